//! Classifies an address: in a block of the pool, managed, page-locked, freed, or the driver's to answer for.

use crate::backing::open;
use crate::serve::{handles, ipc, managed, pinned};
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

/// Whether an address is certainly the driver's to answer for, at a glance, without a lock. Always inlined: most calls that are
/// passed on end here, and as a function of its own it would cost them as much again.
#[inline(always)]
pub fn is_foreign(address: u64) -> bool {
    let is_pooled = open::opened().is_some_and(|opened| opened.contains(address));
    !is_pooled && !pinned::may_have(address) && !ipc::is_any_imported() && !managed::may_have(address)
}

/// Whether an address is certainly the driver's to answer for, and remains so during the call that asks it: such a call needs neither
/// a body nor the gate.
///
/// Other memory is put only behind addresses of the pool, which are the same for the whole process, and behind the program's own
/// mappings. Of these there is an entry before the program has the handle that it maps, so whoever knows an address of one sees
/// it here. A thread that asks about an address while another one first maps something there may be told that nothing is there, as
/// it may without this library. Which addresses are the program's own is not looked up: that takes a lock, which costs more than
/// the gate.
#[inline(always)]
pub fn stays_the_drivers(address: u64) -> bool {
    is_foreign(address) && !handles::is_any()
}

/// Finds out what kind of memory an address lies in.
pub fn known(address: u64) -> Known {
    match open::opened().filter(|opened| opened.contains(address)) {
        Some(opened) => opened.pool.block_at(address).map_or(Known::Freed, Known::Pooled),
        None => match pinned::find(address) {
            Some(block) => block.map_or(Known::Freed, Known::Pinned),
            None => match ipc::imported_at(address) {
                Some(block) => Known::Pooled(block),
                None => managed::block_at(address).map_or(Known::Foreign, Known::Managed),
            },
        },
    }
}
