//! The Python stack of the calling thread, read without the GIL.
//!
//! A hook may be reached with the GIL held or released, from a thread that Python does not know, before Python is up or
//! while it goes down, and must never wait: `PyGILState_Ensure` there is a deadlock in waiting. So the frames are read as
//! they lie in memory. That is sound for the calling thread alone: only it adds and removes its frames, and it is here.
//!
//! [`capture`] takes (code object, instruction) pairs in tens of nanoseconds; [`Stack::resolve`] makes text of them, before
//! the hook returns. What is not understood is left alone: [`state`] says why nothing is read.
//!
//! Architecture Invariant: nothing here takes the GIL, changes a reference count or calls into Python, except the one
//! comparison in [`check`], which is made only while the thread holds the GIL already.
//!
//! What remains: threads that go on after `Py_FinalizeEx` are told so by Python's own flags, which a program resets when it
//! initialises Python a second time. A thread left behind by the first interpreter must not make hooked calls then.

mod cache;
mod check;
mod end;
mod interpreter;
mod layout;
mod lines;
mod memory;
mod published;
mod stack;
mod text;
pub mod versions;

use std::fmt;

pub use end::has_ended;
pub use stack::{Frame, Stack};

/// Frames taken of a stack, the innermost ones. A deeper stack is marked as truncated.
pub const MAX_FRAMES: usize = 64;

/// The Python frames of this thread. `None` where there are none to be had: no Python, not up, going down or not
/// understood, a thread that it does not know, or one that runs no Python code at the moment.
///
/// Allocates nothing, except at the first call that finds an interpreter and at the one that compares.
#[inline]
pub fn capture() -> Option<Stack> {
    let interpreter = interpreter::get()?;
    let thread = interpreter.thread()?;
    let mut stack = Stack::new();
    interpreter.read(thread, &mut stack);
    if stack.depth() == 0 || !(interpreter.check.passed() || interpreter.check.run(interpreter, thread, &stack)) {
        return None;
    }
    Some(stack)
}

/// Whether frames are read, and if not, why. Only reports what captures have found so far.
pub fn state() -> State {
    match interpreter::found() {
        None => State::Absent,
        Some(Err(reason)) => State::Off(reason),
        Some(Ok(interpreter)) => match interpreter.check.failure() {
            Some(reason) => State::Off(reason),
            None => State::On { version: interpreter.version, compared: interpreter.check.passed() },
        },
    }
}

/// What [`state`] answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No capture has found a CPython in the process.
    Absent,
    /// Frames are read. `compared`: they were found equal to Python's own answers, which needs one capture with the GIL.
    On { version: Version, compared: bool },
    /// There is a CPython, and its frames are not read, for this reason.
    Off(&'static str),
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => write!(f, "no Python in this process so far"),
            Self::On { version, compared: true } => write!(f, "CPython {version}, compared with its own answers"),
            Self::On { version, compared: false } => write!(f, "CPython {version}, not compared yet"),
            Self::Off(reason) => write!(f, "Python frames are not read: {reason}"),
        }
    }
}

/// A version of CPython.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Version {
    pub major: u8,
    pub minor: u8,
    pub micro: u8,
    /// All of it as CPython's `PY_VERSION_HEX`.
    hex: u32,
}

impl Version {
    fn from_hex(hex: u32) -> Self {
        let [major, minor, micro, _] = hex.to_be_bytes();
        Self { major, minor, micro, hex }
    }

    /// A release or a release candidate: from then on the layout is settled.
    fn is_released(self) -> bool {
        self.hex & 0xf0 >= 0xc0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)?;
        match self.hex & 0xf0 {
            0xf0 => Ok(()),
            0xc0 => write!(f, "rc{}", self.hex & 0xf),
            _ => write!(f, " pre-release"),
        }
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
