//! The beginning of the process's end, heard before anybody else hears of it: `exit` and `quick_exit`, and `main` that returns.
//!
//! A program that is suspended goes on at its end, since what its handlers and destructors call of the driver would wait for ever. A handler of
//! our own is not enough for that. Handlers run in the reverse order of their registration, so one that was registered while the program was
//! suspended runs before ours, and so do the destructors of the thread's variables; and one of them may wait for another thread that waits.
//! So the calls that end a process are exported, and as the C library calls its own `exit` where `main` returns, `main` is called by us.
//!
//! What ends a process without these (`err(3)`, `error(3)`) is heard by a handler, which is registered anew each time that the program is suspended.
//!
//! Rejected: to export `__cxa_atexit` and `on_exit` and have our handler follow each that is registered (the destructors of a thread's variables run
//! before all of them); a destructor of a thread's variable (the thread that calls `exit` may be one that we never saw, and others of its destructors
//! run before); and to look for `exit` among the callers of a thread that waits (a handler that waits for such a thread is no caller of its, and
//! code that was made at run time ends the list).

use crate::gate;
use gpupool_interpose::dlsym;
use std::ffi::{c_char, c_int, c_void};
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicPtr, Ordering};

static EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static QUICK_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static START: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The program's own.
static MAIN: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Main = unsafe extern "C-unwind" fn(c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;
type Start = unsafe extern "C-unwind" fn(
    Main,
    c_int,
    *mut *mut c_char,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

/// Before `main`: a process may end where `dlsym` would wait for another thread.
pub fn find_next() {
    for (next, name) in [(&EXIT, c"exit"), (&QUICK_EXIT, c"quick_exit")] {
        dlsym::next(next, name);
    }
}

fn begins() {
    // A panic must not cross into the program.
    let _ = catch_unwind(gate::process_ends);
}

extern "C" fn before_exit() -> *mut c_void {
    begins();
    dlsym::next(&EXIT, c"exit")
}

extern "C" fn before_quick_exit() -> *mut c_void {
    begins();
    dlsym::next(&QUICK_EXIT, c"quick_exit")
}

/// Exports a function that takes a status and does not return: `$before` says what the C library's is, which goes on with the caller's frame. What a
/// handler unwinds through is then no frame of ours.
macro_rules! export_end {
    ($(#[$documented:meta])* $name:ident, $before:path) => {
        $(#[$documented])*
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
        pub extern "C" fn $name(_status: c_int) -> ! {
            std::arch::naked_asm!(
                "endbr64",
                "push rdi",
                "call {before}",
                "pop rdi",
                "test rax, rax",
                "jz 2f",
                "jmp rax",
                "2:",
                "jmp {leave}",
                before = sym $before,
                leave = sym super::leave::_exit,
            )
        }
    };
}

export_end!(
    /// `exit(3)`.
    exit, before_exit
);
export_end!(
    /// `quick_exit(3)`.
    quick_exit, before_quick_exit
);

/// What the C library takes for the program's `main`. Without a value that is dropped, since a thread that ends or is cancelled in `main` unwinds
/// through it.
unsafe extern "C-unwind" fn main(count: c_int, words: *mut *mut c_char, variables: *mut *mut c_char) -> c_int {
    // SAFETY: `__libc_start_main` has stored the program's, which has this type, before the C library calls this.
    let main = unsafe { std::mem::transmute::<*mut c_void, Main>(MAIN.load(Ordering::Acquire)) };
    // SAFETY: with the arguments that the C library has for it.
    let status = unsafe { main(count, words, variables) };
    begins();
    status
}

/// What a program's first instructions call, with its `main`.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
pub unsafe extern "C-unwind" fn __libc_start_main(
    programs: Main,
    count: c_int,
    words: *mut *mut c_char,
    init: *mut c_void,
    fini: *mut c_void,
    loader: *mut c_void,
    stack: *mut c_void,
) -> c_int {
    let next = dlsym::next(&START, c"__libc_start_main");
    if next.is_null() {
        super::leave::_exit(libc::EXIT_FAILURE);
    }
    MAIN.store(programs as *mut c_void, Ordering::Release);
    // SAFETY: the C library's export of this name has this signature.
    let next = unsafe { std::mem::transmute::<*mut c_void, Start>(next) };
    // SAFETY: the caller's own arguments, but for `main`, for which ours stands.
    unsafe { next(main, count, words, init, fini, loader, stack) }
}
