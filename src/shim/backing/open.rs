//! The pool of this process: opened once, at the first allocation or question that concerns it.

use super::plan::{NoPlan, Plan};
use super::terms;
use super::vmm::Vmm;
use crate::{log, process};
use gpupool_config::{Limits, Mode, Move, Placement, Settings, format_size};
use gpupool_cuda::Driver;
use gpupool_events::PoolOpen;
use gpupool_interpose::cancel;
use gpupool_pool::{Config, FRAME, LARGEST_CHUNK, Policy, Pool};
use once_cell::race::OnceBox;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The pool and what it was made from.
pub struct Opened {
    pub plan: &'static Plan,
    pub pool: Pool<Vmm>,
    base: u64,
    bytes: u64,
}

impl Opened {
    /// Whether an address lies in the reservation.
    #[inline]
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < self.bytes
    }

    /// Whether a range has an address in the reservation.
    pub fn touches(&self, address: u64, bytes: u64) -> bool {
        self.contains(address) || address < self.base && address.saturating_add(bytes) > self.base
    }
}

// `race` cells: two threads may both plan or open, the second result is dropped (and a second reservation returned);
// neither waits for the other inside a driver call.
static PLAN: OnceBox<Option<Plan>> = OnceBox::new();
static OPENED: OnceBox<Option<Opened>> = OnceBox::new();

/// Addresses for a pool of little memory, in which sizes differ most from each other.
const LEAST_WANTED: u64 = 1 << 40;
/// Addresses for a pool of any size, unless it holds half of that. Of the 128 TiB there are, this leaves the program a range of
/// 64 TiB and more (measured: 80).
const MOST_WANTED: u64 = 32 << 40;

/// How often the driver may not answer before there is no pool for good.
const PATIENCE: u32 = 8;
static UNANSWERED: AtomicU32 = AtomicU32::new(0);

/// The plan; `None` where the driver is not ready or a pool is impossible (said once in the log).
pub fn plan(driver: &Driver) -> Option<&'static Plan> {
    if let Some(known) = PLAN.get() {
        return known.as_ref();
    }
    let _sheltered = cancel::shelter();
    let plan = match Plan::read(driver, process::settings()) {
        Ok(plan) => Some(plan),
        Err(NoPlan::NotYet) => return None,
        Err(NoPlan::Unanswered(_)) if UNANSWERED.fetch_add(1, Ordering::Relaxed) + 1 < PATIENCE => return None,
        Err(NoPlan::Unanswered(unanswered)) => {
            let why = format!("the driver does not say what GPUs there are ({unanswered}, {PATIENCE} times)");
            log::warn_once("plan", format_args!("no pool, every call goes to the driver: {why}"));
            process::explain(why);
            None
        }
        Err(NoPlan::Settings(problems)) => {
            process::refuse(&problems);
            None
        }
        Err(NoPlan::Never(why)) => {
            log::warn_once("plan", format_args!("no pool, every call goes to the driver: {why}"));
            process::explain(why);
            None
        }
    };
    let kept = PLAN.get_or_init(|| Box::new(plan)).as_ref();
    // Of two threads that read it at once the other one's may have found GPUs drained that this one's had not.
    if let Some(kept) = kept {
        terms::close_drained(kept);
    }
    kept
}

/// The plan, if it was made; `None` inside where a pool is impossible.
pub fn planned() -> Option<Option<&'static Plan>> {
    PLAN.get().map(Option::as_ref)
}

/// The plan, if one was made.
pub fn plan_made() -> Option<&'static Plan> {
    planned().flatten()
}

/// Whether a pool was to be opened, and could not be (said once in the log).
pub fn has_failed() -> bool {
    matches!(OPENED.get(), Some(None)) && plan_made().is_some_and(|plan| plan.mode != Mode::Managed)
}

/// The pool if it was opened.
#[inline]
pub fn opened() -> Option<&'static Opened> {
    OPENED.get()?.as_ref()
}

/// The pool, opened now if it was not. Needs a current context.
pub fn open(driver: &'static Driver) -> Option<&'static Opened> {
    if let Some(known) = OPENED.get() {
        return known.as_ref();
    }
    let plan = plan(driver)?;
    // Kept like an opened pool, so that later calls end at the first look.
    if plan.mode == Mode::Managed {
        return OPENED.get_or_init(|| Box::new(None)).as_ref();
    }
    OPENED.get_or_init(|| Box::new(try_open(driver, plan))).as_ref()
}

/// How blocks are spread, as the settings say.
pub fn policy() -> Policy {
    match process::settings().placement {
        Placement::LocalFirst => Policy::LocalFirst,
        Placement::Interleave => Policy::Interleave,
        Placement::MostFree => Policy::MostFree,
    }
}

/// Bytes of the largest chunk. Where memory may move, it moves by whole chunks, and frameworks have many tensors in one block: remapping
/// a GiB takes 0.33 ms in chunks of 128 MiB and 0.11 in those of 512 (measured), and copying it three. By whole chunks it is given to others as well: what is
/// guaranteed keeps up to one of them beyond that.
pub fn largest_chunk(settings: &Settings) -> u64 {
    let is_whole = settings.moving == Move::Off && settings.guarantee == Limits::Unset;
    if is_whole { LARGEST_CHUNK } else { LARGEST_CHUNK / 4 }
}

#[cold]
fn try_open(driver: &'static Driver, plan: &'static Plan) -> Option<Opened> {
    // More than all places can hold, because address space fragments and memory does not: eight times as much, and at least
    // twice where the driver has less. Not all that it grants: what is reserved here is missing for the program's own large
    // reservations.
    let all = plan.places.iter().fold(0u64, |sum, spec| sum.saturating_add(spec.limit));
    let least = all.saturating_mul(2).max(1 << 30);
    let wanted = all.saturating_mul(8).clamp(LEAST_WANTED, MOST_WANTED).max(least).next_multiple_of(FRAME);
    let vmm = Vmm::reserve(driver, plan, wanted, least)
        .inspect_err(|result| {
            let why = format!("cuMemAddressReserve gave no {} of address space ({result})", format_size(least));
            log::warn_once("reserve", format_args!("no pool, every call goes to the driver: {why}"));
            process::explain(why);
        })
        .ok()?;
    let (base, bytes) = (vmm.base(), vmm.bytes());
    let config = Config {
        base,
        bytes,
        accounts: Arc::clone(&plan.accounts),
        links: plan.links.clone(),
        policy: policy(),
        largest_chunk: largest_chunk(process::settings()),
    };
    let places: Vec<String> =
        plan.places.iter().map(|spec| format!("{} {}", spec.place, format_size(spec.limit))).collect();
    log::emit(|| {
        let text = format!("pool of {} behind {} of address space", places.join(", "), format_size(bytes));
        let names = plan.places.iter().map(|spec| spec.place.to_string());
        (PoolOpen { base, bytes, places: names.collect() }, text)
    });
    super::level::opened(&plan.places, || opened().map(super::copies::usage_without));
    Some(Opened { plan, pool: Pool::new(config, vmm), base, bytes })
}
