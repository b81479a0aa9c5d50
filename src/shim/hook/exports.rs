//! What the library exports besides the driver's functions, because of how programs get at these and end their threads. The
//! environment's functions are in `environment.rs`.

use super::trampoline::SLOTS;
use crate::watch::submitted::{self, Unseen};
use gpupool_interpose::{cancel, dlsym::Verdict, export_dlsym};
use std::ffi::{c_char, c_int, c_void};

/// See [`gpupool_interpose::Slots::pick`].
unsafe extern "C" fn pick(handle: *mut c_void, name: *const c_char, caller: *const c_void) -> Verdict {
    // SAFETY: the name is the program's argument to `dlsym`, which demands a NUL-terminated string.
    unsafe { SLOTS.pick(handle, name, caller) }
}

export_dlsym!(pick);

/// `pthread_cancel(3)`.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
pub unsafe extern "C-unwind" fn pthread_cancel(thread: libc::pthread_t) -> c_int {
    submitted::goes_unseen(Unseen::Cancelled, b"");
    // SAFETY: the caller's own argument.
    unsafe { cancel::cancel(thread) }
}

/// `pthread_setcanceltype(3)`.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
pub unsafe extern "C-unwind" fn pthread_setcanceltype(kind: c_int, before: *mut c_int) -> c_int {
    // SAFETY: the caller's own arguments.
    unsafe { cancel::set_cancel_type(kind, before) }
}
