//! The contexts of this process: whom a free has to wait for, and whose blocks go when one is destroyed.
//!
//! Found where they are made (`cuDevicePrimaryCtxRetain`, `cuCtxCreate`) and, for those that come by private ways (the
//! runtime has some), where they are made current or allocate.

use crate::driver::{self, CuResult, Driver};
use crate::memory;
use cudarc::driver::sys::{CUcontext, CUdevice};
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a context came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The device's primary context.
    Primary,
    /// Made with `cuCtxCreate`.
    Created,
    /// Seen in use before the shim saw it being made. Only primary contexts can be made behind the driver interface's
    /// back, so it is treated as one.
    Found,
}

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Kind::Primary => "primary",
            Kind::Created => "created",
            Kind::Found => "found",
        }
    }
}

/// A live context.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The `CUcontext`. The driver may give the same value to a later context.
    handle: usize,
    pub device: CUdevice,
    pub kind: Kind,
    /// Never given twice: the owner of this context's blocks.
    pub id: u64,
}

static CONTEXTS: Mutex<Vec<Known>> = Mutex::new(Vec::new());
/// Contexts of the past, for the summary: device and kind of each.
static SEEN: Mutex<Vec<(CUdevice, Kind)>> = Mutex::new(Vec::new());
/// Counts destructions; a thread's cached context is void once it moved.
static EPOCH: AtomicU64 = AtomicU64::new(1);

#[derive(Clone, Copy)]
struct Cached {
    epoch: u64,
    known: Known,
}

thread_local! {
    static LAST: Cell<Cached> = const {
        Cell::new(Cached { epoch: 0, known: Known { handle: 0, device: 0, kind: Kind::Found, id: 0 } })
    };
}

/// The context that is current on this thread. `None` where there is none.
#[inline]
pub fn current(driver: &Driver) -> Option<Known> {
    let context = driver.current_context()?;
    let last = LAST.get();
    if last.known.handle == context as usize && last.epoch == EPOCH.load(Ordering::Acquire) {
        return Some(last.known);
    }
    lookup_current(driver, context)
}

#[cold]
fn lookup_current(driver: &Driver, context: CUcontext) -> Option<Known> {
    let epoch = EPOCH.load(Ordering::Acquire);
    let known = CONTEXTS.lock().iter().copied().find(|known| known.handle == context as usize);
    let known = match known {
        Some(known) => known,
        None => add(context, driver.current_device().ok()?, Kind::Found, "found in use"),
    };
    LAST.set(Cached { epoch, known });
    Some(known)
}

/// Notes a context unless it is known. `call` says how it was made, for the log.
pub fn add(context: CUcontext, device: CUdevice, kind: Kind, call: &str) -> Known {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    let handle = context as usize;
    let known = {
        let mut contexts = CONTEXTS.lock();
        if let Some(known) = contexts.iter().find(|known| known.handle == handle) {
            return *known;
        }
        let known = Known { handle, device, kind, id: NEXT_ID.fetch_add(1, Ordering::Relaxed) };
        contexts.push(known);
        known
    };
    SEEN.lock().push((device, kind));
    tracing::info!(
        target: "gpupool::context", event = "context.create", device, kind = kind.word(), call,
        "{} context on GPU {device} ({call})", kind.word()
    );
    known
}

/// Drops the contexts that `gone` picks, and the blocks that belonged to them.
fn remove(call: &str, gone: impl Fn(&Known) -> bool) {
    let mut removed = Vec::new();
    CONTEXTS.lock().retain(|known| {
        let stays = !gone(known);
        if !stays {
            removed.push(*known);
        }
        stays
    });
    if removed.is_empty() {
        return;
    }
    EPOCH.fetch_add(1, Ordering::AcqRel);
    for known in removed {
        let blocks = memory::owner_gone(known.id);
        tracing::info!(
            target: "gpupool::context", event = "context.destroy", device = known.device, kind = known.kind.word(), call,
            "{} context on GPU {} is gone ({call}), and {blocks} pooled blocks with it", known.kind.word(), known.device
        );
    }
}

/// `cuCtxDestroy` succeeded.
pub fn destroyed(context: CUcontext, call: &str) {
    remove(call, |known| known.handle == context as usize);
}

/// The primary context of this device does not exist any more.
pub fn primary_gone(device: CUdevice, call: &str) {
    remove(call, |known| known.device == device && known.kind != Kind::Created);
}

/// The `CUcontext` behind an id; null once it is gone.
pub fn handle_of(id: u64) -> CUcontext {
    let contexts = CONTEXTS.lock();
    contexts.iter().find(|known| known.id == id).map_or(0, |known| known.handle) as CUcontext
}

/// Every context that was there in this process, oldest first, for the summary.
pub fn seen() -> Vec<(CUdevice, Kind)> {
    SEEN.lock().clone()
}

/// Waits for all work in every context.
///
/// An error of the current context is the program's to hear, as from the driver's own free. Another context in error has
/// no work left that could touch memory, and one that is gone neither.
pub fn synchronize_all(driver: &Driver) -> Result<(), CuResult> {
    let mut current = std::ptr::null_mut();
    // SAFETY: the output is a local of the right type. An error here is that of a driver that is gone (the process exits).
    unsafe { (driver.cuCtxGetCurrent)(&raw mut current) }.ok()?;
    let current = current as usize;
    let handles: Vec<usize> = CONTEXTS.lock().iter().map(|known| known.handle).collect();
    let mut answer = CuResult::SUCCESS;
    for handle in handles {
        if handle == current {
            // SAFETY: no preconditions.
            answer = unsafe { (driver.cuCtxSynchronize)() };
            continue;
        }
        // SAFETY: the handle is of a context that was not destroyed through the driver interface; pushing it is undone
        // below.
        if !unsafe { (driver.cuCtxPushCurrent_v2)(handle as CUcontext) }.is_ok() {
            continue;
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: the output is a local; the context on top is the one just pushed.
        let _ = unsafe {
            let _ = (driver.cuCtxSynchronize)();
            (driver.cuCtxPopCurrent_v2)(&raw mut popped)
        };
    }
    match answer {
        CuResult::CONTEXT_IS_DESTROYED => Ok(()),
        answer => answer.ok(),
    }
}

/// The driver, for the bodies of context calls.
pub fn driver() -> Option<&'static Driver> {
    driver::get().ok()
}
