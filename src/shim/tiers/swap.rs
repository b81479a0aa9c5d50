//! Carries a swap out: what comes near and what goes away for it, in one go, with the program stopped for the copies alone.

use super::{Home, now, share, stays, timing};
use crate::backing::level;
use crate::gate::{self, Closed, Disturbed, Limits, Reason};
use crate::watch::capture;
use crate::{bell, log};
use gpupool_config::format_size;
use gpupool_events::{TierStop, TierSwap};
use gpupool_pool::{MoveError, Moved, Place, Stopped, Wish};
use gpupool_tiers::{self as tiers, Range, Swap};
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What made it worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A launch gains more by it than it costs.
    Launch,
    /// The program has waited, and what is used most comes near.
    Idle,
    /// Every launch moves something.
    Stress,
}

impl Why {
    fn word(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Idle => "idle",
            Self::Stress => "stress",
        }
    }
}

/// How long a launch waits for the work in front of it, with the gate open and while some of that is seen to end: frameworks run as far ahead (10 to 300 ms).
pub(super) const QUEUE: Duration = Duration::from_millis(500);
/// The same under stress, where every launch would wait.
const QUEUE_UNDER_STRESS: Duration = Duration::from_millis(20);
/// When a process in which nothing may move is looked at again: devices are closed, too.
const LOOKS_AGAIN: Duration = Duration::from_secs(10);

/// Swaps that were carried out, and bytes that came near by them, over the life of the process.
static SWAPS: AtomicU64 = AtomicU64::new(0);
static CAME: AtomicU64 = AtomicU64::new(0);

/// How often memory changed places, and the bytes that came near by it.
pub fn carried() -> (u64, u64) {
    (SWAPS.load(Ordering::Relaxed), CAME.load(Ordering::Relaxed))
}

/// The gate, closed, as the pool asks of it, and what was running all the same.
struct Quiet<'a>(Closed<'static>, &'a Cell<Option<Disturbed>>);

impl Stopped for Quiet<'_> {
    fn still_quiet(&mut self) -> bool {
        let disturbed = self.0.still_quiet().err();
        let is_quiet = disturbed.is_none();
        self.1.set(disturbed);
        is_quiet
    }
}

/// Carries it out, if the devices come to rest soon enough; tells the tiers what became of it.
pub(super) fn carry_out(home: &Home, swap: &Swap, why: Why) {
    // An update of a graph whose copies were moved may be refused; that was not measured yet.
    if capture::has_graphs() && why != Why::Stress {
        return report_graphs();
    }
    let begun = now();
    if begun < home.rests_until.load(Ordering::Relaxed) {
        return;
    }
    // What only might be a reason is none: quiet is proven for all work, however it was submitted, and proven again before anything
    // is unmapped.
    if let Some(reason) = gate::why_not(home.driver).filter(|reason| !reason.is_doubt()) {
        return rest(home, &reason);
    }
    // Another thread may be moving something: this one's swap did not fail, and is asked for again at a later launch.
    let Some(Err(why_not)) = home.alone(|| try_swap(home, swap, why, begun)) else { return };
    if let WhyNot::Disturbed(Disturbed::NotHere(reason)) = &why_not {
        rest(home, reason);
    } else if matches!(why_not, WhyNot::Disturbed(_) | WhyNot::Stuck(_)) && why != Why::Stress {
        // A program that is never quiet loses no more by such waits than it would by moving.
        let share = u64::from(share().max(1));
        home.rests_until.store(now() + (now() - begun) * 1000 / share, Ordering::Relaxed);
    }
    // That other work was running where the program waited for some of it says nothing of these ranges.
    if why != Why::Idle || !matches!(why_not, WhyNot::Disturbed(_)) {
        let mut tiers = home.tiers.lock();
        for range in swap.near.iter().copied().chain(swap.far.iter().map(|(range, _)| *range)) {
            tiers.stayed(range);
        }
    }
    tracing::debug!(target: "gpupool::memory", about = "moves", "nothing moved for GPU {}: {why_not}", home.gpu);
}

/// Nothing is tried for a while, for a reason that holds for the whole process: said once.
#[cold]
fn rest(home: &Home, reason: &Reason) {
    home.rests_until.store(now() + LOOKS_AGAIN.as_nanos() as u64, Ordering::Relaxed);
    log::warn_once(
        "moves",
        format_args!("GPUPOOL_MOVE: memory stays where it is in this process, because {reason} (said once)"),
    );
}

#[cold]
fn report_graphs() {
    log::warn_once(
        "graphs",
        "GPUPOOL_MOVE: the program has made a CUDA graph of which it is not known what it uses, so memory stays where it is from now on: a \
         graph may be bound to where its memory lay when it was made (said once)",
    );
}

/// Why nothing moved.
enum WhyNot {
    /// The devices did not come to rest.
    Disturbed(Disturbed),
    /// Nothing of what was waited for was seen to end for so long.
    Stuck(Duration),
    Pool(String),
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disturbed(what) => what.fmt(f),
            Self::Stuck(still) => write!(f, "no work was seen to end for {} ms", still.as_millis()),
            Self::Pool(what) => f.write_str(what),
        }
    }
}

/// What became of a swap.
#[derive(Default)]
struct Outcome {
    came: u64,
    left: u64,
    stayed: u64,
    /// Nanoseconds for which the GPU had work of its own in front of the swap.
    waited: u64,
}

fn try_swap(home: &Home, swap: &Swap, why: Why, begun: u64) -> Result<(), WhyNot> {
    let near: Vec<Wish> = wishes(home, &swap.near, Place::Gpu(home.gpu));
    let mut far = Vec::new();
    for (range, place) in &swap.far {
        if let Some(place) = home.places.get(usize::from(*place)) {
            far.extend(wishes(home, &[*range], *place));
        }
    }
    let mut outcome = Outcome::default();
    let all: Vec<Wish> = far.iter().chain(&near).copied().collect();
    match rearrange(home, &all, why, &mut outcome) {
        // Memory of other sizes comes in than goes out, so what goes has to be gone first.
        Err(Failed::Full) if !far.is_empty() && !near.is_empty() => {
            rearrange(home, &far, why, &mut outcome).map_err(WhyNot::from)?;
            // What left makes room in any case, for this or for the next.
            let _ = rearrange(home, &near, why, &mut outcome);
        }
        answer => answer?,
    }
    let Outcome { came, left, stayed, waited } = outcome;
    let took = (now() - begun).saturating_sub(waited);
    home.tiers.lock().moved(came, left, took);
    if came + left > 0 {
        SWAPS.fetch_add(1, Ordering::Relaxed);
        CAME.fetch_add(came, Ordering::Relaxed);
        level::report();
        bell::changed();
    }
    log::emit(|| {
        let microseconds = took / 1000;
        let event = TierSwap {
            home: home.gpu,
            why: why.word().to_owned(),
            bytes_in: came,
            bytes_out: left,
            stayed,
            microseconds,
        };
        let [came, left] = [came, left].map(format_size);
        (event, format!("GPU {}: {came} came near, {left} left, in {microseconds} µs", home.gpu))
    });
    Ok(())
}

/// The chunks that these ranges touch, each whole, as far as they are of the same blocks: only whole chunks change their place
/// without new memory's being made for the rest of them.
fn wishes(home: &Home, ranges: &[Range], to: Place) -> Vec<Wish> {
    let pieces = ranges.iter().flat_map(|range| home.opened.pool.pieces(range.start, range.bytes()));
    let mut wishes: Vec<Wish> = Vec::new();
    for piece in pieces.filter(|piece| piece.place != to) {
        let Some(block) = home.opened.pool.block_at(piece.address) else { continue };
        let start = piece.chunk_address.max(block.address);
        let end = (piece.chunk_address + piece.chunk_bytes).min(block.address + block.bytes);
        let mut wish = |start: u64, end: u64| {
            let wish = Wish { address: start, bytes: end.saturating_sub(start), to };
            if wish.bytes > 0 && !wishes.contains(&wish) {
                wishes.push(wish);
            }
        };
        let mut staying = Vec::new();
        stays(Range { start, end }, &mut |range| staying.push(range));
        staying.sort_unstable();
        let mut from = start;
        for range in staying {
            wish(from, range.start);
            from = from.max(range.end);
        }
        wish(from, end);
    }
    wishes
}

/// Why ranges stayed where they are.
enum Failed {
    /// A place has no room for what is to go there.
    Full,
    Other(WhyNot),
}

impl From<Failed> for WhyNot {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Full => Self::Pool("there is no room".to_owned()),
            Failed::Other(why) => why,
        }
    }
}

fn rearrange(home: &Home, wishes: &[Wish], why: Why, outcome: &mut Outcome) -> Result<(), Failed> {
    let mut stuck = false;
    let (mut disturbed, waited, past) = (None, &mut outcome.waited, Cell::new(None));
    let (queue, still) = match why {
        Why::Launch => (QUEUE, home.progress.still()),
        Why::Stress => (QUEUE_UNDER_STRESS, QUEUE_UNDER_STRESS),
        Why::Idle => (Duration::ZERO, Duration::ZERO),
    };
    let stop = || {
        let begun = now();
        let over = queue.is_zero() || gate::wait_until_quiet(home.driver, queue, still, || timing::passed(home));
        *waited += now() - begun;
        if !over && why == Why::Launch {
            stuck = true;
            return None;
        }
        let closed = gate::close_unless(home.driver, &Limits::default(), |reason| !reason.is_doubt());
        closed.map(|closed| Quiet(closed, &past)).map_err(|what| disturbed = Some(what)).ok()
    };
    let done = match home.opened.pool.rearrange(wishes, stop) {
        Ok(done) => done,
        Err(MoveError::Full { .. }) => return Err(Failed::Full),
        Err(MoveError::NotNow) => {
            if stuck {
                return Err(Failed::Other(WhyNot::Stuck(still)));
            }
            let busy = || WhyNot::Pool("a GPU is at work on what is freed beside it".to_owned());
            return Err(Failed::Other(disturbed.map_or_else(busy, WhyNot::Disturbed)));
        }
        Err(MoveError::NotQuiet) => return Err(Failed::Other(ended(home, passed(past.take())))),
        Err(error) => return Err(Failed::Other(WhyNot::Pool(format!("{error:?}")))),
    };
    match done.cut_short {
        Some(MoveError::NotQuiet) => drop(ended(home, passed(past.take()))),
        Some(MoveError::Backend(error)) => drop(ended(home, Reason::CutShort(error))),
        _ => {}
    }
    let mut tiers = home.tiers.lock();
    for (wish, Moved { moved, anchored, shared, .. }) in wishes.iter().zip(done.wishes) {
        let range = Range::of(wish.address, wish.bytes);
        *(if wish.to == Place::Gpu(home.gpu) { &mut outcome.came } else { &mut outcome.left }) += moved;
        outcome.stayed += anchored + shared;
        tiers.placed(range);
        if moved == 0 {
            tiers.stayed(range);
        }
    }
    Ok(())
}

/// What ran although the gate was closed.
fn passed(what: Option<Disturbed>) -> Reason {
    match what {
        Some(Disturbed::NotHere(reason)) => reason,
        what => Reason::Passed(what.map(|what| what.to_string()).unwrap_or_default()),
    }
}

/// What a move found ends all moves of the process: what comes next could take memory from under work that nobody sees.
#[cold]
fn ended(home: &Home, reason: Reason) -> WhyNot {
    gate::found(reason.clone());
    rest(home, &reason);
    WhyNot::Disturbed(Disturbed::NotHere(reason))
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
