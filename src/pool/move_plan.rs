//! A move is prepared while the program runs: the chunks that go are set aside, with the order in which others take their places, and
//! all memory that is needed is found or made and mapped a second time. Whatever fails is taken back.

use crate::account::Accounts;
use crate::backend::Transfer;
use crate::chunks::{Alias, AnchorCounts, Chunk};
use crate::drive::{self, Cause};
use crate::move_books::LEAST_ALIASED;
use crate::moving::{Again, Came, Laid, MoveError, Moved, Plan, Step, Wanted, Wave, overlap};
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::registry::{Record, Registry};
use crate::runs::{Freed, Kind};
use crate::schedule::{self, Nearness, Old, Part, Rooms, Source, Stretch};
use crate::state::{State, bytes_of};
use crate::sync;
use crate::under_way::UnderWay;
use crate::{Claim, Contents, FRAME, Fault, Mover, Place};
use std::collections::{BTreeMap, BTreeSet};

/// How often a plan is made: an answer about room may be out of date, and freed memory goes home in between.
const ATTEMPTS: u32 = 6;

/// Bytes of the smallest chunk whose contents are kept track of: to copy less takes no longer than to look at it twice. Random moves of the
/// tests are mostly of less.
const LEAST_KEPT: u64 = if cfg!(test) { FRAME } else { 16 << 20 };

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

impl<B: Mover> Pool<B> {
    /// Finds and makes everything that the move needs, which is under way from then on at the latest.
    pub(crate) fn prepare<'a>(
        &'a self,
        wanted: &[Wanted],
        waits: bool,
        makes: &dyn Fn(Place, u64) -> bool,
        under_way: &mut Option<UnderWay<'a, B>>,
    ) -> Result<Plan<B::Handle>, MoveError<B::Error>> {
        if waits {
            self.drain()?;
        }
        let mut attempts = ATTEMPTS;
        loop {
            let mut plan = self.plan(wanted, waits, under_way, &mut attempts)?;
            let is_wanted = |(id, bytes): (PlaceId, u64)| makes(self.accounts.place(id), bytes);
            if !plan.unmade().into_iter().all(is_wanted) {
                self.finish(plan, wanted, false);
                return Err(MoveError::NotNow);
            }
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
    pub(crate) fn freed_until_now(&self) -> (u64, u64) {
        (self.front.clock(self.front.own()).now(), self.clock.now())
    }

    /// No GPU is at work on anything that was freed before these numbers were read.
    pub(crate) fn covered(&self, before: (u64, u64)) {
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
        // Nothing that is taken down serves again: it would only be a mapping more to take down.
        let goes_home = plan.steps().flat_map(|step| &step.new).all(|new| new.is_stored);
        let mut is_filled = vec![false; plan.memory.len()];
        plan.steps().flat_map(|step| &step.new).for_each(|new| is_filled[new.memory] = true);
        for (chunk, is_filled) in plan.memory.iter_mut().zip(is_filled) {
            let Chunk { frames, place: id, handle, alias, .. } = *chunk;
            let (place, bytes) = (self.accounts.place(id), bytes_of(frames));
            // What is filled is filled through it, and a large chunk is unmapped more cheaply where it has one.
            if place.is_stored() || !is_filled && (bytes < LEAST_ALIASED || goes_home) {
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
        let contexts = plan.waves.iter().flat_map(Wave::contexts).collect::<BTreeSet<_>>();
        for (owner, gpu) in contexts {
            drive::retry_while_not_ready(|| self.backend.prepare(owner, gpu)).map_err(|fault| {
                let place = plan.memory[0].place;
                (place, 0, Cause::Failed(drive::error_of(fault)))
            })?;
        }
        Ok(())
    }

    /// Writes down what each wave copies: from the frames, whatever is mapped there until then, through the second mapping of what
    /// will be. What leaves for a chunk that it came from is looked at first, and what came from one that keeps it is written down.
    fn set_copies(&self, plan: &mut Plan<B::Handle>, wanted: &[Wanted]) {
        let taken: BTreeSet<usize> = plan.steps().flat_map(|step| &step.new).map(|new| new.memory).collect();
        for wave in &mut plan.waves {
            let Wave { steps, copies, again, came } = wave;
            for step in steps.iter() {
                for new in &step.new {
                    let Some(alias) = plan.memory[new.memory].alias else { continue };
                    let block =
                        wanted.iter().find(|wish| (wish.block..wish.block + wish.record.frames).contains(&new.start));
                    let Some(Record { owner, home, gpu, .. }) = block.map(|wish| wish.record) else { continue };
                    let transfer = |start: u32, end: u32, stored: bool| Transfer {
                        from: self.address(start),
                        to: alias.address + bytes_of(start - new.start),
                        bytes: bytes_of(end - start),
                        inward: step.inward,
                        stored,
                        between: is_between(step, start, end, new.place, gpu, &self.accounts),
                    };
                    let transfers = rows_of(step, new).map(|(start, end, stored)| transfer(start, end, stored));
                    let contents = |address: u64, bytes: u64| Contents { address, bytes, digest: None };
                    let all_mapped = rows_of(step, new).all(|(.., stored)| !stored);
                    let twin = plan.twins.get(&new.memory);
                    if let Some(twin) = twin.filter(|twin| all_mapped && twin.start == new.start) {
                        let again = of_context(
                            again,
                            |again| (again.owner, again.gpu) == (owner, home),
                            || Again::of(owner, home),
                        );
                        let before = again.copies.len();
                        again.copies.extend(transfers);
                        again.near.push(contents(self.address(new.start), bytes_of(new.end - new.start)));
                        again.there.push((twin.digest, new.start, again.copies.len() - before));
                        continue;
                    }
                    match copies.iter_mut().find(|batch| (batch.0, batch.1) == (owner, home)) {
                        Some(batch) => batch.2.extend(transfers),
                        None => copies.push((owner, home, transfers.collect())),
                    }
                    let keeps = |old: &&Laid| {
                        let is_whole = new.start <= old.start && old.end <= new.end;
                        let is_worth_it =
                            bytes_of(old.end - old.start) >= LEAST_KEPT && !plan.changing.contains(&old.start);
                        is_whole
                            && is_worth_it
                            && old.place != new.place
                            && !old.is_stored
                            && !taken.contains(&old.memory)
                    };
                    for old in step.old.iter().filter(|_| new.place == gpu).filter(keeps) {
                        let came =
                            of_context(came, |came| (came.owner, came.gpu) == (owner, home), || Came::of(owner, home));
                        came.near.push(contents(
                            alias.address + bytes_of(old.start - new.start),
                            bytes_of(old.end - old.start),
                        ));
                        came.from.push((old.memory, old.start));
                    }
                }
            }
            for again in again {
                again.needed.reserve_exact(again.copies.len());
                again.changed.reserve_exact(again.near.len());
            }
        }
    }
}

/// Whether all that lies in these frames goes from a GPU to another, and neither is the one that copies.
fn is_between(step: &Step, start: u32, end: u32, to: PlaceId, copier: PlaceId, accounts: &Accounts) -> bool {
    let is_other = |place: PlaceId| place != copier && matches!(accounts.place(place), Place::Gpu(_));
    let mut here = step.old.iter().filter(|old| old.start < end && start < old.end);
    is_other(to) && here.all(|old| is_other(old.place))
}

/// The one of this context, which is made where there is none.
fn of_context<T>(all: &mut Vec<T>, is_it: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> &mut T {
    let index = all.iter().position(is_it).unwrap_or_else(|| {
        all.push(new());
        all.len() - 1
    });
    &mut all[index]
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
            twins: BTreeMap::new(),
            changing: Vec::new(),
        };
        // What somebody wishes for by itself may later be wished for elsewhere by itself, and has chunks of its own then.
        let is_border = |frame: u32| wanted.iter().any(|wish| wish.start == frame || wish.end == frame);
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
                    _ if self.place(part.place).is_stored() => Nearness::Disk,
                    _ if self.place(part.place).is_host() => Nearness::Host,
                    Some(record) if record.gpu == part.place => Nearness::Home,
                    _ => Nearness::Peer,
                };
                match stretch.parts.last_mut() {
                    Some(last)
                        if last.end == part.start
                            && last.place == part.place
                            && blocks_of_parts.last() == Some(&block)
                            && !is_border(part.start) =>
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
        let limits: Vec<u64> = self.budgets.iter().map(|budget| budget.limit()).collect();
        // What is kept for its contents serves others where nothing else can, and before memory of the host is made: to copy what left once more takes a fifth
        // of that and less, and goes on beside what comes.
        let (stock, twins) = self.stock.on_offer(|place| limits[place.index()]);
        let made_on_host = |waves: &Vec<Vec<schedule::Step>>| -> u64 {
            let tiles = waves.iter().flatten().flat_map(|step| &step.tiles);
            let made = tiles.filter(|tile| tile.source == Source::New && self.place(tile.place).is_host());
            made.map(|tile| u64::from(tile.frames)).sum()
        };
        let mut waves = schedule::schedule(stretches, &stock, &twins, &rooms);
        let made = waves.as_ref().map_or(u64::MAX, made_on_host);
        if made > 0 && !twins.is_empty() {
            let other = schedule::schedule(stretches, &self.stock.classes(), &BTreeMap::new(), &rooms);
            if other.as_ref().is_ok_and(|other| made_on_host(other) < made) || waves.is_err() {
                waves = other;
            }
        }
        let waves = waves.map_err(|(place, frames)| NotYet::Lacks(place, frames * FRAME))?;
        let mut needed: BTreeMap<PlaceId, u64> = BTreeMap::new();
        let tiles = || waves.iter().flatten().flat_map(|step| &step.tiles);
        plan.given = plan.old + tiles().filter(|tile| matches!(tile.source, Source::Stock | Source::Twin)).count();
        let stored: Vec<bool> = self.budgets.iter().map(|budget| budget.place.is_stored()).collect();
        for wave in &waves {
            let mut steps = Vec::new();
            for step in wave {
                let laid = |index: usize, chunk: &Chunk<H>| Laid {
                    start: chunk.start,
                    end: chunk.end(),
                    place: chunk.place,
                    is_stored: stored[chunk.place.index()],
                    memory: index,
                };
                let old = step.old.clone().map(|index| laid(index, &plan.memory[index])).collect();
                let mut new = Vec::new();
                for tile in &step.tiles {
                    let memory = match tile.source {
                        Source::Vacated(index) => index,
                        Source::Stock | Source::Twin => {
                            let Some((chunk, twin)) = self.stock.take((tile.place, tile.frames), tile.start) else {
                                debug_assert!(false, "the stock has what the schedule counts on");
                                continue;
                            };
                            self.budget(tile.place).set_aside(bytes_of(tile.frames));
                            plan.memory.push(chunk);
                            let memory = plan.memory.len() - 1;
                            plan.twins.extend(twin.map(|twin| (memory, twin)));
                            memory
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
                    let (start, end, place) = (tile.start, tile.start + tile.frames, tile.place);
                    new.push(Laid { start, end, place, is_stored: stored[place.index()], memory });
                }
                steps.push(Step { old, new, inward: step.inward, is_done: false });
            }
            plan.waves.push(Wave { steps, ..Wave::default() });
        }
        for (place, bytes) in needed.into_iter().filter(|_| keeps) {
            self.stock.needs(place, bytes);
        }
        let starts = plan.memory[..plan.old].iter().map(|chunk| chunk.start);
        plan.changing = starts.filter(|start| !self.stock.may_last(*start)).collect();
        for chunk in &plan.memory[..plan.old] {
            self.chunks.set_moving(chunk.start, chunk.end(), true);
        }
        for &(start, end, _) in &plan.free {
            let taken = self.runs.take(start, end);
            debug_assert!(taken.is_some(), "frames {start}..{end} are free");
        }
        Ok(())
    }
}

/// The frames of a new chunk cut where what is mapped there until then gives way to what is stored: each row with whether it is stored.
fn rows_of(step: &Step, new: &Laid) -> impl Iterator<Item = (u32, u32, bool)> {
    let rows = step.old.chunk_by(|old, next| old.is_stored == next.is_stored);
    let borders = rows.filter_map(|row| Some((row.first()?, row.last()?)));
    let of_new = |(first, last): (&Laid, &Laid)| (first.start.max(new.start), last.end.min(new.end), first.is_stored);
    borders.map(of_new).filter(|(start, end, _)| start < end)
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
