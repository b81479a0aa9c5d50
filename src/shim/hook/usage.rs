//! Bodies: launches and copies, counted for the context that is current. Nothing else happens here; a launch takes two
//! microseconds, and these must not show in it. Copies are also compared with the few addresses of pinned memory that are
//! watched, if any are.

use super::boundary;
use crate::serve::pinned;
use crate::watch::context::{self, Usage};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUDA_MEMCPY3D};
use gpupool_cuda::{self as cuda, CuResult};
use gpupool_interpose::Api;
use std::ffi::c_void;

/// After a launch.
#[inline]
pub fn launched(api: Api, result: CuResult) {
    count(api, result, Usage::launched);
}

/// After a copy or a fill.
#[inline]
pub fn copied(api: Api, result: CuResult) {
    count(api, result, Usage::copied);
}

/// What a copy calls an address, by its side.
pub trait Address {
    fn number(self) -> u64;
}

impl Address for u64 {
    #[inline]
    fn number(self) -> u64 {
        self
    }
}

impl Address for *const c_void {
    #[inline]
    fn number(self) -> u64 {
        self as u64
    }
}

impl Address for *mut c_void {
    #[inline]
    fn number(self) -> u64 {
        self as u64
    }
}

/// After a copy of bytes in a row.
#[inline]
pub fn moved(api: Api, result: CuResult, dst: impl Address, src: impl Address, bytes: usize) {
    copied(api, result);
    if result.is_ok() {
        pinned::after_copy(dst.number(), src.number(), bytes as u64);
    }
}

/// After a copy of rows. Of the fields that are read, those that the kinds of memory do not ask for are whatever the
/// program left there; an address too many only makes a block count as reached or copied out of, and then it is not judged.
#[inline]
pub fn moved_rows(api: Api, result: CuResult, copy: *const c_void) {
    copied(api, result);
    if result.is_ok() && pinned::copies::is_watching() {
        let copy = copy.cast::<CUDA_MEMCPY2D>();
        // SAFETY: the driver read the structure without an error; of it, only fields are read that any bits are a value of.
        let (dst, src) =
            unsafe { ([(*copy).dstHost as u64, (*copy).dstDevice], [(*copy).srcHost as u64, (*copy).srcDevice]) };
        pinned::copies::copied_some(&dst, &src);
    }
}

/// As [`moved_rows`], after a copy of boxes.
#[inline]
pub fn moved_boxes(api: Api, result: CuResult, copy: *const c_void) {
    copied(api, result);
    if result.is_ok() && pinned::copies::is_watching() {
        let copy = copy.cast::<CUDA_MEMCPY3D>();
        // SAFETY: the driver read this structure without an error, too, and only such fields are read of it.
        let (dst, src) =
            unsafe { ([(*copy).dstHost as u64, (*copy).dstDevice], [(*copy).srcHost as u64, (*copy).srcDevice]) };
        pinned::copies::copied_some(&dst, &src);
    }
}

/// After other work: a host function, an event, a prefetch.
#[inline]
pub fn worked(api: Api, result: CuResult) {
    if result.is_ok() {
        count(api, result, Usage::worked);
    } else {
        boundary::trace(api, result);
    }
}

/// Always inlined, so that the rows ask the loader only once where this thread's variables lie.
#[inline(always)]
fn count(api: Api, result: CuResult, as_what: impl Fn(&Usage)) {
    match cuda::at_hand().map(context::glance) {
        Some(Ok(Some(context))) => as_what(&context.usage),
        Some(Ok(None)) => {}
        Some(Err(())) | None => count_in_unknown(api, as_what),
    }
    boundary::trace(api, result);
}

/// The first of a thread in its context, which may have to be noted first: that takes a lock, allocates, asks the driver,
/// logs and may fail.
#[cold]
fn count_in_unknown(api: Api, as_what: impl Fn(&Usage)) {
    boundary::contained(api, || {
        if let Some(context) = context::driver().and_then(context::current) {
            as_what(&context.usage);
        }
    });
}
