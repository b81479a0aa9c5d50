//! Freed memory that goes home: what the agent's thread may do with the pool, and when it must not.
//!
//! The agent has no context and waits for nobody. What it returns is quiet: `cuMemUnmap` and `cuMemRelease` need no context for
//! that, and neither waits (`tests/programs/unmap_without_context.c`). It does so in parts, and none of them is under way while
//! this process forks or once it ends: a child would inherit whatever the driver has locked meanwhile.

use super::{TRIMS, count};
use crate::backing::level;
use crate::backing::open;
use crate::log;
use crate::process;
use crate::watch::capture;
use gpupool_config::format_size;
use gpupool_events::PoolTrim;
use gpupool_pool::{FreedMemory, Place};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Bytes that are on their way at once. Whoever asks for memory meanwhile waits for these alone, and finds the rest.
const PART: u64 = 1 << 30;

/// A part is on its way.
const UNDER_WAY: u32 = 1 << 31;
/// The process ends: there is no further part.
const ENDED: u32 = 1 << 30;
/// [`UNDER_WAY`], [`ENDED`], and how many threads are about to fork.
static GATE: AtomicU32 = AtomicU32::new(0);
/// How often a fork looks whether the part is over, and how long it sleeps in between. The driver might hold it up for the sake
/// of the very thread that forks, so it goes on some time.
const LOOKS: u32 = 10_000;
const NAP: Duration = Duration::from_micros(100);

/// Held while a part is on its way, or the agent asks NVML.
pub struct Part(());

impl Part {
    /// `None` while somebody forks, or the process ends.
    pub fn begin() -> Option<Self> {
        // Made only where it began: the end of one that did not would be taken for that of whoever has it.
        GATE.compare_exchange(0, UNDER_WAY, Ordering::AcqRel, Ordering::Relaxed).is_ok().then(|| Self(()))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        GATE.fetch_and(!UNDER_WAY, Ordering::AcqRel);
    }
}

/// This thread is about to fork. No lock and no allocation.
pub fn before_fork() {
    GATE.fetch_add(1, Ordering::AcqRel);
    for _ in 0..LOOKS {
        if GATE.load(Ordering::Acquire) & UNDER_WAY == 0 {
            return;
        }
        std::thread::sleep(NAP);
    }
}

/// It has forked, and this is the parent.
pub fn after_fork_in_parent() {
    GATE.fetch_sub(1, Ordering::AcqRel);
}

/// It has forked, and this is the child: other threads that were about to are not here, nor is the agent.
pub fn after_fork_in_child() {
    GATE.store(0, Ordering::Release);
}

/// The process ends. Nobody waits for the part that is on its way.
pub fn ended() {
    GATE.fetch_or(ENDED, Ordering::AcqRel);
}

/// What is free, where there is a pool.
pub fn freed() -> Option<FreedMemory> {
    open::opened().map(|opened| opened.pool.freed_memory())
}

/// Begins the next period; its number.
pub fn begin_period() -> Option<u32> {
    open::opened().map(|opened| opened.pool.begin_period())
}

/// Returns what nobody used since that period began, at `place` or everywhere, for the reason that the log is to name (`why`,
/// and `text` behind the size); the bytes. Nothing while a stream is being captured.
pub fn give_back_unused(place: Option<Place>, since: u32, why: &str, text: &str) -> u64 {
    let Some(opened) = open::opened() else { return 0 };
    if since == u32::MAX {
        // What was freed just now may be kept where it is not looked for, until a period ends.
        opened.pool.begin_period();
    }
    let mut sum = 0;
    while !capture::under_way()
        && let Some(_part) = Part::begin()
    {
        // A GPU is asked whether it is done by a call that would break a capture which goes unseen. There, what needs that
        // question stays until the program waits.
        let asks = |_| process::is_preloaded();
        match opened.pool.return_unused(place, since, PART, asks) {
            0 => break,
            bytes => sum += bytes,
        }
    }
    if sum > 0 {
        count(&TRIMS);
        level::report();
        log::emit(|| {
            let text = format!("returned {} to the driver: {text}", format_size(sum));
            (PoolTrim { bytes: sum, why: why.to_owned() }, text)
        });
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::tests::ends_in;

    /// A fork would go on while the driver or NVML is at it.
    #[test]
    fn whoever_is_refused_a_part_does_not_end_the_one_that_is_under_way() {
        ends_in(
            "serve::memory::idle::tests",
            "whoever_is_refused_a_part_does_not_end_the_one_that_is_under_way",
            &[],
            0,
            || {
                let part = Part::begin();
                assert!(part.is_some());
                for _ in 0..2 {
                    assert!(Part::begin().is_none());
                }
                drop(part);
                assert!(Part::begin().is_some());
            },
        );
    }
}
