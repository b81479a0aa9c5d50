//! Copies of the program's memory that lie in the pool while an image of it is written (`checkpoint/shelter.rs`): blocks that the program does not know.

use super::open::Opened;
use gpupool_pool::{Block, Usage};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// The blocks that copies lie in now, by their numbers.
static COPIES: Mutex<BTreeMap<u64, Block>> = Mutex::new(BTreeMap::new());

/// This block is one.
pub fn add(block: Block) {
    COPIES.lock().insert(block.id, block);
}

/// It is freed.
pub fn remove(block: &Block) {
    COPIES.lock().remove(&block.id);
}

/// Whether this block is no memory of the program's, but a copy of some for an image.
pub fn is_copy(block: &Block) -> bool {
    COPIES.lock().contains_key(&block.id)
}

/// What the pool has, without copies: they are held, and no memory of the program's is in use for them. What was in use at most counts them.
pub fn usage_without(opened: &Opened) -> Usage {
    let mut usage = opened.pool.usage();
    // Not under the lock: the pool has its own.
    let copies: Vec<Block> = COPIES.lock().values().copied().collect();
    for Block { address, bytes, .. } in copies {
        usage.live_blocks = usage.live_blocks.saturating_sub(1);
        usage.live_bytes = usage.live_bytes.saturating_sub(bytes);
        usage.allocations = usage.allocations.saturating_sub(1);
        for piece in opened.pool.pieces(address, bytes) {
            if let Some(there) = usage.places.iter_mut().find(|there| there.place == piece.place) {
                there.used = there.used.saturating_sub(piece.bytes);
            }
        }
    }
    usage
}
