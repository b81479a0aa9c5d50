//! Whether the program that Python runs is over.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, Ordering};

use once_cell::race::OnceBox;

use crate::interpreter;
use crate::memory::Address;
use crate::stack::Stack;

/// What a program begins with: a file or what `-c` was given, and a module that `-m` names.
const BEGINNINGS: [&[u8]; 2] = [b"<module>", b"_run_module_as_main"];

/// Asked on the main thread: whether this process is Python itself, and Python is past its program: it runs what was registered by `atexit`, or takes
/// itself apart. Nothing that Python tells says so of `atexit`, whose functions run before it calls itself ending; but no frame of theirs stands
/// on one of a program. Allocates nothing, and knows nothing of other threads, of programs that only use Python, and while a prompt has functions that
/// run as it waits for a line.
pub fn has_ended() -> bool {
    if !is_python_itself() {
        return false;
    }
    let Some(interpreter) = interpreter::get() else { return false };
    if interpreter.is_taken_apart() {
        return true;
    }
    let Some(thread) = interpreter.thread() else { return false };
    if !hook().is_null() {
        return false;
    }
    let mut stack = Stack::new();
    interpreter.read(thread, &mut stack);
    if stack.is_truncated() || !(interpreter.check.passed() || interpreter.check.run(interpreter, thread, &stack)) {
        return false;
    }
    // SAFETY: code objects of frames of this very thread, which are there for as long as it is in this call.
    let mut names =
        stack.frames().iter().map(|frame| unsafe { interpreter.text(frame.code, interpreter.layout.code.name) });
    names.all(|name| name.is_some_and(|name| name.width > 1 || !BEGINNINGS.contains(&name.bytes)))
}

/// What Python calls while it waits for a line at its prompt.
fn hook() -> *const c_void {
    static FOUND: OnceBox<Option<Address>> = OnceBox::new();
    let found = FOUND.get_or_init(|| {
        Box::new(interpreter::symbol(c"PyOS_InputHook").and_then(|at| Address::new(at.expose_provenance())))
    });
    // SAFETY: the variable of this name is a pointer to a function, or NULL.
    found.map_or(std::ptr::null(), |pointer| unsafe { pointer.read::<*const c_void>(0) })
}

const UNKNOWN: u8 = 0;
const YES: u8 = 1;
const NO: u8 = 2;

/// Whether the program's file is called python, python3.12 and so on.
fn is_python_itself() -> bool {
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    match KNOWN.load(Ordering::Relaxed) {
        UNKNOWN => {}
        known => return known == YES,
    }
    let mut path = [0_u8; libc::PATH_MAX as usize];
    // SAFETY: the path is a local of this length, and the name ends with a zero.
    let length = unsafe { libc::readlink(c"/proc/self/exe".as_ptr(), path.as_mut_ptr().cast(), path.len()) };
    let path = &path[..usize::try_from(length).unwrap_or(0)];
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let known = if name.starts_with(b"python") { YES } else { NO };
    KNOWN.store(known, Ordering::Relaxed);
    known == YES
}
