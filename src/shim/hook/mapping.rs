//! Bodies: the program's own virtual memory management. See [`crate::serve::handles`].

use super::{Real, retry};
use crate::address::{self, Known};
use crate::bypass::Bypass;
use crate::serve::{
    handles::{self, Part, Release, Request, Retained},
    memory,
};
use crate::watch::context;
use crate::{log, process};
use cudarc::driver::sys::CUdeviceptr;
use gpupool_cuda::{Access, CuResult, Driver, Location, Physical, Properties};
use gpupool_pool::Anchor;
use std::ffi::{c_int, c_ulonglong, c_void};

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
    let result = match properties.and_then(|properties| Some((*properties, properties.plain_device()?))) {
        Some((properties, device)) if !handle.is_null() && bytes > 0 && flags == 0 => {
            let request = Request { bytes: bytes as u64, properties, device };
            // SAFETY: not NULL, and the program's output argument.
            unsafe { handles::create(real, handle.cast(), &request) }
        }
        plain => {
            let is_of_another_kind = properties.is_some() && plain.is_none();
            let why = if is_of_another_kind { Bypass::OtherKind } else { Bypass::Malformed };
            why.note(real.api);
            retry::call(real)
        }
    };
    // Such memory needs no context; made where the program is, it is what the context there is for.
    if result.is_ok()
        && let Some(context) = context::driver().and_then(context::current)
        && let Some(device) = properties.and_then(|properties| properties.location.device())
        && context.device.ordinal() == device
    {
        context.usage.worked();
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn release(real: &mut Real, handle: u64) -> CuResult {
    let handle = Physical::from_raw(handle);
    let parts = match handles::release(handle) {
        Release::Unknown => return real.call(),
        Release::Counted => return CuResult::SUCCESS,
        Release::Parts(parts) => parts,
    };
    let result = real.call();
    if !result.is_ok() {
        handles::not_released(&parts);
        return result;
    }
    let Some(driver) = process::driver() else { return result };
    for part in parts.iter().filter(|(other, _)| *other != handle) {
        // Made by `handles::create`, with one reference, which the program knows nothing of.
        if !driver.release(part.0).is_ok() {
            handles::not_released(std::slice::from_ref(part));
        }
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn map(
    real: &mut Real,
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
) -> CuResult {
    let parts = handles::begin_map(Physical::from_raw(handle));
    let result = match process::driver() {
        Some(driver) if parts.len() > 1 => map_parts(driver, address, bytes as u64, offset, &parts, flags),
        _ => real.call(),
    };
    handles::end_map(&parts, address, bytes as u64, result.is_ok());
    result
}

/// Maps all parts one after the other, or none. As the driver, only from their beginning and all of them.
fn map_parts(driver: &Driver, address: u64, bytes: u64, offset: usize, parts: &[Part], flags: u64) -> CuResult {
    let whole: u64 = parts.iter().map(|part| part.bytes).sum();
    if (offset as u64).checked_add(bytes).is_none_or(|end| end > whole) {
        return CuResult::INVALID_VALUE;
    }
    if bytes != whole {
        return CuResult::NOT_SUPPORTED;
    }
    let mut done = 0;
    for part in parts {
        let result = driver.map(address + done, part.bytes, part.handle, flags);
        if !result.is_ok() {
            if done > 0 {
                let _ = driver.unmap(address, done);
            }
            return result;
        }
        done += part.bytes;
    }
    CuResult::SUCCESS
}

/// Also for `cuMemAddressFree`, which ends what is mapped there if the driver lets it.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn unmap(real: &mut Real, address: CUdeviceptr, bytes: usize) -> CuResult {
    if memory::is_reserved(address, bytes as u64) {
        return CuResult::INVALID_VALUE;
    }
    let taken = handles::begin_unmap(address, bytes as u64);
    let result = real.call();
    handles::end_unmap(taken, result.is_ok());
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
    if memory::is_reserved(address, bytes as u64) {
        return CuResult::INVALID_VALUE;
    }
    let result = real.call();
    if !result.is_ok() || list.is_null() {
        return result;
    }
    let Some(driver) = process::driver() else { return result };
    // SAFETY: the driver has read `count` entries and answered success.
    handles::widen(driver, address, bytes as u64, unsafe { std::slice::from_raw_parts(list, count) })
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
            if let Some(own) = handles::access_at(address, *location) {
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
        && let Some(asked) = handles::asked_for(Physical::from_raw(handle))
    {
        // SAFETY: the driver answered success, so it has written there.
        unsafe { (*properties).location = Location { kind: Location::DEVICE, id: asked as c_int } };
    }
    result
}

/// Bare, memory from `cuMemAlloc` has no handle. Pooled memory has one where the block is a chunk of its own, and then it is
/// given, since NCCL and UCX share memory that way; a handle of part of a block, or of more than the block, would be taken
/// for the whole of it.
///
/// # Safety
/// `handle` is the program's output argument of that call.
pub unsafe fn retain(real: &mut Real, handle: *mut u64, address: *mut c_void) -> CuResult {
    match address::known(address as CUdeviceptr) {
        Known::Pooled(block) if memory::is_one_chunk(&block) => {
            // Before anybody has it: a block that is freed in between must not serve again.
            if !memory::anchor(block.address, block.bytes, Anchor::Retained) {
                return CuResult::INVALID_VALUE;
            }
            let result = real.call();
            if !result.is_ok() {
                memory::withdraw_anchor(block.address, block.bytes, Anchor::Retained);
            }
            return result;
        }
        Known::Pooled(_) | Known::Freed => return CuResult::INVALID_VALUE,
        Known::Managed(_) | Known::Pinned(_) | Known::Foreign => {}
    }
    let expected = handles::begin_retain(address as u64);
    let result = real.call();
    let given = match result.is_ok() {
        // SAFETY: the driver answered success, so it has written there.
        true => Some(Physical::from_raw(unsafe { *handle })),
        false => None,
    };
    if let Some(expected) = expected {
        if given == Some(expected) {
            return result;
        }
        handles::not_retained(expected);
    }
    let (Some(driver), Some(given)) = (process::driver(), given) else { return result };
    let whole = match handles::retained(given, address as u64) {
        Retained::Plain => return result,
        Retained::Whole(whole) => {
            // The reference that the driver has just given, which the program does not learn of.
            let _ = driver.release(given);
            whole
        }
        Retained::Revived(whole, others) => {
            if let Err(refused) = retain_all(driver, given, &others) {
                return refused;
            }
            handles::revived(whole);
            whole
        }
    };
    // SAFETY: as above.
    unsafe { *handle = whole.raw() };
    result
}

/// Takes a reference on what is mapped at each of these addresses, or gives `given` back, too.
fn retain_all(driver: &Driver, given: Physical, addresses: &[u64]) -> Result<(), CuResult> {
    let mut taken = vec![given];
    for address in addresses {
        match driver.retain_at(*address) {
            Ok(handle) => taken.push(handle),
            Err(result) => {
                for handle in taken {
                    let _ = driver.release(handle);
                }
                return Err(result);
            }
        }
    }
    Ok(())
}

/// A descriptor is of one piece of memory, so what is made of parts has none.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn export(real: &mut Real, handle: u64) -> CuResult {
    if !handles::is_of_parts(Physical::from_raw(handle)) {
        return real.call();
    }
    log::warn_once(
        "vmm.export",
        "cuMemExportToShareableHandle of a handle that no GPU had room for, so that it is made of parts: NOT_SUPPORTED; \
         create smaller handles, or set GPUPOOL_DEVICES to the program's own GPU and GPUPOOL_HOST_LIMIT=0 to be told \
         OUT_OF_MEMORY instead",
    );
    CuResult::NOT_SUPPORTED
}

/// # Safety
/// `handle` is the program's output argument of that call.
pub unsafe fn import(real: &mut Real, handle: *mut u64) -> CuResult {
    let result = real.call();
    let Some(driver) = context::driver().filter(|_| result.is_ok()) else { return result };
    // SAFETY: the driver answered success, so it has written there.
    let handle = Physical::from_raw(unsafe { *handle });
    if let Ok(properties) = driver.properties_of(handle) {
        handles::imported(handle, properties.location);
    }
    result
}
