//! What moves at once: a chunk, where memory moves by these, and any frames where it does not.

use crate::extents::{Extents, FRAME};
use crate::interface::{Range, Whereabouts};

/// What moves as a whole, or any part of it.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    pub range: Range,
    /// A chunk, as far as it is of one block.
    pub is_whole: bool,
}

impl Unit {
    /// Takes at most so many bytes off its end, all of it or nothing where it moves as a whole.
    pub fn take(&mut self, bytes: u64) -> Option<Range> {
        let all = self.range;
        if all.bytes() <= bytes {
            self.range.end = self.range.start;
            return Some(all);
        }
        let start = (all.end - bytes).next_multiple_of(FRAME);
        if self.is_whole || start >= all.end {
            return None;
        }
        self.range.end = start;
        Some(Range { start, ..all })
    }
}

/// What an extent's memory moves in, lowest addresses last: that which is near, or that at a place.
pub fn units(extents: &Extents, slot: u32, from: Option<u8>, at: &impl Whereabouts) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let is_near = from.is_none();
    let movable = extents.movable(slot, is_near, at).into_iter();
    for (range, _) in movable.filter(|(_, place)| from.is_none_or(|from| *place == from)) {
        let mut start = range.start;
        while start < range.end {
            let Some(chunk) = at.unit(start).filter(|chunk| chunk.start <= start && start < chunk.end) else {
                units.push(Unit { range: Range { start, ..range }, is_whole: false });
                break;
            };
            let part = chunk.meet(&range);
            // A far chunk that is wanted for a small part is divided; a near one would need new memory for what stayed, where there is none.
            let moves = if is_near || 2 * part.bytes() >= chunk.bytes() { chunk } else { part };
            if units.last().is_none_or(|last| last.range != moves) {
                units.push(Unit { range: moves, is_whole: true });
            }
            start = chunk.end;
        }
    }
    units.reverse();
    units
}
