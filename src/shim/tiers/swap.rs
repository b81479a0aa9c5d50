//! Carries a swap out: what comes near and what goes away for it, in one go, with the program stopped for the copies alone.

use super::{Home, now};
use crate::backing::level;
use crate::gate::{self, Closed, Disturbed, Limits};
use crate::{bell, log};
use gpupool_config::format_size;
use gpupool_events::{TierStop, TierSwap};
use gpupool_pool::{MoveError, Moved, Place, Stopped, Wish};
use gpupool_tiers::{self as tiers, Range, Swap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What made it worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A launch gains more by it than it costs.
    Launch,
    /// Every launch moves something.
    Stress,
}

impl Why {
    fn word(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Stress => "stress",
        }
    }
}

/// How long a launch waits for the work in front of it, with the gate open: frameworks run as far ahead (10 to 300 ms).
const QUEUE: Duration = Duration::from_millis(500);
/// How long it waits at most while nothing of that work comes to an end.
const STILL: Duration = Duration::from_millis(50);

/// Swaps that were carried out, bytes that came near, and that left for it, over the life of the process.
static SWAPS: AtomicU64 = AtomicU64::new(0);
static CAME: AtomicU64 = AtomicU64::new(0);
static LEFT: AtomicU64 = AtomicU64::new(0);

/// What moved, over the life of the process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Carried {
    pub swaps: u64,
    pub came: u64,
    pub left: u64,
}

/// See [`Carried`].
pub fn carried() -> Carried {
    let [swaps, came, left] = [&SWAPS, &CAME, &LEFT].map(|counter| counter.load(Ordering::Relaxed));
    Carried { swaps, came, left }
}

/// The gate, closed, as the pool asks of it.
struct Quiet(Closed<'static>);

impl Stopped for Quiet {
    fn still_quiet(&mut self) -> bool {
        self.0.still_quiet().is_ok()
    }
}

/// Carries it out, if the devices come to rest soon enough; tells the tiers what became of it.
pub(super) fn carry_out(home: &Home, swap: &Swap, why: Why) {
    let done = home.alone(|| try_swap(home, swap, why));
    // Another thread moves something: this one is not told that its swap failed, and asks again at a later launch.
    let Some(Err(why_not)) = done else { return };
    let mut tiers = home.tiers.lock();
    for range in ranges(swap) {
        tiers.stayed(range);
    }
    drop(tiers);
    tracing::debug!(target: "gpupool::memory", about = "moves", "nothing moved for GPU {}: {why_not}", home.gpu);
}

fn ranges(swap: &Swap) -> impl Iterator<Item = Range> {
    swap.near.iter().copied().chain(swap.far.iter().map(|(range, _)| *range))
}

/// Why nothing moved.
enum WhyNot {
    /// The devices did not come to rest.
    Disturbed(Disturbed),
    Pool(String),
}

impl std::fmt::Display for WhyNot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Disturbed(what) => what.fmt(f),
            Self::Pool(what) => f.write_str(what),
        }
    }
}

fn try_swap(home: &Home, swap: &Swap, why: Why) -> Result<(), WhyNot> {
    let near = swap.near.iter().map(|range| (*range, Place::Gpu(home.gpu)));
    let far = swap.far.iter().filter_map(|(range, place)| Some((*range, *home.places.get(usize::from(*place))?)));
    let wishes: Vec<Wish> =
        near.chain(far).map(|(range, to)| Wish { address: range.start, bytes: range.bytes(), to }).collect();
    let begun = now();
    let mut disturbed = None;
    let stop = || {
        gate::wait_until_quiet(home.driver, QUEUE, STILL, || 0);
        let closed = gate::close(home.driver, &Limits::default());
        closed.map(Quiet).map_err(|what| disturbed = Some(what)).ok()
    };
    let answer = home.opened.pool.rearrange(&wishes, stop);
    let outcomes = match answer {
        Ok(done) => done.wishes,
        Err(MoveError::NotNow) => {
            return Err(disturbed.map_or_else(|| WhyNot::Pool("a GPU is at work on it".to_owned()), WhyNot::Disturbed));
        }
        Err(error) => return Err(WhyNot::Pool(format!("{error:?}"))),
    };
    let took = now() - begun;
    let (mut came, mut left, mut stayed) = (0, 0, 0);
    let mut tiers = home.tiers.lock();
    for (wish, Moved { moved, anchored, shared, .. }) in wishes.iter().zip(outcomes) {
        let range = Range::of(wish.address, wish.bytes);
        *(if wish.to == Place::Gpu(home.gpu) { &mut came } else { &mut left }) += moved;
        stayed += anchored + shared;
        tiers.placed(range);
        if moved == 0 {
            tiers.stayed(range);
        }
    }
    tiers.moved(came, left, took);
    drop(tiers);
    if came + left > 0 {
        SWAPS.fetch_add(1, Ordering::Relaxed);
        CAME.fetch_add(came, Ordering::Relaxed);
        LEFT.fetch_add(left, Ordering::Relaxed);
        level::report();
        bell::changed();
    }
    log::emit(|| {
        let event = TierSwap {
            home: home.gpu,
            why: why.word().to_owned(),
            bytes_in: came,
            bytes_out: left,
            stayed,
            microseconds: took / 1000,
        };
        let [came, left] = [came, left].map(format_size);
        (event, format!("GPU {}: {came} came near, {left} left, in {} µs", home.gpu, took / 1000))
    });
    Ok(())
}

/// Nothing moves for this GPU any more, until the program does something else.
pub(super) fn report_stopped(home: &Home, why: &tiers::Why) {
    log::emit(|| {
        let reason = match why {
            tiers::Why::Slower { before_ns, now_ns } => {
                format!("a round takes {:.1} ms, and took {:.1} before anything moved", now_ns / 1e6, before_ns / 1e6)
            }
            tiers::Why::Unpaid { spent_ns, saved_ns } => {
                format!("moving took {:.1} ms and saved {:.1}", spent_ns / 1e6, saved_ns / 1e6)
            }
        };
        let text = format!("GPU {}: memory stays where it is for now, since {reason}", home.gpu);
        (TierStop { home: home.gpu, why: reason }, text)
    });
}
