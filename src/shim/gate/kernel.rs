//! What the gate asks of the system: a barrier on all threads, sleep on a word, and the time.
//!
//! System calls are made by number: none of them is a place at which a thread can be cancelled, and none looks a symbol up.

use crate::bell;
pub use crate::clock::monotonic_nanoseconds as now;
use gpupool_pool::Outside;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, compiler_fence};
use std::time::Duration;

/// `MEMBARRIER_CMD_QUERY`, and two of the bits that it answers: the barrier on the threads of this process, and what makes it
/// possible.
const QUERY: libc::c_int = 0;
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// How long one who waits at a held gate sleeps between two looks. A program that is resumed goes on so much later at most.
const NAP: Duration = Duration::from_millis(20);
/// In how many naps one looks at Python's frames: they change for nobody who waits, but may not be readable while another thread comes or goes.
const NAPS_TO_LOOK: u32 = 50;
/// One who waits there was interrupted.
pub static WANTED: AtomicBool = AtomicBool::new(false);

/// Whoever has to wait there wants it opened.
pub static EVERYBODY_ASKS: AtomicBool = AtomicBool::new(false);

/// How long one who closes the gate sleeps between two looks at a thread that is inside.
const PAUSE: Duration = Duration::from_micros(20);

pub struct Kernel;

const UNKNOWN: u8 = 0;
const REACHES_ALL: u8 = 1;
const REACHES_NONE: u8 = 2;

static BARRIER: AtomicU8 = AtomicU8::new(UNKNOWN);
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: libc::c_int) -> libc::c_long {
    // SAFETY: the call takes numbers only.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
}

/// Whether the system can make a barrier on all threads (Linux 4.14; some sandboxes forbid it). Always the same.
pub fn barrier_reaches_all() -> bool {
    let mut known = BARRIER.load(Ordering::Relaxed);
    if known == UNKNOWN {
        let answer = membarrier(QUERY);
        let both = libc::c_long::from(PRIVATE_EXPEDITED | REGISTER_PRIVATE_EXPEDITED);
        known = if answer >= 0 && answer & both == both { REACHES_ALL } else { REACHES_NONE };
        BARRIER.store(known, Ordering::Relaxed);
    }
    known == REACHES_ALL
}

/// Before the first barrier. With several threads this takes some milliseconds (10 were measured), so it is not done while the gate
/// is being closed, nor in a process that never closes it.
pub fn prepare() -> bool {
    let ready =
        IS_REGISTERED.load(Ordering::Relaxed) || !barrier_reaches_all() || membarrier(REGISTER_PRIVATE_EXPEDITED) == 0;
    IS_REGISTERED.store(ready, Ordering::Relaxed);
    ready
}

fn is_main_thread() -> bool {
    // SAFETY: the call has no arguments.
    gpupool_interpose::thread_number() == unsafe { libc::getpid() }
}

/// The time so far from now.
pub fn after(duration: Duration) -> u64 {
    now().saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Sleeps for this long, or shorter.
pub fn sleep_for(duration: Duration) {
    static NOBODY: AtomicU32 = AtomicU32::new(0);
    Kernel.sleep(&NOBODY, 0, Some(after(duration)));
}

/// Whether a call of the system answered that a handler of a signal ran.
fn was_interrupted(answer: libc::c_long) -> bool {
    // SAFETY: it is this thread's error number.
    answer != 0 && unsafe { *libc::__errno_location() } == libc::EINTR
}

/// A sleep that is begun anew in any case.
const LONG: Duration = Duration::from_secs(3600);

/// The signals that wait between two naps: all but those that a fault raises, which end the process where they are blocked, and the C library's own two,
/// for which other threads wait (`setuid`, `pthread_cancel`).
const HELD_BACK: u64 = {
    let faults =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT, 32, 33];
    let (mut set, mut at) = (u64::MAX, 0);
    while at < faults.len() {
        set &= !(1 << (faults[at] - 1));
        at += 1;
    }
    set
};

/// A thread at a held gate. Its signals wait but for the length of a nap: the program's handlers run there alone, with the signals blocked that the
/// program has blocked, and the answer says that one ran. Between two naps, and where the time of one is over while the processor is another's, nobody
/// would know.
///
/// A signal that is not for one thread may be handled by another one meanwhile, if that is the only one that takes it; so nothing long happens between.
pub struct Waiting {
    /// What the thread had blocked, as the system has it.
    before: u64,
    naps: u32,
    /// What [`AT`] was.
    outer: Option<u32>,
    /// A handler that ran during another wait of this thread at this gate waits here, or whoever was called by a jump out of one.
    is_nested: bool,
}

thread_local! {
    /// Which hold of the gate this thread waits for, or has left by a jump. `const` and without a destructor, as in `threads.rs`.
    static AT: Cell<Option<u32>> = const { Cell::new(None) };
}

impl Drop for Waiting {
    fn drop(&mut self) {
        AT.set(self.outer);
        set_blocked(libc::SIG_SETMASK, self.before);
    }
}

fn block(signals: u64) -> u64 {
    set_blocked(libc::SIG_BLOCK, signals)
}

/// By number as well: the C library's function is one that others interpose. What was blocked before.
fn set_blocked(how: libc::c_int, signals: u64) -> u64 {
    let mut before = 0_u64;
    let (set, was) = (&raw const signals, &raw mut before);
    // SAFETY: both sets are locals, of the size that is told, which is the system's.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, set, was, size_of::<u64>()) };
    before
}

impl Outside for Kernel {
    type Waiting = Waiting;

    #[inline(always)]
    fn light(&self) {
        compiler_fence(Ordering::SeqCst);
    }

    fn heavy(&self) -> bool {
        // Where it reaches nobody, everybody makes a full barrier before each look (`threads.rs`).
        std::sync::atomic::fence(Ordering::SeqCst);
        !barrier_reaches_all() || membarrier(PRIVATE_EXPEDITED) == 0
    }

    fn now(&self) -> u64 {
        now()
    }

    fn sleep(&self, word: &AtomicU32, value: u32, until: Option<u64>) -> bool {
        // The system begins a sleep without an end anew behind a handler that was installed with `SA_RESTART`, and nobody hears of it.
        let until = until.unwrap_or_else(|| after(LONG));
        let time = libc::timespec {
            tv_sec: (until / 1_000_000_000) as libc::time_t,
            tv_nsec: (until % 1_000_000_000) as libc::c_long,
        };
        const WAIT: libc::c_int = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG;
        const ALL: libc::c_int = libc::FUTEX_BITSET_MATCH_ANY;
        let none = std::ptr::null::<u32>();
        // SAFETY: the word outlives the call, and the time is a local. Whatever ends the sleep, the caller looks again.
        let answer = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAIT, value, &raw const time, none, ALL) };
        was_interrupted(answer)
    }

    fn wake(&self, word: &AtomicU32) {
        const WAKE: libc::c_int = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is a static, and the other arguments are numbers.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAKE, i32::MAX) };
    }

    fn pause(&self) {
        sleep_for(PAUSE);
    }

    fn begin_to_wait(&self, hold: u32) -> Waiting {
        let before = block(HELD_BACK);
        let outer = AT.replace(Some(hold));
        Waiting { before, naps: 0, outer, is_nested: outer == Some(hold) }
    }

    /// Not on the word: no sleep on one takes the signals that may end it.
    fn nap(&self, waiting: &mut Waiting) -> bool {
        let looks = waiting.naps.is_multiple_of(NAPS_TO_LOOK);
        waiting.naps = waiting.naps.wrapping_add(1);
        if !WANTED.load(Ordering::Relaxed) {
            // The wait around it hears of the signal once the handler is back, which is not before this one is over.
            if waiting.is_nested {
                return true;
            }
            // Its handlers run long before the process's end begins, and whoever waits for that waits for them.
            if looks && is_main_thread() && gpupool_python::has_ended() {
                return true;
            }
            if EVERYBODY_ASKS.load(Ordering::Acquire) {
                return true;
            }
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: NAP.subsec_nanos().into() };
        let nothing = std::ptr::null_mut::<libc::pollfd>();
        let set = &raw const waiting.before;
        // SAFETY: no descriptor is named; the time and the set, of the size that is told, are locals.
        let answer = unsafe { libc::syscall(libc::SYS_ppoll, nothing, 0, &raw mut time, set, size_of::<u64>()) };
        was_interrupted(answer)
    }

    fn wanted(&self) {
        WANTED.store(true, Ordering::Release);
        bell::wake();
    }
}
