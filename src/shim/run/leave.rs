//! Leaving without a goodbye: `_exit` and `_Exit` run no handler, so they are exported, for `gpupool run --fail-on`.
//!
//! Shells and Python's forked workers leave by them, and without a word of theirs it would not be known whether they had
//! anything to say. Both are called in handlers of signals and in children of `vfork`: what runs here takes no lock,
//! allocates nothing and changes nothing, and without `--fail-on` is one comparison.

use gpupool_interpose::dlsym;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The next library's `_exit`: the C library's, or that of a sanitizer.
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Before `main`: `dlsym` is nothing for the handler of a signal.
pub fn find_next() {
    dlsym::next(&NEXT, c"_exit");
}

fn leave(status: c_int) -> ! {
    super::exit::at_once();
    let next = NEXT.load(Ordering::Acquire);
    if !next.is_null() {
        // SAFETY: the C library's export of this name has this signature.
        let next: unsafe extern "C" fn(c_int) -> c_int = unsafe { std::mem::transmute(next) };
        // SAFETY: it takes any status, and does not return.
        unsafe { next(status) };
    }
    loop {
        // SAFETY: takes an integer and does not return.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// `_exit(2)`.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
pub extern "C" fn _exit(status: c_int) -> ! {
    leave(status)
}

/// `_Exit(3)`, which is the same.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
#[allow(non_snake_case, reason = "the C library's name")]
pub extern "C" fn _Exit(status: c_int) -> ! {
    leave(status)
}
