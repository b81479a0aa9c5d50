//! What each block is to the program, by the frame it starts at.
//!
//! A record has a lock of its own, so that frees of different blocks never meet: whoever takes the record out ends the
//! block's life, and of several frees of one block exactly one finds it. A table sharded by a hash would be smaller, but
//! two cores that work on blocks of their own would still pass the lines of its locks to and fro.

use crate::place::PlaceId;
use crate::sync::Mutex;
use crate::{Block, FRAME, Request};
use std::sync::OnceLock;

/// Frames in a page of the table. A page (64 bytes a frame, so 1/32768 of the memory it describes) exists once a block
/// starts in it.
const PAGE: usize = if cfg!(loom) { 16 } else { 4096 };

/// Frames of the largest block that is found from any of its frames without a look at the runs, 64 MiB: of the largest whose
/// memory the front keeps, which may have begun inside a run. Nobody allocates larger ones so often that a lock matters.
pub(crate) const KEPT_BLOCK: u32 = ((64 << 20) / FRAME) as u32;

/// A block the program holds, or one whose free waits for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub bytes: u64,
    pub owner: u64,
    pub id: u64,
    pub home: u32,
    /// The place that `home` is: whom a free waits for, wherever the memory lies.
    pub gpu: PlaceId,
    pub frames: u32,
    /// Small blocks stand on it: the program does not know it, and cannot free it.
    pub slab: bool,
    /// A strict free waits for the device.
    pub freeing: bool,
    /// How many others have the block open ([`crate::Pool::hold`]).
    pub holds: u32,
    /// How often a handle or a descriptor of it was given away, which nobody says the end of.
    pub given: u32,
}

impl Record {
    pub fn new(request: &Request, gpu: PlaceId, frames: u32, id: u64) -> Self {
        let Request { bytes, home, owner, .. } = *request;
        Self { bytes, owner, id, home, gpu, frames, slab: false, freeing: false, holds: 0, given: 0 }
    }

    /// The same, for small blocks to stand on if `slab`.
    pub fn for_slab(self, slab: bool) -> Self {
        Self { slab, ..self }
    }

    /// Whether others have its memory, so that the frames may not serve again when it ends.
    pub fn is_out(&self) -> bool {
        self.holds > 0 || self.given > 0
    }

    pub fn block(&self, address: u64) -> Block {
        Block { address, bytes: self.bytes, home: self.home, owner: self.owner, id: self.id }
    }
}

/// A line of its own, or neighbouring blocks of two threads would share one.
#[derive(Debug)]
#[repr(align(64))]
struct Slot(Mutex<Option<Record>>);

#[derive(Debug)]
pub(crate) struct Registry {
    pages: Box<[OnceLock<Box<[Slot]>>]>,
}

impl Registry {
    /// A table for `frames` frames; an eighth of a byte a frame until pages are needed.
    pub fn new(frames: u64) -> Self {
        // Frame numbers are u32; the rest of a larger reservation is not used.
        let frames = frames.min(u64::from(u32::MAX)) as usize;
        Self { pages: (0..frames.div_ceil(PAGE)).map(|_| OnceLock::new()).collect() }
    }

    fn slot(&self, start: u32) -> Option<&Mutex<Option<Record>>> {
        let page = self.pages.get(start as usize / PAGE)?.get()?;
        Some(&page[start as usize % PAGE].0)
    }

    /// The block at `start` begins. Its frames are the caller's alone.
    pub fn enter(&self, start: u32, record: Record) {
        let Some(page) = self.pages.get(start as usize / PAGE) else {
            debug_assert!(false, "frame {start} is outside the reservation");
            return;
        };
        let page = page.get_or_init(|| (0..PAGE).map(|_| Slot(Mutex::new(None))).collect());
        let before = page[start as usize % PAGE].0.lock().replace(record);
        debug_assert!(before.is_none(), "two blocks start at frame {start}");
    }

    /// Ends the block at `start`, unless another free of it is under way.
    pub fn claim(&self, start: u32) -> Option<Record> {
        self.slot(start)?.lock().take_if(|record| !record.freeing && !record.slab)
    }

    /// Ends the slab of that number.
    pub fn claim_slab(&self, start: u32, id: u64) -> Option<Record> {
        self.slot(start)?.lock().take_if(|record| record.slab && record.id == id)
    }

    /// AnchorCounts the block at `start` as being freed, so that no other free of it succeeds; it can still be seen.
    pub fn begin_free(&self, start: u32) -> Option<Record> {
        let mut slot = self.slot(start)?.lock();
        let record = slot.as_mut().filter(|record| !record.freeing && !record.slab)?;
        record.freeing = true;
        Some(*record)
    }

    /// Ends the block that [`Registry::begin_free`] marked, or lets it live on. The record as it was at its end: others may
    /// have let go of the block since the free began.
    pub fn end_free(&self, start: u32, lives_on: bool) -> Option<Record> {
        let mut slot = self.slot(start)?.lock();
        match slot.as_mut() {
            Some(record) if lives_on => {
                record.freeing = false;
                None
            }
            _ => slot.take(),
        }
    }

    /// Changes the record of the block of this number, if it lives; a block whose free has begun does where `freeing` says
    /// so. Whether it was changed.
    pub fn change(&self, start: u32, id: u64, freeing: bool, change: impl FnOnce(&mut Record)) -> bool {
        let Some(slot) = self.slot(start) else { return false };
        let mut slot = slot.lock();
        let record = slot.as_mut().filter(|record| record.id == id && (freeing || !record.freeing));
        record.map(change).is_some()
    }

    /// The block that `frame` lies in, if it starts at most [`KEPT_BLOCK`] frames before, or at `run`; with its start.
    pub fn around(&self, frame: u32, run: u32) -> Option<(u32, Record)> {
        let covers = |&(start, record): &(u32, Record)| frame - start < record.frames;
        let found = (frame.saturating_sub(KEPT_BLOCK - 1)..=frame).rev().find_map(|start| self.at(start));
        found.filter(covers).or_else(|| self.at(run).filter(covers))
    }

    /// The starts of `owner`'s blocks in `start..end`.
    pub fn claim_all(&self, start: u32, end: u32, owner: u64) -> impl Iterator<Item = (u32, Record)> {
        (start..end).filter_map(move |start| {
            let record = self.slot(start)?.lock().take_if(|record| !record.freeing && record.owner == owner)?;
            Some((start, record))
        })
    }

    /// The blocks that start in `start..end`, with their starts; not one whose free has begun.
    pub fn starting_in(&self, start: u32, end: u32) -> impl Iterator<Item = (u32, Record)> {
        (start..end).filter_map(|start| self.at(start)).filter(|(_, record)| !record.freeing)
    }

    /// Whether the block that starts there is still the one of that number.
    pub fn lives(&self, start: u32, id: u64) -> bool {
        self.at(start).is_some_and(|(_, record)| record.id == id)
    }

    fn at(&self, start: u32) -> Option<(u32, Record)> {
        let record = (*self.slot(start)?.lock())?;
        Some((start, record))
    }
}
