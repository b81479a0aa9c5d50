//! When it is tried again to have memory leave a GPU by itself: what did not leave, and what came there behind the last try, as from a thread that had
//! chosen the GPU before.

use crate::suspend::given;
use crate::suspend::vacate::{self, Rest, Vacated};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The shortest and the longest pause between two tries; each one in vain doubles it, since the program stands still meanwhile.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// And the longest for what was not there at the last one.
const FOR_NEWS: Duration = Duration::from_secs(5);
/// For how long one goes on: the program stands still for no longer than this, and nobody waits for it.
const ONE_TRY: Duration = Duration::from_millis(500);

/// What became of the last try.
#[derive(Clone, Copy, Debug)]
struct Tried {
    /// What it left there, of what was there then.
    stayed: u64,
    at: Instant,
    pause: Duration,
}

/// The GPUs that were left, as far as that matters still.
#[derive(Debug)]
pub struct Again {
    tried: BTreeMap<u32, Tried>,
}

impl Again {
    pub const fn new() -> Self {
        Self { tried: BTreeMap::new() }
    }

    /// How long it is until a GPU is to be tried, on which as much lies that may leave ([`vacate::loose_on`]); `None`: it has none of that.
    pub fn due(&mut self, gpu: u32, there: u64, now: Instant) -> Option<Duration> {
        if there == 0 {
            self.tried.remove(&gpu);
            return None;
        }
        let Some(tried) = self.tried.get(&gpu) else { return Some(Duration::ZERO) };
        let pause = if there > tried.stayed { tried.pause.min(FOR_NEWS) } else { tried.pause };
        Some((tried.at + pause).saturating_duration_since(now))
    }

    /// This came of a try, `before` which so much was there. What came meanwhile did not stay: nobody has tried it.
    pub fn note(&mut self, gpu: u32, before: u64, done: &Vacated, now: Instant) {
        let counts = |rest: &&Rest| !rest.cause.is_empty() && rest.cause != vacate::PAGES;
        let told: u64 = done.rest.iter().filter(counts).map(|rest| rest.bytes).sum();
        let is_in_vain = done.moved == 0 && before > 0 && !settles_still(done);
        let stayed = if is_in_vain { told.max(before) } else { told };
        let pause = match self.tried.get(&gpu) {
            Some(tried) if is_in_vain => (2 * tried.pause).min(PAUSES[1]),
            _ => PAUSES[0],
        };
        self.tried.insert(gpu, Tried { stayed, at: now, pause });
    }

    /// Nothing is to leave it any more.
    pub fn forget(&mut self, gpu: u32) {
        self.tried.remove(&gpu);
    }
}

/// Whether it did not leave because other memory was on its way to the host: it leaves behind that.
pub fn settles_still(done: &Vacated) -> bool {
    done.rest.iter().any(|rest| rest.cause == vacate::SETTLING)
}

/// Whether one may begin: what a suspended program has where is settled when it is resumed, and while an image is being written this would wait for that, which others wait
/// for then who ask the agent.
pub fn may_try() -> bool {
    given::may_come_back()
}

/// Whether a try that has begun now goes on still.
pub fn one_try() -> impl Fn() -> bool {
    let begun = Instant::now();
    move || begun.elapsed() < ONE_TRY
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(moved: u64, stayed: u64) -> Vacated {
        let rest = Rest { bytes: stayed, what: "no room".to_owned(), cause: "room" };
        Vacated { moved, rest: Some(rest).filter(|rest| rest.bytes > 0).into_iter().collect(), ..Vacated::default() }
    }

    #[test]
    fn what_stays_is_tried_more_and_more_seldom_and_what_is_new_soon() {
        let (mut again, begun) = (Again::new(), Instant::now());
        assert_eq!(again.due(0, 0, begun), None);
        assert_eq!(again.due(0, 60, begun), Some(Duration::ZERO));
        let mut pauses = Vec::new();
        for _ in 0..8 {
            again.note(0, 60, &came(0, 60), begun);
            pauses.extend(again.due(0, 60, begun).map(|pause| pause.as_secs()));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(again.due(0, 61, begun), Some(FOR_NEWS));
        // Some of it has left, and so may more.
        again.note(0, 61, &came(1, 60), begun);
        assert_eq!(again.due(0, 60, begun), Some(PAUSES[0]));
        // All of it has, and what comes then is tried at once.
        assert_eq!(again.due(0, 0, begun), None);
        assert_eq!(again.due(0, 60, begun), Some(Duration::ZERO));
    }

    /// A thread made it behind the look that found nothing, and before the end of the try.
    #[test]
    fn what_comes_during_a_try_that_found_nothing_has_not_stayed() {
        let (mut again, begun) = (Again::new(), Instant::now());
        for _ in 0..8 {
            again.note(0, 0, &came(0, 0), begun);
        }
        assert_eq!(again.due(0, 60, begun), Some(PAUSES[0]));
        again.note(0, 60, &came(0, 60), begun);
        again.note(0, 60, &came(0, 60), begun);
        again.note(0, 60, &came(0, 60), begun);
        assert_eq!(again.due(0, 60, begun + PAUSES[0]), Some(7 * PAUSES[0]));
        assert_eq!(again.due(0, 90, begun + PAUSES[0]), Some(FOR_NEWS - PAUSES[0]));
    }
}
