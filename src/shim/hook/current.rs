//! Bodies: calls that change which context is current (set, push, pop). The driver answers them. Where the thread's context is
//! then another one than at the last look, it is noted, because its creation may have gone unseen.

use super::boundary;
use crate::process;
use crate::watch::context;
use cudarc::driver::sys::CUcontext;
use gpupool_cuda::{self as cuda, CuResult};
use gpupool_interpose::Api;

/// Before the call, of which nothing is needed.
#[inline]
pub fn before(_: Api) {}

/// After this context, or none, was set current or pushed. The driver is not asked which one is current now: that is a third of
/// what the whole call takes. Always inlined: as a function of its own it asks the loader a second time where this thread's
/// variables lie, and saves its registers, which together costs another third.
#[inline(always)]
pub fn switched_to(api: Api, (): (), result: CuResult, context: CUcontext) {
    if result.is_ok() && context::has_switched_to(cuda::Context::from_raw(context)) {
        look(api);
    }
    boundary::trace(api, result);
}

/// After a context was popped: which one is current now, only the driver knows.
#[inline(always)]
pub fn switched(api: Api, (): (), result: CuResult) {
    let has_switched = || cuda::at_hand().is_none_or(|driver| context::has_switched_to(driver.current_context()));
    if result.is_ok() && has_switched() {
        look(api);
    }
    boundary::trace(api, result);
}

/// Notes the context, which takes a lock, may allocate, asks the driver and logs.
#[cold]
fn look(api: Api) {
    process::contained(api, || {
        if let Some(driver) = context::driver() {
            context::noticed(driver);
            context::sweep(driver, api.name());
        }
    });
}
