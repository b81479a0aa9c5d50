//! (contract; implementation follows)

use crate::{Backend, Fault, Links, Place, Policy};

/// What a place may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceSpec {
    pub place: Place,
    /// The most bytes the pool may hold there (the GPU's memory less the reserve, or the limit set by the user).
    pub limit: u64,
}

/// Which GPUs lend to a home GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Lenders {
    /// Every GPU of the pool that the home GPU can reach.
    #[default]
    All,
    /// None but the home GPU itself (one rank of several on this host).
    HomeOnly,
}

#[derive(Clone, Debug)]
pub struct Config {
    /// First address of the reservation, a multiple of [`crate::FRAME`].
    pub base: u64,
    /// Bytes reserved, a multiple of [`crate::FRAME`].
    pub bytes: u64,
    pub places: Vec<PlaceSpec>,
    pub links: Links,
    pub policy: Policy,
    pub lenders: Lenders,
}

#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes the program asked for, above 0.
    pub bytes: u64,
    /// The GPU that was current.
    pub home: u32,
    /// Who the block belongs to (the context), opaque; see [`Pool::free_owned_by`].
    pub owner: u64,
    /// The caller caches: refuse once with [`Refusal::Soft`] before the home GPU overflows.
    pub soft_refusal: bool,
}

/// A block as the program and its questions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub address: u64,
    /// What was asked for; the frames behind it are this rounded up to [`crate::FRAME`].
    pub bytes: u64,
    pub home: u32,
    pub owner: u64,
    /// Unique in this pool for ever, counting from 1.
    pub id: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub block: Block,
    /// Served from freed memory that was still mapped.
    pub reused: bool,
    /// Bytes of the block that are on another GPU than home.
    pub on_peers: u64,
    /// Bytes of the block that are on the host.
    pub on_host: u64,
}

/// Why there is no block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal<E> {
    /// Told once to a caller that caches; the retry is served.
    Soft,
    /// All places together lack `missing` bytes.
    Full { missing: u64 },
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
    /// Wait now, like the driver's own free.
    #[default]
    Strict,
    /// Return at once; wait when the memory is about to be used again.
    Lazy,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FreeError<E> {
    /// No live block starts at this address (freed twice, an inner pointer, a foreign one).
    NotABlock,
    /// Waiting failed (a sticky device error): the block is still live, as it would be with the driver.
    Backend(E),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub places: Vec<PlaceUsage>,
    pub live_blocks: u64,
    pub live_bytes: u64,
    pub peak_live_bytes: u64,
    pub allocations: u64,
    pub reuses: u64,
    pub trimmed_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceUsage {
    pub place: Place,
    pub limit: u64,
    /// Physical memory the pool holds there: live blocks plus freed runs that stay mapped.
    pub held: u64,
    /// The part of `held` that live blocks stand on.
    pub used: u64,
    pub peak_used: u64,
}

pub struct Pool<B: Backend> {
    backend: B,
}

impl<B: Backend> Pool<B> {
    pub fn new(_config: Config, backend: B) -> Self { Self { backend } }
    pub fn backend(&self) -> &B { &self.backend }
    pub fn contains(&self, _address: u64) -> bool { todo!() }
    pub fn allocate(&self, _request: &Request) -> Result<Allocation, Refusal<B::Error>> { todo!() }
    pub fn free(&self, _address: u64, _when: Free) -> Result<Block, FreeError<B::Error>> { todo!() }
    /// The live block that `address` lies in, inner addresses included.
    pub fn block_at(&self, _address: u64) -> Option<Block> { todo!() }
    /// Where each piece of the block that `address` lies in is: `(address, bytes, place)` in address order.
    pub fn pieces(&self, _address: u64) -> Vec<(u64, u64, Place)> { todo!() }
    /// Frees every block of `owner` (its context is gone); returns how many there were.
    pub fn free_owned_by(&self, _owner: u64) -> usize { todo!() }
    /// Returns freed memory to the driver in whole chunks: at `place` or everywhere, at least `bytes` or all.
    /// Returns the bytes returned.
    pub fn trim(&self, _place: Option<Place>, _bytes: Option<u64>) -> u64 { todo!() }
    pub fn usage(&self) -> Usage { todo!() }
    /// `(free, total)` bytes that a program whose home is this GPU can count on: the lending GPUs, not the host.
    pub fn memory_info(&self, _home: u32) -> (u64, u64) { todo!() }
}

#[allow(dead_code, reason = "contract only")]
fn _uses(_: Fault<()>, _: Policy) {}
