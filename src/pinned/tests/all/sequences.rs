//! What programs do: the bytes pinned at the peak against those in use.

use crate::mock::{GIB, IDLE, KEY, KIB, MIB, pool};
use gpupool_pinned::{Free, Request};
use std::collections::VecDeque;
use std::time::Duration;

/// Runs a program that allocates these sizes in turn and holds up to so many of them at once.
fn peaks(sizes: impl Iterator<Item = u64>, held: usize, when: Free) -> (u64, u64) {
    let pool = pool(64 * GIB);
    let mut live = VecDeque::new();
    let mut now = Duration::ZERO;
    for bytes in sizes {
        if live.len() == held
            && let Some(address) = live.pop_front()
        {
            pool.free(address, when, || now).unwrap();
        }
        live.push_back(pool.allocate(&Request { bytes, key: KEY }).unwrap().block.address);
        now += Duration::from_millis(20);
        pool.return_idle(now, Some(1));
    }
    let usage = pool.usage();
    assert!(now < IDLE || usage.reuses > 0);
    (usage.peak_pinned, usage.peak_requested)
}

fn assert_within_a_tenth(name: &str, sizes: impl Iterator<Item = u64> + Clone, held: usize) {
    for when in [Free::Strict, Free::Lazy] {
        let (pinned, requested) = peaks(sizes.clone(), held, when);
        assert!(pinned * 10 <= requested * 11, "{name}, {when:?}: {pinned} pinned for {requested}");
    }
}

#[test]
fn a_loader_of_batches_holds_little_more_than_its_batches() {
    let images = |batch: u64| batch * 224 * 224 * 3 * 4;
    let epochs = (0..10).flat_map(|_| (0..100).map(|step| if step == 99 { 37 } else { 256 }));
    assert_within_a_tenth("images and labels", epochs.flat_map(|batch| [images(batch), batch * 8]), 12);
    let small = (0..1_000).flat_map(|_| [256 * KIB, 512, 4]);
    assert_within_a_tenth("small batches", small, 24);
}

#[test]
fn a_pool_of_the_program_gets_what_it_asks() {
    // A pool of powers of two, filled as its program needs more, and then emptied.
    let bins = (9..28).flat_map(|power| std::iter::repeat_n(1u64 << power, 3));
    assert_within_a_tenth("powers of two", bins, 57);
}

#[test]
fn batches_of_every_length_hold_little_more_than_the_longest() {
    let mut length = 1u64;
    let sizes = (0..2_000).map(move |_| {
        length = length * 48_271 % 2_147_483_647;
        (1 + length % 512) * 64 * KIB
    });
    assert_within_a_tenth("sequences", sizes.clone(), 8);
    assert_within_a_tenth("long sequences", sizes.map(|bytes| bytes + 100 * MIB), 8);
}
