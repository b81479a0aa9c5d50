//! Many threads at once.

use super::checks::{GIB, GPU0, GPU1, HOST, MIB, assert_accounts, assert_returns_everything, pool, request};
use super::checks::{assert_the_rest_ends_once, free_in_a_race};
use super::mock::BASE;
use gpupool_pool::{Allocation, Anchor, FRAME, Free, FreeError, MoveError, Policy, Request};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// A small generator, so that every thread has its own row of numbers and a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// What all threads meet at is not on the way of a thread that allocates again what it freed: while another one has the pool's lock, it goes on.
#[test]
fn a_thread_that_allocates_again_what_it_freed_waits_for_no_other() {
    for when in [Free::Strict, Free::Lazy] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
        let (to_main, from_thread) = mpsc::channel();
        let (to_thread, from_main) = mpsc::channel();
        std::thread::scope(|scope| {
            let pool = &pool;
            scope.spawn(move || {
                let pair = || {
                    let block = pool.allocate(&request(4 * MIB, 0)).unwrap().block;
                    pool.free(block.address, when).unwrap();
                };
                pair();
                to_main.send(()).unwrap();
                from_main.recv().unwrap();
                pair();
                to_main.send(()).unwrap();
            });
            let minute = Duration::from_secs(60);
            from_thread.recv_timeout(minute).unwrap();
            let lock = pool.lock();
            to_thread.send(()).unwrap();
            let answer = from_thread.recv_timeout(minute);
            drop(lock);
            assert_eq!(answer, Ok(()), "{when:?}");
        });
    }
}

#[test]
fn blocks_of_eight_threads_never_share_a_frame() {
    const ROUNDS: usize = 10_000;
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB / 2), (HOST, GIB)]);
    // Who holds each frame; more than these are never used, since freed address space is used again.
    let owners: Vec<AtomicU32> = (0..8 * GIB / FRAME).map(|_| AtomicU32::new(0)).collect();
    let frames = |address: u64, bytes: u64| {
        let first = ((address - BASE) / FRAME) as usize;
        &owners[first..first + bytes.div_ceil(FRAME) as usize]
    };
    let live: Vec<_> = std::thread::scope(|scope| {
        let worker = |id: u32| {
            let mut dice = Dice(u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut live = Vec::new();
            for _ in 0..ROUNDS {
                if live.len() < 6 && dice.roll(2) == 0 {
                    let frames_wanted = 1 + dice.roll(dice.0 % 40 + 1);
                    let bytes = frames_wanted * FRAME - dice.roll(FRAME);
                    let Ok(allocation) = pool.allocate(&request(bytes, id % 2)) else { continue };
                    for owner in frames(allocation.block.address, bytes) {
                        assert_eq!(owner.swap(id, Ordering::AcqRel), 0, "two blocks on one frame");
                    }
                    live.push(allocation);
                } else if !live.is_empty() {
                    let gone: gpupool_pool::Allocation = live.swap_remove(dice.roll(live.len() as u64) as usize);
                    assert_eq!(pool.block_at(gone.block.address + gone.block.bytes - 1), Some(gone.block));
                    for owner in frames(gone.block.address, gone.block.bytes) {
                        assert_eq!(owner.swap(0, Ordering::AcqRel), id);
                    }
                    let when = if dice.roll(2) == 0 { Free::Lazy } else { Free::Strict };
                    assert_eq!(pool.free(gone.block.address, when), Ok(gone.block));
                } else if dice.roll(64) == 0 {
                    pool.trim(None, Some(64 << 20), &[0, 1]);
                }
            }
            live
        };
        let threads: Vec<_> = (1..=8).map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_accounts(&pool, &live);
    super::checks::assert_returns_everything(&pool, &live);
}

#[test]
fn frees_of_the_same_blocks_trims_and_owners_that_go_agree_in_the_end() {
    const ROUNDS: u64 = 20_000;
    const SHELF: usize = 64;
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    // Blocks are put on a shelf that all threads free from without taking them off, so that most are freed several times,
    // and now and then one that was allocated anew at the same address: a program's error, but never the pool's.
    let shelf: Vec<AtomicU64> = (0..SHELF).map(|_| AtomicU64::new(0)).collect();
    let (made, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for id in 1..=8u64 {
            let (pool, shelf, made, ended) = (&pool, &shelf, &made, &ended);
            scope.spawn(move || {
                let mut dice = Dice(id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                for _ in 0..ROUNDS {
                    let place = &shelf[dice.roll(SHELF as u64) as usize];
                    match dice.roll(400) {
                        0 => _ = pool.trim(None, Some(16 << 20), &[0, 1]),
                        1 => _ = ended.fetch_add(pool.free_owned_by(3).len() as u64, Ordering::Relaxed),
                        2 => {
                            let usage = pool.usage();
                            for place in &usage.places {
                                assert!(place.used <= place.held && place.used <= place.peak_used, "{place:?}");
                            }
                            assert!(usage.live_bytes <= usage.peak_live_bytes && usage.reuses <= usage.allocations);
                        }
                        roll if roll % 2 == 0 => {
                            let bytes = (1 + dice.roll(8)) << 20;
                            let wanted = Request { owner: dice.roll(4), ..request(bytes, (id % 2) as u32) };
                            if let Ok(allocation) = pool.allocate(&wanted) {
                                made.fetch_add(1, Ordering::Relaxed);
                                place.store(allocation.block.address, Ordering::Release);
                            }
                        }
                        _ => {
                            let when = if dice.roll(2) == 0 { Free::Lazy } else { Free::Strict };
                            if free_in_a_race(pool, place.load(Ordering::Acquire), when) {
                                ended.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                }
            });
        }
    });
    assert_the_rest_ends_once(&pool, &[0, 1, 2, 3], made.into_inner(), ended.into_inner());
    super::checks::assert_returns_everything(&pool, &[]);
}

#[test]
fn what_one_thread_freed_serves_all_others() {
    // Small blocks, and one that needs all of them joined: nothing is lost in the hands of the thread that freed it.
    let pool = pool(Policy::LocalFirst, &[(GPU0, 16 * FRAME)]);
    let whole = pool.allocate(&request(16 * FRAME, 0)).unwrap();
    pool.free(whole.block.address, Free::Strict).unwrap();
    let blocks: Vec<_> = (0..16).map(|_| pool.allocate(&request(FRAME, 0)).unwrap()).collect();
    std::thread::scope(|scope| {
        for pair in blocks.chunks(4) {
            let pool = &pool;
            scope.spawn(move || {
                for allocation in pair {
                    pool.free(allocation.block.address, Free::Lazy).unwrap();
                }
            });
        }
    });
    let usage = pool.usage();
    assert_eq!((usage.live_blocks, usage.live_bytes, usage.places[0].used), (0, 0, 0));
    assert_eq!(pool.memory_info(0, |_| true), (16 * FRAME, 16 * FRAME));
    let single = pool.allocate(&request(FRAME, 0)).unwrap();
    assert!(single.reused);
    pool.free(single.block.address, Free::Lazy).unwrap();
    let whole = pool.allocate(&request(16 * FRAME, 0)).unwrap();
    assert!(whole.reused, "the freed memory of four threads is one row");
    assert_eq!(pool.usage().peak_live_bytes, 16 * FRAME);
    super::checks::assert_returns_everything(&pool, &[whole]);
}

#[test]
fn of_many_frees_of_one_block_exactly_one_succeeds() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let barrier = Barrier::new(8);
    for round in 0..200 {
        let block = pool.allocate(&request(FRAME, 0)).unwrap().block;
        let when = if round % 2 == 0 { Free::Strict } else { Free::Lazy };
        let answers: Vec<_> = std::thread::scope(|scope| {
            let free = || {
                barrier.wait();
                pool.free(block.address, when)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(free)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(answers.iter().filter(|answer| **answer == Ok(block)).count(), 1);
        assert_eq!(answers.iter().filter(|answer| **answer == Err(FreeError::NotABlock)).count(), 7);
    }
}

#[test]
fn who_is_added_while_memory_grows_reaches_it() {
    let pool = Arc::new(pool(Policy::LocalFirst, &[(GPU0, GIB)]));
    let weak = Arc::downgrade(&pool);
    let first = AtomicU32::new(0);
    // Behind the moment at which the growth says who is to reach its memory, and before it is in the books.
    pool.backend().set_probe(move |_| {
        let Some(pool) = weak.upgrade() else { return };
        let grants = || pool.backend().inner().log.iter().filter(|entry| entry.0 == "map").count();
        if grants() == 1 && first.fetch_add(1, Ordering::Relaxed) == 0 {
            pool.backend().inner().readers += 1;
        }
    });
    let allocation = pool.allocate(&request(FRAME, 0)).unwrap();
    super::checks::assert_block(&pool, &allocation);
    assert_eq!(pool.backend().inner().log.iter().filter(|entry| entry.0 == "grant").count(), 2);
}

#[test]
fn devices_that_are_added_beside_growth_and_trims_reach_every_block() {
    const ROUNDS: u32 = 3_000;
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    let live: Vec<gpupool_pool::Allocation> = std::thread::scope(|scope| {
        let worker = |id: u32| {
            let mut dice = Dice(u64::from(id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut live: Vec<gpupool_pool::Allocation> = Vec::new();
            for _ in 0..ROUNDS {
                if live.len() == 6 {
                    let gone = live.swap_remove(dice.roll(6) as usize);
                    pool.free(gone.block.address, Free::Lazy).unwrap();
                    pool.trim(None, None, &[id]);
                }
                live.extend(pool.allocate(&request((1 + dice.roll(40)) * FRAME, id)));
            }
            live
        };
        let workers: Vec<_> = (0..2).map(|id| scope.spawn(move || worker(id))).collect();
        while workers.iter().any(|worker| !worker.is_finished()) {
            pool.backend().inner().readers += 1;
            assert_eq!(pool.grant_again(), Ok(()));
        }
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    live.iter().for_each(|allocation| super::checks::assert_block(&pool, allocation));
    super::checks::assert_returns_everything(&pool, &live);
}

#[test]
fn no_lock_is_held_while_the_backend_works() {
    let pool = Arc::new(pool(Policy::LocalFirst, &[(GPU0, GIB), (HOST, GIB)]));
    let weak = Arc::downgrade(&pool);
    pool.backend().set_probe(move |_| {
        let Some(pool) = weak.upgrade() else { return };
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || done.send(pool.usage().live_blocks));
        // Not a wait for something to happen, but the limit after which it never will.
        is_done.recv_timeout(Duration::from_secs(20)).expect("usage() waits for a backend call of another thread");
    });
    let first = pool.allocate(&request(GIB + 100 * FRAME, 0)).unwrap();
    let second = pool.allocate(&request(FRAME, 0)).unwrap();
    pool.free(first.block.address, Free::Strict).unwrap();
    pool.free(second.block.address, Free::Lazy).unwrap();
    let third = pool.allocate(&request(2 * FRAME, 0)).unwrap();
    assert!(third.reused);
    pool.free(third.block.address, Free::Lazy).unwrap();
    pool.trim(None, None, &[0, 1]);
    let called = |name: &str| pool.backend().inner().log.iter().any(|entry| entry.0 == name);
    for name in ["create", "map", "grant", "quiesce", "unmap", "release"] {
        assert!(called(name), "{name} was never called");
    }
}

/// Blocks that move while others are made and freed on the same chunks, trimmed, anchored and granted to others.
#[test]
fn threads_that_move_their_blocks_find_what_they_wrote() {
    const ROUNDS: usize = 1500;
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB / 4), (GPU1, GIB / 4), (HOST, GIB / 4)]);
    let frames = |block: gpupool_pool::Block| (block.address..block.address + block.bytes).step_by(FRAME as usize);
    let check = |allocation: &Allocation| {
        let inner = pool.backend().inner();
        for at in frames(allocation.block) {
            assert_eq!(inner.read(at), at ^ allocation.block.id << 50, "{at:#x} of {:?}", allocation.block);
        }
    };
    let worker = |id: u32| {
        let mut dice = Dice(u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut live: Vec<Allocation> = Vec::new();
        let mut moved = 0;
        for _ in 0..ROUNDS {
            let pick = dice.roll(live.len().max(1) as u64) as usize;
            match dice.roll(16) {
                0..5 if live.len() < 5 => {
                    let bytes = (1 + dice.roll(6) * dice.roll(6)) * FRAME - dice.roll(FRAME);
                    let Ok(allocation) = pool.allocate(&request(bytes, id % 2)) else { continue };
                    for at in frames(allocation.block) {
                        pool.backend().inner().write(at, at ^ allocation.block.id << 50);
                    }
                    live.push(allocation);
                }
                5..9 if !live.is_empty() => {
                    let gone = live.swap_remove(pick);
                    check(&gone);
                    assert_eq!(pool.free(gone.block.address, Free::Strict), Ok(gone.block));
                }
                9..14 if !live.is_empty() => {
                    let block = live[pick].block;
                    let from = dice.roll(2) * dice.roll(block.bytes);
                    let place = [GPU0, GPU1, HOST][dice.roll(3) as usize];
                    match pool.move_to(block.address + from, block.bytes - from, place) {
                        Ok(answer) => moved += answer.moved,
                        Err(MoveError::Full { .. } | MoveError::NotNow) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                    check(&live[pick]);
                }
                14 if !live.is_empty() => {
                    // What is anchored stays on the memory that it was on.
                    let block = live[pick].block;
                    pool.anchor(block.address, block.bytes, Anchor::Shared).unwrap();
                    let handles =
                        || pool.pieces(block.address, u64::MAX).iter().map(|it| it.handle).collect::<Vec<_>>();
                    let before = handles();
                    let answer = pool.move_to(block.address, block.bytes, [GPU0, GPU1][dice.roll(2) as usize]);
                    assert!(answer.is_ok_and(|answer| answer.moved == 0));
                    assert_eq!(handles(), before);
                    assert!(pool.withdraw_anchor(block.address, block.bytes, Anchor::Shared));
                }
                15 => match dice.roll(3) {
                    0 => _ = pool.trim(None, Some(16 * MIB), &[0, 1]),
                    1 => pool.grant_again().unwrap(),
                    _ => _ = pool.return_unused(None, pool.begin_period(), u64::MAX, |_| true),
                },
                _ => {}
            }
        }
        (live, moved)
    };
    let (live, moved): (Vec<_>, Vec<u64>) = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=4).map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).unzip()
    });
    assert!(moved.iter().all(|bytes| *bytes > GIB), "{moved:?} is hardly anything");
    let live: Vec<Allocation> = live.into_iter().flatten().collect();
    live.iter().for_each(check);
    assert_accounts(&pool, &live);
    assert_returns_everything(&pool, &live);
}
