//! Which freed memory which GPU is done with.

use crate::sync::{Apart, AtomicU64, Ordering};

/// Counts frees that did not wait, and remembers for each GPU up to which of them a later wait for it has covered.
///
/// Frees are counted under one lock; waits and questions need none. The argument: a count is stored with release after
/// the program's last work on the block was submitted, and each count happens before the next one (the lock). A wait
/// reads the count with acquire before it begins, so every free up to what it read happened before it began. It notes
/// that number with release when it is over, and whoever reads the note with acquire comes after the wait. A wait may
/// miss a free at the same time; then it vouches for less than it could, never for more. A wait for one GPU says nothing
/// about another: each has a note of its own.
#[derive(Debug)]
pub struct Clock {
    latest: AtomicU64,
    /// Threads that wait for different GPUs do not meet here.
    quiesced: Box<[Apart<AtomicU64>]>,
}

impl Clock {
    /// A clock for so many GPUs (or whatever else is waited for one by one).
    pub fn new(gpus: usize) -> Self {
        let quiesced = (0..gpus).map(|_| Apart(AtomicU64::new(0))).collect();
        Self { latest: AtomicU64::new(0), quiesced }
    }

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

    /// A wait for this GPU that began at `begun` is over.
    pub fn covered(&self, gpu: usize, begun: u64) {
        let quiesced = &self.quiesced[gpu].0;
        // Mostly there is nothing new, and then a line that many read is left alone.
        if quiesced.load(Ordering::Relaxed) < begun {
            quiesced.fetch_max(begun, Ordering::AcqRel);
        }
    }

    /// Memory freed up to this number cannot be touched by this GPU any more.
    pub fn quiesced(&self, gpu: usize) -> u64 {
        self.quiesced[gpu].0.load(Ordering::Acquire)
    }
}
