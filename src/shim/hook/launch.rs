//! Bodies: what is looked at before a kernel is launched, where anybody reads its arguments ([`crate::watch::arguments`]); after the
//! launch it is counted like everything in [`super::submit`].

use crate::serve::managed;
use crate::tiers::launch::{self, About};
use crate::tiers::timing::Running;
use crate::watch::arguments::{self, Arguments, Reader};
use cudarc::driver::sys::{CUfunction, CUgraphExec, CUlaunchConfig, CUstream};
use gpupool_cuda::{Function, GraphExec, Stream};
use gpupool_interpose::Api;
use std::ffi::c_void;

pub use crate::tiers::launch::after;

/// # Safety
/// The arguments are the program's of that call.
pub unsafe fn kernel(
    api: Api,
    function: CUfunction,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Option<Running> {
    // SAFETY: as for this function.
    unsafe { any(api, function, stream, true, Arguments { parameters, extra }) }
}

/// # Safety
/// The arguments are the program's of that call.
pub unsafe fn configured(
    api: Api,
    config: *const c_void,
    function: CUfunction,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Option<Running> {
    // SAFETY: NULL, or what the driver reads too.
    let config = unsafe { config.cast::<CUlaunchConfig>().as_ref() }?;
    // Attributes may ask for launches that overlap, or that run together.
    // SAFETY: as for this function.
    unsafe { any(api, function, config.hStream, config.numAttrs == 0, Arguments { parameters, extra }) }
}

/// # Safety
/// The arguments are the program's of that call.
pub unsafe fn cooperative(
    api: Api,
    function: CUfunction,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> Option<Running> {
    // SAFETY: as for this function.
    unsafe { any(api, function, stream, false, Arguments { parameters, extra: std::ptr::null_mut() }) }
}

/// # Safety
/// The arguments are the program's of that call.
pub unsafe fn graph(api: Api, exec: CUgraphExec, stream: CUstream) -> Option<Running> {
    let exec = GraphExec::from_raw(exec).filter(|_| arguments::are_read_by(Reader::Tiers))?;
    launch::before_graph(api, exec, Stream::from_raw(stream))
}

/// # Safety
/// The arguments are the program's of that call.
unsafe fn any(
    api: Api,
    function: CUfunction,
    stream: CUstream,
    is_plain: bool,
    arguments: Arguments,
) -> Option<Running> {
    let (function, stream) = (Function::from_raw(function), Stream::from_raw(stream));
    if arguments::are_read_by(Reader::Managed) {
        // SAFETY: as for this function.
        unsafe { managed::launch::before(api, function, stream, arguments) };
    }
    if !arguments::are_read_by(Reader::Tiers) {
        return None;
    }
    // SAFETY: as for this function.
    unsafe { launch::before(api, About { function, stream, is_plain }, arguments) }
}
