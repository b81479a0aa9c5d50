//! What goes in and comes out.

use crate::links::{Links, Where};
use crate::operands::Passes;

/// Addresses from `start` to before `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    /// The first address.
    pub start: u64,
    /// Behind the last.
    pub end: u64,
}

impl Range {
    /// The bytes from an address on.
    #[must_use]
    pub fn of(start: u64, bytes: u64) -> Self {
        Self { start, end: start.saturating_add(bytes) }
    }

    /// How many bytes it has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// What both have.
    #[must_use]
    pub fn meet(&self, other: &Self) -> Self {
        let start = self.start.max(other.start);
        Self { start, end: self.end.min(other.end).max(start) }
    }
}

/// Where memory lies and how much room there is: a fact of somebody else's, asked when it is needed. What was answered for a range
/// is remembered until [`Tiers::placed`](crate::Tiers::placed) names it.
pub trait Whereabouts {
    /// Tells the pieces of a range in order of address, each with its place. What is nobody's is left out.
    fn pieces(&self, range: Range, tell: &mut dyn FnMut(Range, Where));

    /// Tells what of a range must stay where it is, in any order. It is no candidate for a move, and nobody asks for it.
    fn fixed(&self, _range: Range, _tell: &mut dyn FnMut(Range)) {}

    /// What moves at once with the memory at an address: its chunk, as far as it is of the same block. None where any frames can move by
    /// themselves as cheaply.
    fn unit(&self, _address: u64) -> Option<Range> {
        None
    }

    /// Bytes that could come to the home GPU without another byte's leaving it.
    fn near_room(&self) -> u64;

    /// Bytes that can go to the place with this index in [`Links::far`](crate::Links::far) without memory's being made there.
    fn far_room(&self, _place: u8) -> u64 {
        u64::MAX
    }
}

impl<T: Whereabouts> Whereabouts for &T {
    fn pieces(&self, range: Range, tell: &mut dyn FnMut(Range, Where)) {
        (**self).pieces(range, tell);
    }
    fn fixed(&self, range: Range, tell: &mut dyn FnMut(Range)) {
        (**self).fixed(range, tell);
    }
    fn unit(&self, address: u64) -> Option<Range> {
        (**self).unit(address)
    }
    fn near_room(&self) -> u64 {
        (**self).near_room()
    }
    fn far_room(&self, place: u8) -> u64 {
        (**self).far_room(place)
    }
}

/// What is decided once for a process.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What reading and moving cost.
    pub links: Links,
    /// Which part of the time may be lost to moves that do not pay (`GPUPOOL_MOVE_SHARE`). More than 0.02 of it is never risked.
    pub share: f64,
    /// Launches that count as a cycle while no sequence repeats itself.
    pub window: u32,
}

impl Settings {
    /// The defaults, for these links.
    #[must_use]
    pub fn new(links: Links) -> Self {
        Self { links, share: 0.05, window: 1024 }
    }
}

/// What is known of a launch as it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// Its number, for [`Tiers::before`](crate::Tiers::before), [`Tiers::timing`](crate::Tiers::timing) and
    /// [`Tiers::timed`](crate::Tiers::timed).
    pub id: u64,
    /// It reads far memory, and whether to move that first is worth asking.
    pub ask: bool,
    /// How long it takes should be measured.
    pub time_it: bool,
    /// That should be told before anything else is launched, if it can be had within milliseconds: each launch like it is charged with much until then.
    pub hear_it: bool,
    /// A cycle has ended: [`Tiers::time_is`](crate::Tiers::time_is) should be told.
    pub tell_time: bool,
}

/// Memory that should change places, all of it in one go.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Swap {
    /// What should come to the home GPU. Far now, in whole pieces as the pool told them, or cut at a frame's border.
    pub near: Vec<Range>,
    /// What should leave it for that, and to where: the place that what comes in leaves. No more bytes than come from there.
    pub far: Vec<(Range, u8)>,
    /// What moving is expected to take, nanoseconds.
    pub cost_ns: f64,
    /// What it is expected to bring, nanoseconds: before a launch until the next use of what leaves; at an idle point, a cycle.
    pub gain_ns: f64,
    /// The launch for which it is made should be timed, whatever was said before: what it gains is only guessed.
    pub time_it: bool,
    /// It brings back what was near at first and what launches lose by: the sooner the better.
    pub is_back: bool,
}

impl Swap {
    /// Bytes that come in.
    #[must_use]
    pub fn bytes_in(&self) -> u64 {
        self.near.iter().map(Range::bytes).sum()
    }

    /// Bytes that go out.
    #[must_use]
    pub fn bytes_out(&self) -> u64 {
        self.far.iter().map(|(range, _)| range.bytes()).sum()
    }
}

/// Why nothing moves any more, until the cycle changes or a while has passed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// Cycles with moves take longer than they took before anything moved.
    Slower {
        /// Nanoseconds of a cycle before the first move.
        before_ns: f64,
        /// Nanoseconds of one now.
        now_ns: f64,
    },
    /// What moved cost more time than it saved, and all that may be risked is used up.
    Unpaid {
        /// Nanoseconds that moves took, so far.
        spent_ns: f64,
        /// Nanoseconds that launches took less (below 0: more) than they would have where memory first lay.
        saved_ns: f64,
    },
}

/// A launch whose time was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// The function, as the caller named it.
    pub function: u64,
    /// A number for launches of the same function with the same pointers.
    pub kind: u32,
    /// One pass over what was far of its operands, weighed by how often each crosses the link where that is known, nanoseconds.
    pub far_ns: f32,
    /// The same for each large operand, not weighed.
    pub by_operand: Passes,
    /// Nanoseconds that one of `far_ns` was taken to cost before this was measured.
    pub gain: f32,
}

/// What moves may cost, nanoseconds throughout.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Cycles so far.
    pub cycles: u64,
    /// Launches of a cycle, if a sequence repeats itself.
    pub length: Option<u64>,
    /// What the last cycle took.
    pub cycle_ns: f64,
    /// What moves took so far.
    pub spent_ns: f64,
    /// What launches took less than they would have where memory first lay, as reckoned.
    pub saved_ns: f64,
    /// What may be spent now, with the way back reserved.
    pub free_ns: f64,
    /// What bringing everything back would take.
    pub reserve_ns: f64,
    /// What was reckoned to be saved more than the clock says.
    pub doubt_ns: f64,
}

/// A function that reads far memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reader {
    /// As the caller named it.
    pub function: u64,
    /// Far bytes that its launches name in a cycle.
    pub far_bytes: u64,
    /// How often the far bytes cross the link in one launch, as measured; none before the first measurement.
    pub reuse: Option<f64>,
    /// Nanoseconds a cycle that it loses by their being far.
    pub lost_ns: f64,
}

/// Totals, for the log, the page and the report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// Launches, copies and graphs so far.
    pub launches: u64,
    /// Cycles so far.
    pub cycles: u64,
    /// Launches of a cycle, if a sequence repeats itself.
    pub cycle: Option<u64>,
    /// Nanoseconds of the last cycle.
    pub cycle_ns: f64,
    /// Swaps that were made.
    pub swaps: u64,
    /// Bytes that came in.
    pub moved_in: u64,
    /// Bytes that went out.
    pub moved_out: u64,
    /// Nanoseconds that this took.
    pub spent_ns: f64,
    /// Nanoseconds that launches took less than they would have where memory first lay, by the measured reuse.
    pub saved_ns: f64,
    /// Bytes of the known extents that are near.
    pub near: u64,
    /// Bytes of them that are far.
    pub far: u64,
    /// Extents that are known.
    pub extents: usize,
    /// The functions that lose most by far memory, most first.
    pub readers: Vec<Reader>,
    /// Whether moving has stopped, and why.
    pub stopped: Option<Why>,
}
