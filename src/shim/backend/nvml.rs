//! Free memory of GPUs on which this process has no context. `cuMemGetInfo` would need one there, and the pool must not
//! make contexts; NVML knows without. Optional: where it is missing, the pool finds out by asking for memory.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

type Device = *mut c_void;

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
    handles: Vec<Option<usize>>,
}

impl Nvml {
    /// Loads NVML and finds the given GPUs in it.
    pub fn load(uuids: &[[u8; 16]]) -> Option<Self> {
        // SAFETY: NVML's constructors have no preconditions; nvidia-smi runs the same.
        let library = unsafe { Library::open(Some("libnvidia-ml.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the types are the C signatures of these exported names.
        let (init, by_uuid, memory) = unsafe {
            (
                *library.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"nvmlInitWithFlags\0").ok()?,
                *library.get(b"nvmlDeviceGetHandleByUUID\0").ok()?,
                *library.get(b"nvmlDeviceGetMemoryInfo\0").ok()?,
            )
        };
        // SAFETY: flags 0; may be called any number of times in a process.
        if unsafe { init(0) } != 0 {
            return None;
        }
        std::mem::forget(library); // The pointers are used until the process ends.
        let mut nvml = Self { by_uuid, memory, handles: Vec::new() };
        nvml.handles = uuids.iter().map(|uuid| nvml.find(uuid)).collect();
        Some(nvml)
    }

    /// `GPU-` is how NVML writes a whole GPU, `MIG-` an instance of one.
    fn find(&self, uuid: &[u8; 16]) -> Option<usize> {
        let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let dashed = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        ["GPU-", "MIG-"].iter().find_map(|prefix| {
            let name = CString::new(format!("{prefix}{dashed}")).ok()?;
            let mut device: Device = std::ptr::null_mut();
            // SAFETY: the name is NUL-terminated and the output a local.
            (unsafe { (self.by_uuid)(name.as_ptr(), &raw mut device) } == 0).then_some(device as usize)
        })
    }

    /// Free bytes of the GPU with this index among those given to [`Nvml::load`].
    pub fn free(&self, index: usize) -> Option<u64> {
        let device = (*self.handles.get(index)?)? as Device;
        let mut memory = Memory::default();
        // SAFETY: the handle came from NVML, the output is a local of nvmlMemory_t's layout.
        (unsafe { (self.memory)(device, &raw mut memory) } == 0).then_some(memory.free)
    }
}
