//! Blocks for which copies and fills that are not asynchronous have to be over when they return
//! (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`): libraries for GPUDirect RDMA set this on memory that a network adapter is to reach.
//!
//! The driver keeps that promise for memory of its own, in the context's default stream, and answers NOT_SUPPORTED for mapped
//! memory (both measured). So it is kept here: by a wait for that stream after each such call that names a marked block.

use super::{anchor, open};
use gpupool_cuda::CuResult;
use gpupool_pool::{Anchor, Block};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What was last set for a block.
struct Marked {
    id: u64,
    end: u64,
    waits: bool,
}

/// By the address that the block starts at.
static MARKED: Mutex<BTreeMap<u64, Marked>> = Mutex::new(BTreeMap::new());
/// How many are in it, readable without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether the attribute of any live block was ever set.
#[inline]
pub fn is_any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Sets the attribute of a block; the program's answer. A network adapter is about to know the block by its physical pages, so it
/// stays on them to its end, also if the attribute is cleared.
pub fn set(block: &Block, waits: bool) -> CuResult {
    let is_new = MARKED.lock().get(&block.address).is_none_or(|marked| marked.id != block.id);
    // Another process's block stays where that process has it.
    let is_ours = open::opened().is_some_and(|opened| opened.contains(block.address));
    if is_new && is_ours && !anchor(block.address, block.bytes, Anchor::Asked) {
        return CuResult::INVALID_VALUE;
    }
    let mut marked = MARKED.lock();
    marked.insert(block.address, Marked { id: block.id, end: block.address + block.bytes, waits });
    COUNT.store(marked.len(), Ordering::Relaxed);
    CuResult::SUCCESS
}

/// What was last set for a block.
pub fn is_set(block: &Block) -> bool {
    is_any() && MARKED.lock().get(&block.address).is_some_and(|marked| marked.id == block.id && marked.waits)
}

/// Whether a call that names this address has to be over when it returns.
#[cold]
pub fn waits_at(address: u64) -> bool {
    let marked = MARKED.lock();
    marked.range(..=address).next_back().is_some_and(|(_, marked)| marked.waits && address < marked.end)
}

/// A block has ended.
#[inline]
pub fn ended(block: &Block) {
    if is_any() {
        forget(block);
    }
}

#[cold]
fn forget(block: &Block) {
    let mut marked = MARKED.lock();
    // By now another block may begin there.
    if marked.get(&block.address).is_some_and(|marked| marked.id == block.id) {
        marked.remove(&block.address);
        COUNT.store(marked.len(), Ordering::Relaxed);
    }
}
