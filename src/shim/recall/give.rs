//! Giving way: what of this process is on a GPU goes elsewhere because somebody else needs the room, and comes back later.

use super::at_work;
use crate::backing::{open, terms};
use crate::serve::memory::idle;
use crate::serve::{handles, memory};
use crate::suspend::vacate::{self, Vacated, Which};
use crate::watch::context;
use crate::{live, log, nvml, process};
use gpupool_config::format_size;
use gpupool_cuda::Device;
use gpupool_events::RecallGive;
use gpupool_lending::{self as lending, Guard, Terms};
use gpupool_machine::Uuid;
use gpupool_pool::{Claim, Place};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often it is looked whether there is room again.
const PERIOD: Duration = Duration::from_secs(2);

/// By GPU, when something came back last, and how long what is given stays away since.
static GUARDS: Mutex<BTreeMap<u32, (Instant, Guard)>> = Mutex::new(BTreeMap::new());

/// By GPU, when it is looked next whether something can come back, and the pause before that.
static TRIES: Mutex<BTreeMap<u32, (Instant, Duration)>> = Mutex::new(BTreeMap::new());

/// Gives so much of this GPU to a program of that priority, until `deadline` and as long as it `is_wanted`.
///
/// # Errors
/// That one does not matter more; in words.
pub fn give_way(
    gpu: &Uuid,
    bytes: u64,
    priority: u32,
    pid: u32,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vacated, String> {
    let own = live::priority();
    let ordinal = ordinal_of(gpu);
    let Some(terms) = lending::terms(own, priority, ordinal.map_or(0, live::guarantee_of)) else {
        return Err(format!("its priority is {own}, and {priority} is lower"));
    };
    let Some(ordinal) = ordinal else { return Ok(Vacated::default()) };
    Ok(give(ordinal, Gives { bytes, terms, pid: Some(pid) }, deadline, is_wanted, progress))
}

/// What is given.
pub(super) struct Gives {
    /// So much at most.
    pub bytes: u64,
    pub terms: Terms,
    /// Who gets it.
    pub pid: Option<u32>,
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
    let Gives { bytes, terms: Terms { lent, floor }, pid } = gives;
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
    terms::keep_below(gpu, bounds(before - most), until);
    vacate::give_back(gpu, Which::Given { bytes: most, lent, cap: most });
    let left = most.saturating_sub(before.saturating_sub(taken()));
    let mut done = Vacated::default();
    if left > 0 {
        // Whoever asked may not know yet that there is any.
        progress(0, left);
        done = vacate::vacate(
            gpu,
            Which::Given { bytes: left, lent, cap: taken().saturating_sub(floor) },
            deadline,
            is_wanted,
            progress,
        );
    }
    let after = taken();
    let freed = before.saturating_sub(after);
    terms::keep_below(gpu, bounds(after), until);
    done.took = begun.elapsed();
    done.moved = freed;
    if freed > 0 {
        log::emit(|| {
            let who = pid.map_or_else(|| "another program".to_owned(), |pid| format!("process {pid}"));
            let asked =
                if bytes == u64::MAX { String::new() } else { format!(", which asked for {}", format_size(bytes)) };
            let text = format!("{} of GPU {gpu} were given to {who}{asked}", format_size(freed));
            let microseconds = done.took.as_micros() as u64;
            (RecallGive { device: gpu, bytes, freed, pid, microseconds }, text)
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

/// Has what was given come back where its time is over and there is room; how long nothing need be done.
pub fn look() -> Option<Duration> {
    let mut again = terms::forget_given();
    for gpu in vacate::given() {
        // Nothing comes back to a GPU that is not lent any more, until it is again.
        if terms::is_kept_below(gpu) {
            continue;
        }
        if !terms::may_hold(gpu) {
            // Those that lend while nobody works there do when that is so again. While the program is suspended nothing comes back.
            let may = terms::keeps_to_its_own() && !terms::is_drained(gpu) && process::settings().recall_wait.is_some();
            let lends = if may && vacate::may_come_back() {
                at_work::lends_again(gpu, "again, and what had to leave it comes back")
            } else {
                None
            };
            if lends != Some(true) {
                again = if lends.is_some() { Some(again.map_or(PERIOD, |again| again.min(PERIOD))) } else { again };
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
            if freed > 0 && room > 0 && room_on(gpu, 0) < vacate::given_of(gpu) {
                vacate::give_back(gpu, Which::Given { bytes: freed, lent: false, cap: freed });
            }
            let came = if room > 0 { vacate::take_back(gpu, room) } else { 0 };
            if came > 0 {
                let mut guards = GUARDS.lock();
                let (came, guard) = guards.entry(gpu).or_insert((now, Guard::default()));
                *came = now;
                guard.came_back();
            }
            // Each try may hold the program up.
            let pause = if room > 0 && came == 0 { (2 * pause).min(lending::LONGEST_GUARD) } else { PERIOD };
            TRIES.lock().insert(gpu, (Instant::now() + pause, pause));
            pause
        };
        again = Some(again.map_or(wait, |again| again.min(wait)));
    }
    again
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
    let reserve = plan.members.get(&gpu).copied().unwrap_or(0);
    let by_limit = plan.limit(Place::Gpu(gpu)).saturating_sub(plan.accounts.taken(Place::Gpu(gpu)));
    lending::room(free + freed, reserve, by_limit.saturating_add(freed))
}

fn ordinal_of(gpu: &Uuid) -> Option<u32> {
    let gpus = &open::plan_made()?.topology.gpus;
    gpus.iter().find(|known| known.uuid == *gpu).map(|known| known.ordinal)
}
