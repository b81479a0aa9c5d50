//! Which stretches of a range are free. Used for address space and inside small-block slabs.

use std::collections::BTreeMap;

/// Free stretches by start, neighbours merged. Units are bytes; the caller keeps to its own granularity.
#[derive(Debug)]
pub struct Extents {
    free: BTreeMap<u64, u64>,
}

impl Extents {
    /// All of `start..start + bytes` free.
    pub fn new(start: u64, bytes: u64) -> Self {
        Self { free: BTreeMap::from([(start, bytes)]) }
    }

    /// The first stretch of `bytes` whose start is a multiple of `align` (a power of two).
    pub fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let (start, length, at) = self.free.iter().find_map(|(&start, &length)| {
            let at = start.checked_next_multiple_of(align)?;
            (at - start <= length && length - (at - start) >= bytes).then_some((start, length, at))
        })?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if start + length > at + bytes {
            self.free.insert(at + bytes, start + length - (at + bytes));
        }
        Some(at)
    }

    /// Gives a stretch back. It must have been taken before.
    pub fn give(&mut self, mut start: u64, mut bytes: u64) {
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
            bytes += length;
        }
        if let Some(length) = self.free.remove(&(start + bytes)) {
            bytes += length;
        }
        self.free.insert(start, bytes);
    }

    /// Whether exactly `bytes` are free, which is how a slab finds out that it is empty.
    pub fn is_whole(&self, bytes: u64) -> bool {
        self.free.len() == 1 && self.free.values().next() == Some(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::Extents;

    #[test]
    fn neighbours_merge_whatever_the_order_of_freeing() {
        let mut extents = Extents::new(0, 4096);
        let taken: Vec<u64> = (0..8).map(|_| extents.take(512, 512).unwrap()).collect();
        assert_eq!(extents.take(1, 1), None);
        for index in [3, 1, 0, 2, 7, 5, 6, 4] {
            extents.give(taken[index], 512);
        }
        assert!(extents.is_whole(4096));
    }

    #[test]
    fn alignment_leaves_the_stretch_before_it_free() {
        let mut extents = Extents::new(100, 10_000);
        assert_eq!(extents.take(512, 4096), Some(4096));
        assert_eq!(extents.take(3996, 1), Some(100));
        assert_eq!(extents.take(10_000, 1), None);
    }
}
