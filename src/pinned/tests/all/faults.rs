//! A fault at every single backend call.

use crate::mock::{FaultKind, GIB, IDLE, KIB, MIB, Mock, pool, try_allocate};
use gpupool_pinned::{Block, Free, FreeError, Pool, Refusal};
use std::time::Duration;

/// What a script does with the pool: the blocks it holds, and the time.
struct Script<'a> {
    pool: &'a Pool<Mock>,
    live: Vec<Block>,
    now: Duration,
}

impl Script<'_> {
    fn allocate(&mut self, bytes: u64) {
        match try_allocate(self.pool, bytes) {
            Ok(allocation) => self.live.push(allocation.block),
            Err(Refusal::Backend(call)) => {
                assert!(call <= self.pool.backend().inner().calls, "the backend's own error")
            }
            Err(refusal) => panic!("{refusal:?}"),
        }
    }

    /// Frees the latest block but `below`.
    fn free(&mut self, below: usize, when: Free) {
        let Some(at) = self.live.len().checked_sub(1 + below) else { return };
        let block = self.live[at];
        match self.pool.free(block.address, when, || self.now) {
            Ok(freed) => {
                assert_eq!(freed, block);
                self.live.remove(at);
            }
            Err(FreeError::Backend(_)) => assert_eq!(self.pool.block_at(block.address), Some(block), "still live"),
            Err(FreeError::NotABlock) => panic!("{block:?} was live"),
        }
    }
}

/// Runs `script` with faults from call `first` on for every `first`, kind and number, until the script ends before they
/// begin.
fn sweep(script: impl Fn(&mut Script)) {
    for kind in [FaultKind::OutOfMemory, FaultKind::NotReady, FaultKind::Failed] {
        for count in [1, 2, 3, 100] {
            for first in 1.. {
                let pool = pool(GIB);
                pool.backend().inner().fault = Some((first, count, kind));
                let mut run = Script { pool: &pool, live: Vec::new(), now: Duration::ZERO };
                script(&mut run);
                pool.backend().inner().fault = None;
                let Script { live, now, .. } = run;
                let usage = pool.usage();
                assert_eq!(usage.pinned, pool.backend().inner().pinned());
                assert_eq!(usage.requested, live.iter().map(|block| block.bytes).sum::<u64>());
                assert_eq!(usage.blocks, live.len() as u64);
                for block in live {
                    assert_eq!(pool.block_at(block.address), Some(block));
                    assert_eq!(pool.free(block.address, Free::Strict, || now), Ok(block));
                }
                assert_eq!(pool.usage().used, 0);
                pool.trim();
                assert_eq!((pool.usage().pinned, pool.backend().inner().pinned()), (0, 0), "nothing is lost");
                let calls = pool.backend().inner().calls;
                if calls < first {
                    assert!(first > 5, "the script makes no calls to fail");
                    break;
                }
            }
        }
    }
}

#[test]
fn in_frees_and_reuse() {
    sweep(|run| {
        for when in [Free::Strict, Free::Lazy] {
            [4 * MIB, 100, 4 * MIB, 12 * KIB].into_iter().for_each(|bytes| run.allocate(bytes));
            run.free(0, when);
            run.free(1, when);
            run.allocate(12 * KIB);
            run.allocate(100);
            run.free(2, when);
            run.allocate(3 * MIB);
        }
    });
}

#[test]
fn in_making_room_and_giving_back() {
    sweep(|run| {
        for round in 0..3 {
            run.allocate((100 + 50 * round) * MIB);
            run.allocate(7 * MIB);
            run.free(1, Free::Strict);
            run.free(0, Free::Lazy);
            run.now += Duration::from_secs(1);
        }
        run.allocate(200 * MIB);
        run.free(0, Free::Strict);
        run.now += 2 * IDLE;
        run.pool.return_idle(run.now, Some(1));
        run.allocate(5 * MIB);
        run.free(0, Free::Lazy);
        run.pool.trim();
    });
}

#[test]
fn a_free_that_could_not_wait_can_be_repeated() {
    let pool = pool(GIB);
    let block = try_allocate(&pool, MIB).unwrap().block;
    pool.backend().inner().fault = Some((2, 1, FaultKind::Failed));
    assert_eq!(pool.free(block.address, Free::Strict, || Duration::ZERO), Err(FreeError::Backend(2)));
    assert_eq!(pool.free(block.address, Free::Strict, || Duration::ZERO), Ok(block));
}

#[test]
fn a_segment_that_does_not_go_is_tried_again_only_after_the_idle_time() {
    let pool = pool(GIB);
    let block = try_allocate(&pool, MIB).unwrap().block;
    pool.free(block.address, Free::Strict, || Duration::ZERO).unwrap();
    pool.backend().inner().fault = Some((3, 1, FaultKind::Failed));
    assert_eq!(pool.return_idle(IDLE, Some(1)), 0);
    let calls = pool.backend().inner().calls;
    assert_eq!(pool.return_idle(2 * IDLE - Duration::from_secs(1), Some(1)), 0);
    assert_eq!(pool.backend().inner().calls, calls);
    assert_eq!(pool.return_idle(2 * IDLE, Some(1)), MIB);
}

#[test]
fn what_could_not_make_room_goes_at_the_next_wait() {
    let pool = pool(GIB);
    let blocks = [100 * MIB, 60 * MIB].map(|bytes| try_allocate(&pool, bytes).unwrap().block);
    for block in blocks {
        pool.free(block.address, Free::Strict, || Duration::ZERO).unwrap();
    }
    pool.backend().inner().running = true;
    let allocation = try_allocate(&pool, 90 * MIB).unwrap();
    assert_eq!((allocation.pinned, allocation.returned, pool.usage().pinned), (90 * MIB, 0, 250 * MIB));
    assert_eq!(
        pool.return_idle(Duration::ZERO, Some(1)),
        100 * MIB,
        "as much as is beyond the bound, and not before its time"
    );
    assert_eq!(pool.return_idle(Duration::ZERO, Some(1)), 0);
}

#[test]
fn busy_memory_that_does_not_go_is_busy_still() {
    let pool = pool(GIB);
    let block = try_allocate(&pool, MIB).unwrap().block;
    pool.free(block.address, Free::Lazy, || Duration::ZERO).unwrap();
    pool.backend().inner().fault = Some((2, 1, FaultKind::Failed));
    assert_eq!(pool.trim(), 0);
    assert_eq!(try_allocate(&pool, MIB).map(|allocation| allocation.block.address), Ok(block.address));
    assert_eq!(pool.backend().inner().log.last(), Some(&("quiesce", 1)));
}
