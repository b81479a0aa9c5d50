//! Which memory leaves a program that is suspended, in which order, and where it goes.

use super::{Target, takes};
use crate::backing::open::Opened;
use crate::gate::{Closed, Held, Limits};
use crate::serve::handles;
use crate::watch::context;
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Device, Driver, Physical};
use gpupool_pool::{Block, MoveError, Moved, Piece, Place, Stopped, Wish};
use std::collections::{BTreeMap, BTreeSet};
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
    stayed: BTreeMap<Why, u64>,
}

/// Has everything leave the GPUs that this process works on.
pub fn leave(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    target: Target,
    progress: &mut dyn FnMut(u64, u64),
) -> (Vec<Parted>, Stayed) {
    let mut leaving = Leaving { opened, driver, held, stayed: BTreeMap::new() };
    let near: Vec<Stretch> = opened
        .pool
        .stretches()
        .into_iter()
        .filter(|(_, pieces)| pieces.iter().any(|piece| is_left(piece.place, target)))
        .collect();
    let own: Vec<_> = handles::by_hand::all().into_iter().filter(|own| is_left(own.place, target)).collect();
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
        let targets = leaving.targets(asked, target);
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

/// Whether this is a place that a suspended program leaves: a GPU that it works on, and where all of its memory goes to the host, any.
fn is_left(place: Place, target: Target) -> bool {
    matches!(place, Place::Gpu(gpu) if target == Target::Host || context::is_on(Device::of(gpu)))
}

fn places_before(block: &Block, pieces: &[Piece<Physical>], target: Target) -> Vec<Parted> {
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
    /// Where memory of this GPU may go, best first.
    fn targets(&self, home: u32, target: Target) -> Vec<Place> {
        let order = self.opened.plan.order(home);
        order.into_iter().filter(|place| takes(target, *place) && !is_left(*place, target)).collect()
    }

    /// Moves all of these, or less and less at a time where there is no room for as much.
    fn go(&mut self, batch: &[Stretch], target: Target) {
        let Some((first, _)) = batch.first() else { return };
        let mut why = Why::nowhere();
        for to in self.targets(first.home, target) {
            let wishes: Vec<Wish> =
                batch.iter().map(|(block, _)| Wish { address: block.address, bytes: block.bytes, to }).collect();
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

    /// One block that is larger than any place has room for.
    fn go_by_piece(&mut self, pieces: &[Piece<Physical>], home: u32, target: Target, why: &Why) {
        for piece in pieces.iter().filter(|piece| is_left(piece.place, target)) {
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

/// Has all of this come back; bytes that came, and that did not.
pub fn come_back(
    opened: &'static Opened,
    driver: &'static Driver,
    held: &Held,
    parted: Vec<Parted>,
    progress: &mut dyn FnMut(u64, u64),
) -> (u64, u64) {
    // A block that was freed meanwhile has nothing to come back.
    let live: BTreeMap<u64, u64> = opened.pool.stretches().iter().map(|(block, _)| (block.address, block.id)).collect();
    let lives = |parted: &Parted| match parted {
        Parted::Pooled { block, start, .. } => live.get(start) == Some(block),
        Parted::Own { .. } => true,
    };
    let parted: Vec<Parted> = parted.into_iter().filter(lives).collect();
    let total = parted.iter().map(Parted::bytes).sum();
    progress(0, total);
    let (mut moved, mut stayed) = (0, 0);
    let mut batch: Vec<Wish> = Vec::new();
    let mut back = |batch: &mut Vec<Wish>, moved: &mut u64, stayed: &mut u64| {
        let wishes = std::mem::take(batch);
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
                    match nearest(opened, driver, held, wish) {
                        true => *moved += wish.bytes,
                        // What was freed meanwhile has nowhere to come back to.
                        false if opened.pool.pieces(wish.address, wish.bytes).is_empty() => {}
                        false => *stayed += wish.bytes,
                    }
                }
            }
        }
        progress(*moved + *stayed, total);
    };
    for parted in &parted {
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

/// Where a range has room now: where it was, or on another GPU of the pool.
fn nearest(opened: &Opened, driver: &'static Driver, held: &Held, wish: Wish) -> bool {
    let gpu = match wish.to {
        Place::Gpu(gpu) => Some(gpu),
        Place::Host(_) => None,
    };
    let home = opened.pool.block_at(wish.address).map(|block| block.home).or(gpu);
    let others = home.map(|home| opened.plan.order(home)).unwrap_or_default();
    let gpus = others.into_iter().filter(|place| matches!(place, Place::Gpu(_)) && *place != wish.to);
    std::iter::once(wish.to).chain(gpus).any(|to| {
        rearrange(opened, driver, held, &[Wish { to, ..wish }]).is_ok_and(|moved| moved.anchored + moved.shared == 0)
    })
}
