//! Has the program freed most of what it had, and will not want it soon?
//!
//! Whoever deletes a model, or empties a cache, frees at once what was in use for minutes, and will not ask for it again soon. A
//! loop that allocates and frees the same in every turn does not look like that: within the time that unused memory stays in any
//! case, it had little in use at least once. So a fall counts from the least that was in use all that time, and not from the
//! highest.
//!
//! Whoever freed most of it and then asks for nothing from one look to the next is not in such a loop either, however short it was
//! held: that is no proof, since a loop may rest longer than a look is away, and who pays for the guess finds it out
//! ([`super::home`]).

use gpupool_pool::FreedMemory;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a fall may take.
const FALL: Duration = Duration::from_secs(2);
/// The longest that memory must have been held for its end to be a fall.
const LONGEST: Duration = Duration::from_secs(60);

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
    /// Neither had changed since the time before.
    rests: bool,
    /// Most of what was held then was not in use.
    is_low: bool,
}

impl Ebb {
    /// Where unused memory stays for `idle`.
    pub fn new(idle: Duration) -> Self {
        Self { spans: VecDeque::new(), held: idle.min(LONGEST), live: 0, allocations: 0, rests: false, is_low: false }
    }

    /// What there is at `now`. `still`: nothing had changed until just now.
    pub fn note(&mut self, now: Instant, freed: &FreedMemory, still: bool) {
        let &FreedMemory { live_bytes: live, least_live_bytes: least, allocations, held, .. } = freed;
        let from = self.spans.back().map_or(now, |last| last.to);
        if still {
            self.spans.push_back(Span { from, to: now, least: self.live, still });
        }
        self.spans.push_back(Span { from: if still { now } else { from }, to: now, least, still: false });
        self.rests = self.live == live && self.allocations == allocations;
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

    /// Whether that is so, and nothing was allocated or freed since the last look.
    pub fn rests(&self) -> bool {
        self.rests && self.is_low
    }

    /// What was in use until now does not matter any more.
    pub fn forget(&mut self) {
        self.spans.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            if ebb.rests() {
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
            ebb.note(begin + Duration::from_millis(500 * look), &freed(live, 0, look * 3, 100), false);
            assert!(!ebb.rests(), "look {look}");
        }
    }
}
