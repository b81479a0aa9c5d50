//! Which sizes of free runs there are in a set of slabs: a list for each size of a small block, a few for what is larger, and a bit
//! for each list that has any. The links between runs of one list are in the slabs ([`crate::slab`]).

use crate::slab::UNIT;

/// No run.
pub(crate) const NIL: u32 = u32::MAX;
/// Small blocks are smaller than this: what is larger fills frames of its own well enough.
pub(crate) const LARGEST: u64 = 1 << 20;
/// Units of the largest small block.
const EXACT: usize = (LARGEST / UNIT) as usize;
/// Lists of larger runs, up to a frame: four for each doubling.
const LARGER: usize = 4 * 2;
const LISTS: usize = EXACT + LARGER;
const WORDS: usize = LISTS.div_ceil(64);

/// First and last run of each list.
#[derive(Debug)]
pub(crate) struct Bins {
    pub ends: Box<[[u32; 2]]>,
    any: [u64; WORDS],
}

/// The list that runs of so many units are in.
pub(crate) fn list(units: u32) -> usize {
    if units as usize <= EXACT {
        return units as usize - 1;
    }
    // Runs of more than 2048 units: by the bits behind the highest one.
    let octave = units.ilog2();
    let quarter = units >> (octave - 2) & 3;
    (EXACT + (octave as usize - EXACT.ilog2() as usize) * 4 + quarter as usize).min(LISTS - 1)
}

impl Bins {
    pub fn new() -> Self {
        Self { ends: vec![[NIL; 2]; LISTS].into(), any: [0; WORDS] }
    }

    /// The first list of runs of at least so many units that has any. Runs of one list are of one size where they are no larger
    /// than a small block, and each that is larger fits.
    pub fn first_from(&self, units: u32) -> Option<usize> {
        let from = list(units);
        let mut word = from / 64;
        let mut bits = self.any[word] & u64::MAX << (from % 64);
        while bits == 0 {
            word += 1;
            bits = *self.any.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// Says whether a list has any run.
    pub fn note(&mut self, list: usize, any: bool) {
        let bit = 1 << (list % 64);
        if any {
            self.any[list / 64] |= bit;
        } else {
            self.any[list / 64] &= !bit;
        }
    }
}
