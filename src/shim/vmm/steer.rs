//! Where a handle goes that its GPU has no room for.

use super::types::Properties;
use super::with_ledger;
use crate::driver::{CuResult, Driver};
use crate::hook::{Real, Row};
use crate::memory::{self, Plan, place_name};
use crate::process;
use gpupool_config::{Mode, Switch, format_size};
use gpupool_pool::Place;

/// What a program asks `cuMemCreate` for.
pub struct Request {
    /// Bytes, a multiple of the granularity or the driver refuses.
    pub bytes: u64,
    pub properties: Properties,
    /// The GPU of the properties.
    pub device: u32,
}

/// Whether handles are placed elsewhere in this process.
pub fn is_wanted() -> bool {
    process::settings().mode != Mode::Trace && process::is_open()
}

/// `cuMemCreate` for plain memory of a GPU: there if it has room, else at the next place that has. The handle is where the
/// driver, or this, has written it through `output`.
///
/// # Safety
/// `output` is the program's output argument of that call, and not NULL.
pub unsafe fn create(real: &mut Real, output: *mut u64, request: &Request) -> CuResult {
    let Request { bytes, device, .. } = *request;
    let home = Place::Gpu(device);
    let Some(limit) = process::settings().limit.of(device).filter(|_| is_wanted()) else {
        let result = at_home(real, home);
        if result != CuResult::OUT_OF_MEMORY || !is_wanted() {
            return result;
        }
        // SAFETY: as for this function.
        return unsafe { elsewhere(real.row, output, request, u64::MAX, "full") };
    };
    if plan_for(device).is_none() {
        return at_home(real, home);
    }
    if !set_aside(home, bytes, limit, real.row) {
        // SAFETY: as for this function.
        return unsafe { elsewhere(real.row, output, request, limit, "limit") };
    }
    let result = at_home(real, home);
    if !result.is_ok() {
        with_ledger(|ledger| ledger.withdraw(home, bytes));
        if result != CuResult::OUT_OF_MEMORY {
            return result;
        }
        // SAFETY: as for this function.
        return unsafe { elsewhere(real.row, output, request, limit, "full") };
    }
    // SAFETY: not NULL, and the driver answered success.
    let handle = unsafe { *output };
    with_ledger(|ledger| ledger.made(handle, device, home, bytes));
    result
}

/// The real call, once more after freed runs of the pool there went back to the driver.
fn at_home(real: &mut Real, home: Place) -> CuResult {
    let result = real.call();
    if result == CuResult::OUT_OF_MEMORY && memory::give_back_at(Some(home), real.row) {
        return real.call();
    }
    result
}

/// The driver and the plan, where this GPU is a place of it.
fn plan_for(device: u32) -> Option<(&'static Driver, &'static Plan)> {
    let driver = process::driver()?;
    Some((driver, memory::plan(driver).filter(|plan| plan.is_member(device as i32))?))
}

/// Sets `bytes` at a place aside if, with what the pool holds there, that is no more than `most`. Freed runs of the pool
/// make room.
fn set_aside(place: Place, bytes: u64, most: u64, row: Row) -> bool {
    let fits = || {
        let left = most.saturating_sub(memory::held_at(place));
        with_ledger(|ledger| ledger.promise(place, bytes, left))
    };
    fits() || memory::give_back_at(Some(place), row) && fits()
}

/// Whether a place has that much and its reserve, as far as that can be told. Freed runs of the pool make room.
fn has(driver: &Driver, plan: &Plan, place: Place, bytes: u64, row: Row) -> bool {
    let has = || plan.free_at(driver, place).is_none_or(|free| free >= bytes);
    has() || memory::give_back_at(Some(place), row) && has()
}

/// What the GPU could still give to a request of the program, as far as that can be told.
fn room(driver: &Driver, plan: &Plan, place: Place, most: u64) -> u64 {
    let by_limit = most.saturating_sub(memory::held_at(place)).saturating_sub(super::own_at(place));
    plan.free_at(driver, place).unwrap_or(0).min(by_limit)
}

/// # Safety
/// As [`create`].
#[cold]
unsafe fn elsewhere(row: Row, output: *mut u64, request: &Request, most: u64, why: &'static str) -> CuResult {
    let Request { bytes, device, ref properties } = *request;
    let Some((driver, plan)) = plan_for(device) else { return CuResult::OUT_OF_MEMORY };
    if let Some(reason) = refusal(driver, plan, request, most) {
        tracing::info!(
            target: "gpupool::memory", event = "pool.refuse", home = device, bytes, why = reason, missing = 0,
            "OUT_OF_MEMORY for a handle of {} on GPU {device} ({reason})", format_size(bytes)
        );
        return CuResult::OUT_OF_MEMORY;
    }
    for place in plan.order(device).into_iter().skip(1) {
        if !has(driver, plan, place, bytes, row) || !set_aside(place, bytes, plan.limit(place), row) {
            continue;
        }
        let there = properties.at(place);
        let mut handle = 0;
        // SAFETY: the output is a local, and the properties, a C struct with numbers for enums, outlive the call.
        let result = unsafe { (driver.cuMemCreate)(&raw mut handle, bytes as usize, (&raw const there).cast(), 0) };
        if !result.is_ok() {
            with_ledger(|ledger| ledger.withdraw(place, bytes));
            continue;
        }
        with_ledger(|ledger| ledger.made(handle, device, place, bytes));
        // SAFETY: not NULL; the driver would write there.
        unsafe { *output = handle };
        memory::count_spilled(bytes);
        let name = place_name(place);
        tracing::info!(
            target: "gpupool::memory", event = "vmm.steer", home = device, bytes, place = name, why,
            "a handle of {} for GPU {device} was made on {name}: GPU {device} is {}", format_size(bytes),
            if why == "limit" { "at its limit" } else { "full" }
        );
        return CuResult::SUCCESS;
    }
    CuResult::OUT_OF_MEMORY
}

/// Why the program is better told that its GPU is full than given memory elsewhere. Who asks again all the same is served.
///
/// *soft*: it keeps freed memory in a cache, and returns that when it hears of it. *arena*: it asks for most of a GPU in
/// one piece while the GPU still has half of that. Programs that do so (XLA) size one arena by what they are told of
/// free memory, which is the pool's, and ask for less until they are served; at home they are served well, whereas the
/// first piece that fits a peer would put all they have on the far side of a link.
fn refusal(driver: &Driver, plan: &Plan, request: &Request, most: u64) -> Option<&'static str> {
    let Request { bytes, device, .. } = *request;
    let total = plan.memory_of(device).min(most);
    let plenty = bytes > total / 2 && room(driver, plan, Place::Gpu(device), most) >= bytes / 2;
    if (bytes > total || plenty) && with_ledger(|ledger| ledger.refuse_arena(device, bytes)) {
        return Some("arena");
    }
    let soft = match process::settings().soft_oom {
        Switch::On => true,
        Switch::Off => false,
        Switch::Auto => memory::program_caches(),
    };
    (soft && with_ledger(|ledger| ledger.tell_softly(device))).then_some("soft")
}
