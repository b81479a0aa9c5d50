//! What the program itself asked to keep in place.

use crate::registry::Registry;

/// A range that the program asked to keep in place.
#[derive(Clone, Copy, Debug)]
struct Range {
    address: u64,
    bytes: u64,
    /// Frames `start..end` of the pool's reservation.
    start: u32,
    end: u32,
    /// First frame and number of its block: a block that ended takes its ranges with it.
    block: (u32, u64),
}

/// The ranges that the program asked for. A list and not anchors of chunks: blocks end without the pool's lock, and so
/// nobody would take the anchors off. Those of blocks that are gone are dropped whenever the list is looked at.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    ranges: Vec<Range>,
}

impl Asked {
    /// Adds `bytes` at `address`, which stand on `frames` of `block` (its first frame and its number).
    pub fn add(&mut self, (address, bytes): (u64, u64), (start, end): (u32, u32), block: (u32, u64)) {
        self.ranges.push(Range { address, bytes, start, end, block });
    }

    /// A small block of so many bytes at `address` has ended. The block it stands on may live on.
    pub fn forget_within(&mut self, address: u64, bytes: u64) {
        self.ranges.retain(|range| range.address < address || range.address - address >= bytes);
    }

    /// Takes one such range off; whether there was one.
    pub fn remove(&mut self, address: u64, bytes: u64, registry: &Registry) -> bool {
        self.forget_ended(registry);
        let found = self.ranges.iter().position(|range| (range.address, range.bytes) == (address, bytes));
        found.map(|index| self.ranges.swap_remove(index)).is_some()
    }

    /// Whether any range touches these frames.
    pub fn touches(&mut self, start: u32, end: u32, registry: &Registry) -> bool {
        self.forget_ended(registry);
        self.ranges.iter().any(|range| range.start < end && start < range.end)
    }

    /// The frames of every range, `(start, end)`; ranges may touch and overlap.
    pub fn ranges(&mut self, registry: &Registry) -> impl Iterator<Item = (u32, u32)> {
        self.forget_ended(registry);
        self.ranges.iter().map(|range| (range.start, range.end))
    }

    fn forget_ended(&mut self, registry: &Registry) {
        self.ranges.retain(|range| registry.lives(range.block.0, range.block.1));
    }
}
