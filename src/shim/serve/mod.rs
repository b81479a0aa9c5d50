//! Who answers: the pool, managed memory or the driver, as the mode says. Everything that a program asks of device memory
//! begins here.

pub mod handles;
pub mod ipc;
pub mod managed;
pub mod memory;
pub mod pinned;

use crate::backing::open;
use crate::process;
use crate::watch::context::{self, Context};
use gpupool_config::{MemInfo, Mode, Switch};
use gpupool_cuda::{CuResult, Device, Driver};
use gpupool_pool::Usage;
use memory::Answer;

/// Serves an allocation of `bytes` for the current context: from the pool, or by `driver_call`, in the order that the
/// mode says.
#[inline]
pub fn allocate(bytes: u64, mut driver_call: impl FnMut() -> CuResult) -> Answer {
    // The driver packs small requests better than frames of 2 MiB would, so it gets them first in every mode.
    let driver_first = bytes < process::settings().min_size;
    let first = driver_first.then(&mut driver_call);
    if let Some(result) = first.filter(|result| *result != CuResult::OUT_OF_MEMORY) {
        return Answer::Driver(result);
    }
    let Some((opened, context)) = memory::pool_for() else {
        return managed::allocate(bytes).unwrap_or_else(|| Answer::Driver(first.unwrap_or_else(driver_call)));
    };
    let first = first.or_else(|| (opened.plan.mode == Mode::Spill).then(&mut driver_call));
    match first {
        Some(result) if result != CuResult::OUT_OF_MEMORY => Answer::Driver(result),
        first => {
            let soft = process::settings().soft_oom != Switch::Off;
            memory::from_pool(opened, &context, context.device, bytes, soft)
                .unwrap_or_else(|| Answer::Driver(first.unwrap_or_else(driver_call)))
        }
    }
}

/// A block for a stream-ordered request on `device` that the driver had no memory for, owned by `context`. `None`: the
/// driver's answer stands. Nobody is told OUT_OF_MEMORY first: the driver has just given back what its own pools kept.
#[cold]
pub fn allocate_after_driver(driver: &'static Driver, context: &Context, device: Device, bytes: u64) -> Option<u64> {
    let answer = match memory::opened_for(driver, device) {
        Some(opened) => memory::from_pool(opened, context, device, bytes, false),
        None => managed::allocate_for(context, device, bytes, false),
    };
    match answer? {
        Answer::Pool(CuResult::SUCCESS, address) => Some(address),
        _ => None,
    }
}

/// Frees memory that the pool made. `None`: not pooled, the driver's to free.
#[inline]
pub fn free(address: u64) -> Option<CuResult> {
    let (answer, waited) = memory::free(address)?;
    pinned::return_idle(waited);
    Some(answer)
}

/// Whether another GPU's program is told of this one's memory. Not where the process has a context on it: a program that
/// works on several GPUs and sizes a cache on each by what it is told (JAX takes three quarters) would count the same
/// memory once for each, and the first cache would take what the second GPU had bare.
fn is_free_to_lend(ordinal: u32) -> bool {
    !context::is_on(Device::of(ordinal))
}

/// `(free, total)` for `cuMemGetInfo` in the current context; `None`: the driver's answer stands.
pub fn memory_info() -> Option<(u64, u64)> {
    let driver = answers_as_pool()?;
    let device = driver.current_device().ok()?;
    let plan = open::plan(driver).filter(|plan| plan.is_member(device))?;
    let home = device.ordinal();
    let total = plan.total(home, is_free_to_lend);
    let free = match open::open(driver) {
        Some(opened) => opened.pool.memory_info(home, is_free_to_lend).0,
        None => managed::free_for(home, is_free_to_lend)?,
    };
    Some((free.min(total), total))
}

/// Bytes for `cuDeviceTotalMem`; `None`: the driver's answer stands.
pub fn total_memory(device: Device) -> Option<u64> {
    let plan = open::plan(answers_as_pool()?)?;
    plan.is_member(device).then(|| plan.total(device.ordinal(), is_free_to_lend))
}

/// The driver, where questions about a GPU's memory are answered for the pool.
fn answers_as_pool() -> Option<&'static Driver> {
    let settings = process::settings();
    let asked = settings.meminfo == MemInfo::Pool && settings.mode != Mode::Trace;
    asked.then(process::driver).flatten()
}

/// What the pool holds and has held, or, in mode managed, what lies where. `None` where neither was opened.
pub fn usage() -> Option<Usage> {
    memory::usage().or_else(managed::usage)
}
