//! How the agent's thread (`agent/`) hears that something has changed which the page tells: one flag.
//!
//! Whoever changes something reads the flag, which is one load of a line that nobody writes as long as nobody has to be
//! woken. The agent puts the flag up when it begins to listen; the first change takes it down and wakes the thread, and
//! for the next second nobody does anything but read. The load is not ordered with the change: where a processor does both
//! the other way round, the change is found by the look a second later, which the agent takes before it sleeps.
//!
//! The thread sleeps on a word of the metrics page, where there is one, so that other processes can ring as well
//! ([`gpupool_metrics::ring`]): it needs no descriptor for that, which the program could close, and does not wake to look.
//!
//! This knows nobody, so that what is below the agent can ring.

use gpupool_metrics::Map;
use once_cell::race::OnceBox;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// Changes are of no interest now: the agent looks by itself, or there is none.
const QUIET: u8 = 0;
/// Nothing was allocated yet.
const FIRST: u8 = 1;
/// The agent sleeps until something changes.
const LISTENING: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(FIRST);
static AT_FIRST: OnceBox<fn()> = OnceBox::new();
static SLEEPER: OnceBox<Thread> = OnceBox::new();
/// How often anybody rang in this process.
static RINGS: AtomicU32 = AtomicU32::new(0);
/// The page that it sleeps at.
static PAGE: OnceBox<Map> = OnceBox::new();
/// Nobody can sleep there any more.
static PAGE_IS_CUT: AtomicBool = AtomicBool::new(false);
/// What other processes leave alone of the page's word, and what they change.
const OWN: u32 = (1 << 31) - 1;

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
    let Some(sleeper) = SLEEPER.get() else { return };
    let number = RINGS.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
    if !page().is_some_and(|page| page.ring_own(number & OWN)) {
        sleeper.unpark();
    }
}

/// The page that the agent sleeps at, where there is one.
pub fn page() -> Option<&'static Map> {
    PAGE.get().filter(|_| !PAGE_IS_CUT.load(Ordering::Relaxed))
}

/// The agent sleeps at this page from now on, before its first sleep.
pub fn sleeps_at(page: Map) {
    let _ = PAGE.set(Box::new(page));
}

/// The agent says who is to be woken.
pub fn sleeps_here() {
    let _ = SLEEPER.set(Box::new(std::thread::current()));
}

/// What to give to [`sleep`], asked before the agent looks what there is to do: whoever rings later ends that sleep at once.
pub fn rung() -> u32 {
    let Some(page) = page() else { return 0 };
    page.bell().unwrap_or_else(|| {
        // The file was cut, or the main thread has left, after which the system finds the process's memory no more by its number.
        PAGE_IS_CUT.store(true, Ordering::Release);
        0
    })
}

/// The agent's sleep, until somebody rings after that [`rung`], or for so long.
pub fn sleep(rung: u32, limit: Option<Duration>) {
    match (page(), limit) {
        // Whoever rings from here on wakes the thread itself, and it looks at everything once more before it sleeps so.
        (Some(page), _) => PAGE_IS_CUT.store(!page.sleep(rung, limit), Ordering::Release),
        (None, Some(limit)) => std::thread::park_timeout(limit),
        (None, None) => std::thread::park(),
    }
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
        let rung = rung();
        listen();
        assert!(is_listening());
        changed();
        assert!(!is_listening());
        // Returns at once, because it was woken.
        sleep(rung, None);
        listen();
        mute();
        assert!(!is_listening());
    }
}
