//! The driver's pools of stream-ordered memory: which of them the pool may stand in for.
//!
//! A pool that the program gave a largest size, a way to be shared, or a place on the host was made for that, and memory
//! from elsewhere would break it. Any other hands out plain memory of one GPU.

use crate::watch::context;
use gpupool_cuda::{Device, Driver, MemoryPool, PoolProperties};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeSet;

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

/// Whether `cuMemAllocAsync` on this GPU hands plain memory of it out.
pub fn is_plain_on(driver: &Driver, device: Device) -> bool {
    driver.current_mempool(device).is_some_and(|pool| device_of(driver, pool) == Some(device))
}
