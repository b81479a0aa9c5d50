//! From a pointer the driver gave to the hook of the same export.
//!
//! The driver exports no two `cu*` names at one address, and `cuGetProcAddress` hands out exactly those addresses, so
//! the pointer says which version was chosen. Matching names instead would need the driver's own rules for versions,
//! flags and aliases, and would be wrong again with the next release.

use super::{HOOKS, Real, Row};
use crate::driver::{CuResult, real};
use crate::process;
use std::ffi::c_void;

/// The hook for a pointer into the driver; any other pointer as it is. Callable from the `dlsym` path.
pub fn hook_for(pointer: *mut c_void) -> *mut c_void {
    match real::row_of(pointer) {
        // Launches are left to the driver where nobody would hear of what is counted.
        Some(row) if process::counts() || !Row::COUNTS[row] => HOOKS[row].ours.cast_mut(),
        _ => pointer,
    }
}

/// `cuGetProcAddress`, both forms: the driver's status, version rules and errors are its own; only the pointer changes.
///
/// # Safety
/// `pfn` is the program's output argument of that call.
pub unsafe fn proc_address(real: &mut Real, pfn: *mut *mut c_void) -> CuResult {
    let result = real.call();
    if result.is_ok() && !pfn.is_null() {
        // SAFETY: the driver answered success, so it has written through `pfn`.
        unsafe { *pfn = hook_for(*pfn) };
    }
    result
}
