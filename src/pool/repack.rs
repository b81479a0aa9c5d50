//! Chunks of which the program has freed a large part, and that cannot go back to the driver for the sake of the rest.
//!
//! A handle is mapped and released whole, so what is in use gets chunks of its own, at the same addresses and the same place, and the
//! large one goes. One after the other: what one chunk gives back is room for the rest of the next. Where the place has no room for the
//! first, what is in use on it goes to another place for a moment and comes back: both are moves of their own, for the large chunk must
//! be with the driver in between.

use crate::half_used::HalfUsed;
use crate::moving::{MoveError, Stopped, Wanted};
use crate::place::PlaceId;
use crate::pool::Pool;
use crate::state::bytes_of;
use crate::under_way::UnderWay;
use crate::{Mover, Place};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// How often what went elsewhere for a moment is tried to be brought back.
const RETURNS: u32 = 3;

/// What came of a [`Pool::repack`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repacked<E> {
    /// Bytes that came free: the driver's again, or freed memory that does not need to wait for anything.
    pub freed: u64,
    /// Bytes in use that were copied.
    pub copied: u64,
    /// Addresses and bytes of what is still elsewhere, since the program could not be stopped a second time or its room was taken.
    pub away: Vec<(u64, u64)>,
    /// Why a chunk was cut in part only, or no further one. Everything lies where [`Pool::pieces`] says.
    pub cut_short: Option<MoveError<E>>,
}

impl<E> Default for Repacked<E> {
    fn default() -> Self {
        Self { freed: 0, copied: 0, away: Vec::new(), cut_short: None }
    }
}

/// Why a chunk was cut in part only, if so.
type Cut<E> = Result<Option<MoveError<E>>, MoveError<E>>;

impl<B: Mover> Pool<B> {
    /// Frees parts of chunks at a place that nothing stands on, at least `bytes` or all, where they are at least half of their chunk.
    /// What is in use there may go over other places that `may_pass` agrees to, on the way of its blocks' homes. Chunks with a range, an
    /// address and its bytes, that `stays` are left alone. `stop` is called for
    /// each chunk, as by [`Pool::rearrange`], and once more each way over another place.
    ///
    /// # Errors
    /// See [`MoveError`], where nothing came of it at all. That there is no room for what is in use is none: such a chunk stays.
    pub fn repack<S: Stopped>(
        &self,
        place: Place,
        bytes: u64,
        may_pass: impl Fn(Place) -> bool,
        stays: impl Fn(u64, u64) -> bool,
        mut stop: impl FnMut() -> Option<S>,
    ) -> Result<Repacked<B::Error>, MoveError<B::Error>> {
        let mut under_way = Some(self.begin_move());
        let id = self.lock().id_of(place).ok_or(MoveError::NoPlace)?;
        let mut tried = BTreeSet::new();
        let mut repacked = Repacked::default();
        while repacked.freed < bytes
            && let Some((free, mut wanted)) = self.hold_half_used(id, &mut tried)
        {
            let is_fixed = |it: &Wanted| stays(self.address(it.start), bytes_of(it.end - it.start));
            let answer = if wanted.iter().any(is_fixed) {
                Err(MoveError::NotABlock)
            } else {
                match self.rechunk(&wanted, &mut under_way, &mut stop) {
                    Err(MoveError::Full { .. }) => {
                        let away = &mut repacked.away;
                        self.rechunk_over(id, &mut wanted, &mut under_way, &may_pass, &mut stop, away)
                    }
                    answer => answer,
                }
            };
            for Wanted { block, record, .. } in &wanted {
                self.let_go(self.address(*block), record.id);
            }
            match answer {
                Ok(None) => {
                    repacked.freed += free;
                    repacked.copied += wanted.iter().map(|it| bytes_of(it.end - it.start)).sum::<u64>();
                }
                // Another chunk may have less in use, or its blocks may live on.
                Err(MoveError::Full { .. } | MoveError::NotABlock) => {}
                Err(error) if repacked.freed == 0 => return Err(error),
                Ok(Some(error)) | Err(error) => {
                    repacked.cut_short = Some(error);
                    break;
                }
            }
        }
        Ok(repacked)
    }

    /// Moves what is held; an error where all of it stayed.
    fn rechunk<'a, S: Stopped>(
        &'a self,
        wanted: &[Wanted],
        under_way: &mut Option<UnderWay<'a, B>>,
        stop: &mut impl FnMut() -> Option<S>,
    ) -> Cut<B::Error> {
        let plan = self.prepare(wanted, false, &|_, _| true, under_way)?;
        Ok(self.act(plan, wanted, false, stop)?.cut_short)
    }

    /// The same where the place has no room for what is in use: over another place. What did not come back is `away`.
    fn rechunk_over<'a, S: Stopped>(
        &'a self,
        place: PlaceId,
        wanted: &mut [Wanted],
        under_way: &mut Option<UnderWay<'a, B>>,
        may_pass: &impl Fn(Place) -> bool,
        stop: &mut impl FnMut() -> Option<S>,
        away: &mut Vec<(u64, u64)>,
    ) -> Cut<B::Error> {
        let routes = || wanted.iter().filter_map(|it| self.routes.iter().find(|route| route.home == it.record.gpu));
        let order = routes().next().map_or(&[][..], |route| &route.order);
        let reached = |over: &PlaceId| routes().all(|route| route.order.contains(over));
        let over: Vec<PlaceId> = order
            .iter()
            .copied()
            .filter(|over| *over != place && reached(over) && may_pass(self.accounts.place(*over)))
            .collect();
        let mut answer = Err(MoveError::Full { place: self.accounts.place(place), missing: 0 });
        for over in over {
            wanted.iter_mut().for_each(|it| it.to = over);
            answer = self.rechunk(wanted, under_way, stop);
            if !matches!(answer, Err(MoveError::Full { .. })) {
                break;
            }
        }
        let mut answer = answer?;
        if answer.is_none() {
            wanted.iter_mut().for_each(|it| it.to = place);
            for _ in 0..RETURNS {
                match self.rechunk(wanted, under_way, stop) {
                    Err(MoveError::NotNow) => {}
                    Ok(None) => return Ok(None),
                    Ok(cut_short) => {
                        answer = cut_short;
                        break;
                    }
                    // What was seen to run past the gate ends all moves of whoever called.
                    Err(error @ MoveError::NotQuiet) => {
                        answer = Some(error);
                        break;
                    }
                    Err(_) => break,
                }
            }
        }
        away.extend(wanted.iter().map(|it| (self.address(it.start), bytes_of(it.end - it.start))));
        Ok(answer)
    }

    /// The chunk with the most free bytes of those that were not tried: how many, and its blocks, which are held.
    fn hold_half_used(&self, place: PlaceId, tried: &mut BTreeSet<u32>) -> Option<(u64, Vec<Wanted>)> {
        let mut given_up = Vec::new();
        let found = {
            let mut state = self.lock_all();
            let mut half_used = state.half_used(place, &self.registry);
            half_used.retain(|chunk| !tried.contains(&chunk.start));
            half_used.sort_unstable_by_key(|chunk| (Reverse(chunk.free), chunk.start));
            half_used.into_iter().find_map(|chunk| {
                tried.insert(chunk.start);
                match self.hold_all(place, &chunk) {
                    Ok(wanted) => Some((bytes_of(chunk.free), wanted)),
                    Err(some) => {
                        given_up.extend(some);
                        None
                    }
                }
            })
        };
        for Wanted { block, record, .. } in &given_up {
            self.let_go(self.address(*block), record.id);
        }
        found
    }

    /// Holds the blocks on a chunk; those that could be held, where one is being freed.
    fn hold_all(&self, place: PlaceId, chunk: &HalfUsed) -> Result<Vec<Wanted>, Vec<Wanted>> {
        let mut wanted = Vec::with_capacity(chunk.blocks.len());
        for &(block, record) in &chunk.blocks {
            if !self.registry.change(block, record.id, false, |record| record.holds += 1) {
                return Err(wanted);
            }
            let (start, end) = (block.max(chunk.start), (block + record.frames).min(chunk.end));
            wanted.push(Wanted { block, record, start, end, to: place, anew: true });
        }
        Ok(wanted)
    }
}
