//! In which period ([`crate::Pool::begin_period`]) was memory freed last?
//!
//! Known by frames, and not by chunks, so that a free costs the same on however many chunks its block stands: a free notes one range,
//! and ranges that were noted in the same period become one. A chunk was freed in the latest period that any of its frames was.
//! What is noted of frames stays when their chunk goes: whatever comes there is noted before it is free.

use std::collections::BTreeMap;

/// From each frame on up to the next one in here, the period; 0 before the first.
#[derive(Debug, Default)]
pub(crate) struct FreedIn(BTreeMap<u32, u32>);

impl FreedIn {
    /// The period that holds for `frame`.
    fn at(&self, frame: u32) -> u32 {
        self.0.range(..=frame).next_back().map_or(0, |(_, period)| *period)
    }

    /// Memory in `start..end` is freed in this period.
    pub fn note(&mut self, start: u32, end: u32, period: u32) {
        let before = start.checked_sub(1).map_or(0, |frame| self.at(frame));
        let until = self.at(end);
        while let Some((&next, _)) = self.0.range(start..=end).next() {
            self.0.remove(&next);
        }
        if before != period {
            self.0.insert(start, period);
        }
        if until != period {
            self.0.insert(end, until);
        }
    }

    /// The latest period in which any frame of `start..end` was freed.
    pub fn latest(&self, start: u32, end: u32) -> u32 {
        let later = self.0.range(start..end).map(|(_, period)| *period);
        later.fold(self.at(start), u32::max)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::FreedIn;

    proptest::proptest! {
        #[test]
        fn it_answers_as_a_list_of_frames_does(frees in proptest::collection::vec((0..90u32, 1..40u32, 0..3u32), 1..60)) {
            let (mut freed_in, mut list) = (FreedIn::default(), vec![0; 130]);
            let mut period = 0;
            for (start, frames, passed) in frees {
                period += passed;
                let end = start + frames;
                freed_in.note(start, end, period);
                list[start as usize..end as usize].fill(period);
                for start in 0..130 {
                    proptest::prop_assert_eq!(freed_in.latest(start, start + 1), list[start as usize]);
                    let longest = list[start as usize..].iter().copied().max().unwrap_or(0);
                    proptest::prop_assert_eq!(freed_in.latest(start, 130), longest);
                }
                let changes = list.windows(2).filter(|pair| pair[0] != pair[1]).count();
                proptest::prop_assert!(freed_in.0.len() <= changes + 1, "frames of one period are one range");
            }
        }
    }
}
