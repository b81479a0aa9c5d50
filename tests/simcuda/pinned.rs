//! Host memory the driver knows: pinned, registered and managed.

use crate::capture;
use crate::context::{current, wait_for_device};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::physical::Use;
use crate::space::{Kind, Region};
use std::ffi::c_uint;

const PAGE: u64 = 4096;
const ALLOC_FLAGS: c_uint = 7;
const REGISTER_FLAGS: c_uint = 15;
const ATTACH_GLOBAL: c_uint = 1;
const ATTACH_HOST: c_uint = 2;

fn map(bytes: u64) -> Outcome<u64> {
    // SAFETY: a new anonymous mapping at an address the kernel picks. Shared, so that a child of fork sees writes as it
    // would with real pinned memory; NORESERVE, so that only what is touched is taken.
    let address = unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), bytes as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(address as u64) }
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
        Kind::Managed { .. } => unmap(&region),
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
        _ => Err(Code::INVALID_VALUE),
    }
}

/// `cuMemAllocManaged`: memory the processor and every GPU reach. It moves nowhere and counts against no GPU, as
/// oversubscription would allow.
pub fn alloc_managed(out: Out<u64>, bytes: usize, flags: c_uint) -> Outcome {
    out.required()?;
    let context = current()?;
    if bytes == 0 || ![ATTACH_GLOBAL, ATTACH_HOST].contains(&flags) {
        return Err(Code::INVALID_VALUE);
    }
    capture::forbid()?;
    let address = map((bytes as u64).checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?)?;
    driver().space.insert_host(address, bytes as u64, Kind::Managed { context: context.id, device: context.device })?;
    out.set(address)
}

/// `cuMemAdvise`: checked, and without effect.
pub fn advise(address: u64, bytes: usize, advice: i32, _device: i32) -> Outcome {
    managed(address, bytes)?;
    if (1..=6).contains(&advice) { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

pub fn advise_v2(address: u64, bytes: usize, advice: i32, _location: crate::ffi::Location) -> Outcome {
    advise(address, bytes, advice, 0)
}

/// `cuMemPrefetchAsync`: checked, and without effect.
pub fn prefetch(address: u64, bytes: usize, _device: i32, stream: Handle) -> Outcome {
    managed(address, bytes)?;
    crate::stream::resolve(stream).map(drop)
}

pub fn prefetch_v2(address: u64, bytes: usize, _to: crate::ffi::Location, flags: c_uint, stream: Handle) -> Outcome {
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    prefetch(address, bytes, 0, stream)
}

fn managed(address: u64, bytes: usize) -> Outcome {
    current()?;
    let end = address.checked_add(bytes as u64).ok_or(Code::INVALID_VALUE)?;
    let inside = driver()
        .space
        .find(address)
        .is_some_and(|region| matches!(region.kind, Kind::Managed { .. }) && end <= region.end());
    if inside && bytes > 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}
