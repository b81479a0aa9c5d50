//! Who a free waits for: the context that the memory is of, and nobody else. A program that waits for another one here would
//! wait for ever, and says so.

use harness::{Output, Run};

fn on_two(program: &str, arguments: &str, gpus: &str) -> Run {
    Run::program(program).args(arguments).sim(gpus).env("GPUPOOL_RESERVE", "16MiB").report()
}

#[track_caller]
fn is_right(output: &Output) {
    output.succeeds().says("done");
    assert_eq!(output.reported("violations"), &serde_json::json!([]));
}

/// Pooled blocks, and such as the driver has.
const SIZES: [&str; 2] = ["GPUPOOL_MIN_SIZE=1MiB", "GPUPOOL_MIN_SIZE=1"];

#[test]
fn a_free_waits_for_whom_the_driver_s_waits() {
    for size in SIZES {
        Run::program("waits").sim("2x1GiB").same_under_shim(&[size]);
    }
}

#[test]
fn a_close_of_another_process_s_memory_waits_for_whom_the_driver_s_waits() {
    Run::program("closes").sim("2x1GiB").same_under_shim(&[]);
}

#[test]
fn a_kernel_held_on_one_gpu_holds_no_free_of_another_s_memory() {
    on_two("held", "free 64 3 1", "2x512MiB").same_under_shim(&[SIZES[1]]);
    for free in ["strict", "lazy"] {
        // The second block lies on both GPUs: it is GPU 0's all the same.
        let shim = on_two("held", "free 64 600 3", "2x512MiB").env("GPUPOOL_FREE", free).shim().go();
        is_right(&shim);
        shim.says("600 MiB: 0 wrong");
    }
}

#[test]
fn a_kernel_held_in_one_context_holds_no_free_of_another_s_memory() {
    for size in SIZES {
        for free in ["strict", "lazy"] {
            let run =
                on_two("held", "contexts", "2x512MiB").env("GPUPOOL_FREE", free).env("GPUPOOL_MIN_SIZE", &size[17..]);
            is_right(&run.shim().go());
        }
    }
}

#[test]
fn threads_on_two_gpus_get_on_while_the_other_gpu_is_busy() {
    on_two("held", "turns", "2x512MiB").same_under_shim(&[SIZES[1]]);
    for free in ["strict", "lazy"] {
        is_right(&on_two("held", "turns", "2x512MiB").env("GPUPOOL_FREE", free).shim().go());
    }
}

#[test]
fn an_allocation_is_served_beside_a_kernel_that_may_use_the_best_fit_where_other_memory_is_quiet() {
    let run =
        Run::program("lazy_fit").sim("1x1GiB").env("GPUPOOL_FREE", "lazy").env("GPUPOOL_HOST_LIMIT", "0").report();
    let shim = run.shim().go();
    shim.succeeds().prints("while the kernel runs: what nobody works on\n");
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
}

#[test]
fn what_another_gpu_borrowed_is_nobody_s_until_that_gpu_is_done() {
    // The block of 300 MiB beside one as large: partly on GPU 0, which takes all it can get meanwhile.
    let run = on_two("held", "borrowed 300", "2x512MiB").env("GPUPOOL_HOST_LIMIT", "0");
    let shim = run.env("GPUPOOL_FREE", "lazy").shim().go();
    is_right(&shim);
    shim.says("0 words of the block and 0 of the pinned memory overwritten");
}

#[test]
fn a_capture_outlives_the_question_whether_a_gpu_is_done() {
    // Before an event is recorded behind all work of a context, which would break a capture there in any mode; and behind
    // that, before the event is asked, which would break a global one anywhere.
    for when in ["cuEventCreate 2 1", "cuEventCreate 0 1", "cuThreadExchangeStreamCaptureMode 0 0"] {
        let run = on_two("held", &format!("asked 300 {when}"), "2x512MiB").env("GPUPOOL_HOST_LIMIT", "0");
        let shim = run.env("GPUPOOL_FREE", "lazy").shim().go();
        is_right(&shim);
        shim.says("end of the capture: 0");
    }
}

#[test]
fn a_capture_that_begins_beside_a_free_which_waits_is_whole() {
    for program in
        ["beside_captures first", "beside_captures later", "beside_captures moment", "beside_captures just_before"]
    {
        let (program, way) = program.split_once(' ').unwrap();
        let shim = Run::program(program).args(way).sim("1x1GiB").report().shim().go();
        is_right(&shim);
        shim.says("the free waited, end of the capture: 0");
    }
}

#[test]
fn what_was_waited_for_is_not_waited_for_again_until_something_is_submitted() {
    let shim = Run::program("waits_again").args("rows").sim("1x1GiB").report().shim().go();
    is_right(&shim);
    shim.says("waits: 0 too many, 0 too few");
}

/// Of what was freed lazily the driver is asked once whether it is done with it, and again behind the next submission.
#[test]
fn what_was_seen_to_be_over_is_not_asked_again_until_something_is_submitted() {
    let shim = Run::program("waits_again").args("lazy").sim("1x1GiB").env("GPUPOOL_FREE", "lazy").report().shim().go();
    is_right(&shim);
    assert_eq!(shim.stdout.matches("asked in 1 of 100 pairs").count(), 3, "{}", shim.stdout);
}

#[test]
fn a_wait_of_the_program_s_own_is_one_for_its_frees() {
    let shim = Run::program("waits_again").args("own").sim("2x1GiB").report().shim().go();
    is_right(&shim);
    shim.says("behind cuCtxSynchronize: no wait").says("behind cuCtxSynchronize in a green context: waits");
    shim.says("behind work on another GPU: waits").says("behind a context more: waits");
}

#[test]
fn threads_that_submit_beside_others_that_free_find_their_data() {
    let shim = Run::program("waits_again").args("threads").sim("1x1GiB").report().shim().go();
    is_right(&shim);
    shim.says("0 words overwritten");
}

/// Whatever may submit work past the hooks.
#[test]
fn every_free_waits_where_work_may_be_submitted_unseen() {
    let run = |way: &str| Run::program("waits_again").args(way).sim("1x1GiB").env("GPUPOOL_LOG", "debug");
    let waits = |run: Run, why: &str| {
        let shim = run.shim().go();
        shim.succeeds().says("a second free: waits");
        shim.warns(&format!("every free waits for its context: {why}"));
    };
    waits(run("dlsym"), "the program looked up cuMemcpyDtoD, which");
    waits(run("address"), "the program looked up cuMemcpyDtoD, which");
    waits(run("table"), "the driver's private table 00000001-0000-0000-0000-000000000000 was taken");
    waits(run("context").sim("2x1GiB"), "a context was found in use, made by a call that was not seen");
    waits(run("cancel"), "the program cancels threads");
    waits(run("nothing").env("CUDA_INJECTION64_PATH", "/nowhere"), "CUDA_INJECTION64_PATH is set");
    let shim = run("nothing").shim().go();
    shim.succeeds().says("a second free: no wait");
    assert!(!shim.stderr.contains("every free waits"), "{}", shim.stderr);
}

#[test]
fn a_wait_that_a_capture_forbids_is_made_another_way() {
    let shim = on_two("held", "refused", "2x512MiB").shim().go();
    is_right(&shim);
    shim.says("0 words of the block overwritten");
}

/// Another thread captures on the same GPU in each mode, or on the other one. Bare, frees are legal here in all modes but 0, global.
const BESIDE: [&str; 4] = ["beside 0 0", "beside 1 0", "beside 2 0", "beside 0 1"];

#[test]
fn a_strict_free_waits_while_another_thread_captures() {
    Run::program("free_while_running").args("beside 2 0").sim("2x1GiB").same_under_shim(&[]);
    for beside in BESIDE {
        for (program, before) in [("free_while_running", "kernel"), ("pinned_running", "copy")] {
            let shim = Run::program(program).args(beside).sim("2x1GiB").report().shim().go();
            shim.succeeds().says("end of the capture: 0");
            for round in 1..=3 {
                shim.says(&format!("round {round}: the free returned before the {before} ran: no"));
                shim.says(&format!("round {round}: 0 words overwritten"));
            }
            assert_eq!(shim.reported("violations"), &serde_json::json!([]));
        }
    }
}

#[test]
fn memory_is_used_again_while_another_thread_captures() {
    for beside in BESIDE {
        let run = on_two("held", &format!("again 300 {beside}"), "2x512MiB").env("GPUPOOL_HOST_LIMIT", "0");
        for free in ["strict", "lazy"] {
            let shim = run.clone().env("GPUPOOL_DEVICES", "0").env("GPUPOOL_FREE", free).shim().go();
            is_right(&shim);
            shim.says("allocation 1: 0").says("allocation 2: 0").says("end of the capture: 0");
        }
    }
}

/// The free returns at once; the data must be right when the memory is used again meanwhile.
#[test]
fn a_lazy_free_is_waited_for_while_another_thread_captures() {
    for (program, before) in [("free_while_running", "kernel"), ("pinned_running", "copy")] {
        let run = Run::program(program).args("lazy beside 1 0").sim("2x1GiB").report();
        let shim = run.shim().env("GPUPOOL_FREE", "lazy").go();
        shim.succeeds().says("end of the capture: 0");
        shim.says(&format!("round 1: the free returned before the {before} ran: yes"));
        shim.says("round 1: 0 words overwritten").says("round 3: 0 words overwritten");
        assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    }
}
