//! Bodies: contexts. The driver's answer changes only where the user forbids a context; see [`crate::context`] for what
//! is noted and why.

use super::{Real, retry};
use crate::context::{self, Before, Kind, Making, policy};
use crate::driver::CuResult;
use crate::{environment, managed, pinned};
use cudarc::driver::sys::{CUcontext, CUdevice};
use std::sync::atomic::Ordering;

/// # Safety
/// Called by a row's trampoline.
pub unsafe fn init(real: &mut Real) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        environment::initialised(real.row.name());
    }
    result
}

/// # Safety
/// `ctx` is the program's output argument of that call.
pub unsafe fn retain(real: &mut Real, ctx: *mut CUcontext, device: CUdevice) -> CuResult {
    // SAFETY: as for this function.
    unsafe { made(real, ctx, device, Kind::Primary) }
}

/// # Safety
/// `ctx` is the program's output argument of that call.
pub unsafe fn create(real: &mut Real, ctx: *mut CUcontext, device: CUdevice) -> CuResult {
    // SAFETY: as for this function.
    unsafe { made(real, ctx, device, Kind::Created) }
}

/// # Safety
/// `ctx` is the program's output argument of that call.
unsafe fn made(real: &mut Real, ctx: *mut CUcontext, device: CUdevice, kind: Kind) -> CuResult {
    let Some(driver) = context::driver() else { return real.call() };
    let call = real.row.name();
    // A primary context that exists is only counted up.
    let new = kind == Kind::Created || !driver.primary_is_active(device);
    if new && let Some(refusal) = policy::refuse(device, call) {
        return refusal;
    }
    context::sweep(driver, call);
    let before = if new { Before::look(driver, device) } else { Before::unknown() };
    let _making = Making::begin();
    let result = retry::call(real);
    if result.is_ok() && !ctx.is_null() {
        // SAFETY: the driver answered success, so it has written a context there.
        context::add(driver, unsafe { *ctx }, device, kind, call, before);
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn release(real: &mut Real, device: CUdevice) -> CuResult {
    managed::launch::forget_functions();
    let result = real.call();
    if result.is_ok() && context::driver().is_some_and(|driver| !driver.primary_is_active(device)) {
        context::primary_gone(device, real.row.name());
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn reset(real: &mut Real, device: CUdevice) -> CuResult {
    managed::launch::forget_functions();
    let result = real.call();
    if result.is_ok() {
        context::primary_gone(device, real.row.name());
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn destroy(real: &mut Real, ctx: CUcontext) -> CuResult {
    managed::launch::forget_functions();
    let result = real.call();
    if result.is_ok() {
        context::destroyed(ctx, real.row.name());
    }
    result
}

/// Set current, pushed or popped: the context that is current now may be one that nobody was seen making.
///
/// # Safety
/// Called by a row's trampoline.
pub unsafe fn switched(real: &mut Real) -> CuResult {
    let result = real.call();
    if result.is_ok()
        && let Some(driver) = context::driver().filter(|driver| context::has_switched(driver))
    {
        context::noticed(driver);
        context::sweep(driver, real.row.name());
    }
    result
}

/// Peer access between the current context and another: a context that was made only for that is told apart.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn peer_enabled(real: &mut Real, peer: CUcontext) -> CuResult {
    let result = real.call();
    let Some(driver) = context::driver().filter(|_| result.is_ok()) else { return result };
    context::sweep(driver, real.row.name());
    for context in [context::current(driver), context::by_handle(peer)].into_iter().flatten() {
        if !context.usage.is_used() {
            context.peered.store(true, Ordering::Relaxed);
        }
    }
    result
}

/// A copy between two GPUs, which may make a context on either.
///
/// # Safety
/// Called by a row's trampoline.
pub unsafe fn copied_between(real: &mut Real) -> CuResult {
    let result = real.call();
    if let Some(driver) = context::driver() {
        context::sweep(driver, real.row.name());
        if let Some(context) = context::current(driver) {
            context.usage.copied();
        }
    }
    result
}

/// The program waited for all work of a context: memory that has to wait for the device to go back goes back here.
///
/// # Safety
/// Called by a row's trampoline.
pub unsafe fn synchronized(real: &mut Real) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        pinned::return_idle();
    }
    result
}
