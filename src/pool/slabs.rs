//! Small blocks: which slab a frame belongs to, and the arenas that threads take small blocks of.
//!
//! Every thread has an arena, as it has a shard of the front (`front.rs`), and allocates there alone; what it frees goes back to the
//! arena that it came of, whoever frees. So threads that work on their own never meet, and each arena sees all that is free in
//! its slabs. A slab is an ordinary block of the pool, which its context owns: place, account, anchors, going home and the
//! end of the context are decided there.
//!
//! Which arena and slot a frame's slab has stands in a table that is read without a lock. An entry changes under the lock of the
//! arena that it names, so whoever finds it unchanged under that lock may rely on it.
//!
//! **Order of locks**: the pool's, then arenas by index, then shards, then a record of the registry.

use crate::FRAME;
use crate::arena::{Arena, Returned, Sums};
use crate::clock::Clock;
use crate::slab::{Ground, Spot, UNIT};
use crate::sync::{self, AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Threads beyond so many share arenas.
const ARENAS: usize = if cfg!(loom) { 2 } else { 32 };
/// Frames in a page of the table.
const PAGE: usize = if cfg!(loom) { 16 } else { 4096 };

/// Two lines, because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Line {
    arena: Mutex<Arena>,
    /// Ticks under the lock.
    clock: Clock,
    /// A slab without blocks may be here, so that a look saves the lock. Written under it.
    empty: AtomicBool,
}

/// A slab of which another process has a small block open, by the number of that block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lent {
    pub ground: Ground,
    pub times: u32,
}

#[derive(Debug)]
pub(crate) struct Slabs {
    lines: Box<[Line]>,
    /// For each frame, 0 or [`entry`].
    table: Box<[OnceLock<Box<[AtomicU32]>>]>,
    /// What other processes have.
    pub lent: Mutex<BTreeMap<u64, Lent>>,
    /// Small blocks that were ever made, in all: 0 spares those who have none a look at each arena.
    any: AtomicU64,
    /// Bytes of all slabs that are in an arena.
    bytes: AtomicU64,
}

/// An arena, locked, and where in it an address lies.
pub(crate) struct Found<'a> {
    pub arena: MutexGuard<'a, Arena>,
    pub index: usize,
    pub slot: u16,
    pub ground: Ground,
}

fn entry(index: usize, slot: u16) -> u32 {
    (index as u32 + 1) << 16 | u32::from(slot)
}

impl Found<'_> {
    /// The run that would start at this offset from the pool's first byte.
    pub fn spot(&self, offset: u64) -> Option<Spot> {
        let inside = offset - u64::from(self.ground.start) * FRAME;
        let unit = u16::try_from(inside / UNIT).ok().filter(|_| inside.is_multiple_of(UNIT))?;
        Some(Spot { slot: self.slot, unit })
    }

    /// The unit that this offset lies in.
    pub fn unit(&self, offset: u64) -> u32 {
        ((offset - u64::from(self.ground.start) * FRAME) / UNIT) as u32
    }
}

impl Slabs {
    /// None yet, for a pool of so many frames and places.
    pub fn new(frames: u64, places: usize) -> Self {
        let frames = frames.min(u64::from(u32::MAX)) as usize;
        let line =
            || Line { arena: Mutex::new(Arena::new(places)), clock: Clock::new(places), empty: AtomicBool::new(false) };
        Self {
            lines: (0..ARENAS).map(|_| line()).collect(),
            table: (0..frames.div_ceil(PAGE)).map(|_| OnceLock::new()).collect(),
            lent: Mutex::default(),
            any: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// The arena of this thread.
    pub fn own(&self) -> usize {
        sync::seat() % ARENAS
    }

    /// Every arena that any thread may have used, this one first.
    pub fn used(&self) -> impl Iterator<Item = usize> {
        let (own, count) = (self.own(), sync::seated().min(ARENAS));
        (0..count).map(move |step| (own + step) % count)
    }

    pub fn lock(&self, index: usize) -> MutexGuard<'_, Arena> {
        self.lines[index].arena.lock()
    }

    /// When what waits in an arena was freed.
    pub fn clock(&self, index: usize) -> &Clock {
        &self.lines[index].clock
    }

    /// Said before the arena's lock is given back, by whoever may have left a slab without blocks there, or taken the last.
    pub fn note_empty(&self, index: usize, arena: &Arena) {
        let empty = &self.lines[index].empty;
        let is = arena.is_any_empty();
        // A line that others read is written only when it changes.
        if empty.load(Ordering::Relaxed) != is {
            empty.store(is, Ordering::Release);
        }
    }

    /// Whether any small block was ever made.
    pub fn is_any(&self) -> bool {
        self.any.load(Ordering::Acquire) != 0
    }

    /// Whether this frame is a slab's.
    #[inline]
    pub fn has(&self, frame: u32) -> bool {
        self.entry_at(frame) != 0
    }

    /// The slab that this frame belongs to, with its arena locked.
    pub fn at(&self, frame: u32) -> Option<Found<'_>> {
        loop {
            let entry = self.entry_at(frame);
            let index = (entry >> 16).checked_sub(1)? as usize;
            let slot = entry as u16;
            let arena = self.lock(index);
            if self.entry_at(frame) == entry {
                let ground = arena.slab_in(slot)?.ground;
                return Some(Found { arena, index, slot, ground });
            }
        }
    }

    /// A slab came into this slot of an arena, whose lock the caller holds.
    pub fn enter(&self, index: usize, slot: u16, ground: Ground) {
        self.any.store(1, Ordering::Release);
        self.bytes.fetch_add(u64::from(ground.frames) * FRAME, Ordering::Relaxed);
        self.set(ground, entry(index, slot));
    }

    /// A slab left its arena, whose lock the caller holds.
    pub fn forget(&self, ground: Ground) {
        self.bytes.fetch_sub(u64::from(ground.frames) * FRAME, Ordering::Relaxed);
        self.set(ground, 0);
    }

    /// Bytes of all slabs. Each counts once the pool has counted it as a block, and until before it does so no longer.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes every slab out that no block stands on. Any lock of the pool's may be held, but none of an arena or behind one.
    pub fn take_empty(&self) -> Vec<Returned> {
        let mut taken = Vec::new();
        if !self.is_any() {
            return taken;
        }
        for index in self.used() {
            let Line { arena, clock, empty } = &self.lines[index];
            if !empty.load(Ordering::Acquire) {
                continue;
            }
            let mut arena = arena.lock();
            let gone = arena.take_empty(|gpu, stamp| stamp <= clock.quiesced(gpu.index()));
            gone.iter().for_each(|it| self.forget(it.ground));
            self.note_empty(index, &arena);
            taken.extend(gone);
        }
        taken
    }

    /// Lets go of half of what arenas keep for slabs to come: nothing is left of what is not needed again for some periods.
    pub fn halve_spare(&self) {
        if self.is_any() {
            self.used().for_each(|index| self.lock(index).halve_spare());
        }
    }

    /// Sums over all arenas, held at once, so that no block is counted twice.
    pub fn sums(&self) -> Option<Sums> {
        if !self.is_any() {
            return None;
        }
        let arenas: Vec<_> = self.lines.iter().map(|line| line.arena.lock()).collect();
        let mut all = Sums::default();
        for sums in arenas.iter().map(|arena| arena.sums()) {
            all.add(sums);
        }
        Some(all)
    }

    #[inline]
    fn entry_at(&self, frame: u32) -> u32 {
        let page = self.table.get(frame as usize / PAGE).and_then(OnceLock::get);
        page.map_or(0, |page| page[frame as usize % PAGE].load(Ordering::Acquire))
    }

    fn set(&self, ground: Ground, entry: u32) {
        // The first frame last: whoever has ended the slab's context looks there, and gives the frames away when nothing is left.
        for frame in (ground.start..ground.start + ground.frames).rev() {
            let Some(page) = self.table.get(frame as usize / PAGE) else { continue };
            let page = page.get_or_init(|| (0..PAGE).map(|_| AtomicU32::new(0)).collect());
            page[frame as usize % PAGE].store(entry, Ordering::Release);
        }
    }
}
