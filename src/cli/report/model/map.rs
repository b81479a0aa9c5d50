//! What the pool's addresses are made of: which place each stretch lies at and what of it is in use, at moments over the life of a process.

use std::collections::BTreeMap;

use gpupool_events::MapChange;

use super::holders::Holders;

/// Moments that are kept; with more, every other one is dropped, and from then on only half as many are taken.
const MOMENTS: usize = 48;
/// Cells that a moment is drawn in at most.
const CELLS: u64 = 1024;
/// The least that a cell stands for: the pool's frame.
const FRAME: u64 = 2 << 20;
/// Stretches that are known. A pool has some thousands; a log may say anything.
const ROWS: usize = 1 << 18;
/// Places that are told apart.
const PLACES: usize = 64;
/// By how much a peak has to be above the one that is kept, in parts of that, to be taken in its place.
const HIGHER: u64 = 32;

/// Stretches of addresses, and pictures of them. Empty where the log does not tell (level `debug`).
#[derive(Default)]
pub struct Map {
    /// By first address: the end, and the place.
    rows: BTreeMap<u64, (u64, usize)>,
    places: Vec<String>,
    moments: Vec<Moment>,
    /// A picture of when most was in use, nearly.
    peak: Option<Moment>,
    peak_bytes: u64,
    /// Seconds between two moments, and when the next is due.
    step: f64,
    next: f64,
}

/// The map at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Moment {
    /// Seconds from the start.
    pub at: f64,
    /// Bytes that a cell stands for.
    pub cell: u64,
    pub places: Vec<PlaceAt>,
    /// In address order; a stretch at one place begins with a cell of its own. Each run of like cells once.
    pub cells: Vec<Cells>,
}

/// One place in a [`Moment`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlaceAt {
    pub place: String,
    pub held: u64,
    pub used: u64,
    /// Stretches of which nothing is in use, of a frame at least, and the largest.
    pub holes: u64,
    pub largest: u64,
}

/// Cells that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cells {
    /// Index in [`Moment::places`].
    pub place: usize,
    /// The part in use, in tenths, rounded up.
    pub tenths: u8,
    pub count: u32,
}

impl Map {
    /// These addresses lie elsewhere now.
    pub fn change(&mut self, changes: &[MapChange]) {
        for change in changes {
            let (start, end) = (change.address, change.address.saturating_add(change.bytes));
            self.clear(start, end);
            let Some(place) = change.place.as_ref().and_then(|place| self.place(place)) else { continue };
            if start < end && self.rows.len() < ROWS {
                self.rows.insert(start, (end, place));
            }
        }
    }

    fn place(&mut self, name: &str) -> Option<usize> {
        let known = self.places.iter().position(|place| place == name);
        if known.is_none() && self.places.len() < PLACES {
            self.places.push(name.to_owned());
            return Some(self.places.len() - 1);
        }
        known
    }

    /// Takes everything out of a range.
    fn clear(&mut self, start: u64, end: u64) {
        let touched: Vec<(u64, (u64, usize))> = self
            .rows
            .range(..end)
            .rev()
            .take_while(|(_, (row_end, _))| *row_end > start)
            .map(|(at, row)| (*at, *row))
            .collect();
        for (at, (row_end, place)) in touched {
            self.rows.remove(&at);
            if at < start {
                self.rows.insert(at, (start, place));
            }
            if row_end > end {
                self.rows.insert(end, (row_end, place));
            }
        }
    }

    /// Whether the log told of any addresses.
    pub fn is_known(&self) -> bool {
        !self.places.is_empty()
    }

    /// Takes a picture if one is due, `now` seconds from the start.
    pub fn look(&mut self, now: f64, holders: &Holders) {
        if self.rows.is_empty() || !now.is_finite() || now < self.next {
            return;
        }
        self.moments.push(self.moment(now, holders));
        if self.moments.len() >= MOMENTS {
            let mut number = 0;
            self.moments.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.step *= 2.0;
        }
        self.step = self.step.max(0.001);
        self.next = now + self.step;
    }

    /// Something is about to be freed: takes a picture if more is in use than ever.
    pub fn look_at_peak(&mut self, holders: &Holders) {
        if let Some(moment) = self.at_peak(holders) {
            self.peak_bytes = holders.total().0;
            self.peak = Some(moment);
        }
    }

    /// What is now, if more is in use than in the picture of the peak; it has been so since the last block came.
    fn at_peak(&self, holders: &Holders) -> Option<Moment> {
        let (used, peak, at) = holders.total();
        let is_higher = used == peak && used > self.peak_bytes.saturating_add(self.peak_bytes / HIGHER);
        (is_higher && !self.rows.is_empty()).then(|| self.moment(at, holders))
    }

    /// All pictures in the order of time, the last one of the end; of not more moments than this, and three.
    pub fn moments(&self, most: usize, end: f64, holders: &Holders) -> Vec<Moment> {
        let every = self.moments.len().div_ceil(most.max(1)).max(1);
        let mut moments: Vec<Moment> = self.moments.iter().step_by(every).chain(&self.peak).cloned().collect();
        moments.extend(self.at_peak(holders));
        if !self.rows.is_empty() {
            moments.push(self.moment(end, holders));
        }
        moments.sort_by(|one, other| one.at.total_cmp(&other.at));
        moments
    }

    fn moment(&self, at: f64, holders: &Holders) -> Moment {
        let mut cell = FRAME;
        let cells_of = |cell: u64| self.rows.iter().map(|(start, (end, _))| (end - start).div_ceil(cell)).sum::<u64>();
        // Rows that are shorter than a cell have one each, however large it is.
        while cells_of(cell) > CELLS.max(self.rows.len() as u64 * 2) && cell < 1 << 60 {
            cell *= 2;
        }
        let mut moment = Moment {
            at,
            cell,
            places: self.places.iter().map(|place| PlaceAt { place: place.clone(), ..PlaceAt::default() }).collect(),
            cells: Vec::new(),
        };
        let mut blocks =
            holders.blocks().map(|(address, live, _)| (address, address.saturating_add(live.bytes))).peekable();
        for (&start, &(end, place)) in &self.rows {
            let sum = &mut moment.places[place];
            sum.held = sum.held.saturating_add(end - start);
            let (mut from, mut free_from, mut stood_on) = (start, start, start);
            while from < end {
                let to = from.saturating_add(cell).min(end);
                let mut used = 0;
                while let Some(&(block, block_end)) = blocks.peek().filter(|(block, _)| *block < to) {
                    used += block_end.min(to).saturating_sub(block.max(from));
                    if block.max(start) > free_from {
                        sum.hole(block - free_from);
                    }
                    free_from = free_from.max(block_end);
                    // As the pool counts it: frames that blocks stand on. What fills the cells is what was asked for.
                    let frames_end = block_end.checked_next_multiple_of(FRAME).unwrap_or(block_end).min(end);
                    let stands = frames_end.saturating_sub((block / FRAME * FRAME).max(stood_on));
                    sum.used = sum.used.saturating_add(stands);
                    stood_on = stood_on.max(frames_end);
                    if block_end > to {
                        break;
                    }
                    blocks.next();
                }
                let tenths = (u128::from(used) * 10).div_ceil(u128::from(to - from)).min(10) as u8;
                match moment.cells.last_mut() {
                    Some(cells) if (cells.place, cells.tenths) == (place, tenths) => cells.count += 1,
                    _ => moment.cells.push(Cells { place, tenths, count: 1 }),
                }
                from = to;
            }
            sum.hole(end.saturating_sub(free_from));
        }
        moment
    }
}

impl PlaceAt {
    fn hole(&mut self, bytes: u64) {
        if bytes >= FRAME {
            self.holes += 1;
            self.largest = self.largest.max(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use gpupool_events::BlockAllocate;

    use super::*;

    fn change(address: u64, frames: u64, place: Option<&str>) -> MapChange {
        MapChange { address: address * FRAME, bytes: frames * FRAME, place: place.map(str::to_owned) }
    }

    fn block(frame: u64, bytes: u64) -> BlockAllocate {
        BlockAllocate { address: frame * FRAME, bytes, home: 0, reused: false, on_peers: 0, on_host: 0, site: None }
    }

    #[test]
    fn a_map_shows_what_is_free_between_what_is_in_use() {
        let (mut map, mut holders) = (Map::default(), Holders::default());
        map.change(&[change(10, 10, Some("gpu0")), change(20, 4, Some("host0"))]);
        // One over both places, and one that leaves half of its frame.
        holders.allocate(0.0, &block(18, 4 * FRAME));
        holders.allocate(0.0, &block(12, FRAME / 2));
        let [.., moment] = &map.moments(8, 1.0, &holders)[..] else { panic!("no moment") };
        let places: Vec<_> = moment
            .places
            .iter()
            .map(|one| (one.place.as_str(), one.held / FRAME, one.holes, one.largest / FRAME))
            .collect();
        assert_eq!(places, [("gpu0", 10, 2, 5), ("host0", 4, 1, 2)]);
        assert_eq!((moment.places[0].used, moment.places[1].used), (3 * FRAME, 2 * FRAME));
        let cells: Vec<_> = moment.cells.iter().map(|cells| (cells.place, cells.tenths, cells.count)).collect();
        assert_eq!(cells, [(0, 0, 2), (0, 5, 1), (0, 0, 5), (0, 10, 2), (1, 10, 2), (1, 0, 2)]);
    }

    #[test]
    fn the_peak_has_a_picture_of_its_own() {
        let (mut map, mut holders) = (Map::default(), Holders::default());
        holders.allocate(1.0, &block(10, 4 * FRAME));
        // The log tells of the ground after the block.
        map.change(&[change(10, 4, Some("gpu0"))]);
        let used = |map: &Map, holders: &Holders| -> Vec<(f64, u64)> {
            map.moments(8, 9.0, holders).iter().map(|moment| (moment.at, moment.places[0].used / FRAME)).collect()
        };
        assert_eq!(used(&map, &holders), [(1.0, 4), (9.0, 4)]);
        map.look_at_peak(&holders);
        holders.free(2.0, 10 * FRAME);
        assert_eq!(used(&map, &holders), [(1.0, 4), (9.0, 0)]);
    }

    #[test]
    fn what_moved_lies_elsewhere_and_what_went_is_gone() {
        let mut map = Map::default();
        map.change(&[change(10, 10, Some("gpu0"))]);
        map.change(&[change(12, 2, Some("gpu1")), change(16, 2, None)]);
        let rows: Vec<_> = map.rows.iter().map(|(at, (end, place))| (at / FRAME, end / FRAME, *place)).collect();
        assert_eq!(rows, [(10, 12, 0), (12, 14, 1), (14, 16, 0), (18, 20, 0)]);
    }

    #[test]
    fn a_long_life_has_no_more_moments_than_a_short_one() {
        let (mut map, holders) = (Map::default(), Holders::default());
        map.change(&[change(10, 10, Some("gpu0"))]);
        for second in 0..100_000 {
            map.look(f64::from(second), &holders);
        }
        assert!(map.moments.len() < MOMENTS && map.moments.len() >= MOMENTS / 2 - 1, "{}", map.moments.len());
        assert!(map.moments(8, 1e5, &holders).len() <= 10);
    }
}
