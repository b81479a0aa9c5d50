//! Memory that goes to a disk and comes back, against a list of what every frame should contain.

use super::checks::{
    CHUNK, GPU0, GPU1, HOST, Lenders, MIB, allocate, assert_accounts, assert_block, assert_returns_everything,
    note_busy, pool, pool_with, request,
};
use super::mock::{FaultKind, Mock};
use super::rearranging::Still;
use gpupool_pool::{Allocation, Anchor, FRAME, Free, MoveError, Moved, Place, Policy, Pool, Wish};
use proptest::prelude::*;

const DISK: Place = Place::Disk;

fn content(allocation: &Allocation, at: u64) -> u64 {
    allocation.block.id << 40 | at
}

fn frames(allocation: &Allocation) -> impl Iterator<Item = u64> + use<> {
    let start = allocation.block.address;
    (0..allocation.block.bytes).step_by(FRAME as usize).map(move |at| start + at)
}

fn fill(pool: &Pool<Mock>, allocation: &Allocation) {
    frames(allocation).for_each(|at| pool.backend().inner().write(at, content(allocation, at)));
}

/// Puts what of a block is not on the disk there, for the pool to let go of.
fn store(pool: &Pool<Mock>, allocation: &Allocation) {
    let mut inner = pool.backend().inner();
    for at in frames(allocation).filter(|at| inner.frame_at(*at).is_some()).collect::<Vec<_>>() {
        let content = inner.read(at);
        inner.disk.insert(at, content);
    }
}

/// Every frame of these is where the pool says, and contains what it should; nothing is mapped that lies on the disk.
fn assert_all(pool: &Pool<Mock>, live: &[Allocation]) {
    for allocation in live {
        let pieces = pool.pieces(allocation.block.address, u64::MAX);
        let place = |at: u64| pieces.iter().find(|it| (it.address..it.address + it.bytes).contains(&at)).unwrap().place;
        let inner = pool.backend().inner();
        for at in frames(allocation) {
            let found = match place(at) {
                DISK => {
                    assert_eq!(inner.frame_at(at), None, "{at:#x} is on the disk and mapped");
                    inner.disk[&at]
                }
                place => {
                    inner.assert_usable(at, FRAME, place);
                    inner.read(at)
                }
            };
            assert_eq!(found, content(allocation, at), "{at:#x} of {allocation:?}");
        }
    }
    assert_accounts(pool, live);
}

fn wish(allocation: &Allocation, to: Place) -> Wish {
    Wish { address: allocation.block.address, bytes: allocation.block.bytes, to }
}

fn rearrange(pool: &Pool<Mock>, wishes: &[Wish]) -> Result<Vec<Moved>, MoveError<u64>> {
    let done = pool.rearrange(wishes, || Some(Still::new(pool.backend(), u32::MAX)))?;
    done.cut_short.map_or(Ok(done.wishes), Err)
}

fn held(pool: &Pool<Mock>, place: Place) -> u64 {
    pool.usage().places.iter().find(|it| it.place == place).map_or(0, |it| it.held)
}

#[test]
fn what_a_place_may_hold_says_nothing_of_a_disk() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * CHUNK), (DISK, u64::MAX)]);
    let block = allocate(&pool, 2 * CHUNK).unwrap();
    fill(&pool, &block);
    store(&pool, &block);
    for place in [GPU0, DISK] {
        pool.accounts().set_limit(place, 0);
        pool.accounts().lend(place, true);
        pool.accounts().close(place, true);
    }
    pool.heed_accounts();
    assert!(!pool.accounts().lends(DISK) && !pool.accounts().is_closed(DISK));
    rearrange(&pool, &[wish(&block, DISK)]).unwrap();
    assert_eq!((held(&pool, GPU0), held(&pool, DISK)), (0, 2 * CHUNK));
    assert!(rearrange(&pool, &[wish(&block, GPU0)]).is_err(), "it is closed");
    assert_all(&pool, &[block]);
}

#[test]
fn what_goes_to_a_disk_leaves_no_memory_behind_and_comes_back_to_its_address() {
    let places = [(GPU0, 4 * CHUNK), (HOST, CHUNK), (DISK, u64::MAX)];
    let pool = pool(Policy::LocalFirst, &places);
    let blocks = [3 * CHUNK, 4 * MIB, 6 * MIB].map(|bytes| allocate(&pool, bytes).unwrap());
    blocks.iter().for_each(|it| fill(&pool, it));
    assert!(pool.usage().places.iter().all(|it| it.place != DISK), "nothing is told of it before");
    blocks.iter().for_each(|it| store(&pool, it));
    pool.backend().inner().log.clear();
    rearrange(&pool, &blocks.map(|it| wish(&it, DISK))).unwrap();
    pool.trim(None, None, &[0]);
    assert_eq!((held(&pool, GPU0), held(&pool, DISK)), (0, 3 * CHUNK + 10 * MIB));
    let calls: Vec<_> = pool.backend().inner().log.iter().map(|call| call.0).collect();
    assert!(!calls.iter().any(|call| ["copy", "alias", "map", "grant"].contains(call)), "{calls:?}");
    assert_all(&pool, &blocks);
    // A new reader has nothing to reach there, and what is freed is gone.
    pool.backend().inner().readers += 1;
    pool.grant_again().unwrap();
    pool.free(blocks[1].block.address, Free::Strict).unwrap();
    let [first, _, last] = blocks;
    assert_all(&pool, &[first, last]);
    assert_eq!(pool.trim(None, None, &[0]), 0, "it is no memory that went home");
    assert_eq!(held(&pool, DISK), 3 * CHUNK + 6 * MIB);
    // Nobody gets it for what is new.
    let new = allocate(&pool, 4 * MIB).unwrap();
    assert_block(&pool, &new);
    fill(&pool, &new);
    rearrange(&pool, &[wish(&first, GPU0), wish(&last, GPU0)]).unwrap();
    let live = [first, last, new];
    assert_all(&pool, &live);
    live.iter().for_each(|it| assert_block(&pool, it));
    assert_eq!(held(&pool, DISK), 0);
    assert_returns_everything(&pool, &live);
}

#[test]
fn what_must_stay_does_not_go_to_a_disk() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * CHUNK), (DISK, u64::MAX)]);
    let blocks = [CHUNK, CHUNK].map(|bytes| allocate(&pool, bytes).unwrap());
    blocks.iter().for_each(|it| fill(&pool, it));
    pool.anchor(blocks[0].block.address, CHUNK, Anchor::Asked).unwrap();
    let anchors: Vec<_> = pool.stretches().iter().map(|it| it.1[0].anchors.is_empty()).collect();
    assert_eq!(anchors, [false, true]);
    blocks.iter().for_each(|it| store(&pool, it));
    let moved = rearrange(&pool, &blocks.map(|it| wish(&it, DISK))).unwrap();
    assert_eq!((moved[0].anchored, moved[1].moved), (CHUNK, CHUNK));
    assert_all(&pool, &blocks);
    assert_returns_everything(&pool, &blocks);
}

#[test]
fn a_fault_at_any_call_on_the_way_there_or_back_loses_nothing() {
    let places = [(GPU0, 4 * CHUNK), (HOST, CHUNK), (DISK, u64::MAX)];
    for kind in [FaultKind::Failed, FaultKind::OutOfMemory] {
        for number in 1.. {
            let pool = pool(Policy::LocalFirst, &places);
            let blocks = [CHUNK, 4 * MIB, CHUNK + 6 * MIB].map(|bytes| allocate(&pool, bytes).unwrap());
            blocks.iter().for_each(|it| fill(&pool, it));
            blocks.iter().for_each(|it| store(&pool, it));
            let begun = pool.backend().inner().calls;
            pool.backend().inner().fault = Some((begun + number, 1, kind));
            for to in [DISK, GPU0] {
                for block in &blocks {
                    let _ = rearrange(&pool, &[wish(block, to)]);
                }
                assert_all(&pool, &blocks);
            }
            let calls = pool.backend().inner().calls - begun;
            pool.backend().inner().fault = None;
            blocks.iter().for_each(|it| drop(rearrange(&pool, &[wish(it, GPU0)]).unwrap()));
            assert_all(&pool, &blocks);
            assert_eq!(held(&pool, DISK), 0);
            assert_returns_everything(&pool, &blocks);
            if number > calls {
                break;
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Allocate {
        bytes: u64,
        home: u32,
    },
    Free {
        pick: usize,
        when: Free,
    },
    Trim,
    Arrive,
    /// Parts of blocks go to places, as long as the program is quiet.
    Go {
        wishes: Vec<(usize, u64, u64, Place)>,
        quiet: u32,
        divides: bool,
    },
    Fail {
        after: u64,
        times: u64,
    },
}

fn any_op() -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![3 => (1..8u64).prop_map(|frames| frames * FRAME), 3 => 1..70 * MIB];
    let place = prop_oneof![3 => Just(DISK), 2 => Just(GPU0), 1 => Just(GPU1), 1 => Just(HOST)];
    let part = (
        any::<usize>(),
        prop_oneof![3 => Just(0), 1 => 0..40 * MIB],
        prop_oneof![3 => Just(u64::MAX), 1 => 1..60 * MIB],
        place,
    );
    prop_oneof![
        4 => (bytes, 0..2u32).prop_map(|(bytes, home)| Op::Allocate { bytes, home }),
        2 => (any::<usize>(), prop_oneof![Just(Free::Strict), Just(Free::Lazy)])
            .prop_map(|(pick, when)| Op::Free { pick, when }),
        1 => Just(Op::Trim),
        1 => Just(Op::Arrive),
        6 => (proptest::collection::vec(part, 1..5), prop_oneof![1 => 0..4u32, 4 => Just(u32::MAX)], any::<bool>())
            .prop_map(|(wishes, quiet, divides)| Op::Go { wishes, quiet, divides }),
        1 => (0..30u64, 1..3u64).prop_map(|(after, times)| Op::Fail { after, times }),
    ]
}

fn check(ops: &[Op]) {
    const LIMITS: [(Place, u64); 4] = [(GPU0, 256 * MIB), (GPU1, 193 * MIB), (HOST, 128 * MIB), (DISK, u64::MAX)];
    let pool = pool_with(Policy::LocalFirst, Lenders::All, &LIMITS, &LIMITS);
    let mut live: Vec<Allocation> = Vec::new();
    for op in ops {
        match *op {
            Op::Allocate { bytes, home } => {
                if let Ok(allocation) = pool.allocate(&request(bytes, home)) {
                    fill(&pool, &allocation);
                    let pieces = pool.pieces(allocation.block.address, u64::MAX);
                    assert!(pieces.iter().all(|piece| piece.place != DISK), "a block begins on the disk");
                    live.push(allocation);
                }
            }
            Op::Free { pick, when } => {
                if let Some(at) = pick.checked_rem(live.len()) {
                    note_busy(&pool, &live[at]);
                    if pool.free(live[at].block.address, when).is_ok() {
                        live.swap_remove(at);
                    }
                }
            }
            Op::Trim => drop(pool.trim(None, None, &[0, 1])),
            Op::Arrive => {
                pool.backend().inner().readers += 1;
                pool.backend().inner().fault = None;
                pool.grant_again().unwrap();
            }
            Op::Go { ref wishes, quiet, divides } => {
                if live.is_empty() {
                    continue;
                }
                let of = |&(pick, from, bytes, to): &(usize, u64, u64, Place)| {
                    let allocation = &live[pick % live.len()];
                    let from = from % allocation.block.bytes;
                    let bytes = bytes.min(allocation.block.bytes - from);
                    store(&pool, allocation);
                    Wish { address: allocation.block.address + from, bytes, to }
                };
                let wishes: Vec<Wish> = wishes.iter().map(of).collect();
                let stop = || Some(Still::new(pool.backend(), quiet));
                let _ = if divides { pool.rearrange_dividing(&wishes, stop) } else { pool.rearrange(&wishes, stop) };
            }
            Op::Fail { after, times } => {
                let mut inner = pool.backend().inner();
                inner.fault = Some((inner.calls + after, times, FaultKind::Failed));
            }
        }
        assert_all(&pool, &live);
    }
    pool.backend().inner().fault = None;
    for (place, when) in [(DISK, "there"), (HOST, "back")] {
        for allocation in &live {
            store(&pool, allocation);
            let to = if place == DISK { DISK } else { Place::Gpu(allocation.block.home) };
            let gone = rearrange(&pool, &[wish(allocation, to)]);
            assert!(gone.is_ok() || to != DISK, "{when}: {gone:?}");
        }
        assert_all(&pool, &live);
    }
    assert_returns_everything(&pool, &live);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_frame_is_where_the_pool_says_and_contains_what_it_did(ops in proptest::collection::vec(any_op(), 1..60)) {
        check(&ops);
    }
}

#[test]
fn what_is_in_pageable_memory_is_told_with_the_host_once() {
    let all = [(GPU0, 4 * CHUNK), (HOST, 4 * CHUNK), (DISK, u64::MAX), (Place::Pageable, u64::MAX)];
    let pool = pool(Policy::LocalFirst, &all);
    let near = allocate(&pool, CHUNK).unwrap();
    let kept = allocate(&pool, 2 * CHUNK).unwrap();
    fill(&pool, &near);
    fill(&pool, &kept);
    store(&pool, &kept);
    let moved = rearrange(&pool, &[wish(&kept, Place::Pageable)]).unwrap();
    assert_eq!(moved[0].moved, 2 * CHUNK);
    assert_eq!((held(&pool, HOST), held(&pool, Place::Pageable)), (2 * CHUNK, 0));
    assert_eq!(pool.usage().places.len(), 2, "no disk");
    assert_eq!(pool.pieces(kept.block.address, u64::MAX)[0].place, Place::Pageable);
    let moved = rearrange(&pool, &[wish(&kept, GPU0)]).unwrap();
    assert_eq!(moved[0].moved, 2 * CHUNK);
    assert_all(&pool, &[near, kept]);
    let host = pool.usage().places.into_iter().find(|it| it.place == HOST).unwrap();
    assert_eq!((host.held, host.used, host.peak_used), (0, 0, 2 * CHUNK));
}
