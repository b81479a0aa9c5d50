//! What a context takes of its GPU: free memory before and after.

use super::within;
use crate::backend::nvml;
use crate::driver::Driver;
use crate::memory;
use cudarc::driver::sys::{CUcontext, CUdevice};

/// Free memory of a GPU before a context was made on it.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    /// By NVML; without a context there is no other way to ask.
    free: Option<u64>,
    /// Nobody looked in time, or the context was there already.
    unknown: bool,
}

impl Before {
    pub fn unknown() -> Self {
        Self { free: None, unknown: true }
    }

    /// Looks now.
    pub fn look(driver: &Driver, device: CUdevice) -> Self {
        Self { free: nvml::get().and_then(|nvml| nvml.free(&driver.uuid_bytes(device))), unknown: false }
    }

    /// `(bytes, approximate)`. Approximate: other processes have contexts on this GPU and may have allocated meanwhile, or
    /// there is no NVML and everything in use beside the pool's memory is taken for the context's.
    pub fn cost(&self, driver: &Driver, context: CUcontext, device: CUdevice) -> (Option<u64>, bool) {
        if self.unknown {
            return (None, true);
        }
        let uuid = driver.uuid_bytes(device);
        if let Some(before) = self.free
            && let Some(nvml) = nvml::get()
            && let Some(after) = nvml.free(&uuid)
        {
            let shared = nvml.processes(&uuid).is_none_or(|count| count > 1);
            return (Some(before.saturating_sub(after)), shared);
        }
        let info = within(driver, context, || driver.memory().ok()).flatten();
        let held = memory::held_on(device);
        (info.map(|(free, total)| total.saturating_sub(free).saturating_sub(held)), true)
    }
}
