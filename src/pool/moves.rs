//! Memory of live blocks that goes to other places, at the same addresses, while the program runs.
//!
//! A move has three phases. It is *prepared* beside the running program: the blocks are held ([`Pool::hold`]), so that the frames of
//! one that ends meanwhile serve nobody before the move is over; the chunks are marked ([`Chunk::moving`]); what is free on them is
//! out; and all memory that is needed is found or made and mapped a second time. Whatever fails until here is taken back.
//! Then the program is *stopped* by the caller, as shortly as can be: nothing is allocated, made or written down, contents are
//! copied through the second mappings, and addresses are mapped anew. The rest, books and memory that goes home, is *finished*
//! while the program runs again.
//!
//! Steps come in waves (`schedule.rs`). The contents of a step are at both places until all of its addresses are mapped again, so
//! whatever fails in between, either the old memory or the new one is mapped there, and nothing of either is given up before.
//! Between two steps everything is in its place, and a move may end there.
//!
//! Architecture Invariant: a chunk changes its place under the pool's lock and those of all shards of the front.

use crate::backend::Transfer;
use crate::chunks::{Alias, AnchorCounts, Chunk};
use crate::drive::{self, Cause};
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::registry::{Record, Registry};
use crate::runs::{Freed, Kind};
use crate::schedule::{self, Nearness, Old, Part, Rooms, Source, Stretch};
use crate::state::{Leaving, State, bytes_of};
use crate::sync;
use crate::under_way::UnderWay;
use crate::{Claim, FRAME, Fault, Mover, Place};
use std::collections::BTreeMap;

/// Bytes of the smallest chunk that keeps its second mapping while it is in use: remapping a smaller one is hardly cheaper with it
/// (2 MiB for one GPU: 18 ms a GiB with, 24 without; 512 MiB: 0.1 and 2.7).
const LEAST_ALIASED: u64 = 32 << 20;
/// How often the new memory and then the old one are tried at addresses that carry nothing.
const ROUNDS: u32 = 64;
/// How often a plan is made: an answer about room may be out of date, and freed memory goes home in between.
const ATTEMPTS: u32 = 6;

/// A range of a live block, and where it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// First byte.
    pub address: u64,
    /// How many.
    pub bytes: u64,
    /// Where to.
    pub to: Place,
}

/// The program, stopped: while this lives nothing runs that may use the pool's memory. Dropping it lets the program go on.
pub trait Stopped {
    /// Whether nothing has run since: asked before anything changes that the program could notice. `false` ends the move, and is
    /// how work is found that was submitted past whoever stopped the program.
    fn still_quiet(&mut self) -> bool;
}

/// What became of a range, in bytes of whole frames that lie in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Lies at the place now and did not before.
    pub moved: u64,
    /// Lay there before.
    pub there: u64,
    /// Must stay on the physical memory that it is on ([`crate::Anchors`]).
    pub anchored: u64,
    /// Stayed on a chunk that others stand on, too.
    pub shared: u64,
}

/// What became of several ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rearranged<E> {
    /// Of each wish, in the order of the wishes.
    pub wishes: Vec<Moved>,
    /// Why not all was done that was begun. What was done stays, and everything lies where [`Pool::pieces`] says.
    pub cut_short: Option<MoveError<E>>,
}

/// Why nothing moved, or not all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveError<E> {
    /// A range lies in no live block.
    NotABlock,
    /// No place of this pool.
    NoPlace,
    /// Blocks of this home GPU may not stand on the place.
    OutOfReach,
    /// A place lacks so many bytes. Nothing moved. Where several ranges were to change places and their chunks are of different
    /// sizes, those that go out make room for the others once they have gone: two calls may do what one cannot.
    Full {
        /// Which one: where a range was to go, or where the rest of a chunk has to stay.
        place: Place,
        /// How many.
        missing: u64,
    },
    /// Nobody can wait now (a stream is being captured), or the program could not be stopped. Nothing moved.
    NotNow,
    /// Work ran although the program was stopped.
    NotQuiet,
    /// The backend failed. Everything lies where [`Pool::pieces`] says.
    Backend(E),
}

/// Why there is no plan yet.
enum NotYet {
    /// Another thread moves one of the chunks.
    Moving,
    /// A GPU may be at work on free memory of the chunks.
    Busy,
    /// What this place could still give has to be known.
    Ask(PlaceId),
    /// This place lacks so many bytes.
    Lacks(PlaceId, u64),
    /// A block has ended, and its frames may be somebody else's.
    Ended,
}

/// A block of which frames `start..end` are to go to `to`.
pub(crate) struct Wanted {
    /// First frame of the block.
    pub block: u32,
    pub record: Record,
    pub start: u32,
    pub end: u32,
    pub to: PlaceId,
    /// On other chunks, also where they are there already.
    pub anew: bool,
}

/// Memory that is mapped, or to be mapped, at frames of the pool.
#[derive(Clone, Copy)]
struct Laid {
    start: u32,
    end: u32,
    place: PlaceId,
    /// Which of [`Plan::memory`].
    memory: usize,
}

/// Chunks that are replaced together.
struct Step {
    old: Vec<Laid>,
    new: Vec<Laid>,
    inward: bool,
    is_done: bool,
}

/// Steps that wait for none of each other, and the copies that they begin with: for each context, its owner's number, its GPU and
/// the copies.
struct Wave {
    steps: Vec<Step>,
    copies: Vec<(u64, u32, Vec<Transfer>)>,
}

/// All that takes part in a move.
pub(crate) struct Plan<H> {
    /// The chunks that go, then those of the stock, then those that were made.
    memory: Vec<Chunk<H>>,
    /// How many of them go.
    old: usize,
    /// How many there were before any was made.
    given: usize,
    /// To be made, in this order.
    to_make: Vec<(PlaceId, u32)>,
    waves: Vec<Wave>,
    /// What was free on the chunks that go, taken out of the free runs.
    free: Vec<(u32, u32, Freed)>,
    /// What stays of each wish.
    stays: Vec<Moved>,
}

/// What is already the case when nobody uses the memory by promise of the caller.
struct Promised;

impl Stopped for Promised {
    fn still_quiet(&mut self) -> bool {
        true
    }
}

impl<H> Plan<H> {
    fn steps(&self) -> impl Iterator<Item = &Step> {
        self.waves.iter().flat_map(|wave| &wave.steps)
    }

    /// What was free on the chunks of a step.
    fn free_on(&self, step: &Step) -> impl Iterator<Item = &(u32, u32, Freed)> {
        self.free.iter().filter(|(start, ..)| step.old.iter().any(|old| (old.start..old.end).contains(start)))
    }
}

impl<B: Mover> Pool<B> {
    /// Moves what of a range of a live block is whole frames to `place`; the block's last frame counts as whole if the range has the
    /// block's last byte. A chunk that the range covers in part is divided, and the rest of the block on it stays at its place, on
    /// other physical memory. A chunk that must stay where it is stays, and so does one that others stand on, too.
    ///
    /// Waits for all work on every device that may reach the pool's memory. From the call to its return nobody uses the chunks
    /// that the range touches; all other memory may be in use.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn move_to(&self, address: u64, bytes: u64, place: Place) -> Result<Moved, MoveError<B::Error>> {
        let done = self.carry_out(&[Wish { address, bytes, to: place }], true, || Some(Promised))?;
        match done.cut_short {
            Some(error) => Err(error),
            None => Ok(done.wishes.into_iter().sum()),
        }
    }

    /// Moves several ranges of live blocks at once, each as [`Pool::move_to`] does, but beside the running program: it is stopped by
    /// `stop` once everything is prepared, and goes on as soon as what that returned is dropped. Where `stop` returns `None`,
    /// nothing has changed. What goes out of a full place makes room for what comes in, chunk for chunk of the same size.
    ///
    /// While the program is stopped the pool allocates nothing and takes no lock, and calls nothing of the backend but
    /// [`Mover::copy`], [`crate::Backend::map`], [`crate::Backend::unmap`] and [`crate::Backend::grant`].
    ///
    /// # Errors
    /// See [`MoveError`]; nothing has changed then. What fails later is in [`Rearranged::cut_short`].
    pub fn rearrange<S: Stopped>(
        &self,
        wishes: &[Wish],
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        self.carry_out(wishes, false, stop)
    }

    /// `waits`: the program is not stopped later; instead all work is waited for now.
    fn carry_out<S: Stopped>(
        &self,
        wishes: &[Wish],
        waits: bool,
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        // Where all work is waited for, nobody may wait for the move before that is over: a kernel may wait for that very thread.
        let mut under_way = (!waits).then(|| self.begin_move());
        let mut wanted = Vec::with_capacity(wishes.len());
        let held = wishes.iter().try_for_each(|wish| {
            wanted.push(self.hold_for(wish)?);
            Ok(())
        });
        let answer = held.and_then(|()| {
            let plan = self.prepare(&wanted, waits, &mut under_way)?;
            self.act(plan, &wanted, waits, stop)
        });
        for Wanted { block, record, .. } in &wanted {
            self.let_go(self.address(*block), record.id);
        }
        answer
    }

    /// What is asked for; the block is held.
    fn hold_for(&self, wish: &Wish) -> Result<Wanted, MoveError<B::Error>> {
        let Wish { address, bytes, to } = *wish;
        let state = self.lock();
        let to = state.id_of(to).ok_or(MoveError::NoPlace)?;
        let (block, record) = self.around(&state, address).ok_or(MoveError::NotABlock)?;
        let (first, last) = (self.address(block), self.address(block) + record.bytes);
        let end = address.checked_add(bytes).filter(|end| bytes > 0 && *end <= last).ok_or(MoveError::NotABlock)?;
        let route = self.routes.iter().find(|route| route.home == record.gpu);
        if !route.is_some_and(|route| route.order.contains(&to)) {
            return Err(MoveError::OutOfReach);
        }
        let start = block + (address - first).div_ceil(FRAME) as u32;
        let end = if end == last { block + record.frames } else { block + ((end - first) / FRAME) as u32 };
        if !self.registry.change(block, record.id, false, |record| record.holds += 1) {
            return Err(MoveError::NotABlock);
        }
        Ok(Wanted { block, record, start, end: end.max(start), to, anew: false })
    }

    /// Finds and makes everything that the move needs, which is under way from then on at the latest.
    pub(crate) fn prepare<'a>(
        &'a self,
        wanted: &[Wanted],
        waits: bool,
        under_way: &mut Option<UnderWay<'a, B>>,
    ) -> Result<Plan<B::Handle>, MoveError<B::Error>> {
        if waits {
            self.drain()?;
        }
        let mut attempts = ATTEMPTS;
        loop {
            let mut plan = self.plan(wanted, waits, under_way, &mut attempts)?;
            let Err((id, created, cause)) = self.gather(&mut plan, wanted) else { return Ok(plan) };
            let full = !matches!(cause, Cause::Failed(_));
            {
                let mut state = self.lock();
                match cause {
                    Cause::OutOfMemory(_) => state.budget(id).ran_out(created),
                    Cause::Unavailable(_) => state.budget(id).close(),
                    Cause::Overdrawn | Cause::Failed(_) => {}
                }
            }
            // Where the place is full, what it could do without goes home, and not to the stock.
            self.finish(plan, wanted, full);
            match cause {
                Cause::Failed(error) => return Err(MoveError::Backend(error)),
                // Freed memory can go home, now that the place is known to be full.
                _ if attempts > 0 => {}
                _ => {
                    let missing = wanted.iter().map(|wish| bytes_of(wish.end - wish.start)).sum();
                    return Err(MoveError::Full { place: self.accounts.place(id), missing });
                }
            }
        }
    }

    /// Sets everything aside that the move needs.
    fn plan<'a>(
        &'a self,
        wanted: &[Wanted],
        waits: bool,
        under_way: &mut Option<UnderWay<'a, B>>,
        attempts: &mut u32,
    ) -> Result<Plan<B::Handle>, MoveError<B::Error>> {
        let mut headrooms = BTreeMap::new();
        // Others free, or take what was freed, faster than this thread looks.
        let mut last = MoveError::NotNow;
        while *attempts > 0 {
            *attempts -= 1;
            loop {
                let planned = {
                    let mut state = self.lock_all();
                    let planned = state.plan_move(wanted, !waits, &headrooms, self.largest_chunk, &self.registry);
                    if planned.is_ok() {
                        under_way.get_or_insert_with(|| self.begin_move_in(&mut state));
                    }
                    planned
                };
                match planned {
                    Ok(plan) => return Ok(plan),
                    Err(NotYet::Ended) => return Err(MoveError::NotABlock),
                    Err(NotYet::Moving) => sync::yield_now(),
                    Err(NotYet::Ask(id)) => {
                        headrooms.insert(id, self.backend.headroom(self.accounts.place(id)));
                    }
                    Err(NotYet::Busy) => {
                        self.drain()?;
                        break;
                    }
                    Err(NotYet::Lacks(id, missing)) => {
                        let place = self.accounts.place(id);
                        // Where others have more than there is, memory that goes is not yet room for as much: then all.
                        let first = matches!(last, MoveError::NotNow);
                        let returned = self.trim(Some(place), first.then_some(missing), &[]);
                        let forgot = self.lock().budget(id).forget_ceiling();
                        if returned == 0 && !self.settle_leaving(Some(place)) && !forgot {
                            *attempts = 0;
                            return Err(MoveError::Full { place, missing });
                        }
                        last = MoveError::Full { place, missing };
                        headrooms.clear();
                        break;
                    }
                }
            }
        }
        Err(last)
    }

    /// Waits until nobody works on what was submitted before. All memory freed before is quiet then.
    fn drain(&self) -> Result<(), MoveError<B::Error>> {
        let before = self.freed_until_now();
        match drive::retry_while_not_ready(|| self.backend.drain()) {
            Ok(()) => {}
            Err(Fault::NotReady(_)) => return Err(MoveError::NotNow),
            Err(fault) => return Err(MoveError::Backend(drive::error_of(fault))),
        }
        self.covered(before);
        Ok(())
    }

    /// The numbers of the last frees so far that this thread's shard and the state know of.
    fn freed_until_now(&self) -> (u64, u64) {
        (self.front.clock(self.front.own()).now(), self.clock.now())
    }

    /// No GPU is at work on anything that was freed before these numbers were read.
    fn covered(&self, before: (u64, u64)) {
        for route in &self.routes {
            self.front.clock(self.front.own()).covered(route.home.index(), before.0);
            self.clock.covered(route.home.index(), before.1);
        }
    }

    /// Makes what is lacking, and maps all memory that takes part a second time; on failure the place, the bytes made there, and why.
    fn gather(&self, plan: &mut Plan<B::Handle>, wanted: &[Wanted]) -> Result<(), (PlaceId, u64, Cause<B::Error>)> {
        let readers = self.backend.readers();
        let mut made: BTreeMap<PlaceId, u64> = BTreeMap::new();
        for &(id, frames) in &plan.to_make {
            let (place, bytes) = (self.accounts.place(id), bytes_of(frames));
            let created = made.entry(id).or_default();
            if !self.accounts.charge(Claim::Pool, place, bytes) {
                return Err((id, *created, Cause::Overdrawn));
            }
            let handle = drive::retry_while_not_ready(|| self.backend.create(place, bytes)).map_err(|fault| {
                self.accounts.credit(Claim::Pool, place, bytes);
                (id, *created, drive::cause_of_create(fault))
            })?;
            let anchors = AnchorCounts::default();
            plan.memory.push(Chunk { start: 0, frames, place: id, handle, anchors, alias: None, moving: false });
            *created += bytes;
        }
        let mut is_filled = vec![false; plan.memory.len()];
        plan.steps().flat_map(|step| &step.new).for_each(|new| is_filled[new.memory] = true);
        for (chunk, is_filled) in plan.memory.iter_mut().zip(is_filled) {
            let Chunk { frames, place: id, handle, alias, .. } = *chunk;
            let (place, bytes) = (self.accounts.place(id), bytes_of(frames));
            // What is filled is filled through it, and a large chunk is unmapped more cheaply where it has one.
            if !is_filled && bytes < LEAST_ALIASED {
                continue;
            }
            let failed = |fault| (id, made.get(&id).copied().unwrap_or(0), Cause::Failed(drive::error_of(fault)));
            let address = match alias {
                None => drive::retry_while_not_ready(|| self.backend.alias(handle, bytes, place)).map_err(failed)?,
                // A GPU that had no context then would fault.
                Some(alias) if alias.readers != readers => {
                    drive::retry_while_not_ready(|| self.backend.grant(alias.address, bytes, place)).map_err(failed)?;
                    alias.address
                }
                Some(_) => continue,
            };
            chunk.alias = Some(Alias { address, readers });
        }
        self.set_copies(plan, wanted);
        for &(owner, gpu, _) in plan.waves.iter().flat_map(|wave| &wave.copies) {
            drive::retry_while_not_ready(|| self.backend.prepare(owner, gpu)).map_err(|fault| {
                let place = plan.memory[0].place;
                (place, 0, Cause::Failed(drive::error_of(fault)))
            })?;
        }
        Ok(())
    }

    /// Writes down what each wave copies: from the frames, whatever is mapped there until then, through the second mapping of what
    /// will be. Who has copied something ahead would leave it out here, and prove it equal where [`Stopped::still_quiet`] is asked.
    fn set_copies(&self, plan: &mut Plan<B::Handle>, wanted: &[Wanted]) {
        for wave in &mut plan.waves {
            for step in &wave.steps {
                for new in &step.new {
                    let Some(alias) = plan.memory[new.memory].alias else { continue };
                    let block =
                        wanted.iter().find(|wish| (wish.block..wish.block + wish.record.frames).contains(&new.start));
                    let Some(Record { owner, home, .. }) = block.map(|wish| wish.record) else { continue };
                    let transfer = Transfer {
                        from: self.address(new.start),
                        to: alias.address,
                        bytes: bytes_of(new.end - new.start),
                        inward: step.inward,
                    };
                    match wave.copies.iter_mut().find(|batch| (batch.0, batch.1) == (owner, home)) {
                        Some(batch) => batch.2.push(transfer),
                        None => wave.copies.push((owner, home, vec![transfer])),
                    }
                }
            }
        }
    }

    /// Stops the program, moves, and lets it go on.
    pub(crate) fn act<S: Stopped>(
        &self,
        mut plan: Plan<B::Handle>,
        wanted: &[Wanted],
        waits: bool,
        stop: impl FnOnce() -> Option<S>,
    ) -> Result<Rearranged<B::Error>, MoveError<B::Error>> {
        let readers = self.backend.readers();
        let longest = plan.steps().map(|step| step.old.len() + step.new.len()).max().unwrap_or(0);
        let mut mapped = Vec::with_capacity(longest);
        let cut_short = if plan.waves.is_empty() {
            Ok(())
        } else {
            match stop() {
                // From here on until it is dropped no lock, no allocation, and no call that is not named in `rearrange`.
                Some(mut stopped) => {
                    let answer = self.move_contents(&mut plan, &mut mapped, waits, &mut stopped);
                    drop(stopped);
                    answer
                }
                None => Err(MoveError::NotNow),
            }
        };
        let cut_short = match cut_short {
            Err(error) if plan.steps().all(|step| !step.is_done) => {
                self.finish(plan, wanted, false);
                return Err(error);
            }
            answer => answer.err(),
        };
        let (wishes, made) = self.finish(plan, wanted, false);
        // Somebody was added meanwhile, who granted the rest; see `Pool::grow`.
        if self.backend.readers() != readers {
            self.grant_rows(&made).map_err(MoveError::Backend)?;
        }
        Ok(Rearranged { wishes, cut_short })
    }

    /// The program is stopped.
    fn move_contents(
        &self,
        plan: &mut Plan<B::Handle>,
        mapped: &mut Vec<(u32, u32)>,
        waits: bool,
        stopped: &mut impl Stopped,
    ) -> Result<(), MoveError<B::Error>> {
        let before = (!waits).then(|| self.freed_until_now());
        for wave in &mut plan.waves {
            for &(owner, gpu, ref transfers) in &wave.copies {
                self.backend.copy(owner, gpu, transfers).map_err(|fault| MoveError::Backend(drive::error_of(fault)))?;
            }
            // What comes next cannot be taken back; all before was to memory that nobody knows.
            if !stopped.still_quiet() {
                return Err(MoveError::NotQuiet);
            }
            before.into_iter().for_each(|before| self.covered(before));
            for step in &mut wave.steps {
                self.remap(step, &plan.memory, mapped).map_err(MoveError::Backend)?;
                step.is_done = true;
            }
        }
        Ok(())
    }

    /// Maps the new chunks of a step in place of the old ones. On failure the old ones are mapped again, unless the backend refuses
    /// that for ever.
    fn remap(&self, step: &Step, memory: &[Chunk<B::Handle>], mapped: &mut Vec<(u32, u32)>) -> Result<(), B::Error> {
        mapped.clear();
        mapped.extend(step.old.iter().map(|old| (old.start, old.end)));
        // Where they are not taken down, nothing has happened.
        let Err(error) = self.take_down(mapped).and_then(|()| self.put_up(&step.new, memory, mapped)) else {
            return Ok(());
        };
        for _ in 0..ROUNDS {
            for (chunks, answer) in [(&step.old, Err(&error)), (&step.new, Ok(()))] {
                if self.take_down(mapped).is_ok() && self.put_up(chunks, memory, mapped).is_ok() {
                    return answer.map_err(Clone::clone);
                }
            }
        }
        Err(error)
    }

    /// Unmaps these chunks, neighbours at once; what is left in the list is mapped still.
    fn take_down(&self, mapped: &mut Vec<(u32, u32)>) -> Result<(), B::Error> {
        while let Some(&(start, end)) = mapped.last() {
            let (mut first, mut left) = (start, mapped.len() - 1);
            while left > 0 && mapped[left - 1].1 == first {
                left -= 1;
                first = mapped[left].0;
            }
            let unmap = || self.backend.unmap(self.address(first), bytes_of(end - first));
            drive::retry_whatever_failed(unmap).map_err(drive::error_of)?;
            mapped.truncate(left);
        }
        Ok(())
    }

    /// Maps these chunks, with all grants; which of them are mapped is added to the list.
    fn put_up(
        &self,
        chunks: &[Laid],
        memory: &[Chunk<B::Handle>],
        mapped: &mut Vec<(u32, u32)>,
    ) -> Result<(), B::Error> {
        for chunk in chunks {
            let handle = memory[chunk.memory].handle;
            let map = || self.backend.map(self.address(chunk.start), bytes_of(chunk.end - chunk.start), handle);
            drive::retry_while_not_ready(map).map_err(drive::error_of)?;
            mapped.push((chunk.start, chunk.end));
        }
        // Once for neighbours at one place: the cost is mostly per call.
        for row in chunks.chunk_by(|left, right| left.place == right.place && left.end == right.start) {
            let (Some(first), Some(last)) = (row.first(), row.last()) else { continue };
            let (address, bytes) = (self.address(first.start), bytes_of(last.end - first.start));
            let place = self.accounts.place(first.place);
            drive::retry_while_not_ready(|| self.backend.grant(address, bytes, place)).map_err(drive::error_of)?;
        }
        Ok(())
    }

    /// The move is over, as far as it went: the books say so, and memory that nobody needs goes to the stock or home. Returns what
    /// became of each wish, and the new chunks. `full`: some place has less room than was thought, so nothing is kept.
    fn finish(&self, mut plan: Plan<B::Handle>, wanted: &[Wanted], full: bool) -> (Vec<Moved>, Vec<Chunk<B::Handle>>) {
        let mut is_laid: Vec<bool> = (0..plan.memory.len()).map(|index| index < plan.old).collect();
        for step in plan.steps().filter(|step| step.is_done) {
            step.old.iter().for_each(|old| is_laid[old.memory] = false);
            step.new.iter().for_each(|new| is_laid[new.memory] = true);
        }
        // Only large chunks keep their second mapping while they are in use.
        for (chunk, _) in plan
            .memory
            .iter_mut()
            .zip(&is_laid)
            .filter(|(chunk, is_laid)| **is_laid && bytes_of(chunk.frames) < LEAST_ALIASED)
        {
            if let Some(alias) = chunk.alias
                && drive::retry_whatever_failed(|| self.backend.drop_alias(alias.address, bytes_of(chunk.frames)))
                    .is_ok()
            {
                chunk.alias = None;
            }
        }
        let (wishes, made, leaving) = {
            let mut state = self.lock();
            // No row is kept and no thread can keep or take one until the books are right again.
            let shards = self.front.empty(&mut state);
            let wishes = moved_of(&plan, wanted);
            let made = state.commit_move(&plan);
            let leaving = state.clear_move(&plan, &is_laid, !full);
            drop(shards);
            (wishes, made, leaving)
        };
        self.send_back(leaving, &mut []);
        (wishes, made)
    }
}

impl std::iter::Sum for Moved {
    fn sum<I: Iterator<Item = Moved>>(all: I) -> Moved {
        all.fold(Moved::default(), |sum, one| Moved {
            moved: sum.moved + one.moved,
            there: sum.there + one.there,
            anchored: sum.anchored + one.anchored,
            shared: sum.shared + one.shared,
        })
    }
}

fn overlap(one: (u32, u32), other: (u32, u32)) -> u64 {
    bytes_of(one.1.min(other.1).saturating_sub(one.0.max(other.0)))
}

/// What became of each wish.
fn moved_of<H>(plan: &Plan<H>, wanted: &[Wanted]) -> Vec<Moved> {
    let mut moved = plan.stays.clone();
    for (moved, wish) in moved.iter_mut().zip(wanted) {
        for step in plan.steps().filter(|step| step.is_done) {
            let came = step.new.iter().filter(|new| new.place == wish.to);
            let went = |new: &Laid| {
                let went = step.old.iter().filter(|old| old.place != wish.to);
                went.map(|old| {
                    let both = (new.start.max(old.start), new.end.min(old.end));
                    overlap((both.0, both.1.max(both.0)), (wish.start, wish.end))
                })
                .sum::<u64>()
            };
            moved.moved += came.map(went).sum::<u64>();
        }
    }
    moved
}

impl<H: Copy> State<H> {
    /// Finds the chunks that move and decides in which order, and sets them, their free memory and all that serves them aside.
    /// `stops`: nobody is at work on anything while memory is unmapped.
    fn plan_move(
        &mut self,
        wanted: &[Wanted],
        stops: bool,
        headrooms: &BTreeMap<PlaceId, Option<u64>>,
        largest_chunk: u64,
        registry: &Registry,
    ) -> Result<Plan<H>, NotYet> {
        // The frames of somebody else, once a block has ended and what was left of it went to the driver.
        if wanted.iter().any(|wish| !registry.lives(wish.block, wish.record.id)) {
            return Err(NotYet::Ended);
        }
        let blocks: BTreeMap<u32, Record> = wanted.iter().map(|wish| (wish.block, wish.record)).collect();
        let touched: BTreeMap<u32, Chunk<H>> = wanted
            .iter()
            .flat_map(|wish| self.chunks.touched(wish.start, wish.end))
            .map(|chunk| (chunk.start, *chunk))
            .collect();
        let mut plan = Plan {
            memory: Vec::new(),
            old: 0,
            given: 0,
            to_make: Vec::new(),
            waves: Vec::new(),
            free: Vec::new(),
            stays: vec![Moved::default(); wanted.len()],
        };
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut blocks_of_parts: Vec<u32> = Vec::new();
        for chunk in touched.values() {
            if chunk.moving {
                return Err(NotYet::Moving);
            }
            let bounds = (chunk.start, chunk.end());
            let parts = parts_on(chunk, wanted, &blocks);
            let free = self.free_beside(chunk, &blocks);
            let is_anew = |wish: &Wanted| wish.anew && overlap((wish.start, wish.end), bounds) > 0;
            let goes = parts.iter().any(|(part, _)| part.place != chunk.place) || wanted.iter().any(is_anew);
            let is_anchored =
                !chunk.anchors.reasons().is_empty() || self.asked.touches(chunk.start, chunk.end(), registry);
            for (stays, wish) in plan.stays.iter_mut().zip(wanted) {
                let bytes = overlap((wish.start, wish.end), bounds);
                match &free {
                    _ if wish.to == chunk.place => stays.there += bytes,
                    _ if is_anchored => stays.anchored += bytes,
                    None => stays.shared += bytes,
                    Some(_) => {}
                }
            }
            let Some(free) = free.filter(|_| goes && !is_anchored) else { continue };
            if !stops && free.iter().any(|(.., freed)| !freed.is_quiet(&self.clock)) {
                return Err(NotYet::Busy);
            }
            let follows = plan.memory.last().is_some_and(|last| last.end() == chunk.start);
            if !follows {
                stretches.push(Stretch::default());
            }
            let Some(stretch) = stretches.last_mut() else { continue };
            let on_host = self.place(chunk.place).is_host();
            stretch.old.push(Old { start: chunk.start, frames: chunk.frames, place: chunk.place, on_host });
            for (mut part, block) in parts {
                part.nearness = match blocks.get(&block) {
                    _ if self.place(part.place).is_host() => Nearness::Host,
                    Some(record) if record.gpu == part.place => Nearness::Home,
                    _ => Nearness::Peer,
                };
                match stretch.parts.last_mut() {
                    Some(last)
                        if last.end == part.start
                            && last.place == part.place
                            && blocks_of_parts.last() == Some(&block) =>
                    {
                        last.end = part.end;
                    }
                    _ => {
                        stretch.parts.push(part);
                        blocks_of_parts.push(block);
                    }
                }
            }
            plan.memory.push(*chunk);
            plan.free.extend(free);
        }
        plan.old = plan.memory.len();
        let keeps = wanted.iter().all(|wish| !wish.anew);
        self.set_aside_for(&mut plan, &stretches, headrooms, largest_chunk, keeps)?;
        Ok(plan)
    }

    /// What is free on a chunk that nobody has anything of but these blocks; `None` where somebody has.
    fn free_beside(&self, chunk: &Chunk<H>, blocks: &BTreeMap<u32, Record>) -> Option<Vec<(u32, u32, Freed)>> {
        let mut free = Vec::new();
        let mut at = chunk.start;
        while at < chunk.end() {
            let run = self.runs.around(at)?;
            let end = run.end().min(chunk.end());
            match run.kind {
                Kind::Free(freed) => free.push((at, end, freed)),
                Kind::Out => {
                    // One run may be several blocks.
                    let mut frame = at;
                    while frame < end {
                        let (start, record) = blocks.range(..=frame).next_back()?;
                        frame = Some(start + record.frames).filter(|until| *until > frame)?;
                    }
                }
            }
            at = end;
        }
        Some(free)
    }

    /// Decides about the order, and sets aside what there is and room for what is to be made. `keeps`: a later move will need as much.
    fn set_aside_for(
        &mut self,
        plan: &mut Plan<H>,
        stretches: &[Stretch],
        headrooms: &BTreeMap<PlaceId, Option<u64>>,
        largest_chunk: u64,
        keeps: bool,
    ) -> Result<(), NotYet> {
        let mut rooms = Rooms { frames: BTreeMap::new(), largest: (largest_chunk / FRAME) as u32 };
        for place in stretches.iter().flat_map(|stretch| &stretch.parts).map(|part| part.place) {
            let headroom = *headrooms.get(&place).ok_or(NotYet::Ask(place))?;
            rooms.frames.insert(place, self.budget(place).growth(headroom) / FRAME);
        }
        let waves = schedule::schedule(stretches, &self.stock.classes(), &rooms)
            .map_err(|(place, frames)| NotYet::Lacks(place, frames * FRAME))?;
        let mut needed: BTreeMap<PlaceId, u64> = BTreeMap::new();
        let tiles = || waves.iter().flatten().flat_map(|step| &step.tiles);
        plan.given = plan.old + tiles().filter(|tile| tile.source == Source::Stock).count();
        for wave in &waves {
            let mut steps = Vec::new();
            for step in wave {
                let laid = |index: usize, chunk: &Chunk<H>| Laid {
                    start: chunk.start,
                    end: chunk.end(),
                    place: chunk.place,
                    memory: index,
                };
                let old = step.old.clone().map(|index| laid(index, &plan.memory[index])).collect();
                let mut new = Vec::new();
                for tile in &step.tiles {
                    let memory = match tile.source {
                        Source::Vacated(index) => index,
                        Source::Stock => {
                            let Some(chunk) = self.stock.take((tile.place, tile.frames)) else {
                                debug_assert!(false, "the stock has what the schedule counts on");
                                continue;
                            };
                            self.budget(tile.place).set_aside(bytes_of(tile.frames));
                            plan.memory.push(chunk);
                            plan.memory.len() - 1
                        }
                        Source::New => {
                            self.budget(tile.place).promise(bytes_of(tile.frames));
                            plan.to_make.push((tile.place, tile.frames));
                            plan.given + plan.to_make.len() - 1
                        }
                    };
                    // The rest of a chunk that was divided has chunks of its own from now on, and needs no more.
                    let is_rest = step.old.clone().any(|index| plan.memory[index].place == tile.place);
                    if !is_rest && !matches!(tile.source, Source::Vacated(_)) {
                        *needed.entry(tile.place).or_default() += bytes_of(tile.frames);
                    }
                    let end = tile.start + tile.frames;
                    new.push(Laid { start: tile.start, end, place: tile.place, memory });
                }
                steps.push(Step { old, new, inward: step.inward, is_done: false });
            }
            plan.waves.push(Wave { steps, copies: Vec::new() });
        }
        for (place, bytes) in needed.into_iter().filter(|_| keeps) {
            self.stock.needs(place, bytes);
        }
        for chunk in &plan.memory[..plan.old] {
            self.chunks.set_moving(chunk.start, chunk.end(), true);
        }
        for &(start, end, _) in &plan.free {
            let taken = self.runs.take(start, end);
            debug_assert!(taken.is_some(), "frames {start}..{end} are free");
        }
        Ok(())
    }

    /// The steps that were done are in the books, and the others as if they had never been planned. The front keeps nothing. Returns
    /// the new chunks, in address order.
    fn commit_move(&mut self, plan: &Plan<H>) -> Vec<Chunk<H>> {
        let made = plan.memory.len() - plan.given;
        for (index, &(place, frames)) in plan.to_make.iter().enumerate() {
            let budget = self.budget(place);
            if index < made { budget.deliver_aside(bytes_of(frames)) } else { budget.withdraw(bytes_of(frames)) }
        }
        let mut all = Vec::new();
        for step in plan.steps() {
            if !step.is_done {
                for old in &step.old {
                    self.chunks.set_moving(old.start, old.end, false);
                    self.chunks.set_alias(old.start, plan.memory[old.memory].alias);
                }
                for &(start, _, freed) in plan.free_on(step) {
                    self.runs.release(start, freed);
                }
                continue;
            }
            for &(start, end, _) in plan.free_on(step) {
                self.runs.remove(start);
                self.space.give(start, end - start);
            }
            let (Some(first), Some(last)) = (step.old.first(), step.old.last()) else { continue };
            let gone = self.chunks.remove_range(first.start, last.end);
            for chunk in &gone {
                let free: u32 = plan
                    .free_on(step)
                    .filter(|(start, ..)| (chunk.start..chunk.end()).contains(start))
                    .map(|(start, end, _)| end - start)
                    .sum();
                self.budget(chunk.place).vacate(bytes_of(chunk.frames), bytes_of(chunk.frames - free));
            }
            let new: Vec<Chunk<H>> = step
                .new
                .iter()
                .map(|new| Chunk {
                    start: new.start,
                    anchors: AnchorCounts::default(),
                    moving: false,
                    ..plan.memory[new.memory]
                })
                .collect();
            for stretch in new.chunk_by(|left, right| left.end() == right.start) {
                self.chunks.insert(stretch);
            }
            for chunk in &new {
                self.budget(chunk.place).use_aside(bytes_of(chunk.frames));
            }
            all.extend(new);
        }
        for chunk in &all {
            self.budget(chunk.place).note_peak();
        }
        all.sort_unstable_by_key(|chunk| chunk.start);
        all
    }

    /// What took part in a move and is mapped nowhere now is stock, or leaves.
    fn clear_move(&mut self, plan: &Plan<H>, is_laid: &[bool], keeps: bool) -> Vec<Leaving<H>> {
        let mut leaving = Vec::new();
        for (chunk, _) in plan.memory.iter().zip(is_laid).filter(|(_, is_laid)| !**is_laid) {
            let chunk = Chunk { start: 0, anchors: AnchorCounts::default(), moving: false, ..*chunk };
            let bytes = bytes_of(chunk.frames);
            self.budget(chunk.place).free_aside(bytes);
            let limit = self.budget(chunk.place).limit();
            if !keeps || !self.stock.keep(&chunk, self.period, limit) {
                self.budget(chunk.place).leave(bytes);
                leaving.push(Leaving { start: 0, frames: 0, chunks: vec![chunk] });
            }
        }
        leaving
    }
}

/// What of these blocks stands on a chunk, and where it is to lie: each with the block, in address order. The last wish counts.
fn parts_on<H>(chunk: &Chunk<H>, wanted: &[Wanted], blocks: &BTreeMap<u32, Record>) -> Vec<(Part, u32)> {
    let mut parts: Vec<(Part, u32)> = Vec::new();
    for (&block, record) in blocks {
        let (start, end) = (block.max(chunk.start), (block + record.frames).min(chunk.end()));
        let wishes = || wanted.iter().filter(|wish| wish.block == block);
        let mut borders: Vec<u32> = wishes().flat_map(|wish| [wish.start, wish.end]).chain([start, end]).collect();
        borders.retain(|border| (start..=end).contains(border));
        borders.sort_unstable();
        for pair in borders.windows(2).filter(|pair| pair[0] < pair[1]) {
            let wish = wishes().rfind(|wish| wish.start <= pair[0] && pair[1] <= wish.end);
            let place = wish.map_or(chunk.place, |wish| wish.to);
            parts.push((Part { start: pair[0], end: pair[1], place, nearness: Nearness::Peer }, block));
        }
    }
    parts
}
