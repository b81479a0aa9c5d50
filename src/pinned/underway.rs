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
}

impl Underway {
    /// Notes a segment; returns its ticket.
    pub fn begin(&mut self, context: u64, bytes: u64) -> u64 {
        self.last += 1;
        self.calls.push(Call { ticket: self.last, context, bytes });
        self.last
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
