//! Programs at random, and adversaries that look at what has moved before they do the next thing: at no moment has a program taken
//! more than 1.02 times as long as without moves. (That nothing is named twice, that what leaves is near and what comes is far, that
//! it fits, and that nothing leaves that the launch names is asserted by whoever carries a swap out.)

use crate::machine::{Machine, Op, Step, Trace};
use crate::policies::{Never, Ours, apply};
use crate::traces::{MIB, Writer, peer};
use gpupool_tiers::Range;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Part {
    /// Begins a block of so many MiB.
    Begin(u64),
    /// Ends one of those that live.
    End(usize),
    /// Repeats launches: function, block, where in it, how much of the rest; so many times.
    Cycle(Vec<(u64, usize, u8, u8)>, usize, f64),
}

fn part() -> impl Strategy<Value = Part> {
    let launch = (0u64..6, any::<usize>(), any::<u8>(), any::<u8>());
    prop_oneof![
        3 => (2u64..600).prop_map(Part::Begin),
        1 => any::<usize>().prop_map(Part::End),
        4 => (prop::collection::vec(launch, 1..20), 1usize..150, prop_oneof![Just(1.0), Just(2.5), Just(20.0)])
            .prop_map(|(launches, times, reuse)| Part::Cycle(launches, times, reuse)),
    ]
}

fn trace(parts: &[Part], near: u64) -> Trace {
    let mut writer = Writer::new();
    let mut blocks: Vec<Range> = (0..6).map(|_| writer.block(256 * MIB)).collect();
    for part in parts {
        match part {
            Part::Begin(mib) => blocks.push(writer.block(mib * MIB)),
            Part::End(which) if blocks.len() > 1 => {
                let block = blocks.swap_remove(which % blocks.len());
                writer.ops.push(Op::End(block));
            }
            Part::End(_) => {}
            Part::Cycle(launches, times, reuse) => {
                for _ in 0..*times {
                    for (function, block, from, bytes) in launches {
                        let block = blocks[block % blocks.len()];
                        // A quarter or all of it. What a launch reads ends where another begins, or with the block.
                        let quarter = block.bytes() / 4 / 512 * 512;
                        let (from, count) = if bytes % 4 == 0 { (0, 4) } else { (u64::from(from % 4), 1) };
                        let end = if from + count == 4 { block.end } else { block.start + quarter * (from + count) };
                        let start = block.start + quarter * from;
                        let bytes = end - start;
                        // A function reads its operands as often each time.
                        writer.launch(function * 100 + *reuse as u64, &[Range::of(start, bytes)], 20_000.0, *reuse);
                    }
                    writer.idle();
                }
            }
        }
    }
    writer.trace("random", near, peer(), 0)
}

/// A program that runs beside itself without moves.
struct Both {
    ours: Ours,
    moved: Machine,
    never: Machine,
    worst: f64,
}

impl Both {
    fn new(near: u64) -> Self {
        let trace = Writer::new().trace("", near, peer(), 0);
        let machine = Machine::new(near, peer());
        Self { ours: Ours::new(&trace), moved: machine.clone(), never: machine, worst: 0.0 }
    }

    fn apply(&mut self, op: &Op) {
        apply(&mut self.moved, &mut self.ours, op);
        apply(&mut self.never, &mut Never, op);
        self.worst = self.worst.max(self.moved.now - 1.02 * self.never.now);
    }

    fn launch(&mut self, function: u64, range: Range, reuse: f64) {
        self.apply(&Op::Launch(Step { function, ranges: vec![range], compute_ns: 20_000.0, reuse }));
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        prop_assert!(
            self.worst <= SLACK,
            "{:.3} ms more than 1.02 of not moving; in the end {:.2} ms and {:.2}: {:?}",
            self.worst / 1e6,
            self.moved.now / 1e6,
            self.never.now / 1e6,
            self.ours.tiers.told(2, &self.moved),
        );
        Ok(())
    }
}

/// Nanoseconds by which a swap may turn out dearer than what was reserved for it: what was near comes back in more pieces than it left
/// in.
const SLACK: f64 = 500_000.0;

/// What an adversary does next.
#[derive(Clone, Debug)]
enum Spite {
    /// Reads what lies far, over and over.
    Far,
    /// Reads what has left the GPU.
    Gone,
    /// The same by a function that nobody has seen.
    GoneAnew,
    /// Reads what has come, if anything has.
    Come,
    /// Frees what has left, takes as much anew and reads that.
    Renew,
    /// The same with what has come.
    RenewCome,
    Anything(usize),
}

fn spite() -> impl Strategy<Value = (Spite, usize, usize, f64)> {
    let spite = prop_oneof![
        4 => Just(Spite::Far),
        3 => Just(Spite::Gone),
        2 => Just(Spite::GoneAnew),
        2 => Just(Spite::Come),
        2 => Just(Spite::Renew),
        1 => Just(Spite::RenewCome),
        2 => any::<usize>().prop_map(Spite::Anything),
    ];
    (spite, 1usize..40, 1usize..16, prop_oneof![Just(1.0), Just(2.5), Just(8.0), Just(30.0)])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn never_slower_than_without_moving(parts in prop::collection::vec(part(), 1..24), near in 64u64..1600) {
        let program = trace(&parts, near * MIB);
        let mut both = Both::new(near * MIB);
        program.ops.iter().for_each(|op| both.apply(op));
        both.check()?;
    }

    #[test]
    fn no_adversary_makes_it_slower(acts in prop::collection::vec(spite(), 1..40), near in 2u64..14) {
        let mut both = Both::new(near * 128 * MIB);
        let mut writer = Writer::new();
        let mut blocks: Vec<Range> = (0..16).map(|_| writer.block(128 * MIB)).collect();
        writer.ops.drain(..).for_each(|op| both.apply(&op));
        for (number, (act, times, most, reuse)) in acts.into_iter().enumerate() {
            let far = |machine: &Machine, block: &Range| machine.far_bytes(*block);
            let is = |both: &Both, block: &Range| match act {
                Spite::Far => far(&both.moved, block) > 0,
                Spite::Gone | Spite::GoneAnew | Spite::Renew => far(&both.moved, block) > far(&both.never, block),
                Spite::Come | Spite::RenewCome => far(&both.moved, block) < far(&both.never, block),
                Spite::Anything(which) => block.start / MIB % 7 == which as u64 % 7,
            };
            if matches!(act, Spite::Renew | Spite::RenewCome) {
                for index in 0..blocks.len() {
                    if is(&both, &blocks[index]) {
                        both.apply(&Op::End(blocks[index]));
                        blocks[index] = writer.block(128 * MIB);
                        writer.ops.drain(..).for_each(|op| both.apply(&op));
                    }
                }
            }
            let function = if matches!(act, Spite::GoneAnew) { number as u64 * 100 } else { 0 } + reuse as u64;
            for _ in 0..times {
                let chosen: Vec<Range> = blocks.iter().copied().filter(|block| is(&both, block)).take(most).collect();
                chosen.into_iter().for_each(|block| both.launch(function, block, reuse));
                both.apply(&Op::Idle);
            }
        }
        both.check()?;
    }
}
