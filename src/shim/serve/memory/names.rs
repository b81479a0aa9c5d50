//! Names by which the program finds ranges of blocks again in an image of its memory.
//!
//! A range and not a block, since frameworks have many arrays in one block. A name means one range at a time, and ends with its block.

use super::block_at;
use gpupool_pool::Block;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A range that has a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    pub address: u64,
    pub bytes: u64,
    block: Block,
}

static NAMES: Mutex<BTreeMap<String, Named>> = Mutex::new(BTreeMap::new());
/// How many there are, readable without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Names `bytes` from an address on, or what is left of its block from there where that is 0; the range, and its block. A range that had the name has none then.
/// `None`: it lies in no live block of the pool.
pub fn set(address: u64, bytes: u64, name: &str) -> Option<(Named, Block)> {
    let block = block_at(address)?;
    let left = block.address + block.bytes - address;
    let bytes = if bytes == 0 { left } else { bytes };
    if bytes > left {
        return None;
    }
    let named = Named { name: name.to_owned(), address, bytes, block };
    {
        let mut names = NAMES.lock();
        names.insert(name.to_owned(), named.clone());
        COUNT.store(names.len(), Ordering::Release);
    }
    if block_at(block.address).is_none_or(|now| now.id != block.id) {
        // Another thread freed it meanwhile, and may not have found it here.
        ended(&block);
        return None;
    }
    Some((named, block))
}

/// Takes the names of ranges that begin at an address; whether there was one, or might have been, since it lies in a live block of the pool.
pub fn take_back(address: u64) -> bool {
    let mut names = NAMES.lock();
    let before = names.len();
    names.retain(|_, named| named.address != address);
    COUNT.store(names.len(), Ordering::Release);
    let has_gone = names.len() < before;
    drop(names);
    has_gone || block_at(address).is_some()
}

/// Forgets a block that ended.
#[inline]
pub fn ended(block: &Block) {
    if COUNT.load(Ordering::Acquire) != 0 {
        forget(block);
    }
}

#[cold]
fn forget(block: &Block) {
    let mut names = NAMES.lock();
    names.retain(|_, named| (named.block.address, named.block.id) != (block.address, block.id));
    COUNT.store(names.len(), Ordering::Release);
}

/// All of them.
pub fn all() -> Vec<Named> {
    NAMES.lock().values().cloned().collect()
}
