//! Places whose terms change while memory lies there: another limit, closed, lending or not.

use super::checks::{
    CHUNK, GPU0, GPU1, HOST, MIB, allocate, assert_accounts, assert_block, assert_returns_everything, pool, request,
};
use super::rearranging::{Still, assert_contents, fill};
use gpupool_pool::{Free, MoveError, Place, Policy, Pool, Refusal, Wish};

/// How much a block has at a place.
fn at(pool: &Pool<super::mock::Mock>, address: u64, place: Place) -> u64 {
    let block = pool.block_at(address).unwrap();
    pool.pieces(block.address, block.bytes).iter().filter(|piece| piece.place == place).map(|piece| piece.bytes).sum()
}

#[test]
fn a_place_that_is_closed_takes_nothing_more_whatever_is_free_there() {
    for policy in [Policy::LocalFirst, Policy::Interleave, Policy::MostFree] {
        let pool = pool(policy, &[(GPU0, 8 * CHUNK), (GPU1, 8 * CHUNK), (HOST, 8 * CHUNK)]);
        let mut live: Vec<_> = (0..4).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
        // Free memory of every kind at home: at hand without the lock, and in a run.
        for allocation in live.drain(1..) {
            pool.free(allocation.block.address, Free::Strict).unwrap();
        }
        pool.accounts().close(GPU0, true);
        pool.heed_accounts();
        for bytes in [2 * MIB, CHUNK, 2 * CHUNK] {
            let allocation = allocate(&pool, bytes).unwrap();
            assert_eq!(at(&pool, allocation.block.address, GPU0), 0, "{policy:?}, {bytes}");
            live.push(allocation);
        }
        let small = pool.allocate_small(&request(4096, 0));
        assert!(matches!(small, Err(Refusal::Full { .. })), "{small:?}");
        let wish = Wish { address: live[1].block.address, bytes: 2 * MIB, to: GPU0 };
        let moved = pool.rearrange(&[wish], || Some(Still::new(pool.backend(), u32::MAX)));
        assert_eq!(moved.unwrap_err(), MoveError::Full { place: GPU0, missing: 2 * MIB });
        pool.accounts().close(GPU0, false);
        pool.heed_accounts();
        assert_accounts(&pool, &live);
        let again = allocate(&pool, CHUNK).unwrap();
        assert!(policy != Policy::LocalFirst || at(&pool, again.block.address, GPU0) == CHUNK);
        live.push(again);
        assert_returns_everything(&pool, &live);
    }
}

#[test]
fn under_a_limit_that_was_lowered_nothing_is_reused_before_it_is_kept() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 8 * CHUNK), (HOST, 16 * CHUNK)]);
    let mut live: Vec<_> = (0..8).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    pool.accounts().set_limit(GPU0, 4 * CHUNK);
    pool.heed_accounts();
    // Seven are in use: nothing new fits, and what is in use stays.
    pool.free(live.remove(0).block.address, Free::Strict).unwrap();
    let far = allocate(&pool, CHUNK).unwrap();
    assert_eq!(at(&pool, far.block.address, HOST), CHUNK);
    live.push(far);
    for _ in 0..4 {
        pool.free(live.remove(0).block.address, Free::Strict).unwrap();
    }
    // Three are in use, and one more may be.
    let near = allocate(&pool, CHUNK).unwrap();
    assert_eq!(at(&pool, near.block.address, GPU0), CHUNK);
    let far = allocate(&pool, CHUNK).unwrap();
    assert_eq!(at(&pool, far.block.address, HOST), CHUNK);
    live.extend([near, far]);
    pool.trim(Some(GPU0), None, &[0]);
    assert_eq!(pool.usage().places[0].held, 4 * CHUNK);
    assert_accounts(&pool, &live);
    pool.accounts().set_limit(GPU0, 6 * CHUNK);
    pool.heed_accounts();
    let near = allocate(&pool, 2 * CHUNK).unwrap();
    assert_eq!(at(&pool, near.block.address, GPU0), 2 * CHUNK);
    live.push(near);
    assert_returns_everything(&pool, &live);
}

#[test]
fn a_place_that_lends_no_more_serves_its_own_and_takes_no_moves() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 2 * CHUNK), (GPU1, 4 * CHUNK), (HOST, 8 * CHUNK)]);
    let mut live: Vec<_> = (0..3).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    live.iter().for_each(|it| fill(&pool, it));
    assert_eq!(at(&pool, live[2].block.address, GPU1), CHUNK);
    pool.accounts().lend(GPU1, false);
    pool.heed_accounts();
    let far = allocate(&pool, CHUNK).unwrap();
    assert_eq!(at(&pool, far.block.address, HOST), CHUNK);
    fill(&pool, &far);
    let own = pool.allocate(&request(CHUNK, 1)).unwrap();
    assert_block(&pool, &own);
    assert_eq!(at(&pool, own.block.address, GPU1), CHUNK);
    fill(&pool, &own);
    let go = |address, to| {
        let wish = Wish { address, bytes: CHUNK, to };
        pool.rearrange(&[wish], || Some(Still::new(pool.backend(), u32::MAX)))
    };
    assert_eq!(go(far.block.address, GPU1).unwrap_err(), MoveError::OutOfReach);
    // What lay there may go, and is as it was.
    assert_eq!(go(live[2].block.address, HOST).unwrap().cut_short, None);
    assert_eq!(at(&pool, live[2].block.address, HOST), CHUNK);
    assert_eq!(pool.memory_info(0, |_| true).1, 2 * CHUNK);
    live.extend([far, own]);
    assert_contents(&pool, &live);
    assert_returns_everything(&pool, &live);
}
