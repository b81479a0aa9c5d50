//! What NVML knows of a GPU without a context on it: free memory, who uses it, where its NVLinks end.
//!
//! NVML is optional. It is loaded at the first question, once a process and for as long as the process lives, with
//! `RTLD_LOCAL`, and starts no thread. Where it is missing (as in containers without the `utility` capability), every
//! question goes unanswered.

use crate::uuid::{Uuid, dashed, from_text};
use libloading::{Library, Symbol};
use nvml_wrapper_sys::bindings::{
    NVML_DEVICE_UUID_V2_BUFFER_SIZE, NVML_GPU_FABRIC_STATE_COMPLETED, NVML_GPU_FABRIC_STATE_NOT_SUPPORTED,
    NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE, nvmlConfComputeSystemState_t, nvmlDevice_t,
    nvmlEnableState_enum_NVML_FEATURE_DISABLED, nvmlEnableState_enum_NVML_FEATURE_ENABLED, nvmlEnableState_t,
    nvmlEventData_t, nvmlEventSet_t, nvmlEventTypeXidCriticalError, nvmlGpuFabricInfo_t, nvmlMemory_t, nvmlPciInfo_t,
    nvmlProcessInfo_t, nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND, nvmlReturn_enum_NVML_SUCCESS, nvmlReturn_t,
};
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong};
use std::path::Path;

/// The most NVLinks that any GPU has had, with room to spare.
const NVLINKS: u32 = 36;
/// Processes that may begin between the question how many there are and the one for their list.
const NEWCOMERS: u32 = 5;

/// NVML's handle of a GPU.
#[derive(Clone, Copy)]
struct Handle(nvmlDevice_t);

// SAFETY: NVML takes its handles on every thread; it is opaque and never followed here.
unsafe impl Send for Handle {}

/// NVML's handles of the GPUs asked about so far; `None` where NVML does not know one. They are looked up without the lock.
static HANDLES: Mutex<Vec<(Uuid, Option<Handle>)>> = Mutex::new(Vec::new());

/// The functions that are asked, as the library exports them; `None` where it is too old to have one. Not `nvml_wrapper`: its
/// table of all functions is moved about on the stack, and takes more of it than a thread that calls CUDA may have (44 KiB).
struct Functions {
    driver_version: Option<unsafe extern "C" fn(*mut c_char, c_uint) -> nvmlReturn_t>,
    confidential: Option<unsafe extern "C" fn(*mut nvmlConfComputeSystemState_t) -> nvmlReturn_t>,
    by_index: Option<unsafe extern "C" fn(c_uint, *mut nvmlDevice_t) -> nvmlReturn_t>,
    uuid: Option<unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t>,
    by_uuid: Option<unsafe extern "C" fn(*const c_char, *mut nvmlDevice_t) -> nvmlReturn_t>,
    /// The first of the two versions of this call: drivers before 510 have no other.
    memory: Option<unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_t) -> nvmlReturn_t>,
    processes: Option<unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut nvmlProcessInfo_t) -> nvmlReturn_t>,
    link_state: Option<unsafe extern "C" fn(nvmlDevice_t, c_uint, *mut nvmlEnableState_t) -> nvmlReturn_t>,
    link_end: Option<unsafe extern "C" fn(nvmlDevice_t, c_uint, *mut nvmlPciInfo_t) -> nvmlReturn_t>,
    rows:
        Option<unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut c_uint, *mut c_uint, *mut c_uint) -> nvmlReturn_t>,
    /// From driver 525 on.
    fabric: Option<unsafe extern "C" fn(nvmlDevice_t, *mut nvmlGpuFabricInfo_t) -> nvmlReturn_t>,
    /// From driver 615 on.
    limits: Option<unsafe extern "C" fn(nvmlDevice_t, *mut RawLimits) -> nvmlReturn_t>,
    make_events: Option<unsafe extern "C" fn(*mut nvmlEventSet_t) -> nvmlReturn_t>,
    register: Option<unsafe extern "C" fn(nvmlDevice_t, c_ulonglong, nvmlEventSet_t) -> nvmlReturn_t>,
    event: Option<unsafe extern "C" fn(nvmlEventSet_t, *mut nvmlEventData_t, c_uint) -> nvmlReturn_t>,
}

impl Functions {
    fn load() -> Result<Self, String> {
        // SAFETY: NVML's initialisers and terminators may run at any time, on any thread.
        let library = unsafe { Library::new("libnvidia-ml.so.1") };
        let library = library.map_err(|_| "libnvidia-ml.so.1 is not there".to_owned())?;
        // SAFETY: each field has the signature that NVML's header gives the function of that name.
        let functions = unsafe {
            Self {
                driver_version: function(&library, c"nvmlSystemGetDriverVersion"),
                confidential: function(&library, c"nvmlSystemGetConfComputeState"),
                by_index: function(&library, c"nvmlDeviceGetHandleByIndex_v2"),
                uuid: function(&library, c"nvmlDeviceGetUUID"),
                by_uuid: function(&library, c"nvmlDeviceGetHandleByUUID"),
                memory: function(&library, c"nvmlDeviceGetMemoryInfo"),
                processes: function(&library, c"nvmlDeviceGetComputeRunningProcesses_v3"),
                link_state: function(&library, c"nvmlDeviceGetNvLinkState"),
                link_end: function(&library, c"nvmlDeviceGetNvLinkRemotePciInfo_v2"),
                rows: function(&library, c"nvmlDeviceGetRemappedRows"),
                fabric: function(&library, c"nvmlDeviceGetGpuFabricInfo"),
                limits: function(&library, c"nvmlDeviceGetMemoryLimits_v1"),
                make_events: function(&library, c"nvmlEventSetCreate"),
                register: function(&library, c"nvmlDeviceRegisterEvents"),
                event: function(&library, c"nvmlEventSetWait_v2"),
            }
        };
        // SAFETY: the signature is that of NVML's header.
        let init: Option<unsafe extern "C" fn(c_uint) -> nvmlReturn_t> =
            unsafe { function(&library, c"nvmlInitWithFlags") };
        // SAFETY: the signature is that of NVML's header.
        let words: Option<unsafe extern "C" fn(nvmlReturn_t) -> *const c_char> =
            unsafe { function(&library, c"nvmlErrorString") };
        let init = init.ok_or("libnvidia-ml.so.1 has no function nvmlInitWithFlags: it is older than driver 400")?;
        // SAFETY: takes an integer.
        let result = unsafe { init(0) };
        if result != nvmlReturn_enum_NVML_SUCCESS {
            // SAFETY: it takes any number, and answers with a constant of the library, which is still loaded.
            let words = words.map(|words| unsafe { CStr::from_ptr(words(result)) }.to_string_lossy().into_owned());
            return Err(words.unwrap_or_else(|| format!("nvmlInitWithFlags failed with {result}")));
        }
        // For as long as the process lives.
        std::mem::forget(library);
        Ok(functions)
    }
}

/// A function of the library, if it has it.
///
/// # Safety
/// `T` is the type of a function pointer with the signature of the function of that name.
unsafe fn function<T: Copy>(library: &Library, name: &CStr) -> Option<T> {
    // SAFETY: as the caller says.
    let symbol: Symbol<'_, T> = unsafe { library.get(name) }.ok()?;
    Some(*symbol)
}

/// NVML, loaded and initialised.
#[derive(Clone, Copy)]
pub struct Nvml(&'static Functions);

/// `nvmlGetMemoryLimits_v1_t` of CUDA 13.4's header, which the bindings do not have.
#[repr(C)]
struct RawLimits {
    group: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

/// What a control group may have of a GPU's memory (`nvmlDeviceSetMemoryLimits_v1`), bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// What it is promised; 0 where it is promised nothing.
    pub soft: u64,
    /// The most that it may have.
    pub hard: u64,
}

/// Rows of a GPU's memory that were replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemappedRows {
    /// After errors that could not be corrected.
    pub uncorrectable: u32,
    /// Some are replaced once the GPU is reset.
    pub is_pending: bool,
}

/// The domain of GPUs, also of other hosts, that a GPU reaches over NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fabric {
    /// Its number, the same on all hosts; zero where it is of this host alone.
    pub cluster: Uuid,
    /// The part of it within which all reach each other.
    pub clique: u32,
    /// It has joined that, and without an error.
    pub is_ready: bool,
}

/// Xids of some GPUs from one moment on.
pub struct Xids {
    functions: &'static Functions,
    set: nvmlEventSet_t,
    gpus: Vec<(Uuid, Handle)>,
}

// SAFETY: NVML takes its sets on every thread; it is opaque and never followed here.
unsafe impl Send for Xids {}

impl Xids {
    /// The next one that has happened: the GPU and its number.
    pub fn next(&self) -> Option<(Uuid, u64)> {
        // SAFETY: all-zero is a valid value of this C struct of integers and an opaque handle.
        let mut event: nvmlEventData_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set came from NVML, which stays loaded, and the output is a local of the type that the call fills.
        let result = unsafe { self.functions.event?(self.set, &raw mut event, 0) };
        let gpu = self.gpus.iter().find(|(_, handle)| handle.0 == event.device);
        (result == nvmlReturn_enum_NVML_SUCCESS).then_some((gpu?.0, event.eventData))
    }
}

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
        // Threads that race load it each, which is a count in the loader and one in NVML. One that waited for another could wait
        // for ever in the child of a fork.
        static NVML: OnceBox<Result<Functions, String>> = OnceBox::new();
        NVML.get_or_init(|| Box::new(Functions::load())).as_ref().map(Nvml).map_err(String::as_str)
    }

    /// Version of the kernel driver.
    pub fn release(self) -> Option<String> {
        let mut text = [0; NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE as usize];
        let room = text.len() as c_uint;
        // SAFETY: the output is a local with so much room.
        let result = unsafe { self.0.driver_version?(text.as_mut_ptr(), room) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then(|| words(&text)).flatten()
    }

    /// Whether confidential computing is on; `None` where NVML does not tell, as that of drivers before 535.
    pub fn is_confidential(self) -> Option<bool> {
        let mut state = nvmlConfComputeSystemState_t { environment: 0, ccFeature: 0, devToolsMode: 0 };
        // SAFETY: the output is a local of the type that the header gives it.
        let result = unsafe { self.0.confidential?(&raw mut state) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then_some(state.ccFeature != 0)
    }

    /// Memory of a GPU.
    pub fn memory(self, uuid: &Uuid) -> Option<GpuMemory> {
        let device = self.device(uuid)?;
        let mut memory = nvmlMemory_t { total: 0, free: 0, used: 0 };
        // SAFETY: the handle came from NVML, which stays loaded, and the output is a local of the type that the call fills.
        let result = unsafe { self.0.memory?(device.0, &raw mut memory) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then_some(GpuMemory { free: memory.free, used: memory.used })
    }

    /// The domain of a GPU; `None` where it can be in none, or NVML does not tell, as that of drivers before 525.
    pub fn fabric(self, uuid: &Uuid) -> Option<Fabric> {
        let device = self.device(uuid)?;
        let mut info = nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status: 0, cliqueId: 0, state: 0 };
        // SAFETY: the handle came from NVML, which stays loaded, and the output is a local of the type that the call fills.
        let result = unsafe { self.0.fabric?(device.0, &raw mut info) };
        let state = u32::from(info.state);
        let is_ready = state == NVML_GPU_FABRIC_STATE_COMPLETED && info.status == nvmlReturn_enum_NVML_SUCCESS;
        let fabric = Fabric { cluster: info.clusterUuid, clique: info.cliqueId, is_ready };
        (result == nvmlReturn_enum_NVML_SUCCESS && state != NVML_GPU_FABRIC_STATE_NOT_SUPPORTED).then_some(fabric)
    }

    /// How many processes have a context on a GPU, this one included.
    pub fn process_count(self, uuid: &Uuid) -> Option<u32> {
        self.count(self.device(uuid)?)
    }

    fn count(self, device: Handle) -> Option<u32> {
        let mut count = 0;
        // SAFETY: the handle came from NVML, which stays loaded; with a count of 0 nothing is written behind the null pointer.
        let result = unsafe { self.0.processes?(device.0, &raw mut count, std::ptr::null_mut()) };
        match result {
            #[allow(non_upper_case_globals, reason = "the name in NVML's header")]
            nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => Some(count),
            #[allow(non_upper_case_globals, reason = "the name in NVML's header")]
            nvmlReturn_enum_NVML_SUCCESS => Some(0),
            _ => None,
        }
    }

    /// The processes that have a context on a GPU, and the bytes that each uses where NVML may say. In a container these are
    /// the host's numbers.
    pub fn processes(self, uuid: &Uuid) -> Option<Vec<(u32, Option<u64>)>> {
        /// NVML's number for bytes that it may not say.
        const NOT_TOLD: u64 = u64::MAX;
        let device = self.device(uuid)?;
        let mut count = self.count(device)?;
        if count == 0 {
            return Some(Vec::new());
        }
        count += NEWCOMERS;
        let none = nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
        let mut processes = vec![none; count as usize];
        // SAFETY: the handle came from NVML, which stays loaded, and there is room for as many as the count says.
        let result = unsafe { self.0.processes?(device.0, &raw mut count, processes.as_mut_ptr()) };
        processes.truncate(count as usize);
        let bytes = |used| (used != NOT_TOLD).then_some(used);
        let told = || processes.iter().map(|process| (process.pid, bytes(process.usedGpuMemory))).collect();
        (result == nvmlReturn_enum_NVML_SUCCESS).then(told)
    }

    /// Rows of a GPU's memory that were replaced; `None` where NVML does not tell, as of GPUs before Ampere.
    pub fn remapped_rows(self, uuid: &Uuid) -> Option<RemappedRows> {
        let device = self.device(uuid)?;
        let (mut corrected, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
        let (rows, more) = ((&raw mut corrected, &raw mut uncorrectable), (&raw mut pending, &raw mut failed));
        // SAFETY: the handle came from NVML, which stays loaded, and the outputs are locals.
        let result = unsafe { self.0.rows?(device.0, rows.0, rows.1, more.0, more.1) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then_some(RemappedRows { uncorrectable, is_pending: pending != 0 })
    }

    /// What the control group with this folder may have of a GPU's memory; `None` where nobody has limited that, or NVML does not tell: before driver 615, of parts
    /// of a GPU (MIG), and of folders that it cannot open.
    pub fn memory_limits(self, uuid: &Uuid, folder: &Path) -> Option<MemoryLimits> {
        let ask = self.0.limits?;
        let device = self.device(uuid)?;
        let group = CString::new(folder.as_os_str().as_encoded_bytes()).ok()?;
        let mut told = RawLimits { group: group.as_ptr(), soft: 0, hard: c_ulonglong::MAX, used: 0 };
        // SAFETY: the handle came from NVML, which stays loaded; the structure is a local, and the text that it names outlives the call.
        let result = unsafe { ask(device.0, &raw mut told) };
        let limits = MemoryLimits { soft: told.soft, hard: told.hard };
        (result == nvmlReturn_enum_NVML_SUCCESS && (limits.soft > 0 || limits.hard < u64::MAX)).then_some(limits)
    }

    /// Watches these GPUs for Xids, for as long as the process lives.
    pub fn watch_xids(self, gpus: &[Uuid]) -> Option<Xids> {
        let mut set: nvmlEventSet_t = std::ptr::null_mut();
        // SAFETY: the output is a local of the type that the call fills.
        if unsafe { self.0.make_events?(&raw mut set) } != nvmlReturn_enum_NVML_SUCCESS {
            return None;
        }
        let gpus: Vec<(Uuid, Handle)> = gpus.iter().filter_map(|uuid| Some((*uuid, self.device(uuid)?))).collect();
        for (_, device) in &gpus {
            // SAFETY: handle and set came from NVML, which stays loaded.
            unsafe { self.0.register?(device.0, c_ulonglong::from(nvmlEventTypeXidCriticalError), set) };
        }
        Some(Xids { functions: self.0, set, gpus })
    }

    /// The GPU with this number, as `nvidia-smi` has it.
    pub fn uuid_of(self, index: u32) -> Option<Uuid> {
        let mut device = std::ptr::null_mut();
        // SAFETY: the output is a local of the type that the call fills.
        let result = unsafe { self.0.by_index?(index, &raw mut device) };
        if result != nvmlReturn_enum_NVML_SUCCESS {
            return None;
        }
        let mut text = [0; NVML_DEVICE_UUID_V2_BUFFER_SIZE as usize];
        let room = text.len() as c_uint;
        // SAFETY: the handle came from NVML, which stays loaded, and the output is a local with so much room.
        let result = unsafe { self.0.uuid?(device, text.as_mut_ptr(), room) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then(|| words(&text)).flatten().and_then(|text| from_text(&text))
    }

    /// Whether this machine has such a GPU, or part of one (MIG); `None` where NVML does not tell, as where one of them is lost.
    pub fn has(self, uuid: &Uuid) -> Option<bool> {
        if self.device(uuid).is_some() {
            return Some(true);
        }
        let is_none = |name: String| {
            let name = CString::new(name).ok()?;
            let mut device = std::ptr::null_mut();
            // SAFETY: the name is a C string, and the output is a local of the type that the call fills.
            let result = unsafe { self.0.by_uuid?(name.as_ptr(), &raw mut device) };
            let unknown = [nvmlReturn_enum_NVML_ERROR_NOT_FOUND, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT];
            unknown.contains(&result).then_some(())
        };
        names(uuid).into_iter().try_for_each(is_none).map(|()| false)
    }

    /// The PCI address at the other end of each active NVLink of a GPU; empty where NVML does not tell it.
    pub fn nvlink_ends(self, uuid: &Uuid) -> Option<Vec<String>> {
        let device = self.device(uuid)?;
        let active = (0..NVLINKS).filter(|link| self.is_active(device, *link) == Some(true));
        Some(active.map(|link| self.end_of(device, link).unwrap_or_default()).collect())
    }

    fn is_active(self, device: Handle, link: u32) -> Option<bool> {
        let mut state = nvmlEnableState_enum_NVML_FEATURE_DISABLED;
        // SAFETY: the handle came from NVML, which stays loaded, and the output is a local of the type that the call fills.
        let result = unsafe { self.0.link_state?(device.0, link, &raw mut state) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then_some(state == nvmlEnableState_enum_NVML_FEATURE_ENABLED)
    }

    fn end_of(self, device: Handle, link: u32) -> Option<String> {
        // SAFETY: all-zero is a valid value of this C struct of integers.
        let mut end: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the handle came from NVML, which stays loaded, and the output is a local of the type that the call fills.
        let result = unsafe { self.0.link_end?(device.0, link, &raw mut end) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then(|| words(&end.busId)).flatten()
    }

    fn device(self, uuid: &Uuid) -> Option<Handle> {
        let known = HANDLES.lock().iter().find(|(known, _)| known == uuid).map(|(_, device)| *device);
        known.unwrap_or_else(|| {
            let found = names(uuid).into_iter().find_map(|name| self.by_uuid(name));
            HANDLES.lock().push((*uuid, found));
            found
        })
    }

    fn by_uuid(self, name: String) -> Option<Handle> {
        let name = CString::new(name).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: the name is a C string, and the output is a local of the type that the call fills.
        let result = unsafe { self.0.by_uuid?(name.as_ptr(), &raw mut device) };
        (result == nvmlReturn_enum_NVML_SUCCESS).then_some(Handle(device))
    }
}

/// As NVML may know it: `GPU-` is how it writes a whole GPU, `MIG-` an instance of one.
fn names(uuid: &Uuid) -> [String; 2] {
    ["GPU-", "MIG-"].map(|prefix| format!("{prefix}{}", dashed(uuid)))
}

/// The text that a C function wrote into this room, if it is one.
fn words(room: &[c_char]) -> Option<String> {
    let bytes: Vec<u8> = room.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect();
    String::from_utf8(bytes).ok()
}
