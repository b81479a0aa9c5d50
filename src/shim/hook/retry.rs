//! Bodies: calls that take device memory of their own. Freed runs that the pool keeps mapped are memory which the bare
//! driver would have had; when it runs out, they go back and the call is made again.

use super::{Real, graph};
use crate::guard;
use crate::process;
use crate::serve::{memory, pinned};
use crate::watch::module::alone::Taking;
use cudarc::driver::sys::{CUgraph, CUgraphExec};
use gpupool_cuda::{CuResult, Device};
use gpupool_interpose::Api;

/// # Safety
/// Called by a row's trampoline.
pub unsafe fn after_trim(real: &mut Real) -> CuResult {
    call(real)
}

/// A graph is made ready to be launched.
///
/// # Safety
/// `exec` is the output argument of that call, and `graph` what it is made of.
pub unsafe fn instantiated(real: &mut Real, exec: *mut CUgraphExec, graph: CUgraph) -> CuResult {
    let result = call(real);
    if result.is_ok() {
        // SAFETY: the driver has answered success, so it has written one.
        unsafe { graph::noted(exec.read(), graph) };
    }
    result
}

/// The real call, once more after a trim if the driver had no memory left.
#[inline]
pub fn call(real: &mut Real) -> CuResult {
    after(real, memory::give_back)
}

/// How often others are asked for as much as a GPU's reserve, which on a small one is less than a context takes: each time they gave something.
const ASKS: u32 = 8;

/// The real call, which takes memory of this GPU for a context, whichever is current; once more after a trim there if the driver had none left, and after
/// other processes gave way, as for an allocation.
pub fn call_on(real: &mut Real, device: Device) -> CuResult {
    let gives_back = |api| memory::give_back_at(Some(device.place()), api);
    let mut result = after(real, gives_back);
    let mut asked = 0;
    while result == CuResult::OUT_OF_MEMORY && asked < ASKS && memory::ask_for_context(device) {
        asked += 1;
        result = after(real, gives_back);
    }
    result
}

/// Makes a call that takes host memory, and once more after OUT_OF_MEMORY where both pools had any of that to give back.
pub fn call_for_host(real: &mut Real) -> CuResult {
    after(real, |api| pinned::give_back(api) | memory::give_back_host(api))
}

/// The real call, once more where the driver had no memory left and something was given back.
#[inline]
fn after(real: &mut Real, gives_back: impl FnOnce(Api) -> bool) -> CuResult {
    let _taking = Taking::begin();
    let result = real.call();
    if result == CuResult::OUT_OF_MEMORY && gives_back(real.api) { real.call() } else { result }
}

/// The driver has just answered OUT_OF_MEMORY: the call once more after a trim, where that returned anything.
#[cold]
pub fn again(real: &mut Real) -> CuResult {
    if memory::give_back(real.api) { real.call() } else { CuResult::OUT_OF_MEMORY }
}

/// For rows without a boundary, after OUT_OF_MEMORY: whether the call is worth making again.
#[cold]
pub fn made_room(api: Api) -> bool {
    let Some(_inside) = guard::enter_sheltered() else { return false };
    std::panic::catch_unwind(|| memory::give_back(api)).unwrap_or_else(|_| {
        process::broken(api);
        false
    })
}
