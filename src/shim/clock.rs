//! Time: since the process started, and cheaply.

use gpupool_interpose::cancel;
use once_cell::race::OnceBox;
use std::time::Duration;

/// When the process started, in clock ticks since the machine did: field 22 of `/proc/self/stat`.
pub fn started_at() -> Option<u64> {
    let _sheltered = cancel::shelter();
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

/// Seconds since the process started; 0 where the system does not tell when that was.
pub fn uptime() -> f64 {
    static STARTED: OnceBox<Option<u64>> = OnceBox::new();
    STARTED.get_or_init(|| Box::new(started_at())).map_or(0.0, seconds_since)
}

/// Seconds since so many clock ticks after the machine's start.
pub fn seconds_since(ticks: u64) -> f64 {
    // SAFETY: sysconf has no preconditions.
    let then = ticks as f64 / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the output is a local.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    (now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9 - then).max(0.0)
}

/// A clock that costs a few nanoseconds and ticks every few milliseconds.
#[inline]
pub fn coarse_now() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the output is a local; the clock exists since Linux 2.6.32.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Nanoseconds of a clock that only goes on. A system call at most, and no place at which a thread can be cancelled.
pub fn monotonic_nanoseconds() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the output is a local. The clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
