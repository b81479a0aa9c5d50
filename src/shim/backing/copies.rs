//! Copies of the program's memory that lie in the pool while an image of it is written (`checkpoint/shelter.rs`): blocks that the program does not know.

use super::open::Opened;
use gpupool_pool::{Block, Place, Usage};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The blocks that copies lie in now, by their numbers.
static COPIES: Mutex<BTreeMap<u64, Block>> = Mutex::new(BTreeMap::new());
/// How many there have been.
static MADE: AtomicU64 = AtomicU64::new(0);
/// For who tells the pool what counts for no peak.
static TELLS: Mutex<()> = Mutex::new(());

/// A block for a copy, if `allocate` finds one.
pub fn make(opened: &Opened, allocate: impl FnOnce() -> Option<Block>) -> Option<Block> {
    let _tells = TELLS.lock();
    // Where it will lie is not known before it counts. The program is stopped meanwhile.
    opened.pool.note_peaks_without(u64::MAX, |_| u64::MAX);
    let block = allocate();
    if let Some(block) = block {
        COPIES.lock().insert(block.id, block);
        MADE.fetch_add(1, Ordering::Relaxed);
    }
    count(opened);
    block
}

/// It was freed.
pub fn remove(opened: &Opened, block: &Block) {
    let _tells = TELLS.lock();
    COPIES.lock().remove(&block.id);
    count(opened);
}

/// What copies take counts for no peak of the program's.
fn count(opened: &Opened) {
    let (mut bytes, mut there) = (0, BTreeMap::new());
    for (place, piece) in pieces(opened, &mut bytes) {
        *there.entry(place).or_insert(0) += piece;
    }
    opened.pool.note_peaks_without(bytes, |place| there.get(&place).copied().unwrap_or(0));
}

/// What of copies lies where, and how much was asked for in them.
fn pieces(opened: &Opened, bytes: &mut u64) -> Vec<(Place, u64)> {
    // Not under the lock: the pool has its own.
    let copies: Vec<Block> = COPIES.lock().values().copied().collect();
    *bytes = copies.iter().map(|copy| copy.bytes).sum();
    let pieces = copies.iter().flat_map(|copy| opened.pool.pieces(copy.address, copy.bytes));
    pieces.map(|piece| (piece.place, piece.bytes)).collect()
}

/// Whether this block is no memory of the program's, but a copy of some for an image.
pub fn is_copy(block: &Block) -> bool {
    COPIES.lock().contains_key(&block.id)
}

/// What the pool has, without copies: they are held, and no memory of the program's is in use for them.
pub fn usage_without(opened: &Opened) -> Usage {
    let mut usage = opened.pool.usage();
    let mut bytes = 0;
    let pieces = pieces(opened, &mut bytes);
    usage.live_blocks = usage.live_blocks.saturating_sub(COPIES.lock().len() as u64);
    usage.live_bytes = usage.live_bytes.saturating_sub(bytes);
    usage.allocations = usage.allocations.saturating_sub(MADE.load(Ordering::Relaxed));
    for (place, bytes) in pieces {
        if let Some(there) = usage.places.iter_mut().find(|there| there.place == place) {
            there.used = there.used.saturating_sub(bytes);
        }
    }
    usage
}
