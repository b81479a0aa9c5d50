//! Who is told that a context began or ended. What goes with a context (blocks, pinned memory, what was opened of other
//! processes, captures) is kept by modules that ask this one, so they cannot be named here: they are in a list that the start
//! of the library hands over.

use gpupool_cuda::{self as cuda, CuResult, Device, Driver};
use once_cell::race::OnceBox;

/// What a module does when contexts come and go. Everything is called without a lock of this module's.
pub trait Observer: Sync {
    /// This device has a context, and the call that gave it one has not returned. Told for each context, and again by another
    /// thread that sees the same one. An error: the context cannot be used together with what the library holds.
    fn arrived(&self, _device: Device) -> Result<(), CuResult> {
        Ok(())
    }

    /// A context is new here, though it may have been made before. Its handle may not be known yet; another context
    /// is current, or none.
    fn began(&self, _driver: &Driver, _context: Option<cuda::Context>) {}

    /// The context with this id is gone: drops what belongs to it, and says how many blocks of device memory that were. Called
    /// again by who made something for the context while it ended.
    fn ended(&self, _id: u64) -> usize {
        0
    }

    /// Contexts have ended, and every observer has heard of it.
    fn settled(&self) {}

    /// Bytes on a device that are held by this library and not by a context.
    fn held_on(&self, _device: Device) -> u64 {
        0
    }
}

static OBSERVERS: OnceBox<&'static [&'static dyn Observer]> = OnceBox::new();

/// Hands the list over; before the first context is noted. A second list is ignored.
pub fn observe(list: &'static [&'static dyn Observer]) {
    let _ = OBSERVERS.set(Box::new(list));
}

/// Tells all that this device has a context; the first error, if there was any.
pub(super) fn arrived(device: Device) -> Result<(), CuResult> {
    let mut answer = Ok(());
    for observer in all() {
        answer = answer.and(observer.arrived(device));
    }
    answer
}

/// In the order of the list.
pub(super) fn all() -> impl Iterator<Item = &'static dyn Observer> {
    OBSERVERS.get().copied().unwrap_or_default().iter().copied()
}
