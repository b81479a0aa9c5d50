//! Pooled device memory: blocks for the program, what is said of them, and what goes back to the driver.

pub mod by_hand;
mod caching;
pub mod call_sites;
pub mod idle;
pub mod labels;
pub mod memops;
pub mod mempool;
pub mod names;
pub mod oom;
mod outcome;
pub mod places;
pub mod scope;
pub mod unpooled;

pub use caching::returns_its_cache;

use crate::backing::open::{self, Opened};
use crate::backing::vmm::Vmm;
use crate::backing::{self, copies, level, residence, terms};
use crate::bypass::{self, Answer, Bypass};
use crate::watch::context::{self, Context, Observer};
use crate::{bell, live, log, process};
use gpupool_config::{Free as FreeSetting, Mode, Move, format_size};
use gpupool_cuda::{CuResult, Device, Driver, Physical};
use gpupool_events::{BlockAllocate, BlockFree, PoolFallback, PoolGrow, PoolRefuse, PoolSpill, PoolTrim};
use gpupool_interpose::Api;
use gpupool_pool::{
    Accounts, Allocation, Anchor, Block, Claim, Free, FreeError, Piece, Place, Pool, Repacks, Request, Small, Usage,
};
use once_cell::race::OnceBox;
use outcome::Outcome;
use parking_lot::Mutex;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes of blocks and handles that lay outside their home GPU when they were made, each of them anew, for the summary. What moved since is in
/// [`residence`]: a total of both would count the same memory each time that it leaves, and be no part of what was allocated.
static SPILLED: AtomicU64 = AtomicU64::new(0);

/// What was said of requests and of freed memory, over the life of the process: how often.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// OUT_OF_MEMORY to a program that caches.
    pub soft_refusals: u64,
    /// No room at any place.
    pub refusals: u64,
    /// No block although there was room.
    pub fallbacks: u64,
    /// Freed memory that went back.
    pub trims: u64,
}

static SOFT_REFUSALS: AtomicU64 = AtomicU64::new(0);
static REFUSALS: AtomicU64 = AtomicU64::new(0);
static FALLBACKS: AtomicU64 = AtomicU64::new(0);
static TRIMS: AtomicU64 = AtomicU64::new(0);

/// See [`Told`].
pub fn told() -> Told {
    let [soft_refusals, refusals, fallbacks, trims] =
        [&SOFT_REFUSALS, &REFUSALS, &FALLBACKS, &TRIMS].map(|counter| counter.load(Ordering::Relaxed));
    Told { soft_refusals, refusals, fallbacks, trims }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
    bell::changed();
}

/// How allocations are served now, a value of `GPUPOOL_MODE`; `off` where no pool is possible.
pub fn mode() -> &'static CStr {
    let mode = match open::planned() {
        Some(None) => Mode::Off,
        Some(Some(_)) if open::has_failed() => Mode::Off,
        Some(Some(plan)) => plan.mode,
        None => process::settings().mode,
    };
    match mode {
        Mode::Pool => c"pool",
        Mode::Spill => c"spill",
        Mode::Managed => c"managed",
        Mode::Trace => c"trace",
        Mode::Off => c"off",
    }
}

/// The pool and the current context, where allocations are the pool's business.
#[inline]
pub fn pool_for() -> Answer<(&'static Opened, Context)> {
    let driver = process::driver().ok_or(Bypass::NoDriver)?;
    let context = context::current(driver).ok_or(Bypass::NoContext)?;
    Ok((opened_for(driver, context.device)?, context))
}

/// The pool, where memory asked for on this GPU is its business.
#[inline]
pub fn opened_for(driver: &'static Driver, device: Device) -> Answer<&'static Opened> {
    bypass::makes_memory()?;
    let opened = open::open(driver).ok_or(Bypass::NoPool)?;
    if opened.plan.serves(device) { Ok(opened) } else { Err(Bypass::LeftOut(device)) }
}

/// A block's address, or the program's OUT_OF_MEMORY where it is told so once (`soft`).
pub fn from_pool(
    opened: &Opened,
    context: &Context,
    device: Device,
    bytes: u64,
    soft: bool,
) -> Answer<Result<u64, CuResult>> {
    let home = device.ordinal();
    let repacker = REPACKER.get();
    let mut request = Request {
        bytes,
        home,
        owner: context.id,
        soft_refusal: soft,
        repacks: repacks_for(repacker.is_some()),
        can_ask: ASKER.get().is_some(),
        can_widen: terms::keeps_apart() && WIDENER.get().is_some(),
    };
    // Others may take what came free, so that once for each place may be too little; the old answer stands then.
    let mut repacks = opened.plan.places.len();
    let mut asking = Asking::default();
    let away = if labels::wants_away(bytes) { opened.pool.allocate_away(&request).ok() } else { None };
    let is_put = away.is_some();
    let mut from_pool = away.map_or_else(|| opened.pool.allocate(&request), Ok);
    loop {
        match outcome::of_request(from_pool, device, || context.is_gone(), || is_refused_softly(home, bytes)) {
            Outcome::Made(allocation) if !is_put && is_refused_far(&allocation) => {
                // Nobody has seen it yet, so nothing is at work on it.
                let _ = opened.pool.free(allocation.block.address, Free::Lazy);
                oom::refused(device, bytes, oom::Kind::Block, oom::Why::Far);
                return Ok(Err(CuResult::OUT_OF_MEMORY));
            }
            Outcome::Made(allocation) => {
                context.usage.allocated(bytes);
                report_made(&allocation, is_put);
                let block = &allocation.block;
                if is_put {
                    say(block, block.address, block.bytes, Placing::Put);
                }
                labels::name_in_scope(block);
                return Ok(Ok(block.address));
            }
            Outcome::TooLate => {
                context::end::disown(context);
                return Err(Bypass::ContextGone);
            }
            Outcome::Refused => return Ok(Err(CuResult::OUT_OF_MEMORY)),
            Outcome::AskAgain => request.soft_refusal = false,
            Outcome::HalfUsed { place, bytes } => {
                let freed = repacker.map_or(0, |repack| repack(place, bytes, "request"));
                repacks = repacks.saturating_sub(1);
                if freed == 0 || repacks == 0 {
                    request.repacks = Repacks::Never;
                }
            }
            Outcome::Lacks { bytes } => {
                request.can_ask = asking.ask(home, bytes);
            }
            Outcome::Far { bytes } => {
                have_more_lend(home, bytes);
                request.can_widen = false;
            }
            Outcome::Full { missing } => {
                report_full(home, bytes, missing);
                return Err(Bypass::Full);
            }
            Outcome::NoBlock(why, text) => {
                report_fallback(home, bytes, &text);
                return Err(why);
            }
            Outcome::Left(why) => return Err(why),
        }
        from_pool = opened.pool.allocate(&request);
    }
}

/// Without `GPUPOOL_MOVE` the program is stopped only where it would be refused otherwise.
fn repacks_for(can: bool) -> Repacks {
    match process::settings().moving {
        _ if !can => Repacks::Never,
        Move::Off => Repacks::ToFit,
        Move::Auto | Move::Stress => Repacks::ToStay,
    }
}

/// Whether a request is for a block that shares its frames with others.
#[inline]
pub fn is_small(bytes: u64) -> bool {
    Pool::<Vmm>::is_small(bytes)
}

/// The address of such a block, on the context's own GPU. Where there is no room the driver is asked, which packs small requests
/// as well, and the log says no more of it than of any other call that is left to the driver.
pub fn small_from_pool(opened: &Opened, context: &Context, bytes: u64) -> Answer<u64> {
    let device = context.device;
    let request = Request {
        bytes,
        home: device.ordinal(),
        owner: context.id,
        soft_refusal: false,
        repacks: Repacks::Never,
        can_ask: false,
        can_widen: false,
    };
    let (small, slab) = match opened.pool.allocate_small(&request) {
        Ok(Small { block, slab }) => {
            let reused = slab.is_none_or(|slab| slab.reused);
            (Ok(Allocation { block, reused, on_peers: 0, on_host: 0 }), slab)
        }
        Err(refusal) => (Err(refusal), None),
    };
    match outcome::of_request(small, device, || context.is_gone(), || false) {
        Outcome::Made(allocation) => {
            context.usage.allocated(bytes);
            // Of small blocks the log alone has a line each; what the pool knows of them is their slabs.
            let site = log::has_every_block().then(|| call_sites::made(&allocation.block, true)).flatten();
            report_block(&allocation, site);
            labels::name_in_scope(&allocation.block);
            match slab.filter(|slab| !slab.reused) {
                Some(slab) => {
                    report_growth(&slab.block, slab.on_peers, slab.on_host, false, site);
                    level::report();
                }
                None => level::rose(bytes),
            }
            bell::allocated();
            Ok(allocation.block.address)
        }
        Outcome::TooLate => {
            context::end::disown(context);
            Err(Bypass::ContextGone)
        }
        Outcome::Refused
        | Outcome::AskAgain
        | Outcome::HalfUsed { .. }
        | Outcome::Lacks { .. }
        | Outcome::Far { .. }
        | Outcome::Full { .. } => Err(Bypass::Full),
        Outcome::NoBlock(why, text) => {
            report_fallback(device.ordinal(), bytes, &text);
            Err(why)
        }
        Outcome::Left(why) => Err(why),
    }
}

/// A block would overflow its GPU: whether the program is told OUT_OF_MEMORY, which is for one that caches. Looked up only here,
/// where it matters: libraries may be loaded at any time.
pub fn is_refused_softly(home: u32, bytes: u64) -> bool {
    let refused = returns_its_cache();
    if refused {
        say_refused_softly(home, bytes, "");
    }
    refused
}

/// Whether a block that was made lies elsewhere in part and must not. Says so then.
fn is_refused_far(allocation: &Allocation) -> bool {
    let Allocation { block: Block { bytes, home, .. }, on_peers, on_host, .. } = *allocation;
    on_peers + on_host > 0 && refuses_far(home, bytes, "")
}

/// Whether so much memory elsewhere than on this GPU is refused, because reading what lies there already costs too much. Says so then,
/// and of what, where that is not a block.
pub fn refuses_far(home: u32, bytes: u64, what: &str) -> bool {
    let refuses = HEARER.get().is_some_and(|hearer| (hearer.refuses)(home));
    if refuses {
        log::emit(|| {
            let size = format_size(bytes);
            let text = format!(
                "OUT_OF_MEMORY for {what}{size}, which would lie far from GPU {home} at least in part: more of the time than \
                 GPUPOOL_FAR_LIMIT is lost by reading what lies there already"
            );
            (PoolRefuse { home, bytes, why: "far".to_owned(), missing: None }, text)
        });
    }
    refuses
}

/// A program is told OUT_OF_MEMORY once, so that it returns its cache; `what` says of what, where that is not a block.
pub fn say_refused_softly(home: u32, bytes: u64, what: &str) {
    count(&SOFT_REFUSALS);
    log::emit(|| {
        let size = format_size(bytes);
        let text = format!(
            "OUT_OF_MEMORY for {what}{size} once, so that the program returns its cache before GPU {home} overflows"
        );
        (PoolRefuse { home, bytes, why: "soft".to_owned(), missing: Some(0) }, text)
    });
}

/// There is no place for a block; the driver is asked.
pub fn report_full(home: u32, bytes: u64, missing: u64) {
    count(&REFUSALS);
    log::emit(|| {
        let (size, less) = (format_size(bytes), format_size(missing));
        let text = format!("no room for {size} in the pool, {less} are missing; the driver is asked");
        (PoolRefuse { home, bytes, why: "full".to_owned(), missing: Some(missing) }, text)
    });
}

/// A block could not be made although there was room; the driver is asked.
pub fn report_fallback(home: u32, bytes: u64, why: &str) {
    count(&FALLBACKS);
    log::emit(|| {
        let size = format_size(bytes);
        let text = format!("the pool could not make a block of {size} for GPU {home} ({why}); the driver is asked");
        (PoolFallback { home, bytes, why: why.to_owned() }, text)
    });
}

/// A block was made.
#[inline]
pub fn report(allocation: &Allocation) {
    report_made(allocation, false);
}

/// A block was made; `is_put`: elsewhere than at home, because the program wants it there.
#[inline]
fn report_made(allocation: &Allocation, is_put: bool) {
    let Allocation { block, reused, on_peers, on_host } = *allocation;
    let site = call_sites::made(&block, reused);
    report_block(allocation, site);
    if reused {
        // What was kept may lie elsewhere, too.
        if on_peers + on_host > 0 {
            count_spilled(on_peers + on_host);
        }
        level::rose(block.bytes);
    } else {
        report_growth(&block, on_peers, on_host, is_put, site);
        level::report();
    }
    if let Some(hearer) = HEARER.get() {
        (hearer.made)(allocation);
    }
    bell::allocated();
}

#[inline]
fn report_block(allocation: &Allocation, site: Option<u64>) {
    let Allocation { block: Block { address, bytes, home, .. }, reused, on_peers, on_host } = *allocation;
    log::emit(move || {
        let event = BlockAllocate { address, bytes, home, reused, on_peers, on_host, site };
        (event, format!("{} at {address:#x} for GPU {home}", format_size(bytes)))
    });
    if on_peers + on_host > 0 {
        places::tell(&allocation.block);
    }
}

#[cold]
fn report_growth(block: &Block, on_peers: u64, on_host: u64, is_put: bool, site: Option<u64>) {
    let Block { bytes, home, .. } = *block;
    if on_peers + on_host == 0 {
        log::emit(|| {
            let event = PoolGrow { home, bytes, on_peers, on_host, site };
            (event, format!("pool grew by {} on GPU {home}", format_size(bytes)))
        });
    } else {
        count_spilled(on_peers + on_host);
        residence::is_far();
        if on_host > 0 && !is_put {
            report_host(home, on_host, bytes);
        }
        log::emit(|| {
            let [size, peers, host] = [bytes, on_peers.min(bytes), on_host.min(bytes)].map(format_size);
            let why = if is_put { "is to be elsewhere" } else { "did not fit there" };
            let text = format!("{size} for GPU {home} {why}: {peers} are on other GPUs, {host} on the host");
            (PoolSpill { home, bytes, on_peers, on_host, site }, text)
        });
    }
}

/// Memory for a GPU is on the host: said the first time, because nothing fails and all that uses it is slow.
pub fn report_host(home: u32, on_host: u64, bytes: u64) {
    // Within a limit the driver serves what no place has room for, so doing without the host makes no OUT_OF_MEMORY.
    let drained = terms::drained();
    let (by_drain, undrain);
    let (why, advice) = if !drained.is_empty() && !terms::keeps_apart() {
        let (is, lends) = if drained.len() == 1 { ("is", "it lends") } else { ("are", "they lend") };
        let gpus = drained.iter().map(|gpu| format!("GPU {gpu}")).collect::<Vec<_>>().join(", ");
        let commands = drained.iter().map(|gpu| format!("gpupool undrain {gpu}")).collect::<Vec<_>>().join(", ");
        by_drain = format!("no GPU that can lend has room, and {gpus} {is} drained (gpupool drain)");
        undrain =
            format!("{commands} so that {lends} again, or set GPUPOOL_HOST_LIMIT=0 to leave such memory to the driver");
        (by_drain.as_str(), undrain.as_str())
    } else if terms::is_kept_below(home) {
        (
            "no GPU that can lend has room, and what this program had there was given to another one that does not matter less, for which it is kept for some seconds",
            "raise GPUPOOL_PRIORITY of this one, or set GPUPOOL_HOST_LIMIT=0 to leave such memory to the driver",
        )
    } else if terms::keeps_apart() {
        (
            terms::why_apart(),
            "set GPUPOOL_DEVICES to a list of GPUs, as GPUPOOL_DEVICES=0,1, to have these lend, at once with gpupool set PID devices=0,1, or set GPUPOOL_HOST_LIMIT=0 to leave such memory to the driver",
        )
    } else if live::limit().is_set() {
        (
            "no GPU that can lend has room within GPUPOOL_LIMIT",
            "raise GPUPOOL_LIMIT, or set GPUPOOL_HOST_LIMIT=0 to leave such memory to the driver",
        )
    } else if open::plan_made().is_some_and(|plan| plan.has_budgets()) {
        (
            "no GPU that can lend has room within what others allow this process of it (gpupool doctor names the limit)",
            "raise that limit, or set GPUPOOL_HOST_LIMIT=0 to leave such memory to the driver",
        )
    } else if process::driver()
        .zip(open::plan_made())
        .is_some_and(|(driver, plan)| plan.reserve_keeps(driver, home, on_host.min(bytes)))
    {
        (
            "no GPU that can lend has room beyond GPUPOOL_RESERVE",
            "lower GPUPOOL_RESERVE, or set GPUPOOL_HOST_LIMIT=0 to get OUT_OF_MEMORY instead",
        )
    } else {
        (
            "no GPU that can lend has room",
            "free GPUs or add some to GPUPOOL_DEVICES, or set GPUPOOL_HOST_LIMIT=0 to get OUT_OF_MEMORY instead",
        )
    };
    log::warn_once(
        "host",
        format_args!(
            "{} of the {} just allocated for GPU {home} are in the host's memory, because {why}; \
             kernels reach it over PCIe, many times more slowly than a GPU's memory (make the working set smaller, {advice}; \
             said once)",
            // What is rounded up to frames may be more than was asked for.
            format_size(on_host.min(bytes)),
            format_size(bytes)
        ),
    );
}

/// Frees pooled memory; the program's answer, and the context that was waited for.
#[inline]
pub fn free_block(address: u64) -> Answer<(CuResult, Option<u64>)> {
    free_when(
        address,
        match process::settings().free {
            FreeSetting::Strict => Free::Strict,
            FreeSetting::Lazy => Free::Lazy,
        },
    )
}

/// Frees pooled memory in the order of a stream of `device`, without waiting: it is used again once everything is done that
/// was submitted before to that GPU, which need not be the block's home.
pub fn free_later(address: u64, device: Device) -> Answer<CuResult> {
    let opened = open::opened().filter(|opened| opened.contains(address)).ok_or(Bypass::NotOurs)?;
    Ok(freed(opened.pool.free_after(address, device.ordinal())))
}

#[inline]
fn free_when(address: u64, when: Free) -> Answer<(CuResult, Option<u64>)> {
    let opened = open::opened().filter(|opened| opened.contains(address)).ok_or(Bypass::NotOurs)?;
    // In a context that is gone nothing is freed, of whomever it is: the driver says so. Asked of our own addresses only,
    // since the driver looks by itself at a call that is passed on.
    if context::is_refused() {
        return Err(Bypass::ContextGone);
    }
    let outcome = opened.pool.free(address, when);
    let waited = outcome::waited_for(&outcome, when);
    Ok((freed(outcome), waited))
}

/// Whether a range touches the pool's addresses: to the program they are the driver's own allocations, whose mappings it may
/// neither end nor change.
pub fn is_reserved(address: u64, bytes: u64) -> bool {
    open::opened().is_some_and(|opened| opened.touches(address, bytes))
}

/// Who hears of every block with frames of its own.
#[derive(Clone, Copy)]
pub struct Hearer {
    /// One was made, perhaps of memory that lies elsewhere than its home.
    pub made: fn(&Allocation),
    /// One ended.
    pub ended: fn(&Block),
    /// Whether one of this GPU's that would lie elsewhere is refused (`GPUPOOL_FAR_LIMIT`).
    pub refuses: fn(u32) -> bool,
    /// Something was said of so many bytes of one, from this address on.
    pub placed: fn(&Block, u64, u64, Placing),
}

/// What was said of where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// The program has put it there, and it is to stay.
    Put,
    /// The program does not mind any more.
    Anywhere,
    /// It must keep its physical memory, or need not any more: the pool knows.
    Anchored,
}

/// Tells whoever moves memory.
fn say(block: &Block, address: u64, bytes: u64, placing: Placing) {
    if let Some(hearer) = HEARER.get() {
        let bytes = bytes.min((block.address + block.bytes).saturating_sub(address));
        (hearer.placed)(block, address, bytes, placing);
    }
}

/// The anchors of the block that this address lies in have changed.
fn say_anchored(address: u64) {
    if HEARER.get().is_some()
        && let Some(block) = block_at(address)
    {
        say(&block, block.address, block.bytes, Placing::Anchored);
    }
}

static HEARER: OnceBox<Hearer> = OnceBox::new();

/// Has this one told of blocks, from now on: by who moves them, which most programs do not ask for.
pub fn hear_of_blocks(hearer: Hearer) {
    let _ = HEARER.set(Box::new(hearer));
}

/// Who cuts half-used chunks at a place anew, until so many bytes came free ([`gpupool_pool::Pool::repack`]); how many did. The last
/// argument is what for, as the log says it.
pub type Repacker = fn(Place, u64, &'static str) -> u64;

static REPACKER: OnceBox<Repacker> = OnceBox::new();

/// Has this one asked from now on, before a request is refused or served farther away, and when the program trims.
pub fn repack_by(repacker: Repacker) {
    let _ = REPACKER.set(Box::new(repacker));
}

/// What an allocation lacks of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Lacks {
    pub gpu: u32,
    pub bytes: u64,
    /// What less than that is good for.
    pub less: Less,
    /// When it asked first, if it has before.
    pub since: Option<Instant>,
}

/// What less than all of it is good for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Less {
    /// A part of a block.
    #[default]
    Part,
    /// Nothing: it lies in one place.
    Nothing,
    /// Nothing, and what a context takes is not known before it is made: so much is asked for at a time.
    Context,
}

/// Who asks other processes for what lacks of a GPU; how much they say they have freed. Of an allocation that has asked for too long it asks nobody.
pub type Asker = fn(&Lacks) -> u64;

static ASKER: OnceBox<Asker> = OnceBox::new();

/// Has this one asked from now on, before a request is refused or served elsewhere because others than this process have the memory of its GPU.
pub fn ask_by(asker: Asker) {
    let _ = ASKER.set(Box::new(asker));
}

/// What one allocation asks other processes. What came free for it anybody may have taken before it looks again, as where two ask one process for what each of them lacks of the same
/// free memory. So it asks for what lacks then, as long as that brings something, within the time for which one question waits at most. Rejected: to have one of them take before the next one is
/// served, which needs a lock over processes, and who is stopped would keep it.
#[derive(Default)]
pub struct Asking {
    /// When the first question began.
    begun: Option<Instant>,
    questions: u32,
    less: Less,
}

impl Asking {
    /// Who says that it has freed something and has not is asked no more often than that.
    const MOST: u32 = 16;

    /// For what less than all of it is good for that.
    pub fn of(less: Less) -> Self {
        Self { less, ..Self::default() }
    }

    /// Asks for so much of this GPU, which the program works on. Whether anybody freed anything.
    #[cold]
    pub fn ask(&mut self, home: u32, bytes: u64) -> bool {
        ASKER.get().is_some_and(|asker| self.ask_by(*asker, home, bytes))
    }

    /// The same of any GPU, by this one.
    pub fn ask_by(&mut self, asker: Asker, gpu: u32, bytes: u64) -> bool {
        let (now, since) = (Instant::now(), self.begun);
        self.begun = since.or(Some(now));
        self.questions += 1;
        let lacks = Lacks { gpu, bytes, less: self.less, since };
        let freed = if self.questions <= Self::MOST { asker(&lacks) } else { 0 };
        if freed > 0
            && let Some(opened) = open::opened()
        {
            opened.pool.has_room_again(Place::Gpu(gpu));
        }
        freed > 0
    }
}

/// Who has GPUs lend to this one that have not so far, because it and those that lend lack so much.
pub type Widener = fn(u32, u64);

static WIDENER: OnceBox<Widener> = OnceBox::new();

/// Has this one asked from now on, before a block of a rank that keeps to its own GPU lies on the host.
pub fn widen_by(widener: Widener) {
    let _ = WIDENER.set(Box::new(widener));
}

/// Asks it, where this process is such a rank.
#[cold]
pub fn have_more_lend(home: u32, bytes: u64) {
    if let Some(widen) = WIDENER.get().filter(|_| terms::keeps_apart()) {
        widen(home, bytes);
    }
}

/// What came of the last question to others for room on a GPU, in words for a program that is refused behind it.
static HEARD: Mutex<Option<(u32, String)>> = Mutex::new(None);

/// This came of a question for room on a GPU.
pub fn was_answered(gpu: u32, what: String) {
    *HEARD.lock() = Some((gpu, what));
}

/// Asks other processes for as much of this GPU as is to stay free there for contexts (`GPUPOOL_RESERVE`): nobody knows what one takes before it is made.
/// Whether they freed anything.
#[cold]
pub fn ask_for_context(device: Device) -> bool {
    let plan = process::driver().and_then(open::plan);
    let Place::Gpu(ordinal) = device.place() else { return false };
    let known = plan.and_then(|plan| plan.topology.gpus.iter().find(|gpu| gpu.ordinal == ordinal));
    *HEARD.lock() = None;
    known.is_some_and(|gpu| Asking::of(Less::Context).ask(ordinal, process::settings().reserve_of(gpu.total)))
}

/// The program was told OUT_OF_MEMORY for a context, after others were asked.
#[cold]
pub fn report_no_context(driver: &'static Driver, device: Device) {
    let uuid = driver.uuid_bytes(device);
    let takes = context::usual_cost().unwrap_or(gpupool_lending::CONTEXT);
    // Where there is room, or nobody can tell, it was refused for a reason of the driver's.
    let Some(free) = backing::free_on(driver, device.ordinal(), &uuid).filter(|free| *free < takes) else { return };
    let heard = HEARD.lock().take().filter(|(gpu, _)| *gpu == device.ordinal()).map(|(_, what)| what);
    let heard = heard.unwrap_or_else(|| {
        "others have not made room for it (gpupool ps tells who has how much of it; only what matters less by GPUPOOL_PRIORITY or is borrowed gives way)".to_owned()
    });
    log::warn_once(
        "no_context",
        format_args!(
            "OUT_OF_MEMORY for a context on GPU {device}: one takes about {}, {} are free, and {heard}",
            format_size(takes),
            format_size(free)
        ),
    );
    oom::refused(device, takes, oom::Kind::Context, oom::Why::Left(Bypass::Full));
}

static ON_END: OnceBox<fn(u64)> = OnceBox::new();

/// Has `tell` called with the number of every block that ends, from now on: by who gives blocks to other processes, which
/// most programs never do.
pub fn when_blocks_end(tell: fn(u64)) {
    let _ = ON_END.set(Box::new(tell));
}

#[inline]
fn tell_ended(block: &Block) {
    if let Some(tell) = ON_END.get() {
        tell(block.id);
    }
    if let Some(hearer) = HEARER.get() {
        (hearer.ended)(block);
    }
}

/// The program's answer.
#[inline]
fn freed(outcome: Result<Block, FreeError<CuResult>>) -> CuResult {
    match outcome {
        Ok(block) => {
            report_free(&block);
            memops::ended(&block);
            mempool::ended(&block);
            labels::ended(&block);
            names::ended(&block);
            tell_ended(&block);
            CuResult::SUCCESS
        }
        Err(error) => outcome::of_failed_free(error),
    }
}

/// A block is gone.
#[inline]
pub fn report_free(block: &Block) {
    let Block { address, bytes, home, owner, .. } = *block;
    if let Some(owner) = context::by_id(owner) {
        owner.usage.freed(bytes);
    }
    log::emit(move || {
        let event = BlockFree { address, bytes, home, label: labels::of(block) };
        (event, format!("freed {} at {address:#x}", format_size(bytes)))
    });
    level::fell(bytes);
    bell::changed();
}

/// The live block of the pool's that an address lies in.
pub fn block_at(address: u64) -> Option<Block> {
    open::opened().filter(|opened| opened.contains(address))?.pool.block_at(address)
}

/// Live blocks of the pool's that have frames of their own, and so no more than there are frames.
pub fn live() -> Vec<Block> {
    let (Some(opened), Some(plan)) = (open::opened(), open::plan_made()) else { return Vec::new() };
    let all = plan.topology.gpus.iter().flat_map(|gpu| opened.pool.blocks(gpu.ordinal));
    all.filter(|block| !copies::is_copy(block)).collect()
}

/// Where each part of a range of a live block lies; empty where there is no such block.
pub fn pieces(address: u64, bytes: u64) -> Vec<Piece<Physical>> {
    let opened = open::opened().filter(|opened| opened.contains(address));
    opened.map_or_else(Vec::new, |opened| opened.pool.pieces(address, bytes))
}

/// Whether a block is a chunk of its own, so that the chunk's handle stands for the block.
pub fn is_one_chunk(block: &Block) -> bool {
    let whole = |piece: &Piece<_>| (piece.address, piece.bytes) == (piece.chunk_address, piece.chunk_bytes);
    matches!(&pieces(block.address, u64::MAX)[..], [piece] if whole(piece))
}

/// Keeps a range of a live block on its physical memory, for this reason; `false` where it lies in no block.
pub fn anchor(address: u64, bytes: u64, why: Anchor) -> bool {
    let is_anchored = open::opened().is_some_and(|opened| opened.pool.anchor(address, bytes, why).is_some());
    if is_anchored {
        say_anchored(address);
    }
    is_anchored
}

/// Takes back what [`anchor`] did to this range for a call that then failed.
pub fn withdraw_anchor(address: u64, bytes: u64, why: Anchor) {
    if let Some(opened) = open::opened() {
        opened.pool.withdraw_anchor(address, bytes, why);
    }
}

/// Another process is about to get the block that starts here and has this number; see [`gpupool_pool::Pool::hold`].
pub fn hold(address: u64, id: u64) -> Option<Block> {
    open::opened()?.pool.hold(address, id)
}

/// Another process no longer has the block that it was given by [`hold`].
pub fn let_go(address: u64, id: u64) {
    if let Some(opened) = open::opened() {
        opened.pool.let_go(address, id);
    }
}

/// Takes one anchor of this range back that the program asked for; `false` where there is none.
pub fn release_anchor(address: u64, bytes: u64) -> bool {
    let is_released = open::opened().is_some_and(|opened| opened.pool.release_anchor(address, bytes));
    if is_released {
        say_anchored(address);
    }
    is_released
}

/// Frees the blocks of contexts that are gone, as the driver does with its own allocations.
pub struct OfContexts;

impl Observer for OfContexts {
    /// What was mapped before this GPU had a context was granted to others only. The call that made the context returns when
    /// that is mended.
    fn arrived(&self, device: Device) -> Result<(), CuResult> {
        let Some(opened) = open::opened() else { return Ok(()) };
        let gpu = device.ordinal();
        let arrival = context::arrivals(device);
        if opened.pool.backend().is_granted_to(gpu, arrival) {
            return Ok(());
        }
        let mut granted = opened.pool.grant_again();
        // Its page tables may want the room that freed memory takes.
        if granted == Err(CuResult::OUT_OF_MEMORY) && opened.pool.trim(Some(Place::Gpu(gpu)), None, &[]) > 0 {
            granted = opened.pool.grant_again();
        }
        if granted.is_ok() {
            opened.pool.backend().granted_to(gpu, arrival);
        }
        granted
    }

    fn ended(&self, id: u64) -> usize {
        let ended = open::opened().map_or_else(Vec::new, |opened| opened.pool.free_owned_by(id));
        ended.iter().for_each(memops::ended);
        ended.iter().for_each(mempool::ended);
        ended.iter().for_each(labels::ended);
        ended.iter().for_each(names::ended);
        ended.iter().for_each(tell_ended);
        if !ended.is_empty() {
            level::report();
            bell::changed();
        }
        ended.len()
    }

    fn held_on(&self, device: Device) -> u64 {
        taken_on(device)
    }
}

/// The GPU of the current context, if there is one: whom this thread may wait for. Another may be at work on a kernel that
/// waits for this very thread.
fn own_gpu() -> Vec<u32> {
    let device = process::driver().and_then(|driver| driver.current_device().ok());
    device.map(Device::ordinal).into_iter().collect()
}

/// The driver has no memory left on the current GPU for a call of its own: freed runs go back to it. Whether there were
/// any.
#[cold]
pub fn give_back(api: Api) -> bool {
    give_back_at(own_gpu().first().copied().map(Place::Gpu), api)
}

/// Freed runs of the pool at this place, or everywhere, go back to the driver, because it has no memory left for a call of its
/// own. Whether there were any.
#[cold]
pub fn give_back_at(place: Option<Place>, api: Api) -> bool {
    let Some(opened) = open::opened() else { return false };
    let (bytes, settled) = opened.pool.give_back(place, &own_gpu());
    if bytes > 0 {
        report_trim(bytes, api.name());
    }
    // What the agent returns at this moment is as good.
    bytes > 0 || settled
}

/// Freed runs of the pool that stand on the host go back to the driver. Whether there were any.
#[cold]
pub fn give_back_host(api: Api) -> bool {
    let Some(opened) = open::opened() else { return false };
    let hosts = opened.plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host());
    hosts.fold(false, |any, place| give_back_at(Some(place), api) | any)
}

/// Returns all freed memory to the driver, also that on chunks of which a part is in use where these may be cut anew; the bytes
/// returned.
pub fn trim() -> u64 {
    let Some(opened) = open::opened() else { return 0 };
    let mut bytes = opened.pool.trim_all(&own_gpu());
    if let Some(repack) = REPACKER.get() {
        let places = || opened.plan.places.iter().map(|spec| spec.place);
        let held = || -> u64 { places().map(|place| opened.pool.accounts().of(Claim::Pool, place)).sum() };
        let before = held();
        if places().map(|place| repack(place, u64::MAX, "gpupool_trim")).sum::<u64>() > 0 {
            // What is left of it is kept for the next move.
            opened.pool.trim(None, None, &[]);
            bytes += before.saturating_sub(held());
        }
    }
    if bytes > 0 {
        report_trim(bytes, "gpupool_trim");
    }
    bytes
}

fn report_trim(bytes: u64, why: &str) {
    count(&TRIMS);
    level::report();
    log::emit(|| {
        let text = format!("returned {} to the driver for {why}", format_size(bytes));
        (PoolTrim { bytes, why: why.to_owned() }, text)
    });
}

/// Bytes on a device that are the pool's, or the program's own by our doing.
fn taken_on(device: Device) -> u64 {
    accounts().map_or(0, |accounts| accounts.taken(device.place()))
}

/// Who has how much of each place, where a plan was made.
pub fn accounts() -> Option<&'static Accounts> {
    open::planned().flatten().map(|plan| &*plan.accounts)
}

/// Whether the GPU that this thread allocates on is drained. Nearly always that is one look at a flag.
#[inline]
pub fn is_home_drained() -> bool {
    terms::is_any_drained() && pool_for().is_ok_and(|(_, context)| terms::is_drained(context.device.ordinal()))
}

/// What the pool holds and has held; `None` if it was never opened.
pub fn pool_usage() -> Option<Usage> {
    open::opened().map(|opened| opened.pool.usage())
}

/// Memory was made outside the GPU that it was asked for on.
pub fn count_spilled(bytes: u64) {
    SPILLED.fetch_add(bytes, Ordering::Relaxed);
}

/// Bytes of blocks and handles that lay outside their home GPU when they were made, over the life of the process.
pub fn spilled() -> u64 {
    SPILLED.load(Ordering::Relaxed)
}
