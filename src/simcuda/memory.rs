//! Plain device memory: `cuMemAlloc` and its relatives, and what is free.

use crate::capture;
use crate::context::{current, wait_for_owner};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::Out;
use crate::physical::Place;
use crate::space::{Kind, Origin};
use std::ffi::c_uint;

/// Rows of `cuMemAllocPitch` start at multiples of this.
const PITCH_ALIGN: usize = 512;

/// `cuMemAlloc`. A refused request leaves a null pointer, as the real driver does.
pub fn alloc(out: Out<u64>, bytes: usize) -> Outcome {
    out.set_if_wanted(0);
    let context = current()?;
    out.required()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    capture::forbid()?;
    let driver = driver();
    let store = &driver.gpus[context.device].store;
    out.set(driver.space.allocate(store, context.device, context.owner(), Origin::Alloc, bytes as u64)?)
}

pub fn alloc_pitch(out: Out<u64>, pitch_out: Out<usize>, width: usize, height: usize, element: c_uint) -> Outcome {
    out.required()?;
    pitch_out.required()?;
    if width == 0 || height == 0 || ![4, 8, 16].contains(&element) {
        return Err(Code::INVALID_VALUE);
    }
    let pitch = width.checked_next_multiple_of(PITCH_ALIGN).ok_or(Code::INVALID_VALUE)?;
    alloc(out, pitch.checked_mul(height).ok_or(Code::INVALID_VALUE)?)?;
    pitch_out.set(pitch)
}

/// `cuMemFree`: waits for the context that owns the memory, whichever is current, because closed-source libraries rely on
/// that. It needs no current context (the address says which one it is), but one that is broken refuses it.
pub fn free_linear(address: u64) -> Outcome {
    if let Err(code) = current()
        && code != Code::INVALID_CONTEXT
    {
        return Err(code);
    }
    if address == 0 {
        return Ok(());
    }
    capture::forbid()?;
    let driver = driver();
    let region = driver.space.find(address).filter(|region| region.start == address).ok_or(Code::INVALID_VALUE)?;
    match region.kind {
        Kind::Plain { origin: Origin::Ipc, .. } | Kind::Vmm { .. } | Kind::Host { .. } => Err(Code::INVALID_VALUE),
        Kind::Plain { origin: Origin::Graph(_), .. } => crate::graph_memory::free_now(address),
        Kind::Plain { context, origin: Origin::Alloc, .. } => {
            wait_for_owner(context);
            driver.space.free(address)
        }
        // Memory of a pool is no context's. Documented: the driver takes all use of it to be over.
        Kind::Plain { .. } => driver.space.free(address),
        Kind::Managed { context, .. } => {
            wait_for_owner(context);
            let region = driver.space.remove(address, |kind| matches!(kind, Kind::Managed { .. }))?;
            crate::managed::drop_region(&region);
            Ok(())
        }
    }
}

/// `cuMemGetInfo`, of the current context's device.
pub fn info(free: Out<usize>, total: Out<usize>) -> Outcome {
    let context = current()?;
    let store = &driver().gpus[context.device].store;
    free.set_if_wanted(store.free() as usize);
    total.set_if_wanted(store.capacity as usize);
    Ok(())
}

/// `cuMemGetAddressRange`: of the allocation, or of the one handle mapped there. Of a handle whose memory is on the host a real driver says the bytes and
/// zero for the start (`tests/programs/probe_ranges.c`).
pub fn address_range(base: Out<u64>, bytes: Out<usize>, address: u64) -> Outcome {
    current()?;
    let region = driver().space.find(address);
    let (start, size) = region.as_ref().map_or((0, 0), |region| {
        let is_on_host =
            matches!(&region.kind, Kind::Vmm { physical, .. } if matches!(physical.place(), Place::Host(_)));
        (if is_on_host { 0 } else { region.start }, region.bytes as usize)
    });
    base.set_if_wanted(start);
    bytes.set_if_wanted(size);
    region.map(drop).ok_or(Code::NOT_FOUND)
}

// The first interface, with 32-bit device pointers. Nothing on a 64-bit machine can use it, and a GPU of today refuses too.

pub fn alloc_32(out: Out<c_uint>, _bytes: c_uint) -> Outcome {
    legacy(out)
}

pub fn alloc_pitch_32(
    out: Out<c_uint>,
    _pitch: Out<c_uint>,
    _width: c_uint,
    _height: c_uint,
    _element: c_uint,
) -> Outcome {
    legacy(out)
}

pub fn free_32(_address: c_uint) -> Outcome {
    Err(Code::NOT_SUPPORTED)
}

pub fn info_32(free: Out<c_uint>, _total: Out<c_uint>) -> Outcome {
    legacy(free)
}

pub fn address_range_32(base: Out<c_uint>, _bytes: Out<c_uint>, _address: c_uint) -> Outcome {
    legacy(base)
}

pub fn total_memory_32(out: Out<c_uint>, _device: i32) -> Outcome {
    legacy(out)
}

fn legacy(out: Out<c_uint>) -> Outcome {
    out.required()?;
    Err(Code::NOT_SUPPORTED)
}
