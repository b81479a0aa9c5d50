//! What goes into the pool and what comes out of it, besides the [`crate::Backend`].

use crate::{Accounts, Anchors, Links, Place, Policy};
use std::sync::Arc;

/// What a pool is made of; fixed for its life.
#[derive(Clone, Debug)]
pub struct Config {
    /// First address of the reservation, a multiple of [`crate::FRAME`].
    pub base: u64,
    /// Bytes reserved, a multiple of [`crate::FRAME`].
    pub bytes: u64,
    /// Every place that may hold memory. Others may have claims there, too.
    pub accounts: Arc<Accounts>,
    /// Which of them a home GPU reaches.
    pub links: Links,
    /// How blocks are spread over them.
    pub policy: Policy,
    /// Bytes of the largest chunk, a multiple of [`crate::FRAME`]; [`crate::LARGEST_CHUNK`] unless there is a reason.
    pub largest_chunk: u64,
}

/// What a program asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes the program asked for, above 0.
    pub bytes: u64,
    /// The GPU that was current, and that a free waits for.
    pub home: u32,
    /// Who the block belongs to (the context), opaque; see [`crate::Pool::free_owned_by`].
    pub owner: u64,
    /// The caller caches: refuse once with [`Refusal::Soft`] before the home GPU overflows.
    pub soft_refusal: bool,
    /// Whether the caller can stop the program: then [`Refusal::HalfUsed`] says where [`crate::Pool::repack`] would serve the block, or serve it better.
    pub repacks: Repacks,
    /// The caller can ask others who have memory of the home GPU: say so with [`Refusal::Lacks`] where that would keep the block there.
    pub can_ask: bool,
    /// The caller can have more GPUs lend: say so with [`Refusal::Far`] where the block would lie on the host, or nowhere.
    pub can_widen: bool,
}

/// For what a caller stops the program, to have chunks of which a part is in use cut anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repacks {
    /// For nothing.
    #[default]
    Never,
    /// To serve a request that would be refused.
    ToFit,
    /// Also to keep a block from going elsewhere.
    ToStay,
}

/// A block as the program and its questions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First byte, a multiple of [`crate::FRAME`].
    pub address: u64,
    /// What was asked for; the frames behind it are this rounded up to [`crate::FRAME`].
    pub bytes: u64,
    /// The GPU that was current.
    pub home: u32,
    /// [`Request::owner`].
    pub owner: u64,
    /// Unique in this pool for ever, counting from 1.
    pub id: u64,
}

/// A block and how it was had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The block.
    pub block: Block,
    /// Served from freed memory that was still mapped, there or elsewhere: the driver made none for it.
    pub reused: bool,
    /// Bytes of the block that are on another GPU than home, in whole frames.
    pub on_peers: u64,
    /// Bytes of the block that are on the host, in whole frames.
    pub on_host: u64,
}

/// Memory at one place, mapped at neighbouring addresses ([`crate::Pool::mapped`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The first of them.
    pub address: u64,
    /// How much of it.
    pub bytes: u64,
    /// Where it lies.
    pub place: Place,
}

/// A part of a block that lies in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<H> {
    /// Its first byte.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// Where it is.
    pub place: Place,
    /// First address of the chunk, at or below `address`. Other blocks may stand on the same one.
    pub chunk_address: u64,
    /// Size of the chunk.
    pub chunk_bytes: u64,
    /// The chunk ([`crate::Backend::create`] made it). Valid while the block lives.
    pub handle: H,
    /// Why the chunk must stay on the physical memory it is on; empty where it may move.
    pub anchors: Anchors,
}

/// Why there is no block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal<E> {
    /// Told once to a caller that caches; the retry is served.
    Soft,
    /// Told instead of [`Refusal::Soft`], [`Refusal::Full`] or a block farther away: so many bytes more at this place, which
    /// [`crate::Pool::repack`] may bring, would serve it better.
    HalfUsed {
        /// Where.
        place: Place,
        /// How many.
        bytes: u64,
    },
    /// Told instead of [`Refusal::Full`] or a block that lies elsewhere: so many bytes of the home GPU are others' than this pool's, and would serve it.
    Lacks {
        /// How many.
        bytes: u64,
    },
    /// Told instead of [`Refusal::Full`] or a block that lies on the host: so many bytes that no GPU which lends has room for.
    Far {
        /// How many.
        bytes: u64,
    },
    /// All places together lack `missing` bytes.
    Full {
        /// How many.
        missing: u64,
    },
    /// No address range of that size is left.
    AddressSpace,
    /// The backend failed; everything was rolled back.
    Backend(E),
    /// The home GPU is not a place of this pool, or the size is 0.
    NotOurs,
}

/// When the memory of a freed block may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Free {
    /// Wait now for the block's home GPU, like the driver's own free.
    #[default]
    Strict,
    /// Return at once; somebody waits for that GPU when the memory is about to be used again.
    Lazy,
}

/// Why a block is still live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FreeError<E> {
    /// No live block starts at this address (freed twice, an inner pointer, a foreign one).
    NotABlock,
    /// Waiting failed (a sticky device error): the block is still live, as it would be with the driver.
    Backend(E),
}

/// The pool in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// One entry for each of [`Accounts::specs`], in that order; a disk is left out that nothing was ever put on. Pageable
    /// memory counts with the first place of the host.
    pub places: Vec<PlaceUsage>,
    /// Blocks the program holds.
    pub live_blocks: u64,
    /// Bytes that the program asked for in the blocks it holds, not rounded.
    pub live_bytes: u64,
    /// The highest `live_bytes` so far; where there are small blocks ([`crate::Pool::allocate_small`]) perhaps somewhat more, since
    /// threads have these on their own: what each had at most is added up.
    pub peak_live_bytes: u64,
    /// Allocations served so far.
    pub allocations: u64,
    /// Allocations that took no new memory of the driver's: served from freed memory, or from what was left of memory that was taken for another.
    pub reuses: u64,
    /// Bytes that went back to the driver so far, by [`crate::Pool::trim`], to make room for growth elsewhere, or after a move.
    pub trimmed_bytes: u64,
}

/// One place in numbers, all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceUsage {
    /// Which place.
    pub place: Place,
    /// The most the pool may hold there; what it holds, once the place proved unable to give memory.
    pub limit: u64,
    /// Physical memory the pool holds there: live blocks, freed runs that stay mapped, and what the driver refused to
    /// take back.
    pub held: u64,
    /// The part of `held` that live blocks stand on, in whole frames, and what ended blocks left that others have open.
    pub used: u64,
    /// The highest `used` that ever was.
    pub peak_used: u64,
    /// The part of `held`, in whole chunks, that must stay on the physical memory it is on ([`Anchors`]).
    pub anchored: u64,
}
