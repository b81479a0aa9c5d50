//! Contexts that end while others begin, green ones, and what is left of those that are gone.

use gpupool_events::Event;
use harness::{Output, Run};

#[track_caller]
fn lives(case: &str) -> Output {
    let run = Run::program("lives").arg(case).sim("1x1GiB").report();
    let shim = run.same_under_shim(&["GPUPOOL_HOST_LIMIT=0"]);
    shim.succeeds().says("what the next life made is whole: yes");
    shim.says("cuMemFree_v2(next.block): 0 CUDA_SUCCESS").says("cuMemFreeHost(next.pinned): 0 CUDA_SUCCESS");
    shim.says("cuMemAlloc_v2(&again, MOST * MIB): 0 CUDA_SUCCESS");
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    shim
}

#[test]
fn what_a_primary_context_s_next_life_made_outlives_the_reset_of_the_last() {
    lives("reset");
    lives("remembered");
}

#[test]
fn what_a_primary_context_s_next_life_made_outlives_the_last_release() {
    lives("release");
    lives("not_the_last");
}

#[test]
fn a_primary_context_is_used_before_the_thread_that_makes_it_has_heard_of_it() {
    lives("begun");
}

#[test]
fn what_is_made_in_a_context_with_the_handle_of_a_destroyed_one_stays() {
    lives("destroy").says("the handle is the same again: yes");
    lives("refused").says("cuCtxDestroy_v2(context): 999 CUDA_ERROR_UNKNOWN");
}

#[test]
fn a_green_context_takes_nothing_along_but_itself() {
    let shim = Run::program("greens").sim("2x1GiB").log().report().same_under_shim(&[]);
    let pooled = shim.events("block.allocate").len();
    assert_eq!(pooled, 8, "two in each round, and two more: {:?}", shim.records);
    shim.succeeds().says("round 3: owners are the primary context: 1 1").says("its owner is the primary context: 1");
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
}

#[test]
fn a_context_that_is_gone_answers_as_bare_and_takes_its_blocks_along() {
    let shim = Run::program("gone").sim("2x1GiB").same_under_shim(&[]);
    shim.succeeds().says("-- detached, and not for the last time");
    // Drivers that do not number contexts.
    Run::program("gone").sim("2x1GiB").env("SIMCUDA_DRIVER", "11080").same_under_shim(&[]);
}

#[test]
fn a_context_that_ended_is_not_taken_for_a_later_one_with_its_handle() {
    let shim = Run::program("dead_current").sim("1x1GiB").report().same_under_shim(&[]);
    shim.succeeds().says("the handle of the first: given again").says("cuMemFree_v2(block): 0 CUDA_SUCCESS");
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
}

#[test]
fn a_context_in_error_answers_as_bare_once_the_program_was_told() {
    let shim = Run::program("broken_context").sim("2x1GiB").same_under_shim(&[]);
    shim.succeeds().says("cuMemAlloc_v2(&other, LEAST * MIB): 719 CUDA_ERROR_LAUNCH_FAILED");
    shim.says("cuIpcGetMemHandle(&handle, block): 719 CUDA_ERROR_LAUNCH_FAILED");
}

#[test]
fn without_a_context_that_can_be_used_every_question_is_answered_as_bare() {
    for settings in [&[][..], &["GPUPOOL_PINNED=off"], &["GPUPOOL_FREE=lazy"]] {
        let shim = Run::program("no_usable_context").sim("1x1GiB").same_under_shim(settings);
        shim.succeeds().says("-- no context").says("-- one that was destroyed");
    }
}

#[test]
fn what_is_allocated_where_an_ended_context_had_memory_is_known_as_new() {
    let again = |what, rounds| Run::program("addresses_again").args(&format!("{what} {rounds}")).sim("1x6GiB");
    let (pooled, managed) = (again("managed", 60), again("plain", 5).env("GPUPOOL_MODE", "managed"));
    for run in [pooled, managed] {
        run.shim().go().succeeds().prints("wrong answers: 0\n");
    }
}

fn abandoned(case: &str) -> Run {
    let run = Run::program("abandoned").arg(case).sim("1x256MiB").report();
    run.env("GPUPOOL_HOST_LIMIT", "0")
}

#[test]
fn memory_is_used_again_after_a_capture_that_nobody_ended() {
    for case in ["stream", "context", "reset", "thread", "green", "twice"] {
        let shim = abandoned(case).log().same_under_shim(&[]);
        shim.succeeds().says("cuMemAlloc_v2(&block, large): 0 CUDA_SUCCESS");
        assert!(!shim.stdout.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{case}: {}", shim.stdout);
        // While a stream is being captured, the pool takes no more pinned memory than it has.
        let by = shim.picked(|event| match event {
            Event::PinnedAllocate(made) => Some(made.by.clone()),
            _ => None,
        });
        assert_eq!(by, ["pool"; 3], "{case}: one in each mode");
        assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{case}");
    }
}

#[test]
fn captures_of_a_thread_s_default_streams_in_two_contexts_are_two() {
    for settings in [&[][..], &["GPUPOOL_FREE=lazy"], &["GPUPOOL_MODE=spill"]] {
        let shim = Run::program("own_streams").sim("1x256MiB").same_under_shim(settings);
        assert_eq!(shim.succeeds().stdout.matches("cuStreamEndCapture_ptsz(NULL, &graph): 0").count(), 4);
    }
}

#[test]
fn a_second_capture_that_is_refused_leaves_the_first_in_peace() {
    let shim = abandoned("free_meanwhile").shim().go();
    shim.succeeds();
    for call in ["cuMemFree_v2(block)", "cuStreamEndCapture(stream, &graph)", "cuMemAlloc_v2(&block, large)"] {
        shim.says(&format!("{call}: 0 CUDA_SUCCESS"));
    }
    assert!(!shim.stdout.contains("INVALIDATED"), "{}", shim.stdout);
}

#[test]
fn threads_that_begin_and_end_contexts_of_every_kind_take_nothing_from_each_other() {
    // On a slow machine what is left behind while the workers work is more than the host has.
    let run = Run::program("lifecycle").arg("12").sim("2x1GiB").env("GPUPOOL_HOST_LIMIT", "2GiB").report();
    let bare = run.clone().go();
    bare.succeeds().prints("enough was made, 0 wrong\nafter the resets, 0 wrong\n");
    for free in ["strict", "lazy"] {
        for _ in 0..4 {
            let shim = run.clone().arg("2").shim().env("GPUPOOL_FREE", free).go();
            shim.same_as(&bare);
            assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{free}");
        }
    }
}

/// Access costs by GPU, and most programs work on one.
#[test]
fn memory_is_granted_to_the_gpus_that_have_a_context() {
    for way in ["retain", "create", "green", "unseen", "unseen_work", "unseen_launch"] {
        let run = Run::program("late_contexts").args(&format!("{way} access")).sim("2x2GiB").shim().go();
        run.succeeds().prints(
            "\
alone: GPU 0 yes, GPU 1 no
both: GPU 0 yes, GPU 1 yes
life 1: copied 0 wrong; read by kernels: 0 0 0 0 0; and after it wrote: 0 0 0 0 0
alone: GPU 0 yes, GPU 1 no
both: GPU 0 yes, GPU 1 yes
life 2: copied 0 wrong; read by kernels: 0 0 0 0 0; and after it wrote: 0 0 0 0 0
",
        );
    }
}

/// Each is granted all the memory there is, whoever else comes at that moment and whatever is allocated meanwhile.
#[test]
fn four_contexts_that_come_late_and_together_reach_all_memory() {
    let run = Run::program("late_together").args("4 4").sim("5x1GiB").report();
    let bare = run.clone().go();
    bare.succeeds().says("life 4: 0 wrong by those who came; 0 wrong of what they wrote");
    for _ in 0..3 {
        let shim = run.clone().shim().go();
        shim.same_as(&bare);
        assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    }
}

#[test]
fn a_context_that_the_memory_cannot_be_granted_to_is_not_made() {
    let shim = Run::program("refused_context").sim("2x1GiB").shim().report().go();
    let of = |way: &str, result: i32, made: &str, state: &str| {
        format!("{way}: {result}, {made}; primary context of GPU 1 {state}, current as before, memory right\n")
    };
    let refused = ["retain", "green", "create"].map(|way| of(way, 2, "nothing", "inactive")).concat();
    let made =
        [of("retain", 0, "made", "active"), of("green", 0, "made", "active"), of("create", 0, "made", "inactive")];
    shim.succeeds()
        .prints(&(refused + &made.concat()))
        .warns("cuGreenCtxCreate on GPU 1 answers CUDA_ERROR_OUT_OF_MEMORY (2): ");
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
}

#[test]
fn freed_memory_on_a_gpu_makes_room_for_a_context_there() {
    let run = Run::program("context_room").sim("4x1GiB").env("GPUPOOL_RESERVE", "16MiB").env("GPUPOOL_HOST_LIMIT", "0");
    let shim = run.same_under_shim(&[]);
    shim.succeeds().says("cuDevicePrimaryCtxRetain(&second, 1): 0 CUDA_SUCCESS");
}
