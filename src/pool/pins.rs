//! Memory that someone knows by its physical pages, and that must therefore stay on them.
//!
//! A mark belongs to a chunk, since physical memory moves by the chunk. What has been given out can not be called back, so
//! a chunk keeps such a mark until it goes back to the driver, also under the blocks that come to stand on it later. Only
//! what the program itself asked for ends, with the block or before ([`Asked`]).
//!
//! A mark does not keep the memory: it goes back to the driver as ever, and whoever holds a handle or a descriptor keeps the
//! pages alive, no longer the pool. What it may not do meanwhile is serve another block: see `crate::held`.

use crate::chunks::Chunks;
use crate::registry::Registry;
use std::collections::BTreeSet;
use std::ops::{BitOr, BitOrAssign};

/// One reason to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Other processes may have it mapped (`cuIpcGetMemHandle`).
    Shared,
    /// Someone may hold its physical handle (`cuMemRetainAllocationHandle`), and whatever was exported from that.
    Retained,
    /// Someone may hold a file descriptor of it (`cuMemGetHandleForAddressRange`: RDMA).
    Descriptor,
    /// The program asked for it. The one reason that ends: [`crate::Pool::unpin`], or the end of the block.
    Asked,
}

impl Pin {
    /// Every reason, in the order of the numbers that [`Pins::bits`] has.
    pub const ALL: [Pin; 4] = [Pin::Shared, Pin::Retained, Pin::Descriptor, Pin::Asked];
}

/// All reasons of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pins(u8);

impl Pins {
    /// No reason.
    pub const NONE: Pins = Pins(0);

    /// Whether the memory may move.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether this is among the reasons.
    pub fn has(self, pin: Pin) -> bool {
        self.0 & Pins::from(pin).0 != 0
    }

    /// One bit for each reason, the lowest for the first of [`Pin::ALL`].
    pub fn bits(self) -> u8 {
        self.0
    }
}

impl From<Pin> for Pins {
    fn from(pin: Pin) -> Self {
        Pins(1 << pin as u8)
    }
}

impl BitOr for Pins {
    type Output = Pins;

    fn bitor(self, other: Pins) -> Pins {
        Pins(self.0 | other.0)
    }
}

impl BitOrAssign for Pins {
    fn bitor_assign(&mut self, other: Pins) {
        *self = *self | other;
    }
}

/// A range that the program asked to keep in place.
#[derive(Clone, Copy, Debug)]
struct Range {
    address: u64,
    bytes: u64,
    /// Its frames.
    start: u32,
    end: u32,
    /// First frame and number of its block: a block that ended takes its ranges with it.
    block: (u32, u64),
}

/// The ranges that the program asked for. A list and not marks on chunks: blocks end without the pool's lock, and so nobody
/// would take the marks off. Those of blocks that are gone are dropped whenever the list is looked at.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    ranges: Vec<Range>,
}

impl Asked {
    /// Adds `bytes` at `address`, which stand on `frames` of `block` (its first frame and its number).
    pub fn add(&mut self, (address, bytes): (u64, u64), (start, end): (u32, u32), block: (u32, u64)) {
        self.ranges.push(Range { address, bytes, start, end, block });
    }

    /// Takes one such range off; whether there was one.
    pub fn remove(&mut self, address: u64, bytes: u64, registry: &Registry) -> bool {
        self.forget_the_dead(registry);
        let found = self.ranges.iter().position(|range| (range.address, range.bytes) == (address, bytes));
        found.map(|index| self.ranges.swap_remove(index)).is_some()
    }

    /// Whether any range touches these frames.
    pub fn touches(&mut self, start: u32, end: u32, registry: &Registry) -> bool {
        self.forget_the_dead(registry);
        self.ranges.iter().any(|range| range.start < end && start < range.end)
    }

    /// First frames of the chunks below all ranges, each once.
    pub fn chunks<H: Copy>(&mut self, chunks: &Chunks<H>, registry: &Registry) -> BTreeSet<u32> {
        self.forget_the_dead(registry);
        let touched = self.ranges.iter().flat_map(|range| chunks.touched(range.start, range.end));
        touched.map(|chunk| chunk.start).collect()
    }

    fn forget_the_dead(&mut self, registry: &Registry) {
        self.ranges.retain(|range| registry.lives(range.block.0, range.block.1));
    }
}
