//! What launches were charged with of which nothing was measured, until something is.
//!
//! A program runs ahead of the device: by the time that the first launch of a function is measured, a hundred of them may have been charged with reading an
//! operand [`UNKNOWN`](crate::kinds::UNKNOWN) times. What is measured then holds for all of them, so that each is charged anew and what was too much is given back.
//! Without it a job of several ranks owed three seconds for an operand that nobody reads, and paid them back in minutes, in which nothing moved.

use crate::kinds::{NONE, Use};
use std::collections::BTreeMap;

/// Operands of launches that are remembered, about 60 bytes each. What is charged beyond that is not given back.
const MOST: usize = 1 << 12;

/// One operand of launches that are alike: what is known of their operands ([`Kind::operands`](crate::kinds::Kind::operands)), their kind and the extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub shape: Option<u32>,
    pub kind: u32,
    pub slot: u32,
}

/// Nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Charge {
    pub generation: u32,
    /// Of one pass over what is farther than at first, all launches together.
    pub pass_ns: f64,
    /// What was charged for that. Both are less than nothing where what was charged for a launch was given back before memory moved for that very launch.
    pub charged_ns: f64,
}

impl Charge {
    /// What of it was too much, if so much is charged for each nanosecond of a pass.
    pub fn too_much(&self, charge: f64) -> f64 {
        let too_much = self.charged_ns - charge * self.pass_ns;
        if self.pass_ns < 0.0 { too_much.min(0.0) } else { too_much.max(0.0) }
    }
}

#[derive(Debug, Default)]
pub struct Unmeasured {
    charges: BTreeMap<Key, Charge>,
    /// What the last launch was charged with.
    last: Vec<(Key, Charge)>,
}

impl Unmeasured {
    /// Another launch is made.
    #[inline]
    pub fn launched(&mut self) {
        self.last.clear();
    }

    fn add(&mut self, key: Key, charge: Charge) {
        let is_full = self.charges.len() >= MOST;
        let known = match self.charges.get_mut(&key) {
            Some(known) => known,
            None if is_full => return,
            None => self.charges.entry(key).or_default(),
        };
        if known.generation != charge.generation {
            *known = Charge { generation: charge.generation, ..Charge::default() };
        }
        known.pass_ns += charge.pass_ns;
        known.charged_ns += charge.charged_ns;
    }

    /// The last launch is charged with so much for one of its operands.
    pub fn charge(&mut self, shape: Option<u32>, kind: u32, part: &Use, pass_ns: f64, charged_ns: f64) {
        let key = Key { shape, kind, slot: part.slot };
        let charge = Charge { generation: part.generation, pass_ns, charged_ns };
        self.last.push((key, charge));
        self.add(key, charge);
    }

    /// It is not, since memory moved in front of it.
    pub fn take_back_last(&mut self) {
        for (key, charge) in std::mem::take(&mut self.last) {
            self.add(key, Charge { pass_ns: -charge.pass_ns, charged_ns: -charge.charged_ns, ..charge });
        }
    }

    /// What launches like one of this kind were charged with.
    pub fn like(&self, shape: Option<u32>, kind: u32) -> Vec<(Key, Charge)> {
        let (first, last) = if shape.is_some() { (0, NONE) } else { (kind, kind) };
        let key = |kind, slot| Key { shape, kind, slot };
        self.charges.range(key(first, 0)..=key(last, u32::MAX)).map(|(key, charge)| (*key, *charge)).collect()
    }

    /// So much of it was too much; what is left can still be.
    pub fn was_too_much(&mut self, key: &Key, ns: f64) {
        if let Some(charge) = self.charges.get_mut(key) {
            charge.charged_ns -= ns;
        }
    }

    /// It is measured now, or nobody can tell any more.
    pub fn is_settled(&mut self, key: &Key) {
        self.charges.remove(key);
    }

    /// Kinds have other numbers now ([`Kinds::forget_before`](crate::kinds::Kinds::forget_before)).
    pub fn rename(&mut self, names: &[u32]) {
        self.last.clear();
        let renamed = std::mem::take(&mut self.charges).into_iter().filter_map(|(key, charge)| {
            let kind = names.get(key.kind as usize).copied().filter(|kind| *kind != NONE)?;
            Some((Key { kind, ..key }, charge))
        });
        self.charges = renamed.collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(slot: u32) -> Use {
        Use { slot, generation: 1, share: 1.0, part: 1.0, is_named: true, operand: Some(0) }
    }

    #[test]
    fn launches_of_one_shape_are_charged_anew_together_and_what_moved_for_one_in_time_is_not_given_back_twice() {
        let mut all = Unmeasured::default();
        for kind in 0..3 {
            all.launched();
            all.charge(Some(7), kind, &part(1), 10.0, 320.0);
        }
        all.launched();
        all.charge(None, 3, &part(1), 10.0, 320.0);
        assert_eq!(all.like(Some(7), 0).len(), 3);
        assert_eq!(all.like(None, 3).len(), 1, "those that are like nothing are by themselves");
        assert!(all.like(None, 0).is_empty());
        // Measured before memory moved in front of the last one: it was given back 310 of 320, and 320 by the move.
        let (key, charge) = all.like(None, 3)[0];
        assert_eq!(charge.too_much(1.0), 310.0);
        all.is_settled(&key);
        all.take_back_last();
        assert_eq!(all.like(None, 3)[0].1.too_much(1.0), -310.0);
        // Another extent in the same slot.
        all.charge(Some(7), 0, &Use { generation: 2, ..part(1) }, 1.0, 32.0);
        assert_eq!(all.like(Some(7), 0)[0].1.charged_ns, 32.0);
        all.rename(&[NONE, 0, 1, 2]);
        assert_eq!(all.like(Some(7), 0).iter().map(|(key, _)| key.kind).collect::<Vec<_>>(), [0, 1]);
    }
}
