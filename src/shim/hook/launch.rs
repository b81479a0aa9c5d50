//! Bodies: what is looked at before a kernel is launched. See [`crate::serve::managed::launch`]; after the launch it is counted
//! like everything in [`super::submit`].

use crate::serve::managed::launch::{before, before_configured};
use crate::watch::arguments::Arguments;
use cudarc::driver::sys::{CUfunction, CUstream};
use gpupool_cuda::{Function, Stream};
use gpupool_interpose::Api;
use std::ffi::c_void;

/// # Safety
/// The arguments are the program's of that call.
#[inline]
pub unsafe fn kernel(
    api: Api,
    function: CUfunction,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) {
    // SAFETY: as for this function.
    unsafe { before(api, Function::from_raw(function), Stream::from_raw(stream), Arguments { parameters, extra }) };
}

/// # Safety
/// The arguments are the program's of that call.
#[inline]
pub unsafe fn configured(
    api: Api,
    config: *const c_void,
    function: CUfunction,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) {
    // SAFETY: as for this function.
    unsafe { before_configured(api, config, Function::from_raw(function), Arguments { parameters, extra }) };
}

/// # Safety
/// The arguments are the program's of that call.
#[inline]
pub unsafe fn cooperative(api: Api, function: CUfunction, stream: CUstream, parameters: *mut *mut c_void) {
    // SAFETY: as for this function.
    unsafe { kernel(api, function, stream, parameters, std::ptr::null_mut()) };
}
