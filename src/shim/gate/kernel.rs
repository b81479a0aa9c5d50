//! What the gate asks of the system: a barrier on all threads, sleep on a word, and the time.
//!
//! System calls are made by number: none of them is a place at which a thread can be cancelled, and none looks a symbol up.

use crate::bell;
pub use crate::clock::monotonic_nanoseconds as now;
use gpupool_pool::Outside;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, compiler_fence};
use std::time::Duration;

/// `MEMBARRIER_CMD_QUERY`, and two of the bits that it answers: the barrier on the threads of this process, and what makes it
/// possible.
const QUERY: libc::c_int = 0;
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// How long one who waits at a held gate sleeps between two looks. A program that is resumed goes on so much later at most.
const NAP: Duration = Duration::from_millis(20);
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

impl Outside for Kernel {
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

    fn sleep(&self, word: &AtomicU32, value: u32, until: Option<u64>) {
        let time = until.map(|until| libc::timespec {
            tv_sec: (until / 1_000_000_000) as libc::time_t,
            tv_nsec: (until % 1_000_000_000) as libc::c_long,
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        const WAIT: libc::c_int = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG;
        const ALL: libc::c_int = libc::FUTEX_BITSET_MATCH_ANY;
        let none = std::ptr::null::<u32>();
        // SAFETY: the word outlives the call, and the time is a local or NULL. Whatever ends the sleep, the caller looks again.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAIT, value, time, none, ALL) };
    }

    fn wake(&self, word: &AtomicU32) {
        const WAKE: libc::c_int = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is a static, and the other arguments are numbers.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), WAKE, i32::MAX) };
    }

    fn pause(&self) {
        sleep_for(PAUSE);
    }

    /// Not on the word: the system begins that sleep anew behind a handler that was installed with `SA_RESTART`, as most are.
    fn nap(&self, _: &AtomicU32, _: u32) -> bool {
        // Its handlers run long before the process's end begins, and whoever waits for that waits for them.
        if is_main_thread() && !WANTED.load(Ordering::Relaxed) && gpupool_python::has_ended() {
            return true;
        }
        if EVERYBODY_ASKS.load(Ordering::Acquire) && !WANTED.load(Ordering::Relaxed) {
            return true;
        }
        let time = libc::timespec { tv_sec: 0, tv_nsec: NAP.subsec_nanos().into() };
        let none = std::ptr::null_mut::<libc::timespec>();
        // SAFETY: the time is a local, and NULL asks for no answer about what was left of it.
        let answer =
            unsafe { libc::syscall(libc::SYS_clock_nanosleep, libc::CLOCK_MONOTONIC, 0, &raw const time, none) };
        // SAFETY: it is this thread's error number.
        answer != 0 && unsafe { *libc::__errno_location() } == libc::EINTR
    }

    fn wanted(&self) {
        WANTED.store(true, Ordering::Release);
        bell::wake();
    }
}
