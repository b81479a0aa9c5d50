//! The driver's and NVML's answers, asked in a process of their own: initialising a broken driver may end the process, or
//! never return, and what it loads should not be loaded into this one.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::process::ExitCode;

use cudarc::driver::sys::{CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUuuid};
use gpupool_machine::{Nvml, Uuid, dashed};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::stdout;

const NATIVE_ATOMICS: c_int = 3;
const VMM_SUPPORTED: c_int = 102;
const HOST_NUMA_ID: c_int = 134;

/// What the child tells.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Probe {
    /// File of the driver that was loaded; `None` where there is none.
    pub library: Option<PathBuf>,
    /// Why the asking ended early.
    pub failure: Option<FailedCall>,
    /// `cuDriverGetVersion`.
    pub cuda: Option<i32>,
    /// The kernel driver's version, from NVML.
    pub release: Option<String>,
    /// Why there is no NVML.
    pub nvml: Option<String>,
    pub gpus: Vec<Gpu>,
    /// By GPU and GPU: how the first reaches the second.
    pub links: Vec<Vec<Link>>,
    /// Host nodes near the GPUs, and the driver's answer to an allocation there.
    pub host: Vec<(i32, c_int)>,
}

/// A call that failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FailedCall {
    /// `cuInit`, or `libcuda.so.1` for a driver that cannot be loaded.
    pub call: String,
    /// `CUresult`; 0 where there is none.
    pub code: c_int,
    /// The driver's name for it, or the loader's words.
    pub words: String,
}

/// The folders of the control groups whose limits NVML is asked for, with colons; whoever starts the probe says which, as it looks at everything else of them.
pub const GROUPS: &str = "_GPUPOOL_PROBE_GROUPS";

/// One GPU as the process sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gpu {
    pub name: String,
    /// Bytes.
    pub total: u64,
    pub pci: String,
    pub uuid: String,
    /// The bytes of `uuid`, by which NVML is asked.
    #[serde(skip)]
    uuid_bytes: Uuid,
    /// Virtual memory management.
    pub vmm: bool,
    /// The host node next to it.
    pub host_node: i32,
    /// Bytes nobody uses, from NVML.
    pub free: Option<u64>,
    /// Processes on it and their bytes, from NVML. In a container these are the host's numbers.
    pub processes: Vec<(u32, Option<u64>)>,
    /// What this process's control groups may have of it at most, each with the folder, from NVML: promised, and the most.
    #[serde(default)]
    pub limits: Vec<(String, u64, u64)>,
    /// The NVLink domain that it shares with GPUs of other hosts, from NVML.
    pub fabric: Option<Fabric>,
}

/// A domain of GPUs of several hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fabric {
    pub cluster: String,
    pub clique: u32,
    pub is_ready: bool,
}

/// How one GPU reaches another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Link {
    /// It is the same one.
    Itself,
    /// Over so many NVLinks; 0 where NVML does not say.
    Nvlink(u32),
    /// Peer access without atomics.
    Pcie,
    /// No peer access.
    None,
}

/// Asks and prints: the child's whole work.
///
/// # Errors
/// stdout cannot be written.
pub fn answer() -> Result<ExitCode, Failure> {
    let mut probe = Probe::default();
    if let Err(problem) = ask_driver(&mut probe) {
        probe.failure = Some(problem);
    }
    ask_nvml(&mut probe);
    let json = serde_json::to_string(&probe).map_err(|error| Failure::broken(error.to_string()))?;
    stdout::print(&format!("{json}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Declares the driver's functions, looked up by name when it is loaded. Results are `i32`: a `CUresult` of a newer driver
/// has no Rust enum.
macro_rules! driver {
    ($($name:ident($($type:ty),*);)*) => {
        #[expect(non_snake_case, reason = "the driver's own names")]
        struct Driver {
            $($name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Driver {
            fn load(library: &Library) -> Result<Driver, FailedCall> {
                Ok(Driver {
                    $($name: {
                        // SAFETY: the type is the C signature of this exported name.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|error| FailedCall::loading(stringify!($name), &error))?
                    },)*
                })
            }
        }
    };
}

driver! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(c_int, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGetName(*mut c_char, c_int, c_int);
    cuDeviceGetUuid(*mut CUuuid, c_int);
    cuDeviceGetPCIBusId(*mut c_char, c_int, c_int);
    cuDeviceTotalMem_v2(*mut usize, c_int);
    cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
    cuDeviceGetP2PAttribute(*mut c_int, c_int, c_int, c_int);
    cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, c_int);
    cuMemCreate(*mut u64, usize, *const CUmemAllocationProp, u64);
    cuMemRelease(u64);
}

impl FailedCall {
    fn loading(what: &str, error: &libloading::Error) -> FailedCall {
        // libloading says what it tried; the loader's own words are behind that.
        let reason = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
        FailedCall { call: what.to_owned(), code: 0, words: reason }
    }
}

fn ask_driver(probe: &mut Probe) -> Result<(), FailedCall> {
    // SAFETY: the driver's constructors have no preconditions; every CUDA program runs them.
    let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| FailedCall::loading("libcuda.so.1", &error))?;
    let driver = Driver::load(&library)?;
    probe.library = file_of(driver.cuInit as *const c_void);
    // SAFETY: the functions stay valid as long as `library`, which outlives them; all outputs are locals of the types
    // that the C interface names. No call needs a context.
    unsafe {
        let mut version = 0;
        if (driver.cuDriverGetVersion)(&raw mut version) == 0 {
            probe.cuda = Some(version);
        }
        driver.check("cuInit", (driver.cuInit)(0))?;
        let mut count = 0;
        driver.check("cuDeviceGetCount", (driver.cuDeviceGetCount)(&raw mut count))?;
        for device in 0..count {
            probe.gpus.push(driver.gpu(device)?);
        }
        for from in 0..count {
            probe.links.push((0..count).map(|to| driver.link(from, to)).collect());
        }
        let mut nodes: Vec<i32> = probe.gpus.iter().filter(|gpu| gpu.vmm).map(|gpu| gpu.host_node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        probe.host = nodes.into_iter().map(|node| (node, driver.host_allocation(node))).collect();
    }
    // The driver stays loaded: it has threads of its own by now.
    std::mem::forget(library);
    Ok(())
}

/// The file that a function was loaded from.
fn file_of(function: *const c_void) -> Option<PathBuf> {
    // SAFETY: all zeroes is a valid Dl_info: null pointers and no addresses.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr reads no memory at `function`, and `info` is writable.
    let found = unsafe { libc::dladdr(function, &raw mut info) } != 0 && !info.dli_fname.is_null();
    // SAFETY: dladdr succeeded, so the name is a string of the loader's, valid while the library is loaded.
    let name = found.then(|| unsafe { CStr::from_ptr(info.dli_fname) })?;
    PathBuf::from(name.to_string_lossy().into_owned()).canonicalize().ok()
}

impl Driver {
    fn check(&self, call: &str, code: c_int) -> Result<(), FailedCall> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the output is a local; what is written there is a constant string of the driver's, or nothing.
        let known = unsafe { (self.cuGetErrorName)(code, &raw mut name) } == 0 && !name.is_null();
        // SAFETY: the driver knew the code, so `name` is a constant string of its own that ends in NUL.
        let name = known.then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
        Err(FailedCall { call: call.to_owned(), code, words: name.unwrap_or_else(|| format!("error {code}")) })
    }

    /// # Safety
    /// `cuInit` succeeded.
    unsafe fn gpu(&self, device: c_int) -> Result<Gpu, FailedCall> {
        let (mut name, mut pci) = ([0 as c_char; 256], [0 as c_char; 64]);
        let (mut total, mut uuid) = (0, CUuuid { bytes: [0; 16] });
        // SAFETY: every output is a local, and the lengths given leave the last byte of each text as the NUL it is.
        unsafe {
            self.check("cuDeviceGetName", (self.cuDeviceGetName)(name.as_mut_ptr(), 255, device))?;
            self.check("cuDeviceGetPCIBusId", (self.cuDeviceGetPCIBusId)(pci.as_mut_ptr(), 63, device))?;
            self.check("cuDeviceTotalMem", (self.cuDeviceTotalMem_v2)(&raw mut total, device))?;
            self.check("cuDeviceGetUuid", (self.cuDeviceGetUuid)(&raw mut uuid, device))?;
        }
        let uuid_bytes = uuid.bytes.map(c_char::cast_unsigned);
        Ok(Gpu {
            name: text(&name),
            total: total as u64,
            pci: text(&pci).to_lowercase(),
            uuid: format!("GPU-{}", dashed(&uuid_bytes)),
            uuid_bytes,
            vmm: self.attribute(VMM_SUPPORTED, device).is_some_and(|value| value != 0),
            host_node: self.attribute(HOST_NUMA_ID, device).unwrap_or(0).max(0),
            free: None,
            processes: Vec::new(),
            fabric: None,
            limits: Vec::new(),
        })
    }

    fn attribute(&self, attribute: c_int, device: c_int) -> Option<c_int> {
        let mut value = 0;
        // SAFETY: the output is a local; an attribute that the driver does not know is an error.
        (unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute, device) } == 0).then_some(value)
    }

    fn link(&self, from: c_int, to: c_int) -> Link {
        if from == to {
            return Link::Itself;
        }
        let (mut can, mut atomics) = (0, 0);
        // SAFETY: the outputs are locals.
        unsafe {
            if (self.cuDeviceCanAccessPeer)(&raw mut can, from, to) != 0 || can == 0 {
                return Link::None;
            }
            (self.cuDeviceGetP2PAttribute)(&raw mut atomics, NATIVE_ATOMICS, from, to);
        }
        if atomics != 0 { Link::Nvlink(0) } else { Link::Pcie }
    }

    /// The driver's answer to one granule of memory on a host node, which is given back at once.
    ///
    /// # Safety
    /// `cuInit` succeeded.
    unsafe fn host_allocation(&self, node: i32) -> c_int {
        // SAFETY: all zeroes is a valid value: no handle types, no flags.
        let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id: node };
        let (mut granule, mut handle) = (0, 0);
        // SAFETY: the outputs are locals and `prop` lives across the calls; the handle is released only once it exists.
        unsafe {
            let mut code = (self.cuMemGetAllocationGranularity)(&raw mut granule, &raw const prop, 0);
            if code == 0 {
                code = (self.cuMemCreate)(&raw mut handle, granule, &raw const prop, 0);
            }
            if code == 0 {
                (self.cuMemRelease)(handle);
            }
            code
        }
    }
}

fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Adds what only NVML knows. The GPUs are found by UUID: NVML counts all of the machine.
fn ask_nvml(probe: &mut Probe) {
    let nvml = match Nvml::get() {
        Ok(nvml) => nvml,
        Err(reason) => {
            probe.nvml = Some(reason.to_owned());
            return;
        }
    };
    probe.release = nvml.release();
    let groups = std::env::var_os(GROUPS).unwrap_or_default();
    let groups: Vec<PathBuf> = std::env::split_paths(&groups).filter(|folder| folder.is_absolute()).collect();
    let addresses: Vec<String> = probe.gpus.iter().map(|gpu| gpu.pci.clone()).collect();
    for (from, gpu) in probe.gpus.iter_mut().enumerate() {
        gpu.free = nvml.memory(&gpu.uuid_bytes).map(|memory| memory.free);
        gpu.processes = nvml.processes(&gpu.uuid_bytes).unwrap_or_default();
        gpu.limits = groups
            .iter()
            .filter_map(|folder| {
                let limits = nvml.memory_limits(&gpu.uuid_bytes, folder)?;
                Some((folder.display().to_string(), limits.soft, limits.hard))
            })
            .collect();
        // Without a number it is the switches of this host.
        let fabric = nvml.fabric(&gpu.uuid_bytes).filter(|fabric| fabric.cluster != [0; 16]);
        gpu.fabric = fabric.map(|known| Fabric {
            cluster: dashed(&known.cluster),
            clique: known.clique,
            is_ready: known.is_ready,
        });
        let ends = nvml.nvlink_ends(&gpu.uuid_bytes).unwrap_or_default();
        let ends: Vec<String> = ends.iter().map(|end| end.to_lowercase()).collect();
        for (to, link) in probe.links.get_mut(from).into_iter().flatten().enumerate() {
            if let Link::Nvlink(count) = link {
                // Links that end at no GPU end at a switch, and lead to every other GPU.
                let direct = ends.iter().filter(|end| same_address(end, &addresses[to])).count();
                let to_gpus = addresses.iter().any(|address| ends.iter().any(|end| same_address(end, address)));
                *count = if to_gpus { direct } else { ends.len() } as u32;
            }
        }
    }
}

/// NVML writes eight digits of the PCI domain, the driver four.
fn same_address(nvml: &str, driver: &str) -> bool {
    nvml.len() >= driver.len() && nvml.ends_with(driver)
}
