//! Memory as programs have it, the same for the same seed.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]
#![allow(dead_code, reason = "each test uses some of it")]

use std::path::Path;

use gpupool_store::{About, Meta, Options, Process, Reader, Result, Which, Writer, Written};

/// A generator of numbers (SplitMix64).
#[derive(Clone)]
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Less than `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Normally distributed, with a deviation of 0.02, as weights are: the sum of twelve numbers, of 21 bits each, so that
    /// every bit of the result is used.
    pub fn weight(&mut self) -> f32 {
        let of = |bits: u64| [0, 21, 42].map(|at| ((bits >> at) & 0x1f_ffff) as f64).iter().sum::<f64>();
        let sum: f64 = (0..4).map(|_| of(self.next())).sum();
        ((sum / f64::from(1 << 21) - 6.0) * 0.02) as f32
    }
}

/// What memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Zeros,
    Constant,
    Words,
    Bf16,
    F32,
    Text,
    Random,
    /// Random bytes and long runs of zeros.
    Holes,
}

pub const KINDS: [Kind; 8] =
    [Kind::Zeros, Kind::Constant, Kind::Words, Kind::Bf16, Kind::F32, Kind::Text, Kind::Random, Kind::Holes];

pub fn memory(kind: Kind, bytes: usize, seed: u64) -> Vec<u8> {
    let mut numbers = Numbers(seed);
    let mut memory = Vec::with_capacity(bytes + 8);
    while memory.len() < bytes {
        match kind {
            Kind::Zeros => memory.resize(bytes, 0),
            Kind::Constant => memory.resize(bytes, seed as u8 | 1),
            Kind::Words => memory.extend_from_slice(&(seed | 1).to_le_bytes()),
            Kind::Bf16 => memory.extend_from_slice(&numbers.weight().to_bits().to_le_bytes()[2..]),
            Kind::F32 => memory.extend_from_slice(&numbers.weight().to_le_bytes()),
            Kind::Text => {
                memory.extend_from_slice(format!("step {} loss {}\n", memory.len(), numbers.below(999)).as_bytes())
            }
            Kind::Random => memory.extend_from_slice(&numbers.next().to_le_bytes()),
            Kind::Holes if numbers.below(2) == 0 => memory.resize(memory.len() + numbers.below(700_000) as usize, 0),
            Kind::Holes => {
                (0..numbers.below(40_000)).for_each(|_| memory.extend_from_slice(&numbers.next().to_le_bytes()))
            }
        }
    }
    memory.truncate(bytes);
    memory
}

pub fn meta() -> Meta {
    Meta {
        process: Process { pid: 4711, started: 99, command: "python train.py".to_owned() },
        host: "node-3".to_owned(),
        gpus: vec!["GPU-0a".to_owned(), "GPU-0b".to_owned()],
        gpupool: "0.2.0".to_owned(),
        ..Meta::default()
    }
}

pub fn about(id: u64, bytes: usize) -> About {
    let (site, label) = ("train.py:12 (main)".to_owned(), format!("layer{id}"));
    About {
        id,
        address: 0x7f00_0000_0000 + (id << 32),
        bytes: bytes as u64,
        home: Some(1),
        site,
        label,
        ..About::default()
    }
}

/// A generation of these blocks, whose ids are their places.
pub fn store(folder: &Path, options: Options, blocks: &[Vec<u8>]) -> Result<Written> {
    let writer = Writer::create(folder, meta(), options)?;
    for (id, bytes) in blocks.iter().enumerate() {
        let block = writer.block(about(id as u64, bytes.len()))?;
        writer.write(block, 0, bytes)?;
    }
    writer.finish()
}

/// All blocks of a generation.
pub fn load(folder: &Path, which: Which) -> Result<Vec<Vec<u8>>> {
    let reader = Reader::open(folder, which, 2)?;
    let blocks = reader.manifest().blocks.iter().map(|block| {
        let mut bytes = vec![0xee; usize::try_from(block.about.bytes).unwrap()];
        reader.read_into(block.about.id, 0, &mut bytes).map(|()| bytes)
    });
    blocks.collect()
}
