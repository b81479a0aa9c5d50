//! Managed memory that is kept where it was placed: mode `managed`, and the program's own managed memory where it asked
//! for advice (`GPUPOOL_MANAGED_ADVICE`).
//!
//! The driver alone would keep managed memory on the GPU that touches it, and evict to the host only. Told a preferred
//! location for each stripe, it leaves the stripe there and maps it for the GPUs that are named as accessing it: a block
//! of several GPUs, as the pool's. A block is one `cuMemAllocManaged`, so what frees it is the driver's own `cuMemFree`.
//!
//! Advice and prefetches are hints: when the driver refuses one, the log says so once and the memory serves all the same.
//! Neither is given during a capture, which they would invalidate; what is owed is made good after it.

pub mod blocks;
pub mod launch;
mod places;

use crate::backing;
use crate::backing::topology;
use crate::bypass::{self, Answer, Bypass};
use crate::serve::{memory, pinned};
use crate::watch::{
    capture,
    context::{self, Context, Observer},
};
use crate::{log, process};
use blocks::Managed;
use cudarc::driver::sys::{CUdeviceptr, CUmem_advise};
use gpupool_config::{Mode, Prefetch, Settings, Switch, Toggle, format_size};
use gpupool_cuda::{self as cuda, CuResult, Device, Driver, Stream};
use gpupool_interpose::cancel;
use gpupool_pool::{Accounts, Allocation, Block, Place, Usage};
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use places::{Level, Places, Refusal, Stripes};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// `CU_MEM_ATTACH_GLOBAL`: any stream of any GPU may use the memory.
const ATTACH_GLOBAL: u32 = 1;

/// What managed memory is placed by; the plan's places, and what was placed there.
struct Opened {
    driver: &'static Driver,
    plan: &'static backing::plan::Plan,
    places: Mutex<Places>,
    live: Mutex<Totals>,
}

/// For the summary.
#[derive(Clone, Copy, Default)]
struct Totals {
    blocks: u64,
    bytes: u64,
    peak: u64,
    allocations: u64,
}

static OPENED: OnceBox<Option<Opened>> = OnceBox::new();
/// Some live block has advice coming that could not be given yet.
static OWED: AtomicBool = AtomicBool::new(false);

fn wanted(settings: &Settings) -> bool {
    settings.mode == Mode::Managed || settings.managed_advice == Toggle::On
}

/// Opened now if it was not. `None` where no managed memory is placed in this process.
fn open() -> Option<&'static Opened> {
    if let Some(known) = OPENED.get() {
        return known.as_ref();
    }
    let settings = process::settings();
    if !wanted(settings) {
        return None;
    }
    let driver = process::driver()?;
    let plan = backing::open::plan(driver)?;
    let coherent = |place: Place| match place {
        Place::Gpu(ordinal) => plan.topology.gpus.get(ordinal as usize).is_some_and(|gpu| gpu.concurrent_managed),
        Place::Host(_) => true,
        Place::Disk | Place::Pageable => false,
    };
    let specs: Vec<_> = plan.places.iter().copied().filter(|spec| coherent(spec.place)).collect();
    let links = topology::coherent(plan.links.clone());
    // In the other modes only the program's own managed memory is placed. The driver evicts that from a GPU that others need,
    // so it keeps to the same limits by itself and leaves the pool what it has.
    let accounts = if plan.mode == Mode::Managed {
        Arc::clone(&plan.accounts)
    } else {
        let accounts = Accounts::new(&specs);
        for place in specs.iter().map(|spec| spec.place) {
            accounts.lend(place, plan.accounts.lends(place));
            accounts.close(place, plan.accounts.is_closed(place));
        }
        Arc::new(accounts)
    };
    let places = Mutex::new(Places::new(accounts, links, backing::open::policy()));
    backing::level::opened(&specs, managed_usage);
    let opened = Opened { driver, plan, places, live: Mutex::default() };
    OPENED.get_or_init(|| Box::new(Some(opened))).as_ref()
}

/// What managed memory needs, where blocks of ours are managed memory: the plan may have fallen back to another mode.
fn open_for_blocks() -> Option<&'static Opened> {
    if process::settings().mode != Mode::Managed {
        return None;
    }
    open().filter(|opened| opened.plan.mode == Mode::Managed)
}

/// Serves an allocation of `bytes` for the current context in mode managed. In the other modes, `why` the pool did not is the
/// answer.
#[cold]
pub fn allocate_managed(bytes: u64, why: Bypass) -> Answer<Result<u64, CuResult>> {
    let opened = open_for_blocks().ok_or(why)?;
    let context = context::current(opened.driver).ok_or(Bypass::NoContext)?;
    allocate_for(&context, context.device, bytes, process::settings().soft_oom != Switch::Off, why)
}

/// A block of managed memory near a GPU, owned by a context. `soft`: a program that caches is told OUT_OF_MEMORY once before the GPU
/// overflows.
#[cold]
pub fn allocate_for(
    context: &Context,
    device: Device,
    bytes: u64,
    soft: bool,
    why: Bypass,
) -> Answer<Result<u64, CuResult>> {
    let opened = open_for_blocks().ok_or(why)?;
    bypass::makes_memory()?;
    let home = device.ordinal();
    let left_out = Bypass::LeftOut(device);
    let mut placed = opened.place(home, bytes, soft).ok_or(left_out)?;
    if placed == Err(Refusal::Soft) {
        if memory::is_refused_softly(home, bytes) {
            return Ok(Err(CuResult::OUT_OF_MEMORY));
        }
        placed = opened.place(home, bytes, false).ok_or(left_out)?;
    }
    if let Err(Refusal::Full { missing }) = placed {
        memory::report_full(home, bytes, missing);
    }
    let stripes = placed.map_err(|_| Bypass::Full)?;
    let address = match opened.driver.allocate_managed(bytes) {
        Ok(address) => address,
        Err(result) => {
            opened.places.lock().give(&stripes);
            // Where the driver is gone, the process is exiting.
            if result != CuResult::DEINITIALIZED {
                memory::report_fallback(home, bytes, &result.to_string());
            }
            return Err(Bypass::Declined(result));
        }
    };
    context.usage.allocated(bytes);
    let managed = opened.began(context, home, address, bytes, stripes, true);
    let (mut on_peers, mut on_host) = (0, 0);
    for &(place, bytes) in managed.stripes.iter().filter(|(place, _)| *place != Place::Gpu(home)) {
        *(if place.is_host() { &mut on_host } else { &mut on_peers }) += bytes;
    }
    memory::report(&Allocation { block: managed.block, reused: false, on_peers, on_host });
    Ok(Ok(address))
}

/// The program allocated managed memory itself (`cuMemAllocManaged` succeeded): placed like a block of ours, where asked
/// for. Memory attached to the host or to a stream is none of the GPUs' in common, and small pieces share pages.
pub fn adopt(address: CUdeviceptr, bytes: u64, flags: u32) {
    let settings = process::settings();
    let eligible = flags == ATTACH_GLOBAL && bytes >= settings.min_size && settings.managed_advice == Toggle::On;
    let Some(opened) = eligible.then(open).flatten() else { return };
    let Some(context) = context::current(opened.driver) else { return };
    let home = context.device.ordinal();
    if let Some(Ok(stripes)) = opened.place(home, bytes, false) {
        opened.began(&context, home, address, bytes, stripes, false);
    }
}

impl Opened {
    /// Sets room aside for a block of `home`. `None`: the GPU is not ours.
    fn place(&self, home: u32, bytes: u64, soft: bool) -> Option<Result<Stripes, Refusal>> {
        if !self.plan.serves(Device::of(home)) {
            return None;
        }
        let order = self.places.lock().order(home);
        let needed = self.places.lock().needed(&order);
        let mut answer = None;
        let mut levels = Vec::new();
        for place in order {
            levels.push((place, self.level(place)));
            if levels.len() >= needed {
                let taken = self.places.lock().take(bytes, &levels, soft);
                let is_full = matches!(taken, Err(Refusal::Full { .. }));
                answer = Some(taken);
                if !is_full {
                    break;
                }
            }
        }
        answer
    }

    /// What the system says of a place. No lock is held.
    fn level(&self, place: Place) -> Level {
        let _sheltered = cancel::shelter();
        let ordinal = match place {
            Place::Host(_) => {
                return backing::host::available().map_or(Level::Unknown, |available| Level::Host { available });
            }
            Place::Gpu(ordinal) => ordinal,
            Place::Disk | Place::Pageable => return Level::Unknown,
        };
        let gpu = self.plan.topology.gpus.get(ordinal as usize);
        let free = gpu.and_then(|gpu| backing::free_on(self.driver, ordinal, &gpu.uuid));
        let (Some(gpu), Some(free)) = (gpu, free) else { return Level::Unknown };
        let reserve = self.plan.members.get(&ordinal).copied().unwrap_or(0);
        Level::Gpu { usable: gpu.total.saturating_sub(reserve), in_use: gpu.total.saturating_sub(free) }
    }

    /// Enters a new block and does for it what can be done now.
    fn began(
        &self,
        context: &Context,
        home: u32,
        address: u64,
        bytes: u64,
        stripes: Stripes,
        ours: bool,
    ) -> Arc<Managed> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let block = Block { address, bytes, home, owner: context.id, id };
        let (placed, accessed) = (AtomicBool::new(false), AtomicU64::new(0));
        let managed = Arc::new(Managed { block, stripes, ours, placed, accessed });
        pinned::given_anew(address, bytes);
        given_anew(address, bytes);
        if process::settings().prefetch == Prefetch::Launch {
            launch::start(self.driver);
        }
        blocks::insert(managed.clone());
        if ours {
            let mut live = self.live.lock();
            live.blocks += 1;
            live.allocations += 1;
            live.bytes += bytes;
            live.peak = live.peak.max(live.bytes);
        }
        self.settle(&managed);
        managed
    }

    /// A block is gone.
    fn ended(&self, managed: &Managed) {
        self.places.lock().give(&managed.stripes);
        if managed.ours {
            let mut live = self.live.lock();
            live.blocks -= 1;
            live.bytes -= managed.block.bytes;
        }
    }

    /// Gives the advice that a block still lacks, and moves it when it gets its places.
    fn settle(&self, managed: &Managed) {
        let Some(context) = context::current(self.driver).filter(|_| !capture::under_way()) else {
            OWED.store(true, Ordering::Release);
            return;
        };
        let first = !managed.placed.swap(true, Ordering::AcqRel);
        if first {
            for (place, address, bytes) in managed.parts() {
                self.advise(address, bytes, CUmem_advise::CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place);
            }
        }
        for ordinal in self.devices_in_use() {
            let bit = 1 << (ordinal % u64::BITS);
            if managed.accessed.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
                let Block { address, bytes, .. } = managed.block;
                self.advise(address, bytes, CUmem_advise::CU_MEM_ADVISE_SET_ACCESSED_BY, Place::Gpu(ordinal));
            }
        }
        if first
            && process::settings().prefetch != Prefetch::Off
            && let Some(stream) = self.stream(&context)
        {
            self.prefetch(managed, stream);
        }
    }

    /// Moves each stripe to its place, in the order of a stream of the current context.
    fn prefetch(&self, managed: &Managed, stream: Stream) {
        for (place, address, bytes) in managed.parts() {
            // SAFETY: the stream is the program's own for this very call, or ours.
            let result = unsafe { self.driver.prefetch(address, bytes, place, stream) };
            say_refused("cuMemPrefetchAsync", result, bytes, place);
        }
    }

    fn advise(&self, address: u64, bytes: u64, what: CUmem_advise, place: Place) {
        let result = self.driver.advise(address, bytes, what as i32, place);
        say_refused("cuMemAdvise", result, bytes, place);
    }

    /// The pool's GPUs that have a context. The others cannot touch the memory.
    fn devices_in_use(&self) -> impl Iterator<Item = u32> {
        let contexts = context::all().into_iter();
        let mut ordinals: Vec<u32> = contexts.map(|context| context.device.ordinal()).collect();
        ordinals.sort_unstable();
        ordinals.dedup();
        ordinals.into_iter().filter(|ordinal| self.plan.members.contains_key(ordinal))
    }

    /// The stream of ours in a context, made when first needed; it goes with the context.
    fn stream(&self, context: &Context) -> Option<Stream> {
        static STREAMS: Mutex<BTreeMap<u64, Stream>> = Mutex::new(BTreeMap::new());
        // A stream made in a green context would end with that, and not with the primary one.
        if self.driver.current_context() != context.live_handle() {
            return None;
        }
        if let Some(known) = STREAMS.lock().get(&context.id) {
            return Some(*known);
        }
        let stream = self.driver.create_stream().ok()?;
        let first = *STREAMS.lock().entry(context.id).or_insert(stream);
        if first != stream {
            // SAFETY: made above, and nobody else knows it: another thread was first.
            let _ = unsafe { self.driver.destroy_stream(stream) };
        }
        Some(first)
    }
}

fn say_refused(call: &'static str, result: CuResult, bytes: u64, place: Place) {
    // The second: the process is exiting, and the driver is gone.
    if !matches!(result, CuResult::SUCCESS | CuResult::DEINITIALIZED) {
        log::warn_once(
            call,
            format_args!(
                "{call} of {} for {} was refused ({result}): managed memory stays where the driver puts it, and works",
                format_size(bytes),
                place
            ),
        );
    }
}

/// Gives what is owed, where nothing forbids it any more: a context appeared, a capture ended.
pub fn catch_up() {
    if let Some(Some(opened)) = OPENED.get()
        && OWED.swap(false, Ordering::AcqRel)
    {
        blocks::all().iter().for_each(|managed| opened.settle(managed));
    }
}

/// Has the GPUs of new contexts map the blocks that live, and ends those of contexts that are gone.
pub struct OfContexts;

impl Observer for OfContexts {
    fn began(&self, driver: &Driver, context: Option<cuda::Context>) {
        context_appeared(driver, context);
    }

    fn ended(&self, id: u64) -> usize {
        let blocks = owner_gone(id);
        if blocks > 0 {
            backing::level::report();
        }
        blocks
    }

    fn settled(&self) {
        catch_up();
    }
}

/// There is a new context, so that its GPU is to map the blocks that live. Another one is current, or none.
fn context_appeared(driver: &Driver, context: Option<cuda::Context>) {
    if OPENED.get().is_none() {
        return;
    }
    OWED.store(true, Ordering::Release);
    if let Some(context) = context {
        context::within(driver, context, catch_up);
    }
}

/// The driver gave this range to the program: a block there went with its context, whose end nobody has told yet.
#[inline]
pub fn given_anew(address: u64, bytes: u64) {
    if !blocks::may_meet(address, bytes) {
        return;
    }
    let Some(Some(opened)) = OPENED.get() else { return };
    for gone in blocks::remove_within(address, bytes) {
        opened.ended(&gone);
    }
}

/// Frees an address by the driver's `cuMemFree`, and ends the block that begins there, if the driver did free it.
#[inline]
pub fn free_managed(address: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    if blocks::may_contain(address) { free_block(address, call) } else { call() }
}

/// Frees a block by the driver's `cuMemFreeAsync`, which takes memory of `cuMemAlloc` but may not take managed memory. Then
/// `cuMemFree` does it, which waits for every stream. During a capture that would break it, and the refusal stands: it is
/// also the answer for memory that the capture did not allocate.
pub fn free_in_order(address: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let result = free_managed(address, call);
    match process::driver() {
        Some(driver) if result == CuResult::INVALID_VALUE && !capture::under_way() => {
            free_managed(address, || driver.free(address))
        }
        _ => result,
    }
}

#[cold]
fn free_block(address: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    // Taken out first: after the call the driver may give the address to another thread.
    let removed = blocks::remove(address);
    let result = call();
    let (Some(managed), Some(Some(opened))) = (removed, OPENED.get()) else { return result };
    if !result.is_ok() {
        blocks::insert(managed);
        return result;
    }
    opened.ended(&managed);
    if managed.ours {
        memory::report_free(&managed.block);
    }
    result
}

/// Whether an address may lie in a live block of managed memory, the program's own among them. No lock.
#[inline]
pub fn may_have(address: u64) -> bool {
    blocks::may_contain(address)
}

/// The live block of ours that an address lies in.
pub fn block_at(address: u64) -> Option<Block> {
    blocks::at(address).filter(|managed| managed.ours).map(|managed| managed.block)
}

/// The parts of a range of a live block of ours, as `(place, address, bytes)`: where they were placed, whatever the program
/// or the driver moved since.
pub fn parts(address: u64, bytes: u64) -> Vec<(Place, u64, u64)> {
    let Some(managed) = blocks::at(address).filter(|managed| managed.ours) else { return Vec::new() };
    let end = address.saturating_add(bytes);
    let within = |(place, start, bytes): (Place, u64, u64)| {
        let (first, last) = (start.max(address), (start + bytes).min(end));
        (first < last).then_some((place, first, last - first))
    };
    managed.parts().filter_map(within).collect()
}

/// The context with this id is gone. What the driver has freed with it is gone, too; how many blocks that were.
fn owner_gone(id: u64) -> usize {
    let Some(Some(opened)) = OPENED.get() else { return 0 };
    let mut gone = 0;
    for managed in blocks::all().into_iter().filter(|managed| managed.block.owner == id) {
        let address = managed.block.address;
        // Where pinned memory of the pool's is by now, the driver answers for that.
        let is_gone = pinned::is_pooled(address) || opened.driver.range_size(address) != Ok(managed.block.bytes);
        if is_gone && blocks::remove_this(&managed) {
            opened.ended(&managed);
            gone += 1;
        }
    }
    gone
}

/// Bytes that blocks for this GPU could still take of the GPUs, for `cuMemGetInfo`; `None` in other modes.
pub fn free_for(home: u32, counts: impl Fn(u32) -> bool) -> Option<u64> {
    let opened = open_for_blocks()?;
    let order = opened.places.lock().order(home);
    let counted = |place: &Place| matches!(*place, Place::Gpu(ordinal) if ordinal == home || counts(ordinal));
    let gpus = order.into_iter().filter(counted);
    let levels: Vec<_> = gpus.map(|place| (place, opened.level(place))).collect();
    Some(opened.places.lock().rooms(&levels).iter().map(|room| room.bytes).sum())
}

/// The usage in mode managed, in the form of the pool's: memory that was placed somewhere counts as held there. `None` in other
/// modes.
pub fn managed_usage() -> Option<Usage> {
    let opened = OPENED.get()?.as_ref().filter(|opened| opened.plan.mode == Mode::Managed)?;
    let places = opened.places.lock().usage();
    let Totals { blocks, bytes, peak, allocations } = *opened.live.lock();
    Some(Usage {
        places,
        live_blocks: blocks,
        live_bytes: bytes,
        peak_live_bytes: peak,
        allocations,
        ..Usage::default()
    })
}
