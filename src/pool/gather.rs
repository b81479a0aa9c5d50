//! Free memory in several rows that becomes one: chunks are mapped side by side at other addresses.
//!
//! A place that is full often has enough free memory for a large block and no row of it that is long enough. To return as much to the
//! driver and make it anew takes milliseconds a GiB, since the driver clears what it gives; to map the same chunks elsewhere takes
//! about 50 µs each, whatever their size. So only large ones are gathered; small ones are exchanged for large ones, which is also how
//! memory that was made for small blocks comes to serve large ones.
//!
//! A place that is not full grows instead. Gathering would keep what is held lower there, but random sizes would have chunks
//! remapped for ever where a pool that is half as large again needs nothing (RMM's mix of up to 1 GiB: ten of a hundred blocks).
//! Only what that growth would exchange, because it is spare, is gathered where its chunks are large. It lets as much more be held as if it had
//! been exchanged ([`crate::budget`]), so a loop comes to need neither, at a tenth of the price.

use crate::FRAME;
use crate::chunks::Chunk;
use crate::place::PlaceId;
use crate::runs::{Freed, Kind};
use crate::state::{Leaving, State, bytes_of};

/// A chunk of less than this part of the block, and of half of the largest chunk, is not gathered but exchanged: once, where its like would be
/// mapped elsewhere again and again.
const LEAST_PART: u32 = 8;
/// Nor is one of less than this, which costs as much to map as to exchange.
const LEAST: u32 = (32 << 20) / FRAME as u32;
/// Nor one of less than this where the place is not full: what is made in its place is one chunk with the rest, and holds together later. With
/// 32 MiB a recorded CuPy program holds 1.38 bytes for each in use, and 1.31 like that.
const LEAST_SPARE: u32 = (128 << 20) / FRAME as u32;

/// What of a row of gathered chunks stands behind the block they are gathered for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rest {
    /// How many frames.
    pub frames: u32,
    /// How it was freed.
    pub freed: Freed,
    /// The latest period in which any of its chunk was.
    pub period: u32,
}

/// Chunks that stand side by side, and how they were freed.
#[derive(Debug)]
pub(crate) struct Row<H> {
    pub start: u32,
    pub frames: u32,
    pub chunks: Vec<Chunk<H>>,
    freed: Freed,
}

/// Chunks that are about to be mapped side by side, still mapped where they were; no run and no table knows them any more.
#[derive(Debug)]
pub(crate) struct Gathered<H> {
    /// In the order in which they will stand.
    pub rows: Vec<Row<H>>,
    pub rest: Option<Rest>,
}

impl<H> Gathered<H> {
    /// None at all.
    pub fn nothing() -> Self {
        Self { rows: Vec::new(), rest: None }
    }

    /// Bytes of all its chunks.
    pub fn bytes(&self) -> u64 {
        self.rows.iter().map(|row| bytes_of(row.frames)).sum()
    }

    /// Bytes that the block will stand on.
    pub fn useful(&self) -> u64 {
        self.bytes() - self.rest.map_or(0, |rest| bytes_of(rest.frames))
    }
}

/// A chunk that could be gathered.
struct Candidate {
    start: u32,
    frames: u32,
    /// Frames of the free run that it is in.
    run: u32,
    freed: Freed,
}

impl<H: Copy> State<H> {
    /// Sets quiet chunks at `place` aside for a block of so many frames, at least `wanted` of them where there are as many. Those in the
    /// shortest runs go first, since these are of least use where they are. The last may be too large: its rest is free memory as before.
    /// `spare`: there is room to make them, and only large ones are worth it.
    pub fn gather(&mut self, place: PlaceId, frames: u32, mut wanted: u32, spare: bool) -> Gathered<H> {
        let mut gathered = Gathered::nothing();
        // Where there is room, a block that is less than one of the chunks is better made.
        if wanted == 0 || spare && frames < LEAST_SPARE.min(self.largest_chunk) {
            return gathered;
        }
        let mut missing = frames;
        let mut larger: Option<Candidate> = None;
        let floor = if spare { LEAST_SPARE.min(self.largest_chunk) } else { LEAST };
        let least = (frames / LEAST_PART).min(self.largest_chunk / 2).max(floor);
        for it in self.candidates(place, least) {
            if wanted == 0 {
                break;
            }
            if it.frames <= missing {
                missing -= it.frames;
                wanted = wanted.saturating_sub(it.frames);
                self.set_row_aside(&it, place, &mut gathered);
            } else if larger.as_ref().is_none_or(|larger| it.frames < larger.frames) {
                larger = Some(it);
            }
        }
        if let Some(last) = larger.filter(|_| wanted > 0 && missing > 0) {
            let period = self.freed_in.latest(last.start, last.start + last.frames);
            gathered.rest = Some(Rest { frames: last.frames - missing, freed: last.freed, period });
            self.set_row_aside(&last, place, &mut gathered);
        }
        gathered
    }

    /// Quiet chunks of at least so many frames, in the order in which they are best gathered.
    fn candidates(&self, place: PlaceId, least: u32) -> Vec<Candidate> {
        let quiet = self.runs.free_at(place).filter_map(|run| match run.kind {
            Kind::Free(freed) if freed.is_quiet(&self.clock) => Some((run.start, run.end(), freed)),
            _ => None,
        });
        let chunks = quiet.flat_map(|(start, end, freed)| {
            let (first, last) = self.chunks.whole_within(start, end);
            // What others have been given is theirs, too, until it is back with the driver.
            let may_serve = move |chunk: &&Chunk<H>| chunk.frames >= least && chunk.anchors.reasons().is_empty();
            let whole = self.chunks.touched(first, last).filter(may_serve);
            whole.map(move |chunk| Candidate { start: chunk.start, frames: chunk.frames, run: end - start, freed })
        });
        let mut chunks: Vec<Candidate> = chunks.collect();
        chunks.sort_unstable_by_key(|it| (it.run, it.freed.number, it.start));
        chunks
    }

    fn set_row_aside(&mut self, it: &Candidate, place: PlaceId, gathered: &mut Gathered<H>) {
        let Some(Leaving { start, frames, chunks }) = self.unlist(it.start, it.start + it.frames, place) else {
            debug_assert!(false, "frames {} and on are free", it.start);
            return;
        };
        self.budget(place).set_aside(bytes_of(frames));
        // Nobody is at work on it, whoever was.
        let freed = Freed { gpu: None, ..it.freed };
        match gathered.rows.last_mut() {
            // One call takes down what stands side by side.
            Some(last) if last.start + last.frames == start => {
                last.frames += frames;
                last.chunks.extend(chunks);
                last.freed.number = last.freed.number.max(freed.number);
            }
            _ => gathered.rows.push(Row { start, frames, chunks, freed }),
        }
    }

    /// Rows stay where they are after all.
    pub fn scatter(&mut self, rows: Vec<Row<H>>) {
        for Row { start, frames, chunks, freed } in rows {
            self.chunks.insert(&chunks);
            for chunk in &chunks {
                self.budget(chunk.place).free_aside(bytes_of(chunk.frames));
            }
            self.runs.add(start, frames, Kind::Out);
            self.runs.release(start, freed);
        }
    }

    /// What was gathered is in use at `place`, and the rest of it is free before frame `end`, where the range ends that it stands in.
    pub fn settle_gathered(&mut self, gathered: &Gathered<H>, place: PlaceId, end: u32) {
        self.budget(place).use_aside(gathered.useful());
        for row in &gathered.rows {
            self.space.give(row.start, row.frames);
        }
        if let Some(Rest { frames, freed, period }) = gathered.rest {
            self.budget(place).free_aside(bytes_of(frames));
            self.freed_in.note(end - frames, end, period);
            self.runs.add(end - frames, frames, Kind::Out);
            self.runs.release(end - frames, Freed { gpu: None, ..freed });
        }
    }
}
