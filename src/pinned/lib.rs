//! The pool of pinned host memory: which block lives in which segment, and when a segment goes back to the driver.
//!
//! Like gpupool-pool this crate is bookkeeping alone: no CUDA type, no environment, clock or I/O, no `unsafe`. Segments are
//! pinned and unpinned by a [`Backend`]; what time it is arrives with each call.
//!
//! Vocabulary: a **segment** is what one driver call pinned, and what one driver call gives back; a **run** is a row of
//! bytes in one segment, free or not; a **block** is the run a program holds.
//!
//! Pinning costs a millisecond and more, so a segment outlives its blocks. What bounds the memory held that way is that a
//! large request gets a segment of exactly its size, which is wholly free again when the block ends: before more is pinned
//! than a tenth above the peak of what was in use, such segments go back. Small requests share segments that grow with
//! what is in use (`policy.rs`).
//!
//! Architecture Invariant: no lock is held while a [`Backend`] method runs. Every operation is plan (locked), act
//! (unlocked), commit (locked), and an act that fails is taken back.

#![forbid(unsafe_code)]

mod backend;
mod interface;
mod policy;
mod pool;
mod runs;
mod state;
mod underway;

pub use backend::Backend;
pub use gpupool_pool::{Fault, Free, FreeError};
pub use interface::{Allocation, Block, Config, Key, PinnedUsage, Refusal, Request};
pub use pool::Pool;

/// Bytes of a page: the unit of segments and of blocks from this size on, and their alignment.
pub const PAGE: u64 = 4 << 10;
/// The unit and alignment of blocks below a [`PAGE`]; the driver aligns to no less, whatever it is asked for.
pub const GRANULE: u64 = 512;
