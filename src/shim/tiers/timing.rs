//! How long some launches take, by an event in front of each and one behind it.
//!
//! A pair lengthens the work by 5.8 µs (H200), so that pairs are begun only as far as they take a hundredth of the time: some hundred at
//! once, and then about one in half a millisecond. Where the GPU had nothing to do before a launch, a pair counts as well what the
//! launch itself took on the processor, and the first one of a function loads its module then, which takes milliseconds: such times
//! are not told.
//!
//! Events are recorded inside the gate ([`gate::enter_if_open`]): one that another thread's move meets would be work that passed it, and no memory would move in this
//! process any more. They are recorded where they change nothing that the program could notice: in the context and on the stream of the launch, never
//! during a capture, and not around launches that record events themselves. Two of them part launches that are meant to overlap
//! (programmatic dependent launches), for those few that are timed: libraries launch so much that way that nothing would be known of
//! it otherwise. A cooperative launch waits for no other work once it runs, and for an event as for any other before. On the default stream every launch waits for all others by itself, so an event there orders nothing more.

use super::{Home, now};
use crate::gate;
use crate::watch::capture;
use crate::watch::context::{self, Observer};
use gpupool_cuda::{CuResult, Driver, Milestone, Stream, Timer};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Launches that are timed at once; beyond these none is begun. Programs run some hundred launches ahead of the GPU.
const MOST: usize = 512;
/// Of those that are asked, how many may not be known yet before the rest is left for the next time.
const NOT_YET: usize = 4;
/// What a pair of events costs the GPU, nanoseconds (`tests/programs/probe_events.c`).
const PAIR: i64 = 6_000;
/// One of so many nanoseconds may go to that.
const ONE_OF: u64 = 100;
/// What may be spent at once.
const SAVED: i64 = 2_000_000;
/// What a launch may take on the processor in any case, nanoseconds, and of its time on the GPU one of so many beyond.
const BRIEF: u64 = 20_000;
const PART: u64 = 4;

/// How long a launch's time is waited for at most, nanoseconds: what it is waited for costs about as much for each launch like it that is not known.
const HEARING: u64 = 10_000_000;
/// So many such waits in a row in vain are the last ones.
const IN_VAIN: u32 = 3;

/// A launch with an event in front of it. One pointer on the way of those that have none: there are hundreds of them for each that has one.
pub type Running = Box<Begun>;

pub struct Begun {
    timing: &'static Timing,
    driver: &'static Driver,
    /// The number of the context that the events belong to.
    owner: u64,
    timer: Timer,
    stream: Stream,
    pub(super) launch: u64,
    /// When the first event was recorded, nanoseconds.
    began: u64,
    /// Its time should be told before anything else is launched.
    pub(super) is_awaited: bool,
}

/// The events there are, for one reader of times.
#[derive(Default)]
pub struct Timing {
    timers: Mutex<Timers>,
    /// How often one was waited for in vain.
    in_vain: AtomicU32,
    /// The launch before which no pair can be paid ([`Timers::rests`]).
    again: AtomicU64,
}

impl Timing {
    /// Whether there may be a pair around this launch, as far as a look at a number tells: of short launches every third may be worth a time, and one of some
    /// hundred gets one.
    #[inline]
    pub fn may_begin(&self, launch: u64) -> bool {
        launch >= self.again.load(Ordering::Relaxed)
    }
}

/// Around the launch with this number; its time is not known yet.
struct Pending {
    /// The number of the context.
    owner: u64,
    timer: Timer,
    launch: u64,
    /// What passed between the two on the processor, nanoseconds.
    between: u64,
}

#[derive(Default)]
struct Timers {
    /// Oldest first.
    pending: VecDeque<Pending>,
    /// Each with the number of its context, as what follows.
    idle: Vec<(u64, Timer)>,
    /// Events among the work that were not seen to pass yet, oldest first.
    marks: VecDeque<(u64, Milestone)>,
    idle_marks: Vec<(u64, Milestone)>,
    /// How many were seen to pass.
    passed: u64,
    /// What pairs may take, nanoseconds, as of this time.
    purse: i64,
    filled: u64,
    /// The launch that asked last, and when.
    asked: (u64, u64),
}

/// Launches that pass until it is looked again whether a pair can be paid, at most: what comes then may take longer than what came.
const MOST_RESTS: u64 = 64;

impl Timers {
    /// A launch asks for a pair. How many launches need not, where there is nothing to pay it from: half of those that pass until there is, if they go on to come as
    /// since the last one that asked.
    fn rests(&mut self, launch: u64, now: u64) -> Option<u64> {
        let (last, then) = std::mem::replace(&mut self.asked, (launch, now));
        if self.pays(now) {
            return None;
        }
        let apart = now.saturating_sub(then) / launch.saturating_sub(last).max(1);
        let lacks = (PAIR - self.purse).max(0) as u64 * ONE_OF;
        Some((lacks / 2 / apart.max(1)).min(MOST_RESTS))
    }

    /// Whether there may be another pair now, which is paid for then.
    fn pays(&mut self, now: u64) -> bool {
        let more = now.saturating_sub(std::mem::replace(&mut self.filled, now)) / ONE_OF;
        self.purse = self.purse.saturating_add(more.min(SAVED as u64) as i64).min(SAVED);
        let pays = self.purse >= PAIR;
        self.purse -= if pays { PAIR } else { 0 };
        pays
    }
}

/// Events among the work at once; beyond these the oldest is used again. They take nothing of the GPU's time.
const MARKS: usize = 1024;

/// Before a launch with this number on a stream of the current context.
pub(super) fn begin(timing: &'static Timing, driver: &'static Driver, launch: u64, stream: Stream) -> Option<Running> {
    let owner = context::current(driver)?.id;
    if capture::under_way() {
        return None;
    }
    let began = now();
    let kept = {
        let mut timers = timing.timers.lock();
        if timers.pending.len() >= MOST {
            return None;
        }
        if let Some(rests) = timers.rests(launch, began) {
            timing.again.store(launch + 1 + rests, Ordering::Relaxed);
            return None;
        }
        let at = timers.idle.iter().position(|(of, _)| *of == owner);
        at.map(|at| timers.idle.swap_remove(at).1)
    };
    let _relaxed = driver.relax();
    let timer = match kept {
        Some(timer) => timer,
        None => driver.timer().ok()?,
    };
    // The launch waits at the gate where that is closed, and is not worth a time then.
    let begun = gate::enter_if_open().map(|_inside| {
        // SAFETY: the events are of the current context, in which the program is about to launch on this stream.
        unsafe { timer.begin(driver, stream) }
    });
    if !begun.is_some_and(CuResult::is_ok) {
        timing.timers.lock().idle.push((owner, timer));
        return None;
    }
    Some(Box::new(Begun { timing, driver, owner, timer, stream, launch, began, is_awaited: false }))
}

/// Puts an event on a stream of the current context, among the program's work ([`super::progress`]).
pub(super) fn mark(home: &Home, stream: Stream) {
    let Some(owner) = context::current(home.driver).map(|context| context.id).filter(|_| !capture::under_way()) else {
        return;
    };
    let kept = {
        let mut timers = home.timing.timers.lock();
        let at = timers.idle_marks.iter().position(|(of, _)| *of == owner);
        match at {
            Some(at) => Some(timers.idle_marks.swap_remove(at)),
            None if timers.marks.len() >= MARKS => timers.marks.pop_front().filter(|(of, _)| *of == owner),
            None => None,
        }
    };
    let _relaxed = home.driver.relax();
    let Some(mark) = kept.map(|(_, mark)| mark).or_else(|| home.driver.milestone().ok()) else { return };
    let put = gate::enter_if_open().map(|_inside| {
        // SAFETY: the event is of the current context, in which the program is about to launch on this stream.
        unsafe { mark.put(home.driver, stream) }
    });
    let mut timers = home.timing.timers.lock();
    match put {
        Some(_) => timers.marks.push_back((owner, mark)),
        None => timers.idle_marks.push((owner, mark)),
    }
}

/// How many of the events among the current context's work have passed so far.
pub(super) fn passed(home: &Home) -> u64 {
    let Some(owner) = context::current(home.driver).map(|context| context.id) else { return 0 };
    let ended = ENDED.load(Ordering::Acquire);
    let mut marks = std::mem::take(&mut home.timing.timers.lock().marks);
    let _relaxed = home.driver.relax();
    let (mut done, mut not_yet) = (Vec::new(), 0);
    marks.retain(|(of, mark)| {
        // SAFETY: the event is of the current context.
        let has_passed = *of == owner && not_yet < NOT_YET && unsafe { mark.ask(home.driver) }.is_ok();
        not_yet += usize::from(*of == owner && !has_passed);
        if has_passed {
            done.push((*of, *mark));
        }
        !has_passed
    });
    let mut timers = home.timing.timers.lock();
    timers.passed += done.len() as u64;
    if ENDED.load(Ordering::Acquire) == ended {
        timers.idle_marks.append(&mut done);
        // What was put meanwhile is newer.
        marks.append(&mut timers.marks);
        timers.marks = marks;
    }
    timers.passed
}

/// Behind that launch.
pub(super) fn end(running: Begun) {
    let Begun { timing, driver, owner, timer, stream, launch, began, .. } = running;
    let between = now().saturating_sub(began);
    let _relaxed = driver.relax();
    // SAFETY: the launch has just been made on this stream, in the context of the events.
    let recorded = unsafe { timer.end(driver, stream) };
    let mut timers = timing.timers.lock();
    if recorded.is_ok() {
        timers.pending.push_back(Pending { owner, timer, launch, between });
    } else {
        timers.idle.push((owner, timer));
    }
}

/// Tells the tiers of the launches in the current context whose time is known by now.
pub(super) fn gather(home: &Home) {
    gather_of(&home.timing, home.driver, |launch, time| {
        if let Some(nanoseconds) = time {
            let timed = home.tiers.lock().timed(launch, nanoseconds as u64);
            if let Some(timed) = timed {
                tracing::trace!(
                    target: "gpupool::memory", about = "times",
                    "launch {launch} of function {:#x}, kind {}: {nanoseconds:.0} ns with {:.0} ns of far pass ({:.0?}), gain {:.2}",
                    timed.function, timed.kind, timed.far_ns, timed.by_operand, timed.gain
                );
            }
            home.progress.took(nanoseconds as u64);
        }
    });
}

/// Waits until the time of this launch was told, but no longer than [`HEARING`]: what is in front of it may be much, and a kernel may wait for this very thread. After
/// [`IN_VAIN`] such waits in a row without an answer nobody waits any more.
pub(super) fn hear(home: &Home, launch: u64) {
    if home.timing.in_vain.load(Ordering::Relaxed) >= IN_VAIN {
        return;
    }
    let is_open = || home.timing.timers.lock().pending.iter().any(|one| one.launch == launch);
    let until = now() + HEARING;
    loop {
        gather(home);
        if !is_open() {
            home.timing.in_vain.store(0, Ordering::Relaxed);
            return;
        }
        if now() > until {
            home.timing.in_vain.fetch_add(1, Ordering::Relaxed);
            return;
        }
        std::thread::yield_now();
    }
}

/// Tells of those that are timed for one reader, in nanoseconds, or none where nobody will ever know.
pub(super) fn gather_of(timing: &Timing, driver: &Driver, mut tell: impl FnMut(u64, Option<f64>)) {
    if timing.timers.lock().pending.is_empty() {
        return;
    }
    let Some(owner) = context::current(driver).map(|context| context.id) else { return };
    let ended = ENDED.load(Ordering::Acquire);
    let mut pending = std::mem::take(&mut timing.timers.lock().pending);
    let _relaxed = driver.relax();
    let (mut known, mut not_yet) = (Vec::new(), 0);
    pending.retain(|one| {
        if one.owner != owner || not_yet >= NOT_YET {
            return true;
        }
        // SAFETY: both were recorded in the current context.
        let answer = unsafe { one.timer.nanoseconds(driver) };
        let is_known = answer != Err(CuResult::NOT_READY);
        if is_known {
            known.push((one.timer, one.launch, answer.ok().filter(|time| is_its_own(*time, one.between))));
        }
        not_yet += usize::from(!is_known);
        !is_known
    });
    if ENDED.load(Ordering::Acquire) == ended {
        let mut timers = timing.timers.lock();
        timers.idle.extend(known.iter().map(|(timer, ..)| (owner, *timer)));
        // What was begun meanwhile is newer.
        pending.append(&mut timers.pending);
        timers.pending = pending;
    }
    for (_, launch, time) in known {
        tell(launch, time);
    }
}

/// Whether a time on the GPU is the launch's own, where it took so long on the processor from the first event to the second.
fn is_its_own(nanoseconds: f64, between: u64) -> bool {
    between <= BRIEF.max((nanoseconds as u64) / PART)
}

/// Counts the contexts that ended. Who looks at events has them out of the lists meanwhile, and does not put them back where one of
/// those may have been among them: they are few, and end with their contexts.
static ENDED: AtomicU64 = AtomicU64::new(0);

/// Forgets the events of contexts that are gone, which ended them.
pub struct OfContexts;

impl Observer for OfContexts {
    fn ended(&self, id: u64) -> usize {
        let homes = super::HOMES.iter().filter_map(once_cell::race::OnceBox::get);
        for timing in homes.map(|home| &home.timing).chain(super::far::timings()) {
            let mut timers = timing.timers.lock();
            timers.pending.retain(|pending| pending.owner != id);
            timers.idle.retain(|(owner, _)| *owner != id);
            timers.marks.retain(|(owner, _)| *owner != id);
            timers.idle_marks.retain(|(owner, _)| *owner != id);
        }
        // Behind that: what was taken out before is not put back.
        ENDED.fetch_add(1, Ordering::AcqRel);
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::tests::{PATIENT, ends_in, start, try_close};

    /// One that the move of another thread met would be work that passed the gate, and the last move of the process.
    #[test]
    fn no_event_is_put_in_front_of_a_launch_that_waits_for_a_move() {
        let name = "no_event_is_put_in_front_of_a_launch_that_waits_for_a_move";
        ends_in("tiers::timing::tests", name, &[], 0, || {
            let (driver, _) = start();
            let timing: &'static Timing = Box::leak(Box::default());
            let closed = try_close(driver, &PATIENT).unwrap();
            assert!(begin(timing, driver, 1, Stream::DEFAULT).is_none());
            drop(closed);
            end(*begin(timing, driver, 2, Stream::DEFAULT).unwrap());
            assert_eq!(timing.timers.lock().pending.len(), 1);
        });
    }

    #[test]
    fn some_hundred_pairs_are_begun_at_once_and_then_a_hundredth_of_the_time_goes_to_them() {
        let mut timers = Timers { purse: 0, filled: 0, ..Timers::default() };
        let start = 1_000_000_000;
        let at_once = (0..10_000).take_while(|_| timers.pays(start)).count();
        assert_eq!(at_once, (SAVED / PAIR) as usize);
        let later = (1..=100_000).filter(|microseconds| timers.pays(start + microseconds * 1000)).count();
        assert!((160..=167).contains(&later), "{later} pairs in 100 ms");
    }

    #[test]
    fn who_cannot_pay_a_pair_asks_again_about_when_it_can() {
        let spent = || Timers { purse: 0, filled: 1_000_000_000, asked: (100, 1_000_000_000), ..Timers::default() };
        // A pair is earned in 600 µs.
        assert_eq!(spent().rests(101, 1_000_040_000), Some(7), "launches 40 µs apart: half of 14");
        assert_eq!(spent().rests(200, 1_000_100_000), Some(MOST_RESTS), "1 µs apart");
        assert_eq!(spent().rests(101, 1_000_500_000), Some(0), "a long one: the next may be paid");
        assert_eq!(spent().rests(101, 1_000_700_000), None, "it is paid");
        let timing = Timing::default();
        timing.again.store(8, Ordering::Relaxed);
        assert!(!timing.may_begin(7) && timing.may_begin(8));
    }

    #[test]
    fn a_time_in_which_the_processor_was_busy_with_the_launch_is_not_told() {
        assert!(is_its_own(5_000.0, 8_000), "any launch takes some microseconds");
        assert!(!is_its_own(3_000_000.0, 2_900_000), "a module was loaded");
        assert!(is_its_own(3_000_000.0, 700_000));
    }
}
