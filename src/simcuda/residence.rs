//! Where the pages of managed memory are, and what was advised about them.
//!
//! The data itself never moves: it stays in the mapping that the processor uses, and the GPUs reach it there too. Kept are
//! the books: which GPU a page counts against, so that a GPU that is full of managed memory can still serve others, and
//! what `cuMemRangeGetAttribute` answers.

use crate::device::linked;
use crate::driver::driver;
use crate::ffi::Location;
use crate::physical::{GRANULE, Place, Use};
use parking_lot::Mutex;
use std::collections::BTreeMap;

pub const PAGE: u64 = 4096;

/// What holds for every page of a stretch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Page {
    pub read_mostly: bool,
    pub preferred: Option<Location>,
    /// GPUs by ordinal, one bit each, and [`PROCESSOR`].
    pub accessed_by: u64,
    pub prefetched: Option<Location>,
    /// `None` until a device uses the page or it is prefetched. The processor's first use of it is not seen.
    pub at: Option<Place>,
    /// When it last moved or was used by a device; the smallest is evicted first.
    used: u64,
}

/// The bit of the processor in [`Page::accessed_by`]; there are at most 32 GPUs.
pub const PROCESSOR: u64 = 1 << 63;

/// All managed memory of the process, by start address: neighbours with equal pages are one stretch.
///
/// Taken inside the lock of the address space and outside that of a store, never the other way round.
static PAGES: Mutex<Pages> = Mutex::new(Pages { stretches: BTreeMap::new(), clock: 0 });

struct Pages {
    stretches: BTreeMap<u64, Stretch>,
    clock: u64,
}

#[derive(Clone, Copy)]
struct Stretch {
    end: u64,
    page: Page,
}

/// Whole pages around a range.
fn around(start: u64, bytes: u64) -> (u64, u64) {
    (start & !(PAGE - 1), (start + bytes).next_multiple_of(PAGE))
}

/// Enters a new allocation.
pub fn enter(start: u64, bytes: u64) {
    let (start, end) = around(start, bytes);
    PAGES.lock().stretches.insert(start, Stretch { end, page: Page::default() });
}

/// Ends an allocation; what its pages took from GPUs goes back.
pub fn leave(start: u64, bytes: u64) {
    let (start, end) = around(start, bytes);
    let mut pages = PAGES.lock();
    for (at, stretch) in pages.cut(start, end) {
        refund(stretch.page.at, stretch.end - at);
        pages.stretches.remove(&at);
    }
}

/// Changes the advice on a range.
pub fn advise(start: u64, bytes: u64, change: impl Fn(&mut Page)) {
    let (start, end) = around(start, bytes);
    let mut pages = PAGES.lock();
    for (at, mut stretch) in pages.cut(start, end) {
        change(&mut stretch.page);
        pages.stretches.insert(at, stretch);
    }
    pages.merge(start, end);
}

/// The pages of a range, one of each stretch.
pub fn pages(start: u64, bytes: u64) -> Vec<Page> {
    let (start, end) = around(start, bytes);
    PAGES.lock().within(start, end).map(|(_, _, page)| page).collect()
}

/// How many bytes of a range are at `place`; for `None` those that are nowhere yet.
pub fn bytes_at(start: u64, bytes: u64, place: impl Fn(Option<Place>) -> bool) -> u64 {
    PAGES.lock().within(start, start + bytes).filter(|(_, _, page)| place(page.at)).map(|(from, to, _)| to - from).sum()
}

/// Brings a range to `place`, as a prefetch does. What does not fit on a GPU even after eviction stays where it is.
pub fn move_to(start: u64, bytes: u64, place: Place) {
    let (start, end) = around(start, bytes);
    let mut pages = PAGES.lock();
    pages.place(start, end, |_| place);
    pages.merge(start, end);
}

/// What a GPU's access does: a page nobody has used yet is made, another one is mapped where it is if the GPU was announced
/// as an accessor and reaches it, and moves if not, to its preferred location where that can be reached.
pub fn touch(start: u64, bytes: u64, device: usize) {
    let reaches = |place| match place {
        Place::Gpu(owner) => linked(device, owner),
        Place::Host(_) => true,
    };
    let (start, end) = around(start, bytes);
    let mut pages = PAGES.lock();
    pages.place(start, end, |page| {
        let announced = page.read_mostly || page.accessed_by & 1 << device != 0;
        match (page.at, page.preferred.map(place_of)) {
            (Some(at), _) if announced && reaches(at) => at,
            (_, Some(preferred)) if reaches(preferred) => preferred,
            _ => Place::Gpu(device),
        }
    });
    pages.merge(start, end);
}

/// Sends the longest unused managed pages of a GPU to the host until `bytes` are free; whether any were there to send.
pub fn evict(device: usize, bytes: u64) -> bool {
    PAGES.lock().evict(device, bytes, (0, 0))
}

/// Host memory without a node is node 0's.
pub fn place_of(location: Location) -> Place {
    match location.kind {
        Location::DEVICE => Place::Gpu(location.id as usize),
        Location::HOST_NUMA => Place::Host(location.id as u32),
        _ => Place::Host(0),
    }
}

fn refund(at: Option<Place>, bytes: u64) {
    if let Some(Place::Gpu(device)) = at {
        driver().gpus[device].store.refund(bytes, Use::Managed);
    }
}

impl Pages {
    /// The parts of stretches inside a range.
    fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, Page)> {
        let first = self.stretches.range(..=start).next_back().map_or(start, |(&at, _)| at);
        self.stretches
            .range(first..end)
            .filter(move |(_, stretch)| stretch.end > start)
            .map(move |(&at, stretch)| (at.max(start), stretch.end.min(end), stretch.page))
    }

    /// Splits stretches at both ends of a range and returns a copy of those inside.
    fn cut(&mut self, start: u64, end: u64) -> Vec<(u64, Stretch)> {
        for at in [start, end] {
            if let Some((_, stretch)) = self.stretches.range_mut(..at).next_back()
                && stretch.end > at
            {
                let rest = *stretch;
                stretch.end = at;
                self.stretches.insert(at, rest);
            }
        }
        self.stretches.range(start..end).map(|(&at, &stretch)| (at, stretch)).collect()
    }

    /// Joins equal neighbours in and around a range.
    fn merge(&mut self, start: u64, end: u64) {
        let first = self.stretches.range(..start).next_back().map_or(start, |(&at, _)| at);
        let mut starts = self.stretches.range(first..=end).map(|(&at, _)| at).collect::<Vec<_>>().into_iter();
        let Some(mut kept) = starts.next() else { return };
        for at in starts {
            let (before, after) = (self.stretches[&kept], self.stretches[&at]);
            if before.end == at && before.page == after.page {
                self.stretches.remove(&at);
                self.stretches.insert(kept, after);
            } else {
                kept = at;
            }
        }
    }

    /// Moves each stretch of a range to where `target` says.
    fn place(&mut self, start: u64, end: u64, target: impl Fn(&Page) -> Place) {
        self.clock += 1;
        for (at, stretch) in self.cut(start, end) {
            let place = target(&stretch.page);
            let mut done = at;
            while done < stretch.end {
                // As a whole if it fits, by frames if not, so that a full GPU takes as much as it can.
                let Some(next) = self.admit(place, stretch.page.at, done, stretch.end, (start, end)) else { break };
                refund(stretch.page.at.filter(|&from| from != place), next - done);
                let page = Page { at: Some(place), used: self.clock, ..stretch.page };
                self.stretches.insert(done, Stretch { end: next, page });
                done = next;
            }
            if done < stretch.end {
                self.stretches.insert(done, stretch);
            }
        }
    }

    /// Charges `place` for part of `at..end`, evicting others; how far it got, or `None` if nothing more fits.
    fn admit(&mut self, place: Place, from: Option<Place>, at: u64, end: u64, keep: (u64, u64)) -> Option<u64> {
        let Place::Gpu(device) = place else { return Some(end) };
        if from == Some(place) {
            return Some(end);
        }
        let frame = ((at / GRANULE + 1) * GRANULE).min(end);
        [end, frame].into_iter().find(|&upto| {
            let store = &driver().gpus[device].store;
            let bytes = upto - at;
            let missing = bytes.saturating_sub(store.free());
            (missing == 0 || self.evict(device, missing, keep)) && store.charge_if_free(bytes, Use::Managed)
        })
    }

    /// Moves managed memory from a GPU to the host, the longest unused first, until `bytes` are free; nothing of the range
    /// `keep` goes. Whether that was enough.
    fn evict(&mut self, device: usize, bytes: u64, keep: (u64, u64)) -> bool {
        let mut oldest: Vec<_> = self
            .stretches
            .iter()
            .filter(|&(&at, stretch)| {
                stretch.page.at == Some(Place::Gpu(device)) && (stretch.end <= keep.0 || at >= keep.1)
            })
            .map(|(&at, stretch)| (stretch.page.used, at, stretch.end))
            .collect();
        oldest.sort_unstable();
        let (mut missing, mut evicted) = (bytes.next_multiple_of(PAGE), false);
        for (_, start, end) in oldest {
            if missing == 0 {
                break;
            }
            let end = end.min(start + missing);
            for (at, mut stretch) in self.cut(start, end) {
                stretch.page.at = Some(Place::Host(0));
                self.stretches.insert(at, stretch);
            }
            refund(Some(Place::Gpu(device)), end - start);
            missing -= end - start;
            evicted = true;
        }
        evicted
    }
}
