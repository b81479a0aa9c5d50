//! The pool's operations: look at the state under the lock, call the backend without it, come back with the outcome.

use crate::budget::PlaceId;
use crate::drive::{self, Broken, Cause, Retired};
use crate::plan::{Attempt, Growth, Step};
use crate::runs::Kind;
use crate::state::{Leaving, Route, State, bytes_of};
use crate::{
    Allocation, Backend, Block, Config, FRAME, Fault, Free, FreeError, Place, Refusal, Request, Usage, placement,
};
use parking_lot::{Mutex, MutexGuard};

/// How often a growth is planned anew before the request is given up, for each place. Every failed one lowers a ceiling, so
/// this only ends the dispute with a driver whose answers keep changing.
const PLANS_PER_PLACE: usize = 8;

/// Spin hints between two looks at a lock that is taken, about 4 µs in all.
const PAUSES: [u32; 6] = [4, 8, 16, 32, 64, 128];

/// One process's memory: blocks of any size over many places, at addresses that never change.
///
/// All methods may be called from any thread. None holds a lock while it calls the backend.
pub struct Pool<B: Backend> {
    backend: B,
    base: u64,
    bytes: u64,
    places: Vec<Place>,
    routes: Vec<Route>,
    state: Mutex<State<B::Handle>>,
}

impl<B: Backend> Pool<B> {
    /// A pool that holds nothing yet. It makes no call to `backend`; `config.base..config.base + config.bytes` is reserved
    /// already and stays so as long as the pool lives.
    pub fn new(config: Config, backend: B) -> Self {
        Self {
            backend,
            base: config.base,
            bytes: config.bytes,
            places: config.places.iter().map(|spec| spec.place).collect(),
            routes: Route::all(&config),
            state: Mutex::new(State::new(&config)),
        }
    }

    /// Who owns the memory.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Whether `address` lies in the reservation, mapped or not. Two comparisons, no lock.
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < self.bytes
    }

    /// Serves a block: from freed memory if there is a fit where the policy would put it, else from new memory
    /// (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess`).
    ///
    /// # Errors
    /// See [`Refusal`]. Whatever was begun is undone.
    pub fn allocate(&self, request: &Request) -> Result<Allocation, Refusal<B::Error>> {
        let route = self.routes.iter().find(|route| route.ordinal == request.home).ok_or(Refusal::NotOurs)?;
        if request.bytes == 0 {
            return Err(Refusal::NotOurs);
        }
        let bytes = placement::round_up(request.bytes);
        let mut attempt = Attempt {
            request,
            route,
            bytes,
            headrooms: Vec::new(),
            only_quiesced: false,
            believed: false,
            trimmed: false,
        };
        let mut plans_left = PLANS_PER_PLACE * self.places.len();
        loop {
            let step = self.lock().plan(&mut attempt);
            match step {
                Step::Done(allocation) => return Ok(allocation),
                Step::Refuse(refusal) => return Err(refusal),
                Step::Ask(place) => attempt.headrooms.push(self.backend.headroom(place)),
                Step::Settle => {
                    // The other thread is inside the driver and holds nothing that this one has.
                    std::thread::yield_now();
                    attempt.headrooms.clear();
                }
                Step::Trim => {
                    self.trim(None, None);
                    attempt.trimmed = true;
                }
                Step::Quiesce => {
                    attempt.only_quiesced = true;
                    self.quiesce_if_possible().map_err(Refusal::Backend)?;
                }
                Step::Wait(taken, begun) => match self.backend.quiesce() {
                    Ok(()) => {
                        let mut state = self.lock();
                        state.quiesced = state.quiesced.max(begun);
                        return Ok(state.award(&taken, request, route, true, 0));
                    }
                    Err(fault) => {
                        self.lock().put_back(&taken);
                        if !matches!(fault, Fault::NotReady(_)) {
                            return Err(Refusal::Backend(drive::error_of(fault)));
                        }
                        attempt.only_quiesced = true;
                    }
                },
                Step::Grow(growth) => match self.grow(growth, &attempt) {
                    Ok(allocation) => return Ok(allocation),
                    Err(Cause::Failed(error)) => return Err(Refusal::Backend(error)),
                    Err(cause) => {
                        plans_left -= 1;
                        if plans_left == 0 {
                            return Err(match cause {
                                Cause::OutOfMemory(error) | Cause::Unavailable(error) => Refusal::Backend(error),
                                _ => Refusal::Full { missing: bytes },
                            });
                        }
                        // The answers were wrong, or are by now.
                        attempt.headrooms.clear();
                    }
                },
            }
        }
    }

    /// Ends the life of the block that starts at `address`.
    ///
    /// [`Free::Strict`] returns when no work submitted before can touch the memory any more; inside a stream capture,
    /// where nobody can wait, it turns into [`Free::Lazy`].
    ///
    /// # Errors
    /// See [`FreeError`]. Of several frees of one block at the same time exactly one succeeds.
    pub fn free(&self, address: u64, when: Free) -> Result<Block, FreeError<B::Error>> {
        let frame = self.frame_at(address).filter(|_| address.is_multiple_of(FRAME)).ok_or(FreeError::NotABlock)?;
        let mut state = self.lock();
        let run = *state.runs.starting_at(frame).ok_or(FreeError::NotABlock)?;
        let Kind::Live(owned) = run.kind else {
            return Err(FreeError::NotABlock);
        };
        let block = state.block_of(&run).ok_or(FreeError::NotABlock)?;
        if when == Free::Lazy {
            let generation = state.next_generation();
            state.retire_block(&run, &owned, generation);
            return Ok(block);
        }
        state.runs.set_kind(frame, Kind::Freeing(owned));
        let begun = state.generation;
        drop(state);
        let answer = self.backend.quiesce();
        let mut state = self.lock();
        let generation = match answer {
            Ok(()) => {
                state.quiesced = state.quiesced.max(begun);
                begun
            }
            Err(Fault::NotReady(_)) => state.next_generation(),
            Err(fault) => {
                state.runs.set_kind(frame, Kind::Live(owned));
                return Err(FreeError::Backend(drive::error_of(fault)));
            }
        };
        state.retire_block(&run, &owned, generation);
        Ok(block)
    }

    /// Frees every block of `owner` (its context is gone, and its work with it); returns how many there were. A block
    /// whose free is under way in another thread is left to that thread.
    pub fn free_owned_by(&self, owner: u64) -> usize {
        let mut state = self.lock();
        let live = |kind: Kind| match kind {
            Kind::Live(owned) if owned.owner == owner => Some(owned),
            _ => None,
        };
        let blocks: Vec<_> = state.runs.all().filter_map(|run| Some((*run, live(run.kind)?))).collect();
        for (run, owned) in &blocks {
            let generation = state.next_generation();
            state.retire_block(run, owned, generation);
        }
        blocks.len()
    }

    /// The live block that `address` lies in, inner addresses included. What is behind its last byte in its last frame
    /// counts as inside.
    pub fn block_at(&self, address: u64) -> Option<Block> {
        let frame = self.frame_at(address)?;
        let state = self.lock();
        state.block_of(state.runs.around(frame)?)
    }

    /// Where each piece of the block that `address` lies in is: `(address, bytes, place)` in address order, neighbours at
    /// one place merged, in whole frames. Empty if there is no such block.
    pub fn pieces(&self, address: u64) -> Vec<(u64, u64, Place)> {
        let Some(frame) = self.frame_at(address) else {
            return Vec::new();
        };
        let state = self.lock();
        let Some(run) = state.runs.around(frame).filter(|run| state.block_of(run).is_some()) else {
            return Vec::new();
        };
        let segments = state.chunks.segments(run.start, run.end());
        segments.into_iter().map(|(at, frames, id)| (state.address(at), bytes_of(frames), state.place(id))).collect()
    }

    /// Returns freed memory to the driver in whole chunks (`cuMemUnmap`, `cuMemRelease`), the longest unused first: at
    /// `place` or everywhere, at least `bytes` or all. Returns the bytes returned.
    ///
    /// Waits for the device if lazily freed memory is needed for that. Inside a stream capture, where nobody can wait, it
    /// returns only what is known to be quiet.
    pub fn trim(&self, place: Option<Place>, bytes: Option<u64>) -> u64 {
        let wanted = bytes.unwrap_or(u64::MAX);
        let zombies = std::mem::take(&mut self.lock().zombies);
        let mut returned = 0;
        for zombie in zombies {
            let retired = drive::bury(&self.backend, self.base, zombie);
            let mut state = self.lock();
            for chunk in &retired.gone {
                state.account(chunk.place).unstick(bytes_of(chunk.frames));
                if place.is_none_or(|place| state.place(chunk.place) == place) {
                    returned += bytes_of(chunk.frames);
                }
            }
            state.count_trimmed(retired.gone.iter().map(|chunk| bytes_of(chunk.frames)).sum());
            state.zombies.extend(retired.zombies);
        }
        let targets: Vec<PlaceId> = PlaceId::all(self.places.len())
            .filter(|id| place.is_none_or(|place| self.places[id.index()] == place))
            .collect();
        // First what is known to be quiet; the device is waited for only if that was not enough.
        for quiet_first in [true, false] {
            if !quiet_first {
                let needed = {
                    let state = self.lock();
                    targets.iter().any(|&id| state.evictable(id, u64::MAX) > 0)
                };
                if returned >= wanted || !needed || self.quiesce().is_err() {
                    break;
                }
            }
            for &id in &targets {
                if returned >= wanted {
                    break;
                }
                let leaving = {
                    let mut state = self.lock();
                    let quiesced = state.quiesced;
                    state.evict(id, wanted - returned, quiesced)
                };
                let gone = self.send_back(leaving, &mut []);
                if gone > 0 {
                    self.lock().account(id).forget_ceiling();
                }
                returned += gone;
            }
        }
        returned
    }

    /// The pool in numbers, exact at the moment of the call.
    pub fn usage(&self) -> Usage {
        self.lock().usage()
    }

    /// `(free, total)` bytes that a program whose home is this GPU can count on: the lending GPUs, not the host. Both 0
    /// if `home` is not a place of this pool.
    pub fn memory_info(&self, home: u32) -> (u64, u64) {
        let Some(route) = self.routes.iter().find(|route| route.ordinal == home) else {
            return (0, 0);
        };
        let gpus = &route.order[..route.gpus];
        let headrooms: Vec<_> = gpus.iter().map(|id| self.backend.headroom(self.places[id.index()])).collect();
        let state = self.lock();
        let accounts = gpus.iter().map(|id| &state.accounts[id.index()]);
        accounts.zip(headrooms).fold((0u64, 0u64), |(free, total), (account, headroom)| {
            (free.saturating_add(account.room(headroom)), total.saturating_add(account.usage().limit))
        })
    }

    /// Sees a planned growth through, or takes it back.
    fn grow(&self, mut growth: Growth<B::Handle>, attempt: &Attempt) -> Result<Allocation, Cause<B::Error>> {
        let leaving = std::mem::take(&mut growth.leaving);
        if !leaving.is_empty() {
            self.send_back(leaving, &mut growth.credits);
            let mut state = self.lock();
            // What did not go is nothing to count on.
            for &(place, bytes) in &growth.credits {
                state.account(place).repay(bytes);
            }
            if growth.pieces.iter().any(|(place, _)| state.account(*place).is_overdrawn()) {
                state.withdraw(&growth);
                state.space.give(growth.start, growth.frames);
                return Err(Cause::Overdrawn);
            }
        }
        match drive::build(&self.backend, self.base, &growth, |id| self.places[id.index()]) {
            Ok(chunks) => {
                let mut state = self.lock();
                for chunk in chunks {
                    state.chunks.insert(chunk);
                }
                Ok(state.deliver(&growth, attempt))
            }
            Err(Broken { cause, place, created, retired }) => {
                let mut state = self.lock();
                state.withdraw(&growth);
                match cause {
                    Cause::OutOfMemory(_) => state.account(place).ran_out(created),
                    Cause::Unavailable(_) => state.account(place).close(),
                    Cause::Failed(_) | Cause::Overdrawn => {}
                }
                let mut lost = 0;
                for zombie in &retired.zombies {
                    for chunk in &zombie.chunks {
                        state.account(chunk.place).strand(bytes_of(chunk.frames));
                        lost += if zombie.mapped { chunk.frames } else { 0 };
                    }
                }
                state.space.give(growth.start + lost, growth.frames - lost);
                state.zombies.extend(retired.zombies);
                Err(cause)
            }
        }
    }

    /// Returns evicted chunks to the driver; returns the bytes that went. `credits` are paid back as they go.
    fn send_back(&self, leaving: Vec<Leaving<B::Handle>>, credits: &mut [(PlaceId, u64)]) -> u64 {
        let mut sum = 0;
        for row in leaving {
            let (start, frames) = (row.start, row.frames);
            let Retired { gone, zombies, unmapped } = drive::dismantle(&self.backend, self.base, row);
            let mut state = self.lock();
            for chunk in &gone {
                let bytes = bytes_of(chunk.frames);
                state.account(chunk.place).left(bytes, 0);
                if let Some((place, credit)) = credits.iter_mut().find(|(place, _)| *place == chunk.place) {
                    let paid = bytes.min(*credit);
                    state.account(*place).repay(paid);
                    *credit -= paid;
                }
                sum += bytes;
            }
            for chunk in zombies.iter().flat_map(|zombie| &zombie.chunks) {
                state.account(chunk.place).left(0, bytes_of(chunk.frames));
            }
            if unmapped {
                state.space.give(start, frames);
            }
            state.count_trimmed(gone.iter().map(|chunk| bytes_of(chunk.frames)).sum());
            state.zombies.extend(zombies);
        }
        sum
    }

    /// The lock. It is held for less than a cache line takes to change cores and come back, so threads that look for it all
    /// the time slow down the one that works more than they gain. A thread that finds it taken stays away for a while,
    /// twice as long each time, and sleeps when that did not help.
    fn lock(&self) -> MutexGuard<'_, State<B::Handle>> {
        for pause in PAUSES {
            if let Some(state) = self.state.try_lock() {
                return state;
            }
            for _ in 0..pause {
                std::hint::spin_loop();
            }
        }
        self.state.lock()
    }

    /// Waits for the device; everything freed before the call is quiet after it.
    fn quiesce(&self) -> Result<(), Fault<B::Error>> {
        let begun = self.lock().generation;
        self.backend.quiesce()?;
        let mut state = self.lock();
        state.quiesced = state.quiesced.max(begun);
        Ok(())
    }

    /// The same, where it is no failure that the device can not be waited for now.
    fn quiesce_if_possible(&self) -> Result<(), B::Error> {
        match self.quiesce() {
            Ok(()) | Err(Fault::NotReady(_)) => Ok(()),
            Err(fault) => Err(drive::error_of(fault)),
        }
    }

    fn frame_at(&self, address: u64) -> Option<u32> {
        let frame = address.checked_sub(self.base)? / FRAME;
        u32::try_from(frame).ok()
    }
}
