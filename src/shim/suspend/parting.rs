//! Which memory leaves its GPUs while nobody uses it, in which order, and where it goes: of a program that is suspended, or that leaves one
//! GPU alone.

use super::Target;
use super::kept::{self, Kept, Refused};
use super::put::Put;
use super::spare;
use super::stored::{Range, Stored};
use super::turns::{self, Turn};
use crate::backing::open::Opened;
use crate::backing::{host, residence, terms};
use crate::gate::{Closed, Held, Limits};
use crate::image::crew::{Crews, Way};
use crate::serve::handles::by_hand::{self, Own};
use crate::serve::memory::by_hand::Unplaced;
use crate::tiers;
use crate::watch::context;
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Device, Driver, Physical};
use gpupool_pool::{Block, FRAME, MoveError, Moved, Piece, Place, Stopped, Wish};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// What moves at a time, so that the end of the process waits for no more: as much as makes the calls that surround it cheap. More where a
/// chunk or block is larger, and between GPUs ([`turns::step_of`]).
pub(super) const BATCH: u64 = 1 << 30;
/// What is copied to plain memory before it leaves one GPU: half a second's work.
const AT_ONCE: u64 = 16 << 30;

/// How often something is tried beside a call that ends a context, and how long that is waited for each time.
const TRIES: u32 = 20;
/// Who owns the program's own memory, in the terms of [`gpupool_pool::Block::owner`].
const NOBODY: u64 = u64::MAX;
const PAUSE: Duration = Duration::from_millis(5);
/// How often at most all of a program's memory is written to a folder because it has been given more meanwhile.
const ROUNDS: u32 = 4;

/// What is to leave, and where it may go.
#[derive(Clone, Copy)]
pub enum Leaves<'a> {
    /// All that lies on GPUs which the program works on, since it is suspended. `put`: what leaves for where it was copied already; nothing else
    /// may, but to peers: a block that another thread was given meanwhile is not among it. `full`: what was not copied.
    Suspended { target: &'a Target, put: Option<&'a Put>, full: Option<&'a Full> },
    /// What lies on this GPU, while the program goes on or is suspended; `lent`: only what is for other GPUs. So many bytes at least, of others' first, and
    /// no more than `cap`. `away`: to no GPU that the program works on, since it is suspended.
    Gpu { gpu: u32, lent: bool, most: u64, cap: u64, onto: Onto<'a>, away: bool },
}

/// Where memory of one GPU goes.
#[derive(Clone, Copy)]
pub enum Onto<'a> {
    /// To peers and to the host.
    Anywhere,
    Peers,
    /// What was copied already goes there, and the program's own memory to peers and to the host. As for [`Leaves::Suspended`].
    Put {
        put: &'a Put,
        full: Option<&'a Full>,
    },
}

/// What was not copied to where it was to go, for lack of room there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Full {
    why: Why,
    /// By their first addresses, the last ones.
    ranges: BTreeMap<u64, u64>,
}

impl Full {
    fn new(why: Why, ranges: &[Range]) -> Self {
        Self { why, ranges: ranges.iter().map(|range| (range.address, range.address + range.bytes)).collect() }
    }

    fn has(&self, address: u64) -> bool {
        self.ranges.range(..=address).next_back().is_some_and(|(_, end)| address < *end)
    }
}

impl<'a> Leaves<'a> {
    /// Whether this is a place that is left. A suspended program leaves GPUs that it works on; where all of its memory goes to the host, any;
    /// and where it goes to a disk, all memory there is.
    fn place(self, place: Place) -> bool {
        match (self, place) {
            (_, Place::Disk | Place::Pageable) => false,
            // Unless somebody asks for it by draining the GPU, nothing is copied from one with a grave error.
            (Self::Suspended { .. }, place) if terms::is_place_left_alone(place) => false,
            (Self::Suspended { target: Target::Folder(_), .. }, _) => true,
            (_, Place::Host(_)) => false,
            (Self::Suspended { target, .. }, Place::Gpu(gpu)) => {
                *target == Target::Host || context::is_on(Device::of(gpu))
            }
            (Self::Gpu { gpu: left, .. }, Place::Gpu(gpu)) => gpu == left,
        }
    }

    /// Whether this piece of a block may leave.
    fn piece(self, piece: &Piece<Physical>) -> bool {
        let is_put = || self.put().map_or(!self.is_put(), |put| put.has(piece.address, piece.bytes));
        self.place(piece.place) && is_put()
    }

    /// Whether only what was copied before leaves.
    fn is_put(self) -> bool {
        match self {
            Self::Suspended { target, .. } => *target != Target::Peers,
            Self::Gpu { onto, .. } => matches!(onto, Onto::Put { .. }),
        }
    }

    /// Where it was copied to.
    fn put(self) -> Option<&'a Put> {
        match self {
            Self::Suspended { put, .. } => put,
            Self::Gpu { onto: Onto::Put { put, .. }, .. } => Some(put),
            Self::Gpu { .. } => None,
        }
    }

    /// What of it was not.
    fn full(self) -> Option<&'a Full> {
        match self {
            Self::Suspended { full, .. } | Self::Gpu { onto: Onto::Put { full, .. }, .. } => full,
            Self::Gpu { .. } => None,
        }
    }

    /// Whether memory for this GPU is concerned at all.
    fn concerns(self, home: u32) -> bool {
        !matches!(self, Self::Gpu { gpu, lent: true, .. } if gpu == home)
    }

    /// Whether memory may go to this place, of those that it does not leave; of the program's own memory, where the target is not peers.
    fn takes(self, opened: &Opened, place: Place) -> bool {
        match (self, place) {
            (_, Place::Disk | Place::Pageable) => false,
            (Self::Suspended { target, .. }, Place::Gpu(_)) => matches!(target, Target::Anywhere | Target::Peers),
            (Self::Suspended { target, .. }, Place::Host(_)) => *target != Target::Peers,
            (Self::Gpu { onto: Onto::Peers, .. }, Place::Host(_)) => false,
            // A suspended program's own GPUs are others' meanwhile.
            (Self::Gpu { away: true, .. }, Place::Gpu(gpu)) if context::is_on(Device::of(gpu)) => false,
            // Who goes on computes there, also together with another GPU.
            (Self::Gpu { .. }, place) => tiers::keeps_atomics(opened, place),
        }
    }

    fn why_nowhere(self) -> Why {
        match self {
            Self::Suspended { target: Target::Peers, .. } => Why::no_peer(),
            Self::Suspended { .. } => Why::nowhere(),
            Self::Gpu { .. } => Why::new(
                "nowhere",
                "there is no other place that it may lie at: none that lends and is in reach, or none at which two GPUs can change the same \
                 word at the same time",
            ),
        }
    }
}

/// Memory that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parted {
    /// Of the pool: of a block with this number, this range, which lay there.
    Pooled { block: u64, start: u64, address: u64, bytes: u64, from: Place },
    /// The program's own, mapped at this address and asked for on this GPU, which lay there.
    Own { address: u64, bytes: u64, asked: u32, from: Place },
}

impl Parted {
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Pooled { bytes, .. } | Self::Own { bytes, .. } => *bytes,
        }
    }

    pub fn address(&self) -> u64 {
        match self {
            Self::Pooled { address, .. } | Self::Own { address, .. } => *address,
        }
    }

    /// Where it lay.
    pub fn from(&self) -> Place {
        match self {
            Self::Pooled { from, .. } | Self::Own { from, .. } => *from,
        }
    }
}

/// What of `more` is not among what has left before: of a program that is suspended, what left its GPU for one from which it leaves again comes back to the first.
pub fn beyond(more: Vec<Parted>, before: &[Parted]) -> Vec<Parted> {
    let mut known: Vec<(u64, u64)> =
        before.iter().map(|parted| (parted.address(), parted.address() + parted.bytes())).collect();
    known.sort_unstable();
    let mut rest = Vec::new();
    for parted in more {
        let Parted::Pooled { block, start, address, bytes, from } = parted else {
            if !before.iter().any(|known| known.address() == parted.address()) {
                rest.push(parted);
            }
            continue;
        };
        let (mut at, end) = (address, address + bytes);
        // Addresses of the pool and of the program's own memory have nothing in common.
        for &(from_there, until) in known.iter().filter(|(start, until)| *until > address && *start < end) {
            if from_there > at {
                rest.push(Parted::Pooled { block, start, address: at, bytes: from_there - at, from });
            }
            at = at.max(until);
        }
        if at < end {
            rest.push(Parted::Pooled { block, start, address: at, bytes: end - at, from });
        }
    }
    rest
}

/// Crews that copy nothing at this moment, for whoever asks for more soon: only while the program is held. They keep contexts alive, and so go
/// as soon as something cannot move because a call is about to end one: that call waits for them.
static AT_REST: Mutex<Option<Crews>> = Mutex::new(None);

/// Those, or none yet.
pub fn rested() -> Crews {
    AT_REST.lock().take().unwrap_or_else(|| Crews::new(Way::Out))
}

/// They have copied.
pub fn rest(crews: Crews) {
    let before = AT_REST.lock().replace(crews);
    drop(before);
}

/// They are of no use any more, or in the way.
pub fn let_go_of_crews() {
    let crews = AT_REST.lock().take();
    drop(crews);
}

/// The program is stopped for a move. `None`: not now.
fn stop(driver: &'static Driver, held: &Held) -> Option<Closed<'static>> {
    held.stop(driver, &Limits::default()).inspect_err(|_| let_go_of_crews()).ok()
}

/// The gate, held, while something moves, and whose turn it is.
struct Quiet<'a>(Closed<'static>, #[expect(dead_code, reason = "it ends with the turn")] MutexGuard<'a, ()>);

impl Stopped for Quiet<'_> {
    fn still_quiet(&mut self) -> bool {
        self.0.still_quiet().is_ok()
    }
}

/// Why memory stayed: one word for each cause, and words for people, which name places and sizes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Why {
    pub cause: &'static str,
    pub text: String,
}

const FREED: &str = "freed";
/// Of what was not there yet when all of it was copied.
const CAME: &str = "came";
/// Of what was not tried any more, since the time was over.
const LATE: &str = "late";

impl Why {
    fn new(cause: &'static str, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }

    fn full(place: Place, missing: u64) -> Self {
        Self::new("room", format!("{place} lacks {} for it", format_size(missing)))
    }

    /// This of one place, and that of the next one: where none has room, all are named.
    pub(super) fn and(self, next: Self) -> Self {
        let lack_room = self.cause == "room" && next.cause == "room";
        if !lack_room || self.text.contains(&next.text) {
            return next;
        }
        Self::new("room", format!("{}, and {}", self.text, next.text))
    }

    fn refused(Refused { error, is_limited, .. }: Refused, missing: u64) -> Self {
        let lacks = format_size(missing);
        match is_limited {
            true => Self::new(
                "addresses",
                format!("the process may map so little more (RLIMIT_AS, ulimit -v) that {lacks} for it are lacking"),
            ),
            false => Self::new("room", format!("the system gives the process {lacks} less than that ({error})")),
        }
    }

    pub(super) fn ill() -> Self {
        Self::new("ill", "it lies on a GPU that had a grave error")
    }

    pub(super) fn own(unplaced: &Unplaced) -> Self {
        Self::new("own", unplaced.in_words())
    }

    pub(super) fn pages() -> Self {
        Self::new(
            "pages",
            "others know it by its pages: another process has it open, a network card or a library has it registered, or gpupool_anchor holds \
             it",
        )
    }

    /// Of what nobody but the driver can place.
    pub fn driver(text: &str) -> Self {
        Self::new("streams", text)
    }

    /// Of what the pool would have had.
    pub fn unpooled() -> Self {
        Self::new("unpooled", "the driver made it, as the pool had no room for it when it was asked for")
    }

    /// Of what a call was given that was under way when the program was stopped: nobody has copied it.
    fn came() -> Self {
        Self::new(CAME, "the program was given it while the rest left")
    }

    /// Of what is to go to other GPUs alone.
    fn no_peer() -> Self {
        let text = if terms::keeps_to_its_own() {
            "no other GPU lends to this program, which keeps to its own as one of several ranks on this host; gpupool set PID devices=0,1 has GPU 0 and 1 \
             lend to it, and --to host has the host take it"
        } else {
            "of the GPUs that it does not work on none lends to this program and is in reach; --to host has the host take it"
        };
        Self::new("no_peer", text)
    }

    pub(super) fn nowhere() -> Self {
        Self::new("nowhere", "there is no other place that it may lie at")
    }
}

/// Memory that could not leave, and why.
pub type Stayed = Vec<(u64, Why)>;

struct Leaving<'a> {
    opened: &'static Opened,
    driver: &'static Driver,
    held: &'a Held,
    leaves: Leaves<'a>,
    stayed: BTreeMap<Why, u64>,
    /// Why neighbours on one chunk do not go together, while they are tried one by one.
    parted_by: Option<Why>,
}

/// What of the pool's memory at the places that are left may leave, in whole frames, as it comes back.
fn ranges(stretches: &[Stretch], is_left: impl Fn(Place) -> bool) -> Vec<Range> {
    let leaves =
        |piece: &&Piece<Physical>| piece.anchors.is_empty() && !piece.place.is_stored() && is_left(piece.place);
    let frames = |block: Block, piece: &Piece<Physical>| {
        let address = piece.address / FRAME * FRAME;
        let bytes = (piece.address + piece.bytes).next_multiple_of(FRAME) - address;
        Range { owner: block.owner, home: block.home, address, bytes }
    };
    let of = |(block, pieces): &(Block, Vec<Piece<Physical>>)| -> Vec<Range> {
        pieces.iter().filter(leaves).map(|piece| frames(*block, piece)).collect()
    };
    let mut ranges: Vec<Range> = stretches.iter().flat_map(of).collect();
    // Each owner's one after the other: what copies them is made for one owner.
    ranges.sort_by_key(|range| (range.home, range.owner, range.address));
    ranges
}

/// Stores all memory of the pool that may leave in a folder; `None` where there is none.
///
/// A call that asks for memory passes no gate, and one that was under way when the program was stopped may be given some while the rest is written: that is
/// begun anew then, as soon as it is seen, since one process has one image in a folder. Rejected: to keep what came on the host, which would leave a program that
/// went to a disk in two places.
///
/// # Errors
/// Why not, in words.
pub fn store(
    opened: &'static Opened,
    driver: &'static Driver,
    folder: &Path,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Option<Put>, String> {
    opened.pool.free_empty_slabs();
    let there = || ranges(&opened.pool.stretches(), |place| !terms::is_place_left_alone(place));
    // Asked at each step: a look at all blocks is made only where one was given out since.
    let given = || opened.pool.usage().allocations;
    let write = |ranges: &[Range], goes_on: &dyn Fn() -> bool| {
        let total = ranges.iter().map(|range| range.bytes).sum();
        progress(0, total);
        Stored::write(driver, opened, folder, ranges, goes_on, &mut |done| progress(done, total))
    };
    let stored = write_all(&there, &given, is_wanted, write, |stored| stored.unname().end())?;
    Ok(stored.map(|stored| Put::Disk(Box::new(stored))))
}

/// Writes all that is `there`, and `drops` what was written and begins anew where more has come, as far as the count of what was `given` out says so; `None` where there
/// is nothing.
fn write_all<T>(
    there: &dyn Fn() -> Vec<Range>,
    given: &dyn Fn() -> u64,
    is_wanted: &dyn Fn() -> bool,
    mut write: impl FnMut(&[Range], &dyn Fn() -> bool) -> Result<T, String>,
    drops: impl Fn(T),
) -> Result<Option<T>, String> {
    // Whoever asks once more waits, so it is not more than a few calls that come.
    for is_last in (1..=ROUNDS).map(|round| round == ROUNDS) {
        let looked_at = Cell::new(given());
        let ranges = there();
        if ranges.is_empty() {
            return Ok(None);
        }
        let known: BTreeMap<u64, u64> = ranges.iter().map(|range| (range.address, range.bytes)).collect();
        // What has gone is none of that. What came counts also where it has gone since: writing was ended for it.
        let is_more = || there().iter().any(|range| known.get(&range.address).is_none_or(|bytes| *bytes < range.bytes));
        let has_come = Cell::new(false);
        let goes_on = || {
            let now = given();
            if !is_last && looked_at.replace(now) != now {
                has_come.set(has_come.get() || is_more());
            }
            is_wanted() && !has_come.get()
        };
        let stored = write(&ranges, &goes_on);
        if !is_wanted() || is_last || !(has_come.get() || is_more()) {
            return stored.map(Some);
        }
        if let Ok(stored) = stored {
            drops(stored);
        }
    }
    Ok(None)
}

/// Copies as much of the pool's memory that is to leave to plain memory of the host as there is room for, and of a suspended program's own; `None` where that is
/// nothing, and why it was not all. Of one GPU about as much as [`AT_ONCE`], and only what may lie on the host; there is room for a further [`BATCH`] on the host,
/// which takes it over ([`settle`]).
///
/// # Errors
/// Why not, in words.
pub fn keep(
    opened: &'static Opened,
    driver: &'static Driver,
    leaves: Leaves<'_>,
    crews: &mut Crews,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Option<Put>, Option<Full>), String> {
    let (mut near, own) = chosen(opened, leaves);
    if matches!(leaves, Leaves::Gpu { .. }) {
        near.retain(|(block, _)| host_for(opened, block.home).is_some());
        let mut sum = 0;
        let first = batches(&near, BATCH).take_while(|batch| {
            let goes = sum < AT_ONCE;
            sum += batch.iter().map(|(_, pieces)| there(leaves, pieces)).sum::<u64>();
            goes
        });
        near.truncate(first.map(<[Stretch]>::len).sum());
    }
    // Where the program goes on, what it made itself goes straight to where GPUs reach it.
    let is_suspended = matches!(leaves, Leaves::Suspended { .. });
    let (keeps, own): (Vec<Own>, Vec<Own>) =
        own.into_iter().partition(|own| is_suspended && by_hand::may_go(own.address, own.asked));
    let range = |own: Own| Range { owner: NOBODY, home: own.asked, address: own.address, bytes: own.bytes };
    // What the program made itself comes first: where the driver has to make memory on the host for it, that takes as much of it.
    let ranges: Vec<Range> = keeps.into_iter().map(range).chain(ranges(&near, |place| leaves.place(place))).collect();
    let mut hosts = opened.plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host());
    let Some(first) = hosts.next() else { return Ok((None, Some(Full::new(Why::nowhere(), &ranges)))) };
    let own = own.into_iter().map(|own| own.bytes).sum();
    let wanted = ranges.iter().map(|range| range.bytes).sum::<u64>() + if is_suspended { 0 } else { BATCH };
    let Room { allowed, mut there } = room_on_host(opened, wanted);
    if matches!(leaves, Leaves::Gpu { .. }) {
        there -= BATCH.min(there / 2);
    }
    let room = allowed.min(there).saturating_sub(own);
    let (ranges, plain, full) = placed(ranges, room, first, kept::make);
    if ranges.is_empty() {
        return Ok((None, full));
    }
    let total = ranges.iter().map(|range| range.bytes).sum();
    progress(0, total);
    let mut heard = |done| {
        progress(done, total);
        is_wanted()
    };
    Kept::copy(driver, plain, &ranges, crews, &mut heard).map(|kept| (Some(Put::Host(kept)), full))
}

/// What of these there is `room` for and memory can be made for, that memory, and what is left out and why. The system may refuse what nobody said that it lacks: limits of
/// the process (`RLIMIT_AS`), what it counts as promised; then it is asked for half of that, and so on.
fn placed<T: Default>(
    ranges: Vec<Range>,
    room: u64,
    place: Place,
    make: impl Fn(u64) -> Result<T, Refused>,
) -> (Vec<Range>, T, Option<Full>) {
    let all = ranges.iter().map(|range| range.bytes).sum::<u64>();
    let (mut room, mut refused) = (room, None);
    loop {
        let (fits, left_out) = fitting(ranges.clone(), room);
        let bytes: u64 = fits.iter().map(|range| range.bytes).sum();
        let made = if bytes == 0 { Ok(T::default()) } else { make(bytes) };
        match made {
            Ok(made) => {
                let lacks = all.saturating_sub(room);
                let why = refused.map_or_else(|| Why::full(place, lacks), |refused| Why::refused(refused, all - bytes));
                return (fits, made, (lacks > 0).then(|| Full::new(why, &left_out)));
            }
            Err(why) => {
                room = why.fits;
                refused = Some(why);
            }
        }
    }
}

/// Plain memory of the host that this process may have at a moment.
pub struct Room {
    /// Below the limits of what the pool takes of the host.
    pub allowed: u64,
    /// Beside what is kept back for the host itself.
    pub there: u64,
}

/// How much plain memory may be had for so much.
pub fn room_on_host(opened: &Opened, wanted: u64) -> Room {
    let accounts = opened.pool.accounts();
    let hosts = opened.plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host());
    let left: u64 = hosts.map(|place| accounts.limit(place).saturating_sub(accounts.taken(place))).sum();
    // What is in plain memory already will be the host's as well.
    let allowed = left.saturating_sub(accounts.taken(Place::Pageable));
    let there = if allowed == 0 { 0 } else { beside(wanted, host::available, spare::give_back).unwrap_or(u64::MAX) };
    Room { allowed, there }
}

/// How much memory there is for so much, beside what is spare, or with that where it takes that: nobody knows how much of it was ever made, so it goes.
fn beside(wanted: u64, available: impl Fn() -> Option<u64>, give_back: impl Fn() -> u64) -> Option<u64> {
    let beside = available()?;
    if wanted > beside && give_back() > 0 { available() } else { Some(beside) }
}

/// What of these there is room for, one after the other, and the rest.
fn fitting(ranges: Vec<Range>, room: u64) -> (Vec<Range>, Vec<Range>) {
    let mut room = room;
    ranges.into_iter().partition(|range| {
        let fits = range.bytes <= room;
        if fits {
            room -= range.bytes;
        }
        fits
    })
}

/// The first place on the host that memory of this GPU may go to while its program goes on.
pub(super) fn host_for(opened: &Opened, home: u32) -> Option<Place> {
    opened.plan.order(home).into_iter().find(|place| place.is_host() && tiers::keeps_atomics(opened, *place))
}

/// Has everything that `leaves` names leave. From `until` on nothing more is begun, and what is left stayed because it was late
/// ([`is_late`]).
pub fn leave(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    leaves: Leaves<'_>,
    until: Option<Instant>,
    progress: &mut dyn FnMut(u64, u64),
) -> (Vec<Parted>, Stayed) {
    let mut leaving = Leaving { opened, driver, held, leaves, stayed: BTreeMap::new(), parted_by: None };
    let is_over = || until.is_some_and(|until| Instant::now() >= until);
    let late = || Why::new(LATE, "the time was over");
    let (near, own) = chosen(opened, leaves);
    let on_gpus = |pieces: &[Piece<Physical>]| there(leaves, pieces);
    let total =
        near.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>() + own.iter().map(|own| own.bytes).sum::<u64>();
    progress(0, total);
    if leaves.is_put() {
        let pieces = near.iter().flat_map(|(_, pieces)| pieces);
        for piece in pieces.filter(|piece| leaves.place(piece.place) && !leaves.piece(piece)) {
            let why = match leaves.full().filter(|full| full.has(piece.address)) {
                _ if !piece.anchors.is_empty() => Some(Why::pages()),
                Some(full) => Some(full.why.clone()),
                // Of one GPU not everything is copied at once.
                None => matches!(leaves, Leaves::Suspended { .. }).then(Why::came),
            };
            if let Some(why) = why {
                *leaving.stayed.entry(why).or_default() += piece.bytes;
            }
        }
    }
    let mut parted: Vec<Parted> = Vec::new();
    let mut done = 0;
    let is_to_peers = matches!(leaves, Leaves::Suspended { .. }) && !leaves.is_put();
    let step = if is_to_peers { turns::step_of(total) } else { BATCH };
    let mut rest: Vec<&[Stretch]> = batches(&near, step).collect();
    // Of a program that goes on, as much leaves at a time as there is time for.
    if matches!(leaves, Leaves::Suspended { .. }) && rest.len() > 1 {
        parted.extend(near.iter().flat_map(|(block, pieces)| places_before(block, pieces, leaves)));
        rest = leaving.go_in_turns(rest, &mut |batch| {
            done += batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>();
            progress(done, total);
        });
        for batch in rest {
            leaving.go(batch);
            done += batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>();
            progress(done, total);
        }
        rest = Vec::new();
    }
    for batch in rest {
        if is_over() {
            let bytes: u64 = batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum();
            *leaving.stayed.entry(late()).or_default() += bytes;
            continue;
        }
        parted.extend(batch.iter().flat_map(|(block, pieces)| places_before(block, pieces, leaves)));
        leaving.go(batch);
        done += batch.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>();
        progress(done, total);
    }
    // What stayed has nothing to come back for.
    let now = opened.pool.stretches();
    let there: BTreeSet<(u64, Place)> =
        now.iter().flat_map(|(_, pieces)| pieces.iter().map(|piece| (piece.address, piece.place))).collect();
    parted.retain(|parted| match parted {
        Parted::Pooled { address, from, .. } => !there.contains(&(*address, *from)),
        Parted::Own { .. } => true,
    });
    for Own { address, bytes, asked, place } in own {
        if is_over() {
            *leaving.stayed.entry(late()).or_default() += bytes;
            continue;
        }
        let mut why = leaves.why_nowhere();
        let stop = || stop(driver, held);
        let mut has_gone = |gone: Result<(), Unplaced>| gone.inspect_err(|unplaced| why = Why::own(unplaced)).is_ok();
        let is_kept = leaves.put().and_then(Put::on_host).is_some_and(|kept| kept.has(address, bytes));
        let went = is_kept && has_gone(by_hand::put_away(driver, address, bytes, stop))
            || leaving
                .order(asked)
                .into_iter()
                .any(|to| has_gone(by_hand::move_behind(driver, opened, address, bytes, to, asked, stop)));
        if went {
            parted.push(Parted::Own { address, bytes, asked, from: place });
        } else {
            *leaving.stayed.entry(why).or_default() += bytes;
        }
        done += bytes;
        progress(done, total);
    }
    // What was freed meanwhile has left in its own way.
    leaving.stayed.retain(|why, _| why.cause != FREED);
    (parted, leaving.stayed.into_iter().map(|(why, bytes)| (bytes, why)).collect())
}

/// Bytes of these at places that are left.
fn there(leaves: Leaves<'_>, pieces: &[Piece<Physical>]) -> u64 {
    pieces.iter().filter(|piece| leaves.place(piece.place)).map(|piece| piece.bytes).sum()
}

/// What `leaves` names, of the pool and of the program's own memory.
fn chosen(opened: &Opened, leaves: Leaves<'_>) -> (Vec<Stretch>, Vec<Own>) {
    opened.pool.free_empty_slabs();
    let mut near: Vec<Stretch> = opened
        .pool
        .stretches()
        .into_iter()
        .filter(|(block, pieces)| leaves.concerns(block.home) && pieces.iter().any(|piece| leaves.place(piece.place)))
        .collect();
    // What the program made itself is no memory of the pool's, and goes to the host where that goes to a disk.
    let leaves_own =
        |own: &Own| matches!(own.place, Place::Gpu(_)) && leaves.concerns(own.asked) && leaves.place(own.place);
    let mut own: Vec<_> = by_hand::all().into_iter().filter(leaves_own).collect();
    if let Leaves::Gpu { gpu, most, cap, .. } = leaves {
        let pooled = near.iter().map(|(block, pieces)| (block.home == gpu, there(leaves, pieces)));
        let kept = least(&pooled.chain(own.iter().map(|own| (own.asked == gpu, own.bytes))).collect::<Vec<_>>(), most);
        let mut keeps = kept.into_iter();
        near.retain(|_| keeps.next().unwrap_or(true));
        own.retain(|_| keeps.next().unwrap_or(true));
        // Of blocks that stand on several chunks no more of these than it takes.
        let mut cap = cap;
        own.retain(|own| {
            let fits = own.bytes <= cap;
            cap -= if fits { own.bytes } else { 0 };
            fits
        });
        let mut left = most.saturating_sub(own.iter().map(|own| own.bytes).sum());
        near.sort_by_key(|(block, _)| (block.home == gpu, block.address));
        for (_, pieces) in &mut near {
            pieces.retain(|piece| {
                if !leaves.place(piece.place) {
                    return true;
                }
                let goes = left > 0 && piece.bytes <= cap;
                if goes {
                    (left, cap) = (left.saturating_sub(piece.bytes), cap - piece.bytes);
                }
                goes
            });
        }
        near.sort_by_key(|(block, _)| block.address);
    }
    (near, own)
}

/// Which of these, each for the GPU that it lies on or not and of so many bytes, make `most` bytes: what is for others first, and all of these
/// where less is there.
fn least(all: &[(bool, u64)], most: u64) -> Vec<bool> {
    let mut chosen = vec![false; all.len()];
    let mut sum = 0;
    for wants_home in [false, true] {
        for (chosen, (_, bytes)) in chosen.iter_mut().zip(all).filter(|(_, (is_home, _))| *is_home == wants_home) {
            if sum >= most {
                break;
            }
            *chosen = true;
            sum += bytes;
        }
    }
    chosen
}

/// Whether memory stayed only because it was not there yet when the rest was copied.
pub fn has_come(stayed: &Stayed) -> bool {
    stayed.iter().any(|(_, why)| why.cause == CAME)
}

/// Whether memory stayed only because there was no time for it.
pub fn is_late(why: &Why) -> bool {
    why.cause == LATE
}

fn places_before(block: &Block, pieces: &[Piece<Physical>], leaves: Leaves<'_>) -> Vec<Parted> {
    let of = |piece: &Piece<Physical>| Parted::Pooled {
        block: block.id,
        start: block.address,
        address: piece.address,
        bytes: piece.bytes,
        from: piece.place,
    };
    pieces.iter().filter(|piece| leaves.place(piece.place)).map(of).collect()
}

pub(super) type Stretch = (Block, Vec<Piece<Physical>>);

/// Whether these neighbours stand on one chunk together.
fn share_a_chunk((_, pieces): &Stretch, (_, next): &Stretch) -> bool {
    pieces.last().zip(next.first()).is_some_and(|(last, first)| last.chunk_address == first.chunk_address)
}

/// Where these come apart without two that share a chunk coming apart, as near to the middle as can be; `None`: nowhere.
fn middle(all: &[Stretch]) -> Option<usize> {
    let ends = (1..all.len()).filter(|at| !share_a_chunk(&all[at - 1], &all[*at]));
    ends.min_by_key(|at| at.abs_diff(all.len() / 2))
}

/// Neighbours that stand on one chunk together, since a chunk moves as a whole, and so many that it is worth it.
fn batches(all: &[Stretch], step: u64) -> impl Iterator<Item = &[Stretch]> {
    let mut sum = 0;
    all.chunk_by(move |before, behind| {
        let ((one, _), (other, _)) = (before, behind);
        sum += one.bytes;
        let goes_on = share_a_chunk(before, behind) || sum < step && one.home == other.home;
        if !goes_on {
            sum = 0;
        }
        goes_on
    })
}

impl Leaving<'_> {
    /// Where memory of the pool may go that belongs to this GPU, best first.
    fn targets(&self, home: u32) -> Vec<Place> {
        match self.leaves {
            leaves if leaves.is_put() => leaves.put().map(Put::place).into_iter().collect(),
            _ => self.order(home),
        }
    }

    /// The same for memory that the program made itself.
    fn order(&self, home: u32) -> Vec<Place> {
        let may =
            |place: &Place| (place.is_host() || !self.leaves.place(*place)) && self.leaves.takes(self.opened, *place);
        self.opened.plan.order(home).into_iter().filter(may).collect()
    }

    /// Moves these to the first place that they may go to; what did not go there as a whole is the answer.
    fn go_in_turns<'b>(
        &mut self,
        batches: Vec<&'b [Stretch]>,
        gone: &mut dyn FnMut(&'b [Stretch]),
    ) -> Vec<&'b [Stretch]> {
        let wishes_of = |batch: &&[Stretch]| -> Vec<Wish> {
            let to = batch.first().and_then(|(first, _)| self.targets(first.home).first().copied());
            to.map(|to| self.wishes(batch, to)).unwrap_or_default()
        };
        let (batches, rest): (Vec<_>, Vec<_>) =
            batches.into_iter().map(|batch| (batch, wishes_of(&batch))).partition(|(_, wishes)| !wishes.is_empty());
        let mut rest: Vec<&[Stretch]> = rest.into_iter().map(|(batch, _)| batch).collect();
        let (batches, wishes): (Vec<&[Stretch]>, Vec<Vec<Wish>>) = batches.into_iter().unzip();
        let (opened, driver, held) = (self.opened, self.driver, self.held);
        turns::carry_out(opened, driver, held, &wishes, &|| true, &mut |at, moved| match moved {
            Ok(moved) => {
                self.note_stayed(moved);
                gone(batches[at]);
            }
            Err(_) => rest.push(batches[at]),
        });
        rest
    }

    /// Moves all of these, or less and less at a time where there is no room for as much.
    fn go(&mut self, batch: &[Stretch]) {
        let Some((first, _)) = batch.first() else { return };
        let mut why = self.leaves.why_nowhere();
        for to in self.targets(first.home) {
            let wishes = self.wishes(batch, to);
            if wishes.is_empty() {
                return;
            }
            match self.rearrange(&wishes) {
                Ok(all) => return self.note_stayed(all),
                // All the others go together as before: what stands on one chunk goes as a whole or not at all.
                Err(cause) if cause.cause == FREED => {
                    let living = self.living(batch);
                    if living.len() < batch.len() {
                        return self.go(&living);
                    }
                    why = cause;
                }
                Err(cause) => why = why.and(cause),
            }
        }
        match batch {
            [(_, pieces)] => self.go_by_piece(pieces, first.home, &why),
            _ => {
                let apart = middle(batch);
                // Neighbours on one chunk keep each other there, and why they are apart is why they stay.
                let before = if apart.is_none() { self.parted_by.replace(why) } else { None };
                let (left, right) = batch.split_at(apart.unwrap_or(batch.len() / 2));
                self.go(left);
                self.go(right);
                if apart.is_none() {
                    self.parted_by = before;
                }
            }
        }
    }

    /// What of these has not been freed meanwhile.
    fn living(&self, batch: &[Stretch]) -> Vec<Stretch> {
        let now = self.opened.pool.stretches();
        let live: BTreeMap<u64, u64> = now.iter().map(|(block, _)| (block.address, block.id)).collect();
        batch.iter().filter(|(block, _)| live.get(&block.address) == Some(&block.id)).cloned().collect()
    }

    /// Of a suspended program whole blocks leave for peers, and otherwise what of them was copied; of one GPU what lies there. The rest of a block
    /// stays where it is.
    fn wishes(&self, batch: &[Stretch], to: Place) -> Vec<Wish> {
        if matches!(self.leaves, Leaves::Suspended { .. }) && !self.leaves.is_put() {
            return batch.iter().map(|(block, _)| Wish { address: block.address, bytes: block.bytes, to }).collect();
        }
        let mut wishes: Vec<Wish> = Vec::new();
        for (block, pieces) in batch {
            for piece in pieces.iter().filter(|piece| self.leaves.piece(piece)) {
                match wishes.last_mut() {
                    Some(last) if last.address + last.bytes == piece.address && last.address >= block.address => {
                        last.bytes += piece.bytes;
                    }
                    _ => wishes.push(Wish { address: piece.address, bytes: piece.bytes, to }),
                }
            }
        }
        wishes
    }

    /// One block that is larger than any place has room for.
    fn go_by_piece(&mut self, pieces: &[Piece<Physical>], home: u32, why: &Why) {
        let leaves = self.leaves;
        for piece in pieces.iter().filter(|piece| leaves.piece(piece)) {
            let mut why = why.clone();
            let went = pieces.len() > 1
                && self.targets(home).into_iter().any(|to| {
                    match self.rearrange(&[Wish { address: piece.address, bytes: piece.bytes, to }]) {
                        Ok(moved) => {
                            self.note_stayed(moved);
                            true
                        }
                        Err(cause) => {
                            why = why.clone().and(cause);
                            false
                        }
                    }
                });
            if !went {
                *self.stayed.entry(why).or_default() += piece.bytes;
            }
        }
    }

    fn note_stayed(&mut self, Moved { anchored, shared, .. }: Moved) {
        let shared_with = "it stands on one piece of memory together with what has to stay";
        let why_shared = self.parted_by.clone().unwrap_or_else(|| Why::new("shared", shared_with));
        for (bytes, why) in [(anchored, Why::pages()), (shared, why_shared)] {
            if bytes > 0 {
                *self.stayed.entry(why).or_default() += bytes;
            }
        }
    }

    fn rearrange(&self, wishes: &[Wish]) -> Result<Moved, Why> {
        rearrange(self.opened, self.driver, self.held, &Turn::default(), wishes)
    }
}

pub(super) fn rearrange(
    opened: &Opened,
    driver: &'static Driver,
    held: &Held,
    turn: &Turn,
    wishes: &[Wish],
) -> Result<Moved, Why> {
    for _ in 0..TRIES {
        let stops = || {
            let turn = turn.0.lock();
            Some(Quiet(stop(driver, held)?, turn))
        };
        match opened.pool.rearrange(wishes, stops) {
            Ok(done) => {
                // Even what is cut short has moved something, to wherever there was room.
                residence::is_far();
                return match done.cut_short {
                    Some(error) => Err(in_words(&error)),
                    None => Ok(done.wishes.into_iter().sum()),
                };
            }
            // A context that is about to end is gone soon. Where the process ends, nothing more is tried.
            Err(MoveError::NotNow) => std::thread::sleep(PAUSE),
            Err(error) => return Err(in_words(&error)),
        }
    }
    Err(in_words(&MoveError::NotNow))
}

fn in_words(error: &MoveError<CuResult>) -> Why {
    match error {
        MoveError::Full { place, missing } => Why::full(*place, *missing),
        MoveError::NoPlace | MoveError::OutOfReach => Why::nowhere(),
        MoveError::NotABlock => Why::new(FREED, "it was freed meanwhile"),
        MoveError::NotNow => Why::new("ending", "the process is ending, or a context of it"),
        MoveError::NotQuiet => Why::new("past", "work was submitted past gpupool"),
        MoveError::Backend(result) => Why::new("driver", format!("the driver answered {result}")),
    }
}

/// What of this belongs to blocks that live.
pub fn living(opened: &Opened, parted: Vec<Parted>) -> Vec<Parted> {
    let live: BTreeMap<u64, u64> = opened.pool.stretches().iter().map(|(block, _)| (block.address, block.id)).collect();
    let lives = |parted: &Parted| match parted {
        Parted::Pooled { block, start, .. } => live.get(start) == Some(block),
        Parted::Own { .. } => true,
    };
    parted.into_iter().filter(lives).collect()
}

/// What of a GPU's own blocks lies elsewhere, as far as there is `room` for it on that GPU.
pub fn displaced(opened: &Opened, gpu: u32, room: u64) -> Vec<Parted> {
    let mut left = room;
    let home = Place::Gpu(gpu);
    let stretches = opened.pool.stretches().into_iter().filter(|(block, _)| block.home == gpu);
    let far = stretches.flat_map(|(block, pieces)| pieces.into_iter().map(move |piece| (block, piece)));
    // What the program has put somewhere itself stays there.
    let is_put = |piece: &Piece<Physical>| tiers::is_placed(piece.address, piece.bytes);
    let far = far.filter(|(_, piece)| {
        piece.place != home
            && !piece.place.is_stored()
            && piece.anchors.is_empty()
            && !terms::is_place_left_alone(piece.place)
            && !is_put(piece)
    });
    let fits = far.map_while(|(block, piece)| {
        left = left.checked_sub(piece.bytes)?;
        let (id, start) = (block.id, block.address);
        Some(Parted::Pooled { block: id, start, address: piece.address, bytes: piece.bytes, from: home })
    });
    fits.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_again_comes_back_to_where_it_left_first() {
        let pooled = |address, bytes, gpu| Parted::Pooled { block: 1, start: 0, address, bytes, from: Place::Gpu(gpu) };
        let own = |address, gpu| Parted::Own { address, bytes: 10, asked: 0, from: Place::Gpu(gpu) };
        let before = [pooled(300, 50, 0), pooled(100, 100, 0), own(1000, 0)];
        let more = vec![pooled(0, 50, 2), pooled(50, 400, 2), pooled(120, 40, 2), own(1000, 2), own(2000, 2)];
        let left = [pooled(0, 50, 2), pooled(50, 50, 2), pooled(200, 100, 2), pooled(350, 100, 2), own(2000, 2)];
        assert_eq!(beyond(more, &before), left);
        assert_eq!(beyond(left.to_vec(), &[]), left);
    }

    #[test]
    fn what_there_was_no_room_for_is_told_from_what_came_later() {
        let range = |address, bytes| Range { owner: 1, home: 0, address, bytes };
        let (kept, left_out) = fitting(vec![range(100, 40), range(200, 30), range(300, 20), range(400, 10)], 60);
        assert_eq!(kept.iter().map(|range| range.address).collect::<Vec<_>>(), [100, 300]);
        let full = Full::new(Why::full(Place::Host(0), 40), &left_out);
        let has: Vec<u64> =
            [99, 100, 199, 200, 229, 230, 300, 399, 400, 409, 410].into_iter().filter(|at| full.has(*at)).collect();
        assert_eq!(has, [200, 229, 400, 409]);
    }

    #[test]
    fn what_the_system_gives_no_memory_for_is_left_out_and_told_as_such() {
        let range = |address, bytes| Range { owner: 1, home: 0, address, bytes };
        let all = || vec![range(100, 40), range(200, 30), range(300, 20), range(400, 10)];
        let placed_by = |room, most: u64, is_limited| {
            let make = |bytes: u64| {
                let error = std::io::ErrorKind::OutOfMemory.into();
                let fits = if is_limited { most } else { bytes / 2 };
                if bytes > most { Err(Refused { error, is_limited, fits }) } else { Ok(bytes) }
            };
            let (ranges, made, full) = placed(all(), room, Place::Host(0), make);
            let addresses: Vec<u64> = ranges.iter().map(|range| range.address).collect();
            (addresses, made, full.map(|full| (full.why.cause, full.ranges.len())))
        };
        assert_eq!(placed_by(100, 100, false), (vec![100, 200, 300, 400], 100, None));
        assert_eq!(placed_by(60, 100, false), (vec![100, 300], 60, Some(("room", 2))));
        // Half of it, and half of that.
        assert_eq!(placed_by(100, 30, false), (vec![300], 20, Some(("room", 3))));
        assert_eq!(placed_by(100, 75, true), (vec![100, 200], 70, Some(("addresses", 2))));
        assert_eq!(placed_by(100, 0, true), (vec![], 0, Some(("addresses", 4))));
    }

    #[test]
    fn neighbours_on_one_chunk_stay_together_where_a_batch_comes_apart() {
        let stretch = |chunks: &[u64]| -> Stretch {
            let block = Block { address: 0, bytes: 1, home: 0, owner: 1, id: 1 };
            let piece = |chunk_address: &u64| Piece {
                address: *chunk_address,
                bytes: 1,
                place: Place::Gpu(0),
                chunk_address: *chunk_address,
                chunk_bytes: 1,
                handle: Physical::from_raw(1),
                anchors: gpupool_pool::Anchors::NONE,
            };
            (block, chunks.iter().map(piece).collect())
        };
        let at = |all: &[&[u64]]| middle(&all.iter().map(|chunks| stretch(chunks)).collect::<Vec<_>>());
        assert_eq!(at(&[&[1], &[2], &[3], &[4]]), Some(2));
        assert_eq!(at(&[&[1], &[1, 2], &[2], &[4]]), Some(3));
        assert_eq!(at(&[&[1], &[2], &[2, 3], &[3]]), Some(1));
        assert_eq!(at(&[&[1, 2], &[2]]), None);
    }

    #[test]
    fn spare_memory_is_room_only_as_far_as_it_was_ever_made() {
        // 100 were spare, of which only 20 are there.
        for (wanted, room, is_given_back) in [(100, 110, false), (130, 130, true), (200, 130, true)] {
            let gone = Cell::new(false);
            let there = beside(
                wanted,
                || Some(if gone.get() { 130 } else { 110 }),
                || {
                    gone.set(true);
                    100
                },
            );
            assert_eq!((there, gone.get()), (Some(room), is_given_back), "{wanted}");
        }
        assert_eq!(beside(200, || Some(110), || 0), Some(110));
    }

    #[test]
    fn what_comes_while_all_is_written_is_written_too_whether_or_not_it_stays() {
        let range = |address| Range { owner: 1, home: 0, address, bytes: 10 };
        // What is there at each look, and whether somebody was given something before it.
        let played = |looks: &[&[u64]]| {
            let look = Cell::new(0);
            let there = || {
                let at = look.replace(look.get() + 1).min(looks.len() - 1);
                looks[at].iter().map(|address| range(*address)).collect::<Vec<_>>()
            };
            let (count, dropped) = (Cell::new(0), Cell::new(0));
            let given = || count.replace(count.get() + 1);
            let mut rounds = Vec::new();
            let write = |ranges: &[Range], goes_on: &dyn Fn() -> bool| {
                let addresses: Vec<u64> = ranges.iter().map(|range| range.address).collect();
                rounds.push(addresses.clone());
                if goes_on() { Ok(addresses) } else { Err("it was told not to go on".to_owned()) }
            };
            let written = write_all(&there, &given, &|| true, write, |_| dropped.set(dropped.get() + 1));
            (written, rounds.len(), dropped.get())
        };
        assert_eq!(played(&[&[]]), (Ok(None), 0, 0));
        assert_eq!(played(&[&[1]]), (Ok(Some(vec![1])), 1, 0));
        // It comes at the look in the middle.
        assert_eq!(played(&[&[1], &[1, 2], &[1, 2]]), (Ok(Some(vec![1, 2])), 2, 0));
        // It has gone again when all is begun anew.
        assert_eq!(played(&[&[1], &[1, 2], &[1]]), (Ok(Some(vec![1])), 2, 0));
        // It comes at the end only.
        assert_eq!(played(&[&[1], &[1], &[1, 2], &[1, 2]]), (Ok(Some(vec![1, 2])), 2, 1));
        // Again and again: what is written last counts.
        let all: Vec<Vec<u64>> = (1..20).map(|last| (1..=last).collect()).collect();
        let all: Vec<&[u64]> = all.iter().map(Vec::as_slice).collect();
        let (written, rounds, _) = played(&all);
        assert!(written.is_ok_and(|written| written.is_some()) && rounds == ROUNDS as usize);
    }
}
