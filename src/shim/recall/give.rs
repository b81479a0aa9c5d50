//! Giving way: what of this process is on a GPU goes elsewhere because somebody else needs the room, and comes back later.

use super::{at_work, neighbours};
use crate::backing::{open, terms};
use crate::serve::memory::idle;
use crate::serve::{handles, memory};
use crate::suspend::vacate::{self, Vacated, Which};
use crate::suspend::{self, bring_home, given};
use crate::watch::context;
use crate::{live, log, nvml, process};
use gpupool_config::format_size;
use gpupool_cuda::Device;
use gpupool_events::RecallGive;
use gpupool_lending::{self as lending, Guard, Terms};
use gpupool_machine::Uuid;
use gpupool_pool::{Claim, Place};
use gpupool_wire::control::GUARANTEED;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often it is looked whether there is room again.
const PERIOD: Duration = Duration::from_secs(2);

/// How long the program works between two steps of what comes back.
const BREATH: Duration = Duration::from_millis(500);

/// By GPU, when something came back last, and how long what is given stays away since.
static GUARDS: Mutex<BTreeMap<u32, (Instant, Guard)>> = Mutex::new(BTreeMap::new());

/// By GPU, when it is looked next whether something can come back, and the pause before that.
static TRIES: Mutex<BTreeMap<u32, (Instant, Duration)>> = Mutex::new(BTreeMap::new());

/// Gives so much of this GPU, or of what it has there for other GPUs (`loans`), to a program of that priority, until `deadline` and as long as it `is_wanted`; and what it has there for other GPUs still.
///
/// # Errors
/// That one does not matter more; in words.
pub fn give_way(
    gpu: &Uuid,
    (bytes, loans): (u64, bool),
    priority: u32,
    pid: u32,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Vacated, u64), String> {
    let own = live::priority();
    let ordinal = ordinal_of(gpu);
    let Some(terms) = lending::terms(own, priority, ordinal.map_or(0, live::guarantee_of)) else {
        return Err(format!("its priority is {own}, and {priority} is lower"));
    };
    let terms = if loans { Terms { lent: true, ..terms } } else { terms };
    let Some(ordinal) = ordinal else { return Ok(Default::default()) };
    // Whoever asked waits, and is not to wait in vain.
    let rest = Duration::MAX;
    let priority = Some(priority).filter(|priority| *priority != GUARANTEED);
    let gives = Gives { bytes, terms, pid: Some(pid), priority, why: "asked", rest };
    let kept = terms::kept_of(ordinal);
    let done = give(ordinal, gives, deadline, is_wanted, progress);
    if done.moved == 0 {
        terms::keep_as(ordinal, kept);
    }
    Ok((done, vacate::lent_on(ordinal)))
}

/// What is given.
pub(super) struct Gives {
    /// So much at most.
    pub bytes: u64,
    pub terms: Terms,
    /// Who gets it.
    pub pid: Option<u32>,
    /// The priority that it asked with, where that is why it gets it.
    pub priority: Option<u32>,
    /// Why, in a word for the log.
    pub why: &'static str,
    /// For how long the program's coming to rest is waited for, of the time that there is.
    pub rest: Duration,
}

/// Gives this; [`Vacated::moved`] is what is free now.
pub(super) fn give(
    gpu: u32,
    gives: Gives,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Vacated {
    let begun = Instant::now();
    let Gives { bytes, terms: Terms { lent, floor }, pid, priority, why, rest } = gives;
    let taken = || on_gpu(gpu);
    let before = taken();
    let most = bytes.min(before.saturating_sub(floor));
    if most == 0 {
        return Vacated::default();
    }
    // Nothing new goes there meanwhile; how much it is in the end is known afterwards.
    let until = begun + guard(gpu);
    // Whoever works there itself goes on to take what it needs, and only lends no more.
    // A limit counts what is charged, which is less than what is there.
    let uncharged = before.saturating_sub(memory::accounts().map_or(0, |all| all.taken(Place::Gpu(gpu))));
    let bounds = |bytes: u64| (!lent || !context::is_on(Device::of(gpu))).then_some(bytes.saturating_sub(uncharged));
    terms::keep_below(gpu, bounds(before - most), until, pid, priority);
    vacate::give_back(gpu, Which::Given { bytes: most, lent, cap: most, rest });
    let left = most.saturating_sub(before.saturating_sub(taken()));
    let mut done = Vacated::default();
    if left > 0 {
        // Whoever asked may not know yet that there is any.
        progress(0, left);
        done = vacate::vacate(
            gpu,
            Which::Given { bytes: left, lent, cap: taken().saturating_sub(floor), rest },
            deadline,
            is_wanted,
            progress,
        );
    }
    let after = taken();
    let freed = before.saturating_sub(after);
    terms::keep_below(gpu, bounds(after), until, pid, priority);
    done.took = begun.elapsed();
    done.moved = freed;
    if freed > 0 {
        log::emit(|| {
            let who = match (pid, why) {
                (Some(pid), _) => format!("process {pid}"),
                (None, "growth") => "whoever is about to come there".to_owned(),
                (None, _) => "another program".to_owned(),
            };
            let asked =
                if bytes == u64::MAX { String::new() } else { format!(", which asked for {}", format_size(bytes)) };
            let text = format!("{} of GPU {gpu} were given to {who}{asked}", format_size(freed));
            let microseconds = done.took.as_micros() as u64;
            // Who comes without a word wants all of it.
            let bytes = if bytes == u64::MAX { before } else { bytes };
            (RecallGive { device: gpu, bytes, freed, to_pid: pid, why: why.to_owned(), microseconds }, text)
        });
    }
    done
}

/// Bytes of this process on a GPU: what is charged there, and what the program made itself within no limit, which is not.
pub(super) fn on_gpu(gpu: u32) -> u64 {
    let place = Place::Gpu(gpu);
    let (taken, charged) = memory::accounts().map_or((0, 0), |all| (all.taken(place), all.of(Claim::Handles, place)));
    taken + handles::by_hand::bytes_at(place).saturating_sub(charged)
}

/// Whether this process has memory on a GPU that it does not work on.
pub(super) fn borrows(gpu: u32) -> bool {
    on_gpu(gpu) > 0 && !context::is_on(Device::of(gpu))
}

/// How long what is given now stays away.
fn guard(gpu: u32) -> Duration {
    GUARDS.lock().get_mut(&gpu).map_or(lending::GUARD, |(came, guard)| guard.asked(came.elapsed()))
}

/// Has what was given come back where its time is over and there is room; how long nothing need be done. `publish` has the page tell what is so now: who lacks memory of a GPU asks those
/// who have some by their pages.
pub fn look(publish: &mut dyn FnMut()) -> Option<Duration> {
    let mut again = terms::forget_given(&neighbours::priority_of);
    // What left because a GPU was drained comes back by itself as well, as soon as that lends.
    for gpu in bring_home::waits_for_lenders() {
        let lends =
            lends_again(gpu, "again, and what left while it was drained comes back", || bring_home::has_room(gpu));
        again = again.into_iter().chain(lends.map(|_| PERIOD)).min();
    }
    for gpu in given::given() {
        // Nothing comes back to a GPU that is not lent any more, until it is again.
        if terms::is_kept_below(gpu) {
            continue;
        }
        if !terms::may_hold(gpu) {
            let lends =
                lends_again(gpu, "again, and what had to leave it comes back", || room_on(gpu, freed_on(gpu)) > 0);
            if lends != Some(true) {
                again = again.into_iter().chain(lends.map(|_| PERIOD)).min();
                continue;
            }
        }
        let now = Instant::now();
        let (next, pause) = TRIES.lock().get(&gpu).copied().unwrap_or((now, PERIOD));
        let wait = if next > now {
            next - now
        } else {
            let freed = freed_on(gpu);
            let room = room_on(gpu, freed);
            // What the program has freed and keeps is nearer than what it uses.
            if freed > 0 && room > 0 && room_on(gpu, 0) < given::given_of(gpu) {
                vacate::give_back(gpu, Which::Given { bytes: freed, lent: false, cap: freed, rest: Duration::ZERO });
            }
            let came = if room > 0 { given::take_back(gpu, room, &|| !super::is_called()) } else { 0 };
            if came > 0 {
                let mut guards = GUARDS.lock();
                let (came, guard) = guards.entry(gpu).or_insert((now, Guard::default()));
                *came = now;
                guard.came_back();
                drop(guards);
                publish();
            }
            // Each try may hold the program up. What there was no time for comes once the program has worked for as long as it stood still.
            let pause = if room > 0 && came == 0 {
                (2 * pause).min(lending::LONGEST_GUARD)
            } else if came > 0 && given::given_of(gpu) > 0 {
                BREATH
            } else {
                PERIOD
            };
            TRIES.lock().insert(gpu, (Instant::now() + pause, pause));
            pause
        };
        again = Some(again.map_or(wait, |again| again.min(wait)));
    }
    again
}

/// Has a GPU lend to this rank again to which something is to come back, where nobody works there any more and there is room; whether it does. `None`: that need not be
/// looked at before something changes. Whatever keeps it from being asked now, a fork or an image, it is asked again: none of them wakes the agent.
fn lends_again(gpu: u32, then: &str, has_room: impl Fn() -> bool) -> Option<bool> {
    let may = terms::keeps_to_its_own() && !terms::is_drained(gpu) && process::settings().recall_wait.is_some();
    // While the program is suspended nothing comes back, and whoever resumes it wakes the agent.
    if !may || suspend::since() != 0 {
        return None;
    }
    if !has_room() || !given::may_come_back() {
        return Some(false);
    }
    let lends = at_work::lends_again(gpu, then);
    if lends.is_none() {
        tracing::debug!(
            target: "gpupool::memory", about = "idle_lent", device = gpu,
            "it cannot be asked at this moment who works on GPU {gpu}, since the program forks; that is asked again"
        );
    }
    Some(lends == Some(true))
}

/// Bytes of a GPU that the program has freed, and the pool keeps.
fn freed_on(gpu: u32) -> u64 {
    let freed = idle::freed();
    let there = freed.as_ref().and_then(|freed| freed.whole.iter().find(|(place, _)| *place == Place::Gpu(gpu)));
    there.map_or(0, |(_, bytes)| *bytes)
}

/// Bytes that nobody uses of a GPU and that this process may, beside the reserve and as much again, so that who needs some does not have to ask at once; with
/// what it has `freed` there.
fn room_on(gpu: u32, freed: u64) -> u64 {
    let Some(plan) = open::plan_made() else { return 0 };
    let Some(known) = plan.topology.gpus.get(gpu as usize) else { return 0 };
    let free = nvml::get().and_then(|nvml| nvml.free(&known.uuid)).unwrap_or(0);
    let reserve = plan.kept_free(gpu);
    let by_limit = plan.limit(Place::Gpu(gpu)).saturating_sub(plan.accounts.taken(Place::Gpu(gpu)));
    lending::room(free + freed, reserve, by_limit.saturating_add(freed))
}

fn ordinal_of(gpu: &Uuid) -> Option<u32> {
    let gpus = &open::plan_made()?.topology.gpus;
    gpus.iter().find(|known| known.uuid == *gpu).map(|known| known.ordinal)
}
