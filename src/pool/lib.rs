//! The pool: which block lives on which frames, and which place pays for them.
//!
//! This crate is arithmetic and bookkeeping. It knows no CUDA type, reads no environment, clock or file, and holds no
//! `unsafe`. Everything it wants done is asked of a [`Backend`]; everything it wants to know arrives in a [`Config`] or a
//! [`Request`]. That is what lets the property tests run it against a naive model, and a fault at every single call.
//!
//! Vocabulary: a **frame** is 2 MiB of reserved address space; a **chunk** is one physical handle at one [`Place`]; a
//! **run** is a row of consecutive frames; a **block** is the run a program holds. A chunk is released only whole. A **small
//! block** is less than 1 MiB; it stands with others of its context on a **slab**, which to everybody else is a block.
//!
//! Warm allocations and frees of small blocks pass neither a lock nor a line that another thread works on (`front.rs`); all
//! else is decided in one place, under one lock (`next_step.rs`).
//!
//! Architecture Invariant: no lock is held while a [`Backend`] method runs. Every operation is plan (locked), act
//! (unlocked), commit (locked), and an act that fails half way is rolled back.

#![forbid(unsafe_code)]

// So that the tests read like a user's of this crate, though they may move memory, which users may not.
#[cfg(all(test, not(loom)))]
extern crate self as gpupool_pool;

mod account;
mod anchors;
mod arena;
mod asked;
mod backend;
mod bins;
mod budget;
mod chunks;
mod clock;
mod drive;
mod freed_in;
mod front;
mod gate;
mod gather;
mod half_used;
mod held;
mod idle;
mod index;
mod interface;
mod let_go;
mod magazine;
#[cfg(all(test, loom))]
mod models;
mod move_act;
mod move_books;
mod move_plan;
mod moves;
mod moving;
mod next_step;
mod numbered;
mod ordered;
mod pieces;
mod place;
mod place_map;
mod placement;
mod pool;
mod registry;
mod repack;
mod reuse;
mod runs;
mod schedule;
mod slab;
mod slabs;
mod small;
mod soft;
mod space;
mod starts;
mod state;
mod stock;
mod submissions;
mod sync;
#[cfg(all(test, not(loom)))]
#[path = "tests/all/mod.rs"]
mod tests;
mod trim;
mod under_way;

pub use account::{Accounts, Claim};
pub use anchors::{Anchor, Anchors};
pub use backend::{Backend, Contents, Fault, Mover, Transfer};
pub use clock::Clock;
pub use gate::{Draining, Gate, Held, Inside, Kept, Mark, Moving, Outside, Slot};
pub use idle::FreedMemory;
pub use index::AddressIndex;
pub use interface::{
    Allocation, Block, Config, Free, FreeError, Mapped, Piece, PlaceUsage, Refusal, Repacks, Request, Usage,
};
pub use moving::{MoveError, Moved, Rearranged, Stopped, Wish};
pub use place::{Place, PlaceSpec};
pub use placement::{Links, Policy, Room, order, spread};
pub use pool::Pool;
pub use repack::Repacked;
pub use small::Small;
pub use soft::SoftRefusal;
pub use submissions::{Epoch, Submissions, Waited};

/// Bytes of one frame. The driver's minimum and recommended granularity for device and host memory alike.
pub const FRAME: u64 = 2 << 20;
/// Bytes that a block which is spread takes of one place before the next one's turn.
pub const STRIPE: u64 = 32 << 20;
/// Bytes of the largest chunk. A block that lies at one place is made of as few as that allows: mapping costs nearly the same for
/// a chunk of any size (4 GiB for one GPU: 11 ms in chunks of 32 MiB, 7.8 of 512, `tests/bench/RESULTS.md`), and a whole chunk is
/// what goes back to the driver.
pub const LARGEST_CHUNK: u64 = 512 << 20;
