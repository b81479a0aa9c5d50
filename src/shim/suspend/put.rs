//! Where memory of a suspended program is that left without being mapped anywhere else.

use super::kept::Kept;
use super::stored::{Stored, Unnamed, Unread};
use crate::backing::open::Opened;
use gpupool_cuda::Driver;
use gpupool_pool::Place;

pub enum Put {
    /// In files.
    Disk(Box<Stored>),
    /// In plain memory of the host.
    Host(Kept),
}

impl Put {
    /// What the pool calls it.
    pub fn place(&self) -> Place {
        match self {
            Self::Disk(_) => Place::Disk,
            Self::Host(_) => Place::Pageable,
        }
    }

    /// What of it is in plain memory of the host.
    pub fn on_host(&self) -> Option<&Kept> {
        match self {
            Self::Disk(_) => None,
            Self::Host(kept) => Some(kept),
        }
    }

    /// Adds what was put to the host as well.
    pub fn join(&mut self, other: Self) {
        if let (Self::Host(kept), Self::Host(other)) = (self, other) {
            kept.join(other);
        }
    }

    /// Whether all that lies at these addresses was put there.
    pub fn has(&self, address: u64, bytes: u64) -> bool {
        match self {
            Self::Disk(stored) => stored.has(address, bytes),
            Self::Host(kept) => kept.has(address, bytes),
        }
    }

    pub fn on_disk(&self) -> Option<&Stored> {
        match self {
            Self::Disk(stored) => Some(stored),
            Self::Host(_) => None,
        }
    }

    /// Has it read for the length of `act`, as the pool asks for it; `act` is given what tells why that failed, if it did.
    ///
    /// # Errors
    /// It cannot be opened; in words.
    pub fn reading<T>(&self, driver: &'static Driver, act: impl FnOnce(&Unread) -> T) -> Result<T, String> {
        match self {
            Self::Disk(stored) => stored.reading(driver, act),
            Self::Host(kept) => Ok(kept.reading(driver, act)),
        }
    }

    /// What of it is where GPUs reach it again is needed no more, by the pool's books. Of files none is removed before all is back.
    pub fn look_what_arrived(&self, opened: &Opened) {
        if let Self::Host(kept) = self {
            kept.look_what_arrived(opened);
        }
    }

    /// All is back: nobody finds it any more. It takes as much room as before until [`Rest::end`], or until the process ends.
    pub fn unname(self) -> Rest {
        match self {
            Self::Disk(stored) => Rest::Disk(Box::new(stored.unname())),
            Self::Host(kept) => Rest::Host(kept),
        }
    }
}

/// What is needed no more, and takes room.
pub enum Rest {
    Disk(Box<Unnamed>),
    Host(Kept),
}

impl Rest {
    /// Gives that back, which takes as long as there is much of it.
    pub fn end(self) {
        match self {
            Self::Disk(unnamed) => unnamed.end(),
            Self::Host(kept) => kept.end(),
        }
    }
}
