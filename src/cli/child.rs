//! Running a program in our stead: its signals, its exit code, its death.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::ptr;

use crate::failure::Failure;

/// What somebody who knows only our process id may send.
const FORWARDED: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// Runs `command` to its end, passing on the signals that other processes send us meanwhile.
///
/// Signals are taken by `sigwaitinfo`, not by handlers: one that arrives before the child exists simply waits, and no
/// code runs at odd moments.
///
/// # Errors
/// The program could not be started.
pub fn wait_for(mut command: Command) -> Result<ExitStatus, Failure> {
    let (signals, before) = block();
    // SAFETY: runs in the child between fork and exec, where only async-signal-safe functions may be called; both are,
    // and neither allocates or takes a lock.
    unsafe { command.pre_exec(move || before.restore()) };
    let started = command.spawn();
    let mut child = started.map_err(|error| Failure::start(command.get_program(), &error))?;
    watch(&mut child, &signals).map_err(|error| Failure::broken(format!("lost sight of the program: {error}")))
}

/// Ends as the child ended: with its exit code, or by the signal that killed it.
pub fn end_as(status: ExitStatus) -> ExitCode {
    if let Some(signal) = status.signal() {
        die_of(signal);
        // Only a signal that does not kill comes back here; shells then say 128 + its number.
        return ExitCode::from(128u8.saturating_add(u8::try_from(signal).unwrap_or(u8::MAX)));
    }
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// What a child must find as if we were not there.
#[derive(Clone, Copy)]
struct Before {
    mask: libc::sigset_t,
    on_child: libc::sighandler_t,
}

impl Before {
    fn restore(&self) -> io::Result<()> {
        // SAFETY: the mask is initialised, and the action was this process's own (default or ignore: exec allows no other).
        unsafe {
            libc::signal(libc::SIGCHLD, self.on_child);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, ptr::null_mut()) {
                0 => Ok(()),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

/// Holds back the signals that [`watch`] takes, and says how it was before.
fn block() -> (libc::sigset_t, Before) {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills `set` and pthread_sigmask fills `mask` before either is read, and every pointer is valid
    // for its call. SIG_DFL is no function that could run; with SIGCHLD ignored there would be no status to wait for.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in FORWARDED.into_iter().chain([libc::SIGCHLD]) {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        let on_child = libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::sigemptyset(mask.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), mask.as_mut_ptr());
        (set.assume_init(), Before { mask: mask.assume_init(), on_child })
    }
}

fn watch(child: &mut Child, signals: &libc::sigset_t) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        // SAFETY: `signals` is an initialised set and `info` is writable.
        let signal = unsafe { libc::sigwaitinfo(signals, info.as_mut_ptr()) };
        if signal < 0 {
            match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            }
        }
        // SAFETY: sigwaitinfo returned a signal, so it filled `info`.
        let sent_by_process = unsafe { info.assume_init() }.si_code <= 0;
        // What the terminal sends (Ctrl-C) goes to the whole foreground group, so the child has it already; a second one
        // would make many programs give up their orderly end.
        if signal != libc::SIGCHLD && sent_by_process {
            // SAFETY: plain integers. The child was not waited for yet, so its number is still its own.
            unsafe { libc::kill(child.id().cast_signed(), signal) };
        }
    }
}

/// Dies of `signal`, without a core file: the program's own is the one to look at.
fn die_of(signal: libc::c_int) {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `none` and `set` live across the calls, sigemptyset fills the set before it is used, and the default
    // action is set before the signal is raised, so no handler runs.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &none);
        libc::signal(signal, libc::SIG_DFL);
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut());
        libc::raise(signal);
    }
}
