//! Bodies: launches and copies, counted for the context that is current. Nothing else happens here; a launch takes two
//! microseconds, and these must not show in it.

use super::Real;
use crate::context;
use crate::driver::CuResult;

/// # Safety
/// Called by a row's trampoline.
#[inline]
pub unsafe fn launched(real: &mut Real) -> CuResult {
    let result = real.call();
    if let Some(context) = context::driver().and_then(context::current) {
        context.usage.launched();
    }
    result
}

/// # Safety
/// Called by a row's trampoline.
#[inline]
pub unsafe fn copied(real: &mut Real) -> CuResult {
    let result = real.call();
    if let Some(context) = context::driver().and_then(context::current) {
        context.usage.copied();
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

/// Pinned host memory: it needs some context, so one that has nothing else is not used.
///
/// # Safety
/// Called by a row's trampoline.
pub unsafe fn pinned(real: &mut Real) -> CuResult {
    let result = super::retry::call(real);
    if result.is_ok()
        && let Some(context) = context::driver().and_then(context::current)
    {
        context.usage.pinned.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    result
}
