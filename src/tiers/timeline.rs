//! The last cycle by extents: when each is used next, and how much that is worth.

use crate::cycle::Cycle;
use crate::extents::Extents;
use crate::kinds::{Basis, Kinds};

/// Which part of the memory that launches have used a cycle has to use, so that what it shows holds for all of it.
const ALL: f64 = 0.95;
/// Uses that are kept; 12 bytes each.
const MOST: usize = 1 << 20;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Launches behind the cycle's beginning.
    at: u32,
    kind: u32,
    part: f32,
}

#[derive(Debug, Default)]
pub struct Timeline {
    base: u64,
    length: u64,
    /// It is a cycle, and not only the last launches.
    repeats: bool,
    /// Where the entries of each slot begin; those of the last end with the list.
    begins: Vec<u32>,
    entries: Vec<Entry>,
    /// Passes of each slot in the cycle.
    pub passes: Vec<f32>,
    /// The same if a use cost no more than bringing what it reads, `most` passes.
    pub visits: Vec<f32>,
    /// Whether launches use it of which nothing was measured.
    unsure: Vec<bool>,
    /// Whether launches of such a function and shape are in it, by their number among [`Kinds`].
    shapes: Vec<bool>,
    /// Nearly all memory that any launch has used is used in the cycle. Where part of it rests for some cycles, as what a language model reads with while it
    /// writes, what a cycle reads of it says nothing of when it is needed again.
    uses_all: bool,
    /// Bytes that its launches name.
    pub bytes: u64,
    /// The most launches between two uses of the same slot.
    longest: u32,
}

/// What a use of this kind is worth, in passes over the link. A guess counts for little until it is measured.
pub fn worth(kinds: &Kinds, kind: u32) -> f32 {
    let (gain, is_measured) = kinds.gain(kind);
    if is_measured { gain } else { gain.min(3.0) }
}

impl Timeline {
    /// Reads the last cycle.
    pub fn rebuild(&mut self, cycle: &Cycle, kinds: &Kinds, extents: &Extents, window: u32, most: f32) {
        let span = cycle.last(window);
        let slots = extents.slots();
        self.base = span.start;
        self.length = span.end - span.start;
        self.repeats = cycle.length().is_some();
        self.begins.clear();
        self.begins.resize(slots + 1, 0);
        self.passes.clear();
        self.passes.resize(slots, 0.0);
        self.visits.clear();
        self.visits.resize(slots, 0.0);
        self.unsure.clear();
        self.unsure.resize(slots, false);
        self.shapes.clear();
        self.shapes.resize(kinds.shapes(), false);
        let lives = |slot: u32, generation| extents.get(slot).is_some_and(|extent| extent.generation == generation);
        let mut count = 0;
        self.bytes = 0;
        for id in span.clone().map(|position| cycle.kind(position)) {
            let Some(kind) = kinds.get(id) else { continue };
            let worth = worth(kinds, id);
            let is_unsure = kinds.known(id).1 == Basis::Nothing;
            self.bytes += kind.bytes;
            if let Some(has) = kind.operands.and_then(|shape| self.shapes.get_mut(shape as usize)) {
                *has = true;
            }
            for part in kind.uses.iter().filter(|part| lives(part.slot, part.generation)) {
                self.passes[part.slot as usize] += worth * part.part;
                self.unsure[part.slot as usize] |= is_unsure;
                self.visits[part.slot as usize] += (worth * part.part).min(most);
                self.begins[part.slot as usize + 1] += 1;
                count += 1;
            }
        }
        let (mut known, mut used) = (0, 0);
        for (slot, extent) in extents.live().filter(|(_, extent)| extent.last > 0) {
            known += extent.range.bytes();
            used += if self.begins[slot as usize + 1] > 0 { extent.range.bytes() } else { 0 };
        }
        self.uses_all = used as f64 >= ALL * known as f64;
        self.entries.clear();
        self.longest = self.length as u32 + 1;
        if count > MOST {
            // Too long to be remembered use by use; the densities still hold.
            self.begins.fill(0);
            self.length = 0;
            return;
        }
        for slot in 0..slots {
            self.begins[slot + 1] += self.begins[slot];
        }
        self.entries.resize(count, Entry { at: 0, kind: 0, part: 0.0 });
        let mut next = self.begins.clone();
        for position in span.clone() {
            let id = cycle.kind(position);
            let Some(kind) = kinds.get(id) else { continue };
            for part in kind.uses.iter().filter(|part| lives(part.slot, part.generation)) {
                let at = &mut next[part.slot as usize];
                self.entries[*at as usize] = Entry { at: (position - span.start) as u32, kind: id, part: part.part };
                *at += 1;
            }
        }
        let idle = (0..slots as u32).filter(|slot| extents.get(*slot).is_some()).map(|slot| self.gap(slot)).max();
        self.longest = idle.unwrap_or(self.longest);
    }

    /// The most launches between two uses of a slot.
    fn gap(&self, slot: u32) -> u32 {
        let entries = self.of(slot);
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else { return self.length as u32 + 1 };
        let gaps = entries.windows(2).map(|pair| pair[1].at - pair[0].at);
        gaps.max().unwrap_or(0).max(self.length as u32 + first.at - last.at)
    }

    /// What [`next`](Self::next) answers at most.
    pub fn longest(&self) -> u32 {
        self.longest
    }

    /// Which offset in the cycle a position has, if it is known what follows.
    pub fn offset(&self, position: Option<u64>) -> Option<u32> {
        let behind = position?.checked_sub(self.base)?;
        (self.length > 0 && self.repeats).then(|| (behind % self.length) as u32)
    }

    fn of(&self, slot: u32) -> &[Entry] {
        let (Some(&begin), Some(&end)) = (self.begins.get(slot as usize), self.begins.get(slot as usize + 1)) else {
            return &[];
        };
        self.entries.get(begin as usize..end as usize).unwrap_or_default()
    }

    /// Whether it is a cycle that comes again.
    pub fn is_cycle(&self) -> bool {
        self.repeats && self.length > 0
    }

    /// Whether it is a cycle that comes again and uses nearly all memory.
    pub fn is_all(&self) -> bool {
        self.is_cycle() && self.uses_all
    }

    /// Whether the cycle has launches of which nothing was measured that use this.
    pub fn is_unsure(&self, slot: u32) -> bool {
        self.unsure.get(slot as usize).is_some_and(|unsure| *unsure)
    }

    /// Whether launches of this function and shape are in the cycle.
    #[inline]
    pub fn has_shape(&self, shape: u32) -> bool {
        self.shapes.get(shape as usize) == Some(&true)
    }

    /// Whether nothing of the cycle uses it.
    pub fn is_idle(&self, slot: u32) -> bool {
        self.of(slot).is_empty()
    }

    /// Launches until the next use behind `offset`; the whole cycle and one if there is none.
    pub fn next(&self, slot: u32, offset: u32) -> u32 {
        let entries = self.of(slot);
        let behind = entries.partition_point(|entry| entry.at <= offset);
        match (entries.get(behind), entries.first()) {
            (Some(entry), _) => entry.at - offset,
            (None, Some(entry)) => self.length as u32 + entry.at - offset,
            (None, None) => self.length as u32 + 1,
        }
    }

    /// Passes that are worth saving from behind `offset` on, for less than `launches`, as far as `enough`.
    pub fn worth(&self, slot: u32, offset: u32, launches: u32, enough: f32, kinds: &Kinds) -> f32 {
        let entries = self.of(slot);
        let behind = entries.partition_point(|entry| entry.at <= offset);
        let end = offset.saturating_add(launches);
        let this = entries[behind..].iter().map(|entry| (entry.at, entry));
        let next = entries[..behind].iter().map(|entry| (entry.at.saturating_add(self.length as u32), entry));
        let mut sum = 0.0;
        for (_, entry) in this.chain(next).take_while(|(at, _)| *at < end) {
            sum += worth(kinds, entry.kind) * entry.part;
            if sum >= enough {
                break;
            }
        }
        sum
    }

    /// Launches of the cycle.
    pub fn length(&self) -> u32 {
        self.length as u32
    }
}
