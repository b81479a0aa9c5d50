//! Where a block lies that is not on its GPU alone: told only where the log has every block (level `debug`).

use super::{block_at, pieces};
use crate::backing::open;
use crate::log;
use gpupool_config::format_size;
use gpupool_events::{BlockPlaced, PlaceBytes};
use gpupool_pool::{Block, FRAME};

/// Says where a block lies.
pub(super) fn tell(block: &Block) {
    log::emit(|| {
        let mut places: Vec<PlaceBytes> = Vec::new();
        for piece in pieces(block.address, block.bytes) {
            let place = piece.place.to_string();
            match places.iter_mut().find(|known| known.place == place) {
                Some(known) => known.bytes += piece.bytes,
                None => places.push(PlaceBytes { place, bytes: piece.bytes }),
            }
        }
        let parts: Vec<String> =
            places.iter().map(|part| format!("{} on {}", format_size(part.bytes), part.place)).collect();
        let text = format!("the block at {:#x} lies with {}", block.address, parts.join(", "));
        (BlockPlaced { address: block.address, places }, text)
    });
}

/// Says where the blocks lie of which something in this range may have moved.
pub fn tell_moved(address: u64, bytes: u64) {
    if !log::has_every_block() {
        return;
    }
    let (mut at, end) = (address, address.saturating_add(bytes));
    while at < end {
        let next = match block_at(at) {
            Some(block) => {
                tell(&block);
                block.address.saturating_add(block.bytes)
            }
            None => at.saturating_add(1),
        };
        at = next.div_ceil(FRAME).saturating_mul(FRAME).max(at.saturating_add(1));
    }
}

/// The log says where everything lies, where it tells of blocks one by one.
pub fn tell_all() {
    let Some(opened) = open::opened().filter(|_| log::has_every_block()) else { return };
    for (block, _) in opened.pool.stretches() {
        tell_moved(block.address, block.bytes);
    }
}
