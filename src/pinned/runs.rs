//! Runs and segments: what lies where, and where a block fits.

use crate::Key;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What keeps free memory apart. Blocks below a page have segments of their own: between blocks of pages they would leave
/// rests that start at no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    pub key: Key,
    pub below_page: bool,
}

/// What one driver call pinned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub address: u64,
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
    pub address: u64,
    pub bytes: u64,
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

/// A run's place in the table. It may be another run's by the time it is used again, so whoever kept it over an unlock
/// looks at the run's kind, which carries a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunId(u32);

const NONE: RunId = RunId(u32::MAX);

/// A run and what it is tied to. An entry of no bytes is vacant.
#[derive(Clone, Copy, Debug)]
struct Slot {
    run: Run,
    segment: u32,
    /// The runs beside it in its segment.
    left: RunId,
    right: RunId,
}

/// A segment and the class it belongs to, by their places in their tables.
#[derive(Clone, Copy, Debug)]
struct Held {
    segment: Segment,
    class: usize,
}

/// Where free runs of one class are. In the sets of `(bytes, address)` the first entry at or above a size is the best fit,
/// the lowest address of equals.
#[derive(Debug)]
struct Vacancies {
    /// `None`: the context of the class ended, and the entry may become another's.
    class: Option<Class>,
    /// Runs beside others, in segments that cannot be given back as they are.
    parts: BTreeSet<(u64, u64, u32)>,
    /// Whole segments.
    wholes: BTreeSet<(u64, u64, u32)>,
    /// Bytes of small segments.
    small: u64,
    /// Bytes in busy runs.
    busy: u64,
}

/// All segments and the runs in them. Every byte of a segment belongs to exactly one run.
///
/// Runs are entries of a table that know their neighbours; the ordered maps are only for addresses that come from outside.
/// So a block that ends and begins again where it was changes no map of addresses.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    slots: Vec<Slot>,
    vacant: Vec<RunId>,
    by_address: BTreeMap<u64, RunId>,
    segments: Vec<Held>,
    vacant_segments: Vec<u32>,
    segment_by_address: BTreeMap<u64, u32>,
    classes: Vec<Vacancies>,
    /// Segments without a live block, the longest unused first.
    unused: BTreeSet<(Duration, u64)>,
    /// Bytes of all segments.
    pub held: u64,
    /// Bytes of live blocks.
    pub used: u64,
    /// Bytes of `unused`.
    pub spare: u64,
}

/// A place for a block: a free run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    pub run: RunId,
    /// Bytes of the run.
    pub bytes: u64,
}

impl Runs {
    /// The segment that `address` lies in.
    pub fn segment_around(&self, address: u64) -> Option<&Segment> {
        let (_, &index) = self.segment_by_address.range(..=address).next_back()?;
        let segment = &self.segments[index as usize].segment;
        (address - segment.address < segment.bytes).then_some(segment)
    }

    /// How many segments there are.
    pub fn segments(&self) -> usize {
        self.segment_by_address.len()
    }

    /// The run that `address` lies in.
    pub fn around(&self, address: u64) -> Option<RunId> {
        let (&start, &id) = self.by_address.range(..=address).next_back()?;
        (address - start < self.run(id).bytes).then_some(id)
    }

    /// A run; one of no bytes if it is gone.
    pub fn run(&self, id: RunId) -> &Run {
        &self.slots[id.0 as usize].run
    }

    /// What a run is, to note something about the block there.
    pub fn kind_mut(&mut self, id: RunId) -> &mut Kind {
        &mut self.slot(id).run.kind
    }

    /// The segment of a run.
    pub fn segment(&self, id: RunId) -> &Segment {
        &self.held_by(id).segment
    }

    /// The best fit for `bytes` among free runs beside others, and that among whole segments.
    pub fn best_fits(&self, class: Class, bytes: u64) -> (Option<Fit>, Option<Fit>) {
        let Some(vacancies) = self.class(class) else {
            return (None, None);
        };
        let first = |set: &BTreeSet<(u64, u64, u32)>| {
            set.range((bytes, 0, 0)..).next().map(|&(bytes, _, id)| Fit { run: RunId(id), bytes })
        };
        (first(&vacancies.parts), first(&vacancies.wholes))
    }

    /// Bytes of this class that the device may still touch.
    pub fn busy(&self, class: Class) -> u64 {
        self.class(class).map_or(0, |vacancies| vacancies.busy)
    }

    /// Bytes of the small segments of this class.
    pub fn small(&self, class: Class) -> u64 {
        self.class(class).map_or(0, |vacancies| vacancies.small)
    }

    /// Segments without a live block, the longest unused first.
    pub fn unused(&self) -> impl Iterator<Item = &Segment> {
        self.unused.iter().filter_map(|&(_, address)| self.segment_around(address))
    }

    /// The addresses of the segments of a context.
    pub fn segments_of(&self, context: u64) -> Vec<u64> {
        let all = self.segment_by_address.values().map(|&index| &self.segments[index as usize].segment);
        all.filter(|segment| segment.class.key.context == context).map(|segment| segment.address).collect()
    }

    /// First addresses of the segments that meet a range.
    pub fn segments_in(&self, address: u64, bytes: u64) -> Vec<u64> {
        let before = self.segment_around(address).map(|segment| segment.address);
        let inside = self.segment_by_address.range(address..address + bytes).map(|(start, _)| *start);
        before.into_iter().filter(|start| *start < address).chain(inside).collect()
    }

    /// Adds a segment without a block, and the runs in it in the order of their addresses. Returns the first.
    pub fn add_segment(&mut self, segment: Segment, runs: &[Run]) -> RunId {
        let class = self.class_entry(segment.class);
        let held = Held { segment, class };
        let index = self.vacant_segments.pop().unwrap_or_else(|| {
            self.segments.push(held);
            self.segments.len() as u32 - 1
        });
        self.segments[index as usize] = held;
        self.segment_by_address.insert(segment.address, index);
        self.unused.insert((segment.since, segment.address));
        self.held += segment.bytes;
        self.spare += segment.bytes;
        if segment.small {
            self.classes[class].small += segment.bytes;
        }
        let (mut first, mut left) = (NONE, NONE);
        for &run in runs {
            let id = self.new_slot(Slot { run, segment: index, left, right: NONE });
            if left == NONE {
                first = id;
            } else {
                self.slot(left).right = id;
            }
            self.by_address.insert(run.address, id);
            self.list(id);
            left = id;
        }
        first
    }

    /// Removes the segment at `address` with all that lies in it. Returns it and its runs.
    pub fn remove_segment(&mut self, address: u64) -> Option<(Segment, Vec<Run>)> {
        let index = self.segment_by_address.remove(&address)?;
        let Held { segment, class } = self.segments[index as usize];
        let mut runs = Vec::new();
        let mut next = self.by_address.get(&address).copied().unwrap_or(NONE);
        while next != NONE {
            let id = next;
            let Slot { run, right, .. } = *self.slot(id);
            self.unlist(id);
            self.by_address.remove(&run.address);
            self.vacate(id);
            runs.push(run);
            next = right;
        }
        if self.unused.remove(&(segment.since, address)) {
            self.spare -= segment.bytes;
        }
        if segment.small {
            self.classes[class].small -= segment.bytes;
        }
        self.held -= segment.bytes;
        self.used -= segment.used;
        self.vacant_segments.push(index);
        Some((segment, runs))
    }

    /// Forgets the classes of a context without segments.
    pub fn forget_classes_of(&mut self, context: u64) {
        for vacancies in &mut self.classes {
            vacancies.class = vacancies.class.filter(|class| class.key.context != context);
        }
    }

    /// Makes a block of the first `bytes` of the free run `fit`; returns its address.
    pub fn take(&mut self, fit: Fit, bytes: u64, requested: u64, id: u64) -> u64 {
        self.unlist(fit.run);
        let Slot { run, segment: index, right, .. } = *self.slot(fit.run);
        let segment = &mut self.segments[index as usize].segment;
        if segment.used == 0 {
            self.unused.remove(&(segment.since, segment.address));
            self.spare -= segment.bytes;
        }
        segment.used += bytes;
        self.used += bytes;
        if bytes < run.bytes {
            let rest = Run { address: run.address + bytes, bytes: run.bytes - bytes, kind: Kind::Free };
            let rest_id = self.new_slot(Slot { run: rest, segment: index, left: fit.run, right });
            if right != NONE {
                self.slot(right).left = rest_id;
            }
            self.slot(fit.run).right = rest_id;
            self.by_address.insert(rest.address, rest_id);
            self.list(rest_id);
        }
        let live = Kind::Live { requested, id, ending: false };
        self.slot(fit.run).run = Run { address: run.address, bytes, kind: live };
        run.address
    }

    /// Ends the block there: it is busy or free from now on. Says whether its segment is without a block then.
    pub fn end(&mut self, id: RunId, kind: Kind, now: Duration) -> bool {
        let slot = self.slot(id);
        slot.run.kind = kind;
        let (bytes, index) = (slot.run.bytes, slot.segment);
        let segment = &mut self.segments[index as usize].segment;
        segment.used -= bytes;
        self.used -= bytes;
        let emptied = segment.used == 0;
        if emptied {
            segment.since = now;
            self.unused.insert((now, segment.address));
            self.spare += segment.bytes;
        }
        match kind {
            Kind::Free => self.join(id),
            _ => self.list(id),
        }
        emptied
    }

    /// Makes the run there free if it is busy since the free of that number.
    pub fn settle(&mut self, id: RunId, number: u64) {
        if self.run(id).kind == (Kind::Busy { number }) {
            self.unlist(id);
            self.slot(id).run.kind = Kind::Free;
            self.join(id);
        }
    }

    /// Joins a free run that is on no list yet with the free runs beside it.
    fn join(&mut self, mut id: RunId) {
        let Slot { left, right, .. } = *self.slot(id);
        let is_free = |runs: &Runs, id: RunId| id != NONE && runs.run(id).kind == Kind::Free;
        if is_free(self, right) {
            self.unlist(right);
            self.absorb(id, right);
        }
        if is_free(self, left) {
            self.unlist(left);
            self.absorb(left, id);
            id = left;
        }
        self.list(id);
    }

    /// Adds the run to the right of another to that.
    fn absorb(&mut self, left: RunId, right: RunId) {
        let Slot { run, right: beyond, .. } = *self.slot(right);
        self.by_address.remove(&run.address);
        self.vacate(right);
        let slot = self.slot(left);
        slot.run.bytes += run.bytes;
        slot.right = beyond;
        if beyond != NONE {
            self.slot(beyond).left = left;
        }
    }

    /// Puts a run on the list of its kind, if there is one.
    fn list(&mut self, id: RunId) {
        let Run { address, bytes, kind } = *self.run(id);
        let Held { segment, class } = *self.held_by(id);
        let vacancies = &mut self.classes[class];
        match kind {
            Kind::Free if bytes == segment.bytes => drop(vacancies.wholes.insert((bytes, address, id.0))),
            Kind::Free => drop(vacancies.parts.insert((bytes, address, id.0))),
            Kind::Busy { .. } => vacancies.busy += bytes,
            Kind::Live { .. } => {}
        }
    }

    /// Takes a run off the list of its kind.
    fn unlist(&mut self, id: RunId) {
        let Run { address, bytes, kind } = *self.run(id);
        let Held { segment, class } = *self.held_by(id);
        let vacancies = &mut self.classes[class];
        match kind {
            Kind::Free if bytes == segment.bytes => drop(vacancies.wholes.remove(&(bytes, address, id.0))),
            Kind::Free => drop(vacancies.parts.remove(&(bytes, address, id.0))),
            Kind::Busy { .. } => vacancies.busy -= bytes,
            Kind::Live { .. } => {}
        }
    }

    fn slot(&mut self, id: RunId) -> &mut Slot {
        &mut self.slots[id.0 as usize]
    }

    fn held_by(&self, id: RunId) -> &Held {
        &self.segments[self.slots[id.0 as usize].segment as usize]
    }

    fn new_slot(&mut self, slot: Slot) -> RunId {
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(slot);
            RunId(self.slots.len() as u32 - 1)
        });
        self.slots[id.0 as usize] = slot;
        id
    }

    fn vacate(&mut self, id: RunId) {
        let nothing = Run { address: 0, bytes: 0, kind: Kind::Free };
        *self.slot(id) = Slot { run: nothing, segment: 0, left: NONE, right: NONE };
        self.vacant.push(id);
    }

    fn class(&self, class: Class) -> Option<&Vacancies> {
        self.classes.iter().find(|vacancies| vacancies.class == Some(class))
    }

    /// The entry of a class, which is made if there is none.
    fn class_entry(&mut self, class: Class) -> usize {
        let at = |wanted| self.classes.iter().position(|vacancies| vacancies.class == wanted);
        let index = at(Some(class)).or_else(|| at(None)).unwrap_or(self.classes.len());
        if index == self.classes.len() {
            let (parts, wholes) = (BTreeSet::new(), BTreeSet::new());
            self.classes.push(Vacancies { class: None, parts, wholes, small: 0, busy: 0 });
        }
        self.classes[index].class = Some(class);
        index
    }
}
