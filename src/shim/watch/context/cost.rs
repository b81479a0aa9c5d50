//! What a context takes of its GPU: free memory before and after.

use super::{observers, within_own};
use crate::nvml;
use gpupool_cuda::{self as cuda, Device, Driver};
use once_cell::race::OnceBox;

/// Free memory of every GPU when CUDA was initialised.
static AT_INIT: OnceBox<Vec<Option<u64>>> = OnceBox::new();

/// `cuInit` succeeded: the state against which contexts are priced that nobody sees being made.
pub fn remember(driver: &Driver) {
    let look = || driver.devices().map(|device| Before::look(driver, device).free).collect();
    let _ = AT_INIT.get_or_init(|| Box::new(look()));
}

/// What the contexts that are known on a GPU took of it.
fn others(device: Device) -> u64 {
    super::cost_on(device)
}

/// Bytes that this library holds on a device, and not a context.
pub fn held_on(device: Device) -> u64 {
    observers::all().map(|observer| observer.held_on(device)).sum()
}

/// Whether no other process has a context on this GPU. Without NVML that is not known, and the answer is no.
pub fn is_alone_on(driver: &Driver, device: Device) -> bool {
    let uuid = driver.uuid_bytes(device);
    nvml::get().and_then(|nvml| nvml.processes(&uuid)).is_some_and(|count| count <= 1)
}

/// Free memory of a GPU before a context was made on it.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    /// By NVML; without a context there is no other way to ask.
    free: Option<u64>,
    /// What this library had there: memory comes back to a GPU, and freed memory makes room for a context, while it is made.
    held: u64,
    /// The context was there already.
    unknown: bool,
}

impl Before {
    /// For a context that is not new.
    pub fn unknown() -> Self {
        Self { free: None, held: 0, unknown: true }
    }

    /// For a context that was found when it was there: what was free when CUDA was initialised, less what this process has
    /// taken on that GPU since.
    pub fn at_init(device: Device) -> Self {
        let then = AT_INIT.get().and_then(|free| *free.get(device.ordinal() as usize)?);
        let held = held_on(device);
        Self { free: then.map(|free| free.saturating_sub(others(device) + held)), held, unknown: false }
    }

    /// Looks now.
    pub fn look(driver: &Driver, device: Device) -> Self {
        let free = nvml::get().and_then(|nvml| nvml.free(&driver.uuid_bytes(device)));
        Self { free, held: held_on(device), unknown: false }
    }

    /// `(bytes, approximate)`. Approximate: other processes have contexts on this GPU and may have allocated meanwhile, or
    /// there is no NVML and everything in use beside the pool's memory is taken for the context's.
    pub fn cost(&self, driver: &Driver, context: Option<cuda::Context>, device: Device) -> (Option<u64>, bool) {
        if self.unknown {
            return (None, true);
        }
        let uuid = driver.uuid_bytes(device);
        if let Some(before) = self.free
            && let Some(nvml) = nvml::get()
            && let Some(after) = nvml.free(&uuid)
        {
            let shared = nvml.processes(&uuid).is_none_or(|count| count > 1);
            return (Some((before + self.held).saturating_sub(after + held_on(device))), shared);
        }
        let Some(context) = context else { return (None, true) };
        let info = within_own(driver, context, || driver.memory().ok()).flatten();
        let held = held_on(device) + others(device);
        (info.map(|(free, total)| total.saturating_sub(free).saturating_sub(held)), true)
    }
}
