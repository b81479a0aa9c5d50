//! Programs that take the place of a process (`exec`) or are started beside it (`posix_spawn`, `system`), for `gpupool run --fail-on`: the
//! library is not loaded into a program whose environment lacks it, and such a program can tell nobody that it was there.
//!
//! So whoever starts a program says so, and whether its environment has what the library needs; the program, if the library is in
//! it, says that itself. (One that has the environment and says nothing was killed while it was loaded, or has rights of its own.) Handlers of `fork` were
//! rejected: shells, Python and the C library start programs by `vfork` and `clone`, which run none, and a child that starts
//! no program needs none. Looking at the processes from outside would miss the short ones.
//!
//! All of it may run in a child of `vfork` or in the handler of a signal, and some of these functions take any number of
//! arguments. So each is naked: it says what is started, and goes on to the C library's function with the caller's frame as
//! it was. Whether that one failed shows at the end of the process, which says that it is still there.

use crate::log::verdict;
use crate::own_memory::Text;
use gpupool_interpose::dlsym;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::AtomicPtr;

/// The next library's function of one name.
struct Next {
    name: &'static CStr,
    function: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Next {
        Next { name, function: AtomicPtr::new(std::ptr::null_mut()) }
    }
}

/// What `system` and `popen` start.
const SHELL: &str = "/bin/sh";

/// Before `main`: `dlsym` is nothing for the handler of a signal.
pub fn find_next() {
    for next in EXEC.iter().chain(&SPAWN) {
        dlsym::next(&next.function, next.name);
    }
}

/// What a naked function pushed, from the stack's top, and behind it the arguments that its caller had on the stack.
#[repr(C)]
struct Frame {
    vectors: usize,
    r9: usize,
    r8: usize,
    rcx: usize,
    rdx: usize,
    rsi: usize,
    rdi: usize,
    back: usize,
    stack: [usize; 0],
}

impl Frame {
    /// The environment of `execle`, which stands behind the NULL that ends the words.
    ///
    /// # Safety
    /// The frame is that of a call of `execle`.
    unsafe fn behind_words(&self) -> usize {
        let mut ended = false;
        for argument in [self.rsi, self.rdx, self.rcx, self.r8, self.r9] {
            if ended {
                return argument;
            }
            ended = argument == 0;
        }
        let mut next = self.stack.as_ptr();
        loop {
            // SAFETY: the caller wrote arguments up to the NULL and one behind it, and those that are no longer in registers are
            // here in a row.
            let argument = unsafe { next.read() };
            if ended {
                return argument;
            }
            ended = argument == 0;
            // SAFETY: more arguments follow until the one behind NULL.
            next = unsafe { next.add(1) };
        }
    }
}

/// Says that this process becomes another program, or that it starts a shell, and where to go on.
unsafe extern "C" fn becomes(frame: &Frame, index: usize) -> *mut c_void {
    let next = &EXEC[index];
    if verdict::is_asked() {
        // SAFETY: the C library's variable, read as the functions do that take no environment.
        let own = unsafe { environ } as usize;
        let (path, environment) = match next.name.to_bytes() {
            b"execve" | b"execvpe" => (frame.rdi, frame.rdx),
            b"execveat" => (frame.rsi, frame.rcx),
            b"fexecve" => (0, frame.rdx),
            // SAFETY: this is a call of execle.
            b"execle" => (frame.rdi, unsafe { frame.behind_words() }),
            _ => (frame.rdi, own),
        };
        // The program need not be right: what cannot be read is the kernel's to refuse.
        let mut path = Text::at(path);
        let is_given = verdict::is_given(environment);
        if !matches!(next.name.to_bytes(), b"system" | b"popen") {
            verdict::becomes(path, is_given);
        } else if !is_given && path.next().is_some() {
            verdict::started_beside(0, SHELL.bytes(), false);
        }
    }
    dlsym::next(&next.function, next.name)
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Exports functions that go on to the next library's with all their arguments.
macro_rules! export_exec {
    ($($index:literal $function:ident $name:literal;)*) => {
        static EXEC: [Next; [$($index),*].len()] = [$(Next::new($name)),*];
        $(
            #[doc = concat!("`", stringify!($function), "(3)`, whatever it takes.")]
            ///
            /// # Safety
            /// As the C library's.
            #[unsafe(naked)]
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
            pub unsafe extern "C" fn $function() -> c_int {
                ::std::arch::naked_asm!(
                    "endbr64",
                    "push rdi",
                    "push rsi",
                    "push rdx",
                    "push rcx",
                    "push r8",
                    "push r9",
                    "push rax", // how many vector registers a function of any number of arguments was given
                    "mov rdi, rsp",
                    concat!("mov rsi, ", $index),
                    "call {becomes}", // seven pushes behind the return address: 16-byte alignment
                    "mov r11, rax",
                    "pop rax",
                    "pop r9",
                    "pop r8",
                    "pop rcx",
                    "pop rdx",
                    "pop rsi",
                    "pop rdi",
                    "test r11, r11",
                    "jz 2f",
                    "jmp r11",
                    "2:",
                    "mov eax, -1",
                    "ret",
                    becomes = sym becomes,
                )
            }
        )*
    };
}

export_exec! {
    0 execve c"execve";
    1 execv c"execv";
    2 execvp c"execvp";
    3 execvpe c"execvpe";
    4 execl c"execl";
    5 execlp c"execlp";
    6 execle c"execle";
    7 execveat c"execveat";
    8 fexecve c"fexecve";
    9 system c"system";
    10 popen c"popen";
}

static SPAWN: [Next; 2] = [Next::new(c"posix_spawn"), Next::new(c"posix_spawnp")];

/// What `posix_spawn` and `posix_spawnp` take, behind the child's number.
type Spawn = unsafe extern "C" fn(
    *mut libc::pid_t,
    *const c_char,
    *const libc::posix_spawn_file_actions_t,
    *const libc::posix_spawnattr_t,
    *const *mut c_char,
    *const *mut c_char,
) -> c_int;

/// Starts a program by `next`, and then says so: before, nobody knows its number.
///
/// # Safety
/// As the C library's.
unsafe fn spawn(
    next: &Next,
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    words: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    let function = dlsym::next(&next.function, next.name);
    if function.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's export of these names has this signature.
    let function: Spawn = unsafe { std::mem::transmute::<*mut c_void, Spawn>(function) };
    let mut child = 0;
    // SAFETY: the caller's own arguments, but for the child's number, which is a local.
    let failed = unsafe { function(&raw mut child, path, actions, attributes, words, environment) };
    if failed == 0 {
        if !pid.is_null() {
            // SAFETY: where the caller wants the number; the C library would have written it there.
            unsafe { pid.write(child) };
        }
        if verdict::is_asked() {
            verdict::started_beside(child, Text::at(path.addr()), verdict::is_given(environment.addr()));
        }
    }
    failed
}

/// `posix_spawn(3)`.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    words: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    // SAFETY: the caller's own arguments.
    unsafe { spawn(&SPAWN[0], pid, path, actions, attributes, words, environment) }
}

/// `posix_spawnp(3)`.
///
/// # Safety
/// As the C library's.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code, reason = "exported only from the library"))]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const libc::posix_spawn_file_actions_t,
    attributes: *const libc::posix_spawnattr_t,
    words: *const *mut c_char,
    environment: *const *mut c_char,
) -> c_int {
    // SAFETY: the caller's own arguments.
    unsafe { spawn(&SPAWN[1], pid, path, actions, attributes, words, environment) }
}
