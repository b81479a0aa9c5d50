//! Starts a program that is no child of this process: nothing that the program waits for, no signal of its end, none of the
//! program's descriptors, signals or session.
//!
//! Not by the C library's fork, which would run the program's handlers, nor by its `posix_spawn`, whose child is one that
//! `wait` finds. A first child borrows this thread's memory (`CLONE_VM | CLONE_VFORK`, so that a process of many gigabytes costs
//! nothing), starts the program the same way and ends. It has no signal for its end, and by that `wait` without `__WCLONE` does
//! not find it either; what it started is left to init. A program that is init itself, or adopts orphans, finds the helper when
//! that ends, which is when nobody needs it any more.

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::io::{Error, Result};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering};

/// The number of the one descriptor that the program is started with, besides the standard three, which lead nowhere.
pub const CONNECTION: RawFd = 3;

/// Bytes of each child's stack. What runs there calls the kernel only, some of it through the C library.
const STACK: usize = 64 << 10;

/// What the children need, made before there is one: they may not allocate.
struct Start {
    program: CString,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    connection: RawFd,
    /// The top of the second child's stack.
    stack: *mut c_void,
    /// Why the program could not be started, or 0.
    error: AtomicI32,
}

/// Starts `program` with these arguments (its name among them) and this environment, and nothing of this process but
/// `connection`.
///
/// # Errors
/// The system's: there can be no further process, or this is no program. Of this process: it is the one that orphans become children
/// of, so the program would see one that it did not start, and might wait for its end.
pub fn start(program: CString, arguments: &[CString], environment: &[CString], connection: &impl AsFd) -> Result<()> {
    if adopts_orphans() {
        return Err(Error::other(
            "this process is the first of its namespace or adopts orphans (PR_SET_CHILD_SUBREAPER), and would find the helper \
             among its children; start a program that is not with the same setting beside it, or this one under an init (docker \
             run --init)",
        ));
    }
    let mut stacks = vec![0u128; 2 * STACK / size_of::<u128>()];
    // SAFETY: half and end of the allocation. Both are aligned to 16 bytes, as the stack of a new thread has to be.
    let (first, second) = unsafe {
        let bottom = stacks.as_mut_ptr().cast::<u8>();
        (bottom.add(STACK).cast::<c_void>(), bottom.add(2 * STACK).cast::<c_void>())
    };
    let pointers = |words: &[CString]| words.iter().map(|word| word.as_ptr()).chain([null()]).collect::<Vec<_>>();
    let start = Start {
        program,
        arguments: pointers(arguments),
        environment: pointers(environment),
        connection: connection.as_fd().as_raw_fd(),
        stack: second,
        error: AtomicI32::new(0),
    };
    // SAFETY: the child runs on a stack of its own, in this memory, while this thread waits for its end (CLONE_VFORK), so all
    // that it is given outlives it. It allocates nothing, takes no lock and runs no handler: all signals are blocked here.
    let child = unsafe {
        libc::clone(between, first, libc::CLONE_VM | libc::CLONE_VFORK, (&raw const start).cast_mut().cast())
    };
    if child < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: no status is wanted; the child is this thread's, and only by __WCLONE found.
    while unsafe { libc::waitpid(child, null_mut(), libc::__WCLONE) } < 0
        && Error::last_os_error().kind() == std::io::ErrorKind::Interrupted
    {}
    drop(stacks);
    match start.error.load(Ordering::Acquire) {
        0 => Ok(()),
        error => Err(Error::from_raw_os_error(error)),
    }
}

/// Whether processes whose parents have ended become children of this one.
fn adopts_orphans() -> bool {
    let mut adopts: c_int = 0;
    // SAFETY: the output is a local of the type that this question has.
    let asked = unsafe { libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut adopts) };
    std::process::id() == 1 || asked == 0 && adopts != 0
}

/// The first child: starts the second one, waits until that is another program, and ends.
extern "C" fn between(start: *mut c_void) -> c_int {
    // SAFETY: what `start` was called with, which waits for this child.
    let given = unsafe { &*start.cast::<Start>() };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: as for the first child; its stack is the second one.
    if unsafe { libc::clone(become_program, given.stack, flags, start) } < 0 {
        given.error.store(errno(), Ordering::Release);
    }
    // The C library's clone ends this child by a system call, past all handlers.
    0
}

/// The second child: leaves behind what it has of the program, and becomes the other one. System calls only, by number where a
/// library in the process may have put its own function under the name.
extern "C" fn become_program(start: *mut c_void) -> c_int {
    // SAFETY: as in `between`.
    let start = unsafe { &*start.cast::<Start>() };
    // SAFETY: the numbers are descriptors, signals and masks; texts are constants or live in `start`, whose lists end with NULL.
    // The handlers and descriptors are this child's own copies (neither CLONE_SIGHAND nor CLONE_FILES).
    unsafe {
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, null_mut());
        libc::syscall(libc::SYS_setsid);
        libc::syscall(libc::SYS_umask, 0o077);
        libc::syscall(libc::SYS_chdir, c"/".as_ptr());
        // Out of the way of the numbers that it and the others get.
        let connection = libc::syscall(libc::SYS_fcntl, start.connection, libc::F_DUPFD, 16);
        let nowhere = libc::syscall(libc::SYS_open, c"/dev/null".as_ptr(), libc::O_RDWR);
        let moved =
            |from: c_long, to: RawFd| libc::syscall(libc::SYS_dup3, from, to, 0) >= 0 || from == c_long::from(to);
        let placed = connection >= 0 && nowhere >= 0 && (0..3).all(|number| moved(nowhere, number));
        if placed && moved(connection, CONNECTION) {
            if libc::syscall(libc::SYS_close_range, CONNECTION + 1, c_int::MAX, 0) != 0 {
                // A kernel before 5.9, or one that is not asked.
                for number in CONNECTION + 1..4096 {
                    libc::syscall(libc::SYS_close, number);
                }
            }
            let (arguments, environment) = (start.arguments.as_ptr(), start.environment.as_ptr());
            libc::syscall(libc::SYS_execve, start.program.as_ptr(), arguments, environment);
        }
    }
    start.error.store(errno(), Ordering::Release);
    127
}

fn errno() -> i32 {
    Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn words(words: &[&str]) -> Vec<CString> {
        words.iter().map(|word| CString::new(*word).unwrap()).collect()
    }

    #[test]
    fn what_is_started_is_nobodys_child_and_has_nothing_of_ours() {
        let (mut own, other) = UnixStream::pair().unwrap();
        let _open = File::open("/dev/null").unwrap();
        let script = "exec >&3; echo $PPID; ls /proc/self/fd | tr '\\n' ' '; echo; echo $A$HOME; grep -h SigBlk /proc/self/status";
        let shell = CString::new("/bin/sh").unwrap();
        start(shell, &words(&["sh", "-c", script]), &words(&["A=1", "PATH=/usr/bin:/bin"]), &other).unwrap();
        drop(other);
        let mut said = String::new();
        own.read_to_string(&mut said).unwrap();
        let lines: Vec<&str> = said.lines().collect();
        assert_ne!(lines[0], std::process::id().to_string(), "{said}");
        // The last one is the folder that ls looks into.
        assert_eq!(lines[1].trim(), "0 1 2 3 4", "{said}");
        assert_eq!(lines[2], "1");
        assert_eq!(lines[3], "SigBlk:\t0000000000000000");
        let mut status = 0;
        // Of this thread's alone: other tests have children, whom this would take from them.
        // SAFETY: the output is a local.
        let found = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WNOTHREAD) };
        assert!(found <= 0, "a child that `wait` finds: {found}");
    }

    #[test]
    fn what_is_no_program_is_an_error() {
        let (_own, other) = UnixStream::pair().unwrap();
        let error = start(CString::new("/nowhere/gpupool").unwrap(), &words(&["gpupool"]), &[], &other).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}
