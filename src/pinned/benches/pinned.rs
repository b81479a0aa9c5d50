//! The pool's own time: a warm allocation and its free, on a backend that does nothing.
//!
//! `cargo bench -p gpupool-pinned`. Prints, besides criterion's estimates, the percentiles of single operations.

use criterion::{BenchmarkId, Criterion};
use gpupool_pinned::{Backend, Config, Fault, Free, Key, Pool, Request};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Grants every wish at no cost, so that what is measured is the pool.
struct Nothing {
    next: AtomicU64,
}

impl Backend for Nothing {
    type Error = ();

    fn pin(&self, _key: Key, bytes: u64) -> Result<u64, Fault<()>> {
        Ok(self.next.fetch_add(bytes, Ordering::Relaxed))
    }
    fn unpin(&self, _key: Key, _address: u64, _bytes: u64, _may_wait: bool) -> Result<(), ()> {
        Ok(())
    }
    fn quiesce(&self, _context: u64) -> Result<(), Fault<()>> {
        Ok(())
    }
}

const SIZES: [(&str, u64); 4] = [("4KiB", 4 << 10), ("1MiB", 1 << 20), ("64MiB", 64 << 20), ("1GiB", 1 << 30)];

/// A pool with so many live blocks of 4 to 256 KiB, with a freed one between every two.
fn crowded(live: u64) -> Pool<Nothing> {
    let config = Config { limit: 1 << 50, idle: Duration::MAX };
    let pool = Pool::new(config, Nothing { next: AtomicU64::new(1 << 40) });
    let bytes = |number: u64| (1 + number * 7 % 64) << 12;
    let blocks: Vec<u64> = (0..2 * live).map(|number| allocate(&pool, bytes(number))).collect();
    blocks.iter().step_by(2).for_each(|&address| release(&pool, address, Free::Strict));
    pool
}

fn allocate(pool: &Pool<Nothing>, bytes: u64) -> u64 {
    let request = Request { bytes, key: Key { context: 1, flags: 0 } };
    match pool.allocate(black_box(&request)) {
        Ok(allocation) => allocation.block.address,
        Err(refusal) => unreachable!("{refusal:?} on a backend that never fails"),
    }
}

fn release(pool: &Pool<Nothing>, address: u64, when: Free) {
    let freed = pool.free(address, when, || Duration::ZERO);
    assert!(freed.is_ok(), "{address:#x} is not live");
}

fn cycle(pool: &Pool<Nothing>, bytes: u64, when: Free) {
    let address = allocate(pool, bytes);
    release(pool, address, when);
    pool.return_idle(black_box(Duration::ZERO), Some(1));
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for (how, when) in [("strict", Free::Strict), ("lazy", Free::Lazy)] {
        let mut group = criterion.benchmark_group(format!("warm allocate + {how} free"));
        for live in [0, 10_000] {
            let pool = crowded(live);
            for (name, bytes) in SIZES {
                cycle(&pool, bytes, when);
                let id = BenchmarkId::new(name, format!("{live} live"));
                group.bench_function(id, |bencher| bencher.iter(|| cycle(&pool, bytes, when)));
            }
        }
        group.finish();
    }
    criterion.final_summary();
    percentiles();
}

/// Percentiles of single cycles, which criterion's averages hide.
fn percentiles() {
    let pool = crowded(10_000);
    for (name, bytes) in SIZES {
        let time = |_| {
            let start = Instant::now();
            cycle(&pool, bytes, Free::Strict);
            start.elapsed()
        };
        let mut times: Vec<Duration> = (0..200_000).map(time).collect();
        times.sort_unstable();
        let at = |share: usize| times[times.len() * share / 1000];
        println!("{name}, 10000 live, strict: p50 {:?}, p99 {:?}, p99.9 {:?}", at(500), at(990), at(999));
    }
}
