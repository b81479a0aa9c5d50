//! Runs of mapped frames: free memory, and what is out of it.
//!
//! Every mapped frame belongs to exactly one run. A run is found in constant time from its first or last frame (boundary
//! tags) and from an inner one through [`Starts`]. Free runs are homogeneous in place and indexed by size for each place.
//! Where two free runs touch there is a *seam*; the seams are how a freed block that spanned several places is found again
//! as a whole.
//!
//! Two free runs of one place that touch become one, unless a GPU that does not own the place may still be at work on one of
//! them ([`Freed::gpu`]): joined, that GPU would have to be waited for before anybody could use either, and a small block
//! that it had borrowed would keep the whole free memory of its neighbour. They are joined once it is known to be done
//! ([`Runs::settle`]).
//!
//! Where its own GPU may be at work on one of them they are joined at once, so that the best fit is one among joined neighbours, and the run
//! remembers its longest part that nobody is at work on. Apart, each lazy free would cut the free memory in pieces until the next
//! wait, and all parts of a run would be a list that grows with it; the longest is what saves a large block its wait.

use crate::clock::Clock;
use crate::ordered::{Ordered, Position};
use crate::place::PlaceId;
use crate::place_map::PlaceMap;
use crate::starts::Starts;
use crate::sync::{Apart, AtomicU64, Ordering};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What matters of a free to whoever uses the memory next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    /// Its number by the state's clock: how long ago it was, and which waits have covered it.
    pub number: u64,
    /// The GPU that may be at work on the memory until a wait for it covers that number; `None`: nobody is.
    pub gpu: Option<PlaceId>,
}

impl Freed {
    /// Whether nobody is at work on the memory any more.
    pub fn is_quiet(&self, clock: &Clock) -> bool {
        self.gpu.is_none_or(|gpu| self.number <= clock.quiesced(gpu.index()))
    }

    /// This free with no GPU in it if that GPU is known to be done.
    fn settled(self, clock: &Clock) -> Self {
        if self.is_quiet(clock) { Self { gpu: None, ..self } } else { self }
    }

    /// Whether the memory is of use to somebody who can wait for this GPU, or for none. Nobody waits for a GPU that others work on: it may
    /// be busy with a kernel that waits for this very thread.
    pub fn is_usable(&self, clock: &Clock, waits_for: Option<PlaceId>) -> bool {
        self.gpu == waits_for || self.is_quiet(clock)
    }

    /// Whether nobody but the GPU that `place` is may be at work on the memory.
    fn is_own(self, place: PlaceId) -> bool {
        self.gpu.is_none_or(|gpu| gpu == place)
    }

    /// What holds for two neighbours at `place` as one run; `None` if they must not become one.
    fn joined(self, other: Self, place: PlaceId) -> Option<Self> {
        match (self.gpu, other.gpu) {
            (Some(_), None) if self.is_own(place) => Some(self),
            (None, Some(_)) if other.is_own(place) => Some(other),
            (gpu, theirs) if gpu == theirs => Some(Self { number: self.number.max(other.number), gpu }),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Freed and still mapped, all of it at one place: the one that its chunks say.
    Free(Freed),
    /// Not among the free memory: a block, on its way to become one, or kept by the front. Which of them, the run does not
    /// know, so that blocks can come and go without the pool's lock.
    Out,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub start: u32,
    pub frames: u32,
    pub kind: Kind,
    /// A part known to be quiet where a GPU may be at work on the rest: the longest of what was joined with blocks freed lazily beside it.
    quiet: Part,
}

/// Frames in a run, from the first up to the second; none where both are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    pub start: u32,
    pub end: u32,
}

impl Part {
    pub fn frames(self) -> u32 {
        self.end - self.start
    }

    /// What of it lies between these frames.
    pub fn within(self, start: u32, end: u32) -> Self {
        let part = Self { start: self.start.max(start), end: self.end.min(end) };
        if part.start < part.end { part } else { Self::default() }
    }

    /// One part where this one ends at the next, else the longer.
    fn joined(self, next: Self) -> Self {
        match (self.frames(), next.frames()) {
            (_, 0) => self,
            (0, _) => next,
            _ if self.end == next.start => Self { start: self.start, end: next.end },
            (left, right) if left < right => next,
            _ => self,
        }
    }
}

impl Run {
    pub fn end(&self) -> u32 {
        self.start + self.frames
    }

    fn new(start: u32, frames: u32, kind: Kind) -> Self {
        Self { start, frames, kind, quiet: Part::default() }
    }

    fn is_free(&self) -> bool {
        self.kind != Kind::Out
    }

    /// The longest part that nobody is at work on, where this is known of the whole.
    fn quiet_part(&self, settled: Freed) -> Part {
        if settled.gpu.is_none() { Part { start: self.start, end: self.end() } } else { self.quiet }
    }

    /// How these frames of it were freed: with no GPU in it where all of them are in the quiet part.
    fn freed(&self, start: u32, end: u32) -> Option<Freed> {
        match self.kind {
            Kind::Free(freed) if self.quiet.start <= start && end <= self.quiet.end => {
                Some(Freed { gpu: None, ..freed })
            }
            Kind::Free(freed) => Some(freed),
            Kind::Out => None,
        }
    }
}

const NONE: u32 = u32::MAX;
/// How many free runs are looked at for a quiet one where the best fit is not: a program that frees lazily may have thousands that are none.
const LOOKS: usize = 16;

#[derive(Debug)]
pub(crate) struct Runs {
    slots: Vec<Run>,
    vacant: Vec<u32>,
    /// Right at the first and the last frame of every run; anything elsewhere. A reader trusts a tag only if the record it
    /// leads to says that it starts (ends) here, so that nothing ever has to be cleared.
    tags: Vec<u32>,
    starts: Starts,
    /// For each place, `frames << 32 | start`: the first entry at or above a size is the best fit, lowest address first.
    free: Vec<Ordered>,
    /// For each place, how many free runs there are of each [`bucket`].
    counts: Vec<[u32; 64]>,
    sizes: Arc<Sizes>,
    /// First frames of free runs whose left neighbour is free too.
    seams: BTreeSet<u32>,
    /// First frames of free runs that a GPU other than their place's own may be at work on, as far as is known. They are
    /// not among `counts`: hardly anybody can use them.
    borrowed: BTreeSet<u32>,
    /// The state's clock.
    clock: Arc<Clock>,
    /// Where memory lies. A chunk changes its place only while no free run stands on it, so that what is filed here
    /// by place is filed right.
    places: Arc<PlaceMap>,
}

/// Which sizes of free runs there are at each place, for a look without the pool's lock. Written under it.
#[derive(Debug)]
pub(crate) struct Sizes(Box<[Apart<AtomicU64>]>);

/// The index of a size in a set of sizes: itself, or 63 for all from 63 frames on.
pub(crate) fn bucket(frames: u32) -> u32 {
    frames.min(63)
}

impl Sizes {
    /// A bit for each [`bucket`].
    pub fn at(&self, place: PlaceId) -> u64 {
        self.0[place.index()].0.load(Ordering::Acquire)
    }
}

fn key(frames: u32, start: u32) -> u64 {
    u64::from(frames) << 32 | u64::from(start)
}

impl Runs {
    pub fn new(count: usize, clock: Arc<Clock>, places: Arc<PlaceMap>) -> Self {
        Self {
            slots: Vec::new(),
            vacant: Vec::new(),
            tags: Vec::new(),
            starts: Starts::default(),
            free: vec![Ordered::default(); count],
            counts: vec![[0; 64]; count],
            sizes: Arc::new(Sizes((0..count).map(|_| Apart(AtomicU64::new(0))).collect())),
            seams: BTreeSet::new(),
            borrowed: BTreeSet::new(),
            clock,
            places,
        }
    }

    /// The sizes of the free runs.
    pub fn sizes(&self) -> &Arc<Sizes> {
        &self.sizes
    }

    /// The run that starts at `frame`.
    pub fn starting_at(&self, frame: u32) -> Option<&Run> {
        let run = self.slots.get(*self.tags.get(frame as usize)? as usize)?;
        (run.start == frame && run.frames > 0).then_some(run)
    }

    /// The run that `frame` lies in.
    pub fn around(&self, frame: u32) -> Option<&Run> {
        // Mostly it is asked by its start.
        self.starting_at(frame).or_else(|| {
            let run = self.starting_at(self.starts.at_or_below(frame)?)?;
            (frame < run.end()).then_some(run)
        })
    }

    /// All runs, in no order.
    pub fn all(&self) -> impl Iterator<Item = &Run> {
        self.slots.iter().filter(|run| run.frames > 0)
    }

    /// Free runs at `place`, smallest first.
    pub fn free_at(&self, place: PlaceId) -> impl Iterator<Item = &Run> {
        self.free_from(place, 0)
    }

    /// Whether there is a free run at `place` of at least so many frames that is of use to who can wait for this GPU.
    pub fn has_fit(&self, place: PlaceId, frames: u32, waits_for: Option<PlaceId>) -> bool {
        self.best_fit(place, frames, waits_for).is_some()
    }

    /// The best fit at `place` for `frames`: the smallest free run that is big enough, the lowest of equals, among those that are of use to
    /// who can wait for this GPU. Its entry, and where that is.
    fn best_fit(&self, place: PlaceId, frames: u32, waits_for: Option<PlaceId>) -> Option<(Position, u64)> {
        let is_usable = |run: &Run| match run.kind {
            Kind::Free(freed) => freed.is_usable(&self.clock, waits_for) || run.quiet.frames() >= frames,
            Kind::Out => false,
        };
        let is_wanted = |entry: u64| self.starting_at(entry as u32).is_some_and(is_usable);
        self.free[place.index()].find(key(frames, 0), is_wanted)
    }

    /// Takes the first frames of the best fit out of the free memory, or the first of its part that nobody is at work on where that has as
    /// many; the first frame, how they were freed, and which of them are quiet though others are not. As [`Runs::take`] does, with one look
    /// for each thing: a pair of large blocks is mostly this and [`Runs::release`].
    pub fn take_fit(&mut self, place: PlaceId, frames: u32, waits_for: Option<PlaceId>) -> Option<(u32, Freed, Part)> {
        let (position, entry) = self.best_fit(place, frames, waits_for)?;
        let start = entry as u32;
        let slot = self.tags[start as usize];
        let run = self.slots[slot as usize];
        let Kind::Free(freed) = run.kind else { return None };
        if run.quiet.frames() >= frames && !freed.is_quiet(&self.clock) {
            let start = run.quiet.start;
            return self.take(start, start + frames).map(|freed| (start, freed, Part::default()));
        }
        let quiet = run.quiet.within(start, start + frames);
        let rest = Run { start: start + frames, frames: run.frames - frames, ..run };
        if rest.frames == 0 {
            self.unlink(&run);
            self.slots[slot as usize].kind = Kind::Out;
            return Some((start, freed, quiet));
        }
        self.free[place.index()].replace_at(position, entry, key(rest.frames, rest.start));
        self.recount(place, Some(&run), Some(&rest));
        if !self.seams.is_empty() {
            self.seams.remove(&start);
        }
        self.put(slot, rest);
        self.starts.insert(rest.start);
        let taken = self.new_slot();
        self.put(taken, Run::new(start, frames, Kind::Out));
        Some((start, freed, quiet))
    }

    /// The smallest of a few free runs at `place` that has so many frames and nobody is at work on.
    pub fn quiet_fit(&self, place: PlaceId, frames: u32) -> Option<u32> {
        let part = |run: &Run| match run.kind {
            Kind::Free(freed) => run.quiet_part(freed.settled(&self.clock)),
            Kind::Out => Part::default(),
        };
        let mut parts = self.free_from(place, frames).take(LOOKS).map(part);
        parts.find(|part| part.frames() >= frames).map(|part| part.start)
    }

    /// Free runs at `place` of at least so many frames, smallest first.
    pub fn free_from(&self, place: PlaceId, frames: u32) -> impl Iterator<Item = &Run> {
        self.free[place.index()].from(key(frames, 0)).filter_map(|entry| self.starting_at(entry as u32))
    }

    /// The rows of two or more adjacent free runs, each in address order.
    pub fn free_spans(&self) -> impl Iterator<Item = Vec<Run>> {
        let mut seams = self.seams.iter().copied().peekable();
        std::iter::from_fn(move || {
            let seam = seams.next()?;
            let mut span: Vec<Run> = self.ending_at(seam).into_iter().chain(self.starting_at(seam)).copied().collect();
            while let Some(last) = span.last()
                && seams.peek() == Some(&last.end())
                && let Some(next) = self.starting_at(last.end())
            {
                span.push(*next);
                seams.next();
            }
            Some(span)
        })
    }

    /// Takes `start..end` out of the free run around it and makes it a run of its own, of kind [`Kind::Out`]. What is
    /// left and right of it stays free. Returns how the run was freed, or `None` when there is no such free run.
    pub fn take(&mut self, start: u32, end: u32) -> Option<Freed> {
        let run = *self.around(start)?;
        let freed = run.freed(start, end)?;
        if end > run.end() {
            return None;
        }
        self.unlink(&run);
        let mut slot = self.tags[run.start as usize];
        if run.start < start {
            self.put(slot, Run { frames: start - run.start, ..run });
            slot = self.new_slot();
            self.starts.insert(start);
        }
        self.put(slot, Run::new(start, end - start, Kind::Out));
        if end < run.end() {
            let right = self.new_slot();
            self.starts.insert(end);
            self.put(right, Run { start: end, frames: run.end() - end, ..run });
            self.link(right);
        }
        if run.start < start {
            self.link(self.tags[run.start as usize]);
        }
        Some(freed)
    }

    /// Makes one run of the adjacent [`Kind::Out`] runs in `start..end`.
    pub fn join_out(&mut self, start: u32, end: u32) {
        let mut frame = start;
        while frame < end {
            let Some(next) = self.starting_at(frame).map(Run::end) else {
                break;
            };
            self.forget(frame);
            frame = next;
        }
        self.add(start, end - start, Kind::Out);
    }

    /// Adds a run on frames that belong to none.
    pub fn add(&mut self, start: u32, frames: u32, kind: Kind) {
        let end = (start + frames) as usize;
        if self.tags.len() < end {
            self.tags.resize(end, NONE);
        }
        let slot = self.new_slot();
        self.put(slot, Run::new(start, frames, kind));
        self.starts.insert(start);
    }

    /// Removes the run that starts at `start` and is not free; its frames belong to none then. Returns its end.
    pub fn remove(&mut self, start: u32) -> u32 {
        let end = self.starting_at(start).map_or(start, Run::end);
        self.forget(start);
        end
    }

    /// Makes the run at `start`, which is not free and lies wholly at one place, free; joins it with its neighbours where
    /// that may be.
    pub fn release(&mut self, start: u32, freed: Freed) {
        let Some(place) = self.places.at(start) else {
            debug_assert!(false, "frame {start} of a run is mapped nowhere");
            return;
        };
        self.release_at(place, start, freed);
    }

    /// The same where the caller has asked for the place.
    pub fn release_at(&mut self, place: PlaceId, start: u32, freed: Freed) {
        let slot = self.tags[start as usize];
        let mut run = self.slots[slot as usize];
        debug_assert!(run.start == start && !run.is_free());
        // What comes back late may have been waited for by now; filed as borrowed, it would be counted among no sizes, and whoever takes what
        // its thread keeps would cut a larger row.
        let mut freed = if freed.is_own(place) { freed } else { freed.settled(&self.clock) };
        let mut quiet = if freed.is_quiet(&self.clock) { Part { start, end: run.end() } } else { Part::default() };
        // The neighbour that became part of it last, which is filed until what came of it is filed in its stead.
        let mut filed = None;
        // More than one: a neighbour that was apart from its own until now no longer is.
        let is_left_free = loop {
            let Some(left) = self.ending_at(run.start).copied() else { break false };
            let Some((both, theirs)) = self.joined(freed, &left, place) else { break left.is_free() };
            freed = both;
            quiet = theirs.joined(quiet);
            self.starts.remove(run.start);
            self.absorb(left, place, &mut filed);
            run.start = left.start;
            run.frames += left.frames;
        };
        let is_right_free = loop {
            let Some(right) = self.starting_at(run.end()).copied() else { break false };
            let Some((both, theirs)) = self.joined(freed, &right, place) else { break right.is_free() };
            freed = both;
            quiet = quiet.joined(theirs);
            self.starts.remove(right.start);
            self.absorb(right, place, &mut filed);
            run.frames += right.frames;
        };
        run.kind = Kind::Free(freed);
        // Where the whole is, it says so itself.
        run.quiet = if freed.gpu.is_none() { Part::default() } else { quiet };
        self.put(slot, run);
        self.refile(place, filed, Some(run));
        if is_left_free {
            self.seams.insert(run.start);
        }
        if is_right_free {
            self.seams.insert(run.end());
        }
    }

    /// A free neighbour becomes part of a run.
    fn absorb(&mut self, neighbour: Run, place: PlaceId, filed: &mut Option<Run>) {
        if let Some(before) = filed.replace(neighbour) {
            self.refile(place, Some(before), None);
        }
        if !self.seams.is_empty() {
            self.seams.remove(&neighbour.start);
        }
        self.vacate(self.tags[neighbour.start as usize]);
    }

    /// What holds for memory freed at `place` and a neighbour as one run, and the neighbour's quiet part; `None` if they must not become one.
    fn joined(&self, freed: Freed, neighbour: &Run, place: PlaceId) -> Option<(Freed, Part)> {
        match neighbour.kind {
            Kind::Free(theirs) if self.places.at(neighbour.start) == Some(place) => {
                let theirs = theirs.settled(&self.clock);
                Some((freed.joined(theirs, place)?, neighbour.quiet_part(theirs)))
            }
            _ => None,
        }
    }

    /// Makes what a GPU had borrowed, and is known to be done with, plain free memory, and joins it with its neighbours.
    pub fn settle(&mut self) {
        if self.borrowed.is_empty() {
            return;
        }
        let is_done = |start: &u32| match self.starting_at(*start).map(|run| run.kind) {
            Some(Kind::Free(freed)) if freed.is_quiet(&self.clock) => Some((*start, freed.number)),
            _ => None,
        };
        let done: Vec<(u32, u64)> = self.borrowed.iter().filter_map(is_done).collect();
        for (start, number) in done {
            // One before may have been joined with it.
            if !self.borrowed.contains(&start) {
                continue;
            }
            let slot = self.tags[start as usize];
            let run = self.slots[slot as usize];
            self.unlink(&run);
            self.slots[slot as usize].kind = Kind::Out;
            self.release(start, Freed { number, gpu: None });
        }
    }

    /// Cuts the run at `start`, which is not free, in two; the second begins at `at`.
    pub fn cut(&mut self, start: u32, at: u32) {
        let slot = self.tags[start as usize];
        let run = self.slots[slot as usize];
        debug_assert!(run.start == start && start < at && at < run.end());
        self.put(slot, Run { frames: at - start, ..run });
        let right = self.new_slot();
        self.put(right, Run { start: at, frames: run.end() - at, ..run });
        self.starts.insert(at);
    }

    fn ending_at(&self, frame: u32) -> Option<&Run> {
        let tag = *self.tags.get(frame.checked_sub(1)? as usize)?;
        let run = self.slots.get(tag as usize)?;
        (run.frames > 0 && run.end() == frame).then_some(run)
    }

    /// The place that a free run is filed under.
    fn place_of(&self, run: &Run) -> Option<PlaceId> {
        if run.is_free() { self.places.at(run.start) } else { None }
    }

    /// What is filed of free memory at `place`: this run no more, that one from now on.
    fn refile(&mut self, place: PlaceId, before: Option<Run>, after: Option<Run>) {
        let free = &mut self.free[place.index()];
        let key_of = |run: Run| key(run.frames, run.start);
        match (before.map(key_of), after.map(key_of)) {
            (Some(before), Some(after)) => free.replace(before, after),
            (Some(before), None) => free.remove(before),
            (None, Some(after)) => free.insert(after),
            (None, None) => {}
        }
        self.recount(place, before.as_ref(), after.as_ref());
    }

    /// What is counted of free memory at `place`: this run no more, that one from now on.
    fn recount(&mut self, place: PlaceId, before: Option<&Run>, after: Option<&Run>) {
        let bucket_of = |run: Option<&Run>| match run {
            Some(&Run { frames, kind: Kind::Free(freed), .. }) if freed.is_own(place) => Some(bucket(frames)),
            _ => None,
        };
        let (less, more) = (bucket_of(before), bucket_of(after));
        // Large runs are mostly of one bucket, before and after.
        if less.is_some() && less == more {
            return;
        }
        if let (None, Some(before)) = (less, before) {
            self.borrowed.remove(&before.start);
        }
        match (more, after) {
            (Some(bucket), _) => self.count(place, bucket, |count| count + 1),
            (None, Some(after)) => _ = self.borrowed.insert(after.start),
            (None, None) => {}
        }
        // Last, so that a line which all threads read is not written twice for nothing.
        if let Some(bucket) = less {
            self.count(place, bucket, |count| count - 1);
        }
    }

    fn link(&mut self, slot: u32) {
        let run = self.slots[slot as usize];
        let Some(place) = self.place_of(&run) else { return };
        self.refile(place, None, Some(run));
        if self.ending_at(run.start).is_some_and(Run::is_free) {
            self.seams.insert(run.start);
        }
        if self.starting_at(run.end()).is_some_and(Run::is_free) {
            self.seams.insert(run.end());
        }
    }

    fn unlink(&mut self, run: &Run) {
        let Some(place) = self.place_of(run) else { return };
        self.refile(place, Some(*run), None);
        // Mostly there are none, and then this costs nothing.
        if !self.seams.is_empty() {
            self.seams.remove(&run.start);
            self.seams.remove(&run.end());
        }
    }

    fn count(&mut self, place: PlaceId, bucket: u32, change: impl Fn(u32) -> u32) {
        let count = &mut self.counts[place.index()][bucket as usize];
        let before = std::mem::replace(count, change(*count));
        // A line that all threads read is written only when the set changes.
        if (before == 0) != (*count == 0) {
            let sizes = &self.sizes.0[place.index()].0;
            sizes.store(sizes.load(Ordering::Relaxed) ^ 1 << bucket, Ordering::Release);
        }
    }

    fn put(&mut self, slot: u32, run: Run) {
        self.slots[slot as usize] = run;
        // What was taken out of it is no part of it any more. Mostly there is none.
        if run.quiet.end != 0 {
            self.slots[slot as usize].quiet = run.quiet.within(run.start, run.end());
        }
        self.tags[run.start as usize] = slot;
        self.tags[run.end() as usize - 1] = slot;
    }

    fn new_slot(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Run::new(0, 0, Kind::Out));
            self.slots.len() as u32 - 1
        })
    }

    fn vacate(&mut self, slot: u32) {
        self.slots[slot as usize] = Run::new(0, 0, Kind::Out);
        self.vacant.push(slot);
    }

    fn forget(&mut self, start: u32) {
        let slot = self.tags[start as usize];
        debug_assert!(self.slots[slot as usize].start == start);
        self.starts.remove(start);
        self.vacate(slot);
    }
}
