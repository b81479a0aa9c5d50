//! The pool's [`Mover`] over the driver: second mappings, the wait before a move, and the copies.
//!
//! Copies are made by the copy engines in the context that the block was allocated in: it reaches both places, and whoever owns
//! the block pays. What goes from one other GPU to another is copied by a kernel there (`kernels.rs`): a lender has no context. What comes home and what goes out have a stream each, because the link to the host carries both at once (55
//! GB/s each way); over NVLink one engine does both, and nothing is lost. The streams are made once in each context, before the
//! program is stopped for a move, since making one may wait for a kernel that runs, and last as long as the context. They are never
//! the default one, by which other work orders itself.

use super::fault;
use super::kernels::{self, Own};
use super::vmm::Vmm;
use crate::watch::capture;
use crate::watch::context::{self, Gpus, Lease};
use crate::{fence, process};
use gpupool_cuda::{self as cuda, CuResult, Device, Driver, Physical, Stream};
use gpupool_pool::{Backend, Contents, Fault, Mover, Place, Transfer};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What [`spent`] answers.
static SPENT: [AtomicU64; 6] = [const { AtomicU64::new(0) }; 6];

/// What the driver was asked for: for the log, which tells how long the program was stopped for what.
#[derive(Clone, Copy)]
pub enum Work {
    /// Copies for moves.
    Copy,
    Unmap,
    Map,
    /// Access to what was mapped.
    Grant,
    /// Looks at what is in memory.
    Digest,
    /// Making memory, for whatever it is.
    Make,
}

/// Nanoseconds that each kind of [`Work`] took so far, in this process, in the order of their names there.
pub fn spent() -> [u64; 6] {
    SPENT.each_ref().map(|spent| spent.load(Ordering::Relaxed))
}

/// Bytes that a kernel copied from one lender to another.
static BY_KERNEL: AtomicU64 = AtomicU64::new(0);

/// Bytes so far that a kernel copied from one GPU to another, neither of which is the one that it ran on.
pub fn copied_by_kernel() -> u64 {
    BY_KERNEL.load(Ordering::Relaxed)
}

/// Counts the time that it takes.
pub fn timed<T>(work: Work, act: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = act();
    SPENT[work as usize].fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
    done
}

/// Brings what was stored of addresses of the pool to others: for the owner of the block, on this GPU. Where it cannot, whoever gave it knows
/// why.
pub type Load = Box<dyn FnMut(u64, u32, &[Transfer]) -> Result<(), CuResult> + Send>;

/// What [`Transfer::stored`] is read by. Stores stand above this, so it is handed over.
static LOAD: Mutex<Option<Load>> = Mutex::new(None);

/// Has stored memory read by this for the length of `act`. One thread at a time.
pub fn loading<T>(load: Load, act: impl FnOnce() -> T) -> T {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            let load = LOAD.lock().take();
            drop(load);
        }
    }
    *LOAD.lock() = Some(load);
    let _ends = Ends;
    act()
}

fn load(owner: u64, gpu: u32, transfers: &[Transfer]) -> Result<(), CuResult> {
    let stored: Vec<Transfer> = transfers.iter().filter(|transfer| transfer.stored).copied().collect();
    if stored.is_empty() {
        return Ok(());
    }
    let mut load = LOAD.lock();
    let load = load.as_mut().ok_or(CuResult::INVALID_VALUE)?;
    load(owner, gpu, &stored)
}

/// How often a call is made that undoes something or waits for it, where the driver refused: there is no second way.
const TRIES: u32 = 5;

/// The streams of a context.
#[derive(Clone, Copy)]
struct Lanes {
    inward: Stream,
    outward: Stream,
}

/// A context in which copies are made.
#[derive(Clone, Copy)]
struct Ready {
    /// Whose blocks, and the GPU.
    owner: u64,
    gpu: u32,
    /// The context that copies: the owner, or another one of that GPU where it is gone.
    context: u64,
    handle: cuda::Context,
    lanes: Lanes,
    /// The library's own kernels, where they were asked for.
    own: Option<Result<Own, NoKernels>>,
}

/// Why there is no [`Own`] in a context: it was refused, and is not asked for again.
#[derive(Clone, Copy)]
struct NoKernels;

/// Those that live, and some that ended. Looked at while the program is stopped: whoever holds this makes no call of the driver.
static READY: Mutex<Vec<Ready>> = Mutex::new(Vec::new());

impl Mover for Vmm {
    fn alias(&self, handle: Physical, bytes: u64, place: Place) -> Result<u64, Fault<CuResult>> {
        let driver = self.driver();
        let _relaxed = driver.relax();
        let address = driver.reserve(bytes).map_err(fault)?;
        let free = || {
            let _ = driver.free_reservation(address, bytes);
        };
        self.map(address, bytes, handle).inspect_err(|_| free())?;
        self.grant(address, bytes, place).inspect_err(|_| {
            // Nobody else knows of this mapping, which would keep the memory for good.
            if (0..TRIES).any(|_| driver.unmap(address, bytes).is_ok()) {
                free();
            }
        })?;
        Ok(address)
    }

    fn drain(&self) -> Result<(), Fault<CuResult>> {
        fence::wait(self.driver(), Gpus::All).map_err(fault)
    }

    fn prepare(&self, owner: u64, gpu: u32) -> Result<(), Fault<CuResult>> {
        let driver = self.driver();
        // Where hooks are not in effect, handles known from earlier calls may be nobody's by now.
        if !process::is_preloaded() {
            return Ok(());
        }
        if let Some(ready) = ready(owner, gpu)
            && let Some(_lives) = context::keep(ready.context)
        {
            prepare_own(driver, &ready);
            return Ok(());
        }
        let (context, handle, _lives) = context_for(owner, gpu).ok_or(Fault::Failed(CuResult::CONTEXT_IS_DESTROYED))?;
        // Another owner's blocks may be copied there already.
        let known = READY.lock().iter().find(|ready| ready.context == context).copied();
        let ready = match known {
            Some(known) => Ready { owner, gpu, ..known },
            None => {
                let lanes = within_kept(driver, handle, || Lanes::make(driver)).map_err(fault)?;
                Ready { owner, gpu, context, handle, lanes, own: None }
            }
        };
        let mut all = READY.lock();
        all.retain(|ready| (ready.owner, ready.gpu) != (owner, gpu) && context::by_id(ready.context).is_some());
        all.push(ready);
        drop(all);
        prepare_own(driver, &ready);
        Ok(())
    }

    fn copy(&self, owner: u64, gpu: u32, transfers: &[Transfer]) -> Result<(), Fault<CuResult>> {
        let driver = self.driver();
        load(owner, gpu, transfers).map_err(Fault::Failed)?;
        let copied = timed(Work::Copy, || {
            if process::is_preloaded() {
                // A context that a call may be ending is left alone: that call may wait for who copies.
                ready(owner, gpu).and_then(|Ready { context, handle, lanes, own, .. }| {
                    let _lives = context::keep(context)?;
                    let own = own.and_then(Result::ok).filter(|_| transfers.iter().any(|transfer| transfer.between));
                    let copy = || lanes.copy(driver, transfers, own.and_then(|own| loaded(driver, context, own, gpu)));
                    Some(within_kept(driver, handle, copy))
                })
            } else {
                within_unseen(driver, gpu, || {
                    let lanes = Lanes::make(driver)?;
                    let copied = lanes.copy(driver, transfers, None);
                    lanes.end(driver);
                    copied
                })
            }
        });
        copied.unwrap_or(Err(CuResult::CONTEXT_IS_DESTROYED)).map_err(Fault::Failed)
    }

    fn digest(&self, owner: u64, gpu: u32, contents: &mut [Contents]) {
        let driver = self.driver();
        timed(Work::Digest, || {
            let Ready { context, handle, lanes, own, .. } = ready(owner, gpu).filter(|_| process::is_preloaded())?;
            let Some(Ok(own)) = own else { return None };
            let _lives = context::keep(context)?;
            let digest = || {
                if let Some(own) = loaded(driver, context, own, gpu) {
                    own.digest(driver, lanes.inward, contents);
                }
                Ok(())
            };
            within_kept(driver, handle, digest).ok()
        });
    }
}

/// With the kernels in its context, which is current and kept by the caller; what became of that is remembered.
fn loaded(driver: &Driver, context: u64, own: Own, gpu: u32) -> Option<Own> {
    let loaded = own.loaded(driver, gpu);
    set_own(context, loaded.ok_or(NoKernels));
    loaded
}

/// Makes what the library's own kernels need in a context, which the caller keeps alive, where there are any for its GPU.
fn prepare_own(driver: &Driver, ready: &Ready) {
    if ready.own.is_none() && kernels::is_known(ready.gpu) && !capture::under_way() {
        let made = within_kept(driver, ready.handle, || Own::make(driver)).map_err(|_| NoKernels);
        set_own(ready.context, made);
    }
}

/// What is known of the library's own kernels in a context from now on.
fn set_own(context: u64, own: Result<Own, NoKernels>) {
    READY.lock().iter_mut().filter(|ready| ready.context == context).for_each(|ready| ready.own = Some(own));
}

/// Makes a context that the caller keeps alive current for the length of `act`.
fn within_kept<T>(
    driver: &Driver,
    context: cuda::Context,
    act: impl FnOnce() -> Result<T, CuResult>,
) -> Result<T, CuResult> {
    context::within_kept(driver, context, act).flatten()
}

fn ready(owner: u64, gpu: u32) -> Option<Ready> {
    READY.lock().iter().find(|ready| (ready.owner, ready.gpu) == (owner, gpu)).copied()
}

/// The context with this id, kept alive, or another one on this GPU where that is gone, as for blocks that outlive their context, or may be
/// ending in some thread's call, which nobody waits for here: that call may wait for who copies.
pub fn context_for(owner: u64, gpu: u32) -> Option<(u64, cuda::Context, Lease)> {
    let own = context::owner(owner).map(|(context, _)| context);
    let others = || context::all().into_iter().filter(|context| context.device == Device::of(gpu));
    let kept = |context: context::Context| Some((context.id, context.live_handle()?, context::keep(context.id)?));
    own.into_iter().chain(others()).find_map(kept)
}

/// Makes some context of this GPU current for the length of `act`, where nobody sees contexts come and go.
fn within_unseen<T>(driver: &Driver, gpu: u32, act: impl FnOnce() -> T) -> Option<T> {
    let device = Device::of(gpu);
    if driver.current_device().is_ok_and(|current| current == device) {
        return Some(act());
    }
    context::within_one_on(driver, device, act)
}

impl Lanes {
    /// In the current context.
    fn make(driver: &Driver) -> Result<Self, CuResult> {
        let _relaxed = driver.relax();
        let inward = driver.create_stream()?;
        match driver.create_stream() {
            Ok(outward) => Ok(Self { inward, outward }),
            Err(result) => {
                // SAFETY: the stream was made above, and nobody else knows it.
                let _ = unsafe { driver.destroy_stream(inward) };
                Err(result)
            }
        }
    }

    fn end(self, driver: &Driver) {
        for stream in [self.inward, self.outward] {
            // SAFETY: both streams were made by `make` in the context that is current still, and `self` was their last user.
            let _ = unsafe { driver.destroy_stream(stream) };
        }
    }

    /// Copies in the current context, which is theirs, and waits for that. What lies on neither end at the GPU that copies is copied by a kernel, where there is one.
    fn copy(self, driver: &Driver, transfers: &[Transfer], own: Option<Own>) -> Result<(), CuResult> {
        let _relaxed = driver.relax();
        let begin = |&Transfer { from, to, bytes, inward, between, .. }: &Transfer| {
            let stream = if inward { self.inward } else { self.outward };
            // SAFETY: who moves memory has mapped both ends for this GPU, and unmaps neither before this function has returned, which waits for the stream.
            let by_kernel = |own: Own| unsafe { own.begin_copy(driver, stream, to, from, bytes) };
            if between && own.is_some_and(by_kernel) {
                BY_KERNEL.fetch_add(bytes, Ordering::Relaxed);
                return Ok(());
            }
            // SAFETY: the stream lives as long as its context, which is current and kept by the caller.
            unsafe { driver.copy_in(stream, to, from, bytes) }.ok()
        };
        let begun = transfers.iter().filter(|transfer| !transfer.stored).try_for_each(begin);
        // Waited for in any case: what was begun must be over before anybody unmaps it. Only in a context that is broken does no
        // wait succeed, and there nothing runs.
        let done = [self.inward, self.outward].map(|stream| {
            // SAFETY: the stream lives as long as its context, which is current and kept by the caller.
            let wait = || unsafe { driver.synchronize_stream(stream) }.ok();
            (0..TRIES).find_map(|_| wait().ok()).map_or_else(wait, Ok)
        });
        begun.and(done[0]).and(done[1])
    }
}
