//! The library's own kernels: what is in memory of a GPU, as a number, and copies between two other GPUs.
//!
//! What left for the chunk that it came from, and is the same still, is not copied: a GPU reads its own memory ten times as fast as it copies to another one, and a hundred times
//! as fast as to the host. What goes from one lender to another is copied by a kernel, three times as fast as by an engine. The driver
//! translates the kernels once for each GPU, before the program is stopped ([`learn`]): a part of the driver is loaded for it,
//! and a program that is stopped may have the loader's lock. They are loaded into a context when they are wanted first, while the program is
//! stopped ([`Own::loaded`]): loading may wait for all work of a context, and then there is none. Wherever any of this fails, everything is
//! copied, by engines.

use crate::backing::open;
use crate::watch::context;
use crate::{process, secret};
use gpupool_cuda::kernel::{self, Kernels, Keys, SUMS};
use gpupool_cuda::{CuResult, Device, Driver, Stream};
use gpupool_interpose::cancel;
use gpupool_pool::{Contents, Place};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The kernels as each GPU takes them; nothing where the driver could not make it.
static IMAGES: Mutex<BTreeMap<u32, Option<Arc<[u8]>>>> = Mutex::new(BTreeMap::new());

/// What all digests of this process are made with, from the first kernel that was made on.
static KEYS: OnceLock<Keys> = OnceLock::new();

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
const DEVICEMAP: u32 = 2;
/// How often they are waited for, where the driver refuses to.
const TRIES: u32 = 5;
/// How many digests are made at once.
const AT_ONCE: usize = 32;

/// Has the kernels made for a GPU, once. Not while the program is stopped; nothing is done unless the calling thread works on that GPU.
pub fn learn(driver: &Driver, gpu: u32) {
    if IMAGES.lock().contains_key(&gpu) || driver.current_device().ok() != Some(Device::of(gpu)) {
        return;
    }
    let _relaxed = driver.relax();
    let image = keys().and_then(|()| driver.translate_kernels());
    if let Err(error) = &image {
        tracing::debug!(
            target: "gpupool::memory", about = "moves",
            "the driver makes no kernels for GPU {gpu} (cuLinkComplete: {error}), so what leaves is copied though it may have stayed the same, by engines"
        );
    }
    IMAGES.lock().insert(gpu, image.ok().map(Arc::from));
}

/// [`context::all_arrivals`] when [`learn_for_lenders`] was through.
static LEARNT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Has the kernels made for the GPUs that the program works on, once it has borrowed memory that may go from one lender to another. By the agent's thread, ahead of that: when somebody comes to the
/// lender there is no time, and a program that is stopped may have the loader's lock.
pub fn learn_for_lenders() {
    let Some(opened) = open::opened().filter(|opened| opened.plan.members.len() > 2) else { return };
    let arrivals = context::all_arrivals();
    let (gpus, lenders): (Vec<u32>, Vec<u32>) =
        opened.plan.members.keys().partition(|gpu| context::is_on(Device::of(**gpu)));
    let is_lent = |gpu: &u32| opened.plan.accounts.taken(Place::Gpu(*gpu)) > 0;
    if LEARNT.load(Ordering::Relaxed) == arrivals || !lenders.iter().any(is_lent) {
        return;
    }
    let Some(driver) = process::driver() else { return };
    for gpu in gpus {
        context::within_one_on(driver, Device::of(gpu), || learn(driver, gpu));
    }
    LEARNT.store(arrivals, Ordering::Relaxed);
}

/// Sees to it that there are [`KEYS`].
fn keys() -> Result<(), CuResult> {
    if KEYS.get().is_none() {
        // A thread of the program's may be cancelled where it asks the system.
        let _sheltered = cancel::shelter();
        let mut keys = [[0; 8]; 4];
        secret::fill(keys.as_flattened_mut()).map_err(|_| CuResult::NOT_SUPPORTED)?;
        let _ = KEYS.set(Keys(keys.map(u64::from_ne_bytes)));
    }
    Ok(())
}

/// Whether memory that begins there and has so many bytes has a digest.
pub fn is_fit(address: u64, bytes: u64) -> bool {
    bytes > 0 && [address, bytes].iter().all(|number| number.is_multiple_of(kernel::AT_ONCE))
}

/// Whoever makes digests. The sums of a context are written to one place, and moves by hand and for launches may come together: who comes second
/// copies.
static ALONE: Mutex<()> = Mutex::new(());

/// Whether it has been made.
pub(super) fn is_known(gpu: u32) -> bool {
    matches!(IMAGES.lock().get(&gpu), Some(Some(_)))
}

/// The kernels in a context, and what they need there, with which it ends.
#[derive(Clone, Copy)]
pub(super) struct Own {
    kernels: Option<Kernels>,
    /// Where the sums are written: pinned memory of the context.
    sums: *mut u64,
}

// SAFETY: the memory is used by one thread at a time, which has [`ALONE`].
unsafe impl Send for Own {}

impl Own {
    /// In the current context. Not while the program is stopped.
    pub fn make(driver: &Driver) -> Result<Self, CuResult> {
        let bytes = (AT_ONCE * SUMS * size_of::<u64>()) as u64;
        let sums = driver.pin(bytes, DEVICEMAP)?;
        Ok(Self { kernels: None, sums: sums as *mut u64 })
    }

    /// With the kernels in the current context, which is its own and one of this GPU's.
    pub fn loaded(self, driver: &Driver, gpu: u32) -> Option<Self> {
        if self.kernels.is_some() {
            return Some(self);
        }
        let image = IMAGES.lock().get(&gpu)?.clone()?;
        // SAFETY: the image was made for this GPU.
        let kernels = unsafe { driver.load_kernels(&image) }.ok()?;
        Some(Self { kernels: Some(kernels), ..self })
    }

    /// Begins to copy in the current context, which is its own, in the order of a stream of it; `false` where nothing was begun.
    ///
    /// # Safety
    /// Both ranges are mapped with access for the context's GPU until the stream was waited for.
    pub unsafe fn begin_copy(self, driver: &Driver, stream: Stream, to: u64, from: u64, bytes: u64) -> bool {
        let Some(kernels) = self.kernels.filter(|_| is_fit(to, bytes) && is_fit(from, bytes)) else { return false };
        // SAFETY: the kernels are of this context; the caller vouches for the rest.
        unsafe { driver.copy_by_kernel(kernels, stream, to, from, bytes) }.is_ok()
    }

    /// Writes down what is there, in the current context, which is its own; nothing where it cannot. The stream is of that context.
    pub fn digest(self, driver: &Driver, stream: Stream, contents: &mut [Contents]) {
        let (Some(kernels), Some(keys)) = (self.kernels, KEYS.get().copied()) else { return };
        let Some(_alone) = ALONE.try_lock() else { return };
        let _relaxed = driver.relax();
        for contents in contents.chunks_mut(AT_ONCE) {
            let begin = |(index, of): (usize, &Contents)| {
                // SAFETY: there is room for so many sums of so many digests.
                let to = unsafe { self.sums.add(index * SUMS) };
                // SAFETY: kernels, stream and the pinned memory are of this context, which is current and kept by the caller. What is looked at is
                // mapped for its GPU, by the program's addresses or by second ones that the pool made, and nobody unmaps it before the
                // stream was waited for below.
                let digest = || unsafe { driver.digest(kernels, stream, of.address, of.bytes, to, keys) };
                is_fit(of.address, of.bytes) && digest().ok().is_ok()
            };
            let are_begun = contents.iter().enumerate().all(begin);
            // SAFETY: the stream lives as long as its context, which is current and kept by the caller.
            let wait = || unsafe { driver.synchronize_stream(stream) }.ok().is_ok();
            // What was begun is over before anybody unmaps what it reads. Only in a context that is broken does no wait succeed, and nothing runs there.
            let are_over = (0..TRIES).any(|_| wait());
            if !are_begun || !are_over {
                return;
            }
            for (index, of) in contents.iter_mut().enumerate() {
                // SAFETY: the kernels that wrote these are over, as was just waited for; volatile, since it was not this program that wrote them.
                let sum = |at: usize| unsafe { self.sums.add(index * SUMS + at).read_volatile() };
                of.digest = Some(kernel::digest_of((0..SUMS).map(sum)));
            }
        }
    }
}
