//! What NVML tells the library: free memory of GPUs on which this process has no context, and whether others use them.
//! `cuMemGetInfo` would need a context there, and the library must not make any. Where NVML is missing, the pool finds out by
//! asking for memory, and what a context costs is an estimate.
//!
//! NVML opens and reads files. A thread that was cancelled at one of them would be unwound through a hook, so it is sheltered.

use gpupool_interpose::cancel;
pub use gpupool_machine::Uuid;
use gpupool_machine::{MemoryLimits, RemappedRows, Xids};
use std::path::Path;

/// NVML, each question to it sheltered.
pub struct Nvml(gpupool_machine::Nvml);

/// The next Xid that has happened.
pub fn next_xid(xids: &Xids) -> Option<(Uuid, u64)> {
    let _sheltered = cancel::shelter();
    xids.next()
}

/// NVML, if this machine has it.
pub fn get() -> Option<Nvml> {
    let _sheltered = cancel::shelter();
    gpupool_machine::Nvml::get().ok().map(Nvml)
}

/// Why this machine has none, where that is so.
pub fn why_missing() -> Option<&'static str> {
    let _sheltered = cancel::shelter();
    gpupool_machine::Nvml::get().err()
}

impl Nvml {
    /// Free bytes of a GPU.
    pub fn free(&self, uuid: &Uuid) -> Option<u64> {
        let _sheltered = cancel::shelter();
        self.0.memory(uuid).map(|memory| memory.free)
    }

    /// Bytes of a GPU that are in use, whoever has them.
    pub fn used(&self, uuid: &Uuid) -> Option<u64> {
        let _sheltered = cancel::shelter();
        self.0.memory(uuid).map(|memory| memory.used)
    }

    /// Whether confidential computing is on, where NVML tells.
    pub fn is_confidential(&self) -> Option<bool> {
        let _sheltered = cancel::shelter();
        self.0.is_confidential()
    }

    /// What the control group with this folder may have of a GPU's memory, where somebody has limited that.
    pub fn memory_limits(&self, uuid: &Uuid, folder: &Path) -> Option<MemoryLimits> {
        let _sheltered = cancel::shelter();
        self.0.memory_limits(uuid, folder)
    }

    /// Rows of a GPU's memory that were replaced.
    pub fn remapped_rows(&self, uuid: &Uuid) -> Option<RemappedRows> {
        let _sheltered = cancel::shelter();
        self.0.remapped_rows(uuid)
    }

    /// Watches these GPUs for Xids.
    pub fn watch_xids(&self, gpus: &[Uuid]) -> Option<Xids> {
        let _sheltered = cancel::shelter();
        self.0.watch_xids(gpus)
    }

    /// The numbers of the processes that have a context on a GPU, this one included; in a container the host's.
    pub fn numbers(&self, uuid: &Uuid) -> Option<Vec<u32>> {
        let _sheltered = cancel::shelter();
        Some(self.0.processes(uuid)?.into_iter().map(|(pid, _)| pid).collect())
    }

    /// The GPU with this number, as `nvidia-smi` has it.
    pub fn uuid_of(&self, index: u32) -> Option<Uuid> {
        let _sheltered = cancel::shelter();
        self.0.uuid_of(index)
    }

    /// How many processes have a context on a GPU, this one included.
    pub fn processes(&self, uuid: &Uuid) -> Option<u32> {
        let _sheltered = cancel::shelter();
        self.0.process_count(uuid)
    }
}
