//! The driver's pools of stream-ordered memory: which of them the pool may stand in for.
//!
//! A pool that the program gave a largest size, a way to be shared, or a place on the host was made for that, and memory
//! from elsewhere would break it. Any other hands out plain memory of one GPU.

use cudarc::driver::sys::{CUdevice, CUmemoryPool};
use gpupool_cuda::{Driver, PoolProperties};
use parking_lot::Mutex;

/// Pools that the program made for plain memory of a GPU. The others that a device hands out are its default pools, which
/// the driver is asked about.
static PLAIN: Mutex<Vec<(usize, CUdevice)>> = Mutex::new(Vec::new());

/// The program made this pool.
pub fn created(pool: CUmemoryPool, properties: &PoolProperties) {
    if let Some(device) = properties.plain_device() {
        PLAIN.lock().push((pool as usize, device as CUdevice));
    }
}

/// The program is about to end this pool; its number may come again at once.
pub fn destroyed(pool: CUmemoryPool) {
    PLAIN.lock().retain(|(known, _)| *known != pool as usize);
}

/// The GPU that this pool hands plain memory of out; `None` where it is another kind of pool.
pub fn device_of(driver: &Driver, pool: CUmemoryPool) -> Option<CUdevice> {
    let made = PLAIN.lock().iter().find(|(known, _)| *known == pool as usize).map(|(_, device)| *device);
    made.or_else(|| (0..driver.device_count()).find(|&device| driver.default_mempool(device) == Some(pool)))
}

/// Whether `cuMemAllocAsync` on this GPU hands plain memory of it out.
pub fn is_plain_on(driver: &Driver, device: CUdevice) -> bool {
    driver.current_mempool(device).is_some_and(|pool| device_of(driver, pool) == Some(device))
}
