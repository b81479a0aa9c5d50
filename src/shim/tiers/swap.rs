//! Carries a swap out: what comes near and what goes away for it, in one go, with the program stopped for the copies alone.

use super::own::{self, Goes};
use super::{Home, ahead, keeps_atomics, now, obstacles, share, stays, timing, totals};
use crate::backing::mover::{self, Work};
use crate::backing::{kernels, level, residence, terms};
use crate::gate::{self, Closed, Disturbed, Limits, Reason};
use crate::serve::memory::labels;
use crate::serve::memory::places;
use crate::watch::capture;
use crate::{bell, log};
use gpupool_config::format_size;
use gpupool_cuda::Physical;
use gpupool_events::{TierStop, TierSwap};
use gpupool_metrics::Counter;
use gpupool_pool::{FRAME, MoveError, Moved, Piece, Place, Stopped, Wish};
use gpupool_tiers::{self as tiers, Range, Swap, Whereabouts};
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What made it worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A launch gains more by it than it costs.
    Launch,
    /// The program has waited, and what is used most comes near.
    Idle,
    /// What launches lose by comes back before one.
    Back,
    /// The same where the program has waited.
    BackIdle,
    /// Every launch moves something.
    Stress,
}

impl Why {
    /// What launches lose by comes back.
    fn is_back(self) -> bool {
        matches!(self, Self::Back | Self::BackIdle)
    }

    /// The program has just waited, and nothing is waited for.
    fn is_at_rest(self) -> bool {
        matches!(self, Self::Idle | Self::BackIdle)
    }

    fn word(self) -> &'static str {
        match self {
            Self::Launch | Self::Back => "launch",
            Self::Idle | Self::BackIdle => "idle",
            Self::Stress => "stress",
        }
    }
}

/// How long a launch waits for the work in front of it, with the gate open and while some of that is seen to end. The GPU has work
/// meanwhile. Frameworks run 10 to 300 ms ahead; where much is far, the same launches are some seconds of work.
pub(super) const QUEUE: Duration = Duration::from_secs(10);
/// The same under stress, where every launch would wait.
pub(super) const QUEUE_UNDER_STRESS: Duration = Duration::from_millis(20);
/// A wait of fewer nanoseconds was for next to nothing.
const SHORT_WAIT: u64 = 1_000_000;
/// When a process in which nothing may move is looked at again: devices are closed, too.
pub(super) const LOOKS_AGAIN: Duration = Duration::from_secs(10);

/// The gate, closed, as the pool asks of it.
pub(super) struct Quiet<'a> {
    closed: Closed<'static>,
    /// What was running all the same.
    past: &'a Cell<Option<Disturbed>>,
    since: u64,
    /// Nanoseconds for which it was closed.
    stopped: &'a Cell<u64>,
}

impl<'a> Quiet<'a> {
    pub fn new(closed: Closed<'static>, past: &'a Cell<Option<Disturbed>>, stopped: &'a Cell<u64>) -> Self {
        Self { closed, past, since: now(), stopped }
    }
}

impl Stopped for Quiet<'_> {
    fn still_quiet(&mut self) -> bool {
        let disturbed = self.closed.still_quiet().err();
        let is_quiet = disturbed.is_none();
        self.past.set(disturbed);
        is_quiet
    }

    fn is_for_a_while(&self) -> bool {
        true
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.stopped.set(self.stopped.get() + now() - self.since);
    }
}

/// Carries it out, if the devices come to rest soon enough; tells the tiers what became of it.
pub(super) fn carry_out(home: &Home, swap: &Swap, why: Why) {
    // An update of a graph whose copies were moved may be refused; that was not measured yet.
    if capture::has_graphs() && why != Why::Stress {
        return report_graphs();
    }
    let why = match why {
        Why::Launch if swap.is_back => Why::Back,
        Why::Idle if swap.is_back => Why::BackIdle,
        why => why,
    };
    let begun = now();
    if begun < home.rests_until.load(Ordering::Relaxed)
        || !why.is_at_rest() && begun < home.waits_rest_until.load(Ordering::Relaxed)
    {
        return not_begun(home, swap);
    }
    if !why.is_back() && ahead::is_under_way() {
        return not_begun(home, swap);
    }
    // What only might be a reason is none: quiet is proven for all work, however it was submitted, and proven again before anything
    // is unmapped.
    if let Some(reason) = gate::why_not(home.driver).filter(|reason| !reason.is_doubt()) {
        not_begun(home, swap);
        return rest(home, &reason);
    }
    kernels::learn(home.driver, home.gpu);
    // The first look at a process with hundreds of libraries takes ten milliseconds and more, as making the kernel does, and no later one does: no move
    // is worth less for that.
    let begun = now();
    // Another thread may be moving something: this one's swap did not fail, and is asked for again at a later launch.
    let why_not = match home.alone(|| try_swap(home, swap, why, begun)) {
        None => return not_begun(home, swap),
        Some(Ok(())) => return,
        Some(Err(why_not)) => why_not,
    };
    if let WhyNot::Disturbed(Disturbed::NotHere(reason)) = &why_not {
        rest(home, reason);
    } else if matches!(why_not, WhyNot::Disturbed(_) | WhyNot::Stuck(_)) && why != Why::Stress {
        // A program that is never quiet loses no more by such waits than it would by moving. Where it has waited itself nothing is waited for, however long launches did in vain.
        let share = u64::from(share().max(1));
        let rests_until = if why.is_at_rest() { &home.rests_until } else { &home.waits_rest_until };
        rests_until.store(now() + (now() - begun) * 1000 / share, Ordering::Relaxed);
    }
    match &why_not {
        WhyNot::Disturbed(Disturbed::NotHere(_)) => {}
        WhyNot::Disturbed(what) => {
            totals::add(Counter::StopsNotQuiet, 1);
            if why != Why::Stress {
                obstacles::was_disturbed(home.gpu, what, now() - begun);
            }
        }
        WhyNot::Stuck(_) => {
            totals::add(Counter::StopsNotQuiet, 1);
            obstacles::was_stuck(home.gpu, why_not.to_string(), now() - begun);
        }
        WhyNot::Pool(_) => totals::add(Counter::StopsNoRoom, 1),
        // It is tried again as soon as there is memory.
        WhyNot::Unmade => {}
    }
    // That work was running, or went on for long, says nothing of these ranges.
    if matches!(why_not, WhyNot::Pool(_)) {
        let mut tiers = home.tiers.lock();
        for range in swap.near.iter().copied().chain(swap.far.iter().map(|(range, _)| *range)) {
            tiers.stayed(range);
        }
    } else {
        not_begun(home, swap);
    }
    tracing::debug!(target: "gpupool::memory", about = "moves", "nothing moved for GPU {}: {why_not}", home.gpu);
}

/// It was not made, for a reason that says nothing of what it names.
fn not_begun(home: &Home, swap: &Swap) {
    home.tiers.lock().not_begun(swap);
}

/// Nothing is tried for a while, for a reason that holds for the whole process: said once.
#[cold]
fn rest(home: &Home, reason: &Reason) {
    home.rests_until.store(now() + LOOKS_AGAIN.as_nanos() as u64, Ordering::Relaxed);
    report_off(home.gpu, reason);
}

/// Said once, as a finding where it is one.
#[cold]
pub(super) fn report_off(gpu: u32, reason: &Reason) {
    totals::add(Counter::StopsOff, 1);
    if !obstacles::is_off(gpu, reason) {
        log::warn_once(
            "moves",
            format_args!("GPUPOOL_MOVE: memory stays where it is in this process, because {reason} (said once)"),
        );
    }
}

#[cold]
pub(super) fn report_graphs() {
    totals::add(Counter::StopsGraphs, 1);
    log::warn_once(
        "graphs",
        "GPUPOOL_MOVE: the program has made a CUDA graph of which it is not known what it uses, so memory stays where it is from now on: a \
         graph may be bound to where its memory lay when it was made (said once)",
    );
}

/// Why nothing moved.
pub(super) enum WhyNot {
    /// The devices did not come to rest.
    Disturbed(Disturbed),
    /// Nothing of what was waited for was seen to end for so long.
    Stuck(Duration),
    /// Memory is made for it first.
    Unmade,
    Pool(String),
}

impl fmt::Display for WhyNot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disturbed(what) => what.fmt(f),
            Self::Stuck(still) => write!(f, "no work was seen to end for {} ms", still.as_millis()),
            Self::Unmade => f.write_str("memory of the host is made for it first, beside the program"),
            Self::Pool(what) => f.write_str(what),
        }
    }
}

/// What became of a swap.
#[derive(Default)]
pub(super) struct Outcome {
    pub came: u64,
    pub left: u64,
    pub stayed: u64,
    /// Of what left, what had not changed since it came.
    pub as_it_came: u64,
    /// Nanoseconds for which the GPU had work of its own in front of the swap.
    waited: u64,
    /// Nanoseconds of preparing it while the GPU had such work: nobody has lost them.
    hidden: u64,
    /// Nanoseconds for which the program was stopped.
    stopped: u64,
}

fn try_swap(home: &Home, swap: &Swap, why: Why, begun: u64) -> Result<(), WhyNot> {
    let mut gone: Vec<(Range, Range, Place)> = Vec::new();
    let mut own_gone: Vec<Goes> = Vec::new();
    let mut why_none = "what was to leave lies there already, has to stay where it is or has been freed";
    for (range, place) in &swap.far {
        // The next best one where this one lends no more, or is drained.
        let accounts = home.opened.pool.accounts();
        let takes = |place: &&Place| accounts.takes(**place, home.gpu) && !accounts.is_closed(**place);
        match home.places.iter().skip(usize::from(*place)).find(takes) {
            None => why_none = "no other place takes what was to leave",
            Some(place) if !keeps_atomics(home.opened, *place) => {
                why_none = "atomics of several GPUs would not be whole there";
            }
            Some(place) => {
                let chunks = chunks_of(home, &[*range], *place);
                gone.extend(chunks.into_iter().map(|(touched, whole)| (touched, whole, *place)));
                own::goes(home, &[*range], *place, &mut own_gone);
            }
        }
    }
    let room = home.near_room();
    let leaves: u64 = gone.iter().map(|(_, whole, _)| whole.bytes()).sum::<u64>() + own::bytes_of(&own_gone);
    let mut near = coming(home, &swap.near, Place::Gpu(home.gpu), room + leaves);
    let mut own_near = Vec::new();
    own::goes(home, &swap.near, Place::Gpu(home.gpu), &mut own_near);
    if gone.is_empty() && near.is_empty() && own_gone.is_empty() && own_near.is_empty() && !swap.far.is_empty() {
        return Err(WhyNot::Pool(why_none.to_owned()));
    }
    let comes: u64 = near.iter().map(|wish| wish.bytes).sum::<u64>() + own::bytes_of(&own_near);
    let has_to_leave = if swap.near.is_empty() { u64::MAX } else { comes.saturating_sub(room) };
    let far = leaving(home, gone, has_to_leave);
    let leave = far.iter().map(|wish| wish.bytes).sum::<u64>();
    let own_far = own::enough(own_gone, has_to_leave.saturating_sub(leave));
    let leave = leave + own::bytes_of(&own_far);
    fit(&mut near, room + leave, Large::Whole);
    let own_near = own::fitting(own_near, (room + leave).saturating_sub(near.iter().map(|wish| wish.bytes).sum()));
    if comes == 0 && !swap.near.is_empty() {
        let why = "what was to come lies there already, has to stay where it is or has been freed";
        return Err(WhyNot::Pool(why.to_owned()));
    }
    if near.is_empty() && own_near.is_empty() && !swap.near.is_empty() {
        let [comes, room, leave] = [comes, room, leave].map(format_size);
        return Err(WhyNot::Pool(format!("there is no room for {comes}: {room} are free, and {leave} would leave")));
    }
    join(&mut near, |address| home.opened.pool.block_at(address).map(|block| block.address));
    let mut outcome = Outcome::default();
    let made_before = mover::spent()[Work::Make as usize];
    if own_far.is_empty() && own_near.is_empty() {
        swap_pooled(home, &far, &near, why, &mut outcome)?;
    } else {
        // The pool and the program's own memory each have their steps; what leaves makes room for what comes.
        if !far.is_empty() {
            rearrange(home, &far, why, &mut outcome)?;
        }
        let exchanged = own::exchange(home, &own_far, &own_near, why, &mut outcome);
        if outcome.came + outcome.left == 0 {
            exchanged?;
        }
        come_in(home, &near, why, &mut outcome);
    }
    let Outcome { came, left, stayed, as_it_came, waited, hidden, stopped } = outcome;
    let took = (now() - begun).saturating_sub(waited + hidden);
    // Where that was hidden it is no part of what it took.
    let made = if hidden == 0 { mover::spent()[Work::Make as usize] - made_before } else { 0 };
    home.tiers.lock().moved(came, left, took, made);
    totals::add(Counter::MovingMicroseconds, took / 1000);
    totals::add(Counter::AwaitingMicroseconds, waited / 1000);
    if came + left > 0 {
        totals::add(Counter::Moves, 1);
        obstacles::moved(home.driver);
        residence::is_far();
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
            stopped: stopped / 1000,
            as_it_came,
        };
        let [came, left, same] = [came, left, as_it_came].map(format_size);
        let same = if as_it_came > 0 { format!(" ({same} of it as it came, without a copy)") } else { String::new() };
        (event, format!("GPU {}: {came} came near, {left} left{same}, in {microseconds} µs", home.gpu))
    });
    Ok(())
}

/// Swaps memory of the pool, in one step if that can be.
fn swap_pooled(home: &Home, far: &[Wish], near: &[Wish], why: Why, outcome: &mut Outcome) -> Result<(), WhyNot> {
    let all: Vec<Wish> = far.iter().chain(near).copied().collect();
    match rearrange(home, &all, why, outcome) {
        // Memory of other sizes comes in than goes out, so what goes has to be gone first.
        Err(Failed::Full) if !far.is_empty() && !near.is_empty() => {
            rearrange(home, far, why, outcome)?;
            come_in(home, near, why, outcome);
        }
        answer => answer?,
    }
    Ok(())
}

/// Has these come, for which others have left. What left makes room in any case, for this or for the next; but what found none by itself is not asked for at once
/// again.
///
/// There may be less room than was reckoned with: some of what was to leave has stayed, as what others share does, others have taken memory of the GPU since, or
/// the driver has less than the limit says. Then as much comes as there is room for, also of what would come in one piece otherwise: left out for a few
/// MiB, it was far as before, and what had left for it was far as well. Where nothing at all has room, what left would find none either: it does not come back.
fn come_in(home: &Home, near: &[Wish], why: Why, outcome: &mut Outcome) {
    let mut wishes = near.to_vec();
    fit(&mut wishes, home.near_room(), Large::Divided);
    let answer = if wishes.is_empty() { Ok(()) } else { rearrange(home, &wishes, why, outcome) };
    let answer = match answer {
        Err(Failed::Full) => wishes.iter().try_for_each(|wish| come_in_parts(home, wish, why, outcome)),
        Ok(()) => Ok(()),
        Err(Failed::Other(why)) => Err(why),
    };
    if let Err(why) = answer {
        not_come(home, &why);
    }
}

/// Of how many parts one comes where not all has room. Each that finds none is looked for in vain, and each that comes costs a stop.
const PARTS: u64 = 16;

/// Has as much of this come as finds room, from its begin.
fn come_in_parts(home: &Home, wish: &Wish, why: Why, outcome: &mut Outcome) -> Result<(), WhyNot> {
    let least = (wish.bytes / PARTS).max(FRAME);
    let (mut done, mut part) = (0, wish.bytes);
    while done < wish.bytes && part >= least {
        let bytes = part.min(wish.bytes - done);
        match rearrange(home, &[Wish { address: wish.address + done, bytes, ..*wish }], why, outcome) {
            Ok(()) => done += bytes,
            Err(Failed::Full) => part = bytes / 2 / FRAME * FRAME,
            Err(Failed::Other(why)) => return Err(why),
        }
    }
    if done < wish.bytes {
        home.tiers.lock().stayed(Range::of(wish.address + done, wish.bytes - done));
    }
    Ok(())
}

/// Others have left for what has not come, for a reason that says nothing of that: a later launch asks for it again.
fn not_come(home: &Home, why: &WhyNot) {
    tracing::debug!(target: "gpupool::memory", about = "moves", "what others left GPU {} for did not come: {why}", home.gpu);
}

/// What has to leave for so many bytes to come, of chunks of which this much is to leave: each whole, as far as it is of one block, since
/// what stayed of a chunk would need new memory where there is none; first those that are to leave for the most part, until it is enough.
/// It leaves in the parts that launches use by themselves, so that each has chunks of its own from then on, and what is used more than
/// the rest can come back alone.
fn leaving(home: &Home, mut chunks: Vec<(Range, Range, Place)>, enough: u64) -> Vec<Wish> {
    let part = |(touched, whole, _): &(Range, Range, Place)| touched.bytes() as f64 / whole.bytes().max(1) as f64;
    chunks.sort_by(|one, other| part(other).total_cmp(&part(one)));
    let (mut wishes, mut leaves) = (Vec::new(), 0);
    for (_, whole, to) in chunks {
        if leaves >= enough {
            break;
        }
        leaves += whole.bytes();
        let parts = home.tiers.lock().parts(whole);
        for part in parts.iter().map(|part| part.meet(&whole)) {
            wish(&mut wishes, part, to);
        }
    }
    wishes
}

/// What comes for these ranges: a chunk that they touch for the most part comes whole if there is room for all of it, of others these
/// ranges alone.
fn coming(home: &Home, ranges: &[Range], to: Place, mut room: u64) -> Vec<Wish> {
    let mut wishes: Vec<Wish> = Vec::new();
    let mut labelled = 0;
    for (touched, whole) in chunks_of(home, ranges, to) {
        let comes = if touched.bytes() >= whole.bytes() / 2 && whole.bytes() <= room { whole } else { touched };
        // What has a label counts as one, whatever it is called: what is left out for that is asked for again.
        let block = home.opened.pool.block_at(comes.start);
        if block.as_ref().is_some_and(|block| labels::is_beyond_budget(block, labelled + comes.bytes())) {
            home.tiers.lock().stayed(comes);
            continue;
        }
        labelled += if block.is_some_and(|block| labels::of(&block).is_some()) { comes.bytes() } else { 0 };
        room = room.saturating_sub(comes.bytes());
        wish(&mut wishes, comes, to);
    }
    wishes
}

/// Of the chunks that these ranges touch and that are elsewhere: what is touched, and what of the chunk is of that block.
fn chunks_of(home: &Home, ranges: &[Range], to: Place) -> Vec<(Range, Range)> {
    let mut found: Vec<(Range, Range)> = Vec::new();
    for range in ranges {
        for piece in pieces_of_all(home, *range).iter().filter(|piece| piece.place != to) {
            let Some(whole) = home.whole(piece) else { continue };
            let touched = Range::of(piece.address, piece.bytes).meet(&whole);
            match found.last_mut() {
                Some((known, same)) if *same == whole => known.end = known.end.max(touched.end),
                _ => found.push((touched, whole)),
            }
        }
    }
    found
}

/// Where each part of a range lies, of all blocks in it. A swap joins what lies one behind the other, whosever it is, and the pool answers for the block that a
/// range begins in.
fn pieces_of_all(home: &Home, range: Range) -> Vec<Piece<Physical>> {
    let mut all = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let pieces = home.opened.pool.pieces(at, range.end - at);
        // Where a block has ended meanwhile, the next one begins on a frame.
        at = pieces.last().map_or(at / FRAME * FRAME + FRAME, |last| last.address + last.bytes);
        all.extend(pieces);
    }
    all
}

/// Wishes for a range, as far as nobody holds it where it is.
fn wish(wishes: &mut Vec<Wish>, range: Range, to: Place) {
    let mut staying = Vec::new();
    stays(range, &mut |range| staying.push(range));
    staying.sort_unstable();
    let mut from = range.start;
    for (start, end) in staying.iter().map(|stays| (stays.start, stays.end)).chain([(range.end, range.end)]) {
        let wish = Wish { address: from, bytes: start.saturating_sub(from), to };
        if wish.bytes > 0 && !wishes.contains(&wish) {
            wishes.push(wish);
        }
        from = from.max(end);
    }
}

/// Leaves so much of what is wished for as there is room for: a small chunk is divided then, and a large one stays where it is (unless `large` says otherwise), since its
/// parts would cost more to map from then on. Without this, memory would leave for chunks that are larger than the room it makes, and none
/// of them would come.
fn fit(wishes: &mut Vec<Wish>, mut room: u64, large: Large) {
    wishes.retain_mut(|wish| {
        if wish.bytes > room {
            let is_divided = wish.bytes < LARGE || large == Large::Divided;
            wish.bytes = if is_divided { room / FRAME * FRAME } else { 0 };
        }
        room -= wish.bytes;
        wish.bytes > 0
    });
}

/// Makes one wish of those that follow each other in one block: what comes may have other borders near than it had far, where it lies as what had left was cut. With
/// chunks of the sizes that leave, both go in one step; else what leaves has to go first, and new memory be made in its place.
fn join(wishes: &mut Vec<Wish>, block: impl Fn(u64) -> Option<u64>) {
    wishes.sort_unstable_by_key(|wish| wish.address);
    wishes.dedup_by(|next, last| {
        let follows = last.address + last.bytes == next.address && last.to == next.to;
        let joined = follows && block(last.address) == block(next.address);
        last.bytes += if joined { next.bytes } else { 0 };
        joined
    });
}

/// What finding the GPU at rest takes at most. Where it took longer, it had work all the while that the swap was prepared.
const AT_REST: Duration = Duration::from_micros(100);

/// What is not divided to fit, unless something has left for it.
const LARGE: u64 = 64 << 20;

/// What becomes of a large chunk that does not fit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Large {
    Whole,
    Divided,
}

/// Why ranges stayed where they are.
pub(super) enum Failed {
    /// A place has no room for what is to go there.
    Full,
    Other(WhyNot),
}

impl Failed {
    pub fn left_alone() -> Self {
        Self::Other(WhyNot::Pool("a GPU that it lies on had a grave error".to_owned()))
    }
}

impl From<Failed> for WhyNot {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Full => Self::Pool("there is no room".to_owned()),
            Failed::Other(why) => why,
        }
    }
}

fn is_left_alone(home: &Home, wish: &Wish) -> bool {
    let pieces = || home.opened.pool.pieces(wish.address, wish.bytes).into_iter();
    terms::is_any_left_alone() && pieces().any(|piece| terms::is_place_left_alone(piece.place))
}

/// Stops the program for a move: waits for the work in front of it, and closes the gate.
pub(super) struct Stop<'a> {
    home: &'a Home,
    phases: Phases,
    /// How long it is waited for queued work, and for how long of that nothing may be seen to end.
    queue: Duration,
    still: Duration,
    stuck: Cell<bool>,
    disturbed: Cell<Option<Disturbed>>,
    /// What was running all the same.
    past: Cell<Option<Disturbed>>,
    /// Nanoseconds for which the gate was closed, and of the waits before.
    stopped: Cell<u64>,
    waited: Cell<u64>,
    /// Nanoseconds of preparing it while the GPU had work: nobody has lost them.
    hidden: Cell<u64>,
}

impl<'a> Stop<'a> {
    pub fn new(home: &'a Home, why: Why) -> Self {
        let (queue, still) = match why {
            Why::Launch | Why::Back => (QUEUE, home.progress.still()),
            Why::Stress => (QUEUE_UNDER_STRESS, QUEUE_UNDER_STRESS),
            Why::Idle | Why::BackIdle => (Duration::ZERO, Duration::ZERO),
        };
        Self {
            home,
            phases: Phases::begin(),
            queue,
            still,
            stuck: Cell::new(false),
            disturbed: Cell::new(None),
            past: Cell::new(None),
            stopped: Cell::new(0),
            waited: Cell::new(0),
            hidden: Cell::new(0),
        }
    }

    /// Nothing runs until what this returns is dropped; `None`: the devices did not come to rest.
    pub fn stop(&self) -> Option<Quiet<'_>> {
        let Self { home, phases, queue, still, .. } = self;
        let begun = now();
        phases.prepared.set(begun);
        let over = queue.is_zero() || gate::wait_until_quiet(home.driver, *queue, *still, || timing::passed(home));
        let took = now() - begun;
        self.waited.set(self.waited.get() + took);
        if took > AT_REST.as_nanos() as u64 {
            self.hidden.set(self.hidden.get() + begun - phases.begun);
        }
        phases.waited.set(begun + took);
        phases.spent.set(mover::spent());
        // What else ended the wait is told by who closes the gate.
        if !over && (*still..*queue).contains(&Duration::from_nanos(took)) {
            self.stuck.set(true);
            home.progress.waited(false);
            return None;
        }
        // What was over before anybody looked says nothing.
        if over && took > SHORT_WAIT {
            home.progress.waited(true);
        }
        let closed = gate::close_unless(home.driver, &Limits::default(), |reason| !reason.is_doubt());
        closed
            .map(|closed| Quiet::new(closed, &self.past, &self.stopped))
            .map_err(|what| self.disturbed.set(Some(what)))
            .ok()
    }

    /// The program runs again; what that took is added up.
    pub fn over(&self, outcome: &mut Outcome) {
        outcome.stopped += self.stopped.replace(0);
        outcome.waited += self.waited.replace(0);
        outcome.hidden += self.hidden.replace(0);
    }

    /// It was not to be stopped, or something else was in the way.
    pub fn failed(&self, outcome: &mut Outcome) -> Failed {
        self.over(outcome);
        if self.stuck.get() {
            return Failed::Other(WhyNot::Stuck(self.still));
        }
        let busy = || WhyNot::Pool("a GPU is at work on what is freed beside it".to_owned());
        Failed::Other(self.disturbed.take().map_or_else(busy, WhyNot::Disturbed))
    }

    /// Work was seen although it was stopped: nothing moves in this process any more.
    pub fn passed(&self, outcome: &mut Outcome) -> Failed {
        self.over(outcome);
        Failed::Other(ended(self.home, passed(self.past.take())))
    }
}

fn rearrange(home: &Home, wishes: &[Wish], why: Why, outcome: &mut Outcome) -> Result<(), Failed> {
    let stop = Stop::new(home, why);
    let lies = |wish: &Wish| home.opened.pool.pieces(wish.address, 1).first().map_or(wish.to, |piece| piece.place);
    let lay: Vec<Place> = wishes.iter().map(lies).collect();
    if wishes.iter().any(|wish| is_left_alone(home, wish)) {
        return Err(Failed::left_alone());
    }
    let unmade = Cell::new(false);
    let makes = |place: Place, bytes: u64| {
        let may = why == Why::Stress || why.is_back() || ahead::may_make(place, bytes);
        unmade.set(unmade.get() || !may);
        may
    };
    let answer = home.opened.pool.rearrange_if(wishes, makes, || stop.stop());
    if unmade.get() {
        stop.over(outcome);
        ahead::ask(home.gpu, wishes);
        return Err(Failed::Other(WhyNot::Unmade));
    }
    stop.phases.tell(home.gpu, stop.stopped.get());
    let done = match answer {
        Ok(done) => {
            // Who had no room in one step makes what it lacks in the next one.
            ahead::had_all();
            done
        }
        Err(MoveError::Full { .. }) => {
            stop.over(outcome);
            return Err(Failed::Full);
        }
        Err(MoveError::NotNow) => return Err(stop.failed(outcome)),
        Err(MoveError::NotQuiet) => return Err(stop.passed(outcome)),
        Err(error) => {
            stop.over(outcome);
            return Err(Failed::Other(WhyNot::Pool(format!("{error:?}"))));
        }
    };
    stop.over(outcome);
    outcome.as_it_came += done.as_it_came;
    match done.cut_short {
        Some(MoveError::NotQuiet) => drop(ended(home, passed(stop.past.take()))),
        Some(MoveError::Backend(error)) => drop(ended(home, Reason::CutShort(error))),
        _ => {}
    }
    let mut tiers = home.tiers.lock();
    for ((wish, lay), Moved { moved, anchored, shared, .. }) in wishes.iter().zip(lay).zip(done.wishes) {
        totals::changed_places(home.gpu, lay, wish.to, moved);
        let range = Range::of(wish.address, wish.bytes);
        *(if wish.to == Place::Gpu(home.gpu) { &mut outcome.came } else { &mut outcome.left }) += moved;
        outcome.stayed += anchored + shared;
        tiers.placed(range);
        if moved == 0 {
            tiers.stayed(range);
        }
    }
    drop(tiers);
    wishes.iter().for_each(|wish| places::tell_moved(wish.address, wish.bytes));
    Ok(())
}

/// When a rearrangement got how far, for the log: nanoseconds as [`now`] counts them, and what had been spent by the end of the wait.
struct Phases {
    begun: u64,
    spent: Cell<[u64; 6]>,
    prepared: Cell<u64>,
    waited: Cell<u64>,
}

impl Phases {
    fn begin() -> Self {
        Self { begun: now(), spent: Cell::new(mover::spent()), prepared: Cell::new(0), waited: Cell::new(0) }
    }

    /// It is over; the gate was closed for so long.
    fn tell(&self, gpu: u32, closed: u64) {
        let (prepared, waited) = (self.prepared.get(), self.waited.get());
        if prepared == 0 {
            return;
        }
        let us = |ns: u64| ns / 1000;
        let mut before = self.spent.get().into_iter();
        let [copy, unmap, map, grant, look, _] = mover::spent().map(|now| us(now - before.next().unwrap_or(now)));
        tracing::trace!(
            target: "gpupool::memory", about = "swaps",
            "GPU {gpu}: prepared in {} µs, waited {} µs, closed for {} µs; {} µs from the wait to the end, {copy} of it copying, {unmap} unmapping, \
             {map} mapping, {grant} granting and {look} looking at what is there",
            us(prepared - self.begun), us(waited - prepared), us(closed), us(now() - waited)
        );
    }
}

/// What ran although the gate was closed.
pub(super) fn passed(what: Option<Disturbed>) -> Reason {
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
    let counter = match why {
        tiers::Why::Slower { .. } => Counter::StopsSlower,
        tiers::Why::Unpaid { .. } => Counter::StopsUnpaid,
    };
    totals::add(counter, 1);
    log::emit(|| {
        let reason = obstacles::in_words(why);
        let text = format!("GPU {}: memory stays where it is for now, since {reason}", home.gpu);
        (TierStop { home: home.gpu, why: reason }, text)
    });
    obstacles::did_not_pay(home.gpu, why);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_to_one_block_beside_each_other_is_one_wish() {
        const MIB: u64 = 1 << 20;
        let wish = |at: u64, mib: u64| Wish { address: at * MIB, bytes: mib * MIB, to: Place::Gpu(0) };
        // Blocks of 86 MiB; the first one comes in three pieces, the last two of which are named first.
        let mut wishes = vec![wish(64, 16), wish(80, 6), wish(0, 64), wish(86, 64), wish(160, 12)];
        join(&mut wishes, |address| Some(address / (86 * MIB)));
        assert_eq!(wishes, [wish(0, 86), wish(86, 64), wish(160, 12)]);
    }

    #[test]
    fn what_comes_fits_into_the_room_there_is() {
        const MIB: u64 = 1 << 20;
        let wish = |address: u64, mib: u64| Wish { address, bytes: mib * MIB, to: Place::Gpu(0) };
        let fitted = |room: u64| {
            let mut wishes = vec![wish(0, 2), wish(1 << 40, 512), wish(2 << 40, 512)];
            fit(&mut wishes, room * MIB, Large::Whole);
            wishes.iter().map(|wish| wish.bytes / MIB).collect::<Vec<_>>()
        };
        assert_eq!(fitted(2000), [2, 512, 512]);
        assert_eq!(fitted(600), [2, 512], "a large one is not divided");
        assert_eq!(fitted(1), [0_u64; 0]);
        let mut small = vec![wish(0, 40)];
        fit(&mut small, 31 * MIB, Large::Whole);
        assert_eq!(small[0].bytes, 30 * MIB);
        let mut large = vec![wish(0, 304), wish(1 << 40, 512)];
        fit(&mut large, 302 * MIB, Large::Divided);
        assert_eq!(large.iter().map(|wish| wish.bytes / MIB).collect::<Vec<_>>(), [302], "something has left for it");
    }
}
