//! Which launch comes next, as far as the program repeats itself.
//!
//! The last launches are kept in a ring. A **reference** goes along in it: the place in the past where the program was when it did
//! what it does now. What came behind that place is what is expected next. The reference is found by a kind's last launch if the
//! launch before it is the same, too, or by the last eight functions where every address is new; it is kept as long as what it says
//! comes true, at least as far as the functions go. So a cycle needs no fixed length: an evaluation between two steps or another tail
//! costs one jump.

use crate::kinds::NONE;
use std::collections::VecDeque;

/// Which part of the launches may come otherwise than before, if the order of the cycle is to be relied on.
pub const SURPRISES: f32 = 0.4;
/// Launches that are remembered.
pub const HISTORY: u64 = 1 << 16;
/// The same, where what followed is all that is asked: of what lies farther back than [`HISTORY`] nothing is told to be repeated.
const RING: u64 = 1 << 17;
const CONTEXTS: usize = 1 << 12;

/// Below this part of the launches none is meant. What goes on to shrink gets to numbers that a processor takes a hundred cycles for, each
/// time: two thirds of what the note of a launch took went there.
const NEGLIGIBLE: f32 = 1e-9;

/// Which part of the last launches something holds for, once it does or does not for one more, of which this is the weight.
#[inline]
pub fn drift(part: f32, holds: bool, weight: f32) -> f32 {
    let part = part + (f32::from(u8::from(holds)) - part) * weight;
    if part < NEGLIGIBLE { 0.0 } else { part }
}

#[derive(Debug)]
pub struct Cycle {
    kinds: Vec<u32>,
    functions: Vec<u32>,
    /// The position of the next launch.
    pub position: u64,
    /// Where the program was when it was where it is now: the position that the next launch repeats.
    reference: Option<u64>,
    /// Launches since the reference jumped.
    steady: u64,
    /// Which part of the last launches came as expected, over about 64.
    quality: f32,
    /// Which part of them was the very kind that was expected.
    exact: f32,
    /// Function of each of the last eight launches, as one hash; where each was last seen.
    context: u64,
    contexts: Vec<u64>,
    /// When the present cycle began, and when it was last lost what follows.
    began: u64,
    lost: u64,
    knows: bool,
    /// Launches between a kind and its last launch, and how many in a row had as many.
    shorter: (u64, u64),
    /// Launches in the present cycle that were not the expected kind.
    pub surprises: u64,
    /// Launches from wait to wait, the last ones, and the position of the last wait.
    spans: VecDeque<u64>,
    waited_at: u64,
    /// Launches of a cycle of so many waits, while these come regularly; and waits since it began.
    by_waits: Option<(u64, usize)>,
    waits: usize,
}

/// Waits of a cycle, at most.
const MOST_WAITS: usize = 4;
/// Launches of one, at least.
const LEAST: u64 = 16;
/// Which part of the last launches has to be the very kind that was expected, for waits to say nothing more.
const EXACT: f32 = 0.9;

impl Cycle {
    pub fn new() -> Self {
        Self {
            kinds: vec![NONE; RING as usize],
            functions: vec![NONE; HISTORY as usize],
            position: 0,
            reference: None,
            steady: 0,
            quality: 0.0,
            exact: 0.0,
            context: 0,
            contexts: vec![u64::MAX; CONTEXTS],
            began: 0,
            lost: 0,
            knows: false,
            shorter: (0, 0),
            surprises: 0,
            spans: VecDeque::with_capacity(2 * MOST_WAITS),
            waited_at: 0,
            by_waits: None,
            waits: 0,
        }
    }

    /// The program has waited for the device. Answers whether a cycle ends with it.
    pub fn waited(&mut self) -> bool {
        let span = self.position - self.waited_at;
        if span == 0 {
            return false;
        }
        self.waited_at = self.position;
        if self.spans.len() == 2 * MOST_WAITS {
            self.spans.pop_front();
        }
        self.spans.push_back(span);
        let alike = |(one, other): (&u64, &u64)| one.abs_diff(*other) * 32 <= *one.max(other);
        let latest = || self.spans.iter().rev();
        let found = (1..=MOST_WAITS).find_map(|waits| {
            let is_again = 2 * waits <= self.spans.len() && latest().skip(waits).zip(latest()).take(waits).all(alike);
            let length: u64 = latest().take(waits).sum();
            (is_again && (LEAST..=HISTORY / 2).contains(&length)).then_some((length, waits))
        });
        // What repeats itself to the letter says more exactly where it is.
        let is_known = |total: u64| {
            let lag = self.reference.map_or(0, |reference| self.position - reference);
            self.exact > EXACT && lag > 0 && self.steady >= lag && total.is_multiple_of(lag)
        };
        let found = found.filter(|(total, _)| !is_known(*total));
        let before = std::mem::replace(&mut self.by_waits, found);
        let Some((_, waits)) = found else {
            if before.is_some() && self.length().is_none() {
                (self.lost, self.began, self.knows) = (self.position, self.position, false);
            }
            return false;
        };
        self.knows = true;
        self.waits += 1;
        let ends = before.is_none_or(|(_, as_before)| as_before != waits) || self.waits >= waits;
        if ends {
            (self.began, self.waits) = (self.position, 0);
        }
        ends
    }

    #[inline]
    fn slot(position: u64) -> usize {
        (position & (RING - 1)) as usize
    }

    #[inline]
    fn recent(position: u64) -> usize {
        (position & (HISTORY - 1)) as usize
    }

    /// What was launched at a position, if that is remembered.
    pub fn kind(&self, position: u64) -> u32 {
        if position < self.position && self.position - position <= RING {
            self.kinds[Self::slot(position)]
        } else {
            NONE
        }
    }

    /// The kind of the next launch, if the program does again what it did.
    #[inline]
    pub fn expected(&self) -> u32 {
        self.reference.map_or(NONE, |reference| self.kinds[Self::slot(reference)])
    }

    /// Notes a launch. `last` is when this kind was launched before. Answers whether a cycle ends with it.
    #[inline]
    pub fn push(&mut self, kind: u32, function: u32, last: Option<u64>, window: u32) -> bool {
        let position = self.position;
        let expected = self.reference.map(Self::slot);
        let is_same = expected.is_some_and(|slot| self.kinds[slot] == kind);
        self.context = (self.context << 8) ^ u64::from(function);
        let known = (self.context.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize & (CONTEXTS - 1);
        let mut is_right = is_same;
        if !is_same {
            is_right = self.reference.is_some_and(|reference| self.functions[Self::recent(reference)] == function);
            self.surprises += 1;
            self.search(kind, function, last, is_right, known);
        }
        self.contexts[known] = position;
        let distance = last.map_or(0, |last| position - last);
        self.shorter = if distance == self.shorter.0 { (distance, self.shorter.1 + 1) } else { (distance, 1) };
        // The program does again what it did long ago, which the reference follows there; it has done so for a cycle by now.
        if distance > 0
            && self.shorter.1 > distance
            && self.reference.is_some_and(|reference| reference < self.lost && position - reference > distance)
        {
            self.reference = Some(position - distance);
            self.steady = distance;
        }
        self.quality = drift(self.quality, is_right, 1.0 / 64.0);
        self.exact = drift(self.exact, is_same, 1.0 / 64.0);
        self.kinds[Self::slot(position)] = kind;
        self.functions[Self::recent(position)] = function;
        self.position += 1;
        self.steady += 1;
        self.reference = self.reference.map(|reference| reference + 1).filter(|old| self.position - old <= HISTORY / 2);
        if let Some((length, _)) = self.by_waits {
            // It waits no more as it did.
            if self.position - self.began > 2 * length {
                self.by_waits = None;
                self.spans.clear();
            }
            return false;
        }
        let length = self.length();
        if self.knows && length.is_none() {
            (self.lost, self.began) = (self.position, self.position);
        }
        self.knows = length.is_some();
        // Cycles of a few launches are counted together, since each end costs some hundred nanoseconds.
        let length = length.map_or(u64::from(window), |length| length * 8u64.div_ceil(length));
        let ends = self.position - self.began >= length;
        if ends {
            self.began = self.position;
        }
        ends
    }

    #[cold]
    fn search(&mut self, kind: u32, function: u32, last: Option<u64>, is_right: bool, known: usize) {
        // Others of its operands are new each time (experts, a cache that grows); the rest still says where it is.
        if is_right && self.exact > 0.15 {
            return;
        }
        let position = self.position;
        let before = self.kind(position.wrapping_sub(1));
        // The launch before it has to be the same, too: a kind alone may stand at many places of a cycle.
        let by_kind = last.filter(|&last| {
            last > 0 && position - last <= HISTORY / 2 && before != NONE && self.kind(last - 1) == before
        });
        let by_context = || {
            let seen = self.contexts[known];
            let near = seen < position && position - seen <= HISTORY / 2 && position - seen > 8;
            (near && self.functions[Self::recent(seen)] == function).then_some(seen)
        };
        let found = by_kind.or_else(|| if is_right { None } else { by_context() });
        if let Some(found) = found
            && self.reference != Some(found)
            && self.kind(found) != NONE
            && (self.kind(found) == kind || !is_right)
        {
            self.reference = Some(found);
            self.steady = 0;
        }
    }

    /// Launches between a place and the one that it repeats, if that has held for as long, or nearly all of the last launches came
    /// as expected.
    #[inline]
    pub fn length(&self) -> Option<u64> {
        if let Some((length, _)) = self.by_waits {
            return Some(length);
        }
        let lag = self.position - self.reference?;
        (lag > 0 && (self.steady >= lag || self.quality > 0.9 && self.steady >= 64)).then_some(lag)
    }

    /// The positions of the last cycle; without one, of the last `window` launches.
    pub fn last(&self, window: u32) -> std::ops::Range<u64> {
        let begin = match self.length() {
            Some(length) => self.position.saturating_sub(length.min(HISTORY / 2)),
            // What the program did before it began to do something else says nothing of what it does now.
            None => self.position.saturating_sub(u64::from(window)).max(self.lost),
        };
        begin..self.position
    }

    /// The position that the last launch repeats, while that is known.
    pub fn repeats(&self) -> Option<u64> {
        if let Some((length, _)) = self.by_waits {
            return self.position.checked_sub(length + 1);
        }
        self.length().and(self.reference).map(|reference| reference.saturating_sub(1))
    }

    /// When the present cycle began.
    pub fn began(&self) -> u64 {
        self.began
    }

    /// When it was last lost what follows.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Kinds have other names now.
    pub fn rename(&mut self, names: &[u32]) {
        for kind in &mut self.kinds {
            *kind = names.get(*kind as usize).copied().unwrap_or(NONE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_launch_does_any_more_comes_to_nothing_and_never_to_numbers_that_are_slow() {
        let mut part = (0..1000).fold(0.0, |part, _| drift(part, true, 1.0 / 32.0));
        assert!(part > 0.99);
        for _ in 0..100_000 {
            part = drift(part, false, 1.0 / 32.0);
            assert!(!part.is_subnormal(), "{part:e}");
        }
        assert_eq!(part, 0.0);
        assert!(drift(part, true, 1.0 / 32.0) > 0.03, "and comes back at once");
    }
}
