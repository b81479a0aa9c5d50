//! What is to leave its GPUs, and where it may go.

use super::Target;
use super::put::Put;
use super::stored::Range;
use super::why::Why;
use crate::backing::open::Opened;
use crate::backing::terms;
use crate::tiers;
use crate::watch::context;
use gpupool_cuda::{Device, Physical};
use gpupool_pool::{Piece, Place};
use std::collections::BTreeMap;

/// What is to leave, and where it may go.
#[derive(Clone, Copy)]
pub enum Leaves<'a> {
    /// All that lies on GPUs which the program works on, since it is suspended. `put`: what leaves for where it was copied already; nothing else
    /// may, but to peers: a block that another thread was given meanwhile is not among it. `full`: what was not copied.
    Suspended { target: &'a Target, put: Option<&'a Put>, full: Option<&'a Full> },
    /// What lies on this GPU, while the program goes on or is suspended; `lent`: only what is for other GPUs. So many bytes at least, of others' first, and
    /// no more than `cap`. `away`: to no GPU that the program works on, since it is suspended.
    Gpu { gpu: u32, lent: bool, most: u64, cap: u64, onto: Onto<'a>, away: bool },
}

/// Where memory of one GPU goes.
#[derive(Clone, Copy)]
pub enum Onto<'a> {
    /// To peers and to the host.
    Anywhere,
    Peers,
    /// What was copied already goes there, and what of the program's own memory was not, to peers and to the host. As for [`Leaves::Suspended`].
    Put {
        put: &'a Put,
        full: Option<&'a Full>,
    },
}

/// What was not copied to where it was to go, for lack of room there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Full {
    pub why: Why,
    /// By their first addresses, the last ones.
    pub ranges: BTreeMap<u64, u64>,
}

impl Full {
    pub fn new(why: Why, ranges: &[Range]) -> Self {
        Self { why, ranges: ranges.iter().map(|range| (range.address, range.address + range.bytes)).collect() }
    }

    pub fn has(&self, address: u64) -> bool {
        self.ranges.range(..=address).next_back().is_some_and(|(_, end)| address < *end)
    }
}

impl<'a> Leaves<'a> {
    /// Whether this is a place that is left. A suspended program leaves GPUs that it works on; where all of its memory goes to the host, any;
    /// and where it goes to a disk, all memory there is, the program's own as well.
    pub fn place(self, place: Place) -> bool {
        match (self, place) {
            (_, Place::Disk | Place::Pageable) => false,
            // Unless somebody asks for it by draining the GPU, nothing is copied from one with a grave error.
            (Self::Suspended { .. }, place) if terms::is_place_left_alone(place) => false,
            (Self::Suspended { target: Target::Folder(_), .. }, _) => true,
            (_, Place::Host(_)) => false,
            (Self::Suspended { target, .. }, Place::Gpu(gpu)) => {
                *target == Target::Host || context::is_on(Device::of(gpu))
            }
            (Self::Gpu { gpu: left, .. }, Place::Gpu(gpu)) => gpu == left,
        }
    }

    /// Whether this piece of a block may leave.
    pub fn piece(self, piece: &Piece<Physical>) -> bool {
        let is_put = || self.put().map_or(!self.is_put(), |put| put.has(piece.address, piece.bytes));
        self.place(piece.place) && is_put()
    }

    /// Whether only what was copied before leaves.
    pub fn is_put(self) -> bool {
        match self {
            Self::Suspended { target, .. } => *target != Target::Peers,
            Self::Gpu { onto, .. } => matches!(onto, Onto::Put { .. }),
        }
    }

    /// Where it was copied to.
    pub fn put(self) -> Option<&'a Put> {
        match self {
            Self::Suspended { put, .. } => put,
            Self::Gpu { onto: Onto::Put { put, .. }, .. } => Some(put),
            Self::Gpu { .. } => None,
        }
    }

    /// What of it was not.
    pub fn full(self) -> Option<&'a Full> {
        match self {
            Self::Suspended { full, .. } | Self::Gpu { onto: Onto::Put { full, .. }, .. } => full,
            Self::Gpu { .. } => None,
        }
    }

    /// Whether memory for this GPU is concerned at all.
    pub fn concerns(self, home: u32) -> bool {
        !matches!(self, Self::Gpu { gpu, lent: true, .. } if gpu == home)
    }

    /// Whether memory may go to this place, of those that it does not leave; of the program's own memory, where the target is not peers. What is to go to a disk and
    /// cannot goes nowhere else: no GPU reaches it, or others do.
    pub fn takes(self, opened: &Opened, place: Place) -> bool {
        match (self, place) {
            (_, Place::Disk | Place::Pageable) => false,
            (Self::Suspended { target, .. }, Place::Gpu(_)) => matches!(target, Target::Anywhere | Target::Peers),
            (Self::Suspended { target, .. }, Place::Host(_)) => matches!(target, Target::Anywhere | Target::Host),
            (Self::Gpu { onto: Onto::Peers, .. }, Place::Host(_)) => false,
            // A suspended program's own GPUs are others' meanwhile.
            (Self::Gpu { away: true, .. }, Place::Gpu(gpu)) if context::is_on(Device::of(gpu)) => false,
            // Who goes on computes there, also together with another GPU.
            (Self::Gpu { .. }, place) => tiers::keeps_atomics(opened, place),
        }
    }

    pub fn why_nowhere(self) -> Why {
        match self {
            Self::Suspended { target: Target::Peers, .. } => Why::no_peer(),
            Self::Suspended { .. } => Why::nowhere(),
            Self::Gpu { .. } => Why::new(
                "nowhere",
                "there is no other place that it may lie at: none that lends and is in reach, or none at which two GPUs can change the same \
                 word at the same time",
            ),
        }
    }
}
