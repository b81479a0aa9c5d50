//! Threads of a program that stop where a test needs them to.

use crate::Running;
use std::io;

/// A thread of another process that stops where it is told to, by `ptrace`.
pub struct Traced(libc::pid_t);

impl Traced {
    fn ask(&self, request: libc::c_uint, number: usize, data: usize) -> io::Result<()> {
        // SAFETY: the requests that are made here take numbers, or a pointer to as many bytes as are told, which the caller owns.
        let answer = unsafe { libc::ptrace(request, self.0, number, data) };
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Why it stops next.
    fn stops(&self) -> i32 {
        let mut status = 0;
        // SAFETY: the status is a local.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) }, self.0);
        assert!(libc::WIFSTOPPED(status), "it ended: {status:#x}");
        libc::WSTOPSIG(status)
    }

    /// It stands. For the thread of the test that gives it back.
    ///
    /// # Errors
    /// The system's: there is none of this number.
    pub fn begin(thread: i32) -> io::Result<Self> {
        let traced = std::mem::ManuallyDrop::new(Self(thread));
        traced.ask(libc::PTRACE_SEIZE, 0, libc::PTRACE_O_TRACESYSGOOD as usize)?;
        traced.ask(libc::PTRACE_INTERRUPT, 0, 0)?;
        traced.stops();
        Ok(std::mem::ManuallyDrop::into_inner(traced))
    }

    /// It goes on until it has slept twice as the gate lets it, without anything having ended that, and stands behind the second time.
    pub fn sleeps_twice(&self) {
        let mut slept = 0;
        while slept < 2 {
            let (call, _, answer) = self.next_call();
            let is_sleep = matches!(call, libc::SYS_clock_nanosleep | libc::SYS_ppoll);
            slept = if is_sleep && answer == 0 { slept + 1 } else { 0 };
        }
    }

    /// It goes on until a system call of this number, of which what it is given `is_meant`, has ended, and stands behind that.
    pub fn ends_call(&self, number: i64, is_meant: impl Fn(&[u64; 6]) -> bool) {
        loop {
            let (call, given, _) = self.next_call();
            if call == number && is_meant(&given) {
                return;
            }
        }
    }

    /// It goes on until its next system call has ended: the number of that, what it was given, and what it answered.
    fn next_call(&self) -> (i64, [u64; 6], i64) {
        let mut call = None;
        loop {
            self.ask(libc::PTRACE_SYSCALL, 0, 0).unwrap_or_else(|e| panic!("thread {} goes on no more: {e}", self.0));
            if self.stops() != libc::SIGTRAP | 0x80 {
                continue;
            }
            // SAFETY: zero is a value of each of its fields.
            let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
            let asked = self.ask(libc::PTRACE_GET_SYSCALL_INFO, size_of_val(&info), (&raw mut info).addr());
            asked.unwrap_or_else(|e| panic!("what thread {} does is not told: {e}", self.0));
            if info.op == libc::PTRACE_SYSCALL_INFO_ENTRY {
                // SAFETY: that is what it says of a call that begins.
                let entry = unsafe { info.u.entry };
                call = Some((entry.nr as i64, entry.args));
            } else if info.op == libc::PTRACE_SYSCALL_INFO_EXIT
                && let Some((number, given)) = call.take()
            {
                // SAFETY: that is what it says of a call that ends.
                return (number, given, unsafe { info.u.exit.sval });
            }
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        if self.ask(libc::PTRACE_DETACH, 0, 0).is_err() {
            // Its process has been killed, or ends; and has not before whoever traces it has heard of that.
            let mut status = 0;
            // SAFETY: the status is a local.
            while unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) } == self.0 && libc::WIFSTOPPED(status)
            {
            }
        }
    }
}

/// The threads of a program that write images or what is suspended to a folder, once there are so many and all of them wait for something to write; they stand still until this is
/// dropped, by the thread that asked. One that stood in the middle of what it does might have a lock that the whole program needs, as that of the memory of the C library.
#[must_use]
pub fn held_writers(program: &Running, count: usize) -> Option<Vec<Traced>> {
    let of_one = |task: std::fs::DirEntry| -> Option<i32> {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        (name.trim() == "gpupool-store").then(|| task.file_name().to_str()?.parse().ok())?
    };
    let tasks = std::fs::read_dir(format!("/proc/{}/task", program.pid())).ok()?;
    let writers: Vec<i32> = tasks.flatten().filter_map(of_one).collect();
    if writers.len() != count {
        return None;
    }
    let held: Vec<Traced> = writers.iter().map(|thread| Traced::begin(*thread)).collect::<Result<_, _>>().ok()?;
    let waits = |thread: &i32| {
        let call = std::fs::read_to_string(format!("/proc/{}/task/{thread}/syscall", program.pid())).ok()?;
        let number = call.split_whitespace().next()?.parse::<i64>().ok()?;
        (number == libc::SYS_futex).then_some(())
    };
    writers.iter().all(|thread| waits(thread).is_some()).then_some(held)
}
