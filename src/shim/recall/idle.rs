//! GPUs that nobody works on: a rank that keeps to its own GPU (`GPUPOOL_DEVICES=auto`) is lent them where that one is full, before its memory goes to the host.
//!
//! Whether there are any is decided when memory is needed, and looked at again by the agent for as long as one is lent. Who works on one, [`at_work`]
//! says. As soon as somebody works there, nothing new goes there
//! and what is there leaves, as for a program that cannot ask ([`super::leaving`]). So a rank that was counted wrongly is given way to, and no more.
//!
//! Where memory of a program lies that has no context there, NVML lists nothing, so borrowers do not keep each other away. In a container NVML tells numbers of
//! another namespace, which does not matter here: only that there are none.

use super::at_work::{self, Work};
use super::coming::{self, Glance};
use super::{ask, give, leaving};
use crate::backing::{open, terms};
use crate::serve::memory::Asking;
use crate::{bell, log, nvml, process};
use gpupool_interpose::cancel;
use gpupool_lending::Whom;
use gpupool_pool::Place;
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// The least time between two looks for more that may lend.
const PERIOD: Duration = Duration::from_millis(50);
/// How long a thread waits for another one that looks.
const TO_LOOK: Duration = Duration::from_millis(500);
/// How long a GPU stays lent of which nothing is taken: the next one that needs memory looks anew.
const UNUSED: Duration = Duration::from_secs(2);

/// When it was looked for more last, and when the agent looks next whether all is as it was.
static WIDENED: Mutex<Option<Instant>> = Mutex::new(None);
static NEXT: Mutex<Option<Instant>> = Mutex::new(None);

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
    if let Some(why) = nvml::why_missing() {
        log::warn_once(
            "no_loans",
            format_args!(
                "this process, one of several ranks, needs more than its own GPU has, and no other GPU lends to it: only NVML tells that nobody works on one, and {why} (in a \
                 container, NVIDIA_DRIVER_CAPABILITIES=compute,utility brings it). What has no room lies on the host; GPUPOOL_DEVICES with a list of GPUs has these lend"
            ),
        );
        return None;
    }
    // Who comes meanwhile waits for what is found: its block would lie on the host otherwise. Not for good, since NVML may have to be loaded and another thread may hold the
    // loader's lock.
    let newly = WIDENED.try_lock_for(TO_LOOK).and_then(|mut widened| {
        if widened.is_some_and(|widened| widened.elapsed() < PERIOD) {
            return None;
        }
        // Where somebody is about to come nothing more is lent, and the list would hold up what leaves for that.
        let may_lend = |gpu: u32| gpu != home && plan.topology.reach(home, gpu) && !coming::is_awaited(gpu);
        let reached = at_work::on(plan, |gpu| may_lend(gpu.ordinal));
        let idle = reached.into_iter().filter(|(_, work)| *work == Some(Work::Nobody));
        let newly = terms::lend_while_idle(&idle.map(|(gpu, _)| gpu).collect::<Vec<_>>(), true);
        newly.iter().for_each(|gpu| has_room_again(*gpu));
        *widened = Some(Instant::now());
        Some(newly)
    });
    for gpu in newly.into_iter().flatten() {
        // It looks 20 times a second from now on.
        bell::wake();
        tracing::info!(
            target: "gpupool::memory", about = "idle_lent", device = gpu,
            "nobody works on GPU {gpu}, so it lends to this rank until somebody does"
        );
    }
    let lent: Vec<u32> =
        terms::lent_while_idle().into_iter().map(|(gpu, _)| gpu).filter(|gpu| plan.lends(*gpu)).collect();
    let by_limit = |gpu: u32| {
        let place = Place::Gpu(gpu);
        plan.limit(place).saturating_sub(plan.accounts.taken(place))
    };
    let room = |gpu: u32| plan.free_at(driver, Place::Gpu(gpu)).unwrap_or(0).min(by_limit(gpu));
    for gpu in &lent {
        let mut asking = Asking::default();
        loop {
            let lacks = bytes.saturating_sub(lent.iter().map(|gpu| room(*gpu)).sum());
            let wanted = lacks.min(by_limit(*gpu).saturating_sub(room(*gpu)));
            if wanted == 0 || !asking.ask_by(ask::ask_as_borrower, *gpu, wanted) {
                break;
            }
        }
    }
    Some(())
}

/// This process is one of several ranks, as it has just found: what it has on other GPUs stays there as on those that it is lent, for as long as nobody works
/// there. Where nobody tells that, or nobody could call it back, it leaves.
pub fn begin() {
    let members = open::plan_made().into_iter().flat_map(|plan| plan.members.keys().copied());
    let borrowed: Vec<u32> = members.filter(|gpu| give::borrows(*gpu)).collect();
    if nvml::get().is_none() || process::settings().recall_wait.is_none() {
        borrowed.iter().for_each(|gpu| leaving::begin(*gpu, Whom::Workers(None), u64::MAX));
        return;
    }
    // It is looked at once who works there.
    terms::lend_while_idle(&borrowed, true);
    *NEXT.lock() = None;
}

/// Looks, if it is time to, whether somebody works on what is lent, so that all is to leave there; how long nothing need be done. `None`: until more is lent.
pub fn look() -> Option<Duration> {
    let lent = terms::lent_while_idle();
    let gpus: Vec<u32> = lent.iter().map(|(gpu, _)| *gpu).collect();
    if gpus.is_empty() {
        return None;
    }
    if !terms::keeps_to_its_own() {
        // The user has said which GPUs lend, or the other ranks have left.
        terms::lend_while_idle(&gpus, false);
        gpus.iter().for_each(|gpu| coming::stop(*gpu));
        return None;
    }
    let begun = Instant::now();
    let left = NEXT.lock().map_or(Duration::ZERO, |next| next.saturating_duration_since(begun));
    if !left.is_zero() {
        return Some(left);
    }
    // What left for somebody who is about to come is not unused before that one is there, or not.
    let is_unused = |gpu: u32, time: Duration| time > UNUSED && give::on_gpu(gpu) == 0 && !coming::is_awaited(gpu);
    let unused: Vec<u32> = lent.into_iter().filter(|(gpu, time)| is_unused(*gpu, *time)).map(|(gpu, _)| gpu).collect();
    terms::lend_while_idle(&unused, false);
    // What somebody has asked for there meanwhile is not used by nobody any more.
    for gpu in unused {
        coming::stop(gpu);
        tracing::info!(
            target: "gpupool::memory", about = "idle_lent", device = gpu,
            "this rank has nothing on GPU {gpu}, so it lends to it no more until it needs memory again"
        );
        leaving::begin(gpu, Whom::Workers(None), u64::MAX);
    }
    let plan = open::plan_made().map_or(&[][..], |plan| &plan.topology.gpus[..]);
    let known = |gpu: u32| plan.iter().find(|known| known.ordinal == gpu && terms::is_lent_while_idle(gpu));
    let told: Vec<(u32, Glance)> =
        gpus.iter().map(|gpu| (*gpu, known(*gpu).map_or(Glance::AskList, coming::glance))).collect();
    // As of what is borrowed otherwise (`strangers.rs`). Who of ours has a context there by its page is asked for with the list, since that context shows in the memory in use as well.
    let leaves = told.iter().any(|(_, glance)| *glance == Glance::Leaves);
    let asked = told.into_iter().filter(|(_, glance)| !leaves && *glance == Glance::AskList).map(|(gpu, _)| gpu);
    let asked: Vec<u32> = asked.collect();
    let works = if asked.is_empty() { None } else { at_work::on_these(&asked) };
    for (gpu, work) in works.iter().flatten() {
        if let Some(known) = known(*gpu) {
            coming::listed(known, *work == Some(Work::Nobody));
        }
    }
    let busy = |(gpu, work): (u32, Option<Work>)| match work {
        Some(Work::Nobody) => None,
        Some(Work::Somebody(pid)) => Some((gpu, pid)),
        // Who comes there from now on would not be seen.
        None => Some((gpu, None)),
    };
    let busy: Vec<_> = works.into_iter().flatten().filter_map(busy).collect();
    // None of them before nothing new goes to any.
    terms::lend_while_idle(&busy.iter().map(|(gpu, _)| *gpu).collect::<Vec<_>>(), false);
    for (gpu, pid) in busy {
        tracing::info!(
            target: "gpupool::memory", about = "idle_lent", device = gpu,
            "somebody works on GPU {gpu} now, so it lends to this rank no more, and what is there leaves"
        );
        leaving::begin(gpu, Whom::Workers(pid), u64::MAX);
    }
    let pause = coming::pause(begun.elapsed());
    *NEXT.lock() = Some(Instant::now() + pause);
    Some(pause)
}

fn has_room_again(gpu: u32) {
    if let Some(opened) = open::opened() {
        opened.pool.has_room_again(Place::Gpu(gpu));
    }
}
