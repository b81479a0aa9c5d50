//! Bodies: the program's own virtual memory management. See [`crate::vmm`].

use super::{Real, retry};
use crate::driver::CuResult;
use crate::vmm::types::{Access, Location, Properties};
use crate::vmm::{self, Request};
use crate::{context, process};
use cudarc::driver::sys::CUdeviceptr;
use std::ffi::{c_int, c_ulonglong};

/// # Safety
/// `handle` and `properties` are the program's arguments of that call.
pub unsafe fn create(
    real: &mut Real,
    handle: *mut u64,
    bytes: usize,
    properties: *const Properties,
    flags: c_ulonglong,
) -> CuResult {
    // SAFETY: NULL, or readable as the driver demands.
    let properties = unsafe { properties.as_ref() };
    match properties.and_then(|properties| Some((*properties, properties.plain_device()?))) {
        Some((properties, device)) if !handle.is_null() && bytes > 0 && flags == 0 => {
            let request = Request { bytes: bytes as u64, properties, device };
            // SAFETY: not NULL, and the program's output argument.
            unsafe { vmm::create(real, handle, &request) }
        }
        _ => retry::call(real),
    }
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn release(real: &mut Real, handle: u64) -> CuResult {
    let before = vmm::release(handle);
    let result = real.call();
    if let Some(before) = before.filter(|_| !result.is_ok()) {
        vmm::not_released(handle, before);
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn map(real: &mut Real, address: CUdeviceptr, bytes: usize, handle: u64) -> CuResult {
    let known = vmm::begin_map(handle);
    let result = real.call();
    if known {
        vmm::end_map(handle, address, bytes as u64, result.is_ok());
    }
    result
}

/// Also for `cuMemAddressFree`, which ends what is mapped there if the driver lets it.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn unmap(real: &mut Real, address: CUdeviceptr, bytes: usize) -> CuResult {
    let taken = vmm::begin_unmap(address, bytes as u64);
    let result = real.call();
    vmm::end_unmap(taken, result.is_ok());
    result
}

/// # Safety
/// `list` is the program's argument of that call.
pub unsafe fn set_access(
    real: &mut Real,
    address: CUdeviceptr,
    bytes: usize,
    list: *const Access,
    count: usize,
) -> CuResult {
    let result = real.call();
    if !result.is_ok() || list.is_null() {
        return result;
    }
    let Some(driver) = process::driver() else { return result };
    // SAFETY: the driver has read `count` entries and answered success.
    vmm::widen(driver, address, bytes as u64, unsafe { std::slice::from_raw_parts(list, count) })
}

/// # Safety
/// The pointers are the program's arguments of that call.
pub unsafe fn get_access(
    real: &mut Real,
    flags: *mut c_ulonglong,
    location: *const Location,
    address: CUdeviceptr,
) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        // SAFETY: the driver answered success, so it has read the one and written the other.
        unsafe {
            if let Some(own) = vmm::access_at(address, *location) {
                *flags = own as c_ulonglong;
            }
        }
    }
    result
}

/// # Safety
/// `properties` is the program's output argument of that call.
pub unsafe fn properties(real: &mut Real, properties: *mut Properties, handle: u64) -> CuResult {
    let result = real.call();
    if result.is_ok()
        && let Some(asked) = vmm::asked_for(handle)
    {
        // SAFETY: the driver answered success, so it has written there.
        unsafe { (*properties).location = Location { kind: Location::DEVICE, id: asked as c_int } };
    }
    result
}

/// # Safety
/// `handle` is the program's output argument of that call.
pub unsafe fn retain(real: &mut Real, handle: *mut u64) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        // SAFETY: the driver answered success, so it has written there.
        vmm::retained(unsafe { *handle });
    }
    result
}

/// # Safety
/// `handle` is the program's output argument of that call.
pub unsafe fn import(real: &mut Real, handle: *mut u64) -> CuResult {
    let result = real.call();
    let Some(driver) = context::driver().filter(|_| result.is_ok()) else { return result };
    // SAFETY: the driver answered success, so it has written there.
    let handle = unsafe { *handle };
    // SAFETY: all-zero is a valid value of this struct of numbers.
    let mut properties: Properties = unsafe { std::mem::zeroed() };
    // SAFETY: the output is a local, the C struct with numbers for enums.
    let known = unsafe { (driver.cuMemGetAllocationPropertiesFromHandle)((&raw mut properties).cast(), handle) };
    if known.is_ok() {
        vmm::imported(handle, properties.location);
    }
    result
}
