//! Signals that are blocked, and taken off their queue.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// What is not passed on: signals that cannot be blocked, or that stop whoever uses the terminal from the background, which we
/// do not. Those of faults are: the kernel ends a process that raises one while it is blocked, so a fault of our own is no less
/// deadly, and what others send is the program's. (Rust's handler for stack overflows would swallow the first of theirs.)
pub const LEFT_ALONE: [libc::c_int; 4] = [libc::SIGKILL, libc::SIGSTOP, libc::SIGTTIN, libc::SIGTTOU];

/// What can be read when one of `signals` waits.
pub fn arrivals(signals: &libc::sigset_t) -> io::Result<OwnedFd> {
    // SAFETY: `signals` is an initialised set; -1 makes a new descriptor.
    match unsafe { libc::signalfd(-1, signals, libc::SFD_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: signalfd succeeded, so this is a new descriptor that nobody else owns.
        descriptor => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
    }
}

/// Waits until there is something to read.
pub fn wait(arrivals: &OwnedFd) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: arrivals.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one valid entry and outlives the call.
    match unsafe { libc::poll(&raw mut poll, 1, -1) } {
        -1 => Err(io::Error::last_os_error()).or_else(|error| match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            _ => Err(error),
        }),
        _ => Ok(()),
    }
}

/// Whether `signal` is blocked and waits.
pub fn is_pending(signal: libc::c_int) -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills the set, so that it can be read whatever sigpending does.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigpending(set.as_mut_ptr());
        libc::sigismember(set.as_ptr(), signal) == 1
    }
}

/// The next of `signals` that waits already, taken off the queue.
pub fn take(signals: &libc::sigset_t) -> Option<libc::siginfo_t> {
    let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `signals` is an initialised set, `info` is writable and `now` outlives the call.
    let signal = unsafe { libc::sigtimedwait(signals, info.as_mut_ptr(), &raw const now) };
    // SAFETY: sigtimedwait returned a signal, so it filled `info`.
    (signal > 0).then(|| unsafe { info.assume_init() })
}
