//! What the pool does, case by case.

use crate::mock::{FaultKind, GIB, IDLE, KEY, KIB, MIB, Mock, allocate, pool, try_allocate};
use gpupool_pinned::{Free, FreeError, Key, Pool, Refusal, Request};
use std::time::Duration;

const START: Duration = Duration::ZERO;

fn free(pool: &Pool<Mock>, address: u64) {
    pool.free(address, Free::Strict, || START).unwrap();
}

#[test]
fn a_freed_block_serves_the_next_of_its_size() {
    for bytes in [1, 4 * KIB, MIB, 64 * MIB, GIB] {
        let pool = pool(2 * GIB);
        let (address, pinned) = allocate(&pool, bytes);
        assert!(pinned >= bytes);
        free(&pool, address);
        assert_eq!(allocate(&pool, bytes), (address, 0));
        assert_eq!(pool.usage().reuses, 1);
    }
}

#[test]
fn what_was_found_is_not_found_once_it_has_ended() {
    let ends: [fn(&Pool<Mock>, u64); 3] = [
        free,
        |pool, _| assert_eq!(pool.context_gone(KEY.context).len(), 1),
        |pool, address| pool.given_anew(address, 4 * KIB),
    ];
    for end in ends {
        let pool = pool(GIB);
        let (address, _) = allocate(&pool, MIB);
        let found = |address| pool.find(address).flatten().map(|block| block.address);
        assert_eq!([found(address), found(address), found(address + 5)], [Some(address); 3]);
        assert_eq!(found(address + MIB), None);
        end(&pool, address);
        assert_eq!([found(address), found(address + 5)], [None; 2]);
    }
}

#[test]
fn a_large_block_is_pinned_to_the_page_and_small_ones_together() {
    let pool = pool(GIB);
    assert_eq!(allocate(&pool, 100 * MIB + 1).1, 100 * MIB + 4 * KIB);
    let (first, pinned) = allocate(&pool, 8 * KIB);
    assert_eq!(pinned, 64 * KIB);
    let (second, pinned) = allocate(&pool, 8 * KIB);
    assert_eq!((second, pinned), (first + 8 * KIB, 0));
}

#[test]
fn small_segments_grow_with_what_is_in_them() {
    let pool = pool(GIB);
    let pins: Vec<u64> = (0..100_000).map(|_| allocate(&pool, 4 * KIB).1).filter(|&pinned| pinned > 0).collect();
    assert!(pins.is_sorted() && pins.len() < 250, "{} driver calls for 100000 blocks", pins.len());
    let usage = pool.usage();
    assert!(usage.pinned < usage.used + usage.used / 30, "{} pinned for {}", usage.pinned, usage.used);
}

#[test]
fn small_segments_start_small_again_when_all_went_back() {
    let pool = pool(GIB);
    let blocks: Vec<u64> = (0..10_000).map(|_| allocate(&pool, 4 * KIB).0).collect();
    blocks.into_iter().for_each(|address| free(&pool, address));
    pool.trim();
    assert_eq!(allocate(&pool, 4 * KIB).1, 64 * KIB);
}

#[test]
fn the_smallest_rest_that_is_big_enough_is_taken() {
    let pool = pool(GIB);
    let blocks: Vec<u64> = [12, 4, 20, 4, 8, 4, 8].map(|kib| allocate(&pool, kib * KIB).0).to_vec();
    assert_eq!(pool.usage().pinned, pool.usage().used, "no room but that of freed blocks");
    for freed in [0, 2, 4] {
        free(&pool, blocks[freed]);
    }
    assert_eq!(allocate(&pool, 8 * KIB), (blocks[4], 0), "exactly");
    assert_eq!(allocate(&pool, 8 * KIB), (blocks[0], 0), "the better of two");
    assert_eq!(allocate(&pool, 4 * KIB), (blocks[0] + 8 * KIB, 0), "its rest");
}

#[test]
fn neighbours_become_one_when_they_are_free() {
    let pool = pool(GIB);
    let blocks: Vec<u64> = (0..16).map(|_| allocate(&pool, 4 * KIB).0).collect();
    assert_eq!(pool.usage().segments, 1);
    for freed in [1, 3, 2, 0, 15, 14, 4, 6, 5, 8, 7, 9, 12, 11, 10, 13] {
        free(&pool, blocks[freed]);
    }
    assert_eq!(allocate(&pool, 64 * KIB), (blocks[0], 0));
}

#[test]
fn segments_side_by_side_stay_two() {
    let pool = pool(GIB);
    let (left, right) = (allocate(&pool, MIB).0, allocate(&pool, MIB).0);
    assert_eq!(right, left + MIB, "the mock puts them side by side");
    free(&pool, left);
    free(&pool, right);
    assert_eq!(allocate(&pool, 2 * MIB).1, 2 * MIB);
}

#[test]
fn a_large_segment_is_not_broken_for_a_small_block() {
    let pool = pool(4 * GIB);
    let large = allocate(&pool, GIB).0;
    free(&pool, large);
    assert!(allocate(&pool, 4 * KIB).1 > 0);
    assert_eq!(allocate(&pool, GIB), (large, 0));
}

#[test]
fn a_slightly_smaller_block_takes_a_kept_segment() {
    let pool = pool(4 * GIB);
    let large = allocate(&pool, GIB).0;
    free(&pool, large);
    assert_eq!(allocate(&pool, GIB - 30 * MIB), (large, 0));
}

#[test]
fn contexts_and_flags_are_kept_apart() {
    let pool = pool(GIB);
    let keys = [(1, 0), (1, 1), (1, 2), (1, 4), (2, 0)].map(|(context, flags)| Key { context, flags });
    let blocks = keys.map(|key| pool.allocate(&Request { bytes: MIB, key }).unwrap().block);
    for block in blocks {
        assert_eq!(pool.backend().inner().segment(block.address).unwrap().2, block.key);
        free(&pool, block.address);
    }
    for block in blocks {
        let again = pool.allocate(&Request { bytes: MIB, key: block.key }).unwrap();
        assert_eq!((again.block.address, again.reused()), (block.address, true));
    }
}

#[test]
fn kept_segments_make_way_for_other_sizes() {
    let pool = pool(8 * GIB);
    let mut peak = 0;
    for round in 0..40 {
        let bytes = (100 + 37 * (round % 7)) * MIB;
        let blocks: Vec<u64> = (0..4).map(|_| allocate(&pool, bytes).0).collect();
        peak = peak.max(4 * bytes);
        blocks.into_iter().for_each(|address| free(&pool, address));
        let usage = pool.usage();
        assert!(usage.peak_pinned <= peak + peak / 10, "{} pinned for {peak}", usage.peak_pinned);
    }
}

#[test]
fn the_limit_holds_and_is_named_by_what_it_refused() {
    let pool = pool(100 * MIB);
    let first = allocate(&pool, 60 * MIB).0;
    assert_eq!(try_allocate(&pool, 50 * MIB), Err(Refusal::Limit { wanted: 50 * MIB }));
    assert_eq!(pool.usage().pinned, 60 * MIB, "nothing was given back in vain");
    free(&pool, first);
    let allocation = try_allocate(&pool, 50 * MIB).unwrap();
    assert_eq!((allocation.pinned, allocation.returned), (50 * MIB, 60 * MIB));
    assert_eq!(pool.usage().pinned, 50 * MIB);
    assert_eq!(try_allocate(&pool, u64::MAX), Err(Refusal::Limit { wanted: u64::MAX }));
    assert_eq!(try_allocate(&pool, 0), Err(Refusal::Empty));
}

#[test]
fn only_the_limit_is_worth_a_wait() {
    let pool = pool(100 * MIB);
    let kept = allocate(&pool, 60 * MIB).0;
    free(&pool, kept);
    pool.backend().inner().running = true;
    assert_eq!(try_allocate(&pool, 30 * MIB).map(|allocation| allocation.returned), Ok(0));
    assert_eq!(try_allocate(&pool, 40 * MIB).map(|allocation| allocation.returned), Ok(60 * MIB));
}

#[test]
fn just_below_the_limit_a_small_block_is_pinned_alone() {
    let pool = pool(MIB + 4 * KIB);
    allocate(&pool, MIB);
    assert_eq!(allocate(&pool, KIB).1, 4 * KIB);
}

#[test]
fn unused_segments_go_back_when_their_time_is_over() {
    let pool = pool(GIB);
    let (a, b) = (allocate(&pool, 4 * MIB).0, allocate(&pool, 8 * MIB).0);
    let second = Duration::from_secs(1);
    pool.free(a, Free::Strict, || second).unwrap();
    pool.free(b, Free::Lazy, || 2 * second).unwrap();
    assert_eq!(pool.return_idle(IDLE, Some(1)), 0);
    assert_eq!(pool.return_idle(IDLE + second, Some(1)), 4 * MIB);
    assert_eq!(pool.usage().pinned, 8 * MIB);
    assert_eq!(pool.return_idle(IDLE + 3 * second, Some(1)), 8 * MIB);
    assert_eq!(pool.return_idle(10 * IDLE, Some(1)), 0);
    assert!(pool.backend().inner().segments.is_empty());
    assert_eq!(pool.usage().returned, 12 * MIB);
}

/// The kernel in front of it ran for longer than unused memory is kept.
#[test]
fn what_a_free_waited_for_is_unused_from_the_end_of_the_wait_on() {
    let pool = pool(GIB);
    let address = allocate(&pool, 4 * MIB).0;
    let waits = |pool: &Pool<Mock>| pool.backend().inner().log.iter().filter(|(name, _)| *name == "quiesce").count();
    let before = waits(&pool);
    pool.free(address, Free::Strict, || if waits(&pool) > before { 2 * IDLE } else { START }).unwrap();
    assert_eq!(pool.return_idle(3 * IDLE - Duration::from_nanos(1), Some(1)), 0);
    assert_eq!(pool.return_idle(3 * IDLE, Some(1)), 4 * MIB);
}

#[test]
fn a_segment_in_use_again_is_not_idle() {
    let pool = pool(GIB);
    let address = allocate(&pool, 4 * MIB).0;
    free(&pool, address);
    allocate(&pool, 4 * MIB);
    assert_eq!(pool.return_idle(2 * IDLE, Some(1)), 0);
    pool.free(address, Free::Strict, || 2 * IDLE).unwrap();
    assert_eq!(pool.return_idle(3 * IDLE - Duration::from_nanos(1), Some(1)), 0);
    assert_eq!(pool.return_idle(3 * IDLE, Some(1)), 4 * MIB);
}

#[test]
fn nothing_idle_costs_no_call() {
    let pool = pool(GIB);
    allocate(&pool, 4 * MIB);
    let calls = pool.backend().inner().calls;
    assert_eq!(pool.return_idle(Duration::MAX, Some(1)), 0);
    assert_eq!(pool.backend().inner().calls, calls);
}

#[test]
fn trimming_keeps_what_is_in_use() {
    let pool = pool(GIB);
    let (kept, gone) = (allocate(&pool, 4 * MIB).0, allocate(&pool, 8 * MIB).0);
    free(&pool, gone);
    assert_eq!(pool.trim(), 8 * MIB);
    assert!(pool.contains(kept) && !pool.contains(gone));
    assert!(pool.block_at(kept).is_some());
}

#[test]
fn memory_freed_lazily_is_used_again_only_after_a_wait() {
    let pool = pool(GIB);
    let address = allocate(&pool, 4 * MIB).0;
    pool.free(address, Free::Lazy, || START).unwrap();
    assert_eq!(pool.backend().inner().log.last(), Some(&("pin", 4 * MIB)), "the free waits for nothing");
    assert_eq!(allocate(&pool, 4 * MIB), (address, 0));
    assert_eq!(pool.backend().inner().log.last(), Some(&("quiesce", 1)));
}

#[test]
fn quiet_memory_is_preferred_to_a_wait() {
    let pool = pool(GIB);
    let (busy, quiet) = (allocate(&pool, 4 * MIB).0, allocate(&pool, 4 * MIB).0);
    free(&pool, quiet);
    pool.free(busy, Free::Lazy, || START).unwrap();
    let calls = pool.backend().inner().calls;
    assert_eq!(allocate(&pool, 4 * MIB), (quiet, 0));
    assert_eq!(pool.backend().inner().calls, calls);
}

#[test]
fn a_wait_that_began_before_a_free_says_nothing_about_it() {
    let pool = std::sync::Arc::new(pool(GIB));
    let (early, late) = (allocate(&pool, 4 * MIB).0, allocate(&pool, 8 * MIB).0);
    let again = std::sync::Arc::downgrade(&pool);
    // While the strict free waits, the other block is freed lazily.
    pool.backend().set_probe(move || {
        if let Ok(block) = again.upgrade().unwrap().free(late, Free::Lazy, || START) {
            assert_eq!(block.address, late);
        }
    });
    free(&pool, early);
    pool.backend().set_probe(|| ());
    let waits = |pool: &Pool<Mock>| pool.backend().inner().log.iter().filter(|(name, _)| *name == "quiesce").count();
    assert_eq!(waits(&pool), 1);
    assert_eq!(allocate(&pool, 8 * MIB), (late, 0));
    assert_eq!(waits(&pool), 2);
}

#[test]
fn inside_a_capture_nothing_waits_and_busy_memory_stays_untouched() {
    let pool = pool(GIB);
    let address = allocate(&pool, 4 * MIB).0;
    pool.backend().inner().capturing = true;
    pool.free(address, Free::Strict, || START).unwrap();
    let (other, pinned) = allocate(&pool, 4 * MIB);
    assert!(other != address && pinned == 4 * MIB);
    pool.backend().inner().capturing = false;
    assert_eq!(allocate(&pool, 4 * MIB), (address, 0));
}

#[test]
fn only_the_first_byte_of_a_live_block_frees_it() {
    let pool = pool(GIB);
    let address = allocate(&pool, 8 * KIB).0;
    for wrong in [0, address + 1, address + 4 * KIB, address + 8 * KIB, u64::MAX] {
        assert_eq!(pool.free(wrong, Free::Strict, || START), Err(FreeError::NotABlock), "{wrong:#x}");
    }
    assert_eq!(
        pool.block_at(address + 8 * KIB - 1).map(|block| (block.address, block.bytes)),
        Some((address, 8 * KIB))
    );
    assert_eq!(pool.block_at(address + 8 * KIB), None);
    free(&pool, address);
    assert_eq!(pool.free(address, Free::Strict, || START), Err(FreeError::NotABlock), "twice");
    assert_eq!(pool.block_at(address), None);
    assert!(pool.contains(address), "pinned still");
}

#[test]
fn a_context_takes_its_memory_along() {
    let pool = pool(GIB);
    let here = allocate(&pool, 4 * MIB).0;
    let there = Key { context: 2, flags: 1 };
    let lost = pool.allocate(&Request { bytes: 100, key: there }).unwrap().block;
    let freed = pool.allocate(&Request { bytes: MIB, key: there }).unwrap().block;
    pool.free(freed.address, Free::Lazy, || START).unwrap();
    pool.backend().inner().end_context(2);
    assert_eq!(pool.context_gone(2), [lost]);
    assert_eq!(pool.free(lost.address, Free::Strict, || START), Err(FreeError::NotABlock));
    assert_eq!(pool.usage().pinned, 4 * MIB);
    assert_eq!(pool.trim(), 0, "nothing of it is given back a second time");
    assert_eq!(pool.block_at(here).map(|block| block.key), Some(KEY));
    // The driver gives the same addresses again, while an old free of one of them is on file.
    let again = pool.allocate(&Request { bytes: MIB, key: there }).unwrap();
    assert_eq!(again.pinned, MIB);
    allocate(&pool, MIB);
    assert_eq!(pool.usage().used, 6 * MIB);
}

#[test]
fn what_is_pinned_where_a_context_that_ended_had_memory_does_not_go_when_that_is_told() {
    let pool = pool(GIB);
    let there = Key { context: 2, flags: 1 };
    let lost = pool.allocate(&Request { bytes: MIB, key: there }).unwrap().block;
    // The driver ends a context before it returns from the call that says so, and gives its addresses to other threads.
    pool.backend().inner().end_context(2);
    let (address, pinned) = allocate(&pool, MIB);
    assert_eq!((address, pinned), (lost.address, MIB));
    assert_eq!(pool.context_gone(2), []);
    assert_eq!((pool.usage().used, pool.usage().blocks), (MIB, 1));
    free(&pool, address);
}

#[test]
fn what_the_driver_gives_to_the_program_is_none_of_the_pool_s_any_more() {
    let pool = pool(GIB);
    let there = Key { context: 2, flags: 1 };
    let lost = pool.allocate(&Request { bytes: MIB, key: there }).unwrap().block;
    let kept = allocate(&pool, MIB).0;
    pool.given_anew(lost.address + 4 * KIB, 4 * KIB);
    assert!(!pool.contains(lost.address) && pool.contains(kept));
    assert_eq!(pool.free(lost.address, Free::Strict, || START), Err(FreeError::NotABlock));
    assert_eq!(pool.context_gone(2), []);
    assert_eq!(pool.usage().blocks, 1);
}

#[test]
fn what_the_driver_gives_away_while_it_goes_back_does_not_come_back() {
    let pool = std::sync::Arc::new(pool(GIB));
    let (address, kept) = (allocate(&pool, 2 * MIB).0, allocate(&pool, MIB).0);
    free(&pool, address);
    let again = std::sync::Arc::downgrade(&pool);
    pool.backend().set_probe(move || again.upgrade().unwrap().given_anew(address + MIB, 4 * KIB));
    let calls = pool.backend().inner().calls;
    pool.backend().inner().fault = Some((calls + 1, 1, FaultKind::Failed));
    assert_eq!(pool.trim(), 0, "the driver refuses: its context has ended, and the end is not told yet");
    assert!(!pool.contains(address) && pool.contains(kept));
    pool.backend().set_probe(|| {});
    pool.given_anew(address - GIB, 8 * GIB);
    assert!(!pool.contains(kept), "a range that is larger than all that the pool has");
}

#[test]
fn a_context_that_ends_while_memory_is_pinned_in_it_gets_none() {
    let pool = std::sync::Arc::new(pool(GIB));
    let again = std::sync::Arc::downgrade(&pool);
    pool.backend().set_probe(move || {
        again.upgrade().unwrap().context_gone(KEY.context);
    });
    assert_eq!(try_allocate(&pool, MIB), Err(Refusal::ContextGone));
    assert_eq!((pool.usage().pinned, pool.usage().segments), (0, 0));
}

#[test]
fn a_context_that_ends_while_its_memory_goes_back_leaves_none() {
    let pool = std::sync::Arc::new(pool(GIB));
    let address = allocate(&pool, MIB).0;
    free(&pool, address);
    let again = std::sync::Arc::downgrade(&pool);
    pool.backend().set_probe(move || drop(again.upgrade().map(|pool| pool.context_gone(KEY.context))));
    let calls = pool.backend().inner().calls;
    pool.backend().inner().fault = Some((calls + 1, 1, FaultKind::Failed));
    assert_eq!(pool.trim(), 0, "the driver refuses, as it knows no such memory any more");
    assert_eq!((pool.usage().pinned, pool.usage().segments, pool.contains(address)), (0, 0, false));
}

#[test]
fn a_host_that_is_short_gets_everything_unused_back_first() {
    let pool = pool(GIB);
    pool.backend().inner().capacity = 64 * MIB;
    let blocks: Vec<u64> = (0..3).map(|_| allocate(&pool, 20 * MIB).0).collect();
    blocks.iter().for_each(|&address| free(&pool, address));
    let allocation = try_allocate(&pool, 61 * MIB).unwrap();
    assert_eq!((allocation.pinned, pool.usage().pinned), (61 * MIB, 61 * MIB));
    assert!(matches!(try_allocate(&pool, 4 * MIB), Err(Refusal::Backend(_))));
    assert_eq!(allocate(&pool, KIB).1, 64 * KIB);
}
