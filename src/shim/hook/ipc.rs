//! Bodies: sharing memory with other processes.

use super::Real;
use crate::driver::CuResult;
use crate::memory;
use cudarc::driver::sys::CUdeviceptr;
use gpupool_config::format_size;

/// Pooled memory has no legacy IPC handle (the driver refuses one for any VMM memory), and the answer is the driver's.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn export(real: &mut Real, dptr: CUdeviceptr) -> CuResult {
    let Some(block) = memory::block_at(dptr) else { return real.call() };
    tracing::warn!(
        target: "gpupool::memory", event = "ipc.refused", address = block.address, bytes = block.bytes,
        "cuIpcGetMemHandle on pooled memory of {}: not supported, the program gets INVALID_VALUE; memory below \
         GPUPOOL_MIN_SIZE is not pooled and can be shared, or set GPUPOOL_MODE=spill to keep what fits with the driver",
        format_size(block.bytes)
    );
    CuResult::INVALID_VALUE
}
