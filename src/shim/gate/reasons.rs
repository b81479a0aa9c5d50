//! Why the gate is never closed in this process: work or memory that would not be seen.

use super::kernel;
use crate::nvml;
use crate::process;
use crate::watch::submitted::{self, Unseen};
use gpupool_cuda::{CuResult, Driver};
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;

/// One reason. Ordered: those that leave no doubt come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Hooks do nothing in this process, or not any more.
    NotActive,
    /// The library was opened and not preloaded: what the program submits is not seen.
    NotPreloaded,
    /// The process ends.
    Ending,
    /// The driver puts no event behind all work of a context (before CUDA 12.5).
    OldDriver,
    /// The system refused the barrier on all threads.
    NoBarrier,
    /// A context on this GPU is in error.
    Broken { gpu: u32, error: CuResult },
    /// Work was seen while the gate was closed, so somebody submits past it; which.
    Passed(String),
    /// The driver refused something in the middle of a move.
    CutShort(CuResult),
    /// Confidential computing is on.
    Confidential,
    /// Work may be submitted past the hooks; what that is about. Where that is a table of the driver's that is common and that
    /// nobody has looked at, [`is_doubt`](Self::is_doubt) says so.
    Unseen(Unseen, String),
    /// A device is open through which others reach physical memory.
    Device(String),
    /// A library of a tool is loaded that submits work of its own.
    Tool(String),
    /// A library is loaded through which others may reach physical memory, or work be submitted; whether it is used is not known.
    Library(String),
}

impl Reason {
    /// Whether this only might be one: a library that many programs load and few use, a private table that many libraries take and of
    /// which nobody knows what they call in it.
    pub fn is_doubt(&self) -> bool {
        matches!(self, Self::Library(_) | Self::Unseen(Unseen::CommonTable, _))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotActive => write!(f, "gpupool does nothing in this process: {}", process::why().to_string_lossy()),
            Self::NotPreloaded => f.write_str(
                "the library was opened by the program and not preloaded, so it does not see what is submitted",
            ),
            Self::Ending => f.write_str("the process ends"),
            Self::OldDriver => f.write_str("the driver is older than CUDA 12.5 and has no cuCtxRecordEvent"),
            Self::NoBarrier => f.write_str("the system refused membarrier(PRIVATE_EXPEDITED)"),
            Self::Broken { gpu, error } => write!(f, "a context on GPU {gpu} is in error: {error}"),
            Self::Passed(what) => {
                write!(f, "work was submitted past the hooks while memory was about to be mapped anew: {what}")
            }
            Self::CutShort(error) => write!(f, "the driver answered {error} in the middle of a move"),
            Self::Confidential => f.write_str("confidential computing is on"),
            Self::Unseen(why, what) => f.write_str(&why.said_of(what)),
            Self::Device(path) => write!(f, "{path} is open, through which others reach physical memory"),
            Self::Tool(name) => write!(f, "{name} is loaded, a tool that submits work of its own"),
            Self::Library(name) => {
                write!(f, "{name} is loaded, which may submit work or let others reach physical memory")
            }
        }
    }
}

/// What a move found, after which there is no other.
static FOUND: OnceBox<Reason> = OnceBox::new();

/// The gate is never closed again in this process; the first reason stays.
pub fn found(reason: Reason) {
    let _ = FOUND.set(Box::new(reason));
}

/// All that is known, those without doubt first. Reads the list of open descriptors and asks the loader what is loaded, so it takes
/// some microseconds for each descriptor; never called while the gate is closed.
pub fn all(driver: &Driver) -> Vec<Reason> {
    look_for_devices();
    look_for_libraries();
    known(driver)
}

/// The same without a look: what was seen by earlier ones.
pub fn known(driver: &Driver) -> Vec<Reason> {
    let mut found: Vec<Reason> = FOUND.get().cloned().into_iter().collect();
    if !process::is_active() {
        found.push(Reason::NotActive);
    }
    if !process::is_preloaded() {
        found.push(Reason::NotPreloaded);
    }
    if super::is_ending() {
        found.push(Reason::Ending);
    }
    if !driver.records_contexts() {
        found.push(Reason::OldDriver);
    }
    if !kernel::prepare() {
        found.push(Reason::NoBarrier);
    }
    if is_confidential() {
        found.push(Reason::Confidential);
    }
    found.extend(submitted::reasons().into_iter().map(|(why, what)| Reason::Unseen(why, what)));
    found.extend(DEVICE.lock().clone().map(Reason::Device));
    found.extend_from_slice(&LOADED.lock().found);
    found.sort_by_key(Reason::is_doubt);
    found
}

fn is_confidential() -> bool {
    static KNOWN: OnceBox<bool> = OnceBox::new();
    *KNOWN.get_or_init(|| Box::new(nvml::get().and_then(|nvml| nvml.is_confidential()).unwrap_or(false)))
}

/// Devices through which memory is registered past the driver's interface: verbs, gdrcopy, GPUDirect Storage.
const DEVICES: [&[u8]; 3] = [b"/dev/infiniband/uverbs", b"/dev/gdrdrv", b"/dev/nvidia-fs"];

fn is_such_a_device(path: &[u8]) -> bool {
    DEVICES.iter().any(|device| path.starts_with(device))
}

/// A device of that kind that is or was open: what was registered through it may outlive the descriptor.
static DEVICE: Mutex<Option<String>> = Mutex::new(None);

fn look_for_devices() {
    if DEVICE.lock().is_some() {
        return;
    }
    let links = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let mut paths = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    if let Some(path) = paths.find(|path| is_such_a_device(path.as_os_str().as_bytes())) {
        *DEVICE.lock() = Some(path.display().to_string());
    }
}

/// Libraries, by the beginnings of their file names; whether they are tools.
const LIBRARIES: [(&[u8], bool); 11] = [
    (b"libsanitizer-collection.so", true),
    (b"libsanitizer-public.so", true),
    (b"libcuda-injection.so", true),
    (b"libToolsInjection64.so", true),
    (b"libcudadebugger.so", true),
    (b"libnvoptix.so", false),
    (b"libnvidia-encode.so", false),
    (b"libnvcuvid.so", false),
    (b"libcufile.so", false),
    (b"libibverbs.so", false),
    (b"libgdrapi.so", false),
];

fn of_library(path: &[u8]) -> Option<Reason> {
    let name = path.rsplit(|letter| *letter == b'/').next()?;
    let (_, is_tool) = LIBRARIES.iter().find(|(beginning, _)| name.starts_with(beginning))?;
    let name = String::from_utf8_lossy(name).into_owned();
    Some(if *is_tool { Reason::Tool(name) } else { Reason::Library(name) })
}

/// What a walk over the loaded libraries found, and how many had ever been loaded then.
struct Walk {
    adds: u64,
    last: u64,
    found: Vec<Reason>,
}

/// The libraries of that kind that are or were loaded.
static LOADED: Mutex<Walk> = Mutex::new(Walk { adds: 0, last: 0, found: Vec::new() });

fn look_for_libraries() {
    let mut walk = Walk { adds: 0, last: LOADED.lock().adds, found: Vec::new() };
    // Not under a lock of ours: another thread may hold the loader's and be in a hook.
    // SAFETY: the callback gets the pointer that is given here, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut walk).cast()) };
    let mut seen = LOADED.lock();
    seen.adds = seen.adds.max(walk.adds);
    for reason in walk.found {
        if !seen.found.contains(&reason) {
            seen.found.push(reason);
        }
    }
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, walk: *mut c_void) -> c_int {
    // SAFETY: the loader gives a description that lives for this call, and `look_for_libraries` the pointer to its own variable.
    let (info, walk) = unsafe { (&*info, &mut *walk.cast::<Walk>()) };
    walk.adds = info.dlpi_adds;
    if walk.adds == walk.last {
        // Nothing was loaded since the last walk.
        return 1;
    }
    if !info.dlpi_name.is_null() {
        // SAFETY: the loader's names end with a NUL.
        walk.found.extend(of_library(unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes()));
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_devices_are_known_by_the_beginning_of_their_names() {
        let library = |name: &str| of_library(name.as_bytes());
        assert_eq!(library("/usr/lib/libcufile.so.0"), Some(Reason::Library("libcufile.so.0".to_owned())));
        assert_eq!(library("libibverbs.so.1"), Some(Reason::Library("libibverbs.so.1".to_owned())));
        assert_eq!(
            library("/opt/libToolsInjection64.so"),
            Some(Reason::Tool("libToolsInjection64.so".to_owned())),
            "nsys"
        );
        assert_eq!(library("/usr/lib/libcufilters.so/libm.so.6"), None);
        assert!(is_such_a_device(b"/dev/infiniband/uverbs0") && is_such_a_device(b"/dev/nvidia-fs7"));
        assert!(!is_such_a_device(b"/dev/nvidia0") && !is_such_a_device(b"/dev/infiniband/rdma_cm"));
    }

    #[test]
    fn what_is_loaded_is_found_and_stays_found() {
        look_for_libraries();
        let first = LOADED.lock().found.clone();
        look_for_libraries();
        assert_eq!(LOADED.lock().found, first, "the second walk stops at once");
        look_for_devices();
        assert_eq!(*DEVICE.lock(), None);
    }

    #[test]
    fn a_library_that_many_load_and_a_table_that_many_take_are_doubts() {
        let doubts = [Reason::Library(String::new()), Reason::Unseen(Unseen::CommonTable, String::new())];
        assert!(doubts.iter().all(Reason::is_doubt));
        let certain = [Reason::Device(String::new()), Reason::Unseen(Unseen::Table, String::new()), Reason::Ending];
        assert!(!certain.iter().any(Reason::is_doubt));
    }
}
