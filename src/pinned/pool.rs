//! The pool's operations: look at the state under the lock, call the backend without it, come back with the outcome.

use crate::{Allocation, Backend, Block, Config, Free, FreeError, Refusal, Request, Usage};
use std::time::Duration;

/// One process's pinned memory. All methods may be called from any thread. None holds a lock while it calls the backend.
///
/// `now` is the time since any fixed moment, the same for all calls; it may stand still but not run back.
pub struct Pool<B: Backend> {
    backend: B,
    config: Config,
}

impl<B: Backend> Pool<B> {
    /// A pool that holds nothing yet. It makes no call to `backend`.
    pub fn new(config: Config, backend: B) -> Self {
        Self { backend, config }
    }

    /// Who pins the memory.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// What the pool was made of.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Serves a block: from memory that is pinned already, else from a new segment (`cuMemHostAlloc`).
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn allocate(&self, request: &Request) -> Result<Allocation, Refusal<B::Error>> {
        Err(Refusal::Limit { wanted: request.bytes })
    }

    /// Ends the life of the block that starts at `address`.
    ///
    /// [`Free::Strict`] returns when no work submitted before can touch the memory any more; inside a stream capture, where
    /// nobody can wait, it turns into [`Free::Lazy`], which returns at once: somebody waits when the memory is about to be
    /// used again.
    ///
    /// # Errors
    /// See [`FreeError`]. Of several frees of one block at the same time exactly one succeeds.
    pub fn free(&self, _address: u64, _when: Free, _now: Duration) -> Result<Block, FreeError<B::Error>> {
        Err(FreeError::NotABlock)
    }

    /// The live block that `address` lies in, inner addresses included. What is behind its last byte in its last page or
    /// granule counts as inside.
    pub fn block_at(&self, _address: u64) -> Option<Block> {
        None
    }

    /// Whether `address` lies in a segment, in a block or not. Two comparisons and no lock for most addresses elsewhere.
    pub fn contains(&self, _address: u64) -> bool {
        false
    }

    /// Gives back the segments that were without a block for [`Config::idle`] (`cuMemFreeHost`); returns their bytes. One
    /// comparison and no lock when none is due.
    pub fn return_idle(&self, _now: Duration) -> u64 {
        0
    }

    /// Gives back every segment without a block (`cuMemFreeHost`): the host is short of memory. Returns their bytes.
    pub fn trim(&self) -> u64 {
        0
    }

    /// Forgets what was pinned in `context`, which ended and took its memory along; returns the blocks that lived there.
    pub fn context_gone(&self, _context: u64) -> Vec<Block> {
        Vec::new()
    }

    /// The pool in numbers, exact at the moment of the call.
    pub fn usage(&self) -> Usage {
        Usage::default()
    }
}
