//! `GPUPOOL_MOVE=stress`: before every launch something of what it names goes to another place, whatever that costs. For tests: what
//! moving breaks shows at once.

use super::{Home, own, swap};
use crate::process;
use gpupool_config::Move;
use gpupool_pool::{FRAME, Place};
use gpupool_tiers::{Range, Swap, Where};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The same numbers in every run.
static STATE: AtomicU64 = AtomicU64::new(0x9e37_79b9_7f4a_7c15);
/// Frames that move at once, at most: several chunks, and parts of chunks.
const MOST_FRAMES: u64 = 48;
/// What came home last, and from which place: it goes back there as often as not, since what leaves for where it came from is not copied if it is
/// the same still.
static CAME: Mutex<Option<(u32, Range, u8)>> = Mutex::new(None);

pub(super) fn is_on() -> bool {
    process::settings().moving == Move::Stress
}

/// A number below this one.
fn below(limit: u64) -> u64 {
    // Splitmix64: the next state by an addition, and an answer that depends on all of its bits.
    let mut number = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (number ^ (number >> 31)) % limit.max(1)
}

/// Moves some frames of a block that one of these addresses lies in: home if they are elsewhere, else to another place.
pub(super) fn move_some(home: &Home, words: &[u64]) {
    let came = CAME.lock().take().filter(|(gpu, ..)| *gpu == home.gpu);
    if let Some((_, range, place)) = came.filter(|_| below(2) == 0) {
        return swap::carry_out(home, &Swap { far: vec![(range, place)], ..Swap::default() }, swap::Why::Stress);
    }
    let Some(&word) = words.get(below(words.len() as u64) as usize) else { return };
    let Some(block) = home.opened.pool.block_at(word).filter(|block| block.bytes >= FRAME) else {
        return move_own(home, word);
    };
    let frames = block.bytes.div_ceil(FRAME);
    // Whole blocks as often as parts, as far as they are small enough.
    let (first, count) = if frames <= MOST_FRAMES && below(2) == 0 {
        (0, frames)
    } else {
        let first = below(frames);
        (first, 1 + below(MOST_FRAMES.min(frames - first)))
    };
    let start = block.address + first * FRAME;
    let end = (start + count * FRAME).min(block.address + block.bytes);
    let range = Range { start, end };
    let pieces = home.opened.pool.pieces(start, end - start);
    let is_near = pieces.first().is_none_or(|piece| piece.place == Place::Gpu(home.gpu));
    swap(home, range, is_near);
    let from = pieces.first().and_then(|piece| home.places.iter().position(|place| *place == piece.place));
    if let Some(place) = from.filter(|_| !is_near) {
        *CAME.lock() = Some((home.gpu, range, place as u8));
    }
}

/// The same with the program's own memory: the part of it that an address lies in.
fn move_own(home: &Home, word: u64) {
    let mut found = None;
    own::pieces(home, Range::of(word, 1), &mut |piece, place| found = Some((own::range_of(piece), place)));
    if let Some((range, place)) = found {
        swap(home, range, place == Some(Where::Near));
    }
}

fn swap(home: &Home, range: Range, is_near: bool) {
    let mut swap = Swap::default();
    if is_near && !home.places.is_empty() {
        swap.far.push((range, below(home.places.len() as u64) as u8));
    } else {
        swap.near.push(range);
    }
    swap::carry_out(home, &swap, swap::Why::Stress);
}
