//! Memory pools: which there are, their attributes, who may use their memory, and sharing it with other processes.

use crate::context::current;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{AccessDesc, Handle, In, Location, Out, PoolProps};
use crate::physical::{Use, owner_of, reopen};
use crate::reserve::Reserve;
use crate::residence::PAGE;
use crate::space::{Kind, Origin};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const DEVICE: c_int = Location::DEVICE;
const PINNED: c_int = 1;
const POSIX_FD: c_int = 1;

pub struct Pool {
    pub device: usize,
    is_default: bool,
    pub reserve: Reserve,
    /// Reuse policies 1 to 3 and the release threshold (4), as set. No policy changes what is reused here.
    settings: [AtomicU64; 4],
    /// Devices granted access, one bit an ordinal.
    access: AtomicU64,
    shareable: bool,
    /// The descriptor of another process' memory, for a pool that was imported: nothing can be allocated from it.
    imported: Option<OwnedFd>,
    /// Destroyed; it goes when the last of its memory is freed.
    ended: AtomicBool,
}

/// The default pool of a device, and the one `cuMemAllocAsync` uses.
#[derive(Default)]
pub struct DevicePools {
    default: Handle,
    current: Handle,
}

/// Whether some pool may hold memory beyond its threshold, so that synchronising calls need not look at every pool.
static UNUSED: AtomicBool = AtomicBool::new(false);

impl Pool {
    fn new(device: usize, limit: u64, shareable: bool) -> Self {
        let on = || AtomicU64::new(1);
        Self {
            device,
            is_default: false,
            reserve: Reserve::new(device, limit),
            settings: [on(), on(), on(), AtomicU64::new(0)],
            access: AtomicU64::new(1 << device),
            shareable,
            imported: None,
            ended: AtomicBool::new(false),
        }
    }

    /// Who was granted access besides its own device.
    pub fn access_list(&self) -> Vec<AccessDesc> {
        let mask = self.access.load(Ordering::Relaxed) & !(1 << self.device);
        let devices = (0..32).filter(|device| mask & 1 << device != 0);
        devices.map(|id| AccessDesc { location: Location { kind: DEVICE, id }, flags: 3 }).collect()
    }

    fn threshold(&self) -> u64 {
        self.settings[3].load(Ordering::Relaxed)
    }
}

/// A pool that was not destroyed.
fn by_handle(handle: Handle) -> Outcome<Arc<Pool>> {
    let pool = driver().pools.get(handle).map_err(|_| Code::INVALID_VALUE)?;
    if pool.ended.load(Ordering::Acquire) { Err(Code::INVALID_VALUE) } else { Ok(pool) }
}

/// A pool to allocate from.
pub fn usable(handle: Handle) -> Outcome<Arc<Pool>> {
    by_handle(handle).and_then(|pool| if pool.imported.is_some() { Err(Code::INVALID_VALUE) } else { Ok(pool) })
}

fn default_of(device: usize) -> Handle {
    let mut pools = driver().gpus[device].pools.lock();
    if pools.default == 0 {
        pools.default = driver().pools.insert(Arc::new(Pool { is_default: true, ..Pool::new(device, 0, false) }));
        pools.current = pools.default;
    }
    pools.default
}

/// The pool that `cuMemAllocAsync` uses.
pub fn current_of(device: usize) -> Handle {
    default_of(device);
    driver().gpus[device].pools.lock().current
}

pub fn get_default(out: Out<Handle>, device: c_int) -> Outcome {
    out.required()?;
    driver().gpu(device)?;
    out.set(default_of(device as usize))
}

pub fn get(out: Out<Handle>, device: c_int) -> Outcome {
    out.required()?;
    driver().gpu(device)?;
    out.set(current_of(device as usize))
}

pub fn set(device: c_int, handle: Handle) -> Outcome {
    let gpu = driver().gpu(device)?;
    default_of(device as usize);
    if usable(handle)?.device != device as usize {
        return Err(Code::INVALID_VALUE);
    }
    gpu.pools.lock().current = handle;
    Ok(())
}

/// The device that a location of CUDA 13's calls means; pools of host and managed memory are not simulated.
fn located(location: In<Location>, kind: c_int) -> Outcome<c_int> {
    match (location.get()?, kind) {
        (Location { kind: DEVICE, id }, PINNED) => Ok(id),
        (_, PINNED) => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

pub fn get_default_at(out: Out<Handle>, location: In<Location>, kind: c_int) -> Outcome {
    get_default(out, located(location, kind)?)
}

pub fn get_at(out: Out<Handle>, location: In<Location>, kind: c_int) -> Outcome {
    get(out, located(location, kind)?)
}

pub fn set_at(location: In<Location>, kind: c_int, pool: Handle) -> Outcome {
    set(located(location, kind)?, pool)
}

pub fn create(out: Out<Handle>, props: In<PoolProps>) -> Outcome {
    out.required()?;
    let props = props.get()?;
    if props.kind != PINNED || ![0, POSIX_FD].contains(&props.handle_types) {
        return Err(Code::INVALID_VALUE);
    }
    if props.location.kind != DEVICE {
        return Err(Code::NOT_SUPPORTED);
    }
    driver().gpu(props.location.id)?;
    let pool = Pool::new(props.location.id as usize, props.max_size as u64, props.handle_types == POSIX_FD);
    out.set(driver().pools.insert(Arc::new(pool)))
}

/// `cuMemPoolDestroy`: memory allocated from it stays valid until it is freed.
pub fn destroy(handle: Handle) -> Outcome {
    let pool = by_handle(handle)?;
    if pool.is_default {
        return Err(Code::INVALID_VALUE);
    }
    for gpu in &driver().gpus {
        let mut pools = gpu.pools.lock();
        if pools.current == handle {
            pools.current = pools.default;
        }
    }
    pool.ended.store(true, Ordering::Release);
    settle(handle, &pool);
    Ok(())
}

/// Lets go of what a pool no longer has to keep.
fn settle(handle: Handle, pool: &Pool) {
    if pool.ended.load(Ordering::Acquire) {
        pool.reserve.trim(0);
        if pool.reserve.levels().reserved.current == 0 {
            // Gone already where two threads freed the last two allocations at once.
            let _ = driver().pools.remove(handle);
        }
    } else {
        pool.reserve.trim(pool.threshold());
    }
}

/// Takes back what a region of a pool had.
pub fn give_back(handle: Handle, address: u64, bytes: u64) {
    // A pool outlives its memory.
    let Ok(pool) = driver().pools.get(handle) else { return };
    pool.reserve.give(address, bytes);
    if pool.ended.load(Ordering::Acquire) {
        settle(handle, &pool);
    }
    UNUSED.store(true, Ordering::Release);
}

/// Called where a stream, event or context was synchronised: that is when pools look at their threshold.
pub fn synchronized() {
    if UNUSED.swap(false, Ordering::AcqRel) {
        for pool in driver().pools.all() {
            pool.reserve.trim(pool.threshold());
        }
    }
}

pub fn trim(handle: Handle, keep: usize) -> Outcome {
    by_handle(handle)?.reserve.trim(keep as u64);
    Ok(())
}

pub fn get_attribute(handle: Handle, attribute: c_int, out: Out<c_void>) -> Outcome {
    out.required()?;
    let pool = by_handle(handle)?;
    let levels = pool.reserve.levels();
    match attribute {
        1..=3 => out.put(pool.settings[attribute as usize - 1].load(Ordering::Relaxed) as c_int),
        4 => out.put(pool.threshold()),
        5 => out.put(levels.reserved.current),
        6 => out.put(levels.reserved.high),
        7 => out.put(levels.used.current),
        8 => out.put(levels.used.high),
        _ => Err(Code::INVALID_VALUE),
    }
}

pub fn set_attribute(handle: Handle, attribute: c_int, value: In<c_void>) -> Outcome {
    let pool = by_handle(handle)?;
    match attribute {
        1..=3 => {
            pool.settings[attribute as usize - 1].store(u64::from(value.cast::<c_int>().get()? != 0), Ordering::Relaxed)
        }
        4 => pool.settings[3].store(value.cast::<u64>().get()?, Ordering::Relaxed),
        // The high-water marks can only be reset.
        6 | 8 if value.cast::<u64>().get()? == 0 => pool
            .reserve
            .change_levels(|levels| if attribute == 6 { levels.reserved.reset() } else { levels.used.reset() }),
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

pub fn set_access(handle: Handle, list: In<AccessDesc>, count: usize) -> Outcome {
    let pool = by_handle(handle)?;
    for desc in list.list(count)? {
        driver().gpu(desc.location.id)?;
        if desc.location.kind != DEVICE || !crate::device::linked(pool.device, desc.location.id as usize) {
            return Err(Code::INVALID_VALUE);
        }
        let bit = 1 << desc.location.id;
        match desc.flags {
            3 => pool.access.fetch_or(bit, Ordering::Relaxed),
            0 => pool.access.fetch_and(!bit, Ordering::Relaxed),
            _ => return Err(Code::INVALID_VALUE),
        };
    }
    Ok(())
}

pub fn get_access(out: Out<c_int>, handle: Handle, location: In<Location>) -> Outcome {
    out.required()?;
    by_handle(handle)?;
    let location = location.get()?;
    driver().gpu(location.id)?;
    out.set(if grants(handle, location.id as usize) { 3 } else { 0 })
}

/// Whether kernels on `device` may use memory of this pool.
pub fn grants(handle: Handle, device: usize) -> bool {
    driver().pools.get(handle).is_ok_and(|pool| pool.access.load(Ordering::Relaxed) & 1 << device != 0)
}

// Sharing with other processes

/// `CUmemPoolPtrExportData`: where in the memory of its device an allocation lies.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Shared([u64; 8]);

const MAGIC: u64 = 0x6c6f_6f70_6475_6373;

/// `cuMemPoolExportToShareableHandle`: a descriptor of the memory of the pool's device.
pub fn export(out: Out<c_int>, handle: Handle, kind: c_int, flags: u64) -> Outcome {
    out.required()?;
    let pool = by_handle(handle)?;
    if kind != POSIX_FD || flags != 0 || !pool.shareable {
        return Err(Code::INVALID_VALUE);
    }
    out.set(reopen(driver().gpus[pool.device].store.descriptor())?.into_raw_fd())
}

pub fn import(out: Out<Handle>, shared: u64, kind: c_int, flags: u64) -> Outcome {
    out.required()?;
    let descriptor = c_int::try_from(shared).map_err(|_| Code::INVALID_VALUE)?;
    if kind != POSIX_FD || flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let (owner, index) = owner_of(descriptor).ok_or(Code::INVALID_VALUE)?;
    let gpus = &driver().gpus;
    let device = gpus.iter().position(|gpu| owner == "gpu" && gpu.index == index).ok_or(Code::INVALID_DEVICE)?;
    let imported = Some(reopen(descriptor)?);
    out.set(driver().pools.insert(Arc::new(Pool { imported, ..Pool::new(device, 0, false) })))
}

/// `cuMemPoolExportPointer`: any allocation of a pool that can be shared.
pub fn export_pointer(out: Out<Shared>, address: u64) -> Outcome {
    out.required()?;
    let region = driver().space.find(address).ok_or(Code::INVALID_VALUE)?;
    let Kind::Plain { physical, offset, origin: Origin::Pool(handle), .. } = &region.kind else {
        return Err(Code::INVALID_VALUE);
    };
    if region.start != address || !by_handle(*handle)?.shareable {
        return Err(Code::INVALID_VALUE);
    }
    // A chunk that lies scattered cannot be named in 64 bytes; memory has to be nearly full for that to happen.
    let [piece] = physical.pieces[..] else { return Err(Code::NOT_SUPPORTED) };
    physical.note_shared()?;
    out.set(Shared([MAGIC, piece.offset + offset, region.bytes, 0, 0, 0, 0, 0]))
}

pub fn import_pointer(out: Out<u64>, handle: Handle, data: In<Shared>) -> Outcome {
    out.required()?;
    let pool = by_handle(handle)?;
    let Shared([magic, offset, bytes, ..]) = data.get()?;
    let file = pool.imported.as_ref().filter(|_| magic == MAGIC && bytes > 0).ok_or(Code::INVALID_VALUE)?;
    let file = reopen(file.as_raw_fd())?;
    // Mappings begin at pages, allocations do not.
    let lead = offset % PAGE;
    let store = &driver().gpus[pool.device].store;
    let physical = store.import(file, offset - lead, (lead + bytes).next_multiple_of(PAGE), Use::Plain)?;
    let context = current().map_or(0, |context| context.owner());
    let space = &driver().space;
    let start = space.take_addresses(physical.bytes)? + lead;
    let device = pool.device;
    space.insert(start, bytes, Kind::Plain { context, device, physical, offset: lead, origin: Origin::Shared });
    out.set(start)
}
