//! What part gpupool plays in this process, and why.

use crate::serve::memory;
use crate::{log, process};
use std::ffi::c_char;

/// What part gpupool plays in this process.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "names of C")]
pub enum gpupool_state {
    /// No function of the CUDA driver was called yet, so nothing was decided. (A state; the setting of this name says when freed memory goes home.)
    GPUPOOL_IDLE = 0,
    /// It takes part; `gpupool_mode` says how.
    GPUPOOL_ACTIVE = 1,
    /// It failed inside: memory handed out stays valid, new memory comes from the driver.
    GPUPOOL_CLOSED = 2,
    /// Memory of GPUs is the driver's: switched off, a setting that cannot be used, here or on any machine, no pool on this machine, or the child of a
    /// fork; `gpupool_why` says which. What only the first allocation finds out is `GPUPOOL_ACTIVE` before it, and contexts are watched all the same.
    GPUPOOL_PASSING = 3,
}

/// See `gpupool_state`.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_get_state() -> gpupool_state {
    match process::part() {
        process::Part::Idle => gpupool_state::GPUPOOL_IDLE,
        process::Part::Active if memory::mode() == c"off" => gpupool_state::GPUPOOL_PASSING,
        process::Part::Active => gpupool_state::GPUPOOL_ACTIVE,
        process::Part::Closed => gpupool_state::GPUPOOL_CLOSED,
        process::Part::Passing => gpupool_state::GPUPOOL_PASSING,
    }
}

/// How allocations are served now: a value of `GPUPOOL_MODE`, which differs from the setting where this machine cannot do
/// that one, and is `off` where every allocation goes to the driver. A string that is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_mode() -> *const c_char {
    let mode = if process::part() == process::Part::Active { memory::mode() } else { c"off" };
    mode.as_ptr()
}

/// Why allocations go to the driver, a sentence; empty where they do not. A string that is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_why() -> *const c_char {
    process::why().as_ptr()
}

/// The file that this process writes its log to (`GPUPOOL_LOG_FILE`); empty before CUDA was used and where there is none. Every line
/// is in the file when the call that it tells of returns. A string that is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_log_file() -> *const c_char {
    log::file_name().as_ptr()
}
