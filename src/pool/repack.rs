//! Chunks of which the program has freed a large part, and that cannot go back to the driver for the sake of the rest.
//!
//! A handle is mapped and released whole, so what is in use gets chunks of its own, at the same addresses and the same place, and the
//! large one goes. One after the other: what one chunk gives back is room for the rest of the next.

use crate::moves::{MoveError, Stopped, Wanted};
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::runs::Kind;
use crate::state::bytes_of;
use crate::{Mover, Place};
use std::cmp::Reverse;
use std::collections::BTreeSet;

impl<B: Mover> Pool<B> {
    /// Frees parts of chunks at a place that nothing stands on, at least `bytes` or all, where they are at least half of their chunk.
    /// Returns how much that was; it is the driver's again, or freed memory that does not need to wait for anything. `stop` is called
    /// once for each chunk, as by [`Pool::rearrange`].
    ///
    /// # Errors
    /// See [`MoveError`], where nothing came of it at all. That there is no room for what is in use is none: such a chunk stays.
    pub fn repack<S: Stopped>(
        &self,
        place: Place,
        bytes: u64,
        mut stop: impl FnMut() -> Option<S>,
    ) -> Result<u64, MoveError<B::Error>> {
        let id = self.lock().id_of(place).ok_or(MoveError::NoPlace)?;
        let mut tried = BTreeSet::new();
        let mut freed = 0;
        while freed < bytes
            && let Some((free, wanted)) = self.hold_half_used(id, &mut tried)
        {
            let answer = self.prepare(&wanted, false).and_then(|plan| self.act(plan, &wanted, false, &mut stop));
            for Wanted { block, record, .. } in &wanted {
                self.let_go(self.address(*block), record.id);
            }
            let error = match answer {
                Ok(done) => done.cut_short,
                Err(error) => Some(error),
            };
            match error {
                None => freed += free,
                // Another chunk may have less in use, or its blocks may live on.
                Some(MoveError::Full { .. } | MoveError::NotABlock) => {}
                Some(error) if freed == 0 => return Err(error),
                Some(_) => break,
            }
        }
        Ok(freed)
    }

    /// The chunk with the most free bytes of those that were not tried: how many, and its blocks, which are held.
    fn hold_half_used(&self, place: PlaceId, tried: &mut BTreeSet<u32>) -> Option<(u64, Vec<Wanted>)> {
        let mut given_up = Vec::new();
        let found = self.hold_half_used_but(place, tried, &mut given_up);
        for Wanted { block, record, .. } in &given_up {
            self.let_go(self.address(*block), record.id);
        }
        found
    }

    /// `given_up`: blocks that are held in vain.
    fn hold_half_used_but(
        &self,
        place: PlaceId,
        tried: &mut BTreeSet<u32>,
        given_up: &mut Vec<Wanted>,
    ) -> Option<(u64, Vec<Wanted>)> {
        let mut state = self.lock_all();
        let mut half_used = Vec::new();
        for chunk in state.chunks.all() {
            let may_go = chunk.place == place && !chunk.moving && chunk.anchors.reasons().is_empty();
            if !may_go || tried.contains(&chunk.start) || state.asked.touches(chunk.start, chunk.end(), &self.registry)
            {
                continue;
            }
            let mut free = 0;
            let mut at = chunk.start;
            while at < chunk.end()
                && let Some(run) = state.runs.around(at)
            {
                let end = run.end().min(chunk.end());
                free += if run.kind == Kind::Out { 0 } else { end - at };
                at = end;
            }
            // What is wholly free can go as it is.
            if free < chunk.frames && free * 2 >= chunk.frames {
                half_used.push((Reverse(free), chunk));
            }
        }
        half_used.sort_unstable_by_key(|(free, chunk)| (*free, chunk.start));
        for (Reverse(free), chunk) in half_used {
            tried.insert(chunk.start);
            let mut wanted: Vec<Wanted> = Vec::new();
            let mut at = chunk.start;
            let is_whole = loop {
                if at >= chunk.end() {
                    break true;
                }
                let Some(run) = state.runs.around(at) else { break false };
                if run.kind != Kind::Out {
                    at = run.end();
                    continue;
                }
                // What is out and no block is on its way to be one, or somebody else's still. A slab is left alone: it goes by itself.
                let Some((block, record)) = self.registry.around(at, run.start) else { break false };
                let may_hold = !record.slab && record.frames > at - block;
                if !may_hold || !self.registry.change(block, record.id, false, |record| record.holds += 1) {
                    break false;
                }
                let end = block + record.frames;
                let (start, until) = (block.max(chunk.start), end.min(chunk.end()));
                wanted.push(Wanted { block, record, start, end: until, to: place, anew: true });
                at = end;
            };
            if is_whole {
                return Some((bytes_of(free), wanted));
            }
            given_up.append(&mut wanted);
        }
        None
    }
}
