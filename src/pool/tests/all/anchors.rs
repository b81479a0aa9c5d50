//! Memory that must stay where it is.

use super::checks::{GIB, GPU0, GPU1, MIB, allocate, assert_returns_everything, pool, roomy};
use super::mock::Mock;
use gpupool_pool::{Allocation, Anchor, Anchors, FRAME, Free, Policy, Pool};

fn anchored(pool: &Pool<Mock>) -> Vec<u64> {
    pool.usage().places.iter().map(|place| place.anchored / MIB).collect()
}

fn anchors_at(pool: &Pool<Mock>, address: u64) -> Anchors {
    pool.pieces(address, 1)[0].anchors
}

fn free(pool: &Pool<Mock>, allocation: &Allocation) {
    pool.free(allocation.block.address, Free::Strict).unwrap();
}

#[test]
fn a_mark_covers_the_chunks_below_its_range_and_is_counted_once() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB), (GPU1, GIB)]);
    let block = allocate(&pool, 100 * MIB).unwrap();
    let address = block.block.address;
    // Chunks of 32 and 32 at home, of 32 and 4 on the peer: the range touches the second and the third.
    assert_eq!(pool.anchor(address + 40 * MIB, 25 * MIB, Anchor::Shared), Some(64 * MIB));
    assert_eq!(pool.anchor(address + 40 * MIB, 1, Anchor::Retained), Some(32 * MIB));
    assert_eq!(anchored(&pool), [32, 32]);
    let anchors: Vec<u8> = pool.pieces(address, u64::MAX).iter().map(|piece| piece.anchors.bits()).collect();
    assert_eq!(anchors, [0, 0b011, 0b001, 0]);
    assert!(Anchor::ALL.map(|why| anchors_at(&pool, address + 32 * MIB).has(why)) == [true, true, false, false]);
    assert_returns_everything(&pool, &[block]);
}

#[test]
fn what_was_given_out_outlives_the_block_but_not_the_chunk() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let first = allocate(&pool, 32 * MIB).unwrap();
    pool.anchor(first.block.address, 1, Anchor::Shared).unwrap();
    free(&pool, &first);
    assert_eq!(anchored(&pool), [32], "whoever mapped it still has");
    let second = allocate(&pool, 8 * MIB).unwrap();
    assert_eq!(second.block.address, first.block.address, "freed memory with a mark is used as ever");
    assert!(anchors_at(&pool, second.block.address).has(Anchor::Shared));
    free(&pool, &second);
    assert_eq!(pool.trim(None, None, &[0, 1]), 32 * MIB, "and goes back to the driver as ever");
    assert_eq!(anchored(&pool), [0]);
    let third = allocate(&pool, 32 * MIB).unwrap();
    assert_eq!(anchors_at(&pool, third.block.address), Anchors::NONE, "a new chunk carries no anchor of an old one");
    assert_returns_everything(&pool, &[third]);
}

fn held(pool: &Pool<Mock>) -> Vec<u64> {
    pool.usage().places.iter().map(|place| place.held / MIB).collect()
}

#[test]
fn a_block_that_others_hold_leaves_with_its_chunks_and_spares_those_of_neighbours() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 96 * MIB), (GPU1, GIB)]);
    let first = allocate(&pool, 32 * MIB).unwrap();
    free(&pool, &first);
    let neighbour = allocate(&pool, 20 * MIB).unwrap();
    let spread = allocate(&pool, 100 * MIB).unwrap();
    pool.anchor(spread.block.address, 100 * MIB, Anchor::Shared).unwrap();
    assert_eq!(pool.hold(spread.block.address, spread.block.id), Some(spread.block));
    let before = held(&pool);
    free(&pool, &spread);
    assert_eq!((before, held(&pool), anchored(&pool)), (vec![96, 36], vec![32, 0], vec![0, 0]));
    assert_eq!(pool.hold(spread.block.address, spread.block.id), None, "it has ended");
    pool.let_go(spread.block.address, spread.block.id);
    // Of a chunk that another block stands on, only the block's part is not.
    assert_eq!(pool.hold(neighbour.block.address, neighbour.block.id), Some(neighbour.block));
    let beside = allocate(&pool, 12 * MIB).unwrap();
    assert_eq!(beside.block.address, neighbour.block.address + 20 * MIB);
    free(&pool, &neighbour);
    let other = allocate(&pool, 12 * MIB).unwrap();
    assert!(!other.reused, "others still read the rest of that chunk");
    pool.let_go(neighbour.block.address, neighbour.block.id);
    assert_eq!(allocate(&pool, 20 * MIB).map(|again| again.block.address), Ok(neighbour.block.address));
    assert_returns_everything(&pool, &[beside, other, allocation_at(&pool, neighbour.block.address)]);
}

fn allocation_at(pool: &Pool<Mock>, address: u64) -> Allocation {
    Allocation { block: pool.block_at(address).unwrap(), reused: true, on_peers: 0, on_host: 0 }
}

#[test]
fn what_a_handle_was_given_of_serves_nobody_else_until_its_chunk_has_gone() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB)]);
    let first = allocate(&pool, 32 * MIB).unwrap();
    free(&pool, &first);
    let (given, neighbour) = (allocate(&pool, 16 * MIB).unwrap(), allocate(&pool, 16 * MIB).unwrap());
    pool.anchor(given.block.address, 16 * MIB, Anchor::Descriptor).unwrap();
    free(&pool, &given);
    let elsewhere = allocate(&pool, 16 * MIB).unwrap();
    assert!(!elsewhere.reused);
    free(&pool, &neighbour);
    // Both halves of the chunk are wanted, and it can go now that no block stands on it.
    let whole = allocate(&pool, 48 * MIB).unwrap();
    assert!(!whole.reused);
    assert_returns_everything(&pool, &[elsewhere, whole]);
}

/// With chunks as large as outside of tests.
#[test]
fn what_a_program_that_gives_memory_out_gives_next_fixes_no_large_chunk() {
    for (why, mib) in [(Anchor::Shared, 2), (Anchor::Retained, 20), (Anchor::Descriptor, 32)] {
        let limit = 4 * GIB;
        let pool = roomy(limit);
        let rows = [512, 2, 512, 2].map(|mib| allocate(&pool, mib * MIB).unwrap());
        free(&pool, &rows[0]);
        free(&pool, &rows[2]);
        let gives = |mib| {
            let block = allocate(&pool, mib * MIB).unwrap();
            assert!(pool.anchor(block.block.address, mib * MIB, why).is_some());
            (block, pool.usage().places[0].anchored / MIB)
        };
        let (_, anchored) = gives(mib);
        assert_eq!(anchored, 512, "nobody knew");
        // What is fixed in any case serves on.
        let (second, anchored) = gives(mib);
        assert_eq!((second.reused, anchored), (true, 512));
        let _rest = allocate(&pool, (512 - 2 * mib) * MIB).unwrap();
        let (third, anchored) = gives(mib);
        assert_eq!((third.reused, anchored), (false, 512 + mib));
        // It is nothing for large ones, nor where there is no room beside what is free.
        let large = allocate(&pool, 64 * MIB).unwrap();
        let fill = allocate(&pool, limit - pool.usage().places[0].held).unwrap();
        let (fourth, _) = gives(mib);
        assert_eq!((large.reused, fill.reused, fourth.reused), (true, false, true));
        assert_eq!((fourth.on_peers, fourth.on_host), (0, 0));
    }
}

#[test]
fn a_mark_for_a_call_that_failed_is_as_if_it_had_never_been() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let block = allocate(&pool, 8 * MIB).unwrap();
    let address = block.block.address;
    pool.anchor(address, 8 * MIB, Anchor::Retained).unwrap();
    pool.anchor(address, 8 * MIB, Anchor::Descriptor).unwrap();
    assert!(
        pool.withdraw_anchor(address, 8 * MIB, Anchor::Retained) && anchored(&pool) == [8],
        "the other anchor is another call's"
    );
    assert!(pool.withdraw_anchor(address, 8 * MIB, Anchor::Descriptor) && anchored(&pool) == [0]);
    free(&pool, &block);
    let again = allocate(&pool, 8 * MIB).unwrap();
    assert!(again.reused, "nobody has it");
    assert!(!pool.withdraw_anchor(address + MIB, 8 * MIB, Anchor::Retained), "that range lies in no block");
    assert_returns_everything(&pool, &[again]);
}

#[test]
fn what_the_program_asked_for_ends_when_it_says_so() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let block = allocate(&pool, 40 * MIB).unwrap();
    let address = block.block.address;
    assert_eq!(pool.anchor(address, 40 * MIB, Anchor::Asked), Some(40 * MIB));
    assert_eq!(pool.anchor(address + 33 * MIB, MIB, Anchor::Asked), Some(8 * MIB));
    assert_eq!(anchored(&pool), [40]);
    assert!(!pool.release_anchor(address, 39 * MIB), "a range is named as it was anchored");
    assert!(pool.release_anchor(address, 40 * MIB));
    assert!(!pool.release_anchor(address, 40 * MIB), "each anchor once");
    assert_eq!(anchored(&pool), [8], "the other range is still there");
    assert!(pool.release_anchor(address + 33 * MIB, MIB));
    assert_eq!((anchored(&pool), anchors_at(&pool, address)), (vec![0], Anchors::NONE));
    assert_returns_everything(&pool, &[block]);
}

#[test]
fn what_the_program_asked_for_ends_with_its_block() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let first = allocate(&pool, 8 * MIB).unwrap();
    let address = first.block.address;
    pool.anchor(address, 8 * MIB, Anchor::Asked).unwrap();
    free(&pool, &first);
    assert_eq!(anchored(&pool), [0]);
    let second = allocate(&pool, 8 * MIB).unwrap();
    assert_eq!((second.block.address, anchors_at(&pool, address)), (address, Anchors::NONE));
    assert!(!pool.release_anchor(address, 8 * MIB), "the next block at that address is another one");
    assert_returns_everything(&pool, &[second]);
}

#[test]
fn only_a_range_inside_one_block_is_marked() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let (first, second) = (allocate(&pool, 3 * MIB).unwrap(), allocate(&pool, 4 * MIB).unwrap());
    let address = first.block.address;
    for (from, bytes) in [(address, 0), (address, 4 * MIB + 1), (address + FRAME, 3 * MIB), (address, u64::MAX)] {
        assert_eq!(pool.anchor(from, bytes, Anchor::Shared), None, "{bytes} bytes from {}", from - address);
    }
    assert_eq!(anchored(&pool), [0]);
    assert_eq!(
        pool.anchor(address, 4 * MIB, Anchor::Shared),
        Some(4 * MIB),
        "the last frame is the block's to its end"
    );
    // What the program asks for ends with the last byte that it asked for.
    assert_eq!(pool.anchor(address, 3 * MIB + 1, Anchor::Asked), None);
    assert_eq!(pool.anchor(address, 3 * MIB, Anchor::Asked), Some(4 * MIB));
    assert_eq!(pool.block_at(address + 3 * MIB - 1), Some(first.block));
    assert_eq!(pool.block_at(address + 3 * MIB), None);
    assert_returns_everything(&pool, &[first, second]);
}
