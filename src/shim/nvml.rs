//! Free memory of GPUs on which this process has no context. `cuMemGetInfo` would need one there, and the shim must not
//! make contexts; NVML knows without. Optional: where it is missing, the pool finds out by asking for memory, and what a
//! context costs is an estimate.

use gpupool_interpose::cancel;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

type Device = *mut c_void;

/// A GPU as CUDA names it.
pub type Uuid = [u8; 16];

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// The few functions of `libnvidia-ml.so.1` that are needed, loaded and initialised.
pub struct Nvml {
    by_uuid: unsafe extern "C" fn(*const c_char, *mut Device) -> c_int,
    memory: unsafe extern "C" fn(Device, *mut Memory) -> c_int,
    processes: Option<unsafe extern "C" fn(Device, *mut c_uint, *mut c_void) -> c_int>,
    /// GPUs asked about so far, as addresses of NVML's handles; `None` where NVML does not know one.
    handles: Mutex<Vec<(Uuid, Option<usize>)>>,
}

/// NVML, if this machine has it.
pub fn get() -> Option<&'static Nvml> {
    static NVML: OnceBox<Option<Nvml>> = OnceBox::new();
    NVML.get_or_init(|| Box::new(Nvml::load())).as_ref()
}

impl Nvml {
    fn load() -> Option<Self> {
        let _sheltered = cancel::shelter();
        // SAFETY: NVML's constructors have no preconditions; nvidia-smi runs the same.
        let library = unsafe { Library::open(Some("libnvidia-ml.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the types are the C signatures of these exported names.
        let (init, by_uuid, memory, processes) = unsafe {
            (
                *library.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"nvmlInitWithFlags\0").ok()?,
                *library.get(b"nvmlDeviceGetHandleByUUID\0").ok()?,
                *library.get(b"nvmlDeviceGetMemoryInfo\0").ok()?,
                library.get(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok().map(|symbol| *symbol),
            )
        };
        // SAFETY: flags 0; may be called any number of times in a process.
        if unsafe { init(0) } != 0 {
            return None;
        }
        std::mem::forget(library); // The pointers are used until the process ends.
        Some(Self { by_uuid, memory, processes, handles: Mutex::default() })
    }

    fn handle(&self, uuid: &Uuid) -> Option<Device> {
        let known = self.handles.lock().iter().find(|(known, _)| known == uuid).map(|(_, handle)| *handle);
        let handle = known.unwrap_or_else(|| {
            let found = self.find(uuid);
            self.handles.lock().push((*uuid, found));
            found
        });
        handle.map(|handle| handle as Device)
    }

    /// `GPU-` is how NVML writes a whole GPU, `MIG-` an instance of one.
    fn find(&self, uuid: &Uuid) -> Option<usize> {
        ["GPU-", "MIG-"].iter().find_map(|prefix| {
            let name = CString::new(format!("{prefix}{}", gpupool_cuda::device::dashed(uuid))).ok()?;
            let mut device: Device = std::ptr::null_mut();
            // SAFETY: the name is NUL-terminated and the output a local.
            (unsafe { (self.by_uuid)(name.as_ptr(), &raw mut device) } == 0).then_some(device as usize)
        })
    }

    /// Free bytes of a GPU.
    pub fn free(&self, uuid: &Uuid) -> Option<u64> {
        let _sheltered = cancel::shelter();
        let device = self.handle(uuid)?;
        let mut memory = Memory::default();
        // SAFETY: the handle came from NVML, the output is a local of nvmlMemory_t's layout.
        (unsafe { (self.memory)(device, &raw mut memory) } == 0).then_some(memory.free)
    }

    /// How many processes have a context on a GPU, this one included.
    pub fn processes(&self, uuid: &Uuid) -> Option<u32> {
        /// With room for no entry the answer is this code, and the count.
        const INSUFFICIENT_SIZE: c_int = 7;
        let _sheltered = cancel::shelter();
        let (device, processes) = (self.handle(uuid)?, self.processes?);
        let mut count = 0;
        // SAFETY: the handle came from NVML; a count of 0 needs no array.
        let result = unsafe { processes(device, &raw mut count, std::ptr::null_mut()) };
        matches!(result, 0 | INSUFFICIENT_SIZE).then_some(count)
    }
}
