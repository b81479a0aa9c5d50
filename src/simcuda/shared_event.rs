//! Events that several processes use: how often one was recorded, and how far that got, in a memory file.

use crate::boundary::{Phase, phase};
use crate::error::{Code, Outcome};
use crate::physical::{alias, memory_file, unalias};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

const BYTES: u64 = 4096;
pub const NAME: &str = "simcuda-event";

/// The file's contents. Counters wrap, and are compared by their difference.
#[repr(C)]
struct Counters {
    recorded: AtomicU32,
    done: AtomicU32,
    /// The process that recorded it last.
    recorder: AtomicU32,
}

pub struct SharedEvent {
    file: OwnedFd,
    base: usize,
}

impl SharedEvent {
    pub fn new() -> Outcome<Self> {
        Self::over(memory_file(NAME, BYTES).map_err(|_| Code::OPERATING_SYSTEM)?)
    }

    /// The event in a file of another process.
    pub fn over(file: OwnedFd) -> Outcome<Self> {
        let base = alias(&file, BYTES).ok_or(Code::OPERATING_SYSTEM)?;
        Ok(Self { file, base })
    }

    pub fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }

    fn counters(&self) -> &Counters {
        // SAFETY: a shared mapping of a whole page that lives as long as `self`; all fields are atomics, for which every
        // value is legal, whatever the other process does.
        unsafe { &*(self.base as *const Counters) }
    }

    /// The number of the latest recording.
    pub fn recorded(&self) -> u32 {
        self.counters().recorded.load(Ordering::Acquire)
    }

    /// A new recording, whose number [`SharedEvent::finish`] is to be given when its stream gets there.
    pub fn begin(&self) -> u32 {
        self.counters().recorder.store(std::process::id(), Ordering::Release);
        self.counters().recorded.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
    }

    pub fn finish(&self, number: u32) {
        self.counters().done.store(number, Ordering::Release);
        // SAFETY: the word lies in a mapping that `self` holds; the call only wakes those who wait at it.
        unsafe { libc::syscall(libc::SYS_futex, &raw const self.counters().done, libc::FUTEX_WAKE, i32::MAX) };
    }

    pub fn is_done(&self, number: u32) -> bool {
        // Differences up to half the range count as later.
        self.counters().done.load(Ordering::Acquire).wrapping_sub(number) <= u32::MAX / 2
    }

    /// Waits for a recording, or for the end of the process that made it: its work will not be done any more.
    pub fn wait(&self, number: u32) {
        let pause = libc::timespec { tv_sec: 1, tv_nsec: 0 };
        while !self.is_done(number) && phase() == Phase::Ready && self.recorder_lives() {
            let word = &self.counters().done;
            let seen = word.load(Ordering::Acquire);
            if !self.is_done(number) {
                // SAFETY: the word lies in a mapping that `self` holds; the call returns when the word
                // is no longer `seen`, when woken, or after the pause, which is there to look whether the recorder still lives.
                unsafe { libc::syscall(libc::SYS_futex, &raw const *word, libc::FUTEX_WAIT, seen, &raw const pause) };
            }
        }
    }

    fn recorder_lives(&self) -> bool {
        let process = self.counters().recorder.load(Ordering::Acquire);
        std::fs::exists(format!("/proc/{process}")).unwrap_or(true)
    }
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        unalias(self.base, BYTES);
    }
}
