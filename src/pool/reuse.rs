//! Serving a block from freed memory that is still mapped.

use crate::FRAME;
use crate::place::PlaceId;
use crate::runs::{Freed, Kind, Run};
use crate::state::{From, Route, State, Taken, bytes_of};

/// How much less of home, or more of the host, a reused row of frames may have than fresh memory would: two large chunks.
/// The borders of a block that was freed are rarely where the placement of today would put them.
const TOLERANCE: u64 = 64 << 20;
/// Frames of the largest block that is kept apart from larger ones where the program gives memory out, and of the largest chunk for that: 32 MiB,
/// as much as a chunk has that is worth moving, or a quarter of the largest chunk.
const APART: u32 = ((32 << 20) / FRAME) as u32;
/// How many free runs are looked at for one of such chunks.
const LOOKS: usize = 64;

impl<H: Copy> State<H> {
    /// Whether memory freed like that is of use to somebody who can wait for this GPU, or for none.
    pub fn is_usable(&self, freed: Freed, waits_for: Option<PlaceId>) -> bool {
        freed.is_usable(&self.clock, waits_for)
    }

    /// Whether blocks of this route may stand at a place: it is home, or it lends.
    pub fn is_open_to(&self, place: PlaceId, route: &Route) -> bool {
        place == route.home || self.budgets[place.index()].lends()
    }

    /// Whether so much free memory at a place may become a block's, after its limit was lowered, too.
    fn may_reuse(&self, place: PlaceId, bytes: u64) -> bool {
        let budget = &self.budgets[place.index()];
        !budget.is_beyond_limit() || budget.room_by_limit() >= bytes
    }

    /// Whether a block of so many frames is to stand on chunks of its own size: an anchor holds a chunk as a whole, and where the program gives
    /// memory out, what is given out of 2 MiB would otherwise fix 512.
    pub fn keeps_apart(&self, frames: u32) -> bool {
        self.gives_out && frames <= self.apart()
    }

    fn apart(&self) -> u32 {
        APART.min(self.largest_chunk / 4)
    }

    /// Takes the best fit of a few at `place` where it stands on small chunks, or on such as must stay in any case.
    pub fn take_apart(&mut self, place: PlaceId, frames: u32, waits_for: Option<PlaceId>) -> Option<Taken> {
        if !self.may_reuse(place, bytes_of(frames)) {
            return None;
        }
        let is_apart = |run: &&Run| {
            let mut chunks = self.chunks.touched(run.start, run.start + frames);
            matches!(run.kind, Kind::Free(freed) if self.is_usable(freed, waits_for))
                && chunks.all(|chunk| chunk.frames <= self.apart() || !chunk.anchors.reasons().is_empty())
        };
        let start = self.runs.free_from(place, frames).take(LOOKS).find(is_apart)?.start;
        self.take_at(start, frames, place)
    }

    /// Takes the best fit at `place` among what is usable.
    pub fn take_best(&mut self, place: PlaceId, frames: u32, waits_for: Option<PlaceId>) -> Option<Taken> {
        if !self.may_reuse(place, bytes_of(frames)) {
            return None;
        }
        let (start, freed, quiet) = self.runs.take_fit(place, frames, waits_for)?;
        let mut taken = self.taken(start, frames, place, freed);
        // Put back, it is known of each part how it was freed.
        if taken.busy && quiet.frames() > 0 {
            let mut parts =
                vec![(quiet.start, freed), (quiet.end, Freed { gpu: None, ..freed }), (start + frames, freed)];
            let mut at = start;
            parts.retain(|part| std::mem::replace(&mut at, part.0) < part.0);
            taken.from = From::Several(parts);
        }
        Some(taken)
    }

    fn take_at(&mut self, start: u32, frames: u32, place: PlaceId) -> Option<Taken> {
        let freed = self.runs.take(start, start + frames)?;
        Some(self.taken(start, frames, place, freed))
    }

    fn taken(&mut self, start: u32, frames: u32, place: PlaceId, freed: Freed) -> Taken {
        self.budget(place).take(bytes_of(frames));
        let from = From::One((start + frames, freed));
        Taken { start, frames, busy: !freed.is_quiet(&self.clock), has_other: false, from }
    }

    /// Whether a fit at `place` is at hand that nobody is at work on.
    pub fn has_quiet(&self, place: PlaceId, frames: u32) -> bool {
        !self.keeps_apart(frames)
            && self.may_reuse(place, bytes_of(frames))
            && self.runs.quiet_fit(place, frames).is_some()
    }

    /// Takes that.
    pub fn take_quiet(&mut self, place: PlaceId, frames: u32) -> Option<Taken> {
        if !self.may_reuse(place, bytes_of(frames)) {
            return None;
        }
        let start = self.runs.quiet_fit(place, frames)?;
        self.take_at(start, frames, place)
    }

    /// Takes the best fit at `place` among the free runs alone, if the sums stay below their peaks; see [`crate::front`].
    pub fn take_below_peaks(&mut self, place: PlaceId, frames: u32, bytes: u64) -> Option<Taken> {
        if !self.is_below_peaks(place, bytes_of(frames), bytes) {
            return None;
        }
        if self.keeps_apart(frames) {
            return self.take_apart(place, frames, Some(place));
        }
        self.take_best(place, frames, Some(place))
    }

    /// Takes free memory that is as good as fresh memory placed in `pieces`: at the one place, or across several.
    pub fn take_like(
        &mut self,
        pieces: &[(PlaceId, u64)],
        route: &Route,
        frames: u32,
        waits_for: Option<PlaceId>,
    ) -> Option<Taken> {
        match pieces {
            [(place, _)] => self.take_best(*place, frames, waits_for),
            _ => {
                if let Some((start, end)) = self.find_span(pieces, route, frames, waits_for) {
                    return self.take_span(start, end);
                }
                // Rows are of runs beside each other; one that lies by itself is at one place.
                let (home_least, host_most) = self.alike(pieces, route);
                let is_alike = |place: PlaceId| {
                    let (at_home, on_host) = (place == route.home, self.place(place).is_host());
                    (at_home || home_least == 0) && (!on_host || u64::from(frames) <= host_most)
                };
                let places: Vec<PlaceId> =
                    pieces.iter().map(|piece| piece.0).filter(|place| is_alike(*place)).collect();
                places.into_iter().find_map(|place| {
                    if self.is_open_to(place, route) { self.take_best(place, frames, waits_for) } else { None }
                })
            }
        }
    }

    /// How many frames at home, at least, and on the host, at most, are as good as fresh memory in `pieces`.
    fn alike(&self, pieces: &[(PlaceId, u64)], route: &Route) -> (u64, u64) {
        let wanted = |matches: &dyn Fn(PlaceId) -> bool| -> u64 {
            pieces.iter().filter(|(place, _)| matches(*place)).map(|(_, bytes)| bytes / FRAME).sum()
        };
        let home_least = wanted(&|place| place == route.home).saturating_sub(TOLERANCE / FRAME);
        (home_least, wanted(&|place| self.place(place).is_host()) + TOLERANCE / FRAME)
    }

    /// The borders of the free row of frames to reuse for `pieces`: from the smallest row of free runs that has one, so
    /// that a block freed as a whole is found as a whole.
    fn find_span(
        &self,
        pieces: &[(PlaceId, u64)],
        route: &Route,
        frames: u32,
        waits_for: Option<PlaceId>,
    ) -> Option<(u32, u32)> {
        let (home_least, host_most) = self.alike(pieces, route);
        let usable = |run: &Run| match run.kind {
            Kind::Free(freed) => {
                let place = self.chunks.places().at(run.start);
                let is_ours = |place: PlaceId| {
                    route.order.contains(&place)
                        && self.is_open_to(place, route)
                        && self.may_reuse(place, bytes_of(run.frames))
                };
                self.is_usable(freed, waits_for) && place.is_some_and(is_ours)
            }
            Kind::Out => false,
        };
        let mut best: Option<(u32, u32)> = None;
        let mut look = |span: &[Run]| {
            let (Some(first), Some(last)) = (span.first(), span.last()) else { return };
            let size = last.end() - first.start;
            if size < frames || best.is_some_and(|(least, _)| least <= size) {
                return;
            }
            let shares = Shares::new(self, span, route.home);
            // Moving a window changes its shares at a constant rate until a border passes one of a run, so only windows
            // that begin or end at one need a look.
            let mut windows =
                span.iter().flat_map(|run| [Some(run.start), run.end().checked_sub(frames)]).flatten().filter(|&at| {
                    let (home, host) = shares.within(at, at + frames);
                    home >= home_least && host <= host_most
                });
            if let Some(start) = windows.find(|&at| at >= first.start && at + frames <= last.end()) {
                best = Some((size, start));
            }
        };
        // One run that cannot be used parts a row, and spoils neither side: where places are full, nearly each row has one.
        for row in self.runs.free_spans() {
            row.split(|run| !usable(run)).for_each(&mut look);
        }
        best.map(|(_, start)| (start, start + frames))
    }

    fn take_span(&mut self, start: u32, end: u32) -> Option<Taken> {
        let mut busy = false;
        let mut from = Vec::new();
        let mut at = start;
        while at < end {
            let run = *self.runs.around(at)?;
            let Kind::Free(freed) = run.kind else { return None };
            let (place, stop) = self.chunks.places().row(at, run.end().min(end))?;
            busy |= !freed.is_quiet(&self.clock);
            self.runs.take(at, stop)?;
            self.budget(place).take(bytes_of(stop - at));
            from.push((stop, freed));
            at = stop;
        }
        self.runs.join_out(start, end);
        Some(Taken { start, frames: end - start, busy, has_other: false, from: From::Several(from) })
    }
}

/// Frames at home and on the host before each border of a row of runs.
struct Shares {
    /// `(frame, at home before it, on the host before it, home?, host?)`, the flags for the run that starts there.
    borders: Vec<(u32, u64, u64, bool, bool)>,
}

impl Shares {
    fn new<H: Copy>(state: &State<H>, span: &[Run], home: PlaceId) -> Self {
        let (mut at_home, mut on_host) = (0, 0);
        let borders = span
            .iter()
            .map(|run| {
                let place = state.chunks.places().at(run.start);
                let is_home = place == Some(home);
                let is_host = place.is_some_and(|place| state.place(place).is_host());
                let border = (run.start, at_home, on_host, is_home, is_host);
                at_home += u64::from(is_home) * u64::from(run.frames);
                on_host += u64::from(is_host) * u64::from(run.frames);
                border
            })
            .collect();
        Self { borders }
    }

    fn before(&self, frame: u32) -> (u64, u64) {
        let index = self.borders.partition_point(|border| border.0 <= frame);
        let Some(&(start, at_home, on_host, is_home, is_host)) = self.borders.get(index.wrapping_sub(1)) else {
            return (0, 0);
        };
        let into = u64::from(frame - start);
        (at_home + u64::from(is_home) * into, on_host + u64::from(is_host) * into)
    }

    /// Frames at home and on the host in `start..end`.
    fn within(&self, start: u32, end: u32) -> (u64, u64) {
        let (low, high) = (self.before(start), self.before(end));
        (high.0.saturating_sub(low.0), high.1.saturating_sub(low.1))
    }
}
