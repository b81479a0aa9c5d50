//! The end of a process whose main thread left by `pthread_exit`: the C library ends it with its last thread, and the agent's
//! thread, which never ends, would be that thread for ever. With all signals blocked, too, so that only SIGKILL would end it.
//!
//! So the agent takes over what the C library does there: as soon as it is alone, it calls `exit(0)`, and the program's handlers
//! run as they would on any last thread. Nobody tells when the others end, so it looks; but only once the main thread has left,
//! which that thread says itself, by the destructor of a key of its own. In every other process nothing is looked at.
//!
//! Rejected: a thread that the C library does not count, made by `clone` (it has none of the C library's state, which all that it
//! calls relies on); and to leave signals unblocked whose disposition is the default one (the program may install a handler at any
//! moment, which would then run on our thread).

use super::PERIOD;
use crate::bell;
use std::ffi::c_void;
use std::io::ErrorKind;
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long it waits at first between two looks, which doubles up to [`PERIOD`]: what lives long may end a little later.
const SHORTEST: Duration = Duration::from_millis(10);

static MAIN_LEFT: AtomicBool = AtomicBool::new(false);

/// Has the main thread say when it leaves. For a process whose main thread loads the library, as a preload does; in any other,
/// which opens it on a second thread, nobody says so. A key's destructor is not called by `exit`.
pub fn watch_main_thread() {
    // SAFETY: the call has no arguments.
    if gpupool_interpose::thread_number() != unsafe { libc::getpid() } {
        return;
    }
    let mut key = 0;
    // SAFETY: the key is a local, and the destructor a function of this library, which is never unloaded (build.rs). Its value is
    // not NULL, so that the destructor is called, and is not used.
    unsafe {
        if libc::pthread_key_create(&raw mut key, Some(main_leaves)) == 0 {
            libc::pthread_setspecific(key, (&raw const MAIN_LEFT).cast());
        }
    }
}

unsafe extern "C" fn main_leaves(_: *mut c_void) {
    MAIN_LEFT.store(true, Ordering::Release);
    bell::wake();
}

/// Whether the main thread has left, or is just about to.
pub fn has_main_left() -> bool {
    MAIN_LEFT.load(Ordering::Acquire)
}

/// How long to wait before the next look, behind a wait of `before`.
pub fn pause_after(before: Duration) -> Duration {
    (before * 2).clamp(SHORTEST, PERIOD)
}

/// Whether there is no thread but this one and what is left of the main thread. Asked without a descriptor, which the program
/// might close.
pub fn is_alone() -> bool {
    /// Links of an empty folder; that of the threads has one more for each.
    const EMPTY: u64 = 2;
    let threads = std::fs::metadata("/proc/self/task").map(|folder| folder.st_nlink().saturating_sub(EMPTY));
    threads.is_ok_and(|threads| threads == 2) && is_main_over()
}

/// A thread that has ended and is still there, as the main thread is until the last one ends, has no program any more.
fn is_main_over() -> bool {
    let program = std::fs::read_link(format!("/proc/self/task/{}/exe", std::process::id()));
    program.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// What the C library does when the last thread ends, with the signals as the program had them.
pub fn end(signals: &libc::sigset_t) -> ! {
    // SAFETY: the set was this process's own. `exit` may be called on any thread, and does not return.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, signals, std::ptr::null_mut());
        libc::exit(0)
    }
}
