//! Where memory can be.

/// One place that memory can be at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A GPU, by CUDA ordinal as the process sees it.
    Gpu(u32),
    /// A host NUMA node.
    Host(u32),
    /// A disk: contents that whoever has them put there ([`crate::Pool::rearrange`]) and nobody can reach. No block is ever placed
    /// there, and nothing is mapped at the addresses of one that was put there.
    Disk,
    /// Pageable memory of the host, of which no GPU reaches any: as a disk is.
    Pageable,
}

impl Place {
    /// Whether this is memory of the host.
    pub fn is_host(self) -> bool {
        matches!(self, Place::Host(_))
    }

    /// Whether this is no memory of the pool's at all, but contents that are stored.
    pub fn is_stored(self) -> bool {
        matches!(self, Place::Disk | Place::Pageable)
    }
}

/// What a place may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceSpec {
    /// Where.
    pub place: Place,
    /// The most bytes the pool may hold there (the GPU's memory less the reserve, or the limit set by the user).
    pub limit: u64,
}

/// Index of a place in [`crate::Accounts::specs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlaceId(u16);

impl PlaceId {
    /// The ids of the first `count` places; places beyond the 65 535th have none.
    pub fn all(count: usize) -> impl Iterator<Item = PlaceId> {
        (0..count.min(usize::from(u16::MAX)) as u16).map(PlaceId)
    }

    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The number of a place, which fits sixteen bits with one to spare.
    pub fn number(self) -> u32 {
        u32::from(self.0)
    }

    /// The place of such a number.
    pub const fn from_number(number: u32) -> Self {
        PlaceId(number as u16)
    }
}
