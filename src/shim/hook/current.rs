//! Bodies: calls that change which context is current (set, push, pop). The driver answers them. Where the thread's context is
//! then another one than at the last look, it is noted, because its creation may have gone unseen.

use super::boundary;
use crate::watch::context;
use gpupool_cuda::{self as cuda, CuResult};
use gpupool_interpose::Api;

/// Before the call, of which nothing is needed.
#[inline]
pub fn before(_: Api) {}

/// After a context was set current, pushed or popped. Always inlined: as a function of its own it asks the loader a second time
/// where this thread's variables lie, and saves its registers, which together costs a third of the call.
#[inline(always)]
pub fn switched(api: Api, (): (), result: CuResult) {
    if result.is_ok() && cuda::at_hand().is_none_or(context::has_switched) {
        look(api);
    }
    boundary::trace(api, result);
}

/// Notes the context, which takes a lock, may allocate, asks the driver and logs.
#[cold]
fn look(api: Api) {
    boundary::contained(api, || {
        if let Some(driver) = context::driver() {
            context::noticed(driver);
            context::sweep(driver, api.name());
        }
    });
}
