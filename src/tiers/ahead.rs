//! What comes next, where the program does again what it did some thousand launches ago.
//!
//! A model that reads, writes a hundred words and reads again does something else than in the cycle that is known, and does it as it did the last time: the launches behind
//! the last one of the same kind, with the same words, are what to expect. That is asked only where a swap is made, which stops the program anyway.

use crate::kinds::NONE;
use crate::tiers::Tiers;
use crate::timeline;

/// Launches in front of both that are compared, and which part of them has to be the same.
const BEFORE: u64 = 48;
const ALIKE: f32 = 0.75;
/// Launches that are looked at.
const AHEAD: u64 = 256;

const NEVER: u32 = u32::MAX;

/// The launches that are expected.
#[derive(Debug, Default)]
pub struct Ahead {
    /// How many are.
    pub launches: u32,
    /// Launches until the first use of each slot, or [`NEVER`].
    first: Vec<u32>,
    /// The slot of each use and what that use is worth, in passes, the next first.
    pub uses: Vec<(u32, f32)>,
}

impl Ahead {
    /// What followed the last launch when one of its kind was made before; nothing where the launches in front of both differ.
    pub fn of(tiers: &Tiers, id: u32) -> Self {
        let mut ahead = Self::default();
        let cycle = &tiers.cycle;
        let Some(now) = cycle.position.checked_sub(1) else { return ahead };
        let Some(previous) = tiers.previous.filter(|previous| *previous < now && cycle.kind(*previous) == id) else {
            return ahead;
        };
        let before = (1..=BEFORE.min(previous)).map(|back| (cycle.kind(now - back), cycle.kind(previous - back)));
        let same = before.filter(|(one, other)| one == other && *one != NONE).count();
        if (same as f32) < ALIKE * BEFORE as f32 {
            return ahead;
        }
        ahead.first.resize(tiers.extents.slots(), NEVER);
        for distance in 1..=AHEAD.min(now - previous) {
            let id = cycle.kind(previous + distance);
            let Some(kind) = tiers.kinds.get(id) else { continue };
            let worth = timeline::worth(&tiers.kinds, id);
            for part in kind.uses.iter() {
                let lives = tiers.extents.get(part.slot).is_some_and(|extent| extent.generation == part.generation);
                if lives {
                    if let Some(first) = ahead.first.get_mut(part.slot as usize) {
                        *first = (*first).min(distance as u32);
                    }
                    ahead.uses.push((part.slot, worth * part.part));
                }
            }
            ahead.launches = distance as u32;
        }
        ahead
    }

    /// Launches until the first use of a slot, if one of those that are expected uses it.
    pub fn first_use(&self, slot: u32) -> Option<u32> {
        self.first.get(slot as usize).copied().filter(|first| *first != NEVER)
    }
}
