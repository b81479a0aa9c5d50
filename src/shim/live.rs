//! Settings that can change while the process runs (`gpupool set`): what each of them says now. At first that is what the process was
//! started with. Whoever needs one asks here, and not [`crate::process::settings`]; who changes one is `agent/set.rs`.
//!
//! What places may hold follows from some of these and from GPUs that are drained; it is worked out in `backing/terms.rs`, and the
//! accounts have it.

use crate::process;
use gpupool_config::{Devices, Limits};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// A number that was never changed.
const UNCHANGED: u32 = u32::MAX;

static MOVE_SHARE: AtomicU32 = AtomicU32::new(UNCHANGED);
static PRIORITY: AtomicU32 = AtomicU32::new(UNCHANGED);
static LIMIT: Mutex<Option<Limits>> = Mutex::new(None);
static DEVICES: Mutex<Option<Devices>> = Mutex::new(None);
static GUARANTEE: Mutex<Option<Limits>> = Mutex::new(None);
static LOG: Mutex<Option<String>> = Mutex::new(None);

fn changed(number: &AtomicU32) -> Option<u32> {
    Some(number.load(Ordering::Relaxed)).filter(|number| *number != UNCHANGED)
}

/// `GPUPOOL_MOVE_SHARE`, in thousandths.
#[inline]
pub fn move_share() -> u32 {
    changed(&MOVE_SHARE).unwrap_or_else(|| process::settings().move_share)
}

/// Changes that.
pub fn set_move_share(thousandths: u32) {
    MOVE_SHARE.store(thousandths, Ordering::Relaxed);
}

/// `GPUPOOL_PRIORITY`, 0 to 100.
pub fn priority() -> u32 {
    changed(&PRIORITY).unwrap_or_else(|| process::settings().priority)
}

/// Changes that.
pub fn set_priority(priority: u32) {
    PRIORITY.store(priority, Ordering::Relaxed);
}

/// `GPUPOOL_GUARANTEE`.
pub fn guarantee() -> Limits {
    GUARANTEE.lock().clone().unwrap_or_else(|| process::settings().guarantee.clone())
}

/// What this process is guaranteed of a GPU, in bytes.
pub fn guarantee_of(gpu: u32) -> u64 {
    let changed = GUARANTEE.lock().as_ref().map(|all| all.of(gpu));
    changed.unwrap_or_else(|| process::settings().guarantee.of(gpu)).unwrap_or(0)
}

/// Changes that.
pub fn set_guarantee(guarantee: Limits) {
    *GUARANTEE.lock() = Some(guarantee);
}

/// `GPUPOOL_LIMIT`.
pub fn limit() -> Limits {
    LIMIT.lock().clone().unwrap_or_else(|| process::settings().limit.clone())
}

/// The most that `GPUPOOL_LIMIT` lets the pool take of a GPU, in bytes.
pub fn limit_of(gpu: u32) -> Option<u64> {
    match &*LIMIT.lock() {
        Some(limit) => limit.of(gpu),
        None => process::settings().limit.of(gpu),
    }
}

/// Changes that. What follows from it is `backing/terms.rs`.
pub fn set_limit(limit: Limits) {
    *LIMIT.lock() = Some(limit);
}

/// `GPUPOOL_DEVICES`, as far as it says which GPUs lend.
pub fn devices() -> Devices {
    DEVICES.lock().clone().unwrap_or_else(|| process::settings().devices.clone())
}

/// Changes that. What follows from it is `backing/terms.rs`.
pub fn set_devices(devices: Devices) {
    *DEVICES.lock() = Some(devices);
}

/// `GPUPOOL_LOG`.
pub fn log() -> Option<String> {
    LOG.lock().clone().or_else(|| process::settings().log.clone()).filter(|directives| !directives.is_empty())
}

/// Changes that; the log itself was changed before.
pub fn set_log(directives: String) {
    *LOG.lock() = Some(directives);
}
