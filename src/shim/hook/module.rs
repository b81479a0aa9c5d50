//! Bodies: modules and libraries. See [`crate::module`].

use super::Real;
use crate::driver::CuResult;
use crate::module::{self, image};
use std::ffi::{CStr, c_char, c_void};

/// # Safety
/// `image` is the program's argument of that call.
pub unsafe fn load_data(real: &mut Real, data: *const c_void) -> CuResult {
    // SAFETY: looked at only after the driver accepted the image.
    module::load(real, None, || unsafe { image::at(data) })
}

/// # Safety
/// `path` is the program's argument of that call.
pub unsafe fn load_file(real: &mut Real, path: *const c_char) -> CuResult {
    if path.is_null() {
        return real.call();
    }
    // SAFETY: not NULL, and the driver demands a NUL-terminated path.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
    let file = path.clone();
    module::load(real, Some(path), move || match std::fs::read(&file) {
        Ok(bytes) => image::of_bytes(&bytes),
        Err(_) => image::Image { kind: "file", ..Default::default() },
    })
}

/// # Safety
/// `size` is the program's output argument of that call.
pub unsafe fn link_complete(real: &mut Real, size: *mut usize) -> CuResult {
    module::load(real, None, || {
        // SAFETY: NULL or written by the driver, which answered success.
        let bytes = unsafe { size.as_ref() }.map(|bytes| *bytes as u64);
        image::Image { kind: "link", bytes, ..Default::default() }
    })
}

/// # Safety
/// Called by a row's trampoline.
pub unsafe fn unload(real: &mut Real) -> CuResult {
    let result = real.call();
    if result.is_ok() {
        module::unloaded(real.row.name());
    }
    result
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn set_limit(real: &mut Real, limit: i32, value: usize) -> CuResult {
    let result = super::retry::call(real);
    module::limit_set(limit, value as u64, result);
    result
}
