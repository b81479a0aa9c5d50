//! Memory of live blocks that goes to another place, at the same addresses.
//!
//! A move is all or nothing up to the point of no return: the new memory is made, mapped a second time and filled while the old
//! one is still mapped, and every failure until then takes all of it back. After an address was unmapped, the new or the old memory
//! is mapped there again, whatever fails: until then nothing of either is given up.
//!
//! While it lasts, the chunks are marked ([`Chunk::moving`]) and the block is held ([`Pool::hold`]): if it ends meanwhile, its frames
//! serve nobody before the move is over, and its chunks do not go back to the driver. What is free on the chunks is out for that
//! time, and then goes home with the old memory instead of moving along.
//!
//! Architecture Invariant: a chunk changes its place under the pool's lock and those of all shards of the front.

use crate::backend::Transfer;
use crate::chunks::{AnchorCounts, Chunk};
use crate::drive::{self, Cause};
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::registry::{Record, Registry};
use crate::runs::{Freed, Kind};
use crate::state::{State, Zombie, bytes_of};
use crate::sync;
use crate::{Claim, FRAME, Fault, Mover, Place};
use std::collections::BTreeMap;

/// Bytes of the smallest chunk that keeps its second mapping: remapping a smaller one is hardly cheaper with it (2 MiB for one
/// GPU: 18 ms a GiB with, 24 without; 512 MiB: 0.1 and 2.7).
const LEAST_ALIASED: u64 = 32 << 20;
/// How often the new memory and then the old one are tried at addresses that carry nothing.
const ROUNDS: u32 = 64;
/// How often a plan is made: an answer about room may be out of date, and freed memory goes home in between.
const ATTEMPTS: u32 = 6;

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

/// Why nothing moved, or not all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveError<E> {
    /// The range lies in no live block.
    NotABlock,
    /// No place of this pool.
    NoPlace,
    /// Blocks of this home GPU may not stand on the place.
    OutOfReach,
    /// A place lacks so many bytes. Nothing moved.
    Full {
        /// Which one: where the range was to go, or where the rest of a chunk has to stay.
        place: Place,
        /// How many.
        missing: u64,
    },
    /// Nobody can wait now (a stream is being captured). Nothing moved.
    NotNow,
    /// The backend failed. Everything lies where [`Pool::pieces`] says.
    Backend(E),
}

/// Chunks one behind the other that go, and what comes in their place.
struct Row<H> {
    start: u32,
    end: u32,
    old: Vec<Chunk<H>>,
    /// Frames of the block on them and the place of each in future, in address order.
    parts: Vec<(u32, u32, PlaceId)>,
    /// Made of `parts`, as far as that went.
    new: Vec<Chunk<H>>,
    /// What was free on them, taken out of the free runs.
    free: Vec<(u32, u32, Freed)>,
}

/// The rows that move, and what will have become of the range, where [`Moved::moved`] is all of it.
type Planned<H> = (Vec<Row<H>>, Moved);

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
}

/// A block of which frames `start..end` are to go to `to`.
struct Wish {
    /// First frame of the block.
    block: u32,
    record: Record,
    start: u32,
    end: u32,
    to: PlaceId,
}

impl<H> Row<H> {
    /// Frames of the block on this chunk.
    fn live_on(&self, chunk: &Chunk<H>) -> u32 {
        let free = self.free.iter().filter(|(start, ..)| (chunk.start..chunk.end()).contains(start));
        chunk.frames - free.map(|(start, end, _)| end - start).sum::<u32>()
    }

    /// The new chunks, those that stand one behind the other together.
    fn new_stretches(&self) -> impl Iterator<Item = &[Chunk<H>]> {
        self.new.chunk_by(|left, right| left.end() == right.start)
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
        let wish = self.wish(address, bytes, place)?;
        let mut attempts = ATTEMPTS;
        let answer = loop {
            let planned = self.plan(&wish, &mut attempts);
            match planned.and_then(|(rows, outcome)| self.carry_out(&wish, rows, outcome)) {
                // Freed memory can go home, now that the place is known to be full.
                Err(MoveError::Full { .. }) if attempts > 0 => {}
                answer => break answer,
            }
        };
        self.let_go(self.address(wish.block), wish.record.id);
        answer
    }

    /// What is asked for; the block is held.
    fn wish(&self, address: u64, bytes: u64, place: Place) -> Result<Wish, MoveError<B::Error>> {
        let state = self.lock();
        let to = state.id_of(place).ok_or(MoveError::NoPlace)?;
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
        Ok(Wish { block, record, start, end: end.max(start), to })
    }

    /// Sets everything aside that the move needs, once nobody is at work on the block.
    fn plan(&self, wish: &Wish, attempts: &mut u32) -> Result<Planned<B::Handle>, MoveError<B::Error>> {
        self.drain()?;
        let mut headrooms = BTreeMap::new();
        // Others free, or take what was freed, faster than this thread looks.
        let mut last = MoveError::NotNow;
        while *attempts > 0 {
            *attempts -= 1;
            loop {
                let not_yet = {
                    let mut state = self.lock_all();
                    // Its frames are somebody else's once it has ended and what was left of it went to the driver.
                    if !self.registry.lives(wish.block, wish.record.id) {
                        return Err(MoveError::NotABlock);
                    }
                    match state.plan_move(wish, &headrooms, &self.registry) {
                        Ok(planned) => return Ok(planned),
                        Err(not_yet) => not_yet,
                    }
                };
                match not_yet {
                    NotYet::Moving => sync::yield_now(),
                    NotYet::Ask(id) => {
                        headrooms.insert(id, self.backend.headroom(self.accounts.place(id)));
                    }
                    NotYet::Busy => {
                        self.drain()?;
                        break;
                    }
                    NotYet::Lacks(id, missing) => {
                        let place = self.accounts.place(id);
                        // Where others have more than there is, memory that goes is not yet room for as much: then all.
                        let first = matches!(last, MoveError::NotNow);
                        let returned = self.trim(Some(place), first.then_some(missing), &[]);
                        let forgot = self.lock().budget(id).forget_ceiling();
                        if returned == 0 && !self.settle(Some(place)) && !forgot {
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

    fn carry_out(
        &self,
        wish: &Wish,
        mut rows: Vec<Row<B::Handle>>,
        mut outcome: Moved,
    ) -> Result<Moved, MoveError<B::Error>> {
        let readers = self.backend.readers();
        if let Err((id, created, cause)) = self.make_new(&mut rows) {
            self.undo(rows);
            let mut state = self.lock();
            return Err(match cause {
                Cause::OutOfMemory(_) | Cause::Unavailable(_) | Cause::Overdrawn => {
                    match cause {
                        Cause::OutOfMemory(_) => state.budget(id).ran_out(created),
                        Cause::Unavailable(_) => state.budget(id).close(),
                        Cause::Overdrawn | Cause::Failed(_) => {}
                    }
                    MoveError::Full { place: state.place(id), missing: bytes_of(wish.end - wish.start) }
                }
                Cause::Failed(error) => MoveError::Backend(error),
            });
        }
        let transfers: Vec<Transfer> = rows.iter().flat_map(|row| &row.new).map(|chunk| self.filling(chunk)).collect();
        if !transfers.is_empty()
            && let Err(fault) = self.backend.copy(wish.record.owner, wish.record.home, &transfers)
        {
            self.undo(rows);
            return Err(MoveError::Backend(drive::error_of(fault)));
        }
        let mut answer = Ok(());
        let mut made = Vec::new();
        let mut left = rows.into_iter();
        for row in left.by_ref() {
            if let Err(error) = self.remap(&row) {
                answer = Err(MoveError::Backend(error));
                self.undo(vec![row]);
                break;
            }
            made.extend_from_slice(&row.new);
            self.commit(row);
        }
        self.undo(left.collect());
        answer?;
        // Somebody was added meanwhile, who granted the rest; see `Pool::grow`.
        if self.backend.readers() != readers {
            self.grant_rows(&made).map_err(MoveError::Backend)?;
        }
        outcome.moved -= outcome.there + outcome.anchored + outcome.shared;
        Ok(outcome)
    }

    /// How a new chunk gets its contents.
    fn filling(&self, chunk: &Chunk<B::Handle>) -> Transfer {
        let from = self.address(chunk.start);
        Transfer { from, to: chunk.alias.unwrap_or(from), bytes: bytes_of(chunk.frames) }
    }

    /// Waits until nobody works on what was submitted before. All memory freed before is quiet then.
    fn drain(&self) -> Result<(), MoveError<B::Error>> {
        let kept = self.front.clock(self.front.own());
        let begun = (kept.now(), self.clock.now());
        match drive::retry_while_not_ready(|| self.backend.drain()) {
            Ok(()) => {}
            Err(Fault::NotReady(_)) => return Err(MoveError::NotNow),
            Err(fault) => return Err(MoveError::Backend(drive::error_of(fault))),
        }
        for route in &self.routes {
            kept.covered(route.home.index(), begun.0);
            self.clock.covered(route.home.index(), begun.1);
        }
        Ok(())
    }

    /// Makes the new memory of all rows and maps it at addresses of its own; on failure the place, the bytes made there, and why.
    fn make_new(&self, rows: &mut [Row<B::Handle>]) -> Result<(), (PlaceId, u64, Cause<B::Error>)> {
        let mut made: BTreeMap<PlaceId, u64> = BTreeMap::new();
        for row in rows {
            for &(start, end, id) in &row.parts {
                let place = self.accounts.place(id);
                let mut start = start;
                while start < end {
                    let created = made.entry(id).or_default();
                    let bytes = bytes_of(end - start).min(self.largest_chunk);
                    if !self.accounts.charge(Claim::Pool, place, bytes) {
                        return Err((id, *created, Cause::Overdrawn));
                    }
                    let handle =
                        drive::retry_while_not_ready(|| self.backend.create(place, bytes)).map_err(|fault| {
                            self.accounts.credit(Claim::Pool, place, bytes);
                            (id, *created, drive::cause_of_create(fault))
                        })?;
                    let frames = (bytes / FRAME) as u32;
                    let anchors = AnchorCounts::default();
                    let chunk = Chunk { start, frames, place: id, handle, anchors, alias: None, moving: false };
                    row.new.push(chunk);
                    *created += bytes;
                    let alias = drive::retry_while_not_ready(|| self.backend.alias(handle, bytes, place))
                        .map_err(|fault| (id, *created, Cause::Failed(drive::error_of(fault))))?;
                    if let Some(last) = row.new.last_mut() {
                        last.alias = Some(alias);
                    }
                    start += frames;
                }
            }
        }
        Ok(())
    }

    /// Maps the new chunks of a row in place of the old ones. On failure the old ones are mapped again, unless the backend refuses
    /// that for ever.
    fn remap(&self, row: &Row<B::Handle>) -> Result<(), B::Error> {
        let mut mapped = vec![(row.start, row.end)];
        // Where they are not taken down, nothing has happened.
        self.take_down(&mut mapped)?;
        let Err(error) = self.put_up(&row.new, &mut mapped) else { return Ok(()) };
        for _ in 0..ROUNDS {
            for (chunks, answer) in [(&row.old, Err(&error)), (&row.new, Ok(()))] {
                if self.take_down(&mut mapped).is_ok() && self.put_up(chunks, &mut mapped).is_ok() {
                    return answer.map_err(Clone::clone);
                }
            }
        }
        Err(error)
    }

    /// Unmaps these frames; what is left in the list is mapped still.
    fn take_down(&self, mapped: &mut Vec<(u32, u32)>) -> Result<(), B::Error> {
        while let Some(&(start, end)) = mapped.last() {
            let unmap = || self.backend.unmap(self.address(start), bytes_of(end - start));
            drive::retry_whatever_failed(unmap).map_err(drive::error_of)?;
            mapped.pop();
        }
        Ok(())
    }

    /// Maps these chunks, with all grants; which of them are mapped is added to the list.
    fn put_up(&self, chunks: &[Chunk<B::Handle>], mapped: &mut Vec<(u32, u32)>) -> Result<(), B::Error> {
        for chunk in chunks {
            let map = || self.backend.map(self.address(chunk.start), bytes_of(chunk.frames), chunk.handle);
            drive::retry_while_not_ready(map).map_err(drive::error_of)?;
            mapped.push((chunk.start, chunk.end()));
        }
        // Once for neighbours at one place: the cost is mostly per call.
        for row in chunks.chunk_by(|left, right| left.place == right.place && left.end() == right.start) {
            let (Some(first), Some(last)) = (row.first(), row.last()) else { continue };
            let (address, bytes) = (self.address(first.start), bytes_of(last.end() - first.start));
            let place = self.accounts.place(first.place);
            drive::retry_while_not_ready(|| self.backend.grant(address, bytes, place)).map_err(drive::error_of)?;
        }
        Ok(())
    }

    /// The new memory of a row is in the books, and the old one goes home.
    fn commit(&self, mut row: Row<B::Handle>) {
        // Only large chunks keep theirs.
        for chunk in row.new.iter_mut().filter(|chunk| bytes_of(chunk.frames) < LEAST_ALIASED) {
            if let Some(alias) = chunk.alias
                && drive::retry_whatever_failed(|| self.backend.drop_alias(alias, bytes_of(chunk.frames))).is_ok()
            {
                chunk.alias = None;
            }
        }
        let old = {
            let mut state = self.lock();
            // No row is kept and no thread can keep or take one until the books are right again.
            let shards = self.front.empty(&mut state);
            let old = state.commit_move(&row);
            drop(shards);
            old
        };
        let retired = drive::release(&self.backend, old, &self.accounts);
        let mut state = self.lock();
        for chunk in &retired.gone {
            state.budget(chunk.place).left(bytes_of(chunk.frames), 0);
        }
        for chunk in retired.zombies.iter().flat_map(|zombie: &Zombie<_>| &zombie.chunks) {
            state.budget(chunk.place).left(0, bytes_of(chunk.frames));
        }
        state.zombies.extend(retired.zombies);
    }

    /// Nothing comes of these rows: their new memory goes home, and all else is as it was.
    fn undo(&self, rows: Vec<Row<B::Handle>>) {
        let (mut rows, mut zombies) = (rows, Vec::new());
        for row in &mut rows {
            let new = std::mem::take(&mut row.new);
            zombies.append(&mut drive::release(&self.backend, new, &self.accounts).zombies);
        }
        let mut state = self.lock();
        for zombie in &zombies {
            for chunk in &zombie.chunks {
                state.budget(chunk.place).strand(bytes_of(chunk.frames));
            }
        }
        state.zombies.extend(zombies);
        rows.iter().for_each(|row| state.withdraw_move(row));
    }
}

impl<H: Copy> State<H> {
    /// Finds the chunks that move, and sets them, their free memory and room for the new ones aside.
    fn plan_move(
        &mut self,
        wish: &Wish,
        headrooms: &BTreeMap<PlaceId, Option<u64>>,
        registry: &Registry,
    ) -> Result<Planned<H>, NotYet> {
        let block = (wish.block, wish.block + wish.record.frames);
        let mut outcome = Moved { moved: bytes_of(wish.end - wish.start), ..Moved::default() };
        let mut rows: Vec<Row<H>> = Vec::new();
        let chunks: Vec<Chunk<H>> = self.chunks.touched(wish.start, wish.end).copied().collect();
        for chunk in chunks {
            let (start, end) = (chunk.start.max(wish.start), chunk.end().min(wish.end));
            let bytes = bytes_of(end - start);
            if chunk.moving {
                return Err(NotYet::Moving);
            }
            if chunk.place == wish.to {
                outcome.there += bytes;
                continue;
            }
            if !chunk.anchors.reasons().is_empty() || self.asked.touches(chunk.start, chunk.end(), registry) {
                outcome.anchored += bytes;
                continue;
            }
            let Some(free) = self.free_beside(&chunk, block) else {
                outcome.shared += bytes;
                continue;
            };
            if free.iter().any(|(.., freed)| !freed.is_quiet(&self.clock)) {
                return Err(NotYet::Busy);
            }
            if rows.last().is_none_or(|row| row.end < chunk.start) {
                let (start, end) = (chunk.start, chunk.start);
                rows.push(Row { start, end, old: Vec::new(), parts: Vec::new(), new: Vec::new(), free: Vec::new() });
            }
            let Some(row) = rows.last_mut() else { continue };
            let live = (chunk.start.max(block.0), chunk.end().min(block.1));
            for (start, end, place) in [(live.0, start, chunk.place), (start, end, wish.to), (end, live.1, chunk.place)]
            {
                match row.parts.last_mut().filter(|part| part.1 == start && part.2 == place) {
                    Some(part) => part.1 = end,
                    None if start < end => row.parts.push((start, end, place)),
                    None => {}
                }
            }
            row.end = chunk.end();
            row.old.push(chunk);
            row.free.extend(free);
        }
        self.set_aside_for(&rows, headrooms)?;
        Ok((rows, outcome))
    }

    /// What is free on a chunk that nobody else has anything of; `None` where somebody has.
    fn free_beside(&self, chunk: &Chunk<H>, block: (u32, u32)) -> Option<Vec<(u32, u32, Freed)>> {
        let mut free = Vec::new();
        let mut at = chunk.start;
        while at < chunk.end() {
            let run = self.runs.around(at)?;
            let end = run.end().min(chunk.end());
            match run.kind {
                Kind::Free(freed) => free.push((at, end, freed)),
                Kind::Out if block.0 <= at && end <= block.1 => {}
                Kind::Out => return None,
            }
            at = end;
        }
        Some(free)
    }

    fn set_aside_for(&mut self, rows: &[Row<H>], headrooms: &BTreeMap<PlaceId, Option<u64>>) -> Result<(), NotYet> {
        let mut needed: BTreeMap<PlaceId, u64> = BTreeMap::new();
        for &(start, end, place) in rows.iter().flat_map(|row| &row.parts) {
            *needed.entry(place).or_default() += bytes_of(end - start);
        }
        for (&place, &bytes) in &needed {
            let headroom = *headrooms.get(&place).ok_or(NotYet::Ask(place))?;
            let room = self.budget(place).growth(headroom);
            if room < bytes {
                return Err(NotYet::Lacks(place, bytes - room));
            }
        }
        for (place, bytes) in needed {
            self.budget(place).promise(bytes);
        }
        self.moves += rows.len() as u32;
        for row in rows {
            self.chunks.set_moving(row.start, row.end, true);
            for &(start, end, _) in &row.free {
                let taken = self.runs.take(start, end);
                debug_assert!(taken.is_some(), "frames {start}..{end} are free");
            }
        }
        Ok(())
    }

    /// What was set aside for a row is free again.
    fn withdraw_move(&mut self, row: &Row<H>) {
        for &(start, end, place) in &row.parts {
            self.budget(place).withdraw(bytes_of(end - start));
        }
        self.moves -= 1;
        self.chunks.set_moving(row.start, row.end, false);
        for &(start, _, freed) in &row.free {
            self.runs.release(start, freed);
        }
    }

    /// The new chunks of a row are mapped. The front keeps nothing. Returns the old ones, which are leaving.
    fn commit_move(&mut self, row: &Row<H>) -> Vec<Chunk<H>> {
        for &(start, end, _) in &row.free {
            self.runs.remove(start);
            self.space.give(start, end - start);
            self.count_trimmed(bytes_of(end - start));
        }
        for chunk in &row.old {
            let live = row.live_on(chunk);
            let budget = self.budget(chunk.place);
            budget.put_back(bytes_of(live));
            budget.leave(bytes_of(chunk.frames));
        }
        self.moves -= 1;
        let old = self.chunks.remove_range(row.start, row.end);
        for stretch in row.new_stretches() {
            self.chunks.insert(stretch);
        }
        for chunk in &row.new {
            let budget = self.budget(chunk.place);
            budget.deliver(bytes_of(chunk.frames));
            budget.note_peak();
        }
        old
    }
}
