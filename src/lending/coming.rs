//! How often it is looked who has come to a GPU that is borrowed from.
//!
//! A program that cannot ask is seen once it has a context there, and may ask the driver for memory as soon as that is made. So the look is to come soon behind the first sign of
//! a context, and each one costs. A program that begins to use CUDA opens the driver's files some time before it makes a context. Which GPU it will use is not told by that, so
//! nothing leaves for it; it is looked more often for a while.

use std::time::{Duration, Instant};

/// How often it is looked at other times.
pub const SELDOM: Duration = Duration::from_millis(50);
/// And while somebody may be about to make a context.
pub const OFTEN: Duration = Duration::from_millis(5);
/// For how long: a framework may import its libraries between the two.
pub const AWAITED: Duration = Duration::from_secs(2);
/// How many times as long as a look took is waited for the next one, so that looks take a tenth of a thread's time at most.
const RESTS: u32 = 9;

/// Whether somebody is about to come.
#[derive(Debug, Default)]
pub struct Coming {
    /// How many files of the driver were open at the last look, where that is told.
    open: Option<u64>,
    until: Option<Instant>,
}

impl Coming {
    /// Nobody, in a static.
    pub const fn new() -> Self {
        Self { open: None, until: None }
    }

    /// So many files of the driver are open now; whether there are more than at the last look, and nobody was awaited.
    pub fn note(&mut self, open: Option<u64>, now: Instant) -> bool {
        let is_more = self.open.zip(open).is_some_and(|(before, open)| open > before);
        // Where it was not told once, what is told next is compared with what was told last.
        self.open = open.or(self.open);
        if !is_more {
            return false;
        }
        self.until.replace(now + AWAITED).is_none_or(|until| until <= now)
    }

    /// How long after a look that took so long the next one is.
    pub fn pause(&self, took: Duration, now: Instant) -> Duration {
        if self.until.is_some_and(|until| now < until) { (RESTS * took).clamp(OFTEN, SELDOM) } else { SELDOM }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_micros(200);

    #[test]
    fn it_is_looked_more_often_for_a_while_once_somebody_begins() {
        let begun = Instant::now();
        let mut coming = Coming::new();
        // What is open at the first look was before.
        assert!(!coming.note(Some(7), begun));
        assert_eq!(coming.pause(QUICK, begun), SELDOM);
        assert!(coming.note(Some(8), begun));
        assert_eq!(coming.pause(QUICK, begun), OFTEN);
        // Another one lengthens the time, and is no news.
        let later = begun + AWAITED / 2;
        assert!(!coming.note(Some(9), later));
        assert_eq!(coming.pause(QUICK, begun + AWAITED), OFTEN);
        assert_eq!(coming.pause(QUICK, later + AWAITED), SELDOM);
        // Who ends is nobody who comes, and the next one is.
        assert!(!coming.note(Some(3), later + AWAITED));
        assert_eq!(coming.pause(QUICK, later + AWAITED), SELDOM);
        assert!(coming.note(Some(4), later + AWAITED));
    }

    #[test]
    fn where_nothing_is_told_it_is_looked_as_at_other_times() {
        let now = Instant::now();
        let mut coming = Coming::new();
        assert!(!coming.note(None, now) && !coming.note(Some(5), now) && !coming.note(None, now));
        assert_eq!(coming.pause(QUICK, now), SELDOM);
        assert!(coming.note(Some(6), now));
    }

    #[test]
    fn looks_take_a_tenth_of_the_time_at_most_or_are_as_seldom_as_otherwise() {
        let now = Instant::now();
        let mut coming = Coming::new();
        coming.note(Some(1), now);
        coming.note(Some(2), now);
        for (took, pause) in [(0, 5), (500, 5), (2_000, 18), (6_000, 50), (300_000, 50)] {
            assert_eq!(coming.pause(Duration::from_micros(took), now), Duration::from_millis(pause), "{took} µs");
        }
    }
}
