//! Stream-ordered memory: the driver's own, and the pool's where the driver has none. Four GPUs of 64 MiB, of which a
//! context takes 16 and a pool of the driver's takes pieces of 32.

use gpupool_events::Event;
use harness::{Output, Run};

fn script(steps: &str) -> Run {
    Run::program("stream_ordered").args(steps).sim("4x64MiB").env("GPUPOOL_RESERVE", "4MiB")
}

fn shim(steps: &str) -> Output {
    let run = script(steps).shim().log().report().go();
    run.succeeds();
    run
}

/// Lines that the program printed, one after the other.
#[track_caller]
fn tells(output: &Output, lines: &str) {
    output.succeeds();
    if !output.stdout.contains(lines) {
        output.fail(&format!("expected on stdout:\n{lines}"));
    }
}

#[test]
fn what_fits_is_the_drivers() {
    let steps = "a:16 p:8 k:0 k:1 x:0 x:1 f:0 f:1 s f:0 a:0 C:0 a:4 k:2 f:2 E";
    script(steps).same_under_shim(&[]).succeeds();
    let run = shim(steps);
    assert!(run.events("block.allocate").is_empty(), "nothing of this is the pool's");
}

#[test]
fn what_the_driver_has_no_memory_for_is_the_pools() {
    tells(&script("a:30 a:30").go(), "allocate async 30: 0\nallocate async 30: 2\n");
    let run = shim("a:30 a:30 z:30 p:30 k:0 k:1 k:2 k:3 x:0 x:1 x:2 x:3 f:1 f:2 F:3 f:0 s f:1 F:3");
    let answers: Vec<_> = run.stdout.lines().filter(|line| line.contains("alloc")).collect();
    assert!(answers.iter().all(|line| line.ends_with(": 0") || line.ends_with(": 0 wrong")), "{answers:?}");
    tells(&run, "free async 1: 0\nfree async 2: 0\nfree 3: 0\nfree async 0: 0\nfree async 1: 1\nfree 3: 1\n");
    assert_eq!(run.reported("violations"), &serde_json::json!([]));
    run.warns("lay outside the GPU that asked for it");
}

/// A pointer tells the same of it, whoever had memory for it; and of what begins there later what that is.
#[test]
fn what_the_pool_stands_in_for_is_told_to_be_of_the_drivers_pool_and_of_no_context() {
    let [of_default, of_own, of_context] =
        ["no context, of the default pool", "no context, of the program's pool", "a context, of no pool"];
    let bare = script("a:4 p:4 b:4 t:0 t:1 t:2").go();
    tells(&bare, &format!("pointer 0: of {of_default}\npointer 1: of {of_own}\npointer 2: of {of_context}\n"));
    script("a:4 p:4 b:4 t:0 t:1 t:2").same_under_shim(&[]).succeeds();
    // The GPU has 48 MiB, of which the first has a piece of 32.
    let run = shim("a:30 a:30 p:30 b:30 t:0 t:1 t:2 t:3 F:1 b:30 t:4");
    tells(&run, &format!("pointer 0: of {of_default}\npointer 1: of {of_default}\npointer 2: of {of_own}\n"));
    tells(&run, &format!("pointer 3: of {of_context}\nfree 1: 0\nallocate 30: 0\npointer 4: of {of_context}\n"));
    assert_eq!(run.events("block.allocate").len(), 4, "what the driver had no memory for");
}

/// Below GPUPOOL_MIN_SIZE, too: the driver had its chance.
#[test]
fn small_requests_are_served_when_the_gpu_is_full() {
    let run = script("b:30 a:16 a:16").shim().env("GPUPOOL_MIN_SIZE", "32MiB").go();
    tells(&run, "allocate 30: 0\nallocate async 16: 0\nallocate async 16: 0\n");
}

/// The stream is held, so a free that waited would never return.
#[test]
fn a_free_in_a_stream_does_not_wait_and_its_memory_is_used_again_after_that() {
    let run = shim("a:30 a:40 w k:1 f:1 W b:40 k:2 x:2 u");
    tells(&run, "free async 1: 0\nallocate 40: 0\nallocation 2: 0 wrong\n");
    let reused = run.picked(|event| match event {
        Event::BlockAllocate(block) => Some(block.reused),
        _ => None,
    });
    assert_eq!(reused, [false, true]);
    assert_eq!(run.reported("violations"), &serde_json::json!([]));
}

#[test]
fn memory_may_be_freed_either_way_whoever_made_it() {
    let steps = "b:8 f:0 a:4 F:1 b:8 f:2 f:2 F:2";
    let bare = script(steps).go();
    tells(&bare, "free async 0: 0\nallocate async 4: 0\nfree 1: 0\n");
    script(steps).same_under_shim(&[]).succeeds();
    script(steps).same_under_shim(&["GPUPOOL_FREE=lazy"]).succeeds();
}

/// A pool that the program limited is full when it is full; one of another GPU is that GPU's.
#[test]
fn pools_that_the_program_made_for_a_purpose_are_left_alone() {
    tells(&shim("l:30 u"), "allocate from a limited pool 30: 2\n");
    let run = shim("q:60 q:30 u");
    tells(&run, "allocate from a pool 60: 0\nallocate from a pool 30: 0\n");
}

/// In a capture memory is a node of the graph, which the driver makes; pooled memory cannot be freed in it.
#[test]
fn captures_are_the_drivers_business() {
    for mode in 0..3 {
        let steps = format!("b:8 C:{mode} a:4 k:1 f:1 f:0 i E F:0");
        let bare = script(&steps).go();
        tells(&bare, "allocate async 4: 0\nfree async 1: 0\nfree async 0: 1\ncapturing: 1\nend: 0\nfree 0: 0\n");
        script(&steps).same_under_shim(&[]).succeeds();
    }
    let steps = "b:40 C:0 a:60 i E";
    script(steps).same_under_shim(&[]).succeeds();
}

#[test]
fn modes_that_only_watch_leave_everything_alone() {
    script("a:30 a:30 f:0").same_under_shim(&["GPUPOOL_MODE=off"]).succeeds();
    tells(
        &script("a:30 a:30 f:0").shim().env("GPUPOOL_MODE", "trace").go(),
        "allocate async 30: 0\nallocate async 30: 2\n",
    );
}

#[test]
fn a_free_on_a_stream_whose_capture_is_broken_says_so() {
    for settings in [&[][..], &["GPUPOOL_MODE=managed"]] {
        let shim = Run::program("broken_capture").sim("1x1GiB").same_under_shim(settings);
        shim.succeeds().says("cuMemFreeAsync(block, stream): 901 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
    }
}
