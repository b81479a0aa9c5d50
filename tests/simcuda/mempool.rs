//! Stream-ordered allocation. A pool here keeps no memory: a free gives it back when its stream gets there.

use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{AccessDesc, Handle, In, Location, Out, PoolProps};
use crate::space::{Kind, Origin};
use crate::stream::{Work, resolve};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const DEVICE: c_int = Location::DEVICE;

pub struct Pool {
    device: usize,
    is_default: bool,
    used: AtomicU64,
    high: AtomicU64,
    /// Reuse policies 1 to 3 and the release threshold (4), as set; nothing depends on them.
    settings: [AtomicU64; 4],
    /// Devices granted access, one bit an ordinal.
    access: AtomicU64,
}

/// The default pool of a device, and the one `cuMemAllocAsync` uses.
#[derive(Default)]
pub struct DevicePools {
    default: Handle,
    current: Handle,
}

fn make(device: usize, is_default: bool) -> Handle {
    let on = || AtomicU64::new(1);
    driver().pools.insert(Arc::new(Pool {
        device,
        is_default,
        used: AtomicU64::new(0),
        high: AtomicU64::new(0),
        settings: [on(), on(), on(), AtomicU64::new(0)],
        access: AtomicU64::new(1 << device),
    }))
}

fn default_of(device: usize) -> Handle {
    let mut pools = driver().gpus[device].pools.lock();
    if pools.default == 0 {
        pools.default = make(device, true);
        pools.current = pools.default;
    }
    pools.default
}

fn current_of(device: usize) -> Handle {
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

pub fn set(device: c_int, pool: Handle) -> Outcome {
    let gpu = driver().gpu(device)?;
    default_of(device as usize);
    if driver().pools.get(pool).map_err(|_| Code::INVALID_VALUE)?.device != device as usize {
        return Err(Code::INVALID_VALUE);
    }
    gpu.pools.lock().current = pool;
    Ok(())
}

pub fn create(out: Out<Handle>, props: In<PoolProps>) -> Outcome {
    out.required()?;
    let props = props.get()?;
    if props.kind != 1 || props.location.kind != DEVICE {
        return Err(if props.kind == 1 { Code::NOT_SUPPORTED } else { Code::INVALID_VALUE });
    }
    driver().gpu(props.location.id)?;
    out.set(make(props.location.id as usize, false))
}

pub fn destroy(pool: Handle) -> Outcome {
    if driver().pools.get(pool).map_err(|_| Code::INVALID_VALUE)?.is_default {
        return Err(Code::INVALID_VALUE);
    }
    for gpu in &driver().gpus {
        let mut pools = gpu.pools.lock();
        if pools.current == pool {
            pools.current = pools.default;
        }
    }
    driver().pools.remove(pool).map(drop)
}

/// `cuMemPoolTrimTo`: nothing is kept, so nothing is trimmed.
pub fn trim(pool: Handle, _keep: usize) -> Outcome {
    driver().pools.get(pool).map(drop).map_err(|_| Code::INVALID_VALUE)
}

pub fn get_attribute(pool: Handle, attribute: c_int, out: Out<c_void>) -> Outcome {
    out.required()?;
    let pool = driver().pools.get(pool).map_err(|_| Code::INVALID_VALUE)?;
    match attribute {
        1..=3 => out.put(pool.settings[attribute as usize - 1].load(Ordering::Relaxed) as c_int),
        4 => out.put(pool.settings[3].load(Ordering::Relaxed)),
        5 | 7 => out.put(pool.used.load(Ordering::Relaxed)),
        6 | 8 => out.put(pool.high.load(Ordering::Relaxed)),
        _ => Err(Code::INVALID_VALUE),
    }
}

pub fn set_attribute(pool: Handle, attribute: c_int, value: In<c_void>) -> Outcome {
    let pool = driver().pools.get(pool).map_err(|_| Code::INVALID_VALUE)?;
    match attribute {
        1..=3 => {
            pool.settings[attribute as usize - 1].store(u64::from(value.cast::<c_int>().get()? != 0), Ordering::Relaxed)
        }
        4 => pool.settings[3].store(value.cast::<u64>().get()?, Ordering::Relaxed),
        // The high-water marks can only be reset.
        6 | 8 if value.cast::<u64>().get()? == 0 => {
            pool.high.store(pool.used.load(Ordering::Relaxed), Ordering::Relaxed)
        }
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

pub fn set_access(pool: Handle, list: In<AccessDesc>, count: usize) -> Outcome {
    let pool = driver().pools.get(pool).map_err(|_| Code::INVALID_VALUE)?;
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

pub fn get_access(out: Out<c_int>, pool: Handle, location: In<Location>) -> Outcome {
    out.required()?;
    let pool = driver().pools.get(pool).map_err(|_| Code::INVALID_VALUE)?;
    let location = location.get()?;
    driver().gpu(location.id)?;
    out.set(if pool.access.load(Ordering::Relaxed) & 1 << location.id != 0 { 3 } else { 0 })
}

/// Whether kernels on `device` may use memory of this pool.
pub fn grants(pool: Handle, device: usize) -> bool {
    driver().pools.get(pool).is_ok_and(|pool| pool.access.load(Ordering::Relaxed) & 1 << device != 0)
}

pub fn alloc(out: Out<u64>, bytes: usize, stream: Handle) -> Outcome {
    out.required()?;
    let device = resolve(stream)?.context()?.device;
    alloc_from(out, bytes, current_of(device), stream)
}

/// `cuMemAllocFromPoolAsync`. The address is usable at once: nothing of an earlier owner is still under way on it,
/// because a free happens when its stream gets there. Allocation nodes of graphs are not simulated.
pub fn alloc_from(out: Out<u64>, bytes: usize, handle: Handle, stream: Handle) -> Outcome {
    out.required()?;
    let stream = resolve(stream)?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    if let Some(capture) = stream.capturing()? {
        capture.invalidate();
        return Err(Code::NOT_SUPPORTED);
    }
    let driver = driver();
    let pool = driver.pools.get(handle).map_err(|_| Code::INVALID_VALUE)?;
    let context = stream.context()?;
    let store = &driver.gpus[pool.device].store;
    let address = driver.space.allocate(store, pool.device, context.id, Origin::Pool(handle), bytes as u64)?;
    let used = pool.used.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    pool.high.fetch_max(used, Ordering::Relaxed);
    out.set(address)
}

/// `cuMemFreeAsync`, also for memory of `cuMemAlloc`.
pub fn free(address: u64, stream: Handle) -> Outcome {
    let stream = resolve(stream)?;
    if address == 0 {
        return Ok(());
    }
    if let Some(capture) = stream.capturing()? {
        capture.invalidate();
        return Err(Code::NOT_SUPPORTED);
    }
    current()?;
    let region = driver().space.find(address).filter(|region| region.start == address).ok_or(Code::INVALID_VALUE)?;
    let Kind::Plain { origin, .. } = region.kind else { return Err(Code::INVALID_VALUE) };
    if origin == Origin::Ipc {
        return Err(Code::INVALID_VALUE);
    }
    let bytes = region.bytes;
    // The region is not captured by the closure: it would keep the memory past the free.
    stream.run_or_submit(Work {
        action: Arc::new(move |_: &Context| {
            forget(origin, bytes);
            driver().space.free(address)
        }),
        touches: Vec::new(),
    })
}

/// Takes freed memory out of its pool's count.
pub fn forget(origin: Origin, bytes: u64) {
    if let Origin::Pool(handle) = origin
        && let Ok(pool) = driver().pools.get(handle)
    {
        pool.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}
