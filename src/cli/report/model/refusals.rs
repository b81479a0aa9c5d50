//! What a process was told OUT_OF_MEMORY for.

use std::collections::VecDeque;

use gpupool_events::OutOfMemory;

/// Refusals that are kept of the first ones of a process, and of the last: the first say what was too much, the last what it died of.
const KEPT: usize = 8;

/// The refusals that a log tells of, in their order. The library tells ever fewer of them.
#[derive(Default)]
pub struct Refusals {
    first: Vec<Refusal>,
    last: VecDeque<Refusal>,
    /// How many there were in all, told or not.
    pub times: u64,
}

/// One of them.
pub struct Refusal {
    /// When, seconds since 1970.
    pub t: f64,
    /// All that was told of it.
    pub told: OutOfMemory,
}

impl Refusals {
    /// One more.
    pub fn add(&mut self, t: f64, told: OutOfMemory) {
        self.times = self.times.max(told.number);
        let refusal = Refusal { t, told };
        if self.first.len() < KEPT {
            self.first.push(refusal);
            return;
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(refusal);
    }

    /// Those that are kept.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Refusal> {
        self.first.iter().chain(&self.last)
    }
}
