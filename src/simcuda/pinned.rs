//! Host memory the driver knows: pinned and registered.

use crate::capture;
use crate::context::{current, wait_for_owner};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::extents::Extents;
use crate::ffi::Out;
use crate::physical::{GRANULE, Use};
use crate::space::{Kind, Region};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::c_uint;

const PAGE: u64 = 4096;
const ALLOC_FLAGS: c_uint = 7;
const REGISTER_FLAGS: c_uint = 15;

/// Fresh memory of the process; whole frames start at a frame's border, as the driver's do. `resident` takes all its pages
/// at once.
pub fn map(bytes: u64, resident: bool) -> Outcome<u64> {
    let align = if bytes >= GRANULE { GRANULE } else { PAGE };
    let room = bytes.checked_add(align - PAGE).ok_or(Code::OUT_OF_MEMORY)?;
    // SAFETY: a new anonymous mapping at an address the kernel picks. Shared, so that a child of fork sees writes as it
    // would with real pinned memory; NORESERVE, so that only what is touched is taken.
    let address = unsafe {
        let populate = if resident { libc::MAP_POPULATE } else { libc::MAP_NORESERVE };
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | populate;
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

/// Gives the pages of memory that left the address space back to the system.
pub fn unmap(start: u64, bytes: u64) {
    // SAFETY: `map` made it with this size, and it is out of the address space, so nobody finds it any more.
    unsafe { libc::munmap(start as *mut _, bytes as usize) };
}

/// 2 MiB that small requests with the same context and flags share.
struct Slab {
    context: u64,
    flags: c_uint,
    free: Extents,
}

/// By start address. Nothing else is locked while this is.
static SLABS: Mutex<BTreeMap<u64, Slab>> = Mutex::new(BTreeMap::new());

/// Requests below this share slabs, at multiples of [`SMALL_ALIGN`].
const SLAB_LIMIT: u64 = 1 << 20;
const SMALL_ALIGN: u64 = 512;

/// New pinned pages, counted against the host.
fn pin(bytes: u64) -> Outcome<u64> {
    let driver = driver();
    driver.hosts[0].charge(bytes, Use::Pinned)?;
    map(bytes, driver.settings.pinned_resident).inspect_err(|_| driver.hosts[0].refund(bytes, Use::Pinned))
}

fn unpin(start: u64, bytes: u64) {
    unmap(start, bytes);
    driver().hosts[0].refund(bytes, Use::Pinned);
}

/// A stretch of a slab.
fn take_small(context: u64, flags: c_uint, bytes: u64) -> Outcome<u64> {
    let rounded = bytes.next_multiple_of(SMALL_ALIGN);
    let known = SLABS
        .lock()
        .iter_mut()
        .filter(|(_, slab)| slab.context == context && slab.flags == flags)
        .find_map(|(start, slab)| Some(start + slab.free.take(rounded, SMALL_ALIGN)?));
    if let Some(address) = known {
        return Ok(address);
    }
    let start = pin(GRANULE)?;
    // From the new one, although another thread may have made room meanwhile: an empty slab would never be given back.
    let mut free = Extents::new(0, GRANULE);
    let offset = free.take(rounded, SMALL_ALIGN).ok_or(Code::OUT_OF_MEMORY)?;
    SLABS.lock().insert(start, Slab { context, flags, free });
    Ok(start + offset)
}

/// Gives back a region that is out of the address space: its pages, or its stretch of a slab.
fn give_back(region: &Region) {
    if region.bytes >= SLAB_LIMIT {
        return unpin(region.start, region.bytes.next_multiple_of(PAGE));
    }
    let start = region.start & !(GRANULE - 1);
    let mut slabs = SLABS.lock();
    let Some(slab) = slabs.get_mut(&start) else { return };
    slab.free.give(region.start - start, region.bytes.next_multiple_of(SMALL_ALIGN));
    let empty = slab.free.is_whole(GRANULE);
    if empty {
        slabs.remove(&start);
    }
    drop(slabs);
    if empty {
        unpin(start, GRANULE);
    }
}

/// `cuMemHostAlloc`. A refused request leaves a null pointer, and so does one for nothing.
pub fn alloc(out: Out<u64>, bytes: usize, flags: c_uint) -> Outcome {
    out.required()?;
    out.set(0)?;
    let context = current()?;
    if flags & !ALLOC_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    capture::forbid()?;
    let bytes = bytes as u64;
    if bytes == 0 {
        return Ok(());
    }
    let address = if bytes < SLAB_LIMIT {
        take_small(context.owner(), flags, bytes)?
    } else {
        pin(bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?)?
    };
    let kind = Kind::Host { context: context.owner(), device: context.device, flags, registered: false };
    driver().space.insert_host(address, bytes, kind)?;
    out.set(address)
}

pub fn alloc_host(out: Out<u64>, bytes: usize) -> Outcome {
    alloc(out, bytes, 0)
}

/// `cuMemFreeHost`: needs no context, and waits for the one that the memory was made in, also where it is portable and
/// other GPUs may be using it.
pub fn free_host(address: u64) -> Outcome {
    if address == 0 {
        return Ok(());
    }
    crate::context::refuse_if_gone()?;
    capture::forbid()?;
    let driver = driver();
    let Some(Region { kind: Kind::Host { context: owner, registered: false, .. }, .. }) =
        driver.space.find(address).filter(|region| region.start == address)
    else {
        return Err(Code::INVALID_VALUE);
    };
    wait_for_owner(owner);
    give_back(&driver.space.remove(address, |kind| matches!(kind, Kind::Host { registered: false, .. }))?);
    Ok(())
}

/// What the end of a context does to host memory made in it, portable or not.
pub fn drop_region(region: &Region, registered: bool) {
    // Somebody may have given it back since it was found, and its addresses to another context.
    let owner = |kind: &Kind| match kind {
        Kind::Host { context, .. } | Kind::Managed { context, .. } => Some(*context),
        _ => None,
    };
    let own = owner(&region.kind);
    let Ok(region) = driver().space.remove(region.start, |kind| owner(kind) == own) else { return };
    match region.kind {
        Kind::Host { .. } if !registered => give_back(&region),
        Kind::Managed { .. } => crate::managed::drop_region(&region),
        _ => {}
    }
}

/// `cuMemHostRegister`: ALREADY_REGISTERED where it meets other registered memory, INVALID_VALUE for memory that the driver
/// itself allocated and for addresses with nothing behind them.
pub fn register(address: u64, bytes: usize, flags: c_uint) -> Outcome {
    let context = current()?;
    if address == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 || !is_mapped(address, bytes) {
        return Err(Code::INVALID_VALUE);
    }
    capture::forbid()?;
    let kind = Kind::Host { context: context.owner(), device: context.device, flags, registered: true };
    driver().space.insert_host(address, bytes as u64, kind)
}

/// Whether the process has pages at all of a range.
fn is_mapped(address: u64, bytes: usize) -> bool {
    let start = address & !(PAGE - 1);
    let Some(end) = address.checked_add(bytes as u64).and_then(|end| end.checked_next_multiple_of(PAGE)) else {
        return false;
    };
    // SAFETY: without MS_SYNC or MS_INVALIDATE this only looks whether the range is mapped.
    unsafe { libc::msync(start as *mut _, (end - start) as usize, libc::MS_ASYNC) == 0 }
}

/// `cuMemHostUnregister`: waits as a free does.
pub fn unregister(address: u64) -> Outcome {
    current()?;
    capture::forbid()?;
    let driver = driver();
    let region = driver.space.find(address).ok_or(Code::HOST_MEMORY_NOT_REGISTERED)?;
    let Region { start, kind: Kind::Host { context: owner, registered: true, .. }, .. } = region else {
        return Err(Code::INVALID_VALUE);
    };
    if start != address {
        return Err(Code::INVALID_VALUE);
    }
    wait_for_owner(owner);
    driver.space.remove(address, |kind| matches!(kind, Kind::Host { registered: true, .. })).map(drop)
}

/// `cuMemHostGetDevicePointer`: the same address, as everywhere with unified addressing. Memory of `cuMemCreate` passes
/// too, wherever it is.
pub fn device_pointer(out: Out<u64>, address: u64, flags: c_uint) -> Outcome {
    out.required()?;
    current()?;
    out.set(0)?;
    let known = matches!(find(address), Some(Kind::Host { .. } | Kind::Vmm { .. }));
    if flags != 0 || !known {
        return Err(Code::INVALID_VALUE);
    }
    out.set(address)
}

/// `cuMemHostGetFlags`: everything is mapped, whether asked for or not.
pub fn flags(out: Out<c_uint>, address: u64) -> Outcome {
    const PORTABLE: c_uint = 1;
    const MAPPED: c_uint = 2;
    out.required()?;
    current()?;
    match find(address) {
        Some(Kind::Host { flags, .. }) => out.set(flags | MAPPED),
        Some(Kind::Managed { .. }) => out.set(MAPPED),
        Some(Kind::Vmm { .. }) => out.set(PORTABLE | MAPPED),
        _ => Err(Code::INVALID_VALUE),
    }
}

fn find(address: u64) -> Option<Kind> {
    driver().space.find(address).map(|region| region.kind)
}

/// What attributes say is mapped around a region: 2 MiB at least of the driver's own memory, the pages of registered.
pub fn mapping(region: &Region, registered: bool) -> (u64, u64) {
    if registered {
        let start = region.start & !(PAGE - 1);
        return (start, region.end().next_multiple_of(PAGE) - start);
    }
    (region.start, region.bytes.next_multiple_of(GRANULE))
}
