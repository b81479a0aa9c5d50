//! One rule a test.

use super::checks::{
    CHUNK, GIB, GPU0, GPU1, HOST, Lenders, MIB, allocate, assert_block, assert_returns_everything, note_busy, pool,
    pool_with, request, roomy, roomy_at,
};
use super::mock::{BASE, FaultKind, Mock};
use gpupool_pool::{
    Accounts, Allocation, Anchor, Config, FRAME, Free, FreeError, Place, PlaceSpec, Policy, Pool, Refusal, Request,
};
use proptest::prelude::*;
use std::sync::Arc;

fn calls_since<T>(pool: &Pool<Mock>, act: impl FnOnce() -> T) -> (T, Vec<(&'static str, u64)>) {
    pool.backend().inner().log.clear();
    let result = act();
    (result, pool.backend().inner().log.clone())
}

fn free(pool: &Pool<Mock>, allocation: &Allocation) {
    pool.free(allocation.block.address, Free::Strict).unwrap();
}

#[test]
fn a_large_block_is_made_of_large_chunks_and_one_tail() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (HOST, GIB)]);
    let (_, log) = calls_since(&pool, || allocate(&pool, 71 * MIB).unwrap());
    let sizes = |name: &str| log.iter().filter(|entry| entry.0 == name).map(|entry| entry.1 / MIB).collect::<Vec<_>>();
    assert_eq!(sizes("create"), [32, 32, 8]);
    assert_eq!(sizes("grant"), [72], "granted once for the whole range");
    assert_eq!(log.iter().filter(|entry| entry.0 == "headroom").count(), 1, "nobody asks the host while home suffices");
    let (_, log) = calls_since(&pool, || allocate(&pool, 5 * MIB).unwrap());
    assert_eq!(log, [("headroom", 0), ("create", 6 * MIB), ("map", 6 * MIB), ("grant", 6 * MIB)]);
}

#[test]
fn a_chunk_has_no_more_than_512_mib() {
    for (bytes, chunks) in [(512 * MIB, vec![512]), (1300 * MIB, vec![512, 512, 276]), (3 * GIB, vec![512; 6])] {
        let pool = roomy(4 * GIB);
        let (_, log) = calls_since(&pool, || allocate(&pool, bytes).unwrap());
        let made: Vec<u64> = log.iter().filter(|call| call.0 == "create").map(|call| call.1 / MIB).collect();
        assert_eq!(made, chunks);
    }
}

#[test]
fn warm_reuse_makes_no_backend_call() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    let first = allocate(&pool, 100 * MIB).unwrap();
    free(&pool, &first);
    let (second, log) = calls_since(&pool, || allocate(&pool, 100 * MIB).unwrap());
    assert_eq!((second.block.address, second.reused, log.len()), (first.block.address, true, 0));
}

#[test]
fn the_blocks_of_a_gpu_are_those_that_live_and_have_frames_of_their_own() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    let blocks: Vec<Allocation> = [8, 2, 70, 2].map(|mib| allocate(&pool, mib * MIB).unwrap()).into();
    let other = pool.allocate(&request(4 * MIB, 1)).unwrap();
    pool.allocate_small(&request(4096, 0)).unwrap();
    free(&pool, &blocks[1]);
    let mut live = [blocks[0].block, blocks[2].block, blocks[3].block];
    live.sort_by_key(|block| block.address);
    assert_eq!((pool.blocks(0), pool.blocks(1)), (live.to_vec(), vec![other.block]));
}

/// By their numbers the blocks of an image find those of the program that it comes back to.
#[test]
fn the_numbers_of_blocks_of_one_thread_rise_whatever_they_stand_on() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 8 * GIB)]);
    let mut last = 0;
    for bytes in [2 * MIB, GIB, 2 * MIB, 2 * MIB, GIB, 20 * MIB, 2 * MIB] {
        // Memory that is new, that the thread keeps, and that the pool has free.
        let [first, second] = [(); 2].map(|()| allocate(&pool, bytes).unwrap());
        free(&pool, &first);
        let third = allocate(&pool, bytes).unwrap();
        let ids = [last, first.block.id, second.block.id, third.block.id];
        assert!(ids.is_sorted_by(|one, next| one < next), "{bytes}: {ids:?}");
        last = third.block.id;
        free(&pool, &second);
        free(&pool, &third);
    }
}

#[test]
fn the_best_fit_is_taken_and_the_lowest_of_equals() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let blocks: Vec<Allocation> = [8, 2, 4, 2, 6, 2, 4, 2].map(|mib| allocate(&pool, mib * MIB).unwrap()).into();
    for index in [6, 4, 2, 0] {
        free(&pool, &blocks[index]);
    }
    let address = |mib: u64| allocate(&pool, mib * MIB).unwrap().block.address;
    assert_eq!(address(4), blocks[2].block.address);
    assert_eq!(address(4), blocks[6].block.address);
    assert_eq!(address(4), blocks[4].block.address, "no exact fit is left: the smallest that is big enough");
    assert_eq!(address(8), blocks[0].block.address);
    assert_eq!(address(2), blocks[4].block.address + 4 * MIB, "the rest of the split run");
}

#[test]
fn a_block_larger_than_any_gpu_spans_several_and_is_reused_as_a_whole() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 10 * GIB), (GPU1, 10 * GIB), (HOST, 10 * GIB)]);
    let first = allocate(&pool, 25 * GIB).unwrap();
    assert_eq!((first.on_peers, first.on_host), (10 * GIB, 5 * GIB));
    assert_block(&pool, &first);
    free(&pool, &first);
    assert_eq!(pool.usage().places.iter().map(|place| place.held / GIB).collect::<Vec<_>>(), [10, 10, 5]);
    let (second, log) = calls_since(&pool, || allocate(&pool, 25 * GIB).unwrap());
    assert!(second.reused && log.iter().all(|entry| entry.0 == "headroom"), "{log:?}");
    assert_eq!(second.block.address, first.block.address);
    free(&pool, &second);
    // A smaller one fits the same row: all of home, a part of the peer.
    let third = allocate(&pool, 15 * GIB).unwrap();
    assert_eq!((third.reused, third.on_peers, third.on_host), (true, 5 * GIB, 0));
    assert_returns_everything(&pool, &[third]);
}

#[test]
fn an_interleaved_block_is_reused_as_a_whole() {
    let pool = pool(Policy::Interleave, &[(GPU0, GIB), (GPU1, GIB)]);
    let first = allocate(&pool, GIB).unwrap();
    assert_eq!(first.on_peers, GIB / 2);
    free(&pool, &first);
    let (second, log) = calls_since(&pool, || allocate(&pool, GIB).unwrap());
    assert_eq!((second.block.address, log.len()), (first.block.address, 0));
}

#[test]
fn free_memory_in_the_way_goes_first() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB), (GPU1, 128 * MIB)]);
    let pieces: Vec<Allocation> = (0..2).map(|_| allocate(&pool, 64 * MIB).unwrap()).collect();
    free(&pool, &pieces[0]);
    // 64 MiB are free in place, but 32 at the end of the limit would have to be bridged.
    let small = allocate(&pool, 2 * MIB).unwrap();
    free(&pool, &pieces[1]);
    let large = allocate(&pool, 96 * MIB).unwrap();
    assert_eq!((large.reused, large.on_peers), (true, 0));
    free(&pool, &large);
    free(&pool, &small);
    let whole = allocate(&pool, 128 * MIB).unwrap();
    assert_eq!((whole.reused, whole.on_peers), (true, 0));
    free(&pool, &whole);

    // Two rows that cannot be joined: the memory moves to a new address.
    let rows: Vec<Allocation> = [30, 2, 30, 2, 30, 2, 32].map(|mib| allocate(&pool, mib * MIB).unwrap()).into();
    pool.trim(None, None, &[0, 1]);
    for row in &rows[..6] {
        free(&pool, row);
    }
    let keep = allocate(&pool, 2 * MIB).unwrap();
    let moved = allocate(&pool, 64 * MIB).unwrap();
    assert_eq!((moved.on_peers, moved.on_host), (0, 0), "there is room at home, in pieces");
    assert!(pool.usage().places[0].held <= 128 * MIB);
    assert_returns_everything(&pool, &[keep, moved, rows[6]]);
}

#[test]
fn free_memory_that_is_too_small_goes_before_more_is_made_and_a_loop_asks_for_none() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * GIB)]);
    let sizes = || (20..320).step_by(20).map(|mib| mib * MIB);
    for bytes in sizes() {
        let block = allocate(&pool, bytes).unwrap();
        free(&pool, &block);
        let held = pool.backend().inner().held(GPU0);
        assert!(held <= bytes + bytes / 16, "{} MiB are held for {}", held / MIB, bytes / MIB);
    }
    let ((), log) = calls_since(&pool, || {
        for bytes in sizes() {
            let block = allocate(&pool, bytes).unwrap();
            free(&pool, &block);
        }
    });
    assert_eq!(log.iter().filter(|call| call.0 != "quiesce").count(), 0, "{log:?}");
}

#[test]
fn what_is_exchanged_has_an_end() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * GIB)]);
    let mut made = 0;
    // One chunk beside a little one that stays: each round wants what the last one has cut up.
    for round in 0..200 {
        let (_, log) = calls_since(&pool, || {
            let count = 3 + round % 5;
            let blocks: Vec<Allocation> = (0..count).map(|_| allocate(&pool, 420 * MIB / count).unwrap()).collect();
            blocks.iter().rev().for_each(|block| free(&pool, block));
        });
        let bytes = |name: &str| log.iter().filter(|call| call.0 == name).map(|call| call.1).sum::<u64>();
        made += bytes("create");
    }
    assert!(made <= 420 * MIB * 10, "{} MiB were made for 420", made / MIB);
}

/// Rounds of one random mix, blocks of up to 256 MiB of which 1000 MiB live at once, beside a block that stays: MiB that were made behind the
/// first round, and held at the end beside that block.
fn made_by_warm_rounds(stays: u64) -> (u64, u64) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * GIB)]);
    let _stays = allocate(&pool, stays).unwrap();
    let mut made = 0;
    for round in 0..5 {
        let mut random = 88_172_645_463_325_252_u64;
        let mut below = |sides: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) % sides
        };
        let mut live: Vec<Allocation> = Vec::new();
        let (_, log) = calls_since(&pool, || {
            for _ in 0..500 {
                let bytes = 1 + below(256 * MIB);
                while live.iter().map(|it| it.block.bytes).sum::<u64>() + bytes > 1000 * MIB {
                    free(&pool, &live.swap_remove(below(live.len() as u64) as usize));
                }
                live.push(allocate(&pool, bytes).unwrap());
            }
            live.drain(..).for_each(|block| free(&pool, &block));
        });
        let created: u64 = log.iter().filter(|call| call.0 == "create").map(|call| call.1).sum();
        made += if round == 0 { 0 } else { created };
    }
    (made / MIB, (pool.backend().inner().held(GPU0) - stays) / MIB)
}

#[test]
fn a_loop_does_not_make_memory_again_and_again_because_much_else_is_in_use() {
    for stays in [2 * MIB, 4 * GIB] {
        let (made, held) = made_by_warm_rounds(stays);
        assert!(made <= 300 && held <= 2200, "beside {} MiB: {made} MiB were made, {held} are held", stays / MIB);
    }
}

#[test]
fn the_whole_free_memory_of_a_gpu_can_become_one_block() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB), (GPU1, 128 * MIB)]);
    let rows: Vec<Allocation> = (0..4).map(|_| allocate(&pool, 32 * MIB).unwrap()).collect();
    free(&pool, &rows[0]);
    free(&pool, &rows[2]);
    let (joined, log) = calls_since(&pool, || allocate(&pool, 64 * MIB).unwrap());
    assert_eq!((joined.reused, joined.on_peers), (true, 0));
    let called = |name: &str| log.iter().filter(|entry| entry.0 == name).count();
    assert_eq!(
        ["create", "release", "unmap", "map", "grant"].map(called),
        [0, 0, 2, 2, 1],
        "the same chunks, elsewhere"
    );
    assert_eq!(pool.usage().trimmed_bytes, 0);
    assert_returns_everything(&pool, &[rows[1], rows[3], joined]);
}

#[test]
fn a_full_gpu_makes_hardly_any_memory_for_blocks_that_its_free_memory_is_too_scattered_for() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * GIB)]);
    // Three quarters are in use, in blocks of sizes that do not divide each other, which end in another order than they came.
    let sizes = [900, 300, 700, 500, 1100, 400, 800, 600].map(|mib| mib * MIB);
    let mut live: Vec<Allocation> = Vec::new();
    let mut made = [0; 2];
    for round in 0..200 {
        let bytes = sizes[round * 5 % 8];
        while live.iter().map(|it| it.block.bytes).sum::<u64>() + bytes > 3 * GIB {
            let gone = live.remove(round * 7 % live.len());
            free(&pool, &gone);
        }
        let (block, log) = calls_since(&pool, || allocate(&pool, bytes).unwrap());
        assert_eq!((block.on_peers, block.on_host), (0, 0));
        made[round / 100] += log.iter().filter(|call| call.0 == "create").map(|call| call.1).sum::<u64>();
        live.push(block);
    }
    assert!(made[1] < GIB, "{} MiB were made for blocks of a loop that was warm", made[1] / MIB);
    assert_returns_everything(&pool, &live);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_block_holds_its_size_rounded_up_and_a_sixteenth_at_most(
        sizes in proptest::collection::vec(prop_oneof![1..8 * MIB, 1..3 * GIB], 1..24),
    ) {
        let pool = roomy(128 * GIB);
        let rounded = |bytes: u64| bytes.next_multiple_of(FRAME);
        let live: Vec<Allocation> = sizes.iter().map(|bytes| allocate(&pool, *bytes).unwrap()).collect();
        let all: u64 = sizes.iter().map(|bytes| rounded(*bytes)).sum();
        let here = pool.usage().places[0];
        prop_assert!(all <= here.used && here.held <= all + all / 16, "{here:?}");
        // The next ones stand on what these leave.
        live.iter().step_by(2).for_each(|block| free(&pool, block));
        let mut rest: Vec<Allocation> = live.into_iter().skip(1).step_by(2).collect();
        rest.extend(sizes.iter().rev().map(|bytes| allocate(&pool, *bytes).unwrap()));
        for Allocation { block, .. } in &rest {
            let stands_on: u64 = pool.pieces(block.address, u64::MAX).iter().map(|piece| piece.bytes).sum();
            prop_assert!(stands_on <= rounded(block.bytes) / 16 * 17, "{stands_on} for {}", block.bytes);
        }
        assert_returns_everything(&pool, &rest);
    }
}

/// MiB that are made for a block of so many MiB where chunks of these sizes are free, each apart from the others, and the place may hold `more`
/// beside them.
fn made_beside(more: u64, block: u64, chunks: &[u64]) -> u64 {
    const KEPT: u64 = 2;
    let sum: u64 = chunks.iter().map(|mib| mib + KEPT).sum();
    let pool = roomy((sum + more) * MIB);
    let mut kept = Vec::new();
    let mut free_ones = Vec::new();
    for mib in chunks {
        free_ones.push(allocate(&pool, mib * MIB).unwrap());
        kept.push(allocate(&pool, KEPT * MIB).unwrap());
    }
    free_ones.iter().for_each(|block| free(&pool, block));
    let (block, log) = calls_since(&pool, || allocate(&pool, block * MIB).unwrap());
    let bytes = |name: &str| log.iter().filter(|call| call.0 == name).map(|call| call.1).sum::<u64>();
    assert_eq!((block.on_peers, block.on_host), (0, 0));
    assert!(bytes("create") <= bytes("map"));
    kept.push(block);
    assert_returns_everything(&pool, &kept);
    bytes("create") / MIB
}

#[test]
fn a_full_place_maps_an_eighth_of_a_block_elsewhere_or_half_of_the_largest_chunk_and_exchanges_what_is_less() {
    assert_eq!(made_beside(0, 1024, &[128; 8]), 0);
    assert_eq!(made_beside(0, 1024, &[128, 126, 128, 126, 128, 126, 128, 126, 8]), 512);
    // Half of 512 MiB, where an eighth is as much or more.
    assert_eq!(made_beside(0, 4096, &[256; 16]), 0);
    let mixed = [[256, 254]; 8].concat().into_iter().chain([16]).collect::<Vec<_>>();
    assert_eq!(made_beside(0, 4096, &mixed), 2048);
    // No less than 32 MiB, where an eighth would be.
    assert_eq!(made_beside(0, 128, &[32, 30, 32, 30, 4]), 64);
}

#[test]
fn a_place_with_room_maps_large_spare_chunks_elsewhere_instead_of_exchanging_them() {
    // Held is to stay within a sixteenth of the most that was in use, 262 MiB and 14 MiB more.
    assert_eq!(made_beside(4096, 256, &[128; 2]), 0);
    assert_eq!(made_beside(4096, 256, &[126, 126, 4]), 256);
    assert_eq!(made_beside(4096, 4096, &[[256, 254]; 8].concat()), 2048);
}

#[test]
fn chunks_that_others_have_are_not_gathered() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB)]);
    let rows: Vec<Allocation> = (0..4).map(|_| allocate(&pool, 32 * MIB).unwrap()).collect();
    let shared = pool.pieces(rows[0].block.address, FRAME)[0].handle;
    assert!(pool.anchor(rows[0].block.address, FRAME, Anchor::Shared).is_some());
    free(&pool, &rows[0]);
    free(&pool, &rows[2]);
    let joined = allocate(&pool, 64 * MIB).unwrap();
    assert!(pool.pieces(joined.block.address, 64 * MIB).iter().all(|piece| piece.handle != shared));
    assert!(pool.backend().inner().is_gone(shared), "it is the driver's, who keeps it for those others");
    assert_returns_everything(&pool, &[rows[1], rows[3], joined]);
}

#[test]
fn what_is_left_of_a_gathered_chunk_is_free_memory_behind_the_block() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 256 * MIB)]);
    let rows: Vec<Allocation> = [64, 32, 96, 64].map(|mib| allocate(&pool, mib * MIB).unwrap()).into();
    free(&pool, &rows[0]);
    free(&pool, &rows[2]);
    let (joined, log) = calls_since(&pool, || allocate(&pool, 120 * MIB).unwrap());
    assert!(log.iter().all(|call| call.0 != "create"), "{log:?}");
    let (rest, log) = calls_since(&pool, || allocate(&pool, 8 * MIB).unwrap());
    assert_eq!((rest.block.address, log.len()), (joined.block.address + 120 * MIB, 0));
    free(&pool, &joined);
    free(&pool, &rest);
    assert_eq!(pool.usage().places[0].used, 96 * MIB);
    assert_returns_everything(&pool, &[rows[1], rows[3]]);
}

#[test]
fn moves_may_have_what_was_free_for_two_cycles_and_no_more() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 256 * MIB)]);
    let stays = allocate(&pool, 32 * MIB).unwrap();
    let turn = || {
        let some = [32, 64].map(|mib| allocate(&pool, mib * MIB).unwrap());
        some.iter().for_each(|block| free(&pool, block));
        pool.begin_cycle(GPU0);
        pool.unneeded(GPU0)
    };
    assert_eq!([turn(), turn(), turn()], [0; 3], "a loop takes it again");
    pool.begin_cycle(GPU0);
    assert_eq!(pool.unneeded(GPU0), 96 * MIB);
    // What a GPU may be at work on is nobody's, and neither is a part of a chunk.
    let half = allocate(&pool, 20 * MIB).unwrap();
    assert_eq!(pool.unneeded(GPU0), 64 * MIB);
    assert_eq!(pool.free(half.block.address, Free::Lazy), Ok(half.block));
    pool.begin_cycle(GPU0);
    pool.begin_cycle(GPU0);
    assert!(pool.unneeded(GPU0) <= 76 * MIB, "{}", pool.unneeded(GPU0) / MIB);
    assert_returns_everything(&pool, &[stays]);
}

#[test]
fn a_cache_is_told_once_before_home_overflows() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 160 * MIB), (GPU1, GIB)]);
    let ask = |mib: u64| pool.allocate(&Request { soft_refusal: true, ..request(mib * MIB, 0) });
    let at_home = ask(120).unwrap();
    assert_eq!(ask(64), Err(Refusal::Soft));
    let small = ask(2).unwrap();
    let spilled = ask(64).expect("the retry is served, whatever came in between");
    assert_eq!(spilled.on_peers, (64 - 38) * MIB);
    ask(64).expect("home is still full, and that was said");
    free(&pool, &at_home);
    ask(2).unwrap();
    assert_eq!(ask(200), Err(Refusal::Soft), "armed again since home had room");
    assert_eq!(allocate(&pool, 200 * MIB).map(|block| block.on_host), Ok(0), "others are not told");
    free(&pool, &small);
}

#[test]
fn a_cache_that_frees_when_told_is_told_again_next_time() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 160 * MIB), (GPU1, GIB)]);
    let ask = |mib: u64| pool.allocate(&Request { soft_refusal: true, ..request(mib * MIB, 0) });
    let cached = ask(120).unwrap();
    assert_eq!(ask(64), Err(Refusal::Soft));
    free(&pool, &cached);
    assert_eq!(ask(64).unwrap().on_peers, 0);
    assert_eq!(ask(128), Err(Refusal::Soft));
}

#[test]
fn a_request_away_from_home_goes_elsewhere_or_nowhere_and_leaves_home_as_it_was() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB), (GPU1, 96 * MIB), (HOST, 64 * MIB)]);
    let away = |mib: u64| pool.allocate_away(&Request { soft_refusal: true, ..request(mib * MIB, 0) });
    let at_home = allocate(&pool, 64 * MIB).unwrap();
    free(&pool, &at_home);
    let first = away(64).unwrap();
    assert_eq!((first.reused, first.on_peers, first.on_host), (false, 64 * MIB, 0), "although home keeps a fit");
    assert_block(&pool, &first);
    let second = away(64).unwrap();
    assert_eq!((second.on_peers, second.on_host), (32 * MIB, 32 * MIB));
    assert_eq!(away(64), Err(Refusal::Full { missing: 32 * MIB }));
    let (kept, log) = calls_since(&pool, || allocate(&pool, 64 * MIB).unwrap());
    assert_eq!((kept.block.address, log.len()), (at_home.block.address, 0), "nothing that is kept went back");
    free(&pool, &first);
    let again = away(64).unwrap();
    assert_eq!((again.block.address, again.reused), (first.block.address, true));
    // An overflow that was wanted is no reason to tell a cache that home overflows.
    let ask = |mib: u64| pool.allocate(&Request { soft_refusal: true, ..request(mib * MIB, 0) });
    free(&pool, &again);
    assert_eq!(ask(72), Err(Refusal::Soft));
    assert_returns_everything(&pool, &[second, kept]);
}

#[test]
fn free_memory_at_home_is_no_overflow() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB), (GPU1, GIB)]);
    let ask = |mib: u64| pool.allocate(&Request { soft_refusal: true, ..request(mib * MIB, 0) });
    let rows: Vec<Allocation> = (0..4).map(|_| ask(32).unwrap()).collect();
    free(&pool, &rows[0]);
    free(&pool, &rows[2]);
    assert_eq!(ask(64).unwrap().on_peers, 0);
}

#[test]
fn a_place_that_runs_out_unannounced_is_filled_and_left() {
    let capacity = [(GPU0, 100 * MIB), (GPU1, GIB)];
    let pool = pool_with(Policy::LocalFirst, Lenders::All, &[(GPU0, GIB), (GPU1, GIB)], &capacity);
    pool.backend().inner().blind = true;
    let first = allocate(&pool, 192 * MIB).unwrap();
    assert_eq!(first.on_peers, 96 * MIB, "three chunks fit at home");
    let (second, log) = calls_since(&pool, || allocate(&pool, 32 * MIB).unwrap());
    assert_eq!(log.iter().filter(|entry| entry.0 == "create").count(), 1, "home is not tried in vain again");
    assert_returns_everything(&pool, &[first, second]);
}

#[test]
fn a_place_that_cannot_give_is_never_asked_again() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB), (HOST, GIB)]);
    let home = allocate(&pool, 64 * MIB).unwrap();
    let calls = pool.backend().inner().calls;
    pool.backend().inner().fault = Some((calls + 1, 1, FaultKind::Unavailable));
    assert_eq!(allocate(&pool, 2 * MIB), Err(Refusal::Full { missing: 2 * MIB }));
    let (answer, log) = calls_since(&pool, || allocate(&pool, 2 * MIB));
    assert_eq!((answer, log.len()), (Err(Refusal::Full { missing: 2 * MIB }), 0));
    assert_eq!(pool.usage().places[1].limit, 0);
    assert_returns_everything(&pool, &[home]);
}

#[test]
fn a_driver_that_asks_for_patience_gets_five_repeats() {
    for (count, served) in [(5, true), (6, false)] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB)]);
        pool.backend().inner().fault = Some((3, count, FaultKind::NotReady));
        assert_eq!(allocate(&pool, 2 * MIB).is_ok(), served, "{count} times not ready at the grant");
    }
}

#[test]
fn lazily_freed_memory_waits_for_the_device_before_reuse() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB)]);
    let first = allocate(&pool, 64 * MIB).unwrap();
    pool.free(first.block.address, Free::Lazy).unwrap();
    note_busy(&pool, &first);
    pool.backend().inner().at_work.insert(0);
    let (second, log) = calls_since(&pool, || allocate(&pool, 64 * MIB).unwrap());
    assert_eq!(log, [("look", 1), ("quiesce", 1)]);
    assert_block(&pool, &second);
}

/// A block of 96 MiB that nobody is at work on, and one of so many MiB that its GPU may be, both freed; one more stands between them.
fn quiet_and_busy(mib: u64) -> (Pool<Mock>, Allocation, Allocation, Allocation) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let [quiet, between, busy] = [96, 2, mib].map(|mib| allocate(&pool, mib * MIB).unwrap());
    free(&pool, &quiet);
    pool.free(busy.block.address, Free::Lazy).unwrap();
    note_busy(&pool, &busy);
    (pool, quiet, between, busy)
}

#[test]
fn nobody_waits_for_a_gpu_at_work_on_the_best_fit_while_other_free_memory_is_quiet() {
    // Of the front, and too large for it.
    for mib in [32, 80] {
        let (pool, quiet, between, busy) = quiet_and_busy(mib);
        pool.backend().inner().held.insert(0);
        let (block, log) = calls_since(&pool, || allocate(&pool, mib * MIB).unwrap());
        assert_eq!((block.block.address, log), (quiet.block.address, vec![("look", 1)]), "{mib} MiB");
        // The best fit is what was left for it.
        pool.backend().inner().held.clear();
        let again = allocate(&pool, mib * MIB).unwrap();
        assert_eq!(again.block.address, busy.block.address, "{mib} MiB");
        assert_returns_everything(&pool, &[block, between, again]);
    }
}

#[test]
fn a_gpu_that_is_done_is_not_waited_for_and_the_best_fit_is_taken() {
    for mib in [32, 80] {
        let (pool, _, between, busy) = quiet_and_busy(mib);
        let (block, log) = calls_since(&pool, || allocate(&pool, mib * MIB).unwrap());
        assert_eq!((block.block.address, log), (busy.block.address, vec![("look", 1)]), "{mib} MiB");
        assert_returns_everything(&pool, &[block, between]);
    }
}

#[test]
fn what_was_freed_lazily_at_rest_is_waited_for_by_nobody() {
    for mib in [32, 80] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB)]);
        let block = allocate(&pool, mib * MIB).unwrap();
        pool.backend().inner().at_rest = true;
        pool.free(block.block.address, Free::Lazy).unwrap();
        pool.backend().inner().at_rest = false;
        let (again, log) = calls_since(&pool, || allocate(&pool, mib * MIB).unwrap());
        assert_eq!((again.block.address, &log[..]), (block.block.address, &[][..]), "{mib} MiB");
        assert_returns_everything(&pool, &[again]);
    }
}

#[test]
fn a_wait_for_one_context_vouches_for_its_own_block_only() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 128 * MIB)]);
    let (lazy, strict) = (allocate(&pool, 64 * MIB).unwrap(), allocate(&pool, 64 * MIB).unwrap());
    pool.backend().inner().others = true;
    pool.free(lazy.block.address, Free::Lazy).unwrap();
    note_busy(&pool, &lazy);
    let ((), log) = calls_since(&pool, || free(&pool, &strict));
    assert_eq!(log, [("quiesce owner", strict.block.owner)]);
    let (again, log) = calls_since(&pool, || allocate(&pool, 64 * MIB).unwrap());
    assert_eq!((again.block.address, log.len()), (strict.block.address, 0));
    pool.backend().inner().at_work.insert(0);
    let (_, log) = calls_since(&pool, || allocate(&pool, 64 * MIB).unwrap());
    assert_eq!(log, [("look", 1), ("quiesce", 1)], "the memory of another context's lazy free needs the whole GPU");
}

#[test]
fn a_free_inside_a_capture_is_lazy_and_trim_leaves_it() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB), (GPU1, 64 * MIB)]);
    let first = allocate(&pool, 64 * MIB).unwrap();
    pool.backend().inner().capturing = true;
    note_busy(&pool, &first);
    assert_eq!(pool.free(first.block.address, Free::Strict), Ok(first.block));
    assert_eq!(pool.trim(None, None, &[0, 1]), 0);
    let second = allocate(&pool, 64 * MIB).unwrap();
    assert_eq!((second.reused, second.on_peers), (false, 64 * MIB), "home's memory may still be in use");
    pool.backend().inner().capturing = false;
    assert_eq!(pool.trim(None, None, &[0, 1]), 64 * MIB);
    assert_returns_everything(&pool, &[second]);
}

#[test]
fn a_sticky_device_error_leaves_the_block_live() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB)]);
    let first = allocate(&pool, 2 * MIB).unwrap();
    let calls = pool.backend().inner().calls;
    pool.backend().inner().fault = Some((calls + 1, 1, FaultKind::Failed));
    assert_eq!(pool.free(first.block.address, Free::Strict), Err(FreeError::Backend(calls + 1)));
    assert_eq!(pool.block_at(first.block.address), Some(first.block));
    assert_eq!(pool.free(first.block.address, Free::Strict), Ok(first.block));
}

#[test]
fn memory_info_counts_lending_gpus_and_what_the_driver_has() {
    let limits = [(GPU0, 100 * MIB), (GPU1, 50 * MIB), (HOST, GIB)];
    let all = pool_with(Policy::LocalFirst, Lenders::All, &limits, &limits);
    assert_eq!(all.memory_info(0, |_| true), (150 * MIB, 150 * MIB));
    let block = allocate(&all, 20 * MIB).unwrap();
    all.backend().inner().external.insert(GPU1, 40 * MIB);
    assert_eq!(all.memory_info(0, |_| true), (90 * MIB, 150 * MIB));
    free(&all, &block);
    assert_eq!(all.memory_info(0, |_| true), (110 * MIB, 150 * MIB), "freed memory counts although it is still held");
    assert_eq!(all.memory_info(0, |_| false), (100 * MIB, 100 * MIB), "a GPU's own memory always counts");
    assert_eq!(all.memory_info(1, |ordinal| ordinal != 0), (10 * MIB, 50 * MIB));
    let alone = pool_with(Policy::LocalFirst, Lenders::None, &limits, &limits);
    assert_eq!(alone.memory_info(1, |_| true), (50 * MIB, 50 * MIB));
    assert_eq!(alone.memory_info(2, |_| true), (0, 0));
}

#[test]
fn what_is_not_ours_is_said_so() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    assert_eq!(allocate(&pool, 0), Err(Refusal::NotOurs));
    assert_eq!(pool.allocate(&request(1, 3)), Err(Refusal::NotOurs));
    assert_eq!(allocate(&pool, GIB + 1), Err(Refusal::Full { missing: FRAME }));
    assert_eq!(allocate(&pool, 1 << 63), Err(Refusal::Full { missing: (1 << 63) - GIB }));
    assert!(matches!(allocate(&pool, u64::MAX), Err(Refusal::Full { .. })));
    for address in [0, BASE - 1, BASE, BASE + FRAME, u64::MAX] {
        assert_eq!(pool.free(address, Free::Strict), Err(FreeError::NotABlock));
        assert_eq!((pool.block_at(address), pool.pieces(address, FRAME).len()), (None, 0));
        assert_eq!((pool.anchor(address, FRAME, Anchor::Shared), pool.release_anchor(address, FRAME)), (None, false));
    }
    assert_eq!([BASE - 1, BASE, BASE + (64 << 40)].map(|address| pool.contains(address)), [false, true, false]);
    assert_eq!(pool.backend().inner().calls, 0);
}

#[test]
fn address_space_that_runs_out_is_found_by_returning_memory() {
    let accounts = Arc::new(Accounts::new(&[PlaceSpec { place: GPU0, limit: GIB }]));
    let config = Config {
        base: BASE,
        bytes: 128 * MIB,
        accounts,
        links: Default::default(),
        policy: Policy::LocalFirst,
        largest_chunk: CHUNK,
    };
    let pool = Pool::new(config, Mock::new(&[(Place::Gpu(0), GIB)]));
    let rows: Vec<Allocation> = (0..4).map(|_| allocate(&pool, 32 * MIB).unwrap()).collect();
    assert_eq!(allocate(&pool, FRAME), Err(Refusal::AddressSpace));
    free(&pool, &rows[1]);
    free(&pool, &rows[2]);
    pool.trim(None, Some(FRAME), &[0, 1]);
    let next = allocate(&pool, 64 * MIB).expect("both halves are returned and taken again as one");
    assert_returns_everything(&pool, &[rows[0], rows[3], next]);
}

#[test]
fn blocks_of_a_dead_owner_are_freed_together() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let ask = |owner: u64| pool.allocate(&Request { owner, ..request(40 * MIB, 0) }).unwrap();
    let (first, other, last) = (ask(1), ask(2), ask(1));
    assert_eq!(pool.free_owned_by(1).len(), 2);
    assert_eq!(pool.free_owned_by(1), []);
    assert_eq!([&first, &other, &last].map(|it| pool.block_at(it.block.address).is_some()), [false, true, false]);
    assert_returns_everything(&pool, &[other]);
}

/// Bytes of every chunk that is mapped, in address order.
fn mapped(pool: &Pool<Mock>) -> Vec<u64> {
    pool.backend().inner().mapped().map(|(_, bytes, _)| bytes / MIB).collect()
}

/// What comes near leaves chunks of these sizes there, and so what goes out next is laid on them, whatever it stood on.
#[test]
fn memory_of_the_host_stands_on_powers_of_two_up_to_32_mib_and_that_of_gpus_on_large_chunks() {
    let pool = roomy_at(&[(GPU0, 300 * MIB), (GPU1, 300 * MIB), (HOST, GIB)]);
    let near = allocate(&pool, 300 * MIB).unwrap();
    let peer = allocate(&pool, 300 * MIB).unwrap();
    assert_eq!(mapped(&pool), [300, 300]);
    let host = allocate(&pool, 126 * MIB).unwrap();
    assert_eq!((host.on_peers, host.on_host), (0, 126 * MIB));
    assert_eq!(mapped(&pool)[2..], [32, 32, 32, 16, 8, 4, 2]);
    assert_returns_everything(&pool, &[near, peer, host]);
}

#[test]
fn what_nobody_used_for_some_periods_goes_and_what_is_used_stays() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let large = allocate(&pool, 320 * MIB).unwrap();
    free(&pool, &large);
    // It is one free run all the time, and each turn uses its low end.
    for period in 1..5 {
        assert_eq!(pool.begin_period(), period);
        assert_eq!(
            pool.return_unused(None, period.saturating_sub(2), u64::MAX, |_| false),
            if period == 3 { 224 * MIB } else { 0 }
        );
        let used = allocate(&pool, 80 * MIB).unwrap();
        assert_eq!((used.reused, used.block.address), (true, large.block.address));
        free(&pool, &used);
    }
    assert_eq!(mapped(&pool), [32, 32, 32]);
    let used = allocate(&pool, 80 * MIB).unwrap();
    assert_eq!(pool.return_unused(None, u32::MAX, u64::MAX, |_| false), 0, "the free part of a chunk stays");
    free(&pool, &used);
    assert_eq!(pool.return_unused(None, u32::MAX, 40 * MIB, |_| false), 64 * MIB, "until there is enough");
    assert_returns_everything(&pool, &[]);
}

#[test]
fn what_the_front_keeps_goes_like_the_rest() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let blocks: Vec<Allocation> = (0..4).map(|_| allocate(&pool, 20 * MIB).unwrap()).collect();
    blocks.iter().for_each(|block| free(&pool, block));
    let freed = pool.freed_memory();
    assert_eq!((freed.kept, freed.whole.is_empty(), freed.is_any()), (80 * MIB, true, true));
    assert_eq!(pool.return_unused(None, u32::MAX, u64::MAX, |_| false), 0, "it is at hand still");
    assert_eq!(pool.begin_period(), 1);
    let freed = pool.freed_memory();
    assert_eq!((freed.kept, freed.whole), (0, vec![(GPU0, 80 * MIB)]));
    assert_eq!(pool.return_unused(None, 1, u64::MAX, |_| false), 80 * MIB);
    assert!(!pool.freed_memory().is_any());
}

#[test]
fn what_a_gpu_may_be_at_work_on_goes_only_once_it_is_asked_and_done() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let block = allocate(&pool, 100 * MIB).unwrap();
    note_busy(&pool, &block);
    pool.free(block.block.address, Free::Lazy).unwrap();
    pool.begin_period();
    assert_eq!(pool.return_unused(None, 1, u64::MAX, |_| false), 0);
    pool.backend().inner().held.insert(0);
    assert_eq!(pool.return_unused(None, 1, u64::MAX, |_| true), 0, "it is not done");
    pool.backend().inner().held.clear();
    let (returned, log) = calls_since(&pool, || pool.return_unused(None, 1, u64::MAX, |_| true));
    assert_eq!((returned, log.iter().any(|call| call.0 == "quiesce")), (100 * MIB, false));
}

#[test]
fn the_least_that_was_in_use_is_never_told_too_high() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let least = || pool.freed_memory().least_live_bytes;
    let blocks: Vec<Allocation> = [100, 8, 8].map(|mib| allocate(&pool, mib * MIB).unwrap()).into();
    least();
    assert_eq!(least(), 116 * MIB);
    free(&pool, &blocks[0]);
    let again = allocate(&pool, 100 * MIB).unwrap();
    assert_eq!(least(), 16 * MIB, "though 116 MiB are in use again");
    assert_eq!(least(), 116 * MIB);
    // Past the pool's lock.
    free(&pool, &blocks[1]);
    let small = allocate(&pool, 8 * MIB).unwrap();
    assert_eq!((small.reused, least()), (true, 108 * MIB));
    assert_returns_everything(&pool, &[again, small, blocks[2]]);
}

#[test]
fn an_allocation_that_meets_memory_on_its_way_back_waits_for_that_and_goes_nowhere_else() {
    for soft in [false, true] {
        let pool = Arc::new(pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]));
        let first = allocate(&pool, GIB).unwrap();
        free(&pool, &first);
        pool.begin_period();
        let (send, receive) = std::sync::mpsc::channel();
        let begun = std::sync::atomic::AtomicBool::new(false);
        let other = Arc::clone(&pool);
        // As the first chunk goes, another thread asks for more than is left beside it.
        pool.backend().set_probe(move |_| {
            if begun.swap(true, std::sync::atomic::Ordering::Relaxed) {
                return;
            }
            let (other, send) = (Arc::clone(&other), send.clone());
            std::thread::spawn(move || {
                let _ = send.send(other.allocate(&Request { soft_refusal: soft, ..request(700 * MIB, 0) }));
            });
            // A wrong answer comes at once, and a right one only behind this.
            (0..20_000).for_each(|_| std::thread::yield_now());
        });
        assert_eq!(pool.return_unused(None, 1, u64::MAX, |_| false), GIB);
        let block = receive.recv().unwrap().unwrap();
        assert_eq!((block.on_peers, block.reused), (0, false));
        pool.backend().set_probe(|_| ());
        assert_returns_everything(&pool, &[block]);
    }
}

#[test]
fn who_can_ask_others_hears_what_they_have_of_its_gpu_before_it_goes_elsewhere() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB), (HOST, GIB)]);
    let ask = |bytes: u64| pool.allocate(&Request { can_ask: true, ..request(bytes, 0) });
    let others = |bytes: u64| {
        pool.backend().inner().external.insert(GPU0, bytes);
    };
    others(900 * MIB);
    assert!(ask(100 * MIB).is_ok_and(|it| it.on_peers == 0), "there is room");
    assert_eq!(ask(64 * MIB), Err(Refusal::Lacks { bytes: 40 * MIB }));
    // What the program keeps itself goes first.
    let caching = Request { soft_refusal: true, can_ask: true, ..request(64 * MIB, 0) };
    assert_eq!(pool.allocate(&caching), Err(Refusal::Soft));
    assert_eq!(pool.allocate(&caching), Err(Refusal::Lacks { bytes: 40 * MIB }), "told once");
    others(800 * MIB);
    pool.has_room_again(GPU0);
    assert!(ask(64 * MIB).is_ok_and(|it| it.on_peers == 0), "they gave it back");
    // Where nobody tells what is free, the place has run out in vain, and is trusted again.
    pool.backend().inner().blind = true;
    others(860 * MIB);
    assert!(matches!(ask(64 * MIB), Err(Refusal::Lacks { .. })));
    others(700 * MIB);
    pool.has_room_again(GPU0);
    assert!(ask(64 * MIB).is_ok_and(|it| it.on_peers == 0));
    others(0);
    // Beyond what it may hold, others have nothing to do with it.
    assert!(ask(900 * MIB).is_ok_and(|it| it.on_peers > 0), "the limit, and nobody else");
}

#[test]
fn who_can_have_more_gpus_lend_hears_what_would_lie_on_the_host() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB), (HOST, GIB)]);
    pool.accounts().lend(GPU1, false);
    pool.heed_accounts();
    let ask = |bytes, can_widen| pool.allocate(&Request { can_widen, ..request(bytes, 0) });
    // By its limit, and what others have of it.
    assert_eq!(ask(GIB + 64 * MIB, true), Err(Refusal::Far { bytes: 64 * MIB }));
    pool.backend().inner().external.insert(GPU0, 900 * MIB);
    assert_eq!(ask(200 * MIB, true), Err(Refusal::Far { bytes: 76 * MIB }));
    assert!(matches!(ask(3 * GIB, true), Err(Refusal::Far { .. })), "or nowhere");
    assert_eq!(ask(3 * GIB, false), Err(Refusal::Full { missing: GIB }));
    let far = ask(200 * MIB, false).unwrap();
    assert_eq!((far.on_peers, far.on_host), (0, 76 * MIB));
    // Freed memory of the host serves only where there is nothing nearer.
    assert!(pool.free(far.block.address, Free::Strict).is_ok());
    assert!(matches!(ask(200 * MIB, true), Err(Refusal::Far { .. })));
    pool.accounts().lend(GPU1, true);
    pool.heed_accounts();
    assert!(ask(400 * MIB, true).is_ok_and(|it| it.on_host == 0 && it.on_peers > 0));
}

#[test]
fn a_request_that_all_places_lack_room_for_says_what_others_have_of_its_gpu() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    pool.backend().inner().external.insert(GPU0, 900 * MIB);
    let ask = |can_ask| pool.allocate(&Request { can_ask, ..request(200 * MIB, 0) });
    assert_eq!(ask(true), Err(Refusal::Lacks { bytes: 76 * MIB }));
    assert_eq!(ask(false), Err(Refusal::Full { missing: 76 * MIB }));
}

/// Where a few MiB are free near, each block would have those and the rest anew from far away, and what was freed there would serve nobody.
#[test]
fn a_program_that_does_not_fit_holds_no_more_for_running_long() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 2 * MIB), (HOST, 64 * GIB)]);
    let mut random = 1_u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut live: Vec<Allocation> = Vec::new();
    let mut most = 0;
    for _ in 0..30_000 {
        if live.len() < 12 && next(2) == 0 {
            live.push(allocate(&pool, (1 + next(20)) * FRAME).unwrap());
        } else if !live.is_empty() {
            let block = live.swap_remove(next(live.len() as u64) as usize);
            free(&pool, &block);
        }
        most = most.max(live.iter().map(|block| block.block.bytes).sum::<u64>());
    }
    let held: u64 = pool.usage().places.iter().map(|place| place.held).sum();
    assert!(held <= 3 * most, "{} MiB held for {} MiB in use at most", held / MIB, most / MIB);
}
