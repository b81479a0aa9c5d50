//! Memory that comes near, and leaves, while the program runs (`GPUPOOL_MOVE`).

use gpupool_events::{Event, Reader, Record};
use gpupool_metrics::{Counter, Snapshot};
use harness::{Build, Driver, Output, Run, Running, driver_without, eventually, page_of};
use std::collections::BTreeMap;
use std::io::BufReader;

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
    output.succeeds().prints(&sums_and_arrays());
    output
}

/// What `rotation` prints of eight arrays.
fn sums_and_arrays() -> String {
    let rounds = (0..ROUNDS).map(|round| format!("round {round}: sums right\n"));
    rounds.chain((0..8).map(|array| format!("array {array}: 0 wrong\n"))).collect()
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

/// The driver takes long to make memory of the host, so no launch waits for that.
#[test]
fn memory_of_the_host_that_moves_need_is_made_beside_the_program() {
    let run = crowded("rotation", &format!("8 8 6000 {ROUNDS}"), "auto").sim("1x2GiB").env("SIMCUDA_CONTEXT_MIB", "0");
    let output = run.env("GPUPOOL_LIMIT", "0:50MiB").go();
    output.succeeds().prints(&sums_and_arrays());
    let of = |text: &str| output.records.iter().position(|record| record.message.contains(text));
    let waits = of("nothing moved for GPU 0: memory of the host is made for it first, beside the program");
    let made = of("memory of the host for a move of 8.0 MiB was made beside the program");
    // How soon the other thread has a processor is chance; nothing moves before.
    let came = of("8.0 MiB came near").unwrap_or(usize::MAX);
    assert!(
        waits.is_some() && waits < made.or(Some(came)) && made.unwrap_or(came) <= came,
        "{waits:?}, {made:?}, {came}"
    );
}

/// Memory that the program makes by `cuMemCreate`, as PyTorch's expandable segments (`segments`) and JAX's arena do.
/// What stands on one chunk with memory that stays could not leave, and for its 8 MiB nothing came.
#[test]
fn what_has_room_comes_near_though_not_all_leaves_that_was_to() {
    let output = crowded("shares_a_chunk", "", "auto").env("GPUPOOL_LIMIT", "0:50MiB").go();
    output.succeeds().prints("at first: 0 MiB near\nin the end: 32 MiB near\n0 wrong\n");
}

/// The driver has less than the limit says, since another program has taken memory: what is far did not fit in one piece, so 128 MiB left for it and nothing
/// came.
#[test]
fn what_leaves_for_something_is_not_lost_where_less_comes_than_was_reckoned_with() {
    for taken in [60, 180] {
        let run = crowded("half_near", &format!("604 300 300 200 1500 {taken}"), "auto").sim("2x832MiB");
        let output = run.env("SIMCUDA_CONTEXT_MIB", "0").go();
        output.succeeds();
        let line = output.stdout.lines().next().unwrap_or_default();
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let &[first, least, last] = &numbers[..] else { output.fail("no numbers") };
        assert!(output.stdout.ends_with("sums right\narray 0: 0 wrong\narray 1: 0 wrong\n"), "{}", output.stdout);
        // The last part that has room is a 16th of what was to come, at least.
        assert!(least + 304 / 16 >= first && last + 304 / 16 >= first, "{line}");
        assert!(swapped(&output).1 >= 128 << 20, "nothing left: {line}");
    }
}

#[test]
fn the_programs_own_memory_comes_near_as_the_pools_does() {
    for how in ["segments", "arena"] {
        let (far, near) = (rotation_with(6000, "off", how), rotation_with(6000, "auto", how));
        assert_eq!(swapped(&far), (0, 0), "{how}");
        let (far, near, swapped) = (rounds(&far), rounds(&near), swapped(&near));
        assert!(swapped.0 >= 8 << 20 && swapped.1 >= 8 << 20, "{how}: {swapped:?}");
        let fastest = near.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(fastest < 0.75 * far[0], "{how}: {far:?} against {near:?}");
    }
}

/// A kernel is given the begin of an array, and that is on another GPU than the rest, which the program asked for there.
#[test]
fn the_programs_own_memory_comes_near_behind_some_of_another_gpu() {
    let run = crowded("rotation", &format!("8 12 6000 {ROUNDS} mixed"), "auto").env("GPUPOOL_LIMIT", "0:50MiB").go();
    let right: String = (0..ROUNDS).map(|round| format!("round {round}: sums right\n")).collect();
    assert!(run.succeeds().stdout.starts_with(&right), "{}", run.stdout);
    let (came, left) = swapped(&run);
    assert!(came >= 8 << 20 && left >= 8 << 20, "{came} bytes came, {left} left");
}

/// What a move counts is what moved, and not what was there when it began to wait.
#[test]
fn what_the_program_maps_anew_while_a_move_waits_is_not_taken_for_what_was_there() {
    let run = crowded("own_moves", "remaps", "stress").go();
    run.succeeds().prints("changed\n");
    assert_eq!(swapped(&run), (0, 0));
}

/// Everything near was in use for as long as anything was launched. That all of it is free at the end is no reason.
#[test]
fn what_is_free_at_the_end_did_not_keep_anything_far() {
    // Too few rounds for anything to have come near.
    let told = crowded("rotation", "8 8 6000 3", "auto").env("GPUPOOL_LIMIT", "0:50MiB").go();
    let reasons = told.picked(|event| match event {
        Event::TierReader(reader) => Some(reader.why.clone()),
        _ => None,
    });
    assert!(!reasons.is_empty(), "{}", told.stderr);
    assert!(
        reasons
            .iter()
            .all(|why| why == "nothing that lies near and may leave is used so much less that an exchange pays"),
        "{reasons:?}"
    );
}

/// What a page draws of moves and of the pool's addresses comes from these lines alone.
#[test]
fn what_the_log_tells_of_moves_and_addresses_adds_up() {
    let run = crowded("rotation", &format!("8 8 6000 {ROUNDS}"), "auto").env("GPUPOOL_LIMIT", "0:50MiB");
    let output = run.env("GPUPOOL_LOG", "info,gpupool::memory=debug").go();
    output.succeeds();
    let totals = output.picked(|event| match event {
        Event::TierTotal(total) => Some((total.times, total.came, total.left)),
        _ => None,
    });
    let (came, left) = swapped(&output);
    let swaps = output
        .picked(|event| matches!(event, Event::TierSwap(swap) if swap.bytes_in + swap.bytes_out > 0).then_some(()));
    assert_eq!(totals, [(swaps.len() as u64, came, left)]);
    assert!(came > 0, "nothing moved");

    // Each record says what lies at some frames from then on, so at the end they say what is mapped where.
    let frame = 2 << 20;
    let mut frames: BTreeMap<u64, Option<String>> = BTreeMap::new();
    let changes = output.picked(|event| match event {
        Event::PoolMap(map) => Some(map.changes.clone()),
        _ => None,
    });
    for change in changes.iter().flatten() {
        for at in (change.address..change.address + change.bytes).step_by(frame) {
            assert_ne!(frames.insert(at, change.place.clone()).flatten(), change.place, "{change:?} changes nothing");
        }
    }
    let mut mapped: BTreeMap<String, u64> = BTreeMap::new();
    for place in frames.into_values().flatten() {
        *mapped.entry(place).or_default() += frame as u64;
    }
    let told = output.picked(|event| match event {
        Event::ProcessExit(exit) => Some(exit.peak.clone()),
        _ => None,
    });
    // The pool also holds memory that is mapped nowhere, to come near with.
    let told: BTreeMap<String, u64> = told.into_iter().flatten().map(|place| (place.place, place.held)).collect();
    assert!(
        !mapped.is_empty() && mapped.iter().all(|(place, bytes)| told.get(place) >= Some(bytes)),
        "{mapped:?} of {told:?}"
    );
}

/// The page of a running program.
fn page(program: &Running) -> Option<Snapshot> {
    page_of(&program.session(), program.pid())
}

#[test]
fn the_page_counts_what_moved_from_and_to_where_and_what_is_still_far() {
    let run = crowded("rotation", "8 8 6000 10 wait", "auto").env("GPUPOOL_LIMIT", "0:50MiB,1:8MiB");
    let program = run.start(None);
    let told = eventually("a move on the page", || page(&program).filter(|told| told.counter(Counter::Moves) > 0));
    let count = |counter| told.counter(counter);
    let came = count(Counter::CameFromPeersBytes) + count(Counter::CameFromHostBytes);
    let left = count(Counter::LeftForPeersBytes) + count(Counter::LeftForHostBytes);
    assert!(came >= 8 << 20 && left >= 8 << 20, "{told:?}");
    assert!(count(Counter::MovingMicroseconds) > 0, "{told:?}");
    let residence = &told.levels.residence;
    // One array lies on the other GPU and another on the host; the near ones are in front of the limit.
    assert!(residence.on_peers > 0 && residence.on_host > 0 && residence.near >= 40 << 20, "{residence:?}");
    assert_eq!(residence.near + residence.on_peers + residence.on_host, 8 * (8 << 20) + (2 << 20), "{residence:?}");
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

/// A planted fault: as if the table of hooks had no row for a two-dimensional fill. It comes behind the last look at what is at work, and the strict driver of all tests tells of it.
#[test]
fn a_fill_that_passes_no_gate_would_be_told_by_the_simulated_driver() {
    let run = crowded("rotation", "8 8 1 2 fills", "stress").env("GPUPOOL_LIMIT", "0:50MiB");
    let output = run.may_violate().go();
    let told = output.violations.iter().filter(|told| told.contains("cuMemUnmap"));
    assert!(told.count() > 0, "{:?}\n{}", output.violations, output.stderr);
}

/// Where work may be submitted or memory be reached past the hooks, or quiet cannot be proven, nothing moves, and one line says why.
#[test]
fn nothing_moves_where_quiet_cannot_be_proven_and_that_is_told_once() {
    let run = || crowded("rotation", &format!("8 8 6000 {ROUNDS}"), "auto").env("GPUPOOL_LIMIT", "0:50MiB");
    let tool = Build::library("caching", "ToolsInjection64").path();
    for (run, why) in [
        (run().env("CUDA_INJECTION64_PATH", "/nowhere"), "CUDA_INJECTION64_PATH is set"),
        (run().preload(tool), "libToolsInjection64.so is loaded, a tool that submits work of its own"),
    ] {
        let output = run.go();
        output.succeeds().prints(&sums_and_arrays());
        output.warns(why);
        assert_eq!(swapped(&output), (0, 0), "{why}");
        assert_eq!(output.stderr.matches("memory stays where it is in this process").count(), 1, "{}", output.stderr);
    }
}

/// A function that may submit work and that no hook is in front of: nobody has to call it. Looked up in the middle of a program whose memory has moved so far.
#[test]
fn moves_end_where_a_function_is_looked_up_that_nobody_has_looked_at() {
    for how in ["dlsym", "address"] {
        let output = rotation_with(1, "stress", how);
        let why = "the program looked up cuMemcpyDtoD, which is not known to submit nothing";
        output.warns(&format!("memory stays where it is in this process, because {why}"));
        let is_move =
            |record: &&Record| matches!(&record.event, Event::TierSwap(swap) if swap.bytes_in + swap.bytes_out > 0);
        let told = output.records.iter().position(|record| record.message.contains(why));
        let (before, after) = output.records.split_at(told.unwrap_or_else(|| output.fail("not in the log")));
        let moves = [before, after].map(|part| part.iter().filter(is_move).count());
        assert!(moves[0] > 0 && moves[1] == 0, "{how}: {moves:?} moves before and after");
    }
}

/// Many programs load such a library and never use it. Moves go on, since quiet is proven for all work; whoever looks for a wrong word finds this.
#[test]
fn a_library_that_might_use_memory_unseen_is_told_once_where_memory_moves() {
    let run = crowded("rotation", "8 8 1 6", "stress").env("GPUPOOL_LIMIT", "0:50MiB");
    let output = run.preload(Build::library("caching", "cufile").path()).go();
    output.succeeds();
    assert!(swapped(&output).0 > 0, "{:?}", swapped(&output));
    let told = output.records.iter().filter(|record| record.message.contains("memory moves although"));
    let told: Vec<&str> = told.map(|record| record.message.as_str()).collect();
    assert!(matches!(&told[..], [one] if one.contains("libcufile.so is loaded")), "{told:?}");
    assert!(!output.stderr.contains("libcufile.so"), "{}", output.stderr);
    let without = rotation_with(1, "stress", "");
    assert!(!said(&without, "memory moves although"), "{:?}", without.records);
}

/// What `rotation` was kept from moving by, told in one line, where memory would have come near otherwise.
#[track_caller]
fn nothing_moves(run: Run, why: &str) {
    let output = run.env("GPUPOOL_LIMIT", "0:50MiB").go();
    output.succeeds().prints(&sums_and_arrays());
    output.warns(why);
    assert_eq!(swapped(&output), (0, 0), "{why}");
    assert_eq!(output.stderr.matches("memory stays where it is in this process").count(), 1, "{}", output.stderr);
}

fn rotated() -> Run {
    crowded("rotation", &format!("8 8 6000 {ROUNDS}"), "auto")
}

#[test]
fn nothing_moves_where_other_processes_share_the_contexts_and_that_is_told_once() {
    nothing_moves(rotated().env("SIMCUDA_MPS", "on"), "other processes share the context of GPU 0 (MPS)");
}

/// `cuCtxRecordEvent` came with CUDA 12.5, `cuFuncGetParamInfo` with 12.4.
#[test]
fn nothing_moves_with_a_driver_that_is_too_old_and_that_is_told_once() {
    for (version, lacks) in
        [("12040", &["cuCtxRecordEvent"][..]), ("12030", &["cuCtxRecordEvent", "cuFuncGetParamInfo"])]
    {
        let driver = driver_without(lacks).unwrap();
        let run = rotated().driver(Driver::In(driver.path().to_owned())).env("SIMCUDA_DRIVER", version);
        nothing_moves(run, "the driver is older than CUDA 12.5");
    }
}

#[test]
fn nothing_moves_under_confidential_computing_and_that_is_told_once() {
    nothing_moves(rotated().nvml().env("SIMCUDA_CONFIDENTIAL", "on"), "confidential computing is on");
}

/// `rotation` where the system refuses a command of `membarrier`, or all.
fn sandboxed(command: &str) -> Run {
    let run = crowded("sandboxed", command, "auto").arg(built("rotation").path());
    run.args(&format!("8 8 6000 {ROUNDS}"))
}

/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED`, which the system says that it has.
#[test]
fn nothing_moves_where_the_system_refuses_the_barrier_and_that_is_told_once() {
    nothing_moves(sandboxed("16"), "the system refused membarrier(PRIVATE_EXPEDITED)");
}

/// Where there is no barrier at all every thread makes its own.
#[test]
fn memory_comes_near_where_the_system_has_no_barrier_as_well() {
    let output = sandboxed("-1").env("GPUPOOL_LIMIT", "0:50MiB").go();
    output.succeeds().prints(&sums_and_arrays());
    assert!(swapped(&output).0 > 0, "{}", output.stderr);
}

/// How many swaps in which something moved a program that runs has told of so far.
fn swaps_told(program: &Running) -> usize {
    let Ok(log) = std::fs::File::open(program.log()) else { return 0 };
    // The last line may be half written.
    let records = Reader::new(BufReader::new(log)).map_while(Result::ok);
    let moved = |event: &Event| matches!(event, Event::TierSwap(swap) if swap.bytes_in + swap.bytes_out > 0);
    records.filter(|record| moved(&record.event)).count()
}

/// The copies of such a move are ours, and no work that passed the gate.
#[test]
fn what_is_moved_by_hand_beside_other_moves_is_not_taken_for_work_past_the_hooks() {
    let run = crowded("by_hand_beside", "", "stress").env("GPUPOOL_LIMIT", "0:28MiB,1:64MiB").report();
    let mut program = run.start(None);
    let moves = |program: &mut Running| program.ask("moves").parse().unwrap_or(0);
    // Each goes on until as many of the other's moves as show something were made beside it.
    let (mut swaps, mut by_hand) = (0, 0);
    for _ in 0..2 {
        swaps = eventually("another move for a launch", || Some(swaps_told(&program)).filter(|now| *now > swaps));
        by_hand = eventually("another move by hand", || Some(moves(&mut program)).filter(|now: &u64| *now > by_hand));
    }
    assert_eq!(program.ask("end"), "0 wrong");
    let log = std::fs::read_to_string(program.log()).unwrap_or_default();
    assert!(!log.contains("past the hooks"), "{log}");
    let (status, folder) = program.end();
    let report = std::fs::read_to_string(folder.path().join("report")).unwrap_or_default();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap_or_default();
    assert!(status.success() && report["violations"] == serde_json::json!([]), "{status}: {report}");
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

/// What a program has freed and does not take again is kept by the pool for a while, or for ever. It is room for what is far.
#[test]
fn what_is_far_comes_near_where_near_memory_is_freed() {
    let run = crowded("freed_near", "", "auto").env("GPUPOOL_LIMIT", "0:42MiB").env("GPUPOOL_IDLE", "off");
    let output = run.go();
    output.succeeds().prints("before: far\nafter: near\nsum: right\narray: 0 wrong\n");
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
    // Both at once, and as much for them: that they and what leaves are blocks beside each other cuts nothing off.
    assert!(came.iter().any(|bytes| *bytes >= 8 << 20), "{used}, {waits}: {came:?}\n{}", output.stderr);
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
fn what_leaves_as_it_came_is_not_copied_and_is_right() {
    let bare = Run::program("rotation").args("8 64 2 12").sim("2x2GiB").env("SIMCUDA_CONTEXT_MIB", "0").go();
    let moved = crowded("rotation", "8 64 2 12", "stress").env("GPUPOOL_LIMIT", "0:352MiB").go();
    moved.same_as(&bare);
    let same = moved.picked(|event| match event {
        Event::TierSwap(swap) => Some(swap.as_it_came),
        _ => None,
    });
    // Nobody writes to the arrays once they are filled.
    assert!(same.iter().any(|bytes| *bytes > 0), "{same:?}");
}

#[test]
fn the_programs_own_memory_is_right_while_it_moves() {
    for how in ["segments", "arena"] {
        let (came, left) = under_stress("rotation", &format!("12 8 3 6 {how}"));
        assert!(came > 0 && left > 0, "{how}: {came} bytes came, {left} left");
    }
    // Threads that map and unmap beside each other's moves; nothing of it is left.
    let (came, left) = under_stress("own_moves", "churn 4 80");
    assert!(came > 0 && left > 0, "{came} bytes came, {left} left");
}

#[test]
fn what_others_reach_by_its_pages_or_was_put_somewhere_stays_of_the_programs_own_memory() {
    let told = crowded("own_moves", "stays", "stress").go();
    told.succeeds().prints(
        "plain: moves\nexported: stays\nmapped twice: stays\nput by hand: stays\ncompressed: stays\nfor decompression: stays\n\
         told to be on GPU 0; 0 wrong\n",
    );
}

#[test]
fn a_fault_at_any_call_while_the_programs_own_memory_moves_loses_nothing() {
    let run = |nth: u64| crowded("own_moves", &format!("faults {nth}"), "stress").env("GPUPOOL_LIMIT", "0:20MiB").go();
    let counted = run(0);
    counted.succeeds();
    let calls = counted.stdout.lines().find_map(|line| line.strip_prefix("calls: ")?.parse().ok());
    let calls: u64 = calls.unwrap_or_else(|| counted.fail("no count"));
    assert!(swapped(&counted).0 > 0 && swapped(&counted).1 > 0, "{:?}", swapped(&counted));
    // Every kind of call comes again for each part that moves.
    let step = (calls / 300).max(11) as usize;
    for nth in (1..=calls.min(60)).chain((61..=calls).step_by(step)) {
        run(nth).succeeds().prints("0 wrong\n");
    }
}

/// Two arrays, one of which has room on the first GPU, that swap with another GPU or the host while faults strike.
fn moved_faults(gpus: &str, host: &str, arguments: &str) -> Output {
    let run = crowded("moved_faults", arguments, "stress").sim(gpus).env("SIMCUDA_CONTEXT_MIB", "0");
    run.env("GPUPOOL_LIMIT", "0:24MiB").env("GPUPOOL_HOST_LIMIT", host).go()
}

/// The first call that was not struck; each that was left everything in order, and the program went on.
#[track_caller]
fn swept_to(output: &Output) -> u64 {
    let (next, rest) = output.succeeds().stdout.split_once('\n').unwrap_or_else(|| output.fail("too little was said"));
    assert_eq!(rest, "later: 0 wrong, 0 misplaced, kernels found 0\nleft: 0 handles, 0 mapped\n", "{}", output.stdout);
    next.strip_prefix("next: ").and_then(|next| next.parse().ok()).unwrap_or_else(|| output.fail("something was lost"))
}

/// Bytes that left without a copy.
fn left_as_they_came(output: &Output) -> u64 {
    output
        .picked(|event| match event {
            Event::TierSwap(swap) => Some(swap.as_it_came),
            _ => None,
        })
        .iter()
        .sum()
}

/// Sweeps a fault over every driver call of a launch that swaps. Some faults end all moves of their process, and the next one goes on behind these.
#[track_caller]
fn every_call_of_a_swap_fails_once(gpus: &str, host: &str) {
    let (mut nth, mut came, mut left, mut same) = (1, 0, 0, 0);
    loop {
        let output = moved_faults(gpus, host, &nth.to_string());
        let next = swept_to(&output);
        let swapped = swapped(&output);
        (came, left, same) = (came + swapped.0, left + swapped.1, same + left_as_they_came(&output));
        if next == nth {
            break;
        }
        nth = next;
    }
    assert!(nth > 40, "a swap takes more than {nth} calls of the driver");
    assert!(came > 0 && left > 0 && same > 0, "{came} bytes came, {left} left, {same} of these as they came");
}

#[test]
fn a_fault_at_any_call_of_a_swap_with_another_gpu_leaves_every_byte_where_it_was_or_should_be() {
    every_call_of_a_swap_fails_once("2x2GiB", "0");
}

#[test]
fn a_fault_at_any_call_of_a_swap_with_the_host_leaves_every_byte_where_it_was_or_should_be() {
    every_call_of_a_swap_fails_once("1x2GiB", "1GiB");
}

/// Children have only the thread that forked: nothing that the moving one held is let go there. Each driver call of a swap is one place for that.
#[test]
fn a_fork_at_any_call_of_a_swap_leaves_parent_and_child_right() {
    for (gpus, host) in [("2x2GiB", "0"), ("1x2GiB", "1GiB")] {
        let output = moved_faults(gpus, host, "1 fork");
        let next = swept_to(&output);
        let (came, left) = swapped(&output);
        assert!(next > 40, "a swap takes more than {next} calls of the driver");
        assert!(came > 0 && left > 0, "{came} bytes came, {left} left");
    }
}

/// By another thread while the move goes on, and by the one that moves, as from a callback of the driver. The status is the program's own.
#[test]
fn an_end_of_the_process_at_any_call_of_a_swap_is_one() {
    for how in ["exit", "exit_here"] {
        let counted = moved_faults("2x2GiB", "0", &format!("0 {how}"));
        let (came, left) = swapped(&counted);
        assert!(came > 0 && left > 0, "{came} bytes came, {left} left");
        // Every kind of call comes again for what moves later.
        for nth in (1..=60).chain((61..).step_by(9)) {
            let output = moved_faults("2x2GiB", "0", &format!("{nth} {how}"));
            if output.status.code() == Some(0) {
                let calls = output.stdout.strip_prefix("calls: ").and_then(|calls| calls.trim().parse().ok());
                assert!(nth > 60 && calls.is_some_and(|calls: usize| calls < nth), "{how} {nth}: {}", output.stdout);
                break;
            }
            output.exits(5).prints("");
        }
    }
}

/// Every way to a digest fails once: its kernel is not made, not loaded, has no room for its sums, or is not run (the program launches a kernel of its own, too).
#[test]
fn where_what_has_changed_cannot_be_known_everything_is_copied() {
    for (call, is_for_good) in [
        ("cuLinkCreate", true),
        ("cuLinkAddData", true),
        ("cuLinkComplete", true),
        ("cuLinkDestroy", false),
        ("cuMemHostAlloc", true),
        ("cuModuleLoadData", true),
        ("cuModuleGetFunction", true),
        ("cuLaunchKernel", false),
    ] {
        let output = moved_faults("2x2GiB", "0", &format!("1 {call}"));
        let next = swept_to(&output);
        assert!(next > 1, "{call} was not made");
        let same = left_as_they_came(&output);
        assert!(!is_for_good || same == 0, "{call}: {same} bytes left without a copy");
    }
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

/// The addresses are words of a structure that the kernel is given by value, and nowhere else.
#[test]
fn what_a_structure_names_that_is_passed_by_value_comes_near() {
    let run = crowded("by_value", "8 8 20", "stress").env("GPUPOOL_LIMIT", "0:50MiB").go();
    run.succeeds().prints("0 wrong\n");
    let (came, left) = swapped(&run);
    assert!(came >= 16 << 20 && left >= 16 << 20, "{came} bytes came, {left} left");
}

/// Threads that fork or load modules beside it, a process that stops this one and lets it go on, by signals and as a debugger does, and an end while a thread
/// launches.
#[test]
fn what_goes_on_beside_moves_is_right_and_ends() {
    for how in ["forks", "loads", "stops", "traces", "leaves"] {
        let (came, left) = under_stress("rotation", &format!("16 8 3 6 {how}"));
        assert!(came > 0 && left > 0, "{how}: {came} bytes came, {left} left");
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

/// One chunk of 64 MiB at home, where 2 MiB more have room, of which every other 8 MiB are free; then a block that no hole has room for.
fn half_used(arguments: &str, moving: &str) -> Output {
    crowded("half_used", arguments, moving).env("GPUPOOL_LIMIT", "0:66MiB").go()
}

const INTACT: &str = "the table's blocks: right\nthe list's nodes: right\n";

/// Bytes that came free by cutting chunks anew, and that are elsewhere since.
fn repacked(output: &Output) -> Vec<(u64, u64)> {
    output.picked(|event| match event {
        Event::PoolRepack(repack) => Some((repack.freed, repack.away)),
        _ => None,
    })
}

/// What is in use goes over the other GPU, since home is full.
#[test]
fn a_block_stays_at_home_where_freed_parts_of_chunks_can_hold_it() {
    let far = half_used("24", "off");
    far.succeeds().prints(&format!("24: served, GPU 0 +0 MiB, GPU 1 +24 MiB\n{INTACT}"));
    assert_eq!(repacked(&far), []);
    for (moving, arguments, meanwhile) in
        [("auto", "24", ""), ("stress", "24 threads", "thread 0: 0 wrong\nthread 1: 0 wrong\nthread 2: 0 wrong\n")]
    {
        let near = half_used(arguments, moving);
        if meanwhile.is_empty() {
            near.succeeds().prints(&format!("24: served, GPU 0 -8 MiB, GPU 1 +0 MiB\n{meanwhile}{INTACT}"));
            assert_eq!(repacked(&near), [(32 << 20, 0)]);
        } else {
            // Where it lies depends on what the threads have in work.
            let told = near.succeeds().stdout.split_once('\n').map(|(_, rest)| rest.to_owned());
            assert_eq!(told.as_deref(), Some(&*format!("{meanwhile}{INTACT}")));
        }
    }
}

#[test]
fn a_block_that_would_be_refused_is_served_where_freed_parts_of_chunks_can_hold_it() {
    let crowded = |moving: &str| {
        let run = Run::program("half_used")
            .args("40")
            .sim("1x104MiB")
            .env("SIMCUDA_CONTEXT_MIB", "0")
            .env("GPUPOOL_MOVE", moving);
        run.env("GPUPOOL_RESERVE", "1").env("GPUPOOL_HOST_LIMIT", "0").log().shim().go()
    };
    // Whoever has asked for no moves gets this one all the same: the driver would have had room.
    for moving in ["off", "auto"] {
        let served = crowded(moving);
        served.succeeds().prints(&format!("40: served, GPU 0 +8 MiB, GPU 1 +0 MiB\n{INTACT}"));
        assert_eq!(repacked(&served), [(32 << 20, 0)], "{moving}");
    }
}

/// Without gpupool the block takes 4 MiB, and the large one has room.
#[test]
fn one_block_keeps_no_freed_chunk_from_a_request_that_would_be_refused() {
    let run = Run::program("pinned_chunk").args("3145728").sim("1x104MiB").env("SIMCUDA_CONTEXT_MIB", "0");
    let run = run.env("SIMCUDA_HOST", "none").env("GPUPOOL_RESERVE", "1");
    run.clone().go().succeeds().prints("served, and the small block is right\n");
    run.shim().go().succeeds().prints("served, and the small block is right\n");
}

#[test]
fn a_trim_returns_what_is_free_on_chunks_in_use() {
    for moving in ["off", "auto"] {
        half_used("24 trim", moving).succeeds().prints(&format!("returned: 32 MiB\n{INTACT}"));
    }
}

/// Chunks that others know by their pages stay as they are, and so do all where the GPUs do not come to rest: the answer is the one
/// that there would be without.
#[test]
fn what_cannot_be_cut_anew_costs_nobody_his_block() {
    for (what, more) in [("shared", ""), ("captured", ""), ("busy", "the kernel that waited: right\n")] {
        let far = half_used(&format!("24 {what}"), "auto");
        far.succeeds().prints(&format!("24: served, GPU 0 +0 MiB, GPU 1 +24 MiB\n{more}{INTACT}"));
        assert_eq!(repacked(&far), [], "{what}");
    }
}

/// The first reason that came to hand was told of memory that no atomic had to do with, and that there was no room for nothing.
#[test]
fn why_nothing_moved_is_told_as_it_is() {
    // What is far was put there by the program, and so stays there.
    let output = crowded("rotation", "8 8 1 6 away", "stress").env("GPUPOOL_LIMIT", "0:50MiB").go();
    output.succeeds();
    assert!(said(&output, "has to stay where it is"), "{}", output.stderr);
    for wrong in ["atomics", "no room for 0 B"] {
        assert!(!said(&output, wrong), "{wrong}");
    }
    // The host is where these two GPUs would lose what the other adds.
    let two = crowded("rotation", "8 8 1 6 two", "stress").env("GPUPOOL_LIMIT", "96MiB").env("SIMCUDA_LINK", "pcie");
    let output = two.env("SIMCUDA_HOST_ATOMICS", "off").go();
    output.succeeds();
    assert!(said(&output, "nothing moved for GPU 0: atomics of several GPUs would not be whole there"));
}

/// Atomics on memory of the host, or of a GPU behind PCIe, may be a read and a write: two GPUs lose what the other adds.
#[test]
fn nothing_goes_by_itself_where_atomics_of_two_gpus_are_not_whole() {
    let at_most = |arguments: &str, link: &str, host: &str| {
        let run = crowded("rotation", arguments, "stress").env("GPUPOOL_LIMIT", "96MiB").env("SIMCUDA_LINK", link);
        let output = run.env("SIMCUDA_HOST_ATOMICS", host).go();
        output.succeeds();
        let levels = output.picked(|event| match event {
            Event::PoolLevel(level) => Some(level.places.clone()),
            _ => None,
        });
        let most = |place: &str| {
            let levels = levels.iter().flatten().filter(|level| level.place == place);
            levels.map(|level| level.held).max().unwrap_or(0)
        };
        (most("gpu1") > 0, most("host0") > 0)
    };
    assert_eq!(at_most("8 8 1 6", "pcie", "off"), (true, true), "one GPU alone");
    assert_eq!(at_most("8 8 1 6 two", "nvlink", "on"), (true, true));
    assert_eq!(at_most("8 8 1 6 two", "nvlink", "off"), (true, false));
    assert_eq!(at_most("8 8 1 6 two", "pcie", "on"), (false, true));
    assert_eq!(at_most("8 8 1 6 two", "pcie", "off"), (false, false));
}

/// An array of 16 MiB lies on the other GPU and is read 3000 times in each of 60 launches.
fn far(how: &str, limit: &str) -> Run {
    let run = crowded("far", &format!("{how} 3000 60"), "off").env("GPUPOOL_LIMIT", "0:32MiB");
    if limit.is_empty() { run } else { run.env("GPUPOOL_FAR_LIMIT", limit) }
}

#[test]
fn a_limit_for_far_memory_warns_or_refuses_what_would_be_far_too() {
    for (limit, warns, answer) in [("", false, 0), ("20%", true, 0), ("20%:refuse", true, 2)] {
        let output = far("more", limit).go();
        output.succeeds();
        assert!(output.stdout.ends_with(&format!("handle: {answer}\nmore: {answer}\n")), "{limit}: {}", output.stdout);
        let told = output.picked(|event| match event {
            Event::TierLimit(told) => Some((told.home, told.refuses, told.function.clone(), told.why.clone())),
            _ => None,
        });
        let expected = (0, answer == 2, "sum_again_u32".to_owned(), "GPUPOOL_MOVE is off".to_owned());
        assert_eq!(told, if warns { vec![expected] } else { vec![] }, "{limit}");
        let refused =
            output.picked(|event| matches!(event, Event::PoolRefuse(refused) if refused.why == "far").then_some(()));
        assert_eq!(refused.len(), answer, "one each for the handle and the block: {limit}");
        assert_eq!(output.stderr.contains("GPUPOOL_FAR_LIMIT=20%"), warns, "{}", output.stderr);
    }
}

/// Why the function that reads far memory was told to read it there, on GPUs of so many MiB of which a context takes 100 and another program so many.
fn why_far(gpu_mib: u32, others_mib: u32) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("no folder: {error}"));
    let on_machine = |run: Run| {
        let gpus = format!("2x{gpu_mib}MiB");
        let run = run.env("SIMCUDA_GPUS", gpus).env("SIMCUDA_MACHINE", folder.path().join("machine"));
        run.env("SIMCUDA_CONTEXT_MIB", "100")
    };
    let other = (others_mib > 0).then(|| {
        let mut other = on_machine(Run::program("suspended").sim("1x1GiB")).start(None);
        // Of what it takes, its context is a part.
        assert_eq!(other.ask(&format!("keep {}", others_mib - 100)), "kept");
        other
    });
    // What lies near must stay there, so that nothing makes room.
    let output = on_machine(crowded("far", "kept 3000 40", "auto")).nvml().go();
    output.succeeds();
    drop(other);
    output.picked(|event| match event {
        Event::TierReader(reader) if reader.on_peers > 0 => Some(reader.why.clone()),
        _ => None,
    })
}

/// A limit does not count contexts, and what the program's own took was put down to others.
#[test]
fn what_a_function_reads_far_is_not_put_down_to_others_for_the_programs_own_context() {
    let (alone, beside) = (why_far(150, 0), why_far(274, 124));
    assert_eq!(alone, ["nothing that lies near and may leave is used so much less that an exchange pays"]);
    assert_eq!(beside, ["others have 124.0 MiB of GPU 0 that this program might have by its limits"]);
}

/// Where memory may move and cannot, the limit holds, and says for which reason it cannot.
#[test]
fn a_limit_for_far_memory_holds_where_nothing_can_be_moved() {
    // It is waited for longer than where moving is off.
    let run = crowded("far", "more 3000 400", "auto").env("GPUPOOL_LIMIT", "0:32MiB");
    let output = run.env("GPUPOOL_FAR_LIMIT", "20%:refuse").env("CUDA_INJECTION64_PATH", "/nowhere").go();
    output.succeeds();
    assert!(output.stdout.ends_with("handle: 2\nmore: 2\n"), "{}", output.stdout);
    let told = output.picked(|event| match event {
        Event::TierLimit(told) => Some((told.refuses, told.why.clone())),
        _ => None,
    });
    let [(true, why)] = &told[..] else { output.fail("expected one line of the limit") };
    assert!(why.contains("CUDA_INJECTION64_PATH is set"), "{why}");
}

/// What is near, or costs little, may go on as before.
#[test]
fn a_limit_for_far_memory_refuses_nothing_while_it_is_not_exceeded() {
    let near = crowded("far", "more 3000 60", "off").env("GPUPOOL_FAR_LIMIT", "20%:refuse").go();
    let cheap =
        crowded("far", "more 1 60", "off").env("GPUPOOL_LIMIT", "0:32MiB").env("GPUPOOL_FAR_LIMIT", "100%:refuse");
    for output in [near, cheap.go()] {
        assert!(output.succeeds().stdout.ends_with("more: 0\n"), "{}", output.stdout);
        assert!(!output.stderr.contains("GPUPOOL_FAR_LIMIT"), "{}", output.stderr);
    }
}

#[test]
fn the_log_tells_where_memory_lay_and_which_function_paid_and_the_page_what_it_cost() {
    let program = far("wait", "").start(None);
    let told = eventually("a loss on the page", || {
        page(&program).filter(|told| told.levels.residence.lost_microseconds > 100_000)
    });
    assert_eq!(told.levels.residence.on_peers, 16 << 20, "{told:?}");
    assert_eq!(told.counter(Counter::Moves), 0);
    drop(program);
    let output = far("plain", "").go();
    let lay = output.picked(|event| match event {
        Event::PoolResidence(lay) => Some((lay.near >> 20, lay.on_peers >> 20, lay.on_host)),
        _ => None,
    });
    assert!(lay.contains(&(32, 16, 0)), "{lay:?}");
    let readers = output.picked(|event| match event {
        Event::TierReader(reader) => Some(reader.clone()),
        _ => None,
    });
    let [reader] = &readers[..] else { output.fail("expected one function") };
    assert_eq!((reader.function.as_str(), reader.home, reader.on_peers), ("sum_again_u32", 0, 16 << 20));
    assert!(reader.passes.is_some_and(|passes| (2000.0..=4000.0).contains(&passes)), "{reader:?}");
    assert!((30..=90).contains(&reader.launches), "60 launches, estimated: {reader:?}");
    assert!(reader.lost > 0.2 && reader.why == "GPUPOOL_MOVE is off" && reader.site.is_some(), "{reader:?}");
}

/// What a label may have on its GPU is kept by moves as by the program's own calls.
#[test]
fn a_label_s_budget_is_kept_where_memory_moves() {
    let output = crowded("label_moves", "", "stress").env("GPUPOOL_LIMIT", "0:64MiB").go();
    output.succeeds().prints("at most 4 MiB of 4 near, some moved: 1\n");
}
