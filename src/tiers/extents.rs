//! What lies where in the program's blocks, as far as its launches show.
//!
//! Frameworks take memory in large segments and pass pointers into them. The distinct pointers that launches name are the borders of
//! the **extents**: each goes to the next border or to the block's end. A border lies on a frame (2 MiB), since nothing smaller
//! moves, so that five hundred tensors in a segment of 20 MiB are ten extents at most and share their fate by frames. A large tensor
//! that was named at its head is one extent; it can be moved in part, so it needs no division.

use crate::interface::{Range, Whereabouts};
use crate::links::{Links, Where};
use std::collections::BTreeMap;

/// Bytes of the smallest thing that moves.
pub const FRAME: u64 = 2 << 20;
/// Extents that are told apart; about 100 bytes each. Beyond it new pointers belong to the extent that they lie in.
const MOST: usize = 1 << 16;
/// The least weight of a cycle in an extent's density. What changes at once is noticed by itself ([`Extents::cycle`]).
const DECAY: f32 = 1.0 / 32.0;

/// One extent.
#[derive(Clone, Debug)]
pub struct Extent {
    pub range: Range,
    /// Where the block begins that it is part of.
    pub block: u64,
    /// Counts the extents that had this slot before: who remembers a slot remembers this with it.
    pub generation: u32,
    pub lives: bool,
    /// `near_bytes`, `pass_ns` and `place` are out of date.
    dirty: bool,
    /// No place has been asked yet.
    fresh: bool,
    pub near_bytes: u64,
    pub far_bytes: u64,
    /// The same without what must stay where it is.
    pub near_free: u64,
    pub far_free: u64,
    /// Nanoseconds of one pass over its far bytes.
    pub pass_ns: f32,
    /// The same over those that may move.
    pub may_ns: f32,
    /// Nanoseconds of one pass as it lay when it was first seen.
    first_ns: f32,
    /// Where most of its far bytes are; if none are, where they last were.
    pub place: u8,
    /// The cycle before which it is not moved again, after somebody could not.
    pub stays_until: u64,
    stays: u32,
    /// Passes a cycle that would be saved if it were near, over the last cycles.
    pub density: f32,
    /// The first and the last cycle in which it was named.
    first_cycle: u64,
    pub last_cycle: u64,
    /// The position of the last launch that named it.
    pub last: u64,
}

impl Extent {
    /// Nanoseconds of a pass less now than when it was first seen.
    pub fn saved_ns(&self) -> f32 {
        self.first_ns - self.pass_ns
    }
}

/// What of a range must stay where it is, in order of address and each byte once.
fn fixed(range: Range, at: &impl Whereabouts) -> Vec<Range> {
    let mut all = Vec::new();
    at.fixed(range, &mut |part| all.push(part.meet(&range)));
    all.sort_unstable();
    let mut joined: Vec<Range> = Vec::new();
    for part in all.into_iter().filter(|part| part.bytes() > 0) {
        match joined.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => joined.push(part),
        }
    }
    joined
}

/// Bytes of a piece that may move.
fn free_of(piece: Range, fixed: &[Range]) -> u64 {
    piece.bytes() - fixed.iter().map(|part| part.meet(&piece).bytes()).sum::<u64>()
}

#[derive(Debug, Default)]
pub struct Extents {
    slots: Vec<Extent>,
    free: Vec<u32>,
    /// Start of each extent and its slot.
    by_start: BTreeMap<u64, u32>,
    /// What was far when it was first seen: start, end and nanoseconds a byte of a pass.
    homes: BTreeMap<u64, (u64, f64)>,
    /// Counts the changes of borders.
    pub shape: u64,
}

impl Extents {
    pub fn get(&self, slot: u32) -> Option<&Extent> {
        self.slots.get(slot as usize).filter(|extent| extent.lives)
    }

    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Extent> {
        self.slots.get_mut(slot as usize).filter(|extent| extent.lives)
    }

    /// One more than the highest slot.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    pub fn live(&self) -> impl Iterator<Item = (u32, &Extent)> {
        self.slots.iter().enumerate().filter(|(_, extent)| extent.lives).map(|(slot, extent)| (slot as u32, extent))
    }

    pub fn len(&self) -> usize {
        self.by_start.len()
    }

    fn add(&mut self, range: Range, like: Option<&Extent>, block: u64, cycle: u64) -> u32 {
        let mut extent = Extent {
            range,
            block,
            generation: 0,
            lives: true,
            dirty: true,
            fresh: true,
            near_bytes: 0,
            far_bytes: 0,
            near_free: 0,
            far_free: 0,
            pass_ns: 0.0,
            may_ns: 0.0,
            first_ns: 0.0,
            place: 0,
            stays_until: 0,
            stays: 0,
            density: 0.0,
            first_cycle: cycle,
            last_cycle: cycle,
            last: 0,
        };
        if let Some(like) = like {
            extent = Extent { range, dirty: true, generation: 0, ..like.clone() };
        }
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        match self.slots.get_mut(slot as usize) {
            Some(old) => {
                extent.generation = old.generation + 1;
                *old = extent;
            }
            None => self.slots.push(extent),
        }
        self.by_start.insert(range.start, slot);
        self.shape += 1;
        slot
    }

    fn remove(&mut self, slot: u32) {
        if let Some(extent) = self.get_mut(slot) {
            extent.lives = false;
            let start = extent.range.start;
            self.by_start.remove(&start);
            self.free.push(slot);
            self.shape += 1;
        }
    }

    /// With its block.
    fn end(&mut self, slot: u32) {
        let Some(range) = self.get(slot).map(|extent| extent.range) else { return };
        let homes: Vec<u64> = self.homes.range(range.start..range.end).map(|(start, _)| *start).collect();
        for start in homes {
            self.homes.remove(&start);
        }
        self.remove(slot);
    }

    /// A block that was known at the same addresses has ended without a word.
    pub fn block_began(&mut self, block: Range, cycle: u64) {
        if block.bytes() == 0 {
            return;
        }
        let stale: Vec<u32> = self.over(block).collect();
        stale.into_iter().for_each(|slot| self.end(slot));
        self.add(block, None, block.start, cycle);
    }

    pub fn block_ended(&mut self, address: u64) {
        let of_block: Vec<u32> = self
            .by_start
            .range(address..)
            .map(|(_, slot)| *slot)
            .take_while(|slot| self.get(*slot).is_some_and(|extent| extent.block == address))
            .collect();
        of_block.into_iter().for_each(|slot| self.end(slot));
    }

    /// The extents that have something of a range.
    pub fn over(&self, range: Range) -> impl Iterator<Item = u32> + '_ {
        let before = self.by_start.range(..=range.start).next_back();
        let within = self.by_start.range(range.start.saturating_add(1)..range.end.max(range.start.saturating_add(1)));
        before
            .into_iter()
            .chain(within)
            .map(|(_, slot)| *slot)
            .filter(move |slot| self.get(*slot).is_some_and(|extent| extent.range.meet(&range).bytes() > 0))
    }

    fn at(&self, address: u64) -> Option<u32> {
        let (_, slot) = self.by_start.range(..=address).next_back()?;
        self.get(*slot).filter(|extent| address < extent.range.end).map(|_| *slot)
    }

    /// The extent that a pointer names, with a border made where it points to.
    pub fn named(&mut self, address: u64, cycle: u64) -> Option<u32> {
        let slot = self.at(address)?;
        let border = address & !(FRAME - 1);
        let extent = self.get(slot)?;
        // A frame belongs to whoever points into it first; the end of what lies before it goes along.
        if border <= extent.range.start || self.len() >= MOST {
            return Some(slot);
        }
        let like = extent.clone();
        let (left, right) = (Range { end: border, ..like.range }, Range { start: border, ..like.range });
        if let Some(extent) = self.get_mut(slot) {
            extent.range = left;
            extent.dirty = true;
        }
        let new = self.add(right, Some(&like), like.block, cycle);
        if let Some(extent) = self.get_mut(new) {
            (extent.first_cycle, extent.last_cycle) = (cycle, cycle);
        }
        Some(new)
    }

    /// Takes borders away that no pointer has named for long: those of one time, as of a program's start, after 4 cycles, others
    /// after 256. A framework cuts its first step's memory otherwise than that of all later ones, and what a border cuts off the end
    /// of a tensor looks as if nobody read it.
    pub fn forget_borders(&mut self, cycle: u64) {
        let stale: Vec<(u32, u64)> = self
            .live()
            .filter(|(_, extent)| extent.range.start != extent.block)
            .filter(|(_, extent)| {
                let patience = if extent.last_cycle <= extent.first_cycle + 1 { 4 } else { 256 };
                cycle > extent.last_cycle + patience
            })
            .map(|(slot, extent)| (slot, extent.range.start))
            .collect();
        for (slot, start) in stale {
            let left = self.by_start.range(..start).next_back().map(|(_, left)| *left);
            let Some((left, gone)) = left.and_then(|left| Some((left, self.get(slot)?.clone()))) else { continue };
            self.remove(slot);
            if let Some(extent) = self.get_mut(left) {
                extent.range.end = gone.range.end;
                extent.dirty = true;
                extent.fresh &= gone.fresh;
            }
        }
    }

    pub fn placed(&mut self, range: Range) {
        let touched: Vec<u32> = self.over(range).collect();
        for slot in touched {
            if let Some(extent) = self.get_mut(slot) {
                extent.dirty = true;
            }
        }
    }

    /// A move of this range failed. It is tried again after 8 cycles, after twice as many each further time.
    pub fn stayed(&mut self, range: Range, cycle: u64) {
        let touched: Vec<u32> = self.over(range).collect();
        for slot in touched {
            if let Some(extent) = self.get_mut(slot) {
                extent.stays = (extent.stays + 1).min(16);
                extent.stays_until = cycle + (4 << extent.stays);
            }
        }
    }

    /// Asks where an extent lies if something of it has moved.
    #[inline]
    pub fn refresh(&mut self, slot: u32, links: &Links, at: &impl Whereabouts) {
        if self.slots.get(slot as usize).is_some_and(|extent| extent.dirty && extent.lives) {
            self.ask(slot, links, at);
        }
    }

    #[cold]
    fn ask(&mut self, slot: u32, links: &Links, at: &impl Whereabouts) {
        let Some(extent) = self.get_mut(slot) else { return };
        let (mut near, mut far, mut pass_ns, mut most) = (0, 0, 0.0, (0, extent.place));
        let (mut near_free, mut far_free, mut may_ns) = (0, 0, 0.0);
        let fixed = fixed(extent.range, at);
        let mut last = (0, extent.place);
        at.pieces(extent.range, &mut |piece, place| match place {
            Where::Near => {
                near += piece.bytes();
                near_free += free_of(piece, &fixed);
            }
            Where::Far(index) => {
                far += piece.bytes();
                far_free += free_of(piece, &fixed);
                pass_ns += links.pass_ns(place, piece.bytes());
                may_ns += links.pass_ns(place, free_of(piece, &fixed));
                last = (if last.1 == index { last.0 + piece.bytes() } else { piece.bytes() }, index);
                most = most.max(last);
            }
        });
        extent.near_bytes = near;
        extent.far_bytes = far;
        (extent.near_free, extent.far_free) = (near_free, far_free);
        (extent.pass_ns, extent.may_ns) = (pass_ns as f32, may_ns as f32);
        extent.place = most.1;
        extent.dirty = false;
        let (range, fresh) = (extent.range, std::mem::take(&mut extent.fresh));
        let first_ns: f64 = if fresh {
            at.pieces(range, &mut |piece, place| {
                if place != Where::Near {
                    self.homes.insert(piece.start, (piece.end, links.pass_ns(place, 1)));
                }
            });
            pass_ns
        } else {
            self.homes_in(range).map(|(bytes, ns)| bytes as f64 * ns).sum()
        };
        if let Some(extent) = self.get_mut(slot) {
            extent.first_ns = first_ns as f32;
        }
    }

    /// Bytes of a range that were far when they were first seen.
    pub fn far_at_home(&self, range: Range) -> u64 {
        self.homes_in(range).map(|(bytes, _)| bytes).sum()
    }

    /// The same piece by piece, with nanoseconds a byte of a pass.
    fn homes_in(&self, range: Range) -> impl Iterator<Item = (u64, f64)> + '_ {
        let before = self.homes.range(..range.start).next_back();
        let homes = before.into_iter().chain(self.homes.range(range.start..range.end));
        homes.map(move |(&start, &(end, ns))| (range.meet(&Range { start, end }).bytes(), ns))
    }

    /// What of an extent lies far, or near, and may move.
    pub fn movable(&self, slot: u32, near: bool, at: &impl Whereabouts) -> Vec<(Range, u8)> {
        let mut found: Vec<(Range, u8)> = Vec::new();
        let Some(extent) = self.get(slot) else { return found };
        let all_fixed = fixed(extent.range, at);
        at.pieces(extent.range, &mut |piece, place| {
            let index = match place {
                Where::Near if near => extent.place,
                Where::Far(index) if !near => index,
                Where::Near | Where::Far(_) => return,
            };
            let mut start = piece.start;
            for fixed in &all_fixed {
                let fixed = piece.meet(fixed);
                if fixed.bytes() > 0 {
                    if start < fixed.start {
                        found.push((Range { start, end: fixed.start }, index));
                    }
                    start = start.max(fixed.end);
                }
            }
            match found.last_mut() {
                Some((last, place)) if last.end == start && *place == index => last.end = piece.end.max(start),
                _ if start < piece.end => found.push((Range { start, end: piece.end }, index)),
                _ => {}
            }
        });
        found
    }

    /// A cycle has ended in which each slot's uses were worth so many passes. Answers which part of that was expected, 0 to 1.
    pub fn cycle(&mut self, passes: &[f32], seen: u32, cycle: u64) -> f32 {
        let (mut expected, mut all) = (0.0, 0.0);
        for (slot, extent) in self.slots.iter_mut().enumerate().filter(|(_, extent)| extent.lives) {
            let now = passes.get(slot).copied().unwrap_or(0.0);
            let bytes = extent.range.bytes() as f32;
            expected += bytes * now.min(extent.density);
            all += bytes * now;
            let age = cycle.saturating_sub(extent.first_cycle).min(u64::from(seen));
            let weight = DECAY.max(1.0 / (age as f32 + 1.0));
            extent.density += (now - extent.density) * weight;
        }
        if all > 0.0 { expected / all } else { 1.0 }
    }

    /// What was expected does not hold any more: only the last cycle counts.
    pub fn forget(&mut self, passes: &[f32]) {
        for (slot, extent) in self.slots.iter_mut().enumerate() {
            extent.density = passes.get(slot).copied().unwrap_or(0.0);
        }
    }
}
