//! What NVML knows of a GPU without a context on it: free memory, who uses it, where its NVLinks end.
//!
//! NVML is optional. It is loaded at the first question, once a process and for as long as the process lives, with
//! `RTLD_LOCAL`, and starts no thread. Where it is missing (as in containers without the `utility` capability), every
//! question goes unanswered.

use crate::uuid::{Uuid, dashed};
use nvml_wrapper::Device;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::sync::Arc;

/// The most NVLinks that any GPU has had, with room to spare.
const NVLINKS: u32 = 36;

type Handle = Arc<Device<'static>>;

/// NVML's handles of the GPUs asked about so far; `None` where NVML does not know one. They are looked up without the lock.
static HANDLES: Mutex<Vec<(Uuid, Option<Handle>)>> = Mutex::new(Vec::new());

/// NVML, loaded and initialised.
#[derive(Clone, Copy, Debug)]
pub struct Nvml(&'static nvml_wrapper::Nvml);

/// Memory of one GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// What nobody uses.
    pub free: u64,
    /// What all processes use together, with what the driver keeps for itself.
    pub used: u64,
}

impl Nvml {
    /// NVML, if this machine has it.
    ///
    /// # Errors
    /// Why there is none, for a person.
    pub fn get() -> Result<Nvml, &'static str> {
        // Threads that race load it each and all but one give it back, which is a count inside NVML. One that waited for
        // another could wait for ever in the child of a fork.
        static NVML: OnceBox<Result<nvml_wrapper::Nvml, String>> = OnceBox::new();
        let loaded = NVML.get_or_init(|| {
            let loaded = nvml_wrapper::Nvml::init_with_flags(InitFlags::empty());
            Box::new(loaded.map_err(|error| match error {
                NvmlError::LibloadingError(_) => "libnvidia-ml.so.1 is not there".to_owned(),
                error => error.to_string(),
            }))
        });
        loaded.as_ref().map(Nvml).map_err(String::as_str)
    }

    /// Version of the kernel driver.
    pub fn release(self) -> Option<String> {
        self.0.sys_driver_version().ok()
    }

    /// Memory of a GPU.
    pub fn memory(self, uuid: &Uuid) -> Option<GpuMemory> {
        let device = self.device(uuid)?;
        // Of the two versions of this call the first: drivers before 510 have no other.
        let ask = self.0.lib().nvmlDeviceGetMemoryInfo.as_ref().ok()?;
        // SAFETY: all-zero is a valid value of this C struct of integers.
        let mut memory = unsafe { std::mem::zeroed() };
        // SAFETY: the handle came from NVML, which stays loaded, and the output is a local of the type that the call fills.
        let result = unsafe { ask(device.handle(), &raw mut memory) };
        (result == 0).then_some(GpuMemory { free: memory.free, used: memory.used })
    }

    /// How many processes have a context on a GPU, this one included.
    pub fn process_count(self, uuid: &Uuid) -> Option<u32> {
        self.device(uuid)?.running_compute_processes_count().ok()
    }

    /// The processes that have a context on a GPU, and the bytes that each uses where NVML may say. In a container these are
    /// the host's numbers.
    pub fn processes(self, uuid: &Uuid) -> Option<Vec<(u32, Option<u64>)>> {
        let processes = self.device(uuid)?.running_compute_processes().ok()?.into_iter();
        let bytes = |used| match used {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        Some(processes.map(|process| (process.pid, bytes(process.used_gpu_memory))).collect())
    }

    /// The PCI address at the other end of each active NVLink of a GPU; empty where NVML does not tell it.
    pub fn nvlink_ends(self, uuid: &Uuid) -> Option<Vec<String>> {
        let device = self.device(uuid)?;
        let links = (0..NVLINKS).map(|link| device.link_wrapper_for(link));
        let active = links.filter(|link| matches!(link.is_active(), Ok(true)));
        Some(active.map(|link| link.remote_pci_info().map(|pci| pci.bus_id).unwrap_or_default()).collect())
    }

    fn device(self, uuid: &Uuid) -> Option<Handle> {
        let known = HANDLES.lock().iter().find(|(known, _)| known == uuid).map(|(_, device)| device.clone());
        known.unwrap_or_else(|| {
            // `GPU-` is how NVML writes a whole GPU, `MIG-` an instance of one.
            let names = ["GPU-", "MIG-"].map(|prefix| format!("{prefix}{}", dashed(uuid)));
            let found = names.into_iter().find_map(|name| self.0.device_by_uuid(name).ok()).map(Arc::new);
            HANDLES.lock().push((*uuid, found.clone()));
            found
        })
    }
}
