//! Memory on its way back to the driver.

use crate::budget::Budget;
use crate::drive::{self, Retired};
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::state::{Leaving, bytes_of};
use crate::sync::yield_now;
use crate::{Backend, Place};

impl<B: Backend> Pool<B> {
    /// Returns freed memory to the driver in whole chunks (`cuMemUnmap`, `cuMemRelease`), the longest unused first: at
    /// `place` or everywhere, at least `bytes` or all. Returns the bytes returned.
    ///
    /// Waits for those of `waits_for`, GPUs, on whose lazily freed memory it depends, and for no other: what another GPU
    /// turns out to be at work on still stays. Where the backend cannot wait now, it returns only what is known to be quiet.
    pub fn trim(&self, place: Option<Place>, bytes: Option<u64>, waits_for: &[u32]) -> u64 {
        let wanted = bytes.unwrap_or(u64::MAX);
        let zombies = std::mem::take(&mut self.lock().zombies);
        let mut returned = 0;
        for zombie in zombies {
            let retired = drive::retire_again(&self.backend, self.base, zombie, &self.accounts);
            let mut state = self.lock();
            for chunk in &retired.gone {
                state.budget(chunk.place).unstick(bytes_of(chunk.frames));
                if place.is_none_or(|place| state.place(chunk.place) == place) {
                    returned += bytes_of(chunk.frames);
                }
            }
            state.count_trimmed(retired.gone.iter().map(|chunk| bytes_of(chunk.frames)).sum());
            state.zombies.extend(retired.zombies);
        }
        let targets: Vec<PlaceId> = PlaceId::all(self.accounts.specs().len())
            .filter(|id| place.is_none_or(|place| self.accounts.place(*id) == place))
            .collect();
        // First what is known to be quiet; somebody is waited for only if that was not enough.
        for quiet_first in [true, false] {
            if !quiet_first {
                if returned >= wanted {
                    break;
                }
                let at_work = self.lock_all().others_at_work(&targets, None);
                let may_wait = |gpu: &PlaceId| self.ordinal(*gpu).is_some_and(|ordinal| waits_for.contains(&ordinal));
                let (own, others): (Vec<_>, Vec<_>) = at_work.into_iter().partition(may_wait);
                others.into_iter().for_each(|gpu| self.look(gpu));
                if !own.is_empty() {
                    // Where nobody can wait now, what is quiet goes all the same.
                    let _ = self.quiesce(self.front.own(), &own);
                }
            }
            for &id in &targets {
                if returned >= wanted {
                    break;
                }
                let leaving = {
                    let mut state = self.lock_all();
                    let mut leaving = state.evict_held(Some(id));
                    let held = leaving.iter().map(|row| bytes_of(row.frames)).sum();
                    leaving.append(&mut state.evict(id, (wanted - returned).saturating_sub(held)));
                    leaving
                };
                let gone = self.send_back(leaving, &mut []);
                if gone > 0 {
                    self.lock().budget(id).forget_ceiling();
                }
                returned += gone;
            }
        }
        returned
    }

    /// Returns all freed memory, as [`Pool::trim`] does, and waits until what other threads return at this moment is gone as well: they
    /// are inside the driver, and wait for no GPU. The bytes returned here.
    pub fn trim_all(&self, waits_for: &[u32]) -> u64 {
        let returned = self.trim(None, None, waits_for);
        while self.lock().budgets.iter().any(Budget::is_returning) {
            yield_now();
        }
        returned
    }

    /// Returns all freed memory at `place` or everywhere, as [`Pool::trim`] does, and what moves under way and other threads that
    /// return memory leave of it. The bytes returned here, and whether others returned anything.
    pub fn give_back(&self, place: Option<Place>, waits_for: &[u32]) -> (u64, bool) {
        let returned = self.trim(place, None, waits_for);
        let settled = self.settle(place);
        // What a move has vacated is kept for the next one.
        let more = if settled { self.trim(place, None, &[]) } else { 0 };
        (returned + more, settled)
    }

    /// Returns evicted chunks to the driver; returns the bytes that went. `credits` are paid back as they go.
    pub(crate) fn send_back(&self, leaving: Vec<Leaving<B::Handle>>, credits: &mut [(PlaceId, u64)]) -> u64 {
        let mut sum = 0;
        for row in leaving {
            let (start, frames) = (row.start, row.frames);
            let Retired { gone, zombies, unmapped } = drive::dismantle(&self.backend, self.base, row, &self.accounts);
            let mut state = self.lock();
            for chunk in &gone {
                let bytes = bytes_of(chunk.frames);
                state.budget(chunk.place).left(bytes, 0);
                if let Some((place, credit)) = credits.iter_mut().find(|(place, _)| *place == chunk.place) {
                    let paid = bytes.min(*credit);
                    state.budget(*place).repay(paid);
                    *credit -= paid;
                }
                sum += if self.accounts.place(chunk.place).is_stored() { 0 } else { bytes };
            }
            for chunk in zombies.iter().flat_map(|zombie| &zombie.chunks) {
                state.budget(chunk.place).left(0, bytes_of(chunk.frames));
            }
            if unmapped {
                state.space.give(start, frames);
            }
            let memory = gone.iter().filter(|chunk| !self.accounts.place(chunk.place).is_stored());
            state.count_trimmed(memory.map(|chunk| bytes_of(chunk.frames)).sum());
            state.zombies.extend(zombies);
        }
        sum
    }
}
