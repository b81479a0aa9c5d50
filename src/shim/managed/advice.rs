//! Telling the driver where managed memory is to live, and moving it there.

use crate::backend::location;
use crate::driver::{CuResult, Driver};
use cudarc::driver::sys::{CUdevice, CUstream};
use gpupool_pool::Place;
use std::ffi::c_int;

/// `CU_DEVICE_CPU`: the host in the calls that know no NUMA nodes.
const CPU: CUdevice = -1;

fn device(place: Place) -> CUdevice {
    match place {
        Place::Gpu(ordinal) => ordinal as CUdevice,
        Place::Host(_) => CPU,
    }
}

/// Gives advice, a number of `CUmem_advise`, on managed memory (`cuMemAdvise_v2`, or `cuMemAdvise` where the driver is older). Not for use during a
/// capture, which it invalidates.
pub fn advise(driver: &Driver, address: u64, bytes: u64, advice: c_int, place: Place) -> CuResult {
    match driver.cuMemAdvise_v2 {
        // SAFETY: any range and location may be asked for; the driver checks both.
        Some(call) => unsafe { call(address, bytes as usize, advice, location(place)) },
        // SAFETY: as above.
        None => unsafe { (driver.cuMemAdvise)(address, bytes as usize, advice, device(place)) },
    }
}

/// Moves managed memory to a place, in the order of a stream of the current context (`cuMemPrefetchAsync_v2`, or
/// `cuMemPrefetchAsync`). Not for use during a capture, which it invalidates.
pub fn prefetch(driver: &Driver, address: u64, bytes: u64, place: Place, stream: CUstream) -> CuResult {
    match driver.cuMemPrefetchAsync_v2 {
        // SAFETY: the driver checks range and location; the stream is the program's own for this very call, or ours.
        Some(call) => unsafe { call(address, bytes as usize, location(place), 0, stream) },
        // SAFETY: as above.
        None => unsafe { (driver.cuMemPrefetchAsync)(address, bytes as usize, device(place), stream) },
    }
}
