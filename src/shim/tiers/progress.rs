//! How work that a launch waits for is seen to go on: by events among it, about one for each millisecond of work, as far as launches
//! were measured. A kernel that never ends lets none of them pass, and then nobody waits for long.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What should lie between two events, nanoseconds.
const APART: u64 = 1_000_000;
/// Launches between two events, at most: where they take four microseconds.
const MOST: u64 = 256;
/// Launches of which nothing is known are taken to be so long, nanoseconds.
const UNKNOWN: u64 = APART / 16;
/// The same, however long launches were. Rejected: up to 3 s where much is lost by far memory. Of two ranks that share a model each waited longer for the other
/// one's collectives then, and the guard counted the wait as what moving had lost (`tests/bench/RESULTS.md`, `move-fsdp`).
const MOST_STILL: Duration = Duration::from_secs(1);
/// How long nothing may be seen to end, where launches are short and nothing was seen to end before.
const STILL: Duration = Duration::from_millis(25);
/// The same where waits have ended so far.
const PATIENT: Duration = Duration::from_millis(400);

/// What the measured launches of one GPU take.
pub(super) struct Progress {
    /// Nanoseconds; the last ones weigh most.
    typical: AtomicU64,
    /// Of the longest lately.
    longest: AtomicU64,
    /// Launches between two events.
    apart: AtomicU64,
    /// How long nothing may be seen to end, whatever launches take; nanoseconds.
    patience: AtomicU64,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            typical: AtomicU64::new(UNKNOWN),
            longest: AtomicU64::new(0),
            apart: AtomicU64::new(APART / UNKNOWN),
            patience: AtomicU64::new(PATIENT.as_nanos() as u64),
        }
    }
}

impl Progress {
    /// A launch took so long.
    pub fn took(&self, nanoseconds: u64) {
        let before = self.typical.load(Ordering::Relaxed);
        let weighed = if before == UNKNOWN { nanoseconds } else { (7 * before + nanoseconds) / 8 };
        self.typical.store(weighed, Ordering::Relaxed);
        let before = self.longest.load(Ordering::Relaxed);
        self.longest.store(nanoseconds.max(before - before / 64), Ordering::Relaxed);
        // A power of two, so that to look whether one is due takes no division.
        let apart = (APART / weighed.max(1)).clamp(1, MOST);
        self.apart.store(1 << apart.ilog2(), Ordering::Relaxed);
    }

    #[inline]
    fn launches_apart(&self) -> u64 {
        self.apart.load(Ordering::Relaxed)
    }

    /// Whether an event should be put in front of the launch with this number.
    #[inline]
    pub fn is_due(&self, launch: u64) -> bool {
        launch & (self.launches_apart() - 1) == 0
    }

    /// What was waited for has ended, or nothing of it was seen to.
    pub fn waited(&self, has_ended: bool) {
        let patience = self.patience.load(Ordering::Relaxed);
        let now = if has_ended { patience.saturating_mul(2) } else { patience / 4 };
        self.patience.store(now.clamp(STILL.as_nanos() as u64, PATIENT.as_nanos() as u64), Ordering::Relaxed);
    }

    /// How long nothing may be seen to end until that means that nothing does.
    pub fn still(&self) -> Duration {
        let between = self.launches_apart().saturating_mul(self.typical.load(Ordering::Relaxed));
        let between = between.max(self.longest.load(Ordering::Relaxed));
        let patience = self.patience.load(Ordering::Relaxed);
        Duration::from_nanos(between.saturating_mul(4).max(patience)).min(MOST_STILL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_a_millisecond_apart_and_long_kernels_are_waited_for_longer() {
        let progress = Progress::default();
        (0..9).for_each(|_| progress.waited(false));
        assert_eq!((progress.launches_apart(), progress.still()), (16, STILL));
        progress.took(10_000);
        assert_eq!((progress.launches_apart(), progress.still()), (64, STILL), "short launches");
        (0..100).for_each(|_| progress.took(1_000));
        assert_eq!((progress.launches_apart(), progress.still()), (256, STILL), "launches that take next to nothing");
        for _ in 0..100 {
            progress.took(12_000_000);
        }
        assert_eq!(progress.launches_apart(), 1);
        assert!((40..=48).contains(&progress.still().as_millis()), "{:?}", progress.still());
        progress.took(100_000_000);
        assert_eq!(progress.still().as_millis(), 400, "one was long");
        progress.took(1 << 50);
        assert_eq!(progress.still(), MOST_STILL);
        assert!((0..100).filter(|launch| Progress::default().is_due(*launch)).count() == 7);
    }

    #[test]
    fn who_was_waited_for_in_vain_is_waited_for_shorter_until_a_wait_has_an_end() {
        let progress = Progress::default();
        assert_eq!(progress.still(), PATIENT);
        progress.waited(false);
        assert_eq!(progress.still(), PATIENT / 4);
        (0..9).for_each(|_| progress.waited(false));
        assert_eq!(progress.still(), STILL);
        progress.waited(true);
        assert_eq!(progress.still(), 2 * STILL);
        (0..9).for_each(|_| progress.waited(true));
        assert_eq!(progress.still(), PATIENT);
    }
}
