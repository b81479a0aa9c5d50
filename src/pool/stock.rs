//! Chunks that moves have vacated and that serve the next one, mapped nowhere but at their aliases.
//!
//! Making memory of the host takes the driver longer than filling it (32 MiB: up to 6.7 ms), and a move into a full place needs a
//! spare chunk there. To everybody but moves the stock is free memory: it counts as such, goes back to the driver before anybody is
//! refused or sent elsewhere for its sake, and goes home when no move has used it for a while.

use crate::chunks::{Chunk, bytes_of};
use crate::place::PlaceId;
use crate::schedule::Class;
use std::collections::BTreeMap;

/// The part of a place's limit that its stock may take.
const SHARE: u64 = 8;
/// How often what one move needed is kept at a place that is far for it. Moves differ in the sizes of their chunks, so that what one left fits the next by chance, and
/// making it takes the driver 0.3 s a GiB on the host (H200: 128 MiB in 29 to 142 ms, where copying them took 5). A GPU's memory takes a hundredth of that, but to give it back
/// and make it again takes some tenths of a millisecond of a swap that takes one (two H100). Near, memory is what there is least of, and no more is kept than one move needs.
const MOVES_AFAR: u64 = 4;

#[derive(Debug)]
struct Shelf<H> {
    /// Those that came last stand last, each with the period in which it came.
    chunks: Vec<(Chunk<H>, u32)>,
    bytes: u64,
    /// The most that one move needed here beyond what it vacated itself, in this period and in the one before.
    needed: [u64; 2],
}

#[derive(Debug)]
pub(crate) struct Stock<H>(Vec<Shelf<H>>);

impl<H: Copy> Stock<H> {
    /// Nothing, at so many places.
    pub fn new(places: usize) -> Self {
        Self((0..places).map(|_| Shelf { chunks: Vec::new(), bytes: 0, needed: [0; 2] }).collect())
    }

    /// Bytes at a place.
    pub fn bytes(&self, place: PlaceId) -> u64 {
        self.0[place.index()].bytes
    }

    /// How many there are of each class.
    pub fn classes(&self) -> BTreeMap<Class, u32> {
        let mut classes = BTreeMap::new();
        for (chunk, _) in self.0.iter().flat_map(|shelf| &shelf.chunks) {
            *classes.entry((chunk.place, chunk.frames)).or_default() += 1;
        }
        classes
    }

    /// A move needs so many bytes at a place.
    pub fn needs(&mut self, place: PlaceId, bytes: u64) {
        let needed = &mut self.0[place.index()].needed[0];
        *needed = bytes.max(*needed);
    }

    /// A new period begins.
    pub fn begin_period(&mut self) {
        for shelf in &mut self.0 {
            shelf.needed = [0, shelf.needed[0]];
        }
    }

    /// Takes the one of a class that came last.
    pub fn take(&mut self, (place, frames): Class) -> Option<Chunk<H>> {
        let shelf = &mut self.0[place.index()];
        let index = shelf.chunks.iter().rposition(|(chunk, _)| chunk.frames == frames)?;
        shelf.bytes -= bytes_of(frames);
        Some(shelf.chunks.remove(index).0)
    }

    /// Keeps a chunk from this period on, where lately moves have needed that much and the place, which may hold `limit`, has most of it for others.
    /// `afar`: it is no place that something of this move calls home. Whether it was kept.
    pub fn keep(&mut self, chunk: &Chunk<H>, period: u32, limit: u64, afar: bool) -> bool {
        let shelf = &mut self.0[chunk.place.index()];
        let moves = if afar { MOVES_AFAR } else { 1 };
        let most = shelf.needed[0].max(shelf.needed[1]).saturating_mul(moves).min(limit / SHARE);
        let fits = shelf.bytes + bytes_of(chunk.frames) <= most;
        if fits {
            shelf.bytes += bytes_of(chunk.frames);
            shelf.chunks.push((*chunk, period));
        }
        fits
    }

    /// Takes chunks that came before period `since`, those that came first before others, until they are `bytes`.
    pub fn clear(&mut self, place: PlaceId, since: u32, bytes: u64) -> Vec<Chunk<H>> {
        let shelf = &mut self.0[place.index()];
        let mut sum = 0;
        let mut gone = Vec::new();
        shelf.chunks.retain(|(chunk, period)| {
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
