//! A process that does nothing but be in our group: a signal that it got as well was sent to the group.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;

use super::signals::LEFT_ALONE;

/// What asks for everything that is pending; other numbers are signals.
const ALL: u64 = 0;
/// Signals that fit a mask.
const SIGNALS: std::ops::RangeInclusive<libc::c_int> = 1..=64;

/// Our end of the conversation. The other one lives no longer than this: it ends when nobody can ask it any more.
pub struct Witness {
    asked: OwnedFd,
}

/// The asking end of the conversation in a child of ours, which does not own it.
#[derive(Clone, Copy)]
pub struct Question {
    asked: RawFd,
}

impl Witness {
    /// A witness, unless the system has none to give. Call it with the signals blocked that it will be asked about, and
    /// before the program is started.
    pub fn start() -> Option<Witness> {
        let (ours, its) = UnixStream::pair().ok()?;
        // SAFETY: this process has one thread, so nothing is locked or half done in the child.
        match unsafe { libc::fork() } {
            -1 => None,
            0 => {
                drop(ours);
                answer(its.as_raw_fd())
            }
            _ => Some(Witness { asked: ours.into() }),
        }
    }

    /// Whether it got `signal` too, since it was last asked; `None` if it does not answer. A group's newest members are
    /// signalled first, so it has the signal when we do.
    pub fn got(&self, signal: libc::c_int) -> Option<bool> {
        self.question().ask(u64::from(signal.unsigned_abs())).map(|answer| answer != 0)
    }

    /// For the program, before it starts.
    pub fn question(&self) -> Question {
        Question { asked: self.asked.as_raw_fd() }
    }
}

impl Question {
    /// Gives this process what the witness has got and it has not: that was sent to the group before this process was
    /// forked, and its parent will not pass it on. Calls async-signal-safe functions only.
    pub fn catch_up(self) {
        let before = self.ask(ALL).unwrap_or(0);
        // Read after the witness's: what came in between is here, and what is only there came before the fork.
        let missed = before & !pending();
        for signal in SIGNALS.filter(|signal| missed & bit(*signal) != 0 && !LEFT_ALONE.contains(signal)) {
            // SAFETY: plain integers.
            unsafe { libc::raise(signal) };
        }
    }

    fn ask(self, what: u64) -> Option<u64> {
        send(self.asked, what)?;
        receive(self.asked)
    }
}

/// The witness's life.
fn answer(asked: RawFd) -> ! {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset fills the set before it is read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), ptr::null_mut());
    }
    while let Some(what) = receive(asked) {
        let answer = match libc::c_int::try_from(what) {
            Ok(signal) if what != ALL => u64::from(take(signal)),
            _ => pending(),
        };
        if send(asked, answer).is_none() {
            break;
        }
    }
    // SAFETY: ends at once; what the parent has registered for its own end is not for this process.
    unsafe { libc::_exit(0) }
}

/// Takes `signal` off the queue, every time that it is there, and says whether it was.
fn take(signal: libc::c_int) -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut taken = false;
    // SAFETY: sigemptyset fills the set before it is read, and `now` outlives the calls; nobody wants the details.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        while libc::sigtimedwait(set.as_ptr(), ptr::null_mut(), &raw const now) == signal {
            taken = true;
        }
    }
    taken
}

/// The signals that wait for this process.
fn pending() -> u64 {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills the set, so that it can be read whatever sigpending does.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigpending(set.as_mut_ptr());
        set.assume_init()
    };
    // SAFETY: the set is initialised.
    let waits = |signal: &libc::c_int| unsafe { libc::sigismember(&raw const set, *signal) } == 1;
    SIGNALS.filter(waits).map(bit).sum()
}

fn bit(signal: libc::c_int) -> u64 {
    1 << (signal - 1)
}

/// A message is eight bytes in one write; the peers are never more than one question apart, so it is taken whole.
fn send(to: RawFd, message: u64) -> Option<()> {
    let bytes = message.to_ne_bytes();
    // SAFETY: `bytes` is readable for its length. MSG_NOSIGNAL: a peer that is gone must not end this process.
    let sent = unsafe { libc::send(to, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    (usize::try_from(sent) == Ok(bytes.len())).then_some(())
}

fn receive(from: RawFd) -> Option<u64> {
    let mut bytes = [0; 8];
    // SAFETY: `bytes` is writable for its length.
    let received = unsafe { libc::recv(from, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_WAITALL) };
    (usize::try_from(received) == Ok(bytes.len())).then_some(u64::from_ne_bytes(bytes))
}
