//! How often it is looked who has come to a GPU that is borrowed from, and what leaves before anybody is seen there.
//!
//! A program that cannot ask is seen once it has a context there, and may ask the driver for memory as soon as that is made. So the look is to come soon behind the first sign of
//! a context, and each one costs. A program that begins to use CUDA opens the driver's files some time before it makes a context. Which GPU it will use is not told by that, so
//! nothing leaves for it; it is looked more often for a while ([`Coming`]).
//!
//! Once it is seen there are 92 to 111 ms left, too little for what leaves at 200 GB/s. 230 to 530 ms before its context is made a GPU's memory in use grows ([`InUse`]), and for that all
//! leaves at once, unless it has been a false alarm lately ([`Alarm`]): `cuInit` does it, so it may come of a program that goes to another GPU in the end.
//!
//! Measured on four H100 (driver 580.159.04, 2026-11-27, `fleet-comers`): the driver's files are opened 0 to 5 ms behind the begin; within 20 to 85 ms `cuInit` takes 64 KiB of every GPU of the machine, and of those that the process sees 3 328 KiB in all, in
//! steps, until it returns (after 210 to 530 ms); right behind that the GPU on which a context is made grows by 6 to 19 MiB more within 6 to 40 ms, 120 to 127 ms before that is made. Meanwhile a look at the list takes up to 54 ms (one visible GPU) or 108 ms (two), and one at the memory
//! in use 8 µs. So the list is asked seldom where the memory in use tells as much ([`Listed`]).
//!
//! Nobody else used those GPUs. Beside a borrower the first growth that was seen was the context's, less exactly those 3 328 KiB (`fleet-stranger-at-once`, the same day): they are most likely the first program's of a GPU and not
//! each one's, so that 80 to 120 ms are all there is. That was not asked by itself.

use crate::{GUARD, LONGEST_GUARD};
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
        is_more && self.expect(now)
    }

    /// Somebody is about to come, by another sign; whether nobody was awaited.
    pub fn expect(&mut self, now: Instant) -> bool {
        self.until.replace(now + AWAITED).is_none_or(|until| until <= now)
    }

    /// How long after a look that took so long the next one is.
    pub fn pause(&self, took: Duration, now: Instant) -> Duration {
        if self.until.is_some_and(|until| now < until) { (RESTS * took).clamp(OFTEN, SELDOM) } else { SELDOM }
    }
}

/// A GPU's memory in use, where nobody has a context: what is there is borrowed, and grows by those who borrow or by who is about to come.
///
/// Any growth counts: the first step is 64 KiB (the head of this file), and of an idle GPU the number did not change in ten seconds of looks 0.2 ms apart before one came. What is known to be explained is left out as a whole ([`InUse::note`]) and not subtracted, since a page of a process that borrows tells its bytes up to a second
/// late.
#[derive(Debug, Default)]
pub struct InUse(Option<u64>);

impl InUse {
    /// So much is in use now, `None`: that is not told, or somebody is there. By how much it has grown since the last look.
    pub fn note(&mut self, used: Option<u64>) -> Option<u64> {
        let before = std::mem::replace(&mut self.0, used);
        let more = used?.checked_sub(before?)?;
        (more > 0).then_some(more)
    }

    /// What was in use at the last look.
    pub fn last(&self) -> Option<u64> {
        self.0
    }
}

/// How often it is asked who is on the list of a GPU of which the memory in use is looked at.
pub const LISTED: Duration = Duration::from_millis(500);

/// Whether a GPU's list of processes is to be asked for: where it was empty, the memory in use tells of who comes, at a fraction of the price, and the list can hold its asker up for as long as whoever comes takes to make a context.
#[derive(Debug, Default)]
pub struct Listed {
    /// When the list was empty last.
    empty: Option<Instant>,
    /// Whether the memory in use has changed since.
    changed: bool,
}

impl Listed {
    /// The list was asked for, and nobody is on it or somebody is.
    pub fn note(&mut self, is_empty: bool, now: Instant) {
        (self.empty, self.changed) = (is_empty.then_some(now), false);
    }

    /// The memory in use has changed.
    pub fn change(&mut self) {
        self.changed = true;
    }

    /// Whether the list is to be asked for at this time.
    pub fn is_due(&self, now: Instant) -> bool {
        self.changed || self.empty.is_none_or(|empty| now >= empty + LISTED)
    }
}

/// What an alarm comes of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heed {
    /// All leaves.
    Leave,
    /// It is part of one that is heeded already, or that is not.
    Same,
    /// Nothing leaves before somebody is seen: there was a false alarm so lately that this may be one for so long yet.
    Look(Duration),
}

/// For how long alarms make nothing leave behind the first false one.
const DISTRUSTED: Duration = GUARD.saturating_mul(6);

/// What `cuInit` takes of a GPU before a context is made there, rounded up: 3 328 KiB of each GPU that its program sees. A growth beyond it is a context's on this very GPU, which takes 6 MiB and more at first (the head of this file). Several programs that begin at once are taken for one that comes.
pub const INIT: u64 = 4 << 20;

/// Whether memory leaves a GPU because somebody may be about to come there.
///
/// Somebody is awaited for as long as what left stays away at first ([`GUARD`]). Who does not come within that was a false alarm: programs that begin to use CUDA may go to another GPU. Behind one, alarms make
/// nothing leave for a minute, and behind each further one twice as long, up to [`LONGEST_GUARD`], so that what is borrowed is away by false alarms for a small part of the time. Who comes ends that; and
/// what grows by more than `cuInit` takes is heeded in any case.
#[derive(Debug, Default)]
pub struct Alarm {
    /// Until when somebody is awaited, and whether all leaves for that.
    awaited: Option<(Instant, bool)>,
    /// By how much the memory in use has grown since the first sign of that, this one included.
    grown: u64,
    /// For how long the last false one counted, and until when.
    distrust: Option<(Duration, Instant)>,
}

impl Alarm {
    /// There is a sign that somebody is about to come: the memory in use has grown by so much.
    pub fn rings(&mut self, bytes: u64, now: Instant) -> Heed {
        let before = if self.awaited.is_some() { self.grown } else { 0 };
        self.grown = before.saturating_add(bytes);
        let is_context = self.grown > INIT;
        match self.awaited {
            Some((_, false)) if is_context => {}
            Some(_) => return Heed::Same,
            None => {}
        }
        let rest = self.distrust.map_or(Duration::ZERO, |(_, until)| until.saturating_duration_since(now));
        let heeded = rest.is_zero() || is_context;
        self.awaited = Some((now + GUARD, heeded));
        if heeded { Heed::Leave } else { Heed::Look(rest) }
    }

    /// Whether somebody is awaited.
    pub fn awaits(&self) -> bool {
        self.awaited.is_some()
    }

    /// Whether somebody is awaited for whom nothing leaves, since the last sign was a false one.
    pub fn is_distrusted(&self) -> bool {
        self.awaited.is_some_and(|(_, heeded)| !heeded)
    }

    /// Somebody is there.
    pub fn came(&mut self) {
        if self.awaited.take().is_some() {
            self.distrust = None;
        }
    }

    /// Nobody is there at this time; where an alarm for which all was to leave has proved false just now, for how long alarms make nothing leave.
    pub fn look(&mut self, now: Instant) -> Option<Duration> {
        let (_, heeded) = self.awaited.take_if(|(until, _)| now >= *until)?;
        if !heeded {
            return None;
        }
        let time = match self.distrust {
            // Soon behind the last one.
            Some((time, until)) if now < until + time => (2 * time).min(LONGEST_GUARD),
            _ => DISTRUSTED,
        };
        self.distrust = Some((time, now + time));
        Some(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_micros(200);
    /// The first one of `cuInit`.
    const STEP: u64 = 64 << 10;

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
    fn memory_in_use_that_grows_is_a_sign_and_that_falls_or_was_not_known_is_none() {
        let mut used = InUse::default();
        let noted: Vec<_> = [Some(7), Some(7), Some(9), Some(3), Some(4), None, Some(90), Some(91)]
            .into_iter()
            .map(|bytes| used.note(bytes))
            .collect();
        assert_eq!(noted, [None, None, Some(2), None, Some(1), None, None, Some(1)]);
    }

    #[test]
    fn who_comes_behind_an_alarm_has_the_next_one_heeded_as_well() {
        let now = Instant::now();
        let mut alarm = Alarm::default();
        for _ in 0..3 {
            assert_eq!((alarm.rings(STEP, now), alarm.rings(STEP, now + GUARD / 2)), (Heed::Leave, Heed::Same));
            assert_eq!(alarm.look(now + GUARD * 9 / 10), None);
            assert!(alarm.awaits());
            alarm.came();
            assert!(!alarm.awaits());
        }
    }

    /// However often programs begin that go elsewhere.
    #[test]
    fn false_alarms_have_memory_leave_more_and_more_seldom() {
        let begun = Instant::now();
        let (mut alarm, mut left) = (Alarm::default(), Vec::new());
        for second in 0..7200 {
            let now = begun + Duration::from_secs(second);
            alarm.look(now);
            if alarm.rings(STEP, now) == Heed::Leave {
                left.push(second);
            }
        }
        let pauses: Vec<u64> = left.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(left[0], 0);
        let grow = pauses.windows(2).all(|pair| pair[0] <= pair[1] + GUARD.as_secs());
        assert!(grow && pauses[0] >= DISTRUSTED.as_secs(), "{pauses:?}");
        assert!(pauses.last() >= Some(&LONGEST_GUARD.as_secs()) && left.len() < 30, "{left:?}");
        // One that is seen to come behind an alarm that was not heeded ends that.
        let later = begun + Duration::from_secs(7200);
        alarm.look(later + GUARD);
        assert!(matches!(alarm.rings(STEP, later), Heed::Look(_)));
        alarm.came();
        assert_eq!(alarm.rings(STEP, later), Heed::Leave);
    }

    #[test]
    fn a_false_alarm_long_ago_is_no_matter() {
        let now = Instant::now();
        let mut alarm = Alarm::default();
        let mut false_one = |at: Instant| {
            assert_eq!(alarm.rings(STEP, at), Heed::Leave);
            alarm.look(at + GUARD)
        };
        assert_eq!(false_one(now), Some(DISTRUSTED));
        assert_eq!(false_one(now + GUARD + DISTRUSTED), Some(2 * DISTRUSTED));
        assert_eq!(false_one(now + 9 * DISTRUSTED), Some(DISTRUSTED));
    }

    #[test]
    fn what_grows_by_more_than_a_program_takes_that_goes_elsewhere_is_heeded_though_the_last_alarm_was_false() {
        let begun = Instant::now();
        let mut alarm = Alarm::default();
        assert_eq!(alarm.rings(STEP, begun), Heed::Leave);
        assert!(alarm.look(begun + GUARD).is_some());
        let now = begun + GUARD + GUARD / 2;
        // All that `cuInit` takes, step by step.
        assert!(matches!(alarm.rings(STEP, now), Heed::Look(_)));
        for step in [1 << 20, 2 << 20, 192 << 10] {
            assert_eq!(alarm.rings(step, now), Heed::Same);
        }
        assert!(alarm.is_distrusted());
        // And then a context.
        let later = now + GUARD / 2;
        assert_eq!((alarm.rings(2 << 20, later), alarm.rings(4 << 20, later)), (Heed::Leave, Heed::Same));
        assert!(!alarm.is_distrusted());
        // Who does not come then was a false alarm as well, of which one step is worth as little as before.
        assert_eq!(alarm.look(now + GUARD), None);
        assert_eq!(alarm.look(later + GUARD), Some(2 * DISTRUSTED));
        let next = later + 2 * GUARD;
        assert!(matches!(alarm.rings(STEP, next), Heed::Look(_)));
        assert_eq!(alarm.look(next + GUARD), None);
        // All at once is a context, too.
        assert_eq!(alarm.rings(6 << 20, next + GUARD), Heed::Leave);
    }

    #[test]
    fn the_list_of_a_gpu_where_nobody_was_is_asked_for_behind_a_change_and_now_and_then() {
        let now = Instant::now();
        let mut listed = Listed::default();
        assert!(listed.is_due(now));
        listed.note(true, now);
        assert!(!listed.is_due(now + LISTED * 9 / 10) && listed.is_due(now + LISTED));
        listed.change();
        assert!(listed.is_due(now));
        listed.note(true, now);
        assert!(!listed.is_due(now));
        // Where somebody is, the memory in use tells nothing.
        listed.note(false, now);
        assert!(listed.is_due(now));
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
