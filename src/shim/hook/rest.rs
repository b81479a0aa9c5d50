//! Bodies: waits of the program's for the device, and what is done once one is over: the device may have nothing to do.

use super::boundary;
use crate::tiers;
use crate::watch::arguments::{self, Reader};
use gpupool_cuda::CuResult;
use gpupool_interpose::Api;

/// Before the call, of which nothing is needed.
#[inline]
pub fn before(_: Api) {}

/// After the program waited for a stream or an event.
#[inline]
pub fn waited(api: Api, (): (), result: CuResult) {
    boundary::trace(api, result);
}

/// Behind all that a row does which waits for the device. One load while nothing lies far.
#[inline(always)]
pub fn over(api: Api, result: CuResult) {
    if arguments::are_read_by(Reader::Tiers) && result.is_ok() {
        tiers::idle::point(api);
    }
}
