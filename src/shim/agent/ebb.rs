//! Has the program freed most of what it had held for long?
//!
//! Whoever deletes a model, or empties a cache, frees at once what was in use for minutes, and will not ask for it again soon. A
//! loop that allocates and frees the same in every turn does not look like that: within the time that unused memory stays in any
//! case, it had little in use at least once. So a fall counts from the least that was in use all that time, and not from the
//! highest.

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
}

impl Ebb {
    /// Where unused memory stays for `idle`.
    pub fn new(idle: Duration) -> Self {
        Self { spans: VecDeque::new(), held: idle.min(LONGEST), live: 0 }
    }

    /// So much is in use at `now`, and `least` was since the last time. `still`: nothing had changed until just now.
    pub fn note(&mut self, now: Instant, live: u64, least: u64, still: bool) {
        let from = self.spans.back().map_or(now, |last| last.to);
        if still {
            self.spans.push_back(Span { from, to: now, least: self.live, still });
        }
        self.spans.push_back(Span { from: if still { now } else { from }, to: now, least, still: false });
        self.live = live;
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

    /// What was in use until now does not matter any more.
    pub fn forget(&mut self) {
        self.spans.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(10);

    /// Notes what was in use at each second, and the least in the second before it; when it had fallen.
    fn falls(seconds: &[(u64, u64)]) -> Vec<usize> {
        let (mut ebb, begin) = (Ebb::new(IDLE), Instant::now());
        let mut fallen = Vec::new();
        for (second, &(live, least)) in seconds.iter().enumerate() {
            let now = begin + Duration::from_secs(second as u64);
            ebb.note(now, live, least, false);
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
            ebb.note(begin, 100, 0, false);
            let later = begin + Duration::from_secs(seconds);
            // The change that ends the time is over when it is looked at.
            ebb.note(later, 0, 0, true);
            assert_eq!(ebb.has_fallen(later), fallen, "after {seconds} seconds");
        }
    }
}
