//! GPUs that nobody works on: a rank that keeps to its own GPU (`GPUPOOL_DEVICES=auto`) is lent them where that one is full, before its memory goes to the host.
//!
//! Whether there are any is decided when memory is needed, and looked at again by the agent for as long as one is lent. Nobody works on a GPU where NVML lists
//! no process with a context; and it is no rank's of this job, which may have to start yet. As soon as somebody works there, nothing new goes there
//! and what is there leaves, as for a program that cannot ask ([`super::strangers`]). So a rank that was counted wrongly is given way to, and no more.
//!
//! Where memory of a program lies that has no context there, NVML lists nothing, so borrowers do not keep each other away. In a container NVML tells numbers of
//! another namespace, which does not matter here: only that there are none.

use super::{ask, give, neighbours, strangers};
use crate::backing::plan::Plan;
use crate::backing::topology::Gpu;
use crate::backing::{open, terms};
use crate::nvml::{self, Nvml};
use crate::serve::memory::idle::Part;
use crate::watch::context;
use crate::{bell, process};
use gpupool_cuda::Device;
use gpupool_interpose::cancel;
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use gpupool_pool::Place;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The least time between two looks. A context takes 110 ms to make.
const PERIOD: Duration = Duration::from_millis(50);
/// How long a GPU stays lent of which nothing is taken: the next one that needs memory looks anew.
const UNUSED: Duration = Duration::from_secs(2);

/// When it was looked for more last, and by the agent whether all is as it was.
static WIDENED: Mutex<Option<Instant>> = Mutex::new(None);
static LOOKED: Mutex<Option<Instant>> = Mutex::new(None);

/// For how long more of what leaves a GPU is looked for: a thread that had chosen the GPU before may have made memory there after.
const LATE: Duration = Duration::from_secs(1);
/// GPUs that lend no more, to whom, and until when that is.
static LEFT: Mutex<Vec<(u32, Option<u32>, Instant)>> = Mutex::new(Vec::new());

/// Has GPUs lend that nobody works on, since this one lacks so many bytes; where these are full, ranks that matter less are asked for what they have there.
pub fn widen(home: u32, bytes: u64) {
    let _sheltered = cancel::shelter();
    // Others are found beside the page.
    bell::allocated();
    let _ = try_to_widen(home, bytes);
}

fn try_to_widen(home: u32, bytes: u64) -> Option<()> {
    // Who has no page is called back by nobody.
    super::page()?;
    let driver = process::driver()?;
    let plan = open::plan(driver).filter(|plan| plan.members.len() > 1)?;
    if is_time(&WIDENED) {
        let nvml = nvml::get()?;
        let others = Others::read(plan, &nvml);
        let idle = members(plan)
            .filter(|gpu| plan.topology.reach(home, gpu.ordinal) && others.at_work(&nvml, gpu) == Some(Work::Nobody));
        let idle: Vec<u32> = idle.map(|gpu| gpu.ordinal).filter(|gpu| *gpu != home).collect();
        for gpu in terms::lend_while_idle(&idle, true) {
            has_room_again(gpu);
            // It looks 20 times a second from now on.
            bell::wake();
            tracing::info!(
                target: "gpupool::memory", about = "idle_lent", device = gpu,
                "nobody works on GPU {gpu}, so it lends to this rank until somebody does"
            );
        }
    }
    let lent: Vec<u32> =
        terms::lent_while_idle().into_iter().map(|(gpu, _)| gpu).filter(|gpu| plan.lends(*gpu)).collect();
    let room = |gpu: &u32| {
        let place = Place::Gpu(*gpu);
        let by_limit = plan.limit(place).saturating_sub(plan.accounts.taken(place));
        plan.free_at(driver, place).unwrap_or(0).min(by_limit)
    };
    let mut lacks = bytes.saturating_sub(lent.iter().map(room).sum());
    for gpu in lent {
        if lacks == 0 {
            break;
        }
        let freed = ask::ask_as_borrower(gpu, lacks);
        if freed > 0 {
            has_room_again(gpu);
        }
        lacks = lacks.saturating_sub(freed);
    }
    Some(())
}

/// Looks, if it is time to, whether somebody works on what is lent, and has all leave there; how long nothing need be done. `None`: until more is lent.
pub fn look() -> Option<Duration> {
    let lent = terms::lent_while_idle();
    let gpus: Vec<u32> = lent.iter().map(|(gpu, _)| *gpu).collect();
    if !gpus.is_empty() && !terms::keeps_to_its_own() {
        // The user has said which GPUs lend, or the other ranks have left.
        terms::lend_while_idle(&gpus, false);
        LEFT.lock().clear();
        return None;
    }
    if gpus.is_empty() && LEFT.lock().is_empty() {
        return None;
    }
    if !is_time(&LOOKED) {
        return Some(PERIOD);
    }
    let is_unused = |gpu: u32, time: Duration| time > UNUSED && give::on_gpu(gpu) == 0;
    let unused: Vec<u32> = lent.into_iter().filter(|(gpu, time)| is_unused(*gpu, *time)).map(|(gpu, _)| gpu).collect();
    terms::lend_while_idle(&unused, false);
    let busy = busy_of(&gpus);
    // None of them before nothing new goes to any.
    terms::lend_while_idle(&busy.iter().map(|(gpu, _)| *gpu).collect::<Vec<_>>(), false);
    for (gpu, _) in &busy {
        tracing::info!(
            target: "gpupool::memory", about = "idle_lent", device = gpu,
            "somebody works on GPU {gpu} now, so it lends to this rank no more, and what is there leaves"
        );
    }
    let mut left = std::mem::take(&mut *LEFT.lock());
    left.extend(busy.into_iter().map(|(gpu, pid)| (gpu, pid, Instant::now() + LATE)));
    left.retain(|(gpu, _, until)| Instant::now() < *until && !terms::is_lent_while_idle(*gpu));
    // What cannot leave is not tried again: each try may hold the program up.
    left.retain(|(gpu, pid, _)| !strangers::borrows(*gpu) || strangers::leave(*gpu, u64::MAX, *pid) > 0);
    LEFT.lock().extend(left);
    Some(PERIOD)
}

/// Those of these GPUs that somebody works on, and who where that is told.
fn busy_of(gpus: &[u32]) -> Vec<(u32, Option<u32>)> {
    // NVML opens files, which a child of a fork would have as well.
    let (Some(_part), Some(nvml), Some(plan)) = (Part::begin(), nvml::get(), open::plan_made()) else {
        return Vec::new();
    };
    let others = Others::read(plan, &nvml);
    let busy = |gpu: &Gpu| match others.at_work(&nvml, gpu)? {
        Work::Somebody(pid) => Some((gpu.ordinal, pid)),
        Work::Nobody => None,
    };
    members(plan).filter(|gpu| gpus.contains(&gpu.ordinal)).filter_map(busy).collect()
}

fn is_time(last: &Mutex<Option<Instant>>) -> bool {
    let mut last = last.lock();
    let is_time = last.is_none_or(|last| last.elapsed() >= PERIOD);
    if is_time {
        *last = Some(Instant::now());
    }
    is_time
}

fn members(plan: &Plan) -> impl Iterator<Item = &Gpu> {
    plan.topology.gpus.iter().filter(|gpu| plan.members.contains_key(&gpu.ordinal))
}

fn has_room_again(gpu: u32) {
    if let Some(opened) = open::opened() {
        opened.pool.has_room_again(Place::Gpu(gpu));
    }
}

/// What a GPU is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Nobody,
    /// Who, where that is told.
    Somebody(Option<u32>),
}

/// What is known of others than NVML's list.
struct Others {
    /// GPUs of ranks by the launcher's count, and of programs under gpupool by their pages.
    theirs: BTreeSet<Uuid>,
}

impl Others {
    fn read(plan: &Plan, nvml: &Nvml) -> Self {
        let ranks = process::settings().local_ranks.map_or(0, |(_, ranks)| ranks);
        let mut theirs: BTreeSet<Uuid> =
            plan.topology.gpus.iter().filter(|gpu| gpu.ordinal < ranks).map(|gpu| gpu.uuid).collect();
        // Each rank may see the GPUs in another order, its own one first, or others than this one does: of as many ranks the machine's first GPUs are
        // somebody's as well.
        theirs.extend((0..ranks).map_while(|index| nvml.uuid_of(index)));
        let folder = super::page().and_then(|page| Folder::around(page).ok());
        for told in folder.iter().flat_map(neighbours::snapshots) {
            let works = told.contexts.rows.iter().filter_map(|context| told.levels.gpu(context.device));
            theirs.extend(works.map(|gpu| gpu.uuid));
        }
        Self { theirs }
    }

    /// Whether somebody works on this GPU. `None`: nobody knows.
    fn at_work(&self, nvml: &Nvml, gpu: &Gpu) -> Option<Work> {
        if context::is_on(Device::of(gpu.ordinal)) || self.theirs.contains(&gpu.uuid) {
            return Some(Work::Somebody(None));
        }
        let who = nvml.numbers(&gpu.uuid)?.into_iter().find(|pid| !strangers::is_helper(*pid));
        Some(who.map_or(Work::Nobody, |pid| Work::Somebody(Some(pid))))
    }
}
