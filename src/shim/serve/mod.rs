//! Who answers: the pool, managed memory or the driver, as the mode says. Everything that a program asks of device memory
//! begins here.

pub mod handles;
pub mod ipc;
pub mod managed;
pub mod memory;
pub mod pinned;

use crate::backing::{open, plan::Plan};
use crate::bypass::{Answer, Bypass};
use crate::process;
use crate::watch::context::{self, Context};
use gpupool_config::{MemInfo, Mode, Switch};
use gpupool_cuda::{CuResult, Device, Driver};
use gpupool_pool::Usage;

/// Who served an allocation.
pub enum Served {
    /// gpupool, with this address, or with an error for the program.
    Pool(Result<u64, CuResult>),
    /// The driver, which has written the outputs, and why it did.
    Driver(CuResult, Bypass),
}

/// Serves an allocation of `bytes` for the current context: from the pool, or by `driver_call`, in the order that the
/// mode says.
#[inline]
pub fn allocate(bytes: u64, mut driver_call: impl FnMut() -> CuResult) -> Served {
    // The driver packs small requests better than frames of 2 MiB would, so it gets them first in every mode.
    let driver_first = bytes < process::settings().min_size;
    let mut first = driver_first.then(&mut driver_call);
    if let Some(result) = first.filter(|result| *result != CuResult::OUT_OF_MEMORY) {
        return Served::Driver(result, Bypass::Small);
    }
    let answer = match memory::pool_for() {
        Ok((opened, context)) => {
            first = first.or_else(|| (opened.plan.mode == Mode::Spill).then(&mut driver_call));
            if let Some(result) = first.filter(|result| *result != CuResult::OUT_OF_MEMORY) {
                return Served::Driver(result, Bypass::HadRoom);
            }
            let soft = process::settings().soft_oom != Switch::Off;
            memory::from_pool(opened, &context, context.device, bytes, soft)
        }
        Err(why) => managed::allocate_managed(bytes, why),
    };
    match answer {
        Ok(answer) => Served::Pool(answer),
        Err(why) => Served::Driver(first.unwrap_or_else(driver_call), why),
    }
}

/// A block's address for a stream-ordered request on `device` that the driver had no memory for, owned by `context`. Nobody is
/// told OUT_OF_MEMORY first: the driver has just given back what its own pools kept.
#[cold]
pub fn allocate_after_driver(driver: &'static Driver, context: &Context, device: Device, bytes: u64) -> Answer<u64> {
    let answer = match memory::opened_for(driver, device) {
        Ok(opened) => memory::from_pool(opened, context, device, bytes, false),
        Err(why) => managed::allocate_for(context, device, bytes, false, why),
    };
    answer?.map_err(Bypass::Declined)
}

/// Frees memory that the pool made.
#[inline]
pub fn free(address: u64) -> Answer<CuResult> {
    let (answer, waited) = memory::free_block(address)?;
    pinned::return_idle(waited);
    Ok(answer)
}

/// Whether another GPU's program is told of this one's memory. Not where the process has a context on it: a program that
/// works on several GPUs and sizes a cache on each by what it is told (JAX takes three quarters) would count the same
/// memory once for each, and the first cache would take what the second GPU had bare.
fn is_free_to_lend(ordinal: u32) -> bool {
    !context::is_on(Device::of(ordinal))
}

/// `(free, total)` for `cuMemGetInfo` in the current context.
pub fn memory_info() -> Answer<(u64, u64)> {
    let driver = answers_as_pool()?;
    let device = driver.current_device().map_err(Bypass::Declined)?;
    let plan = plan_with(driver, device)?;
    let home = device.ordinal();
    let total = plan.total(home, is_free_to_lend);
    let free = match open::open(driver) {
        Some(opened) => opened.pool.memory_info(home, is_free_to_lend).0,
        None => managed::free_for(home, is_free_to_lend).ok_or(Bypass::NoPool)?,
    };
    Ok((free.min(total), total))
}

/// Bytes for `cuDeviceTotalMem`.
pub fn total_memory(device: Device) -> Answer<u64> {
    let plan = plan_with(answers_as_pool()?, device)?;
    Ok(plan.total(device.ordinal(), is_free_to_lend))
}

/// The driver, where questions about a GPU's memory are answered for the pool.
fn answers_as_pool() -> Answer<&'static Driver> {
    let settings = process::settings();
    match settings.meminfo {
        MemInfo::Device => Err(Bypass::InfoOfDevice),
        MemInfo::Pool if settings.mode == Mode::Trace => Err(Bypass::Tracing),
        MemInfo::Pool => process::driver().ok_or(Bypass::NoDriver),
    }
}

/// The plan, where this GPU is a place of it.
fn plan_with(driver: &'static Driver, device: Device) -> Answer<&'static Plan> {
    let plan = open::plan(driver).ok_or(Bypass::NoPool)?;
    if plan.is_member(device) { Ok(plan) } else { Err(Bypass::LeftOut(device)) }
}

/// What the pool holds and has held, or, in mode managed, what lies where. `None` where neither was opened.
pub fn usage() -> Option<Usage> {
    memory::pool_usage().or_else(managed::managed_usage)
}
