//! Threads that are cancelled (`pthread_cancel`) while they are inside a hook.
//!
//! Cancelling unwinds the thread's stack by force, from a function that waits or does input or output (and, in a thread of
//! asynchronous type, from anywhere). Such an unwinding must not meet the boundary that keeps panics in: Rust ends the
//! process then. So a thread is not cancelled while it is inside a hook, but right behind it; bare, the driver's own code
//! would have to be cancelled at a place that it is prepared for.
//!
//! Forbidding and allowing it again takes two atomic operations, as long as a whole free from a thread's cache. Nearly no
//! program cancels threads, so hooks that are often called do it only once somebody did or prepared to:
//! [`is_known`], which [`cancel`] and [`set_cancel_type`] set; the library exports both under the C library's names. The first cancellation of a process may come when the thread is
//! inside such a hook already; hence the [`shelter`]s around all that writes, opens or reads a file on their way.

use crate::dlsym;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

const ENABLE: c_int = 0;
const DISABLE: c_int = 1;
const DEFERRED: c_int = 0;
const ASYNCHRONOUS: c_int = 1;

unsafe extern "C-unwind" {
    // These are not in `libc`'s list for Linux. They unwind: a thread may end in them.
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    fn pthread_testcancel();
}

/// A map that may be made in a hook. The standard library's own asks the system for random numbers when a thread makes its first one (`getrandom`), in which
/// a thread is cancelled. Its keys are nobody's to choose, so they need not be scattered at random.
pub type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;

/// Somebody cancelled a thread, or made one that can be cancelled anywhere.
static KNOWN: AtomicBool = AtomicBool::new(false);

/// Whether threads are cancelled in this process.
#[inline]
pub fn is_known() -> bool {
    KNOWN.load(Ordering::Relaxed)
}

/// This thread is not cancelled until dropped.
pub struct Shelter {
    before: c_int,
}

/// See [`Shelter`]. Cheap inside another one.
pub fn shelter() -> Shelter {
    let mut before = ENABLE;
    // SAFETY: the output is a local. Forbidding never unwinds.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    Shelter { before }
}

impl Drop for Shelter {
    fn drop(&mut self) {
        if self.before == DISABLE {
            return;
        }
        let mut kind = DEFERRED;
        // SAFETY: the outputs are locals or NULL, which is legal. Where one of these unwinds, this is the outermost shelter
        // of a hook's way out: what is left on the stack are frames of ours that own nothing, and the program's.
        unsafe {
            // A thread of asynchronous type is ended by testcancel, which says to whoever joins it that it was cancelled.
            // Some versions of glibc forget that where allowing it again ends the thread.
            set_type(DEFERRED, &raw mut kind);
            pthread_setcancelstate(ENABLE, std::ptr::null_mut());
            if kind == ASYNCHRONOUS {
                pthread_testcancel();
                set_type(ASYNCHRONOUS, std::ptr::null_mut());
            }
        }
    }
}

/// What the exported `pthread_cancel(3)` does.
///
/// # Safety
/// As the C library's.
pub unsafe fn cancel(thread: libc::pthread_t) -> c_int {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    KNOWN.store(true, Ordering::Relaxed);
    let function = dlsym::next(&NEXT, c"pthread_cancel");
    if function.is_null() {
        return libc::ESRCH;
    }
    // SAFETY: the C library's export of this name has this signature; a thread that cancels itself unwinds.
    let function: unsafe extern "C-unwind" fn(libc::pthread_t) -> c_int = unsafe { std::mem::transmute(function) };
    // SAFETY: the caller's own argument.
    unsafe { function(thread) }
}

/// What the exported `pthread_setcanceltype(3)` does.
///
/// # Safety
/// As the C library's.
pub unsafe fn set_cancel_type(kind: c_int, before: *mut c_int) -> c_int {
    if kind == ASYNCHRONOUS {
        KNOWN.store(true, Ordering::Relaxed);
    }
    // SAFETY: the caller's own arguments.
    unsafe { set_type(kind, before) }
}

/// The C library's `pthread_setcanceltype`.
///
/// # Safety
/// As the C library's.
unsafe fn set_type(kind: c_int, before: *mut c_int) -> c_int {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let function = dlsym::next(&NEXT, c"pthread_setcanceltype");
    if function.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the C library's export of this name has this signature; with a request waiting, it unwinds.
    let function: unsafe extern "C-unwind" fn(c_int, *mut c_int) -> c_int = unsafe { std::mem::transmute(function) };
    // SAFETY: as for this function.
    unsafe { function(kind, before) }
}
