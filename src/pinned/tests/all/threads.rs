//! Many threads at once.

use crate::mock::{GIB, KEY, KIB, MIB, Mock, pool};
use gpupool_pinned::{Allocation, Free, FreeError, Key, Pool, Request};
use std::collections::BTreeMap;
use std::sync::{Barrier, Mutex};
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

/// Who holds which bytes.
#[derive(Default)]
struct Owners(Mutex<BTreeMap<u64, u64>>);

impl Owners {
    fn enter(&self, address: u64, bytes: u64) {
        let mut owners = self.0.lock().unwrap();
        let before = owners.range(..address + bytes).next_back();
        assert!(before.is_none_or(|(&at, &size)| at + size <= address), "two blocks on the same bytes");
        owners.insert(address, bytes);
    }

    fn leave(&self, address: u64) {
        assert!(self.0.lock().unwrap().remove(&address).is_some());
    }
}

#[test]
fn blocks_of_eight_threads_never_share_a_byte() {
    let pool = pool(GIB);
    let owners = Owners::default();
    let worker = |id: u64| {
        let mut dice = Dice(id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut live: Vec<Allocation> = Vec::new();
        for step in 0..4_000 {
            if live.len() < 6 && dice.roll(2) == 0 {
                let bytes = 1 + dice.roll([KIB, 64 * KIB, 4 * MIB, 32 * MIB][dice.0 as usize % 4]);
                let key = Key { flags: dice.roll(2) as u32, ..KEY };
                let Ok(allocation) = pool.allocate(&Request { bytes, key }) else { continue };
                owners.enter(allocation.block.address, bytes);
                live.push(allocation);
            } else if !live.is_empty() {
                let Allocation { block, .. } = live.swap_remove(dice.roll(live.len() as u64) as usize);
                assert_eq!(pool.block_at(block.address + block.bytes - 1), Some(block));
                owners.leave(block.address);
                let when = if dice.roll(2) == 0 { Free::Lazy } else { Free::Strict };
                assert_eq!(pool.free(block.address, when, || Duration::from_secs(step)), Ok(block));
            }
            match dice.roll(64) {
                0 => drop(pool.trim()),
                1 => drop(pool.return_idle(Duration::from_secs(step), Some(1))),
                _ => {}
            }
        }
        live
    };
    let live: Vec<Allocation> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=8).map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(pool.usage().requested, live.iter().map(|allocation| allocation.block.bytes).sum::<u64>());
    for Allocation { block, .. } in live {
        assert_eq!(pool.free(block.address, Free::Strict, || Duration::ZERO), Ok(block));
    }
    pool.trim();
    assert_eq!((pool.usage().pinned, pool.backend().inner().pinned()), (0, 0));
}

#[test]
fn of_several_frees_of_one_block_one_succeeds() {
    for when in [Free::Strict, Free::Lazy] {
        let pool = pool(GIB);
        for _ in 0..200 {
            let address = pool.allocate(&Request { bytes: MIB, key: KEY }).unwrap().block.address;
            let barrier = Barrier::new(4);
            let free = || {
                barrier.wait();
                pool.free(address, when, || Duration::ZERO)
            };
            let answers: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(free)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let wrong = answers.iter().filter(|answer| **answer == Err(FreeError::NotABlock)).count();
            assert_eq!(wrong, 3, "{answers:?}");
        }
    }
}

#[test]
fn the_backend_may_call_back() {
    let pool = std::sync::Arc::new(pool(GIB));
    let again = std::sync::Arc::downgrade(&pool);
    // A lock that is held here would hang the test.
    pool.backend().set_probe(move || {
        let pool: std::sync::Arc<Pool<Mock>> = again.upgrade().unwrap();
        assert!(pool.usage().pinned <= GIB);
    });
    let blocks: Vec<_> = (1..9).map(|size| pool.allocate(&Request { bytes: size * 30 * MIB, key: KEY })).collect();
    for (number, block) in blocks.into_iter().flatten().enumerate() {
        let when = if number % 2 == 0 { Free::Lazy } else { Free::Strict };
        pool.free(block.block.address, when, || Duration::ZERO).unwrap();
    }
    assert!(pool.return_idle(Duration::from_secs(99), Some(1)) > 0);
    assert_eq!(pool.usage().pinned, 0);
}
