//! Bodies: modules and libraries. See [`crate::watch::module`].

use super::{Real, retry};
use crate::watch::arguments;
use crate::watch::module::{self, image};
use gpupool_cuda::{CuResult, Module};
use std::ffi::{CStr, c_char, c_void};

/// The handle that a loading call wrote, where there is one.
///
/// # Safety
/// `output` is NULL or the output argument of a call that succeeded.
unsafe fn handle<T>(output: *const *mut T) -> Option<Module> {
    // SAFETY: as above.
    unsafe { output.as_ref() }.and_then(|handle| Module::from_raw(handle.cast()))
}

/// # Safety
/// `output` and `data` are the program's arguments of that call.
pub unsafe fn load_data<T>(real: &mut Real, output: *const *mut T, data: *const c_void) -> CuResult {
    // SAFETY: looked at only after the driver accepted the image and wrote the output.
    module::load(real.api, || retry::call(real), None, || unsafe { (handle(output), image::at(data)) })
}

/// # Safety
/// `output` and `path` are the program's arguments of that call.
pub unsafe fn load_file<T>(real: &mut Real, output: *const *mut T, path: *const c_char) -> CuResult {
    if path.is_null() {
        return real.call();
    }
    // SAFETY: not NULL, and the driver demands a NUL-terminated path.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
    let file = path.clone();
    module::load(
        real.api,
        || retry::call(real),
        Some(path),
        move || {
            let unread = image::Image { kind: "file", ..Default::default() };
            // SAFETY: called only after the driver wrote the output.
            (unsafe { handle(output) }, std::fs::read(&file).map_or(unread, |bytes| image::of_bytes(&bytes)))
        },
    )
}

/// # Safety
/// `size` is the program's output argument of that call.
pub unsafe fn link_complete(real: &mut Real, size: *mut usize) -> CuResult {
    module::load(
        real.api,
        || retry::call(real),
        None,
        || {
            // SAFETY: NULL or written by the driver, which answered success.
            let bytes = unsafe { size.as_ref() }.map(|bytes| *bytes as u64);
            (None, image::Image { kind: "link", bytes, ..Default::default() })
        },
    )
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn unload<T>(real: &mut Real, handle: *mut T) -> CuResult {
    arguments::forget_functions();
    module::unload(Module::from_raw(handle.cast()), real.api.name(), || real.call())
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn set_limit(real: &mut Real, limit: i32, value: usize) -> CuResult {
    let result = retry::call(real);
    module::limit_set(limit, value as u64, result);
    result
}
