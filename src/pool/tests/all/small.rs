//! Small blocks against a naive model, and what they cost in memory.

use super::checks::{GIB, GPU0, GPU1, HOST, MIB, pool, request};
use super::checks::{assert_the_rest_ends_once, free_in_a_race};
use super::mock::{FaultKind, Mock};
use gpupool_pool::{Anchor, Block, FRAME, Free, FreeError, Policy, Pool, Refusal, Request};
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// What sizes step by.
const UNIT: u64 = 512;

/// A small linear congruential generator: the same numbers in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn small(pool: &Pool<Mock>, bytes: u64) -> Block {
    pool.allocate_small(&request(bytes, 0)).unwrap().block
}

fn used(pool: &Pool<Mock>) -> u64 {
    pool.usage().places.iter().map(|place| place.used).sum()
}

fn calls(pool: &Pool<Mock>, name: &str) -> usize {
    pool.backend().inner().log.iter().filter(|entry| entry.0 == name).count()
}

/// Trims, and expects that nothing is left.
fn assert_empty(pool: &Pool<Mock>) {
    pool.trim(None, None, &[0, 1]);
    let usage = pool.usage();
    assert_eq!((usage.live_blocks, usage.live_bytes), (0, 0));
    assert!(usage.places.iter().all(|place| (place.used, place.held) == (0, 0)), "{usage:?}");
    assert!(pool.backend().inner().is_empty(), "a handle or a mapping is left");
}

/// Whoever moves it moves all of it, whichever of its blocks have ended.
#[test]
fn a_slab_lies_where_it_lies_whatever_stands_at_its_beginning() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * GIB)]);
    let [first, second] = [0, 1].map(|_| small(&pool, 10_000));
    let slab = pool.stretches().remove(0);
    assert_eq!((slab.0.address, slab.0.bytes), (first.address, FRAME));
    let lies = |bytes| pool.pieces_of_stretch(first.address, bytes).iter().map(|piece| piece.bytes).sum::<u64>();
    for _ in 0..2 {
        assert_eq!([1, FRAME, 2 * FRAME].map(lies), [1, FRAME, FRAME]);
        let _ = pool.free(first.address, Free::Strict);
    }
    assert_eq!(pool.pieces(first.address, FRAME), [], "the block itself has ended");
    assert_eq!(pool.free(second.address, Free::Strict), Ok(second));
    assert_empty(&pool);
    assert_eq!(lies(FRAME), 0);
}

/// A slab is no block of the program's, and what it holds is not live.
#[test]
fn the_most_that_was_live_is_what_was_asked_for() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * GIB)]);
    let blocks: Vec<Block> = (0..10).map(|_| small(&pool, 1000)).collect();
    let large = pool.allocate(&request(3 * MIB + 1, 0)).unwrap().block;
    let most = 10_000 + 3 * MIB + 1;
    let usage = pool.usage();
    assert_eq!((usage.live_bytes, usage.peak_live_bytes, usage.allocations, usage.reuses), (most, most, 11, 9));
    for block in blocks.iter().chain([&large]) {
        assert_eq!(pool.free(block.address, Free::Strict), Ok(*block));
    }
    // What small blocks had at most and what larger ones had are added up, though not at one time.
    let larger = pool.allocate(&request(8 * MIB, 0)).unwrap().block;
    assert!((8 * MIB..=8 * MIB + 10_000).contains(&pool.usage().peak_live_bytes), "{:?}", pool.usage());
    assert_eq!(pool.free(larger.address, Free::Strict), Ok(larger));
    assert_empty(&pool);
    // That is never more than all slabs have.
    let blocks: Vec<Block> = (0..20).map(|_| small(&pool, MIB - 1)).collect();
    assert_eq!(pool.usage().peak_live_bytes, 20 * MIB);
    for block in blocks {
        assert_eq!(pool.free(block.address, Free::Strict), Ok(block));
    }
    assert_empty(&pool);
}

#[test]
fn a_block_that_lives_on_keeps_its_frame_and_no_more() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 4 * GIB)]);
    let blocks: Vec<Block> = (0..100_000).map(|_| small(&pool, 4096)).collect();
    let (left, gone): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(number, _)| number % 2000 == 7);
    for (_, block) in gone {
        assert_eq!(pool.free(block.address, Free::Strict), Ok(block));
    }
    pool.trim(None, None, &[0]);
    let held: u64 = pool.usage().places.iter().map(|place| place.held).sum();
    // One frame each, and the empty slab that a thread keeps.
    assert!(held <= (left.len() as u64 + 1) * FRAME, "{} blocks of 4 KiB hold {held} bytes", left.len());
    for (_, block) in left {
        assert_eq!(pool.free(block.address, Free::Strict), Ok(block));
    }
    assert_empty(&pool);
}

#[test]
fn a_random_mix_holds_little_more_than_it_uses() {
    for (live, when) in [(1000, Free::Strict), (10_000, Free::Strict), (1000, Free::Lazy)] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 16 * GIB)]);
        let mut dice = Dice(live);
        let mut blocks: Vec<Block> = Vec::new();
        for round in 0..live * 10 {
            let bytes = 1 + dice.roll(MIB - 1);
            if blocks.len() as u64 == live {
                let gone = blocks.swap_remove(dice.roll(live) as usize);
                assert_eq!(pool.free(gone.address, when), Ok(gone));
            }
            blocks.push(small(&pool, bytes));
            if round > live * 5 && round % live == 0 {
                let asked: u64 = blocks.iter().map(|block| block.bytes).sum();
                let ratio = used(&pool) as f64 / asked as f64;
                assert!(ratio <= 1.2, "{live} live, {when:?}: {ratio:.3} bytes are held for each in use");
            }
        }
        for block in blocks {
            assert_eq!(pool.free(block.address, when), Ok(block));
        }
        assert_empty(&pool);
    }
}

#[test]
fn a_loop_takes_no_slab_each_time_and_asks_the_driver_for_nothing() {
    for when in [Free::Strict, Free::Lazy] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
        for _ in 0..100_000 {
            let block = small(&pool, 4096);
            pool.free(block.address, when).unwrap();
        }
        assert_eq!(calls(&pool, "create"), 1);
        let [waits, looks] = ["quiesce", "look"].map(|call| calls(&pool, call));
        assert_eq!((waits, looks), if when == Free::Strict { (100_000, 0) } else { (0, 100_000 / 512) }, "{when:?}");
        // The slab is at hand, and nobody's: who asks hears that its memory is free.
        assert_eq!((used(&pool), pool.memory_info(0, |_| true).0), (0, GIB));
        assert_empty(&pool);
    }
}

#[test]
fn nobody_waits_for_small_blocks_that_were_freed_lazily_while_little_is_held() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let kept = small(&pool, 512);
    for bytes in [512, 300_000, 700_000] {
        // A kernel that waits for the host, as long as it may.
        pool.backend().inner().held.clear();
        let gone: Vec<Block> = (0..10).map(|_| small(&pool, bytes)).collect();
        pool.backend().inner().held.insert(0);
        for block in gone {
            pool.free(block.address, Free::Lazy).unwrap();
            note_busy(&pool, &block, 0);
        }
        let before = calls(&pool, "quiesce");
        for _ in 0..2 * FRAME / bytes {
            small(&pool, bytes);
        }
        assert_eq!(calls(&pool, "quiesce"), before, "{bytes} bytes");
    }
    assert_eq!(pool.free(kept.address, Free::Lazy), Ok(kept));
}

#[test]
fn slabs_without_blocks_serve_whoever_needs_the_memory() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 8 * FRAME)]);
    let blocks: Vec<Block> = (0..12).map(|_| small(&pool, MIB - 1)).collect();
    assert_eq!(used(&pool), 6 * FRAME);
    for block in blocks {
        pool.free(block.address, Free::Lazy).unwrap();
    }
    let large = pool.allocate(&request(8 * FRAME, 0)).unwrap();
    assert_eq!(large.on_peers + large.on_host, 0);
    // Nothing is left at home, and small blocks lie nowhere else.
    assert!(matches!(pool.allocate_small(&request(100, 0)), Err(Refusal::Full { .. })));
    pool.free(large.block.address, Free::Strict).unwrap();
    let again = (0..20).find_map(|_| pool.allocate_small(&request(100, 0)).ok()).expect("it is asked again in time");
    pool.free(again.block.address, Free::Strict).unwrap();
    assert_empty(&pool);
}

#[test]
fn they_lie_at_home_under_every_policy() {
    for policy in [Policy::LocalFirst, Policy::Interleave, Policy::MostFree] {
        let pool = pool(policy, &[(GPU0, 64 * MIB), (GPU1, GIB), (HOST, GIB)]);
        let mut live = Vec::new();
        while let Ok(small) = pool.allocate_small(&request(200_000, 0)) {
            let pieces = pool.pieces(small.block.address, u64::MAX);
            assert!(pieces.iter().all(|piece| piece.place == GPU0), "{pieces:?}");
            assert_eq!(pieces.iter().map(|piece| piece.bytes).sum::<u64>(), 200_000);
            live.push(small.block);
        }
        assert!(live.len() as u64 * 200_000 > 56 * MIB, "{} blocks", live.len());
        for block in live {
            pool.free(block.address, Free::Strict).unwrap();
        }
        assert_empty(&pool);
    }
}

#[test]
fn what_is_asked_to_stay_does_so_to_the_end_of_the_block() {
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB)]);
    let (first, second) = (small(&pool, 5000), small(&pool, 5000));
    let anchored = |pool: &Pool<Mock>| pool.usage().places[0].anchored;
    assert_eq!(pool.anchor(first.address, 5001, Anchor::Asked), None, "it ends where the block does");
    assert!(pool.anchor(first.address + 100, 100, Anchor::Asked).is_some());
    assert_eq!(anchored(&pool), FRAME);
    pool.free(second.address, Free::Strict).unwrap();
    assert_eq!(anchored(&pool), FRAME, "another one's end changes nothing");
    pool.free(first.address, Free::Strict).unwrap();
    assert_eq!(anchored(&pool), 0);
    assert!(!pool.release_anchor(first.address + 100, 100));
    let third = small(&pool, 5000);
    assert!(pool.anchor(third.address, 5000, Anchor::Asked).is_some());
    assert!(pool.release_anchor(third.address, 5000) && anchored(&pool) == 0);
    pool.free(third.address, Free::Strict).unwrap();
    assert_empty(&pool);
}

#[test]
fn a_fault_at_any_call_leaves_nothing_behind() {
    for kind in [FaultKind::OutOfMemory, FaultKind::Unavailable, FaultKind::NotReady, FaultKind::Failed] {
        for length in [1, 6, 40] {
            for first in 1.. {
                let pool = pool(Policy::LocalFirst, &[(GPU0, 64 * MIB), (GPU1, 64 * MIB)]);
                pool.backend().inner().fault = Some((first, length, kind));
                let mut live = Vec::new();
                for (round, when) in [Free::Strict, Free::Lazy, Free::Lazy].into_iter().enumerate() {
                    for bytes in [100, MIB - 1, 300_000, MIB - 1, 70_000, MIB - 1] {
                        live.extend(pool.allocate_small(&request(bytes, 0)).map(|small| small.block));
                    }
                    live.retain(|block| match pool.free(block.address, when) {
                        Ok(freed) => {
                            assert_eq!(freed, *block);
                            false
                        }
                        Err(error) => {
                            assert!(matches!(error, FreeError::Backend(_)), "{error:?}");
                            assert_eq!(pool.block_at(block.address), Some(*block), "it lives on in round {round}");
                            true
                        }
                    });
                }
                let calls = pool.backend().inner().calls;
                pool.backend().inner().fault = None;
                let bytes: u64 = live.iter().map(|block| block.bytes).sum();
                let usage = pool.usage();
                assert_eq!((usage.live_blocks, usage.live_bytes), (live.len() as u64, bytes));
                for block in live {
                    pool.free(block.address, Free::Strict).unwrap();
                }
                assert_empty(&pool);
                if calls < first {
                    assert!(first > 4, "there are no calls to fail");
                    break;
                }
            }
        }
    }
}

#[test]
fn threads_that_free_each_others_blocks_agree_in_the_end() {
    const ROUNDS: u64 = 20_000;
    let pool = pool(Policy::LocalFirst, &[(GPU0, GIB), (GPU1, GIB)]);
    // Freed without being taken off, so that many are freed several times: a program's error, but never the pool's.
    let shelf: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
    let (made, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for id in 1..=6u64 {
            let (pool, shelf, made, ended) = (&pool, &shelf, &made, &ended);
            scope.spawn(move || {
                let mut dice = Dice(id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                for _ in 0..ROUNDS {
                    let place = &shelf[dice.roll(64) as usize];
                    match dice.roll(400) {
                        0 => _ = pool.trim(None, None, &[0, 1]),
                        1 => _ = ended.fetch_add(pool.free_owned_by(3).len() as u64, Ordering::Relaxed),
                        2 => assert!(pool.usage().places.iter().all(|place| place.used <= place.held)),
                        3..=20 => {
                            let address = place.load(Ordering::Acquire);
                            if let Some(block) = pool.block_at(address + dice.roll(MIB)) {
                                let id = block.id;
                                if pool.hold(block.address, id).is_some() {
                                    pool.let_go(block.address, id);
                                }
                            }
                        }
                        roll if roll % 2 == 0 => {
                            let home = (id % 2) as u32;
                            let owner = [1 + u64::from(home), 3 + u64::from(home) * 2][dice.roll(2) as usize];
                            let wanted = Request { owner, ..request(1 + dice.roll(MIB - 1), home) };
                            if let Ok(small) = pool.allocate_small(&wanted) {
                                made.fetch_add(1, Ordering::Relaxed);
                                place.store(small.block.address, Ordering::Release);
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
    assert_the_rest_ends_once(&pool, &[1, 2, 3, 5], made.into_inner(), ended.into_inner());
    assert_empty(&pool);
}

#[derive(Clone, Debug)]
enum Op {
    Allocate { bytes: u64, owner: u64 },
    Large { frames: u64 },
    Free { pick: usize, when: Free },
    FreeAfter { pick: usize, gpu: u32 },
    FreeInner { pick: usize, offset: u64 },
    FreeTwice { pick: usize },
    FreeOwner { owner: u64 },
    Hold { pick: usize },
    LetGo { pick: usize },
    Descriptor { pick: usize, withdrawn: bool },
    Trim,
    Idle,
    Capture(bool),
    Stall(bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let sizes = prop_oneof![1..2000u64, 1..MIB, Just(UNIT), Just(UNIT + 1), Just(MIB - 1)];
    let pick = || 0..64usize;
    let when = prop_oneof![Just(Free::Strict), Just(Free::Lazy)];
    let op = prop_oneof![
        12 => (sizes, 1..4u64).prop_map(|(bytes, owner)| Op::Allocate { bytes, owner }),
        2 => (1..6u64).prop_map(|frames| Op::Large { frames }),
        8 => (pick(), when).prop_map(|(pick, when)| Op::Free { pick, when }),
        2 => (pick(), 0..2u32).prop_map(|(pick, gpu)| Op::FreeAfter { pick, gpu }),
        2 => (pick(), 1..MIB).prop_map(|(pick, offset)| Op::FreeInner { pick, offset }),
        1 => pick().prop_map(|pick| Op::FreeTwice { pick }),
        1 => (1..4u64).prop_map(|owner| Op::FreeOwner { owner }),
        2 => pick().prop_map(|pick| Op::Hold { pick }),
        2 => pick().prop_map(|pick| Op::LetGo { pick }),
        1 => (pick(), any::<bool>()).prop_map(|(pick, withdrawn)| Op::Descriptor { pick, withdrawn }),
        1 => Just(Op::Trim),
        1 => Just(Op::Idle),
        1 => any::<bool>().prop_map(Op::Capture),
        1 => any::<bool>().prop_map(Op::Stall),
    ];
    prop::collection::vec(op, 1..120)
}

/// What a program knows: its blocks, and which memory others have.
#[derive(Default)]
struct Model {
    live: Vec<Block>,
    /// Blocks that another process has open, ended or not, and the chunks they lie on: the driver keeps that for who has it open.
    held: Vec<(Block, [u64; 2])>,
    /// Blocks of which a descriptor was given away.
    given: Vec<(Block, [u64; 2])>,
    made: u64,
}

fn overlap(left: &Block, right: &Block) -> bool {
    left.address < right.address + right.bytes && right.address < left.address + left.bytes
}

impl Model {
    fn enter(&mut self, pool: &Pool<Mock>, block: Block) {
        assert!(block.address.is_multiple_of(UNIT));
        let others =
            self.held.iter().chain(&self.given).filter(|&&(other, chunks)| chunks_of(pool, &other) == Some(chunks));
        for other in self.live.iter().chain(others.map(|(other, _)| other)) {
            assert!(!overlap(&block, other), "{block:?} stands on {other:?}");
            assert_ne!(block.id, other.id);
        }
        let inner = pool.backend().inner();
        assert!(!inner.is_busy(block.address, block.bytes), "a GPU may still touch {block:?}");
        inner.assert_usable(block.address, block.bytes, gpupool_pool::Place::Gpu(block.home));
        drop(inner);
        self.live.push(block);
        self.made += 1;
    }

    fn check(&self, pool: &Pool<Mock>) {
        let usage = pool.usage();
        let bytes: u64 = self.live.iter().map(|block| block.bytes).sum();
        assert_eq!((usage.live_blocks, usage.live_bytes), (self.live.len() as u64, bytes));
        assert_eq!(usage.allocations, self.made);
        assert!(usage.peak_live_bytes >= usage.live_bytes && usage.reuses <= usage.allocations);
        for block in &self.live {
            for offset in [0, block.bytes / 2, block.bytes - 1] {
                assert_eq!(pool.block_at(block.address + offset), Some(*block));
            }
            let behind = block.address + block.bytes;
            let other = self.live.iter().find(|other| other.address == behind);
            assert_eq!(pool.block_at(behind), other.copied());
        }
    }
}

/// The chunks below the ends of a small block, of which there are two at most.
fn chunks_of(pool: &Pool<Mock>, block: &Block) -> Option<[u64; 2]> {
    let inner = pool.backend().inner();
    Some([inner.mapped_around(block.address)?.3, inner.mapped_around(block.address + block.bytes - 1)?.3])
}

fn note_busy(pool: &Pool<Mock>, block: &Block, gpu: u32) {
    pool.backend().inner().note_busy(block.address, block.bytes, gpu);
}

fn play(ops: &[Op]) {
    let pool = pool(Policy::LocalFirst, &[(GPU0, 48 * MIB), (GPU1, 48 * MIB)]);
    let mut model = Model::default();
    for op in ops {
        let pick = |pick: usize, of: &[Block]| (!of.is_empty()).then(|| pick % of.len());
        match *op {
            Op::Allocate { bytes, owner } => {
                // Owners 1 and 3 are at home on GPU 0, 2 on GPU 1. Who is at home on a GPU with a stalled kernel waits for it.
                let home = u32::from(owner == 2);
                if pool.backend().inner().held.contains(&home) {
                    continue;
                }
                match pool.allocate_small(&Request { owner, ..request(bytes, home) }) {
                    Ok(small) => {
                        assert_eq!((small.block.bytes, small.block.owner, small.block.home), (bytes, owner, home));
                        model.enter(&pool, small.block);
                    }
                    Err(refusal) => assert!(matches!(refusal, Refusal::Full { .. }), "{refusal:?}"),
                }
            }
            Op::Large { frames } => {
                if pool.backend().inner().held.contains(&0) {
                    continue;
                }
                match pool.allocate(&request(frames * FRAME, 0)) {
                    Ok(allocation) if allocation.on_peers == 0 => model.enter(&pool, allocation.block),
                    Ok(allocation) => {
                        // What lies on the other GPU takes its room, and is of no further use here.
                        model.made += 1;
                        assert_eq!(pool.free(allocation.block.address, Free::Lazy), Ok(allocation.block));
                    }
                    Err(refusal) => assert!(matches!(refusal, Refusal::Full { .. }), "{refusal:?}"),
                }
            }
            Op::Free { pick: at, when } => {
                let Some(at) = pick(at, &model.live) else { continue };
                let block = model.live[at];
                if when == Free::Strict && pool.backend().inner().held.contains(&block.home) {
                    continue;
                }
                let capturing = pool.backend().inner().capturing;
                if when == Free::Lazy || capturing {
                    note_busy(&pool, &block, block.home);
                }
                assert_eq!(pool.free(block.address, when), Ok(block));
                model.live.swap_remove(at);
            }
            Op::FreeAfter { pick: at, gpu } => {
                let Some(at) = pick(at, &model.live) else { continue };
                let (block, is_small) = (model.live[at], model.live[at].bytes < MIB);
                let mut inner = pool.backend().inner();
                // Another GPU than home is waited for.
                if is_small && gpu != block.home && (inner.held.contains(&gpu) || inner.capturing) {
                    continue;
                }
                inner.note_busy(block.address, block.bytes, gpu);
                drop(inner);
                model.live.swap_remove(at);
                assert_eq!(pool.free_after(block.address, gpu), Ok(block));
            }
            Op::FreeInner { pick: at, offset } => {
                let Some(at) = pick(at, &model.live) else { continue };
                let address = model.live[at].address + offset % model.live[at].bytes;
                if address != model.live[at].address {
                    assert_eq!(pool.free(address, Free::Lazy), Err(FreeError::NotABlock));
                    assert_eq!(pool.free_after(address, 0), Err(FreeError::NotABlock));
                }
            }
            Op::FreeTwice { pick: at } => {
                let Some(at) = pick(at, &model.live) else { continue };
                let block = model.live.swap_remove(at);
                note_busy(&pool, &block, block.home);
                assert_eq!(pool.free(block.address, Free::Lazy), Ok(block));
                assert_eq!(pool.free(block.address, Free::Lazy), Err(FreeError::NotABlock));
                assert_eq!(pool.block_at(block.address), None);
            }
            Op::FreeOwner { owner } => {
                let (mut gone, left): (Vec<_>, Vec<_>) = model.live.iter().partition(|block| block.owner == owner);
                model.live = left;
                gone.iter().for_each(|block| note_busy(&pool, block, block.home));
                let mut ended = pool.free_owned_by(owner);
                gone.sort_unstable_by_key(|block| block.address);
                ended.sort_unstable_by_key(|block| block.address);
                assert_eq!(ended, gone);
            }
            Op::Hold { pick: at } => {
                let Some(at) = pick(at, &model.live).filter(|&at| model.live[at].bytes < MIB) else { continue };
                let block = model.live[at];
                assert_eq!(pool.hold(block.address, block.id), Some(block));
                assert_eq!(pool.hold(block.address, block.id + 1_000_000), None);
                model.held.push((block, chunks_of(&pool, &block).unwrap()));
            }
            Op::LetGo { pick: at } => {
                if model.held.is_empty() {
                    continue;
                }
                let (block, _) = model.held.swap_remove(at % model.held.len());
                pool.let_go(block.address, block.id);
            }
            Op::Descriptor { pick: at, withdrawn } => {
                let Some(at) = pick(at, &model.live).filter(|&at| model.live[at].bytes < MIB) else { continue };
                let block = model.live[at];
                assert!(pool.anchor(block.address, block.bytes, Anchor::Descriptor).is_some());
                if withdrawn {
                    assert!(pool.withdraw_anchor(block.address, block.bytes, Anchor::Descriptor));
                } else {
                    model.given.push((block, chunks_of(&pool, &block).unwrap()));
                }
            }
            Op::Trim => {
                let gpus: Vec<u32> = (0..2).filter(|gpu| !pool.backend().inner().held.contains(gpu)).collect();
                pool.trim(None, None, &gpus);
            }
            Op::Idle => {
                let period = pool.begin_period();
                pool.return_unused(None, period, u64::MAX, |_| true);
            }
            Op::Capture(capturing) => pool.backend().inner().capturing = capturing,
            Op::Stall(stalled) => {
                let mut inner = pool.backend().inner();
                if stalled {
                    inner.held.insert(1)
                } else {
                    inner.held.remove(&1)
                };
            }
        }
        model.check(&pool);
    }
    pool.backend().inner().capturing = false;
    pool.backend().inner().held.clear();
    for (block, _) in std::mem::take(&mut model.held) {
        pool.let_go(block.address, block.id);
    }
    for block in std::mem::take(&mut model.live) {
        assert_eq!(pool.free(block.address, Free::Strict), Ok(block));
    }
    assert_empty(&pool);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_sequences_agree_with_the_model(ops in ops()) {
        play(&ops);
    }
}
