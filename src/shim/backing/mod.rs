//! Where the pool's memory comes from.

pub mod copies;
pub mod host;
pub mod kernels;
pub mod level;
pub mod map;
pub mod mover;
pub mod numa;
pub mod open;
pub mod pinned;
pub mod plan;
pub mod reclaim;
pub mod residence;
mod sharing;
pub mod terms;
pub mod topology;
pub mod vmm;

use crate::nvml;
use crate::watch::context;
use gpupool_cuda::{CuResult, Device, Driver};
use gpupool_pool::Fault;

/// Free bytes of a GPU: by the driver where it is the current one, else by NVML, which needs no context to be made current.
/// Where that is missing (as in containers without the `utility` capability), by the driver in a context that this process
/// has there: the reserve of such a GPU is what the program's own calls live on. `None` where nobody can tell.
pub fn free_on(driver: &Driver, ordinal: u32, uuid: &nvml::Uuid) -> Option<u64> {
    if driver.current_device().is_ok_and(|device| device.ordinal() == ordinal) {
        return driver.free_memory().ok();
    }
    let in_context = || context::within_one_on(driver, Device::of(ordinal), || driver.free_memory().ok()).flatten();
    nvml::get().and_then(|nvml| nvml.free(uuid)).or_else(in_context)
}

/// What the driver's answer is to a pool.
fn fault(result: CuResult) -> Fault<CuResult> {
    match result {
        CuResult::OUT_OF_MEMORY => Fault::OutOfMemory(result),
        CuResult::NOT_READY => Fault::NotReady(result),
        result => Fault::Failed(result),
    }
}
