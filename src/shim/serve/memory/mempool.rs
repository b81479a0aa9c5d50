//! The driver's pools of stream-ordered memory: which of them the pool may stand in for.
//!
//! A pool that the program gave a largest size, a way to be shared, or a place on the host was made for that, and memory
//! from elsewhere would break it. Any other hands out plain memory of one GPU.

use gpupool_cuda::{Device, Driver, MemoryPool, PoolProperties};
use parking_lot::Mutex;

/// Pools that the program made for plain memory of a GPU. The others that a device hands out are its default pools, which
/// the driver is asked about.
static PLAIN: Mutex<Vec<(MemoryPool, Device)>> = Mutex::new(Vec::new());

/// The program made this pool.
pub fn created(pool: MemoryPool, properties: &PoolProperties) {
    if let Some(device) = properties.plain_device() {
        PLAIN.lock().push((pool, Device::of(device)));
    }
}

/// The program is about to end this pool; its handle may come again at once.
pub fn destroyed(pool: MemoryPool) {
    PLAIN.lock().retain(|(known, _)| *known != pool);
}

/// The GPU that this pool hands plain memory of out; `None` where it is another kind of pool.
pub fn device_of(driver: &Driver, pool: MemoryPool) -> Option<Device> {
    let made = PLAIN.lock().iter().find(|(known, _)| *known == pool).map(|(_, device)| *device);
    made.or_else(|| driver.devices().find(|&device| driver.default_mempool(device) == Some(pool)))
}

/// Whether `cuMemAllocAsync` on this GPU hands plain memory of it out.
pub fn is_plain_on(driver: &Driver, device: Device) -> bool {
    driver.current_mempool(device).is_some_and(|pool| device_of(driver, pool) == Some(device))
}
