//! Bodies: contexts. The driver's answer changes only where the user forbids a context; see [`crate::watch::context`] for what
//! is noted and why.

use super::{Real, rest, retry, stream, submit};
use crate::fence;
use crate::gate;
use crate::serve::{handles, memory, pinned};
use crate::taking::Taking;
use crate::watch::{
    arguments, capture,
    context::{self, Before, By, Kind, Making, end, policy, unseen},
    environment,
};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr};
use gpupool_cuda::{self as cuda, CuResult, Device, Driver, GreenContext};
use std::ffi::c_void;
use std::sync::atomic::Ordering;

/// # Safety
/// Called by a row's trampoline.
pub unsafe fn init(real: &mut Real) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        environment::initialised(real.api.name());
    }
    result
}

/// # Safety
/// `ctx` is the program's output argument of that call.
pub unsafe fn retain(real: &mut Real, ctx: *mut CUcontext, device: CUdevice) -> CuResult {
    let device = Device::from_raw(device);
    let made = |_: &Driver| {
        context::retained(device);
        // SAFETY: the driver answered success.
        unsafe { written(ctx) }
    };
    making(real, device, Kind::Primary, made, |driver, call| {
        let result = end::of_primary(driver, device, By::Release, call, || driver.release_primary(device));
        // SAFETY: the output argument of a call that succeeded.
        unsafe { forget(ctx, result) }
    })
}

/// # Safety
/// `ctx` is the program's output argument of that call.
pub unsafe fn create(real: &mut Real, ctx: *mut CUcontext, device: CUdevice) -> CuResult {
    let made = |_: &Driver| {
        // SAFETY: the driver answered success.
        unsafe { written(ctx) }
    };
    making(real, Device::from_raw(device), Kind::Created, made, |driver, call| {
        let Some(context) = made(driver) else { return CuResult::INVALID_CONTEXT };
        // SAFETY: it was made by this very call, and the program has not heard of it.
        let result = end::of_handle(context, call, || unsafe { driver.destroy_context(context) }, || true);
        // SAFETY: the output argument of a call that succeeded.
        unsafe { forget(ctx, result) }
    })
}

/// The context that a call has given the program.
///
/// # Safety
/// The driver answered success to a call with this output argument: it has written a context there, unless it takes NULL.
unsafe fn written(ctx: *const CUcontext) -> Option<cuda::Context> {
    // SAFETY: as for this function.
    unsafe { ctx.as_ref() }.and_then(|context| cuda::Context::from_raw(*context))
}

/// What a call has given the program was ended again with this result: if it was, the program gets NULL.
///
/// # Safety
/// `output` is the output argument of a call that succeeded.
unsafe fn forget<T>(output: *mut *mut T, result: CuResult) -> CuResult {
    if result.is_ok() && !output.is_null() {
        // SAFETY: the driver has written there.
        unsafe { *output = std::ptr::null_mut() };
    }
    result
}

/// A green context, which retains the primary one and so may make it.
///
/// # Safety
/// `green` is the program's output argument of that call.
pub unsafe fn green_create(real: &mut Real, green: *mut *mut c_void, device: CUdevice) -> CuResult {
    let device = Device::from_raw(device);
    // SAFETY: asked only after a success of the driver, which has then written a green context there, unless it takes NULL.
    let given = || unsafe { green.as_ref() }.and_then(|green| GreenContext::from_raw(*green));
    let made = |driver: &Driver| {
        context::retained(device);
        if let Some(green) = given() {
            context::green_began(green, device);
        }
        unseen::Primary::hold(driver, device).map(|primary| primary.handle)
    };
    let result = making(real, device, Kind::Primary, made, |driver, call| {
        let Some(made) = given() else { return CuResult::INVALID_CONTEXT };
        // SAFETY: it was made by this very call, and the program has not heard of it.
        let result = end::of_green(driver, made, call, || unsafe { driver.destroy_green(made) });
        // SAFETY: the output argument of a call that succeeded.
        unsafe { forget(green, result) }
    });
    if result.is_ok() {
        context::is_meant(device);
    }
    result
}

/// Makes a call that makes a context, or counts a primary one up that exists. `made` runs after a success, and says which
/// handle it has. Where the pool's memory cannot be granted to its GPU, the context is taken back (`take_back`) and the program
/// told why: a copy from a context without access would kill it.
fn making(
    real: &mut Real,
    device: Device,
    kind: Kind,
    made: impl FnOnce(&Driver) -> Option<cuda::Context>,
    take_back: impl FnOnce(&Driver, &'static str) -> CuResult,
) -> CuResult {
    let Some(driver) = context::driver() else { return real.call() };
    let call = real.api.name();
    let new = kind == Kind::Created || !driver.primary_is_active(device);
    if new {
        // A context takes some hundred MiB of the GPU, which a suspended program has just left.
        gate::wait_while_held();
    }
    if new && let Err(refusal) = policy::allow(device, call) {
        return refusal;
    }
    context::sweep(driver, call);
    let before = if new { Before::look(driver, device) } else { Before::unknown() };
    let _making = Making::begin();
    let taking = new.then(Taking::begin);
    let result = retry::call_on(real, device);
    drop(taking);
    if new && result == CuResult::OUT_OF_MEMORY {
        memory::report_no_context(driver, device);
    }
    let Some(context) = result.is_ok().then(|| made(driver)).flatten() else { return result };
    let added = context::add(driver, Some(context), device, kind, call, before);
    if let Err(refused) = added.reaches {
        // That nothing ran there is not the program's doing, so nothing is found about it.
        if let Some(context) = added.context {
            context.usage.worked();
        }
        tracing::error!(
            target: "gpupool::context", about = "grant",
            "{call} on GPU {device} answers {refused}: that is what the driver answered when the pool's memory was to be granted to \
             this GPU (cuMemSetAccess), and a context that cannot reach it would die of the first copy; free memory on GPU \
             {device}, or make its context before the first allocation"
        );
        return match take_back(driver, call) {
            CuResult::SUCCESS => refused,
            // It is there, and the program must be able to end it.
            _ => result,
        };
    }
    result
}

/// A context may end while the program is suspended, unless memory of the program's own is to be copied back with it: that belongs to no context, and may be needed
/// when the last one is gone.
fn wait_for_own() {
    if handles::by_hand::is_any_away() {
        gate::wait_while_held();
    }
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn release(real: &mut Real, device: CUdevice) -> CuResult {
    wait_for_own();
    arguments::forget_functions();
    let Some(driver) = context::driver() else { return real.call() };
    end::of_primary(driver, Device::from_raw(device), By::Release, real.api.name(), || real.call())
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn reset(real: &mut Real, device: CUdevice) -> CuResult {
    wait_for_own();
    arguments::forget_functions();
    let Some(driver) = context::driver() else { return real.call() };
    end::of_primary(driver, Device::from_raw(device), By::Reset, real.api.name(), || real.call())
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn destroy(real: &mut Real, ctx: CUcontext) -> CuResult {
    wait_for_own();
    arguments::forget_functions();
    let Some(ctx) = cuda::Context::from_raw(ctx) else { return real.call() };
    end::of_handle(ctx, real.api.name(), || real.call(), || true)
}

/// `cuCtxDetach` of the current context: the last of as many as `cuCtxAttach` and the making of it ends it.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn detach(real: &mut Real, ctx: CUcontext) -> CuResult {
    wait_for_own();
    arguments::forget_functions();
    let (Some(driver), Some(ctx)) = (context::driver(), cuda::Context::from_raw(ctx)) else { return real.call() };
    let life = driver.current_life();
    let lives = || driver.current_context() == Some(ctx) && driver.current_life() == life;
    end::of_handle(ctx, real.api.name(), || real.call(), || !lives())
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn green_destroy(real: &mut Real, green: *mut c_void) -> CuResult {
    wait_for_own();
    arguments::forget_functions();
    let (Some(driver), Some(green)) = (context::driver(), GreenContext::from_raw(green)) else { return real.call() };
    let captures = capture::seen_in(green);
    let result = end::of_green(driver, green, real.api.name(), || real.call());
    if result.is_ok() {
        stream::ended(captures);
    }
    result
}

/// # Safety
/// `ctx` is the program's output argument of that call.
pub unsafe fn from_green(real: &mut Real, ctx: *mut CUcontext, green: *mut c_void) -> CuResult {
    let result = real.call();
    // SAFETY: looked at only where the driver answered success.
    let made = result.is_ok().then(|| unsafe { written(ctx) }).flatten();
    if let (Some(green), Some(context)) = (GreenContext::from_raw(green), made) {
        context::green_is(green, context);
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
    context::sweep(driver, real.api.name());
    let peer = cuda::Context::from_raw(peer).and_then(context::by_handle);
    for context in [context::current(driver), peer].into_iter().flatten() {
        if !context.usage.is_used() {
            context.peered.store(true, Ordering::Relaxed);
        }
    }
    result
}

/// A copy between two GPUs whose addresses are known, which may be over only when it returns ([`submit::finish_at`]).
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn copied_between_blocks(real: &mut Real, dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CuResult {
    // SAFETY: the caller is a row's trampoline, with this call's parameters.
    let result = unsafe { copied_between_later(real, dst, src, bytes) };
    submit::finish_at(real.api, result, &[dst, src]);
    result
}

/// A copy between two GPUs whose addresses are known.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn copied_between_later(real: &mut Real, dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) -> CuResult {
    // SAFETY: the caller is a row's trampoline, with this call's parameters.
    let result = unsafe { copied_between(real) };
    submit::uses(real.api, result, || [(dst, bytes), (src, bytes)]);
    result
}

/// A copy between two GPUs, which may make a context on either.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn copied_between(real: &mut Real) -> CuResult {
    let result = real.call();
    if let Some(driver) = context::driver() {
        context::sweep(driver, real.api.name());
        if let Some(context) = context::current(driver) {
            context.usage.copied();
        }
    }
    result
}

/// The program waited for all work of the current context: memory that has to wait for it to go back goes back here.
///
/// # Safety
/// Called by a row's trampoline.
pub unsafe fn synchronized(real: &mut Real) -> CuResult {
    // SAFETY: NULL names the current context.
    unsafe { synchronized_in(real, std::ptr::null_mut()) }
}

/// The program waited for all work of the context that the call names: memory that has to wait for it to go back goes back
/// here.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn synchronized_in(real: &mut Real, ctx: CUcontext) -> CuResult {
    let api = real.api;
    let result = fence::waited_by_program(|| {
        let result = real.call();
        if !result.is_ok() {
            return (result, None);
        }
        let (handle, waited) = match (cuda::Context::from_raw(ctx), context::driver()) {
            (Some(ctx), _) => (Some(ctx), context::by_handle(ctx)),
            (None, Some(driver)) => (driver.current_context(), context::current(driver)),
            (None, None) => (None, None),
        };
        pinned::return_idle(waited.map(|context| context.id));
        // In a green context the wait is for the work of that one alone.
        (result, waited.filter(|context| context.live_handle() == handle))
    });
    rest::over(api, result);
    result
}
