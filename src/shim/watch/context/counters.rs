//! What a context was used for. Counted on the way of launches and copies, so: relaxed atomics, no clock but the coarse one.

use crate::clock;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Counters of one context. On lines of their own, because threads that free look at what stands beside them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters {
    pub launches: AtomicU64,
    pub copies: AtomicU64,
    pub modules: AtomicU64,
    /// Pinned host allocations and registrations made while it was current.
    pub pinned: AtomicU64,
    /// Work that is none of these: events, host functions, prefetches, memory made with `cuMemCreate`.
    others: AtomicU64,
    /// Milliseconds of the coarse clock at the last use; 0 for never.
    last: AtomicU64,
    memory: Memory,
}

/// How many threads count allocations on lines of their own; those beyond share them.
const SHARES: usize = 16;

/// Device memory that was allocated there. Each thread counts on lines of its own: one that all threads write at each pair made eight of them
/// slower together than one alone.
///
/// The peak is known all the same, and without a sum that all of them write: what a thread's blocks had, it may give to its next ones
/// (`credit`). `out` is what live blocks and credit add up to, and rises only where a share has too little; that it rises above `peak` is
/// believed once all credit was taken back.
///
/// Not in place, since copies of counters are passed by value on the agent's stack, which is small.
#[derive(Debug)]
struct Memory {
    /// [`SHARES`], or one with the sums in a copy.
    shares: Box<[Share]>,
    total: Box<Total>,
}

impl Default for Memory {
    fn default() -> Self {
        Self { shares: (0..SHARES).map(|_| Share::default()).collect(), total: Box::default() }
    }
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Total {
    out: AtomicU64,
    peak: AtomicU64,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Share {
    /// Device allocations, the driver's and the pool's.
    allocations: AtomicU64,
    /// Bytes of pooled blocks that began.
    began: AtomicU64,
    /// Bytes of pooled blocks that ended and that `out` still has.
    credit: AtomicU64,
    /// As [`Counters::last`].
    last: AtomicU64,
}

static SEATED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// This thread's number. `const` and without a destructor: legal at any time.
    static SEAT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// This thread's number, from 0 in the order in which threads first ask.
#[inline]
fn seat() -> usize {
    match SEAT.get() {
        usize::MAX => take_seat(),
        seat => seat,
    }
}

#[cold]
fn take_seat() -> usize {
    let seat = SEATED.fetch_add(1, Relaxed);
    SEAT.set(seat);
    seat
}

impl Share {
    fn counters(&self) -> [&AtomicU64; 4] {
        let Self { allocations, began, credit, last } = self;
        [allocations, began, credit, last]
    }

    /// Takes so much of the credit, if there is enough.
    #[inline]
    fn spend(&self, bytes: u64) -> bool {
        let mut credit = self.credit.load(Relaxed);
        while credit >= bytes {
            match self.credit.compare_exchange_weak(credit, credit - bytes, Relaxed, Relaxed) {
                Ok(_) => return true,
                Err(now) => credit = now,
            }
        }
        false
    }
}

impl Memory {
    #[inline]
    fn own(&self) -> Option<&Share> {
        self.shares.get(seat() % SHARES)
    }

    /// So many bytes more are out, which this share had no credit for.
    #[cold]
    fn rise(&self, bytes: u64) {
        let Total { out, peak } = &*self.total;
        if out.load(Relaxed).wrapping_add(bytes) as i64 > peak.load(Relaxed) as i64 {
            for share in self.shares.iter().filter(|share| share.credit.load(Relaxed) > 0) {
                out.fetch_sub(share.credit.swap(0, Relaxed), Relaxed);
            }
        }
        // Less than nothing for a moment, where an end is counted that began in another context's time.
        let now = out.fetch_add(bytes, Relaxed).wrapping_add(bytes) as i64;
        peak.fetch_max(now.max(0) as u64, Relaxed);
    }

    fn last(&self) -> u64 {
        self.shares.iter().map(|share| share.last.load(Relaxed)).max().unwrap_or(0)
    }

    fn sum(&self, of: impl Fn(&Share) -> &AtomicU64) -> u64 {
        self.shares.iter().map(|share| of(share).load(Relaxed)).sum()
    }
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
        let Some(share) = self.memory.own() else { return };
        share.allocations.fetch_add(1, Relaxed);
        if pooled > 0 {
            share.began.fetch_add(pooled, Relaxed);
            if !share.spend(pooled) {
                self.memory.rise(pooled);
            }
        }
        share.last.store(coarse_milliseconds(), Relaxed);
    }

    /// A pooled block of so many bytes ended.
    #[inline]
    pub fn freed(&self, pooled: u64) {
        if let Some(share) = self.memory.own() {
            share.credit.fetch_add(pooled, Relaxed);
        }
    }

    /// Device allocations, the driver's and the pool's.
    pub fn allocations(&self) -> u64 {
        self.memory.sum(|share| &share.allocations)
    }

    /// Bytes of pooled blocks that began.
    pub fn began(&self) -> u64 {
        self.memory.sum(|share| &share.began)
    }

    /// The most bytes of pooled blocks at any moment.
    pub fn peak(&self) -> u64 {
        self.memory.total.peak.load(Relaxed)
    }

    #[inline]
    fn touch(&self) {
        self.last.store(coarse_milliseconds(), Relaxed);
    }

    /// Whether anything ran or was stored there. Modules do not count: they are loaded for a context, not used; neither
    /// does pinned memory, which needs any context and not this one.
    pub fn is_used(&self) -> bool {
        self.work() + self.allocations() + self.others.load(Relaxed) > 0
    }

    /// Grows with every launch and copy.
    pub fn work(&self) -> u64 {
        self.launches.load(Relaxed) + self.copies.load(Relaxed)
    }

    /// Grows with everything that is done with it: launches, copies, other work, allocations, modules.
    pub fn uses(&self) -> u64 {
        let Self { launches, copies, others, modules, .. } = self;
        self.allocations()
            + [launches, copies, others, modules].map(|counter| counter.load(Relaxed)).iter().sum::<u64>()
    }

    fn counters(&self) -> [&AtomicU64; 8] {
        let Self { launches, copies, modules, pinned, others, last, memory: Memory { total, .. } } = self;
        [launches, copies, modules, pinned, others, last, &total.out, &total.peak]
    }

    /// Begins anew, for another context.
    pub fn restart(&self) {
        let of_shares = self.memory.shares.iter().flat_map(Share::counters);
        self.counters().into_iter().chain(of_shares).for_each(|counter| counter.store(0, Relaxed));
    }

    /// The numbers as they are now.
    pub fn copy(&self) -> Self {
        let sum = |of: fn(&Share) -> &AtomicU64| AtomicU64::new(self.memory.sum(of));
        let share = Share {
            allocations: sum(|share| &share.allocations),
            began: sum(|share| &share.began),
            credit: sum(|share| &share.credit),
            last: AtomicU64::new(self.memory.last()),
        };
        let memory = Memory { shares: Box::new([share]), total: Box::default() };
        let zero = AtomicU64::default;
        let copy = Self {
            launches: zero(),
            copies: zero(),
            modules: zero(),
            pinned: zero(),
            others: zero(),
            last: zero(),
            memory,
        };
        for (to, from) in copy.counters().into_iter().zip(self.counters()) {
            to.store(from.load(Relaxed), Relaxed);
        }
        copy
    }

    /// Seconds since the process started, at the last use.
    pub fn last_use(&self) -> Option<f64> {
        let last = self.last.load(Relaxed).max(self.memory.last());
        let age = clock::coarse_now().saturating_sub(Duration::from_millis(last)).as_secs_f64();
        (last > 0).then(|| (clock::uptime() - age).max(0.0))
    }
}

#[inline]
fn coarse_milliseconds() -> u64 {
    let now = clock::coarse_now();
    now.as_secs() * 1000 + u64::from(now.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_what_lived_at_once_whichever_threads_it_came_and_went_in() {
        let counters = Counters::default();
        let elsewhere = |act: &(dyn Fn() + Sync)| std::thread::scope(|scope| _ = scope.spawn(act).join());
        counters.allocated(100);
        counters.freed(100);
        counters.allocated(60);
        assert_eq!(counters.peak(), 100);
        elsewhere(&|| counters.allocated(30));
        elsewhere(&|| counters.freed(30));
        counters.allocated(35);
        assert_eq!(counters.peak(), 100, "95 live, whatever threads keep");
        elsewhere(&|| counters.freed(60));
        elsewhere(&|| counters.allocated(70));
        assert_eq!((counters.peak(), counters.began(), counters.allocations()), (105, 295, 5));
        let copy = counters.copy();
        assert_eq!((copy.peak(), copy.began(), copy.allocations(), copy.uses()), (105, 295, 5, 5));
        assert_eq!(size_of::<Counters>(), 128, "they are passed by value on small stacks");
        counters.restart();
        assert_eq!((counters.peak(), counters.began(), counters.allocations()), (0, 0, 0));
    }
}
