//! Whether this process is about to take memory that others see as in use and cannot see whose it is: of a GPU that it has had no context on for long, or for a context.
//!
//! Others look at a GPU's memory in use for who is about to come there (`recall/coming.rs`). So the page says it before and behind each such call of the driver's, beside what it says once a second.

use crate::bell;
use crate::clock::monotonic_nanoseconds;
use gpupool_metrics::Took;
use parking_lot::Mutex;

/// How many threads are about to, and when the last one was done.
static TAKING: Mutex<(u32, u64)> = Mutex::new((0, 0));

/// Held while memory is taken.
#[must_use = "it is over when this is dropped"]
pub struct Taking(());

impl Taking {
    /// No allocation: two system calls of a microsecond around a call of the driver's that takes a hundred and more.
    pub fn begin() -> Self {
        change(|(count, _)| *count += 1);
        Self(())
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        change(|(count, last)| (*count, *last) = (count.saturating_sub(1), monotonic_nanoseconds()));
    }
}

fn change(change: impl FnOnce(&mut (u32, u64))) {
    let mut taking = TAKING.lock();
    change(&mut taking);
    // Within the lock: the page says what was so last.
    if let Some(page) = bell::page() {
        page.tell_took(told(*taking));
    }
}

/// What this process itself would say.
pub fn last() -> Took {
    told(*TAKING.lock())
}

fn told((count, last): (u32, u64)) -> Took {
    Took { is_taking: count > 0, last }
}
