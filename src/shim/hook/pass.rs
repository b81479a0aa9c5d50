//! Rows that change nothing: the call is the driver's, and the log at level trace has it.

use super::boundary;
use gpupool_cuda::CuResult;
use gpupool_interpose::Api;

/// Before the call, of which nothing is needed.
#[inline]
pub fn before(_: Api) {}

/// After the call.
#[inline]
pub fn through(api: Api, (): (), result: CuResult) {
    boundary::trace(api, result);
}
