//! Programs with their own virtual memory management, on four small GPUs: what one has no room for lies elsewhere, and the
//! program cannot tell.

use gpupool_events::Event;
use harness::{Output, Run, library};
use std::process::Command;

/// A context takes 16 MiB of these, and the pool leaves as much.
const SMALL: &str = "4x64MiB";

fn script(steps: &str) -> Run {
    Run::program("own_memory").args(steps).sim(SMALL).env("GPUPOOL_RESERVE", "16MiB")
}

fn shim(steps: &str) -> Run {
    script(steps).shim().log().report()
}

/// Lines that the program printed, one after the other.
#[track_caller]
fn tells<'a>(output: &'a Output, lines: &str) -> &'a Output {
    output.succeeds();
    if !output.stdout.contains(lines) {
        output.fail(&format!("expected on stdout:\n{lines}"));
    }
    output
}

/// Where handles went that did not go where they were asked to.
fn steered(output: &Output) -> Vec<String> {
    let steers = output.records.iter().filter_map(|record| match &record.event {
        Event::VmmSteer(steer) => Some(format!("{} to {} ({})", steer.bytes >> 20, steer.place, steer.why)),
        _ => None,
    });
    steers.collect()
}

#[test]
fn a_handle_that_does_not_fit_lies_on_the_next_gpu_with_the_right_data() {
    tells(&script("c:20 c:20 c:20").go(), "create 20: 2");
    let run = shim("c:20 c:20 c:20 m:0 m:1 m:2 x:0 x:1 x:2").go();
    tells(&run, "handle 0: 0 wrong\nhandle 1: 0 wrong\nhandle 2: 0 wrong\n");
    assert_eq!(steered(&run), ["20 to gpu1 (full)"]);
    assert_eq!(run.reported("violations"), &serde_json::json!([]));
    run.warns("20.0 MiB of all that was allocated lay outside the GPU that asked for it");
}

/// As blocks that were never freed; what was released counts as long as it is mapped.
#[test]
fn what_was_never_released_is_told_at_the_end() {
    for (steps, live) in [("c:30 c:20 m:1 c:10 r:2", (2, 50)), ("c:20 m:0 r:0", (1, 20)), ("c:20 m:0 r:0 u:0", (0, 0))]
    {
        let run = shim(steps).go();
        let told = run.succeeds().event("process.exit", |event| match event {
            Event::ProcessExit(exit) => Some((exit.live_handles, exit.live_handle_bytes >> 20, exit.live_blocks)),
            _ => None,
        });
        assert_eq!(told, (live.0, live.1, 0), "{steps}");
    }
    let run = shim("c:30 c:20 c:20 r:1").go();
    run.warns("40.0 MiB of all that was allocated lay outside the GPU that asked for it when it was; at the end 20.0 MiB in use did");
}

/// What the program has for a handle is a number of gpupool's.
#[test]
fn calls_that_bind_memory_get_the_driver_s_handle() {
    let run = Run::program("bound_handles").sim("2x1GiB").same_under_shim(&[]);
    run.succeeds().says("cuLogicalEndpointBindMem(1, 0, 0, handle, 0, BYTES, 0): 1 CUDA_ERROR_INVALID_VALUE");
    assert_eq!(run.violations, [""; 0]);
}

#[test]
fn neighbours_come_in_order_and_the_host_last() {
    let run = shim("c:30 c:30 c:30 c:30 c:30 m:4 x:4 s").go();
    tells(&run, "handle 4: 0 wrong\nused: gpu0 46 gpu1 30 gpu2 30 gpu3 30 host 30");
    assert_eq!(steered(&run), ["30 to gpu1 (full)", "30 to gpu2 (full)", "30 to gpu3 (full)", "30 to host0 (full)"]);
}

/// The program asks everything that it could tell the difference by; on a GPU with room it hears the same.
#[test]
fn what_the_program_is_told_is_what_it_asked_for() {
    let told = "handle 0 is at 1 0, memory type 2 of GPU 0, access 3 0 0 0, host pointer 1\n";
    tells(&script("c:20 m:0 p:0").go(), told);
    for (home, place) in [("c:30 c:30", "gpu1"), ("c:30 c:30 c:30 c:30 c:30", "host0")] {
        let last = home.split(' ').count() - 1;
        let run = shim(&format!("{home} m:{last} p:{last} R:{last} p:{last} n:{last} p:{last}")).go();
        let told = told.replace("handle 0", &format!("handle {last}"));
        tells(&run, &format!("{told}{told}{}", told.replace("access 3", "access 1")));
        assert!(steered(&run).last().is_some_and(|last| last.contains(place)), "{:?}", steered(&run));
    }
}

/// Each of these copies names the context of the GPU that was asked for, and another. The memory lies on one of them, where
/// the program granted nothing: that would end the context.
#[test]
fn copies_to_every_other_gpu_survive() {
    let bare = script("c:20 m:0 o:0").go();
    let run = shim("c:30 c:20 m:1 o:1").go();
    assert_eq!(steered(&run), ["20 to gpu1 (full)"]);
    let copies = bare.stdout.trim_start_matches("create 20: 0\n").replace("handle 0", "handle 1");
    tells(&run, &copies);
    assert_eq!(run.reported("violations"), &serde_json::json!([]));
}

#[test]
fn memory_lives_while_it_is_mapped_and_no_longer() {
    let run = shim("c:30 c:30 m:1 r:1 s x:1 p:0 u:1 s c:30 s").go();
    let with = "used: gpu0 46 gpu1 30 gpu2 0 gpu3 0 host 0\n";
    let without = "used: gpu0 46 gpu1 0 gpu2 0 gpu3 0 host 0\n";
    tells(&run, &format!("release 1: 0\n{with}handle 1: 0 wrong\n"));
    tells(&run, &format!("{without}create 30: 0\n{with}"));
}

#[test]
fn a_limit_counts_the_programs_handles_and_the_pools_memory_together() {
    let limited = |steps: &str| shim(steps).env("GPUPOOL_LIMIT", "0:30MiB").go();
    let run = limited("c:14 c:14 c:14 m:2 x:2 s");
    tells(&run, "handle 2: 0 wrong\nused: gpu0 44 gpu1 14");
    assert_eq!(steered(&run), ["14 to gpu1 (limit)"]);
    tells(&limited("a:28 c:14 s"), "used: gpu0 44 gpu1 14");
    // A block may be spread, so it takes what is left.
    tells(&limited("c:28 a:14 s"), "used: gpu0 46 gpu1 12");
    tells(&limited("c:28 r:0 a:14 s"), "used: gpu0 30 gpu1 0");
    tells(&limited("a:28 f c:28 s"), "used: gpu0 44 gpu1 0");
}

/// What the log says at the end, in MiB, the summary and `gpupool report`: the most that was used of GPU 0 and, without the limit's room, of GPU 1.
#[test]
fn the_peaks_that_are_told_have_the_handles_in_them_that_the_limit_counts() {
    // Handles alone, with a block, and behind each other: never more than there was at once.
    for (steps, home, peer) in [("c:14 c:14 c:14", 28, 14), ("a:10 c:14", 24, 0), ("c:28 r:0 a:14", 28, 0)] {
        let limited = || shim(steps).env("GPUPOOL_LIMIT", "0:30MiB").env("GPUPOOL_SUMMARY", "on");
        let run = limited().go();
        let peaks = run.succeeds().event("process.exit", |event| match event {
            Event::ProcessExit(exit) => Some(exit.peak.clone()),
            _ => None,
        });
        let of = |place: &str| peaks.iter().find(|peak| peak.place == place).map_or(0, |peak| peak.peak_used >> 20);
        assert_eq!((of("gpu0"), of("gpu1")), (home, peer), "{steps}: {peaks:?}");
        run.warns(&format!("gpupool: gpu0   peak  {home}.0 MiB of 30.0 MiB\n"));
        if peer > 0 {
            run.warns(&format!("gpupool: gpu1   peak  {peer}.0 MiB"));
        }
        let (_, folder) = limited().start(None).end();
        let told = Command::new(library("gpupool")).arg("report").arg(folder.path().join("log.jsonl")).output();
        let told = told.map(|told| String::from_utf8_lossy(&told.stdout).into_owned()).unwrap_or_default();
        let is_told = |line: &str| line.contains("gpu0") && line.contains(&format!("{home}.0 MiB"));
        assert!(told.lines().any(is_told), "{steps}: {told}");
    }
}

#[test]
fn a_gpu_that_lends_is_not_filled_beyond_its_limit() {
    let run = shim("c:30 c:20 c:20 s").env("GPUPOOL_LIMIT", "1:20MiB").go();
    tells(&run, "used: gpu0 46 gpu1 20 gpu2 20");
}

#[test]
fn when_every_place_refuses_the_answer_is_out_of_memory() {
    let run = shim("c:30 c:30 c:60 s").env("GPUPOOL_DEVICES", "0").env("GPUPOOL_HOST_LIMIT", "0").go();
    tells(&run, "create 30: 0\ncreate 30: 2\ncreate 60: 2\nused: gpu0 46 gpu1 0 gpu2 0 gpu3 0 host 0");
}

#[test]
fn the_pools_free_memory_goes_back_before_a_handle_goes_elsewhere() {
    let run = shim("a:30 f g:1 g:0 c:30 s").go();
    tells(&run, "create 30: 0\nused: gpu0 46 gpu1 16");
    // On a GPU that is not the current one, too.
    tells(&shim("g:1 a:30 f g:0 c:30 c:30 s").go(), "used: gpu0 46 gpu1 46 gpu2 0");
}

/// XLA asks for a share of what it is told is free, in one piece. It lies at home as far as home goes.
#[test]
fn what_no_gpu_has_whole_is_made_of_parts_and_home_comes_first() {
    let steps = "c:120 m:0 x:0 p:0 R:0 s o:0 r:0 s x:0 u:0 s";
    let run = shim(steps).go();
    let told = "handle 0 is at 1 0, memory type 2 of GPU 0, access 3 0 0 0, host pointer 1\n";
    let used = "used: gpu0 48 gpu1 48 gpu2 40 gpu3 0 host 0\n";
    tells(&run, &format!("create 120: 0\nhandle 0: 0 wrong\n{told}{used}"));
    tells(&run, "GPU 1's context: 0 wrong").says("handle 0 in GPU 3's context: 0 wrong");
    tells(&run, "release 0: 0\n").says("handle 0: 0 wrong");
    assert_eq!(steered(&run), ["48 to gpu1 (full)", "40 to gpu2 (full)"]);
    assert_eq!(run.reported("violations"), &serde_json::json!([]));
    // Nothing is left of it but the contexts and what the copies left in the pool.
    let last = shim("c:120 m:0 r:0 u:0 s c:120 r:1 s").go();
    let empty = "used: gpu0 16 gpu1 0 gpu2 0 gpu3 0 host 0\n";
    tells(&last, &format!("{empty}create 120: 0\nrelease 1: 0\n{empty}"));
}

/// Two GPUs with 32 and 48 MiB to give: an arena for more is refused rather than laid on the host, and the program asks
/// for less until it fits.
#[test]
fn parts_do_not_reach_the_host() {
    let run = shim("C:120 s").env("GPUPOOL_DEVICES", "0,1").go();
    tells(&run, "created 76\nused: gpu0 48 gpu1 44 gpu2 0 gpu3 0 host 0");
}

/// Asked for on a GPU that is not the current one, whose free memory nobody can tell here.
#[test]
fn home_comes_first_where_its_free_memory_is_unknown() {
    let run = shim("d:1 c:100 s").go();
    tells(&run, "create 100: 0\nused: gpu0 16 gpu1 48 gpu2 48 gpu3 4");
    // 44 MiB are left there. The first guess is 48.
    let run = shim("d:1 c:20 c:100 s").go();
    tells(&run, "create 100: 0\nused: gpu0 16 gpu1 44 gpu2 48 gpu3 28");
}

#[test]
fn nvml_tells_the_free_memory_of_a_gpu_that_is_not_current() {
    let run = shim("d:1 c:20 c:100 s").nvml().go();
    tells(&run, "create 100: 0\nused: gpu0 16 gpu1 48 gpu2 48 gpu3 24");
}

#[test]
fn a_handle_that_was_released_while_mapped_can_be_taken_again_with_all_its_parts() {
    let run = shim("c:120 m:0 r:0 R:0 x:0 s u:0 s").go();
    tells(&run, "release 0: 0\nhandle 0: 0 wrong\nused: gpu0 48 gpu1 48 gpu2 40 gpu3 0 host 0\nused: gpu0 16 gpu1 0");
}

#[test]
fn parts_have_no_descriptor_and_pieces_elsewhere_have() {
    let run = shim("c:30 c:30 e:1 c:100 e:2").go();
    tells(&run, "export 1: 0\ncreate 100: 0\nexport 2: 801\n");
    let because = |size: &str| {
        let call = "cuMemExportToShareableHandle of a handle of";
        format!("{call} {size} for GPU 0: NOT_SUPPORTED, because it is made of parts: GPU 0 had no room for all of it")
    };
    run.warns(&because("100.0 MiB"));
    // More than half of a GPU, and three others could have it whole.
    let run = shim("c:20 c:40 e:1 e:1").go();
    tells(&run, "create 40: 0\nexport 1: 801\nexport 1: 801\n");
    assert_eq!(steered(&run), ["28 to gpu1 (full)"]);
    run.warns(&because("40.0 MiB"))
        .warns("although another GPU may have room for all of it; create handles of 32.0 MiB at most");
    assert!(!run.stderr.contains("neither GPU 0 nor another place"), "{}", run.stderr);
    // Less than half of it, and no other GPU may lend more than 22 MiB.
    let run = shim("c:30 g:1 c:10 g:2 c:10 g:3 c:10 g:0 c:30 e:4").env("GPUPOOL_HOST_LIMIT", "0").go();
    tells(&run, "export 4: 801\n");
    assert_eq!(steered(&run), ["22 to gpu1 (full)", "6 to gpu2 (full)"]);
    run.warns("neither GPU 0 nor another place had room for all of it; create smaller handles");
    assert!(!run.stderr.contains("more than half"), "{}", run.stderr);
}

/// As of any handle that was not made for it, and nothing is said: no smaller one would have a descriptor either.
#[test]
fn parts_that_were_not_to_be_exported_are_refused_in_the_driver_s_words() {
    tells(&script("k:20 e:0").go(), "create 20: 0\nexport 0: 1\n");
    let run = shim("k:120 e:0").go();
    tells(&run, "create 120: 0\nexport 0: 1\n");
    assert!(!run.stderr.contains("made of parts"), "{}", run.stderr);
}

/// Every driver call of a creation in parts, of its mapping and of its release fails once; nothing is left behind.
#[test]
fn a_failure_half_way_leaves_nothing_behind() {
    for fault in ["cuMemCreate:2", "cuMemCreate:3", "cuMemCreate:4", "cuMemRelease:1"] {
        let run = shim("c:120 r:0 r:0 s").env("SIMCUDA_FAULT", format!("{fault}=999")).go();
        tells(&run, "used: gpu0 16 gpu1 0 gpu2 0 gpu3 0 host 0");
    }
    for fault in 1..=3 {
        let run = shim("c:120 m:0").env("SIMCUDA_FAULT", format!("cuMemMap:{fault}=999")).go();
        run.exits(1);
        assert!(run.stdout.contains("cuMemMap(address, bytes, 0, handle, 0): 999"), "{}", run.stdout);
        assert_eq!(run.reported("mapped_bytes"), &serde_json::json!(0), "map {fault}");
    }
}

/// Each driver call fails once of all that making, mapping, retaining and releasing a handle takes, whole or in parts.
#[test]
fn a_fault_at_any_call_about_a_handle_leaves_nothing_behind() {
    for (size, least) in [("20", 12), ("120", 30)] {
        let run = Run::program("handle_faults").args(size).sim(SMALL).env("GPUPOOL_RESERVE", "16MiB").shim().report();
        let run = run.go();
        run.succeeds();
        let swept = run.stdout.lines().find_map(|line| line.strip_prefix("swept ")?.parse::<u64>().ok());
        assert!(swept.is_some_and(|calls| calls > least), "{}", run.stdout);
        assert_eq!(run.reported("violations"), &serde_json::json!([]), "{size}");
    }
}

#[test]
fn a_program_that_caches_hears_of_it_once() {
    let run = shim("c:30 c:20 c:20 c:20 r:1 r:2 c:20 c:20").env("GPUPOOL_SOFT_OOM", "on").go();
    let before = "create 30: 0\ncreate 20: 2\ncreate 20: 0\ncreate 20: 0\n";
    run.prints(&format!("{before}release 1: 0\nrelease 2: 0\ncreate 20: 2\ncreate 20: 0\n"));
}

#[test]
fn modes_that_only_watch_leave_everything_alone() {
    for mode in ["trace", "off"] {
        let run = shim("c:30 c:30").env("GPUPOOL_MODE", mode).go();
        run.prints("create 30: 0\ncreate 30: 2\n");
        assert!(steered(&run).is_empty());
    }
}

/// GPUs that do not reach each other lend nothing; the host serves.
#[test]
fn without_links_the_host_serves() {
    let run = shim("c:30 c:30 m:1 x:1 s").env("SIMCUDA_LINK", "none").go();
    tells(&run, "handle 1: 0 wrong\nused: gpu0 46 gpu1 0 gpu2 0 gpu3 0 host 30");
}

/// A descriptor says where memory is, not where it was asked for; the importer names the GPU that the exporter asked for.
#[test]
fn another_process_may_use_what_lies_elsewhere() {
    let bare = Run::program("shared_handles").sim("2x96MiB").env("GPUPOOL_RESERVE", "16MiB").go();
    let told = "imported: 0 wrong\naccess: 3 0\nin GPU 1's context: 0 wrong\n";
    tells(&bare, told);
    let run = Run::program("shared_handles").sim("2x64MiB").env("GPUPOOL_RESERVE", "8MiB").shim().go();
    tells(&run, told);
    tells(&run, "importer: 0\n");
}

/// On a GPU with a limit every handle is counted, so here every call of every thread changes the inventory.
#[test]
fn threads_that_make_and_release_at_once_lose_nothing() {
    for limit in ["0:30MiB", "3:64MiB"] {
        let run = Run::program("own_threads").sim(SMALL).env("GPUPOOL_RESERVE", "8MiB").env("GPUPOOL_LIMIT", limit);
        let run = run.shim().report().go();
        tells(&run, "96 of 96 made, 0 wrong\nleft: 0 handles, 0 bytes mapped\n");
        assert_eq!(run.reported("violations"), &serde_json::json!([]), "{limit}");
    }
}

/// All of them hold one piece of memory, whole or in parts, of which at times nobody has a reference.
#[test]
fn threads_that_share_a_handle_count_its_references_right() {
    for (arguments, gpus) in [("8 60 8", "2x256MiB"), ("8 60 120", SMALL)] {
        let run =
            Run::program("handle_races").args(arguments).sim(gpus).env("GPUPOOL_RESERVE", "16MiB").shim().report();
        let run = run.go();
        tells(&run, "480 times, 0 wrong, one release more: 1\nleft: 0 handles, 0 bytes mapped, 0 MiB\n");
        assert_eq!(run.reported("violations"), &serde_json::json!([]), "{arguments}");
    }
}

/// Calls that the driver refuses are among them, and every answer is compared.
#[test]
fn any_calls_about_handles_answer_the_same_bare_and_under_the_shim() {
    for seed in 0..3 {
        let run = Run::program("handle_sequences").args(&format!("{seed} 400 4 0")).sim("2x2GiB");
        let shim = run.same_under_shim(&["GPUPOOL_LIMIT=0:40MiB,1:1GiB"]);
        assert!(tells(&shim, "").stdout.contains("another handle 1"), "{}", shim.stdout);
        run.same_under_shim(&["GPUPOOL_LIMIT=0:40MiB,1:1GiB", "GPUPOOL_MOVE=stress"]);
    }
    let run = Run::program("handle_sequences").args("3 400 4 0").sim("2x2GiB");
    run.same_under_shim(&[]).succeeds();
    run.same_under_shim(&["GPUPOOL_MODE=managed"]).succeeds();
}

/// Bare the GPU has room. Under the shim all of it is taken before, and the program cannot tell. (With a little room left, the
/// simulated driver would scatter handles there, which it cannot export.)
#[test]
fn any_calls_about_handles_answer_the_same_where_the_memory_lies_elsewhere() {
    for seed in 4..7 {
        let program = |full: &str| Run::program("handle_sequences").args(&format!("{seed} 400 4 {full}")).sim("3x2GiB");
        let shim = program("2032").shim().log().report().env("GPUPOOL_RESERVE", "16MiB").go();
        shim.same_as(&program("0").go());
        assert!(steered(&shim).len() > 20, "{:?}", steered(&shim));
        assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{seed}");
    }
}

/// The driver follows what it is given as a handle; a real one ends the process for most of these.
#[test]
fn a_number_that_is_kept_too_long_is_refused_and_never_the_driver_s() {
    let run = shim("c:20 r:0 r:0 e:0 c:20 m:1 r:1 r:1 x:1 u:1 r:1 e:1").go();
    tells(&run, "release 0: 0\nrelease 0: 1\nexport 0: 1\n");
    tells(&run, "release 1: 0\nrelease 1: 1\nhandle 1: 0 wrong\nrelease 1: 1\nexport 1: 1\n");
}

/// A part of what is one for the program cannot be unmapped or given access to, as no part of any handle can.
#[test]
fn parts_are_unmapped_and_given_access_to_together() {
    for (steps, gpus) in [("c:20 m:0 h:0 x:0", SMALL), ("c:120 m:0 h:0 x:0", SMALL)] {
        let run = Run::program("own_memory").args(steps).sim(gpus).env("GPUPOOL_RESERVE", "16MiB").shim().go();
        tells(&run, "two fifths of handle 0, and the rest: unmap 1 1, access 1 1\nhandle 0: 0 wrong\n");
    }
}

/// Memory that lies elsewhere is granted to every GPU, and who was given it to read took from the others what they were given before.
#[test]
fn who_may_only_read_memory_takes_from_nobody_what_he_may() {
    let run = Run::program("reads_only").args("30").sim("2x1GiB");
    for settings in [&["GPUPOOL_LIMIT=0:30MiB"][..], &["GPUPOOL_LIMIT=0:40MiB"], &["GPUPOOL_LIMIT=0:30MiB,1:0"], &[]] {
        run.same_under_shim(settings).says("GPU 0 reads: 0 wrong").says("GPU 1 reads: 0 wrong");
    }
}

#[test]
fn a_limit_holds_for_the_pool_and_the_program_s_own_handles_together() {
    // One gets its 60 MiB at home, the other what is left there and the rest, or all, on the next GPU.
    let run = Run::program("one_limit").args("60 600").sim("2x512MiB").env("GPUPOOL_LIMIT", "0:100MiB").shim().report();
    let shim = run.go();
    shim.succeeds().prints("done\n");
    let peak = shim.reported("gpus/0/peak").as_u64().unwrap_or(0) >> 20;
    // The context has 16 MiB.
    assert!(peak <= 116, "{peak} MiB on GPU 0");
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    // What one has been given by the driver counts for the other before the call is back.
    for first in ["handle", "block"] {
        let run =
            Run::program("one_limit").args(&format!("60 {first}")).sim("2x512MiB").env("GPUPOOL_LIMIT", "0:100MiB");
        run.shim().go().succeeds().prints("on GPU 0: 116\ndone\n");
    }
}

/// A limit is what the pool takes; that nothing else has room is no reason to refuse what the driver gives.
#[test]
fn what_the_limits_leave_no_room_for_anywhere_is_the_driver_s_to_give() {
    for (limit, used) in
        [("0:0,1:0", "gpu0 88 gpu1 0"), ("0:12MiB,1:12MiB", "gpu0 76 gpu1 12"), ("0:24MiB,1:24MiB", "gpu0 64 gpu1 24")]
    {
        let steps = "c:24 c:24 c:24 m:0 m:1 m:2 x:0 x:1 x:2 s";
        let run = Run::program("own_memory").args(steps).sim("2x128MiB").env("GPUPOOL_RESERVE", "80MiB");
        let shim = run.env("GPUPOOL_LIMIT", limit).env("GPUPOOL_HOST_LIMIT", "0").shim().report().go();
        tells(&shim, &format!("handle 0: 0 wrong\nhandle 1: 0 wrong\nhandle 2: 0 wrong\nused: {used} host 0\n"));
        assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{limit}");
    }
    // What even the driver has no memory for is refused.
    let run = Run::program("own_memory").args("c:24 c:120 c:24").sim("2x128MiB").env("GPUPOOL_HOST_LIMIT", "0");
    tells(&run.env("GPUPOOL_LIMIT", "0").shim().go(), "create 24: 0\ncreate 120: 2\ncreate 24: 0\n");
}

/// One of more than half its GPU lies in parts on GPUs, and never on the host; the report says that, and what the program's own handles have.
#[test]
fn a_refused_handle_is_told_with_what_handles_have_and_what_the_host_takes_of_them() {
    let refused = |steps: &str, host: &str| {
        let run = Run::program("own_memory")
            .args(steps)
            .sim("2x128MiB")
            .env("SIMCUDA_HOST", "4GiB")
            .env("GPUPOOL_RESERVE", "16MiB");
        let shim = run.env("GPUPOOL_HOST_LIMIT", host).shim().log().go();
        shim.succeeds();
        let told = shim.picked(|event| match event {
            Event::OutOfMemory(told) => Some(told.clone()),
            _ => None,
        });
        let [first, ..] = &told[..] else { shim.fail("expected a refusal in the log") };
        first.clone()
    };
    let large = refused("c:40 c:90 c:90", "1GiB");
    let rows: Vec<_> = large.places.iter().map(|row| (&*row.place, row.own >> 20, row.out.as_deref())).collect();
    assert_eq!(rows, [("gpu0", 96, None), ("gpu1", 34, None), ("host0", 0, Some("too large"))]);
    assert_eq!((large.largest_whole, large.places[0].others), (Some(64 << 20), Some(0)), "{large:?}");
    assert_eq!(large.remedies, []);
    // Of half a GPU the host has one, if it has room for all of it.
    let small = refused("c:60 c:60 c:60 c:60 c:60", "100MiB");
    let host = small.places.last().unwrap_or_else(|| panic!("{small:?}"));
    assert_eq!((host.own >> 20, host.room >> 20, host.out.as_deref()), (60, 40, None), "{small:?}");
    let [remedy] = &small.remedies[..] else { panic!("{small:?}") };
    assert!(remedy.setting == "GPUPOOL_HOST_LIMIT" && remedy.enough, "{remedy:?}");
    let run =
        Run::program("own_memory").args("c:60 c:60 c:60 c:60 c:60").sim("2x128MiB").env("GPUPOOL_RESERVE", "16MiB");
    let mended = run.env("GPUPOOL_HOST_LIMIT", &remedy.value).shim().go();
    assert!(!mended.succeeds().stdout.contains("create 60: 2"), "{}", mended.stdout);
}

#[test]
fn mappings_of_what_the_program_only_allocated_stay_as_they_are() {
    Run::program("not_theirs").sim(SMALL).same_under_shim(&[]).succeeds().says("round 1: 0 wrong");
}

#[test]
fn a_program_s_own_large_reservations_succeed_beside_the_pool_s() {
    for gpus in ["2x256MiB", "8x141GiB"] {
        let shim = Run::program("addresses").sim(gpus).same_under_shim(&["GPUPOOL_HOST_LIMIT=1GiB"]);
        shim.succeeds().is_quiet().says("after, 64 TiB: 0");
    }
}
