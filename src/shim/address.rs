//! Classifies an address: in a block of the pool, managed, page-locked, freed, or the driver's to answer for.

use crate::backing::open;
use crate::serve::{ipc, managed, pinned};
use gpupool_pool::Block;

/// What an address is, for the questions that a program asks about it.
pub enum Known {
    /// The driver's to answer.
    Foreign,
    /// In a live block of the pool, of this process or opened from another.
    Pooled(Block),
    /// In a live block that is managed memory.
    Managed(Block),
    /// In a live block of pinned host memory.
    Pinned(gpupool_pinned::Block),
    /// In memory that was freed and stays mapped, or pinned: to the program it is gone.
    Freed,
}

/// The driver gave this range to the program. It reuses what an ended context had before the thread that ended it is back
/// from the call, so what is known of the range is somebody else's: it is forgotten before the program has the address.
#[inline]
pub fn given_anew(address: u64, bytes: u64) {
    pinned::given_anew(address, bytes);
    managed::given_anew(address, bytes);
}

/// Whether an address is certainly the driver's to answer for, at a glance. Always inlined: most calls that are passed on end here,
/// and as a function of its own it would cost them as much again.
#[inline(always)]
pub fn is_foreign(address: u64) -> bool {
    let is_pooled = open::opened().is_some_and(|opened| opened.contains(address));
    !is_pooled && !pinned::is_pooled(address) && !ipc::is_any_imported() && !managed::may_have(address)
}

/// Finds out what kind of memory an address lies in.
pub fn known(address: u64) -> Known {
    match open::opened().filter(|opened| opened.contains(address)) {
        Some(opened) => opened.pool.block_at(address).map_or(Known::Freed, Known::Pooled),
        None if pinned::is_pooled(address) => pinned::block_at(address).map_or(Known::Freed, Known::Pinned),
        None => match ipc::imported_at(address) {
            Some(block) => Known::Pooled(block),
            None => managed::block_at(address).map_or(Known::Foreign, Known::Managed),
        },
    }
}
