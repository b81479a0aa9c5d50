//! The driver's pools of stream-ordered memory: which of them the pool may stand in for.
//!
//! A pool that the program gave a largest size, a way to be shared, or a place on the host was made for that, and memory
//! from elsewhere would break it. Any other hands out plain memory of one GPU.

use crate::watch::context;
use gpupool_cuda::{Device, Driver, MemoryPool, PoolProperties};
use gpupool_pool::Block;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pools that the program made, and the GPU of those that hand out plain memory of one. The others that a device hands out are its default pools,
/// which the driver is asked about.
struct Made {
    all: Vec<(MemoryPool, Option<Device>)>,
    /// One of which something is asked at this moment, so that it does not end.
    asked: Option<MemoryPool>,
}

static MADE: Mutex<Made> = Mutex::new(Made { all: Vec::new(), asked: None });
static ANSWERED: Condvar = Condvar::new();

/// The program made this pool.
pub fn created(pool: MemoryPool, properties: &PoolProperties) {
    MADE.lock().all.push((pool, properties.plain_device().map(Device::of)));
}

/// The program is about to end this pool; its handle may come again at once.
pub fn destroyed(pool: MemoryPool) {
    let mut made = MADE.lock();
    while made.asked == Some(pool) {
        ANSWERED.wait(&mut made);
    }
    made.all.retain(|(known, _)| *known != pool);
}

/// Has all pools that are known give back what nobody uses, where the driver's work is over; bytes that they hold then.
pub fn trim(driver: &Driver) -> u64 {
    let devices: BTreeSet<u32> = context::all().iter().map(|context| context.device.ordinal()).collect();
    let defaults = devices.into_iter().filter_map(|device| driver.default_mempool(Device::of(device)));
    let held: u64 = defaults.filter_map(|pool| driver.trim_mempool(pool)).sum();
    let made: Vec<MemoryPool> = MADE.lock().all.iter().map(|(pool, _)| *pool).collect();
    held + made.into_iter().filter_map(|pool| trim_made(driver, pool)).sum::<u64>()
}

fn trim_made(driver: &Driver, pool: MemoryPool) -> Option<u64> {
    let mut made = MADE.lock();
    if made.asked.is_some() || !made.all.iter().any(|(known, _)| *known == pool) {
        return None;
    }
    made.asked = Some(pool);
    drop(made);
    let held = driver.trim_mempool(pool);
    MADE.lock().asked = None;
    ANSWERED.notify_all();
    held
}

/// The GPU that this pool hands plain memory of out; `None` where it is another kind of pool.
pub fn device_of(driver: &Driver, pool: MemoryPool) -> Option<Device> {
    let made = MADE.lock().all.iter().find(|(known, _)| *known == pool).and_then(|(_, device)| *device);
    made.or_else(|| driver.devices().find(|&device| driver.default_mempool(device) == Some(pool)))
}

/// The pool of which `cuMemAllocAsync` on this GPU hands memory out, where that is plain memory of the GPU.
pub fn plain_on(driver: &Driver, device: Device) -> Option<MemoryPool> {
    driver.current_mempool(device).filter(|pool| device_of(driver, *pool) == Some(device))
}

/// Blocks that stand in for memory of one of the driver's pools, by the address that each starts at: its number, and which pool that is.
static STAND_INS: Mutex<BTreeMap<u64, (u64, MemoryPool)>> = Mutex::new(BTreeMap::new());
/// How many are in it, readable without the lock: mostly the driver has memory for all of them.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A block was made because the driver had no memory for what a program asked of this pool.
pub fn stands_in(block: &Block, pool: MemoryPool) {
    let mut all = STAND_INS.lock();
    all.insert(block.address, (block.id, pool));
    COUNT.store(all.len(), Ordering::Release);
}

/// The driver's pool that a block stands in for.
pub fn behind(block: &Block) -> Option<MemoryPool> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    STAND_INS.lock().get(&block.address).filter(|(id, _)| *id == block.id).map(|(_, pool)| *pool)
}

/// A block has ended.
#[inline]
pub fn ended(block: &Block) {
    if COUNT.load(Ordering::Acquire) != 0 {
        forget(block);
    }
}

#[cold]
fn forget(block: &Block) {
    let mut all = STAND_INS.lock();
    // By now another block may begin there.
    if all.get(&block.address).is_some_and(|(id, _)| *id == block.id) {
        all.remove(&block.address);
        COUNT.store(all.len(), Ordering::Release);
    }
}
