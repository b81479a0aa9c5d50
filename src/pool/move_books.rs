//! A move is over, as far as it went: the books say so, and memory that nobody needs goes to the stock or home.

use crate::Mover;
use crate::chunks::{AnchorCounts, Chunk};
use crate::drive;
use crate::moving::{Laid, Moved, Plan, Wanted, overlap};
use crate::pool::Pool;
use crate::state::{Leaving, State, bytes_of};

/// Bytes of the smallest chunk that gets a second mapping only to be unmapped more cheaply: a smaller one hardly is (2 MiB for one GPU: 18 ms a
/// GiB with, 24 without; 512 MiB: 0.1 and 2.7).
pub(crate) const LEAST_ALIASED: u64 = 32 << 20;
/// Bytes of the smallest chunk that keeps the second mapping that it was filled through while it is in use: what moves once moves again, and to
/// make one takes longer than to copy (reckoned from what was measured, 24 ms a GiB: half a millisecond for 16 and 6 MiB on another GPU, the rest of a block of 86,
/// where copying takes 0.06).
const LEAST_LEFT: u64 = 4 << 20;

impl<B: Mover> Pool<B> {
    /// The move is over, as far as it went: the books say so, and memory that nobody needs goes to the stock or home. Returns what
    /// became of each wish, and the new chunks. `full`: some place has less room than was thought, so nothing is kept.
    pub(crate) fn finish(
        &self,
        mut plan: Plan<B::Handle>,
        wanted: &[Wanted],
        full: bool,
    ) -> (Vec<Moved>, Vec<Chunk<B::Handle>>) {
        let mut is_laid: Vec<bool> = (0..plan.memory.len()).map(|index| index < plan.old).collect();
        for step in plan.steps().filter(|step| step.is_done) {
            step.old.iter().for_each(|old| is_laid[old.memory] = false);
            step.new.iter().for_each(|new| is_laid[new.memory] = true);
        }
        // The smallest chunks are many, and keep no second mapping while they are in use.
        for (chunk, _) in plan
            .memory
            .iter_mut()
            .zip(&is_laid)
            .filter(|(chunk, is_laid)| **is_laid && bytes_of(chunk.frames) < LEAST_LEFT)
        {
            if let Some(alias) = chunk.alias
                && drive::retry_whatever_failed(|| self.backend.drop_alias(alias.address, bytes_of(chunk.frames)))
                    .is_ok()
            {
                chunk.alias = None;
            }
        }
        let (wishes, made, leaving) = {
            let mut state = self.lock();
            // No row is kept and no thread can keep or take one until the books are right again.
            let shards = self.front.empty(&mut state);
            let wishes = moved_of(&plan, wanted);
            let made = state.commit_move(&plan);
            let leaving = state.clear_move(&plan, &is_laid, !full, wanted);
            drop(shards);
            (wishes, made, leaving)
        };
        self.send_back(leaving, &mut []);
        (wishes, made)
    }
}

/// What became of each wish.
fn moved_of<H>(plan: &Plan<H>, wanted: &[Wanted]) -> Vec<Moved> {
    let mut moved = plan.stays.clone();
    for (moved, wish) in moved.iter_mut().zip(wanted) {
        for step in plan.steps().filter(|step| step.is_done) {
            let came = step.new.iter().filter(|new| new.place == wish.to);
            let went = |new: &Laid| {
                let went = step.old.iter().filter(|old| old.place != wish.to);
                went.map(|old| {
                    let both = (new.start.max(old.start), new.end.min(old.end));
                    overlap((both.0, both.1.max(both.0)), (wish.start, wish.end))
                })
                .sum::<u64>()
            };
            moved.moved += came.map(went).sum::<u64>();
        }
    }
    moved
}

impl<H: Copy> State<H> {
    /// The steps that were done are in the books, and the others as if they had never been planned. The front keeps nothing. Returns
    /// the new chunks, in address order.
    fn commit_move(&mut self, plan: &Plan<H>) -> Vec<Chunk<H>> {
        let made = plan.memory.len() - plan.given;
        for (index, &(place, frames)) in plan.to_make.iter().enumerate() {
            let budget = self.budget(place);
            if index < made { budget.deliver_aside(bytes_of(frames)) } else { budget.withdraw(bytes_of(frames)) }
        }
        let mut all = Vec::new();
        for step in plan.steps() {
            if !step.is_done {
                for old in &step.old {
                    self.chunks.set_moving(old.start, old.end, false);
                    self.chunks.set_alias(old.start, plan.memory[old.memory].alias);
                }
                for &(start, _, freed) in plan.free_on(step) {
                    self.runs.release(start, freed);
                }
                continue;
            }
            for &(start, end, _) in plan.free_on(step) {
                self.runs.remove(start);
                self.space.give(start, end - start);
            }
            let (Some(first), Some(last)) = (step.old.first(), step.old.last()) else { continue };
            let gone = self.chunks.remove_range(first.start, last.end);
            for chunk in &gone {
                let free: u32 = plan
                    .free_on(step)
                    .filter(|(start, ..)| (chunk.start..chunk.end()).contains(start))
                    .map(|(start, end, _)| end - start)
                    .sum();
                self.budget(chunk.place).vacate(bytes_of(chunk.frames), bytes_of(chunk.frames - free));
            }
            let new: Vec<Chunk<H>> = step
                .new
                .iter()
                .map(|new| Chunk {
                    start: new.start,
                    anchors: AnchorCounts::default(),
                    moving: false,
                    ..plan.memory[new.memory]
                })
                .collect();
            for stretch in new.chunk_by(|left, right| left.end() == right.start) {
                self.chunks.insert(stretch);
            }
            for chunk in &new {
                self.budget(chunk.place).use_aside(bytes_of(chunk.frames));
            }
            all.extend(new);
        }
        for chunk in &all {
            self.budget(chunk.place).note_peak();
        }
        all.sort_unstable_by_key(|chunk| chunk.start);
        all
    }

    /// What took part in a move and is mapped nowhere now is stock, or leaves.
    fn clear_move(&mut self, plan: &Plan<H>, is_laid: &[bool], keeps: bool, wanted: &[Wanted]) -> Vec<Leaving<H>> {
        let mut leaving = Vec::new();
        let changed = plan.waves.iter().flat_map(|wave| &wave.again).flat_map(|again| &again.changed);
        changed.for_each(|start| self.stock.has_changed(*start));
        let left = plan.left();
        for (index, (chunk, _)) in plan.memory.iter().zip(is_laid).enumerate().filter(|(_, (_, is_laid))| !**is_laid) {
            let twin = left.get(&index).copied();
            let chunk = Chunk { start: 0, anchors: AnchorCounts::default(), moving: false, ..*chunk };
            let bytes = bytes_of(chunk.frames);
            self.budget(chunk.place).free_aside(bytes);
            let limit = self.budget(chunk.place).limit();
            let afar = wanted.iter().all(|wish| wish.record.gpu != chunk.place);
            if !keeps || self.place(chunk.place).is_stored() || !self.stock.keep(&chunk, twin, self.period, limit, afar)
            {
                self.budget(chunk.place).leave(bytes);
                leaving.push(Leaving { start: 0, frames: 0, chunks: vec![chunk] });
            }
        }
        leaving
    }
}
