//! Threads that no signal of the program is delivered to.

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// What the threads are called, for debuggers and `top -H`.
const NAME: &str = "gpupool-store";

/// All signals are blocked in this thread until it is dropped. A thread that is started meanwhile has them blocked for good.
struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: sigfillset fills `all` and pthread_sigmask fills `before`; both pointers are valid for the call, and neither
        // function fails for these arguments.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self { before: before.assume_init() }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set was filled by pthread_sigmask, and a null pointer asks for nothing back.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// Starts a thread.
///
/// # Errors
/// The system has none to spare.
pub fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    let _blocked = Blocked::new();
    Builder::new().name(NAME.to_owned()).spawn(body)
}

/// Starts a thread that ends within a scope.
///
/// # Errors
/// The system has none to spare.
pub fn spawn_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let _blocked = Blocked::new();
    Builder::new().name(NAME.to_owned()).spawn_scoped(scope, body)
}

/// Does something that a signal may be raised for, in a thread that it is lost with: a write where files have a limit (SIGXFSZ) ends a
/// program that did not think of that. `None`: there is no thread, or it panicked.
pub fn aside<T: Send>(body: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| spawn_in(scope, body).ok()?.join().ok())
}
