//! The pinned pool's [`Backend`] over the driver's own pinned allocations.

use super::{fault, host, numa, reclaim};
use crate::fence;
use crate::watch::context::Gpus;
use crate::watch::{capture, context};
use gpupool_cuda::{CuResult, Driver};
use gpupool_interpose::cancel;
use gpupool_pinned::{Backend, Fault, Key};
use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    /// What pinning took on this thread since somebody asked. `const` and without a destructor: legal at any time.
    static SPENT: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// How long this thread waited for the driver to pin since the last call of this.
pub fn take_spent() -> Duration {
    SPENT.replace(Duration::ZERO)
}

/// `cuMemHostAlloc` and `cuMemFreeHost` in the context that is current.
pub struct Host(pub &'static Driver);

impl Backend for Host {
    type Error = CuResult;

    fn pin(&self, key: Key, bytes: u64) -> Result<u64, Fault<CuResult>> {
        // In two of the three capture modes the driver refuses and ends the capture. Whether this is one of them only the
        // driver knows, so the program's own call is made instead of ours.
        if capture::under_way() {
            return Err(Fault::NotReady(CuResult::NOT_READY));
        }
        let _sheltered = cancel::shelter();
        if host::available().is_some_and(|available| available < bytes) {
            reclaim::reclaim("a host short of memory");
        }
        let _node = numa::prefer_near(self.0);
        let start = Instant::now();
        let pinned = self.0.pin(bytes, key.flags);
        SPENT.set(SPENT.get() + start.elapsed());
        pinned.map_err(fault)
    }

    fn unpin(&self, key: Key, address: u64, _: u64, may_wait: bool) -> Result<(), CuResult> {
        if !may_wait && fence::may_be_busy(key.context) {
            return Err(CuResult::NOT_READY);
        }
        // With its context the memory would go, and the driver could give the address to another thread before this call.
        let Some(_lives) = context::keep(key.context) else { return Err(CuResult::NOT_READY) };
        // The driver's free breaks no capture where the thread that makes it is relaxed (measured).
        let _relaxed = self.0.relax();
        // SAFETY: `pin` got this address from the driver, and the pool gives it back once, when no block is there.
        unsafe { self.0.unpin(address) }.ok()
    }

    fn quiesce(&self, context: u64) -> Result<(), Fault<CuResult>> {
        fence::quiesce_owner(self.0, context, Gpus::All).map(drop).map_err(fault)
    }
}
