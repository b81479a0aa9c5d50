//! Bodies: launches and copies, counted for the context that is current. Nothing else happens here; a launch takes two
//! microseconds, and these must not show in it. Copies are also compared with the few addresses of pinned memory that are
//! watched, if any are.

use super::{Row, boundary};
use crate::context::{self, Usage};
use crate::driver::{self, CuResult};
use crate::pinned;
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUDA_MEMCPY3D};
use std::ffi::c_void;

/// After a launch.
#[inline]
pub fn launched(row: Row, result: CuResult) {
    count(row, result, Usage::launched);
}

/// After a copy or a fill.
#[inline]
pub fn copied(row: Row, result: CuResult) {
    count(row, result, Usage::copied);
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
pub fn moved(row: Row, result: CuResult, dst: impl Address, src: impl Address, bytes: usize) {
    copied(row, result);
    if result.is_ok() {
        pinned::after_copy(dst.number(), src.number(), bytes as u64);
    }
}

/// After a copy of rows. Of the fields that are read, those that the kinds of memory do not ask for are whatever the
/// program left there; an address too many only makes a block count as reached.
#[inline]
pub fn moved_rows(row: Row, result: CuResult, copy: *const c_void) {
    copied(row, result);
    if result.is_ok() && pinned::copies::is_watching() {
        let copy = copy.cast::<CUDA_MEMCPY2D>();
        // SAFETY: the driver read the structure without an error; of it, only fields are read that any bits are a value of.
        let addresses =
            unsafe { [(*copy).srcHost as u64, (*copy).srcDevice, (*copy).dstHost as u64, (*copy).dstDevice] };
        pinned::copies::copied_some(&addresses);
    }
}

/// As [`moved_rows`], after a copy of boxes.
#[inline]
pub fn moved_boxes(row: Row, result: CuResult, copy: *const c_void) {
    copied(row, result);
    if result.is_ok() && pinned::copies::is_watching() {
        let copy = copy.cast::<CUDA_MEMCPY3D>();
        // SAFETY: as in `moved_rows`.
        let addresses =
            unsafe { [(*copy).srcHost as u64, (*copy).srcDevice, (*copy).dstHost as u64, (*copy).dstDevice] };
        pinned::copies::copied_some(&addresses);
    }
}

#[inline]
fn count(row: Row, result: CuResult, as_what: fn(&Usage)) {
    match driver::at_hand().and_then(context::at_hand) {
        Some(context) => as_what(&context.usage),
        None => count_first(row, as_what),
    }
    boundary::trace(row, result);
}

/// The context is another one than this thread's last, and perhaps one that nobody saw being made: that is looked up under
/// a lock, allocates, calls the driver and logs.
#[cold]
fn count_first(row: Row, as_what: fn(&Usage)) {
    boundary::contained(row, || {
        if let Some(context) = context::driver().and_then(context::current) {
            as_what(&context.usage);
        }
    });
}
