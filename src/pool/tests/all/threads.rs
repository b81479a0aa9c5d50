//! Many threads at once.

use crate::checks::{GIB, GPU0, GPU1, HOST, assert_accounts, pool, request};
use crate::mock::BASE;
use gpupool_pool::{FRAME, Free, FreeError, Policy};
use std::sync::atomic::{AtomicU32, Ordering};
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
                    pool.trim(None, Some(64 << 20));
                }
            }
            live
        };
        let threads: Vec<_> = (1..=8).map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_accounts(&pool, &live);
    crate::checks::assert_returns_everything(&pool, &live);
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
fn no_lock_is_held_while_the_backend_works() {
    let pool = Arc::new(pool(Policy::LocalFirst, &[(GPU0, GIB), (HOST, GIB)]));
    let weak = Arc::downgrade(&pool);
    pool.backend().set_probe(move || {
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
    pool.trim(None, None);
    let called = |name: &str| pool.backend().inner().log.iter().any(|entry| entry.0 == name);
    for name in ["create", "map", "grant", "quiesce", "unmap", "release"] {
        assert!(called(name), "{name} was never called");
    }
}
