//! The pool's [`Mover`] over the driver: second mappings, the wait before a move, and the copies.
//!
//! Copies are made by the copy engine, on a stream that lives as long as they do, in the context that the block was allocated in: it
//! reaches both places, and whoever owns the block pays. A stream is never made beside work of ours, since the device has just been
//! waited for, and never is it the default one, which other work orders itself by.

use super::fault;
use super::vmm::Vmm;
use crate::watch::context::{self, Gpus};
use crate::{fence, process};
use gpupool_cuda::{CuResult, Device, Driver, Physical};
use gpupool_pool::{Backend, Fault, Mover, Place, Transfer};

/// How often a call is made that undoes something or waits for it, where the driver refused: there is no second way.
const TRIES: u32 = 5;

impl Mover for Vmm {
    fn alias(&self, handle: Physical, bytes: u64, place: Place) -> Result<u64, Fault<CuResult>> {
        let driver = self.driver();
        let address = driver.reserve(bytes).map_err(fault)?;
        let free = || {
            let _ = driver.free_reservation(address, bytes);
        };
        self.map(address, bytes, handle).inspect_err(|_| free())?;
        self.grant(address, bytes, place).inspect_err(|_| {
            // Nobody else knows of this mapping, which would keep the memory for good.
            if (0..TRIES).any(|_| driver.unmap(address, bytes).is_ok()) {
                free();
            }
        })?;
        Ok(address)
    }

    fn drain(&self) -> Result<(), Fault<CuResult>> {
        fence::wait(self.driver(), Gpus::All).map_err(fault)
    }

    fn copy(&self, owner: u64, gpu: u32, transfers: &[Transfer]) -> Result<(), Fault<CuResult>> {
        let driver = self.driver();
        let copied = within_owner(driver, owner, gpu, || copy_all(driver, transfers));
        copied.unwrap_or(Err(CuResult::CONTEXT_IS_DESTROYED)).map_err(Fault::Failed)
    }
}

/// Makes the context with this id, or another one on this GPU, current for the length of `act`. `None` where there is none.
fn within_owner<T>(driver: &Driver, owner: u64, gpu: u32, act: impl FnOnce() -> T) -> Option<T> {
    // Where hooks are not in effect, handles known from earlier calls may be nobody's by now. Any context of that GPU does.
    let owner = context::owner(owner).filter(|_| process::is_preloaded());
    if let Some(handle) = owner.and_then(|(owner, _)| owner.live_handle()) {
        return context::within(driver, handle, act);
    }
    let device = Device::of(gpu);
    if driver.current_device().is_ok_and(|current| current == device) {
        return Some(act());
    }
    context::within_one_on(driver, device, act)
}

/// Copies in the current context, and waits for that.
fn copy_all(driver: &Driver, transfers: &[Transfer]) -> Result<(), CuResult> {
    let _relaxed = driver.relax();
    let stream = driver.create_stream()?;
    let begin = |&Transfer { from, to, bytes }: &Transfer| {
        // SAFETY: the stream was made above and is destroyed below.
        unsafe { driver.copy_in(stream, to, from, bytes) }.ok()
    };
    let begun = transfers.iter().try_for_each(begin);
    // Waited for in any case: what was begun must be over before anybody unmaps it. Only in a context that is broken does no
    // wait succeed, and there nothing runs.
    // SAFETY: the stream was made above and is destroyed below.
    let wait = || unsafe { driver.synchronize_stream(stream) }.ok();
    let done = (0..TRIES).find_map(|_| wait().ok()).map_or_else(wait, Ok);
    // SAFETY: the stream was made above, and nobody else knows it.
    let _ = unsafe { driver.destroy_stream(stream) };
    begun.and(done)
}
