//! Virtual memory management: reservations, handles, mappings and who may use them.

use crate::device::linked;
use crate::driver::{Driver, driver};
use crate::error::{Code, Outcome};
use crate::ffi::{AccessDesc, AllocationProp, In, Location, Out};
use crate::physical::{GRANULE, Physical, Place, Store, Use, reopen, shared_range};
use crate::report;
use crate::residence::PAGE;
use crate::space::{Grants, Kind, next_id};
use crate::strict;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Weak};

const PINNED: c_int = 1;
/// `gpuDirectRDMACapable` in the flags of a property.
const RDMA_CAPABLE: usize = 1;
const POSIX_FD: c_int = 1;
const DMA_BUF: c_int = 1;
const MAP_AS_PCIE_BAR: u64 = 1;
const FABRIC: c_int = 8;
const DEVICE: c_int = Location::DEVICE;
const HOST: c_int = Location::HOST;
const HOST_NUMA: c_int = Location::HOST_NUMA;
const HOST_NUMA_CURRENT: c_int = Location::HOST_NUMA_CURRENT;
const READ: c_int = 1;
const READ_WRITE: c_int = 3;

/// The program's handles. An entry without references stays findable while its memory is mapped, for
/// `cuMemRetainAllocationHandle`.
static HANDLES: Mutex<Option<HashMap<u64, Entry>>> = Mutex::new(None);

struct Entry {
    physical: Option<Arc<Physical>>,
    mapped: Weak<Physical>,
    references: u64,
    prop: AllocationProp,
}

impl Entry {
    /// A released handle is as good as any while its memory is mapped somewhere, but for one more release.
    fn memory(&self) -> Option<Arc<Physical>> {
        self.physical.clone().or_else(|| self.mapped.upgrade())
    }
}

fn with_handles<T>(body: impl FnOnce(&mut HashMap<u64, Entry>) -> T) -> T {
    body(HANDLES.lock().get_or_insert_default())
}

/// Handles the program still holds.
pub fn live_handles() -> usize {
    with_handles(|handles| handles.values().filter(|entry| entry.references > 0).count())
}

fn supported() -> Outcome<&'static Driver> {
    let driver = driver();
    if driver.settings.vmm { Ok(driver) } else { Err(Code::NOT_SUPPORTED) }
}

fn aligned(address: u64, bytes: usize) -> Outcome<u64> {
    let bytes = bytes as u64;
    if bytes == 0 || !bytes.is_multiple_of(GRANULE) || !address.is_multiple_of(GRANULE) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(bytes)
}

pub fn reserve(out: Out<u64>, bytes: usize, align: usize, hint: u64, flags: u64) -> Outcome {
    out.required()?;
    let driver = supported()?;
    let bytes = aligned(0, bytes)?;
    if flags != 0 || align != 0 && !align.is_power_of_two() {
        return Err(Code::INVALID_VALUE);
    }
    out.set(driver.space.reserve(bytes, align as u64, hint)?)
}

pub fn unreserve(address: u64, bytes: usize) -> Outcome {
    supported()?.space.unreserve(address, aligned(address, bytes)?)
}

/// Where a property asks for memory. Host memory may be forbidden as a whole, as in most containers.
fn store(driver: &'static Driver, prop: &AllocationProp) -> Outcome<&'static Store> {
    if prop.kind != PINNED {
        return Err(Code::INVALID_VALUE);
    }
    let node = match prop.location.kind {
        DEVICE => return Ok(&driver.gpu(prop.location.id)?.store),
        HOST_NUMA => prop.location.id,
        HOST | HOST_NUMA_CURRENT => 0,
        _ => return Err(Code::INVALID_VALUE),
    };
    let store = usize::try_from(node).ok().and_then(|node| driver.hosts.get(node)).ok_or(Code::INVALID_VALUE)?;
    if driver.settings.host.is_none() { Err(Code::NOT_PERMITTED) } else { Ok(store) }
}

pub fn create(out: Out<u64>, bytes: usize, prop: In<AllocationProp>, flags: u64) -> Outcome {
    out.required()?;
    let driver = supported()?;
    let prop = prop.get()?;
    let bytes = aligned(0, bytes)?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let store = store(driver, &prop)?;
    if prop.flags[RDMA_CAPABLE] != 0 && !driver.settings.rdma && prop.location.kind == DEVICE {
        return Err(Code::NOT_SUPPORTED);
    }
    let physical = match prop.handle_types {
        0 | POSIX_FD => store.allocate(bytes, Use::Vmm)?,
        // There is no fabric manager to share it through.
        FABRIC => return Err(Code::NOT_PERMITTED),
        _ => return Err(Code::INVALID_VALUE),
    };
    let handle = enter(physical, prop);
    crate::checkpoint::tell();
    out.set(handle)
}

/// Whether this process has made memory of the host and has it still, mapped or not.
pub fn has_host_memory() -> bool {
    let is_there = |entry: &Entry| entry.references > 0 || entry.mapped.strong_count() > 0;
    let is_host = |entry: &Entry| entry.prop.location.kind != DEVICE && is_there(entry);
    with_handles(|handles| handles.values().any(is_host))
}

fn enter(physical: Arc<Physical>, prop: AllocationProp) -> u64 {
    let handle = next_id();
    let entry = Entry { mapped: Arc::downgrade(&physical), physical: Some(physical), references: 1, prop };
    with_handles(|handles| handles.insert(handle, entry));
    handle
}

/// `cuMemRelease`: the memory lives on while it is mapped.
pub fn release(handle: u64) -> Outcome {
    supported()?;
    let freed = with_handles(|handles| {
        let entry = handles.get_mut(&handle).filter(|entry| entry.references > 0).ok_or(Code::INVALID_VALUE)?;
        entry.references -= 1;
        let freed = if entry.references == 0 { entry.physical.take() } else { None };
        Ok(freed)
    })?;
    // Unlocked: this may give memory back to the system.
    drop(freed);
    with_handles(|handles| {
        if handles.get(&handle).is_some_and(|entry| entry.references == 0 && entry.mapped.strong_count() == 0) {
            handles.remove(&handle);
        }
    });
    crate::checkpoint::tell();
    Ok(())
}

pub fn map(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) -> Outcome {
    let driver = supported()?;
    let physical = with_handles(|handles| handles.get(&handle)?.memory()).ok_or(Code::INVALID_VALUE)?;
    if flags != 0 || bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    if offset != 0 || bytes as u64 != physical.bytes {
        return Err(Code::NOT_SUPPORTED);
    }
    let bytes = aligned(address, bytes)?;
    driver.space.map(address, physical, handle)?;
    strict::mapping(address, address + bytes);
    Ok(())
}

/// `cuMemUnmap`. It does not wait for the device, so taking memory from under work that uses it is a bug of the caller
/// that a real GPU may or may not punish; here it is always reported, in strict mode or not.
pub fn unmap(address: u64, bytes: usize) -> Outcome {
    let driver = supported()?;
    let bytes = aligned(address, bytes)?;
    let end = address.saturating_add(bytes);
    let reachable =
        driver.space.within(address, end).iter().fold(0, |mask, at| mask | strict::reachable_from(&at.kind));
    let (users, followers) = (strict::users_of(address, end, 0), strict::followers_of(address, end, reachable));
    let regions = driver.space.unmap(address, bytes)?;
    strict::unmapped(address, end, &users, followers);
    let visible = regions.iter().filter(|region| matches!(&region.kind, Kind::Vmm { grants, .. } if grants.host));
    for region in visible {
        hide_from_processor(region.start, region.bytes);
    }
    let handles: Vec<u64> = regions
        .iter()
        .filter_map(|region| match &region.kind {
            Kind::Vmm { handle, .. } => Some(*handle),
            _ => None,
        })
        .collect();
    drop(regions);
    with_handles(|list| {
        for handle in handles {
            if list.get(&handle).is_some_and(|entry| entry.references == 0 && entry.mapped.strong_count() == 0) {
                list.remove(&handle);
            }
        }
    });
    crate::checkpoint::tell();
    Ok(())
}

pub fn set_access(address: u64, bytes: usize, list: In<AccessDesc>, count: usize) -> Outcome {
    let driver = supported()?;
    let bytes = aligned(address, bytes)?;
    let _alone = strict::giving_access(address, address.saturating_add(bytes));
    let list = list.list(count)?;
    if list.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    for desc in &list {
        if ![0, READ, READ_WRITE].contains(&desc.flags) {
            return Err(Code::INVALID_VALUE);
        }
        match desc.location.kind {
            DEVICE => drop(driver.gpu(desc.location.id).map_err(|_| Code::INVALID_VALUE)?),
            HOST | HOST_NUMA | HOST_NUMA_CURRENT => {}
            _ => return Err(Code::INVALID_VALUE),
        }
    }
    let limits = |desc: &&AccessDesc| desc.location.kind == DEVICE && desc.flags != READ_WRITE;
    let limited = list.iter().filter(limits).fold(0, |mask, desc| mask | 1 << desc.location.id);
    let users = strict::users_on(address, address.saturating_add(bytes), limited);
    let opens = |desc: &&AccessDesc| desc.location.kind == DEVICE && desc.flags != 0;
    let opened = list.iter().filter(opens).fold(0, |mask, desc| mask | 1 << desc.location.id);
    for region in driver.space.within(address, address.saturating_add(bytes)) {
        if let Kind::Vmm { tables, .. } = &region.kind {
            tables.take(opened)?;
        }
    }
    let mut lost = 0;
    let changed = driver.space.set_access(address, bytes, |physical, grants| {
        let before = *grants;
        list.iter().try_for_each(|desc| grant(physical, grants, desc))?;
        lost |= before.read & !grants.read | before.write & !grants.write;
        Ok(())
    })?;
    if lost != 0 {
        strict::lost_access(address, address + bytes, &users);
    }
    for region in &changed {
        if let Kind::Vmm { physical, grants, .. } = &region.kind
            && grants.host
        {
            show_to_processor(region.start, physical)?;
        }
    }
    crate::checkpoint::tell();
    Ok(())
}

fn grant(physical: &Physical, grants: &mut Grants, desc: &AccessDesc) -> Outcome {
    if desc.location.kind != DEVICE {
        return match physical.place() {
            Place::Host(_) => {
                grants.host = desc.flags == READ_WRITE;
                Ok(())
            }
            Place::Gpu(_) => Err(Code::NOT_SUPPORTED),
        };
    }
    let device = desc.location.id as usize;
    if let Place::Gpu(owner) = physical.place()
        && !linked(device, owner)
    {
        return Err(Code::INVALID_DEVICE);
    }
    let (bit, returns) = (1 << device, driver().machine.returns());
    if desc.flags != 0 && grants.taken & bit != 0 && returns > grants.taken_after {
        return Err(Code::INVALID_HANDLE);
    }
    if desc.flags == 0 && grants.read & bit != 0 {
        (grants.taken, grants.taken_after) = (grants.taken | bit, returns);
    }
    let set = |mask: &mut u64, on| *mask = *mask & !(1 << device) | u64::from(on) << device;
    set(&mut grants.read, desc.flags & READ != 0);
    set(&mut grants.write, desc.flags == READ_WRITE);
    Ok(())
}

/// Maps host memory at its device address, for a program that granted its processor access.
fn show_to_processor(start: u64, physical: &Physical) -> Outcome {
    let file = physical.file();
    let mut at = start;
    for piece in &physical.pieces {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the range lies in a reservation of this driver, so what it replaces is the reservation's own mapping.
        let address = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(at as *mut _, piece.bytes as usize, access, flags, file, piece.offset as i64)
        };
        if address == libc::MAP_FAILED {
            return Err(Code::OPERATING_SYSTEM);
        }
        at += piece.bytes;
    }
    Ok(())
}

fn hide_from_processor(start: u64, bytes: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range lies in a reservation of this driver, whose inaccessible part it becomes again.
    unsafe { libc::mmap(start as *mut _, bytes as usize, libc::PROT_NONE, flags, -1, 0) };
}

/// `cuMemGetAccess`. As an H200 answered: memory that nobody sets access to (of `cuMemAlloc`, stream-ordered, managed, pinned) is
/// answered like mapped memory that nobody was given access to, and where there is no memory at all 0 is written beside the error.
pub fn get_access(out: Out<u64>, location: In<Location>, address: u64) -> Outcome {
    out.required()?;
    let driver = supported()?;
    let location = location.get()?;
    if address == 0 {
        return Err(Code::INVALID_VALUE);
    }
    match location.kind {
        DEVICE => _ = driver.gpu(location.id)?,
        HOST | HOST_NUMA | HOST_NUMA_CURRENT => {}
        _ => return Err(Code::INVALID_DEVICE),
    }
    let Some(region) = driver.space.find(address) else {
        out.set(0)?;
        return Err(Code::INVALID_VALUE);
    };
    let Kind::Vmm { grants, .. } = region.kind else { return out.set(0) };
    let flags = match location.kind {
        DEVICE => {
            let bit = |mask: u64, value: c_int| if mask & 1 << location.id != 0 { value } else { 0 };
            bit(grants.read, READ) | bit(grants.write, READ_WRITE)
        }
        _ if grants.host => READ_WRITE,
        _ => 0,
    };
    out.set(flags as u64)
}

/// `cuMemGetAllocationGranularity`: the same for minimum (0) and recommended (1).
pub fn granularity(out: Out<usize>, prop: In<AllocationProp>, option: c_int) -> Outcome {
    out.required()?;
    let driver = supported()?;
    if !(0..=1).contains(&option) {
        return Err(Code::INVALID_VALUE);
    }
    match store(driver, &prop.get()?) {
        Ok(_) | Err(Code::NOT_PERMITTED) => out.set(GRANULE as usize),
        Err(code) => Err(code),
    }
}

pub fn retain(out: Out<u64>, address: u64) -> Outcome {
    out.required()?;
    let driver = supported()?;
    let Some(Kind::Vmm { physical, handle, .. }) = driver.space.find(address).map(|region| region.kind) else {
        return Err(Code::INVALID_VALUE);
    };
    with_handles(|handles| {
        let entry = handles.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        entry.references += 1;
        entry.physical = Some(physical);
        Ok(())
    })?;
    out.set(handle)
}

pub fn properties(out: Out<AllocationProp>, handle: u64) -> Outcome {
    out.required()?;
    supported()?;
    let prop =
        with_handles(|handles| handles.get(&handle).filter(|entry| entry.memory().is_some()).map(|entry| entry.prop));
    out.set(prop.ok_or(Code::INVALID_VALUE)?)
}

/// Nobody has a multicast object or a logical endpoint here, so nothing is bound. But the driver follows every handle of memory that it is given, and
/// ends with one that is none (measured with others of its calls).
fn bind_to_nothing(call: &str, memory: u64) -> Outcome {
    if strict::is_on() && with_handles(|handles| handles.get(&memory).and_then(Entry::memory)).is_none() {
        report::violation(format!("{call} of {memory:#x}, which is no handle of memory"));
    }
    Err(Code::INVALID_VALUE)
}

pub fn bind_multicast(_: u64, _: usize, memory: u64, _: usize, _: usize, _: u64) -> Outcome {
    bind_to_nothing("cuMulticastBindMem", memory)
}

pub fn bind_multicast_v2(_: u64, _: c_int, _: usize, memory: u64, _: usize, _: usize, _: u64) -> Outcome {
    bind_to_nothing("cuMulticastBindMem_v2", memory)
}

pub fn bind_endpoint(_: c_uint, _: c_int, _: u64, memory: u64, _: u64, _: u64, _: u64) -> Outcome {
    bind_to_nothing("cuLogicalEndpointBindMem", memory)
}

/// What a handle was created to be shared as, for pointer attributes.
pub fn handle_types(handle: u64) -> c_int {
    with_handles(|handles| handles.get(&handle).map_or(0, |entry| entry.prop.handle_types))
}

/// Whether a handle was created for network cards to reach.
pub fn is_rdma_capable(handle: u64) -> bool {
    with_handles(|handles| handles.get(&handle).is_some_and(|entry| entry.prop.flags[RDMA_CAPABLE] != 0))
}

/// `cuMemGetHandleForAddressRange`: a descriptor that keeps a range of one GPU's memory, plain or mapped. A real one is a
/// DMA buffer; this one can be held and closed.
pub fn range_handle(out: Out<c_int>, address: u64, bytes: usize, kind: c_int, flags: u64) -> Outcome {
    out.required()?;
    let driver = driver();
    let whole_pages = address.is_multiple_of(PAGE) && (bytes as u64).is_multiple_of(PAGE) && bytes > 0;
    if kind != DMA_BUF || flags & !MAP_AS_PCIE_BAR != 0 || !whole_pages {
        return Err(Code::INVALID_VALUE);
    }
    if !driver.settings.rdma {
        return Err(Code::NOT_SUPPORTED);
    }
    let spans = driver.space.spans(address, bytes as u64, false)?;
    let memory = spans.iter().map(|span| match span.region.as_ref().map(|region| &region.kind) {
        Some(Kind::Plain { physical, .. } | Kind::Vmm { physical, .. }) => Ok(physical.clone()),
        _ => Err(Code::INVALID_VALUE),
    });
    let memory = memory.collect::<Outcome<Vec<_>>>()?;
    let first = memory.first().ok_or(Code::INVALID_VALUE)?;
    let one_gpu = matches!(first.place(), Place::Gpu(_)) && memory.iter().all(|other| other.file() == first.file());
    if !one_gpu {
        return Err(Code::INVALID_VALUE);
    }
    let file = reopen(first.file())?;
    memory.iter().try_for_each(|physical| physical.hold_by(&file))?;
    out.set(file.into_raw_fd())
}

/// `cuMemExportToShareableHandle`: a descriptor of the allocation's own memory file, to be sent over a socket.
pub fn export(out: Out<c_int>, handle: u64, kind: c_int, flags: u64) -> Outcome {
    out.required()?;
    supported()?;
    let entry = with_handles(|handles| {
        let entry = handles.get(&handle)?;
        Some((entry.memory()?, entry.prop.handle_types))
    });
    let (physical, types) = entry.ok_or(Code::INVALID_VALUE)?;
    if kind != POSIX_FD || types & POSIX_FD == 0 || flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(physical.share()?.into_raw_fd())
}

/// `cuMemImportFromShareableHandle`: the name of the file says whose memory it is, its size how much.
pub fn import(out: Out<u64>, shared: u64, kind: c_int) -> Outcome {
    out.required()?;
    let driver = supported()?;
    if kind != POSIX_FD {
        return Err(Code::INVALID_VALUE);
    }
    let descriptor = shared as c_int;
    let (kind, index, offset, bytes) = shared_range(descriptor).ok_or(Code::UNKNOWN)?;
    let (store, location) = match kind.as_str() {
        "gpu" => {
            let ordinal = driver.gpus.iter().position(|gpu| gpu.index == index).ok_or(Code::INVALID_DEVICE)?;
            (&driver.gpus[ordinal].store, Location { kind: DEVICE, id: ordinal as c_int })
        }
        _ => (driver.hosts.get(index).ok_or(Code::INVALID_VALUE)?, Location { kind: HOST_NUMA, id: index as c_int }),
    };
    // SAFETY: it was just looked at, so it is an open descriptor.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    // SAFETY: the copy is new and nobody else closes it; the original is the caller's.
    let copy = unsafe { OwnedFd::from_raw_fd(copy) };
    let physical = store.import(copy, offset, bytes, Use::Vmm)?;
    out.set(enter(physical, AllocationProp { kind: PINNED, handle_types: 0, location, win32: 0, flags: [0; 8] }))
}
