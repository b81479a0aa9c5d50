//! Memory for programs and libraries that call gpupool by name: PyTorch's pluggable allocator, a function of CuPy's or
//! RMM's, C. They take the way of `cuMemAlloc` through its hook, so nothing is decided twice, whether the library was
//! preloaded or only opened.

use super::gpupool_error;
use crate::hook::trampoline::{cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRetain, cuMemAlloc_v2, cuMemFree_v2};
use crate::run::fork;
use crate::watch::capture;
use crate::watch::context::{unseen, within_own};
use crate::{log, process};
use gpupool_cuda::{self as cuda, Context, CuResult, Device, Driver, Stream};
use std::ffi::{c_int, c_void};

/// Allocates `bytes` on GPU `device` (-1: that of the current context; a lower number is none), from the pool or the driver as
/// `cuMemAlloc` would with the library preloaded. Without a context of that GPU its primary one is made, as the runtime's
/// `cudaMalloc` does.
/// `stream` is the one that uses the memory first (NULL: the legacy stream): it is asked whether it is being captured.
///
/// Works without `LD_PRELOAD`, in a program that opened the library. Returns 0, a `CUresult`, or a `gpupool_error`: 0 bytes are
/// `GPUPOOL_INVALID_ARGUMENT`, and a GPU that the program does not see is the driver's 101 (`CUDA_ERROR_INVALID_DEVICE`).
///
/// # Safety
/// `pointer` points to a pointer, or is NULL; `stream` is a stream of that GPU's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_malloc(
    pointer: *mut *mut c_void,
    bytes: usize,
    device: c_int,
    stream: *mut c_void,
) -> c_int {
    if pointer.is_null() || bytes == 0 {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    match allocate("gpupool_malloc", bytes, device, Stream::from_raw(stream.cast())) {
        Ok(address) => {
            // SAFETY: not NULL, and the caller's.
            unsafe { *pointer = address as *mut c_void };
            0
        }
        Err(error) => error,
    }
}

/// Frees what `gpupool_malloc` or `cuMemAlloc` gave, as `cuMemFree` would with the library preloaded: waits for the
/// device unless `GPUPOOL_FREE` is `lazy`, also while `stream` is being captured. NULL is nothing.
///
/// Without `LD_PRELOAD`, what is waited for are the current context and the primary contexts; other contexts of the
/// program's must be done with the memory. Returns 0, a `CUresult`, or a `gpupool_error`.
///
/// # Safety
/// Nothing uses the memory after this call; `stream` is a stream of that GPU's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_free(pointer: *mut c_void, device: c_int, stream: *mut c_void) -> c_int {
    if pointer.is_null() {
        return 0;
    }
    match release(pointer as u64, device, Stream::from_raw(stream.cast())) {
        Ok(()) => 0,
        Err(error) => error,
    }
}

/// `gpupool_malloc` in the shape of `torch.cuda.memory.CUDAPluggableAllocator`, which has no way to report a failure:
/// NULL, and an error in the log.
///
/// # Safety
/// As `gpupool_malloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_malloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let Some(bytes) = usize::try_from(size).ok().filter(|&bytes| bytes > 0) else { return std::ptr::null_mut() };
    match allocate("gpupool_torch_malloc", bytes, device, Stream::from_raw(stream.cast())) {
        Ok(address) => address as *mut c_void,
        Err(error) => {
            complain("gpupool_torch_malloc", &format!("{bytes} bytes on GPU {device}"), error);
            std::ptr::null_mut()
        }
    }
}

/// `gpupool_free` in the shape of `torch.cuda.memory.CUDAPluggableAllocator`.
///
/// # Safety
/// As `gpupool_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_free(ptr: *mut c_void, size: isize, device: c_int, stream: *mut c_void) {
    if ptr.is_null() {
        return;
    }
    match release(ptr as u64, device, Stream::from_raw(stream.cast())) {
        // At the end of a process the driver is gone before PyTorch's last tensors are.
        Ok(()) | Err(4) => {}
        Err(error) => complain("gpupool_torch_free", &format!("{size} bytes at {ptr:p} on GPU {device}"), error),
    }
}

fn allocate(call: &str, bytes: usize, device: c_int, stream: Stream) -> Result<u64, c_int> {
    if device < -1 {
        return Err(gpupool_error::GPUPOOL_INVALID_ARGUMENT.into());
    }
    // The hooks that are called below would name themselves.
    fork::used_by(call);
    let mut address = 0;
    on_device(device, true, |driver| {
        let _captured = capture::look(driver, stream);
        // SAFETY: the output is a local.
        let mut call = || unsafe { cuMemAlloc_v2(&raw mut address, bytes) };
        match call() {
            // GPUPOOL_SOFT_OOM refuses once where a cache can give memory back and try again. Whoever calls this one may
            // have no such cache (PyTorch's takes NULL for an address), so this is the second try.
            CuResult::OUT_OF_MEMORY => call(),
            answer => answer,
        }
    })?;
    Ok(address)
}

fn release(address: u64, device: c_int, stream: Stream) -> Result<(), c_int> {
    on_device(device, false, |driver| {
        let _captured = capture::look(driver, stream);
        // SAFETY: the caller's own address; one that is nobody's is an error of the driver's.
        unsafe { cuMemFree_v2(address) }
    })
}

/// Runs `act` with a context of this GPU current. `make`: where it has none, the primary one is made.
fn on_device(device: c_int, make: bool, act: impl FnOnce(&Driver) -> CuResult) -> Result<(), c_int> {
    let driver = cuda::get().map_err(|_| c_int::from(gpupool_error::GPUPOOL_NOT_ACTIVE))?;
    if !process::is_preloaded() && process::is_active() {
        unseen::refresh(driver);
    }
    let gpu = Device::from_raw(device);
    let is_current = driver.current_device().is_ok_and(|current| device < 0 || current == gpu);
    let exists = is_current || driver.primary_is_active(gpu);
    if is_current || device < 0 || (!exists && !make) {
        return act(driver).ok().map_err(|result| result.0);
    }
    let mut context = std::ptr::null_mut();
    // Through the hook: where this makes the context, the log tells by whom.
    // SAFETY: the output is a local.
    unsafe { cuDevicePrimaryCtxRetain(&raw mut context, device) }.ok().map_err(|result| result.0)?;
    let within = |context| within_own(driver, context, || act(driver));
    let answer = Context::from_raw(context).and_then(within).unwrap_or(CuResult::INVALID_CONTEXT);
    // The reference that made the context stays, as the runtime's does: the memory lives in it.
    if exists {
        // SAFETY: gives back the reference taken above.
        let _ = unsafe { cuDevicePrimaryCtxRelease_v2(device) };
    }
    answer.ok().map_err(|result| result.0)
}

/// Says on stderr, or in the log where there is one, what the caller cannot be told.
fn complain(function: &str, what: &str, error: c_int) {
    let why = match error {
        error if error == c_int::from(gpupool_error::GPUPOOL_NOT_ACTIVE) => {
            cuda::get().err().unwrap_or("gpupool has no part in this process").to_owned()
        }
        error => CuResult(error).to_string(),
    };
    if process::is_active() {
        tracing::error!(target: "gpupool::memory", about = function, "{function}: {what}: {why}");
    } else {
        log::write_stderr(&format!("gpupool: error: {function}: {what}: {why}\n"));
    }
}
