//! What a user of the crate relies on, one thing a test.

use crate::machine::{Machine, Making, Op, Trace};
use crate::policies::{Ahead, Never, Ours, Policy, apply, run, run_on};
use crate::traces::{self, GIB, MIB, Writer, peer};
use gpupool_tiers::{Range, Settings, Tiers, Where, Whereabouts, Why};

const BASE: u64 = 0x7000_0000_0000;

fn tiers() -> Tiers {
    Tiers::new(Settings::new(peer()))
}

/// Runs a trace, and answers what each part up to an idle point took, with the policy's state.
fn steps(trace: &Trace) -> (Vec<f64>, Ours, Machine) {
    let (mut machine, mut ours) = (Machine::new(trace.near, trace.links.clone()), Ours::new(trace));
    let (mut steps, mut last) = (Vec::new(), 0.0);
    for op in &trace.ops {
        apply(&mut machine, &mut ours, op);
        if *op == Op::Idle {
            steps.push(machine.now - last);
            last = machine.now;
        }
    }
    (steps, ours, machine)
}

#[test]
fn a_segment_of_tiny_tensors_is_as_many_extents_as_frames() {
    let (mut tiers, mut machine) = (tiers(), Machine::new(0, peer()));
    machine.begin(Range::of(BASE, 20 * MIB));
    tiers.block_began(BASE, 20 * MIB);
    for tensor in 0..500 {
        tiers.launched(1, 0, &[BASE + tensor * 40 * 1024], &machine);
    }
    assert_eq!(tiers.told(0, &machine).extents, 10);
}

#[test]
fn a_large_block_is_divided_at_its_weights() {
    let (mut tiers, mut machine) = (tiers(), Machine::new(0, peer()));
    machine.begin(Range::of(BASE, 24 * GIB));
    tiers.block_began(BASE, 24 * GIB);
    let weights: Vec<u64> = (0..200).map(|weight| BASE + weight * 120 * MIB).collect();
    tiers.launched(1, 0, &weights, &machine);
    assert_eq!(tiers.told(0, &machine).extents, 200);
    tiers.block_ended(BASE);
    assert_eq!(tiers.told(0, &machine).extents, 0);
}

#[test]
fn an_operand_goes_on_into_what_its_block_grew_by() {
    let (mut tiers, mut machine) = (tiers(), Machine::new(0, peer()));
    machine.begin(Range::of(BASE, 20 * MIB));
    tiers.block_began(BASE, 20 * MIB);
    for more in 1..3 {
        let address = BASE + more * 20 * MIB;
        machine.begin(Range::of(address, 20 * MIB));
        tiers.block_grew(BASE, address, 20 * MIB);
    }
    tiers.launched(1, 0, &[BASE + 10 * MIB], &machine);
    assert_eq!(tiers.told(1, &machine).readers[0].far_bytes, 50 * MIB);
    tiers.block_ended(BASE);
    assert_eq!(tiers.told(0, &machine).extents, 0, "it ends as a whole");
}

#[test]
fn what_no_block_has_is_nothing() {
    let (mut tiers, machine) = (tiers(), Machine::new(0, peer()));
    let launch = tiers.launched(1, 0, &[BASE, BASE + 1], &machine);
    assert!(!launch.ask && !launch.time_it);
    assert_eq!(tiers.before(launch.id, 1, &machine), None);
    assert_eq!(tiers.before(launch.id + 7, 1, &machine), None);
    tiers.timed(launch.id, 5);
    assert!(tiers.when_idle(1 << 40, 2, &machine).is_empty());
}

#[test]
fn a_pointer_that_was_nobody_s_names_the_block_that_begins_there() {
    let (mut tiers, mut machine) = (tiers(), Machine::new(0, peer()));
    tiers.launched(1, 0, &[BASE + 4 * MIB], &machine);
    machine.begin(Range::of(BASE, 8 * MIB));
    tiers.block_began(BASE, 8 * MIB);
    tiers.launched(1, 0, &[BASE + 4 * MIB], &machine);
    // In both of its launches.
    assert_eq!(tiers.told(1, &machine).readers[0].far_bytes, 8 * MIB);
    // Another block at the same address is another block.
    machine.end(Range::of(BASE, 8 * MIB));
    machine.begin(Range::of(BASE, 16 * MIB));
    tiers.block_ended(BASE);
    tiers.block_began(BASE, 16 * MIB);
    tiers.launched(1, 0, &[BASE + 4 * MIB], &machine);
    assert_eq!((tiers.told(0, &machine).extents, tiers.told(0, &machine).far), (2, 16 * MIB));
}

#[test]
fn activations_that_an_optimizer_s_state_drove_away_are_near_again_within_ten_steps() {
    for (ratio, links, most) in
        [(1.2, peer(), 1.15), (1.56, peer(), 1.15), (2.0, peer(), 1.15), (1.2, traces::host(), 1.15)]
    {
        let trace = traces::training(ratio, links, "training");
        let (took, _, _) = steps(&trace);
        let last = took[took.len() - 1];
        assert!(took[10] <= most * last, "{ratio}: {took:?}");
        let never = run(&trace, &mut Never).total / took.len() as f64;
        assert!(never > 1.5 * last, "a step takes {never} where nothing moves, and {last} in the end");
    }
}

#[test]
fn on_a_cycle_that_reads_each_byte_once_nothing_moves() {
    for ratio in [1.1, 1.5, 2.0] {
        let (_, mut ours, machine) = steps(&traces::cyclic(ratio, peer(), "once"));
        assert_eq!(ours.tiers.told(0, &machine).swaps, 0, "{ratio}");
    }
}

#[test]
fn the_reuse_of_a_function_is_measured() {
    let (_, mut ours, machine) = steps(&traces::rotation(peer(), "rotation"));
    let told = ours.tiers.told(4, &machine);
    let reuse = told.readers[0].reuse.unwrap();
    assert!((29.0..31.0).contains(&reuse), "{reuse}");
    assert_eq!(told.cycle, Some(32));
    assert!(told.saved_ns > 10.0 * told.spent_ns, "{told:?}");
}

/// Rotates, with what `prepare` says of the first four matrices.
fn rotated(prepare: impl Fn(&mut Machine, Range)) -> (Machine, Vec<Range>) {
    let trace = traces::rotation(peer(), "rotation");
    let (mut machine, mut ours) = (Machine::new(trace.near, trace.links.clone()), Ours::new(&trace));
    let mut blocks = Vec::new();
    for op in &trace.ops {
        apply(&mut machine, &mut ours, op);
        if let Op::Begin(block) = op {
            blocks.push(*block);
            if blocks.len() <= 4 {
                prepare(&mut machine, *block);
            }
        }
    }
    assert!(machine.moved_in > 10 * GIB);
    (machine, blocks)
}

#[test]
fn what_is_fixed_stays() {
    let (machine, blocks) = rotated(|machine, block| machine.fixed.push(Range::of(block.start + 64 * MIB, 128 * MIB)));
    let far: Vec<u64> =
        blocks[..4].iter().map(|block| machine.far_bytes(Range::of(block.start + 64 * MIB, 128 * MIB))).collect();
    assert_eq!(far, [0; 4]);
}

#[test]
fn what_is_far_and_must_stay_is_not_asked_for() {
    let (mut machine, mut tiers) = (Machine::new(256 * MIB, peer()), tiers());
    let blocks = [Range::of(BASE, 256 * MIB), Range::of(BASE + GIB, 256 * MIB)];
    for block in blocks {
        machine.begin(block);
        tiers.block_began(block.start, block.bytes());
    }
    let asked = |machine: &mut Machine, tiers: &mut Tiers| {
        let mut asked = 0;
        for _ in 0..200 {
            machine.now += 50e6;
            let launch = tiers.launched(1, 0, &[blocks[1].start], machine);
            if launch.tell_time {
                tiers.time_is(machine.now as u64, machine);
            }
            asked += u32::from(launch.ask);
            if launch.time_it {
                tiers.timing(launch.id, machine);
                tiers.timed(launch.id, 20_000_000);
            }
            assert!(machine.fixed.is_empty() || tiers.when_idle(u64::MAX, machine.now as u64, machine).is_empty());
        }
        asked
    };
    machine.fixed.push(blocks[1]);
    assert_eq!(asked(&mut machine, &mut tiers), 0);
    assert_eq!(tiers.told(1, &machine).far, 256 * MIB, "it is far all the same");
    machine.fixed.clear();
    tiers.placed(blocks[1]);
    assert!(asked(&mut machine, &mut tiers) > 0);
}

#[test]
fn what_left_comes_back_even_if_the_launch_that_reads_it_reads_what_came_for_it() {
    let mut writer = Writer::new();
    let blocks: Vec<Range> = (0..3).map(|_| writer.block(512 * MIB)).collect();
    for _ in 0..40 {
        writer.launch(1, &blocks[1..], 20_000.0, 30.0);
        writer.idle();
    }
    for _ in 0..40 {
        writer.launch(2, &blocks, 20_000.0, 1.0);
        // It reads the block that was not needed so far over and over, and the others once.
        if let Some(Op::Launch(step)) = writer.ops.last_mut() {
            step.reuses = vec![90.0, 1.0, 1.0];
        }
        writer.idle();
    }
    let trace = writer.trace("", GIB, peer(), 0);
    let (ours, never) = (run(&trace, &mut Ours::new(&trace)), run(&trace, &mut Never));
    assert!(ours.moved > 0 && ours.settled < never.settled, "{ours:?} {never:?}");
    let (steps, _, machine) = steps(&trace);
    assert_eq!(machine.far_bytes(blocks[0]), 0);
    // Ninety times half a GiB from the caches takes 5.4 ms.
    assert!(steps.last() < Some(&8e6), "{steps:?}");
}

#[test]
fn what_could_not_move_is_left_alone_for_a_while() {
    let (mut machine, mut tiers) = (Machine::new(256 * MIB, peer()), tiers());
    let blocks = [Range::of(BASE, 256 * MIB), Range::of(BASE + GIB, 256 * MIB)];
    for block in blocks {
        machine.begin(block);
        tiers.block_began(block.start, block.bytes());
    }
    let mut asked = Vec::new();
    for step in 0..2000 {
        machine.now += 50e6;
        let launch = tiers.launched(1, 0, &[blocks[1].start], &machine);
        if launch.tell_time {
            tiers.time_is(machine.now as u64, &machine);
        }
        if launch.ask && tiers.before(launch.id, machine.now as u64, &machine).is_some() {
            asked.push(step);
            tiers.stayed(blocks[1]);
        }
        if launch.time_it {
            tiers.timing(launch.id, &machine);
            tiers.timed(launch.id, 40_000_000);
        }
    }
    assert!(asked.len() > 1, "{asked:?}");
    assert!(asked.windows(2).all(|pair| pair[1] - pair[0] >= 8), "{asked:?}");
    assert!(asked.len() < 12, "{asked:?}");
}

#[test]
fn free_room_is_used_without_a_victim() {
    let mut writer = Writer::new();
    let first = writer.block(256 * MIB);
    let second = writer.block(256 * MIB);
    for _ in 0..4 {
        writer.launch(1, &[second], 1000.0, 1.0);
        writer.idle();
    }
    writer.ops.push(Op::End(first));
    for _ in 0..600 {
        writer.launch(1, &[second], 1000.0, 1.0);
        writer.idle();
    }
    let (_, _, machine) = steps(&writer.trace("room", 256 * MIB, peer(), 0));
    assert_eq!((machine.far_bytes(second), machine.moved_in, machine.moved_out), (0, 256 * MIB, 0));
}

#[test]
fn copies_count_by_the_bytes_that_they_touch() {
    let (mut tiers, mut machine) = (tiers(), Machine::new(0, peer()));
    machine.begin(Range::of(BASE, 64 * MIB));
    tiers.block_began(BASE, 64 * MIB);
    let launch = tiers.copied(&[Range::of(BASE + 16 * MIB, 8 * MIB)], &machine);
    assert!(!launch.time_it);
    assert_eq!(tiers.told(1, &machine).readers[0].far_bytes, 8 * MIB);
}

/// A machine on which near memory is slower than told, so that each move makes things worse than reckoned.
struct Lying(Ours);

impl Policy for Lying {
    fn began(&mut self, machine: &mut Machine, block: Range) {
        self.0.began(machine, block);
    }
    fn launch(&mut self, machine: &mut Machine, step: &crate::machine::Step) -> f64 {
        let took = self.0.launch(machine, step);
        let mut moved = 0;
        machine.pieces(step.ranges[0], &mut |piece, place| {
            if place == Where::Near && step.ranges[0].start >= BASE + 2 * GIB {
                moved += piece.bytes();
            }
        });
        machine.now += moved as f64 / 20.0;
        took
    }
    fn idle(&mut self, machine: &mut Machine) {
        self.0.idle(machine);
    }
}

#[test]
fn what_makes_cycles_longer_is_stopped_and_told_once() {
    let mut writer = Writer::new();
    let cold = writer.block(2 * GIB);
    let hot = writer.block(2 * GIB);
    writer.launch(9, &[cold], 1000.0, 1.0);
    for _ in 0..60 {
        for part in 0..16 {
            writer.launch(part, &[Range::of(hot.start + part * 128 * MIB, 128 * MIB)], 500_000.0, 6.0);
        }
        writer.idle();
    }
    let trace = writer.trace("lying", 2 * GIB, peer(), 0);
    let mut policy = Lying(Ours::new(&trace));
    let mut machine = Machine::new(trace.near, trace.links.clone());
    let mut told = Vec::new();
    for op in &trace.ops {
        apply(&mut machine, &mut policy, op);
        told.extend(policy.0.tiers.stopped());
    }
    assert!(matches!(told[..], [Why::Slower { before_ns, now_ns }] if now_ns > before_ns), "{told:?}");
    assert!(policy.0.tiers.told(0, &machine).stopped.is_some());
}

#[test]
fn kinds_and_extents_are_bounded() {
    let (mut tiers, mut machine) = (tiers(), Machine::new(0, peer()));
    machine.begin(Range::of(BASE, 1 << 40));
    tiers.block_began(BASE, 1 << 40);
    for launch in 0..200_000u64 {
        tiers.launched(launch, 0, &[BASE + launch * 5 * MIB % (1 << 40)], &machine);
    }
    let told = tiers.told(3, &machine);
    assert!(told.extents <= 1 << 16, "{}", told.extents);
    assert_eq!((told.launches, told.readers.len()), (200_000, 1.max(told.readers.len().min(3))));
}

/// A share of nothing keeps everything where it is; with another one, given while the program runs, memory comes near as with that from the begin.
#[test]
fn a_share_that_is_given_later_is_spent() {
    let trace = traces::rotation(peer(), "rotation");
    let came = |begin: f64| {
        let (mut machine, mut ours) = (Machine::new(trace.near, trace.links.clone()), Ours::new(&trace));
        ours.tiers.set_share(begin);
        let mut at_half = 0;
        for (number, op) in trace.ops.iter().chain(&trace.ops).filter(|op| !matches!(op, Op::End(_))).enumerate() {
            if number == trace.ops.len() {
                at_half = machine.moved_in;
                ours.tiers.set_share(0.05);
            }
            // The second time everything is there.
            if number < trace.ops.len() || !matches!(op, Op::Begin(..)) {
                apply(&mut machine, &mut ours, op);
            }
        }
        (at_half, machine.moved_in)
    };
    let (nothing, later) = came(0.0);
    assert_eq!(nothing, 0);
    let (half, all) = came(0.05);
    assert!(half > 0 && later > (all - half) / 2, "{later} bytes came, {} with it from the begin", all - half);
}

/// The first moves to the host make memory there, which takes the driver 16 times as long as filling it (H200), and longer where nobody had touched that
/// memory before. It is kept for the moves that follow.
#[test]
fn memory_that_is_made_for_the_first_moves_is_no_price_of_later_ones() {
    let trace = traces::training(1.2, traces::host(), "training");
    let cost = |gib_ns: f64, makes_beside: bool| {
        let mut machine = Machine::new(trace.near, trace.links.clone());
        machine.making = Some(Making::new(gib_ns));
        let mut ours = Ours::new(&trace);
        ours.makes_beside = makes_beside;
        run_on(machine, &trace, &mut ours)
    };
    let (warm, never) = (cost(0.0, false), run(&trace, &mut Never));
    assert!(never.total > 5.0 * warm.total);
    for gib_ns in [0.3e9, 1e9, 3e9] {
        let (cold, beside) = (cost(gib_ns, false), cost(gib_ns, true));
        let told =
            format!("{gib_ns} ns a GiB: {cold:?}, beside the program {beside:?}, where it takes no time {warm:?}");
        assert!(cold.settled <= 1.03 * warm.settled && beside.settled <= 1.03 * warm.settled, "{told}");
        // At 150 times what filling takes, the program is ahead of its memory for a while, and no more.
        assert!(cold.total > 1.2 * warm.total && beside.total <= 1.25 * warm.total, "{told}");
    }
}

/// A swap that was not begun, as the GPU was busy, has found nothing out: it is asked for as if it had never been answered.
#[test]
fn what_could_not_be_tried_was_no_try() {
    let (mut machine, mut tiers) = (Machine::new(256 * MIB, peer()), tiers());
    let blocks = [Range::of(BASE, 256 * MIB), Range::of(BASE + GIB, 256 * MIB)];
    for block in blocks {
        machine.begin(block);
        tiers.block_began(block.start, block.bytes());
    }
    let mut answered = 0;
    for _ in 0..2000 {
        machine.now += 50e6;
        let launch = tiers.launched(1, 0, &[blocks[1].start], &machine);
        if launch.tell_time {
            tiers.time_is(machine.now as u64, &machine);
        }
        if launch.ask
            && let Some(swap) = tiers.before(launch.id, machine.now as u64, &machine)
        {
            answered += u32::from(swap.time_it);
            tiers.not_begun(&swap);
        }
        if launch.time_it {
            tiers.timing(launch.id, &machine);
            tiers.timed(launch.id, 40_000_000);
        }
    }
    assert!(answered > 10, "{answered}");
}

/// What is read eight times in a row is worth a swap of its price, and not one of three times as much: who took that for the price would move nothing any more, and never find
/// out.
#[test]
fn what_is_hardly_worth_a_swap_is_moved_although_the_first_one_had_to_make_memory() {
    let mut writer = Writer::new();
    let arrays: Vec<Range> = (0..8).map(|_| writer.block(512 * MIB)).collect();
    for _ in 0..400 {
        for array in &arrays {
            writer.launch(1, &[*array], 10_000_000.0, 8.0);
        }
        writer.idle();
    }
    let settled = writer.ops.len() / 2;
    let trace = writer.trace("", 6 * 512 * MIB, traces::host(), settled);
    let settled = |gib_ns: f64| {
        let mut machine = Machine::new(trace.near, trace.links.clone());
        machine.making = Some(Making::new(gib_ns));
        run_on(machine, &trace, &mut Ours::new(&trace))
    };
    let (warm, cold) = (settled(0.0), settled(1e9));
    println!("{warm:?} {cold:?} {:?}", run(&trace, &mut Never));
    assert!(warm.moved_settled > 0, "{warm:?}");
    assert!(cold.settled <= 1.03 * warm.settled, "{cold:?} and {warm:?}");
}

/// As large as a tenth of the GPU's memory or as small as in the tests of processes, whose kernels read each byte more often than any that is in use:
/// what takes longer by far memory comes near as soon as moves may cost something. (Of a kernel that reads each byte thousands of times nobody knows any more
/// after some hundred launches that all of its time is that; then an array is tried that is an eighth of near memory at most.)
#[test]
fn a_share_that_is_given_later_is_spent_whatever_the_size() {
    for (mib, reuse) in [(8, 400.0), (64, 100.0), (512, 30.0), (10 << 10, 30.0), (10 << 10, 8.0)] {
        let mut writer = Writer::new();
        let arrays: Vec<Range> = (0..8).map(|_| writer.block(mib * MIB)).collect();
        for _ in 0..200 {
            for array in &arrays {
                writer.launch(1, &[*array], 100_000.0, reuse);
                writer.idle();
            }
        }
        let trace = writer.trace("", 6 * mib * MIB, peer(), 0);
        let came = |begin: f64| {
            let (mut machine, mut ours) = (Machine::new(trace.near, trace.links.clone()), Ours::new(&trace));
            ours.tiers.set_share(begin);
            let half = trace.ops.len() / 2;
            trace.ops[..half].iter().for_each(|op| apply(&mut machine, &mut ours, op));
            let at_half = machine.moved_in;
            ours.tiers.set_share(0.05);
            trace.ops[half..].iter().for_each(|op| apply(&mut machine, &mut ours, op));
            (at_half, machine.moved_in - at_half)
        };
        let ((none, later), (_, usual)) = (came(0.0), came(0.05));
        assert_eq!(none, 0);
        assert!(later > usual / 4, "{mib} MiB read {reuse} times: {later} bytes came, {usual} with it from the begin");
    }
}

/// A job of several ranks runs ahead of the device, which never comes to rest before a launch, as it waits for the other ranks there. All its products are given a workspace that
/// none reads. That leaves first, and fifty of them are charged with reading it thirty times before the first is measured.
#[test]
fn what_launches_are_given_and_do_not_read_keeps_no_job_of_several_ranks_from_moving() {
    const FIRST: usize = 12;
    let mut writer = Writer::new();
    let workspace = writer.block(128 * MIB);
    let [weights, states, outputs] = [0; 3].map(|_| (0..20).map(|_| writer.block(128 * MIB)).collect::<Vec<Range>>());
    let links = traces::host();
    // No product is made in the first steps.
    for _ in 0..FIRST {
        for block in outputs.iter().chain(&states).chain(&weights) {
            writer.launch(3, &[*block], 5_000_000.0, 2.0);
        }
        writer.idle();
    }
    for _ in 0..30 {
        for _ in 0..2 {
            for (weight, output) in weights.iter().zip(&outputs) {
                writer.launch(1, &[workspace, *weight, *output], 5_000_000.0, 1.0);
                if let Some(Op::Launch(step)) = writer.ops.last_mut() {
                    step.reuses = vec![0.0, 8.0, 8.0];
                }
            }
        }
        for (weight, state) in weights.iter().zip(&states) {
            writer.launch(2, &[*weight, *state], 10_000.0, 1.0);
        }
        writer.idle();
    }
    let trace = writer.trace("", 55 * 128 * MIB, links, 0);
    let (mut machine, mut ours) = (Machine::new(trace.near, trace.links.clone()), Ours::new(&trace));
    (ours.ahead, ours.rests_at_idle_points_alone) = (Some(Ahead::default()), true);
    let (mut steps, mut last, mut left) = (Vec::new(), 0.0, false);
    for op in &trace.ops {
        apply(&mut machine, &mut ours, op);
        left |= machine.far_bytes(workspace) > 0;
        if *op == Op::Idle {
            steps.push((machine.now - last) / 1e6);
            last = machine.now;
        }
    }
    let never = run(&trace, &mut Never).total / 1e6 / steps.len() as f64;
    assert!(left, "nothing is shown by what stayed near");
    // From the fifth step of the products on.
    let settled = steps[FIRST + 4..].iter().copied().fold(0.0, f64::max);
    assert!(settled < 0.6 * never, "{settled} ms a step, and {never} where nothing moves: {steps:.0?}");
}
