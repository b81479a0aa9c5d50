//! Memory that someone knows by its physical pages, and that must therefore stay on them.
//!
//! An anchor belongs to a chunk, since physical memory moves by the chunk. What has been given out cannot be called back, so
//! a chunk stays anchored until it goes back to the driver, also under the blocks that come to stand on it later. Only what
//! the program itself asked for ends, with the block or before (`crate::asked`).
//!
//! An anchor does not keep the memory: it goes back to the driver as ever, and whoever holds a handle or a descriptor keeps
//! the pages alive, no longer the pool. What it may not do meanwhile is serve another block: see `crate::held`.
//!
//! Anchored is not anchored, which is what host memory is that the system may not page out.

use std::ops::{BitOr, BitOrAssign};

/// One reason to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// Other processes may have it mapped (`cuIpcGetMemHandle`).
    Shared,
    /// Someone may hold its physical handle (`cuMemRetainAllocationHandle`), and whatever was exported from that.
    Retained,
    /// Someone may hold a file descriptor of it (`cuMemGetHandleForAddressRange`: RDMA), or it is bound to a multicast object or a logical
    /// endpoint.
    Descriptor,
    /// The program asked for it. The one reason that ends: [`crate::Pool::release_anchor`], or the end of the block.
    Asked,
}

impl Anchor {
    /// Every reason, in the order of the numbers that [`Anchors::bits`] has.
    pub const ALL: [Anchor; 4] = [Anchor::Shared, Anchor::Retained, Anchor::Descriptor, Anchor::Asked];
}

/// All reasons of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anchors(u8);

impl Anchors {
    /// No reason.
    pub const NONE: Anchors = Anchors(0);

    /// Whether the memory may move.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether this is among the reasons.
    pub fn has(self, reason: Anchor) -> bool {
        self.0 & Anchors::from(reason).0 != 0
    }

    /// One bit for each reason, the lowest for the first of [`Anchor::ALL`].
    pub fn bits(self) -> u8 {
        self.0
    }
}

impl From<Anchor> for Anchors {
    fn from(reason: Anchor) -> Self {
        Anchors(1 << reason as u8)
    }
}

impl BitOr for Anchors {
    type Output = Anchors;

    fn bitor(self, other: Anchors) -> Anchors {
        Anchors(self.0 | other.0)
    }
}

impl BitOrAssign for Anchors {
    fn bitor_assign(&mut self, other: Anchors) {
        *self = *self | other;
    }
}
