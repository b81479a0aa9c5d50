//! Does this program keep freed memory in a cache of its own?

use crate::process;
use gpupool_config::Switch;
use std::ffi::{CStr, c_void};

/// Parts of file names of libraries whose allocators cache device memory, and on OUT_OF_MEMORY return the cache and try
/// again: PyTorch, CuPy, RMM. (XLA takes what is left in one piece and does not give back.)
const CACHING: [&str; 4] = ["libc10_cuda", "cupy/cuda/memory.", "cupy/cuda/memory/", "librmm"];

/// Whether this program returns a cache and tries again when it hears of OUT_OF_MEMORY: whom [`gpupool_pool::SoftRefusal`] is
/// for.
pub fn returns_its_cache() -> bool {
    match process::settings().soft_oom {
        Switch::On => true,
        Switch::Off => false,
        Switch::Auto => caches(),
    }
}

/// Whether a library of that kind is loaded now.
fn caches() -> bool {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void) -> i32 {
        // SAFETY: dl_iterate_phdr passes a valid description; its name is a NUL-terminated string or NULL.
        let name = unsafe { (*info).dlpi_name };
        if name.is_null() {
            return 0;
        }
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        if CACHING.iter().any(|part| name.contains(part)) {
            // SAFETY: `found` is the bool below.
            unsafe { *found.cast::<bool>() = true };
            return 1;
        }
        0
    }
    let mut found = false;
    // SAFETY: `visit` has the callback's signature and `found` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found
}
