//! Chunks that moves have vacated and that serve the next one, mapped nowhere but at their aliases.
//!
//! Making memory of the host takes the driver longer than filling it (32 MiB: up to 6.7 ms), and a move into a full place needs a
//! spare chunk there. To everybody but moves the stock is free memory: it counts as such, goes back to the driver before anybody is
//! refused or sent elsewhere for its sake, and goes home when no move has used it for a while.
//!
//! What came near from a chunk is there still, until something else is copied to it. So a chunk of the stock is known by a digest of what
//! is in it ([`Twin`]): what leaves for the chunk that it came from, and was not written to meanwhile, needs no copy. What leaves next is mostly what came
//! last, so the few chunks that are kept anyway suffice. Rejected: to keep all that came, since each chunk then has to be made once, which takes as long as ten
//! copies of it between GPUs and as fifteen to the host (H100: a rotation that gained 0.4 ms a product lost 0.6 by that until it had all of them).

use crate::chunks::{Chunk, bytes_of};
use crate::place::PlaceId;
use crate::schedule::{Class, Twins};
use std::collections::{BTreeMap, BTreeSet};

/// The part of a place's limit that its stock may take.
const SHARE: u64 = 8;
/// How often what one move needed is kept at a place that is far for it. Moves differ in the sizes of their chunks, so that what one left fits the next by chance, and
/// making it takes the driver 0.3 s a GiB on the host (H200: 128 MiB in 29 to 142 ms, where copying them took 5). A GPU's memory takes a hundredth of that, but to give it back
/// and make it again takes some tenths of a millisecond of a swap that takes one (two H100). Near, memory is what there is least of, and no more is kept than one move needs.
const MOVES_AFAR: u64 = 4;

/// What a chunk of the stock still has: the contents of as many frames from this one on, when they came home from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Twin {
    pub start: u32,
    pub digest: u128,
}

#[derive(Debug)]
struct Kept<H> {
    chunk: Chunk<H>,
    /// The period in which it came.
    period: u32,
    twin: Option<Twin>,
}

#[derive(Debug)]
struct Shelf<H> {
    /// Those that came last stand last.
    chunks: Vec<Kept<H>>,
    bytes: u64,
    /// The most that one move needed here beyond what it vacated itself, in this period and in the one before.
    needed: [u64; 2],
}

impl<H> Shelf<H> {
    /// Bytes that are kept at most where the place may hold `limit`.
    fn most(&self, limit: u64, afar: bool) -> u64 {
        let moves = if afar { MOVES_AFAR } else { 1 };
        self.needed[0].max(self.needed[1]).saturating_mul(moves).min(limit / SHARE)
    }
}

#[derive(Debug)]
pub(crate) struct Stock<H> {
    shelves: Vec<Shelf<H>>,
    /// Frames whose contents had changed when they left, in this period and in the one before: nothing is kept or looked at for those.
    changing: [BTreeSet<u32>; 2],
}

impl<H: Copy> Stock<H> {
    /// Nothing, at so many places.
    pub fn new(places: usize) -> Self {
        let shelf = |_| Shelf { chunks: Vec::new(), bytes: 0, needed: [0; 2] };
        Self { shelves: (0..places).map(shelf).collect(), changing: Default::default() }
    }

    /// Bytes at a place.
    pub fn bytes(&self, place: PlaceId) -> u64 {
        self.shelves[place.index()].bytes
    }

    /// How many there are of each class, with those that are kept for their contents.
    pub fn classes(&self) -> BTreeMap<Class, u32> {
        let mut classes = BTreeMap::new();
        for Kept { chunk, .. } in self.shelves.iter().flat_map(|shelf| &shelf.chunks) {
            *classes.entry((chunk.place, chunk.frames)).or_default() += 1;
        }
        classes
    }

    /// How many of each class serve whoever comes, and those that serve for their contents alone: as long as no more is kept than may be. Then the
    /// next that comes takes the place of another, and they serve whoever comes as well.
    pub fn on_offer(&self, limit: impl Fn(PlaceId) -> u64) -> (BTreeMap<Class, u32>, Twins) {
        let (mut classes, mut twins) = (BTreeMap::new(), Twins::new());
        for shelf in &self.shelves {
            for Kept { chunk, twin, .. } in &shelf.chunks {
                let is_full = shelf.bytes + bytes_of(chunk.frames) > shelf.most(limit(chunk.place), true);
                match twin.filter(|_| !is_full) {
                    Some(twin) => {
                        twins.insert((chunk.place, twin.start), chunk.frames);
                    }
                    None => *classes.entry((chunk.place, chunk.frames)).or_default() += 1,
                }
            }
        }
        (classes, twins)
    }

    /// Whether what came near from here on is likely to leave as it came.
    pub fn may_last(&self, start: u32) -> bool {
        self.changing.iter().all(|starts| !starts.contains(&start))
    }

    /// It did not.
    pub fn has_changed(&mut self, start: u32) {
        self.changing[0].insert(start);
    }

    /// A move needs so many bytes at a place.
    pub fn needs(&mut self, place: PlaceId, bytes: u64) {
        let needed = &mut self.shelves[place.index()].needed[0];
        *needed = bytes.max(*needed);
    }

    /// A new period begins.
    pub fn begin_period(&mut self) {
        for shelf in &mut self.shelves {
            shelf.needed = [0, shelf.needed[0]];
        }
        let [now, _] = std::mem::take(&mut self.changing);
        self.changing[1] = now;
    }

    /// Takes the one of a class that has the contents of the frames from here on; else the last that has nobody's; else the first.
    pub fn take(&mut self, (place, frames): Class, start: u32) -> Option<(Chunk<H>, Option<Twin>)> {
        let shelf = &mut self.shelves[place.index()];
        let fits = |kept: &Kept<H>| kept.chunk.frames == frames;
        let of = |kept: &Kept<H>| kept.twin.map(|twin| twin.start);
        let chunks = &shelf.chunks;
        let index = chunks
            .iter()
            .rposition(|kept| fits(kept) && of(kept) == Some(start))
            .or_else(|| chunks.iter().rposition(|kept| fits(kept) && kept.twin.is_none()))
            .or_else(|| chunks.iter().position(fits))?;
        shelf.bytes -= bytes_of(frames);
        let Kept { chunk, twin, .. } = shelf.chunks.remove(index);
        Some((chunk, twin.filter(|twin| twin.start == start)))
    }

    /// Keeps a chunk from this period on, where lately moves have needed that much and the place, which may hold `limit`, has most of it for others.
    /// `afar`: it is no place that something of this move calls home. Whether it was kept.
    pub fn keep(&mut self, chunk: &Chunk<H>, twin: Option<Twin>, period: u32, limit: u64, afar: bool) -> bool {
        let shelf = &mut self.shelves[chunk.place.index()];
        let fits = shelf.bytes + bytes_of(chunk.frames) <= shelf.most(limit, afar);
        if fits {
            shelf.bytes += bytes_of(chunk.frames);
            // What was there before of the same frames is outdated.
            let same = |kept: &&mut Kept<H>| kept.twin.map(|twin| twin.start) == twin.map(|twin| twin.start);
            shelf.chunks.iter_mut().filter(same).for_each(|kept| kept.twin = None);
            shelf.chunks.push(Kept { chunk: *chunk, period, twin });
        }
        fits
    }

    /// Takes chunks that came before period `since`, those that came first before others, until they are `bytes`.
    pub fn clear(&mut self, place: PlaceId, since: u32, bytes: u64) -> Vec<Chunk<H>> {
        let shelf = &mut self.shelves[place.index()];
        let mut sum = 0;
        let mut gone = Vec::new();
        shelf.chunks.retain(|Kept { chunk, period, .. }| {
            let goes = sum < bytes && *period < since;
            if goes {
                sum += bytes_of(chunk.frames);
                gone.push(*chunk);
            }
            !goes
        });
        shelf.bytes -= sum;
        gone
    }
}
