//! Memory that changes places while the program runs.

use super::checks::{
    CHUNK, GIB, GPU0, GPU1, HOST, Lenders, MIB, allocate, assert_accounts, assert_block, assert_returns_everything,
    note_busy, pool, pool_with, request,
};
use super::mock::{FaultKind, Mock};
use crate::next_step::{Attempt, Step};
use gpupool_pool::{
    Allocation, Anchor, Backend, FRAME, Free, MoveError, Moved, Place, Policy, Pool, Rearranged, Refusal, Repacked,
    Repacks, Request, Stopped, Wish,
};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

/// The program, stopped, and quiet so many times.
pub struct Still<'a> {
    mock: &'a Mock,
    quiet: u32,
    is_for_good: bool,
}

impl<'a> Still<'a> {
    pub fn new(mock: &'a Mock, quiet: u32) -> Self {
        mock.inner().stopped = true;
        Self { mock, quiet, is_for_good: false }
    }
}

impl Stopped for Still<'_> {
    fn still_quiet(&mut self) -> bool {
        let is_quiet = self.quiet > 0;
        self.quiet = self.quiet.saturating_sub(1);
        is_quiet.then(|| self.mock.inner().all_done()).is_some()
    }

    fn is_for_a_while(&self) -> bool {
        !self.is_for_good
    }
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.mock.inner().stopped = false;
    }
}

/// Everything is full but the peer, which has 32 MiB left: four blocks at home and two on the peer, of a chunk each.
fn full(peer: u64) -> (Pool<Mock>, Vec<Allocation>) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * CHUNK), (GPU1, peer)]);
    let blocks: Vec<_> = (0..6).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    (pool, blocks)
}

pub fn fill(pool: &Pool<Mock>, allocation: &Allocation) {
    let block = allocation.block;
    for at in (0..block.bytes).step_by(FRAME as usize) {
        pool.backend().inner().write(block.address + at, block.id << 40 | at);
    }
}

pub fn assert_contents(pool: &Pool<Mock>, live: &[Allocation]) {
    for block in live.iter().map(|allocation| allocation.block) {
        for at in (0..block.bytes).step_by(FRAME as usize) {
            assert_eq!(pool.backend().inner().read(block.address + at), block.id << 40 | at, "{block:?} at {at:#x}");
        }
    }
}

/// What the program would be told of each block after it moved.
fn now(pool: &Pool<Mock>, live: &[Allocation]) -> Vec<Allocation> {
    let bytes = |block: &Allocation, is_meant: &dyn Fn(Place) -> bool| {
        let pieces = pool.pieces(block.block.address, u64::MAX);
        pieces.iter().filter(|piece| is_meant(piece.place)).map(|piece| piece.bytes).sum()
    };
    let with_places = |it: &Allocation| Allocation {
        on_peers: bytes(it, &|place| !place.is_host() && place != Place::Gpu(it.block.home)),
        on_host: bytes(it, &Place::is_host),
        ..*it
    };
    live.iter().map(with_places).collect()
}

fn assert_all(pool: &Pool<Mock>, live: &[Allocation]) {
    assert_contents(pool, live);
    let live = now(pool, live);
    assert_accounts(pool, &live);
    live.iter().for_each(|it| assert_block(pool, it));
}

fn whole(allocation: &Allocation, to: Place) -> Wish {
    Wish { address: allocation.block.address, bytes: allocation.block.bytes, to }
}

/// Two blocks go out and the two on the peer come in.
fn swap(blocks: &[Allocation], out: [usize; 2], inside: [usize; 2]) -> Vec<Wish> {
    let out = out.map(|index| whole(&blocks[index], GPU1));
    out.into_iter().chain(inside.map(|index| whole(&blocks[index], GPU0))).collect()
}

fn rearrange(pool: &Pool<Mock>, wishes: &[Wish]) -> Result<Rearranged<u64>, MoveError<u64>> {
    pool.rearrange(wishes, || Some(Still::new(pool.backend(), u32::MAX)))
}

fn calls(pool: &Pool<Mock>, name: &str) -> usize {
    pool.backend().inner().log.iter().filter(|call| call.0 == name).count()
}

fn places(pool: &Pool<Mock>, live: &[Allocation]) -> Vec<Place> {
    live.iter().map(|it| pool.pieces(it.block.address, 1)[0].place).collect()
}

#[test]
fn what_goes_out_of_a_full_place_makes_room_for_what_comes_in_with_one_spare_chunk() {
    let (pool, blocks) = full(8 * CHUNK);
    pool.backend().inner().log.clear();
    let all = |bytes: u64| Moved { moved: bytes, ..Moved::default() };
    let answer = rearrange(&pool, &swap(&blocks, [0, 1], [4, 5])).unwrap();
    assert_eq!(answer, Rearranged { wishes: vec![all(CHUNK); 4], cut_short: None, as_it_came: 0 });
    assert_eq!(places(&pool, &blocks), [GPU1, GPU1, GPU0, GPU0, GPU0, GPU0]);
    assert_eq!(calls(&pool, "create"), 1);
    assert_all(&pool, &blocks);
    // The spare one serves the next move, and so does every second mapping.
    pool.backend().inner().log.clear();
    rearrange(&pool, &swap(&blocks, [4, 5], [0, 1])).unwrap();
    assert_eq!(places(&pool, &blocks), [GPU0, GPU0, GPU0, GPU0, GPU1, GPU1]);
    assert_eq!(["create", "alias", "release", "drop alias"].map(|name| calls(&pool, name)), [0; 4]);
    assert_all(&pool, &blocks);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

/// Bytes that were copied since the log was cleared.
fn copied(pool: &Pool<Mock>) -> u64 {
    pool.backend().inner().log.iter().filter(|call| call.0 == "copy").map(|call| call.1).sum()
}

/// Of two blocks at home and one on the peer, the last comes in for the first and goes again.
fn there_and_back(pool: &Pool<Mock>, blocks: &[Allocation]) {
    rearrange(pool, &[whole(&blocks[0], GPU1), whole(&blocks[2], GPU0)]).unwrap();
    pool.backend().inner().log.clear();
}

fn two_and_one() -> (Pool<Mock>, Vec<Allocation>) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 2 * CHUNK), (GPU1, 16 * CHUNK)]);
    let blocks: Vec<_> = (0..3).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    (pool, blocks)
}

#[test]
fn what_leaves_as_it_came_is_not_copied() {
    let (pool, blocks) = two_and_one();
    there_and_back(&pool, &blocks);
    // The third goes back, and the first comes.
    let back = [whole(&blocks[2], GPU1), whole(&blocks[0], GPU0)];
    let done = rearrange(&pool, &back).unwrap();
    assert_eq!((copied(&pool), done.as_it_came), (CHUNK, CHUNK), "one way alone");
    assert_eq!(places(&pool, &blocks), [GPU0, GPU0, GPU1]);
    assert_all(&pool, &blocks);
    // Again and again, each of them.
    for _ in 0..3 {
        there_and_back(&pool, &blocks);
        rearrange(&pool, &back).unwrap();
        assert_eq!(copied(&pool), CHUNK);
        assert_all(&pool, &blocks);
    }
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn what_leaves_other_than_it_came_is_copied_and_not_looked_at_again_soon() {
    let (pool, blocks) = two_and_one();
    there_and_back(&pool, &blocks);
    let block = blocks[2].block;
    // One word of its last frame.
    let last = block.address + block.bytes - FRAME;
    pool.backend().inner().write(last, 5);
    let back = [whole(&blocks[2], GPU1), whole(&blocks[0], GPU0)];
    rearrange(&pool, &back).unwrap();
    assert_eq!((copied(&pool), pool.backend().inner().read(last)), (2 * CHUNK, 5));
    fill(&pool, &blocks[2]);
    assert_all(&pool, &blocks);
    there_and_back(&pool, &blocks);
    rearrange(&pool, &back).unwrap();
    assert_eq!((copied(&pool), calls(&pool, "digest")), (2 * CHUNK, 1), "the first block's alone");
    // What changes in one phase of a program may last in the next.
    pool.begin_period();
    pool.begin_period();
    there_and_back(&pool, &blocks);
    rearrange(&pool, &back).unwrap();
    assert_eq!(copied(&pool), CHUNK);
    assert_all(&pool, &blocks);
}

#[test]
fn what_came_last_and_leaves_next_is_not_copied_with_a_few_chunks_more() {
    // Products of neighbours in a rotation of twelve: what leaves is what was used last, and came two products before. The peer has room for
    // forty chunks beside what lies there, of which moves may keep four, or for one.
    for (room, most) in [(40, 3), (1, 4)] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 8 * CHUNK), (GPU1, (4 + room) * CHUNK)]);
        let blocks: Vec<_> = (0..12).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
        blocks.iter().for_each(|it| fill(&pool, it));
        pool.backend().inner().log.clear();
        let mut swaps = 0;
        for product in 0..12 * 8 {
            let [leaves, used, comes] = [product + 11, product, product + 1].map(|block| &blocks[block % 12]);
            assert_eq!(places(&pool, &[*used]), [GPU0]);
            if places(&pool, &[*comes]) != [GPU0] {
                rearrange(&pool, &[whole(leaves, GPU1), whole(comes, GPU0)]).unwrap();
                swaps += 1;
            }
        }
        // All that comes is copied, and of what leaves all but the first two of a round.
        let copies = copied(&pool) / CHUNK;
        assert!(copies * 2 <= swaps * most, "{copies} copies in {swaps} swaps with room for {room}");
        assert!(room > 1 || copies == 2 * swaps, "{copies} copies in {swaps} swaps");
        assert!(pool.usage().places[1].held <= 9 * CHUNK, "{:?}", pool.usage());
        assert_all(&pool, &blocks);
        assert_returns_everything(&pool, &now(&pool, &blocks));
    }
}

#[test]
fn what_is_kept_for_its_contents_is_free_memory_to_everybody_else() {
    let (pool, blocks) = two_and_one();
    there_and_back(&pool, &blocks);
    let held = |pool: &Pool<Mock>| pool.usage().places[1].held;
    assert_eq!((held(&pool), pool.usage().places[1].used), (2 * CHUNK, CHUNK));
    assert_eq!(pool.trim(Some(GPU1), None, &[0]), CHUNK);
    assert_eq!(held(&pool), CHUNK);
    rearrange(&pool, &[whole(&blocks[2], GPU1), whole(&blocks[0], GPU0)]).unwrap();
    assert_all(&pool, &blocks);
}

#[test]
fn the_host_gets_and_gives_at_once() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 5 * CHUNK), (HOST, 16 * CHUNK)]);
    let near: Vec<_> = (0..4).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    let keeper = allocate(&pool, CHUNK).unwrap();
    let far: Vec<_> = (0..4).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    pool.free(keeper.block.address, Free::Strict).unwrap();
    assert_eq!(pool.trim(None, None, &[0]), CHUNK);
    let blocks: Vec<_> = near.iter().chain(&far).copied().collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    let out = near.iter().map(|it| whole(it, HOST));
    let wishes: Vec<_> = out.chain(far.iter().map(|it| whole(it, GPU0))).collect();
    pool.backend().inner().log.clear();
    rearrange(&pool, &wishes).unwrap();
    let copied: Vec<_> = pool.backend().inner().log.iter().filter(|it| it.0 == "copy").map(|it| it.1).collect();
    assert_eq!(copied, [2 * CHUNK; 4], "one in and one out each time");
    assert_eq!(calls(&pool, "create"), 2, "a spare chunk for each direction");
    assert_all(&pool, &blocks);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn what_stands_one_behind_the_other_is_mapped_and_granted_as_one_where_it_goes_together() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * CHUNK), (GPU1, 4 * CHUNK)]);
    let blocks: Vec<_> = (0..4).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    for to in [GPU1, GPU0] {
        pool.backend().inner().log.clear();
        rearrange(&pool, &blocks.iter().map(|it| whole(it, to)).collect::<Vec<_>>()).unwrap();
        assert_eq!(["map", "unmap", "grant"].map(|name| calls(&pool, name)), [4, 1, 1]);
        assert_all(&pool, &blocks);
    }
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn what_cannot_be_stopped_has_changed_nothing_and_costs_less_the_next_time() {
    let (pool, blocks) = full(8 * CHUNK);
    let wishes = swap(&blocks, [0, 1], [4, 5]);
    let handles = || -> Vec<_> { blocks.iter().map(|it| pool.pieces(it.block.address, 1)[0].handle).collect() };
    let before = (handles(), pool.usage().places.iter().map(|it| it.used).collect::<Vec<_>>());
    assert_eq!(pool.rearrange(&wishes, || None::<Still>), Err(MoveError::NotNow));
    assert_eq!(pool.rearrange(&wishes, || Some(Still::new(pool.backend(), 0))), Err(MoveError::NotQuiet));
    assert_eq!(before, (handles(), pool.usage().places.iter().map(|it| it.used).collect()));
    assert_eq!(calls(&pool, "unmap"), 0);
    assert_all(&pool, &blocks);
    pool.backend().inner().log.clear();
    rearrange(&pool, &wishes).unwrap();
    assert_eq!(["create", "alias"].map(|name| calls(&pool, name)), [0; 2]);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn work_that_is_seen_between_two_steps_ends_the_move_where_everything_is_in_its_place() {
    for quiet in 1..4 {
        let (pool, blocks) = full(8 * CHUNK);
        let stop = || Some(Still::new(pool.backend(), quiet));
        let answer = pool.rearrange(&swap(&blocks, [0, 1], [4, 5]), stop).unwrap();
        assert_eq!(answer.cut_short, Some(MoveError::NotQuiet));
        let moved: u64 = answer.wishes.iter().map(|it| it.moved).sum();
        assert_eq!(moved, u64::from(quiet) * CHUNK, "one chunk each time");
        assert_all(&pool, &blocks);
        assert_returns_everything(&pool, &now(&pool, &blocks));
    }
}

#[test]
fn chunks_that_cannot_take_each_other_s_place_are_refused_before_anything_is_stopped() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, CHUNK), (GPU1, 2 * CHUNK)]);
    let blocks = [CHUNK, 30 * MIB].map(|bytes| allocate(&pool, bytes).unwrap());
    blocks.iter().for_each(|it| fill(&pool, it));
    let wishes = [whole(&blocks[0], GPU1), whole(&blocks[1], GPU0)];
    let answer = pool.rearrange(&wishes, || -> Option<Still> { panic!("it cannot be done") });
    assert_eq!(answer, Err(MoveError::Full { place: GPU0, missing: 30 * MIB }));
    // One after the other they can.
    rearrange(&pool, &wishes[..1]).unwrap();
    rearrange(&pool, &wishes[1..]).unwrap();
    assert_eq!(places(&pool, &blocks), [GPU1, GPU0]);
    assert_all(&pool, &blocks);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

/// A chunk at home that moves have left there, and blocks: the first half of the GPU is free for the driver.
fn with_stock() -> (Pool<Mock>, Vec<Allocation>) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 8 * CHUNK), (GPU1, 8 * CHUNK)]);
    let blocks = [0, 1].map(|_| allocate(&pool, CHUNK).unwrap());
    blocks.iter().for_each(|it| fill(&pool, it));
    rearrange(&pool, &[whole(&blocks[1], GPU1)]).unwrap();
    // In and out: one of the two places gets a spare chunk for it, and keeps it, for nobody's contents.
    let stop = || {
        let mut still = Still::new(pool.backend(), u32::MAX);
        still.is_for_good = true;
        Some(still)
    };
    pool.rearrange(&[whole(&blocks[0], GPU1), whole(&blocks[1], GPU0)], stop).unwrap();
    assert_eq!(pool.backend().inner().stock().iter().map(|row| row.1).sum::<u64>(), CHUNK);
    (pool, blocks.to_vec())
}

#[test]
fn what_moves_left_is_free_memory_to_everybody_else() {
    let (pool, blocks) = with_stock();
    let place = pool.backend().inner().stock()[0].2;
    let usage = pool.usage().places.into_iter().find(|it| it.place == place).unwrap();
    assert_eq!((usage.held, usage.used), (2 * CHUNK, CHUNK));
    let freed = pool.freed_memory();
    assert!(freed.is_any() && freed.whole == [(place, CHUNK)], "{freed:?}");
    assert_eq!(pool.memory_info(0, |_| true), (14 * CHUNK, 16 * CHUNK));
    assert_eq!(pool.trim(Some(place), Some(1), &[]), CHUNK);
    assert_eq!(pool.freed_memory().whole, []);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn what_moves_left_goes_before_a_block_goes_elsewhere_or_is_refused() {
    let (pool, mut blocks) = with_stock();
    for (index, bytes) in [7 * CHUNK, 7 * CHUNK].into_iter().enumerate() {
        let block = allocate(&pool, bytes).unwrap();
        assert_eq!(block.on_peers, if index == 0 { 0 } else { bytes }, "there is room at home for the first");
        fill(&pool, &block);
        blocks.push(block);
    }
    assert_eq!(pool.backend().inner().stock(), []);
    assert_eq!(allocate(&pool, 1), Err(Refusal::Full { missing: FRAME }));
    assert_all(&pool, &blocks);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn what_no_move_used_for_some_periods_goes_home() {
    let (pool, blocks) = with_stock();
    let since = pool.begin_period();
    assert_eq!(pool.return_unused(None, since - 1, u64::MAX, |_| true), 0);
    assert_eq!(pool.return_unused(None, since, u64::MAX, |_| true), CHUNK);
    assert_eq!(pool.backend().inner().stock(), []);
    // Nothing is kept any more where no move was for so long.
    pool.begin_period();
    pool.begin_period();
    rearrange(&pool, &[whole(&blocks[0], GPU0)]).unwrap();
    assert_eq!(pool.backend().inner().stock(), []);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn no_place_keeps_more_than_a_part_of_what_it_may_hold() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    let blocks: Vec<_> = (0..3).map(|_| allocate(&pool, 4 * CHUNK).unwrap()).collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    let to = |place: Place| -> Vec<Wish> { blocks.iter().map(|it| whole(it, place)).collect() };
    rearrange(&pool, &to(GPU1)).unwrap();
    rearrange(&pool, &to(GPU0)).unwrap();
    let stock: Vec<_> = pool.backend().inner().stock();
    assert_eq!(stock.iter().map(|row| (row.1, row.2)).collect::<Vec<_>>(), [(CHUNK, GPU1); 4], "12 chunks were there");
    assert_all(&pool, &blocks);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn a_gpu_that_came_later_copies_through_mappings_that_were_there_before() {
    let (pool, mut blocks) = with_stock();
    {
        let mut inner = pool.backend().inner();
        inner.readers += 1;
        let readers = inner.readers;
        inner.arrived.insert(1, readers);
    }
    pool.grant_again().unwrap();
    let (_, _, place) = pool.backend().inner().stock()[0];
    let Place::Gpu(stocked) = place else { panic!("no GPU") };
    // On the other GPU, so that it goes where the chunk of the stock is.
    let later = pool.allocate(&request(CHUNK, 1)).unwrap();
    fill(&pool, &later);
    blocks.push(later);
    if stocked == 1 {
        rearrange(&pool, &[whole(&later, GPU0)]).unwrap();
    }
    pool.backend().inner().log.clear();
    rearrange(&pool, &[whole(&later, place)]).unwrap();
    assert_eq!(calls(&pool, "create"), 0, "the copy was to a chunk of the stock");
    assert_all(&pool, &blocks);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn several_blocks_on_one_chunk_move_together_and_what_is_anchored_stays() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 8 * CHUNK), (GPU1, 8 * CHUNK)]);
    let ground = allocate(&pool, CHUNK).unwrap();
    pool.free(ground.block.address, Free::Strict).unwrap();
    let blocks: Vec<_> = [8, 16, 8].map(|mib| allocate(&pool, mib * MIB).unwrap()).to_vec();
    blocks.iter().for_each(|it| fill(&pool, it));
    let wishes: Vec<_> = blocks.iter().map(|it| whole(it, GPU1)).collect();
    let answer = rearrange(&pool, &wishes[..2]).unwrap();
    assert_eq!(answer.wishes.iter().map(|it| it.shared / MIB).collect::<Vec<_>>(), [8, 16], "the third is on it, too");
    // The one in the middle may stay, on other memory.
    rearrange(&pool, &[wishes[0], Wish { to: GPU0, ..wishes[1] }, wishes[2]]).unwrap();
    assert_eq!(places(&pool, &blocks), [GPU1, GPU0, GPU1]);
    assert_all(&pool, &blocks);
    pool.anchor(blocks[1].block.address, 1, Anchor::Shared).unwrap();
    let answer = rearrange(&pool, &wishes[1..2]).unwrap();
    assert_eq!(answer.wishes[0].anchored, 16 * MIB);
    assert_returns_everything(&pool, &now(&pool, &blocks));
}

#[test]
fn a_block_that_ends_while_it_is_prepared_leaves_its_memory_where_it_went() {
    let (pool, blocks) = full(8 * CHUNK);
    let wishes = swap(&blocks, [0, 1], [4, 5]);
    let ended = blocks[0];
    pool.rearrange(&wishes, || {
        note_busy(&pool, &ended);
        assert_eq!(pool.free(ended.block.address, Free::Lazy), Ok(ended.block));
        Some(Still::new(pool.backend(), u32::MAX))
    })
    .unwrap();
    assert_all(&pool, &blocks[1..]);
    assert_eq!(pool.backend().inner().mapped_around(ended.block.address).map(|row| row.2), Some(GPU1));
    assert_returns_everything(&pool, &now(&pool, &blocks[1..]));
}

/// Moves in and out while calls fail: whatever does, each block has its bytes.
fn swap_with_faults(
    first: u64,
    length: u64,
    second: Option<u64>,
    kind: FaultKind,
) -> (Pool<Mock>, Vec<Allocation>, u64) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 2 * CHUNK + 40 * MIB), (GPU1, 4 * CHUNK), (HOST, 8 * CHUNK)]);
    let sizes = [CHUNK, 6 * MIB, CHUNK, CHUNK, 6 * MIB, 50 * MIB];
    let blocks: Vec<_> = sizes.iter().map(|bytes| allocate(&pool, *bytes).unwrap()).collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    let begun = pool.backend().inner().calls;
    pool.backend().inner().fault = Some((begun + first, length, kind));
    pool.backend().inner().second = second.map(|second| (begun + first + second, length, kind));
    let wishes = [whole(&blocks[0], GPU1), whole(&blocks[1], HOST), whole(&blocks[3], GPU0), whole(&blocks[5], HOST)];
    for wishes in [&wishes[..], &[whole(&blocks[0], GPU0), whole(&blocks[3], GPU1), whole(&blocks[5], GPU0)]] {
        match rearrange(&pool, wishes) {
            Ok(Rearranged { cut_short: None | Some(MoveError::Backend(_)), .. }) => {}
            Err(MoveError::Backend(_) | MoveError::Full { .. }) => {}
            answer => panic!("{answer:?}"),
        }
        assert!(!pool.backend().inner().stopped, "the program goes on");
    }
    let calls = pool.backend().inner().calls - begun;
    (pool, blocks, calls)
}

const KINDS: [FaultKind; 4] = [FaultKind::OutOfMemory, FaultKind::Unavailable, FaultKind::NotReady, FaultKind::Failed];

#[test]
fn whatever_fails_each_block_has_its_bytes() {
    for kind in KINDS {
        for length in [1, 6, 12, 40] {
            for first in 1.. {
                let (pool, blocks, calls) = swap_with_faults(first, length, None, kind);
                assert_all(&pool, &blocks);
                assert_returns_everything(&pool, &now(&pool, &blocks));
                if calls < first {
                    assert!(first > 30, "the moves make no calls to fail");
                    break;
                }
            }
        }
    }
}

#[test]
fn after_two_failures_in_a_row_each_block_has_its_bytes() {
    // The repeats of one call are used up, and then, a few calls later, those of another: forward and back.
    for first in 1.. {
        let mut most = 0;
        for second in 7..18 {
            let (pool, blocks, calls) = swap_with_faults(first, 6, Some(second), FaultKind::Failed);
            assert_all(&pool, &blocks);
            assert_returns_everything(&pool, &now(&pool, &blocks));
            most = calls.max(most);
        }
        if most < first {
            assert!(first > 30, "the moves make no calls to fail");
            break;
        }
    }
}

#[test]
fn what_is_freed_of_a_large_chunk_goes_home_though_the_rest_is_in_use() {
    for (room, freed) in [(4, 0), (6, 46), (12, 46)] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 2 * CHUNK + room * MIB), (GPU1, 2 * CHUNK)]);
        let grounds = [0, 1].map(|_| allocate(&pool, CHUNK).unwrap());
        grounds.iter().for_each(|it| drop(pool.free(it.block.address, Free::Strict)));
        let blocks: Vec<_> = [8, 20, 4, 6, 26].map(|mib| allocate(&pool, mib * MIB).unwrap()).to_vec();
        blocks.iter().for_each(|it| fill(&pool, it));
        for gone in [1, 4] {
            pool.free(blocks[gone].block.address, Free::Strict).unwrap();
        }
        let live = [blocks[0], blocks[2], blocks[3]];
        assert_eq!(pool.trim(None, None, &[0]), 0, "a part of a chunk cannot go");
        // What the chunk with less in use gives back is room for the rest of the other.
        let stop = || Some(Still::new(pool.backend(), u32::MAX));
        let answer = pool.repack(GPU0, u64::MAX, |_| false, |_, _| false, stop).unwrap();
        assert_eq!((answer.freed, answer.away), (freed * MIB, vec![]));
        let held = pool.usage().places[0].held;
        assert_eq!(held, 2 * CHUNK - freed * MIB, "what nobody uses is the driver's");
        assert_all(&pool, &live);
        let stop = || -> Option<Still> { panic!("there is nothing left to do") };
        assert_eq!(pool.repack(GPU1, u64::MAX, |_| true, |_, _| false, stop), Ok(Repacked::default()));
        assert_returns_everything(&pool, &now(&pool, &live));
    }
}

/// Four chunks at home, which is full of them: of the first two every other 4 MiB are in use.
fn half_used(peer: u64) -> (Pool<Mock>, Vec<Allocation>) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * CHUNK), (GPU1, peer)]);
    let grounds = [0; 4].map(|_| allocate(&pool, CHUNK).unwrap());
    grounds[..2].iter().for_each(|it| drop(pool.free(it.block.address, Free::Strict)));
    let small: Vec<_> = (0..16).map(|_| allocate(&pool, 4 * MIB).unwrap()).collect();
    let (gone, stay): (Vec<_>, Vec<_>) = small.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
    gone.iter().for_each(|(_, it)| drop(pool.free(it.block.address, Free::Strict)));
    let live: Vec<_> = stay.into_iter().map(|(_, it)| it).chain(grounds[2..].iter().copied()).collect();
    live.iter().for_each(|it| fill(&pool, it));
    (pool, live)
}

fn for_repackers(pool: &Pool<Mock>, bytes: u64) -> Result<Allocation, Refusal<u64>> {
    pool.allocate(&Request { repacks: Repacks::ToStay, can_ask: false, can_widen: false, ..request(bytes, 0) })
}

#[test]
fn a_block_that_would_go_elsewhere_is_served_at_home_once_chunks_are_cut_anew() {
    let (pool, mut live) = half_used(4 * CHUNK);
    // Holes of 4 MiB, 32 in all.
    assert!(
        for_repackers(&pool, 4 * MIB)
            .is_ok_and(|it| it.on_peers == 0 && pool.free(it.block.address, Free::Strict).is_ok())
    );
    let refusal = for_repackers(&pool, 24 * MIB);
    assert_eq!(refusal, Err(Refusal::HalfUsed { place: GPU0, bytes: 24 * MIB }));
    // Who cannot stop the program gets what there is, and who stops it only for what would be refused.
    for repacks in [Repacks::Never, Repacks::ToFit] {
        let far =
            pool.allocate(&Request { repacks, can_ask: false, can_widen: false, ..request(24 * MIB, 0) }).unwrap();
        assert_eq!(far.on_peers, 24 * MIB);
        pool.free(far.block.address, Free::Strict).unwrap();
    }
    // Home is full, so what is in use goes over the peer.
    let stop = || Some(Still::new(pool.backend(), u32::MAX));
    assert_eq!(pool.repack(GPU0, 24 * MIB, |_| false, |_, _| false, stop), Ok(Repacked::default()), "there is no way");
    let stays = |address: u64, bytes: u64| (address..address + bytes).contains(&live[0].block.address);
    let stop_once = || Some(Still::new(pool.backend(), u32::MAX));
    let first = pool.repack(GPU0, 1, |_| true, stays, stop_once).unwrap();
    assert!(first.freed == 16 * MIB && pool.pieces(live[0].block.address, 1)[0].chunk_bytes == CHUNK, "it stays");
    let repacked = pool.repack(GPU0, 16 * MIB, |place| place == GPU1, |_, _| false, stop).unwrap();
    assert_eq!(repacked, Repacked { freed: 16 * MIB, copied: 16 * MIB, ..Repacked::default() });
    assert_all(&pool, &live);
    assert_eq!(places(&pool, &live), vec![GPU0; 10]);
    let near = for_repackers(&pool, 24 * MIB).unwrap();
    assert_eq!((near.on_peers, near.on_host), (0, 0));
    fill(&pool, &near);
    live.push(near);
    assert_all(&pool, &live);
    assert_returns_everything(&pool, &live);
}

#[test]
fn a_block_that_would_be_refused_is_served_once_chunks_are_cut_anew() {
    // Room for what is in use on one chunk, and no other place.
    let pool = pool(Policy::LocalFirst, &[(GPU0, 2 * CHUNK + 8 * MIB)]);
    let grounds = [0; 2].map(|_| allocate(&pool, CHUNK).unwrap());
    pool.free(grounds[0].block.address, Free::Strict).unwrap();
    let small = [8, 16, 8].map(|mib| allocate(&pool, mib * MIB).unwrap());
    [0, 1].iter().for_each(|&index| drop(pool.free(small[index].block.address, Free::Strict)));
    let live = [grounds[1], small[2]];
    live.iter().for_each(|it| fill(&pool, it));
    assert_eq!(allocate(&pool, 30 * MIB), Err(Refusal::Full { missing: 22 * MIB }));
    let too_much = for_repackers(&pool, 34 * MIB);
    assert!(matches!(too_much, Err(Refusal::Full { .. })), "more than there is: {too_much:?}");
    let lacking = Err(Refusal::HalfUsed { place: GPU0, bytes: 22 * MIB });
    assert_eq!(for_repackers(&pool, 30 * MIB), lacking);
    let to_fit = Request { repacks: Repacks::ToFit, can_ask: false, can_widen: false, ..request(30 * MIB, 0) };
    assert_eq!(pool.allocate(&to_fit), lacking);
    let stop = || Some(Still::new(pool.backend(), u32::MAX));
    assert_eq!(pool.repack(GPU0, 22 * MIB, |_| true, |_, _| false, stop).map(|it| it.freed), Ok(24 * MIB));
    let near = for_repackers(&pool, 30 * MIB).unwrap();
    fill(&pool, &near);
    assert_all(&pool, &[live[0], live[1], near]);
}

#[test]
fn what_is_slow_to_stop_is_left_elsewhere_and_said() {
    for stops in 0..5 {
        let (pool, live) = half_used(4 * CHUNK);
        let mut left = stops;
        let stop = || {
            left -= 1;
            (left >= 0).then(|| Still::new(pool.backend(), u32::MAX))
        };
        let answer = pool.repack(GPU0, 1, |_| true, |_, _| false, stop);
        match stops {
            0 => assert_eq!(answer, Err(MoveError::NotNow)),
            1 => {
                let repacked = answer.unwrap();
                assert_eq!((repacked.freed, repacked.away.len()), (16 * MIB, 4));
                let far = live.iter().filter(|it| pool.pieces(it.block.address, 1)[0].place == GPU1);
                assert!(far.map(|it| it.block.address).eq(repacked.away.iter().map(|it| it.0)));
            }
            _ => assert_eq!(answer.map(|it| it.away), Ok(vec![])),
        }
        assert_all(&pool, &live);
        assert_returns_everything(&pool, &now(&pool, &live));
    }
}

#[test]
fn chunks_that_others_know_by_their_pages_are_not_cut_and_promise_nothing() {
    let (pool, live) = half_used(4 * CHUNK);
    let reasons = [Anchor::Shared, Anchor::Asked];
    for (block, why) in [live[0], live[4]].iter().zip(reasons) {
        pool.anchor(block.block.address, block.block.bytes, why).unwrap();
    }
    let answer = for_repackers(&pool, 24 * MIB).unwrap();
    assert_eq!(answer.on_peers, 24 * MIB);
    pool.free(answer.block.address, Free::Strict).unwrap();
    let stop = || -> Option<Still> { panic!("there is nothing to do") };
    assert_eq!(pool.repack(GPU0, 1, |_| true, |_, _| false, stop), Ok(Repacked::default()));
    assert!(pool.release_anchor(live[4].block.address, live[4].block.bytes));
    let answer = for_repackers(&pool, 16 * MIB);
    assert_eq!(answer, Err(Refusal::HalfUsed { place: GPU0, bytes: 16 * MIB }), "the second chunk has as much");
}

#[test]
fn whatever_fails_while_chunks_are_cut_each_block_has_its_bytes() {
    for kind in KINDS {
        for length in [1, 6, 12, 40] {
            for first in 1.. {
                let (pool, live) = half_used(4 * CHUNK);
                let begun = pool.backend().inner().calls;
                pool.backend().inner().fault = Some((begun + first, length, kind));
                let stop = || Some(Still::new(pool.backend(), u32::MAX));
                match pool.repack(GPU0, u64::MAX, |_| true, |_, _| false, stop) {
                    Ok(_) | Err(MoveError::Backend(_) | MoveError::Full { .. }) => {}
                    answer => panic!("{answer:?}"),
                }
                assert!(!pool.backend().inner().stopped, "the program goes on");
                let calls = pool.backend().inner().calls - begun;
                assert_all(&pool, &live);
                assert_returns_everything(&pool, &now(&pool, &live));
                if calls < first {
                    assert!(first > 30, "cutting makes no calls to fail");
                    break;
                }
            }
        }
    }
}

/// The next step of a request at GPU 0, asked in the course of another thread's move.
fn step(pool: &Pool<Mock>, bytes: u64) -> Step<u64, u64> {
    let request = request(bytes, 0);
    let mut attempt = Attempt::new(&request, &pool.routes[0], false);
    loop {
        match pool.lock_all().next_step(&mut attempt, &pool.registry) {
            Step::Ask(place) => attempt.headrooms.push(pool.backend().headroom(place)),
            Step::Look(gpus) => gpus.into_iter().for_each(|gpu| pool.look(gpu)),
            Step::Quiesce => attempt.only_quiesced = true,
            Step::Trim => attempt.trimmed = true,
            step => return step,
        }
    }
}

/// Has `see` look at the pool at the start of this call, the first of its kind from now on.
fn look_at(
    pool: &Arc<Pool<Mock>>,
    call: &'static str,
    see: impl Fn(&Pool<Mock>) + Send + Sync + 'static,
) -> Arc<AtomicBool> {
    let (weak, was_seen) = (Arc::downgrade(pool), Arc::new(AtomicBool::new(false)));
    let seen = Arc::clone(&was_seen);
    pool.backend().set_probe(move |name| {
        if name == call && !seen.swap(true, Ordering::SeqCst) {
            see(&weak.upgrade().unwrap());
        }
    });
    was_seen
}

/// A block that ends while a move holds it is memory in a moment, before the move has begun and when it is in the books already.
#[test]
fn what_a_move_holds_of_blocks_that_ended_is_waited_for() {
    for call in ["headroom", "grant"] {
        let pool = Arc::new(pool_with(
            Policy::LocalFirst,
            Lenders::All,
            &[(GPU0, 3 * CHUNK), (GPU1, 2 * CHUNK)],
            &[(GPU0, 2 * CHUNK), (GPU1, 2 * CHUNK)],
        ));
        let blocks: Vec<_> = (0..3).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
        blocks.iter().for_each(|it| fill(&pool, it));
        let ended = blocks[0].block.address;
        let (seen, answer) = match call {
            "headroom" => {
                // Half a chunk, which cannot go back to the driver as it is.
                pool.free(ended, Free::Strict).unwrap();
                let halves = [0; 3].map(|_| allocate(&pool, CHUNK / 2).unwrap().block.address);
                allocate(&pool, CHUNK / 2).unwrap();
                let seen = look_at(&pool, call, move |pool| {
                    pool.free(halves[0], Free::Strict).unwrap();
                    assert!(matches!(step(pool, CHUNK / 2), Step::Settle), "it was refused");
                });
                // Another one is on that chunk, and would have to stay.
                let wish = |index: usize, to: Place| Wish { address: halves[index], bytes: CHUNK / 2, to };
                (seen, rearrange(&pool, &[wish(0, GPU1), wish(1, GPU0)]).err())
            }
            _ => {
                let seen = Arc::new(AtomicBool::new(false));
                let again = Arc::clone(&seen);
                let stop = || {
                    pool.free(ended, Free::Strict).unwrap();
                    // Somebody is added, so that the last thing a move does is to grant what it made.
                    pool.backend().inner().readers += 1;
                    let shared = Arc::downgrade(&pool);
                    pool.backend().set_probe(move |name| {
                        let pool = shared.upgrade().unwrap();
                        if name == "grant" && !pool.backend().inner().stopped && !again.swap(true, Ordering::SeqCst) {
                            assert!(matches!(step(&pool, 2 * CHUNK), Step::Settle), "it was refused");
                        }
                    });
                    Some(Still::new(pool.backend(), u32::MAX))
                };
                (seen, pool.rearrange(&[whole(&blocks[0], GPU1)], stop).err())
            }
        };
        assert!(
            seen.load(Ordering::SeqCst) && matches!(answer, None | Some(MoveError::NotABlock | MoveError::Full { .. })),
            "{call}: {answer:?}"
        );
        assert!(!matches!(step(&pool, CHUNK / 2), Step::Settle | Step::Refuse(_)), "there is room now");
    }
}

#[test]
fn no_block_goes_elsewhere_for_the_sake_of_a_chunk_that_a_move_needs_for_a_moment() {
    let (places, room) = ([(GPU0, 4 * CHUNK), (GPU1, 3 * CHUNK), (HOST, 4 * CHUNK)], 6);
    let pool = Arc::new(pool(Policy::LocalFirst, &places));
    let blocks: Vec<_> = (0..room).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    let seen = look_at(&pool, "alias", |pool| {
        assert!(matches!(step(pool, CHUNK), Step::Settle), "it went elsewhere");
    });
    rearrange(&pool, &swap(&blocks, [0, 1], [4, 5])).unwrap();
    assert!(seen.load(Ordering::SeqCst));
    let last = allocate(&pool, CHUNK).unwrap();
    assert_eq!(last.on_host, 0);
}

#[test]
fn memory_that_the_driver_lacks_while_a_move_has_it_is_asked_for_again() {
    let limits = [(GPU0, 8 * CHUNK), (GPU1, 8 * CHUNK), (HOST, 4 * CHUNK)];
    let pool = Arc::new(pool_with(
        Policy::LocalFirst,
        Lenders::All,
        &limits,
        &[(GPU0, 4 * CHUNK), (GPU1, CHUNK), (HOST, 4 * CHUNK)],
    ));
    pool.backend().inner().external.insert(GPU0, CHUNK);
    let blocks: Vec<_> = (0..4).map(|_| allocate(&pool, CHUNK).unwrap()).collect();
    blocks.iter().for_each(|it| fill(&pool, it));
    assert_eq!(places(&pool, &blocks), [GPU0, GPU0, GPU0, GPU1]);
    {
        let mut inner = pool.backend().inner();
        (inner.blind, inner.log) = (true, Vec::new());
        inner.external.clear();
    }
    let (send, asked) = mpsc::channel();
    let creates = |pool: &Pool<Mock>| calls(pool, "create");
    let (sender, asker) = (Mutex::new(Some(send)), Arc::downgrade(&pool));
    let seen = look_at(&pool, "alias", move |pool| {
        let (before, asker, send) = (creates(pool), asker.upgrade().unwrap(), sender.lock().unwrap().take().unwrap());
        std::thread::spawn(move || send.send(allocate(&asker, CHUNK)));
        // Until it has been refused by the driver.
        while creates(pool) == before {
            std::thread::yield_now();
        }
    });
    let wishes = [whole(&blocks[0], GPU1), whole(&blocks[3], GPU0)];
    rearrange(&pool, &wishes).unwrap();
    assert!(seen.load(Ordering::SeqCst));
    let last = asked.recv().unwrap().unwrap();
    assert_eq!((last.on_peers, last.on_host), (0, 0), "the spare chunk was its room");
}

/// Memory that a call of the driver's needs goes back to it, whatever a move keeps of it at this moment or when it is over.
#[test]
fn who_gives_everything_back_gives_what_a_move_leaves_as_well() {
    let (pool, mut blocks) = full(8 * CHUNK);
    // Once, so that the next one keeps what it needed.
    rearrange(&pool, &swap(&blocks, [0, 1], [4, 5])).unwrap();
    pool.trim(None, None, &[]);
    let extra = allocate(&pool, CHUNK).unwrap();
    pool.free(extra.block.address, Free::Strict).unwrap();
    let pool = Arc::new(pool);
    let (send, returned) = mpsc::channel();
    let other = Arc::clone(&pool);
    let stop = || {
        std::thread::spawn(move || send.send(other.give_back(None, &[])));
        // It has returned what was free, and waits for the rest.
        while calls(&pool, "release") == 0 {
            std::thread::yield_now();
        }
        Some(Still::new(pool.backend(), u32::MAX))
    };
    pool.backend().inner().log.clear();
    pool.rearrange(&swap(&blocks, [4, 5], [0, 1]), stop).unwrap();
    assert!(returned.recv().unwrap().0 > 0);
    assert_eq!(pool.backend().inner().stock(), []);
    blocks.sort_unstable_by_key(|it| it.block.address);
    assert_all(&pool, &blocks);
}

/// What a move needs is made by one who stops nothing, and the move itself makes nothing then.
#[test]
fn memory_that_a_move_needs_can_be_made_before_it() {
    let (pool, blocks) = full(32 * CHUNK);
    let (wishes, lacks) = (swap(&blocks, [0, 1], [4, 5]), Cell::new(0));
    let moves = || {
        let makes = |place: Place, bytes: u64| {
            assert_eq!(place, GPU1);
            lacks.set(lacks.get() + bytes);
            false
        };
        pool.rearrange_if(&wishes, makes, || Some(Still::new(pool.backend(), u32::MAX)))
    };
    let before = (calls(&pool, "create"), places(&pool, &blocks));
    assert_eq!(moves(), Err(MoveError::NotNow));
    assert!(lacks.take() > 0);
    assert_eq!((calls(&pool, "create"), places(&pool, &blocks)), before, "nothing was made, and nothing moved");
    assert_eq!(pool.rearrange(&wishes, || None::<Still<'_>>), Err(MoveError::NotNow));
    let made = calls(&pool, "create");
    assert!(made > before.0 && places(&pool, &blocks) == before.1, "made, and nothing moved");
    let moved = moves().unwrap();
    assert_eq!((lacks.take(), calls(&pool, "create")), (0, made));
    assert!(moved.wishes.iter().all(|it| it.moved == CHUNK), "{moved:?}");
    assert_all(&pool, &blocks);
}
