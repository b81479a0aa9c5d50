//! How memory leaves one GPU while the program goes on: all of it (`gpupool drain`), what is there for others (`gpupool set devices=`), or as
//! much as is beyond a limit (`gpupool set limit=`).
//!
//! The accounts say already that nothing new goes there ([`crate::backing::terms`]), so this ends. The program stands still for half a second at
//! a time at most, and for as long as its GPUs need to come to rest before that.
//!
//! **Where somebody waits**, what finds no room on other GPUs goes to plain memory of the host first, ten times as fast as the driver makes memory there
//! (RESULTS.md), and the GPU is free at once. The program stands still until that is memory of the host which GPUs reach ([`super::settle`]): for longer in
//! one go than by slices, and no longer in all.

use super::leaves::{Leaves, Onto};
use super::parted::{self, Parted};
use super::put::Put;
use super::why::{self, Why};
use super::{Alone, BUSY, STATE, Settles, Suspended, hold, opened, told_anew};
use super::{away, copying, given, parting, rearranging};
use crate::backing::{mover, open, residence, terms};
use crate::gate::Held;
use crate::log;
use crate::process;
use crate::serve::handles::{self, of_kind};
use crate::serve::memory::{self, idle};
use crate::watch::context;
use gpupool_config::{Mode, format_size};
use gpupool_cuda::{Device, Driver, Physical};
use gpupool_events::GpuDrain;
use gpupool_pool::{Claim, Piece, Place};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// For how long the program stands still at once, a batch aside.
pub(super) const SLICE: Duration = Duration::from_millis(500);
/// For how long it goes on in between, and between two tries to have its GPUs come to rest.
pub(super) const BREATH: Duration = Duration::from_millis(500);
/// The same where somebody waits for the memory.
pub(super) const SHORT_BREATH: Duration = Duration::from_millis(20);

/// Bytes a second of host memory that the driver makes (H200; RESULTS.md).
const HOST_IS_MADE: f64 = 3.4e9;

/// Why something stays that others know by its pages.
pub use super::why::PAGES;
/// Why something stays that leaves once other memory is the host's, for the log.
pub const SETTLING: &str = "settling";
/// The same in words.
pub(super) const SETTLES: &str = "its memory is on its way to the host, since another program needs its GPU";

/// What a GPU still has of this process, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rest {
    /// 0 where that is not known.
    pub bytes: u64,
    pub what: String,
    /// One word for each reason; empty of what was not to leave.
    pub cause: &'static str,
}

impl Rest {
    /// Whether it stayed because no other place has room for it.
    pub fn lacks_room(&self) -> bool {
        matches!(self.cause, "room" | "nowhere" | "addresses")
    }
}

/// What became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vacated {
    /// Bytes that left, or came back.
    pub moved: u64,
    /// What stayed.
    pub rest: Vec<Rest>,
    pub took: Duration,
}

impl Vacated {
    /// Bytes that did not leave, or come back.
    pub(super) fn stayed(&self) -> u64 {
        self.rest.iter().map(|rest| rest.bytes).sum()
    }
}

/// Which memory is to leave a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All of it, until the GPU is drained no more.
    All,
    /// What is for other GPUs.
    Lent,
    /// So many bytes at least, those that are for other GPUs first.
    Most(u64),
    /// The same, because somebody else needs them; `lent`: only what is for other GPUs. It comes back once there is room ([`take_back`]).
    /// `cap`: no more than that may leave. `rest`: for how long the program's coming to rest is waited for each time, of the time that there is.
    Given { bytes: u64, lent: bool, cap: u64, rest: Duration },
}

impl Which {
    /// Whether only what is for other GPUs leaves, and how much at least.
    fn bounds(self) -> (bool, u64) {
        match self {
            Which::All => (false, u64::MAX),
            Which::Lent => (true, u64::MAX),
            Which::Most(bytes) => (false, bytes),
            Which::Given { bytes, lent, .. } => (lent, bytes),
        }
    }

    /// How much may leave at most.
    fn cap(self) -> u64 {
        if let Which::Given { cap, .. } = self { cap } else { u64::MAX }
    }

    /// For how long the program's coming to rest is waited for.
    fn to_rest(self) -> Duration {
        if let Which::Given { rest, .. } = self { rest } else { Duration::MAX }
    }

    /// For how long the program goes on in between. Somebody waits for what is given.
    fn breath(self) -> Duration {
        if matches!(self, Which::Given { .. }) { SHORT_BREATH } else { BREATH }
    }

    /// Whether so much is to be gone sooner than the driver makes as much memory on the host, while the program goes on for half of the time.
    fn hurries(self, bytes: u64, time: Duration) -> bool {
        match self {
            Which::Given { .. } => true,
            Which::All => bytes as f64 / HOST_IS_MADE > time.as_secs_f64() / 2.0,
            Which::Lent | Which::Most(_) => false,
        }
    }

    /// Why freed memory goes, for the log.
    fn word(self) -> &'static str {
        match self {
            Which::All => "drain",
            Which::Lent | Which::Most(_) => "set",
            Which::Given { .. } => "recall",
        }
    }
}

/// Has memory leave a GPU until `deadline`, as long as that `is_wanted`; `progress` hears how many bytes of how many have left.
pub fn vacate(
    gpu: u32,
    which: Which,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Vacated {
    let begun = Instant::now();
    // Who asked hears itself whether anything moves, and does not wait for a kernel that hangs.
    let _moving = (!matches!(which, Which::Given { .. })).then(terms::begin_to_move);
    let by_kernel = mover::copied_by_kernel();
    let (moved, stayed) = match process::settings().mode {
        Mode::Pool | Mode::Spill if terms::is_left_alone(gpu) => {
            let text = "the GPU had a grave error, and what reads a broken page loses its context; gpupool drain moves it all the same";
            (0, vec![(bytes_on(gpu), Why { cause: "ill", text: text.to_owned() })])
        }
        Mode::Pool | Mode::Spill => {
            have_idle_lend_for(gpu, which.bounds().0);
            leave(gpu, which, deadline, is_wanted, progress)
        }
        _ => (0, Vec::new()),
    };
    give_back(gpu, which);
    if moved > 0 {
        told_anew();
    }
    let by_kernel = mover::copied_by_kernel() - by_kernel;
    if by_kernel > 0 {
        let bytes = format_size(by_kernel);
        tracing::debug!(target: "gpupool::memory", about = "moves", device = gpu, "{bytes} went from one lender to another by a kernel");
    }
    let mut rest: Vec<Rest> =
        stayed.into_iter().map(|(bytes, Why { text, cause })| Rest { bytes, what: text, cause }).collect();
    if which == Which::All {
        rest.extend(besides(gpu, rest.iter().map(|rest| rest.bytes).sum()));
    }
    Vacated { moved, rest, took: begun.elapsed() }
}

/// The same for a GPU that is drained, and the log hears of it.
pub fn drain(gpu: u32, deadline: Instant, is_wanted: &dyn Fn() -> bool, progress: &mut dyn FnMut(u64, u64)) -> Vacated {
    let done = vacate(gpu, Which::All, deadline, is_wanted, progress);
    tell_drain(gpu, &done);
    done
}

/// The same for what is there still or has come since, which nobody waits for; the log hears of it where any of it left.
pub fn drain_again(gpu: u32, deadline: Instant, is_wanted: &dyn Fn() -> bool) -> Vacated {
    let done = vacate(gpu, Which::All, deadline, is_wanted, &mut |_, _| {});
    if done.moved > 0 {
        tell_drain(gpu, &done);
    }
    done
}

fn tell_drain(gpu: u32, done: &Vacated) {
    log::emit(|| {
        let (bytes, stayed) = (done.moved, done.stayed());
        let text = format!("GPU {gpu} is drained: {} left it, {} stayed", format_size(bytes), format_size(stayed));
        let microseconds = done.took.as_micros() as u64;
        (GpuDrain { device: gpu, uuid: uuid(gpu), bytes, stayed, microseconds }, text)
    });
}

/// Has GPUs lend that nobody works on, for what is about to leave those that this program works on. Not while that is held: NVML may have to be loaded.
pub fn have_idle_lend() {
    let homes: BTreeSet<Device> = context::all().iter().map(|context| context.device).collect();
    homes.into_iter().for_each(|home| memory::have_more_lend(home.ordinal(), 0));
}

/// The same for what is about to leave this GPU: whoever has to leave needs memory as one does who asks for it, and would go to the host otherwise.
/// None is asked for room: this is the thread that answers others.
fn have_idle_lend_for(gpu: u32, lent: bool) {
    let Some(opened) = open::opened().filter(|_| terms::keeps_apart()) else { return };
    homes_on(opened, gpu, lent).into_iter().for_each(|home| memory::have_more_lend(home, 0));
}

/// The GPUs for which something lies on this one, this one among them unless only what is `lent` counts.
fn homes_on(opened: &open::Opened, gpu: u32, lent: bool) -> BTreeSet<u32> {
    let place = Place::Gpu(gpu);
    let lies = |pieces: &[Piece<Physical>]| pieces.iter().any(|piece| piece.place == place);
    let blocks = opened.pool.stretches().into_iter().filter(|(_, pieces)| lies(pieces)).map(|(block, _)| block.home);
    let own = handles::by_hand::all().into_iter().filter(|own| own.place == place).map(|own| own.asked);
    blocks.chain(own).filter(|home| !lent || *home != gpu).collect()
}

/// A GPU's number with dashes, for the log.
pub(super) fn uuid(gpu: u32) -> String {
    let known = open::plan_made().and_then(|plan| plan.topology.gpus.get(gpu as usize));
    known.map_or_else(String::new, |gpu| gpupool_machine::dashed(&gpu.uuid))
}

/// Bytes that left, and what stayed of the pool's and of the program's own memory.
fn leave(
    gpu: u32,
    which: Which,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> (u64, why::Stayed) {
    let Some(driver) = process::driver() else { return (0, Vec::new()) };
    let Some(opened) = opened(driver) else { return (0, Vec::new()) };
    let Some(state) = STATE.try_lock_until(deadline) else {
        let text = BUSY.to_owned();
        return (0, vec![(lies_there(opened, gpu, which.bounds().0), Why { cause: "rest", text })]);
    };
    let mut state = state;
    let left = leave_in((opened, driver), &mut state, (gpu, which), deadline, is_wanted, progress);
    // Who takes block after block asks again at once, and the program is held until then; otherwise it goes on, and may end a context.
    if state.as_ref().is_none_or(|state| state.settles.is_none()) {
        rearranging::let_go_of_crews();
    }
    left
}

/// The same, while this thread has the state.
fn leave_in(
    (opened, driver): (&'static open::Opened, &'static Driver),
    state: &mut Option<Suspended>,
    (gpu, which): (u32, Which),
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> (u64, why::Stayed) {
    let (mut moved, mut returned) = (0, 0);
    let mut total = None;
    let (mut may_hurry, mut may_to_peers) = (true, true);
    // What other GPUs lack for it, where that was found.
    let mut full_peers = None;
    let mut alone = match which {
        Which::All => Alone::patient(BREATH),
        Which::Lent | Which::Most(_) | Which::Given { .. } => Alone::brief(which.breath()),
    };
    loop {
        let (lent, most) = which.bounds();
        let most = if most == u64::MAX { most } else { most.saturating_sub(moved + returned) };
        let there = lies_there(opened, gpu, lent).min(most);
        if there == 0 {
            return (moved, Vec::new());
        }
        let total = *total.get_or_insert(there);
        let own = match state {
            Some(_) => None,
            None => match hold(driver, rests_by(which, deadline), is_wanted, &mut alone) {
                Ok(held) => Some(held),
                Err(text) => return (moved, vec![(there, Why { cause: "rest", text })]),
            },
        };
        let Some(held) = own.as_ref().or(state.as_ref().map(|state| &state.held)) else { return (moved, Vec::new()) };
        // What was freed while a GPU was at work is of no use to anybody, and goes before anything that is.
        let most = if matches!(which, Which::Given { .. }) {
            let now = give_back(gpu, which);
            returned += now;
            most.saturating_sub(now)
        } else {
            most
        };
        if most == 0 {
            return (moved, Vec::new());
        }
        let is_suspended = state.as_ref().is_some_and(|state| state.settles.is_none());
        // What is on a disk is there, and nothing beside it.
        let is_on_disk =
            state.as_ref().is_some_and(|state| state.put.as_ref().is_some_and(|put| put.on_disk().is_some()));
        let hurries =
            may_hurry && !is_on_disk && which.hurries(there, deadline.saturating_duration_since(Instant::now()));
        let before = moved;
        let mut step = |done: u64, _: u64| progress((before + done).min(total), total);
        let cap = which.cap().saturating_sub(moved + returned);
        let leaves = |onto| Leaves::Gpu { gpu, lent, most, cap, onto, away: is_suspended };
        let until = deadline.min(Instant::now() + SLICE);
        let (mut parted, mut stayed, mut put) = (Vec::new(), Vec::new(), None);
        if !hurries && state.as_ref().is_some_and(|state| state.settles.is_some()) {
            // Nobody waits for a GPU so much that this could not wait for what is on its way to the host; behind that it goes as anything else.
            if !matches!(which, Which::Given { .. }) {
                if Instant::now() >= deadline || !is_wanted() {
                    return (moved, vec![(there, Why { cause: SETTLING, text: SETTLES.to_owned() })]);
                }
                if let Err(text) = super::settle_in(state, until) {
                    return (moved, vec![(there, Why { cause: "room", text })]);
                }
                continue;
            }
            // There is room on the host for what waits for it, and nobody knows how much more.
            let host = Why { cause: "room", text: "the host has no room for it".to_owned() };
            return (moved, vec![(there, full_peers.map_or(host.clone(), |peers: Why| peers.and(host)))]);
        }
        if !hurries {
            (parted, stayed) = parting::leave(opened, driver, held, leaves(Onto::Anywhere), Some(until), &mut step);
        } else {
            if may_to_peers {
                (parted, stayed) = parting::leave(opened, driver, held, leaves(Onto::Peers), Some(until), &mut step);
                may_to_peers = stayed.iter().any(|(_, why)| why::is_late(why));
                full_peers = stayed.iter().find(|(_, why)| why.cause == "room").map(|(_, why)| why.clone());
            }
            if parted.is_empty() {
                let mut crews = rearranging::rested();
                let kept = copying::keep(opened, driver, leaves(Onto::Anywhere), &mut crews, is_wanted, &mut step);
                if kept.is_ok() {
                    rearranging::rest(crews);
                }
                let full;
                (put, full) = kept.unwrap_or_else(|why| {
                    tracing::debug!(target: "gpupool::memory", about = "recall", "nothing was put in plain memory: {why}");
                    may_hurry = false;
                    (None, None)
                });
                if let Some(put) = &put {
                    super::note_put();
                    let onto = Onto::Put { put, full: full.as_ref() };
                    (parted, stayed) = parting::leave(opened, driver, held, leaves(onto), None, &mut |_, _| {});
                }
                may_hurry &= full.is_none() && !parted.is_empty();
            }
        }
        let went = parted.iter().map(Parted::bytes).sum::<u64>();
        moved += went;
        if went > 0 {
            residence::is_far();
        }
        match (which, state.as_mut()) {
            // It comes back when it is resumed.
            (_, Some(state)) if is_suspended => {
                let more = parted::beyond(parted, &state.parted);
                state.parted.extend(more);
            }
            (Which::All, _) => away::add(parted),
            (Which::Given { .. }, _) => given::add(opened, gpu, parted),
            (Which::Lent | Which::Most(_), _) => {}
        }
        if let Some(put) = put {
            settles(state, own, put, went);
        }
        // What the memory stood on goes home, or the next part of it would have no room where it goes to.
        give_back(gpu, which);
        let goes_on = hurries || stayed.iter().any(|(_, why)| why::is_late(why));
        if !goes_on || moved == before && !hurries || Instant::now() >= deadline || !is_wanted() {
            return (moved, stayed);
        }
        if state.is_none() && !hurries {
            std::thread::sleep(which.breath().min(deadline.saturating_duration_since(Instant::now())));
        }
    }
}

/// By when the program has to have come to rest.
fn rests_by(which: Which, deadline: Instant) -> Instant {
    Instant::now().checked_add(which.to_rest()).map_or(deadline, |rests| rests.min(deadline))
}

/// So much of the program's memory was put on the host; it stands still until that is memory of the host that GPUs reach, or, where it is suspended, until all of it is
/// back.
fn settles(state: &mut Option<Suspended>, held: Option<Held>, put: Put, bytes: u64) {
    super::was_put();
    match (state.as_mut(), held) {
        (Some(Suspended { put: before, settles, .. }), _) => {
            match before {
                Some(before) => before.join(put),
                None => *before = Some(put),
            }
            if let Some(settles) = settles {
                settles.bytes += bytes;
            }
        }
        (None, Some(held)) => {
            let settles = Some(Settles { since: Instant::now(), bytes });
            *state = Some(Suspended { held, parted: Vec::new(), put: Some(put), settles });
        }
        (None, None) => {}
    }
}

/// What is free there goes to the driver, as far as no GPU may be at work on it; the bytes.
pub fn give_back(gpu: u32, which: Which) -> u64 {
    idle::give_back_unused(Some(Place::Gpu(gpu)), u32::MAX, which.word(), &format!("GPU {gpu} is left"))
}

/// Bytes that this program has on a GPU for others.
pub fn lent_on(gpu: u32) -> u64 {
    open::opened().map_or(0, |opened| lies_there(opened, gpu, true))
}

/// Bytes that this program has on a GPU and that leave it when that is drained, as far as they can.
pub fn bytes_on(gpu: u32) -> u64 {
    open::opened().map_or(0, |opened| lies_there(opened, gpu, false))
}

/// The same without what others know by its pages: a try that has nothing but that would stop the program for nothing. `lent`: only what is for other GPUs.
pub fn loose_on(gpu: u32, lent: bool) -> u64 {
    let is_loose = |piece: &Piece<Physical>| piece.anchors.is_empty();
    open::opened().map_or(0, |opened| lies_there_where(opened, gpu, lent, is_loose))
}

/// Bytes of blocks and of the program's own mapped memory on a GPU, or of what of these is for others.
fn lies_there(opened: &open::Opened, gpu: u32, lent: bool) -> u64 {
    lies_there_where(opened, gpu, lent, |_| true)
}

fn lies_there_where(opened: &open::Opened, gpu: u32, lent: bool, counts: impl Fn(&Piece<Physical>) -> bool) -> u64 {
    let place = Place::Gpu(gpu);
    let blocks = opened.pool.stretches().into_iter().filter(|(block, _)| !lent || block.home != gpu);
    let pieces = blocks.flat_map(|(_, pieces)| pieces).filter(|piece| piece.place == place && counts(piece));
    let own = handles::by_hand::all().into_iter().filter(|own| own.place == place && (!lent || own.asked != gpu));
    pieces.map(|piece| piece.bytes).sum::<u64>() + own.map(|own| own.bytes).sum::<u64>()
}

/// Of what a GPU has beyond a limit that was set, the part that does not count among what the pool takes and is not moved for it.
pub fn beyond_the_pool(gpu: u32, limit: u64) -> Vec<Rest> {
    let place = Place::Gpu(gpu);
    let (taken, charged) = memory::accounts().map_or((0, 0), |all| (all.taken(place), all.of(Claim::Handles, place)));
    let own = handles::by_hand::bytes_at(place).saturating_sub(charged);
    let beyond = (taken + own + of_kind::bytes_on(gpu)).saturating_sub(limit);
    // Where that is what the limit is for, nothing can have left.
    let managed = memory::accounts().map_or(0, |all| all.of(Claim::Managed, place)).min(taken.saturating_sub(limit));
    let managed = Rest { bytes: managed, what: MANAGED.to_owned(), cause: "managed" };
    let beyond = beyond - managed.bytes;
    let what = "memory of the program's own (cuMemCreate) that its GPU had room for: the limit is for what the pool takes, which is less by so much";
    let rest = Rest { bytes: own.min(beyond), what: what.to_owned(), cause: "own" };
    let kind = only_the_drivers(gpu, beyond - rest.bytes);
    [managed, rest].into_iter().filter(|rest| rest.bytes > 0).chain(kind).collect()
}

/// Why it stays on a GPU.
const MANAGED: &str = "managed memory, which stays where it was placed";

/// What only the driver can place of what a GPU has, so many bytes of it at most, if there is any.
fn only_the_drivers(gpu: u32, most: u64) -> Option<Rest> {
    let Why { text, cause } = Why::of_kind();
    Some(Rest { bytes: of_kind::bytes_on(gpu).min(most), what: text, cause }).filter(|rest| rest.bytes > 0)
}

/// What of this process is on a GPU beside what was to leave and is told of already.
fn besides(gpu: u32, told: u64) -> Vec<Rest> {
    let place = Place::Gpu(gpu);
    let usage = open::opened().map(|opened| opened.pool.usage());
    let pooled = usage.as_ref().and_then(|usage| usage.places.iter().find(|known| known.place == place));
    let (held, used) = pooled.map_or((0, 0), |known| (known.held, known.used));
    let own = handles::by_hand::bytes_at(place);
    let managed = memory::accounts().map_or(0, |accounts| accounts.of(Claim::Managed, place));
    let contexts = context::all().iter().filter(|context| context.device == Device::of(gpu)).count();
    let cost = context::cost_on(Device::of(gpu));
    let rows = [
        (
            (used + own).saturating_sub(told),
            "memory that blocks or cuMemCreate of the program made while it left, or that is not mapped as one whole",
        ),
        (held.saturating_sub(used), "freed memory that a GPU may still be at work on; it goes home once that is over"),
        (managed, MANAGED),
    ];
    let mut rest: Vec<Rest> = rows
        .into_iter()
        .filter(|row| row.0 > 0)
        .map(|(bytes, what)| Rest { bytes, what: what.to_owned(), cause: "" })
        .chain(only_the_drivers(gpu, u64::MAX))
        .collect();
    if contexts > 0 {
        let many = if contexts == 1 { "a context".to_owned() } else { format!("{contexts} contexts") };
        rest.push(Rest {
            cause: "",
            bytes: cost,
            what: format!(
                "{many}, with modules and what the driver itself allocated there: the program computes on this GPU, and only its end \
                 takes that away"
            ),
        });
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_hurries_only_where_the_driver_would_take_longer_than_there_is_time() {
        let minute = Duration::from_secs(60);
        assert!(!Which::All.hurries(100_000_000_000, minute) && Which::All.hurries(110_000_000_000, minute));
        assert!(!Which::Lent.hurries(u64::MAX, Duration::ZERO) && !Which::Most(1).hurries(u64::MAX, Duration::ZERO));
        assert!(Which::Given { bytes: 1, lent: true, cap: 1, rest: minute }.hurries(1, minute));
    }
}
