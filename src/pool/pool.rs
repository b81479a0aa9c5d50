//! The pool's operations: look at the state under the lock, call the backend without it, come back with the outcome.

use crate::chunks::Chunk;
use crate::clock::Clock;
use crate::drive::{self, Broken, Cause};
use crate::front::{Front, Popped, Push};
use crate::magazine::Miss;
use crate::next_step::{Attempt, Fresh, Growth, Step};
use crate::place::PlaceId;
use crate::registry::{KEPT_BLOCK, Record, Registry};
use crate::runs::{Kind, Run};
use crate::slabs::Slabs;
use crate::state::{Route, State, Taken, bytes_of};
use crate::sync::{self, Apart, Mutex, MutexGuard};
use crate::{
    Accounts, Allocation, Backend, Block, Config, FRAME, Fault, Free, FreeError, Place, Refusal, Repacks, Request,
    Usage,
};
use std::sync::Arc;

/// How often a growth is planned anew before the request is given up, for each place. Every failed one lowers a ceiling, so
/// this only ends the dispute with a driver whose answers keep changing.
const PLANS_PER_PLACE: usize = 8;

/// Spin hints between two looks at a lock that is taken, about 4 µs in all.
const PAUSES: [u32; 6] = [4, 8, 16, 32, 64, 128];

/// How far a request got.
enum Served<B: Backend> {
    Block(Allocation),
    NotYet(Step<B::Handle, B::Error>),
}

/// One process's memory: blocks of any size over many places, at addresses that never change.
///
/// All methods may be called from any thread. None holds a lock while it calls the backend.
pub struct Pool<B: Backend> {
    pub(crate) backend: B,
    pub(crate) base: u64,
    bytes: u64,
    pub(crate) largest_chunk: u64,
    pub(crate) accounts: Arc<Accounts>,
    pub(crate) routes: Vec<Route>,
    /// Those that end where they begin: what goes on them stays at home.
    pub(crate) home_routes: Vec<Route>,
    /// Those without home.
    away_routes: Vec<Route>,
    /// The GPUs of these.
    peer_routes: Vec<Route>,
    pub(crate) registry: Registry,
    pub(crate) front: Front,
    pub(crate) slabs: Slabs,
    /// The state's clock, which is read without the lock.
    pub(crate) clock: Arc<Clock>,
    /// Whoever takes its lock does not slow down those who read what is beside it.
    state: Apart<Mutex<State<B::Handle>>>,
}

impl<B: Backend> Pool<B> {
    /// A pool that holds nothing yet. It makes no call to `backend`; `config.base..config.base + config.bytes` is reserved
    /// already and stays so as long as the pool lives.
    pub fn new(config: Config, backend: B) -> Self {
        let state = State::new(&config);
        Self {
            backend,
            base: config.base,
            bytes: config.bytes,
            largest_chunk: config.largest_chunk,
            accounts: Arc::clone(&config.accounts),
            routes: Route::all(&config),
            home_routes: Route::all(&config).into_iter().map(Route::home_only).collect(),
            away_routes: Route::all(&config).into_iter().map(Route::away).collect(),
            peer_routes: Route::all(&config).into_iter().map(Route::away).map(Route::gpus_only).collect(),
            registry: Registry::new(config.bytes / FRAME),
            front: Front::new(&config, Arc::clone(state.runs.sizes()), Arc::clone(state.chunks.places())),
            slabs: Slabs::new(config.bytes / FRAME, config.accounts.specs().len()),
            clock: Arc::clone(&state.clock),
            state: Apart(Mutex::new(state)),
        }
    }

    /// Who owns the memory.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Who has how much of each place, the pool among others.
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
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
        self.allocate_on(request, route, false)
    }

    /// The same where home is not among the places. Nobody is told to give a cache back or to cut half-used chunks anew for it, and
    /// nothing that is kept goes back where there is no room.
    ///
    /// # Errors
    /// See [`Refusal`]. Whatever was begun is undone.
    pub fn allocate_away(&self, request: &Request) -> Result<Allocation, Refusal<B::Error>> {
        self.allocate_elsewhere(request, &self.away_routes)
    }

    /// The same where home alone is.
    ///
    /// # Errors
    /// See [`Refusal`]. Whatever was begun is undone.
    pub fn allocate_at_home(&self, request: &Request) -> Result<Allocation, Refusal<B::Error>> {
        self.allocate_elsewhere(request, &self.home_routes)
    }

    /// The same where only other GPUs are, and the host is none of them either.
    ///
    /// # Errors
    /// See [`Refusal`]. Whatever was begun is undone.
    pub fn allocate_on_peers(&self, request: &Request) -> Result<Allocation, Refusal<B::Error>> {
        self.allocate_elsewhere(request, &self.peer_routes)
    }

    fn allocate_elsewhere(&self, request: &Request, routes: &[Route]) -> Result<Allocation, Refusal<B::Error>> {
        let route = routes.iter().find(|route| route.ordinal == request.home).ok_or(Refusal::NotOurs)?;
        self.allocate_on(
            &Request { soft_refusal: false, repacks: Repacks::Never, can_ask: false, can_widen: false, ..*request },
            route,
            false,
        )
    }

    /// The same where the places are these; `slab`: for small blocks to stand on.
    pub(crate) fn allocate_on(
        &self,
        request: &Request,
        route: &Route,
        slab: bool,
    ) -> Result<Allocation, Refusal<B::Error>> {
        if request.bytes == 0 {
            return Err(Refusal::NotOurs);
        }
        let mut attempt = Attempt::new(request, route, slab);
        let bytes = attempt.bytes;
        let mut plans_left = PLANS_PER_PLACE * self.accounts.specs().len();
        // What the front keeps lies at home.
        let kept = if route.has_home { self.serve_kept(&mut attempt)? } else { None };
        let mut next = match kept {
            Some(served) => served,
            None => self.next_step(&mut attempt),
        };
        loop {
            let step = match next {
                Served::Block(allocation) => return Ok(allocation),
                Served::NotYet(step) => step,
            };
            match step {
                Step::Done(taken) => {
                    let mut state = self.lock();
                    return Ok(self.award(&mut state, &taken, &attempt, true, 0));
                }
                Step::Refuse(refusal) => return Err(refusal),
                Step::Ask(place) => attempt.headrooms.push(self.backend.headroom(place)),
                Step::Settle => {
                    // The other thread is inside the driver and holds nothing that this one has.
                    sync::yield_now();
                    attempt.headrooms.clear();
                }
                Step::Trim => {
                    self.trim(None, None, &[request.home]);
                    attempt.trimmed = true;
                    attempt.headrooms.clear();
                }
                Step::Quiesce => {
                    attempt.only_quiesced = true;
                    self.quiesce_if_possible(route.home).map_err(Refusal::Backend)?;
                }
                Step::Look(gpus) => gpus.into_iter().for_each(|gpu| self.look(gpu)),
                Step::Wait(taken) => {
                    if taken.has_other {
                        if let Some(allocation) = self.serve_if_quiet(&taken, &mut attempt) {
                            return Ok(allocation);
                        }
                        next = self.next_step(&mut attempt);
                        continue;
                    }
                    match self.quiesce(self.front.own(), &[route.home]) {
                        Ok(()) => {
                            let mut state = self.lock();
                            return Ok(self.award(&mut state, &taken, &attempt, true, 0));
                        }
                        Err(fault) => {
                            self.lock().put_back(&taken);
                            if !matches!(fault, Fault::NotReady(_)) {
                                return Err(Refusal::Backend(drive::error_of(fault)));
                            }
                            attempt.only_quiesced = true;
                        }
                    }
                }
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
                        if matches!(cause, Cause::OutOfMemory(_)) {
                            self.wait_for_moves();
                        }
                        // The answers were wrong, or are by now.
                        attempt.headrooms.clear();
                    }
                },
            }
            next = self.next_step(&mut attempt);
        }
    }

    /// Serves the request with what was taken if the GPU turns out to be done with it, else with other memory at home that is quiet. `None`
    /// where there is none either: `taken` is put back, and the request is to have new memory, if there is any.
    fn serve_if_quiet(&self, taken: &Taken, attempt: &mut Attempt) -> Option<Allocation> {
        let home = attempt.route.home;
        self.look(home);
        let mut state = self.lock();
        if state.has_become_quiet(taken) {
            return Some(self.award(&mut state, taken, attempt, true, 0));
        }
        let instead = state.take_quiet(home, taken.frames);
        state.put_back(taken);
        if instead.is_none() {
            attempt.fresh = Fresh::Wanted;
        }
        Some(self.award(&mut state, &instead?, attempt, true, 0))
    }

    /// Looks at the state, with all free memory in it, for the next step; awards a block that can be had at once.
    fn next_step(&self, attempt: &mut Attempt) -> Served<B> {
        let mut state = self.lock_all();
        let step = state.next_step(attempt, &self.registry);
        if let Step::Done(taken) = step {
            return Served::Block(self.award(&mut state, &taken, attempt, true, 0));
        }
        self.open_front_unless_watched(&state, attempt.route);
        Served::NotYet(step)
    }

    /// Serves the request with a freed block that fits exactly: kept by this thread's shard, among the free runs, or kept
    /// by another shard. `None` if there is none, or none that can be waited for now.
    fn serve_kept(&self, attempt: &mut Attempt) -> Result<Option<Served<B>>, Refusal<B::Error>> {
        let Attempt { request, route, .. } = *attempt;
        let Some(frames) = u32::try_from(attempt.bytes / FRAME).ok().filter(|_| self.front.is_open(route.home)) else {
            return Ok(None);
        };
        if !self.front.takes(route.home, frames) {
            return Ok(self.serve_free(attempt, frames));
        }
        let mut answer = self.front.pop(route.home, frames, request.bytes);
        if answer.is_err_and(|miss| miss == Miss::NoCredit) {
            let mut state = self.lock();
            if state.lend(request.bytes) {
                self.note_large(&mut state, attempt);
                self.front.lend(request.bytes);
                drop(state);
                answer = self.front.pop(route.home, frames, request.bytes);
            }
        }
        let popped = match answer {
            Ok(popped) => popped,
            Err(Miss::NoCredit) => return Ok(None),
            Err(Miss::NoFit) => {
                if let Some(served) = self.serve_free(attempt, frames) {
                    return Ok(Some(served));
                }
                match self.front.steal(route.home, frames, request.bytes) {
                    Some(popped) => popped,
                    None => return Ok(None),
                }
            }
        };
        let Popped { start, id, shard, mut busy, .. } = popped;
        let put_back = |state: &mut State<B::Handle>| {
            self.front.unserve(&popped);
            state.settle(request.bytes);
            let freed = state.freed_now(Some(route.home));
            state.take_back(start, frames, freed);
        };
        if busy {
            // Mostly it is done. To see first whether there is other memory would save a question before some waits, and have all threads meet at
            // the pool's lock in each pair.
            self.look_for(shard, route.home);
            busy = self.front.is_busy(&popped, route.home);
        }
        if busy && (self.front.has_quiet(shard, route.home, frames) || self.lock().has_other(attempt, frames)) {
            let mut state = self.lock();
            let instead = state.take_quiet(route.home, frames);
            put_back(&mut state);
            let Some(instead) = instead else {
                attempt.fresh = Fresh::Wanted;
                return Ok(None);
            };
            let allocation = self.award(&mut state, &instead, attempt, true, 0);
            return Ok(Some(Served::Block(allocation)));
        }
        if busy && let Err(fault) = self.quiesce(shard, &[route.home]) {
            let mut state = self.lock();
            put_back(&mut state);
            if !matches!(fault, Fault::NotReady(_)) {
                return Err(Refusal::Backend(drive::error_of(fault)));
            }
            attempt.only_quiesced = true;
            return Ok(None);
        }
        Ok(Some(Served::Block(self.begin(start, frames, id, attempt))))
    }

    /// Frames at home, which are the caller's alone and served before, are a block from here on.
    fn begin(&self, start: u32, frames: u32, id: u64, attempt: &Attempt) -> Allocation {
        let record = Record::new(attempt.request, attempt.route.home, frames, id).for_slab(attempt.slab);
        self.registry.enter(start, record);
        Allocation { block: record.block(self.address(start)), reused: true, on_peers: 0, on_host: 0 }
    }

    /// Serves the request with the best fit among the free runs, and leaves what shards keep there: a large block takes no memory from
    /// threads at work on small ones, as long as there is a fit without.
    fn serve_free(&self, attempt: &Attempt, frames: u32) -> Option<Served<B>> {
        let Attempt { request, route, .. } = *attempt;
        if !self.front.may_be_free(route.home, frames) {
            return None;
        }
        let mut state = self.lock();
        let taken = state.take_below_peaks(route.home, frames, request.bytes)?;
        if !taken.busy {
            // The front is open and nothing is near a peak, so the state has nothing more to say. The record is on a line of its own, which may
            // have to be fetched: others need not wait for that.
            state.award_at_home(route.home, request.bytes);
            self.note_large(&mut state, attempt);
            drop(state);
            return Some(Served::Block(self.begin(taken.start, frames, self.front.next_id(), attempt)));
        }
        Some(match state.hand_out(taken, attempt) {
            Step::Done(taken) => Served::Block(self.award(&mut state, &taken, attempt, true, 0)),
            step => Served::NotYet(step),
        })
    }

    /// Makes `taken` a block. The sums may only rise above their peaks while nothing is kept; see [`crate::front`].
    fn award(
        &self,
        state: &mut State<B::Handle>,
        taken: &Taken,
        attempt: &Attempt,
        reused: bool,
        headroom: u64,
    ) -> Allocation {
        let Attempt { request, route, .. } = *attempt;
        if !state.is_award_below_peaks(taken, request.bytes) {
            self.front.drain(state);
        }
        let record = Record::new(request, route.home, taken.frames, self.front.next_id()).for_slab(attempt.slab);
        let block = record.block(self.address(taken.start));
        let (on_peers, on_host) = state.award(taken, request, route, reused, headroom);
        self.note_large(state, attempt);
        self.open_front_unless_watched(state, route);
        self.registry.enter(taken.start, record);
        Allocation { block, reused, on_peers, on_host }
    }

    /// Has the state note what is out without slabs, of which this attempt's is one more, if it is for one.
    fn note_large(&self, state: &mut State<B::Handle>, attempt: &Attempt) {
        let own = if attempt.slab { attempt.request.bytes } else { 0 };
        state.note_large(self.slabs.bytes() + own);
    }

    /// Lets the front serve blocks of this home GPU as long as nothing about them matters to its account.
    fn open_front_unless_watched(&self, state: &State<B::Handle>, route: &Route) {
        let budget = &state.budgets[route.home.index()];
        self.front.set_open(route.home, !budget.is_watched() && !budget.is_beyond_limit());
    }

    /// The terms of a place have changed ([`Accounts::set_limit`], [`Accounts::close`], [`Accounts::lend`]): nothing that is at hand
    /// without the lock is served past them from here on.
    pub fn heed_accounts(&self) {
        let state = self.lock_all();
        self.routes.iter().for_each(|route| self.open_front_unless_watched(&state, route));
    }

    /// Others have given memory of a place back: that it ran out before its limit is forgotten.
    pub fn has_room_again(&self, place: Place) {
        let mut state = self.lock_all();
        if let Some(place) = state.id_of(place) {
            state.budget(place).forget_ceiling();
        }
    }

    /// Ends the life of the block that starts at `address`.
    ///
    /// [`Free::Strict`] returns when the block's home GPU cannot touch the memory any more by work submitted before; where
    /// the backend cannot wait now, it turns into [`Free::Lazy`].
    ///
    /// # Errors
    /// See [`FreeError`]. Of several frees of one block at the same time exactly one succeeds.
    pub fn free(&self, address: u64, when: Free) -> Result<Block, FreeError<B::Error>> {
        if let Some(frame) = self.frame_at(address).filter(|&frame| self.slabs.has(frame)) {
            return self.free_small(frame, address, when);
        }
        let frame = self.start_at(address).ok_or(FreeError::NotABlock)?;
        let (record, quiet) = match when {
            Free::Lazy => {
                let record = self.registry.claim(frame).ok_or(FreeError::NotABlock)?;
                (record, self.backend.is_at_rest(record.owner))
            }
            Free::Strict => self.wait_and_end(frame, |record| self.quiesce_owner(record))?,
        };
        self.retire(frame, &record, (!quiet).then_some(record.gpu));
        Ok(record.block(address))
    }

    /// Frees lazily in the order of a stream of this GPU, which need not be the block's home: all that the program does with
    /// the block comes before this point of that stream, so that GPU is the one to wait for. One that is not of this pool
    /// is waited for now, because nobody would later.
    ///
    /// # Errors
    /// See [`FreeError`].
    pub fn free_after(&self, address: u64, gpu: u32) -> Result<Block, FreeError<B::Error>> {
        let place = self.routes.iter().find(|route| route.ordinal == gpu).map(|route| route.home);
        if let Some(frame) = self.frame_at(address).filter(|&frame| self.slabs.has(frame)) {
            return self.free_small_after(frame, address, gpu);
        }
        let frame = self.start_at(address).ok_or(FreeError::NotABlock)?;
        let Some(place) = place else {
            let record = self.registry.begin_free(frame).ok_or(FreeError::NotABlock)?;
            let answer = self.backend.quiesce(&[gpu]);
            let ended = self.registry.end_free(frame, answer.is_err());
            answer.map_err(|fault| FreeError::Backend(drive::error_of(fault)))?;
            let record = ended.unwrap_or(record);
            self.retire(frame, &record, None);
            return Ok(record.block(address));
        };
        let record = self.registry.claim(frame).ok_or(FreeError::NotABlock)?;
        self.retire(frame, &record, Some(place));
        Ok(record.block(address))
    }

    /// Ends the block at `frame` once `wait` is over. Says whether its memory is quiet then; it lives on after an error other
    /// than that nobody can wait now.
    pub(crate) fn wait_and_end(
        &self,
        frame: u32,
        wait: impl FnOnce(&Record) -> Result<(), Fault<B::Error>>,
    ) -> Result<(Record, bool), FreeError<B::Error>> {
        let record = self.registry.begin_free(frame).ok_or(FreeError::NotABlock)?;
        let answer = wait(&record);
        let lives_on = matches!(answer, Err(ref fault) if !matches!(fault, Fault::NotReady(_)));
        // Somebody may have been given the memory during the wait: the record of the end says so.
        let ended = self.registry.end_free(frame, lives_on);
        match answer {
            Err(fault) if lives_on => Err(FreeError::Backend(drive::error_of(fault))),
            answer => Ok((ended.unwrap_or(record), answer.is_ok())),
        }
    }

    /// Keeps the memory of a block that ended at hand, or puts it among the free runs. `busy` is the GPU that may be at work
    /// on it still, if any.
    pub(crate) fn retire(&self, start: u32, record: &Record, busy: Option<PlaceId>) {
        let Record { frames, bytes, .. } = *record;
        if record.is_out() {
            return self.hold_back(start, record, busy);
        }
        if frames <= KEPT_BLOCK {
            let mut push = self.front.push(start, frames, bytes, busy);
            if push == Push::Full {
                self.front.make_room(&mut self.lock());
                push = self.front.push(start, frames, bytes, busy);
            }
            if push == Push::Kept {
                return;
            }
        }
        self.lock().retire_block(start, record, busy);
    }

    /// Frees every block of `owner` (its context is gone, and its work with it); returns them. A block whose free is under
    /// way in another thread is left to that thread.
    pub fn free_owned_by(&self, owner: u64) -> Vec<Block> {
        let mut state = self.lock();
        let out = state.runs.all().filter(|run| run.kind == Kind::Out);
        let claim = |run: &Run| self.registry.claim_all(run.start, run.end(), owner);
        let blocks: Vec<(u32, Record)> = out.flat_map(claim).collect();
        let mut small = Vec::new();
        for (start, record) in &blocks {
            if record.slab {
                small.extend(self.drop_slab(*start, record.id));
            }
            if record.is_out() {
                let freed = state.freed_now(Some(record.gpu));
                state.hold_back(*start, record, freed);
            } else {
                state.retire_block(*start, record, Some(record.gpu));
            }
        }
        let blocks = blocks.iter().filter(|(_, record)| !record.slab);
        blocks.map(|(start, record)| record.block(self.address(*start))).chain(small).collect()
    }

    /// Keeps the memory of a block that ended away from everybody, since others have it. What of it fills chunks with
    /// nothing else in them goes back to the driver, who keeps it for those others.
    fn hold_back(&self, start: u32, record: &Record, busy: Option<PlaceId>) {
        let leaving = {
            let mut state = self.lock_all();
            let freed = state.freed_now(busy);
            state.hold_back(start, record, freed);
            state.evict_held(None)
        };
        self.send_back(leaving, &mut []);
    }

    /// The live block that `address` lies in, inner addresses included. It ends with the last byte that was asked for: what stands
    /// behind that in its last frame is nobody's, as behind memory of the driver's own, whatever that is rounded up to (measured).
    pub fn block_at(&self, address: u64) -> Option<Block> {
        if !self.contains(address) {
            return None;
        }
        if let Some(small) = self.small_at(address) {
            return small;
        }
        let state = self.lock();
        let (start, record) = self.around(&state, address).filter(|(_, record)| !record.slab)?;
        let block = record.block(self.address(start));
        (address - block.address < block.bytes).then_some(block)
    }

    /// The live blocks of this home GPU that have frames of their own, in order of address.
    pub fn blocks(&self, home: u32) -> Vec<Block> {
        let records = self.records_out(&self.lock()).into_iter();
        let own = records.filter(|(_, record)| !record.slab && record.home == home);
        own.map(|(start, record)| record.block(self.address(start))).collect()
    }

    /// What blocks and slabs there are, in order of address, which runs are in no order of.
    pub(crate) fn records_out(&self, state: &State<B::Handle>) -> Vec<(u32, Record)> {
        let out = state.runs.all().filter(|run| run.kind == Kind::Out);
        let mut records: Vec<_> = out.flat_map(|run| self.registry.starting_in(run.start, run.end())).collect();
        records.sort_unstable_by_key(|(start, _)| *start);
        records
    }

    /// From now on so much of what is asked for, and of what is in use at each place, is no memory of the program's, and the most that the program had does not count it.
    pub fn note_peaks_without(&self, bytes: u64, at: impl Fn(Place) -> u64) {
        self.lock().note_peaks_without(bytes, at);
    }

    /// The pool in numbers, exact at the moment of the call.
    pub fn usage(&self) -> Usage {
        let mut state = self.lock();
        let mut usage = state.usage(&self.front.sums(), &self.registry);
        self.count_small(&mut usage, state.peak_large_bytes(), state.left_out());
        // Nothing else is told of a disk, in a process that never stores anything.
        usage.places.retain(|place| !place.place.is_stored() || place.peak_used > 0);
        // Memory of the host is told as one.
        if let Some(at) = usage.places.iter().position(|place| place.place == Place::Pageable)
            && usage.places.iter().any(|place| place.place.is_host())
        {
            let stored = usage.places.remove(at);
            if let Some(host) = usage.places.iter_mut().find(|place| place.place.is_host()) {
                host.held += stored.held;
                host.used += stored.used;
                host.peak_used = host.peak_used.max(stored.peak_used).max(host.used);
            }
        }
        usage
    }

    /// `(free, total)` bytes that a program whose home is this GPU can count on: its own and those of the GPUs that lend to
    /// it and that `counts` agrees to, not the host. Both 0 if `home` is not a place of this pool.
    pub fn memory_info(&self, home: u32, counts: impl Fn(u32) -> bool) -> (u64, u64) {
        let Some(route) = self.routes.iter().find(|route| route.ordinal == home) else {
            return (0, 0);
        };
        let counted = |place: Place| matches!(place, Place::Gpu(ordinal) if ordinal == home || counts(ordinal));
        let counted = |place: Place| counted(place) && self.accounts.takes(place, home);
        let gpus = route.order[..route.gpus].iter().filter(|id| counted(self.accounts.place(**id)));
        let headrooms: Vec<_> = gpus.clone().map(|id| self.backend.headroom(self.accounts.place(*id))).collect();
        let state = self.lock();
        let kept = self.kept_frames();
        gpus.zip(headrooms).fold((0u64, 0u64), |(free, total), (id, headroom)| {
            let (budget, kept) = (&state.budgets[id.index()], kept[id.index()] * FRAME);
            (free.saturating_add(budget.room(headroom, kept)), total.saturating_add(budget.limit()))
        })
    }

    /// Bytes that the pool holds on a GPU and no block stands on: the driver counts them as used, and the program has freed them.
    pub fn idle_on(&self, gpu: u32) -> u64 {
        let Some(place) = self.accounts.id(Place::Gpu(gpu)) else { return 0 };
        let state = self.lock();
        let kept = self.kept_frames();
        state.budgets[place.index()].idle(kept[place.index()] * FRAME)
    }

    /// Frames by place that no block of the program's stands on, though they are no free run: the caller holds the pool's lock.
    pub(crate) fn kept_frames(&self) -> Vec<u64> {
        let mut kept = self.front.sums().frames;
        for (sum, frames) in kept.iter_mut().zip(self.slabs.sums().unwrap_or_default().empty) {
            *sum += frames;
        }
        kept
    }

    /// Sees a planned growth through, or takes it back.
    fn grow(&self, mut growth: Growth<B::Handle>, attempt: &Attempt) -> Result<Allocation, Cause<B::Error>> {
        let leaving = std::mem::take(&mut growth.leaving);
        if !leaving.is_empty() {
            self.send_back(leaving, &mut growth.credits);
            let mut state = self.lock();
            // What did not go is nothing to count on.
            for &(place, bytes) in &growth.credits {
                state.budget(place).repay(bytes);
            }
            if growth.pieces.iter().any(|(place, _)| state.budget(*place).is_overdrawn()) {
                state.withdraw(&growth);
                state.space.give(growth.start, growth.frames);
                state.scatter(std::mem::take(&mut growth.gathered.rows));
                return Err(Cause::Overdrawn);
            }
        }
        let readers = self.backend.readers();
        match drive::build(&self.backend, self.base, self.largest_chunk, &growth, &self.accounts) {
            Ok(chunks) => {
                let allocation = {
                    let mut state = self.lock();
                    state.chunks.insert(&chunks);
                    let (taken, headroom) = state.deliver(&growth, attempt);
                    let reused = growth.pieces.iter().all(|piece| piece.1 == 0);
                    self.award(&mut state, &taken, attempt, reused, headroom)
                };
                // Somebody was added meanwhile. Whoever added it grants what was in the books then, and this may not have been.
                if self.backend.readers() != readers
                    && let Err(error) = self.grant_rows(&chunks)
                {
                    self.take_back_granted(&allocation.block, attempt);
                    return Err(Cause::Failed(error));
                }
                Ok(allocation)
            }
            Err(Broken { cause, place, created, taken_down, retired }) => {
                let mut state = self.lock();
                state.withdraw(&growth);
                state.scatter(growth.gathered.rows.split_off(taken_down));
                match cause {
                    // What a move has for a moment is there again when it is over.
                    Cause::OutOfMemory(_) if state.moves.are_any() => {}
                    Cause::OutOfMemory(_) => state.budget(place).ran_out(created),
                    Cause::Unavailable(_) => state.budget(place).close(),
                    Cause::Failed(_) | Cause::Overdrawn => {}
                }
                let mut lost = 0;
                let gathered = |chunk: &Chunk<B::Handle>| {
                    growth.gathered.rows.iter().flat_map(|row| &row.chunks).any(|other| other.handle == chunk.handle)
                };
                for chunk in retired.gone.iter().filter(|chunk| gathered(chunk)) {
                    state.budget(chunk.place).lose_aside(bytes_of(chunk.frames), 0);
                }
                for zombie in &retired.zombies {
                    for chunk in &zombie.chunks {
                        let bytes = bytes_of(chunk.frames);
                        match gathered(chunk) {
                            true => state.budget(chunk.place).lose_aside(0, bytes),
                            false => state.budget(chunk.place).strand(bytes),
                        }
                        let is_here = (growth.start..growth.start + growth.frames).contains(&chunk.start);
                        lost += if zombie.mapped && is_here { chunk.frames } else { 0 };
                    }
                }
                state.space.give(growth.start + lost, growth.frames - lost);
                for row in &growth.gathered.rows {
                    if !retired
                        .zombies
                        .iter()
                        .any(|zombie| zombie.mapped && zombie.chunks.iter().any(|it| it.start == row.start))
                    {
                        state.space.give(row.start, row.frames);
                    }
                }
                state.zombies.extend(retired.zombies);
                Err(cause)
            }
        }
    }

    /// Ends a block that could not be granted to everybody, and that nobody has been given.
    #[cold]
    fn take_back_granted(&self, block: &Block, attempt: &Attempt) {
        if !attempt.slab {
            let _ = self.free(block.address, Free::Lazy);
        } else if let Some(start) = self.frame_at(block.address)
            && let Some(record) = self.registry.claim_slab(start, block.id)
        {
            self.retire(start, &record, Some(attempt.route.home));
        }
    }

    /// Grants all memory of the pool once more, because [`Backend::readers`] changed: when it returns, whoever was added
    /// before the call reaches every block there is, and every later one.
    ///
    /// # Errors
    /// The backend's, of the first row of chunks that could not be granted; the others are.
    pub fn grant_again(&self) -> Result<(), B::Error> {
        let chunks = self.lock().chunks.all();
        self.grant_rows(&chunks)
    }

    /// Grants chunks, in address order, as far as they are still mapped.
    pub(crate) fn grant_rows(&self, chunks: &[Chunk<B::Handle>]) -> Result<(), B::Error> {
        let mut answer = Ok(());
        for row in chunks.chunk_by(|left, right| left.place == right.place && left.end() == right.start) {
            let (Some(first), Some(last)) = (row.first(), row.last()) else { continue };
            if self.accounts.place(first.place).is_stored() {
                continue;
            }
            let grant = |start: u32, end: u32| {
                let (address, bytes) = (self.address(start), bytes_of(end - start));
                drive::retry_while_not_ready(|| self.backend.grant(address, bytes, self.accounts.place(first.place)))
            };
            if grant(first.start, last.end()).is_ok() {
                continue;
            }
            // Where another thread takes one of them down meanwhile, the driver refuses the whole row.
            for chunk in row {
                // One that moves is granted by whoever moves it.
                let is_here = |now: &Chunk<B::Handle>| now.handle == chunk.handle && !now.moving;
                if let Err(fault) = grant(chunk.start, chunk.end())
                    && self.lock().chunks.at(chunk.start).is_some_and(is_here)
                {
                    answer = answer.and(Err(drive::error_of(fault)));
                }
            }
        }
        answer
    }

    /// The lock, with everything that is kept back among the free runs, and slabs without blocks.
    pub(crate) fn lock_all(&self) -> MutexGuard<'_, State<B::Handle>> {
        let mut state = self.lock();
        self.return_empty_slabs(&mut state);
        self.front.drain(&mut state);
        state
    }

    /// The lock. It is held for less than a cache line takes to change cores and come back, so threads that look for it all
    /// the time slow down the one that works more than they gain. A thread that finds it taken stays away for a while,
    /// twice as long each time, and sleeps when that did not help.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State<B::Handle>> {
        // The model checker would try every number of looks.
        let pauses: &[u32] = if cfg!(loom) { &[] } else { &PAUSES };
        for &pause in pauses {
            if let Some(state) = self.state.0.try_lock() {
                return state;
            }
            for _ in 0..pause {
                std::hint::spin_loop();
            }
        }
        self.state.0.lock()
    }

    /// Waits for the owner of a block. Where nobody else is on its GPU, all memory freed there before is quiet then.
    fn quiesce_owner(&self, record: &Record) -> Result<(), Fault<B::Error>> {
        let shard = self.front.own();
        let Place::Gpu(ordinal) = self.accounts.place(record.gpu) else { return self.quiesce(shard, &[record.gpu]) };
        let kept = self.front.clock(shard);
        let begun = (kept.now(), self.clock.now());
        if self.backend.quiesce_owner(record.owner, ordinal)? {
            kept.covered(record.gpu.index(), begun.0);
            self.clock.covered(record.gpu.index(), begun.1);
        }
        Ok(())
    }

    /// Waits for GPUs; what was freed before the call, and they alone might be at work on, is quiet after it, but for what
    /// other shards keep.
    pub(crate) fn quiesce(&self, shard: usize, gpus: &[PlaceId]) -> Result<(), Fault<B::Error>> {
        let kept = self.front.clock(shard);
        let begun = (kept.now(), self.clock.now());
        match *gpus {
            [gpu] => self.backend.quiesce(self.ordinal(gpu).as_slice())?,
            _ => self.backend.quiesce(&gpus.iter().filter_map(|&gpu| self.ordinal(gpu)).collect::<Vec<_>>())?,
        }
        for gpu in gpus {
            kept.covered(gpu.index(), begun.0);
            self.clock.covered(gpu.index(), begun.1);
        }
        Ok(())
    }

    /// Asks a GPU whether it is done, without waiting: what was freed before the call, and it alone might be at work on, is
    /// quiet if so, but for what other shards keep.
    pub(crate) fn look(&self, gpu: PlaceId) {
        self.look_for(self.front.own(), gpu);
    }

    /// The same for what another shard keeps.
    fn look_for(&self, shard: usize, gpu: PlaceId) {
        let kept = self.front.clock(shard);
        let begun = (kept.now(), self.clock.now());
        if self.ordinal(gpu).is_some_and(|ordinal| self.backend.has_finished(ordinal)) {
            kept.covered(gpu.index(), begun.0);
            self.clock.covered(gpu.index(), begun.1);
        }
    }

    pub(crate) fn ordinal(&self, gpu: PlaceId) -> Option<u32> {
        match self.accounts.place(gpu) {
            Place::Gpu(ordinal) => Some(ordinal),
            Place::Host(_) | Place::Disk | Place::Pageable => None,
        }
    }

    /// The wait for one, where it is no failure that it cannot be waited for now.
    fn quiesce_if_possible(&self, gpu: PlaceId) -> Result<(), B::Error> {
        match self.quiesce(self.front.own(), &[gpu]) {
            Ok(()) | Err(Fault::NotReady(_)) => Ok(()),
            Err(fault) => Err(drive::error_of(fault)),
        }
    }

    pub(crate) fn address(&self, frame: u32) -> u64 {
        self.base + bytes_of(frame)
    }

    /// The frame that begins at `address`.
    pub(crate) fn start_at(&self, address: u64) -> Option<u32> {
        self.frame_at(address).filter(|_| address.is_multiple_of(FRAME))
    }

    pub(crate) fn frame_at(&self, address: u64) -> Option<u32> {
        let frame = address.checked_sub(self.base)? / FRAME;
        u32::try_from(frame).ok()
    }
}
