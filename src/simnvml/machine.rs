//! The machine that is told of: the one that `SIMCUDA_MACHINE` names, or that of the driver in this process.

use crate::ffi::Answer;
use nvml_wrapper_sys::bindings::*;
use simmachine::links::Link;
use simmachine::settings::Settings;
use simmachine::{Occupancy, Visitor, gpu_place, say};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

static SETTINGS: OnceLock<Settings> = OnceLock::new();
/// How often it was initialised and not shut down.
static STARTED: Mutex<u32> = Mutex::new(0);

/// Reads the environment the first time. A bad value is named on stderr.
pub fn init() -> Answer {
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if SETTINGS.get().is_none() {
        let settings = Settings::read(|name| std::env::var(name).ok()).map_err(|message| {
            say(&format!("simnvml: {message}"));
            nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
        })?;
        SETTINGS.get_or_init(|| settings);
    }
    *started += 1;
    Ok(())
}

pub fn shutdown() -> Answer {
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    *started = started.checked_sub(1).ok_or(nvmlReturn_enum_NVML_ERROR_UNINITIALIZED)?;
    Ok(())
}

/// The machine's description, while NVML is initialised.
pub fn settings() -> Answer<&'static Settings> {
    let started = *STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    SETTINGS.get().filter(|_| started > 0).ok_or(nvmlReturn_enum_NVML_ERROR_UNINITIALIZED)
}

/// Looks at the accounts; `None` where nobody has any: a machine of one process that did not start the driver.
fn visitor() -> Answer<Option<Visitor>> {
    if let Some(opened) = Visitor::of(settings()?) {
        return opened.map(Some).map_err(|message| {
            say(&format!("simnvml: {message}"));
            nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED
        });
    }
    // SAFETY: the name is a C string, and nothing is loaded that is not there already.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if driver.is_null() {
        return Ok(None);
    }
    // SAFETY: the handle is the driver's, the name a C string.
    let export = unsafe { libc::dlsym(driver, c"simcuda_occupancy".as_ptr()) };
    if export.is_null() {
        return Ok(None);
    }
    // SAFETY: `const Occupancy *simcuda_occupancy(void)` of the simulated driver, the only library with that export.
    let occupancy = unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *const Occupancy>(export) }();
    // SAFETY: not null, it is what the driver of this process shares with its machine.
    Ok((!occupancy.is_null()).then(|| unsafe { Visitor::within(occupancy) }))
}

/// Addresses to tell GPUs by: a handle is one of these.
static HANDLES: [u8; 32] = [0; 32];

/// A GPU of the machine.
#[derive(Clone, Copy)]
pub struct Gpu {
    pub index: usize,
}

impl Gpu {
    pub fn by_index(index: u32) -> Answer<Self> {
        let index = index as usize;
        if index < settings()?.gpus.len() {
            Ok(Self { index })
        } else {
            Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
        }
    }

    pub fn find(is_it: impl Fn(usize) -> bool) -> Answer<Self> {
        let index = (0..settings()?.gpus.len()).find(|&index| is_it(index));
        index.map(|index| Self { index }).ok_or(nvmlReturn_enum_NVML_ERROR_NOT_FOUND)
    }

    pub fn of(handle: nvmlDevice_t) -> Answer<Self> {
        let offset = (handle as usize).wrapping_sub((&raw const HANDLES) as usize);
        Self::by_index(u32::try_from(offset).unwrap_or(u32::MAX))
    }

    pub fn handle(self) -> nvmlDevice_t {
        (&raw const HANDLES[self.index]).cast_mut().cast()
    }

    pub fn capacity(self) -> Answer<u64> {
        Ok(settings()?.gpus[self.index])
    }

    /// All bytes and those in use.
    pub fn memory(self) -> Answer<(u64, u64)> {
        let total = self.capacity()?;
        let used = visitor()?.map_or(0, |visitor| visitor.used(gpu_place(self.index)));
        Ok((total, used.min(total)))
    }

    /// The same, for who asks for the list: it is slow while another process begins.
    pub fn list(self) -> Answer<Vec<(u32, u64)>> {
        let until = Instant::now() + Duration::from_millis(settings()?.list_ms);
        while Instant::now() < until && visitor()?.is_some_and(|visitor| visitor.begins_beside(std::process::id())) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.processes()
    }

    /// Processes with a context, and what they use.
    pub fn processes(self) -> Answer<Vec<(u32, u64)>> {
        Ok(visitor()?.map_or_else(Vec::new, |visitor| visitor.on_gpu(gpu_place(self.index))))
    }

    /// Whether some process has a context on it: without one it falls asleep.
    pub fn is_awake(self) -> Answer<bool> {
        Ok(!self.processes()?.is_empty())
    }

    pub fn link_to(self, other: Self) -> Answer<Link> {
        Ok(settings()?.links.between(self.index, other.index))
    }
}
