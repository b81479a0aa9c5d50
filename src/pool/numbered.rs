//! Which moves are under way.

use std::collections::BTreeSet;

/// The moves under way, by number; later ones have higher numbers.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    now: BTreeSet<u64>,
    begun: u64,
}

impl Moves {
    /// Whether there are any.
    pub fn are_any(&self) -> bool {
        !self.now.is_empty()
    }

    /// One begins; its number.
    pub fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.now.insert(self.begun);
        self.begun
    }

    /// The one of this number is over.
    pub fn end(&mut self, number: u64) {
        self.now.remove(&number);
    }

    /// The number of the last one that began.
    pub fn last(&self) -> u64 {
        self.begun
    }

    /// Whether any is under way of those up to this number.
    pub fn are_any_until(&self, last: u64) -> bool {
        self.now.first().is_some_and(|first| *first <= last)
    }
}
