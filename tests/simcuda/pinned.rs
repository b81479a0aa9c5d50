//! Host memory the driver knows: pinned and registered.

use crate::capture;
use crate::context::{current, wait_for_device};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::Out;
use crate::physical::{GRANULE, Use};
use crate::space::{Kind, Region};
use std::ffi::c_uint;

const PAGE: u64 = 4096;
const ALLOC_FLAGS: c_uint = 7;
const REGISTER_FLAGS: c_uint = 15;

/// Fresh memory of the process; whole frames start at a frame's border, as the driver's do.
pub fn map(bytes: u64) -> Outcome<u64> {
    let align = if bytes >= GRANULE { GRANULE } else { PAGE };
    let room = bytes.checked_add(align - PAGE).ok_or(Code::OUT_OF_MEMORY)?;
    // SAFETY: a new anonymous mapping at an address the kernel picks. Shared, so that a child of fork sees writes as it
    // would with real pinned memory; NORESERVE, so that only what is touched is taken.
    let address = unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), room as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    let start = (address as u64).next_multiple_of(align);
    for (from, to) in [(address as u64, start), (start + bytes, address as u64 + room)] {
        if to > from {
            // SAFETY: whole pages of the mapping just made, outside what is handed out.
            unsafe { libc::munmap(from as *mut _, (to - from) as usize) };
        }
    }
    Ok(start)
}

/// Gives the pages of a region that was removed from the address space back to the system.
pub fn unmap(region: &Region) {
    // SAFETY: `map` made it with this size, and the region is out of the address space, so nobody finds it any more.
    unsafe { libc::munmap(region.start as *mut _, region.bytes.next_multiple_of(PAGE) as usize) };
}

/// `cuMemHostAlloc`.
pub fn alloc(out: Out<u64>, bytes: usize, flags: c_uint) -> Outcome {
    out.required()?;
    let context = current()?;
    if bytes == 0 || flags & !ALLOC_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    capture::forbid()?;
    let driver = driver();
    let rounded = (bytes as u64).checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
    driver.hosts[0].charge(rounded, Use::Pinned)?;
    let address = map(rounded).inspect_err(|_| driver.hosts[0].refund(rounded, Use::Pinned))?;
    let kind = Kind::Host { context: context.id, device: context.device, flags, registered: false };
    driver.space.insert_host(address, bytes as u64, kind)?;
    out.set(address)
}

pub fn alloc_host(out: Out<u64>, bytes: usize) -> Outcome {
    alloc(out, bytes, 0)
}

/// `cuMemFreeHost`: waits for all devices, any of which may be using it.
pub fn free(address: u64) -> Outcome {
    current()?;
    capture::forbid()?;
    let ours = |kind: &Kind| matches!(kind, Kind::Host { registered: false, .. });
    let driver = driver();
    if !driver.space.find(address).is_some_and(|region| region.start == address && ours(&region.kind)) {
        return Err(Code::INVALID_VALUE);
    }
    wait_for_device(None);
    let region = driver.space.remove(address, ours)?;
    give_back(&region);
    Ok(())
}

fn give_back(region: &Region) {
    unmap(region);
    driver().hosts[0].refund(region.bytes.next_multiple_of(PAGE), Use::Pinned);
}

/// What the end of a context does to host memory made in it.
pub fn drop_region(region: &Region, registered: bool) {
    let Ok(region) = driver().space.remove(region.start, |_| true) else { return };
    match region.kind {
        Kind::Host { .. } if !registered => give_back(&region),
        Kind::Managed { .. } => crate::managed::drop_region(&region),
        _ => {}
    }
}

/// `cuMemHostRegister`.
pub fn register(address: u64, bytes: usize, flags: c_uint) -> Outcome {
    let context = current()?;
    if address == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    capture::forbid()?;
    let kind = Kind::Host { context: context.id, device: context.device, flags, registered: true };
    driver().space.insert_host(address, bytes as u64, kind)
}

pub fn unregister(address: u64) -> Outcome {
    current()?;
    capture::forbid()?;
    let registered = |kind: &Kind| matches!(kind, Kind::Host { registered: true, .. });
    driver().space.remove(address, registered).map_err(|_| Code::HOST_MEMORY_NOT_REGISTERED)?;
    Ok(())
}

/// `cuMemHostGetDevicePointer`: the same address, as everywhere with unified addressing.
pub fn device_pointer(out: Out<u64>, address: u64, flags: c_uint) -> Outcome {
    out.required()?;
    current()?;
    let known = driver().space.find(address).is_some_and(|region| matches!(region.kind, Kind::Host { .. }));
    if flags != 0 || !known {
        return Err(Code::INVALID_VALUE);
    }
    out.set(address)
}

pub fn flags(out: Out<c_uint>, address: u64) -> Outcome {
    out.required()?;
    current()?;
    match driver().space.find(address).map(|region| region.kind) {
        Some(Kind::Host { flags, .. }) => out.set(flags | 2),
        Some(Kind::Managed { .. }) => out.set(2),
        _ => Err(Code::INVALID_VALUE),
    }
}
