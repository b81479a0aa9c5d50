//! Blocks that the pool would have served and had no room for, so that the driver did: a small one for want of memory on its GPU that it could share, a large one for want of any. They are in
//! no image and stay when a program is suspended, and whoever asks for that is told how much they are.

use crate::watch::context;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// By their addresses: how long each is, and whose context it ends with.
static BLOCKS: Mutex<BTreeMap<u64, Block>> = Mutex::new(BTreeMap::new());
/// How many there are, readable without the lock: mostly none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A block of the driver's.
#[derive(Clone, Copy)]
pub struct Block {
    address: u64,
    bytes: u64,
    owner: u64,
}

/// The driver gave this to the current context.
#[cold]
pub fn given(address: u64, bytes: u64) {
    let context = context::driver().and_then(context::current);
    if let Some(context) = context {
        keep(Block { address, bytes, owner: context.id });
    }
}

/// Whether there may be any.
#[inline]
pub fn is_any() -> bool {
    COUNT.load(Ordering::Acquire) != 0
}

/// It is about to be freed: before the driver may give its address to somebody else. Where the driver refuses that, [`keep`] it.
#[inline]
pub fn take(address: u64) -> Option<Block> {
    if is_any() { take_known(address) } else { None }
}

#[cold]
fn take_known(address: u64) -> Option<Block> {
    let mut blocks = BLOCKS.lock();
    let block = blocks.remove(&address);
    COUNT.store(blocks.len(), Ordering::Release);
    block
}

/// It is there still.
#[cold]
pub fn keep(block: Block) {
    let mut blocks = BLOCKS.lock();
    blocks.insert(block.address, block);
    COUNT.store(blocks.len(), Ordering::Release);
}

/// Bytes of those that live.
pub fn bytes() -> u64 {
    if !is_any() {
        return 0;
    }
    let all: Vec<Block> = BLOCKS.lock().values().copied().collect();
    // What ended with its context was freed by nobody.
    let (live, gone): (Vec<Block>, Vec<Block>) =
        all.into_iter().partition(|block| context::owner(block.owner).is_some());
    let mut blocks = BLOCKS.lock();
    for block in gone {
        if blocks.get(&block.address).is_some_and(|now| now.owner == block.owner) {
            blocks.remove(&block.address);
        }
    }
    COUNT.store(blocks.len(), Ordering::Release);
    live.iter().map(|block| block.bytes).sum()
}
