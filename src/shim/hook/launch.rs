//! Bodies: what is looked at before a kernel is launched. See [`crate::managed::launch`]; after the launch it is counted
//! like everything in [`super::usage`].

use super::Row;
use crate::managed::launch::{Arguments, before, before_configured};
use cudarc::driver::sys::{CUfunction, CUstream};
use std::ffi::c_void;

/// # Safety
/// The arguments are the program's of that call.
#[inline]
pub unsafe fn kernel(
    row: Row,
    function: CUfunction,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) {
    // SAFETY: as for this function.
    unsafe { before(row, function, stream, Arguments { parameters, extra }) };
}

/// # Safety
/// The arguments are the program's of that call.
#[inline]
pub unsafe fn configured(
    row: Row,
    config: *const c_void,
    function: CUfunction,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) {
    // SAFETY: as for this function.
    unsafe { before_configured(row, config, function, Arguments { parameters, extra }) };
}

/// # Safety
/// The arguments are the program's of that call.
#[inline]
pub unsafe fn cooperative(row: Row, function: CUfunction, stream: CUstream, parameters: *mut *mut c_void) {
    // SAFETY: as for this function.
    unsafe { before(row, function, stream, Arguments { parameters, extra: std::ptr::null_mut() }) };
}
