//! Bodies: streams that are made, and their capture ([`crate::watch::capture`]).

use super::Real;
use crate::serve::managed;
use crate::watch::capture::{self, Seen};
use crate::watch::context;
use cudarc::driver::sys::CUstream;
use gpupool_cuda::{CuResult, Stream};

/// Answers of `cuStreamEndCapture` after which the stream is still being captured: the call was wrong, not the capture.
const STILL_CAPTURING: [i32; 5] = [1, 201, 400, 903, 908];

fn per_thread_default(real: &Real) -> bool {
    real.api.name().ends_with("_ptsz")
}

/// The stream that this call means by its argument, for a call of ours, which has no `_ptsz` in its name.
pub(super) fn handle(real: &Real, stream: CUstream) -> Stream {
    Stream::from_raw(stream).meant_by(per_thread_default(real))
}

/// A stream was made in the context that is current, which the program uses from here on: what the stream is given is counted for
/// whichever context is current then. Asking the driver for the stream's own (`cuStreamGetCtx`) would show in every launch and copy.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn created(real: &mut Real) -> CuResult {
    let result = real.call();
    if result.is_ok()
        && let Some(context) = context::driver().and_then(context::current)
    {
        context.usage.worked();
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn begin(real: &mut Real, stream: CUstream) -> CuResult {
    let attempt = capture::begin(Stream::from_raw(stream), per_thread_default(real));
    let result = real.call();
    if result.is_ok() {
        attempt.succeeded();
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn end(real: &mut Real, stream: CUstream) -> CuResult {
    let seen = capture::seen(Stream::from_raw(stream), per_thread_default(real));
    let result = real.call();
    if !STILL_CAPTURING.contains(&result.0) {
        ended(seen);
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn destroy(real: &mut Real, stream: CUstream) -> CuResult {
    let seen = capture::seen(Stream::from_raw(stream), false);
    let result = real.call();
    if result.is_ok() {
        ended(seen);
    }
    result
}

/// These captures are over.
pub(super) fn ended(seen: impl IntoIterator<Item = Seen>) {
    for seen in seen {
        seen.ended();
        managed::catch_up();
    }
}
