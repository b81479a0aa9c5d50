//! What this process was started with and Rust's runtime changes before `main`, so that a program can be given it unchanged.
//!
//! The runtime ignores SIGPIPE and opens `/dev/null` for standard descriptors that are closed; `Command` then sets SIGPIPE
//! to its default in the child. A program under `nohup`-like wrappers, or of a service without stdin, must not notice.
//!
//! SIGXFSZ, which the runtime leaves alone, is ignored here in the same way: a write to a file that may be no longer (`ulimit -f`) would end the command without
//! a word, in the middle of what it does, and is an error that it says instead.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Signals of writes that fail, and whether they were ignored.
static WRITES: [(libc::c_int, AtomicBool); 2] =
    [(libc::SIGPIPE, AtomicBool::new(false)), (libc::SIGXFSZ, AtomicBool::new(false))];
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Runs before the runtime does: constructors come before `main`, and the runtime is part of that.
#[ctor::ctor(unsafe)]
fn note() {
    for (signal, was_ignored) in &WRITES {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: sigaction with a NULL new action only fills `action`, and fills it whenever it returns 0.
        let ignored = unsafe {
            libc::sigaction(*signal, std::ptr::null(), action.as_mut_ptr()) == 0
                && action.assume_init().sa_sigaction == libc::SIG_IGN
        };
        was_ignored.store(ignored, Ordering::Relaxed);
    }
    go_on();
    for (descriptor, closed) in (0..).zip(&CLOSED) {
        // SAFETY: F_GETFD takes a number, open or not, and touches no memory.
        closed.store(unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0, Ordering::Relaxed);
    }
}

/// Whether this process was started without a standard output. The runtime has put `/dev/null` in its place, where everything
/// that is printed would be lost and seem to be printed.
pub fn has_no_stdout() -> bool {
    CLOSED[1].load(Ordering::Relaxed)
}

/// Lets `command` start its program with what this process was started with. Signals that are ignored otherwise, and the
/// mask, are inherited without help.
pub fn hand_on(command: &mut Command) {
    // SAFETY: `restore` loads atomics and calls signal and close, which are async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            restore();
            Ok(())
        })
    };
}

fn restore() {
    for (signal, was_ignored) in &WRITES {
        let before = if was_ignored.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: both are no functions that could run.
        unsafe { libc::signal(*signal, before) };
    }
    for (descriptor, closed) in (0..).zip(&CLOSED) {
        if closed.load(Ordering::Relaxed) {
            // SAFETY: the number is the runtime's /dev/null, which nobody in this program was given as an owned descriptor.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// Takes back what concerns this process, for a program that could not be started: the complaint may go to a pipe that
/// nobody reads, or to a file that may be no longer.
pub fn go_on() {
    for (signal, _) in &WRITES {
        // SAFETY: SIG_IGN is no function that could run.
        unsafe { libc::signal(*signal, libc::SIG_IGN) };
    }
}
