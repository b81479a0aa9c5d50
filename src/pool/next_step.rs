//! Decides what an allocation needs next. Under the lock, [`State::next_step`] looks at the state and chooses one [`Step`]; the
//! caller carries it out without the lock and asks again, until the request is served or refused.

use crate::budget::Budget;
use crate::gather::Gathered;
use crate::place::PlaceId;
use crate::registry::Registry;
use crate::state::{From, Leaving, Route, State, Taken, bytes_of};
use crate::{FRAME, Place, Policy, Refusal, Repacks, Request, Room, placement};

/// Whether memory is made for a request that could have free memory once the home GPU is done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fresh {
    /// If it comes to a wait.
    IfDue,
    /// It came to that, and the GPU is not done.
    Wanted,
    /// There is none to be had, or no more than that is to be held.
    Unavailable,
}

/// A request being served, and what was found out for it between the looks at the state.
#[derive(Debug)]
pub(crate) struct Attempt<'a> {
    pub request: &'a Request,
    pub route: &'a Route,
    /// The block is for small ones to stand on.
    pub slab: bool,
    /// The size in whole frames.
    pub bytes: u64,
    /// What the backend said of the first places of the route.
    pub headrooms: Vec<Option<u64>>,
    /// The home GPU cannot be waited for (or just was): only memory that is known to be quiet counts from here on.
    pub only_quiesced: bool,
    /// Whether memory is made for it rather than waited for.
    pub fresh: Fresh,
    /// Other GPUs were asked whether they are done with what could serve it.
    pub looked: bool,
    /// The home GPU was asked whether it is done with what could go for it.
    pub looked_home: bool,
    /// Old ceilings were forgotten for it.
    pub forgot_ceilings: bool,
    /// Everything that could be returned was, to find address space.
    pub trimmed: bool,
    /// The last of the moves that it waits for rather than be served elsewhere; later ones are not waited for, of which there may always
    /// be some.
    pub last_move: Option<u64>,
}

impl<'a> Attempt<'a> {
    /// Nothing was found out yet.
    pub fn new(request: &'a Request, route: &'a Route, slab: bool) -> Self {
        Self {
            request,
            route,
            slab,
            bytes: placement::round_up(request.bytes),
            headrooms: Vec::new(),
            only_quiesced: false,
            fresh: Fresh::IfDue,
            looked: false,
            looked_home: false,
            forgot_ceilings: false,
            // The request that comes after one away from home returns everything if it has to.
            trimmed: !route.has_home,
            last_move: None,
        }
    }
}

/// Chunks to create in a new range, and what has to go first.
#[derive(Debug)]
pub(crate) struct Growth<H> {
    pub start: u32,
    /// With the rest of what is gathered.
    pub frames: u32,
    /// Free memory that stands first in the range, at the place of the first piece.
    pub gathered: Gathered<H>,
    /// What is made, in address order.
    pub pieces: Vec<(PlaceId, u64)>,
    pub leaving: Vec<Leaving<H>>,
    /// What each place's budget counts on of `leaving`.
    pub credits: Vec<(PlaceId, u64)>,
}

/// What to do next, without the lock.
#[derive(Debug)]
pub(crate) enum Step<H, E> {
    /// Served from free memory.
    Done(Taken),
    /// Served from free memory, once the home GPU is done with it.
    Wait(Taken),
    /// Find out what this place has left.
    Ask(Place),
    /// Let the home GPU finish, so that freed memory can be returned.
    Quiesce,
    /// Ask these GPUs, which others work on, whether they are done with freed memory here.
    Look(Vec<PlaceId>),
    /// Return everything, so that address space comes free.
    Trim,
    /// Create memory.
    Grow(Growth<H>),
    /// Look again: memory that another thread is returning will be room in a moment.
    Settle,
    /// Not served.
    Refuse(Refusal<E>),
}

impl<H: Copy> State<H> {
    /// The next step for `attempt`. Budgets and address space of a [`Step::Grow`], and the memory of a [`Step::Wait`],
    /// are set aside for the caller, who must see the step through or take it back.
    pub fn next_step<E>(&mut self, attempt: &mut Attempt, registry: &Registry) -> Step<H, E> {
        if attempt.fresh == Fresh::Wanted
            && let Some(step) = self.serve_without_wait(attempt)
        {
            return step;
        }
        match self.step_now(attempt, registry) {
            Step::Refuse(Refusal::Full { .. })
                if self.moves.are_any() || self.budgets.iter().any(Budget::is_leaving) =>
            {
                Step::Settle
            }
            Step::Refuse(Refusal::Full { .. }) if !attempt.trimmed && self.has_held(None, Some(attempt.route.home)) => {
                Step::Trim
            }
            // What lies beside memory that the home GPU may be at work on is one with it only after the wait.
            Step::Refuse(Refusal::Full { .. })
                if !attempt.only_quiesced
                    && attempt.route.order.iter().any(|&place| self.is_at_work(place, attempt.route.home)) =>
            {
                Step::Quiesce
            }
            Step::Refuse(Refusal::Full { missing }) => {
                let instead =
                    self.half_used_instead(attempt, None, registry).or_else(|| self.lacks_instead(attempt, None));
                let far = || attempt.request.can_widen.then_some(Refusal::Far { bytes: missing });
                Step::Refuse(instead.or_else(far).unwrap_or(Refusal::Full { missing }))
            }
            step => step,
        }
    }

    fn step_now<E>(&mut self, attempt: &mut Attempt, registry: &Registry) -> Step<H, E> {
        let Attempt { route, bytes, .. } = *attempt;
        self.runs.settle();
        let waits_for = if attempt.only_quiesced { None } else { Some(route.home) };
        let frames = u32::try_from(bytes / FRAME).unwrap_or(u32::MAX);
        let is_local = self.policy == Policy::LocalFirst && route.has_home;
        if is_local
            && self.keeps_apart(frames)
            && let Some(step) = self.serve_apart(attempt, frames, waits_for)
        {
            return step;
        }
        if is_local && let Some(taken) = self.take_best(route.home, frames, waits_for) {
            return self.hand_out(taken, attempt);
        }
        if !std::mem::replace(&mut attempt.looked, true) {
            let others = self.others_at_work(&route.order, Some(route.home));
            if !others.is_empty() {
                return Step::Look(others);
            }
        }

        // What the policy would do if nobody else used the places: an upper bound, known without asking the backend. It
        // finds the freed memory to reuse in the steady state, and what cannot be had in any case.
        let rooms = self.rooms(route, |state, place, _| state.budgets[place.index()].room_by_limit());
        let wanted = match self.spread(bytes, &rooms) {
            Err(missing) => return Step::Refuse(Refusal::Full { missing }),
            Ok(pieces) => pieces,
        };
        if self.far_bytes(&wanted, route) > (0, 0) && self.is_in_flux(route, &wanted) && self.awaits_moves(attempt) {
            return Step::Settle;
        }
        // Freed memory of the host is no reason to stay there.
        if let Some(instead) = self.far_instead(attempt, &wanted) {
            return Step::Refuse(instead);
        }
        if let Some(step) = self.serve_warm(&wanted, attempt, frames, waits_for) {
            return step;
        }
        self.step_to_growth(attempt, frames, waits_for, &wanted, registry)
    }

    /// Serves a small block on chunks of its own size, new ones where there is room; `None` where there is none, and it may stand anywhere.
    fn serve_apart<E>(&mut self, attempt: &mut Attempt, frames: u32, waits_for: Option<PlaceId>) -> Option<Step<H, E>> {
        let home = attempt.route.home;
        if let Some(taken) = self.take_apart(home, frames, waits_for) {
            return Some(self.hand_out(taken, attempt));
        }
        let can_grow = |state: &Self, headroom| state.budgets[home.index()].growth(headroom) >= attempt.bytes;
        if !can_grow(self, None) {
            return None;
        }
        match attempt.headrooms.first() {
            None => Some(Step::Ask(self.place(home))),
            Some(&headroom) if can_grow(self, headroom) => Some(self.set_aside(attempt, vec![(home, attempt.bytes)])),
            Some(_) => None,
        }
    }

    /// `wanted`: the pieces as they would be if all memory that no block stands on were the driver's again.
    fn step_to_growth<E>(
        &mut self,
        attempt: &mut Attempt,
        frames: u32,
        waits_for: Option<PlaceId>,
        wanted: &[(PlaceId, u64)],
        registry: &Registry,
    ) -> Step<H, E> {
        let Attempt { route, bytes, .. } = *attempt;
        // Memory that is on its way back in another thread is room in a moment: no block goes elsewhere, and nobody is
        // refused, for its sake.
        let is_leaving = wanted.iter().any(|(place, _)| self.budgets[place.index()].is_leaving())
            || self.is_in_flux(route, wanted) && self.awaits_moves(attempt);
        // The other policies cannot choose before they have heard of every GPU.
        let needed = if self.policy == Policy::LocalFirst { 1 } else { route.gpus };
        loop {
            let asked = attempt.headrooms.len();
            let mut missing = bytes;
            if asked >= needed {
                let rooms = self.rooms(route, |state, place, index| {
                    let headroom = attempt.headrooms.get(index);
                    headroom.map_or(0, |headroom| state.makeable(place, *headroom, waits_for))
                });
                match self.spread(bytes, &rooms) {
                    Ok(pieces) if is_leaving && pieces != wanted => return Step::Settle,
                    Ok(pieces) => {
                        if pieces != wanted
                            && let Some(instead) = self.half_used_instead(attempt, Some(&pieces), registry)
                        {
                            return Step::Refuse(instead);
                        }
                        if pieces != wanted
                            && let Some(instead) = self.lacks_instead(attempt, Some(&pieces))
                        {
                            // What the program itself keeps unused goes first.
                            let is_soft = self.is_soft(&pieces, attempt);
                            return Step::Refuse(if is_soft { Refusal::Soft } else { instead });
                        }
                        if let Some(instead) = self.far_instead(attempt, &pieces) {
                            return Step::Refuse(instead);
                        }
                        let warm = self.serve_warm(&pieces, attempt, frames, waits_for);
                        return warm.unwrap_or_else(|| self.set_aside(attempt, pieces));
                    }
                    Err(lacking) => missing = lacking,
                }
                // A place too full to grow may still have the row of free frames that is wanted.
                for &place in route.order[..asked].iter().filter(|_| !is_leaving) {
                    if self.is_open_to(place, route)
                        && self.runs.has_fit(place, frames, waits_for)
                        && let Some(step) = self.serve_warm(&[(place, bytes)], attempt, frames, waits_for)
                    {
                        return step;
                    }
                }
            }
            let Some(&next) = route.order.get(asked) else {
                if self.forget_ceilings(attempt) {
                    continue;
                }
                return Step::Refuse(Refusal::Full { missing });
            };
            let account = &self.budgets[next.index()];
            if self.is_open_to(next, route) && account.growth(None) > 0 {
                return Step::Ask(account.place);
            }
            // At its limit, or it does not lend; the driver's answer would change nothing.
            attempt.headrooms.push(Some(0));
        }
    }

    /// Whether a move is waited for that may be what keeps the request from a better place.
    fn awaits_moves(&self, attempt: &mut Attempt) -> bool {
        let last = *attempt.last_move.get_or_insert(self.moves.last());
        self.moves.are_any_until(last)
    }

    /// Whether anybody has memory for a moment, or will, at the places of these pieces or at better ones.
    fn is_in_flux(&self, route: &Route, pieces: &[(PlaceId, u64)]) -> bool {
        let last = route.order.iter().rposition(|place| pieces.iter().any(|piece| piece.0 == *place));
        let places = route.order.iter().take(last.map_or(0, |last| last + 1));
        places.map(|place| &self.budgets[place.index()]).any(Budget::is_in_flux)
    }

    /// Where chunks that are half used keep the request from a better place than `pieces`, or from any, and how much they would have to
    /// give.
    fn half_used_instead<E>(
        &mut self,
        attempt: &Attempt,
        pieces: Option<&[(PlaceId, u64)]>,
        registry: &Registry,
    ) -> Option<Refusal<E>> {
        let Attempt { request, route, bytes, only_quiesced, .. } = *attempt;
        match request.repacks {
            Repacks::Never => return None,
            Repacks::ToFit if pieces.is_some() => return None,
            Repacks::ToFit | Repacks::ToStay => {}
        }
        let waits_for = if only_quiesced { None } else { Some(route.home) };
        let mut rooms = Vec::new();
        for (&place, &headroom) in route.order.iter().zip(&attempt.headrooms) {
            rooms.push(if self.is_open_to(place, route) { self.makeable(place, headroom, waits_for) } else { 0 });
        }
        let mut more = Vec::new();
        for (&place, &room) in route.order.iter().zip(&rooms) {
            let is_open = self.is_open_to(place, route) && !self.budgets[place.index()].is_beyond_limit();
            let half_used = if is_open { self.half_used(place, registry) } else { Vec::new() };
            let bytes = room + half_used.iter().map(|chunk| bytes_of(chunk.free)).sum::<u64>();
            more.push(Room { place: self.place(place), bytes });
        }
        let better = self.spread(bytes, &more).ok()?;
        if pieces.is_some_and(|pieces| self.far_bytes(&better, route) >= self.far_bytes(pieces, route)) {
            return None;
        }
        route.order.iter().zip(&rooms).find_map(|(&place, &room)| {
            let wanted: u64 = better.iter().filter(|piece| piece.0 == place).map(|piece| piece.1).sum();
            let lacking = wanted.saturating_sub(room);
            (lacking > 0).then(|| Refusal::HalfUsed { place: self.place(place), bytes: lacking })
        })
    }

    /// Where others than this pool have so much of the home GPU that the request goes elsewhere (`pieces`), or nowhere: how much.
    fn lacks_instead<E>(&self, attempt: &Attempt, pieces: Option<&[(PlaceId, u64)]>) -> Option<Refusal<E>> {
        let Attempt { request, route, bytes, only_quiesced, .. } = *attempt;
        if !request.can_ask || !route.has_home || self.policy != Policy::LocalFirst {
            return None;
        }
        let home = route.home;
        let at_home =
            |pieces: &[(PlaceId, u64)]| pieces.iter().filter(|piece| piece.0 == home).map(|piece| piece.1).sum();
        let by_limit = self.rooms(route, |state, place, _| state.budgets[place.index()].room_by_limit());
        let wanted: u64 = at_home(&self.spread(bytes, &by_limit).ok()?);
        let has = pieces.map_or_else(
            || {
                let waits_for = if only_quiesced { None } else { Some(home) };
                self.makeable(home, attempt.headrooms.first().copied().flatten(), waits_for)
            },
            at_home,
        );
        Some(wanted.saturating_sub(has)).filter(|bytes| *bytes > 0).map(|bytes| Refusal::Lacks { bytes })
    }

    /// How much of these pieces the host would have, where the caller can do something about it.
    fn far_instead<E>(&self, attempt: &Attempt, pieces: &[(PlaceId, u64)]) -> Option<Refusal<E>> {
        let (bytes, _) = self.far_bytes(pieces, attempt.route);
        (attempt.request.can_widen && bytes > 0).then_some(Refusal::Far { bytes })
    }

    /// Bytes on the host, and those on peers where the policy would rather have them at home.
    fn far_bytes(&self, pieces: &[(PlaceId, u64)], route: &Route) -> (u64, u64) {
        let sum = |is_meant: &dyn Fn(PlaceId) -> bool| {
            pieces.iter().filter(|piece| is_meant(piece.0)).map(|piece| piece.1).sum::<u64>()
        };
        let on_host = sum(&|place| self.place(place).is_host());
        let on_peers = sum(&|place| place != route.home && !self.place(place).is_host());
        (on_host, if self.policy == Policy::LocalFirst { on_peers } else { 0 })
    }

    /// A place that ran out long ago may have room again; before the request is refused for that, and once in its course,
    /// the limit of every place is trusted again. Whether that changes anything.
    fn forget_ceilings(&mut self, attempt: &mut Attempt) -> bool {
        if std::mem::replace(&mut attempt.forgot_ceilings, true) {
            return false;
        }
        let mut any = false;
        for &place in &attempt.route.order {
            any |= self.budget(place).forget_ceiling();
        }
        if any {
            attempt.headrooms.clear();
        }
        any
    }

    /// Serves the block from free memory if there is any as good as `pieces`; refuses softly if that is due.
    fn serve_warm<E>(
        &mut self,
        pieces: &[(PlaceId, u64)],
        attempt: &Attempt,
        frames: u32,
        waits_for: Option<PlaceId>,
    ) -> Option<Step<H, E>> {
        if self.is_soft(pieces, attempt) {
            return Some(Step::Refuse(Refusal::Soft));
        }
        let taken = self.take_like(pieces, attempt.route, frames, waits_for)?;
        Some(self.hand_out(taken, attempt))
    }

    pub fn hand_out<E>(&self, taken: Taken, attempt: &Attempt) -> Step<H, E> {
        if !taken.busy {
            return Step::Done(taken);
        }
        let has_other = self.has_other(attempt, taken.frames);
        Step::Wait(Taken { has_other, ..taken })
    }

    /// Whether the request may be served at home without a wait for the GPU that is at work on the best fit: by other free memory or by new.
    pub fn has_other(&self, attempt: &Attempt, frames: u32) -> bool {
        attempt.fresh == Fresh::IfDue
            && (self.has_quiet(attempt.route.home, frames) || self.can_be_fresh(attempt, None))
    }

    /// Whether memory may be made at home for the request, given what the driver has left there, rather than waited for. The other policies choose
    /// a place by what is free there, and where home is full memory elsewhere is no better than a wait.
    fn can_be_fresh(&self, attempt: &Attempt, headroom: Option<u64>) -> bool {
        let Attempt { route, bytes, .. } = *attempt;
        let budget = &self.budgets[route.home.index()];
        self.policy == Policy::LocalFirst
            && route.has_home
            && budget.may_run_ahead(bytes)
            && budget.growth(headroom) >= bytes
    }

    /// Serves the request at home without a wait: from any free memory that is quiet, else from new memory. `None` where there is neither, and
    /// it comes to the wait.
    fn serve_without_wait<E>(&mut self, attempt: &mut Attempt) -> Option<Step<H, E>> {
        let (home, frames) = (attempt.route.home, u32::try_from(attempt.bytes / FRAME).unwrap_or(u32::MAX));
        self.runs.settle();
        let quiet = if self.keeps_apart(frames) {
            self.take_apart(home, frames, None)
        } else {
            self.take_best(home, frames, None)
        };
        if let Some(taken) = quiet {
            return Some(Step::Done(taken));
        }
        if !std::mem::replace(&mut attempt.looked, true) {
            let others = self.others_at_work(&attempt.route.order, Some(home));
            if !others.is_empty() {
                return Some(Step::Look(others));
            }
        }
        let headroom = attempt.headrooms.first().copied();
        if headroom.is_none() && self.can_be_fresh(attempt, None) {
            return Some(Step::Ask(self.place(home)));
        }
        if headroom.is_some_and(|headroom| self.can_be_fresh(attempt, headroom)) {
            // It was, just now.
            attempt.looked_home = true;
            // Where address space is lacking, more than this request would have to wait for it.
            if let step @ Step::Grow(_) = self.set_aside(attempt, vec![(home, attempt.bytes)]) {
                return Some(step);
            }
        }
        attempt.fresh = Fresh::Unavailable;
        None
    }

    fn is_soft(&mut self, pieces: &[(PlaceId, u64)], attempt: &Attempt) -> bool {
        if !attempt.request.soft_refusal {
            return false;
        }
        let (mut on_peers, mut on_host) = (0, 0);
        for &(place, bytes) in pieces {
            if self.place(place).is_host() {
                on_host += bytes;
            } else if place != attempt.route.home {
                on_peers += bytes;
            }
        }
        self.policy.overflows(on_peers, on_host) && self.budget(attempt.route.home).refuse_softly(attempt.request.bytes)
    }

    /// Sets budgets, address space and the memory that has to go first aside for `pieces`.
    fn set_aside<E>(&mut self, attempt: &mut Attempt, mut pieces: Vec<(PlaceId, u64)>) -> Step<H, E> {
        let is_spare = |&(place, bytes): &(PlaceId, u64)| self.budgets[place.index()].spare_beside(bytes) > 0;
        if !attempt.looked_home
            && pieces.iter().any(is_spare)
            && self.is_at_work(attempt.route.home, attempt.route.home)
        {
            attempt.looked_home = true;
            return Step::Look(vec![attempt.route.home]);
        }
        let headroom = |place: PlaceId| {
            let index = attempt.route.order.iter().position(|&other| other == place);
            index.and_then(|index| attempt.headrooms.get(index)).copied().flatten()
        };
        let mut sums: Vec<(PlaceId, u64)> = Vec::new();
        for &(place, bytes) in &pieces {
            match sums.iter_mut().find(|(other, _)| *other == place) {
                Some((_, sum)) => *sum += bytes,
                None => sums.push((place, bytes)),
            }
        }
        let excess = |state: &Self, place: PlaceId, bytes: u64| {
            bytes.saturating_sub(state.budgets[place.index()].growth(headroom(place)))
        };
        if sums.iter().any(|&(place, bytes)| self.evictable(place, None) < excess(self, place, bytes)) {
            return Step::Quiesce;
        }
        let mut gathered = Gathered::nothing();
        if let ([(place, made)], [(_, sum)]) = (&mut pieces[..], &mut sums[..]) {
            let excess = excess(self, *place, *sum);
            let spare = self.budgets[place.index()].spare_beside(*sum).min(*sum);
            // Where the place is full, what is missing; else what would be exchanged.
            let wanted = if excess > 0 { excess } else { spare };
            gathered = self.gather(*place, (*sum / FRAME) as u32, (wanted / FRAME) as u32, excess == 0);
            if excess == 0 {
                self.budget(*place).exchange(gathered.useful().min(spare), *sum);
            }
            *made -= gathered.useful();
            *sum = *made;
        }
        let frames = attempt.bytes / FRAME + gathered.rest.map_or(0, |rest| u64::from(rest.frames));
        let Some(start) = self.space.take(frames) else {
            self.scatter(gathered.rows);
            return if attempt.trimmed { Step::Refuse(Refusal::AddressSpace) } else { Step::Trim };
        };
        let (mut leaving, mut credits) = (Vec::new(), Vec::new());
        for &(place, bytes) in &sums {
            let excess = excess(self, place, bytes);
            if excess > 0 {
                leaving.append(&mut self.evict(place, excess));
                self.budget(place).lend(excess);
                credits.push((place, excess));
            }
            leaving.append(&mut self.evict_spare(place, bytes, gathered.bytes(), gathered.useful()));
            self.budget(place).promise(bytes);
        }
        for budget in &mut self.budgets {
            budget.age_ceiling();
        }
        Step::Grow(Growth { start, frames: frames as u32, gathered, pieces, leaving, credits })
    }

    fn rooms(&self, route: &Route, bytes: impl Fn(&Self, PlaceId, usize) -> u64) -> Vec<Room> {
        let places = route.order.iter().enumerate();
        let room = |index, id| if self.is_open_to(id, route) { bytes(self, id, index) } else { 0 };
        places.map(|(index, &id)| Room { place: self.place(id), bytes: room(index, id) }).collect()
    }

    /// What could be had at a place by making memory, with room that free memory leaves if it goes back first.
    fn makeable(&self, place: PlaceId, headroom: Option<u64>, waits_for: Option<PlaceId>) -> u64 {
        let budget = &self.budgets[place.index()];
        // What goes back makes no room while that much is held beyond the limit.
        if budget.is_overdrawn() {
            return 0;
        }
        budget.growth(headroom).saturating_add(self.evictable(place, waits_for))
    }

    fn spread(&self, bytes: u64, rooms: &[Room]) -> Result<Vec<(PlaceId, u64)>, u64> {
        let pieces = placement::spread(bytes, rooms, self.policy, self.turn)?;
        Ok(pieces.into_iter().filter_map(|(place, bytes)| Some((self.id_of(place)?, bytes))).collect())
    }

    /// The growth came to nothing: its budgets are free again.
    pub fn withdraw(&mut self, growth: &Growth<H>) {
        for &(place, bytes) in &growth.pieces {
            self.budget(place).withdraw(bytes);
        }
    }

    /// The growth is done: its range is there to become a block. Returns what home's driver is known to have left, too.
    pub fn deliver(&mut self, growth: &Growth<H>, attempt: &Attempt) -> (Taken, u64) {
        let mut at_home = 0;
        for &(place, bytes) in &growth.pieces {
            self.budget(place).deliver(bytes);
            at_home += if place == attempt.route.home { bytes } else { 0 };
        }
        if let Some(&(place, _)) = growth.pieces.first() {
            self.settle_gathered(&growth.gathered, place, growth.start + growth.frames);
        }
        let frames = growth.frames - growth.gathered.rest.map_or(0, |rest| rest.frames);
        self.runs.add(growth.start, frames, crate::runs::Kind::Out);
        let taken = Taken { start: growth.start, frames, busy: false, has_other: false, from: From::Nowhere };
        let headroom = attempt.headrooms.first().copied().flatten().unwrap_or(u64::MAX).saturating_sub(at_home);
        debug_assert_eq!(bytes_of(frames), attempt.bytes);
        (taken, headroom)
    }
}
