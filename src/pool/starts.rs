//! The set of frames at which a run starts, as a bitmap with summaries: which run does this inner address belong to?

/// A set of `u32` with constant-time change and a predecessor query that looks at one word a level (64 frames, 4 096,
/// 262 144…). A `BTreeMap` of blocks would answer too, but it pays an ordered insertion for every warm allocation.
#[derive(Debug, Default)]
pub(crate) struct Starts {
    /// `levels[0]` has a bit a frame, `levels[i + 1]` a bit for each word of `levels[i]` that is not 0. The last level is
    /// one word.
    levels: Vec<Vec<u64>>,
}

impl Starts {
    pub fn insert(&mut self, frame: u32) {
        self.grow_to(frame as usize);
        let mut at = frame as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let was_empty = *word == 0;
            *word |= 1 << (at % 64);
            if !was_empty {
                return;
            }
            at /= 64;
        }
    }

    pub fn remove(&mut self, frame: u32) {
        let mut at = frame as usize;
        for level in &mut self.levels {
            let Some(word) = level.get_mut(at / 64) else {
                return;
            };
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
    }

    /// The greatest member that is at most `frame`.
    pub fn at_or_below(&self, frame: u32) -> Option<u32> {
        // `at` is the first bit, at the present level, that is out of the question.
        let mut at = frame as usize + 1;
        for (height, level) in self.levels.iter().enumerate() {
            if at == 0 {
                return None;
            }
            let last = (at - 1).min(level.len() * 64 - 1);
            let word = level[last / 64] & (u64::MAX >> (63 - last % 64));
            if word != 0 {
                let mut found = last / 64 * 64 + (63 - word.leading_zeros() as usize);
                for level in self.levels[..height].iter().rev() {
                    found = found * 64 + (63 - level[found].leading_zeros() as usize);
                }
                return u32::try_from(found).ok();
            }
            at = last / 64;
        }
        None
    }

    fn grow_to(&mut self, frame: usize) {
        let mut words = frame / 64 + 1;
        if self.levels.first().is_some_and(|level| level.len() >= words) {
            return;
        }
        // Doubling keeps a pool that grows chunk by chunk from copying the summaries every time.
        words = words.next_power_of_two();
        for height in 0.. {
            if height == self.levels.len() {
                // The level below was the one-word top; a new top has a bit set if that word had any.
                let summary = self.levels.last().map_or(0, |level| u64::from(level.iter().any(|&word| word != 0)));
                self.levels.push(vec![summary]);
            }
            self.levels[height].resize(words, 0);
            if words == 1 {
                return;
            }
            words = words.div_ceil(64);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Starts;
    use std::collections::BTreeSet;

    proptest::proptest! {
        #[test]
        fn it_answers_as_an_ordered_set_does(ops in proptest::collection::vec((0..3u8, 0..20_000u32), 1..400)) {
            let (mut starts, mut set) = (Starts::default(), BTreeSet::new());
            for (op, frame) in ops {
                match op {
                    0 => { starts.insert(frame); set.insert(frame); }
                    1 => { starts.remove(frame); set.remove(&frame); }
                    _ => {}
                }
                proptest::prop_assert_eq!(starts.at_or_below(frame), set.range(..=frame).next_back().copied());
                proptest::prop_assert_eq!(starts.at_or_below(u32::MAX - 1), set.last().copied());
            }
        }
    }

    #[test]
    fn the_top_summary_survives_growth() {
        let mut starts = Starts::default();
        starts.insert(3);
        starts.insert(40_000_000);
        starts.remove(40_000_000);
        assert_eq!(starts.at_or_below(39_999_999), Some(3));
        assert_eq!(starts.at_or_below(2), None);
    }
}
