//! Freed memory that the home GPU is at work on: when it is waited for, and what is taken instead.

use super::checks::{
    GIB, GPU0, GPU1, HOST, MIB, allocate, assert_block, assert_returns_everything, note_busy, pool, roomy, roomy_at,
};
use super::mock::Mock;
use gpupool_pool::{Allocation, FRAME, Free, Policy, Pool};
use proptest::prelude::*;

/// Of the front, and too large for it.
const SIZES: [u64; 2] = [32, 80];

fn free_lazily(pool: &Pool<Mock>, allocation: &Allocation) {
    pool.free(allocation.block.address, Free::Lazy).unwrap();
    note_busy(pool, allocation);
}

/// How often GPU 0 was waited for so far.
fn waits(pool: &Pool<Mock>) -> usize {
    pool.backend().inner().log.iter().filter(|call| **call == ("quiesce", 1)).count()
}

#[test]
fn memory_is_made_rather_than_waited_for_while_there_is_room() {
    for mib in SIZES {
        let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
        let first = allocate(&pool, mib * MIB).unwrap();
        free_lazily(&pool, &first);
        // Whoever waits for it now does so for ever.
        pool.backend().inner().held.insert(0);
        let second = allocate(&pool, mib * MIB).unwrap();
        assert!(!second.reused && second.block.address != first.block.address, "{mib} MiB");
        assert_block(&pool, &second);
        assert_eq!(waits(&pool), 0);
        pool.backend().inner().held.clear();
        assert_returns_everything(&pool, &[second]);
    }
}

#[test]
fn a_gpu_that_is_done_after_all_has_no_memory_made() {
    for mib in SIZES {
        let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
        let first = allocate(&pool, mib * MIB).unwrap();
        free_lazily(&pool, &first);
        let again = allocate(&pool, mib * MIB).unwrap();
        assert_eq!((again.block.address, waits(&pool)), (first.block.address, 0), "{mib} MiB");
        assert_eq!(pool.backend().inner().held(GPU0), mib * MIB);
    }
}

#[test]
fn a_loop_on_a_gpu_that_is_always_at_work_holds_twice_what_it_uses_at_most() {
    for mib in SIZES {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * GIB)]);
        pool.backend().inner().at_work.insert(0);
        for round in 1..200 {
            let blocks = [(); 3].map(|()| allocate(&pool, mib * MIB).unwrap());
            blocks.iter().for_each(|block| free_lazily(&pool, block));
            let held = pool.backend().inner().held(GPU0);
            assert!(held <= 6 * mib * MIB, "{} MiB are held after {round} rounds of {mib} MiB", held / MIB);
        }
        // One wait covers all that was freed before it, and that is as much as a round needs.
        assert!((1..=200).contains(&waits(&pool)), "{} waits in 200 rounds of {mib} MiB", waits(&pool));
    }
}

/// A wait is better than memory that is read slowly, and than none.
#[test]
fn where_home_is_full_the_gpu_is_waited_for_though_others_have_room() {
    for mib in SIZES {
        let full_by_limit = pool(Policy::LocalFirst, &[(GPU0, mib * MIB), (GPU1, GIB), (HOST, GIB)]);
        let full_by_others = roomy_at(&[(GPU0, GIB), (GPU1, GIB)]);
        full_by_others.backend().inner().external.insert(GPU0, GIB - mib * MIB);
        for pool in [full_by_limit, full_by_others] {
            let first = allocate(&pool, mib * MIB).unwrap();
            free_lazily(&pool, &first);
            pool.backend().inner().at_work.insert(0);
            let again = allocate(&pool, mib * MIB).unwrap();
            assert_eq!((again.block.address, waits(&pool)), (first.block.address, 1), "{mib} MiB");
        }
    }
}

#[test]
fn free_memory_of_another_size_that_nobody_is_at_work_on_is_taken_before_memory_is_made() {
    // Of the same thread's small blocks, of which no other thread knows.
    let pool = roomy(GIB);
    let [quiet, between, busy] = [48, 2, 32].map(|mib| allocate(&pool, mib * MIB).unwrap());
    pool.free(quiet.block.address, Free::Strict).unwrap();
    free_lazily(&pool, &busy);
    pool.backend().inner().held.insert(0);
    let block = allocate(&pool, 32 * MIB).unwrap();
    assert_eq!(block.block.address, quiet.block.address);
    pool.backend().inner().held.clear();
    assert_returns_everything(&pool, &[between, block]);
}

/// Of small blocks, which one thread keeps at hand: a larger row of its own that is quiet is cut rather than the best fit waited for. There is
/// no room for more, and a wait would never end.
#[test]
fn a_larger_row_that_the_same_thread_keeps_is_taken_before_the_gpu_is_waited_for() {
    let pool = roomy(14 * MIB);
    let [quiet, between, busy] = [8, 2, 4].map(|mib| allocate(&pool, mib * MIB).unwrap());
    pool.free(quiet.block.address, Free::Strict).unwrap();
    free_lazily(&pool, &busy);
    pool.backend().inner().held.insert(0);
    let block = allocate(&pool, 4 * MIB).unwrap();
    assert_eq!(block.block.address, quiet.block.address);
    pool.backend().inner().held.clear();
    assert_returns_everything(&pool, &[between, block]);
}

/// Memory that nobody is at work on stays known as such when what is freed lazily beside it becomes one with it, on either side, and when a
/// block that does not fit into it was looked for in vain. There is no room for more, and a wait would never end.
#[test]
fn what_is_quiet_is_known_beside_what_is_freed_lazily() {
    for quiet in [0, 1, 2] {
        let pool = roomy(240 * MIB);
        let blocks = [(); 3].map(|()| allocate(&pool, 80 * MIB).unwrap());
        pool.free(blocks[quiet].block.address, Free::Strict).unwrap();
        let busy = blocks.iter().enumerate().filter(|it| it.0 != quiet);
        busy.for_each(|(_, block)| free_lazily(&pool, block));
        let mut inner = pool.backend().inner();
        inner.held.insert(0);
        // Whoever cannot be served without a wait is refused.
        inner.capturing = true;
        drop(inner);
        assert!(allocate(&pool, 100 * MIB).is_err());
        pool.backend().inner().capturing = false;
        let before = waits(&pool);
        let parts = [50, 30].map(|mib| allocate(&pool, mib * MIB).unwrap());
        let from = blocks[quiet].block.address;
        assert_eq!(parts.map(|part| part.block.address), [from, from + 50 * MIB], "block {quiet} was quiet");
        assert_eq!(waits(&pool), before);
        parts.iter().for_each(|part| assert_block(&pool, part));
        pool.backend().inner().held.clear();
        assert_returns_everything(&pool, &parts);
    }
}

/// A block whose middle is at another place leaves at home only what is behind it. The check below once took all that lies behind that place for
/// quiet, and so a wait that was due for one that was not.
#[test]
fn a_block_that_comes_home_again_is_no_quiet_memory() {
    let pool = roomy_at(&[(GPU0, GIB), (GPU1, GIB)]);
    let others_leave = |bytes: u64| {
        let mut inner = pool.backend().inner();
        let theirs = GIB - inner.held(GPU0) - bytes;
        inner.external.insert(GPU0, theirs);
    };
    others_leave(240 * MIB);
    let first = allocate(&pool, 100 * MIB).unwrap();
    let to_peer = allocate(&pool, 200 * MIB).unwrap();
    others_leave(200 * MIB);
    let behind = allocate(&pool, 200 * MIB).unwrap();
    for block in [&to_peer, &behind] {
        pool.free(block.block.address, Free::Strict).unwrap();
    }
    let across = allocate(&pool, 360 * MIB).unwrap();
    let pieces = pool.pieces(across.block.address, u64::MAX);
    assert_eq!(pieces.iter().map(|piece| piece.place).collect::<Vec<_>>(), [GPU0, GPU1, GPU0]);

    free_lazily(&pool, &first);
    pool.backend().inner().at_work.insert(0);
    assert_eq!(longest_quiet(&pool, std::slice::from_ref(&across)), 40 * MIB);
    let before = waits(&pool);
    let again = allocate(&pool, 80 * MIB).unwrap();
    assert_eq!((again.block.address, waits(&pool)), (first.block.address, before + 1));
    assert_returns_everything(&pool, &[across, again]);
}

#[derive(Clone, Debug)]
enum Op {
    Allocate { frames: u64 },
    Free { pick: usize, lazily: bool },
    Others { mib: u64 },
}

fn any_op(sizes: std::ops::Range<u64>) -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => sizes.prop_map(|frames| Op::Allocate { frames }),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(pick, lazily)| Op::Free { pick, lazily }),
        1 => (0..2048_u64).prop_map(|mib| Op::Others { mib }),
    ]
}

/// The longest row of bytes at GPU 0 between blocks that nobody is at work on any part of: what is free side by side is one.
fn longest_quiet(pool: &Pool<Mock>, live: &[Allocation]) -> u64 {
    let inner = pool.backend().inner();
    let at_home: Vec<(u64, u64)> =
        inner.mapped().filter(|row| row.2 == GPU0).map(|row| (row.0, row.0 + row.1)).collect();
    let mut blocks: Vec<(u64, u64)> =
        live.iter().map(|it| (it.block.address, it.block.address + it.block.bytes)).collect();
    blocks.sort_unstable();
    let mut longest = 0;
    for row in at_home.chunk_by(|left, right| left.1 == right.0) {
        let (mut from, end) = (row[0].0, row[row.len() - 1].1);
        // A block that begins at another place has a part of the row, too.
        let within = blocks.iter().copied().filter(|block| block.0 < end && from < block.1);
        for (first, last) in within.chain([(end, end)]).collect::<Vec<_>>() {
            if first > from && !inner.is_busy(from, first - from) {
                longest = longest.max(first - from);
            }
            from = last;
        }
    }
    longest
}

/// Plays this on a GPU of 4 GiB that always has more to do, and asks of every wait whether it was due.
fn check(ops: &[Op], looks_for_quiet: bool) {
    const LIMIT: u64 = 4 * GIB;
    let pool = roomy_at(&[(GPU0, LIMIT), (GPU1, 64 * GIB)]);
    pool.backend().inner().at_work.insert(0);
    let mut live: Vec<Allocation> = Vec::new();
    for op in ops {
        match *op {
            Op::Allocate { frames } if live.len() < 12 => {
                let size = frames * FRAME;
                let usage = pool.usage();
                let home = usage.places.iter().find(|usage| usage.place == GPU0).unwrap();
                let longest = if looks_for_quiet { longest_quiet(&pool, &live) } else { 0 };
                let before = waits(&pool);
                let held = pool.backend().inner().held(GPU0);
                let left = pool.backend().inner().left(GPU0);
                let block = allocate(&pool, size).unwrap();
                assert_block(&pool, &block);
                live.push(block);
                if waits(&pool) > before {
                    let most = 2 * home.peak_used.max(home.used + size);
                    let has_room = held + size <= most && size <= left && held + size <= LIMIT;
                    assert!(!has_room, "a wait for {size} bytes, though {held} of {most} were held and {left} left");
                    assert!(!looks_for_quiet || longest < size, "a wait for {size} bytes, though {longest} were quiet");
                }
            }
            Op::Free { pick, lazily } if !live.is_empty() => {
                let block = live.swap_remove(pick % live.len());
                if lazily {
                    free_lazily(&pool, &block);
                } else {
                    pool.free(block.block.address, Free::Strict).unwrap();
                }
            }
            // No more than there is: where others have what the pool counts on, it finds that out by running out, and asks for less for a while.
            Op::Others { mib } => {
                let mut inner = pool.backend().inner();
                let most = LIMIT - inner.held(GPU0);
                inner.external.insert(GPU0, most.min(mib * MIB));
            }
            _ => {}
        }
    }
    pool.backend().inner().external.clear();
    assert_returns_everything(&pool, &live);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn large_blocks_wait_only_where_nothing_is_quiet_and_no_more_is_to_be_held(
        ops in proptest::collection::vec(any_op(33..300), 1..80)
    ) {
        check(&ops, true);
    }

    #[test]
    fn blocks_of_the_front_wait_only_where_no_more_is_to_be_held(ops in proptest::collection::vec(any_op(1..32), 1..80)) {
        check(&ops, false);
    }
}
