//! How the agent's thread (`agent/`) hears that something has changed which the page tells: one flag.
//!
//! Whoever changes something reads the flag, which is one load of a line that nobody writes as long as nobody has to be
//! woken. The agent puts the flag up when it begins to listen; the first change takes it down and wakes the thread, and
//! for the next second nobody does anything but read. The load is not ordered with the change: where a processor does both
//! the other way round, the change is found by the look a second later, which the agent takes before it sleeps.
//!
//! This knows nobody, so that what is below the agent can ring.

use once_cell::race::OnceBox;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::Thread;

/// Changes are of no interest now: the agent looks by itself, or there is none.
const QUIET: u8 = 0;
/// Nothing was allocated yet.
const FIRST: u8 = 1;
/// The agent sleeps until something changes.
const LISTENING: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(FIRST);
static AT_FIRST: OnceBox<fn()> = OnceBox::new();
static SLEEPER: OnceBox<Thread> = OnceBox::new();

/// What the first allocation calls.
pub fn at_first(call: fn()) {
    let _ = AT_FIRST.set(Box::new(call));
}

/// Memory was allocated that we know of.
#[inline]
pub fn allocated() {
    if STATE.load(Ordering::Relaxed) != QUIET {
        ring_for_allocation();
    }
}

/// Anything else changed that the page tells.
#[inline]
pub fn changed() {
    if STATE.load(Ordering::Relaxed) == LISTENING {
        ring();
    }
}

#[cold]
fn ring_for_allocation() {
    match AT_FIRST.get() {
        Some(call) if STATE.compare_exchange(FIRST, QUIET, Ordering::AcqRel, Ordering::Relaxed).is_ok() => call(),
        _ => ring(),
    }
}

#[cold]
fn ring() {
    if STATE.compare_exchange(LISTENING, QUIET, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        wake();
    }
}

/// Wakes the agent, whatever it sleeps for.
pub fn wake() {
    if let Some(sleeper) = SLEEPER.get() {
        sleeper.unpark();
    }
}

/// The agent says who is to be woken.
pub fn sleeps_here() {
    let _ = SLEEPER.set(Box::new(std::thread::current()));
}

/// The agent wants to be woken by the next change.
pub fn listen() {
    STATE.store(LISTENING, Ordering::SeqCst);
}

/// The agent does not want to be woken for a while.
pub fn mute() {
    STATE.store(QUIET, Ordering::Relaxed);
}

/// Whether nothing has rung since [`listen`].
pub fn is_listening() -> bool {
    STATE.load(Ordering::Acquire) == LISTENING
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    static CALLS: AtomicU32 = AtomicU32::new(0);

    /// One test, because the flag is the process's.
    #[test]
    fn the_first_allocation_starts_and_the_first_change_wakes() {
        allocated();
        changed();
        assert_eq!(STATE.load(Ordering::Relaxed), FIRST, "nobody is there to be started");
        at_first(|| {
            CALLS.fetch_add(1, Ordering::Relaxed);
        });
        (0..3).for_each(|_| allocated());
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
        sleeps_here();
        listen();
        assert!(is_listening());
        changed();
        assert!(!is_listening());
        // Returns at once, because it was woken.
        std::thread::park();
        listen();
        mute();
        assert!(!is_listening());
    }
}
