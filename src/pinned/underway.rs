//! Segments for which a backend call is under way.

/// Segments that are neither in the pool nor at the driver: the lock is open while the driver is called. Each has a ticket,
/// and one whose context ends meanwhile is struck off, so that whoever comes back with the outcome learns of it.
#[derive(Debug, Default)]
pub(crate) struct Underway {
    /// Few: one a thread that is inside the driver, or all that are about to be given back.
    calls: Vec<Call>,
    last: u64,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    ticket: u64,
    context: u64,
    bytes: u64,
    /// Where it is; `None` while it is being pinned.
    address: Option<u64>,
    /// The driver gave its addresses to somebody meanwhile.
    given: bool,
}

impl Underway {
    /// Notes a segment; returns its ticket.
    pub fn begin(&mut self, context: u64, bytes: u64, address: Option<u64>) -> u64 {
        self.last += 1;
        self.calls.push(Call { ticket: self.last, context, bytes, address, given: false });
        self.last
    }

    /// The driver gave this range to somebody: what was there is the driver's by now, whatever comes of the calls.
    pub fn given_anew(&mut self, address: u64, bytes: u64) {
        for call in &mut self.calls {
            let meets = |start: u64| start < address.saturating_add(bytes) && address < start + call.bytes;
            call.given |= call.address.is_some_and(meets);
        }
    }

    /// As [`Underway::end`], of a call that left the segment where it is: whether it is nobody else's.
    pub fn stays(&mut self, ticket: u64) -> bool {
        let given = self.calls.iter().any(|call| call.ticket == ticket && call.given);
        self.end(ticket).is_some() && !given
    }

    /// The call is over. Returns the segment's bytes, or `None` if its context ended meanwhile.
    pub fn end(&mut self, ticket: u64) -> Option<u64> {
        let at = self.calls.iter().position(|call| call.ticket == ticket)?;
        Some(self.calls.swap_remove(at).bytes)
    }

    /// The context ended, and the memory of its segments with it.
    pub fn context_gone(&mut self, context: u64) {
        self.calls.retain(|call| call.context != context);
    }

    /// Bytes of all that are under way.
    pub fn bytes(&self) -> u64 {
        self.calls.iter().map(|call| call.bytes).sum()
    }
}
