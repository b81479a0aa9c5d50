//! Room for a copy of a program's memory, so that the program need not wait for a disk.
//!
//! It is the pool's: on the GPU itself, where a copy is fastest, as long as at least as much stays free there; then wherever the pool places
//! what is not to lie at home. What was freed before serves again, and each piece is free again once it is written.

use super::blocks::Span;
use crate::backing::open::Opened;
use crate::image::{Failed, Shuttle};
use gpupool_cuda::Driver;
use gpupool_pool::{Block, Free, Mover, Place, Request, Transfer};
use gpupool_store::{Key, PART, Writer};
use parking_lot::Mutex;
use std::collections::BTreeSet;

/// What has one piece of room: enough that a request and the copies are cheap, and little enough that there is often room for one more.
const BATCH: u64 = 256 << 20;

/// The numbers of blocks that copies lie in now, each known before the program that was stopped for it goes on.
static ROOMS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Whether this block is no memory of the program's, but a copy of some for an image.
pub fn is_copy(block: &Block) -> bool {
    ROOMS.lock().contains(&block.id)
}

/// Where copies of spans go.
pub struct Shelter {
    opened: &'static Opened,
    driver: &'static Driver,
    batches: Vec<Sheltered>,
}

/// Copies that lie behind each other in a block of the pool that nobody else knows; it is freed when this is dropped.
pub struct Sheltered {
    opened: &'static Opened,
    room: Block,
    /// Of the original.
    owner: u64,
    gpu: u32,
    copies: Vec<(Key, u64, u64)>,
}

impl Shelter {
    pub fn new(opened: &'static Opened, driver: &'static Driver) -> Self {
        Self { opened, driver, batches: Vec::new() }
    }

    /// Copies as many of these as there is room for; the others come back.
    pub fn take_all(&mut self, spans: &[Span], keys: &[Key]) -> Vec<Span> {
        let mut left = Vec::new();
        for batch in batches(spans) {
            match self.copy(&batch, keys) {
                Some(sheltered) => self.batches.push(sheltered),
                None => left.extend(batch),
            }
        }
        left
    }

    pub fn into_batches(self) -> Vec<Sheltered> {
        self.batches
    }

    fn copy(&self, batch: &[Span], keys: &[Key]) -> Option<Sheltered> {
        let &Span { owner, gpu, .. } = batch.first()?;
        let bytes = batch.iter().map(|span| span.bytes).sum();
        let room = self.room(owner, gpu, bytes)?;
        ROOMS.lock().insert(room.id);
        let mut at = room.address;
        let mut transfers = Vec::new();
        let mut copies = Vec::new();
        for span in batch {
            transfers.push(Transfer { from: span.address, to: at, bytes: span.bytes, inward: true, stored: false });
            copies.push((keys[span.block], span.offset, span.bytes));
            at += span.bytes;
        }
        let sheltered = Sheltered { opened: self.opened, room, owner, gpu, copies };
        let backend = self.opened.pool.backend();
        backend.prepare(owner, gpu).and_then(|()| backend.copy(owner, gpu, &transfers)).ok()?;
        Some(sheltered)
    }

    fn room(&self, owner: u64, home: u32, bytes: u64) -> Option<Block> {
        let pool = &self.opened.pool;
        let request =
            Request { bytes, home, owner, soft_refusal: false, can_repack: false, can_ask: false, can_widen: false };
        let free = self.opened.plan.free_at(self.driver, Place::Gpu(home)).unwrap_or(0);
        let at_home = if free >= 2 * bytes { pool.allocate(&request).ok() } else { None };
        at_home.or_else(|| pool.allocate_away(&request).ok()).map(|allocation| allocation.block)
    }
}

/// Spans of one owner, as many as have room together. Longer ones are cut.
fn batches(spans: &[Span]) -> Vec<Vec<Span>> {
    let mut all: Vec<Vec<Span>> = Vec::new();
    let mut sum = 0;
    for span in spans {
        let mut rest = *span;
        while rest.bytes > 0 {
            let goes_on = all
                .last()
                .and_then(|batch| batch.last())
                .is_some_and(|last| (last.owner, last.gpu) == (rest.owner, rest.gpu) && sum < BATCH);
            if !goes_on {
                all.push(Vec::new());
                sum = 0;
            }
            // Parts that are stored are not cut here (`image::parts`): a batch has a few bytes less instead.
            let room = BATCH - sum;
            let end = rest.offset + room;
            let whole = (end - end % PART as u64).saturating_sub(rest.offset);
            let bytes = if rest.bytes <= room { rest.bytes } else { whole };
            if bytes == 0 {
                sum = BATCH;
                continue;
            }
            if let Some(batch) = all.last_mut() {
                batch.push(Span { bytes, ..rest });
            }
            sum += bytes;
            rest =
                Span { offset: rest.offset + bytes, address: rest.address + bytes, bytes: rest.bytes - bytes, ..rest };
        }
    }
    all
}

impl Sheltered {
    pub fn bytes(&self) -> u64 {
        self.copies.iter().map(|(_, _, bytes)| bytes).sum()
    }

    /// Whose context copies it, on which GPU.
    pub fn copier(&self) -> (u32, u64) {
        (self.gpu, self.owner)
    }

    /// Hands all of it to the store, beside the program.
    pub fn write(self, shuttle: &mut Shuttle, writer: &Writer) -> Result<(), Failed> {
        let mut at = self.room.address;
        for (key, offset, bytes) in &self.copies {
            shuttle.save_beside(writer, *key, *offset, at, *bytes)?;
            at += bytes;
        }
        Ok(())
    }
}

impl Drop for Sheltered {
    fn drop(&mut self) {
        // Whoever copied has waited for it. Waiting for the program's work as well would take as long as its longest kernel.
        let _ = self.opened.pool.free(self.room.address, Free::Lazy);
        ROOMS.lock().remove(&self.room.id);
    }
}
