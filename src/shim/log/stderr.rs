//! Warnings for the person in front of the terminal.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Different warnings that are remembered; beyond that a repetition may show again, which costs less than memory that
/// grows for as long as somebody's program runs.
const REMEMBERED: usize = 1024;

static WARNINGS: AtomicU64 = AtomicU64::new(0);

/// Warnings and errors so far, shown or not.
pub fn warnings() -> u64 {
    WARNINGS.load(Ordering::Relaxed)
}

pub(super) fn count_warning() {
    WARNINGS.fetch_add(1, Ordering::Relaxed);
}

/// Counts what it is shown.
pub(super) struct Tally;

impl<S: Subscriber> Layer<S> for Tally {
    fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
        count_warning();
    }
}

/// Writes every event's message as text, a repeated warning once.
pub(super) struct Text {
    descriptor: libc::c_int,
    hasher: RandomState,
    said: Mutex<HashSet<u64>>,
}

impl Text {
    pub(super) fn new(descriptor: libc::c_int) -> Self {
        Text { descriptor, hasher: RandomState::new(), said: Mutex::new(HashSet::new()) }
    }

    fn said_before(&self, message: &str) -> bool {
        let hash = self.hasher.hash_one(message);
        // After a fork the lock may be held by a thread that no longer exists; then a repetition is the lesser evil.
        self.said.try_lock().is_some_and(|mut said| {
            if said.len() >= REMEMBERED {
                said.clear();
            }
            !said.insert(hash)
        })
    }
}

impl<S: Subscriber> Layer<S> for Text {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let finding = *event.metadata().level() <= Level::WARN;
        if !(finding && self.said_before(&message.0)) {
            say(self.descriptor, level, &message.0);
        }
    }
}

/// Keeps the message and passes over the fields: the message is a whole sentence by our own rule.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// `gpupool: LEVEL: MESSAGE` in one write, further lines of the message indented.
pub(super) fn say(descriptor: libc::c_int, level: &str, message: &str) {
    write_once(descriptor, format!("gpupool: {level}: {}\n", message.replace('\n', "\n  ")).as_bytes());
}

/// One `write(2)`, repeated only where a signal came before the first byte. Returns the bytes written, 0 for any error.
///
/// A reader that went away must not cost the program its life: it would not have written here by itself. So SIGPIPE is
/// held back in this thread for the duration of the write, and taken off the queue if the write raised it.
pub(super) fn write_once(descriptor: libc::c_int, bytes: &[u8]) -> usize {
    let mut pipe = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    let mut pending = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: each set is filled by the call that takes it mutably before another call reads it, and all of them live
    // until the end of this function. `bytes` is readable for its length.
    unsafe {
        libc::sigemptyset(pipe.as_mut_ptr());
        libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
        libc::sigemptyset(pending.as_mut_ptr());
        libc::sigpending(pending.as_mut_ptr());
        let was_pending = libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1;
        let held = libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), before.as_mut_ptr()) == 0;

        let mut written = libc::write(descriptor, bytes.as_ptr().cast(), bytes.len());
        while written < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
            written = libc::write(descriptor, bytes.as_ptr().cast(), bytes.len());
        }
        let broken = written < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EPIPE);

        if held {
            if broken && !was_pending {
                let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                libc::sigtimedwait(pipe.as_ptr(), ptr::null_mut(), &now);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        }
        usize::try_from(written).unwrap_or(0)
    }
}
