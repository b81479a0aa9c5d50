//! How the library waits for work: for one context, or for everything on a GPU.
//!
//! - A free waits for the context that owns the memory, with its green contexts ([`quiesce_owner`]). The driver's own free waits
//!   for no other context of that GPU and no other GPU, with peer access or without (measured, for device and pinned memory).
//!   Neither does this one: a program may have a kernel elsewhere that waits for the very thread that frees.
//! - An allocation that takes memory which was freed without a wait, and a trim, wait for all contexts of a GPU ([`wait`]),
//!   because the pool notes such frees by GPU and not by context. An allocation waits for the GPU that it is made for, a trim
//!   for the GPU of the current context.
//!
//! `cuCtxSynchronize` ends a capture in the context that it waits for, in every mode and from every thread, if that has begun
//! when the driver is called. So it waits only in a process that has never captured (`watch/capture.rs` says what the first capture
//! does). Later an event is recorded behind all work of the context (`cuCtxRecordEvent`), which breaks captures, too, but waits
//! for nothing, so that a capture can wait until it is recorded; then the event is waited for on a thread that is relaxed, which
//! breaks none whether it is under way or begins meanwhile (measured in every mode). That takes as long as the other: 1.41 µs
//! against 1.38 with the GPU idle, 6.5 µs against 6.6 behind a kernel. While any stream of the process is being captured, and with
//! drivers that record no contexts, the wait is the free of a little pinned memory, also on a relaxed thread: that waits for the
//! context as well and breaks no capture (measured), but as with the program's own free the driver holds up a capture that begins
//! elsewhere until it is over. Which contexts a capture is in is not asked, because streams of others join one by waiting for its
//! events, which nobody sees.
//!
//! What was waited for, and submitted nothing since, is not waited for again, nor asked (`watch/submitted`).
//!
//! Architecture Invariant: nothing here waits for a GPU that the caller did not name, and no wait ends a capture that was
//! under way when it began.

use crate::watch::{
    capture,
    context::{self, Context, Gpus, unseen},
    submitted,
};

use crate::process;
use gpupool_cuda::{self as cuda, CuResult, Driver};
use gpupool_interpose::cancel;
use gpupool_pool::{Epoch, Waited};
use std::sync::atomic::{AtomicU64, Ordering};

/// How often an event is looked at before the work in front of it is taken to be running: an idle GPU takes a moment to
/// pass one.
const LOOKS: usize = 200;
/// Bytes of pinned memory whose free is a wait.
const SCRAP: u64 = 4096;
/// GPUs beyond these are always taken to be busy.
const GPUS: usize = 64;
/// For each GPU, how many kernels had been launched there when it was last waited for.
static WAITED_FOR: [AtomicU64; GPUS] = [const { AtomicU64::new(0) }; GPUS];
/// For each GPU, the last wait for everything there.
static WAITS: [Waited; GPUS] = [const { Waited::new() }; GPUS];

/// Waits for all work in the context with this id, which is on these GPUs; that includes what was submitted through its green
/// contexts. Says whether that was all work on its GPU. NOT_READY where it cannot wait now, as for [`wait`].
///
/// An error of the context is the program's to hear if it works in it, as from the driver's own free. One that is gone was
/// waited for when it ended.
#[inline]
pub fn quiesce_owner(driver: &Driver, id: u64, gpus: Gpus) -> Result<bool, CuResult> {
    match covered(id) {
        Some(is_alone) => Ok(is_alone),
        None => wait_for_owner(driver, id, gpus),
    }
}

/// Whether nothing was submitted since this context was waited for, and what was said of that wait; `None` where there is something to wait for.
#[inline]
fn covered(id: u64) -> Option<bool> {
    context::by_id(id).and_then(|context| submitted::covered_by(&context.waited))
}

/// Whether nothing was submitted since this context was waited for.
#[inline]
pub fn is_at_rest(id: u64) -> bool {
    covered(id).is_some()
}

fn wait_for_owner(driver: &Driver, id: u64, gpus: Gpus) -> Result<bool, CuResult> {
    if !process::is_preloaded() {
        return unseen::synchronize(driver, gpus, || drain(driver)).map(|()| true);
    }
    let epoch = submitted::before_wait();
    // An error here is that of a driver that is gone, because the process exits.
    let current = driver.ask_current_context()?;
    let Some((owner, is_alone)) = context::owner(id) else { return Ok(false) };
    // Of a context that was only seen to appear nobody knows the handle, but nothing was made in it either.
    let Some(handle) = owner.live_handle() else { return Ok(false) };
    // Of a GPU with several contexts, one wait says nothing.
    let launched = is_alone.then(|| launches_of(&owner));
    let is_quiet = launched.is_some_and(|(gpu, count)| waited_for(gpu) == Some(count));
    // Where there is something to wait for, the driver may do so in a call at which threads are cancelled.
    let _sheltered = (!is_quiet).then(cancel::shelter);
    // In a green context the error is that of its primary one, which is the owner.
    let is_heard = || context::current(driver).is_some_and(|current| current == owner);
    let is_current = Some(handle) == current;
    match if is_current { Some(drain(driver)) } else { drain_in(driver, handle, is_heard) } {
        Some(CuResult::CONTEXT_IS_DESTROYED) | None => return Ok(false),
        Some(answer) => answer.ok()?,
    }
    note_wait(owner, epoch, is_alone);
    note_waits(launched.as_slice());
    Ok(is_alone)
}

/// Waits for all work in every context on these GPUs, primary or created; what was submitted through a green context is
/// work of its GPU's primary one. NOT_READY where a stream is being captured and the driver has no pinned memory to wait with.
///
/// An error of the current context, if it is on one of them, is the program's to hear, as from the driver's own free.
/// Another context in error has no work left that could touch memory, and one that is gone neither; any other error of a wait
/// there says that it was not waited for.
///
/// A wait for all GPUs is always made: it is not for memory that the program has done with, and so not ordered behind the
/// calls that submitted work on it.
pub fn wait(driver: &Driver, gpus: Gpus) -> Result<(), CuResult> {
    if are_waited_for(gpus) {
        return Ok(());
    }
    if !process::is_preloaded() {
        return unseen::synchronize(driver, gpus, || drain(driver));
    }
    let epoch = submitted::before_wait();
    // An error here is that of a driver that is gone, because the process exits.
    let current = driver.ask_current_context()?;
    let mut answer = CuResult::SUCCESS;
    let mut contexts = context::all();
    contexts.retain(|context| gpus.contain(context.device));
    let launched: Vec<(usize, u64)> = launches(&contexts);
    // Where there is something to wait for, the driver may do so in a call at which threads are cancelled.
    let _sheltered = launched.iter().any(|&(gpu, count)| waited_for(gpu) != Some(count)).then(cancel::shelter);
    let mut is_whole = true;
    let is_open = |context: &&Context| matches!(gpus, Gpus::All) || submitted::covered_by(&context.waited).is_none();
    for context in contexts.iter().filter(is_open) {
        let Some(handle) = context.live_handle() else { continue };
        let is_current = Some(handle) == current;
        let waited = if is_current { Some(drain(driver)) } else { drain_in(driver, handle, || false) };
        match waited {
            Some(CuResult::NOT_READY) => return Err(CuResult::NOT_READY),
            Some(result) if is_current => answer = result,
            Some(CuResult::CONTEXT_IS_DESTROYED) => {}
            Some(result) => result.ok()?,
            None => {}
        }
        is_whole &= waited.is_none_or(CuResult::is_ok);
    }
    match answer {
        CuResult::CONTEXT_IS_DESTROYED => return Ok(()),
        answer => answer.ok()?,
    }
    note_waits(&launched);
    if is_whole {
        note_rest(gpus, epoch);
    }
    Ok(())
}

/// Everything on these GPUs is over that was submitted before this epoch, and no context had an error.
fn note_rest(gpus: Gpus, epoch: Option<Epoch>) {
    if let (Some(epoch), Gpus::Of(gpus)) = (epoch, gpus) {
        gpus.iter().filter_map(|gpu| WAITS.get(*gpu as usize)).for_each(|wait| wait.note(epoch, true));
    }
}

/// A wait for this context that began in this epoch is over, without an error. `is_alone`: no other is on its GPU.
fn note_wait(context: Context, epoch: Option<Epoch>, is_alone: bool) {
    let Some(epoch) = epoch else { return };
    context.waited.note(epoch, is_alone);
    if is_alone && let Some(wait) = WAITS.get(context.device.ordinal() as usize) {
        wait.note(epoch, true);
    }
}

/// The program waits for a context by itself: `wait` is its call, and says with its answer which context that was for.
pub fn waited_by_program(wait: impl FnOnce() -> (CuResult, Option<Context>)) -> CuResult {
    let epoch = submitted::before_wait();
    let (answer, context) = wait();
    if answer.is_ok()
        && let Some(context) = context.filter(|context| submitted::covered_by(&context.waited).is_none())
    {
        let is_alone = context::owner(context.id).is_some_and(|(_, is_alone)| is_alone);
        note_wait(context, epoch, is_alone);
    }
    answer
}

/// Whether nothing was submitted since everything on these GPUs was waited for.
fn are_waited_for(gpus: Gpus) -> bool {
    let is_waited_for = |gpu: &u32| WAITS.get(*gpu as usize).is_some_and(|wait| submitted::covered_by(wait).is_some());
    matches!(gpus, Gpus::Of(gpus) if gpus.iter().all(is_waited_for))
}

/// Waits for all work of the current context and its green ones. NOT_READY where nothing was waited for.
fn drain(driver: &Driver) -> CuResult {
    match capture::unless_ever(|| driver.synchronize()) {
        // A capture began there unseen. The driver has waited for nothing.
        None | Some(CuResult::STREAM_CAPTURE_UNSUPPORTED) => {}
        Some(answer) => return answer,
    }
    let behind = driver.current_context().filter(|_| !capture::under_way()).and_then(|context| {
        // SAFETY: the context is current.
        unsafe { driver.behind_all_work(context, |record| capture::unless_under_way(record)) }
    });
    if let Some(behind) = behind {
        let _relaxed = driver.relax();
        return behind.wait();
    }
    // Pinned memory and not device memory: of a GPU that is full none could be had, just when freed memory is wanted back, and
    // to pin 4 KiB takes the driver 0.05 ms where device memory takes 0.3.
    let _relaxed = driver.relax();
    match driver.pin(SCRAP, 0) {
        // SAFETY: the driver gave this address just now, and nobody else knows it.
        Ok(scrap) => unsafe { driver.unpin(scrap) },
        // Neither is an error of the context.
        Err(CuResult::OUT_OF_MEMORY | CuResult::OPERATING_SYSTEM) => CuResult::NOT_READY,
        Err(error) => error,
    }
}

/// The same for a context that is not current. `None`: it is gone, or in error, which is not for this thread to hear (`is_heard`).
fn drain_in(driver: &Driver, handle: cuda::Context, is_heard: impl FnOnce() -> bool) -> Option<CuResult> {
    let _lives = context::lease(handle)?;
    context::wait_kept(driver, handle, || drain(driver), is_heard)
}

/// Notes how many kernels had been launched on each of these GPUs before a wait that is over.
fn note_waits(launched: &[(usize, u64)]) {
    for &(gpu, count) in launched {
        if let Some(waited_for) = WAITED_FOR.get(gpu) {
            waited_for.store(count, Ordering::Relaxed);
        }
    }
}

/// Whether all that was submitted to these GPUs is over, asked without waiting. `false` while a capture forbids the question,
/// and with drivers before CUDA 12.5, which have none that covers streams of every kind.
pub fn has_finished(driver: &Driver, gpus: Gpus) -> bool {
    if are_waited_for(gpus) {
        return true;
    }
    let finished = |handle| is_idle(driver, handle);
    if !process::is_preloaded() {
        return unseen::all(driver, gpus, finished);
    }
    let epoch = submitted::before_wait();
    let contexts = context::all();
    let open = contexts.iter().filter(|it| gpus.contain(it.device) && submitted::covered_by(&it.waited).is_none());
    let are_over = open.filter_map(|it| it.live_handle()).all(finished);
    // An event that has passed says what a wait says, so that neither is asked of the driver again until something is submitted.
    if are_over {
        note_rest(gpus, epoch);
    }
    are_over
}

/// Whether all work of the context with this id is over, asked without waiting. One that is gone was waited for when it ended.
pub fn owner_has_finished(driver: &Driver, id: u64) -> bool {
    let epoch = submitted::before_wait();
    let open = |(owner, _): &(Context, bool)| submitted::covered_by(&owner.waited).is_none();
    let Some((owner, is_alone)) = context::owner(id).filter(open) else { return true };
    let Some(handle) = owner.live_handle() else { return true };
    let is_over = is_idle(driver, handle);
    if is_over {
        note_wait(owner, epoch, is_alone);
    }
    is_over
}

/// Whether all work of a context is over, asked without waiting.
///
/// A capture may begin on another thread after it was looked for here. A global one would be broken by `cuEventQuery`, so this
/// thread is relaxed meanwhile. One in this very context is broken by `cuCtxRecordEvent` in every mode (both measured), so it
/// begins before that or after it.
fn is_idle(driver: &Driver, handle: cuda::Context) -> bool {
    if !driver.records_contexts() || capture::under_way() {
        return false;
    }
    context::within(driver, handle, || passes(driver, handle)).unwrap_or(false)
}

/// Whether an event behind all work of the current context comes to pass.
fn passes(driver: &Driver, context: cuda::Context) -> bool {
    // SAFETY: the caller has made the context current.
    let behind = unsafe { driver.behind_all_work(context, |record| capture::unless_under_way(record)) };
    let _relaxed = driver.relax();
    behind.is_some_and(|behind| (0..LOOKS).any(|_| behind.has_passed()))
}

/// How many kernels had been launched on a GPU when it was last waited for; `None` where nobody keeps that.
fn waited_for(gpu: usize) -> Option<u64> {
    WAITED_FOR.get(gpu).map(|count| count.load(Ordering::Relaxed))
}

/// Whether a kernel may be running on the GPU of the context with this id: one was launched since that was last waited for,
/// or launches go unseen.
pub fn may_be_busy(id: u64) -> bool {
    let Some((owner, _)) = context::owner(id).filter(|_| process::is_preloaded()) else { return true };
    if are_waited_for(Gpus::Of(&[owner.device.ordinal()])) {
        return false;
    }
    let mut contexts = context::all();
    contexts.retain(|context| context.device == owner.device);
    launches(&contexts).into_iter().any(|(gpu, count)| waited_for(gpu) != Some(count))
}

/// Kernels launched on the GPUs of these contexts, by GPU: in them, and in others that are gone.
fn launches(contexts: &[Context]) -> Vec<(usize, u64)> {
    let mut sums: Vec<(usize, u64)> = Vec::new();
    for context in contexts {
        let (gpu, count) = launches_of(context);
        match sums.iter_mut().find(|(known, _)| *known == gpu) {
            Some((_, sum)) => *sum += context.usage.launches.load(Ordering::Relaxed),
            None => sums.push((gpu, count)),
        }
    }
    sums
}

/// Kernels launched in this context and in those of its GPU that are gone.
fn launches_of(context: &Context) -> (usize, u64) {
    let gpu = context.device.ordinal() as usize;
    (gpu, context.usage.launches.load(Ordering::Relaxed) + context::gone_launches(context.device))
}
