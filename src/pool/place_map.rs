//! Where each frame lies, for whoever may not wait for the pool's lock.
//!
//! The chunks are what says where memory lies ([`crate::chunks`], which alone writes here). Nobody keeps a copy of the answer
//! beyond the lock under which it was asked: a copy would be wrong once a chunk has moved, and the wrong place would pay.
//!
//! Written under the pool's lock. A frame that is mapped already changes its place only while every magazine's lock is held,
//! too, so either lock makes an answer last. No more order than these locks give is needed, or asked for.

use crate::place::PlaceId;
use crate::sync::{AtomicU32, Ordering};
use std::sync::OnceLock;

/// Frames in a page of the table; it exists once a chunk is mapped there.
const PAGE: usize = if cfg!(loom) { 16 } else { 4096 };

/// A row that an entry tells of ends at the next multiple of this number at the latest, so that memory which comes or goes changes
/// so many entries before it at most: 2 GiB.
const ROW: u32 = if cfg!(loom) { 16 } else { 1024 };

/// For each frame `(1 + place) << 16 | far`: from this one on, so many frames lie there and the next one does not, or is a multiple
/// of [`ROW`]; 0 where nothing is mapped. So a look at a block mostly takes one load, or one for every 2 GiB, of however many chunks
/// it is.
#[derive(Debug)]
pub(crate) struct PlaceMap {
    pages: Box<[OnceLock<Box<[AtomicU32; PAGE]>>]>,
}

impl PlaceMap {
    /// A table for `frames` frames, none of them mapped.
    pub fn new(frames: u64) -> Self {
        // Frame numbers are u32; the rest of a larger reservation is not used.
        let frames = frames.min(u64::from(u32::MAX)) as usize;
        Self { pages: (0..frames.div_ceil(PAGE)).map(|_| OnceLock::new()).collect() }
    }

    /// The place of a frame, and the end of a row of frames from there on that lie there, too; it may go on.
    fn look(&self, frame: u32) -> Option<(PlaceId, u32)> {
        let page = self.pages.get(frame as usize / PAGE)?.get()?;
        let entry = page[frame as usize % PAGE].load(Ordering::Relaxed);
        Some((PlaceId::from_number((entry >> 16).checked_sub(1)?), frame + (entry & 0xffff)))
    }

    /// The place of a frame; `None` where nothing is mapped.
    pub fn at(&self, frame: u32) -> Option<PlaceId> {
        self.look(frame).map(|found| found.0)
    }

    /// The place of the first frame of `start..end`, and the end of the row of frames from there on that lie there, too.
    pub fn row(&self, start: u32, end: u32) -> Option<(PlaceId, u32)> {
        let (place, mut at) = self.look(start)?;
        while at < end
            && let Some((_, next)) = self.look(at).filter(|found| found.0 == place)
        {
            at = next;
        }
        Some((place, at.min(end)))
    }

    /// The one place of so many frames; `None` where they lie at several.
    pub fn of_all(&self, start: u32, frames: u32) -> Option<PlaceId> {
        let end = start + frames;
        self.row(start, end).filter(|row| row.1 == end).map(|row| row.0)
    }

    /// `start..end` cut where the place changes: `(start, end, place)` in address order.
    pub fn rows(&self, start: u32, end: u32) -> impl Iterator<Item = (u32, u32, PlaceId)> {
        let mut at = start;
        std::iter::from_fn(move || {
            let from = at;
            let (place, until) = if from < end { self.row(from, end)? } else { return None };
            at = until;
            Some((from, until, place))
        })
    }

    /// Frames `start..end` lie at `place` from now on; `None`: nothing is mapped there any more.
    pub fn set(&self, start: u32, end: u32, place: Option<PlaceId>) {
        // What lies behind them may go on with them, and what lies before them, too.
        let mut stop = self.look(end).filter(|found| Some(found.0) == place).map_or(end, |found| found.1);
        for frame in (start..end).rev() {
            if (frame + 1).is_multiple_of(ROW) {
                stop = frame + 1;
            }
            self.write(frame, place, stop);
        }
        if start.is_multiple_of(ROW) {
            return;
        }
        // Their place stays, so nobody minds when they read this.
        let before = |frame: u32| Some((frame, self.look(frame).filter(|found| found.1 >= start)?.0));
        let first = start - start % ROW;
        for (frame, other) in (first..start).rev().map_while(before) {
            self.write(frame, Some(other), if Some(other) == place { stop } else { start });
        }
    }

    fn write(&self, frame: u32, place: Option<PlaceId>, end: u32) {
        let Some(page) = self.pages.get(frame as usize / PAGE) else {
            debug_assert!(false, "frame {frame} is outside the reservation");
            return;
        };
        let page = page.get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU32::new(0))));
        let entry = place.map_or(0, |place| (place.number() + 1) << 16 | (end - frame));
        page[frame as usize % PAGE].store(entry, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{PlaceMap, ROW};
    use crate::place::PlaceId;

    proptest::proptest! {
        #[test]
        fn it_answers_as_a_list_of_places_does(changes in proptest::collection::vec((0..90u32, 1..40u32, 0..4u32), 1..60)) {
            let map = PlaceMap::new(130);
            let mut list = vec![None; 130];
            for (start, frames, place) in changes {
                let place = (place < 3).then(|| PlaceId::from_number(place));
                map.set(start, start + frames, place);
                list[start as usize..(start + frames) as usize].fill(place);
                for start in 0..130 {
                    let place = list[start as usize];
                    let end = (start..130).find(|&frame| list[frame as usize] != place).unwrap_or(130);
                    proptest::prop_assert_eq!(map.at(start), place);
                    proptest::prop_assert_eq!(map.row(start, 130), place.map(|place| (place, end)));
                    proptest::prop_assert_eq!(map.of_all(start, 1), place);
                }
            }
        }
    }

    #[test]
    fn a_block_of_many_chunks_is_as_few_rows_as_one_of_one_chunk() {
        let (frames, place) = (5 * ROW, PlaceId::from_number(7));
        let map = PlaceMap::new(u64::from(frames) + 10);
        // In any order of memory that came.
        for step in [3, 5, 0, 1, 4, 2] {
            for start in (step..frames).step_by(6) {
                map.set(start, start + 1, Some(place));
            }
        }
        let hops = |from: u32| {
            let next = |at: &u32| Some(map.look(*at)?.1);
            std::iter::successors(Some(from), next).take_while(|at| *at < frames).count()
        };
        assert_eq!((map.row(5, frames), hops(5), hops(ROW)), (Some((place, frames)), 5, 4));
        map.set(2 * ROW + 7, 2 * ROW + 8, None);
        assert_eq!((map.row(5, frames), map.row(2 * ROW + 7, frames)), (Some((place, 2 * ROW + 7)), None));
        assert_eq!(map.row(2 * ROW + 8, frames), Some((place, frames)));
    }
}
