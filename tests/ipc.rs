//! Memory shared between processes: pooled memory goes from one process under the shim to another as the driver's does
//! bare, and nowhere else.

use gpupool_events::Event;
use gpupool_wire::VERSION;
use harness::{Output, Run};

/// Two GPUs of 128 MiB and a host: 300 MiB lie on all three.
const SPREAD: &str = "2x128MiB";

fn ipc(steps: &str) -> Run {
    Run::program("ipc").args(steps).sim("2x1GiB")
}

fn spread(steps: &str) -> Run {
    let run = Run::program("ipc").args(steps).sim(SPREAD);
    run.env("GPUPOOL_RESERVE", "8MiB").env("GPUPOOL_HOST_LIMIT", "200MiB").shim()
}

/// Process A has the log; it is the exporter in most tests here.
fn logged(run: Run) -> Output {
    run.log().env("B_GPUPOOL_LOG_FILE", "").env("C_GPUPOOL_LOG_FILE", "").go()
}

#[test]
fn a_block_is_shared_as_the_driver_shares_one() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:4096 A:open:0 A:damaged:0 B:damaged:0 B:open:0 B:range:0 \
                 B:check:0:100 B:again:0 B:fill:0:7 A:check:0:7 B:get:0:0 B:free:0 B:close:0 B:close:0 B:close:0 \
                 A:check:0:7 A:free:0 A:get:0:0 A:exit B:exit";
    ipc(steps).same_under_shim(&[]).succeeds().says("B:check:0:100: 0 wrong, ends right");
    ipc(steps).same_under_shim(&["GPUPOOL_FREE=lazy"]);
    ipc(steps).same_under_shim(&["GPUPOOL_MODE=spill"]);
    ipc(steps).same_under_shim(&["GPUPOOL_MODE=trace"]);
}

#[test]
fn a_close_without_a_context_closes_nothing() {
    let steps =
        "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:unbound:0 B:check:0:100 B:close:0 B:unbound:0 B:close:0";
    ipc(steps).same_under_shim(&[]).succeeds().says("B:unbound:0: 201").says("B:check:0:100: 0 wrong, ends right");
}

/// Libraries choose by this attribute how they share memory (UCX, NCCL).
#[test]
fn memory_of_which_a_handle_can_be_had_says_so() {
    let steps = "A:alloc:0:65536 A:alloc:1:8 A:capable:0 A:capable:1 A:get:0:0 B:open:0 B:capable:0 A:capable:0";
    let shim = ipc(steps).same_under_shim(&[]);
    shim.succeeds().says("A:capable:0: 0 1, together 1").says("B:capable:0: 0 0, together 0");
    // Where none can be had, the answer is no.
    let run = ipc("A:alloc:0:65536 A:capable:0 A:get:0:0").env("SIMCUDA_FAULT", "cuMemCreate:1=801,cuMemCreate:2=801");
    run.shim().go().says("A:capable:0: 0 0, together 0").says("A:get:0:0: 1");
    let run = ipc("A:alloc:0:65536 A:capable:0 A:get:0:0").env("GPUPOOL_MODE", "managed");
    run.shim().go().says("A:capable:0: 0 0, together 0").says("A:get:0:0: 1");
}

#[test]
fn several_blocks_that_begin_inside_chunks_are_kept_apart() {
    // The first block leaves one chunk, on which the next ones stand side by side.
    let steps = "A:alloc:0:32768 A:free:0 A:alloc:1:3000 A:alloc:2:6144 A:alloc:3:5000 A:fill:1:10 A:fill:2:20 A:fill:3:30 \
                 A:get:1:0 A:get:2:99 A:get:3:0 B:open:3 B:open:1 B:open:2 B:range:2 B:check:1:10 B:check:2:20 B:check:3:30 \
                 B:fill:2:7 A:check:1:10 A:check:2:7 A:check:3:30 B:close:3 B:check:2:7 B:close:1 B:close:2 B:exit A:free:2";
    ipc(steps).same_under_shim(&[]).succeeds().says("A:check:2:7: 0 wrong, ends right");
}

/// What another process has open stays in its place, and all else of its exporter moves beside that.
#[test]
fn what_others_have_open_is_theirs_while_all_else_of_the_exporter_moves() {
    let mut steps = String::from("A:alloc:0:20480 A:fill:0:100 A:get:0:0 B:open:0 B:check:0:100");
    for slot in 1..7 {
        steps += &format!(" A:alloc:{slot}:16384 A:fill:{slot}:{slot}");
    }
    for round in 0..4 {
        steps += &format!(" B:fill:0:{round}");
        for slot in (1..7).rev() {
            steps += &format!(" A:check:{slot}:{slot} A:fill:{slot}:{slot}");
        }
        steps += &format!(" A:check:0:{round} B:check:0:{round}");
    }
    steps += " B:close:0 A:free:0 A:check:3:3 B:exit";
    let bare = ipc(&steps).env("SIMCUDA_CONTEXT_MIB", "0").go();
    let run =
        ipc(&steps).env("SIMCUDA_CONTEXT_MIB", "0").env("A_GPUPOOL_MOVE", "stress").env("GPUPOOL_LIMIT", "0:80MiB");
    let shim = logged(run.shim());
    shim.succeeds().same_as(&bare);
    let swaps = shim.picked(|event| match event {
        Event::TierSwap(swap) => Some((swap.bytes_in, swap.bytes_out)),
        _ => None,
    });
    let (came, left) = swaps.iter().fold((0, 0), |sum: (u64, u64), swap| (sum.0 + swap.0, sum.1 + swap.1));
    assert!(came > 0 && left > 0, "{swaps:?}");
}

#[test]
fn the_other_process_is_told_the_size_that_was_asked_for() {
    let steps = "A:alloc:0:5001 A:fill:0:10 A:get:0:0 B:open:0 B:range:0 B:check:0:10 B:close:0";
    ipc(steps).same_under_shim(&[]).succeeds().says("B:range:0: 0, 5121024 bytes, base right");
}

#[test]
fn a_block_over_gpus_and_the_host_is_one_block_in_the_other_process() {
    let steps = "A:alloc:0:307200 A:fill:0:100 A:get:0:0 B:open:0 B:range:0 B:check:0:100 B:fill:0:7 A:check:0:7 C:open:0 \
                 C:check:0:7 B:close:0 C:close:0 B:left C:left";
    let shim = logged(spread(steps));
    shim.succeeds().says("B:check:0:100: 0 wrong, ends right").says("A:check:0:7: 0 wrong, ends right");
    shim.says("B:range:0: 0, 314572800 bytes, base right").says("C:check:0:7: 0 wrong, ends right");
    shim.says("B:left: 0 handles, 0 MiB mapped, 16 MiB used").says("C:left: 0 handles, 0 MiB mapped, 16 MiB used");
    let (on_peers, on_host) = shim.event("pool.spill", |event| match event {
        Event::PoolSpill(spill) => Some((spill.on_peers, spill.on_host)),
        _ => None,
    });
    assert!(on_peers > 50 << 20 && on_host > 50 << 20, "{on_peers} bytes on peers, {on_host} on the host");
}

#[test]
fn threads_that_open_and_close_one_handle_agree() {
    let steps =
        "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:race:0 C:race:0 B:open:0 B:check:0:100 B:close:0 B:left C:left";
    let shim = ipc(steps).same_under_shim(&[]);
    shim.succeeds().says("B:race:0: 0 wrong").says("C:race:0: 0 wrong").is_quiet();
    shim.says("B:left: 0 handles, 0 MiB mapped, 16 MiB used").says("C:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

#[test]
fn gpus_are_matched_by_what_they_are_and_not_by_their_numbers() {
    let steps =
        "A:alloc:0:307200 A:fill:0:100 A:get:0:0 B:open:0 B:range:0 B:check:0:100 B:fill:0:7 A:check:0:7 B:close:0";
    let shim = spread(steps).env("B_CUDA_VISIBLE_DEVICES", "1,0").go();
    shim.succeeds().says("B:check:0:100: 0 wrong, ends right").says("A:check:0:7: 0 wrong, ends right");
    // What is opened counts as the opener's GPU's, wherever it lies (measured).
    shim.says("B:range:0: type 2, device 0, managed 0, context mine, 314572800 bytes from there");
}

#[test]
fn memory_of_a_gpu_that_the_importer_does_not_see_is_refused() {
    let run = ipc("A:alloc:0:65536 A:get:0:0 B:open:0 B:left").env("B_CUDA_VISIBLE_DEVICES", "1");
    let shim = run.same_under_shim(&[]);
    shim.succeeds().says("B:open:0: 101").says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
    shim.warns("which this process does not see (CUDA_VISIBLE_DEVICES)");
}

#[test]
fn the_exporter_may_free_and_end_first() {
    for end in ["exit", "kill"] {
        let steps = format!(
            "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 A:free:0 B:check:0:100 B:fill:0:7 A:{end} B:check:0:7 B:close:0 \
             B:open:0 B:left B:exit"
        );
        let shim = ipc(&steps).same_under_shim(&[]);
        shim.says("B:check:0:7: 0 wrong, ends right").says("B:open:0: 1").warns("cannot be reached");
    }
}

#[test]
fn the_importer_may_end_first() {
    for end in ["exit", "kill"] {
        let steps = format!("A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:fill:0:7 B:{end} A:check:0:7 A:free:0");
        ipc(&steps).same_under_shim(&[]).succeeds().says("A:check:0:7: 0 wrong, ends right");
    }
}

#[test]
fn freed_memory_lives_until_the_last_close_and_is_nobody_elses_till_then() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 A:free:0 A:alloc:1:65536 A:fill:1:9 B:check:0:100 B:fill:0:7 \
                 A:check:1:9 B:check:0:7";
    ipc(steps).same_under_shim(&[]).succeeds().says("B:check:0:7: 0 wrong, ends right");
    ipc(steps).same_under_shim(&["GPUPOOL_FREE=lazy"]);
    // Given back by the exporter at once, and used until the importer closes. Its own thread does that.
    let shim = ipc("A:alloc:0:65536 A:get:0:0 B:open:0 A:free:0 A:left B:close:0 A:asleep A:left").shim().go();
    shim.succeeds().says("A:left: 0 handles, 0 MiB mapped, 80 MiB used");
    shim.says("A:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

#[test]
fn nobody_gets_frames_that_somebody_else_still_has_open() {
    // Blocks 1 and 2 stand on one chunk of 32 MiB, which stays while 2 lives; 3 fits exactly where 1 was.
    let shared = "A:alloc:0:32768 A:free:0 A:alloc:1:4096 A:alloc:2:4096 A:fill:1:100 A:fill:2:50 A:get:1:0 B:open:1";
    let after = "A:alloc:3:4096 A:alloc:4:24576 A:fill:3:9 A:fill:4:9 B:check:1:100 B:fill:1:7 A:check:3:9 A:check:4:9";
    for settings in [&[][..], &["GPUPOOL_FREE=lazy"], &["GPUPOOL_MODE=spill"]] {
        let shim = ipc(&format!("{shared} A:free:1 {after} A:check:2:50")).same_under_shim(settings);
        shim.succeeds().says("B:check:1:100: 0 wrong, ends right");
    }
    // Frees that nobody can wait for.
    let shim = ipc(&format!("{shared} A:freed:1 {after} A:check:2:50 B:check:1:7")).shim().go();
    shim.succeeds().says("A:freed:1: free 0, end of the capture 0").says("B:check:1:100: 0 wrong, ends right");
    shim.says("A:check:3:9: 0 wrong, ends right").says("B:check:1:7: 0 wrong, ends right");
}

#[test]
fn what_is_open_elsewhere_outlives_the_context_that_it_was_made_in() {
    let open = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0";
    let after = "A:alloc:1:65536 A:fill:1:9 B:check:0:100 B:fill:0:7 A:check:1:9 B:check:0:7 B:close:0";
    for steps in [format!("{open} A:reset A:anew {after}"), format!("A:context {open} A:destroy {after}")] {
        let shim = ipc(&steps).same_under_shim(&[]);
        shim.succeeds().says("B:check:0:100: 0 wrong, ends right").says("A:check:1:9: 0 wrong, ends right");
    }
    let freed = ipc(&format!("{open} A:freed:0 {after}")).shim().go();
    freed.succeeds().says("B:check:0:100: 0 wrong, ends right").says("A:check:1:9: 0 wrong, ends right");
}

#[test]
fn frames_serve_again_once_nobody_has_them_open() {
    // The GPU has room for two such chunks and not for three.
    let shared = "A:alloc:0:32768 A:free:0 A:alloc:1:16384 A:alloc:2:4096 A:get:1:0 B:open:1 A:free:1";
    for end in ["B:close:1", "B:exit", "B:kill"] {
        let steps = format!("{shared} {end} C:open:1 A:alloc:3:16384 A:alloc:4:32768 A:fill:3:5 A:check:3:5");
        let run = Run::program("ipc").args(&steps).sim("1x96MiB").env("GPUPOOL_RESERVE", "8MiB");
        let shim = run.env("GPUPOOL_HOST_LIMIT", "0").shim().go();
        shim.says("A:alloc:3:16384: 0").says("A:alloc:4:32768: 0").says("A:check:3:5: 0 wrong, ends right");
    }
}

#[test]
fn a_handle_of_a_freed_block_opens_nothing_also_when_its_address_is_used_again() {
    let steps = "A:alloc:0:65536 A:get:0:0 A:free:0 B:open:0 A:alloc:1:65536 B:open:0 B:left";
    let shim = ipc(steps).shim().go();
    shim.succeeds().says("B:left: 0 handles, 0 MiB mapped, 16 MiB used").warns("it freed that memory");
    assert_eq!(shim.stdout.matches("B:open:0: 1\n").count(), 2, "{}", shim.stdout);
}

#[test]
fn a_context_that_goes_takes_what_was_opened_in_it() {
    let steps = "A:alloc:0:65536 A:get:0:0 B:open:0 B:reset B:left";
    ipc(steps).same_under_shim(&[]).succeeds().says("B:left: 0 handles, 0 MiB mapped, 0 MiB used");
}

#[test]
fn a_context_that_goes_with_what_was_opened_in_it_waits_for_no_other() {
    let steps = "A:alloc:0:65536 A:get:0:0 B:taken:0 B:left";
    let shim = ipc(steps).same_under_shim(&[]);
    shim.succeeds().says("B:taken:0: close 1");
    assert!(shim.stdout.contains("B:left: 0 handles, 0 MiB mapped"), "{}", shim.stdout);
}

/// Measured: an address for each GPU, and only the context that has a handle open may open it again there.
#[test]
fn each_gpu_has_what_it_opens_at_an_address_of_its_own() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:range:0 B:on:1 B:again:0 B:open:0 B:range:0 B:reset:0 \
                 B:check:0:100 B:close:0 B:check:0:100 B:close:0 B:close:0 B:on:0 B:left";
    let shim = ipc(steps).same_under_shim(&[]);
    shim.succeeds().says("B:again:0: 0 elsewhere").says("B:check:0:100: 0 wrong, ends right");
    shim.says("B:left: 0 handles, 0 MiB mapped, 32 MiB used");
}

#[test]
fn a_second_context_of_a_gpu_is_refused_what_the_first_has_open() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:context B:again:0 B:check:0:100 B:destroy B:again:0 B:close:0 \
                 B:check:0:100 B:context B:again:0 B:close:0 B:open:0 B:check:0:100 B:destroy B:open:0 B:check:0:100 B:close:0 B:left";
    let shim = ipc(steps).same_under_shim(&[]);
    shim.succeeds().says("B:again:0: 400 elsewhere").says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

#[test]
fn what_is_opened_in_the_next_context_of_a_handle_outlives_the_last() {
    for end in ["reset", "destroy"] {
        let steps = format!("A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:outlives:0:{end} B:check:0:100 B:close:0 B:left");
        let shim = ipc(&steps).report().same_under_shim(&[]);
        shim.succeeds().says(&format!("B:outlives:0:{end}: open 0, in a context of the same handle: 1"));
        shim.says("B:check:0:100: 0 wrong, ends right");
        assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    }
}

#[test]
fn closing_during_a_capture_is_done_when_it_returns() {
    let shim = ipc("A:alloc:0:65536 A:get:0:0 B:open:0 B:captured:0 B:left").shim().go();
    shim.succeeds().says("B:captured:0: close 0, end of the capture 0");
    shim.says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:captured:0 B:open:0 B:check:0:100 B:close:0 B:left";
    let shim = ipc(steps).shim().go();
    shim.succeeds().says("B:captured:0: close 0, end of the capture 0").says("B:check:0:100: 0 wrong, ends right");
    shim.says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

/// No pinned memory is left to wait with either.
#[test]
fn closing_during_a_capture_without_means_to_wait_is_done_later() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:fault:cuMemHostAlloc:1=2 B:captured:0 B:open:0 B:check:0:100 \
                 B:close:0 B:left";
    let shim = ipc(steps).shim().go();
    shim.succeeds().says("B:captured:0: close 0, end of the capture 0").says("B:check:0:100: 0 wrong, ends right");
    shim.says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

#[test]
fn closing_is_not_refused_because_a_capture_begins_meanwhile() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:overtaken:0 B:open:0 B:check:0:100 B:close:0 B:left";
    let shim = ipc(steps).shim().go();
    shim.succeeds().says("B:overtaken:0: close 0, end of the capture 0").says("B:check:0:100: 0 wrong, ends right");
    shim.says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

/// The thread that keeps the metrics page is there from the first allocation on, and serves exported blocks too.
#[test]
fn there_is_one_thread_at_most_and_none_in_an_importer() {
    let steps = "A:alloc:0:65536 A:threads A:get:0:0 A:threads A:get:0:0 A:threads B:open:0 B:threads";
    for (metrics, before) in [("off", 1), ("on", 2)] {
        let shim = ipc(steps).shim().env("GPUPOOL_METRICS", metrics).env("GPUPOOL_IDLE", "off").go();
        shim.succeeds().prints(&format!(
            "A:alloc:0:65536: 0\nA:threads: {before}\nA:get:0:0: 0\nA:threads: 2\nA:get:0:0: 0\nA:threads: 2\nB:open:0: 0\n\
             B:threads: 1\n"
        ));
    }
}

#[test]
fn the_child_of_a_fork_shares_nothing_and_keeps_nobody_waiting() {
    let steps =
        "A:alloc:0:65536 A:fill:0:100 A:get:0:0 A:fork:0 B:open:0 B:fork:0 B:check:0:100 B:close:0 A:check:0:100";
    ipc(steps).same_under_shim(&[]).succeeds().says("A:fork:0: in a child get 3, open 3, close 3, threads 1");
}

#[test]
fn few_descriptors_are_enough() {
    // Twelve chunks: stripes of 32 MiB over both GPUs. The simulated driver keeps a descriptor for each that it imported.
    let steps = "A:alloc:0:307200 A:fill:0:100 A:get:0:0 A:files:2 B:files:17 B:open:0 B:check:0:100 B:close:0 B:left";
    let shim = spread(steps).env("GPUPOOL_PLACEMENT", "interleave").go();
    shim.succeeds().says("B:check:0:100: 0 wrong, ends right").says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

#[test]
fn without_descriptors_the_importer_gets_an_error_and_keeps_nothing() {
    let steps = "A:alloc:0:307200 A:get:0:0 B:files:5 B:open:0 B:left";
    let shim = spread(steps).env("GPUPOOL_PLACEMENT", "interleave").go();
    shim.succeeds()
        .says("B:open:0: 304")
        .says("B:left: 0 handles, 0 MiB mapped, 16 MiB used")
        .warns("CUDA IPC, import failed");
}

#[test]
fn who_has_no_descriptor_left_is_told_so() {
    let importer = ipc("A:alloc:0:65536 A:get:0:0 B:files:0 B:open:0").shim().go();
    importer.succeeds().says("B:open:0: 1").warns("this process has no descriptor left");
    assert!(!importer.stderr.contains("it ended, became another program"), "{}", importer.stderr);
    // One for the connection, and none for the memory.
    let exporter = ipc("A:alloc:0:65536 A:get:0:0 A:files:1 B:open:0").shim().go();
    exporter.succeeds().says("B:open:0: 1").warns("because this process has no descriptor left");
}

#[test]
fn an_exporter_whose_importers_were_refused_says_that() {
    let shim = logged(ipc("A:alloc:0:65536 A:get:0:0 B:user:65534 B:open:0 A:free:0").shim());
    if shim.stdout.contains("B:user:65534: not allowed") {
        println!("only root can become another user: not checked");
        return;
    }
    shim.says("B:open:0: 1").warns("nobody had opened it; who tried was refused, as another user's");
    assert!(!shim.stderr.contains("run that one under gpupool"), "{}", shim.stderr);
}

#[test]
fn an_importer_without_the_shim_is_refused_and_the_exporter_says_so() {
    let run = ipc("A:alloc:0:65536 A:get:0:0 B:open:0 A:free:0").env("B_LD_PRELOAD", "");
    let shim = logged(run.shim());
    shim.succeeds().says("B:open:0: 1").warns("run that one under gpupool, too");
    let said =
        shim.events("ipc.export").iter().any(|record| record.message.contains("only processes that run under gpupool"));
    assert!(said, "{:?}", shim.records);
}

#[test]
fn memory_of_an_exporter_without_the_shim_is_opened_by_the_driver() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:again:0 B:check:0:100 B:range:0 B:close:0 B:close:0";
    let run = ipc(steps);
    let bare = run.clone().go();
    run.shim().env("A_LD_PRELOAD", "").go().same_as(&bare).succeeds();
}

#[test]
fn an_exporter_that_hangs_does_not_hang_the_importer() {
    let shim = ipc("A:alloc:0:65536 A:get:0:0 A:hold B:open:0 B:left").shim().go();
    shim.says("B:open:0: 1")
        .warns("it did not answer within 5 s; it is stopped")
        .says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

#[test]
fn another_user_gets_nothing() {
    // The exporter serves in the order of asking, so once the third process has the memory, it has told of the second.
    let steps = "A:alloc:0:65536 A:get:0:0 B:user:65534 B:open:0 B:left C:open:0 C:close:0";
    let shim = logged(ipc(steps).shim());
    if shim.stdout.contains("B:user:65534: not allowed") {
        println!("only root can become another user: not checked");
        return;
    }
    shim.says("B:open:0: 1").says("B:left: 0 handles, 0 MiB mapped, 16 MiB used").warns("of user 65534");
    shim.says("C:open:0: 0");
    let refused = shim.event("ipc.failed", |event| match event {
        Event::IpcFailed(failed) if failed.what == "serve" => Some(failed.why.clone()),
        _ => None,
    });
    assert!(refused.contains("may not open memory"), "{refused}");
}

#[test]
fn who_becomes_another_user_shares_as_that_one_and_not_at_all_after_sharing_as_the_first() {
    for (first, opened) in [("A:user:12345 A:get:0:0", 0), ("A:get:0:0 A:user:12345", 1)] {
        let shim = ipc(&format!("A:alloc:0:65536 {first} B:user:12345 B:open:0 C:open:0")).shim().go();
        if shim.stdout.contains("user:12345: not allowed") {
            println!("only root can become another user: not checked");
            return;
        }
        shim.says(&format!("B:open:0: {opened}")).says("C:open:0: 1");
    }
}

#[test]
fn an_exporter_that_closed_all_its_descriptors_serves_on() {
    // One step more before it waits: the thread has met what was closed, and neither it nor the importer goes round.
    let steps = "A:alloc:0:65536 A:fill:0:100 A:alloc:1:8192 A:fill:1:5 A:get:0:0 A:get:1:0 B:open:0 A:daemonise B:open:1 \
                 A:asleep B:check:0:100 B:check:1:5 C:open:0 C:check:0:100 B:close:0 B:close:1 A:asleep";
    let run = ipc(steps);
    let shim = run.shim().go();
    shim.succeeds().is_quiet().says("A:asleep: yes").says("B:check:1:5: 0 wrong, ends right");
    shim.says("C:check:0:100: 0 wrong, ends right");
    assert!(!shim.stdout.contains("A:asleep: no"), "{}", shim.stdout);
}

#[test]
fn what_was_open_before_an_exporter_closed_its_descriptors_stays_whole() {
    let steps = "A:alloc:0:32768 A:free:0 A:alloc:1:4096 A:alloc:2:4096 A:fill:1:100 A:fill:2:50 A:get:1:0 A:get:2:0 B:open:1 \
                 A:daemonise C:open:2 A:free:1 A:alloc:3:4096 A:fill:3:9 B:check:1:100 B:exit C:check:2:50 A:check:3:9";
    let shim = ipc(steps).shim().go();
    shim.succeeds().says("B:check:1:100: 0 wrong, ends right").says("A:check:3:9: 0 wrong, ends right");
}

#[test]
fn descriptors_of_the_programs_that_took_our_numbers_stay_open() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:alloc:1:65536 A:fill:1:5 A:get:0:0 A:get:1:0 B:open:0 A:reuse C:open:0 A:kept \
                 A:asleep A:fork:0 A:kept C:check:0:100 B:reuse B:open:1 B:close:0 B:kept B:open:0 B:check:0:100 B:check:1:5 \
                 B:close:1 B:kept";
    let shim = ipc(steps).shim().go();
    shim.succeeds().says("A:reuse: all there in the child: yes").says("B:reuse: all there in the child: yes");
    shim.says("A:asleep: yes").says("C:check:0:100: 0 wrong, ends right").says("B:check:0:100: 0 wrong, ends right");
    assert_eq!(shim.stdout.matches("kept: all").count(), 4, "{}", shim.stdout);
}

#[test]
fn public_names_and_numbers_open_nothing() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:forge:0 A:asleep B:open:0 B:check:0:100";
    let shim = ipc(steps).shim().go();
    shim.succeeds().says("B:forge:0: 0 answered, 0 descriptors, asked yes").says("B:check:0:100: 0 wrong, ends right");
    shim.says("B:forge:0: with the secret 1 held, 1 descriptors");
}

#[test]
fn a_process_of_another_version_is_told_which_one_is_spoken_and_garbage_is_not_answered() {
    let shim = logged(ipc("A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:say:0:99 B:open:0 B:check:0:100").shim());
    shim.succeeds().says(&format!("B:say:0:99: a hold: kind 0 of version {VERSION}, then the end"));
    shim.says(&format!("B:say:0:99: something else: kind 0 of version {VERSION}, then the end"));
    shim.says("B:say:0:99: garbage: 0 bytes, then the end").says("B:check:0:100: 0 wrong, ends right");
    shim.warns(&format!("it speaks version 99 of gpupool's messages, and this process version {VERSION}"));
}

#[test]
fn an_importer_says_which_version_the_exporter_speaks() {
    let shim = ipc("A:alloc:0:65536 A:get:0:0 B:imitate:0:99 B:open:0 B:left").shim().go();
    shim.says("B:open:0: 1").says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
    shim.warns(&format!(
        "it speaks version 99 of gpupool's messages, and this process version {VERSION}; run both under the same version"
    ));
    // A handle says so, too, before anybody is asked.
    let shim = ipc("A:alloc:0:65536 A:get:0:0 A:stamp:0:98 B:open:0").shim().go();
    let told = format!("it speaks version 98 of gpupool's messages, and this process version {VERSION}");
    shim.says("B:open:0: 1").warns(&told);
}

#[test]
fn the_number_that_stands_for_unknown_users_is_nobodys() {
    // B does not wait to be refused: A is to have seen it before it ends.
    let shim = ipc("A:alloc:0:65536 A:get:0:0 A:user:65534 B:user:65534 B:open:0 B:left A:asleep").shim().go();
    if shim.stdout.contains("user:65534: not allowed") {
        println!("only root can become another user: not checked");
        return;
    }
    shim.says("B:open:0: 1").warns("stands for every user that this user namespace does not know");
}

#[test]
fn another_user_who_only_connects_stops_nobody_and_fills_no_log() {
    let knocks =
        "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:user:65533 B:knock:200 C:crowd:70 C:open:0 C:check:0:100 C:close:0";
    let shim = logged(ipc(knocks).shim());
    if shim.stdout.contains("B:user:65533: not allowed") {
        println!("only root can become another user: not checked");
        return;
    }
    shim.says("B:knock:200: 200 ended").says("C:check:0:100: 0 wrong, ends right");
    let told = shim.picked(|event| match event {
        Event::IpcFailed(failed) if failed.what == "serve" => Some(failed.why.clone()),
        _ => None,
    });
    assert!((2..=10).contains(&told.len()), "{told:#?}");
    assert_eq!(told.last().map(String::as_str), Some("200 connections in all were refused"), "{told:#?}");
    // Nobody reads what the exporter says any more.
    let deaf = knocks.replace("B:user", "A:deaf B:user").replace("A:fill:0:100", "A:fill:0:100 A:free:1");
    let shim = ipc(&format!("{deaf} A:kill")).shim().go();
    shim.says("B:knock:200: 200 ended").says("C:check:0:100: 0 wrong, ends right");
}

#[test]
fn a_capture_that_begins_while_a_close_waits_does_not_fail_it() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:get:0:0 B:open:0 B:running:0 B:open:0 B:check:0:100 B:close:0 B:left";
    let shim = ipc(steps).shim().env("GPUPOOL_PINNED", "off").go();
    shim.succeeds().says("B:running:0: close 0, end of the capture 0").says("B:check:0:100: 0 wrong, ends right");
    shim.says("B:left: 0 handles, 0 MiB mapped, 16 MiB used");
}

#[test]
fn a_fault_at_any_driver_call_leaves_nothing_behind() {
    let steps = "A:alloc:0:204800 A:fill:0:5 A:sweep:get:0 A:get:0:0 B:sweep:open:0 B:open:0 B:check:0:5 B:close:0 B:left \
                 A:fault:cuMemExportToShareableHandle:1=999 B:open:0 B:open:0 B:check:0:5 B:close:0 B:left";
    let shim = ipc(steps).shim().go();
    // It asks for the current context alone, and is served whether or not the driver tells that.
    shim.succeeds().says("A:sweep:get:0: every call failed once, some refused: 0");
    shim.says("B:sweep:open:0: every call failed once, some refused: 1").says("B:check:0:5: 0 wrong, ends right");
    assert!(shim.stdout.ends_with("B:left: 0 handles, 0 MiB mapped, 16 MiB used\n"), "{}", shim.stdout);
}

#[test]
fn the_log_tells_both_sides() {
    let steps = "A:alloc:0:65536 A:get:0:0 A:get:0:0 B:open:0 B:again:0 B:close:0 B:close:0";
    let exporter = logged(ipc(steps).shim());
    assert_eq!(exporter.events("ipc.export").len(), 1, "once a block: {:?}", exporter.records);
    let importer = ipc(steps).shim().log().env("A_GPUPOOL_LOG_FILE", "").go();
    let (bytes, chunks) = importer.event("ipc.import", |event| match event {
        Event::IpcImport(import) => Some((import.bytes, import.chunks)),
        _ => None,
    });
    assert_eq!((bytes, chunks), (64 << 20, 1));
    assert_eq!((importer.events("ipc.import").len(), importer.events("ipc.close").len()), (1, 1));
}

#[test]
fn memory_that_leaves_by_its_handle_is_anchored_and_lives_with_whoever_has_it() {
    let shim = Run::program("ipc_anchors").sim("2x1GiB").shim().go();
    shim.succeeds().prints(
        "\
cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)freed): 1 CUDA_ERROR_INVALID_VALUE
several chunks: 600 MiB 0
cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)several): 1 CUDA_ERROR_INVALID_VALUE
shared: 600 MiB 1
before the handle is given: 8 MiB 2
cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)whole): 0 CUDA_SUCCESS
retained: 8 MiB 2
before the descriptor is given: 8 MiB 6
cuMemGetHandleForAddressRange(&descriptor, whole, 8 * MIB, DMA_BUF, 0): 0 CUDA_SUCCESS
and a descriptor given: 8 MiB 6
through the handle: 0 wrong
cuMemRelease(handle): 1 CUDA_ERROR_INVALID_VALUE
a new one: 8 MiB 0
retained twice: the same handle
while it is bound: 8 MiB 4
cuMulticastBindAddr(1, 0, bound, 8 * MIB, 0): 1 CUDA_ERROR_INVALID_VALUE
refused: 8 MiB 0
cuMemGetHandleForAddressRange(&descriptor, given, 8 * MIB, DMA_BUF, 1 << 20): 1 CUDA_ERROR_INVALID_VALUE
refused: 4 MiB 0
cuMemGetHandleForAddressRange(&descriptor, given, 4 * MIB, DMA_BUF, 0): 0 CUDA_SUCCESS
what is open by its descriptor serves again: no
all of it goes: 1
cuIpcGetMemHandle(&shared, given_away): 1 CUDA_ERROR_INVALID_VALUE
cuIpcGetMemHandle(&shared, given_away): 1 CUDA_ERROR_INVALID_VALUE
",
    );
}

#[test]
fn events_are_shared_as_without_the_shim() {
    let steps = "A:alloc:0:65536 A:fill:0:100 A:event:1 A:get:0:0 B:await:1 B:open:0 B:check:0:100 B:close:0";
    ipc(steps).same_under_shim(&[]).succeeds().says("B:await:1: open 0, wait 0");
}

#[test]
fn blocks_that_come_and_go_under_many_importers_keep_their_words() {
    for (seed, free) in [("1", "strict"), ("2", "lazy")] {
        let run = Run::program("ipc_stress").args(&format!("{seed} 10 2")).sim("1x512MiB,1x64MiB");
        let run = run.env("GPUPOOL_LIMIT", "0:160MiB,1:48MiB").env("GPUPOOL_HOST_LIMIT", "200MiB");
        let shim = run.env("GPUPOOL_FREE", free).shim().report().go();
        shim.succeeds().prints("some opened, 0 handles left, 0 MiB mapped\n");
        assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    }
}

#[test]
fn python_processes_share_arrays() {
    Run::client("ipc_client.py")
        .sim("2x1GiB")
        .same_under_shim(&[])
        .succeeds()
        .says("the receiver found 0 wrong words and wrote its own");
}
