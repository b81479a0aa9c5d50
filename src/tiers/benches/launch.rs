//! What a launch costs the program's thread, in nanoseconds: `cargo bench -p gpupool-tiers`.

use criterion::{BenchmarkId, Criterion};
use gpupool_tiers::{FarLink, Links, Range, Settings, Tiers, Where, Whereabouts};
use std::hint::black_box;

const BASE: u64 = 0x7000_0000_0000;
const BLOCKS: u64 = 400;
const BYTES: u64 = 64 << 20;

/// Every fifth block is far.
struct Fifth;

impl Whereabouts for Fifth {
    fn pieces(&self, range: Range, tell: &mut dyn FnMut(Range, Where)) {
        let is_far = ((range.start - BASE) / BYTES).is_multiple_of(5);
        tell(range, if is_far { Where::Far(0) } else { Where::Near });
    }
    fn near_room(&self) -> u64 {
        0
    }
}

/// Launches of a cycle, each of another function or on other memory.
fn cycle(launches: u64, pointers: u64) -> Vec<(u64, Vec<u64>)> {
    let pointer = |launch, number| BASE + (launch * 13 + number * 7) % BLOCKS * BYTES;
    (0..launches).map(|launch| (launch % 40, (0..pointers).map(|number| pointer(launch, number)).collect())).collect()
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("launched");
    for (launches, pointers) in [(1, 4), (1, 8), (1000, 4), (1000, 8), (5000, 6), (5000, 64)] {
        let cycle = cycle(launches, pointers);
        let mut tiers = Tiers::new(Settings::new(Links::measured(vec![FarLink::PEER])));
        (0..BLOCKS).for_each(|block| tiers.block_began(BASE + block * BYTES, BYTES));
        let mut next = cycle.iter().cycle();
        let mut now = 0;
        let mut launch = || {
            let Some((function, words)) = next.next() else { unreachable!("a cycle has no end") };
            let launch = tiers.launched(*function, 0, black_box(words), &Fifth);
            if launch.tell_time {
                now += 1_000_000;
                tiers.time_is(now, &Fifth);
            }
            // Nothing can be moved.
            if launch.ask
                && let Some(swap) = black_box(tiers.before(launch.id, now, &Fifth))
            {
                swap.near.iter().for_each(|range| tiers.stayed(*range));
            }
            if launch.time_it {
                tiers.timing(launch.id, &Fifth);
                // Each byte is read once.
                let far = words.iter().filter(|word| ((*word - BASE) / BYTES).is_multiple_of(5)).count() as u64;
                tiers.timed(launch.id, far * BYTES / 374 + words.len() as u64 * BYTES / 4480);
            }
            launch
        };
        // It has learnt what there is to learn.
        for _ in 0..400 * launches.max(8) {
            black_box(launch());
        }
        let name = BenchmarkId::from_parameter(format!("{pointers} pointers, cycle of {launches}"));
        group.bench_function(name, |bencher| bencher.iter(&mut launch));
    }
    group.finish();
    criterion.final_summary();
}
