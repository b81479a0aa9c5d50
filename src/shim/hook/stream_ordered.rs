//! Bodies: stream-ordered memory. It is the driver's business, which keeps pools of its own and knows the order of streams;
//! only what it has no memory for comes from the pool.

use super::{Real, memory as memory_body, retry, stream};
use crate::address::{self, Known};
use crate::bypass::{Answer, Bypass, or_driver};
use crate::serve::{
    managed,
    memory::{self, mempool},
    modes,
};
use crate::watch::{capture, context};
use cudarc::driver::sys::{CUdeviceptr, CUmemoryPool, CUstream};
use gpupool_cuda::{Capturing, CuResult, Device, Driver, MemoryPool, PoolProperties, Stream};

/// Whether there is nothing to do about an allocation that the driver answered like this: it is no refusal for want of memory, and the context is known
/// to be in use. [`allocate`] is called for every other.
#[inline(always)]
pub fn is_over(result: CuResult) -> bool {
    result != CuResult::OUT_OF_MEMORY && context::is_in_use()
}

/// # Safety
/// `dptr` is the program's output argument of that call.
#[cold]
pub unsafe fn allocate(real: &mut Real, dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CuResult {
    let result = real.call();
    if result != CuResult::OUT_OF_MEMORY {
        return used(result);
    }
    // SAFETY: the caller vouches for the output.
    unsafe { allocate_without_room(real, dptr, bytes, stream) }
}

/// The driver had no memory for such a request.
///
/// # Safety
/// `dptr` is the program's output argument of that call.
#[cold]
unsafe fn allocate_without_room(real: &mut Real, dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CuResult {
    let result = retry::again(real);
    if result != CuResult::OUT_OF_MEMORY {
        return used(result);
    }
    // The pool that is current on the stream's GPU, which may be one that the program made for a purpose.
    let pool = |driver: &Driver, of_stream| Some((of_stream, mempool::plain_on(driver, of_stream)?));
    // SAFETY: as for this function.
    let answer = unsafe { serve(real, dptr, bytes, stream, pool) };
    or_driver(answer, real.api, || result)
}

/// # Safety
/// `dptr` is the program's output argument of that call.
pub unsafe fn allocate_from(
    real: &mut Real,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CuResult {
    let result = retry::call(real);
    if result != CuResult::OUT_OF_MEMORY {
        return used(result);
    }
    let pool = |driver: &Driver, _| {
        let pool = MemoryPool::from_raw(pool)?;
        Some((mempool::device_of(driver, pool)?, pool))
    };
    // SAFETY: as for this function.
    let answer = unsafe { serve(real, dptr, bytes, stream, pool) };
    or_driver(answer, real.api, || result)
}

/// Has the context in which the driver allocated count as one that is in use.
#[inline]
fn used(result: CuResult) -> CuResult {
    if context::is_in_use() { result } else { memory_body::served_by_driver(result) }
}

/// A block of the pool in place of memory of the driver's pool that `pool` names, with the GPU that this is for, given that of the stream. Not in a capture, where the request is a node
/// of the graph and its memory the driver's.
///
/// # Safety
/// `dptr` is the program's output argument of that call.
#[cold]
unsafe fn serve(
    real: &Real,
    dptr: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
    pool: impl FnOnce(&Driver, Device) -> Option<(Device, MemoryPool)>,
) -> Answer<CuResult> {
    let driver = context::driver().ok_or(Bypass::NoDriver)?;
    let stream = stream::handle(real, stream);
    // SAFETY: the driver accepted the stream just now.
    let captured = unsafe { driver.is_capturing(stream) };
    if dptr.is_null() || bytes == 0 {
        return Err(Bypass::Malformed);
    }
    if captured.map_err(Bypass::Declined)? {
        return Err(Bypass::Capturing);
    }
    // SAFETY: the driver accepted the stream just now.
    let handle = unsafe { driver.stream_context(stream) }.map_err(Bypass::Declined)?;
    let context = context::by_handle(handle).ok_or(Bypass::NoContext)?;
    let (device, pool) = pool(driver, context.device).ok_or(Bypass::OtherKind)?;
    let address = modes::allocate_after_driver(driver, &context, device, bytes as u64)?;
    if let Some(block) = memory::block_at(address) {
        mempool::stands_in(&block, pool);
    }
    // SAFETY: not NULL; the driver has written there too, 0.
    unsafe { *dptr = address };
    Ok(CuResult::SUCCESS)
}

/// Pooled memory is used again only after this point of the stream, and after that of every other one of its GPU: see
/// [`memory::free_later`]. In a capture it is memory of somebody else's, and the driver's answer for that is
/// INVALID_VALUE, which leaves the capture as it was; where the capture is broken already, the driver says that instead.
///
/// What is certainly the driver's does not come here ([`address::is_foreign`]), unless it may be what the pool had no room for.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn free(real: &mut Real, dptr: CUdeviceptr, stream: CUstream) -> CuResult {
    let known = address::known(dptr);
    match known {
        Known::Pooled(_) | Known::Managed(_) => {}
        // Where there is no context, or it or at the end of the process the driver is gone, that is the answer.
        Known::Freed | Known::Pinned(_) => {
            let usable = context::driver().is_some_and(context::is_usable);
            let refused = if usable { Ok(CuResult::INVALID_VALUE) } else { Err(Bypass::ContextGone) };
            return or_driver(refused, real.api, || real.call());
        }
        Known::Foreign => {
            Bypass::NotOurs.note(real.api);
            return managed::free_managed(dptr, || super::memory::freed_by_driver(dptr, || real.call()));
        }
    }
    let Some(driver) = context::driver() else {
        Bypass::NoDriver.note(real.api);
        return real.call();
    };
    let stream = stream::handle(real, stream);
    if capture::under_way() {
        // SAFETY: the stream is the program's argument to a call that uses it.
        match unsafe { driver.capture_of(stream) } {
            Ok(Capturing::Not) => {}
            Ok(Capturing::Valid) => return CuResult::INVALID_VALUE,
            Ok(Capturing::Invalidated) => return CuResult::STREAM_CAPTURE_INVALIDATED,
            Err(refused) => return refused,
        }
    }
    if matches!(known, Known::Managed(_)) {
        return managed::free_in_order(dptr, || real.call());
    }
    let freed = match device_of(driver, stream) {
        Ok(device) => memory::free_later(dptr, device),
        Err(refused) => return refused,
    };
    or_driver(freed, real.api, || real.call())
}

/// The GPU that a stream is on; the driver's error for one that is none.
fn device_of(driver: &Driver, stream: Stream) -> Result<Device, CuResult> {
    // SAFETY: the stream is the program's argument to a call that uses it.
    let handle = unsafe { driver.stream_context(stream) }?;
    if driver.current_context() == Some(handle) {
        return driver.current_device();
    }
    context::within(driver, handle, || driver.current_device()).unwrap_or(Err(CuResult::INVALID_CONTEXT))
}

/// # Safety
/// `pool` and `properties` are the program's arguments of that call.
pub unsafe fn pool_created(real: &mut Real, pool: *mut CUmemoryPool, properties: *const PoolProperties) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        // SAFETY: the driver answered success, so it has read the one and written the other.
        let (pool, properties) = unsafe { (*pool, &*properties) };
        if let Some(pool) = MemoryPool::from_raw(pool) {
            mempool::created(pool, properties);
        }
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn pool_destroyed(real: &mut Real, pool: CUmemoryPool) -> CuResult {
    if let Some(pool) = MemoryPool::from_raw(pool) {
        mempool::destroyed(pool);
    }
    real.call()
}
