//! What a move is made of, and what it is told and answers.

use crate::chunks::{Chunk, bytes_of};
use crate::place::PlaceId;
use crate::registry::Record;
use crate::runs::Freed;
use crate::stock::Twin;
use crate::{Contents, Place, Transfer};
use std::collections::BTreeMap;

/// A range of a live block, and where it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// First byte.
    pub address: u64,
    /// How many.
    pub bytes: u64,
    /// Where to.
    pub to: Place,
}

/// The program, stopped: while this lives nothing runs that may use the pool's memory. Dropping it lets the program go on.
pub trait Stopped {
    /// Whether nothing has run since: asked before anything changes that the program could notice. `false` ends the move, and is
    /// how work is found that was submitted past whoever stopped the program.
    fn still_quiet(&mut self) -> bool;
    /// Whether what comes near now is likely to leave again, so that it is worth a look at what is in it: what leaves as it came, for where it came
    /// from, needs no copy. A look takes a tenth of a copy.
    fn is_for_a_while(&self) -> bool {
        false
    }
}

/// What became of a range, in bytes of whole frames that lie in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Lies at the place now and did not before.
    pub moved: u64,
    /// Lay there before.
    pub there: u64,
    /// Must stay on the physical memory that it is on ([`crate::Anchors`]).
    pub anchored: u64,
    /// Stayed on a chunk that others stand on, too.
    pub shared: u64,
}

/// What became of several ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rearranged<E> {
    /// Of each wish, in the order of the wishes.
    pub wishes: Vec<Moved>,
    /// Why not all was done that was begun. What was done stays, and everything lies where [`Pool::pieces`] says.
    pub cut_short: Option<MoveError<E>>,
    /// Bytes that went back to the memory that they came from and were there still, so that nothing was copied.
    pub as_it_came: u64,
}

/// Why nothing moved, or not all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveError<E> {
    /// A range lies in no live block.
    NotABlock,
    /// No place of this pool.
    NoPlace,
    /// Blocks of this home GPU may not stand on the place.
    OutOfReach,
    /// A place lacks so many bytes. Nothing moved. Where several ranges were to change places and their chunks are of different
    /// sizes, those that go out make room for the others once they have gone: two calls may do what one cannot.
    Full {
        /// Which one: where a range was to go, or where the rest of a chunk has to stay.
        place: Place,
        /// How many.
        missing: u64,
    },
    /// Nobody can wait now (a stream is being captured), the program could not be stopped, or memory that the move needs is not to be made
    /// now. Nothing moved.
    NotNow,
    /// Work ran although the program was stopped.
    NotQuiet,
    /// The backend failed. Everything lies where [`Pool::pieces`] says.
    Backend(E),
}

/// A block of which frames `start..end` are to go to `to`.
pub(crate) struct Wanted {
    /// First frame of the block.
    pub block: u32,
    pub record: Record,
    pub start: u32,
    pub end: u32,
    pub to: PlaceId,
    /// On other chunks, also where they are there already.
    pub anew: bool,
}

/// Memory that is mapped, or to be mapped, at frames of the pool.
#[derive(Clone, Copy)]
pub(crate) struct Laid {
    pub start: u32,
    pub end: u32,
    pub place: PlaceId,
    /// Nothing is mapped there.
    pub is_stored: bool,
    /// Which of [`Plan::memory`].
    pub memory: usize,
}

/// Chunks that are replaced together.
pub(crate) struct Step {
    pub old: Vec<Laid>,
    pub new: Vec<Laid>,
    pub inward: bool,
    pub is_done: bool,
}

impl Step {
    /// Whether the other one stands right behind this one.
    pub fn is_before(&self, other: &Self) -> bool {
        self.old.last().zip(other.old.first()).is_some_and(|(last, first)| last.end == first.start)
    }
}

/// Steps that wait for none of each other, and the copies that they begin with: for each context, its owner's number, its GPU and
/// the copies.
#[derive(Default)]
pub(crate) struct Wave {
    pub steps: Vec<Step>,
    pub copies: Vec<(u64, u32, Vec<Transfer>)>,
    /// What leaves for chunks that it came from, for each context: copied only where it is not the same any more.
    pub again: Vec<Again>,
    /// What came from chunks that keep it, for each context.
    pub came: Vec<Came>,
}

impl Wave {
    /// The contexts that copy or look, by owner and GPU.
    pub fn contexts(&self) -> impl Iterator<Item = (u64, u32)> {
        let copies = self.copies.iter().map(|&(owner, gpu, _)| (owner, gpu));
        let again = self.again.iter().map(|again| (again.owner, again.gpu));
        copies.chain(again).chain(self.came.iter().map(|came| (came.owner, came.gpu)))
    }
}

/// What leaves for chunks that may have it already, all in one context.
pub(crate) struct Again {
    pub owner: u64,
    pub gpu: u32,
    /// What is near.
    pub near: Vec<Contents>,
    /// Of each what is there, its first frame, and how many of the copies are its.
    pub there: Vec<(u128, u32, usize)>,
    /// All copies, in that order.
    pub copies: Vec<Transfer>,
    /// Room for those that are needed, and what had changed.
    pub needed: Vec<Transfer>,
    pub changed: Vec<u32>,
}

impl Again {
    pub fn of(owner: u64, gpu: u32) -> Self {
        let (near, there, copies, needed, changed) = Default::default();
        Self { owner, gpu, near, there, copies, needed, changed }
    }

    /// Sorts the copies out, now that the digests of what is near are known. Allocates nothing.
    pub fn sort_out(&mut self) {
        let mut copies = self.copies.iter();
        for (near, &(digest, start, count)) in self.near.iter().zip(&self.there) {
            let is_same = near.digest == Some(digest);
            let of_this = copies.by_ref().take(count);
            if is_same {
                of_this.for_each(drop);
            } else {
                self.needed.extend(of_this);
                self.changed.extend(near.digest.map(|_| start));
            }
        }
    }
}

/// What came near, all in one context.
pub(crate) struct Came {
    pub owner: u64,
    pub gpu: u32,
    /// What is near.
    pub near: Vec<Contents>,
    /// Of each which of [`Plan::memory`] it came from, and its first frame.
    pub from: Vec<(usize, u32)>,
}

impl Came {
    pub fn of(owner: u64, gpu: u32) -> Self {
        Self { owner, gpu, near: Vec::new(), from: Vec::new() }
    }
}

/// All that takes part in a move.
pub(crate) struct Plan<H> {
    /// The chunks that go, then those of the stock, then those that were made.
    pub memory: Vec<Chunk<H>>,
    /// How many of them go.
    pub old: usize,
    /// How many there were before any was made.
    pub given: usize,
    /// To be made, in this order.
    pub to_make: Vec<(PlaceId, u32)>,
    pub waves: Vec<Wave>,
    /// What was free on the chunks that go, taken out of the free runs.
    pub free: Vec<(u32, u32, Freed)>,
    /// What stays of each wish.
    pub stays: Vec<Moved>,
    /// What chunks of the stock have still, by their number in `memory`.
    pub twins: BTreeMap<usize, Twin>,
    /// First frames of what is not looked at, since it changed lately.
    pub changing: Vec<u32>,
}

impl<H> Plan<H> {
    /// Bytes that are to be made at each place.
    pub fn unmade(&self) -> BTreeMap<PlaceId, u64> {
        let mut all = BTreeMap::new();
        self.to_make.iter().for_each(|&(place, frames)| *all.entry(place).or_default() += bytes_of(frames));
        all
    }

    /// Bytes that went where they were already.
    pub fn as_it_came(&self) -> u64 {
        let done = self.waves.iter().filter(|wave| wave.steps.iter().all(|step| step.is_done));
        let each = done.flat_map(|wave| &wave.again).flat_map(|again| again.near.iter().zip(&again.there));
        each.filter(|(near, there)| near.digest == Some(there.0)).map(|(near, _)| near.bytes).sum()
    }

    /// What the chunks that went have still, by their number in [`Self::memory`], once the move is over.
    pub fn left(&self) -> BTreeMap<usize, Twin> {
        let all = self.waves.iter().flat_map(|wave| &wave.came);
        let each = all.flat_map(|came| came.near.iter().zip(&came.from));
        each.filter_map(|(near, &(memory, start))| Some((memory, Twin { start, digest: near.digest? }))).collect()
    }

    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.waves.iter().flat_map(|wave| &wave.steps)
    }

    /// What was free on the chunks of a step.
    pub fn free_on(&self, step: &Step) -> impl Iterator<Item = &(u32, u32, Freed)> {
        self.free.iter().filter(|(start, ..)| step.old.iter().any(|old| (old.start..old.end).contains(start)))
    }
}

impl std::iter::Sum for Moved {
    fn sum<I: Iterator<Item = Moved>>(all: I) -> Moved {
        all.fold(Moved::default(), |sum, one| Moved {
            moved: sum.moved + one.moved,
            there: sum.there + one.there,
            anchored: sum.anchored + one.anchored,
            shared: sum.shared + one.shared,
        })
    }
}

pub(crate) fn overlap(one: (u32, u32), other: (u32, u32)) -> u64 {
    bytes_of(one.1.min(other.1).saturating_sub(one.0.max(other.0)))
}
