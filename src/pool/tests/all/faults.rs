//! A fault at every single backend call.

use super::checks::{
    GIB, GPU0, GPU1, HOST, MIB, assert_accounts, assert_block, assert_returns_everything, note_busy, pool, request,
};
use super::mock::{FaultKind, Mock};
use gpupool_pool::{Allocation, Anchor, FRAME, Free, FreeError, MoveError, Place, Policy, Pool, Refusal};

const KINDS: [FaultKind; 4] = [FaultKind::OutOfMemory, FaultKind::Unavailable, FaultKind::NotReady, FaultKind::Failed];
/// Once; until the repeats of one call are used up; and until those of the calls that would undo it are, too.
const LENGTHS: [u64; 4] = [1, 6, 12, 40];

/// Runs `script` with a fault from call `first` on for every `first`, kind and length, until the script ends before the
/// fault begins. `script` returns the blocks it still holds.
fn sweep(policy: Policy, script: impl Fn(&Pool<Mock>) -> Vec<Allocation>) {
    for kind in KINDS {
        for length in LENGTHS {
            for first in 1.. {
                let pool = pool(policy, &[(GPU0, 128 * MIB), (GPU1, 96 * MIB), (HOST, 256 * MIB)]);
                pool.backend().inner().fault = Some((first, length, kind));
                let live = script(&pool);
                let calls = pool.backend().inner().calls;
                assert_accounts(&pool, &live);
                for allocation in &live {
                    assert_block(&pool, allocation);
                }
                assert_returns_everything(&pool, &live);
                if calls < first {
                    assert!(first > 10, "the script makes no calls to fail");
                    break;
                }
            }
        }
    }
}

fn try_allocate(pool: &Pool<Mock>, bytes: u64, live: &mut Vec<Allocation>) {
    match pool.allocate(&request(bytes, 0)) {
        Ok(allocation) => live.push(allocation),
        Err(Refusal::Backend(call)) => assert!(call <= pool.backend().inner().calls, "the backend's own error"),
        // Faults of the kinds that close a place leave the others, and those may be too small.
        Err(Refusal::Full { missing }) => assert!(missing > 0),
        Err(refusal) => panic!("{refusal:?}"),
    }
}

fn try_free(pool: &Pool<Mock>, when: Free, live: &mut Vec<Allocation>) {
    let Some(allocation) = live.pop() else { return };
    match pool.free(allocation.block.address, when) {
        Ok(block) => {
            assert_eq!(block, allocation.block);
            if when == Free::Lazy {
                note_busy(pool, &allocation);
            }
        }
        Err(FreeError::Backend(_)) => {
            assert_eq!(pool.block_at(block_address(&allocation)), Some(allocation.block), "still live");
            live.push(allocation);
        }
        Err(FreeError::NotABlock) => panic!("{allocation:?} was live"),
    }
}

fn block_address(allocation: &Allocation) -> u64 {
    allocation.block.address
}

#[test]
fn in_allocations_over_several_places() {
    for policy in [Policy::LocalFirst, Policy::Interleave, Policy::MostFree] {
        sweep(policy, |pool| {
            let mut live = Vec::new();
            for bytes in [100 * MIB, 3 * MIB, 70 * MIB, 130 * MIB] {
                try_allocate(pool, bytes, &mut live);
            }
            live
        });
    }
}

#[test]
fn in_frees_reuse_and_trims() {
    sweep(Policy::LocalFirst, |pool| {
        let mut live = Vec::new();
        try_allocate(pool, 300 * MIB, &mut live);
        for allocation in &live {
            assert!(pool.anchor(allocation.block.address + 60 * MIB, 100 * MIB, Anchor::Shared).is_some());
            assert!(pool.anchor(allocation.block.address, 200 * MIB, Anchor::Asked).is_some());
        }
        try_allocate(pool, 3 * MIB, &mut live);
        try_free(pool, Free::Strict, &mut live);
        try_allocate(pool, 4 * MIB, &mut live);
        try_free(pool, Free::Lazy, &mut live);
        try_free(pool, Free::Lazy, &mut live);
        try_allocate(pool, 2 * MIB, &mut live);
        // Others have the last one and never say that they let go.
        if let Some(last) = live.last() {
            assert_eq!(pool.hold(last.block.address, last.block.id), Some(last.block));
        }
        try_free(pool, Free::Strict, &mut live);
        pool.trim(Some(GPU1), Some(10 * MIB), &[0, 1]);
        // Needs what is free at home to go first.
        try_allocate(pool, 127 * MIB, &mut live);
        pool.trim(None, None, &[0, 1]);
        live
    });
}

#[test]
fn in_chunks_that_are_mapped_side_by_side() {
    sweep(Policy::LocalFirst, |pool| {
        let mut live = Vec::new();
        for bytes in [32, 16, 64, 14] {
            try_allocate(pool, bytes * MIB, &mut live);
        }
        if live.len() == 4 {
            for index in [2, 0] {
                let picked = live.swap_remove(index);
                live.push(picked);
                try_free(pool, Free::Strict, &mut live);
            }
            // All of both; then a part of the second and what has to be made.
            try_allocate(pool, 80 * MIB, &mut live);
            try_free(pool, Free::Strict, &mut live);
            try_allocate(pool, 98 * MIB, &mut live);
        }
        live
    });
}

#[test]
fn the_error_is_that_of_the_call_that_failed() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB)]);
    pool.backend().inner().fault = Some((4, 1, FaultKind::Failed));
    assert_eq!(pool.allocate(&request(64 * MIB, 0)), Err(Refusal::Backend(4)));
    assert_eq!(pool.usage().places[0].held, 0);
    assert!(pool.backend().inner().is_empty());
}

#[test]
fn a_place_that_had_no_memory_once_is_tried_again_by_the_next_but_one() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    let calls = pool.backend().inner().calls;
    pool.backend().inner().fault = Some((calls + 1, 1, FaultKind::OutOfMemory));
    let blocks: Vec<Allocation> = (0..4).map(|_| pool.allocate(&request(4 * MIB, 0)).unwrap()).collect();
    let away: Vec<bool> = blocks.iter().map(|block| block.on_peers > 0).collect();
    assert_eq!(away, [true, true, false, false]);
    assert_returns_everything(&pool, &blocks);
}

/// Others hold the first GPU, and the driver does not tell: what is asked of it in vain becomes rare, and what is asked once there is
/// room again does not wait for ever.
#[test]
fn a_place_that_has_no_memory_is_asked_less_and_less_often() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    pool.backend().inner().blind = true;
    pool.backend().inner().external.insert(GPU0, GIB);
    let mut blocks: Vec<Allocation> = Vec::new();
    let mut tried = Vec::new();
    for _ in 0..200 {
        let before = pool.backend().inner().log.iter().filter(|call| call.0 == "create").count();
        blocks.push(pool.allocate(&request(2 * MIB, 0)).unwrap());
        let made = pool.backend().inner().log.iter().filter(|call| call.0 == "create").count() - before;
        tried.push(made > 1);
    }
    assert!(blocks.iter().all(|block| block.on_peers > 0));
    let (early, late) = tried.split_at(100);
    let vain = |part: &[bool]| part.iter().filter(|tried| **tried).count();
    assert!((3..=7).contains(&vain(early)) && vain(late) <= 2, "{} and {}", vain(early), vain(late));
    pool.backend().inner().external.clear();
    let further: Vec<Allocation> = (0..70).map(|_| pool.allocate(&request(2 * MIB, 0)).unwrap()).collect();
    assert_eq!(further.last().map(|block| block.on_peers), Some(0));
    blocks.extend(further);
    assert_returns_everything(&pool, &blocks);
}

#[test]
fn memory_the_driver_does_not_take_back_is_counted_until_it_does() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB)]);
    let address = pool.allocate(&request(64 * MIB, 0)).unwrap().block.address;
    pool.free(address, Free::Strict).unwrap();
    let calls = pool.backend().inner().calls;
    pool.backend().inner().fault = Some((calls + 1, 6, FaultKind::Failed));
    assert_eq!(pool.trim(None, None, &[0, 1]), 0);
    assert_eq!(pool.usage().places[0].held, 64 * MIB);
    assert_eq!(pool.memory_info(0, |_| true), (64 * MIB, 128 * MIB));
    let next = pool.allocate(&request(64 * MIB, 0)).unwrap();
    assert_ne!(next.block.address, address, "addresses that may still be mapped are not used again");
    assert_eq!(pool.allocate(&request(1, 0)), Err(Refusal::Full { missing: 2 * MIB }));
    assert_eq!(pool.trim(None, None, &[0, 1]), 64 * MIB);
    assert_returns_everything(&pool, &[next]);
}

#[test]
fn who_could_not_be_added_is_with_the_next_try() {
    sweep(Policy::LocalFirst, |pool| {
        let mut live = Vec::new();
        try_allocate(pool, 40 * MIB, &mut live);
        try_allocate(pool, 150 * MIB, &mut live);
        try_free(pool, Free::Lazy, &mut live);
        pool.backend().inner().readers += 1;
        let answer = pool.grant_again();
        let usage = pool.usage();
        if answer.is_err() {
            pool.backend().inner().fault = None;
            assert_eq!(pool.grant_again(), Ok(()));
        }
        let places = |usage: gpupool_pool::Usage| usage.places.iter().map(|place| place.held).collect::<Vec<_>>();
        assert_eq!(places(pool.usage()), places(usage), "nothing came or went for it");
        live
    });
}

/// Moves a part of a block. Whatever fails, its contents stay what they are.
fn try_move(pool: &Pool<Mock>, live: &mut [Allocation], index: usize, (from, bytes): (u64, u64), place: Place) {
    let Some(allocation) = live.get_mut(index) else { return };
    let block = allocation.block;
    // Of other blocks than were meant, where one could not be had.
    let bytes = bytes.min(block.bytes.saturating_sub(from)).max(1);
    let from = from.min(block.bytes - bytes);
    match pool.move_to(block.address + from, bytes, place) {
        Ok(moved) => assert_eq!((moved.anchored, moved.shared), (0, 0)),
        Err(MoveError::Backend(call)) => assert!(call <= pool.backend().inner().calls, "the backend's own error"),
        Err(MoveError::Full { .. } | MoveError::NotNow) => {}
        Err(error) => panic!("{error:?}"),
    }
    for at in (0..block.bytes).step_by(FRAME as usize) {
        assert_eq!(pool.backend().inner().read(block.address + at), block.id << 40 | at, "of {block:?} at {at:#x}");
    }
    let pieces = pool.pieces(block.address, u64::MAX);
    let at = |is_there: &dyn Fn(Place) -> bool| {
        pieces.iter().filter(|piece| is_there(piece.place)).map(|piece| piece.bytes).sum()
    };
    allocation.on_peers = at(&|place| !place.is_host() && place != Place::Gpu(block.home));
    allocation.on_host = at(&Place::is_host);
}

#[test]
fn in_moves() {
    sweep(Policy::LocalFirst, |pool| {
        let mut live = Vec::new();
        for bytes in [40 * MIB, 30 * MIB, 6 * MIB] {
            try_allocate(pool, bytes, &mut live);
        }
        for allocation in &live {
            let block = allocation.block;
            for at in (0..block.bytes).step_by(FRAME as usize) {
                pool.backend().inner().write(block.address + at, block.id << 40 | at);
            }
        }
        try_move(pool, &mut live, 0, (0, 40 * MIB), GPU1);
        try_move(pool, &mut live, 1, (3 * MIB, 20 * MIB), HOST);
        // Free memory has to go first.
        try_free(pool, Free::Lazy, &mut live);
        try_allocate(pool, 50 * MIB, &mut live);
        try_free(pool, Free::Lazy, &mut live);
        try_move(pool, &mut live, 0, (0, 40 * MIB), GPU0);
        try_move(pool, &mut live, 0, (0, 8 * MIB), HOST);
        try_move(pool, &mut live, 1, (0, 30 * MIB), GPU1);
        try_move(pool, &mut live, 1, (0, 30 * MIB), GPU0);
        live
    });
}
