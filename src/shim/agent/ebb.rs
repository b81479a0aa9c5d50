//! Has the program freed most of what it had, and will not want it soon?
//!
//! Whoever deletes a model, or empties a cache, frees at once what was in use for minutes, and will not ask for it again soon. A
//! loop that allocates and frees the same in every turn does not look like that: within the time that unused memory stays in any
//! case, it had little in use at least once. So a fall counts from the least that was in use all that time, and not from the
//! highest.
//!
//! Whoever freed most of it and then asks for nothing for [`REST`] is not in such a loop either, however short it was held. That is no
//! proof: in its first pause a loop that rests longer has done nothing that a program at the end of its work has not, so one of
//! the two is judged wrongly, whatever the rule. It is the loop, once, and [`super::home`] finds it out. A loop that rests shorter is
//! never judged so. Looks are no measure of a rest: two of them fall into a pause that is hardly longer than they are apart.

use gpupool_pool::FreedMemory;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a fall may take.
const FALL: Duration = Duration::from_secs(2);
/// The longest that memory must have been held for its end to be a fall.
const LONGEST: Duration = Duration::from_secs(60);
/// How long a program must ask for nothing, by what looks have seen of it. With two looks more, one that sees the last change and one
/// that may come just before this is over, it is the second within which memory goes home.
pub const REST: Duration = Duration::from_millis(500);

/// A time, and the fewest bytes that were in use in it.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: Instant,
    to: Instant,
    least: u64,
    /// Nothing changed in it.
    still: bool,
}

/// What was in use until now, as far back as it matters.
#[derive(Debug)]
pub struct Ebb {
    spans: VecDeque<Span>,
    /// How long memory must have been held.
    held: Duration,
    /// In use when it was noted last.
    live: u64,
    /// Allocations until then.
    allocations: u64,
    /// The first look that saw both as they are.
    unchanged: Option<Instant>,
    /// Most of what was held then was not in use.
    is_low: bool,
}

impl Ebb {
    /// Where unused memory stays for `idle`.
    pub fn new(idle: Duration) -> Self {
        Self {
            spans: VecDeque::new(),
            held: idle.min(LONGEST),
            live: 0,
            allocations: 0,
            unchanged: None,
            is_low: false,
        }
    }

    /// What there is at `now`. `still`: nothing had changed until just now.
    pub fn note(&mut self, now: Instant, freed: &FreedMemory, still: bool) {
        let &FreedMemory { live_bytes: live, least_live_bytes: least, allocations, held, .. } = freed;
        let from = self.spans.back().map_or(now, |last| last.to);
        if still {
            self.spans.push_back(Span { from, to: now, least: self.live, still });
        }
        self.spans.push_back(Span { from: if still { now } else { from }, to: now, least, still: false });
        if (self.live, self.allocations) != (live, allocations) {
            self.unchanged = None;
        }
        self.unchanged.get_or_insert(now);
        self.is_low = held > 0 && live <= held / 2;
        (self.live, self.allocations) = (live, allocations);
        // The first one that remains reaches back as far as is asked.
        while self.spans.get(1).is_some_and(|second| second.from + self.held + FALL <= now) {
            self.spans.pop_front();
        }
    }

    /// Whether most of what was in use for long is in use no more.
    pub fn has_fallen(&self, now: Instant) -> bool {
        let known_for = self.spans.front().map_or(Duration::ZERO, |first| now - first.from);
        if known_for < self.held {
            return false;
        }
        // Looks may be late; the fall is in the last two, whenever these were.
        let last_two = self.spans.iter().rev().filter(|span| !span.still).nth(1).map_or(now, |span| span.from);
        let is_before = |span: &&Span| span.still || span.from + FALL < now && span.from < last_two;
        let held = self.spans.iter().filter(is_before).map(|span| span.least).min();
        held.is_some_and(|held| held > 0 && self.live <= held / 2)
    }

    /// Whether most of what is held is not in use.
    pub fn is_low(&self) -> bool {
        self.is_low
    }

    /// Whether that is so, and nothing was allocated or freed for [`REST`].
    pub fn rests(&self, now: Instant) -> bool {
        self.is_low && self.unchanged.is_some_and(|since| now - since >= REST)
    }

    /// What was in use until now does not matter any more.
    pub fn forget(&mut self) {
        self.spans.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::home::{LONGEST as LOOKS, SHORTEST};
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const IDLE: Duration = Duration::from_secs(10);

    fn freed(live_bytes: u64, least_live_bytes: u64, allocations: u64, held: u64) -> FreedMemory {
        FreedMemory { whole: Vec::new(), kept: 0, held, live_bytes, least_live_bytes, allocations }
    }

    /// Notes what was in use at each second, and the least in the second before it; when it had fallen.
    fn falls(seconds: &[(u64, u64)]) -> Vec<usize> {
        let (mut ebb, begin) = (Ebb::new(IDLE), Instant::now());
        let mut fallen = Vec::new();
        for (second, &(live, least)) in seconds.iter().enumerate() {
            let now = begin + Duration::from_secs(second as u64);
            ebb.note(now, &freed(live, least, 0, 100), false);
            if ebb.has_fallen(now) {
                fallen.push(second);
                ebb.forget();
            }
        }
        fallen
    }

    #[test]
    fn what_was_held_for_long_and_is_freed_is_a_fall_at_once_and_one() {
        let mut seconds = vec![(100, 100); 20];
        seconds.extend([(0, 0); 20]);
        assert_eq!(falls(&seconds), [20]);
        // Freed in two parts, each of them less than half.
        seconds[20] = (60, 60);
        seconds[21] = (20, 20);
        assert_eq!(falls(&seconds), [21]);
    }

    #[test]
    fn a_loop_is_none_however_its_turns_lie_to_the_looks() {
        for turn in 2..9 {
            let level = |second: usize| if second.is_multiple_of(turn) { (0, 0) } else { (100, 100) };
            assert!(falls(&(0..100).map(level).collect::<Vec<_>>()).is_empty(), "a turn of {turn} seconds");
        }
        // Every look but the last comes while memory is in use.
        let mut seconds = vec![(100, 0); 50];
        seconds.push((0, 0));
        assert!(falls(&seconds).is_empty());
    }

    #[test]
    fn what_was_held_shortly_or_is_mostly_still_held_is_none() {
        let mut seconds = vec![(0, 0); 20];
        seconds.extend([(100, 0)]);
        seconds.extend([(100, 100); 5]);
        seconds.extend([(0, 0); 20]);
        assert!(falls(&seconds).is_empty());
        let mut seconds = vec![(100, 100); 20];
        seconds.extend([(51, 51); 20]);
        assert!(falls(&seconds).is_empty());
    }

    #[test]
    fn a_time_in_which_nothing_changed_counts_up_to_the_change_that_ended_it() {
        let begin = Instant::now();
        for (seconds, fallen) in [(3600, true), (11, true), (9, false)] {
            let mut ebb = Ebb::new(IDLE);
            // What was allocated just before has not been held yet.
            ebb.note(begin, &freed(100, 0, 1, 100), false);
            let later = begin + Duration::from_secs(seconds);
            // The change that ends the time is over when it is looked at.
            ebb.note(later, &freed(0, 0, 1, 100), true);
            assert_eq!(ebb.has_fallen(later), fallen, "after {seconds} seconds");
        }
    }

    #[test]
    fn who_frees_most_and_then_asks_for_nothing_rests_once() {
        let (mut ebb, begin) = (Ebb::new(IDLE), Instant::now());
        // In use, allocations so far, and held, at each half second.
        let looks =
            [(100, 10, 100), (100, 10, 100), (20, 10, 100), (20, 10, 100), (20, 10, 20), (20, 10, 20), (90, 11, 90)];
        let more = [(30, 11, 90), (30, 12, 90), (30, 12, 90), (30, 12, 30)];
        let mut rested = Vec::new();
        for (look, (live, allocations, held)) in looks.into_iter().chain(more).enumerate() {
            let now = begin + Duration::from_millis(500 * look as u64);
            ebb.note(now, &freed(live, live, allocations, held), false);
            if ebb.rests(now) {
                rested.push(look);
            }
        }
        assert_eq!(rested, [3, 9]);
    }

    #[test]
    fn a_loop_that_allocates_between_any_two_looks_does_not_rest() {
        let (mut ebb, begin) = (Ebb::new(IDLE), Instant::now());
        for look in 0..100u64 {
            let live = if look % 7 == 0 { 100 } else { 0 };
            let now = begin + Duration::from_millis(500 * look);
            ebb.note(now, &freed(live, 0, look * 3, 100), false);
            assert!(!ebb.rests(now), "look {look}");
        }
    }

    /// A program as looks see it: rounds that allocate and free all of it, with pauses between them.
    struct Rounds {
        /// When a round begins and when it ends, in milliseconds.
        rounds: Vec<(u64, u64)>,
    }

    impl Rounds {
        fn at(&self, ms: u64) -> FreedMemory {
            let is_in_one = self.rounds.iter().any(|(from, to)| (*from..*to).contains(&ms));
            let begun = self.rounds.iter().filter(|(from, _)| *from <= ms).count() as u64;
            freed(if is_in_one { 100 } else { 0 }, 0, begun, if begun > 0 { 100 } else { 0 })
        }
    }

    /// When it is seen to rest first, with looks that come so much later than `step` each.
    fn rests_at(program: &Rounds, step: Duration, late: &[u64], until: u64) -> Option<u64> {
        let (mut ebb, begin) = (Ebb::new(IDLE), Instant::now());
        let (mut ms, mut late) = (0, late.iter().cycle());
        while ms < until {
            let now = begin + Duration::from_millis(ms);
            ebb.note(now, &program.at(ms), false);
            if ebb.rests(now) {
                return Some(ms);
            }
            ms += step.as_millis() as u64 + late.next().copied().unwrap_or(0);
        }
        None
    }

    proptest! {
        /// However its pauses lie to the looks, and however late these come.
        #[test]
        fn a_loop_whose_pauses_are_shorter_than_a_rest_is_never_taken_for_one_that_has_ended(
            rounds in vec((1u64..700, 1u64..REST.as_millis() as u64), 1..60),
            begins in 0u64..1000,
            late in vec(0u64..400, 1..8),
        ) {
            let mut at = begins;
            let one = |(works, pauses): &(u64, u64)| {
                let round = (at, at + works);
                at += works + pauses;
                round
            };
            let program = Rounds { rounds: rounds.iter().map(one).collect() };
            let (_, until) = *program.rounds.last().unwrap();
            for step in [SHORTEST, LOOKS] {
                prop_assert_eq!(rests_at(&program, step, &late, until), None);
            }
        }

        /// The step and the rest are what "within a second" is made of.
        #[test]
        fn who_frees_all_of_it_for_good_is_seen_to_rest_with_time_left_of_a_second(
            works in 1u64..3000, begins in 0u64..1000,
        ) {
            let end = begins + works;
            let rests = rests_at(&Rounds { rounds: vec![(begins, end)] }, LOOKS, &[0], end + 5000);
            prop_assert!(rests.is_some_and(|at| at <= end + 800), "freed at {end}, seen to rest at {rests:?}");
        }
    }
}
