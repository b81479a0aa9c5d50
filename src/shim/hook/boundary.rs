//! What every body has behind it: the boundary that keeps panics in and `errno` as it was, and the line in the log about the call.

use crate::watch::context;
use crate::{log, process};
use gpupool_cuda::CuResult;
use gpupool_events::Call;
use gpupool_interpose::errno::Errno;
use gpupool_interpose::{Api, boundary};

/// The real driver call with the arguments the program gave.
pub type Real<'a> = gpupool_interpose::Real<'a, CuResult>;

/// Runs a body. On a panic the pool takes no new allocations, and the program gets the driver's answer.
#[inline]
pub fn run(api: Api, call: &mut dyn FnMut() -> CuResult, body: impl FnOnce(&mut Real) -> CuResult) -> CuResult {
    let _errno = Errno::keep();
    let result = boundary::run(api, call, body, process::broken);
    trace(api, result);
    result
}

/// Logs a hooked call, at level trace, and notices a context in error. Rows without a boundary come here, too.
#[inline]
pub fn trace(api: Api, result: CuResult) {
    if !result.is_ok() {
        failed(result);
    }
    if tracing::enabled!(target: "gpupool::call", tracing::Level::TRACE) {
        process::contained(api, || {
            let name = api.name();
            log::emit(|| (Call { api: name.to_owned(), result: result.0 }, format!("{name} -> {result}")));
        });
    }
}

/// A call that the pool answers asks the driver nothing, so a context in error is noticed where the program is told of it.
#[cold]
fn failed(result: CuResult) {
    if result.may_stick() {
        context::end::doubt_all();
    }
}
