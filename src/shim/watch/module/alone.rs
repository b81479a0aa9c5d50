//! Did anybody else in this process take device memory while a module was loaded? What its GPU lost meanwhile is then not the
//! module's price alone.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Calls that may take device memory: how many have begun, and how many are under way.
struct Calls {
    begun: AtomicU64,
    under_way: AtomicU64,
}

static CALLS: Calls = Calls { begun: AtomicU64::new(0), under_way: AtomicU64::new(0) };

/// A call that may take device memory is under way until this ends.
pub struct Taking(&'static Calls);

impl Taking {
    #[inline]
    pub fn begin() -> Self {
        CALLS.enter()
    }
}

impl Drop for Taking {
    #[inline]
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, SeqCst);
    }
}

/// The time around one such call.
pub struct Around {
    calls: &'static Calls,
    /// Calls that had begun; `None` where one was under way.
    begun: Option<u64>,
}

impl Around {
    /// Before the call.
    pub fn begin() -> Self {
        CALLS.look()
    }

    /// After it: whether it was the only one.
    pub fn was_alone(&self) -> bool {
        self.begun.is_some_and(|begun| self.calls.begun.load(SeqCst) == begun + 1)
    }
}

impl Calls {
    fn enter(&'static self) -> Taking {
        self.under_way.fetch_add(1, SeqCst);
        self.begun.fetch_add(1, SeqCst);
        Taking(self)
    }

    /// One that enters between the two questions has begun later than what is noted here, and is found by that.
    fn look(&'static self) -> Around {
        let begun = self.begun.load(SeqCst);
        Around { calls: self, begun: (self.under_way.load(SeqCst) == 0).then_some(begun) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> &'static Calls {
        Box::leak(Box::new(Calls { begun: AtomicU64::new(0), under_way: AtomicU64::new(0) }))
    }

    #[test]
    fn a_call_with_nobody_beside_it_was_alone() {
        let calls = calls();
        for _ in 0..2 {
            let around = calls.look();
            drop(calls.enter());
            assert!(around.was_alone());
        }
    }

    #[test]
    fn one_that_began_before_begins_meanwhile_or_lasts_longer_is_noticed() {
        let calls = calls();
        let before = calls.enter();
        let around = calls.look();
        drop(before);
        drop(calls.enter());
        assert!(!around.was_alone(), "it was under way when this began");
        let around = calls.look();
        let own = calls.enter();
        let other = calls.enter();
        drop(own);
        assert!(!around.was_alone(), "it began meanwhile and goes on");
        drop(other);
        assert!(!around.was_alone(), "and is over");
    }
}
