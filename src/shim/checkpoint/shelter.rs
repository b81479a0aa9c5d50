//! Room for a copy of a program's memory, so that the program need not wait for a disk.
//!
//! It is the pool's: on the GPU itself, where a copy is fastest, as long as at least as much stays free there; then on GPUs that lend. What was freed before serves
//! again, and each piece is free again once it is written. What finds no room there goes to plain memory of the host, as of a program that is suspended
//! (`suspend/kept.rs`), below the same limits. Rejected: host memory of the pool, which the driver makes a tenth as fast (`image/crew.rs`).

use super::Shuttles;
use super::blocks::Span;
use crate::backing::copies;
use crate::backing::open::Opened;
use crate::gate;
use crate::image::crew::{self, Crews, Part, Way};
use crate::image::plain::Plain;
use crate::image::{self, Failed};
use crate::serve::handles::by_hand::NOBODY;
use crate::suspend;
use gpupool_cuda::Driver;
use gpupool_pool::{Block, Free, Mover, Place, Repacks, Request, Transfer};
use gpupool_store::{Key, PART, Writer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What has one piece of room: enough that a request and the copies are cheap, and little enough that there is often room for one more.
const BATCH: u64 = 256 << 20;

/// Bytes of plain memory that copies lie in.
static ON_HOST: AtomicU64 = AtomicU64::new(0);

/// Bytes of the host's memory that copies for an image lie in at most: what is zero was never made.
pub fn bytes_on_host() -> u64 {
    ON_HOST.load(Ordering::Relaxed)
}

/// The child of a fork has none of it.
pub fn after_fork_in_child() {
    ON_HOST.store(0, Ordering::Relaxed);
}

/// Where copies of spans go.
pub struct Shelter {
    opened: &'static Opened,
    driver: &'static Driver,
    batches: Vec<Sheltered>,
}

/// Copies that lie behind each other.
pub struct Sheltered {
    room: Room,
    /// Of the original.
    owner: u64,
    gpu: u32,
    copies: Vec<(Key, u64, u64)>,
}

enum Room {
    OnGpus(OnGpus),
    OnHost(Arc<OnHost>),
}

/// A block of the pool that nobody else knows; it is freed when this is dropped.
struct OnGpus {
    opened: &'static Opened,
    block: Block,
}

/// Plain memory, which goes to the system when this is dropped.
struct OnHost(Plain);

/// A part of what lies in plain memory.
struct Copied {
    of: Arc<OnHost>,
    offset: usize,
    bytes: usize,
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
        if left.is_empty() { left } else { self.take_on_host(&left, keys) }
    }

    pub fn into_batches(self) -> Vec<Sheltered> {
        self.batches
    }

    fn copy(&self, batch: &[Span], keys: &[Key]) -> Option<Sheltered> {
        let &Span { owner, gpu, .. } = batch.first()?;
        let bytes = batch.iter().map(|span| span.bytes).sum();
        let block = copies::make(self.opened, || self.room(gpu, bytes))?;
        let mut at = block.address;
        let mut transfers = Vec::new();
        let mut copies = Vec::new();
        for span in batch {
            transfers.push(Transfer {
                from: span.address,
                to: at,
                bytes: span.bytes,
                inward: true,
                stored: false,
                between: false,
            });
            copies.push((keys[span.block], span.offset, span.bytes));
            at += span.bytes;
        }
        let room = Room::OnGpus(OnGpus { opened: self.opened, block });
        let backend = self.opened.pool.backend();
        backend.prepare(owner, gpu).and_then(|()| backend.copy(owner, gpu, &transfers)).ok()?;
        Some(Sheltered { room, owner, gpu, copies })
    }

    /// Of no context: the end of one frees what it owns, while it is still read, and the address may be the program's when the copy is done with.
    fn room(&self, home: u32, bytes: u64) -> Option<Block> {
        let pool = &self.opened.pool;
        let owner = NOBODY;
        let request = Request {
            bytes,
            home,
            owner,
            soft_refusal: false,
            repacks: Repacks::Never,
            can_ask: false,
            can_widen: false,
        };
        let free = self.opened.plan.free_at(self.driver, Place::Gpu(home)).unwrap_or(0);
        let at_home = if free >= 2 * bytes { pool.allocate_at_home(&request).ok() } else { None };
        at_home.or_else(|| pool.allocate_on_peers(&request).ok()).map(|allocation| allocation.block)
    }

    /// The same on the host.
    fn take_on_host(&mut self, spans: &[Span], keys: &[Key]) -> Vec<Span> {
        let wanted = spans.iter().map(|span| span.bytes).sum();
        let suspend::Room { allowed, there } = suspend::room_on_host(self.opened, wanted);
        let room = allowed.min(there).min(suspend::addresses_left().unwrap_or(u64::MAX));
        let (fits, mut left) = fitting(spans, room);
        let mut sheltered = Vec::new();
        let mut of: BTreeMap<(u64, u32), Vec<Part>> = BTreeMap::new();
        for batch in batches(&fits) {
            let Some(&Span { owner, gpu, .. }) = batch.first() else { continue };
            let Some(memory) = OnHost::new(batch.iter().map(|span| span.bytes).sum()) else {
                left.extend(batch);
                continue;
            };
            let mut host = memory.0.start();
            for span in &batch {
                let part = Part { address: span.address, host, bytes: span.bytes, used: false };
                of.entry((owner, gpu)).or_default().push(part);
                host += span.bytes as usize;
            }
            let copies = batch.iter().map(|span| (keys[span.block], span.offset, span.bytes)).collect();
            sheltered.push(Sheltered { room: Room::OnHost(Arc::new(memory)), owner, gpu, copies });
        }
        let mut crews = Crews::new(Way::Out);
        // SAFETY: each part has memory of its own, which was made for it above, is zero and outlives this. The program is stopped, and nothing of its memory is
        // unmapped before the second mappings of it end, behind this.
        let carried = crews
            .with(self.driver, of)
            .is_ok_and(|work| unsafe { crew::carry(&work, &mut |_| !gate::is_ending()).is_ok() });
        if carried {
            self.batches.extend(sheltered);
            return left;
        }
        spans.to_vec()
    }
}

impl OnHost {
    fn new(bytes: u64) -> Option<Self> {
        let plain = Plain::new(bytes).ok()?;
        ON_HOST.fetch_add(bytes, Ordering::Relaxed);
        Some(Self(plain))
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        let bytes = self.0.bytes();
        let _ = ON_HOST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |sum| Some(sum.saturating_sub(bytes)));
    }
}

impl AsRef<[u8]> for Copied {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: a part of plain memory that lives as long as `of`, and that nobody writes to once it was filled.
        unsafe { std::slice::from_raw_parts((self.of.0.start() + self.offset) as *const u8, self.bytes) }
    }
}

/// What of these there is room for, and the rest.
fn fitting(spans: &[Span], mut room: u64) -> (Vec<Span>, Vec<Span>) {
    let (mut fits, mut left) = (Vec::new(), Vec::new());
    for span in spans {
        let bytes = within(span, room);
        room -= bytes;
        fits.extend((bytes > 0).then_some(Span { bytes, ..*span }));
        left.extend((bytes < span.bytes).then(|| behind(span, bytes)));
    }
    (fits, left)
}

/// How much of it has room. Parts that are stored are not cut (`image::parts`): some bytes of room are left instead.
fn within(span: &Span, room: u64) -> u64 {
    let whole = || {
        let end = span.offset + room;
        (end - end % PART as u64).saturating_sub(span.offset)
    };
    if span.bytes <= room { span.bytes } else { whole() }
}

/// What comes behind so many bytes of it.
fn behind(span: &Span, bytes: u64) -> Span {
    Span { offset: span.offset + bytes, address: span.address + bytes, bytes: span.bytes - bytes, ..*span }
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
            let bytes = within(&rest, BATCH - sum);
            if bytes == 0 {
                sum = BATCH;
                continue;
            }
            if let Some(batch) = all.last_mut() {
                batch.push(Span { bytes, ..rest });
            }
            sum += bytes;
            rest = behind(&rest, bytes);
        }
    }
    all
}

impl Sheltered {
    pub fn bytes(&self) -> u64 {
        self.copies.iter().map(|(_, _, bytes)| bytes).sum()
    }

    pub fn is_on_host(&self) -> bool {
        matches!(self.room, Room::OnHost(_))
    }

    /// Hands all of it to the store, beside the program; what lies on GPUs, by the shuttle of its GPU and owner.
    pub fn write(self, shuttles: &mut Shuttles, writer: &Writer) -> Result<(), Failed> {
        let Self { room, owner, gpu, copies } = self;
        match &room {
            Room::OnGpus(room) => {
                let shuttle = shuttles.get_mut(&(gpu, owner)).ok_or(Failed::NoContext { gpu })?;
                let mut at = room.block.address;
                for (key, offset, bytes) in copies {
                    shuttle.save_beside(writer, key, offset, at, bytes)?;
                    at += bytes;
                }
            }
            Room::OnHost(memory) => {
                let mut at = 0;
                for (key, offset, bytes) in copies {
                    for (done, bytes) in image::parts(offset, bytes) {
                        let copied = Copied { of: Arc::clone(memory), offset: at + done as usize, bytes };
                        writer.submit(key, offset + done, copied)?;
                    }
                    at += bytes as usize;
                }
            }
        }
        Ok(())
    }
}

impl Drop for OnGpus {
    fn drop(&mut self) {
        // Whoever copied has waited for it. Waiting for the program's work as well would take as long as its longest kernel.
        let _ = self.opened.pool.free(self.block.address, Free::Lazy);
        copies::remove(self.opened, &self.block);
    }
}
