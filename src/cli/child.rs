//! Running a program in our stead: its signals, its exit code, its death.
//!
//! Whoever started us knows our number and our group, and means the program by both. What is sent to us alone is passed on.
//! What is sent to the group, as a terminal's Ctrl-C is, has reached the program already: a second one would make many
//! programs give up their orderly end. The signal itself does not tell the two apart, so a witness in the same group does.
//! Moving the program, or us, to a group of its own would need none, but a shell could no longer stop and continue both.
//!
//! Whoever kills us means the program as well: it is ended with us (`PR_SET_PDEATHSIG`). Without that `timeout -s KILL` or
//! `Popen.kill` would end the one that waits and leave the GPUs taken by the one that works.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, ExitStatus};
use std::ptr;

use crate::failure::Failure;
use crate::inherited;
use signals::{LEFT_ALONE, arrivals, is_pending, take, wait};
pub use survivors::Survivor;
use witness::Witness;

mod signals;
mod survivors;
mod witness;

/// Runs `command` to its end, passing on the signals that others send to us alone meanwhile.
///
/// Signals are taken off their queue, not by handlers: one that arrives before the child exists simply waits, and no
/// code runs at odd moments.
///
/// # Errors
/// The program could not be started.
pub fn wait_for(command: Command, held: Held) -> Result<ExitStatus, Failure> {
    start_and_watch(command, &held.signals, held.before)
}

/// Runs `command` to its end like [`wait_for`]. If it succeeded, then waits a few seconds for processes that outlive it, and
/// returns those that are still there.
///
/// # Errors
/// The program could not be started.
pub fn wait_for_all(command: Command, held: Held) -> Result<(ExitStatus, Vec<Survivor>), Failure> {
    survivors::adopt();
    let status = start_and_watch(command, &held.signals, held.before)?;
    let survivors = if status.success() { survivors::wait(&held.signals) } else { Vec::new() };
    Ok((status, survivors))
}

fn start_and_watch(mut command: Command, signals: &libc::sigset_t, before: Before) -> Result<ExitStatus, Failure> {
    let witness = Witness::start();
    let beside = witness.as_ref().map(Witness::question);
    // SAFETY: getpid takes nothing and cannot fail.
    let parent = unsafe { libc::getpid() };
    // SAFETY: runs in the child between fork and exec, where only async-signal-safe functions may be called; all of these
    // are, and none allocates or takes a lock.
    unsafe {
        command.pre_exec(move || {
            end_with(parent)?;
            if let Some(beside) = beside {
                beside.catch_up();
            }
            before.restore()
        })
    };
    inherited::hand_on(&mut command);
    let started = command.spawn();
    let child = started.map_err(|error| Failure::start(command.get_program(), &error))?;
    watch(child.id().cast_signed(), signals, witness)
        .map_err(|error| Failure::broken(format!("lost sight of the program: {error}")))
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

/// In the child: dies when `parent` does, also if that has happened already.
fn end_with(parent: libc::pid_t) -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal's number; getppid and raise touch no memory.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) != 0 {
            return Err(io::Error::last_os_error());
        }
        if libc::getppid() != parent {
            libc::raise(libc::SIGKILL);
        }
    }
    Ok(())
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

/// Signals that wait for the program to start.
pub struct Held {
    signals: libc::sigset_t,
    before: Before,
}

/// Holds back the signals that [`watch`] takes. Before anything is made that must not be left behind: one that comes later waits and
/// goes to the program.
pub fn hold() -> Held {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset fills `set` and pthread_sigmask fills `mask` before either is read, and every pointer is valid
    // for its call. SIG_DFL is no function that could run; with SIGCHLD ignored there would be no status to wait for.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        for signal in LEFT_ALONE {
            libc::sigdelset(set.as_mut_ptr(), signal);
        }
        let on_child = libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::sigemptyset(mask.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), mask.as_mut_ptr());
        Held { signals: set.assume_init(), before: Before { mask: mask.assume_init(), on_child } }
    }
}

fn watch(child: libc::pid_t, signals: &libc::sigset_t, witness: Option<Witness>) -> io::Result<ExitStatus> {
    let arrivals = arrivals(signals)?;
    let mut taken = *signals;
    // SAFETY: `taken` is an initialised set.
    unsafe { libc::sigdelset(&raw mut taken, libc::SIGTSTP) };
    // Without a witness the kernel's own are taken for the terminal's, which go to the group.
    let to_the_group = |signal, from_kernel| {
        let seen = witness.as_ref().and_then(|witness| witness.got(signal));
        seen.unwrap_or(from_kernel)
    };
    loop {
        let mut status = 0;
        // SAFETY: `status` is writable. Others than the child are the witness, and processes that were left to us.
        match unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) } {
            0 => {}
            -1 => return Err(io::Error::last_os_error()),
            ended if ended == child => return Ok(ExitStatus::from_raw(status)),
            _ => continue,
        }
        wait(&arrivals)?;
        // Left pending until it is passed on: a SIGCONT that comes meanwhile takes it off, as it should.
        if is_pending(libc::SIGTSTP) {
            if !to_the_group(libc::SIGTSTP, true) {
                pass_on(child, libc::SIGTSTP, None);
            }
            stop();
        }
        while let Some(info) = take(&taken) {
            let signal = info.si_signo;
            if signal != libc::SIGCHLD && !to_the_group(signal, info.si_code > 0) {
                pass_on(child, signal, Some(&info));
            }
        }
    }
}

/// Sends `signal` to the child, which was not waited for yet, so its number is still its own.
fn pass_on(child: libc::pid_t, signal: libc::c_int, info: Option<&libc::siginfo_t>) {
    // SAFETY: plain integers; a value that was queued with the signal is in `info` if its code is SI_QUEUE, and is handed
    // on as the bits that it is.
    unsafe {
        match info {
            Some(info) if info.si_code == libc::SI_QUEUE => libc::sigqueue(child, signal, info.si_value()),
            _ => libc::kill(child, signal),
        }
    };
}

/// Lets SIGTSTP do what it would have done at once: stop us, unless it is ignored or nobody could continue us.
fn stop() {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills `set` before it is read; the action of SIGTSTP is the default or to ignore it, so no
    // handler runs.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTSTP);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut());
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
