//! Threads that no signal of the program is delivered to, with stacks that the program's thread-local variables take nothing of.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// What the threads are called, for debuggers and `top -H`.
const NAME: &str = "gpupool-store";

/// Bytes of such a thread's stack.
const STACK: usize = 2 << 20;

/// What to ask for so that a thread has a stack of so many bytes: glibc takes the thread-local variables of the program and all its libraries out of it. Those of a program
/// with a buffer of 2 MiB in one left a thread 20 KiB, and it ended with the program at its first deeper call.
pub fn stack_of(bytes: usize) -> usize {
    bytes.saturating_add(thread_locals())
}

/// Bytes of the thread-local variables of everything that is loaded. Some of what was loaded late has them elsewhere: then the stack is larger.
fn thread_locals() -> usize {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, sum: *mut c_void) -> i32 {
        // SAFETY: dl_iterate_phdr passes a valid description, and the sum below, to one visit at a time.
        let (info, sum) = unsafe { (&*info, &mut *sum.cast::<usize>()) };
        for index in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: `dlpi_phdr` points to `dlpi_phnum` headers.
            let header = unsafe { &*info.dlpi_phdr.add(index) };
            if header.p_type == libc::PT_TLS {
                let bytes = header.p_memsz.saturating_add(header.p_align);
                *sum = sum.saturating_add(usize::try_from(bytes).unwrap_or(0));
            }
        }
        0
    }
    let mut sum = 0_usize;
    // SAFETY: `visit` has the callback's signature, and the sum outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut sum).cast()) };
    sum
}

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
    Builder::new().name(NAME.to_owned()).stack_size(stack_of(STACK)).spawn(body)
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
    Builder::new().name(NAME.to_owned()).stack_size(stack_of(STACK)).spawn_scoped(scope, body)
}

/// Does something that a signal may be raised for, in a thread that it is lost with: a write where files have a limit (SIGXFSZ) ends a
/// program that did not think of that. `None`: there is no thread, or it panicked.
pub fn aside<T: Send>(body: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| spawn_in(scope, body).ok()?.join().ok())
}
