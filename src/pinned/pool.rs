//! The pool's operations: look at the state under the lock, call the backend without it, come back with the outcome.

use crate::state::{Attempt, Leaving, State, Step};
use crate::{Allocation, Backend, Block, Config, Fault, Free, FreeError, PinnedUsage, Refusal, Request, policy};
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// One process's pinned memory. All methods may be called from any thread. None holds a lock while it calls the backend.
///
/// `now` is the time since any fixed moment, the same for all calls; it may stand still but not run back.
pub struct Pool<B: Backend> {
    /// No other pool of the process has or had it.
    number: u64,
    backend: B,
    config: Config,
    /// All segments that ever were lie between these two.
    lowest: AtomicU64,
    highest: AtomicU64,
    /// No segment is due to go back before then, in nanoseconds of `now`.
    due: AtomicU64,
    state: Mutex<State>,
}

impl<B: Backend> Pool<B> {
    /// A pool that holds nothing yet. It makes no call to `backend`.
    pub fn new(config: Config, backend: B) -> Self {
        let state = State::new(config);
        Self {
            number: a_block_ends(),
            backend,
            config,
            lowest: AtomicU64::new(u64::MAX),
            highest: AtomicU64::new(0),
            due: AtomicU64::new(u64::MAX),
            state: Mutex::new(state),
        }
    }

    /// Who pins the memory.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// What the pool was made of.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Serves a block: from memory that is pinned already, else from a new segment (`cuMemHostAlloc`).
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn allocate(&self, request: &Request) -> Result<Allocation, Refusal<B::Error>> {
        if request.bytes == 0 {
            return Err(Refusal::Empty);
        }
        let bytes = policy::footprint(request.bytes).ok_or(Refusal::Limit { wanted: request.bytes })?;
        let mut attempt = Attempt::new(request, bytes);
        let mut returned = 0;
        loop {
            let step = self.state.lock().next_step(&mut attempt);
            match step {
                Step::Done(block) => return Ok(Allocation { block, pinned: 0, returned }),
                Step::Limit(wanted) => return Err(Refusal::Limit { wanted }),
                Step::Wait => {
                    attempt.waited = true;
                    match self.quiesce(request.key.context) {
                        Ok(()) | Err(Fault::NotReady(_)) => {}
                        Err(fault) => return Err(Refusal::Backend(error_of(fault))),
                    }
                }
                Step::Return { leaving, may_wait } => returned += self.send_back(leaving, None, |_| may_wait),
                Step::Pin { bytes, ticket } => match self.backend.pin(request.key, bytes) {
                    Ok(address) => {
                        self.lowest.fetch_min(address, Ordering::Relaxed);
                        self.highest.fetch_max(address + bytes, Ordering::Relaxed);
                        let mut state = self.state.lock();
                        let block = state.pinned_at(ticket, address, &attempt).ok_or(Refusal::ContextGone)?;
                        if state.excess() > 0 {
                            self.due.store(0, Ordering::Relaxed);
                        }
                        return Ok(Allocation { block, pinned: bytes, returned });
                    }
                    Err(fault) => {
                        let mut state = self.state.lock();
                        state.withdraw(ticket);
                        let Fault::OutOfMemory(error) = fault else {
                            return Err(Refusal::Backend(error_of(fault)));
                        };
                        let leaving = if attempt.trimmed { Vec::new() } else { state.detach_unused(u64::MAX, None) };
                        drop(state);
                        if leaving.is_empty() && bytes == attempt.least() {
                            return Err(Refusal::Backend(error));
                        }
                        attempt.exact = true;
                        attempt.trimmed = true;
                        returned += self.send_back(leaving, None, |_| true);
                    }
                },
            }
        }
    }

    /// Ends the life of the block that starts at `address`.
    ///
    /// [`Free::Strict`] returns when no work submitted before can touch the memory any more; where the backend
    /// cannot wait now, it turns into [`Free::Lazy`], which returns at once: somebody waits when the memory is about to be
    /// used again.
    ///
    /// `now` is asked when the wait is over: from then on the memory is unused, however long the work in front took.
    ///
    /// # Errors
    /// See [`FreeError`]. Of several frees of one block at the same time exactly one succeeds.
    pub fn free(&self, address: u64, when: Free, now: impl FnOnce() -> Duration) -> Result<Block, FreeError<B::Error>> {
        let mut state = self.state.lock();
        let (run, block) = state.block_to_end(address).ok_or(FreeError::NotABlock)?;
        let mut quiet = false;
        if when == Free::Strict {
            state.mark(run, &block, true);
            drop(state);
            let answer = self.quiesce(block.key.context);
            state = self.state.lock();
            match answer {
                Ok(()) => quiet = true,
                Err(Fault::NotReady(_)) => {}
                Err(fault) => {
                    state.mark(run, &block, false);
                    return Err(FreeError::Backend(error_of(fault)));
                }
            }
        }
        a_block_ends();
        let now = now();
        if state.end(run, &block, quiet, now) {
            let due = nanoseconds(now.saturating_add(self.config.idle));
            if due < self.due.load(Ordering::Relaxed) {
                self.due.store(due, Ordering::Relaxed);
            }
        }
        Ok(block)
    }

    /// The live block that `address` lies in, inner addresses included. What is behind its last byte in its last page or
    /// granule counts as inside.
    pub fn block_at(&self, address: u64) -> Option<Block> {
        if !self.may_contain(address) {
            return None;
        }
        self.state.lock().block_around(address).map(|(_, block)| block)
    }

    /// The same, and `Some(None)` for an address that lies in a segment and in no live block. One look and one lock, or none where this thread
    /// asks about a block again: frameworks ask of every pointer several times what it is.
    pub fn find(&self, address: u64) -> Option<Option<Block>> {
        if !self.may_contain(address) {
            return None;
        }
        if let Some((pool, ended, block)) = FOUND.get()
            && pool == self.number
            && address.wrapping_sub(block.address) < block.bytes
            && ended == ENDED.load(Ordering::Acquire)
        {
            return Some(Some(block));
        }
        let state = self.state.lock();
        // Before the look, and under the lock: a block that ends later makes it another number.
        let ended = ENDED.load(Ordering::Acquire);
        let found = state.found(address)?;
        if let Some(block) = found {
            FOUND.set(Some((self.number, ended, block)));
        }
        Some(found)
    }

    /// Whether `address` lies in a segment, in a block or not. Two comparisons and no lock for most addresses elsewhere.
    pub fn contains(&self, address: u64) -> bool {
        self.may_contain(address) && self.state.lock().runs.segment_around(address).is_some()
    }

    /// Whether `address` lies between the first segment and the last, which takes two comparisons and no lock.
    #[inline]
    pub fn may_contain(&self, address: u64) -> bool {
        // Who has an address of ours got it from a thread that wrote these before it handed the address out.
        (self.lowest.load(Ordering::Relaxed)..self.highest.load(Ordering::Relaxed)).contains(&address)
    }

    /// Gives back the segments that were without a block for [`Config::idle`] (`cuMemFreeHost`), and those that could not
    /// make room for another while that was pinned; returns their bytes. One comparison and no lock when none is due.
    ///
    /// The driver's free waits for the context that the memory is of. `waited` is the one that the caller has just waited
    /// for, if any: nobody else's memory goes back while its context may be busy.
    pub fn return_idle(&self, now: Duration, waited: Option<u64>) -> u64 {
        if nanoseconds(now) < self.due.load(Ordering::Relaxed) {
            return 0;
        }
        let mut state = self.state.lock();
        let until = now.checked_sub(self.config.idle);
        let mut leaving = until.map_or_else(Vec::new, |until| state.detach_unused(u64::MAX, Some(until)));
        let excess = state.excess();
        leaving.extend(state.detach_unused(excess, None));
        self.set_due(&state);
        drop(state);
        self.send_back(leaving, Some(now), |context| waited == Some(context))
    }

    /// Gives back every segment without a block (`cuMemFreeHost`): the host is short of memory. Returns their bytes.
    pub fn trim(&self) -> u64 {
        let leaving = self.state.lock().detach_unused(u64::MAX, None);
        self.send_back(leaving, None, |_| true)
    }

    /// As [`Pool::trim`], of segments that no work may be at still.
    pub fn trim_quiet(&self) -> u64 {
        let leaving = self.state.lock().detach_unused(u64::MAX, None);
        self.send_back(leaving, None, |_| false)
    }

    /// The driver gave this range to the program. What was there went with a context whose end is about to be told.
    pub fn given_anew(&self, address: u64, bytes: u64) {
        let highest = self.highest.load(Ordering::Relaxed);
        if address < highest && address.saturating_add(bytes) > self.lowest.load(Ordering::Relaxed) {
            let mut state = self.state.lock();
            a_block_ends();
            state.given_anew(address, bytes);
        }
    }

    /// Forgets what was pinned in `context`, which ended and took its memory along; returns the blocks that lived there.
    pub fn context_gone(&self, context: u64) -> Vec<Block> {
        let mut state = self.state.lock();
        a_block_ends();
        state.context_gone(context)
    }

    /// The pool in numbers, exact at the moment of the call.
    pub fn usage(&self) -> PinnedUsage {
        self.state.lock().usage()
    }

    /// Returns segments to the driver; returns the bytes that went. One that does not go is unused since `now`, or as long
    /// as before.
    fn send_back(&self, leaving: Vec<Leaving>, now: Option<Duration>, may_wait: impl Fn(u64) -> bool) -> u64 {
        let mut sum = 0;
        for leaving in leaving {
            let segment = leaving.segment;
            let key = segment.class.key;
            let answer = self.backend.unpin(key, segment.address, segment.bytes, may_wait(key.context));
            let mut state = self.state.lock();
            match answer {
                Ok(()) => sum += state.left(&leaving),
                Err(_) => {
                    state.put_back(leaving, now.unwrap_or(segment.since));
                    self.set_due(&state);
                }
            }
        }
        sum
    }

    fn set_due(&self, state: &State) {
        let due = state.unused_since().map(|since| since.saturating_add(self.config.idle));
        self.due.store(due.map_or(u64::MAX, nanoseconds), Ordering::Relaxed);
    }

    /// Waits for a context; everything of its own that was freed before the call is quiet after it.
    fn quiesce(&self, context: u64) -> Result<(), Fault<B::Error>> {
        let begun = self.state.lock().unwaited;
        self.backend.quiesce(context)?;
        self.state.lock().waited_for(context, begun);
        Ok(())
    }
}

/// Another number whenever a block of any pool ends, under the lock of that pool: what was found before says nothing any more then.
static ENDED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The block that this thread found last, in which pool, and [`ENDED`] then. `const` and without a destructor: legal at any time.
    static FOUND: Cell<Option<(u64, u64, Block)>> = const { Cell::new(None) };
}

/// The number that was.
fn a_block_ends() -> u64 {
    ENDED.fetch_add(1, Ordering::Release)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn error_of<E>(fault: Fault<E>) -> E {
    match fault {
        Fault::OutOfMemory(error) | Fault::Unavailable(error) | Fault::NotReady(error) | Fault::Failed(error) => error,
    }
}
