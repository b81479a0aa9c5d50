//! Programs that take the place of a process (`exec`) or are started beside it (`posix_spawn`), for `gpupool run --fail-on`: the
//! library is not loaded into a program whose environment lacks it, and such a program can tell nobody that it was there.
//!
//! So whoever starts a program says so before, and the program, if the library is in it, says so itself. Handlers of `fork` were
//! rejected: shells, Python and the C library start programs by `vfork` and `clone`, which run none, and a child that starts
//! no program needs none. Looking at the processes from outside would miss the short ones.
//!
//! All of it may run in a child of `vfork` or in the handler of a signal, and some of these functions take any number of
//! arguments. So each is naked: it says what is started, and goes on to the C library's function with the caller's frame as
//! it was. Whether that one failed shows at the end of the process, which says that it is still there.

use crate::log::verdict;
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

/// Before `main`: `dlsym` is nothing for the handler of a signal.
pub fn find_next() {
    for next in EXEC.iter().chain(&SPAWN) {
        dlsym::next(&next.function, next.name);
    }
}

/// Says that this process becomes the program at `path`, and where to go on.
unsafe extern "C" fn becomes(path: *const c_char, index: usize) -> *mut c_void {
    let next = &EXEC[index];
    if verdict::is_asked() {
        // SAFETY: the program's own argument, which must be a C string; NULL where there is none.
        verdict::becomes(if path.is_null() { c"" } else { unsafe { CStr::from_ptr(path) } });
    }
    dlsym::next(&next.function, next.name)
}

/// Exports functions of the `exec` family; `$path` is the register that has the path, or 0.
macro_rules! export_exec {
    ($($index:literal $function:ident $name:literal $path:literal;)*) => {
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
                    concat!("mov rdi, ", $path),
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
    0 execve c"execve" "rdi";
    1 execv c"execv" "rdi";
    2 execvp c"execvp" "rdi";
    3 execvpe c"execvpe" "rdi";
    4 execl c"execl" "rdi";
    5 execlp c"execlp" "rdi";
    6 execle c"execle" "rdi";
    7 execveat c"execveat" "rsi";
    8 fexecve c"fexecve" "0";
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
        if verdict::is_asked() && !path.is_null() {
            // SAFETY: the path with which the program was just started.
            verdict::started_beside(child, unsafe { CStr::from_ptr(path) });
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
