//! What `cuMemGetInfo` and `cuDeviceTotalMem` answer: memory of the GPU, and of those that lend to it.

use super::managed;
use crate::backing::{open, plan::Plan, terms};
use crate::bypass::{Answer, Bypass};
use crate::process;
use crate::watch::context;
use gpupool_config::{MemInfo, Mode};
use gpupool_cuda::{Device, Driver};

/// Whether another GPU's program is told of this one's memory. Not where the process has a context on it: a program that
/// works on several GPUs and sizes a cache on each by what it is told (JAX takes three quarters) would count the same
/// memory once for each, and the first cache would take what the second GPU had bare. Nor where it is lent only until somebody
/// works there: a program would size what it keeps for good by that.
fn is_free_to_lend(ordinal: u32) -> bool {
    !context::is_on(Device::of(ordinal)) && !terms::is_lent_while_idle(ordinal)
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

/// Bytes of the current context's GPU that the program has freed and the pool keeps: the driver counts them as used, while a program
/// that asks for its GPU's own memory sees what it freed as free.
pub fn freed_here() -> u64 {
    let freed = |driver: &'static Driver| {
        let device = driver.current_device().ok()?;
        Some(open::opened()?.pool.idle_on(device.ordinal()))
    };
    process::driver().and_then(freed).unwrap_or(0)
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
