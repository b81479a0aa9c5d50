//! The driver's own checkpoint (`cuCheckpointProcess*`, from driver 570 on): another process is stopped at its calls of the driver, and all that it has on GPUs
//! goes to the host and comes back. None of these calls needs `cuInit` or makes a context (measured, driver 580).

use crate::CuResult;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_void};

/// Where a process is, by the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frozen {
    /// It runs.
    Not,
    /// It waits at its calls.
    Locked,
    /// It has nothing on the GPUs.
    Gone,
    /// The driver gave it up.
    Failed,
}

type Act = unsafe extern "C" fn(c_int, *mut c_void) -> CuResult;

/// The driver's functions.
pub struct Freezer {
    get_state: unsafe extern "C" fn(c_int, *mut c_int) -> CuResult,
    lock: Act,
    checkpoint: Act,
    restore: Act,
    unlock: Act,
}

/// What each of the calls takes: words that are reserved, and the first one of a lock's says for how many milliseconds it may wait.
type Arguments = [u64; 8];

impl Freezer {
    /// Of the driver that programs find.
    ///
    /// # Errors
    /// There is none, or it is older.
    pub fn load() -> Result<Self, String> {
        const NAME: &str = "libcuda.so.1";
        // SAFETY: loading libcuda runs its constructors, which every CUDA program does.
        let library = unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| format!("{NAME} cannot be loaded: {error}"))?;
        let act = |name: &'static str| {
            // SAFETY: all of these have this signature; what they point to is `Arguments`.
            let symbol = unsafe { library.get::<Act>(name.as_bytes()) };
            symbol.map(|symbol| *symbol).map_err(|_| format!("this driver has no {name}; it came with driver 570"))
        };
        // SAFETY: its signature in C.
        let get_state = unsafe { library.get(b"cuCheckpointProcessGetState\0") };
        let freezer = Self {
            get_state: *get_state
                .map_err(|_| "this driver has no cuCheckpointProcessGetState; it came with driver 570")?,
            lock: act("cuCheckpointProcessLock\0")?,
            checkpoint: act("cuCheckpointProcessCheckpoint\0")?,
            restore: act("cuCheckpointProcessRestore\0")?,
            unlock: act("cuCheckpointProcessUnlock\0")?,
        };
        // The pointers are used until the process ends.
        std::mem::forget(library);
        Ok(freezer)
    }

    /// # Errors
    /// The driver's answer; it knows no such process.
    pub fn state(&self, pid: u32) -> Result<Frozen, CuResult> {
        let mut state = 0;
        // SAFETY: the pointer is to a local.
        unsafe { (self.get_state)(pid.cast_signed(), &raw mut state) }.ok()?;
        Ok(match state {
            0 => Frozen::Not,
            1 => Frozen::Locked,
            2 => Frozen::Gone,
            _ => Frozen::Failed,
        })
    }

    fn act(act: Act, pid: u32, arguments: &mut Arguments) -> Result<(), CuResult> {
        // SAFETY: the pointer is to as many words as the largest of the arguments has.
        unsafe { act(pid.cast_signed(), arguments.as_mut_ptr().cast()) }.ok()
    }

    /// Has it wait at its calls, once its work is over, for which it has so many milliseconds.
    ///
    /// # Errors
    /// The driver's answer; it runs on then.
    pub fn lock(&self, pid: u32, milliseconds: u32) -> Result<(), CuResult> {
        Self::act(self.lock, pid, &mut [u64::from(milliseconds), 0, 0, 0, 0, 0, 0, 0])
    }

    /// Has all of it leave the GPUs.
    ///
    /// # Errors
    /// The driver's answer.
    pub fn checkpoint(&self, pid: u32) -> Result<(), CuResult> {
        Self::act(self.checkpoint, pid, &mut [0; 8])
    }

    /// Has all of it come back.
    ///
    /// # Errors
    /// The driver's answer. It stays without its memory then.
    pub fn restore(&self, pid: u32) -> Result<(), CuResult> {
        Self::act(self.restore, pid, &mut [0; 8])
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// The driver's answer.
    pub fn unlock(&self, pid: u32) -> Result<(), CuResult> {
        Self::act(self.unlock, pid, &mut [0; 8])
    }
}
