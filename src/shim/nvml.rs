//! What NVML tells the library: free memory of GPUs on which this process has no context, and whether others use them.
//! `cuMemGetInfo` would need a context there, and the library must not make any. Where NVML is missing, the pool finds out by
//! asking for memory, and what a context costs is an estimate.
//!
//! NVML opens and reads files. A thread that was cancelled at one of them would be unwound through a hook, so it is sheltered.

use gpupool_interpose::cancel;
pub use gpupool_machine::Uuid;

/// NVML, each question to it sheltered.
pub struct Nvml(gpupool_machine::Nvml);

/// NVML, if this machine has it.
pub fn get() -> Option<Nvml> {
    let _sheltered = cancel::shelter();
    gpupool_machine::Nvml::get().ok().map(Nvml)
}

impl Nvml {
    /// Free bytes of a GPU.
    pub fn free(&self, uuid: &Uuid) -> Option<u64> {
        let _sheltered = cancel::shelter();
        self.0.memory(uuid).map(|memory| memory.free)
    }

    /// Whether confidential computing is on, where NVML tells.
    pub fn is_confidential(&self) -> Option<bool> {
        let _sheltered = cancel::shelter();
        self.0.is_confidential()
    }

    /// How many processes have a context on a GPU, this one included.
    pub fn processes(&self, uuid: &Uuid) -> Option<u32> {
        let _sheltered = cancel::shelter();
        self.0.process_count(uuid)
    }
}
