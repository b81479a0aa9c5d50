//! What a context was used for. Counted on the way of launches and copies, so: relaxed atomics, no clock but the coarse one.

use crate::clock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Counters of one context. On lines of their own, because threads that free look at what stands beside them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters {
    pub launches: AtomicU64,
    pub copies: AtomicU64,
    pub modules: AtomicU64,
    /// Device allocations, the driver's and the pool's.
    pub allocations: AtomicU64,
    /// Pinned host allocations and registrations made while it was current.
    pub pinned: AtomicU64,
    /// Work that is none of these: events, host functions, prefetches, memory made with `cuMemCreate`.
    others: AtomicU64,
    /// Bytes of pooled blocks that began and that ended: two sums that only grow, which cost no more than their difference,
    /// and tell how much was allocated.
    began: AtomicU64,
    ended: AtomicU64,
    /// The most that the difference ever was.
    peak: AtomicU64,
    /// Milliseconds of the coarse clock at the last use; 0 for never.
    last: AtomicU64,
}

impl Counters {
    #[inline]
    pub fn launched(&self) {
        self.launches.fetch_add(1, Relaxed);
        self.touch();
    }

    #[inline]
    pub fn copied(&self) {
        self.copies.fetch_add(1, Relaxed);
        self.touch();
    }

    /// Other work was submitted.
    #[inline]
    pub fn worked(&self) {
        self.others.fetch_add(1, Relaxed);
        self.touch();
    }

    /// An allocation of device memory; `pooled` bytes of it are the pool's.
    #[inline]
    pub fn allocated(&self, pooled: u64) {
        self.allocations.fetch_add(1, Relaxed);
        if pooled > 0 {
            let began = self.began.fetch_add(pooled, Relaxed) + pooled;
            // Less than nothing for a moment, where a free is counted late.
            let now = began.saturating_sub(self.ended.load(Relaxed));
            if now > self.peak.load(Relaxed) {
                self.peak.fetch_max(now, Relaxed);
            }
        }
        self.touch();
    }

    pub fn freed(&self, pooled: u64) {
        self.ended.fetch_add(pooled, Relaxed);
    }

    /// Bytes of pooled blocks that began.
    pub fn began(&self) -> u64 {
        self.began.load(Relaxed)
    }

    /// The most bytes of pooled blocks at any moment.
    pub fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }

    #[inline]
    fn touch(&self) {
        self.last.store(clock::coarse_now().as_millis() as u64, Relaxed);
    }

    /// Whether anything ran or was stored there. Modules do not count: they are loaded for a context, not used; neither
    /// does pinned memory, which needs any context and not this one.
    pub fn is_used(&self) -> bool {
        self.work() + self.allocations.load(Relaxed) + self.others.load(Relaxed) > 0
    }

    /// Grows with every launch and copy.
    pub fn work(&self) -> u64 {
        self.launches.load(Relaxed) + self.copies.load(Relaxed)
    }

    /// Grows with everything that is done with it: launches, copies, other work, allocations, modules.
    pub fn uses(&self) -> u64 {
        let Self { launches, copies, others, allocations, modules, .. } = self;
        [launches, copies, others, allocations, modules].map(|counter| counter.load(Relaxed)).iter().sum()
    }

    fn counters(&self) -> [&AtomicU64; 10] {
        let Self { launches, copies, modules, allocations, pinned, others, began, ended, peak, last } = self;
        [launches, copies, modules, allocations, pinned, others, began, ended, peak, last]
    }

    /// Begins anew, for another context.
    pub fn restart(&self) {
        self.counters().into_iter().for_each(|counter| counter.store(0, Relaxed));
    }

    /// The numbers as they are now.
    pub fn copy(&self) -> Self {
        let copy = Self::default();
        for (to, from) in copy.counters().into_iter().zip(self.counters()) {
            to.store(from.load(Relaxed), Relaxed);
        }
        copy
    }

    /// Seconds since the process started, at the last use.
    pub fn last_use(&self) -> Option<f64> {
        let last = self.last.load(Relaxed);
        let age = clock::coarse_now().saturating_sub(Duration::from_millis(last)).as_secs_f64();
        (last > 0).then(|| (clock::uptime() - age).max(0.0))
    }
}
