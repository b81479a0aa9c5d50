//! One slab: a row of frames in units of 512 bytes, and what each run of units is. Neither locks nor lists; [`crate::arena`] has
//! those.
//!
//! What is known of a run stands at its first unit, and its length at its last one too, so that a run that ends finds its
//! neighbours at once. An inner address finds its block through a bit for each unit, 64 units a look.

use crate::FRAME;
use crate::place::PlaceId;

/// What sizes step by: the driver's own alignment of small allocations (measured).
pub(crate) const UNIT: u64 = 512;
/// Units of a frame.
pub(crate) const UNITS: u32 = (FRAME / UNIT) as u32;
/// Frames of a slab: one, as with the driver's own small allocations (measured). Larger ones were tried, up to 32 MiB: one block that
/// lives on then keeps so much from everybody else, and a random mix of sizes takes no less time with them.
pub(crate) const FRAMES: u32 = 1;

/// What a run of units is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nobody has it, and no GPU is at work on it.
    Free,
    /// A block.
    Live,
    /// A block whose free waits for its context. It can still be seen.
    Ending,
    /// A block that ended, and that a GPU may still be at work on.
    Pending,
}

/// The place of a run: which slab of its arena, and the first unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Spot {
    pub slot: u16,
    pub unit: u16,
}

/// A run of units as it is known at its first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub units: u32,
    pub kind: Kind,
    /// Bytes behind the last one that was asked for.
    pub slack: u32,
}

impl Run {
    pub fn bytes(&self) -> u64 {
        u64::from(self.units) * UNIT - u64::from(self.slack)
    }

    /// Units below bit 20, slack in the ten bits above, the kind on top.
    fn pack(self) -> u32 {
        let kind = match self.kind {
            Kind::Free => 0,
            Kind::Live => 1,
            Kind::Ending => 2,
            Kind::Pending => 3,
        };
        self.units | self.slack << 20 | kind << 30
    }

    fn unpack(word: u32) -> Self {
        let kind = match word >> 30 {
            0 => Kind::Free,
            1 => Kind::Live,
            2 => Kind::Ending,
            _ => Kind::Pending,
        };
        Self { units: word & 0xf_ffff, slack: word >> 20 & 0x3ff, kind }
    }
}

/// The block of the pool that small blocks stand on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ground {
    /// First frame.
    pub start: u32,
    pub frames: u32,
    /// [`crate::Block::id`] of that block.
    pub id: u64,
    pub owner: u64,
    pub home: u32,
    /// The place that `home` is.
    pub gpu: PlaceId,
}

#[derive(Debug)]
pub(crate) struct Slab {
    pub ground: Ground,
    /// Which of the arena's owners it serves.
    pub of: usize,
    /// Blocks in it, those included whose free is under way.
    pub live: u32,
    /// How many others have memory of it: nothing freed in it serves again as long as there are any.
    pub shares: u32,
    /// Blocks in it that ended, and that a GPU may still be at work on.
    pub pending: u32,
    /// The program asked for a part of it to stay where it is, at some time.
    pub asked: bool,
    cells: Cells,
    /// A bit for each unit: a run starts there.
    starts: Box<[u64]>,
}

/// Two words a unit, side by side because they are looked at together: [`Run::pack`], which is right at the first and the last
/// unit of each run; and of a free run its neighbours in the list of its size, of a block its number. Nothing else is ever read,
/// so that those of a slab that went serve the next one as they are.
pub(crate) type Cells = Box<[[u64; 2]]>;

impl Slab {
    /// One that is free from end to end, on what was another one's if any is given.
    pub fn new(ground: Ground, of: usize, cells: Option<Cells>) -> Self {
        let units = ground.frames * UNITS;
        let count = units as usize;
        let cells = cells.filter(|cells| cells.len() == count);
        let mut slab = Self {
            ground,
            of,
            live: 0,
            shares: 0,
            pending: 0,
            asked: false,
            cells: cells.unwrap_or_else(|| vec![[0; 2]; count].into()),
            starts: vec![0; count.div_ceil(64)].into(),
        };
        slab.put(0, Run { units, kind: Kind::Free, slack: 0 });
        slab
    }

    pub fn units(&self) -> u32 {
        self.cells.len() as u32
    }

    /// Enters a run; what stood there is gone but for bits of starts inside it.
    pub fn put(&mut self, unit: u32, run: Run) {
        let word = u64::from(run.pack());
        self.cells[unit as usize][0] = word;
        self.cells[(unit + run.units - 1) as usize][0] = word;
        self.starts[unit as usize / 64] |= 1 << (unit % 64);
    }

    /// Gives a run another kind.
    pub fn turn(&mut self, unit: u32, kind: Kind) {
        let run = Run { kind, ..self.run(unit) };
        self.put(unit, run);
    }

    /// The run that starts at this unit, where one does.
    pub fn run(&self, unit: u32) -> Run {
        Run::unpack(self.cells[unit as usize][0] as u32)
    }

    /// The neighbours of the free run that starts at this unit, in the list of its size: before and behind it.
    pub fn links(&self, unit: u16) -> [u32; 2] {
        let word = self.cells[usize::from(unit)][1];
        [word as u32, (word >> 32) as u32]
    }

    pub fn set_links(&mut self, unit: u16, [before, behind]: [u32; 2]) {
        self.cells[usize::from(unit)][1] = u64::from(before) | u64::from(behind) << 32;
    }

    pub fn starts_at(&self, unit: u32) -> bool {
        self.starts[unit as usize / 64] >> (unit % 64) & 1 == 1
    }

    /// Where the run starts that this unit is in.
    pub fn start_of(&self, unit: u32) -> u32 {
        let (mut word, mask) = (unit as usize / 64, u64::MAX >> (63 - unit % 64));
        let mut bits = self.starts[word] & mask;
        // A run starts at unit 0.
        while bits == 0 && word > 0 {
            word -= 1;
            bits = self.starts[word];
        }
        word as u32 * 64 + 63u32.saturating_sub(bits.leading_zeros())
    }

    pub fn number(&self, unit: u32) -> u64 {
        self.cells[unit as usize][1]
    }

    pub fn set_number(&mut self, unit: u32, number: u64) {
        self.cells[unit as usize][1] = number;
    }

    /// What the next slab may have.
    pub fn into_cells(self) -> Cells {
        self.cells
    }

    /// The free run that ends right before this unit.
    pub fn free_before(&self, unit: u32) -> Option<(u32, u32)> {
        let run = Run::unpack(self.cells[unit.checked_sub(1)? as usize][0] as u32);
        (run.kind == Kind::Free).then(|| (unit - run.units, run.units))
    }

    /// The free run that starts at this unit.
    pub fn free_at(&self, unit: u32) -> Option<u32> {
        let run = Run::unpack(self.cells.get(unit as usize)?[0] as u32);
        (run.kind == Kind::Free).then_some(run.units)
    }

    /// A run starts at this unit no more: it became part of the one before.
    pub fn join(&mut self, unit: u32) {
        self.starts[unit as usize / 64] &= !(1 << (unit % 64));
    }

    /// All runs, in their order.
    pub fn runs(&self) -> impl Iterator<Item = (u32, Run)> + '_ {
        let mut unit = 0;
        std::iter::from_fn(move || {
            let run = (unit < self.units()).then(|| (unit, self.run(unit)))?;
            unit += run.1.units;
            Some(run)
        })
    }
}
