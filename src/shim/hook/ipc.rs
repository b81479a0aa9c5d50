//! Bodies: sharing memory with other processes.

use super::{Real, mapping};
use crate::address::{self, Known};
use crate::bypass::{Bypass, or_driver};
use crate::serve::{handles, ipc, memory};
use crate::watch::context;
use crate::{log, process};
use cudarc::driver::sys::{CUdeviceptr, CUipcMemHandle};
use gpupool_cuda::CuResult;
use std::ffi::c_uint;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the driver takes this value and no other.
const LAZY_PEER_ACCESS: c_uint = 1;

/// # Safety
/// `handle` is the program's output argument of that call.
pub unsafe fn export(real: &mut Real, handle: *mut CUipcMemHandle, dptr: CUdeviceptr) -> CuResult {
    let (Some(block), Some(driver)) = (memory::block_at(dptr), process::driver()) else {
        Bypass::NotOurs.note(real.api);
        let result = real.call();
        if !result.is_ok() && matches!(address::known(dptr), Known::Managed(_)) {
            log::warn_once(
                "ipc-managed",
                format_args!(
                    "cuIpcGetMemHandle: the driver shares no managed memory with other processes ({result}); set \
                     GPUPOOL_MODE=pool or spill for this program"
                ),
            );
        }
        return result;
    };
    let answer = match handle.is_null() {
        true => Err(Bypass::Malformed),
        false if !context::is_usable(driver) => Err(Bypass::NoContext),
        false => Ok(ipc::export(driver, &block)),
    };
    let answer = answer.map(|exported| {
        if let Ok(bytes) = exported {
            // SAFETY: not NULL; the program's 64 bytes, for which it promised room only.
            unsafe { handle.cast::<[u8; 64]>().write_unaligned(bytes) };
        }
        CuResult::of(exported)
    });
    or_driver(answer, real.api, || real.call())
}

/// # Safety
/// `dptr` is the program's output argument of that call.
pub unsafe fn open(real: &mut Real, dptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) -> CuResult {
    let answer = match process::driver() {
        None => Err(Bypass::NoDriver),
        Some(_) if dptr.is_null() || flags != LAZY_PEER_ACCESS => Err(Bypass::Malformed),
        Some(driver) if !context::is_usable(driver) => Err(Bypass::NoContext),
        Some(driver) => ipc::open(driver, &handle.reserved.map(|byte| byte as u8)),
    };
    let answer = answer.map(|opened| {
        if let Ok(address) = opened {
            // SAFETY: not NULL; the driver writes there after a success.
            unsafe { *dptr = address };
        }
        CuResult::of(opened)
    });
    or_driver(answer, real.api, || real.call())
}

/// A file descriptor of the memory itself, for network adapters (dma-buf).
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn descriptor(real: &mut Real, dptr: CUdeviceptr, bytes: usize) -> CuResult {
    mapping::giving_away(dptr, bytes as u64, handles::Anchor::Descriptor, || real.call())
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn close(real: &mut Real, dptr: CUdeviceptr) -> CuResult {
    let driver = process::driver().ok_or(Bypass::NoDriver);
    // Without a context the driver closes nothing, whoever made the memory.
    let bound = driver.and_then(|driver| driver.current_context().map(|_| driver).ok_or(Bypass::NoContext));
    let answer = bound.and_then(|driver| ipc::close(driver, dptr));
    or_driver(answer, real.api, || real.call())
}
