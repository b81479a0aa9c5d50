//! The rows of freed memory that one shard of the front keeps: best fits, joins, and what they may spend. Neither locks nor
//! atomics; [`crate::front`] has those, and says what the rows are for.

use crate::FRAME;
use crate::place::PlaceId;
use crate::runs::bucket;

/// Rows that a magazine keeps.
const MOST_ROWS: usize = if cfg!(loom) { 2 } else { 32 };
/// Frames that a magazine keeps, 1 GiB.
const MOST_FRAMES: u32 = ((1 << 30) / FRAME) as u32;

/// A row of freed frames, all at the place that it is filed under.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub start: u32,
    pub frames: u32,
    /// The number of the latest free in it by the shard's clock, until which the place's GPU may be at work on it; 0 for
    /// memory known to be quiet.
    pub stamp: u64,
}

/// Why a magazine serves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// It has no fit, or the free runs have a better one.
    NoFit,
    /// It has the best fit, and not the credit for it.
    NoCredit,
}

#[derive(Debug)]
pub(crate) struct Magazine {
    /// By place, smallest first, the lowest of equals first. Where a row lies is what the chunks below it say: they change
    /// their place only while no magazine has a row and all are locked, so a row is filed right as long as it is here.
    rows: Box<[Vec<Kept>]>,
    /// Rows at all places.
    count: usize,
    /// No two rows touch.
    joined: bool,
    frames: u32,
    /// Bytes asked for that blocks served from here may spend; see [`crate::front`].
    pub credit: u64,
    /// The highest `credit` since [`crate::front::Front::most_credit`] was asked.
    pub most_credit: u64,
    /// Blocks that began here.
    pub served: u64,
    /// Blocks that ended here.
    pub retired: u64,
    /// Block numbers not given yet: the next one, and the first that is not this magazine's.
    pub ids: (u64, u64),
}

/// What is kept in all magazines at one moment.
#[derive(Debug)]
pub(crate) struct Sums {
    /// Blocks that began in the front less those that ended in it.
    pub blocks: i64,
    pub credit: u64,
    pub served: u64,
    /// Frames by place.
    pub frames: Vec<u64>,
}

/// In a magazine's hint: there is credit. Takes the place of the [`bucket`] of size 0.
const CREDIT: u64 = 1;

/// The buckets of sizes in `from..to`, where `to` may be above all.
fn between(from: u32, to: u32) -> u64 {
    let below = |size: u32| 1u64.checked_shl(size).map_or(u64::MAX, |bit| bit - 1);
    below(bucket(to)) & !below(bucket(from))
}

/// The buckets of sizes from `from` on.
pub(crate) fn at_least(from: u32) -> u64 {
    u64::MAX << bucket(from)
}

impl Kept {
    /// The order among the rows of one place.
    fn key(&self) -> (u32, u32) {
        (self.frames, self.start)
    }
}

impl Magazine {
    /// An empty one for so many places.
    pub fn new(places: usize) -> Self {
        Self {
            rows: (0..places).map(|_| Vec::new()).collect(),
            count: 0,
            joined: true,
            frames: 0,
            credit: 0,
            most_credit: 0,
            served: 0,
            retired: 0,
            ids: (0, 0),
        }
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Takes the best fit out: the smallest row, of those a quiet one, so that waits are rare, of those the lowest. Leaves
    /// it when `sizes`, those of the pool's free runs, have a better one.
    pub fn pop(&mut self, place: PlaceId, frames: u32, bytes: u64, quiesced: u64, sizes: u64) -> Result<Kept, Miss> {
        let mut first = self.first_fit(place, frames);
        if first.is_none() && sizes & at_least(frames) == 0 && self.join() {
            first = self.first_fit(place, frames);
        }
        let first = first.ok_or(Miss::NoFit)?;
        let rows = &mut self.rows[place.index()];
        let least = rows[first].frames;
        if sizes & between(frames, least) != 0 {
            return Err(Miss::NoFit);
        }
        self.credit = self.credit.checked_sub(bytes).ok_or(Miss::NoCredit)?;
        let equals = rows[first..].iter().take_while(|kept| kept.frames == least);
        let quiet = equals.map(|kept| kept.stamp).position(|stamp| stamp <= quiesced);
        let best = rows.remove(first + quiet.unwrap_or(0));
        self.count -= 1;
        if best.frames > frames {
            self.insert(place, Kept { start: best.start + frames, frames: best.frames - frames, ..best });
        }
        self.frames -= frames;
        self.served += 1;
        Ok(Kept { frames, ..best })
    }

    /// Whether there is a row of at least so many frames that is quiet.
    pub fn has_quiet(&self, place: PlaceId, frames: u32, quiesced: u64) -> bool {
        self.rows[place.index()].iter().any(|kept| kept.frames >= frames && kept.stamp <= quiesced)
    }

    /// May spend so much more.
    pub fn earn(&mut self, bytes: u64) {
        self.credit += bytes;
        self.most_credit = self.most_credit.max(self.credit);
    }

    /// The index of the smallest row of at least so many frames.
    fn first_fit(&self, place: PlaceId, frames: u32) -> Option<usize> {
        let rows = &self.rows[place.index()];
        Some(rows.partition_point(|kept| kept.frames < frames)).filter(|&index| index < rows.len())
    }

    /// Adds a row that lies at `place`; `false` if there is no room for it.
    pub fn push(&mut self, place: PlaceId, row: Kept) -> bool {
        if self.frames + row.frames > MOST_FRAMES || (self.count == MOST_ROWS && !self.join()) {
            return false;
        }
        self.insert(place, row);
        self.frames += row.frames;
        self.joined = false;
        true
    }

    fn insert(&mut self, place: PlaceId, row: Kept) {
        let rows = &mut self.rows[place.index()];
        let index = rows.partition_point(|kept| kept.key() < row.key());
        rows.insert(index, row);
        self.count += 1;
    }

    /// Joins rows that touch; whether there were any. Not done at every free: a program mostly asks for the sizes it freed,
    /// and finds them as long as they are whole.
    fn join(&mut self) -> bool {
        if std::mem::replace(&mut self.joined, true) {
            return false;
        }
        for rows in &mut self.rows {
            rows.sort_unstable_by_key(|kept| kept.start);
            rows.dedup_by(|right, left| {
                let touch = left.start + left.frames == right.start;
                if touch {
                    left.frames += right.frames;
                    left.stamp = left.stamp.max(right.stamp);
                }
                touch
            });
            rows.sort_unstable_by_key(Kept::key);
        }
        let before = std::mem::replace(&mut self.count, self.rows.iter().map(Vec::len).sum());
        self.count < before
    }

    /// Takes the first so many rows out, each with its place.
    pub fn take_rows(&mut self, mut wanted: usize, mut each: impl FnMut(PlaceId, Kept)) {
        for (place, rows) in PlaceId::all(self.rows.len()).zip(&mut self.rows) {
            let taken = wanted.min(rows.len());
            for row in rows.drain(..taken) {
                self.frames -= row.frames;
                each(place, row);
            }
            self.count -= taken;
            wanted -= taken;
        }
    }

    /// The frames that it keeps at each place.
    pub fn frames_by_place(&self) -> impl Iterator<Item = u64> {
        self.rows.iter().map(|rows| rows.iter().map(|row| u64::from(row.frames)).sum())
    }

    /// The [`bucket`] of each row, and whether there is credit, a bit each; 0 where there is neither.
    pub fn hint(&self) -> u64 {
        let credit = if self.credit > 0 { CREDIT } else { 0 };
        self.rows.iter().flatten().fold(credit, |hint, kept| hint | 1 << bucket(kept.frames))
    }
}
