//! Chunks of which the program has freed a large part are cut anew, so that a request stays near or is served at all, and what is free
//! goes home when the program trims ([`gpupool_pool::Pool::repack`]).
//!
//! Without `GPUPOOL_MOVE` this is done for a request alone that would be refused, as without gpupool it would often not be: one block in use keeps a chunk
//! whole that the driver would have given back.
//!
//! The thread that asked for memory does it, or for the trim: it would be told OUT_OF_MEMORY or get slow memory otherwise. It waits for
//! no longer than a launch does for a swap, and a process whose GPUs do not come to rest loses no more than `GPUPOOL_MOVE_SHARE` to such
//! waits; the answer is then what it would have been without.

use super::{home, keeps_atomics, now, obstacles, share, stays, stress, swap};
use crate::backing::{level, open};
use crate::gate::{self, Disturbed, Limits, Reason};
use crate::serve::memory::places;
use crate::watch::capture;
use crate::{bell, log, process};
use gpupool_config::{Move, format_size};
use gpupool_events::PoolRepack;
use gpupool_pool::{MoveError, Place, Repacked};
use gpupool_tiers::Range;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// One thread at a time: another one's request would wait for the same devices, and for the same chunks.
static IS_BUSY: AtomicBool = AtomicBool::new(false);
/// Until then nothing is tried, on the clock of [`now`]: the last try waited in vain.
static RESTS_UNTIL: AtomicU64 = AtomicU64::new(0);
/// How long a request waits for the work in front of it, before it is answered as it would have been.
const QUEUE: Duration = Duration::from_millis(500);

/// Cuts half-used chunks at this place anew until so many bytes came free; how many did.
#[cold]
pub(super) fn repack(place: Place, bytes: u64, why: &'static str) -> u64 {
    // An update of a graph whose copies were moved may be refused; that was not measured yet.
    if capture::has_graphs() && !stress::is_on() {
        if process::settings().moving != Move::Off {
            swap::report_graphs();
        }
        return 0;
    }
    if now() < RESTS_UNTIL.load(Ordering::Relaxed)
        || IS_BUSY.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
    {
        return 0;
    }
    let freed = repack_alone(place, bytes, why);
    IS_BUSY.store(false, Ordering::Release);
    freed
}

fn repack_alone(place: Place, bytes: u64, why: &'static str) -> u64 {
    let (Some(opened), Some(driver)) = (open::opened(), process::driver()) else { return 0 };
    let begun = now();
    // Who has not asked for moves gets one instead of OUT_OF_MEMORY only where nothing might be at work unseen.
    let is_reason = |reason: &Reason| !reason.is_doubt() || process::settings().moving == Move::Off;
    if let Some(reason) = gate::why_not(driver).filter(is_reason) {
        rest(place, &reason);
        return 0;
    }
    let (mut disturbed, mut waited, past, stopped) = (None, 0, Cell::new(None), Cell::new(0));
    let queue = if stress::is_on() { swap::QUEUE_UNDER_STRESS } else { QUEUE };
    let stop = || {
        let begun = now();
        gate::wait_until_quiet(driver, queue, queue, || 0);
        waited += now() - begun;
        let closed = gate::close_unless(driver, &Limits::default(), is_reason);
        closed.map(|closed| swap::Quiet::new(closed, &past, &stopped)).map_err(|what| disturbed = Some(what)).ok()
    };
    let is_fixed = |address: u64, bytes: u64| {
        let mut any = false;
        stays(Range::of(address, bytes), &mut |_| any = true);
        any
    };
    let answer = opened.pool.repack(place, bytes, |over| keeps_atomics(opened, over), is_fixed, stop);
    if let Some(what) = &disturbed {
        tracing::debug!(target: "gpupool::memory", about = "moves", "chunks at {place} stay as they are: {what}");
        if let Disturbed::NotHere(reason) = what {
            rest(place, reason);
        } else if !stress::is_on() {
            RESTS_UNTIL.store(now() + (now() - begun) * 1000 / u64::from(share().max(1)), Ordering::Relaxed);
        }
    }
    let Repacked { freed, copied, away, cut_short } = match answer {
        Ok(repacked) => repacked,
        Err(MoveError::NotNow) => return 0,
        Err(error @ MoveError::NotQuiet) => Repacked { cut_short: Some(error), ..Repacked::default() },
        Err(error) => {
            tracing::debug!(target: "gpupool::memory", about = "moves", "chunks at {place} stay as they are: {error:?}");
            return 0;
        }
    };
    match cut_short {
        Some(MoveError::NotQuiet) => ended(place, swap::passed(past.take())),
        Some(MoveError::Backend(error)) => ended(place, Reason::CutShort(error)),
        _ => {}
    }
    for &(address, bytes) in &away {
        places::tell_moved(address, bytes);
        let block = opened.pool.block_at(address);
        if let Some(home) = block.and_then(|block| home(block.home)) {
            home.tiers.lock().placed(Range::of(address, bytes));
        }
    }
    if copied == 0 && away.is_empty() {
        return 0;
    }
    level::report();
    bell::changed();
    obstacles::tell_doubts(driver);
    log::emit(|| {
        let microseconds = (now() - begun).saturating_sub(waited) / 1000;
        let away = away.iter().map(|range| range.1).sum();
        let event = PoolRepack { place: place.to_string(), why: why.to_owned(), freed, copied, away, microseconds };
        let [more, size] = [freed, copied].map(format_size);
        (event, format!("{more} came free at {place} by giving {size} chunks of their own, in {microseconds} µs"))
    });
    freed
}

/// Nothing is tried for a while, for a reason that holds for the whole process.
fn rest(place: Place, reason: &Reason) {
    RESTS_UNTIL.store(now() + swap::LOOKS_AGAIN.as_nanos() as u64, Ordering::Relaxed);
    let gpu = if let Place::Gpu(gpu) = place { gpu } else { 0 };
    // Who has not asked for moves is not told that there are none.
    if process::settings().moving != Move::Off {
        swap::report_off(gpu, reason);
    }
}

/// What was found ends all moves of the process: what comes next could take memory from under work that nobody sees.
#[cold]
fn ended(place: Place, reason: Reason) {
    rest(place, &reason);
    gate::found(reason);
}
