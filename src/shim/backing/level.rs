//! How much is held and in use, told over time: whenever the pool grows or shrinks, and when what is in use has risen or
//! fallen much since it was last told, which reused memory does without either.
//!
//! A block that comes or goes costs an addition and a comparison on a number of its thread. Only when that has changed by a
//! whole step do threads meet. How often the level is told is bounded by bytes: a step of difference each time,
//! and, the more was told, the more that must have come and gone in between, up to what a GPU holds. So a program that
//! allocates and frees the same in a loop does not fill its log. Where blocks are as large as that difference, it is told so seldom, too, that
//! telling takes a small part of the time: a line takes ten times as long as a pair of blocks.

use super::{map, residence};
use crate::clock::monotonic_nanoseconds as now;
use crate::log;
use gpupool_events::{PlaceLevel, PoolLevel};
use gpupool_pool::{PlaceSpec, PlaceUsage, Usage};
use once_cell::race::OnceBox;
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// A difference worth telling, and worth a thread's speaking up, is what the largest GPU may hold over this.
const STEPS: u64 = 64;
/// The least step.
const LEAST: u64 = 16 << 20;

/// Bytes; nothing is told before there is a pool.
static STEP: AtomicU64 = AtomicU64::new(u64::MAX);
/// Bytes in use, as far as threads have spoken up.
static IN_USE: AtomicI64 = AtomicI64::new(0);
/// Bytes in use when the level was last told.
static TOLD: AtomicI64 = AtomicI64::new(0);
/// Bytes that came and went since then.
static MOVED: AtomicU64 = AtomicU64::new(0);
/// How often it was told because of what is in use.
static TIMES: AtomicU64 = AtomicU64::new(0);
/// Until then it is not told for that any more, once that was often.
static RESTS_UNTIL: AtomicU64 = AtomicU64::new(0);
/// The part of the time that telling may take: one over this.
const SPARINGLY: u64 = 64;

thread_local! {
    /// What this thread has not spoken of yet. `const` and without a destructor: legal at any time.
    static CHANGE: Cell<i64> = const { Cell::new(0) };
}

/// What the pool, or managed memory in its stead, has where.
static USAGE: OnceBox<fn() -> Option<Usage>> = OnceBox::new();

fn usage() -> Option<Usage> {
    USAGE.get()?()
}

/// There is a pool over these places; `usage` says what it holds.
pub fn opened(places: &[PlaceSpec], usage: fn() -> Option<Usage>) {
    let _ = USAGE.set(Box::new(usage));
    let largest = places.iter().filter(|spec| !spec.place.is_host()).map(|spec| spec.limit).max().unwrap_or(0);
    STEP.store((largest / STEPS).max(LEAST), Relaxed);
}

/// A block of so many bytes began.
#[inline]
pub fn rose(bytes: u64) {
    changed(bytes as i64);
}

/// A block of so many bytes ended.
#[inline]
pub fn fell(bytes: u64) {
    changed(-(bytes as i64));
}

#[inline]
fn changed(bytes: i64) {
    let change = CHANGE.get().wrapping_add(bytes);
    CHANGE.set(change);
    if change.unsigned_abs() >= STEP.load(Relaxed) {
        speak_up();
    }
}

#[cold]
fn speak_up() {
    let change = CHANGE.replace(0);
    let in_use = IN_USE.fetch_add(change, Relaxed).wrapping_add(change);
    let moved = MOVED.fetch_add(change.unsigned_abs(), Relaxed).saturating_add(change.unsigned_abs());
    let step = STEP.load(Relaxed);
    let gap = step.saturating_mul((1 + TIMES.load(Relaxed) / STEPS).min(STEPS));
    if in_use.abs_diff(TOLD.load(Relaxed)) < step || moved < gap {
        return;
    }
    let begun = now();
    if TIMES.load(Relaxed) >= STEPS && begun < RESTS_UNTIL.load(Relaxed) {
        MOVED.store(0, Relaxed);
        return;
    }
    let usage = usage().unwrap_or_default();
    // Threads that ended without having spoken of their rest make the sum drift; this is what it should be.
    let exact = in_use_of(&usage);
    if exact.abs_diff(TOLD.load(Relaxed)) < step {
        IN_USE.store(exact, Relaxed);
        return;
    }
    TIMES.fetch_add(1, Relaxed);
    tell(&usage);
    let ended = now();
    RESTS_UNTIL.store(ended + (ended - begun) * SPARINGLY, Relaxed);
}

fn in_use_of(usage: &Usage) -> i64 {
    usage.places.iter().map(|place| place.used as i64).sum()
}

/// What every place holds and has in use now.
pub fn report() {
    tell(&usage().unwrap_or_default());
}

/// Tells the level at the end of the process, where it is another than was told last.
pub fn report_last() {
    if let Some(usage) = usage().filter(|usage| in_use_of(usage) != TOLD.load(Relaxed)) {
        tell(&usage);
    }
    map::tell_now();
}

fn tell(usage: &Usage) {
    let exact = in_use_of(usage);
    IN_USE.store(exact, Relaxed);
    TOLD.store(exact, Relaxed);
    MOVED.store(0, Relaxed);
    log::emit(|| {
        let of =
            |&PlaceUsage { place, held, used, .. }: &PlaceUsage| PlaceLevel { place: place.to_string(), held, used };
        (PoolLevel { places: usage.places.iter().map(of).collect() }, "what is held and in use has changed")
    });
    residence::tell(usage);
    map::tell();
}
