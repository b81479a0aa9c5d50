//! Freed memory at hand: what threads free and allocate again without the pool's lock.
//!
//! Every thread belongs to a [`Shard`], which keeps the memory of the last small blocks freed there. An allocation takes
//! the best fit at its home place: from its own shard, unless the free runs of the pool have a better one (a set of their
//! sizes can be read without the lock), or else from another thread's shard. Rows join only within a shard, and only when
//! there is no fit without; among equals, the lowest address counts only there. So a thread that works on its own never
//! splits a row where another one, as it is, would fit better; of what other threads keep, it sees only what it needs.
//! Everything else is decided under the pool's lock, by code that first puts all kept memory back ([`Front::drain`]), and
//! so sees every free byte: placement, joining, limits and refusals, growth, trimming.
//!
//! **Why not only a faster lock.** One lock lets two cores do what one does, and a line that goes to and fro between them
//! makes it less. **Why not whole blocks, for exact fits.** Measured with eight threads and four sizes, half of all
//! allocations found none, because a pool that does not grow for their sake has little memory to keep; those that can be
//! split nearly always suffice.
//!
//! **Accounts.** To the free runs and the accounts kept memory is out, like a block. So `used` and the bytes asked for are
//! sums over live blocks *and* what is kept, which is subtracted where somebody asks. Their peaks stay exact without a
//! shared counter because neither sum grows here. Kept frames become a block's frames, and the bytes asked for, which may
//! differ within the last frame, are paid from the shard's `credit`: what the blocks freed into it had asked for, less
//! what was spent. The state raises the sums only after a drain, or below their peaks.
//!
//! **Quiet memory.** Each shard counts its lazy frees in a [`Clock`] of its own, and a wait vouches for the clocks that it
//! read before it began: that of the state and that of one shard. One clock for all shards would let every wait vouch for
//! all of them, but all threads would write its line at every lazy free. A row at a GPU's place is quiet or waits for that
//! GPU, which is the home of all who are served from it. What another GPU borrowed there, and may be at work on, is not
//! kept: nobody here could wait for it.
//!
//! **Order of locks**: the pool's, then shards by index, then a record of the registry.

use crate::clock::Clock;
use crate::magazine::{Kept, Magazine, Miss, Sums, at_least};
use crate::place::PlaceId;
use crate::place_map::PlaceMap;
use crate::registry::KEPT_BLOCK;
use crate::runs::Sizes;
use crate::state::State;
use crate::sync::{self, Apart, AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::{Config, Place, PlaceSpec, Policy};
use std::sync::Arc;

/// Threads beyond so many share shards.
const SHARDS: usize = if cfg!(loom) { 2 } else { 32 };
/// Block numbers that a shard takes at a time.
const IDS: u64 = 64;

/// Kept memory that becomes a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Popped {
    pub start: u32,
    pub id: u64,
    /// The shard that kept it.
    pub shard: usize,
    /// The GPU of its place may still touch it.
    pub busy: bool,
    /// The number of its free by the shard's clock.
    stamp: u64,
}

/// Two lines, because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    /// [`Magazine::hint`]: a look here saves the lock of a shard that has nothing. Written under the lock; whoever freed a
    /// block before an allocation began is seen by it, and nobody else has to be.
    hint: AtomicU64,
    /// Ticks under the lock.
    clock: Clock,
    magazine: Mutex<Magazine>,
}
#[derive(Debug)]
pub(crate) struct Front {
    shards: Box<[Shard]>,
    /// The sizes of the free runs.
    sizes: Arc<Sizes>,
    /// Whether anything is kept at all.
    keeps: bool,
    /// Whether blocks at a place may be kept and taken, by place: not while the account there has to see every block, and
    /// never on the host, where no request is at home.
    open: Box<[Apart<AtomicBool>]>,
    /// Where memory lies.
    places: Arc<PlaceMap>,
    /// Each thread writes it now and then, and every allocation reads what is beside it.
    next_ids: Apart<AtomicU64>,
}

/// What became of the memory of a freed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Push {
    /// It is kept.
    Kept,
    /// The shard is full: [`Front::make_room`].
    Full,
    /// Nothing of that kind is kept.
    Refused,
}

impl Shard {
    fn new(places: usize) -> Self {
        let magazine = Mutex::new(Magazine::new(places));
        Self { hint: AtomicU64::new(0), clock: Clock::new(places), magazine }
    }

    fn note(&self, hint: u64) {
        self.hint.store(hint, Ordering::Release);
    }

    /// Puts the first `count` kept rows back among the free runs, and that share of the credit.
    fn give_back<H: Copy>(&self, magazine: &mut Magazine, count: usize, state: &mut State<H>) {
        let share = match magazine.len() {
            all if all == count => magazine.credit,
            all => magazine.credit / all as u64 * count as u64,
        };
        magazine.credit -= share;
        magazine.take_rows(count, |place, row| {
            let busy = row.stamp > self.clock.quiesced(place.index());
            let freed = state.freed_now(busy.then_some(place));
            state.take_back(row.start, row.frames, freed);
        });
        state.settle(share);
        self.note(magazine.hint());
    }
}

impl Front {
    pub fn new(config: &Config, sizes: Arc<Sizes>, places: Arc<PlaceMap>) -> Self {
        // The other policies choose a place for every block anew; what was freed last says nothing about it.
        let keeps = config.policy == Policy::LocalFirst;
        let open = |spec: &PlaceSpec| Apart(AtomicBool::new(keeps && matches!(spec.place, Place::Gpu(_))));
        Self {
            shards: (0..SHARDS).map(|_| Shard::new(config.accounts.specs().len())).collect(),
            sizes,
            keeps,
            open: config.accounts.specs().iter().map(open).collect(),
            places,
            next_ids: Apart(AtomicU64::new(1)),
        }
    }

    /// The shards that any thread has used.
    fn used(&self) -> &[Shard] {
        &self.shards[..sync::seated().min(SHARDS)]
    }

    /// The shard of this thread.
    pub fn own(&self) -> usize {
        sync::seat() % SHARDS
    }

    fn own_shard(&self) -> &Shard {
        &self.shards[self.own()]
    }

    /// When the blocks that a shard keeps were freed.
    pub fn clock(&self, shard: usize) -> &Clock {
        &self.shards[shard].clock
    }

    /// Opens or closes the shards for a home GPU. Called under the pool's lock.
    pub fn set_open(&self, place: PlaceId, open: bool) {
        let open = open && self.keeps;
        let gate = &self.open[place.index()].0;
        // A line that everybody reads is written only when it changes.
        if gate.load(Ordering::Relaxed) != open {
            gate.store(open, Ordering::Release);
        }
    }

    /// Whether blocks of a home GPU may be kept, or served without a look at its account.
    pub fn is_open(&self, place: PlaceId) -> bool {
        self.open[place.index()].0.load(Ordering::Acquire)
    }

    /// Whether a block of that shape may be kept, or taken from what is.
    pub fn takes(&self, place: PlaceId, frames: u32) -> bool {
        frames <= KEPT_BLOCK && self.is_open(place)
    }

    /// A number that no other block has or had; those of one thread rise, whatever its blocks stand on: by them the blocks of an image find those of
    /// the program that it comes back to. So all of them are of the thread's shard.
    pub fn next_id(&self) -> u64 {
        self.draw_id(&mut self.own_shard().magazine.lock().ids)
    }

    /// The next of some numbers, `(next, end)`, which are taken anew where there are none left.
    pub fn draw_id(&self, ids: &mut (u64, u64)) -> u64 {
        if ids.0 == ids.1 {
            let first = self.next_ids.0.fetch_add(IDS, Ordering::Relaxed);
            *ids = (first, first + IDS);
        }
        ids.0 += 1;
        ids.0 - 1
    }

    /// Whether the free runs at `place` have one of at least so many frames, or will have in a moment, or had.
    pub fn may_be_free(&self, place: PlaceId, frames: u32) -> bool {
        self.sizes.at(place) & at_least(frames) != 0
    }

    /// Takes `frames` at `place` that this thread's shard keeps, for a request of `bytes`.
    pub fn pop(&self, place: PlaceId, frames: u32, bytes: u64) -> Result<Popped, Miss> {
        let (index, sizes) = (self.own(), self.sizes.at(place));
        let mut magazine = self.shards[index].magazine.lock();
        let mut popped = self.pop_from(index, &mut magazine, (place, frames, bytes), sizes)?;
        popped.id = self.draw_id(&mut magazine.ids);
        Ok(popped)
    }

    /// Gives this thread's shard credit, which the state has added to its sum. The caller holds the pool's lock.
    pub fn lend(&self, bytes: u64) {
        let shard = self.own_shard();
        let mut magazine = shard.magazine.lock();
        magazine.earn(bytes);
        shard.note(magazine.hint());
    }

    fn pop_from(
        &self,
        index: usize,
        magazine: &mut Magazine,
        (place, frames, bytes): (PlaceId, u32, u64),
        sizes: u64,
    ) -> Result<Popped, Miss> {
        let shard = &self.shards[index];
        let quiesced = shard.clock.quiesced(place.index());
        let kept = magazine.pop(place, frames, bytes, quiesced, sizes)?;
        shard.note(magazine.hint());
        Ok(Popped { start: kept.start, id: 0, shard: index, busy: kept.stamp > quiesced, stamp: kept.stamp })
    }

    /// Whether this GPU, that of its place, may still touch what was popped.
    pub fn is_busy(&self, popped: &Popped, place: PlaceId) -> bool {
        popped.stamp > self.clock(popped.shard).quiesced(place.index())
    }

    /// Whether this shard keeps a row at `place` of at least so many frames that the GPU there is done with.
    pub fn has_quiet(&self, shard: usize, place: PlaceId, frames: u32) -> bool {
        let shard = &self.shards[shard];
        shard.magazine.lock().has_quiet(place, frames, shard.clock.quiesced(place.index()))
    }

    /// Takes `frames` at `place` that another thread's shard keeps. Cheaper for all threads than a drain, after which every
    /// shard is empty.
    pub fn steal(&self, place: PlaceId, frames: u32, bytes: u64) -> Option<Popped> {
        let (own, shards) = (self.own(), self.used());
        for step in 1..shards.len() {
            let index = (own + step) % shards.len();
            let shard = &shards[index];
            if shard.hint.load(Ordering::Acquire) & at_least(frames) == 0 {
                continue;
            }
            // Waiting for who works there may take longer than what comes next.
            let Some(mut magazine) = shard.magazine.try_lock() else { continue };
            if let Ok(mut popped) = self.pop_from(index, &mut magazine, (place, frames, bytes), 0) {
                drop(magazine);
                popped.id = self.next_id();
                return Some(popped);
            }
        }
        None
    }

    /// The wait for a popped block failed: it was never served. The state gets its memory back, not this front.
    pub fn unserve(&self, popped: &Popped) {
        self.shards[popped.shard].magazine.lock().served -= 1;
    }

    /// Keeps the memory of a freed block, of which the program had asked for `bytes`, and which this GPU may be at work on
    /// still, if any: where it lies at one place, and no other GPU than that is.
    pub fn push(&self, start: u32, frames: u32, bytes: u64, busy: Option<PlaceId>) -> Push {
        if !self.keeps {
            return Push::Refused;
        }
        let shard = self.own_shard();
        let mut magazine = shard.magazine.lock();
        // Asked under the lock, so that a chunk which moves finds the row here or has moved before.
        let place = self.places.of_all(start, frames).filter(|&place| busy.is_none_or(|gpu| gpu == place));
        let Some(place) = place.filter(|&place| self.takes(place, frames)) else { return Push::Refused };
        let stamp = if busy.is_none() { 0 } else { shard.clock.tick() };
        if !magazine.push(place, Kept { start, frames, stamp }) {
            return Push::Full;
        }
        magazine.retired += 1;
        magazine.earn(bytes);
        shard.note(magazine.hint());
        Push::Kept
    }

    /// Puts half of what this thread's shard keeps back among the free runs. The caller holds the pool's lock: at no
    /// moment is the memory in neither of the two.
    pub fn make_room<H: Copy>(&self, state: &mut State<H>) {
        let shard = self.own_shard();
        let mut magazine = shard.magazine.lock();
        let half = magazine.len().div_ceil(2);
        shard.give_back(&mut magazine, half, state);
    }

    /// Puts everything kept back among the free runs, and with it all that is free is there.
    pub fn drain<H: Copy>(&self, state: &mut State<H>) {
        for shard in self.used() {
            if shard.hint.load(Ordering::Acquire) != 0 {
                let mut magazine = shard.magazine.lock();
                let all = magazine.len();
                shard.give_back(&mut magazine, all, state);
            }
        }
    }

    /// Puts everything kept back among the free runs; nothing is kept or taken until the answer is dropped. The caller holds
    /// the pool's lock, and may change where chunks lie.
    pub fn empty<H: Copy>(&self, state: &mut State<H>) -> Vec<MutexGuard<'_, Magazine>> {
        let mut magazines = self.lock_shards();
        for (shard, magazine) in self.shards.iter().zip(&mut magazines) {
            let all = magazine.len();
            shard.give_back(magazine, all, state);
        }
        magazines
    }

    /// What is kept now. The caller holds the pool's lock, and all shards are held at once, so that no block is counted
    /// twice or not at all on its way between them.
    pub fn sums(&self) -> Sums {
        let magazines = self.lock_shards();
        let mut sums = Sums { blocks: 0, credit: 0, served: 0, frames: vec![0; self.open.len()] };
        for magazine in &magazines {
            sums.blocks += magazine.served as i64 - magazine.retired as i64;
            sums.credit += magazine.credit;
            sums.served += magazine.served;
            for (sum, frames) in sums.frames.iter_mut().zip(magazine.frames_by_place()) {
                *sum += frames;
            }
        }
        sums
    }

    /// At least the most credit that all shards together had at one moment since this was asked last. The caller holds the
    /// pool's lock.
    pub fn most_credit(&self) -> u64 {
        let most = |magazine: &mut Magazine| std::mem::replace(&mut magazine.most_credit, magazine.credit);
        self.lock_shards().iter_mut().map(|magazine| most(magazine)).sum()
    }

    /// Every shard, those of threads that come only now included.
    fn lock_shards(&self) -> Vec<MutexGuard<'_, Magazine>> {
        self.shards.iter().map(|shard| shard.magazine.lock()).collect()
    }
}
