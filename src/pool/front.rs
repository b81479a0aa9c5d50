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

use crate::budget::PlaceId;
use crate::clock::Clock;
use crate::runs::{Sizes, bucket};
use crate::state::State;
use crate::sync::{self, AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::{Config, FRAME, PlaceSpec, Policy};
use std::sync::Arc;

/// Threads beyond so many share shards.
const SHARDS: usize = if cfg!(loom) { 2 } else { 32 };
/// Rows that a shard keeps.
const KEPT: usize = if cfg!(loom) { 2 } else { 32 };
/// Frames that a shard keeps, 1 GiB.
const KEPT_FRAMES: u32 = ((1 << 30) / FRAME) as u32;
/// Frames of the largest block whose memory is kept, 64 MiB. It bounds the search for the block around an address, and
/// nobody allocates larger ones so often that a lock matters.
pub(crate) const KEPT_BLOCK: u32 = ((64 << 20) / FRAME) as u32;
/// Block numbers that a shard takes at a time.
const IDS: u64 = 64;

/// A row of freed frames at one place.
#[derive(Clone, Copy, Debug)]
struct Kept {
    start: u32,
    frames: u32,
    place: PlaceId,
    /// The number of the latest free in it by the shard's clock, until which the place's GPU may be at work on it; 0 for
    /// memory known to be quiet.
    stamp: u64,
}

/// Why a shard serves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// It has no fit, or the free runs have a better one.
    NoFit,
    /// It has the best fit, and not the credit for it.
    NoCredit,
}

/// Kept memory that becomes a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Popped {
    pub start: u32,
    pub id: u64,
    /// The shard that kept it.
    pub shard: usize,
    /// The GPU of its place may still touch it.
    pub busy: bool,
}

#[derive(Debug)]
struct Magazine {
    /// In the order of [`Kept::key`].
    kept: Vec<Kept>,
    /// No two rows touch.
    joined: bool,
    frames: u32,
    /// Bytes asked for that pops may spend; see the module's text.
    credit: u64,
    /// Blocks that began and that ended here.
    served: u64,
    retired: u64,
    /// Block numbers not given yet: the next one, and the first that is not this shard's.
    ids: (u64, u64),
}

/// Two lines, because processors fetch them in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    /// [`bit`] of each kept block, and [`CREDIT`]: a look here saves the lock of a shard that has nothing. Written under
    /// the lock; whoever freed a block before an allocation began is seen by it, and nobody else has to be.
    hint: AtomicU64,
    /// Ticks under the lock.
    clock: Clock,
    magazine: Mutex<Magazine>,
}

/// What is kept in all shards at one moment.
#[derive(Debug)]
pub(crate) struct Stock {
    /// Blocks that began in the front less those that ended in it.
    pub blocks: i64,
    pub credit: u64,
    pub served: u64,
    /// Frames by place.
    pub frames: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Front {
    shards: Box<[Shard]>,
    /// Of the free runs.
    sizes: Arc<Sizes>,
    /// Whether anything is kept at all.
    keeps: bool,
    /// Whether blocks at a place may be kept and taken, by place: not while the account there has to see every block, and
    /// never on the host, where no request is at home.
    open: Box<[AtomicBool]>,
    next_ids: AtomicU64,
}

/// In a shard's hint: there is credit. Takes the place of the [`bucket`] of size 0.
const CREDIT: u64 = 1;

/// The buckets of sizes in `from..to`, where `to` may be above all.
fn between(from: u32, to: u32) -> u64 {
    let below = |size: u32| 1u64.checked_shl(size).map_or(u64::MAX, |bit| bit - 1);
    below(bucket(to)) & !below(bucket(from))
}

/// The buckets of sizes from `from` on.
fn at_least(from: u32) -> u64 {
    u64::MAX << bucket(from)
}

impl Kept {
    /// The order in a magazine.
    fn key(&self) -> (PlaceId, u32, u32) {
        (self.place, self.frames, self.start)
    }
}

impl Magazine {
    /// Takes the best fit out: the smallest row, of those a quiet one, so that waits are rare, of those the lowest. Leaves
    /// it when `sizes`, those of the pool's free runs, have a better one.
    fn pop(&mut self, place: PlaceId, frames: u32, bytes: u64, quiesced: u64, sizes: u64) -> Result<Kept, Miss> {
        let mut first = self.first_fit(place, frames);
        if first.is_none() && sizes & at_least(frames) == 0 && self.join() {
            first = self.first_fit(place, frames);
        }
        let first = first.ok_or(Miss::NoFit)?;
        let least = self.kept[first].frames;
        if sizes & between(frames, least) != 0 {
            return Err(Miss::NoFit);
        }
        self.credit = self.credit.checked_sub(bytes).ok_or(Miss::NoCredit)?;
        let equals = self.kept[first..].iter().take_while(|kept| kept.place == place && kept.frames == least);
        let quiet = equals.map(|kept| kept.stamp).position(|stamp| stamp <= quiesced);
        let best = self.kept.remove(first + quiet.unwrap_or(0));
        if best.frames > frames {
            self.insert(Kept { start: best.start + frames, frames: best.frames - frames, ..best });
        }
        self.frames -= frames;
        self.served += 1;
        Ok(Kept { frames, ..best })
    }

    /// The index of the smallest row of at least so many frames.
    fn first_fit(&self, place: PlaceId, frames: u32) -> Option<usize> {
        let index = self.kept.partition_point(|kept| kept.key() < (place, frames, 0));
        self.kept.get(index).filter(|kept| kept.place == place).map(|_| index)
    }

    /// Adds a row; `false` if there is no room for it.
    fn push(&mut self, row: Kept) -> bool {
        if self.frames + row.frames > KEPT_FRAMES || (self.kept.len() == KEPT && !self.join()) {
            return false;
        }
        self.insert(row);
        self.frames += row.frames;
        self.joined = false;
        true
    }

    fn insert(&mut self, row: Kept) {
        let index = self.kept.partition_point(|kept| kept.key() < row.key());
        self.kept.insert(index, row);
    }

    /// Joins rows that touch; whether there were any. Not done at every free: a program mostly asks for the sizes it freed,
    /// and finds them as long as they are whole.
    fn join(&mut self) -> bool {
        let before = self.kept.len();
        if !std::mem::replace(&mut self.joined, true) {
            self.kept.sort_unstable_by_key(|kept| kept.start);
            self.kept.dedup_by(|right, left| {
                let touch = left.place == right.place && left.start + left.frames == right.start;
                if touch {
                    left.frames += right.frames;
                    left.stamp = left.stamp.max(right.stamp);
                }
                touch
            });
            self.kept.sort_unstable_by_key(Kept::key);
        }
        self.kept.len() < before
    }

    fn hint(&self) -> u64 {
        let credit = if self.credit > 0 { CREDIT } else { 0 };
        self.kept.iter().fold(credit, |hint, kept| hint | 1 << bucket(kept.frames))
    }
}

impl Shard {
    fn new(places: usize) -> Self {
        let magazine = Magazine {
            kept: Vec::with_capacity(KEPT),
            joined: true,
            frames: 0,
            credit: 0,
            served: 0,
            retired: 0,
            ids: (0, 0),
        };
        Self { hint: AtomicU64::new(0), clock: Clock::new(places), magazine: Mutex::new(magazine) }
    }

    fn note(&self, hint: u64) {
        self.hint.store(hint, Ordering::Release);
    }

    /// Puts the first `count` kept rows back among the free runs, and that share of the credit.
    fn give_back<H: Copy>(&self, magazine: &mut Magazine, count: usize, state: &mut State<H>) {
        let share = match magazine.kept.len() {
            all if all == count => magazine.credit,
            all => magazine.credit / all as u64 * count as u64,
        };
        magazine.credit -= share;
        for kept in magazine.kept.drain(..count) {
            magazine.frames -= kept.frames;
            let busy = kept.stamp > self.clock.quiesced(kept.place.index());
            let freed = state.freed_now(busy.then_some(kept.place));
            state.take_back(kept.start, kept.frames, kept.place, freed);
        }
        state.settle(share);
        self.note(magazine.hint());
    }
}

impl Front {
    pub fn new(config: &Config, sizes: Arc<Sizes>) -> Self {
        // The other policies choose a place for every block anew; what was freed last says nothing about it.
        let keeps = config.policy == Policy::LocalFirst;
        let open = |spec: &PlaceSpec| AtomicBool::new(keeps && !spec.place.is_host());
        Self {
            shards: (0..SHARDS).map(|_| Shard::new(config.places.len())).collect(),
            sizes,
            keeps,
            open: config.places.iter().map(open).collect(),
            next_ids: AtomicU64::new(1),
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
        let gate = &self.open[place.index()];
        // A line that everybody reads is written only when it changes.
        if gate.load(Ordering::Relaxed) != open {
            gate.store(open, Ordering::Release);
        }
    }

    /// Whether a block of that shape may be kept, or taken from what is.
    pub fn takes(&self, place: PlaceId, frames: u32) -> bool {
        frames <= KEPT_BLOCK && self.open[place.index()].load(Ordering::Acquire)
    }

    /// A number that no other block has or had; those of one thread rise.
    pub fn next_id(&self) -> u64 {
        self.take_id(&mut self.own_shard().magazine.lock())
    }

    fn take_id(&self, magazine: &mut Magazine) -> u64 {
        if magazine.ids.0 == magazine.ids.1 {
            let first = self.next_ids.fetch_add(IDS, Ordering::Relaxed);
            magazine.ids = (first, first + IDS);
        }
        magazine.ids.0 += 1;
        magazine.ids.0 - 1
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
        popped.id = self.take_id(&mut magazine);
        Ok(popped)
    }

    /// Gives this thread's shard credit, which the state has added to its sum. The caller holds the pool's lock.
    pub fn lend(&self, bytes: u64) {
        let shard = self.own_shard();
        let mut magazine = shard.magazine.lock();
        magazine.credit += bytes;
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
        Ok(Popped { start: kept.start, id: 0, shard: index, busy: kept.stamp > quiesced })
    }

    /// The same from another thread's shard. Cheaper for all than a drain: theirs stay filled.
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

    /// Keeps the memory of a freed block, of which the program had asked for `bytes`, and which the place's GPU may be at
    /// work on still unless it is `quiet`; `false` if the shard is full, then [`Front::make_room`].
    pub fn push(&self, start: u32, frames: u32, place: PlaceId, bytes: u64, quiet: bool) -> bool {
        let shard = self.own_shard();
        let mut magazine = shard.magazine.lock();
        let stamp = if quiet { 0 } else { shard.clock.tick() };
        let room = magazine.push(Kept { start, frames, place, stamp });
        if room {
            magazine.retired += 1;
            magazine.credit += bytes;
            shard.note(magazine.hint());
        }
        room
    }

    /// Puts half of what this thread's shard keeps back among the free runs. The caller holds the pool's lock: at no
    /// moment is the memory in neither of the two.
    pub fn make_room<H: Copy>(&self, state: &mut State<H>) {
        let shard = self.own_shard();
        let mut magazine = shard.magazine.lock();
        let half = magazine.kept.len().div_ceil(2);
        shard.give_back(&mut magazine, half, state);
    }

    /// Puts everything kept back among the free runs, and with it all that is free is there.
    pub fn drain<H: Copy>(&self, state: &mut State<H>) {
        for shard in self.used() {
            if shard.hint.load(Ordering::Acquire) != 0 {
                let mut magazine = shard.magazine.lock();
                let all = magazine.kept.len();
                shard.give_back(&mut magazine, all, state);
            }
        }
    }

    /// What is kept now. The caller holds the pool's lock, and all shards are held at once, so that no block is counted
    /// twice or not at all on its way between them.
    pub fn stock(&self) -> Stock {
        let magazines: Vec<MutexGuard<'_, Magazine>> = self.shards.iter().map(|shard| shard.magazine.lock()).collect();
        let mut stock = Stock { blocks: 0, credit: 0, served: 0, frames: vec![0; self.open.len()] };
        for magazine in &magazines {
            stock.blocks += magazine.served as i64 - magazine.retired as i64;
            stock.credit += magazine.credit;
            stock.served += magazine.served;
            for kept in &magazine.kept {
                stock.frames[kept.place.index()] += u64::from(kept.frames);
            }
        }
        stock
    }
}
