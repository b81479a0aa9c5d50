//! Warnings for the person in front of the terminal.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::output;
use gpupool_interpose::cancel;

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
    write(descriptor, &format!("gpupool: {level}: {}\n", message.replace('\n', "\n  ")));
}

/// A warning that comes past every filter, because it tells why something else does not come.
pub(super) fn warn_now(message: &str) {
    say(libc::STDERR_FILENO, "warning", message);
    count_warning();
}

/// Writes text for a person. Names of files, of Python's functions and values of variables are in it, which a terminal may
/// take for commands: of control characters only line feeds go through. A reader that is stuck does not stop the program.
pub(super) fn write(descriptor: libc::c_int, text: &str) {
    let _sheltered = cancel::shelter();
    if descriptor == libc::STDERR_FILENO && !is_stderr() {
        return;
    }
    let mut whole = clean(text);
    let missing = MISSING.swap(0, Ordering::Relaxed);
    if missing > 0 {
        let (lines, were) = if missing == 1 { ("line", "was") } else { ("lines", "were") };
        whole.insert_str(0, &format!("gpupool: {missing} {lines} before this one {were} lost: nobody read them\n"));
    }
    let torn = TORN.swap(false, Ordering::Relaxed);
    if torn {
        whole.insert(0, '\n');
    }
    if let Err((written, error)) = output::write_ready(descriptor, whole.as_bytes())
        && error.kind() == io::ErrorKind::WouldBlock
    {
        TORN.store(torn || written > 0, Ordering::Relaxed);
        MISSING.fetch_add(missing + text.lines().count() as u64, Ordering::Relaxed);
    }
}

/// Lines that were not written because they would have waited for a reader, since that was last told; and whether a part of the last
/// one was.
static MISSING: AtomicU64 = AtomicU64::new(0);
static TORN: AtomicBool = AtomicBool::new(false);

/// `text` without what a terminal would obey: control characters, and those that reorder what stands around them.
fn clean(text: &str) -> String {
    let obeyed = |c: char| {
        (c.is_control() && c != '\n')
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|c| if obeyed(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Device and inode of descriptor 2 when the library was loaded; an inode is never 0.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);

/// Notes what descriptor 2 is. A program may close it later, and a file of its own gets the number.
pub fn remember_stderr() {
    if let Ok(status) = output::status(libc::STDERR_FILENO) {
        DEVICE.store(status.st_dev, Ordering::Relaxed);
        INODE.store(status.st_ino, Ordering::Relaxed);
    }
}

/// Whether descriptor 2 is what it was. A program that sends its stderr elsewhere by `dup2` is not told apart from one
/// whose data file got the number: text of ours in a data file does more harm than text of ours that nobody sees, and the
/// log has it all.
fn is_stderr() -> bool {
    let was = (DEVICE.load(Ordering::Relaxed), INODE.load(Ordering::Relaxed));
    was.1 != 0 && output::status(libc::STDERR_FILENO).is_ok_and(|status| (status.st_dev, status.st_ino) == was)
}

#[cfg(test)]
mod tests {
    use super::clean;

    #[test]
    fn what_a_terminal_would_obey_is_taken_out() {
        assert_eq!(clean("a\u{1b}[2Jb\r\u{9b}c\u{202e}d\ne"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c\u{fffd}d\ne");
        assert_eq!(clean("gpu0 ×2 ünïcode"), "gpu0 ×2 ünïcode");
    }
}
