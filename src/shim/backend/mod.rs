//! Where the pool's memory comes from.

pub mod host;
pub mod numa;
pub mod nvml;
pub mod pinned;
mod sharing;
pub mod vmm;

use crate::driver::{CuResult, Driver};
use gpupool_pool::Fault;

/// Free bytes of a GPU: by the driver where it is the current one, else by NVML; `None` where nobody can tell.
pub fn free_on(driver: &Driver, ordinal: u32, uuid: &nvml::Uuid) -> Option<u64> {
    let here = driver.current_device().is_ok_and(|device| device as u32 == ordinal);
    if here { driver.free_memory().ok() } else { nvml::get()?.free(uuid) }
}

/// What the driver's answer is to a pool.
fn fault(result: CuResult) -> Fault<CuResult> {
    match result {
        CuResult::OUT_OF_MEMORY => Fault::OutOfMemory(result),
        CuResult::NOT_READY => Fault::NotReady(result),
        result => Fault::Failed(result),
    }
}
