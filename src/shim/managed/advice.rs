//! Telling the driver where managed memory is to live, and moving it there.

use crate::driver::{CuResult, Driver};
use cudarc::driver::sys::{CUdevice, CUmemLocation, CUmemLocationType, CUstream};
use gpupool_pool::Place;
use std::ffi::c_int;

/// `CUmem_advise`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Advice {
    /// Mostly read: every processor that reads gets a copy. The place means nothing.
    ReadMostly = 1,
    /// Takes that back.
    UnsetReadMostly = 2,
    /// The driver keeps the pages there, and maps them for others that it can instead of moving them.
    PreferredLocation = 3,
    /// Takes that back. The place means nothing.
    UnsetPreferredLocation = 4,
    /// The driver maps the pages for that processor wherever they are, so that it does not fault.
    AccessedBy = 5,
    /// Takes that back.
    UnsetAccessedBy = 6,
}

/// `CU_DEVICE_CPU`: the host in the calls that know no NUMA nodes.
const CPU: CUdevice = -1;

fn location(place: Place) -> CUmemLocation {
    let (type_, id) = match place {
        Place::Gpu(ordinal) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, ordinal as i32),
        Place::Host(node) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, node as i32),
    };
    CUmemLocation { type_, id }
}

fn device(place: Place) -> CUdevice {
    match place {
        Place::Gpu(ordinal) => ordinal as CUdevice,
        Place::Host(_) => CPU,
    }
}

/// Gives advice on managed memory (`cuMemAdvise_v2`, or `cuMemAdvise` where the driver is older). Not for use during a
/// capture, which it invalidates.
pub fn advise(driver: &Driver, address: u64, bytes: u64, advice: Advice, place: Place) -> CuResult {
    let advice = advice as c_int;
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
