//! How a program gets a hook instead of the function that it asked for, and what holds while it is inside one.
//!
//! This crate knows names and addresses. What a hook does is in its bodies, which are the library's (`src/shim/hook`), and
//! what a call means to CUDA is in `src/cuda`.
//!
//! * [`dlsym`]: the C library's own function, past ours, and what ours answers.
//! * [`Slots`]: the driver's function behind each hook, and the hook of each of the driver's functions.
//! * [`cancel`]: threads that are cancelled inside a hook.
//! * [`boundary`]: what happens to a panic.
//!
//! Architecture Invariant: [`dlsym`] and [`Slots`] allocate nothing, take no lock and use no part of `std` that resolves
//! symbols, because memory allocators call `dlsym` while they start.

pub mod boundary;
pub mod cancel;
pub mod code;
pub mod dlsym;
pub mod errno;
mod slots;

pub use boundary::Real;
pub use slots::{Hook, Slots, Unhooked};

use std::fmt;

/// The driver function that the program called, by its exported name: what the log calls `api`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Api(pub &'static str);

impl Api {
    /// The exported name.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

/// This thread's number with the system (`gettid`, which the C library has from glibc 2.30 on only). A system call and nothing else.
pub fn thread_number() -> libc::pid_t {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as libc::pid_t }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}
