//! In which period ([`crate::Pool::begin_period`]) was memory freed last?
//!
//! Known by frames, and not by chunks, so that a free costs the same on however many chunks its block stands: a free notes one range,
//! and ranges that were noted in the same period become one. A chunk was freed in the latest period that any of its frames was.
//! What is noted of frames stays when their chunk goes: whatever comes there is noted before it is free.

use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct FreedIn {
    /// From each frame on up to the next one in here, the period; 0 before the first.
    periods: BTreeMap<u32, u32>,
    /// Frames around those that were noted last, `(start, end, period)`, all of one period each: a program frees within them over and over.
    /// A few, since what a pool holds lies in several ranges.
    last: [(u32, u32, u32); LAST],
    /// Which of them is replaced next.
    turn: usize,
}

const LAST: usize = 4;

impl FreedIn {
    /// The period that holds for `frame`.
    fn at(&self, frame: u32) -> u32 {
        self.periods.range(..=frame).next_back().map_or(0, |(_, period)| *period)
    }

    /// Memory in `start..end` is freed in this period.
    pub fn note(&mut self, start: u32, end: u32, period: u32) {
        if self.last.iter().any(|last| last.0 <= start && end <= last.1 && last.2 == period) {
            return;
        }
        let (first, latest) =
            self.periods.range(..=start).next_back().map_or((0, 0), |(first, period)| (*first, *period));
        if latest == period {
            let next = self.periods.range(start + 1..).next().map_or(u32::MAX, |(next, _)| *next);
            if end <= next {
                return self.remember(first, next, period);
            }
        }
        for last in &mut self.last {
            if last.0 < end && start < last.1 && last.2 != period {
                *last = (0, 0, 0);
            }
        }
        let before = start.checked_sub(1).map_or(0, |frame| self.at(frame));
        let until = self.at(end);
        while let Some((&next, _)) = self.periods.range(start..=end).next() {
            self.periods.remove(&next);
        }
        if before != period {
            self.periods.insert(start, period);
        }
        if until != period {
            self.periods.insert(end, until);
        }
        let first = self.periods.range(..=start).next_back().map_or(0, |(first, _)| *first);
        let next = self.periods.range(end..).next().map_or(u32::MAX, |(next, _)| *next);
        self.remember(first, next, period);
    }

    fn remember(&mut self, first: u32, next: u32, period: u32) {
        self.last[self.turn] = (first, next, period);
        self.turn = (self.turn + 1) % LAST;
    }

    /// The latest period in which any frame of `start..end` was freed.
    pub fn latest(&self, start: u32, end: u32) -> u32 {
        let later = self.periods.range(start..end).map(|(_, period)| *period);
        later.fold(self.at(start), u32::max)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::FreedIn;

    proptest::proptest! {
        #[test]
        fn it_answers_as_a_list_of_frames_does(frees in proptest::collection::vec((0..90u32, 1..40u32, 0..5u32), 1..60)) {
            let (mut freed_in, mut list) = (FreedIn::default(), vec![0; 130]);
            // Not in order: memory that was gathered keeps the period in which it was freed.
            for (start, frames, period) in frees {
                let end = start + frames;
                freed_in.note(start, end, period);
                list[start as usize..end as usize].fill(period);
                for start in 0..130 {
                    proptest::prop_assert_eq!(freed_in.latest(start, start + 1), list[start as usize]);
                    let longest = list[start as usize..].iter().copied().max().unwrap_or(0);
                    proptest::prop_assert_eq!(freed_in.latest(start, 130), longest);
                }
                let changes = list.windows(2).filter(|pair| pair[0] != pair[1]).count();
                proptest::prop_assert!(freed_in.periods.len() <= changes + 1, "frames of one period are one range");
            }
        }
    }
}
