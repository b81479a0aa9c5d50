//! Bodies: pinned host memory, allocated and registered.

use super::{Real, retry};
use crate::address::{self, Known};
use crate::bypass::{Bypass, or_driver};
use crate::serve::pinned::{self, holders::By};
use crate::watch::context;
use gpupool_cuda::CuResult;
use std::ffi::{c_uint, c_void};
use std::time::Instant;

/// # Safety
/// `pointer` is the program's output argument of that call.
pub unsafe fn allocate(real: &mut Real, pointer: *mut *mut c_void, bytes: usize, flags: c_uint) -> CuResult {
    if pointer.is_null() || bytes == 0 {
        Bypass::Malformed.note(real.api);
        return real.call();
    }
    let why = match pinned::pin(bytes as u64, flags) {
        Ok(address) => {
            // SAFETY: not NULL; the driver writes there too.
            unsafe { *pointer = address as *mut c_void };
            return CuResult::SUCCESS;
        }
        Err(why) => why,
    };
    why.note(real.api);
    let start = Instant::now();
    let result = retry::call_for_host(real);
    if result.is_ok() {
        // SAFETY: not NULL, and the driver has just written to it.
        let address = unsafe { *pointer } as u64;
        address::given_anew(address, bytes as u64);
        pinned::driver_allocated(address, bytes as u64, flags, By::Driver, start.elapsed());
        if why == Bypass::OverLimit {
            pinned::over_limit(bytes as u64);
        }
    }
    result
}

/// # Safety
/// `pointer` is the program's output argument of that call. This older function gives what [`allocate`] gives without flags.
pub unsafe fn allocate_plain(real: &mut Real, pointer: *mut *mut c_void, bytes: usize) -> CuResult {
    // SAFETY: as for this function.
    unsafe { allocate(real, pointer, bytes, 0) }
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn free(real: &mut Real, pointer: *mut c_void) -> CuResult {
    let address = pointer as u64;
    or_driver(pinned::unpin(address), real.api, || {
        let result = pinned::forgetting(address, || real.call());
        if result.is_ok() {
            pinned::return_idle(None);
        }
        result
    })
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn register(real: &mut Real, pointer: *mut c_void, bytes: usize, flags: c_uint) -> CuResult {
    let start = Instant::now();
    let result = retry::call_for_host(real);
    let (address, bytes) = (pointer as u64, bytes as u64);
    if result.is_ok() {
        address::given_anew(address, bytes);
        pinned::driver_allocated(address, bytes, flags, By::Program, start.elapsed());
    } else if result == CuResult::HOST_MEMORY_ALREADY_REGISTERED {
        pinned::registered_twice(address, bytes);
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn unregister(real: &mut Real, pointer: *mut c_void) -> CuResult {
    let address = pointer as u64;
    match address::known(address) {
        Known::Foreign => {
            Bypass::NotOurs.note(real.api);
            pinned::forgetting(address, || real.call())
        }
        _ if !context::driver().is_some_and(context::is_usable) => {
            Bypass::ContextGone.note(real.api);
            real.call()
        }
        // To the driver most blocks are the middle of something, and freed memory is there still; the program asks about a
        // whole allocation, or about memory that is gone.
        Known::Freed => CuResult::HOST_MEMORY_NOT_REGISTERED,
        Known::Pinned(_) | Known::Pooled(_) | Known::Managed(_) => CuResult::INVALID_VALUE,
    }
}

/// # Safety
/// `device` is the program's output argument of that call.
pub unsafe fn device_pointer(real: &mut Real, device: *mut u64, pointer: *mut c_void) -> CuResult {
    if device.is_null() || !is_hidden(pointer as u64) {
        let result = real.call();
        if result.is_ok() {
            pinned::copies::may_be_read(pointer as u64);
        }
        return result;
    }
    // SAFETY: not NULL; the driver writes 0 there for memory that is not pinned.
    unsafe { *device = 0 };
    CuResult::INVALID_VALUE
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn flags(real: &mut Real, pointer: *mut c_void) -> CuResult {
    if is_hidden(pointer as u64) { CuResult::INVALID_VALUE } else { real.call() }
}

/// Memory that the driver takes for pinned and the program must not: what is freed of the pinned pool's segments, and
/// blocks of device memory, for which the driver answers as for pinned memory because they are mapped. Without a context
/// that can be used it looks at no address.
fn is_hidden(address: u64) -> bool {
    !matches!(address::known(address), Known::Foreign | Known::Pinned(_))
        && context::driver().is_some_and(context::is_usable)
}
