//! The driver's pools of stream-ordered memory: which of them the pool may stand in for.
//!
//! A pool that the program gave a largest size, a way to be shared, or a place on the host was made for that, and memory
//! from elsewhere would break it. Any other hands out plain memory of one GPU.

use crate::driver::Driver;
use cudarc::driver::sys::{CUdevice, CUmemoryPool};
use parking_lot::Mutex;
use std::ffi::{c_int, c_void};

/// `CUmemPoolProps`, as numbers: a program may write any into it.
#[repr(C)]
pub struct Properties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location_id: c_int,
    win32: *mut c_void,
    max_size: usize,
    usage: u16,
}

/// Pools that the program made for plain memory of a GPU. The others that a device hands out are its default pools, which
/// the driver is asked about.
static PLAIN: Mutex<Vec<(usize, CUdevice)>> = Mutex::new(Vec::new());

/// The program made this pool.
pub fn created(pool: CUmemoryPool, properties: &Properties) {
    const PINNED: c_int = 1;
    const DEVICE: c_int = 1;
    let Properties { kind: PINNED, handle_types: 0, location_kind: DEVICE, location_id, max_size: 0, usage: 0, .. } =
        *properties
    else {
        return;
    };
    PLAIN.lock().push((pool as usize, location_id));
}

/// The program is about to end this pool; its number may come again at once.
pub fn destroyed(pool: CUmemoryPool) {
    PLAIN.lock().retain(|(known, _)| *known != pool as usize);
}

/// The GPU that this pool hands plain memory of out; `None` where it is another kind of pool.
pub fn device_of(driver: &Driver, pool: CUmemoryPool) -> Option<CUdevice> {
    let made = PLAIN.lock().iter().find(|(known, _)| *known == pool as usize).map(|(_, device)| *device);
    made.or_else(|| (0..driver.device_count()).find(|&device| default_of(driver, device) == Some(pool)))
}

/// Whether `cuMemAllocAsync` on this GPU hands plain memory of it out.
pub fn is_plain_on(driver: &Driver, device: CUdevice) -> bool {
    let mut pool = std::ptr::null_mut();
    let Some(get) = driver.cuDeviceGetMemPool else { return false };
    // SAFETY: the output is a local of the right type.
    let result = unsafe { get(&raw mut pool, device) };
    result.is_ok() && device_of(driver, pool) == Some(device)
}

fn default_of(driver: &Driver, device: CUdevice) -> Option<CUmemoryPool> {
    let mut pool = std::ptr::null_mut();
    // SAFETY: the output is a local of the right type.
    unsafe { driver.cuDeviceGetDefaultMemPool?(&raw mut pool, device) }.ok().ok()?;
    Some(pool)
}
