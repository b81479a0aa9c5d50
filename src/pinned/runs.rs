//! Runs and segments: what lies where, and where a block fits.

use crate::Key;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

/// What keeps free memory apart. Blocks below a page have segments of their own: between blocks of pages they would leave
/// rests that start at no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Class {
    pub key: Key,
    pub below_page: bool,
}

/// What one driver call pinned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub bytes: u64,
    pub class: Class,
    /// No bigger than what small blocks were pinned in together at the time; see [`crate::policy`].
    pub small: bool,
    /// Bytes of live blocks in it.
    pub used: u64,
    /// When the last of them ended.
    pub since: Duration,
}

/// A row of bytes in one segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub bytes: u64,
    /// The address of its segment.
    pub segment: u64,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Free,
    /// Freed by the program, but the device may still touch it: `number` is that of the free (`gpupool_pool::Clock`).
    /// Joined with its neighbours when it is free; earlier, one such run would make all memory around it unusable.
    Busy {
        number: u64,
    },
    /// A block.
    Live {
        requested: u64,
        id: u64,
        /// A thread waits for the device on its behalf; the next thing is that it ends, or that it goes on living.
        ending: bool,
    },
}

/// Where free runs of one class are. In the sets of `(bytes, address)` the first entry at or above a size is the best fit,
/// the lowest address of equals.
#[derive(Debug, Default)]
struct Vacancies {
    /// Runs beside others, in segments that can not be given back as they are.
    parts: BTreeSet<(u64, u64)>,
    /// Whole segments.
    wholes: BTreeSet<(u64, u64)>,
    /// Bytes of small segments.
    small: u64,
    /// Bytes in busy runs.
    busy: u64,
}

/// All segments and the runs in them. Every byte of a segment belongs to exactly one run.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    segments: BTreeMap<u64, Segment>,
    runs: BTreeMap<u64, Run>,
    vacancies: BTreeMap<Class, Vacancies>,
    /// Segments without a live block, as `(since, address)`: the longest unused first.
    unused: BTreeSet<(Duration, u64)>,
    /// Bytes of all segments.
    pub held: u64,
    /// Bytes of live blocks.
    pub used: u64,
    /// Bytes of `unused`.
    pub spare: u64,
}

/// A place for a block, found among the free runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    pub address: u64,
    /// Bytes of the run.
    pub bytes: u64,
}

impl Runs {
    /// The segment that `address` lies in, and where it begins.
    pub fn segment_around(&self, address: u64) -> Option<(u64, &Segment)> {
        let (&start, segment) = self.segments.range(..=address).next_back()?;
        (address - start < segment.bytes).then_some((start, segment))
    }

    /// How many segments there are.
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// The run that begins at `address`.
    pub fn starting_at(&mut self, address: u64) -> Option<&mut Run> {
        self.runs.get_mut(&address)
    }

    /// The run that `address` lies in, where it begins, and its segment.
    pub fn around(&self, address: u64) -> Option<(u64, &Run, &Segment)> {
        let (&start, run) = self.runs.range(..=address).next_back()?;
        let segment = self.segments.get(&run.segment)?;
        (address - start < run.bytes).then_some((start, run, segment))
    }

    /// The best fit for `bytes` among free runs beside others, and that among whole segments.
    pub fn best_fits(&self, class: Class, bytes: u64) -> (Option<Fit>, Option<Fit>) {
        let Some(vacancies) = self.vacancies.get(&class) else {
            return (None, None);
        };
        let first =
            |set: &BTreeSet<(u64, u64)>| set.range((bytes, 0)..).next().map(|&(bytes, address)| Fit { address, bytes });
        (first(&vacancies.parts), first(&vacancies.wholes))
    }

    /// Bytes of this class that the device may still touch.
    pub fn busy(&self, class: Class) -> u64 {
        self.vacancies.get(&class).map_or(0, |vacancies| vacancies.busy)
    }

    /// Bytes of the small segments of this class.
    pub fn small(&self, class: Class) -> u64 {
        self.vacancies.get(&class).map_or(0, |vacancies| vacancies.small)
    }

    /// Segments without a live block, the longest unused first, as `(since, address, bytes)`.
    pub fn unused(&self) -> impl Iterator<Item = (Duration, u64, u64)> {
        self.unused.iter().filter_map(|&(since, address)| Some((since, address, self.segments.get(&address)?.bytes)))
    }

    /// Adds a segment without a block, and the runs in it.
    pub fn add_segment(&mut self, address: u64, segment: Segment, runs: Vec<(u64, Run)>) {
        let Segment { bytes, class, small, since, .. } = segment;
        self.segments.insert(address, segment);
        self.unused.insert((since, address));
        self.held += bytes;
        self.spare += bytes;
        if small {
            self.vacancies.entry(class).or_default().small += bytes;
        }
        for (address, run) in runs {
            self.enter(address, run);
        }
    }

    /// Removes the segment at `address` with all that lies in it. Returns it and its runs.
    pub fn remove_segment(&mut self, address: u64) -> Option<(Segment, Vec<(u64, Run)>)> {
        let segment = self.segments.remove(&address)?;
        let starts: Vec<u64> = self.runs.range(address..address + segment.bytes).map(|(&start, _)| start).collect();
        let gone = starts.into_iter().filter_map(|start| Some((start, self.leave(start, &segment)?))).collect();
        if self.unused.remove(&(segment.since, address)) {
            self.spare -= segment.bytes;
        }
        if segment.small
            && let Some(vacancies) = self.vacancies.get_mut(&segment.class)
        {
            vacancies.small -= segment.bytes;
        }
        self.held -= segment.bytes;
        self.used -= segment.used;
        Some((segment, gone))
    }

    /// The addresses of the segments of a context.
    pub fn segments_of(&self, context: u64) -> Vec<u64> {
        let theirs = self.segments.iter().filter(|(_, segment)| segment.class.key.context == context);
        theirs.map(|(&address, _)| address).collect()
    }

    /// Forgets the classes of a context without segments.
    pub fn forget_classes_of(&mut self, context: u64) {
        self.vacancies.retain(|class, _| class.key.context != context);
    }

    /// Makes a block of the first `bytes` of the free run `fit`.
    pub fn take(&mut self, fit: Fit, bytes: u64, requested: u64, id: u64) {
        let Some(start) = self.runs.get(&fit.address).map(|run| run.segment) else {
            return;
        };
        let Some(segment) = self.segments.get_mut(&start) else {
            return;
        };
        if segment.used == 0 {
            self.unused.remove(&(segment.since, start));
            self.spare -= segment.bytes;
        }
        segment.used += bytes;
        self.used += bytes;
        let segment = *segment;
        self.leave(fit.address, &segment);
        let live = Kind::Live { requested, id, ending: false };
        self.enter(fit.address, Run { bytes, segment: start, kind: live });
        if bytes < fit.bytes {
            let rest = Run { bytes: fit.bytes - bytes, segment: start, kind: Kind::Free };
            self.enter(fit.address + bytes, rest);
        }
    }

    /// Ends the block at `address`: it is busy or free from now on. Says whether its segment is without a block then.
    pub fn end(&mut self, address: u64, kind: Kind, now: Duration) -> bool {
        let Some(run) = self.runs.get_mut(&address) else {
            return false;
        };
        let (bytes, start) = (run.bytes, run.segment);
        run.kind = kind;
        let Some(segment) = self.segments.get_mut(&start) else {
            return false;
        };
        segment.used -= bytes;
        self.used -= bytes;
        let emptied = segment.used == 0;
        if emptied {
            segment.since = now;
            self.unused.insert((now, start));
            self.spare += segment.bytes;
        }
        match kind {
            Kind::Busy { .. } => {
                let class = segment.class;
                self.vacancies.entry(class).or_default().busy += bytes;
            }
            _ => self.join(address),
        }
        emptied
    }

    /// Makes the run at `address` free if it is busy since the free of that number.
    pub fn settle(&mut self, address: u64, number: u64) {
        let Some(run) = self.runs.get_mut(&address).filter(|run| run.kind == (Kind::Busy { number })) else {
            return;
        };
        run.kind = Kind::Free;
        let (bytes, start) = (run.bytes, run.segment);
        if let Some(segment) = self.segments.get(&start)
            && let Some(vacancies) = self.vacancies.get_mut(&segment.class)
        {
            vacancies.busy -= bytes;
        }
        self.join(address);
    }

    /// Joins the free run at `address`, which is among no vacancies yet, with the free runs beside it.
    fn join(&mut self, address: u64) {
        let Some(&run) = self.runs.get(&address) else {
            return;
        };
        let Some(&segment) = self.segments.get(&run.segment) else {
            return;
        };
        let (mut start, mut end) = (address, address + run.bytes);
        let joins = |other: &Run| other.segment == run.segment && other.kind == Kind::Free;
        let left = self.runs.range(..address).next_back().filter(|(_, left)| joins(left)).map(|(&at, _)| at);
        let right = self.runs.range((Excluded(address), Unbounded)).next();
        let right = right.filter(|(_, right)| joins(right)).map(|(&at, right)| (at, at + right.bytes));
        if let Some((right, beyond)) = right {
            self.leave(right, &segment);
            end = beyond;
        }
        if let Some(left) = left {
            self.leave(left, &segment);
            self.runs.remove(&address);
            start = left;
        }
        self.enter(start, Run { bytes: end - start, segment: run.segment, kind: Kind::Free });
    }

    /// Writes a run down, among the vacancies too if it is one.
    fn enter(&mut self, address: u64, run: Run) {
        self.runs.insert(address, run);
        let Some(segment) = self.segments.get(&run.segment) else {
            return;
        };
        let vacancies = self.vacancies.entry(segment.class).or_default();
        match run.kind {
            Kind::Free if run.bytes == segment.bytes => vacancies.wholes.insert((run.bytes, address)),
            Kind::Free => vacancies.parts.insert((run.bytes, address)),
            Kind::Busy { .. } => {
                vacancies.busy += run.bytes;
                true
            }
            Kind::Live { .. } => true,
        };
    }

    /// Takes a run off every list; `segment` is that which it lies in.
    fn leave(&mut self, address: u64, segment: &Segment) -> Option<Run> {
        let run = self.runs.remove(&address)?;
        let vacancies = self.vacancies.entry(segment.class).or_default();
        match run.kind {
            Kind::Free if run.bytes == segment.bytes => vacancies.wholes.remove(&(run.bytes, address)),
            Kind::Free => vacancies.parts.remove(&(run.bytes, address)),
            Kind::Busy { .. } => {
                vacancies.busy -= run.bytes;
                true
            }
            Kind::Live { .. } => true,
        };
        Some(run)
    }
}
