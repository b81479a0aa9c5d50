//! Bodies: the program's own virtual memory management, by addresses; [`super::handle`] has what is given a handle. See
//! [`crate::serve::handles`].

use super::handle::let_go;
use super::{Real, retry};
use crate::address::{self, Known};
use crate::bell;
use crate::bypass::Bypass;
use crate::gate;
use crate::process;
use crate::serve::{
    handles::{self, Anchor as Held, Request, Retained, of_kind},
    memory,
};
use crate::watch::context;
use cudarc::driver::sys::CUdeviceptr;
use gpupool_cuda::{Access, CuResult, Driver, Location, Physical, Properties};
use gpupool_pool::Anchor;
use std::ffi::{c_ulonglong, c_void};

/// # Safety
/// `handle` and `properties` are the program's arguments of that call.
pub unsafe fn create(
    real: &mut Real,
    handle: *mut u64,
    bytes: usize,
    properties: *const Properties,
    flags: c_ulonglong,
) -> CuResult {
    // What a suspended program asks for would lie on the GPU that it has just left.
    gate::wait_while_held();
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
            let result = retry::call(real);
            if result.is_ok() && is_of_another_kind && !handle.is_null() {
                let gpu = properties.and_then(|properties| properties.location.device());
                // SAFETY: the driver answered success, so it has written there.
                of_kind::made(unsafe { *handle }, bytes as u64, gpu);
            }
            result
        }
    };
    if result.is_ok() {
        bell::allocated();
    }
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

/// Also for `cuMemAddressFree`, which ends what is mapped there if the driver lets it.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn unmap(real: &mut Real, address: CUdeviceptr, bytes: usize) -> CuResult {
    if memory::is_reserved(address, bytes as u64) {
        return CuResult::INVALID_VALUE;
    }
    let unmapping = match handles::begin_unmap(address, bytes as u64) {
        Ok(unmapping) => unmapping,
        Err(refused) => return refused,
    };
    let of_kind = of_kind::unmap(address, bytes as u64);
    let result = real.call();
    handles::end_unmap(unmapping, result.is_ok());
    if !result.is_ok() {
        of_kind::still_mapped(of_kind);
    }
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
    let Some(driver) = process::driver().filter(|_| !list.is_null()) else { return real.call() };
    // SAFETY: not NULL, and the program promised the driver `count` entries.
    let list = unsafe { std::slice::from_raw_parts(list, count) };
    handles::set_access(driver, address, bytes as u64, list, || real.call())
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
    if !result.is_ok() {
        return result;
    }
    // Nobody sets access to memory of cuMemAlloc, and of what is no memory any more the driver says so (H200).
    let (own, result) = match address::known(address) {
        Known::Pooled(_) => (Some(0), result),
        Known::Freed => (Some(0), CuResult::INVALID_VALUE),
        Known::Managed(_) | Known::Pinned(_) | Known::Foreign => {
            // SAFETY: the driver answered success, so it has read the location.
            let location = unsafe { *location };
            (handles::access_at(address, location), result)
        }
    };
    if let Some(own) = own {
        // SAFETY: the driver answered success, so it has written there.
        unsafe { *flags = own as c_ulonglong };
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
    let (Some(driver), true) = (process::driver(), result.is_ok()) else {
        expected.into_iter().for_each(handles::not_retained);
        return result;
    };
    // SAFETY: the driver answered success, so it has written there.
    let given = Physical::from_raw(unsafe { *handle });
    let number = match handles::retained(expected, given, address as u64) {
        Retained::Unknown => {
            of_kind::retained(address as u64);
            return result;
        }
        Retained::As(number) => number,
        Retained::Extra(number) => {
            // The reference that the driver has just given, which the program does not learn of.
            let _ = let_go(driver, given);
            number
        }
        Retained::Revived(number, others) => {
            if let Err(refused) = retain_all(driver, given, &others) {
                handles::not_retained(number);
                return refused;
            }
            handles::revived(number);
            number
        }
    };
    // SAFETY: the driver has just written there.
    unsafe { *handle = number.raw() };
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
                    let _ = let_go(driver, handle);
                }
                return Err(result);
            }
        }
    }
    Ok(())
}

/// # Safety
/// `handle` is the program's output argument of that call.
pub unsafe fn import(real: &mut Real, handle: *mut u64) -> CuResult {
    let result = real.call();
    let Some(driver) = context::driver().filter(|_| result.is_ok()) else { return result };
    // SAFETY: the driver answered success, so it has written there.
    let given = Physical::from_raw(unsafe { *handle });
    let location = driver.properties_of(given).ok().map(|properties| properties.location);
    // SAFETY: the driver has just written there.
    unsafe { *handle = handles::imported(given, location).raw() };
    result
}

/// Binds what is mapped at an address to a multicast object.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn bind_multicast(real: &mut Real, address: CUdeviceptr, bytes: usize) -> CuResult {
    giving_away(address, bytes as u64, Held::Multicast, || real.call())
}

/// Binds what is mapped at an address to a logical endpoint.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn bind_endpoint(real: &mut Real, address: *mut c_void, bytes: u64) -> CuResult {
    giving_away(address as u64, bytes, Held::Endpoint, || real.call())
}

/// Makes a call that gives away what is mapped in a range, of the pool or of the program's own: it stays on its physical memory from
/// before the call on.
pub fn giving_away(address: u64, bytes: u64, why: Held, call: impl FnOnce() -> CuResult) -> CuResult {
    // Before anybody has it: a block that is freed in between must not serve again.
    let anchored = memory::anchor(address, bytes, Anchor::Descriptor);
    let result = handles::giving_away(address, bytes, why, call);
    if anchored && !result.is_ok() {
        memory::withdraw_anchor(address, bytes, Anchor::Descriptor);
    }
    result
}
