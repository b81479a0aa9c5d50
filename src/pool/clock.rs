//! Which freed memory the device is done with.

use crate::sync::{AtomicU64, Ordering};

/// Counts frees that did not wait for the device, and remembers up to which of them a later wait has covered.
///
/// Frees are counted under one lock; waits and questions need none. The argument: a count is stored with release after
/// the program's last work on the block was submitted, and each count happens before the next one (the lock). A wait
/// reads the count with acquire before it begins, so every free up to what it read happened before it began. It notes
/// that number with release when it is over, and whoever reads the note with acquire comes after the wait. A wait may
/// miss a free at the same time; then it vouches for less than it could, never for more.
#[derive(Debug)]
pub struct Clock {
    latest: AtomicU64,
    quiesced: AtomicU64,
}

impl Default for Clock {
    fn default() -> Self {
        Self { latest: AtomicU64::new(0), quiesced: AtomicU64::new(0) }
    }
}

impl Clock {
    /// The number of a free that happens now. The caller holds the lock that orders these.
    pub fn tick(&self) -> u64 {
        let number = self.latest.load(Ordering::Relaxed) + 1;
        self.latest.store(number, Ordering::Release);
        number
    }

    /// The number of the latest free: read before a wait begins.
    pub fn now(&self) -> u64 {
        self.latest.load(Ordering::Acquire)
    }

    /// A wait that began at `begun` is over.
    pub fn covered(&self, begun: u64) {
        // Mostly there is nothing new, and then a line that many read is left alone.
        if self.quiesced.load(Ordering::Relaxed) < begun {
            self.quiesced.fetch_max(begun, Ordering::AcqRel);
        }
    }

    /// Memory freed up to this number can not be touched by the device any more.
    pub fn quiesced(&self) -> u64 {
        self.quiesced.load(Ordering::Acquire)
    }
}
