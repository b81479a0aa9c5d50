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

/// Frames that an entry tells of at most, 128 GiB.
const FAR: u32 = 0xffff;

/// For each frame `(1 + place) << 16 | far`: from this one on, at least so many frames lie there; 0 where nothing is mapped.
/// So a look at a block mostly takes one load, whatever its size.
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
        Some((PlaceId::from_number((entry >> 16).checked_sub(1)?), frame + (entry & FAR)))
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
        for frame in start..end {
            self.write(frame, place, end);
        }
        // What lies before them may have told of them, too. Its place stays, so nobody minds when they read this.
        let before = |frame: u32| Some((frame, self.look(frame).filter(|found| found.1 > start)?.0));
        for (frame, place) in (0..start).rev().map_while(before) {
            self.write(frame, Some(place), start);
        }
    }

    fn write(&self, frame: u32, place: Option<PlaceId>, end: u32) {
        let Some(page) = self.pages.get(frame as usize / PAGE) else {
            debug_assert!(false, "frame {frame} is outside the reservation");
            return;
        };
        let page = page.get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU32::new(0))));
        let entry = place.map_or(0, |place| (place.number() + 1) << 16 | (end - frame).min(FAR));
        page[frame as usize % PAGE].store(entry, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{FAR, PlaceMap};
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
    fn a_row_longer_than_an_entry_can_tell_is_one_row() {
        let (end, place) = (3 * FAR, PlaceId::from_number(7));
        let map = PlaceMap::new(u64::from(end));
        map.set(5, end, Some(place));
        assert_eq!(map.row(5, end), Some((place, end)));
        map.set(2 * FAR, 2 * FAR + 1, None);
        assert_eq!(map.row(5, end), Some((place, 2 * FAR)));
    }
}
