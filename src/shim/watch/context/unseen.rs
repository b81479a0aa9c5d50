//! Contexts where the library was opened by the program and not preloaded: none is seen being made or destroyed, and a
//! handle that was good at the last call may be nobody's now. Only two kinds can be used without that danger: the context
//! that is current on this thread, and primary contexts, which the driver can be asked for.

use super::{By, Gpus, current, end, retained, wait_kept};
use crate::process;
use gpupool_cuda::{self as cuda, CuResult, Device, Driver};

/// The driver may have given the handle of a destroyed context to another one, on another GPU even: this thread looks
/// again. Where the driver does not number contexts, only the GPU tells them apart.
pub fn refresh(driver: &Driver) {
    end::forget_current();
    if let Some(known) = current(driver)
        && driver.current_device().is_ok_and(|device| device != known.device)
    {
        end::unseen(known, "seen gone");
    }
}

/// The primary context of a device where it exists, held so that it stays until dropped.
pub struct Primary<'a> {
    driver: &'a Driver,
    device: Device,
    pub handle: cuda::Context,
}

impl<'a> Primary<'a> {
    /// `None` where the device has none. (One that is destroyed between the question and the retain is made again: the
    /// driver cannot do both in one step.)
    pub fn hold(driver: &'a Driver, device: Device) -> Option<Self> {
        if !driver.primary_is_active(device) {
            return None;
        }
        let handle = driver.retain_primary(device).ok()?;
        if process::is_preloaded() {
            retained(device);
        }
        Some(Self { driver, device, handle })
    }
}

impl Drop for Primary<'_> {
    fn drop(&mut self) {
        let release = || self.driver.release_primary(self.device);
        // The program may have given up all of its own meanwhile; then this is the end.
        let _ = match process::is_preloaded() {
            true => end::of_primary(self.driver, self.device, By::Release, "cuDevicePrimaryCtxRelease", release),
            false => release(),
        };
    }
}

/// Waits by `wait` for all work on these GPUs in the current context and in every primary context. An error of the current
/// context is the program's to hear, and any other one, as NOT_READY, says that one of them was not waited for.
pub fn synchronize(driver: &Driver, gpus: Gpus, wait: impl Fn() -> CuResult) -> Result<(), CuResult> {
    let current = driver.current_context().filter(|_| driver.current_device().is_ok_and(|device| gpus.contain(device)));
    for device in driver.devices().filter(|device| gpus.contain(*device)) {
        if let Some(primary) = Primary::hold(driver, device).filter(|primary| Some(primary.handle) != current)
            && let Some(answer) = wait_kept(driver, primary.handle, &wait, || false)
            && answer != CuResult::CONTEXT_IS_DESTROYED
        {
            answer.ok()?;
        }
    }
    if current.is_some() { wait().ok() } else { Ok(()) }
}

/// Whether `holds` of the current context and of every primary context on these GPUs.
pub fn all(driver: &Driver, gpus: Gpus, holds: impl Fn(cuda::Context) -> bool) -> bool {
    let current = driver.current_context().filter(|_| driver.current_device().is_ok_and(|device| gpus.contain(device)));
    let mut primaries = driver.devices().filter(|device| gpus.contain(*device));
    let hold = |device| Primary::hold(driver, device).is_none_or(|primary| holds(primary.handle));
    primaries.all(hold) && current.is_none_or(&holds)
}
