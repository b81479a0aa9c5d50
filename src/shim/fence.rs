//! Who a free waits for: everything that was submitted in one context, and nothing else.
//!
//! The driver's free waits for the context that owns the memory, with its green contexts, and for nobody else: no other
//! context of that GPU, and no other GPU, with peer access enabled or not (measured, for device and for pinned memory). So do
//! ours: a program may have a kernel elsewhere that waits for the very thread that frees. Who takes memory that was freed
//! without a wait waits for its whole GPU, because the pool keeps notes by GPU and not by context.
//!
//! `cuCtxSynchronize` ends a capture in the context that it waits for, in every mode and from every thread. While any stream of
//! the process is being captured, all waits are therefore made by a free of a little pinned memory instead, on a thread that is
//! relaxed meanwhile: that waits for the context as well and breaks no capture (both measured). Which contexts a capture is in
//! is not asked, because streams of others join one by waiting for its events, which nobody sees.
//!
//! Architecture Invariant: nothing here waits for a GPU that the caller did not name, and no wait ends a capture that was
//! under way when it began.

use crate::watch::{
    capture,
    context::{self, Context, Gpus, unseen},
};

use crate::process;
use gpupool_cuda::{self as cuda, CuResult, Driver};
use gpupool_interpose::cancel;
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

/// Waits for all work in the context with this id, which is on these GPUs; that includes what was submitted through its green
/// contexts. Says whether that was all work on its GPU. NOT_READY where it cannot wait now, as for [`wait`].
///
/// An error of the context is the program's to hear if it works in it, as from the driver's own free. One that is gone was
/// waited for when it ended.
pub fn quiesce_owner(driver: &Driver, id: u64, gpus: Gpus) -> Result<bool, CuResult> {
    if !process::is_preloaded() {
        return unseen::synchronize(driver, gpus, || drain(driver)).map(|()| true);
    }
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
    let drain = || drain(driver);
    let answer = if Some(handle) == current { Some(drain()) } else { context::within(driver, handle, drain) };
    // In a green context the error is that of its primary one, which is the owner.
    let is_heard = || context::current(driver).is_some_and(|current| current == owner);
    match answer {
        Some(CuResult::CONTEXT_IS_DESTROYED) | None => return Ok(false),
        Some(CuResult::NOT_READY) => return Err(CuResult::NOT_READY),
        Some(answer) if !answer.is_ok() && is_heard() => return Err(answer),
        Some(_) => {}
    }
    note_waits(launched.as_slice());
    Ok(is_alone)
}

/// Waits for all work in every context on these GPUs, primary or created; what was submitted through a green context is
/// work of its GPU's primary one. NOT_READY where a stream is being captured and the driver has no pinned memory to wait with.
///
/// An error of the current context, if it is on one of them, is the program's to hear, as from the driver's own free.
/// Another context in error has no work left that could touch memory, and one that is gone neither.
pub fn wait(driver: &Driver, gpus: Gpus) -> Result<(), CuResult> {
    if !process::is_preloaded() {
        return unseen::synchronize(driver, gpus, || drain(driver));
    }
    // An error here is that of a driver that is gone, because the process exits.
    let current = driver.ask_current_context()?;
    let mut answer = CuResult::SUCCESS;
    let drain = || drain(driver);
    let mut contexts = context::all();
    contexts.retain(|context| gpus.contain(context.device));
    let launched: Vec<(usize, u64)> = launches(&contexts);
    // Where there is something to wait for, the driver may do so in a call at which threads are cancelled.
    let _sheltered = launched.iter().any(|&(gpu, count)| waited_for(gpu) != Some(count)).then(cancel::shelter);
    for handle in contexts.iter().filter_map(|context| context.live_handle()) {
        let is_current = Some(handle) == current;
        let waited = if is_current { Some(drain()) } else { context::within(driver, handle, drain) };
        match waited {
            Some(CuResult::NOT_READY) => return Err(CuResult::NOT_READY),
            Some(result) if is_current => answer = result,
            _ => {}
        }
    }
    match answer {
        CuResult::CONTEXT_IS_DESTROYED => return Ok(()),
        answer => answer.ok()?,
    }
    note_waits(&launched);
    Ok(())
}

/// Waits for all work of the current context and its green ones. NOT_READY where nothing was waited for.
fn drain(driver: &Driver) -> CuResult {
    if !capture::under_way() {
        match driver.synchronize() {
            // A capture began there since it was looked for. The driver has waited for nothing.
            CuResult::STREAM_CAPTURE_UNSUPPORTED => {}
            answer => return answer,
        }
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

/// So many kernels had been launched on each of these GPUs before a wait that is over.
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
    let finished = |handle| is_idle(driver, handle);
    if !process::is_preloaded() {
        return unseen::all(driver, gpus, finished);
    }
    let contexts = context::all();
    contexts.iter().filter(|it| gpus.contain(it.device)).filter_map(|it| it.live_handle()).all(finished)
}

/// Whether all work of the context with this id is over, asked without waiting. One that is gone was waited for when it ended.
pub fn owner_has_finished(driver: &Driver, id: u64) -> bool {
    let owner = context::owner(id).and_then(|(owner, _)| owner.live_handle());
    owner.is_none_or(|handle| is_idle(driver, handle))
}

/// Whether all work of a context is over, asked without waiting.
///
/// A capture may begin on another thread after it was looked for here. A global one would be broken by `cuEventQuery`, so this
/// thread is relaxed meanwhile. One in this very context is broken by `cuCtxRecordEvent` in every mode (both measured): of
/// that, the moment between the look and the call is left, as there is no other question.
fn is_idle(driver: &Driver, handle: cuda::Context) -> bool {
    if !driver.records_contexts() || capture::under_way() {
        return false;
    }
    let _relaxed = driver.relax();
    context::within(driver, handle, || passes(driver, handle)).unwrap_or(false)
}

/// Whether an event behind all work of the current context comes to pass.
fn passes(driver: &Driver, context: cuda::Context) -> bool {
    // SAFETY: the caller has made the context current.
    let behind = unsafe { driver.behind_all_work(context) };
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
