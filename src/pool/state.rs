//! Everything under the pool's lock, and the steps that keep it consistent.
//!
//! A step here never calls the backend; whoever needs the backend unlocks first and comes back with what happened.

use crate::asked::Asked;
use crate::budget::Budget;
pub(crate) use crate::chunks::bytes_of;
use crate::chunks::{Chunk, Chunks};
use crate::clock::Clock;
use crate::freed_in::FreedIn;
use crate::held::Held;
use crate::magazine::Sums;
use crate::numbered::Moves;
use crate::place::PlaceId;
use crate::registry::{Record, Registry};
use crate::runs::{Freed, Kind, Runs};
use crate::space::Space;
use crate::stock::Stock;
use crate::{Config, FRAME, Place, Policy, Request, Usage, placement};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The places that blocks of one home GPU may stand on.
#[derive(Debug)]
pub(crate) struct Route {
    pub ordinal: u32,
    pub home: PlaceId,
    /// Best first, home included: the GPUs, then the host nodes.
    pub order: Vec<PlaceId>,
    /// How many of `order` are GPUs.
    pub gpus: usize,
    /// Whether blocks on it may stand at home: `order` has it.
    pub has_home: bool,
}

impl Route {
    /// The part of it that is home.
    pub fn home_only(self) -> Self {
        Self { order: vec![self.home], gpus: 1, has_home: true, ..self }
    }

    /// All of it but home.
    pub fn away(mut self) -> Self {
        self.order.retain(|&place| place != self.home);
        Self { gpus: self.gpus.saturating_sub(1), has_home: false, ..self }
    }

    /// The GPUs of it.
    pub fn gpus_only(mut self) -> Self {
        self.order.truncate(self.gpus);
        self
    }

    /// A route for every GPU of the pool.
    pub fn all(config: &Config) -> Vec<Route> {
        let places: Vec<Place> = config.accounts.specs().iter().map(|spec| spec.place).collect();
        let mut routes = Vec::new();
        for (home, &place) in PlaceId::all(places.len()).zip(&places) {
            let Place::Gpu(ordinal) = place else { continue };
            let order: Vec<PlaceId> = placement::order(ordinal, &places, &config.links)
                .into_iter()
                .filter_map(|place| PlaceId::all(places.len()).find(|id| places[id.index()] == place))
                .collect();
            let gpus = order.iter().filter(|id| !places[id.index()].is_host()).count();
            let has_home = order.contains(&home);
            routes.push(Route { ordinal, home, order, gpus, has_home });
        }
        routes
    }
}

/// A row of frames that is about to become a block.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub start: u32,
    pub frames: u32,
    /// The home GPU of the request may still be at work on it.
    pub busy: bool,
    /// And other memory would do at home that nobody is at work on, or can be made.
    pub has_other: bool,
    /// The free runs it was taken from, in address order: the end of each and how it was freed.
    pub from: From,
}

/// Free runs that a row was taken from. One mostly, and that needs no allocation.
#[derive(Clone, Debug)]
pub(crate) enum From {
    /// New memory.
    Nowhere,
    One((u32, Freed)),
    Several(Vec<(u32, Freed)>),
}

impl From {
    fn iter(&self) -> std::slice::Iter<'_, (u32, Freed)> {
        match self {
            From::Nowhere => [].iter(),
            From::One(run) => std::slice::from_ref(run).iter(),
            From::Several(runs) => runs.iter(),
        }
    }
}

/// Chunks on their way back to the driver; no run and no table knows them any more. They are mapped at these frames, if any.
#[derive(Debug)]
pub(crate) struct Leaving<H> {
    pub start: u32,
    pub frames: u32,
    pub chunks: Vec<Chunk<H>>,
}

impl<H> Leaving<H> {
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| bytes_of(chunk.frames)).sum()
    }
}

/// Chunks that the driver did not take back. Their addresses are never used again.
#[derive(Debug)]
pub(crate) struct Zombie<H> {
    /// Whether they are still mapped, all of them, at their addresses.
    pub mapped: bool,
    pub chunks: Vec<Chunk<H>>,
}

#[derive(Debug)]
pub(crate) struct State<H> {
    pub policy: Policy,
    /// Frames of the largest chunk.
    pub largest_chunk: u32,
    pub space: Space,
    pub chunks: Chunks<H>,
    pub runs: Runs,
    pub budgets: Vec<Budget>,
    pub zombies: Vec<Zombie<H>>,
    /// What moves have left for the next one.
    pub stock: Stock<H>,
    /// Memory of ended blocks that others have.
    pub held: Held,
    /// What the program wants to stay where it is.
    pub asked: Asked,
    /// The program has given memory out by its physical pages, and may do so again.
    pub gives_out: bool,
    /// Each has room at two places until it is over.
    pub moves: Moves,
    /// Counts the frees whose memory came back while a GPU might still touch it, whichever: one row of numbers, so that free
    /// runs have an age whoever used them. Ticks under the pool's lock.
    pub clock: Arc<Clock>,
    /// Counts blocks placed by [`Policy::Interleave`].
    pub turn: u64,
    /// The caller's periods so far ([`crate::idle`]).
    pub period: u32,
    pub freed_in: FreedIn,
    totals: Totals,
}

/// Sums. The front serves and keeps blocks on its own; see there for what that means for each.
#[derive(Debug, Default)]
struct Totals {
    /// Blocks that began here less those that ended here; the front has counts of its own.
    blocks: i64,
    /// What was asked for in live blocks, and the front's credit.
    out_bytes: u64,
    /// The lowest `out_bytes` since [`State::least_out_bytes`] was asked.
    least_out_bytes: u64,
    /// The highest `out_bytes` without any credit and without `left_out`, and so never exceeded by live blocks of the program's.
    peak_live_bytes: u64,
    /// The highest `out_bytes` without slabs and `left_out`. Credit may be in it.
    peak_large_bytes: u64,
    /// The part of `out_bytes` that makes no peak ([`crate::Pool::note_peaks_without`]).
    left_out: u64,
    allocations: u64,
    reuses: u64,
    trimmed_bytes: u64,
}

impl<H: Copy> State<H> {
    pub fn new(config: &Config) -> Self {
        let specs = config.accounts.specs();
        let clock = Arc::new(Clock::new(specs.len()));
        let chunks = Chunks::new(config.bytes / FRAME);
        let runs = Runs::new(specs.len(), Arc::clone(&clock), Arc::clone(chunks.places()));
        Self {
            policy: config.policy,
            largest_chunk: (config.largest_chunk / FRAME) as u32,
            // A reservation beyond 2^32 frames (8 PiB) is not offered by any driver; the rest of one would go unused.
            space: Space::new(u32::try_from(config.bytes / FRAME).unwrap_or(u32::MAX)),
            chunks,
            runs,
            budgets: specs.iter().map(|spec| Budget::new(spec.place, &config.accounts)).collect(),
            zombies: Vec::new(),
            stock: Stock::new(specs.len()),
            held: Held::default(),
            asked: Asked::default(),
            gives_out: false,
            moves: Moves::default(),
            clock,
            turn: 0,
            period: 0,
            freed_in: FreedIn::default(),
            totals: Totals::default(),
        }
    }

    pub fn budget(&mut self, place: PlaceId) -> &mut Budget {
        &mut self.budgets[place.index()]
    }

    pub fn place(&self, id: PlaceId) -> Place {
        self.budgets[id.index()].place
    }

    /// The id of a place of this pool.
    pub fn id_of(&self, place: Place) -> Option<PlaceId> {
        PlaceId::all(self.budgets.len()).find(|id| self.place(*id) == place)
    }

    /// Whether the home GPU has turned out to be done with what was taken.
    pub fn has_become_quiet(&self, taken: &Taken) -> bool {
        taken.from.iter().all(|(_, freed)| freed.is_quiet(&self.clock))
    }

    /// Puts `taken` back among the free runs, as it was.
    pub fn put_back(&mut self, taken: &Taken) {
        let mut at = taken.start;
        for &(end, freed) in taken.from.iter() {
            self.take_back(at, end - at, freed);
            at = end;
        }
    }

    /// Makes `taken` a block; returns how much of it is on peers and on the host. `headroom` is what home's driver is known
    /// to have left, 0 if nobody asked. Either the front keeps nothing, or the sums stay below their peaks.
    pub fn award(
        &mut self,
        taken: &Taken,
        request: &Request,
        route: &Route,
        reused: bool,
        headroom: u64,
    ) -> (u64, u64) {
        let totals = &mut self.totals;
        totals.allocations += 1;
        totals.reuses += u64::from(reused);
        totals.blocks += 1;
        totals.out_bytes += request.bytes;
        totals.peak_live_bytes = totals.peak_live_bytes.max(totals.out_bytes.saturating_sub(totals.left_out));
        self.turn += 1;

        let (mut on_peers, mut on_host) = (0, 0);
        for (start, end, place) in self.chunks.places().rows(taken.start, taken.start + taken.frames) {
            let account = &mut self.budgets[place.index()];
            account.note_peak();
            if account.place.is_host() {
                on_host += bytes_of(end - start);
            } else if place != route.home {
                on_peers += bytes_of(end - start);
            }
        }

        if !route.has_home {
            return (on_peers, on_host);
        }
        let overflowed = self.policy.overflows(on_peers, on_host);
        let account = self.budget(route.home);
        if overflowed {
            account.overflowed();
        } else {
            account.served_at_home(request.bytes, headroom);
        }
        (on_peers, on_host)
    }

    /// The same for free memory at home that was taken by [`State::take_below_peaks`] under this very lock: there is no new peak, and
    /// nothing elsewhere.
    pub fn award_at_home(&mut self, home: PlaceId, bytes: u64) {
        let totals = &mut self.totals;
        totals.allocations += 1;
        totals.reuses += 1;
        totals.blocks += 1;
        totals.out_bytes += bytes;
        self.turn += 1;
        let budget = self.budget(home);
        budget.note_peak();
        budget.served_at_home(bytes, 0);
    }

    /// Ends the life of a block, which this GPU may be at work on still, or none.
    pub fn retire_block(&mut self, start: u32, record: &Record, busy: Option<PlaceId>) {
        let freed = self.freed_now(busy);
        self.end_block(record);
        self.take_back(start, record.frames, freed);
    }

    /// A block is one no longer; its frames are still out.
    pub fn end_block(&mut self, record: &Record) {
        self.totals.blocks -= 1;
        self.settle(record.bytes);
    }

    /// Counts so many bytes as asked for, on credit of the front, unless that were a new peak.
    pub fn lend(&mut self, bytes: u64) -> bool {
        let below = self.totals.out_bytes + bytes <= self.totals.peak_live_bytes;
        self.totals.out_bytes += if below { bytes } else { 0 };
        below
    }

    /// Notes how much is out without slabs, which have so many bytes of it: whenever `out_bytes` rose.
    pub fn note_large(&mut self, slabs: u64) {
        let totals = &mut self.totals;
        let large = totals.out_bytes.saturating_sub(slabs).saturating_sub(totals.left_out);
        totals.peak_large_bytes = totals.peak_large_bytes.max(large);
    }

    /// See [`crate::Pool::note_peaks_without`].
    pub fn note_peaks_without(&mut self, bytes: u64, at: impl Fn(Place) -> u64) {
        self.totals.left_out = bytes;
        for budget in &mut self.budgets {
            budget.leave_out(at(budget.place));
        }
    }

    /// Bytes asked for that make no peak.
    pub fn left_out(&self) -> u64 {
        self.totals.left_out
    }

    /// The most that was out at once without slabs, or somewhat more.
    pub fn peak_large_bytes(&self) -> u64 {
        self.totals.peak_large_bytes
    }

    /// So many bytes asked for are no longer out.
    pub fn settle(&mut self, bytes: u64) {
        let totals = &mut self.totals;
        totals.out_bytes -= bytes;
        totals.least_out_bytes = totals.least_out_bytes.min(totals.out_bytes);
    }

    /// The fewest bytes asked for that were out, the front's credit included, since this was asked last.
    pub fn least_out_bytes(&mut self) -> u64 {
        std::mem::replace(&mut self.totals.least_out_bytes, self.totals.out_bytes)
    }

    /// Puts frames that are out back among the free runs, each at the place where it lies now. The front may have cut and
    /// joined them since they went out, so their borders need not be those of runs.
    pub fn take_back(&mut self, start: u32, frames: u32, freed: Freed) {
        let end = start + frames;
        self.freed_in.note(start, end, self.period);
        // Mostly it went out as it comes back, from one place.
        if self.runs.starting_at(start).is_some_and(|run| run.frames == frames && run.kind == Kind::Out)
            && let Some(place) = self.chunks.places().of_all(start, frames)
        {
            self.budget(place).put_back(bytes_of(frames));
            return self.runs.release_at(place, start, freed);
        }
        let mut at = start;
        while at < end {
            let Some(&run) = self.runs.around(at).filter(|run| run.kind == Kind::Out) else {
                debug_assert!(false, "frame {at} is not out");
                return;
            };
            if run.start < at {
                self.runs.cut(run.start, at);
            }
            let Some((place, stop)) = self.chunks.places().row(at, run.end().min(end)) else {
                debug_assert!(false, "frame {at} is mapped nowhere");
                return;
            };
            if stop < run.end() {
                self.runs.cut(at, stop);
            }
            self.budget(place).put_back(bytes_of(stop - at));
            self.runs.release_at(place, at, freed);
            at = stop;
        }
    }

    /// Memory that comes back now, and that this GPU may be at work on still, or none. Quiet memory has no number of its
    /// own, and is as old as the latest that is not.
    pub fn freed_now(&self, gpu: Option<PlaceId>) -> Freed {
        let number = if gpu.is_some() { self.clock.tick() } else { self.clock.now() };
        Freed { number, gpu }
    }

    /// Whether a block of `used` bytes at `place`, of which the program asks for `bytes`, makes no new peak.
    pub fn is_below_peaks(&self, place: PlaceId, used: u64, bytes: u64) -> bool {
        self.budgets[place.index()].is_below_peak(used) && self.asks_below_peak(bytes)
    }

    /// Whether these frames, which were taken for a request of `bytes`, are a block that makes no new peak.
    pub fn is_award_below_peaks(&self, taken: &Taken, bytes: u64) -> bool {
        let mut rows = self.chunks.places().rows(taken.start, taken.start + taken.frames);
        self.asks_below_peak(bytes) && rows.all(|(.., place)| self.budgets[place.index()].is_below_peak(0))
    }

    fn asks_below_peak(&self, bytes: u64) -> bool {
        self.totals.out_bytes + bytes <= self.totals.peak_live_bytes
    }

    /// Takes chunks that moves left at `place` before period `since` out of the pool, at least `bytes` or all.
    pub fn evict_stock(&mut self, place: PlaceId, since: u32, bytes: u64) -> Vec<Leaving<H>> {
        let chunks = self.stock.clear(place, since, bytes);
        let sum = chunks.iter().map(|chunk| bytes_of(chunk.frames)).sum();
        self.budget(place).leave(sum);
        if chunks.is_empty() { Vec::new() } else { vec![Leaving { start: 0, frames: 0, chunks }] }
    }

    /// Takes quiet memory at `place` out of the pool in whole chunks, at least `bytes` or all, what moves left before all else and
    /// then the longest unused first.
    pub fn evict(&mut self, place: PlaceId, bytes: u64) -> Vec<Leaving<H>> {
        self.runs.settle();
        let mut cold: Vec<(u64, u32, u32)> = self
            .runs
            .free_at(place)
            .filter_map(|run| match run.kind {
                Kind::Free(freed) if freed.is_quiet(&self.clock) => Some((freed.number, run.start, run.end())),
                _ => None,
            })
            .collect();
        cold.sort_unstable();
        let mut leaving = self.evict_stock(place, u32::MAX, bytes);
        let mut sum = leaving.iter().map(Leaving::bytes).sum::<u64>();
        for (_, start, end) in cold {
            if sum >= bytes {
                break;
            }
            let (start, mut end) = self.chunks.whole_within(start, end);
            // No more chunks than are wanted, counted from the low end, so that the high part of a run stays one.
            let wanted = u32::try_from((bytes - sum).div_ceil(FRAME)).unwrap_or(u32::MAX);
            if wanted < end - start
                && let Some(last) = self.chunks.at(start + wanted - 1)
            {
                end = last.start + last.frames;
            }
            if let Some(row) = self.take_out(start, end, place) {
                sum += bytes_of(row.frames);
                leaving.push(row);
            }
        }
        leaving
    }

    /// Takes quiet chunks at `place` out of the pool that are spare beside `bytes` to be made there, no more than those, the longest
    /// unused first: free memory that is too small for what is asked for now would only add to it. What is held never becomes less
    /// by that, so a loop comes to have what it needs. So much is set aside for the same block, and so much of that it
    /// will use.
    pub fn evict_spare(&mut self, place: PlaceId, bytes: u64, gathered: u64, useful: u64) -> Vec<Leaving<H>> {
        let mut spare = self.budgets[place.index()].spare_with(bytes, gathered, useful);
        let mut leaving = Vec::new();
        if spare == 0 {
            return leaving;
        }
        let quiet = self.runs.free_at(place).filter_map(|run| match run.kind {
            Kind::Free(freed) if freed.is_quiet(&self.clock) => Some((freed.number, run.start, run.end())),
            _ => None,
        });
        let mut cold: Vec<(u64, u32, u32)> = quiet.collect();
        cold.sort_unstable();
        let mut most = bytes;
        for (_, start, end) in cold {
            let (start, end) = self.chunks.whole_within(start, end);
            let chunks: Vec<(u32, u32)> =
                self.chunks.touched(start, end).map(|chunk| (chunk.start, chunk.end())).collect();
            for (start, end) in chunks {
                if spare > 0
                    && bytes_of(end - start) <= most
                    && let Some(row) = self.take_out(start, end, place)
                {
                    let gone = bytes_of(row.frames);
                    (spare, most) = (spare.saturating_sub(gone), most - gone);
                    leaving.push(row);
                }
            }
        }
        self.budget(place).exchange(bytes - most, bytes + useful);
        leaving
    }

    /// Takes a free row of whole chunks at `place` out of the pool; nothing if it is empty or not free.
    pub fn take_out(&mut self, start: u32, end: u32, place: PlaceId) -> Option<Leaving<H>> {
        let row = self.unlist(start, end, place)?;
        self.budget(place).leave(bytes_of(end - start));
        Some(row)
    }

    /// The same where somebody else says what becomes of the memory.
    pub fn unlist(&mut self, start: u32, end: u32, place: PlaceId) -> Option<Leaving<H>> {
        if start == end {
            return None;
        }
        self.runs.take(start, end)?;
        self.runs.remove(start);
        let chunks = self.chunks.remove_range(start, end);
        let anchored =
            chunks.iter().filter(|chunk| !chunk.anchors.reasons().is_empty()).map(|chunk| bytes_of(chunk.frames));
        self.budget(place).release_anchor(anchored.sum());
        Some(Leaving { start, frames: end - start, chunks })
    }

    /// Bytes that [`State::evict`] could take out at `place`, after a wait for this GPU if any.
    pub fn evictable(&self, place: PlaceId, waits_for: Option<PlaceId>) -> u64 {
        let of_runs: u64 = self
            .runs
            .free_at(place)
            .filter(|run| matches!(run.kind, Kind::Free(freed) if self.is_usable(freed, waits_for)))
            .map(|run| {
                let (start, end) = self.chunks.whole_within(run.start, run.end());
                bytes_of(end - start)
            })
            .sum();
        of_runs + self.stock.bytes(place)
    }

    /// The GPUs but this one that may be at work on free memory at these places, or on memory of ended blocks that others have.
    pub fn others_at_work(&self, places: &[PlaceId], but: Option<PlaceId>) -> Vec<PlaceId> {
        let mut gpus = self.held.at_work(&self.clock);
        gpus.retain(|gpu| Some(*gpu) != but);
        for run in places.iter().flat_map(|&place| self.runs.free_at(place)) {
            if let Kind::Free(freed @ Freed { gpu: Some(gpu), .. }) = run.kind
                && Some(gpu) != but
                && !gpus.contains(&gpu)
                && !freed.is_quiet(&self.clock)
            {
                gpus.push(gpu);
            }
        }
        gpus
    }

    /// Whether this GPU may be at work on free memory at `place`.
    pub fn is_at_work(&self, place: PlaceId, gpu: PlaceId) -> bool {
        let by = |freed: Freed| freed.gpu == Some(gpu) && !freed.is_quiet(&self.clock);
        self.runs.free_at(place).any(|run| matches!(run.kind, Kind::Free(freed) if by(freed)))
    }

    pub fn count_trimmed(&mut self, bytes: u64) {
        self.totals.trimmed_bytes += bytes;
    }

    /// The pool in numbers, given what the front keeps at this moment.
    pub fn usage(&mut self, kept: &Sums, registry: &Registry) -> Usage {
        let asked = self.asked.ranges(registry).flat_map(|(start, end)| self.chunks.touched(start, end));
        let asked: BTreeMap<u32, &Chunk<H>> = asked.map(|chunk| (chunk.start, chunk)).collect();
        let Totals { blocks, out_bytes, peak_live_bytes, allocations, reuses, trimmed_bytes, .. } = self.totals;
        let mut places: Vec<_> =
            self.budgets.iter().zip(&kept.frames).map(|(budget, kept)| budget.usage(kept * FRAME)).collect();
        for chunk in asked.values().filter(|chunk| chunk.anchors.reasons().is_empty()) {
            places[chunk.place.index()].anchored += bytes_of(chunk.frames);
        }
        Usage {
            places,
            live_blocks: (blocks + kept.blocks) as u64,
            live_bytes: out_bytes - kept.credit,
            peak_live_bytes,
            allocations: allocations + kept.served,
            reuses: reuses + kept.served,
            trimmed_bytes,
        }
    }
}
