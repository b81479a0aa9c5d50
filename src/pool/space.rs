//! Address space of the reservation, in frames: what is mapped nowhere and free to be taken.

use std::collections::{BTreeMap, BTreeSet};

/// The frames that carry no memory. Everything at or above `edge` was never used, so that a reservation of 64 TiB costs
/// no more bookkeeping than the part of it that was touched.
#[derive(Debug)]
pub(crate) struct Space {
    edge: u32,
    end: u32,
    /// Returned extents below `edge`, `start -> frames`, never adjacent to each other or to `edge`.
    by_start: BTreeMap<u32, u32>,
    /// Free extents by size: `(frames, start)`.
    by_size: BTreeSet<(u32, u32)>,
}

impl Space {
    pub fn new(frames: u32) -> Self {
        Self { edge: 0, end: frames, by_start: BTreeMap::new(), by_size: BTreeSet::new() }
    }

    /// Takes consecutive frames: the smallest returned extent that fits, else fresh ones. `None` when there is no such
    /// extent.
    pub fn take(&mut self, frames: u64) -> Option<u32> {
        let frames = u32::try_from(frames).ok()?;
        if let Some(&(size, start)) = self.by_size.range((frames, 0)..).next() {
            self.remove(start, size);
            if size > frames {
                self.insert(start + frames, size - frames);
            }
            return Some(start);
        }
        if self.end - self.edge < frames {
            return None;
        }
        let start = self.edge;
        self.edge += frames;
        Some(start)
    }

    /// Gives frames back; joins them with their free neighbours.
    pub fn give(&mut self, start: u32, frames: u32) {
        if frames == 0 {
            return;
        }
        let (mut start, mut end) = (start, start + frames);
        if let Some((&before, &size)) = self.by_start.range(..start).next_back()
            && before + size == start
        {
            self.remove(before, size);
            start = before;
        }
        if let Some(&size) = self.by_start.get(&end) {
            self.remove(end, size);
            end += size;
        }
        if end == self.edge {
            self.edge = start;
        } else {
            self.insert(start, end - start);
        }
    }

    fn insert(&mut self, start: u32, frames: u32) {
        self.by_start.insert(start, frames);
        self.by_size.insert((frames, start));
    }

    fn remove(&mut self, start: u32, frames: u32) {
        self.by_start.remove(&start);
        self.by_size.remove(&(frames, start));
    }
}

#[cfg(test)]
mod tests {
    use super::Space;

    #[test]
    fn returned_extents_join_and_the_edge_falls_back() {
        let mut space = Space::new(10);
        assert_eq!([space.take(4), space.take(2), space.take(4), space.take(1)], [Some(0), Some(4), Some(6), None]);
        space.give(0, 4);
        space.give(6, 4);
        assert_eq!(space.take(5), None, "two extents of 4 are not one of 5");
        space.give(4, 2);
        assert_eq!(space.take(10), Some(0));
    }

    #[test]
    fn the_smallest_extent_that_fits_is_taken() {
        let mut space = Space::new(100);
        assert_eq!([space.take(8), space.take(1), space.take(3), space.take(1)], [Some(0), Some(8), Some(9), Some(12)]);
        space.give(0, 8);
        space.give(9, 3);
        assert_eq!(space.take(3), Some(9));
        assert_eq!(space.take(u64::MAX), None);
    }
}
