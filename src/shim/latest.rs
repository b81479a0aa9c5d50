//! Something that is known late and may become something else: the last one holds, and whoever has an older one keeps it.

use std::sync::atomic::{AtomicPtr, Ordering};

/// Empty at first. What it holds is never freed, since anybody may be reading it: for what changes once or twice in the life of a process. No lock, so that
/// the child of a fork can read it.
pub struct Latest<T>(AtomicPtr<T>);

impl<T: Sync> Latest<T> {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// This one, from now on.
    pub fn set(&self, value: T) {
        self.0.store(Box::into_raw(Box::new(value)), Ordering::Release);
    }

    /// The last one.
    pub fn get(&self) -> Option<&'static T> {
        // SAFETY: NULL, or from `Box::into_raw` above, written before the pointer was, and never freed.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_one_holds_and_an_older_one_can_still_be_read() {
        static LATEST: Latest<u32> = Latest::new();
        assert_eq!(LATEST.get(), None);
        LATEST.set(1);
        let older = LATEST.get();
        LATEST.set(2);
        assert_eq!((older, LATEST.get()), (Some(&1), Some(&2)));
    }
}
