//! The slabs of some of the threads: which free run serves a small block, what becomes of it afterwards, and when a slab goes back
//! to the pool. Neither locks nor atomics; [`crate::slabs`] has those.
//!
//! A block is cut from the low end of the best fit: of runs of one size, the one that was freed first, so that what was freed last
//! has time to be joined with what is freed beside it. What is free is quiet, without exception: a block that ends while a GPU may
//! still be at work on it waits in a queue until its GPU was waited for ([`Arena::release_quiet`]). Who finds no fit takes a slab first,
//! as far as [`Arena::grows_unwaited`] says, and waits only then. So lazy frees cost a wait now and then, however many there are. Rejected: to wait
//! without a slab, however little there is. A program whose kernel waits for the host hangs in that, and lazy frees are its remedy.
//!
//! Blocks of a context are in slabs of their own, because both end together. A slab without blocks stays, if it is the only one
//! of its context in this arena, so that a program which allocates and frees one block in a loop takes no slab each time.

use crate::bins::{Bins, NIL, list};
use crate::budget::IN_FLIGHT;
use crate::place::PlaceId;
use crate::slab::{Cells, Ground, Kind, Run, Slab, Spot, UNIT};
use crate::{Block, FRAME};
use std::collections::VecDeque;

/// So many slabs of one arena are numbered.
const MOST_SLABS: usize = u16::MAX as usize;

/// The context that slabs belong to, and its home.
#[derive(Debug)]
struct Owner {
    owner: u64,
    gpu: PlaceId,
    bins: Bins,
    /// Frames of its slabs.
    frames: u32,
    /// Its slabs that have no block.
    empty: u32,
    /// Its blocks that ended and wait for a GPU.
    pending: u32,
    /// How many requests are not worth asking the pool for a slab for, and how many there were the last time.
    patience: (u32, u32),
}

/// A block that ended lazily.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    spot: Spot,
    /// The number of its slab. Where another one has the slot, the slab went back meanwhile, and the block with it.
    slab: u64,
    gpu: PlaceId,
    /// When, by the arena's clock.
    stamp: u64,
}

/// What ended lazily and waits for one GPU, in the order of its stamps.
#[derive(Clone, Debug, Default)]
struct Queue {
    blocks: VecDeque<Waiting>,
    /// How many of them went with their slabs.
    gone: usize,
}

/// Bytes of slabs that a context may have without a wait in any case.
const LITTLE: u64 = 16 << 20;

/// So many blocks that went with their slabs may stand in a queue, or as many as there are others.
const MOST_GONE: usize = 64;

/// Sums over an arena.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sums {
    pub slabs: u64,
    pub slab_bytes: u64,
    /// Slabs ever taken of the pool, and how many of them of freed memory.
    pub taken: u64,
    pub reused: u64,
    pub blocks: u64,
    pub bytes: u64,
    /// The most that `bytes` ever was, of several arenas added up.
    pub peak_bytes: u64,
    pub allocations: u64,
    /// Slabs of new memory: an allocation each that reused nothing.
    pub grown: u64,
    /// Frames of slabs without blocks, by place.
    pub empty: Vec<u64>,
}

impl Sums {
    /// Adds those of another arena.
    pub fn add(&mut self, other: &Sums) {
        self.slabs += other.slabs;
        self.slab_bytes += other.slab_bytes;
        self.taken += other.taken;
        self.reused += other.reused;
        self.blocks += other.blocks;
        self.bytes += other.bytes;
        self.peak_bytes += other.peak_bytes;
        self.allocations += other.allocations;
        self.grown += other.grown;
        self.empty.resize(self.empty.len().max(other.empty.len()), 0);
        for (sum, frames) in self.empty.iter_mut().zip(&other.empty) {
            *sum += frames;
        }
    }
}

/// A slab on its way back to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Returned {
    pub ground: Ground,
    /// The GPU that may still be at work on it.
    pub busy: Option<PlaceId>,
}

#[derive(Debug)]
pub(crate) struct Arena {
    slabs: Vec<Option<Slab>>,
    /// Slots without a slab.
    vacant: Vec<u16>,
    /// What slabs that went had, for those to come: to make it takes longer than all else about a slab.
    spare: Vec<Cells>,
    owners: Vec<Owner>,
    /// What ended lazily, by the GPU that it waits for.
    waiting: Box<[Queue]>,
    sums: Sums,
    /// Numbers of blocks not given yet: the next one, and the first that is not this arena's.
    pub ids: (u64, u64),
}

impl Arena {
    /// An empty one, of a pool with so many places.
    pub fn new(places: usize) -> Self {
        let sums = Sums { empty: vec![0; places], ..Sums::default() };
        Self {
            slabs: Vec::new(),
            vacant: Vec::new(),
            spare: Vec::new(),
            owners: Vec::new(),
            waiting: vec![Queue::default(); places].into(),
            sums,
            ids: (0, 0),
        }
    }

    /// A block of so many bytes for this context, with its number; where it is. `None` where no free run is large enough.
    #[inline]
    pub fn take(&mut self, owner: u64, gpu: PlaceId, bytes: u64, id: u64) -> Option<Spot> {
        let of = self.owner(owner, gpu)?;
        let units = bytes.div_ceil(UNIT) as u32;
        let list = self.owners[of].bins.first_from(units)?;
        let [head, _] = self.owners[of].bins.ends[list];
        let spot = unpack(head);
        let found = self.slab(spot)?.run(u32::from(spot.unit)).units;
        self.unlink(of, spot, found);
        let slab = self.slabs[usize::from(spot.slot)].as_mut()?;
        let unit = u32::from(spot.unit);
        let slack = u32::try_from(u64::from(units) * UNIT - bytes).unwrap_or(0);
        slab.put(unit, Run { units, kind: Kind::Live, slack });
        slab.set_number(unit, id);
        let (was_empty, frames) = (slab.live == 0, slab.ground.frames);
        slab.live += 1;
        if found > units {
            slab.put(unit + units, Run { units: found - units, kind: Kind::Free, slack: 0 });
            self.link(of, Spot { slot: spot.slot, unit: (unit + units) as u16 }, found - units);
        }
        if was_empty {
            self.filled(of, gpu, frames);
        }
        self.sums.blocks += 1;
        self.sums.bytes += bytes;
        self.sums.peak_bytes = self.sums.peak_bytes.max(self.sums.bytes);
        self.sums.allocations += 1;
        Some(spot)
    }

    /// The pool gave a slab, of freed memory or of new.
    pub fn count_slab(&mut self, reused: bool) {
        self.sums.taken += 1;
        self.sums.reused += u64::from(reused);
        self.sums.grown += u64::from(!reused);
    }

    /// Whether the pool is worth asking for a slab for this context: not each time once it had none.
    pub fn may_grow(&mut self, owner: u64, gpu: PlaceId) -> bool {
        let of = self.owner_or_new(owner, gpu);
        let patience = &mut self.owners[of].patience;
        let may = patience.0 == 0;
        patience.0 -= u32::from(!may);
        may
    }

    /// The pool had no slab for this context.
    pub fn could_not_grow(&mut self, owner: u64, gpu: PlaceId) {
        let of = self.owner_or_new(owner, gpu);
        let before = self.owners[of].patience.1;
        let next = (before * 2 + 1).min(255);
        self.owners[of].patience = (next, next);
    }

    /// Adds a slab; its slot, or `None` where there are too many.
    pub fn add(&mut self, ground: Ground) -> Option<u16> {
        let of = self.owner_or_new(ground.owner, ground.gpu);
        let slot = self.vacant.pop().or_else(|| {
            let next = self.slabs.len();
            (next < MOST_SLABS).then(|| self.slabs.push(None))?;
            Some(next as u16)
        })?;
        let slab = Slab::new(ground, of, self.spare.pop());
        let units = slab.units();
        self.slabs[usize::from(slot)] = Some(slab);
        let owner = &mut self.owners[of];
        owner.frames += ground.frames;
        owner.empty += 1;
        owner.patience = (0, 0);
        self.sums.empty[ground.gpu.index()] += u64::from(ground.frames);
        self.sums.slabs += 1;
        self.sums.slab_bytes += u64::from(ground.frames) * FRAME;
        self.link(of, Spot { slot, unit: 0 }, units);
        Some(slot)
    }

    /// The slab in this slot.
    pub fn slab_in(&self, slot: u16) -> Option<&Slab> {
        self.slabs.get(usize::from(slot))?.as_ref()
    }

    /// The block that starts at this spot and whose free, if any, has not begun, where `of` agrees to its number.
    pub fn block(&self, spot: Spot, of: impl Fn(u64) -> bool) -> Option<Block> {
        let slab = self.slab(spot)?;
        let unit = u32::from(spot.unit);
        let lives = unit < slab.units() && slab.starts_at(unit) && slab.run(unit).kind == Kind::Live;
        (lives && of(slab.number(unit))).then(|| block_of(slab, unit))
    }

    /// The block around a unit, freeing or not.
    pub fn around(&self, slot: u16, unit: u32) -> Option<(Spot, Block)> {
        let slab = self.slab_in(slot)?;
        let start = slab.start_of(unit);
        let lives = matches!(slab.run(start).kind, Kind::Live | Kind::Ending);
        lives.then(|| (Spot { slot, unit: start as u16 }, block_of(slab, start)))
    }

    /// Marks the block of that number as being freed, or as living on.
    pub fn turn(&mut self, spot: Spot, number: u64, ending: bool) -> bool {
        let (from, to) = if ending { (Kind::Live, Kind::Ending) } else { (Kind::Ending, Kind::Live) };
        let unit = u32::from(spot.unit);
        let Some(slab) = self.slab_mut(spot) else { return false };
        if !slab.starts_at(unit) || slab.run(unit).kind != from || slab.number(unit) != number {
            return false;
        }
        slab.turn(unit, to);
        true
    }

    /// Ends the block of that number, which is being freed and quiet; the slab, if it goes back. `None` where there is no such
    /// block any more.
    pub fn end(&mut self, spot: Spot, number: u64) -> Option<Option<Returned>> {
        self.end_block(spot, number)?;
        Some(self.settle(spot))
    }

    /// Ends the block of that number, which is being freed, and which its home may still be at work on, as of `stamp`.
    pub fn end_lazily(&mut self, spot: Spot, number: u64, stamp: u64) -> Option<Option<Returned>> {
        self.end_block(spot, number)?;
        let slab = self.slab_mut(spot)?;
        slab.turn(u32::from(spot.unit), Kind::Pending);
        slab.pending += 1;
        let (of, Ground { gpu, id, .. }) = (slab.of, slab.ground);
        self.owners[of].pending += 1;
        self.waiting[gpu.index()].blocks.push_back(Waiting { spot, slab: id, gpu, stamp });
        Some(self.emptied(spot))
    }

    /// Whether the free of the block of that number is under way.
    fn end_block(&mut self, spot: Spot, number: u64) -> Option<()> {
        let slab = self.slab(spot)?;
        let unit = u32::from(spot.unit);
        let run = slab.run(unit);
        (slab.starts_at(unit) && run.kind == Kind::Ending && slab.number(unit) == number).then_some(())?;
        self.sums.blocks -= 1;
        self.sums.bytes -= run.bytes();
        Some(())
    }

    /// Frees what waits and is quiet by now (`is_quiet` of a GPU and a stamp); whether anything was. What waits for one GPU is in the
    /// order of its stamps.
    #[inline]
    pub fn release_quiet(&mut self, is_quiet: impl Fn(PlaceId, u64) -> bool) -> bool {
        let mut any = false;
        for queue in 0..self.waiting.len() {
            while let Some(it) = self.waiting[queue].blocks.front().copied().filter(|it| is_quiet(it.gpu, it.stamp)) {
                self.waiting[queue].blocks.pop_front();
                let Some(slab) = self.slab_mut(it.spot).filter(|slab| slab.ground.id == it.slab) else {
                    self.waiting[queue].gone -= 1;
                    continue;
                };
                slab.pending -= 1;
                let of = slab.of;
                self.owners[of].pending -= 1;
                self.free_run(it.spot);
                any = true;
            }
        }
        any
    }

    /// Whether a slab is taken for this context before its freed blocks are waited for: as long as its slabs are little, or no more than so many times the most
    /// that ever lived here. It is as with larger blocks ([`IN_FLIGHT`]): a kernel that waits for the host is never over where the host waits for it.
    pub fn grows_unwaited(&self, owner: u64) -> bool {
        let most = LITTLE.max(IN_FLIGHT * self.sums.peak_bytes);
        self.owners
            .iter()
            .any(|it| it.owner == owner && it.pending > 0 && it.patience.0 == 0 && u64::from(it.frames) * FRAME < most)
    }

    /// Whether any memory of this context's waits.
    pub fn is_any_waiting(&self, owner: u64) -> bool {
        self.owners.iter().any(|it| it.owner == owner && it.pending > 0)
    }

    /// Whether there is a slab that no block stands on.
    pub fn is_any_empty(&self) -> bool {
        self.owners.iter().any(|owner| owner.empty > 0)
    }

    /// Takes every slab out that no block stands on. `is_quiet`: of a GPU and a stamp.
    pub fn take_empty(&mut self, is_quiet: impl Fn(PlaceId, u64) -> bool) -> Vec<Returned> {
        self.release_quiet(is_quiet);
        let slots = 0..self.slabs.len() as u16;
        let is_empty = |slot: &u16| self.slab_in(*slot).is_some_and(|slab| slab.live == 0);
        let empty: Vec<u16> = slots.filter(is_empty).collect();
        empty.into_iter().filter_map(|slot| self.take_out(slot)).collect()
    }

    /// Takes the slab out whose context has ended, with the blocks in it: those whose free is under way are left to who frees.
    pub fn end_slab(&mut self, slot: u16) -> Option<(Vec<Block>, Returned)> {
        let slab = self.slab_in(slot)?;
        let lives = |kind| matches!(kind, Kind::Live | Kind::Ending);
        let runs: Vec<(u32, Run)> = slab.runs().filter(|(_, run)| lives(run.kind)).collect();
        let ended =
            runs.iter().filter(|(_, run)| run.kind == Kind::Live).map(|&(unit, _)| block_of(slab, unit)).collect();
        let (of, live, gpu, frames) = (slab.of, slab.live, slab.ground.gpu, slab.ground.frames);
        self.sums.blocks -= runs.len() as u64;
        self.sums.bytes -= runs.iter().map(|(_, run)| run.bytes()).sum::<u64>();
        if live > 0 {
            // As [`Arena::take_out`] expects it.
            self.owners[of].empty += 1;
            self.sums.empty[gpu.index()] += u64::from(frames);
        }
        let gone = self.take_out(slot)?;
        if self.owners[of].frames == 0 {
            // Another context may have its number's place: lists without runs are all alike.
            self.owners[of].owner = u64::MAX;
        }
        Some((ended, gone))
    }

    /// Lets go of half of what is kept for slabs to come.
    pub fn halve_spare(&mut self) {
        self.spare.truncate(self.spare.len() / 2);
    }

    /// Others have memory of this slab, or one less has: nothing freed in it serves again meanwhile.
    pub fn share(&mut self, slot: u16, more: bool) {
        let Some(slab) = self.slabs.get_mut(usize::from(slot)).and_then(Option::as_mut) else { return };
        let before = slab.shares;
        slab.shares = if more { before + 1 } else { before.saturating_sub(1) };
        let (after, of) = (slab.shares, slab.of);
        if (before == 0) == (after == 0) {
            return;
        }
        let free: Vec<_> = slab.runs().filter(|(_, run)| run.kind == Kind::Free).collect();
        for (unit, run) in free {
            let spot = Spot { slot, unit: unit as u16 };
            if after == 0 { self.link(of, spot, run.units) } else { self.unlink(of, spot, run.units) }
        }
    }

    /// The program asked for a part of this slab to stay where it is.
    pub fn note_asked(&mut self, slot: u16) {
        if let Some(slab) = self.slabs.get_mut(usize::from(slot)).and_then(Option::as_mut) {
            slab.asked = true;
        }
    }

    pub fn sums(&self) -> &Sums {
        &self.sums
    }

    fn slab(&self, spot: Spot) -> Option<&Slab> {
        self.slab_in(spot.slot)
    }

    fn slab_mut(&mut self, spot: Spot) -> Option<&mut Slab> {
        self.slabs.get_mut(usize::from(spot.slot))?.as_mut()
    }

    fn owner(&self, owner: u64, gpu: PlaceId) -> Option<usize> {
        self.owners.iter().position(|it| (it.owner, it.gpu) == (owner, gpu))
    }

    fn owner_or_new(&mut self, owner: u64, gpu: PlaceId) -> usize {
        let vacant = || self.owners.iter().position(|it| it.owner == u64::MAX);
        match self.owner(owner, gpu).or_else(vacant) {
            Some(of) => {
                let it = &mut self.owners[of];
                if it.owner == u64::MAX {
                    (it.owner, it.gpu, it.patience) = (owner, gpu, (0, 0));
                }
                of
            }
            None => {
                self.owners.push(Owner {
                    owner,
                    gpu,
                    bins: Bins::new(),
                    frames: 0,
                    empty: 0,
                    pending: 0,
                    patience: (0, 0),
                });
                self.owners.len() - 1
            }
        }
    }

    /// A slab had no block, and has one.
    fn filled(&mut self, of: usize, gpu: PlaceId, frames: u32) {
        self.owners[of].empty -= 1;
        self.sums.empty[gpu.index()] -= u64::from(frames);
    }

    /// A block is no more, and what it stood on is free; the slab, if it goes back.
    fn settle(&mut self, spot: Spot) -> Option<Returned> {
        self.free_run(spot);
        self.emptied(spot)
    }

    /// One block less in this slab; the slab, if it goes back.
    fn emptied(&mut self, spot: Spot) -> Option<Returned> {
        let slab = self.slab_mut(spot)?;
        slab.live -= 1;
        if slab.live > 0 {
            return None;
        }
        let (of, gpu, frames, is_shared) = (slab.of, slab.ground.gpu, slab.ground.frames, slab.shares > 0);
        self.owners[of].empty += 1;
        self.sums.empty[gpu.index()] += u64::from(frames);
        // What others have serves nobody here any more.
        if is_shared || self.owners[of].empty > 1 { self.take_out(spot.slot) } else { None }
    }

    /// Makes a run free, joined with what is free beside it.
    fn free_run(&mut self, spot: Spot) {
        let Some(slab) = self.slab(spot) else { return };
        let (of, unit) = (slab.of, u32::from(spot.unit));
        let mut start = unit;
        let mut units = slab.run(unit).units;
        let (before, behind) = (slab.free_before(unit), slab.free_at(unit + units));
        if let Some(more) = behind {
            let next = unit + units;
            self.delist(of, Spot { slot: spot.slot, unit: next as u16 }, more);
            if let Some(slab) = self.slab_mut(spot) {
                slab.join(next);
            }
            units += more;
        }
        if let Some((from, more)) = before {
            self.delist(of, Spot { slot: spot.slot, unit: from as u16 }, more);
            if let Some(slab) = self.slab_mut(spot) {
                slab.join(unit);
            }
            start = from;
            units += more;
        }
        if let Some(slab) = self.slab_mut(spot) {
            slab.put(start, Run { units, kind: Kind::Free, slack: 0 });
        }
        self.enlist(of, Spot { slot: spot.slot, unit: start as u16 }, units);
    }

    /// Takes a slab out that no block stands on.
    fn take_out(&mut self, slot: u16) -> Option<Returned> {
        let slab = self.slab_in(slot)?;
        let (of, ground) = (slab.of, slab.ground);
        let free: Vec<_> = slab.runs().filter(|(_, run)| run.kind == Kind::Free).collect();
        for (unit, run) in free {
            self.delist(of, Spot { slot, unit: unit as u16 }, run.units);
        }
        let slab = self.slabs[usize::from(slot)].take()?;
        self.vacant.push(slot);
        let pending = slab.pending;
        let busy = (pending > 0).then_some(ground.gpu);
        self.spare.push(slab.into_cells());
        let owner = &mut self.owners[of];
        owner.pending -= pending;
        owner.frames -= ground.frames;
        owner.empty -= 1;
        self.sums.empty[ground.gpu.index()] -= u64::from(ground.frames);
        self.sums.slabs -= 1;
        self.sums.slab_bytes -= u64::from(ground.frames) * FRAME;
        let queue = &mut self.waiting[ground.gpu.index()];
        queue.gone += pending as usize;
        if queue.gone > MOST_GONE.max(queue.blocks.len() / 2) {
            let is_here = |it: &Waiting| {
                self.slabs[usize::from(it.spot.slot)].as_ref().is_some_and(|slab| slab.ground.id == it.slab)
            };
            queue.blocks.retain(is_here);
            queue.gone = 0;
        }
        Some(Returned { ground, busy })
    }

    /// Puts a free run into its list, unless others have memory of its slab.
    fn enlist(&mut self, of: usize, spot: Spot, units: u32) {
        if self.slab(spot).is_some_and(|slab| slab.shares == 0) {
            self.link(of, spot, units);
        }
    }

    fn delist(&mut self, of: usize, spot: Spot, units: u32) {
        if self.slab(spot).is_some_and(|slab| slab.shares == 0) {
            self.unlink(of, spot, units);
        }
    }

    /// Puts a run at the end of the list of its size.
    fn link(&mut self, of: usize, spot: Spot, units: u32) {
        let list = list(units);
        let word = pack(spot);
        let [_, last] = self.owners[of].bins.ends[list];
        self.set_links(spot, [last, NIL]);
        match last {
            NIL => self.owners[of].bins.ends[list][0] = word,
            last => self.set_link(last, 1, word),
        }
        self.owners[of].bins.ends[list][1] = word;
        self.owners[of].bins.note(list, true);
    }

    fn unlink(&mut self, of: usize, spot: Spot, units: u32) {
        let list = list(units);
        let Some([before, behind]) = self.slab(spot).map(|slab| slab.links(spot.unit)) else { return };
        match before {
            NIL => self.owners[of].bins.ends[list][0] = behind,
            before => self.set_link(before, 1, behind),
        }
        match behind {
            NIL => self.owners[of].bins.ends[list][1] = before,
            behind => self.set_link(behind, 0, before),
        }
        let any = self.owners[of].bins.ends[list][0] != NIL;
        self.owners[of].bins.note(list, any);
    }

    fn set_links(&mut self, spot: Spot, links: [u32; 2]) {
        if let Some(slab) = self.slab_mut(spot) {
            slab.set_links(spot.unit, links);
        }
    }

    fn set_link(&mut self, word: u32, side: usize, to: u32) {
        let spot = unpack(word);
        if let Some(slab) = self.slab_mut(spot) {
            let mut links = slab.links(spot.unit);
            links[side] = to;
            slab.set_links(spot.unit, links);
        }
    }
}

fn block_of(slab: &Slab, unit: u32) -> Block {
    let Ground { start, home, owner, .. } = slab.ground;
    // Relative to the pool's base, which is not known here.
    let address = u64::from(start) * FRAME + u64::from(unit) * UNIT;
    Block { address, bytes: slab.run(unit).bytes(), home, owner, id: slab.number(unit) }
}

fn pack(spot: Spot) -> u32 {
    u32::from(spot.slot) << 16 | u32::from(spot.unit)
}

fn unpack(word: u32) -> Spot {
    Spot { slot: (word >> 16) as u16, unit: word as u16 }
}
