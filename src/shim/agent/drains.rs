//! GPUs that are drained (`gpupool drain`): the agent looks at the files that say so, has memory leave, and brings it back afterwards.
//!
//! The files are what holds. A request by a socket says that they have changed, and waits for what comes of it; a process that was stopped
//! then, or that nobody could ask, sees the files when its agent next looks.

use super::again::{Again, may_try, one_try, settles_still};
use super::page_path;
use crate::backing::{open, terms};
use crate::process;
use crate::suspend::vacate::{self, Rest, Vacated, Which};
use crate::suspend::{self, bring_home};
use crate::watch::context;
use gpupool_cuda::Device;
use gpupool_metrics::drains::Uuid;
use gpupool_pool::Place;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long a process tries by itself.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked whether freed memory on such a GPU can go.
const PERIOD: Duration = Duration::from_secs(1);

/// How long a process that only borrows from a GPU waits to be asked by the command that has ended its drain: that asks those first who work there, and what they
/// have for themselves goes before loans.
const BEHIND: Duration = Duration::from_secs(5);

/// GPUs that were seen to be drained, or to be so no more, and for which nothing was done yet.
static SEEN: Mutex<BTreeMap<u32, bool>> = Mutex::new(BTreeMap::new());

/// What was done by itself for files that a command has just written, which then asks what became of it.
struct ByItself {
    gpu: u32,
    is_drained: bool,
    bytes: u64,
    took: Duration,
    at: Instant,
}

static BY_ITSELF: Mutex<Vec<ByItself>> = Mutex::new(Vec::new());

/// When the files were looked at last without a word from anybody.
static LOOKED: Mutex<Option<Instant>> = Mutex::new(None);

/// GPUs that were left because rows of theirs are to be replaced.
static LEFT: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// What became of GPUs that were left because they are drained.
static AGAIN: Mutex<Again> = Mutex::new(Again::new());

/// Has memory leave a GPU that is drained.
fn leave(gpu: u32, deadline: Instant, is_wanted: &dyn Fn() -> bool, progress: &mut dyn FnMut(u64, u64)) -> Vacated {
    bring_home::note_before_drain(gpu);
    let there = vacate::loose_on(gpu, false);
    let done = vacate::drain(gpu, deadline, is_wanted, progress);
    AGAIN.lock().note(gpu, there, &done, Instant::now());
    done
}

/// Has that leave which is on drained GPUs, if it is time to: what could not leave before, and what has come since. How long nothing need be done.
///
/// A thread that had chosen a GPU before it was drained makes its memory there behind that, and a program that starts later may have some there that was on no
/// list yet.
fn leave_again() -> Option<Duration> {
    // From one with a grave error nothing is copied unasked.
    let gpus: Vec<u32> = terms::drained().into_iter().filter(|gpu| !terms::is_left_alone(*gpu)).collect();
    if gpus.is_empty() || !may_try() {
        return Some(PERIOD).filter(|_| !gpus.is_empty() && suspend::since() == 0);
    }
    let mut next = None;
    for gpu in gpus {
        let there = vacate::loose_on(gpu, false);
        let due = AGAIN.lock().due(gpu, there, Instant::now());
        if due == Some(Duration::ZERO) {
            let done = vacate::drain_again(gpu, Instant::now() + PATIENCE, &one_try());
            let mut again = AGAIN.lock();
            again.note(gpu, there, &done, Instant::now());
            next = next.into_iter().chain(again.due(gpu, there, Instant::now())).min();
            drop(again);
            if done.moved > 0 {
                note_by_itself(gpu, true, &done);
            }
        } else {
            next = next.into_iter().chain(due).min();
        }
    }
    next
}

fn note_by_itself(gpu: u32, is_drained: bool, done: &Vacated) {
    let mut all = BY_ITSELF.lock();
    all.retain(|known| known.gpu != gpu && known.at.elapsed() < PATIENCE);
    all.push(ByItself { gpu, is_drained, bytes: done.moved, took: done.took, at: Instant::now() });
}

/// Looks at the files.
fn see(behind: Duration) {
    let (drained, open) = terms::look_for_drains(page_path(), behind);
    let mut seen = SEEN.lock();
    seen.extend(drained.into_iter().map(|gpu| (gpu, true)));
    seen.extend(open.into_iter().map(|gpu| (gpu, false)));
    drop(seen);
    // By itself, each once.
    let mut left = LEFT.lock();
    for gpu in terms::to_be_left() {
        if left.insert(gpu) {
            SEEN.lock().insert(gpu, true);
        }
    }
}

/// Does what the files say anew; how long nothing need be done.
pub fn look() -> Option<Duration> {
    // The agent may wake more often than that for other reasons.
    let is_due = {
        let mut looked = LOOKED.lock();
        let is_due = looked.is_none_or(|looked: Instant| looked.elapsed() >= PERIOD);
        if is_due {
            *looked = Some(Instant::now());
        }
        is_due
    };
    if is_due {
        see(BEHIND);
    }
    // What of it has to be where is settled when it is resumed, and the driver answers nothing before that.
    if suspend::is_whole() {
        return (!is_due || terms::is_any_unsaid()).then_some(PERIOD);
    }
    let until = Instant::now() + PATIENCE;
    let seen = std::mem::take(&mut *SEEN.lock());
    for (gpu, is_drained) in seen {
        let done = if is_drained {
            let done = leave(gpu, until, &|| true, &mut |_, _| {});
            if settles_still(&done) {
                SEEN.lock().insert(gpu, true);
            }
            done
        } else {
            AGAIN.lock().forget(gpu);
            bring_home::come_back(gpu, true, until, &|| true, &mut |_, _| {})
        };
        note_by_itself(gpu, is_drained, &done);
    }
    let again = if is_due { leave_again() } else { None };
    // What the program frees there goes at once, and does not wait for `GPUPOOL_IDLE`.
    let mut any = false;
    for gpu in terms::drained() {
        if held_at(gpu) {
            vacate::give_back(gpu, Which::All);
            any |= held_at(gpu);
        }
    }
    // Whoever rang in between may have meant that.
    (any || !is_due || terms::is_any_unsaid()).then_some(PERIOD).into_iter().chain(again).min()
}

fn held_at(gpu: u32) -> bool {
    let usage = open::opened().map(|opened| opened.pool.usage());
    usage.is_some_and(|usage| usage.places.iter().any(|known| known.place == Place::Gpu(gpu) && known.held > 0))
}

/// Has memory leave this GPU, which the files say is drained.
///
/// # Errors
/// The files say nothing of that.
pub fn drain(
    gpu: &Uuid,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vacated, String> {
    if open::plan_made().is_none() {
        // Nothing of it can leave, and what it has there is told.
        let rest = |gpu| vacate::vacate(gpu, Which::All, deadline, is_wanted, progress);
        return Ok(works_on(gpu).map(rest).unwrap_or_default());
    }
    let faster = || format!("GPU-{} is drained no more: undrain was faster", gpupool_machine::dashed(gpu));
    let Some((ordinal, _)) = seen_as(gpu, true, faster)? else { return Ok(Vacated::default()) };
    // Nothing of it is there, not even a context.
    if suspend::is_whole() {
        SEEN.lock().insert(ordinal, true);
        return Ok(Vacated::default());
    }
    let mut done = leave(ordinal, deadline, is_wanted, progress);
    with_by_itself(&mut done, ordinal, true);
    // The files say it still, whoever waits for it or does not.
    if !is_wanted() || settles_still(&done) {
        SEEN.lock().insert(ordinal, true);
    }
    Ok(done)
}

/// Has memory come back to it.
///
/// # Errors
/// The files still say that it is drained.
pub fn undrain(
    gpu: &Uuid,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vacated, String> {
    let still = "the GPU is still drained for it: somebody else said so (root, or a gpupool drain just now), or a file of that name is left";
    let Some((ordinal, is_news)) = seen_as(gpu, false, || still.to_owned())? else { return Ok(Vacated::default()) };
    AGAIN.lock().forget(ordinal);
    if suspend::is_whole() {
        if is_news {
            SEEN.lock().insert(ordinal, false);
        }
        // How much that is depends on what else is there then.
        let rest = vec![Rest { bytes: 0, what: suspend::whole(), cause: "" }];
        return Ok(Vacated { rest, ..Vacated::default() });
    }
    let mut done = bring_home::come_back(ordinal, is_news, deadline, is_wanted, progress);
    with_by_itself(&mut done, ordinal, false);
    Ok(done)
}

/// Adds what moved for this command before it had asked, since the files said it already, and how long that took.
fn with_by_itself(done: &mut Vacated, gpu: u32, is_drained: bool) {
    let mut all = BY_ITSELF.lock();
    let is_of = |known: &&ByItself| {
        known.gpu == gpu && known.is_drained == is_drained && known.at.elapsed() < PATIENCE && known.bytes > 0
    };
    if let Some(before) = all.iter().find(is_of) {
        done.moved += before.bytes;
        done.took += before.took;
    }
    all.retain(|known| known.gpu != gpu);
}

/// The number of this GPU, about which the files are to say so; whoever asked does now what is to be done. `None`: it is not one of the pool's.
/// With it whether that was not known here.
fn seen_as(gpu: &Uuid, is_drained: bool, other: impl FnOnce() -> String) -> Result<Option<(u32, bool)>, String> {
    let Some(ordinal) = ordinal_of(gpu) else { return Ok(None) };
    see(Duration::ZERO);
    if terms::is_said_drained(gpu) != is_drained {
        return Err(other());
    }
    let is_news = SEEN.lock().remove(&ordinal).is_some();
    Ok(Some((ordinal, is_news)))
}

fn ordinal_of(gpu: &Uuid) -> Option<u32> {
    let gpus = &open::plan_made()?.topology.gpus;
    gpus.iter().find(|known| known.uuid == *gpu).map(|known| known.ordinal)
}

/// The same of a program that has asked the pool for nothing yet, if it has a context there.
fn works_on(gpu: &Uuid) -> Option<u32> {
    let driver = process::driver()?;
    let mut devices = context::all().into_iter().map(|context| context.device);
    devices.find(|device| driver.uuid_bytes(*device) == *gpu).map(Device::ordinal)
}
