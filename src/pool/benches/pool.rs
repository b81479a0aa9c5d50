//! The pool's own time: a warm allocation and its lazy free, on a backend that does nothing.
//!
//! `cargo bench -p gpupool-pool`. Prints, besides criterion's estimates, the percentiles of single operations and what
//! eight threads get done beside one. `cargo bench -p gpupool-pool -- mixes [lazy|strict [MIB]]` prints random mixes of sizes instead, and
//! `-- waste [hour] FILE...` what is held for recorded sequences, `-- rounds` what memory is made and remapped for random mixes that
//! repeat themselves, and `-- waits` how often those wait for a GPU that is always at work.

use criterion::{BenchmarkId, Criterion};
use gpupool_pool::{
    Accounts, Backend, Config, FRAME, Fault, Free, LARGEST_CHUNK, Links, Place, PlaceSpec, Policy, Pool, Repacks,
    Request,
};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Grants every wish at no cost, so that what is measured is the pool.
#[derive(Default)]
struct Nothing {
    handles: AtomicU64,
    /// Bytes that were created.
    created: AtomicU64,
    maps: AtomicU64,
    mapped: AtomicU64,
    /// What the calls would have taken on an H200 where memory was released before (`tests/bench/RESULTS.md`).
    microseconds: AtomicU64,
    /// Whether the GPU has always more to do: it can be waited for, and is not done when asked.
    at_work: bool,
    waits: AtomicU64,
}

impl Nothing {
    fn takes(&self, microseconds: u64) {
        self.microseconds.fetch_add(microseconds, Ordering::Relaxed);
    }
}

impl Backend for Nothing {
    type Handle = u64;
    type Error = ();

    fn headroom(&self, _place: Place) -> Option<u64> {
        None
    }
    fn create(&self, _place: Place, bytes: u64) -> Result<u64, Fault<()>> {
        self.created.fetch_add(bytes, Ordering::Relaxed);
        // 0.2 ms for 32 MiB, 0.5 for 128, 1 for 512: the driver clears what it gives.
        self.takes(150 + bytes * 165 / (100 << 20));
        Ok(self.handles.fetch_add(1, Ordering::Relaxed))
    }
    fn release(&self, _handle: u64, _place: Place, _bytes: u64) -> Result<(), Fault<()>> {
        self.takes(15);
        Ok(())
    }
    fn map(&self, _address: u64, bytes: u64, _handle: u64) -> Result<(), Fault<()>> {
        self.maps.fetch_add(1, Ordering::Relaxed);
        self.mapped.fetch_add(bytes, Ordering::Relaxed);
        // With the grant and the unmap: 37 µs for 32 MiB, 41 for 128, 55 for 512.
        self.takes(37 + bytes * 4 / (100 << 20));
        Ok(())
    }
    fn unmap(&self, _address: u64, _bytes: u64) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn grant(&self, _address: u64, _bytes: u64, _place: Place) -> Result<(), Fault<()>> {
        Ok(())
    }
    fn quiesce(&self, _gpus: &[u32]) -> Result<(), Fault<()>> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn has_finished(&self, _gpu: u32) -> bool {
        !self.at_work
    }
}

const SIZES: [(&str, u64); 3] = [("2MiB", FRAME), ("64MiB", 64 << 20), ("1GiB", 1 << 30)];

fn request(bytes: u64) -> Request {
    Request { bytes, home: 0, owner: 1, soft_refusal: false, repacks: Repacks::Never, can_ask: false, can_widen: false }
}

/// An empty pool over one GPU that may hold so much.
fn limited(limit: u64) -> Pool<Nothing> {
    on(limit, Nothing::default())
}

fn on(limit: u64, backend: Nothing) -> Pool<Nothing> {
    let config = Config {
        base: 1 << 40,
        bytes: 64 << 40,
        accounts: Arc::new(Accounts::new(&[PlaceSpec { place: Place::Gpu(0), limit }])),
        links: Links::default(),
        policy: Policy::LocalFirst,
        largest_chunk: LARGEST_CHUNK,
    };
    Pool::new(config, backend)
}

/// A pool with so many live blocks of 2 MiB, with a freed one between every two: the free list is as long.
fn crowded(live: u64) -> Pool<Nothing> {
    let pool = limited(32 << 40);
    let address = |_| pool.allocate(&request(FRAME)).map_or(0, |allocation| allocation.block.address);
    let blocks: Vec<u64> = (0..2 * live).map(address).collect();
    for address in blocks.iter().step_by(2) {
        release(&pool, *address);
    }
    pool
}

fn release(pool: &Pool<Nothing>, address: u64) {
    let freed = pool.free(address, Free::Lazy);
    assert!(freed.is_ok(), "{address:#x} is not live");
}

fn cycle(pool: &Pool<Nothing>, bytes: u64) {
    match pool.allocate(black_box(&request(bytes))) {
        Ok(allocation) => release(pool, allocation.block.address),
        Err(refusal) => unreachable!("{refusal:?} on a backend that never fails"),
    }
}

fn warm(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("warm allocate + lazy free");
    for live in [0, 100_000] {
        let pool = crowded(live);
        for (name, bytes) in SIZES {
            cycle(&pool, bytes);
            let id = BenchmarkId::new(name, format!("{live} live"));
            group.bench_function(id, |bencher| bencher.iter(|| cycle(&pool, bytes)));
        }
    }
    group.finish();
}

/// Percentiles of single cycles, which criterion's averages hide.
fn percentiles() {
    for live in [0, 100_000] {
        let pool = crowded(live);
        for (name, bytes) in SIZES {
            let mut times: Vec<Duration> = (0..200_000)
                .map(|_| {
                    let start = Instant::now();
                    cycle(&pool, bytes);
                    start.elapsed()
                })
                .collect();
            times.sort_unstable();
            let at = |share: usize| times[times.len() * share / 1000];
            println!("{name}, {live} live: p50 {:?}, p99 {:?}, p99.9 {:?}", at(500), at(990), at(999));
        }
    }
}

/// One thread's work: blocks of 1 to 8 MiB in sixteen slots, allocated and freed in random order.
fn mixed(pool: &Pool<Nothing>, seed: u64, operations: u64) {
    let mut random = 88_172_645_463_325_252 + seed;
    let mut held = [None; 16];
    for _ in 0..operations {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let slot = &mut held[random as usize % 16];
        match slot.take() {
            Some(address) => release(pool, address),
            None => {
                let bytes = (1 + (random >> 8) % 8) << 20;
                *slot = pool.allocate(&request(bytes)).ok().map(|allocation| allocation.block.address);
            }
        }
    }
    held.into_iter().flatten().for_each(|address| release(pool, address));
}

/// Operations a second that so many threads get done together.
fn throughput(threads: u64, work: impl Fn(u64, u64) + Sync) -> f64 {
    const OPERATIONS: u64 = 800_000;
    let barrier = Barrier::new(threads as usize);
    let each = OPERATIONS / threads;
    // The workers look at the clock themselves: a thread that only watches may be woken long after they began.
    let times = std::thread::scope(|scope| {
        let worker = |seed: u64| {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                barrier.wait();
                let start = Instant::now();
                work(seed, each);
                (start, Instant::now())
            })
        };
        let workers: Vec<_> = (0..threads).map(worker).collect();
        workers.into_iter().flat_map(|worker| worker.join().ok()).collect::<Vec<_>>()
    });
    let (start, end) = (times.iter().map(|time| time.0).min(), times.iter().map(|time| time.1).max());
    let seconds = start.zip(end).map_or(f64::NAN, |(start, end)| (end - start).as_secs_f64());
    (each * threads) as f64 / seconds
}

fn threads() {
    let pool = crowded(1_000);
    let equal = |_: u64, operations: u64| (0..operations / 2).for_each(|_| cycle(&pool, FRAME));
    let tight = crowded(0);
    let mixed = |seed: u64, operations: u64| mixed(&tight, seed, operations);
    // In pairs and by turns, so that a busy machine is busy for both.
    let report = |name: &str, work: &(dyn Fn(u64, u64) + Sync)| {
        let mut ratios: Vec<f64> = (0..15).map(|_| throughput(8, work) / throughput(1, work)).collect();
        ratios.sort_by(f64::total_cmp);
        println!(
            "8 threads against 1, {name}: throughput ratio {:.2} (median of 15; {:.2} to {:.2})",
            ratios[7], ratios[0], ratios[14]
        );
    };
    report("2 MiB", &equal);
    report("1 to 8 MiB mixed", &mixed);
}

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}

/// Blocks of a random mix that live at once: so many of them, or so many bytes.
#[derive(Clone, Copy)]
enum Live {
    Blocks(usize),
    MiB(u64),
}

impl Live {
    fn is_full(self, held: &[(u64, u64)], used: u64) -> bool {
        match self {
            Live::Blocks(most) => held.len() >= most,
            Live::MiB(most) => !held.is_empty() && used > most << 20,
        }
    }
}

/// Sizes up to so many bytes, `live` of them at once: one is freed and others are allocated, in any order, and at the end the
/// rest is freed. Returns ns a pair once the pool holds enough, and how many blocks it grew for meanwhile.
fn mix(pool: &Pool<Nothing>, largest: u64, live: Live, when: Free) -> (f64, u64) {
    const PAIRS: usize = 20_000;
    let mut random = Random(88_172_645_463_325_252);
    let mut held: Vec<(u64, u64)> = Vec::new();
    let mut used = 0;
    let free_one = |held: &mut Vec<(u64, u64)>, at: usize| {
        let (address, bytes) = held.swap_remove(at);
        assert!(pool.free(address, when).is_ok(), "{address:#x} is not live");
        bytes
    };
    let mut turn = |held: &mut Vec<(u64, u64)>| {
        let before = pool.usage();
        let start = Instant::now();
        for _ in 0..PAIRS {
            let bytes = 1 + random.below(largest);
            while live.is_full(held, used + bytes) {
                used -= free_one(held, random.below(held.len() as u64) as usize);
            }
            let address = pool.allocate(&request(bytes)).map_or(0, |allocation| allocation.block.address);
            held.push((address, bytes));
            used += bytes;
        }
        let nanoseconds = start.elapsed().as_nanos() as f64 / PAIRS as f64;
        let after = pool.usage();
        (nanoseconds, (after.allocations - after.reuses) - (before.allocations - before.reuses))
    };
    for _ in 0..4 {
        turn(&mut held);
    }
    // The median, so that a busy machine does not count.
    let mut times: Vec<(f64, u64)> = (0..9).map(|_| turn(&mut held)).collect();
    while !held.is_empty() {
        free_one(&mut held, 0);
    }
    let grown = times.iter().map(|time| time.1).sum();
    times.sort_by(|left, right| left.0.total_cmp(&right.0));
    (times[4].0, grown)
}

/// The random mix by which RMM measures its resources (`tests/bench/rmm_mix.cpp`). Rows of one line are of one pool, as there: large
/// blocks stand on the chunks that small ones were made of. With a word, the rows of that way to free alone; with two, of that size of 16 000 MiB
/// live, so that instructions can be counted (`valgrind --tool=callgrind`).
fn mixes(when: Option<&str>, mib: Option<u64>) {
    for (name, when) in
        [("lazy", Free::Lazy), ("strict", Free::Strict)].into_iter().filter(|way| when.is_none_or(|it| it == way.0))
    {
        if let Some(mib) = mib {
            let (nanoseconds, grown) = mix(&crowded(0), mib << 20, Live::MiB(16_000), when);
            println!(
                "random mix, {name}, 16000 MiB live, a pair with sizes up to {mib} MiB: {nanoseconds:.0} ns ({grown} grown)"
            );
            continue;
        }
        for (what, live) in [
            ("16000 MiB", Live::MiB(16_000)),
            ("128 GiB", Live::MiB(128 << 10)),
            ("1000 blocks", Live::Blocks(1000)),
            ("10000 blocks", Live::Blocks(10_000)),
        ] {
            let pool = crowded(0);
            let row = [4, 64, 256, 1024, 4096].map(|mib| {
                let (nanoseconds, grown) = mix(&pool, mib << 20, live, when);
                format!("{mib} MiB {nanoseconds:.0} ns ({grown} grown)")
            });
            println!("random mix, {name}, {what} live, a pair with sizes up to: {}", row.join(", "));
        }
    }
}

/// A step of a drawn sequence: a block of so many bytes is allocated, or freed where that is 0.
type Drawn = (usize, u64);

/// The sequence of `tests/bench/mix.c`: about three allocations to each free until `count` were made or `live` bytes are in use; then
/// the rest is freed. Any order.
fn draw(count: usize, largest: u64, live: u64, seed: u64) -> Vec<Drawn> {
    let mut state = 88_172_645_463_325_252_u64.wrapping_add(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    };
    for _ in 0..16 {
        next();
    }
    let (mut steps, mut held, mut used, mut made): (Vec<Drawn>, Vec<Drawn>, u64, usize) = Default::default();
    while made < count || !held.is_empty() {
        let bytes = 1 + next() % largest;
        if next() % 100 < 73 && made < count && used + bytes <= live || held.is_empty() {
            steps.push((made, bytes.min(live)));
            held.push((made, bytes.min(live)));
            made += 1;
            used += bytes.min(live);
        } else {
            let (block, bytes) = held.swap_remove(next() as usize % held.len());
            used -= bytes;
            steps.push((block, 0));
        }
    }
    steps
}

/// Where a random mix is played.
struct Scene {
    name: &'static str,
    /// Bytes that the GPU may hold.
    limit: u64,
    /// Blocks of 32 GiB that live beside it all the time, as those of RMM's pool and arena do in `tests/bench/rmm_mix.cpp`.
    slabs: u64,
}

/// `tests/bench/rmm_mix.cpp` without a driver, whose time is what rounds of large blocks cost: how much memory was made and mapped anew in
/// 1000 operations of the warm rounds, what the driver would have taken for that, and what is held for each byte in use at most. Sizes in one
/// pool, in this order; means over several sequences.
fn rounds() {
    const LIVE: u64 = 16_000 << 20;
    const SEEDS: u64 = 8;
    let scenes = [
        Scene { name: "alone", limit: 32 << 40, slabs: 0 },
        Scene { name: "beside RMM's two", limit: 137 << 30, slabs: 2 },
        Scene { name: "20 GiB at most", limit: 20 << 30, slabs: 0 },
    ];
    let rows = [1, 4, 64, 1024, 4096].map(|mib| [(mib, 1000), (mib, 10_000)]).concat();
    for (when, Scene { name, limit, slabs }) in
        [Free::Lazy, Free::Strict].into_iter().flat_map(|when| scenes.iter().map(move |scene| (when, scene)))
    {
        let mut sums = vec![[0.0; 8]; rows.len()];
        for seed in 1..=SEEDS {
            let pool = limited(*limit);
            for _ in 0..*slabs {
                assert!(pool.allocate(&request(32 << 30)).is_ok(), "there is room for a slab");
            }
            for (sum, &(mib, count)) in sums.iter_mut().zip(&rows) {
                let steps = draw(count, mib << 20, LIVE, seed);
                let [first, mut warm @ ..] = [(); 5].map(|()| round(&pool, &steps, count, when));
                let mean = |index: usize| warm.iter().map(|round| round[index]).sum::<f64>() / warm.len() as f64;
                let means = [mean(0), mean(1), mean(2), mean(3), mean(4)];
                warm.sort_by(|left, right| left[4].total_cmp(&right[4]));
                let held = (pool.usage().places[0].held - (slabs << 35)) as f64 / most_live(&steps) as f64;
                let all = means.into_iter().chain([warm[2][4], first[4], held]);
                sum.iter_mut().zip(all).for_each(|(sum, it)| *sum += it / SEEDS as f64);
            }
        }
        for ([made, mapped, maps, grown, mean, median, first, held], (mib, count)) in sums.iter().zip(&rows) {
            println!(
                "{when:?} frees, {name}, to {mib} MiB, {count}: {made:.3} GiB made, {mapped:.3} GiB in {maps:.2} chunks mapped, \
                 {grown:.3} blocks grown, driver {mean:.3} us an operation (median round {median:.3}, first {first:.3}), held {held:.3}"
            );
        }
    }
}

/// How often the random mixes of `rounds` wait with lazy frees for a GPU that is always at work, and what is held for each byte in use at
/// most; the same round again and again, means over several sequences.
fn waits() {
    const LIVE: u64 = 16_000 << 20;
    const SEEDS: u64 = 8;
    for (name, limit) in [("alone", 140 << 30), ("20 GiB at most", 20 << 30)] {
        for (mib, count) in [1, 4, 64, 1024, 4096].map(|mib| [(mib, 1000), (mib, 10_000)]).concat() {
            let (mut first, mut warm, mut held, mut made) = (0.0, 0.0, 0.0, 0.0);
            for seed in 1..=SEEDS {
                let pool = on(limit, Nothing { at_work: true, ..Nothing::default() });
                let steps = draw(count, mib << 20, LIVE, seed);
                let waits = || pool.backend().waits.load(Ordering::Relaxed) as f64 * 1000.0 / count as f64;
                round(&pool, &steps, count, Free::Lazy);
                first += waits() / SEEDS as f64;
                let before = waits();
                let rounds = [(); 4].map(|()| round(&pool, &steps, count, Free::Lazy));
                warm += (waits() - before) / rounds.len() as f64 / SEEDS as f64;
                made += rounds.iter().map(|round| round[4]).sum::<f64>() / rounds.len() as f64 / SEEDS as f64;
                held += pool.usage().places[0].held as f64 / most_live(&steps) as f64 / SEEDS as f64;
            }
            println!(
                "{name}, to {mib} MiB, {count}: waits in 1000 allocations, first round {first:.2}, warm {warm:.2}; driver {made:.3} us an \
                 operation; held {held:.3}"
            );
        }
    }
}

/// The most bytes that live at once in a drawn sequence.
fn most_live(steps: &[Drawn]) -> u64 {
    let mut sizes = std::collections::BTreeMap::new();
    let (mut used, mut most) = (0, 0);
    for &(block, bytes) in steps {
        used = if bytes == 0 { used - sizes.remove(&block).unwrap_or(0) } else { used + bytes };
        if bytes > 0 {
            sizes.insert(block, bytes);
        }
        most = most.max(used);
    }
    most
}

/// One round of a drawn sequence, for 1000 operations: GiB made, GiB mapped, maps, blocks grown; and the driver's µs for one.
fn round(pool: &Pool<Nothing>, steps: &[Drawn], count: usize, when: Free) -> [f64; 5] {
    let counts = || {
        let backend = pool.backend();
        [&backend.created, &backend.mapped, &backend.maps, &backend.microseconds]
            .map(|count| count.load(Ordering::Relaxed) as f64)
    };
    let mut addresses = vec![0; count];
    let before = (counts(), pool.usage());
    for &(block, bytes) in steps {
        if bytes == 0 {
            // Zero where it was refused.
            assert!(addresses[block] == 0 || pool.free(addresses[block], when).is_ok(), "it is live");
            continue;
        }
        let answer = if Pool::<Nothing>::is_small(bytes) {
            pool.allocate_small(&request(bytes)).map(|small| small.block.address)
        } else {
            pool.allocate(&request(bytes)).map(|allocation| allocation.block.address)
        };
        addresses[block] = answer.unwrap_or(0);
    }
    let (now, usage) = (counts(), pool.usage());
    let grown = (usage.allocations - usage.reuses) - (before.1.allocations - before.1.reuses);
    let each = 1000.0 / steps.len() as f64;
    let gib = |index: usize| (now[index] - before.0[index]) / (1_u64 << 30) as f64 * each;
    let took = (now[3] - before.0[3]) / steps.len() as f64;
    [gib(0), gib(1), (now[2] - before.0[2]) * each, grown as f64 * each, took]
}

/// A step of a recorded sequence: an allocation of so many bytes, or a free.
#[derive(Clone, Copy)]
enum Recorded {
    Allocate(usize, u64),
    Free(usize),
}

/// The steps of a recording, and how many milliseconds it was long.
fn recording(text: &str) -> (Vec<Recorded>, f64) {
    let (mut steps, mut end) = (Vec::new(), 0.0);
    for line in text.lines() {
        match (line.get(..1), line.get(1..).unwrap_or("").split_once(' ')) {
            (Some("+"), Some((id, bytes))) => {
                steps.extend(id.parse().ok().zip(bytes.parse().ok()).map(|(id, bytes)| Recorded::Allocate(id, bytes)));
            }
            (Some("-"), None) => steps.extend(line[1..].parse().ok().map(Recorded::Free)),
            (Some("@"), None) => end = line[1..].parse().unwrap_or(end),
            _ => {}
        }
    }
    (steps, end)
}

/// Plays a recorded sequence of allocations (`tests/bench/traces`, unpacked) five times over, or for an hour of the program's time without its pauses:
/// what is held at most for each byte in use at most, as `tests/bench/replay.c` tells it, and how many blocks the pool grew for in the first
/// and in the last round. Of an hour also what is held at its end, and the most that was held in its first minute.
fn waste(path: &str, hour: bool) {
    let Ok(text) = std::fs::read_to_string(path) else { return println!("{path} cannot be read") };
    let (steps, milliseconds) = recording(&text);
    let rounds = if hour { (3_600_000.0 / milliseconds.max(1.0)).ceil() as usize } else { 5 };
    let in_a_minute = rounds.div_ceil(60);
    let pool = crowded(0);
    let mut live: std::collections::BTreeMap<usize, (u64, u64)> = std::collections::BTreeMap::new();
    let (mut used, mut peak_used, mut peak_held, mut held_early) = (0_u64, 0_u64, 0_u64, 0);
    // Sums over steps, for means in which each is as long.
    let (mut sum_used, mut sum_held) = (0_u128, 0_u128);
    let mut grown = Vec::new();
    let start = Instant::now();
    for number in 0..rounds {
        let before = pool.usage();
        for (index, step) in steps.iter().enumerate() {
            match *step {
                Recorded::Allocate(id, bytes) => {
                    let address = if Pool::<Nothing>::is_small(bytes) {
                        pool.allocate_small(&request(bytes)).ok().map(|small| small.block.address)
                    } else {
                        pool.allocate(&request(bytes)).ok().map(|allocation| allocation.block.address)
                    };
                    live.insert(id, (address.unwrap_or(0), bytes));
                    used += bytes;
                }
                Recorded::Free(id) => {
                    if let Some((address, bytes)) = live.remove(&id) {
                        release(&pool, address);
                        used -= bytes;
                    }
                }
            }
            // To ask takes longer than to allocate.
            if hour && used <= peak_used && index % 16 != 0 {
                continue;
            }
            let held = pool.usage().places[0].held;
            (peak_used, peak_held) = (peak_used.max(used), peak_held.max(held));
            (sum_used, sum_held) = (sum_used + u128::from(used), sum_held + u128::from(held));
        }
        for (address, bytes) in std::mem::take(&mut live).into_values() {
            release(&pool, address);
            used -= bytes;
        }
        if number + 1 == in_a_minute {
            held_early = peak_held;
        }
        let after = pool.usage();
        grown.push((after.allocations - after.reuses) - (before.allocations - before.reuses));
    }
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    println!(
        "{path}: in use {:.1} MiB, held {:.1} MiB, ratio {:.3}, sent back {:.0} MiB; grown {} and {}",
        mib(peak_used),
        mib(peak_held),
        peak_held as f64 / peak_used as f64,
        mib(pool.usage().trimmed_bytes),
        grown[0],
        grown[rounds - 1]
    );
    if hour {
        println!(
            "  {rounds} rounds of {:.2} s, {} calls in {:.0} s; ratio in the first minute {:.3}, at the end {:.3}, of the means {:.3}; grown after \
             the first minute {}",
            milliseconds / 1000.0,
            rounds * steps.len(),
            start.elapsed().as_secs_f64(),
            held_early as f64 / peak_used as f64,
            pool.usage().places[0].held as f64 / peak_used as f64,
            sum_held as f64 / sum_used as f64,
            grown[in_a_minute..].iter().sum::<u64>()
        );
    }
}

fn main() {
    let mut words = std::env::args().skip_while(|word| word != "waste").skip(1).filter(|word| !word.starts_with('-'));
    if let Some(first) = words.next() {
        let hour = first == "hour";
        return (!hour).then_some(first).into_iter().chain(words).for_each(|path| waste(&path, hour));
    }
    let mut words = std::env::args().skip_while(|word| word != "mixes");
    if words.next().is_some() {
        let words: Vec<String> = words.filter(|word| !word.starts_with('-')).collect();
        return mixes(words.first().map(String::as_str), words.get(1).and_then(|mib| mib.parse().ok()));
    }
    if std::env::args().any(|word| word == "rounds") {
        return rounds();
    }
    if std::env::args().any(|word| word == "waits") {
        return waits();
    }
    let mut criterion = Criterion::default().configure_from_args();
    warm(&mut criterion);
    criterion.final_summary();
    percentiles();
    threads();
}
