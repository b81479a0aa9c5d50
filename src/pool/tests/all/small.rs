//! Small blocks against a naive model, and what they cost in memory.

use super::checks::{GPU0, GPU1, MIB, assert_returns_everything, pool, request};
use super::mock::{BASE, Mock};
use gpupool_pool::{Anchor, Block, FRAME, Free, FreeError, Policy, Pool, Refusal, Request};
use proptest::prelude::*;
use std::collections::BTreeMap;

const UNIT: u64 = 512;

/// A small linear congruential generator: the same numbers in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn held(pool: &Pool<Mock>) -> u64 {
    pool.usage().places.iter().map(|place| place.used).sum()
}

#[test]
fn a_random_mix_holds_little_more_than_it_uses() {
    for (live, when) in [(1000, Free::Strict), (10_000, Free::Strict), (1000, Free::Lazy)] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 16384 * MIB)]);
        let mut dice = Dice(live);
        let mut blocks: Vec<Block> = Vec::new();
        let mut worst = 0.0f64;
        for round in 0..live * 12 {
            let bytes = 1 + dice.roll(MIB - 1);
            if blocks.len() as u64 == live {
                let gone = blocks.swap_remove(dice.roll(live) as usize);
                assert_eq!(pool.free(gone.address, when), Ok(gone));
            }
            blocks.push(pool.allocate_small(&request(bytes, 0)).unwrap().block);
            if round > live * 6 && round % live == 0 {
                let used: u64 = blocks.iter().map(|block| block.bytes).sum();
                worst = worst.max(held(&pool) as f64 / used as f64);
            }
        }
        println!("{live} {when:?}: {worst:.3}");
        assert!(worst <= 1.2, "{live} live: {worst:.3} bytes are held for each in use");
    }
}

#[test]
fn speed() {
    for live in [0u64, 1000, 10_000] {
        let pool = pool(Policy::LocalFirst, &[(GPU0, 16384 * MIB)]);
        let mut dice = Dice(live);
        let mut blocks: Vec<u64> = (0..live)
            .map(|_| pool.allocate_small(&request(1 + dice.roll(MIB - 1), 0)).unwrap().block.address)
            .collect();
        for _ in 0..3 {
            let begin = std::time::Instant::now();
            for _ in 0..200_000 {
                if live > 0 {
                    let at = dice.roll(live) as usize;
                    pool.free(blocks[at], Free::Lazy).unwrap();
                    blocks[at] = pool.allocate_small(&request(1 + dice.roll(MIB - 1), 0)).unwrap().block.address;
                } else {
                    let b = pool.allocate_small(&request(4096, 0)).unwrap().block.address;
                    pool.free(b, Free::Lazy).unwrap();
                }
            }
            println!("{live}: {:?} a pair", begin.elapsed() / 200_000);
        }
    }
}
