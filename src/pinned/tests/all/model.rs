//! The pool against a naive model, which finds free memory by looking at everything.

use crate::mock::{GIB, IDLE, MIB, Mock, pool};
use gpupool_pinned::{Allocation, Block, Free, FreeError, GRANULE, Key, PAGE, Pool, Refusal, Request};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const LIMIT: u64 = GIB;

#[derive(Clone, Debug)]
enum Op {
    Allocate { bytes: u64, key: Key },
    Free { pick: usize, lazily: bool },
    FreeWrongly { pick: usize, offset: u64 },
    Capture(bool),
    Wait { seconds: u64 },
    Trim,
    EndContext(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![
        4 => 1..PAGE,
        4 => (1..32u64).prop_map(|pages| pages * PAGE),
        2 => 1..MIB,
        2 => 1..64 * MIB,
        1 => prop_oneof![Just(8 * MIB), Just(32 * MIB), Just(300 * MIB)],
    ];
    let key = (1..3u64, 0..2u32).prop_map(|(context, flags)| Key { context, flags });
    prop_oneof![
        12 => (bytes, key).prop_map(|(bytes, key)| Op::Allocate { bytes, key }),
        8 => (any::<usize>(), any::<bool>()).prop_map(|(pick, lazily)| Op::Free { pick, lazily }),
        1 => (any::<usize>(), 1..MIB).prop_map(|(pick, offset)| Op::FreeWrongly { pick, offset }),
        1 => any::<bool>().prop_map(Op::Capture),
        1 => (0..40u64).prop_map(|seconds| Op::Wait { seconds }),
        1 => Just(Op::Trim),
        1 => (1..3u64).prop_map(Op::EndContext),
    ]
}

fn footprint(bytes: u64) -> u64 {
    bytes.next_multiple_of(if bytes < PAGE { GRANULE } else { PAGE })
}

fn is_small(bytes: u64) -> bool {
    footprint(bytes) < PAGE
}

type Segments = BTreeMap<u64, (u64, Key)>;

#[derive(Default)]
struct Model {
    live: BTreeMap<u64, Block>,
    /// Lazily freed, and their context not waited for since: bytes and context by address.
    busy: BTreeMap<u64, (u64, u64)>,
    /// Segments of blocks below a page.
    small_segments: BTreeSet<u64>,
    capturing: bool,
    now: Duration,
    peak_used: u64,
    peak_requested: u64,
}

impl Model {
    fn used(&self) -> u64 {
        self.live.values().map(|block| footprint(block.bytes)).sum()
    }

    /// Free runs of a segment, as `(bytes, address)`, by walking over all that is in it.
    fn gaps(&self, start: u64, bytes: u64) -> Vec<(u64, u64)> {
        let taken = self.live.range(start..start + bytes).map(|(&at, block)| (at, footprint(block.bytes)));
        let mut taken: Vec<_> =
            taken.chain(self.busy.range(start..start + bytes).map(|(&at, &(size, _))| (at, size))).collect();
        taken.sort_unstable();
        let mut gaps = Vec::new();
        let mut at = start;
        for (address, size) in taken.into_iter().chain([(start + bytes, 0)]) {
            if address > at {
                gaps.push((address - at, at));
            }
            at = address + size;
        }
        gaps
    }

    /// Where the pool should put a block: exactly, beside others, in a whole segment that is as big. `Err` if it may break a
    /// bigger segment, or not.
    fn fit(&self, segments: &Segments, bytes: u64, key: Key) -> Result<Option<u64>, (u64, u64)> {
        let (mut parts, mut wholes) = (Vec::new(), Vec::new());
        for (&start, &(size, its_key)) in segments {
            if its_key == key && self.small_segments.contains(&start) == is_small(bytes) {
                for gap in self.gaps(start, size).into_iter().filter(|gap| gap.0 >= footprint(bytes)) {
                    if gap.0 == size { wholes.push(gap) } else { parts.push(gap) }
                }
            }
        }
        let (part, whole) = (parts.into_iter().min(), wholes.into_iter().min());
        let exact = |gap: &(u64, u64)| gap.0 == footprint(bytes);
        match part.filter(exact).or(whole.filter(exact)).or(part) {
            Some((_, address)) => Ok(Some(address)),
            None => whole.map_or(Ok(None), Err),
        }
    }

    /// Others may still be at work on what was theirs.
    fn waited_for(&mut self, context: u64) {
        self.busy.retain(|_, (_, theirs)| *theirs != context);
    }

    fn allocate(&mut self, pool: &Pool<Mock>, bytes: u64, key: Key) -> Result<(), TestCaseError> {
        let waits =
            |pool: &Pool<Mock>| pool.backend().inner().log.iter().filter(|(name, _)| *name == "quiesce").count();
        let (before, waits_before) = (pool.usage(), waits(pool));
        let unused = self.unused(pool);
        let segments = pool.backend().inner().segments.clone();
        let mut expected = self.fit(&segments, bytes, key);
        let answer = pool.allocate(&Request { bytes, key });
        if waits(pool) > waits_before {
            prop_assert!(!matches!(expected, Ok(Some(_))), "waited although {expected:?} was there");
            if !self.capturing {
                self.waited_for(key.context);
                expected = self.fit(&segments, bytes, key);
            }
        }
        let Allocation { block, pinned, returned } = match answer {
            Ok(allocation) => allocation,
            Err(Refusal::Limit { .. }) => {
                let kept = before.pinned - unused;
                prop_assert!(kept + footprint(bytes).next_multiple_of(PAGE) > LIMIT, "{kept} of {LIMIT} for {bytes}");
                return Ok(());
            }
            Err(refusal) => return Err(TestCaseError::fail(format!("{refusal:?}"))),
        };
        prop_assert_eq!((block.bytes, block.key), (bytes, key));
        prop_assert_eq!(block.address % if is_small(bytes) { GRANULE } else { PAGE }, 0);
        let (start, size, its_key) = pool.backend().inner().segment(block.address).expect("in a segment");
        prop_assert!(block.address + footprint(bytes) <= start + size && its_key == key);
        if pinned == 0 {
            match expected {
                Ok(address) => prop_assert_eq!(Some(block.address), address, "the best fit"),
                Err((_, address)) => prop_assert_eq!(block.address, address, "the best whole segment"),
            }
        } else {
            prop_assert!(!matches!(expected, Ok(Some(_))), "pinned although {expected:?} was there");
            prop_assert_eq!((start, size), (block.address, pinned));
            if is_small(bytes) {
                self.small_segments.insert(start);
            } else {
                self.small_segments.remove(&start);
            }
            // The driver gives memory out anew, at addresses that may be old ones.
            self.busy.retain(|&at, _| at < start || at >= start + size);
        }
        let gone = |at: &u64| pool.backend().inner().segment(*at).is_none();
        self.busy.retain(|at, _| !gone(at));
        prop_assert_eq!(pool.usage().returned - before.returned, returned);
        let before_and_after = |at: u64| (at, at + footprint(bytes));
        let (first, end) = before_and_after(block.address);
        for other in self.live.values() {
            prop_assert!(other.address + footprint(other.bytes) <= first || end <= other.address, "{other:?} overlaps");
        }
        for (&at, &(size, _)) in &self.busy {
            prop_assert!(at + size <= first || end <= at, "the device may still touch {at:#x}");
        }
        self.live.insert(block.address, block);
        self.peak_used = self.peak_used.max(self.used());
        self.peak_requested = self.peak_requested.max(self.live.values().map(|block| block.bytes).sum());
        let usage = pool.usage();
        let ceiling = self.peak_used + self.peak_used / 10;
        prop_assert!(pinned == 0 || usage.pinned <= ceiling || self.unused(pool) == 0, "{usage:?}");
        Ok(())
    }

    /// Bytes of segments without a live block, as far as they can go back now.
    fn unused(&self, pool: &Pool<Mock>) -> u64 {
        if self.capturing {
            return 0;
        }
        let segments = &pool.backend().inner().segments;
        let without = segments.iter().filter(|&(&at, &(size, _))| self.live.range(at..at + size).next().is_none());
        without.map(|(_, &(size, _))| size).sum()
    }

    fn check(&self, pool: &Pool<Mock>) -> Result<(), TestCaseError> {
        let usage = pool.usage();
        let inner = pool.backend().inner();
        prop_assert_eq!(usage.pinned, inner.pinned());
        prop_assert_eq!(usage.segments, inner.segments.len() as u64);
        drop(inner);
        prop_assert!(usage.pinned <= LIMIT && usage.peak_pinned <= LIMIT);
        prop_assert_eq!(usage.used, self.used());
        prop_assert_eq!(usage.requested, self.live.values().map(|block| block.bytes).sum::<u64>());
        prop_assert_eq!(usage.blocks, self.live.len() as u64);
        prop_assert_eq!((usage.peak_used, usage.peak_requested), (self.peak_used, self.peak_requested));
        Ok(())
    }

    fn apply(&mut self, pool: &Pool<Mock>, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::Allocate { bytes, key } => self.allocate(pool, bytes, key)?,
            Op::Free { pick, lazily } if !self.live.is_empty() => {
                let block = *self.live.values().nth(pick % self.live.len()).unwrap();
                let when = if lazily { Free::Lazy } else { Free::Strict };
                prop_assert_eq!(pool.free(block.address, when, || self.now), Ok(block));
                self.live.remove(&block.address);
                if lazily || self.capturing {
                    self.busy.insert(block.address, (footprint(block.bytes), block.key.context));
                } else {
                    self.waited_for(block.key.context);
                }
            }
            Op::FreeWrongly { pick, offset } if !self.live.is_empty() => {
                let address = self.live.keys().nth(pick % self.live.len()).unwrap() + offset;
                if !self.live.contains_key(&address) {
                    prop_assert_eq!(pool.free(address, Free::Strict, || self.now), Err(FreeError::NotABlock));
                }
                let around = self.live.range(..=address).next_back().map(|(_, block)| *block);
                let around = around.filter(|block| address < block.address + footprint(block.bytes));
                prop_assert_eq!(pool.block_at(address), around);
                prop_assert_eq!(pool.find(address).flatten(), around);
            }
            Op::Capture(capturing) => {
                self.capturing = capturing;
                pool.backend().inner().capturing = capturing;
            }
            Op::Wait { seconds } => {
                self.now += Duration::from_secs(seconds);
                let unused = self.unused(pool);
                let returned = pool.return_idle(self.now, Some(1));
                prop_assert!(returned <= unused);
                if seconds >= IDLE.as_secs() {
                    prop_assert_eq!(returned, unused, "all were unused that long");
                }
            }
            Op::Trim => prop_assert_eq!(self.unused(pool), pool.trim()),
            Op::EndContext(context) => {
                pool.backend().inner().end_context(context);
                let gone: Vec<Block> =
                    self.live.values().copied().filter(|block| block.key.context == context).collect();
                prop_assert_eq!(pool.context_gone(context), gone);
                self.live.retain(|_, block| block.key.context != context);
            }
            _ => {}
        }
        let inner = pool.backend().inner();
        self.busy.retain(|&at, _| inner.segment(at).is_some());
        drop(inner);
        self.check(pool)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_pool_does_what_the_model_says(ops in proptest::collection::vec(op(), 1..150)) {
        let pool = pool(LIMIT);
        let mut model = Model::default();
        for op in &ops {
            model.apply(&pool, op)?;
        }
        // Whatever happened, after a last wait for each context every segment is one free run again.
        model.apply(&pool, &Op::Capture(false))?;
        for context in 1..=3 {
            model.apply(&pool, &Op::Allocate { bytes: 1, key: Key { context, flags: 0 } })?;
        }
        while !model.live.is_empty() {
            model.apply(&pool, &Op::Free { pick: 0, lazily: false })?;
        }
        let segments = pool.backend().inner().segments.clone();
        for (address, (bytes, key)) in segments {
            if !model.small_segments.contains(&address) {
                let answer = pool.allocate(&Request { bytes, key });
                prop_assert_eq!(answer.map(|allocation| allocation.pinned), Ok(0));
            }
        }
    }
}
