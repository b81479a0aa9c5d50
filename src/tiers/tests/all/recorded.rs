//! Programs that ran on an H200 (driver 580), as they were recorded there: PyTorch 2.11 and CuPy 14.2. Their launches with the words of their
//! parameters, what each took with all memory near, and, of matrix products and attention, how often each operand crossed the link, by
//! least squares over three runs in which other parts were far. How far an operand reaches is not recorded: up to the next pointer that
//! was named within 32 launches, or to the size that the model has such tensors of.
//!
//! They run as they do there: the program is ahead of the device, times are heard later, and memory moves by chunks.

use crate::format::read;
use crate::machine::{Extra, Machine, Op, Step, Trace};
use crate::policies::{BestStatic, Never, Ours, Policy, apply};
use crate::traces;
use flate2::read::GzDecoder;
use gpupool_tiers::Range;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// A recorded trace, divided where the program waits, and its last whole part some times more: each time with other blocks of the same
/// size where they are used for something else each time. PyTorch's cache hands memory out so: of 1541 launches of a training step some
/// 1000 had words that no launch before had, step after step.
fn recorded(name: &str, more: usize) -> (Trace, Vec<Vec<Op>>) {
    let trace = read(name, &unpacked(name), traces::peer()).unwrap();
    let mut steps: Vec<Vec<Op>> = vec![Vec::new()];
    for op in &trace.ops {
        let step = steps.last_mut().unwrap();
        step.push(op.clone());
        let launches = step.iter().filter(|op| matches!(op, Op::Launch(_))).count();
        if *op == Op::Idle && launches > 20 {
            steps.push(Vec::new());
        }
    }
    steps.retain(|step| step.iter().any(|op| matches!(op, Op::Launch(_))));
    let blocks = handed_out(&steps);
    println!("{name}: {} blocks are handed out anew each time", blocks.values().map(Vec::len).sum::<usize>());
    let last = steps.last().unwrap().clone();
    let mut random = 7;
    for _ in 0..more {
        let names: BTreeMap<u64, (u64, u64)> = blocks
            .iter()
            .flat_map(|(&bytes, starts)| {
                let shuffled = shuffled(starts, &mut random);
                starts.iter().zip(shuffled).map(move |(&old, new)| (old, (bytes, new))).collect::<Vec<_>>()
            })
            .collect();
        steps.push(last.iter().map(|op| renamed(op, &names)).collect());
    }
    (trace, steps)
}

fn unpacked(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded").join(format!("{name}.txt.gz"));
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    text
}

fn shuffled(starts: &[u64], random: &mut u64) -> Vec<u64> {
    let mut keyed: Vec<(u64, u64)> = starts
        .iter()
        .map(|start| {
            *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (*random >> 20, *start)
        })
        .collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, start)| start).collect()
}

/// The blocks that the last two steps use for something else each, by their size.
fn handed_out(steps: &[Vec<Op>]) -> BTreeMap<u64, Vec<u64>> {
    let mut blocks: BTreeMap<u64, u64> = BTreeMap::new();
    for op in steps.iter().flatten() {
        match op {
            Op::Begin(block) => _ = blocks.insert(block.start, block.bytes()),
            Op::End(block) => _ = blocks.remove(&block.start),
            _ => {}
        }
    }
    let uses = |step: &Vec<Op>| {
        let mut uses: BTreeMap<u64, Vec<(usize, u64)>> = BTreeMap::new();
        let launches = step.iter().filter_map(|op| if let Op::Launch(launch) = op { Some(launch) } else { None });
        for (at, launch) in launches.enumerate() {
            for word in launch.words() {
                if let Some((start, _)) = blocks.range(..=word).next_back() {
                    uses.entry(*start).or_default().push((at, word - start));
                }
            }
        }
        uses
    };
    let [.., before, last] = steps else { return BTreeMap::new() };
    let (before, last) = (uses(before), uses(last));
    let mut found: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for (start, bytes) in blocks.into_iter().filter(|(start, _)| before.get(start) != last.get(start)) {
        found.entry(bytes).or_default().push(start);
    }
    found
}

/// The same, with other blocks.
fn renamed(op: &Op, names: &BTreeMap<u64, (u64, u64)>) -> Op {
    let address = |address: u64| match names.range(..=address).next_back() {
        Some((old, (bytes, new))) if address - old < *bytes => address - old + new,
        _ => address,
    };
    let range = |old: Range| Range::of(address(old.start), old.bytes());
    match op {
        Op::Launch(launch) => Op::Launch(Step {
            ranges: launch.ranges.iter().copied().map(range).collect(),
            named: launch.named.iter().copied().map(address).collect(),
            ..launch.clone()
        }),
        Op::Copy(copied) => Op::Copy(range(*copied)),
        other => other.clone(),
    }
}

/// What each step takes, milliseconds.
fn times(steps: &[Vec<Op>], machine: &mut Machine, policy: &mut dyn Policy) -> Vec<f64> {
    let step = |ops: &Vec<Op>| {
        let begun = machine.now;
        let before = (machine.moved_in, machine.moved_out);
        ops.iter().for_each(|op| apply(machine, policy, op));
        if std::env::var("TOLD").is_ok() {
            println!(
                "  step {:.1} ms, in {} out {} MiB; {}",
                (machine.now - begun) / 1e6,
                (machine.moved_in - before.0) >> 20,
                (machine.moved_out - before.1) >> 20,
                policy.told(machine)
            );
        }
        (machine.now - begun) / 1e6
    };
    steps.iter().map(step).collect()
}

struct Run {
    local: Vec<f64>,
    never: Vec<f64>,
    ours: Vec<f64>,
}

impl Run {
    fn of(name: &str, more: usize) -> Self {
        Self::with(name, more, NOTHING_MORE)
    }

    /// Swaps take this more than they are reckoned with.
    fn with(name: &str, more: usize, extra: Extra) -> Self {
        let (trace, steps) = recorded(name, more);
        let links = || trace.links.clone();
        let local = times(&steps, &mut Machine::new(u64::MAX, links()), &mut Never);
        let never = times(&steps, &mut Machine::new(trace.near, links()), &mut Never);
        let mut ours = Ours::new(&trace);
        ours.ahead = Some(Default::default());
        let mut machine = Machine::new(trace.near, links());
        machine.chunks = Some(Default::default());
        machine.extra = extra;
        let ours = times(&steps, &mut machine, &mut ours);
        println!("{name}: all local {local:.1?}\n    never moved {never:.1?}\n    ours {ours:.1?}");
        Self { local, never, ours }
    }

    /// The last three steps, to all local.
    fn settled(&self) -> f64 {
        let last = |times: &[f64]| times.iter().rev().take(3).sum::<f64>();
        last(&self.ours) / last(&self.local)
    }

    /// All of it, to never moved.
    fn to_never(&self) -> f64 {
        self.ours.iter().sum::<f64>() / self.never.iter().sum::<f64>()
    }
}

#[test]
fn a_transformer_in_training_settles_near_the_time_that_it_takes_with_all_memory_near() {
    // What swaps take on GPUs decides how soon: with these costs the first twelve steps take what they were measured to.
    for (name, goal, extra) in [("training-1.2", 1.15), ("training-1.56", 1.35)]
        .into_iter()
        .flat_map(|(name, goal)| [NOTHING_MORE, A_DAY_LATER].map(|extra| (name, goal, extra)))
    {
        let run = Run::with(name, 16, extra);
        assert!(run.settled() <= goal, "{name}: {:.3} of all local", run.settled());
        // Within ten steps: the first two have nothing to compare with yet.
        let steps = run.ours.iter().zip(&run.local).enumerate().skip(8);
        for (step, ratio) in steps.map(|(step, (ours, local))| (step, ours / local)) {
            assert!(ratio <= goal + 0.25, "{name}: step {step} takes {ratio:.3} of all local");
        }
        assert!(run.never.last().unwrap() > &(1.5 * run.local.last().unwrap()), "{name}: nothing is far");
    }
}

#[test]
fn products_of_matrices_in_rotation_wait_for_little_more_than_their_copies() {
    let run = Run::of("rotation", 8);
    // Thirteen swaps a round, which nobody can do without, take a tenth of it, and what the sums of a round work on lies far, too.
    assert!(run.settled() <= 1.2, "{:.3} of all local", run.settled());
    assert!(run.to_never() <= 0.6, "{:.3} of never moved", run.to_never());
}

#[test]
fn what_is_read_once_or_fits_is_left_alone() {
    for (name, more) in [("decoding", 20), ("cupy", 0)] {
        let run = Run::of(name, more);
        assert!(run.to_never() <= 1.02, "{name}: {:.4} of never moved", run.to_never());
    }
}

/// In turns of one reading and many words, one wait for each word: the reading's milliseconds, and those of a whole turn.
fn turns(waits: &[Vec<Op>], words: usize, machine: &mut Machine, policy: &mut dyn Policy) -> Vec<(f64, f64)> {
    let took = times(waits, machine, policy);
    took.chunks(words).map(|turn| (turn[0], turn.iter().sum())).collect()
}

/// Not a recording, but what the model's layers are given, with the passes that products and attention of such sizes were measured to make.
#[test]
fn a_language_model_that_reads_and_writes_by_turns_has_what_it_reads_most_near_from_its_second_turn_on() {
    const WORDS: usize = 24;
    let trace = traces::language_model(15 * traces::GIB, 6, WORDS, traces::peer(), false);
    let all = by_turns(&trace, WORDS);
    for ours in all.ours {
        for (turn, (local, fixed)) in ours.iter().zip(all.local.iter().zip(&all.fixed)).skip(1) {
            assert!(turn.0 <= 1.5 * local.0, "a reading takes {:.3} of all local", turn.0 / local.0);
            assert!(turn.1 <= 1.15 * fixed.1, "a turn takes {:.3} of the best fixed choice", turn.1 / fixed.1);
        }
    }
}

/// The same beside the host, whose link takes seven times as long, with keys and values that are made as they are first used. A reading is about as many launches as a
/// word, and what it works on is nothing that writing does: it may not leave for it in the middle.
#[test]
fn beside_the_host_what_a_reading_works_on_stays_near_while_it_lasts() {
    const WORDS: usize = 12;
    let host = gpupool_tiers::Links::measured(vec![gpupool_tiers::FarLink::HOST]);
    let trace = traces::language_model(15 * traces::GIB, 8, WORDS, host, true);
    let all = by_turns(&trace, WORDS);
    let mut readings = Vec::new();
    for ours in all.ours {
        for (turn, never) in ours.iter().zip(&all.never).skip(3) {
            // Some readings bring things a second time, and take half as long again.
            assert!(turn.0 <= 0.42 * never.0, "a reading takes {:.3} of never moved", turn.0 / never.0);
            assert!(turn.1 <= 0.65 * never.1, "a turn takes {:.3} of never moved", turn.1 / never.1);
            readings.push(turn.0 / never.0);
        }
    }
    let mean = readings.iter().sum::<f64>() / readings.len() as f64;
    assert!(mean <= 0.3, "a reading takes {mean:.3} of never moved, in the mean");
}

struct ByTurns {
    local: Vec<(f64, f64)>,
    never: Vec<(f64, f64)>,
    fixed: Vec<(f64, f64)>,
    /// With exact times, and with every third, fifth and seventh one wrong.
    ours: Vec<Vec<(f64, f64)>>,
}

fn by_turns(trace: &Trace, words: usize) -> ByTurns {
    let waits: Vec<Vec<Op>> = trace.ops.split_inclusive(|op| *op == Op::Idle).map(<[Op]>::to_vec).collect();
    let run =
        |near: u64, policy: &mut dyn Policy| turns(&waits, words, &mut Machine::new(near, trace.links.clone()), policy);
    let (local, never) = (run(u64::MAX, &mut Never), run(trace.near, &mut Never));
    let fixed = run(trace.near, &mut BestStatic::of(trace));
    println!("all local {:.1?}, never moved {:.1?}, best fixed choice {:.1?}", local[0], never[0], fixed[0]);
    let ours = [None, Some((3, 1.6)), Some((5, 1.6)), Some((7, 1.3))].map(|noise| {
        let mut ours = Ours::new(trace);
        (ours.ahead, ours.noise) = (Some(Default::default()), noise);
        let mut machine = Machine::new(trace.near, trace.links.clone());
        machine.chunks = Some(Default::default());
        let ours = turns(&waits, words, &mut machine, &mut ours);
        println!("    ours {ours:.1?}");
        ours
    });
    ByTurns { local, never, fixed, ours: ours.into() }
}

/// Of the language model as it ran: what each reading of a prompt takes, and each turn with the words that follow.
fn of_turns(steps: &[Vec<Op>], took: &[f64]) -> Vec<(f64, f64)> {
    let mut turns: Vec<(f64, f64)> = Vec::new();
    let mut reads = false;
    for (ops, took) in steps.iter().zip(took) {
        let is_reading = ops.iter().any(|op| matches!(op, Op::Launch(step) if step.compute_ns > 1e6));
        if is_reading && !reads {
            turns.push((0.0, 0.0));
        }
        reads = is_reading;
        if let Some(turn) = turns.last_mut() {
            turn.1 += took;
            if is_reading {
                turn.0 += took;
            }
        }
    }
    turns
}

/// What the language model as it ran takes: each reading with its turn, and how often the program is stopped for a move while it reads.
struct Readings {
    local: Vec<(f64, f64)>,
    never: Vec<(f64, f64)>,
    ours: Vec<(f64, f64)>,
    stops: Vec<u64>,
}

/// How it is repeated: each word so often, the last turn so many times more, and whether numbers among its parameters pass for pointers.
#[derive(Clone, Copy, Default)]
struct Repeated {
    each_word: usize,
    more_turns: usize,
    has_strays: bool,
}

/// Launches that long are of a reading.
fn is_reading(ops: &[Op]) -> bool {
    ops.iter().any(|op| matches!(op, Op::Launch(step) if step.compute_ns > 1e6))
}

/// In front of a launch that reads one layer's weights, another is given two flags behind a zero, which are an address within these weights, 6 MiB behind their begin. On two
/// H100 (2026-11-27) it was so.
fn add_strays(step: &mut [Op]) {
    const WEIGHTS: u64 = 0x100_ffa0_0000;
    for at in 1..step.len() {
        let names = matches!(&step[at], Op::Launch(launch) if launch.words().contains(&WEIGHTS));
        if names && let Op::Launch(before) = &mut step[at - 1] {
            before.named = before.words();
            before.named.push(0x101_0000_0000);
        }
    }
}

/// A model of 6.7 billion parameters by the transformers library, 26 GiB with 17 near, as it ran on an H100 (2026-11-25): four times it reads 4 x 4 096 tokens and writes
/// eleven words. What it works on while it reads (128 to 344 MiB each) lies far at first, and while it writes nothing of that is used.
fn reads_and_writes(links: gpupool_tiers::Links, repeated: Repeated, extra: Extra) -> Readings {
    let trace = read("llm", &unpacked("llm"), links).unwrap();
    let is_word = |ops: &[Op]| {
        ops.len() > 200 && !is_reading(ops) && !ops.iter().any(|op| matches!(op, Op::Begin(_) | Op::End(_)))
    };
    let mut steps: Vec<Vec<Op>> = trace
        .ops
        .split_inclusive(|op| *op == Op::Idle)
        .flat_map(|ops| std::iter::repeat_n(ops.to_vec(), if is_word(ops) { repeated.each_word } else { 1 }))
        .collect();
    if repeated.has_strays {
        steps.iter_mut().filter(|step| is_reading(step)).for_each(|step| add_strays(step));
    }
    let last = (1..steps.len()).rev().find(|at| is_reading(&steps[*at]) && !is_reading(&steps[*at - 1])).unwrap();
    let turn = steps[last..].to_vec();
    (0..repeated.more_turns).for_each(|_| steps.extend(turn.clone()));
    let links = || trace.links.clone();
    let run =
        |near: u64, policy: &mut dyn Policy| of_turns(&steps, &times(&steps, &mut Machine::new(near, links()), policy));
    let (local, never) = (run(u64::MAX, &mut Never), run(trace.near, &mut Never));
    let mut ours = Ours::new(&trace);
    ours.ahead = Some(Default::default());
    let mut machine = Machine::new(trace.near, links());
    (machine.chunks, machine.extra) = (Some(Default::default()), extra);
    let (mut took, mut stopped) = (Vec::new(), Vec::new());
    for step in &steps {
        let before = machine.stops;
        took.extend(times(std::slice::from_ref(step), &mut machine, &mut ours));
        stopped.push((machine.stops - before) as f64);
    }
    let stops = of_turns(&steps, &stopped).iter().map(|turn| turn.0 as u64).collect();
    let ours = of_turns(&steps, &took);
    println!(
        "all local {local:.1?}\n    never moved {never:.1?}\n    ours {ours:.1?} moved in {} GiB, stops while reading {stops:?}",
        machine.moved_in >> 30
    );
    Readings { local, never, ours, stops }
}

/// What a swap takes more than it is reckoned with on two H100 (2026-11-26): 0.3 ms once, and 0.03 for each range.
const AS_MEASURED: Extra = Extra { once: 300_000.0, each_range: 30_000.0, each_byte: 0.0, two_steps: 0.0 };
/// The same as it was a day before, where most of them took two steps.
const IN_TWO_STEPS: Extra = Extra { once: 1_000_000.0, each_range: 50_000.0, each_byte: 0.0, two_steps: 0.0 };
/// The same on 2026-11-27, by least squares over the 352 swaps before launches of one run: 0.37 ms once, 0.19 for each range, 4.7 ns a KiB in all, and 0.73 where it took two steps.
const A_DAY_LATER: Extra = Extra { once: 380_000.0, each_range: 120_000.0, each_byte: 1.6e-3, two_steps: 700_000.0 };
const NOTHING_MORE: Extra = Extra { once: 0.0, each_range: 0.0, each_byte: 0.0, two_steps: 0.0 };

#[test]
fn a_language_model_that_ran_has_what_it_reads_with_near_from_its_second_reading_on() {
    for (each_word, extra) in
        [(1, NOTHING_MORE), (1, AS_MEASURED), (2, AS_MEASURED), (4, AS_MEASURED), (4, IN_TWO_STEPS)]
    {
        let repeated = Repeated { each_word, ..Repeated::default() };
        let Readings { local, never, ours, .. } = reads_and_writes(traces::peer(), repeated, extra);
        assert_eq!(ours.len(), 4);
        for (turn, ours) in ours.iter().enumerate().skip(1) {
            let most = if extra == IN_TWO_STEPS { 2.3 } else { 1.8 };
            assert!(ours.0 <= most * local[turn].0, "reading {turn} takes {:.3} of all local", ours.0 / local[turn].0);
            assert!(ours.1 <= 0.9 * never[turn].1, "turn {turn} takes {:.3} of never moved", ours.1 / never[turn].1);
        }
    }
}

/// As it ran on 2026-11-27, 22 words each: what one stop is made for is as much as the next layers read, and one layer's weights that seem to be short say nothing of the others'.
#[test]
fn once_it_has_read_some_times_it_is_stopped_seldom_for_moves_while_it_reads() {
    for has_strays in [false, true] {
        let repeated = Repeated { each_word: 2, more_turns: 3, has_strays };
        let Readings { local, ours, stops, .. } = reads_and_writes(traces::peer(), repeated, A_DAY_LATER);
        assert_eq!(ours.len(), 7);
        for turn in 4..7 {
            let reading = ours[turn].0 / local[turn].0;
            assert!(reading <= 1.55, "strays {has_strays}: reading {turn} takes {reading:.3} of all local");
            assert!(stops[turn] <= 45, "strays {has_strays}: {} stops in reading {turn}", stops[turn]);
        }
    }
}

#[test]
fn the_same_beside_the_host_reads_in_half_the_time_and_in_the_end_in_less_than_a_third() {
    for (each_word, extra) in [(1, NOTHING_MORE), (2, AS_MEASURED), (4, AS_MEASURED)] {
        let host = gpupool_tiers::Links::measured(vec![gpupool_tiers::FarLink::HOST]);
        let repeated = Repeated { each_word, ..Repeated::default() };
        let Readings { never, ours, .. } = reads_and_writes(host, repeated, extra);
        for (turn, ours) in ours.iter().enumerate().skip(1) {
            let most = if turn == 3 { 0.3 } else { 0.5 };
            assert!(
                ours.0 <= most * never[turn].0,
                "reading {turn} takes {:.3} of never moved",
                ours.0 / never[turn].0
            );
            assert!(ours.1 <= 0.75 * never[turn].1, "turn {turn} takes {:.3} of never moved", ours.1 / never[turn].1);
        }
    }
}

/// Beside the host a product whose operands are far takes a hundred times as long, and what is known of it must not be forgotten: where the last matrix of a round seems to be
/// an eighth shorter, two products of each round read the rest of it from afar unseen.
#[test]
fn products_of_matrices_in_rotation_beside_the_host_wait_for_their_copies_from_the_fourth_round_on() {
    let host = gpupool_tiers::Links::measured(vec![gpupool_tiers::FarLink::HOST]);
    let (trace, steps) = recorded("rotation", 20);
    let local = times(&steps, &mut Machine::new(u64::MAX, host.clone()), &mut Never);
    let trace = Trace { links: host.clone(), ..trace };
    let mut policy = Ours::new(&trace);
    policy.ahead = Some(Default::default());
    let mut machine = Machine::new(trace.near, host);
    machine.chunks = Some(Default::default());
    let ours = times(&steps, &mut machine, &mut policy);
    println!("all local {local:.0?}\n    ours {ours:.0?}");
    for (round, (ours, local)) in ours.iter().zip(&local).enumerate().skip(3) {
        assert!(ours <= &(3.0 * local), "round {round} takes {ours:.0} ms, and {local:.0} with all memory near");
    }
}
