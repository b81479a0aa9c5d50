//! Which streams are being captured into graphs.
//!
//! `cuCtxSynchronize` during a capture fails and invalidates it, in every capture mode, so nothing of ours waits while
//! one is under way: frees become lazy, and the memory is reused after the capture.
//!
//! Where the library is preloaded, captures are seen to begin and end. Where a program has only opened it, it looks at
//! what it can: see [`look`].

use crate::driver::{CuResult, Driver};
use crate::process;
use cudarc::driver::sys::CUstream;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The per-thread default stream is one handle for many streams.
const PER_THREAD: usize = 2;

/// `(stream, thread)` of captures under way; the thread is 0 for streams of their own handle.
static CAPTURES: Mutex<Vec<(usize, u64)>> = Mutex::new(Vec::new());
/// How many there are, readable without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// How many calls under way found a capture by [`look`].
static LOOKED: AtomicUsize = AtomicUsize::new(0);

/// Whether any stream of the process is being captured.
#[inline]
pub fn under_way() -> bool {
    COUNT.load(Ordering::Acquire) + LOOKED.load(Ordering::Acquire) != 0
}

/// Held for a call of a program that has only opened this library: a capture was found, and nothing may synchronise.
pub struct Looked(());

impl Drop for Looked {
    fn drop(&mut self) {
        LOOKED.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Whether this stream is being captured, or any other that the legacy stream waits for, in a process where captures are
/// not seen to begin. (A capture on a non-blocking stream other than this one stays unseen; the driver has no question
/// that would find it.)
pub fn look(driver: &Driver, stream: CUstream) -> Option<Looked> {
    if process::is_preloaded() {
        return None;
    }
    let captured = |stream| {
        let mut status = 0;
        // SAFETY: the stream is the program's, or the legacy one; the output is a local.
        let result = unsafe { (driver.cuStreamIsCapturing)(stream, &raw mut status) };
        result == CuResult::STREAM_CAPTURE_IMPLICIT || (result.is_ok() && status != 0)
    };
    (captured(stream) || captured(std::ptr::null_mut())).then(|| {
        LOOKED.fetch_add(1, Ordering::AcqRel);
        Looked(())
    })
}

fn key(stream: CUstream, per_thread_default: bool) -> (usize, u64) {
    let handle = stream as usize;
    if handle == PER_THREAD || (handle == 0 && per_thread_default) {
        // SAFETY: pthread_self has no preconditions.
        return (PER_THREAD, unsafe { libc::pthread_self() });
    }
    (handle, 0)
}

/// The driver began to capture this stream. `per_thread_default`: the call was of the `_ptsz` kind.
pub fn began(stream: CUstream, per_thread_default: bool) {
    let mut captures = CAPTURES.lock();
    let key = key(stream, per_thread_default);
    if !captures.contains(&key) {
        captures.push(key);
    }
    COUNT.store(captures.len(), Ordering::Release);
}

/// The capture of this stream ended, well or not, or the stream is gone.
pub fn ended(stream: CUstream, per_thread_default: bool) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let mut captures = CAPTURES.lock();
    let key = key(stream, per_thread_default);
    captures.retain(|capture| *capture != key);
    COUNT.store(captures.len(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the captures are the process's.
    #[test]
    fn counts_streams_and_keeps_threads_apart_on_the_per_thread_default() {
        let own = 0x1000 as CUstream;
        let default = std::ptr::null_mut();
        began(own, false);
        began(own, false);
        assert!(under_way());
        ended(own, false);
        assert!(!under_way(), "a stream is captured once, however often it was said");
        began(default, true);
        std::thread::spawn(|| ended(std::ptr::null_mut(), true)).join().unwrap();
        assert!(under_way(), "another thread's default stream is another stream");
        ended(PER_THREAD as CUstream, false);
        assert!(!under_way(), "the handle 2 is the per-thread default stream, whatever the call's name");
        ended(own, false);
    }
}
