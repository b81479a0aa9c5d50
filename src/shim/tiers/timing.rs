//! How long some launches take, by an event in front of each and one behind it.
//!
//! Events are recorded where they change nothing that the program could notice: in the context and on the stream of the launch, never
//! during a capture, and around plain launches only. Two of them would part launches that are meant to overlap (programmatic
//! dependent launches). On the default stream every launch waits for all others by itself, so an event there orders nothing more.

use super::Home;
use crate::watch::capture;
use crate::watch::context::{self, Observer};
use gpupool_cuda::{CuResult, Milestone, Stream, Timer};
use std::collections::VecDeque;

/// Launches that are timed at once; beyond these none is begun.
const MOST: usize = 16;

/// A launch with an event in front of it.
pub struct Running {
    home: &'static Home,
    /// The number of the context that the events belong to.
    owner: u64,
    timer: Timer,
    stream: Stream,
    launch: u64,
}

/// The events there are, each with the number of its context.
#[derive(Default)]
pub struct Timers {
    /// Around the launch with this number; its time is not known yet.
    pending: Vec<(u64, Timer, u64)>,
    idle: Vec<(u64, Timer)>,
    /// Events among the work, oldest first, each with the number of its context.
    marks: VecDeque<(u64, Milestone)>,
}

/// Events among the work at once; beyond these the oldest is used again.
const MARKS: usize = 64;

/// Before a launch with this number on a stream of the current context.
pub(super) fn begin(home: &'static Home, launch: u64, stream: Stream) -> Option<Running> {
    let owner = context::current(home.driver)?.id;
    if capture::under_way() {
        return None;
    }
    let kept = {
        let mut timers = home.timers.lock();
        if timers.pending.len() >= MOST {
            return None;
        }
        let at = timers.idle.iter().position(|(of, _)| *of == owner);
        at.map(|at| timers.idle.swap_remove(at).1)
    };
    let _relaxed = home.driver.relax();
    let timer = match kept {
        Some(timer) => timer,
        None => home.driver.timer().ok()?,
    };
    // SAFETY: the events are of the current context, in which the program is about to launch on this stream.
    if !unsafe { timer.begin(home.driver, stream) }.is_ok() {
        home.timers.lock().idle.push((owner, timer));
        return None;
    }
    home.tiers.lock().timing(launch, home);
    Some(Running { home, owner, timer, stream, launch })
}

/// Puts an event on a stream of the current context, among the program's work ([`super::progress`]).
pub(super) fn mark(home: &Home, stream: Stream) {
    let Some(owner) = context::current(home.driver).map(|context| context.id).filter(|_| !capture::under_way()) else {
        return;
    };
    let kept = {
        let mut timers = home.timers.lock();
        let at = timers.marks.iter().position(|(of, _)| *of == owner).filter(|_| timers.marks.len() >= MARKS);
        at.and_then(|at| timers.marks.remove(at))
    };
    let _relaxed = home.driver.relax();
    let Some(mark) = kept.map(|(_, mark)| mark).or_else(|| home.driver.milestone().ok()) else { return };
    // SAFETY: the event is of the current context, in which the program is about to launch on this stream.
    let _ = unsafe { mark.put(home.driver, stream) };
    home.timers.lock().marks.push_back((owner, mark));
}

/// How many of the events among the current context's work have passed.
pub(super) fn passed(home: &Home) -> u64 {
    let Some(owner) = context::current(home.driver).map(|context| context.id) else { return 0 };
    let marks: Vec<Milestone> =
        home.timers.lock().marks.iter().filter(|(of, _)| *of == owner).map(|(_, mark)| *mark).collect();
    let _relaxed = home.driver.relax();
    // SAFETY: the events are of the current context.
    marks.into_iter().filter(|mark| unsafe { mark.ask(home.driver) }.is_ok()).count() as u64
}

/// Behind that launch.
pub(super) fn end(running: Running) {
    let Running { home, owner, timer, stream, launch } = running;
    let _relaxed = home.driver.relax();
    // SAFETY: the launch has just been made on this stream, in the context of the events.
    let recorded = unsafe { timer.end(home.driver, stream) };
    let mut timers = home.timers.lock();
    if recorded.is_ok() {
        timers.pending.push((owner, timer, launch));
    } else {
        timers.idle.push((owner, timer));
    }
}

/// Tells of the launches in the current context whose time is known by now.
pub(super) fn gather(home: &Home) {
    if home.timers.lock().pending.is_empty() {
        return;
    }
    let Some(owner) = context::current(home.driver).map(|context| context.id) else { return };
    let mut own = Vec::new();
    home.timers.lock().pending.retain_mut(|pending| {
        let is_own = pending.0 == owner;
        if is_own {
            own.push((pending.1, pending.2));
        }
        !is_own
    });
    let _relaxed = home.driver.relax();
    for (timer, launch) in own {
        // SAFETY: both were recorded in the current context.
        match unsafe { timer.nanoseconds(home.driver) } {
            Ok(nanoseconds) => {
                home.tiers.lock().timed(launch, nanoseconds as u64);
                home.progress.took(nanoseconds as u64);
                home.timers.lock().idle.push((owner, timer));
            }
            Err(CuResult::NOT_READY) => home.timers.lock().pending.push((owner, timer, launch)),
            Err(_) => home.timers.lock().idle.push((owner, timer)),
        }
    }
}

/// Forgets the events of contexts that are gone, which ended them.
pub struct OfContexts;

impl Observer for OfContexts {
    fn ended(&self, id: u64) -> usize {
        for home in super::HOMES.iter().filter_map(once_cell::race::OnceBox::get) {
            let mut timers = home.timers.lock();
            timers.pending.retain(|(owner, ..)| *owner != id);
            timers.idle.retain(|(owner, _)| *owner != id);
            timers.marks.retain(|(owner, _)| *owner != id);
        }
        0
    }
}
