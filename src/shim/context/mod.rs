//! The contexts of this process: who made each, what it cost, what it was used for.
//!
//! A context is found where it is made (`cuDevicePrimaryCtxRetain`, `cuCtxCreate`), where it is made current or used, and
//! by asking every device's primary context for its state around calls that are rare anyway: the runtime has private ways.
//!
//! Records are never freed: there are a few, and a launch on another thread may be counting in one.

mod cost;
mod judge;
pub mod limits;
pub mod policy;
pub mod unseen;
mod usage;

pub use judge::{heap_is_default, judge};
pub use usage::{Usage, coarse_now};

use crate::driver::{self, Driver};
use crate::{ipc, managed, memory, pinned, site};
use cudarc::driver::sys::{CUcontext, CUdevice};
use gpupool_events::Site;
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

pub use cost::{Before, remember};

/// How a context came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The device's primary context, seen being made.
    Primary,
    /// Made with `cuCtxCreate`.
    Created,
    /// Seen in use before the shim saw it being made. Only primary contexts can be made behind the driver interface's
    /// back, so it is treated as one.
    Found,
    /// A primary context that came to be between two hooked calls, neither of which made it.
    Appeared,
}

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Kind::Primary => "primary",
            Kind::Created => "created",
            Kind::Found => "found",
            Kind::Appeared => "appeared",
        }
    }
}

/// One context, from its making to the end of the process.
#[derive(Debug)]
pub struct Context {
    /// The `CUcontext`; 0 while unknown, and once it is gone (the driver may give the value to a later context).
    handle: AtomicUsize,
    pub device: CUdevice,
    pub kind: Kind,
    /// Counts from 1; the owner of this context's blocks.
    pub id: u64,
    /// What made it, for people.
    pub call: String,
    pub site: Site,
    /// Bytes that the GPU lost with it.
    pub cost: Option<u64>,
    pub usage: Usage,
    /// Peer access from or to it was enabled before anything was done with it.
    pub peered: AtomicBool,
}

static ALL: Mutex<Vec<&'static Context>> = Mutex::new(Vec::new());
/// The first records by their id. A process with more contexts than this loses only their peaks.
static BY_ID: [AtomicPtr<Context>; 256] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 256];
/// Counts destructions; a thread's cached context is void once it moved.
static EPOCH: AtomicU64 = AtomicU64::new(1);
/// The last call after which every device's state was known, for "appeared between".
static LAST_SWEEP: Mutex<&'static str> = Mutex::new("the start of the process");

/// GPUs that the process sees, once a sweep asked; the driver no longer answers when the process ends.
static DEVICES: AtomicUsize = AtomicUsize::new(0);

fn device_count() -> usize {
    DEVICES.load(Ordering::Relaxed)
}

thread_local! {
    /// The context that was current here last, and the epoch of that.
    static LAST: Cell<(u64, Option<&'static Context>)> = const { Cell::new((0, None)) };
}

/// Seconds since the process started.
pub fn uptime() -> f64 {
    /// Field 22 of `/proc/self/stat`, the start in clock ticks since the machine's.
    fn started() -> Option<f64> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        let ticks: f64 = stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()?;
        // SAFETY: sysconf has no preconditions.
        Some(ticks / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64)
    }
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the output is a local.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    let now = now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9;
    started().map_or(0.0, |started| (now - started).max(0.0))
}

impl Context {
    fn is(&self, context: CUcontext) -> bool {
        !context.is_null() && self.handle.load(Ordering::Acquire) == context as usize
    }

    fn is_primary(&self) -> bool {
        self.kind != Kind::Created
    }

    /// The `CUcontext`; `None` while it is unknown, and once the context is gone.
    pub fn live_handle(&self) -> Option<CUcontext> {
        let handle = self.handle.load(Ordering::Acquire);
        (handle != 0 && handle != Self::GONE).then_some(handle as CUcontext)
    }
}

/// The context that is current on this thread. `None` where there is none.
#[inline]
pub fn current(driver: &Driver) -> Option<&'static Context> {
    let context = driver.current_context()?;
    if let (epoch, Some(last)) = LAST.get()
        && last.handle.load(Ordering::Acquire) == context as usize
        && epoch == EPOCH.load(Ordering::Acquire)
    {
        return Some(last);
    }
    lookup_current(driver, context)
}

#[cold]
fn lookup_current(driver: &Driver, context: CUcontext) -> Option<&'static Context> {
    let epoch = EPOCH.load(Ordering::Acquire);
    let found = ALL.lock().iter().copied().find(|known| known.is(context));
    let known = match found {
        Some(known) => known,
        None => found_in_use(driver, context)?,
    };
    LAST.set((epoch, Some(known)));
    Some(known)
}

/// Whether this thread's current context is another one than at the last look; cheap where it is not.
#[inline]
pub fn has_switched(driver: &Driver) -> bool {
    let current = driver.current_context().map_or(0, |context| context as usize);
    let (epoch, last) = LAST.get();
    let last = last.filter(|_| epoch == EPOCH.load(Ordering::Acquire));
    current != last.map_or(0, |last| last.handle.load(Ordering::Acquire))
}

/// Notes the context that has just become current. The runtime makes the handle of a primary context current before it
/// retains it: such a one does not exist yet, and is noted when it does.
pub fn noticed(driver: &Driver) {
    let Some(context) = driver.current_context() else { return };
    let exists = || driver.current_device().is_ok_and(|device| driver.primary_is_active(device));
    if by_handle(context).is_some() || exists() {
        let _ = current(driver);
    }
}

/// A context that is current and has no record: one that appeared before, or one that nobody saw being made.
fn found_in_use(driver: &Driver, context: CUcontext) -> Option<&'static Context> {
    let device = driver.current_device().ok()?;
    Some(add(driver, context, device, Kind::Found, "found in use", Before::at_init(device)))
}

/// The record of a primary context that appeared on this device, which learns its handle now.
fn appeared(driver: &Driver, context: CUcontext, device: CUdevice) -> Option<&'static Context> {
    let waiting = ALL.lock().iter().copied().find(|known| {
        known.kind == Kind::Appeared && known.device == device && known.handle.load(Ordering::Acquire) == 0
    })?;
    waiting.handle.store(context as usize, Ordering::Release);
    limits::apply(driver, context, device);
    managed::context_appeared(driver, context);
    Some(waiting)
}

/// Notes a context unless it is known. `call` says how it was made; `before` was taken before that call.
pub fn add(
    driver: &Driver,
    context: CUcontext,
    device: CUdevice,
    kind: Kind,
    call: &str,
    before: Before,
) -> &'static Context {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    if let Some(known) = ALL.lock().iter().copied().find(|known| known.is(context)) {
        return known;
    }
    if kind != Kind::Created
        && !context.is_null()
        && let Some(known) = appeared(driver, context, device)
    {
        return known;
    }
    if !context.is_null() {
        limits::apply(driver, context, device);
    }
    let site = site::here();
    let (cost, approximate) = before.cost(driver, context, device);
    let known: &'static Context = Box::leak(Box::new(Context {
        handle: AtomicUsize::new(context as usize),
        device,
        kind,
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        call: call.to_owned(),
        site,
        cost,
        usage: Usage::default(),
        peered: AtomicBool::new(false),
    }));
    {
        // Two threads that retain one primary context at once: the first record stays.
        let mut all = ALL.lock();
        if let Some(first) = all.iter().copied().find(|known| known.is(context)) {
            return first;
        }
        all.push(known);
    }
    if let Some(slot) = BY_ID.get(known.id as usize) {
        slot.store(std::ptr::from_ref(known).cast_mut(), Ordering::Release);
    }
    report(driver, known, approximate);
    managed::context_appeared(driver, context);
    known
}

fn report(driver: &Driver, context: &Context, approximate: bool) {
    let Context { device, id, call, site, cost, kind, .. } = context;
    let (pci, uuid) = (driver.pci_address(*device), driver.uuid(*device));
    let price = cost.map_or(String::new(), |cost| {
        format!(", {}{}", if approximate { "≈" } else { "" }, gpupool_config::format_size(cost))
    });
    tracing::info!(
        target: "gpupool::context", event = "context.create", id, device, pci, uuid, kind = kind.word(), call,
        runtime_call = site::runtime_call(site), caller = site::caller(site), thread = site::thread_name(), seconds = uptime(),
        cost, approximate, site.json = %site::json(site),
        "{} context on GPU {device} ({call}{price}) by {}", kind.word(), site::line(site)
    );
}

/// Calls under way that make a context which has no record yet.
static MAKING: AtomicUsize = AtomicUsize::new(0);

/// Held around such a call and its [`add`]: another thread that sees the context meanwhile must not say that it appeared.
pub struct Making(());

impl Making {
    pub fn begin() -> Self {
        MAKING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        MAKING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Looks for primary contexts that came to be without a hooked call. Cheap (tens of nanoseconds a device), and called
/// only where something rare happens.
pub fn sweep(driver: &Driver, call: &'static str) {
    let count = driver.device_count();
    DEVICES.store(count as usize, Ordering::Relaxed);
    let before = std::mem::replace(&mut *LAST_SWEEP.lock(), call);
    for device in 0..count {
        let known = || ALL.lock().iter().any(|known| known.device == device && known.is_primary() && !known.is_gone());
        // In this order: who made it was in MAKING before it existed, and has noted it when no longer there.
        if driver.primary_is_active(device) && MAKING.load(Ordering::SeqCst) == 0 && !known() {
            let between = format!("appeared between {before} and {call}");
            add(driver, std::ptr::null_mut(), device, Kind::Appeared, &between, Before::at_init(device));
        }
    }
}

impl Context {
    /// Gone contexts keep their record, with this for a handle.
    const GONE: usize = usize::MAX;

    pub fn is_gone(&self) -> bool {
        self.handle.load(Ordering::Acquire) == Self::GONE
    }
}

/// Marks the contexts that `gone` picks as gone, and drops the blocks that belonged to them.
fn remove(call: &str, gone: impl Fn(&Context) -> bool) {
    let removed: Vec<_> = ALL.lock().iter().copied().filter(|known| !known.is_gone() && gone(known)).collect();
    if removed.is_empty() {
        return;
    }
    for known in &removed {
        known.handle.store(Context::GONE, Ordering::Release);
    }
    EPOCH.fetch_add(1, Ordering::AcqRel);
    for known in removed {
        let blocks = memory::owner_gone(known.id);
        pinned::context_gone(known.id);
        if let Some(driver) = self::driver() {
            ipc::owner_gone(driver, known.id);
        }
        let Context { device, id, kind, .. } = known;
        tracing::info!(
            target: "gpupool::context", event = "context.destroy", id, device, kind = kind.word(), call,
            "{} context on GPU {device} is gone ({call}), and {blocks} pooled blocks with it", kind.word()
        );
    }
}

/// `cuCtxDestroy` succeeded.
pub fn destroyed(context: CUcontext, call: &str) {
    remove(call, |known| known.is(context));
}

/// The primary context of this device does not exist any more.
pub fn primary_gone(device: CUdevice, call: &str) {
    remove(call, |known| known.device == device && known.is_primary());
}

/// The `CUcontext` behind an id; null once it is gone.
pub fn handle_of(id: u64) -> CUcontext {
    let all = ALL.lock();
    let handle = all.iter().find(|known| known.id == id && !known.is_gone());
    handle.map_or(0, |known| known.handle.load(Ordering::Acquire)) as CUcontext
}

/// The record with this id, without a lock: asked at every free.
#[inline]
pub fn by_id(id: u64) -> Option<&'static Context> {
    let known = BY_ID.get(id as usize)?.load(Ordering::Acquire);
    // SAFETY: the slot is null or a record, and records are never freed.
    unsafe { known.as_ref() }
}

/// The record of this handle.
pub fn by_handle(context: CUcontext) -> Option<&'static Context> {
    ALL.lock().iter().copied().find(|known| known.is(context))
}

/// Every context that was there in this process, oldest first.
pub fn all() -> Vec<&'static Context> {
    ALL.lock().clone()
}

/// Whether this process has a context on a device now.
pub fn is_on(device: CUdevice) -> bool {
    ALL.lock().iter().any(|context| context.device == device && !context.is_gone())
}

/// Makes a context current for the length of `act`, unless it is current already.
pub fn within<T>(driver: &Driver, context: CUcontext, act: impl FnOnce() -> T) -> Option<T> {
    if driver.current_context() == Some(context) {
        return Some(act());
    }
    // SAFETY: the handle is of a context that was not destroyed through the driver interface; it is popped below.
    if !unsafe { (driver.cuCtxPushCurrent_v2)(context) }.is_ok() {
        return None;
    }
    let value = act();
    let mut popped = std::ptr::null_mut();
    // SAFETY: the output is a local; the context on top is the one just pushed.
    let _ = unsafe { (driver.cuCtxPopCurrent_v2)(&raw mut popped) };
    Some(value)
}

/// The driver, for the bodies of context calls.
pub fn driver() -> Option<&'static Driver> {
    driver::get().ok()
}
