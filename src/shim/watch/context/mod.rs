//! The contexts of this process: who made each, what it cost, what it was used for.
//!
//! A context is found where it is made (`cuDevicePrimaryCtxRetain`, `cuCtxCreate`), where it is made current or used, and
//! by asking every device's primary context for its state around calls that are rare anyway: the runtime has private ways.
//!
//! What ends a context is told before the driver is asked ([`end`]), because its handle may be another context's the moment
//! the driver is done: until that call is over nobody goes by the handle alone, and nobody pushes it.

mod cost;
mod counters;
pub mod end;
mod last;
pub mod limits;
mod observers;
pub mod policy;
mod registry;
pub mod unseen;

pub use counters::Counters;
pub use limits::heap_is_default;
pub use observers::{Observer, observe};
pub use registry::{By, Record, Tally, Totals};

use crate::log::{self, verdict};
use crate::watch::{site, submitted};
use crate::{bell, clock, process};
use gpupool_config::Rank;
use gpupool_cuda::{self as cuda, CuResult, Device, Driver, GreenContext};
use gpupool_events::{ContextCreate, ContextUse, RankOnGpu};
use last::{Epoch, Last};
use parking_lot::{Condvar, Mutex};
use registry::{Found, Name, Origin, Registry};
use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub use cost::{Before, held_on, is_alone_on, remember};

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

/// One context, as long as it lives. Every later life of a primary context is another one.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    pub device: Device,
    pub kind: Kind,
    /// Counts from 1; the owner of this context's blocks.
    pub id: u64,
    tally: &'static Tally,
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Context {}

impl Deref for Context {
    type Target = Tally;

    fn deref(&self) -> &Tally {
        self.tally
    }
}

impl Context {
    fn is_primary(&self) -> bool {
        self.kind != Kind::Created
    }

    /// Whether it ended. What was made for it since belongs to nobody.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.tally.id.load(Ordering::Acquire) != self.id
    }

    /// What it was used for. The counters outlive it.
    #[inline]
    pub fn usage(&self) -> &'static Counters {
        &self.tally.usage
    }

    /// The driver's handle; `None` while it is unknown, and once the context is gone.
    pub fn live_handle(&self) -> Option<cuda::Context> {
        self.tally.handle.load(Ordering::Acquire).filter(|_| !self.is_gone())
    }
}

/// GPUs whose contexts are meant.
#[derive(Clone, Copy, Debug)]
pub enum Gpus<'a> {
    /// The GPUs with these ordinals.
    Of(&'a [u32]),
    /// All that this process has a context on.
    All,
}

impl Gpus<'_> {
    pub fn contain(self, device: Device) -> bool {
        match self {
            Gpus::Of(ordinals) => ordinals.contains(&device.ordinal()),
            Gpus::All => true,
        }
    }
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry::new());
/// A call that may have ended a context is over, or a context was given back that was pushed for a moment.
static CHANGED: Condvar = Condvar::new();
/// Where what threads remember ends.
static EPOCH: Epoch = Epoch::new();
/// The last call after which every device's state was known, for "appeared between".
static LAST_SWEEP: Mutex<&'static str> = Mutex::new("the start of the process");

thread_local! {
    static LAST: Last = const { Last::new() };
    /// How many [`Keeping`] the thread has.
    static KEEPS: Cell<u32> = const { Cell::new(0) };
}

/// The context that is current on this thread. `None` where there is none that lives.
#[inline]
pub fn current(driver: &Driver) -> Option<Context> {
    let handle = driver.current_context()?;
    remembered(handle).or_else(|| look_up_current(driver, handle))
}

/// The context that is current on this thread; `Err`: that takes a longer look, which may log. `Ok(None)`: there is none.
#[inline]
pub fn glance(driver: &Driver) -> Result<Option<Context>, ()> {
    match driver.current_context() {
        None => Ok(None),
        Some(handle) => remembered(handle).map(Some).ok_or(()),
    }
}

/// Whether the context that this thread used last is known to be in use already, so that one more allocation there need not
/// be noted. The driver is not asked, because the question costs as much as passing on the call: a switch that no hook saw is
/// noticed at the next look.
#[inline]
pub fn is_in_use() -> bool {
    LAST.with(|last| last.is_in_use(EPOCH.now()))
}

#[inline]
fn remembered(handle: cuda::Context) -> Option<Context> {
    LAST.with(|last| last.context_of(handle, EPOCH.now()))
}

#[cold]
fn look_up_current(driver: &Driver, handle: cuda::Context) -> Option<Context> {
    let epoch = EPOCH.now();
    // The handle of a context that is gone stays current, and every call with it fails; so does one of a primary context
    // that is not made yet, which the runtime makes current before it retains it.
    let life = driver.current_life().ok()?;
    let name = Name { handle: Some(handle), life };
    let (found, again) = {
        let registry = REGISTRY.lock();
        (registry.find(name), registry.is_given_again(handle))
    };
    let (context, settled) = match found {
        Found::Known { context, settled } => (context, settled),
        Found::Renamed(context) => (renamed(driver, context, handle, life)?, true),
        Found::Unknown => (found_in_use(driver, handle)?, true),
    };
    if settled {
        LAST.with(|last| last.remember(handle, context, epoch, again));
    }
    Some(context)
}

/// The current context has the handle of one that ended without anybody seeing it.
fn renamed(driver: &Driver, context: Context, handle: cuda::Context, life: Option<u64>) -> Option<Context> {
    if driver.current_device().ok()? == context.device {
        REGISTRY.lock().lives_on(context.id, life);
        return Some(context);
    }
    end::unseen(context, "seen gone");
    found_in_use(driver, handle)
}

/// Whether a call that needs a usable context has one, or what it answers: what calls in a context answer which is gone or
/// broken, or those of a driver that is gone at the end of the process. Without any context, calls that can do without succeed.
#[inline]
pub fn usable(driver: &Driver) -> Result<(), CuResult> {
    let handle = match driver.ask_current_context() {
        Ok(Some(handle)) => handle,
        Err(CuResult::DEINITIALIZED) => return Err(CuResult::DEINITIALIZED),
        Ok(None) | Err(_) => return Ok(()),
    };
    if remembered(handle).is_some() {
        return Ok(());
    }
    driver.current_life().map(drop)
}

/// Whether the driver is gone because the process ends: it says so to every call, whatever it is asked.
#[inline]
pub fn is_driver_gone() -> bool {
    driver().is_some_and(|driver| driver.ask_current_context() == Err(CuResult::DEINITIALIZED))
}

/// Whether a call of this thread's that needs a usable context has none, as [`usable`] says.
#[inline]
pub fn is_refused() -> bool {
    driver().is_some_and(|driver| usable(driver).is_err())
}

/// Whether a context is current that lives and is not in error. Where none is, calls that need one answer so before they
/// look at an address, and it is for the driver to say which answer that is.
pub fn is_usable(driver: &Driver) -> bool {
    match driver.ask_current_context() {
        Ok(Some(handle)) => remembered(handle).is_some() || driver.current_life().is_ok(),
        Ok(None) | Err(CuResult::DEINITIALIZED) => false,
        // Which one it is nobody knows, and there may be one.
        Err(_) => driver.current_life().is_ok(),
    }
}

/// Whether this thread's current context, which is this one or none, is another than at the last look; cheap where it is not.
#[inline]
pub fn has_switched_to(current: Option<cuda::Context>) -> bool {
    LAST.with(|last| last.has_switched_to(current, EPOCH.now()))
}

/// Notes the context that has just become current.
pub fn noticed(driver: &Driver) {
    let _ = current(driver);
}

/// A context that is current and has no record: a primary one that appeared before, or that nobody saw being made. Any
/// other is not ours to serve: nobody would see it end.
fn found_in_use(driver: &Driver, context: cuda::Context) -> Option<Context> {
    let device = driver.current_device().ok()?;
    let primary = || {
        // Looked up by itself: in the head of a `match` the lock would be held through its arms, which take it, too.
        let known = REGISTRY.lock().primary_handle(device);
        known.or_else(|| unseen::Primary::hold(driver, device).map(|primary| primary.handle))
    };
    if process::is_preloaded() && primary() != Some(context) {
        return None;
    }
    found(device, add(driver, Some(context), device, Kind::Found, "found in use", Before::at_init(device)))
}

/// A context that nobody saw being made, so that nobody can be refused it for what it cannot reach.
fn found(device: Device, added: Added) -> Option<Context> {
    if let Err(result) = added.reaches {
        tracing::error!(
            target: "gpupool::context", about = "grant",
            "cuMemSetAccess of the pool's memory for GPU {device}, which has a context now: {result}; a kernel or copy of that \
             GPU that touches blocks of the others will fail with 719. Free memory on GPU {device}, or make its context before \
             the first allocation"
        );
    }
    added.context
}

/// The record of a primary context that appeared on this device, which learns its handle now.
fn appeared(driver: &Driver, context: cuda::Context, device: Device, name: Name) -> Option<Context> {
    let waiting = REGISTRY.lock().name_waiting(name, device)?;
    limits::apply(driver, context, device);
    observers::all().for_each(|observer| observer.began(driver, Some(context)));
    Some(waiting)
}

/// What became of a context that was noted.
pub struct Added {
    /// `None`: it is gone again already, by another thread's doing.
    pub context: Option<Context>,
    /// Why it cannot be used together with what the library holds, if it cannot.
    pub reaches: Result<(), CuResult>,
}

/// Notes a context unless it is known, by its handle where that is known. `call` says how it was made; `before` was taken before
/// that call.
pub fn add(
    driver: &Driver,
    context: Option<cuda::Context>,
    device: Device,
    kind: Kind,
    call: &str,
    before: Before,
) -> Added {
    let known = |context| Added { context: Some(context), reaches: observers::arrived(device) };
    let life = match context {
        None => None,
        // SAFETY: the caller got the context from the driver just now, or it is a primary one.
        Some(context) => match unsafe { driver.life(context) } {
            Ok(life) => life,
            Err(_) => return Added { context: None, reaches: Ok(()) },
        },
    };
    let name = Name { handle: context, life };
    if let Some(context) = context {
        let found = REGISTRY.lock().find(name);
        if let Found::Known { context, .. } = found {
            // The thread that entered it may not be through yet with what has to be done before it is used.
            return known(context);
        }
        if kind != Kind::Created
            && let Some(waiting) = appeared(driver, context, device, name)
        {
            return known(waiting);
        }
        limits::apply(driver, context, device);
    }
    let site = site::here();
    let (cost, approximate) = before.cost(driver, context, device);
    let origin = Arc::new(Origin { call: call.to_owned(), site, cost, approximate });
    // Of two threads that retain one primary context at once, or that see at once that one appeared, the first enters it.
    let entered = REGISTRY.lock().enter(name, device, kind, origin.clone());
    let entered = match entered {
        Ok(entered) => entered,
        Err(first) => return known(first),
    };
    // Whoever was alone on its GPU is not any more.
    submitted::note();
    if matches!(kind, Kind::Found | Kind::Appeared) {
        submitted::context_came_unseen(&origin.call);
    }
    if driver.is_shared_by_mps(device) {
        submitted::goes_unseen(submitted::Unseen::Shared, format!("GPU {device}").as_bytes());
    }
    report(driver, &entered, &origin);
    bell::changed();
    let added = known(entered);
    observers::all().for_each(|observer| observer.began(driver, context));
    added
}

fn report(driver: &Driver, context: &Context, origin: &Origin) {
    let (Context { device, id, kind, .. }, Origin { call, site, cost, approximate }) = (context, origin);
    let (pci, uuid) = (driver.pci_address(*device), driver.uuid(*device));
    let price = cost.map_or(String::new(), |cost| {
        format!(", {}{}", if *approximate { "≈" } else { "" }, gpupool_config::format_size(cost))
    });
    tell_rank(driver, *device, &uuid, origin);
    log::emit(|| {
        let kind = kind.word();
        let event = ContextCreate {
            id: *id,
            device: device.ordinal(),
            pci: Some(pci),
            uuid: Some(uuid),
            kind: kind.to_owned(),
            call: call.clone(),
            runtime_call: site::runtime_call(site).map(str::to_owned),
            caller: site::caller(site).map(str::to_owned),
            thread: site::thread_name(),
            seconds: clock::uptime(),
            cost: *cost,
            approximate: *approximate,
            site: Some(site.clone()),
        };
        (event, format!("{kind} context on GPU {device} ({call}{price}) by {}", site::line(site)))
    });
}

/// Logs what a context was used for.
pub fn report_use(context: &Record) {
    let Record { id, device, kind, usage, .. } = context;
    log::emit(|| {
        let (launches, copies) = (usage.launches.load(Ordering::Relaxed), usage.copies.load(Ordering::Relaxed));
        let (allocations, modules) = (usage.allocations(), usage.modules.load(Ordering::Relaxed));
        let event = ContextUse {
            id: *id,
            device: device.ordinal(),
            kind: kind.word().to_owned(),
            allocations,
            bytes_peak: usage.peak(),
            launches,
            copies,
            modules,
            last_use: usage.last_use(),
        };
        let text = format!(
            "context on GPU {device}: {launches} launches, {copies} copies, {allocations} allocations, {modules} modules"
        );
        (event, text)
    });
}

/// The GPUs of these contexts, in order, each once.
pub fn devices(contexts: &[&Record]) -> String {
    let mut devices: Vec<Device> = contexts.iter().map(|context| context.device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.iter().map(Device::to_string).collect::<Vec<_>>().join(", ")
}

/// What is known of every context that the process has or had, as far as it is kept for its end.
pub fn records() -> Vec<Record> {
    REGISTRY.lock().records()
}

/// What shows together with other ranks of the job whether several of them are on one GPU, which `run --fail-on` asks past
/// the log.
fn tell_rank(driver: &Driver, device: Device, uuid: &str, origin: &Origin) {
    let Some(Rank { number, ranks, job, .. }) = process::rank() else { return };
    verdict::on_gpu(RankOnGpu {
        device: device.ordinal(),
        local_rank: *number,
        job_ranks: *ranks,
        job: job.clone(),
        host: Some(log::host_name().to_string_lossy().into_owned()),
        gpus: u32::try_from(driver.device_count()).ok(),
        uuid: Some(uuid.to_owned()),
        visible_devices: process::visible_devices(),
        cost: origin.cost,
        site: Some(origin.site.clone()),
    });
}

/// Whether this process ever had a context. Takes no lock, so that it can be asked where the process leaves at once.
pub fn was_any() -> bool {
    registry::is_known_of(FIRST)
}

/// The id of the first context of a process.
const FIRST: u64 = 1;

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
    let devices = driver.devices();
    let before = std::mem::replace(&mut *LAST_SWEEP.lock(), call);
    for device in devices {
        let known = || REGISTRY.lock().has_primary(device);
        // In this order: who made it was in MAKING before it existed, and has noted it when no longer there.
        if driver.primary_is_active(device) && MAKING.load(Ordering::SeqCst) == 0 && !known() {
            let between = format!("appeared between {before} and {call}");
            let added = add(driver, None, device, Kind::Appeared, &between, Before::at_init(device));
            found(device, added);
        }
    }
}

/// A reference to the primary context of this device was taken.
pub fn retained(device: Device) {
    REGISTRY.lock().retained(device);
}

/// A green context was made on this device.
pub fn green_began(green: GreenContext, device: Device) {
    REGISTRY.lock().green_began(green, device);
}

/// Whether a green context lives.
pub fn is_any_green() -> bool {
    REGISTRY.lock().is_any_green()
}

/// A part of the primary context of this device was made on purpose, and its streams may be given work whichever context is current:
/// that one is used.
pub fn is_meant(device: Device) {
    let primary = REGISTRY.lock().primary(device);
    if let Some(context) = primary {
        context.usage.worked();
    }
}

/// The handle that a green context has as a context. What is made in it belongs to the primary one.
pub fn green_is(green: GreenContext, context: cuda::Context) {
    REGISTRY.lock().green_is(green, context);
}

/// The driver's handle of the context with this id; `None` once it is gone.
pub fn handle_of(id: u64) -> Option<cuda::Context> {
    REGISTRY.lock().handle_of(id)
}

/// What is counted of the context with this id, while it lives: asked at every free, so mostly without a lock.
#[inline]
pub fn by_id(id: u64) -> Option<&'static Tally> {
    registry::recent(id).or_else(|| by_id_cold(id))
}

/// It is gone, or it is one of so many that a later one took its place among those that are at hand.
#[cold]
fn by_id_cold(id: u64) -> Option<&'static Tally> {
    REGISTRY.lock().by_id(id).map(|context| context.tally)
}

/// The context with this id, while it lives, and whether it is the only one on its device.
pub fn owner(id: u64) -> Option<(Context, bool)> {
    REGISTRY.lock().owner(id)
}

/// The context of this handle. That of a green context is its primary one.
pub fn by_handle(context: cuda::Context) -> Option<Context> {
    REGISTRY.lock().by_handle(context)
}

/// Every context of this process that lives, oldest first.
pub fn all() -> Vec<Context> {
    REGISTRY.lock().live()
}

/// Every context that lives, with what it was used for, and what all contexts of the process did together.
pub fn living() -> (Vec<Record>, Totals) {
    REGISTRY.lock().living()
}

/// Bytes that the contexts of this process took of a device's memory, as far as that is known.
pub fn cost_on(device: Device) -> u64 {
    REGISTRY.lock().cost_on(device)
}

/// What a context takes of a GPU, as far as those of this process tell: the most that one surely took, or the least that one took together with what others did meanwhile.
pub fn usual_cost() -> Option<u64> {
    REGISTRY.lock().usual_cost()
}

/// Whether this process has a context on a device now.
pub fn is_on(device: Device) -> bool {
    REGISTRY.lock().is_on(device)
}

/// Whether this process has had a context on a device for as long.
pub fn is_on_for(device: Device, time: Duration) -> bool {
    REGISTRY.lock().is_on_for(device, time)
}

/// How often a first context came to a device that had none. 0: it never had one, or what it has was not seen yet.
pub fn arrivals(device: Device) -> u64 {
    REGISTRY.lock().arrivals(device)
}

/// The sum of [`arrivals`] over all devices.
pub fn all_arrivals() -> u64 {
    REGISTRY.lock().all_arrivals()
}

/// A context that lives for as long as this does: calls that would end it wait.
pub struct Lease(u64);

/// Held by a thread that keeps contexts alive and works in them meanwhile, also in those that somebody is about to end: that waits for
/// this thread, which therefore must not wait for it.
pub struct Keeping(());

impl Keeping {
    pub fn begin() -> Self {
        KEEPS.with(|keeps| keeps.set(keeps.get() + 1));
        Self(())
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        KEEPS.with(|keeps| keeps.set(keeps.get() - 1));
    }
}

/// Keeps the context of this handle alive. `None`: it is not known to live.
pub fn lease(context: cuda::Context) -> Option<Lease> {
    Lease::take(context)
}

/// Keeps the context with this id alive. `None`: it is gone, or a call is under way that may end it; nobody waits for that.
pub fn keep(id: u64) -> Option<Lease> {
    REGISTRY.lock().lease_by_id(id)?.ok().map(Lease)
}

impl Lease {
    /// `None`: no context of this handle is known to live. A call under way that may end it is waited for, since it may
    /// live on after that, with work that somebody has to wait for.
    fn take(context: cuda::Context) -> Option<Self> {
        let mut registry = REGISTRY.lock();
        let keeps = KEEPS.get() > 0;
        loop {
            match if keeps { registry.lease_again(context) } else { registry.lease(context) }? {
                Ok(id) => return Some(Self(id)),
                Err(()) => CHANGED.wait(&mut registry),
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        REGISTRY.lock().give_back(self.0);
        CHANGED.notify_all();
    }
}

/// Makes a context current for the length of `act`, unless it is current already. `None` where it is not known to live: the
/// driver takes the handle of a destroyed context for a good one, and the process crashes later.
pub fn within<T>(driver: &Driver, context: cuda::Context, act: impl FnOnce() -> T) -> Option<T> {
    if driver.current_context() == Some(context) {
        return Some(act());
    }
    let _lives = Lease::take(context)?;
    within_own(driver, context, act)
}

/// Makes a context current for the length of `act`, one that the caller keeps alive or that the driver has just given to this
/// thread; others are for [`within`]. `None` where the driver refuses.
pub fn within_own<T>(driver: &Driver, context: cuda::Context, act: impl FnOnce() -> T) -> Option<T> {
    within_kept(driver, context, act).ok()
}

/// As [`within_own`], and says why the driver refuses.
pub fn within_kept<T>(driver: &Driver, context: cuda::Context, act: impl FnOnce() -> T) -> Result<T, CuResult> {
    if driver.current_context() == Some(context) {
        return Ok(act());
    }
    // SAFETY: the caller vouches for the context, which lives until it is popped below.
    unsafe { driver.push_context(context) }?;
    let value = act();
    driver.pop_context(context);
    Ok(value)
}

/// What `wait` answers in a context that the caller keeps alive, or why it could not be made current for that. `None`: it is in error, which is not for this thread to hear
/// (`is_heard`), and has no work left. A call may fail for other reasons, and then its work may go on.
pub fn wait_kept(
    driver: &Driver,
    context: cuda::Context,
    wait: impl Fn() -> CuResult,
    is_heard: impl FnOnce() -> bool,
) -> Option<CuResult> {
    let wait = || within_kept(driver, context, &wait).unwrap_or_else(|refused| refused);
    let answer = wait();
    // A context in error answers so to every call; in one that is not, this waits for its work.
    let is_over = answer.may_stick() && !is_heard() && !wait().is_ok();
    (!is_over).then_some(answer)
}

/// Makes some context of this device current for the length of `act`. `None` where none lives that could be. One that a call
/// may be ending is left alone: nobody waits here.
pub fn within_one_on<T>(driver: &Driver, device: Device, act: impl FnOnce() -> T) -> Option<T> {
    if !process::is_preloaded() {
        let primary = unseen::Primary::hold(driver, device)?;
        return within_own(driver, primary.handle, act);
    }
    let mut here = all().into_iter().filter(|context| context.device == device);
    let (_lives, handle) = here.find_map(|context| Some((keep(context.id)?, context.live_handle()?)))?;
    within_own(driver, handle, act)
}

/// Kernels launched in contexts of this device that are gone.
pub fn gone_launches(device: Device) -> u64 {
    REGISTRY.lock().gone_launches(device)
}

/// The driver, for the bodies of context calls.
pub fn driver() -> Option<&'static Driver> {
    cuda::get().ok()
}
