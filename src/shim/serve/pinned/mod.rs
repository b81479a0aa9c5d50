//! Pinned host memory: who serves it, what is known of it, and what is said of the program's use of it.
//!
//! The pool (`gpupool-pinned`) keeps what was freed, because to pin a gibibyte takes the driver a third of a second. Its
//! segments are the driver's own pinned allocations, so copies, kernels and other libraries find in them what they find in
//! memory of the driver's; only questions about sizes and ids are answered for the block (`hook/query.rs`).
//!
//! Architecture Invariant: freed memory goes back to the driver only inside calls that wait for the device in any case
//! (frees, `cuCtxSynchronize`), where the host is short of memory, or where the pool is about to pin more and no kernel may be
//! running or the limit is reached. The driver's free waits for running kernels, and a program may have one that waits for
//! the program.

pub mod callers;
pub mod copies;
pub mod holders;
mod judge;
pub mod staging;

use crate::backing::host;
use crate::backing::pinned::{Host, take_spent};
use crate::bypass::{self, Answer, Bypass};
use crate::watch::{
    context::{self, Context, Observer},
    site,
};
use crate::{bell, clock, log, process};
use gpupool_config::{Free as FreeSetting, Pinned, format_size};
use gpupool_cuda::CuResult;
use gpupool_events::{PinnedAllocate, PinnedFree, PinnedLevel, PinnedReturn};
use gpupool_interpose::{Api, cancel};
use gpupool_pinned::{Allocation, Block, Config, Free, FreeError, Key, Pool, Refusal, Request};
use holders::{By, Entry, Level, Live};
use once_cell::race::OnceBox;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub use judge::judge;
pub use staging::after_copy;

/// Flags of `cuMemHostAlloc` that the pool keeps apart: portable, mapped, write-combined. Others are for the driver to
/// refuse, or to know.
const FLAGS: u32 = 7;
const WRITE_COMBINED: u32 = 4;
const PAGE: u64 = 4096;

/// `race`: two threads may both make one, the second is dropped unused.
static POOL: OnceBox<Pool<Host>> = OnceBox::new();

/// The pool, if anything was ever asked of it.
#[inline]
fn opened() -> Option<&'static Pool<Host>> {
    POOL.get()
}

/// The pool and the current context, where pinned memory is the pool's business.
fn pool_for(flags: u32) -> Answer<(&'static Pool<Host>, Context)> {
    let settings = process::settings();
    bypass::makes_memory()?;
    if settings.pinned == Pinned::Off || settings.pinned_limit == Some(0) {
        return Err(Bypass::PinnedOff);
    }
    if flags & !FLAGS != 0 {
        return Err(Bypass::OtherKind);
    }
    let driver = process::driver().ok_or(Bypass::NoDriver)?;
    let context = context::current(driver).ok_or(Bypass::NoContext)?;
    let make = || {
        let _sheltered = cancel::shelter();
        let config = Config { limit: host::pinned_limit(), idle: settings.pinned_idle };
        Box::new(Pool::new(config, Host(driver)))
    };
    Ok((POOL.get_or_init(make), context))
}

/// The address of pooled memory of `bytes` for the current context.
pub fn pin(bytes: u64, flags: u32) -> Answer<u64> {
    let (pool, context) = pool_for(flags)?;
    let outcome = pool.allocate(&Request { bytes, key: Key { context: context.id, flags } });
    let spent = take_spent();
    let Allocation { block, pinned, returned } = match outcome {
        Ok(allocation) => allocation,
        Err(Refusal::Limit { .. }) => return Err(Bypass::OverLimit),
        // The driver's own answer to the program's own call is better than ours to what we made of it.
        Err(Refusal::Backend(CuResult::NOT_READY)) => return Err(Bypass::Capturing),
        Err(Refusal::Backend(result)) => return Err(Bypass::Declined(result)),
        Err(Refusal::ContextGone) => return Err(Bypass::ContextGone),
        Err(Refusal::Empty) => return Err(Bypass::Malformed),
    };
    if returned > 0 {
        report_return(returned, "new pinned memory");
    }
    if context.is_gone() {
        // It ended meanwhile, and what was pinned in it was forgotten: this came too late for that.
        OfContexts.ended(context.id);
        return Err(Bypass::ContextGone);
    }
    note(&entry(block.address, bytes, flags, By::Pool, pinned, spent, &context));
    Ok(block.address)
}

/// The driver gave this range to the program, for whatever use. What was pinned there went with a context, whose end the
/// thread that ended it has not told yet.
#[inline]
pub fn given_anew(address: u64, bytes: u64) {
    if let Some(pool) = opened() {
        pool.given_anew(address, bytes);
    }
}

/// The driver served an allocation, or accepted a registration, in so much time.
pub fn driver_allocated(address: u64, bytes: u64, flags: u32, by: By, spent: Duration) {
    if let Some(context) = context::driver().and_then(context::current) {
        note(&entry(address, bytes, flags, by, bytes.next_multiple_of(PAGE), spent, &context));
    }
}

fn entry(address: u64, bytes: u64, flags: u32, by: By, pinned: u64, spent: Duration, context: &Context) -> Entry {
    let is_slow = by != By::Program && flags & WRITE_COMBINED != 0;
    let watch = bytes >= staging::WORTH_LOOKING && !is_slow && staging::is_looking();
    let nanos = spent.as_nanos() as u64;
    Entry { address, bytes, flags, by, context: context.id, pinned, nanos, work: context.usage.work(), watch }
}

fn note(entry: &Entry) {
    if let Some(context) = context::by_id(entry.context) {
        context.usage.pinned.fetch_add(1, Ordering::Relaxed);
    }
    let growing = holders::allocated(entry, site::fingerprint, site::here);
    let Entry { address, bytes, flags, by, pinned, .. } = *entry;
    log::emit(|| {
        let event = PinnedAllocate { address, bytes, flags, by: by.word().to_owned(), reused: pinned == 0 };
        (event, format!("{} pinned at {address:#x}", format_size(bytes)))
    });
    if pinned > 0 {
        report_level();
    }
    if let Some(growing) = growing {
        judge::growing(&growing);
    }
    bell::allocated();
}

/// Frees pooled memory.
pub fn unpin(address: u64) -> Answer<CuResult> {
    let pool = opened().filter(|pool| pool.contains(address)).ok_or(Bypass::NotOurs)?;
    // In a context that is gone nothing is freed, of whomever it is: the driver says so.
    if context::is_refused() {
        return Err(Bypass::ContextGone);
    }
    let when = match process::settings().free {
        FreeSetting::Strict => Free::Strict,
        FreeSetting::Lazy => Free::Lazy,
    };
    Ok(forgetting(address, || match pool.free(address, when, clock::coarse_now) {
        Ok(block) => {
            return_idle(Some(block.key.context).filter(|_| when == Free::Strict));
            CuResult::SUCCESS
        }
        // Freed twice, or an inner pointer: the driver's answer for either.
        Err(FreeError::NotABlock) => CuResult::INVALID_VALUE,
        Err(FreeError::Backend(result)) => result,
    }))
}

/// Makes the call that ends what starts at `address`, which is taken out of the holders before: once it is free, another
/// thread may get the same address.
pub fn forgetting(address: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let taken = holders::take(address);
    let result = call();
    match taken {
        Some((live, copies)) if result.is_ok() => gone(address, &live, copies),
        Some((live, _)) => holders::put_back(address, live),
        None => {}
    }
    result
}

fn gone(address: u64, live: &Live, copies: u32) {
    let Live { bytes, by, .. } = *live;
    log::emit(|| {
        let event = PinnedFree { address, bytes, by: by.word().to_owned() };
        (event, format!("{} of pinned memory freed at {address:#x}", format_size(bytes)))
    });
    if by != By::Pool {
        report_level();
    }
    bell::changed();
    staging::freed(live, copies);
}

/// The driver refused to register what is registered in part: said once a place.
pub fn registered_twice(address: u64, bytes: u64) {
    if holders::first_registered_twice(site::fingerprint(), site::here) {
        judge::registered_twice(address, bytes, &site::here());
    }
}

/// Whether an address may lie in a segment of the pool: not, if it lies outside of all of them together.
#[inline]
pub fn may_have(address: u64) -> bool {
    opened().is_some_and(|pool| pool.may_contain(address))
}

/// Whether an address lies in a segment of the pool, in a live block or not.
#[inline]
pub fn is_pooled(address: u64) -> bool {
    opened().is_some_and(|pool| pool.contains(address))
}

/// The live block that an address lies in, what is behind its last byte left out; `Some(None)` in what no live block has of a segment.
pub fn find(address: u64) -> Option<Option<Block>> {
    let found = opened()?.find(address)?;
    Some(found.filter(|block| address < block.address + block.bytes))
}

/// Forgets the pinned memory of contexts that are gone, which the driver has freed with them.
pub struct OfContexts;

impl Observer for OfContexts {
    fn ended(&self, context: u64) -> usize {
        let dropped = opened().map_or(0, |pool| pool.context_gone(context).len());
        holders::context_gone(context);
        if dropped > 0 {
            report_level();
        }
        0
    }
}

/// Gives back segments that nobody used for a while. For calls that have waited for work in any case: for that of the context
/// `waited`, if it is known.
#[inline]
pub fn return_idle(waited: Option<u64>) {
    let Some(pool) = opened() else { return };
    let bytes = pool.return_idle(clock::coarse_now(), waited);
    if bytes > 0 {
        report_return(bytes, "idle");
    }
}

/// Gives all freed memory back to the driver, for `why`; the bytes.
#[cold]
pub fn trim(why: &str) -> u64 {
    let bytes = opened().map_or(0, Pool::trim);
    if bytes > 0 {
        report_return(bytes, why);
    }
    bytes
}

/// As [`trim`], of what no work may be at still: waits for nobody.
pub fn trim_quiet(why: &str) -> u64 {
    let bytes = opened().map_or(0, Pool::trim_quiet);
    if bytes > 0 {
        report_return(bytes, why);
    }
    bytes
}

/// Whether freed memory is kept.
pub fn is_any_unused() -> bool {
    opened().is_some_and(|pool| {
        let usage = pool.usage();
        usage.pinned > usage.used
    })
}

/// The driver has no host memory left for this call. Whether any was given back.
#[cold]
pub fn give_back(api: Api) -> bool {
    trim(api.name()) > 0
}

fn report_return(bytes: u64, why: &str) {
    bell::changed();
    log::emit(|| {
        let text = format!("{} of freed pinned memory returned for {why}", format_size(bytes));
        (PinnedReturn { bytes, why: why.to_owned() }, text)
    });
    report_level();
}

/// The level now, for the picture over time; small changes wait for the next one.
fn report_level() {
    /// Bytes.
    const STEP: u64 = 1 << 20;
    static SAID: AtomicU64 = AtomicU64::new(0);
    let Level { pinned, requested, registered } = holders::level(opened().map_or(0, |pool| pool.usage().pinned));
    let said = SAID.load(Ordering::Relaxed);
    if pinned.abs_diff(said) < STEP && pinned != 0 {
        return;
    }
    SAID.store(pinned, Ordering::Relaxed);
    log::emit(|| {
        let text = format!("{} pinned for {} that the program holds", format_size(pinned), format_size(requested));
        (PinnedLevel { pinned, requested, registered }, text)
    });
}

/// The driver served what would have taken the pool over its limit: said once.
pub fn over_limit(bytes: u64) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if let Some(pool) = opened()
        && !SAID.swap(true, Ordering::Relaxed)
    {
        judge::over_limit(bytes, pool.config().limit);
    }
}

/// What is pinned, for the page.
pub struct Levels {
    /// The most that the pool may pin; 0 while it has pinned nothing.
    pub limit: u64,
    pub now: Level,
    pub peak: Level,
}

/// See [`Levels`].
pub fn levels() -> Levels {
    let pool = opened();
    let now = holders::level(pool.map_or(0, |pool| pool.usage().pinned));
    Levels { limit: pool.map_or(0, |pool| pool.config().limit), now, peak: holders::peak() }
}

/// The most bytes that were pinned, and the most that the program held of them, over the life of the process.
pub fn peak() -> (u64, u64) {
    let Level { pinned, requested, .. } = holders::peak();
    (pinned, requested)
}
