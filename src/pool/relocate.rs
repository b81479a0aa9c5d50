//! What the books say once a chunk lies elsewhere: everything of a move but the copy and the mapping.
//!
//! Only tests move anything yet. They hold the rest of the pool to what a mover needs: a chunk's place is written once, in
//! the table of chunks, and whoever goes by a place asks there under a lock that a move takes, too.

use crate::pool::Pool;
use crate::registry::Registry;
use crate::runs::{Freed, Kind};
use crate::state::{State, bytes_of};
use crate::{Backend, Place};

impl<B: Backend> Pool<B> {
    /// Books the chunk behind `address` as lying at `place`. `false`, and nothing changes, where it lies there already, must
    /// stay where it is, or finds no room below the limit there.
    pub(crate) fn relocate(&self, address: u64, place: Place) -> bool {
        let Some(frame) = self.frame_at(address) else { return false };
        let mut state = self.lock();
        // No row is kept and no thread can keep or take one until the books are right again.
        let shards = self.front.empty(&mut state);
        let moved = state.relocate(frame, place, &self.registry);
        drop(shards);
        moved
    }
}

impl<H: Copy> State<H> {
    /// Moves the chunk that has this frame, while the front keeps nothing.
    fn relocate(&mut self, frame: u32, place: Place, registry: &Registry) -> bool {
        let Some(to) = self.id_of(place) else { return false };
        let Some(chunk) = self.chunks.at(frame).copied() else { return false };
        let (start, end) = (chunk.start, chunk.start + chunk.frames);
        let must_stay = !chunk.anchors.reasons().is_empty() || self.asked.touches(start, end, registry);
        if must_stay || chunk.place == to {
            return false;
        }
        let mut free: Vec<(u32, u32, Freed)> = Vec::new();
        let mut at = start;
        while let Some(run) = self.runs.around(at).filter(|_| at < end) {
            if let Kind::Free(freed) = run.kind {
                free.push((at, run.end().min(end), freed));
            }
            at = run.end();
        }
        let used = chunk.frames - free.iter().map(|(at, stop, _)| stop - at).sum::<u32>();
        let (bytes, used) = (bytes_of(chunk.frames), bytes_of(used));
        if !self.budget(to).move_in(bytes, used) {
            return false;
        }
        self.budget(chunk.place).move_out(bytes, used);
        // Free runs are filed by place: out with them, and in again at the new one.
        for &(at, stop, _) in &free {
            self.runs.take(at, stop);
        }
        self.chunks.relocate(frame, to);
        for (at, _, freed) in free {
            self.runs.release(at, freed);
        }
        true
    }
}
