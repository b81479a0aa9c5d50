//! What goes into the pool and what comes out of it, besides the [`crate::Backend`].

use std::time::Duration;

/// What keeps memory apart: a block stands only on a segment of its own key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The context that was current. The driver frees a context's pinned memory with it, portable or not.
    pub context: u64,
    /// The flags of the driver call (portable, mapped, write-combined), opaque.
    pub flags: u32,
}

/// What a pool is made of; fixed for its life.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The most bytes the pool may have pinned.
    pub limit: u64,
    /// How long a segment without a block is kept; see [`crate::Pool::return_idle`].
    pub idle: Duration,
}

/// What a program asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes the program asked for, above 0.
    pub bytes: u64,
    /// Where it belongs.
    pub key: Key,
}

/// A block as the program and its questions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First byte: a multiple of [`crate::PAGE`] for a block of that size and more, else of [`crate::GRANULE`].
    pub address: u64,
    /// What was asked for; the memory behind it is this rounded up to the same unit.
    pub bytes: u64,
    /// [`Request::key`].
    pub key: Key,
    /// Unique in this pool for ever, counting from 1.
    pub id: u64,
}

/// A block and how it was had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The block.
    pub block: Block,
    /// Bytes that were pinned for it; 0 where it stands on memory that was pinned before.
    pub pinned: u64,
    /// Bytes of other segments that were given back to make room for it.
    pub returned: u64,
}

impl Allocation {
    /// Whether it stands on memory that was pinned before.
    pub fn reused(&self) -> bool {
        self.pinned == 0
    }
}

/// Why there is no block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal<E> {
    /// It would take more than [`Config::limit`], even after all that can be given back was.
    Limit {
        /// Bytes that would have been pinned.
        wanted: u64,
    },
    /// The context ended while memory was pinned for it.
    ContextGone,
    /// The backend failed; everything was taken back.
    Backend(E),
    /// Nothing was asked for: the size is 0.
    Empty,
}

/// The pool in numbers, all in bytes but the last four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedUsage {
    /// What the driver has pinned for the pool.
    pub pinned: u64,
    /// What the program asked for in blocks that live, not rounded.
    pub requested: u64,
    /// Blocks that live, in whole [`crate::PAGE`]s and [`crate::GRANULE`]s.
    pub used: u64,
    /// The highest `pinned` that ever was.
    pub peak_pinned: u64,
    /// The highest `requested` that ever was.
    pub peak_requested: u64,
    /// The highest `used` that ever was.
    pub peak_used: u64,
    /// What was given back to the driver so far; what went with its context does not count.
    pub returned: u64,
    /// Segments there are.
    pub segments: u64,
    /// Blocks the program holds.
    pub blocks: u64,
    /// Allocations served so far.
    pub allocations: u64,
    /// Allocations served from memory that was pinned before.
    pub reuses: u64,
}
