//! Freed memory that nobody needs goes home to the driver while the program runs.
//!
//! The pool has no clock: the caller divides time into periods ([`Pool::begin_period`]), and [`crate::freed_in`] remembers the period
//! in which memory was freed last. An allocation pays nothing for that, and a free that takes the pool's lock one look, mostly. What
//! the front keeps is freed as far as that knows when it comes back among the free runs, at the end of a period at the latest.
//!
//! Why chunks, and not free runs: neighbours become one run, so a small block that comes and goes beside a large free run would
//! make all of it look used. Why not the least number of free bytes in a period: that many bytes were not needed, but which they
//! were it does not say, and of two runs that are used in turn one would go and be missed.

use crate::place::PlaceId;
use crate::pool::Pool;
use crate::runs::Kind;
use crate::state::{Leaving, State, bytes_of};
use crate::sync::yield_now;
use crate::{Backend, FRAME, Place};
use std::cmp::Reverse;

/// What the pool has that no block stands on, and what of it could go back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreedMemory {
    /// Bytes of free memory in whole chunks by place, those that a GPU may still be at work on included; places without any are
    /// left out.
    pub whole: Vec<(Place, u64)>,
    /// Bytes that the front keeps, and slabs without blocks. Whether they are whole chunks is known only once a period ends.
    pub kept: u64,
    /// Bytes that the pool holds, used or not.
    pub held: u64,
    /// Bytes that the program asked for in the blocks it holds.
    pub live_bytes: u64,
    /// At most the fewest such bytes since this was asked last.
    pub least_live_bytes: u64,
    /// Allocations that the pool served so far.
    pub allocations: u64,
}

impl FreedMemory {
    /// Whether there is anything that could go back, or could turn out to be.
    pub fn is_any(&self) -> bool {
        self.kept > 0 || !self.whole.is_empty()
    }
}

impl<B: Backend> Pool<B> {
    /// Ends a period and begins the next; returns the number of the latter. Numbers rise from 1 on.
    pub fn begin_period(&self) -> u32 {
        self.slabs.halve_spare();
        // What comes back now was freed before.
        let mut state = self.lock_all();
        state.period += 1;
        state.stock.begin_period();
        state.period
    }

    /// Looks at what is free. One caller at a time.
    pub fn freed_memory(&self) -> FreedMemory {
        let mut state = self.lock();
        let most_credit = self.front.most_credit();
        let sums = self.front.sums();
        let least_live_bytes = state.least_out_bytes().saturating_sub(most_credit);
        let usage = state.usage(&sums, &self.registry);
        let ids = PlaceId::all(usage.places.len()).filter(|id| !state.place(*id).is_stored());
        let whole = ids.map(|id| (state.place(id), state.whole_at(id))).filter(|(_, bytes)| *bytes > 0).collect();
        FreedMemory {
            whole,
            kept: self.kept_frames().iter().sum::<u64>() * FRAME,
            held: usage.places.iter().filter(|place| !place.place.is_stored()).map(|place| place.held).sum(),
            live_bytes: usage.live_bytes,
            least_live_bytes,
            allocations: usage.allocations,
        }
    }

    /// The program begins to do again what it did, as far as its use of a place goes: see [`Pool::unneeded`].
    pub fn begin_cycle(&self, place: Place) {
        // What the front keeps is free memory, too.
        let mut state = self.lock_all();
        if let Some(id) = state.id_of(place) {
            state.budget(id).begin_cycle();
        }
    }

    /// Bytes at a place that moves can have without a program that goes on as it did missing them: what moves left there, and
    /// freed memory in whole chunks that no GPU is at work on, as far as it is beyond the most that was in use there at once since
    /// the last cycle but one began.
    pub fn unneeded(&self, place: Place) -> u64 {
        let state = self.lock();
        let Some(id) = state.id_of(place) else { return 0 };
        let stock = state.stock.bytes(id);
        let spare = state.budgets[id.index()].unneeded().saturating_sub(stock);
        stock + state.evictable(id, None).saturating_sub(stock).min(spare)
    }

    /// Returns freed memory to the driver (`cuMemUnmap`, `cuMemRelease`) in whole chunks on which nothing was freed in period
    /// `since` or later: at `place` or everywhere, the longest unused first and of these the largest. It stops once that are
    /// `most` bytes. Returns the bytes returned.
    ///
    /// Waits for nobody: what a GPU may be at work on stays. GPUs that `asks` agrees to are asked whether they are done.
    pub fn return_unused(&self, place: Option<Place>, since: u32, most: u64, asks: impl Fn(u32) -> bool) -> u64 {
        let targets: Vec<PlaceId> = PlaceId::all(self.accounts.specs().len())
            .filter(|id| place.is_none_or(|place| self.accounts.place(*id) == place))
            .collect();
        let at_work = self.lock().others_at_work(&targets, None);
        let asked = at_work.into_iter().filter(|gpu| self.ordinal(*gpu).is_some_and(&asks));
        asked.for_each(|gpu| self.look(gpu));
        let mut returned = 0;
        for id in targets {
            if returned >= most {
                break;
            }
            let leaving = self.lock().evict_unused(id, since, most - returned);
            let gone = self.send_back(leaving, &mut []);
            if gone > 0 {
                self.lock().budget(id).forget_ceiling();
            }
            returned += gone;
        }
        returned
    }

    /// Waits until nothing is on its way back at `place`, or anywhere, in other threads; whether anything was. They are inside
    /// the driver, and wait for no GPU.
    pub(crate) fn settle_leaving(&self, place: Option<Place>) -> bool {
        let mut any = false;
        loop {
            let is_leaving = {
                let state = self.lock();
                state.budgets.iter().any(|it| it.is_leaving() && place.is_none_or(|place| place == it.place))
            };
            if !is_leaving {
                return any;
            }
            any = true;
            yield_now();
        }
    }
}

impl<H: Copy> State<H> {
    /// Bytes of whole chunks at `place` that are free, what moves left included.
    fn whole_at(&self, place: PlaceId) -> u64 {
        let bounds = self.runs.free_at(place).map(|run| self.chunks.whole_within(run.start, run.end()));
        bounds.map(|(start, end)| bytes_of(end - start)).sum::<u64>() + self.stock.bytes(place)
    }

    /// Takes quiet chunks at `place` out of the pool on which nothing was freed in period `since` or later, nor moved from.
    fn evict_unused(&mut self, place: PlaceId, since: u32, most: u64) -> Vec<Leaving<H>> {
        self.runs.settle();
        let quiet = self.runs.free_at(place).filter(|run| match run.kind {
            Kind::Free(freed) => freed.is_quiet(&self.clock),
            Kind::Out => false,
        });
        let bounds = quiet.map(|run| self.chunks.whole_within(run.start, run.end()));
        let chunks = bounds.flat_map(|(start, end)| self.chunks.touched(start, end));
        let mut unused: Vec<_> = chunks
            .map(|chunk| (self.freed_in.latest(chunk.start, chunk.end()), Reverse(chunk.frames), chunk.start))
            .filter(|(freed_in, ..)| *freed_in < since)
            .collect();
        unused.sort_unstable();
        let mut leaving = self.evict_stock(place, since, most);
        let mut sum = leaving.iter().map(Leaving::bytes).sum::<u64>();
        for (_, Reverse(frames), start) in unused {
            if sum >= most {
                break;
            }
            if let Some(row) = self.take_out(start, start + frames, place) {
                sum += bytes_of(row.frames);
                leaving.push(row);
            }
        }
        leaving
    }
}
