//! Freed blocks at hand: the memory that threads free and allocate again without the pool's lock.
//!
//! Every thread belongs to a [`Shard`], which keeps the last blocks freed there as they are. An allocation of exactly as
//! many frames at the same place takes one of them. An exact fit is always a best fit; only the address among equals may
//! differ from what the free runs would give. Everything else is decided under the pool's lock, by code that first puts
//! all kept memory back ([`Front::drain`]), and so sees every free byte: placement, best fit with coalescing, limits and
//! refusals, trimming.
//!
//! **Why not only a faster lock.** One lock costs two cores as much as one, and a line that goes to and fro between them
//! on top. A thread that finds what it needs here touches no line that another core writes.
//!
//! **Accounts.** To the free runs and the accounts a kept block is out, like a live one. So `used` and the live bytes of
//! the state are sums over live *and* kept blocks; what is kept is subtracted where somebody asks. Their peaks stay
//! exact without a shared counter because neither sum grows here. A kept block becomes a live one of the same frames,
//! and the bytes asked for, which may differ within the last frame, are paid from the shard's `credit`: what the blocks
//! freed into it had asked for, less what was spent. The state raises the sums only after a drain, or below their peaks.
//!
//! **Quiet memory.** Each shard counts its lazy frees in a [`Clock`] of its own, and a wait vouches for the clocks that it
//! read before it began: that of the state and that of one shard. One clock for all shards would let every wait vouch for
//! all of them, but all threads would write its line at every lazy free.
//!
//! **Order of locks**: the pool's, then shards by index, then a record of the registry.

use crate::budget::PlaceId;
use crate::clock::Clock;
use crate::state::State;
use crate::sync::{self, AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::{Config, FRAME, PlaceSpec, Policy};

/// Threads beyond so many share shards.
const SHARDS: usize = if cfg!(loom) { 2 } else { 32 };
/// Blocks that a shard keeps.
const KEPT: usize = if cfg!(loom) { 2 } else { 32 };
/// Frames that a shard keeps, 1 GiB. A larger block costs more to use than to find.
const KEPT_FRAMES: u32 = ((1 << 30) / FRAME) as u32;
/// Block numbers that a shard takes at a time.
const IDS: u64 = 64;

/// A freed block that was not taken apart.
#[derive(Clone, Copy, Debug)]
struct Kept {
    start: u32,
    frames: u32,
    place: PlaceId,
    /// The number of its free in the shard's clock; 0 for memory known to be quiet.
    stamp: u64,
}

/// A kept block that becomes a live one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Popped {
    pub start: u32,
    pub id: u64,
    /// The shard that kept it.
    pub shard: usize,
    /// The device may still touch it.
    pub busy: bool,
}

#[derive(Debug)]
struct Magazine {
    kept: Vec<Kept>,
    frames: u32,
    /// Bytes asked for that pops may spend; see the module's text.
    credit: u64,
    /// Blocks served from here.
    served: u64,
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
    pub blocks: u64,
    pub credit: u64,
    pub served: u64,
    /// Frames by place.
    pub frames: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Front {
    shards: Box<[Shard]>,
    /// Whether anything is kept at all.
    keeps: bool,
    /// Whether blocks at a place may be kept and taken, by place: not while the account there has to see every block, and
    /// never on the host, where no request is at home.
    open: Box<[AtomicBool]>,
    next_ids: AtomicU64,
}

/// In a shard's hint: there is credit.
const CREDIT: u64 = 1 << 63;

/// In a shard's hint: there may be a block of so many frames.
fn bit(frames: u32) -> u64 {
    1 << (frames % 63)
}

impl Magazine {
    /// Takes a kept block of that shape out: a quiet one if there is any, so that waits are rare, and the lowest of equals.
    fn pop(&mut self, place: PlaceId, frames: u32, bytes: u64, quiesced: u64) -> Option<Kept> {
        let fits = |kept: &&Kept| kept.frames == frames && kept.place == place;
        let best = self.kept.iter().filter(fits).min_by_key(|kept| (kept.stamp > quiesced, kept.start))?.start;
        self.credit = self.credit.checked_sub(bytes)?;
        self.frames -= frames;
        self.served += 1;
        let index = self.kept.iter().position(|kept| kept.start == best)?;
        Some(self.kept.swap_remove(index))
    }

    fn hint(&self) -> u64 {
        let credit = if self.credit > 0 { CREDIT } else { 0 };
        self.kept.iter().fold(credit, |hint, kept| hint | bit(kept.frames))
    }
}

impl Shard {
    fn new() -> Self {
        let magazine = Magazine { kept: Vec::with_capacity(KEPT), frames: 0, credit: 0, served: 0, ids: (0, 0) };
        Self { hint: AtomicU64::new(0), clock: Clock::default(), magazine: Mutex::new(magazine) }
    }

    fn note(&self, hint: u64) {
        self.hint.store(hint, Ordering::Release);
    }

    /// Puts the first `count` kept blocks back among the free runs, and that share of the credit.
    fn give_back<H: Copy>(&self, magazine: &mut Magazine, count: usize, state: &mut State<H>) {
        let share = match magazine.kept.len() {
            all if all == count => magazine.credit,
            all => magazine.credit / all as u64 * count as u64,
        };
        magazine.credit -= share;
        let quiesced = self.clock.quiesced();
        for kept in magazine.kept.drain(..count) {
            magazine.frames -= kept.frames;
            state.take_back(kept.start, kept.frames, kept.place, kept.stamp <= quiesced);
        }
        state.settle(count as u64, share);
        self.note(magazine.hint());
    }
}

impl Front {
    pub fn new(config: &Config) -> Self {
        // The other policies choose a place for every block anew; what was freed last says nothing about it.
        let keeps = config.policy == Policy::LocalFirst;
        let open = |spec: &PlaceSpec| AtomicBool::new(keeps && !spec.place.is_host());
        Self {
            shards: (0..SHARDS).map(|_| Shard::new()).collect(),
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
        frames <= KEPT_FRAMES && self.open[place.index()].load(Ordering::Acquire)
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

    /// Takes a block of `frames` at `place` that this thread's shard keeps, for a request of `bytes`.
    pub fn pop(&self, place: PlaceId, frames: u32, bytes: u64) -> Option<Popped> {
        let index = self.own();
        let mut magazine = self.shards[index].magazine.lock();
        let mut popped = self.pop_from(index, &mut magazine, place, frames, bytes)?;
        popped.id = self.take_id(&mut magazine);
        Some(popped)
    }

    fn pop_from(
        &self,
        index: usize,
        magazine: &mut Magazine,
        place: PlaceId,
        frames: u32,
        bytes: u64,
    ) -> Option<Popped> {
        let shard = &self.shards[index];
        let quiesced = shard.clock.quiesced();
        let kept = magazine.pop(place, frames, bytes, quiesced)?;
        shard.note(magazine.hint());
        Some(Popped { start: kept.start, id: 0, shard: index, busy: kept.stamp > quiesced })
    }

    /// The same from another thread's shard. Cheaper for all than a drain: theirs stay filled.
    pub fn steal(&self, place: PlaceId, frames: u32, bytes: u64) -> Option<Popped> {
        let (own, shards) = (self.own(), self.used());
        for step in 1..shards.len() {
            let index = (own + step) % shards.len();
            let shard = &shards[index];
            if shard.hint.load(Ordering::Acquire) & bit(frames) == 0 {
                continue;
            }
            // Waiting for who works there may take longer than what comes next.
            let Some(mut magazine) = shard.magazine.try_lock() else { continue };
            if let Some(mut popped) = self.pop_from(index, &mut magazine, place, frames, bytes) {
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

    /// Keeps a freed block, of which the program had asked for `bytes`. Refuses one that would fill the shard;
    /// [`Front::make_room`] first.
    pub fn push(&self, start: u32, frames: u32, place: PlaceId, bytes: u64, quiet: bool) -> bool {
        let shard = self.own_shard();
        let mut magazine = shard.magazine.lock();
        if magazine.kept.len() == KEPT || magazine.frames + frames > KEPT_FRAMES {
            return false;
        }
        let stamp = if quiet { 0 } else { shard.clock.tick() };
        magazine.kept.push(Kept { start, frames, place, stamp });
        magazine.frames += frames;
        magazine.credit += bytes;
        shard.note(shard.hint.load(Ordering::Relaxed) | bit(frames) | CREDIT);
        true
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
            stock.blocks += magazine.kept.len() as u64;
            stock.credit += magazine.credit;
            stock.served += magazine.served;
            for kept in &magazine.kept {
                stock.frames[kept.place.index()] += u64::from(kept.frames);
            }
        }
        stock
    }
}
