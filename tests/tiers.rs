//! Memory that comes near, and leaves, while the program runs (`GPUPOOL_MOVE`).

use gpupool_events::Event;
use harness::{Build, Output, Run};

/// Two GPUs, of the first of which the program may have less than it asks for.
fn crowded(program: &str, arguments: &str, moving: &str) -> Run {
    let run = Run::built(&built(program)).args(arguments).sim("2x2GiB").env("SIMCUDA_CONTEXT_MIB", "0");
    let run = run.env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "1GiB").env("GPUPOOL_MOVE", moving);
    run.env("GPUPOOL_LOG", "gpupool::memory=debug").log().shim()
}

/// What such a program defines of the C library's is everybody's.
fn built(program: &str) -> Build {
    let build = Build::program(program);
    if program == "rotation" { build.flag("-rdynamic") } else { build }
}

/// Eight arrays of 8 MiB that are read in turn, six of which have room.
fn rotation(passes: u32, moving: &str) -> Output {
    rotation_with(passes, moving, "")
}

fn rotation_with(passes: u32, moving: &str, how: &str) -> Output {
    let output =
        crowded("rotation", &format!("8 8 {passes} {ROUNDS} {how}"), moving).env("GPUPOOL_LIMIT", "0:50MiB").go();
    let rounds = (0..ROUNDS).map(|round| format!("round {round}: sums right\n"));
    let arrays = (0..8).map(|array| format!("array {array}: 0 wrong\n"));
    output.succeeds().prints(&rounds.chain(arrays).collect::<String>());
    output
}

const ROUNDS: usize = 10;

/// Microseconds that the GPU took for each round.
fn rounds(output: &Output) -> Vec<f64> {
    let told =
        output.stderr.lines().filter_map(|line| line.strip_prefix("round ")?.split(": ").nth(1)?.split(' ').next());
    let rounds: Vec<f64> = told.filter_map(|number| number.parse().ok()).collect();
    assert_eq!(rounds.len(), ROUNDS, "{}", output.stderr);
    rounds
}

/// Bytes that came near, and that left, by all swaps.
fn swapped(output: &Output) -> (u64, u64) {
    let swaps = output.picked(|event| match event {
        Event::TierSwap(swap) => Some((swap.bytes_in, swap.bytes_out)),
        _ => None,
    });
    swaps.into_iter().fold((0, 0), |(came, left), (more_came, more_left)| (came + more_came, left + more_left))
}

/// A kernel that goes through its operand thousands of times gains so much by having it near that the time this machine takes for a
/// move hardly matters. On a busy machine moving may be found not to pay all the same; it is over then, so the fastest round counts.
#[test]
fn what_is_read_again_and_again_comes_near() {
    let (far, near) = (rotation(6000, "off"), rotation(6000, "auto"));
    assert_eq!(swapped(&far), (0, 0));
    let (far, near, swapped) = (rounds(&far), rounds(&near), swapped(&near));
    assert!(swapped.0 >= 8 << 20 && swapped.1 >= 8 << 20, "{swapped:?}");
    // Two arrays of eight are far, at a twelfth of the speed. One that comes near takes a third off the whole round.
    let fastest = near.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(fastest < 0.75 * far[0], "{far:?} against {near:?}");
}

/// How often somebody tried to move something: what came of it is told each time.
fn tries(output: &Output) -> usize {
    let told = output.picked(|event| matches!(event, Event::TierSwap(_)).then_some(()));
    told.len() + output.records.iter().filter(|record| record.message.contains("nothing moved for GPU 0")).count()
}

/// Whether the log has a line with this text.
fn said(output: &Output, text: &str) -> bool {
    output.records.iter().any(|record| record.message.contains(text))
}

/// To look which devices are open takes some microseconds for each descriptor.
#[test]
fn what_forbids_moving_is_looked_for_once_for_each_try() {
    let output = rotation(6000, "auto");
    let looks = output.stderr.lines().find_map(|line| line.strip_prefix("looked ")?.strip_suffix(" times"));
    let looks: usize = looks.unwrap_or_else(|| output.fail("no word of looks")).parse().unwrap();
    assert!((1..=tries(&output)).contains(&looks), "{looks} looks, {} tries", tries(&output));
}

/// Somebody has the driver's functions past all hooks, and uses them in the middle of a move.
#[test]
fn work_that_passed_no_gate_ends_all_moves_of_the_process() {
    let output = rotation_with(6000, "auto", "past");
    output
        .warns("work was submitted past the hooks while memory was about to be mapped anew: work was running on GPU 0");
    assert_eq!(swapped(&output), (0, 0), "the first move saw it, and there is no second one");
    assert_eq!(output.stderr.matches("memory stays where it is in this process").count(), 1, "{}", output.stderr);
}

/// A kernel that runs as long as the program likes lets no wait end.
#[test]
fn a_launch_waits_only_while_work_is_seen_to_end() {
    let output = rotation_with(6000, "auto", "persistent");
    assert!(said(&output, "no work was seen to end for"), "{:?}", output.records);
}

#[test]
fn what_runs_far_ahead_is_waited_for() {
    let (came, left) = swapped(&rotation_with(6000, "auto", "ahead"));
    assert!(came > 0 && left > 0, "{came} bytes came, {left} left");
}

/// What the program has put somewhere itself, or holds where it is, nobody moves, and nobody tries to.
#[test]
fn what_the_program_has_placed_stays_there_and_is_not_asked_for() {
    for how in ["kept", "away"] {
        let output = rotation_with(6000, "auto", how);
        assert_eq!((swapped(&output), tries(&output)), ((0, 0), 0), "{how}");
    }
    assert!(swapped(&rotation_with(6000, "auto", "taken_back")).0 > 0);
}

/// Ten arrays of 4 MiB of which eight have room; the last two are used eight times as often as the others, and come near where the
/// program waits.
#[track_caller]
fn at_rest(used: &str, waits: &str) {
    let output = crowded("at_rest", &format!("10 4 24 {used} {waits}"), "auto").env("GPUPOOL_LIMIT", "0:38MiB").go();
    output.succeeds().prints(&(0..10).map(|array| format!("array {array}: 0 wrong\n")).collect::<String>());
    let came = output.picked(|event| match event {
        Event::TierSwap(swap) if swap.why == "idle" => Some(swap.bytes_in),
        _ => None,
    });
    assert!(came.iter().sum::<u64>() >= 4 << 20, "{used}, {waits}: {came:?}\n{}", output.stderr);
}

#[test]
fn what_is_used_most_comes_near_where_the_program_waits() {
    for waits in ["context", "stream", "event", "copy"] {
        at_rest("copy", waits);
    }
}

#[test]
fn fills_are_uses_as_copies_are() {
    at_rest("fill", "stream");
}

#[test]
fn what_is_read_once_stays_where_it_is() {
    let output = rotation(1, "auto");
    assert_eq!(swapped(&output), (0, 0), "copying a byte costs as much as reading it from afar");
}

#[test]
fn nothing_moves_where_everything_has_room() {
    let output = crowded("rotation", "4 8 6000 3", "auto").go();
    assert_eq!(swapped(&output), (0, 0));
}

/// What a program does and prints is the same, whatever moves before each of its launches.
#[track_caller]
fn under_stress(program: &str, arguments: &str) -> (u64, u64) {
    let bare = Run::program(program).args(arguments).sim("2x2GiB").env("SIMCUDA_CONTEXT_MIB", "0").go();
    let moved = crowded(program, arguments, "stress").env("GPUPOOL_LIMIT", "96MiB").go();
    moved.same_as(&bare);
    swapped(&moved)
}

#[test]
fn arrays_are_right_while_they_move() {
    let (came, left) = under_stress("fill_spread", "8 64 130 200");
    assert!(came > 0 && left > 0, "{came} bytes came, {left} left");
}

#[test]
fn blocks_that_come_and_go_are_right_while_they_move() {
    under_stress("steps", "a:100 a:3 f:0 a:50 c:1 c:2 s f:1 f:2");
    under_stress("leak", "60");
}

#[test]
fn what_no_argument_names_is_right_while_it_moves() {
    for gpus in ["1", "2"] {
        // How often its threads leave the GPUs idle enough for a move is chance.
        under_stress("all_at_once", gpus);
    }
}

#[test]
fn programs_whose_gpus_are_never_idle_end_while_memory_would_move() {
    for part in ["persistent", "host", "functions", "flags", "capture", "ahead", "connections"] {
        under_stress("never_stuck", part);
    }
}

#[test]
fn graphs_are_right_while_memory_moves() {
    under_stress("graphs", "replay");
}

/// A graph of kernels is a launch of all that they are given.
#[test]
fn what_graphs_read_again_and_again_comes_near() {
    let (came, left) = swapped(&rotation_with(6000, "auto", "graphs"));
    assert!(came > 0 && left > 0, "{came} bytes came, {left} left");
}

/// An update of a graph whose copies were moved may be refused, as documented.
#[test]
fn what_a_graph_copies_stays_while_the_graph_does() {
    let output = rotation_with(6000, "auto", "copies");
    assert_eq!((swapped(&output), tries(&output)), ((0, 0), 0));
    assert!(swapped(&rotation_with(6000, "auto", "gone")).0 > 0);
}

#[test]
fn nothing_moves_once_it_is_not_known_what_a_graph_uses() {
    let output = rotation_with(6000, "auto", "set");
    output.warns("has made a CUDA graph of which it is not known what it uses");
    assert_eq!(swapped(&output), (0, 0));
}
