//! Rows that change nothing: the call is the driver's, and the log at level trace has it.

use super::boundary;
use gpupool_cuda::CuResult;
use gpupool_interpose::Api;

/// Before the call, of which nothing is needed.
#[inline]
pub fn before(_: Api) {}

/// After a call during which the driver looks at what is mapped at an address that the program gives it, and which nobody may change
/// meanwhile ([`crate::gate`]).
#[inline]
pub fn looking(api: Api, (): (), result: CuResult) {
    through(api, (), result);
}

/// After the call.
#[inline]
pub fn through(api: Api, (): (), result: CuResult) {
    boundary::trace(api, result);
}
