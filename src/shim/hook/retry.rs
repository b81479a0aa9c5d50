//! Bodies: calls that take device memory of their own. Freed runs that the pool keeps mapped are memory which the bare
//! driver would have had; when it runs out, they go back and the call is made again.

use super::Real;
use crate::driver::CuResult;
use crate::memory;

/// # Safety
/// Called by a row's trampoline.
pub unsafe fn after_trim(real: &mut Real) -> CuResult {
    call(real)
}

/// The real call, once more after a trim if the driver had no memory left.
pub fn call(real: &mut Real) -> CuResult {
    let result = real.call();
    if result == CuResult::OUT_OF_MEMORY && memory::give_back(real.row) {
        return real.call();
    }
    result
}
