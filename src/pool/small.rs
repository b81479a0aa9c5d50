//! What the pool does with small blocks, which stand on slabs ([`crate::slabs`]).

use crate::arena::Returned;
use crate::bins::LARGEST;
use crate::drive;
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::slab::{FRAMES, Ground, Spot};
use crate::slabs::{Found, Lent};
use crate::state::{Route, State};
use crate::{Allocation, Backend, Block, FRAME, Fault, Free, FreeError, Place, Refusal, Repacks, Request, Usage};

/// A small block, and the slab that was taken for it, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Small {
    /// The block. Always at home.
    pub block: Block,
    /// The new slab's memory: a block that the program never sees.
    pub slab: Option<Allocation>,
}

/// How often a request asks for a slab.
const TRIES: usize = 4;

impl<B: Backend> Pool<B> {
    /// Whether a request is for a small block.
    #[inline]
    pub fn is_small(bytes: u64) -> bool {
        bytes > 0 && bytes < LARGEST
    }

    /// Serves a small block from the slabs of its owner, which lie on its home GPU. `soft_refusal` means nothing here.
    ///
    /// # Errors
    /// See [`Refusal`]: of the slab that would be needed. After a refusal the next requests that need one are refused without a
    /// look.
    pub fn allocate_small(&self, request: &Request) -> Result<Small, Refusal<B::Error>> {
        let (home, route) = self.home_route(request.home).ok_or(Refusal::NotOurs)?;
        if !Self::is_small(request.bytes) {
            return Err(Refusal::NotOurs);
        }
        let own = self.slabs.own();
        if let Some(block) = self.take_small(own, home, request) {
            return Ok(Small { block, slab: None });
        }
        if self.release_waiting(own, home, request.owner, false)?
            && let Some(block) = self.take_small(own, home, request)
        {
            return Ok(Small { block, slab: None });
        }
        // With the GPU full the pool has no slab, or waits for one itself.
        if self.slabs.lock(own).grows_unwaited(request.owner)
            && let Ok(slab) = self.grow_small(own, home, route, request)
            && let Some(block) = self.take_small(own, home, request)
        {
            return Ok(Small { block, slab: Some(slab) });
        }
        if self.release_waiting(own, home, request.owner, true)?
            && let Some(block) = self.take_small(own, home, request)
        {
            return Ok(Small { block, slab: None });
        }
        if !self.slabs.lock(own).may_grow(request.owner, home) {
            return self.take_anywhere(home, request).ok_or(Refusal::Full { missing: request.bytes });
        }
        // Threads that share this arena may be quicker to take what the new slab has.
        for _ in 0..TRIES {
            let slab = match self.grow_small(own, home, route, request) {
                Ok(slab) => slab,
                Err(refusal) => {
                    self.slabs.lock(own).could_not_grow(request.owner, home);
                    return self.take_anywhere(home, request).ok_or(refusal);
                }
            };
            if let Some(block) = self.take_small(own, home, request) {
                return Ok(Small { block, slab: Some(slab) });
            }
        }
        Err(Refusal::Full { missing: request.bytes })
    }

    /// Takes a block of an arena.
    fn take_small(&self, index: usize, home: PlaceId, request: &Request) -> Option<Block> {
        let Request { bytes, owner, .. } = *request;
        let clock = self.slabs.clock(index);
        let mut arena = self.slabs.lock(index);
        arena.release_quiet(|gpu, stamp| stamp <= clock.quiesced(gpu.index()));
        let id = self.front.draw_id(&mut arena.ids);
        let spot = arena.take(owner, home, bytes, id)?;
        Some(self.at_its_address(arena.block(spot, |_| true)?))
    }

    /// Where no slab is to be had: from what other threads' arenas have for this context.
    #[cold]
    fn take_anywhere(&self, home: PlaceId, request: &Request) -> Option<Small> {
        let block = self.slabs.used().skip(1).find_map(|index| self.take_small(index, home, request))?;
        Some(Small { block, slab: None })
    }

    /// Looks whether the home GPU is done with blocks of this context that wait for that in this arena, or `waits` for it; whether any became free.
    fn release_waiting(&self, index: usize, home: PlaceId, owner: u64, waits: bool) -> Result<bool, Refusal<B::Error>> {
        if !self.slabs.lock(index).is_any_waiting(owner) {
            return Ok(false);
        }
        let gpu = self.ordinal(home);
        let clock = self.slabs.clock(index);
        let begun = (clock.now(), self.clock.now());
        if waits {
            match self.backend.quiesce(gpu.as_slice()) {
                Ok(()) => {}
                // Nobody can wait now.
                Err(Fault::NotReady(_)) => return Ok(false),
                Err(fault) => return Err(Refusal::Backend(drive::error_of(fault))),
            }
        } else if !gpu.is_none_or(|gpu| self.backend.has_finished(gpu)) {
            return Ok(false);
        }
        clock.covered(home.index(), begun.0);
        self.clock.covered(home.index(), begun.1);
        let mut arena = self.slabs.lock(index);
        Ok(arena.release_quiet(|gpu, stamp| stamp <= clock.quiesced(gpu.index())))
    }

    /// Takes a slab of the pool, at home, for this arena.
    #[cold]
    fn grow_small(
        &self,
        index: usize,
        home: PlaceId,
        route: &Route,
        request: &Request,
    ) -> Result<Allocation, Refusal<B::Error>> {
        let bytes = u64::from(FRAMES) * FRAME;
        let slab = self.allocate_on(
            &Request {
                bytes,
                soft_refusal: false,
                repacks: Repacks::Never,
                can_ask: false,
                can_widen: false,
                ..*request
            },
            route,
            true,
        )?;
        let Block { address, bytes, id, owner, .. } = slab.block;
        let start = self.frame_at(address).ok_or(Refusal::NotOurs)?;
        let ground = Ground { start, frames: (bytes / FRAME) as u32, id, owner, home: request.home, gpu: home };
        let mut arena = self.slabs.lock(index);
        arena.count_slab(slab.reused);
        let Some(slot) = arena.add(ground) else {
            drop(arena);
            self.return_slab(Returned { ground, busy: None });
            return Err(Refusal::AddressSpace);
        };
        // Its context may have ended meanwhile, and the slab's frames may be somebody else's. Entered under the lock of its record, so
        // that whoever ends it finds it in the table, or has ended it before and nothing is entered.
        if !self.registry.change(start, id, false, |_| self.slabs.enter(index, slot, ground)) {
            arena.end_slab(slot);
            return Err(Refusal::NotOurs);
        }
        self.slabs.note_empty(index, &arena);
        Ok(slab)
    }

    /// Ends the life of a small block; as [`Pool::free`] says.
    pub(crate) fn free_small(&self, frame: u32, address: u64, when: Free) -> Result<Block, FreeError<B::Error>> {
        let (found, spot, block) = self.begin_free_small(frame, address)?;
        let (index, gpu) = (found.index, found.ground.gpu);
        if when == Free::Lazy {
            self.end_lazily(found, spot, block.id);
            return Ok(block);
        }
        drop(found);
        let clock = self.slabs.clock(index);
        let begun = (clock.now(), self.clock.now());
        let answer = match self.accounts.place(gpu) {
            Place::Gpu(ordinal) => self.backend.quiesce_owner(block.owner, ordinal),
            Place::Host(_) | Place::Disk | Place::Pageable => Ok(true),
        };
        if matches!(answer, Ok(true)) {
            clock.covered(gpu.index(), begun.0);
            self.clock.covered(gpu.index(), begun.1);
        }
        // Where its context has ended meanwhile, the block has ended with it, and was left to this free to tell.
        let Some(mut found) = self.slabs.at(frame) else { return Ok(block) };
        let Some(spot) = found.spot(address - self.base) else { return Ok(block) };
        match answer {
            Ok(_) => {
                let gone = found.arena.end(spot, block.id).flatten();
                self.leave(found, gone);
            }
            Err(Fault::NotReady(_)) => self.end_lazily(found, spot, block.id),
            Err(fault) => {
                found.arena.turn(spot, block.id, false);
                return Err(FreeError::Backend(drive::error_of(fault)));
            }
        }
        Ok(block)
    }

    /// Frees a small block in the order of a stream of this GPU; as [`Pool::free_after`] says. One that is not home is asked, and
    /// waited for if it is at work: what is known of a slab that goes back is one GPU, and that is home.
    pub(crate) fn free_small_after(&self, frame: u32, address: u64, gpu: u32) -> Result<Block, FreeError<B::Error>> {
        let (found, spot, block) = self.begin_free_small(frame, address)?;
        if found.ground.home == gpu {
            self.end_lazily(found, spot, block.id);
            return Ok(block);
        }
        drop(found);
        let answer = if self.backend.has_finished(gpu) { Ok(()) } else { self.backend.quiesce(&[gpu]) };
        if let Some(mut found) = self.slabs.at(frame) {
            if let Err(fault) = answer {
                found.arena.turn(spot, block.id, false);
                return Err(FreeError::Backend(drive::error_of(fault)));
            }
            let gone = found.arena.end(spot, block.id).flatten();
            self.leave(found, gone);
        }
        Ok(block)
    }

    /// The block that starts at this address, marked as being freed.
    fn begin_free_small(&self, frame: u32, address: u64) -> Result<(Found<'_>, Spot, Block), FreeError<B::Error>> {
        let mut found = self.slabs.at(frame).ok_or(FreeError::NotABlock)?;
        let spot = found.spot(address - self.base).ok_or(FreeError::NotABlock)?;
        let block = found.arena.block(spot, |_| true).ok_or(FreeError::NotABlock)?;
        let block = self.at_its_address(block);
        found.arena.turn(spot, block.id, true);
        if found.arena.slab_in(spot.slot).is_some_and(|slab| slab.asked) {
            return self.begin_free_of_asked(found, spot, block);
        }
        Ok((found, spot, block))
    }

    /// Where the program asked for a part of the block to stay where it is, that ends with the block.
    #[cold]
    fn begin_free_of_asked<'a>(
        &'a self,
        found: Found<'a>,
        spot: Spot,
        block: Block,
    ) -> Result<(Found<'a>, Spot, Block), FreeError<B::Error>> {
        // The pool's lock comes before that of an arena. The block is marked, so nobody else frees it meanwhile.
        let frame = found.ground.start;
        drop(found);
        self.lock().asked.forget_within(block.address, block.bytes);
        let found = self.slabs.at(frame).filter(|found| found.slot == spot.slot).ok_or(FreeError::NotABlock)?;
        Ok((found, spot, block))
    }

    /// Ends a block that is being freed and that its home may still be at work on.
    fn end_lazily(&self, mut found: Found<'_>, spot: Spot, number: u64) {
        let stamp = self.slabs.clock(found.index).tick();
        let gone = found.arena.end_lazily(spot, number, stamp).flatten();
        self.leave(found, gone);
    }

    /// Gives the arena's lock back, and the slab that left it to the pool.
    fn leave(&self, found: Found<'_>, gone: Option<Returned>) {
        if let Some(gone) = gone {
            self.slabs.forget(gone.ground);
        }
        self.slabs.note_empty(found.index, &found.arena);
        drop(found);
        if let Some(gone) = gone {
            self.return_slab(gone);
        }
    }

    /// A slab that no arena has any more goes back to the pool.
    fn return_slab(&self, gone: Returned) {
        let Ground { start, id, .. } = gone.ground;
        // Otherwise its context has ended, and whoever ended that has it.
        if let Some(record) = self.registry.claim_slab(start, id) {
            self.retire(start, &record, gone.busy);
        }
    }

    /// Every slab without blocks goes back. The caller holds the pool's lock.
    pub(crate) fn return_empty_slabs(&self, state: &mut State<B::Handle>) {
        for Returned { ground: Ground { start, id, .. }, busy } in self.slabs.take_empty() {
            let Some(record) = self.registry.claim_slab(start, id) else { continue };
            if record.is_out() {
                let freed = state.freed_now(busy);
                state.hold_back(start, &record, freed);
            } else {
                state.retire_block(start, &record, busy);
            }
        }
    }

    /// A slab's context has ended, and its record is gone: so is the slab, and the blocks in it, which are returned.
    pub(crate) fn drop_slab(&self, start: u32, id: u64) -> Vec<Block> {
        let Some(mut found) = self.slabs.at(start).filter(|found| found.ground.id == id) else { return Vec::new() };
        let slot = found.slot;
        let Some((ended, gone)) = found.arena.end_slab(slot) else { return Vec::new() };
        self.slabs.forget(gone.ground);
        self.slabs.note_empty(found.index, &found.arena);
        ended.into_iter().map(|block| self.at_its_address(block)).collect()
    }

    /// The live small block that an address lies in; `None` where its frame is no slab's.
    pub(crate) fn small_at(&self, address: u64) -> Option<Option<Block>> {
        let frame = self.frame_at(address).filter(|&frame| self.slabs.has(frame))?;
        let found = self.slabs.at(frame)?;
        let around = found.arena.around(found.slot, found.unit(address - self.base));
        let block = around.map(|(_, block)| self.at_its_address(block));
        Some(block.filter(|block| address - block.address < block.bytes))
    }

    /// The slab below an address, and the small block there.
    pub(crate) fn ground_at(&self, address: u64) -> Option<(Ground, Block)> {
        let frame = self.frame_at(address).filter(|&frame| self.slabs.has(frame))?;
        let found = self.slabs.at(frame)?;
        let (_, block) = found.arena.around(found.slot, found.unit(address - self.base))?;
        Some((found.ground, self.at_its_address(block)))
    }

    /// Another process is about to get the small block that starts at `address` and has this number; as [`Pool::hold`] says,
    /// for all of its slab.
    pub(crate) fn hold_small(&self, frame: u32, address: u64, id: u64) -> Option<Block> {
        let mut found = self.slabs.at(frame)?;
        let spot = found.spot(address - self.base)?;
        let block = found.arena.block(spot, |number| number == id)?;
        let ground = found.ground;
        if !self.registry.change(ground.start, ground.id, false, |record| record.holds += 1) {
            return None;
        }
        found.arena.share(found.slot, true);
        self.slabs.lent.lock().entry(id).or_insert(Lent { ground, times: 0 }).times += 1;
        Some(self.at_its_address(block))
    }

    /// That process has it no more; whether there was such a block.
    pub(crate) fn let_go_small(&self, id: u64) -> bool {
        let ground = {
            let mut lent = self.slabs.lent.lock();
            let Some(of) = lent.get_mut(&id) else { return false };
            of.times -= 1;
            let Lent { ground, times } = *of;
            if times == 0 {
                lent.remove(&id);
            }
            ground
        };
        // Under the lock, so that a slab which ends at this moment is found in one of the two places, or will be soon.
        let mut state = self.lock();
        if !self.registry.change(ground.start, ground.id, true, |record| record.holds = record.holds.saturating_sub(1))
        {
            state.let_go(ground.id);
            return true;
        }
        drop(state);
        self.share_slab(ground, false);
        true
    }

    /// Others have memory of this slab, or one less has.
    pub(crate) fn share_slab(&self, ground: Ground, more: bool) {
        if let Some(mut found) = self.slabs.at(ground.start).filter(|found| found.ground.id == ground.id) {
            let slot = found.slot;
            found.arena.share(slot, more);
        }
    }

    /// The program asked for a part of this slab to stay where it is.
    pub(crate) fn note_asked(&self, ground: Ground) {
        if let Some(mut found) = self.slabs.at(ground.start).filter(|found| found.ground.id == ground.id) {
            let slot = found.slot;
            found.arena.note_asked(slot);
        }
    }

    /// Puts small blocks into the place of their slabs. The caller holds the pool's lock.
    ///
    /// What all threads had at once at most nobody knows, since they do not meet. It is no more than what each had at most, with the
    /// most that larger blocks had (`peak_large`), and no more than if slabs counted whole; `left_out` of what lives makes no peak.
    pub(crate) fn count_small(&self, usage: &mut Usage, peak_large: u64, left_out: u64) {
        let Some(small) = self.slabs.sums() else { return };
        usage.live_blocks = (usage.live_blocks + small.blocks).saturating_sub(small.slabs);
        usage.live_bytes = (usage.live_bytes + small.bytes).saturating_sub(small.slab_bytes);
        let least = usage.live_bytes.saturating_sub(left_out);
        usage.peak_live_bytes = usage.peak_live_bytes.min(peak_large + small.peak_bytes).max(least);
        usage.allocations = (usage.allocations + small.allocations).saturating_sub(small.taken);
        usage.reuses = (usage.reuses + small.allocations).saturating_sub(small.grown + small.reused);
        for (place, frames) in usage.places.iter_mut().zip(&small.empty) {
            place.used -= frames * FRAME;
        }
    }

    fn home_route(&self, home: u32) -> Option<(PlaceId, &Route)> {
        let route = self.home_routes.iter().find(|route| route.ordinal == home)?;
        Some((route.home, route))
    }

    /// An arena knows where a block lies from the pool's first byte on.
    fn at_its_address(&self, block: Block) -> Block {
        Block { address: self.base + block.address, ..block }
    }
}
