//! When memory of ended blocks that others had comes back ([`crate::held`]).

use crate::held::Left;
use crate::place::PlaceId;
use crate::registry::Record;
use crate::runs::{Freed, Kind};
use crate::state::{Leaving, State};
use std::collections::{BTreeMap, BTreeSet};

impl<H: Copy> State<H> {
    /// A block ended that others have.
    pub fn hold_back(&mut self, start: u32, record: &Record, freed: Freed) {
        self.end_block(record);
        let early = self.held.early.remove(&record.id).unwrap_or(0);
        let left = Left {
            parts: vec![(start, start + record.frames)],
            freed,
            holds: record.holds.saturating_sub(early),
            given: record.given > 0,
        };
        self.held.blocks.insert(record.id, left);
        self.free_unless_held(record.id);
    }

    /// One process less has this block, which has ended, or ends at this moment.
    pub fn let_go(&mut self, id: u64) {
        match self.held.blocks.get_mut(&id) {
            Some(left) => left.holds = left.holds.saturating_sub(1),
            None => *self.held.early.entry(id).or_default() += 1,
        }
        self.free_unless_held(id);
    }

    fn free_unless_held(&mut self, id: u64) {
        // Where nothing is left here, whoever has a handle is the driver's concern alone.
        let is_done = |left: &Left| left.holds == 0 && (!left.given || left.parts.is_empty());
        if self.held.blocks.get(&id).is_some_and(is_done)
            && let Some(Left { parts, freed, .. }) = self.held.blocks.remove(&id)
        {
            for (start, end) in parts {
                self.release_part(start, end, freed);
            }
        }
    }

    fn release_part(&mut self, start: u32, end: u32, freed: Freed) {
        self.take_back(start, end - start, freed);
    }

    /// Whether a chunk at `place`, or anywhere, could go that only such memory and free memory stand on, after a wait for
    /// this GPU if any.
    pub fn has_held(&self, place: Option<PlaceId>, waits_for: Option<PlaceId>) -> bool {
        !self.unused(place, waits_for).is_empty()
    }

    /// Takes the chunks out of the pool on which nothing stands but free memory and ended blocks that nobody has open any
    /// more, all of it quiet.
    pub fn evict_held(&mut self, place: Option<PlaceId>) -> Vec<Leaving<H>> {
        let mut leaving = Vec::new();
        for (start, end, place) in self.unused(place, None) {
            let mut freed = Vec::new();
            for left in self.held.blocks.values_mut() {
                let parts = std::mem::take(&mut left.parts);
                for (from, to) in parts {
                    let inside = (from.max(start), to.min(end));
                    if inside.0 >= inside.1 {
                        left.parts.push((from, to));
                        continue;
                    }
                    freed.push((inside, left.freed));
                    left.parts.extend([(from, inside.0), (inside.1, to)].into_iter().filter(|part| part.0 < part.1));
                }
            }
            for ((from, to), freed) in freed {
                // It is quiet, as [`State::is_unused`] has seen, and must say so: by the GPU that borrowed it, it would be joined with
                // a neighbour that this GPU may still be at work on, and the chunk would stay with memory of others free on it.
                self.release_part(from, to, Freed { gpu: None, ..freed });
            }
            // What was freed in different ways is one row of free memory only then.
            self.runs.settle();
            let taken = self.take_out(start, end, place);
            debug_assert!(taken.is_some(), "frames {start}..{end} are free and are no row");
            leaving.extend(taken);
        }
        self.held.blocks.retain(|_, left| left.holds > 0 || !left.parts.is_empty());
        leaving
    }

    /// Chunks on which nothing stands but free memory and ended blocks that nobody has open any more: borders and places.
    fn unused(&self, place: Option<PlaceId>, waits_for: Option<PlaceId>) -> Vec<(u32, u32, PlaceId)> {
        let usable = self.held.blocks.values().filter(|left| self.is_usable(left.freed, waits_for));
        let parts: BTreeMap<u32, u32> = usable.flat_map(|left| left.parts.iter().copied()).collect();
        let starts: BTreeSet<u32> =
            parts.iter().flat_map(|(&start, &end)| self.chunks.touched(start, end)).map(|chunk| chunk.start).collect();
        let chunks = starts.into_iter().filter_map(|start| self.chunks.at(start)).filter(|chunk| !chunk.moving);
        let at_place = chunks.filter(|chunk| place.is_none_or(|place| place == chunk.place));
        let bounds = at_place.map(|chunk| (chunk.start, chunk.start + chunk.frames, chunk.place));
        bounds.filter(|&(start, end, _)| self.is_unused(start, end, waits_for, &parts)).collect()
    }

    /// Whether every frame in `start..end` is free, and quiet after that wait, or in one of `parts`.
    fn is_unused(&self, start: u32, end: u32, waits_for: Option<PlaceId>, parts: &BTreeMap<u32, u32>) -> bool {
        let mut at = start;
        while at < end {
            let part = parts.range(..=at).next_back().map(|(_, &end)| end).filter(|end| *end > at);
            let free = || match self.runs.around(at) {
                Some(run) if matches!(run.kind, Kind::Free(freed) if self.is_usable(freed, waits_for)) => {
                    Some(run.end())
                }
                _ => None,
            };
            match part.or_else(free) {
                Some(next) => at = next,
                None => return false,
            }
        }
        true
    }
}
