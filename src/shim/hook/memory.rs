//! Bodies: allocation and free of device memory.

use super::{Real, retry};
use crate::address;
use crate::bypass::{Bypass, or_driver};
use crate::serve::memory::unpooled;
use crate::serve::modes::{self, Served};
use crate::serve::{managed, pinned};
use crate::watch::context;
use cudarc::driver::sys::CUdeviceptr;
use gpupool_cuda::CuResult;
use std::ffi::c_uint;

/// Bytes that a row of pitched memory is rounded up to. Every GPU since compute capability 5 answers so; measured on
/// Hopper for 45 combinations of width and element size.
const PITCH: usize = 512;

/// # Safety
/// `dptr` is the program's output argument of that call.
pub unsafe fn allocate(real: &mut Real, dptr: *mut CUdeviceptr, bytes: usize) -> CuResult {
    if dptr.is_null() || bytes == 0 {
        Bypass::Malformed.note(real.api);
        return real.call();
    }
    match modes::allocate(bytes as u64, || retry::call(real)) {
        Served::Driver(result, why) => {
            why.note(real.api);
            // SAFETY: not NULL, and looked at only where the driver has just written to it.
            let address = result.is_ok().then(|| unsafe { *dptr });
            given_by_driver(result, address, bytes as u64, why)
        }
        Served::Pool(answer) => {
            // SAFETY: not NULL; the driver writes there too, also 0 when it has no memory.
            unsafe { *dptr = answer.unwrap_or(0) };
            CuResult::of(answer)
        }
    }
}

/// # Safety
/// `dptr` and `pitch` are the program's output arguments of that call.
pub unsafe fn allocate_pitch(
    real: &mut Real,
    dptr: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CuResult {
    let row = width.checked_next_multiple_of(PITCH);
    let bytes = row.and_then(|row| row.checked_mul(height));
    let (Some(row), Some(bytes), 4 | 8 | 16) = (row, bytes, element) else {
        Bypass::Malformed.note(real.api);
        return real.call();
    };
    if dptr.is_null() || pitch.is_null() || bytes == 0 {
        Bypass::Malformed.note(real.api);
        return real.call();
    }
    match modes::allocate(bytes as u64, || retry::call(real)) {
        Served::Driver(result, why) => {
            why.note(real.api);
            // SAFETY: not NULL, and looked at only where the driver has just written to it.
            let address = result.is_ok().then(|| unsafe { *dptr });
            given_by_driver(result, address, bytes as u64, why)
        }
        Served::Pool(answer) => {
            // SAFETY: neither is NULL; the driver writes to both after a success.
            unsafe { *dptr = answer.unwrap_or(0) };
            if answer.is_ok() {
                // SAFETY: not NULL, and the driver writes there after a success.
                unsafe { *pitch = row };
            }
            CuResult::of(answer)
        }
    }
}

/// The driver answered an allocation, and gave this address if it had memory.
fn given_by_driver(result: CuResult, address: Option<u64>, bytes: u64, why: Bypass) -> CuResult {
    if let Some(address) = address {
        address::given_anew(address, bytes);
        if matches!(why, Bypass::Full | Bypass::NoAddresses | Bypass::Declined(_)) {
            unpooled::given(address, bytes);
        }
    }
    served_by_driver(result)
}

/// Counts an allocation that the driver made.
pub(super) fn served_by_driver(result: CuResult) -> CuResult {
    if result.is_ok()
        && let Some(context) = context::driver().and_then(context::current)
    {
        context.usage.allocated(0);
    }
    result
}

/// Managed memory of the program's own: placed where the user asked for that.
///
/// # Safety
/// `dptr` is the program's output argument of that call.
pub unsafe fn allocate_managed(real: &mut Real, dptr: *mut CUdeviceptr, bytes: usize, flags: c_uint) -> CuResult {
    let result = retry::call(real);
    if result.is_ok() && !dptr.is_null() {
        // SAFETY: not NULL, and the driver has just written to it.
        let address = unsafe { *dptr };
        address::given_anew(address, bytes as u64);
        managed::adopt(address, bytes as u64, flags);
    }
    served_by_driver(result)
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
#[inline(always)]
pub unsafe fn free(real: &mut Real, dptr: CUdeviceptr) -> CuResult {
    if address::is_foreign(dptr) {
        Bypass::NotOurs.note(real.api);
        let result = freed_by_driver(dptr, || real.call());
        if result.is_ok() {
            pinned::return_idle(None);
        }
        return result;
    }
    free_known(real, dptr)
}

/// Has the driver free what it made.
#[inline]
pub(super) fn freed_by_driver(dptr: CUdeviceptr, free: impl FnOnce() -> CuResult) -> CuResult {
    let block = unpooled::take(dptr);
    let result = free();
    if let Some(block) = block.filter(|_| !result.is_ok()) {
        unpooled::keep(block);
    }
    result
}

/// Frees what may be somebody's whom the library knows of.
#[inline]
fn free_known(real: &mut Real, dptr: CUdeviceptr) -> CuResult {
    or_driver(modes::free(dptr), real.api, || {
        let result = managed::free_managed(dptr, || freed_by_driver(dptr, || real.call()));
        if result.is_ok() {
            pinned::return_idle(None);
        }
        result
    })
}
