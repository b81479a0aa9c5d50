//! The life of a process: where the library starts, what happens on a fork, and how it ends.

mod begin;
mod ending;
mod exec;
mod exit;
pub mod fork;
mod leave;
mod observers;
mod start;

pub use start::takes_part;

use crate::agent;
use crate::log::{self, verdict};
use crate::process;
use std::ffi::{c_int, c_void};

unsafe extern "C" {
    /// What `at_quick_exit` calls; that one is no function of the shared C library.
    fn __cxa_at_quick_exit(function: extern "C" fn(*mut c_void), library: *mut c_void) -> c_int;
}

/// See [`crate::register`]. The lists have room for this without allocating in any glibc since 2.36, and a process that
/// never touches CUDA runs only a few comparisons in each handler.
pub fn register() {
    log::remember_stderr();
    // The loader drops a preload there, but not a library that it was told of by the system or that the program was linked with.
    if !process::has_rights_of_its_file() {
        log::remember_folder();
        verdict::remember_folder();
    }
    leave::find_next();
    begin::find_next();
    exec::find_next();
    agent::watch_main_thread();
    // SAFETY: the handlers are functions of this library, which is never unloaded (build.rs); NULL belongs to no library that
    // could be.
    unsafe {
        libc::pthread_atfork(Some(fork::before), Some(fork::in_parent), Some(fork::in_child));
        libc::atexit(exit::orderly);
        __cxa_at_quick_exit(exit::quick, std::ptr::null_mut());
    }
}
