//! Which memory leaves a program that is suspended, in which order, and where it goes.

use super::stored::{Range, Stored, Unread};
use super::{Target, takes};
use crate::backing::open::Opened;
use crate::gate::{Closed, Held, Limits};
use crate::serve::handles;
use crate::watch::context;
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Device, Driver, Physical};
use gpupool_pool::{Block, FRAME, Mapped, MoveError, Moved, Piece, Place, Stopped, Wish};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// What moves at a time, so that the end of the process waits for no more: as much as makes the calls that surround it cheap. More where a
/// chunk or block is larger.
const BATCH: u64 = 1 << 30;

/// How often something is tried beside a call that ends a context, and how long that is waited for each time.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(5);

/// Memory that left.
pub enum Parted {
    /// Of the pool: of a block with this number, this range, which lay there.
    Pooled { block: u64, start: u64, address: u64, bytes: u64, from: Place },
    /// The program's own, mapped at this address, which lay there.
    Own { address: u64, bytes: u64, from: Place },
}

impl Parted {
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Pooled { bytes, .. } | Self::Own { bytes, .. } => *bytes,
        }
    }
}

/// The gate, held, while something moves.
struct Quiet(Closed<'static>);

impl Stopped for Quiet {
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

impl Why {
    fn new(cause: &'static str, text: impl Into<String>) -> Self {
        Self { cause, text: text.into() }
    }

    fn nowhere() -> Self {
        Self::new("nowhere", "there is no other place that it may lie at")
    }
}

/// Memory that could not leave, and why.
pub type Stayed = Vec<(u64, Why)>;

struct Leaving<'a> {
    opened: &'static Opened,
    driver: &'static Driver,
    held: &'a Held,
    /// What leaves for a disk; nothing else may: a block that another thread was given meanwhile is not among it.
    stored: Option<&'a Stored>,
    stayed: BTreeMap<Why, u64>,
}

/// Stores all memory of the pool that may leave in a folder; `None` where there is none.
///
/// # Errors
/// Why not, in words.
pub fn store(
    opened: &'static Opened,
    driver: &'static Driver,
    folder: &Path,
    is_wanted: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Option<Stored>, String> {
    let stretches = opened.pool.stretches();
    let leaves = |piece: &&Piece<Physical>| piece.anchors.is_empty() && !piece.place.is_disk();
    // In whole frames, as they come back.
    let frames = |block: Block, piece: &Piece<Physical>| {
        let address = piece.address / FRAME * FRAME;
        Range { block, address, bytes: (piece.address + piece.bytes).next_multiple_of(FRAME) - address }
    };
    let of = |(block, pieces): &(Block, Vec<Piece<Physical>>)| -> Vec<Range> {
        pieces.iter().filter(leaves).map(|piece| frames(*block, piece)).collect()
    };
    let mut ranges: Vec<Range> = stretches.iter().flat_map(of).collect();
    if ranges.is_empty() {
        return Ok(None);
    }
    // Each owner's one after the other: what copies them is made for one owner.
    ranges.sort_by_key(|range| (range.block.home, range.block.owner, range.address));
    let total = ranges.iter().map(|range| range.bytes).sum();
    progress(0, total);
    Stored::write(driver, folder, &ranges, is_wanted, &mut |done| progress(done, total)).map(Some)
}

/// Has everything leave the GPUs that this process works on.
pub fn leave(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    target: &Target,
    stored: Option<&Stored>,
    progress: &mut dyn FnMut(u64, u64),
) -> (Vec<Parted>, Stayed) {
    let mut leaving = Leaving { opened, driver, held, stored, stayed: BTreeMap::new() };
    let near: Vec<Stretch> = opened
        .pool
        .stretches()
        .into_iter()
        .filter(|(_, pieces)| pieces.iter().any(|piece| is_left(piece.place, target)))
        .collect();
    // What the program made itself is no memory of the pool's, and goes to the host where that goes to a disk.
    let is_gpu = |place: Place| matches!(place, Place::Gpu(_));
    let own: Vec<_> =
        handles::by_hand::all().into_iter().filter(|own| is_gpu(own.place) && is_left(own.place, target)).collect();
    let on_gpus = |pieces: &[Piece<Physical>]| -> u64 {
        pieces.iter().filter(|piece| is_left(piece.place, target)).map(|piece| piece.bytes).sum()
    };
    let total =
        near.iter().map(|(_, pieces)| on_gpus(pieces)).sum::<u64>() + own.iter().map(|own| own.bytes).sum::<u64>();
    progress(0, total);
    let mut parted: Vec<Parted> = Vec::new();
    let mut done = 0;
    for batch in batches(&near) {
        parted.extend(batch.iter().flat_map(|(block, pieces)| places_before(block, pieces, target)));
        leaving.go(batch, target);
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
    for handles::by_hand::Own { address, bytes, asked, place } in own {
        let targets = leaving.order(asked, target);
        let mut why = Why::nowhere();
        let went = targets.into_iter().any(|to| {
            let stop = || held.stop(driver, &Limits::default()).ok();
            match handles::by_hand::move_behind(driver, opened, address, bytes, to, asked, stop) {
                Ok(()) => true,
                Err(unplaced) => {
                    why = Why::new("own", unplaced.in_words());
                    false
                }
            }
        });
        if went {
            parted.push(Parted::Own { address, bytes, from: place });
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

/// Whether this is a place that a suspended program leaves: a GPU that it works on; where all of its memory goes to the host, any; and where
/// it goes to a disk, all memory there is.
fn is_left(place: Place, target: &Target) -> bool {
    match (place, target) {
        (Place::Disk, _) => false,
        (_, Target::Folder(_)) | (Place::Gpu(_), Target::Host) => true,
        (Place::Gpu(gpu), _) => context::is_on(Device::of(gpu)),
        (Place::Host(_), _) => false,
    }
}

fn places_before(block: &Block, pieces: &[Piece<Physical>], target: &Target) -> Vec<Parted> {
    let of = |piece: &Piece<Physical>| Parted::Pooled {
        block: block.id,
        start: block.address,
        address: piece.address,
        bytes: piece.bytes,
        from: piece.place,
    };
    pieces.iter().filter(|piece| is_left(piece.place, target)).map(of).collect()
}

type Stretch = (Block, Vec<Piece<Physical>>);

/// Neighbours that stand on one chunk together, since a chunk moves as a whole, and so many that it is worth it.
fn batches(all: &[Stretch]) -> impl Iterator<Item = &[Stretch]> {
    let mut sum = 0;
    all.chunk_by(move |(one, pieces), (other, next)| {
        sum += one.bytes;
        let shared =
            pieces.last().zip(next.first()).is_some_and(|(last, first)| last.chunk_address == first.chunk_address);
        let goes_on = shared || sum < BATCH && one.home == other.home;
        if !goes_on {
            sum = 0;
        }
        goes_on
    })
}

impl Leaving<'_> {
    /// Where memory of the pool may go that belongs to this GPU, best first.
    fn targets(&self, home: u32, target: &Target) -> Vec<Place> {
        match (target, self.stored) {
            (Target::Folder(_), Some(_)) => vec![Place::Disk],
            (Target::Folder(_), None) => Vec::new(),
            _ => self.order(home, target),
        }
    }

    /// The same for memory that the program made itself.
    fn order(&self, home: u32, target: &Target) -> Vec<Place> {
        let may = |place: &Place| takes(target, *place) && (place.is_host() || !is_left(*place, target));
        self.opened.plan.order(home).into_iter().filter(may).collect()
    }

    /// Moves all of these, or less and less at a time where there is no room for as much.
    fn go(&mut self, batch: &[Stretch], target: &Target) {
        let Some((first, _)) = batch.first() else { return };
        let mut why = Why::nowhere();
        for to in self.targets(first.home, target) {
            let wishes: Vec<Wish> = batch.iter().flat_map(|stretch| self.wishes(stretch, to)).collect();
            if wishes.is_empty() {
                return;
            }
            match self.rearrange(&wishes) {
                Ok(all) => return self.note_stayed(all),
                Err(cause) => why = cause,
            }
        }
        match batch {
            [(_, pieces)] => self.go_by_piece(pieces, first.home, target, &why),
            _ => {
                let (left, right) = batch.split_at(batch.len() / 2);
                self.go(left, target);
                self.go(right, target);
            }
        }
    }

    fn wishes(&self, (block, pieces): &Stretch, to: Place) -> Vec<Wish> {
        match self.stored {
            None => vec![Wish { address: block.address, bytes: block.bytes, to }],
            Some(_) => {
                let pieces = pieces.iter().filter(|piece| self.may_leave(piece));
                pieces.map(|piece| Wish { address: piece.address, bytes: piece.bytes, to }).collect()
            }
        }
    }

    fn may_leave(&self, piece: &Piece<Physical>) -> bool {
        self.stored.is_none_or(|stored| stored.has(piece.address))
    }

    /// One block that is larger than any place has room for.
    fn go_by_piece(&mut self, pieces: &[Piece<Physical>], home: u32, target: &Target, why: &Why) {
        for piece in pieces.iter().filter(|piece| is_left(piece.place, target)) {
            if !self.may_leave(piece) {
                continue;
            }
            let mut why = why.clone();
            let went = pieces.len() > 1
                && self.targets(home, target).into_iter().any(|to| {
                    match self.rearrange(&[Wish { address: piece.address, bytes: piece.bytes, to }]) {
                        Ok(moved) => {
                            self.note_stayed(moved);
                            true
                        }
                        Err(cause) => {
                            why = cause;
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
        let pages = "others know it by its pages: another process has it open, a network card or a library has it registered, or \
                     gpupool_anchor holds it";
        let shared_with = "it stands on one piece of memory together with what has to stay";
        for (bytes, why) in [(anchored, Why::new("pages", pages)), (shared, Why::new("shared", shared_with))] {
            if bytes > 0 {
                *self.stayed.entry(why).or_default() += bytes;
            }
        }
    }

    fn rearrange(&self, wishes: &[Wish]) -> Result<Moved, Why> {
        rearrange(self.opened, self.driver, self.held, wishes)
    }
}

fn rearrange(opened: &Opened, driver: &'static Driver, held: &Held, wishes: &[Wish]) -> Result<Moved, Why> {
    for _ in 0..TRIES {
        let stop = || held.stop(driver, &Limits::default()).ok().map(Quiet);
        match opened.pool.rearrange(wishes, stop) {
            Ok(done) => {
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
        MoveError::Full { place, missing } => {
            Why::new("room", format!("{place} lacks {} for it", format_size(*missing)))
        }
        MoveError::NoPlace | MoveError::OutOfReach => Why::nowhere(),
        MoveError::NotABlock => Why::new(FREED, "it was freed meanwhile"),
        MoveError::NotNow => Why::new("ending", "the process is ending, or a context of it"),
        MoveError::NotQuiet => Why::new("past", "work was submitted past gpupool"),
        MoveError::Backend(result) => Why::new("driver", format!("the driver answered {result}")),
    }
}

/// What could not come back although it has to, since it is on a disk: why, and all that is elsewhere still.
pub type Stuck = (String, Vec<Parted>);

/// Has all of this come back; bytes that came, and that did not.
///
/// # Errors
/// Something is on a disk still.
pub fn come_back(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    parted: Vec<Parted>,
    stored: Option<&Stored>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(u64, u64), Stuck> {
    let Some(stored) = stored else {
        return Ok(bring_back(opened, driver, held, &parted, &Unread::default(), progress));
    };
    let mut why = None;
    let back = stored.reading(driver, |unread| {
        let back = bring_back(opened, driver, held, &parted, unread, progress);
        why = unread.why();
        back
    });
    // Of what was freed meanwhile, nothing is left on the disk either. All work is over, so this waits for nothing.
    let gpus: Vec<u32> = opened.plan.members.keys().copied().collect();
    opened.pool.trim(Some(Place::Disk), None, &gpus);
    let is_stored = |(_, pieces): &Stretch| pieces.iter().any(|piece| piece.place.is_disk());
    let left: Vec<Stretch> = opened.pool.stretches().into_iter().filter(is_stored).collect();
    match (back, left.first()) {
        (Ok(back), None) => Ok(back),
        // Nothing of it was needed.
        (Err(_), None) => Ok((0, 0)),
        (Ok(_), Some((block, pieces))) => {
            let bytes = pieces.iter().filter(|piece| piece.place.is_disk()).map(|piece| piece.bytes).sum();
            let nowhere = || {
                let order = opened.plan.order(block.home);
                let places: Vec<String> = order.iter().map(Place::to_string).collect();
                format!("{} of it have room nowhere: of {} none has as much", format_size(bytes), places.join(", "))
            };
            Err((why.unwrap_or_else(nowhere), parted))
        }
        (Err(why), Some(_)) => Err((why, parted)),
    }
}

/// As [`come_back`], as far as it goes: nothing more is tried once something could not be read.
fn bring_back(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    parted: &[Parted],
    unread: &Unread,
    progress: &mut dyn FnMut(u64, u64),
) -> (u64, u64) {
    // A block that was freed meanwhile has nothing to come back.
    let live: BTreeMap<u64, u64> = opened.pool.stretches().iter().map(|(block, _)| (block.address, block.id)).collect();
    let lives = |parted: &Parted| match parted {
        Parted::Pooled { block, start, .. } => live.get(start) == Some(block),
        Parted::Own { .. } => true,
    };
    let parted: Vec<&Parted> = parted.iter().filter(|parted| lives(parted)).collect();
    let total = parted.iter().map(|parted| parted.bytes()).sum();
    progress(0, total);
    let (mut moved, mut stayed) = (0, 0);
    let mut batch: Vec<Wish> = Vec::new();
    let mut back = |batch: &mut Vec<Wish>, moved: &mut u64, stayed: &mut u64| {
        let wishes = std::mem::take(batch);
        if unread.why().is_some() {
            return;
        }
        match rearrange(opened, driver, held, &wishes) {
            Ok(Moved { anchored, shared, .. }) => {
                let all: u64 = wishes.iter().map(|wish| wish.bytes).sum();
                // In whole frames, of which the last one of a block is not always full.
                let kept = (anchored + shared).min(all);
                *moved += all - kept;
                *stayed += kept;
            }
            Err(_) => {
                for wish in wishes {
                    if unread.why().is_some() {
                        break;
                    }
                    match nearest(opened, driver, held, wish) {
                        Some(place) if place == wish.to || !place.is_host() => *moved += wish.bytes,
                        // What was freed meanwhile has nowhere to come back to.
                        None if opened.pool.pieces(wish.address, wish.bytes).is_empty() => {}
                        _ => *stayed += wish.bytes,
                    }
                }
            }
        }
        progress(*moved + *stayed, total);
    };
    for parted in parted {
        match *parted {
            Parted::Pooled { address, bytes, from, .. } => {
                batch.push(Wish { address, bytes, to: from });
                if batch.iter().map(|wish| wish.bytes).sum::<u64>() >= BATCH {
                    back(&mut batch, &mut moved, &mut stayed);
                }
            }
            Parted::Own { address, bytes, from } => {
                back(&mut batch, &mut moved, &mut stayed);
                let Place::Gpu(asked) = from else { continue };
                if unread.why().is_some() {
                    continue;
                }
                let stop = || held.stop(driver, &Limits::default()).ok();
                match handles::by_hand::move_behind(driver, opened, address, bytes, from, asked, stop) {
                    Ok(()) => moved += bytes,
                    Err(_) => stayed += bytes,
                }
            }
        }
    }
    back(&mut batch, &mut moved, &mut stayed);
    (moved, stayed)
}

/// Where a range has room now: where it was, or on another GPU of the pool; and for what is on a disk, on the host.
fn nearest(opened: &Opened, driver: &'static Driver, held: &Held, wish: Wish) -> Option<Place> {
    let gpu = match wish.to {
        Place::Gpu(gpu) => Some(gpu),
        Place::Host(_) | Place::Disk => None,
    };
    let home = opened.pool.block_at(wish.address).map(|block| block.home).or(gpu);
    let others = home.map(|home| opened.plan.order(home)).unwrap_or_default();
    let is_here = |row: &Mapped| (row.address..row.address + row.bytes).contains(&wish.address);
    let is_stored = opened.pool.mapped().iter().any(|row| row.place.is_disk() && is_here(row));
    let may = |place: &Place| (is_stored || matches!(place, Place::Gpu(_))) && *place != wish.to;
    let others = others.into_iter().filter(may);
    std::iter::once(wish.to).chain(others).find(|&to| {
        rearrange(opened, driver, held, &[Wish { to, ..wish }]).is_ok_and(|moved| moved.anchored + moved.shared == 0)
    })
}
