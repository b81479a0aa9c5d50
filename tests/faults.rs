//! Every driver call of an allocation and of a free fails once. The program gets its memory, or an error it could have got
//! from the driver, and nothing is left half done.

use harness::Run;

/// OUT_OF_MEMORY, UNKNOWN, NOT_READY, INVALID_VALUE.
const CODES: &[i32] = &[2, 999, 600, 1];

/// Large enough to stand on two GPUs: its allocation makes several handles at two places.
const OVER_TWO_GPUS: &str = "300";

/// Fits on the first GPU: when the pool fails, the driver's own allocation succeeds.
const ON_ONE_GPU: &str = "150";

fn sweep(arguments: &str) -> Run {
    Run::program("fault_sweep")
        .args(arguments)
        .sim("3x256MiB")
        .env("GPUPOOL_HOST_LIMIT", "256MiB")
        .env("GPUPOOL_RESERVE", "16MiB")
}

/// What one sweep may say: memory, or the fault's code, or that there is no memory.
#[track_caller]
fn accept(output: &harness::Output, code: i32) {
    output.succeeds();
    for line in output.stdout.lines() {
        let answer = line.split_once(": ").map_or("", |(_, answer)| answer);
        let allowed = answer == "allocation survives"
            || answer == format!("allocation answers {code}")
            || answer == "allocation answers 2"
            || answer == format!("free answers {code}")
            || line.starts_with("swept ")
            || line.starts_with("calls: ");
        if !allowed {
            output.fail(&format!("not an answer to a fault {code}: {line}"));
        }
    }
}

#[test]
fn a_fault_at_any_call_leaves_nothing_behind_in_a_running_pool() {
    for code in CODES {
        let shim = sweep(&format!("{code} 1 {OVER_TWO_GPUS}")).shim().go();
        accept(&shim, *code);
        let swept: u64 = shim
            .stdout
            .lines()
            .find_map(|line| line.strip_prefix("swept ")?.strip_suffix(" calls")?.parse().ok())
            .unwrap_or_else(|| shim.fail("the sweep did not end"));
        assert!(swept > 8, "an allocation over two GPUs takes more than {swept} driver calls");
    }
}

#[test]
fn a_fault_at_any_call_leaves_nothing_behind_in_mode_managed() {
    for code in CODES {
        let shim = sweep(&format!("{code} 1 {OVER_TWO_GPUS}")).shim().env("GPUPOOL_MODE", "managed").go();
        accept(&shim, *code);
    }
}

/// The calls of one allocation and free in a fresh process, where the pool is opened too.
fn calls_of_a_first_allocation(size: &str) -> u64 {
    let counted = sweep(&format!("999 0 {size} 1000000")).shim().go();
    counted.succeeds();
    let calls = counted.stdout.lines().find_map(|line| line.strip_prefix("calls: ")?.parse().ok());
    calls.unwrap_or_else(|| counted.fail("no count"))
}

#[test]
fn a_fault_at_any_call_of_the_first_allocation_leaves_nothing_behind() {
    let calls = calls_of_a_first_allocation(OVER_TWO_GPUS);
    assert!((20..2000).contains(&calls), "{calls} calls");
    for code in CODES {
        for n in 1..=calls {
            accept(&sweep(&format!("{code} 0 {OVER_TWO_GPUS} {n}")).shim().go(), *code);
        }
    }
}

/// The pool's failure is not the program's: what the driver could have served, it serves.
#[test]
fn what_fits_the_gpu_is_served_whichever_call_fails() {
    let calls = calls_of_a_first_allocation(ON_ONE_GPU);
    for code in [999, 2, 600] {
        for n in 1..=calls {
            let shim = sweep(&format!("{code} 0 {ON_ONE_GPU} {n}")).shim().go();
            accept(&shim, code);
            if shim.stdout.contains("allocation answers") {
                shim.fail("the driver would have served this");
            }
        }
    }
}

#[test]
fn a_pitched_allocation_survives_faults_too() {
    for fault in
        ["cuMemCreate:1=999", "cuMemMap:1=999", "cuMemSetAccess:1=999", "cuMemCreate:2=2", "cuMemAddressReserve:1=2"]
    {
        let shim = Run::program("pitch").sim("2x1GiB").env("SIMCUDA_FAULT", fault).shim().report().go();
        shim.succeeds();
        assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{fault}");
    }
}

#[test]
fn a_pool_that_cannot_open_leaves_everything_to_the_driver() {
    let bare = Run::program("steps").args("a:100 a:100 f:0 f:1").sim("2x256MiB").go();
    let faults: Vec<String> = (1..=40).map(|n| format!("cuMemAddressReserve:{n}=2")).collect();
    let shim = Run::program("steps").args("a:100 a:100 f:0 f:1").sim("2x256MiB").env("SIMCUDA_FAULT", faults.join(","));
    let shim = shim.shim().go();
    shim.same_as(&bare).warns("gpupool: ");
}

/// Behind a wait that failed the memory would be somebody else's while a kernel writes to it.
#[test]
fn a_free_from_elsewhere_whose_wait_fails_answers_that_and_keeps_the_block() {
    let run = |fault: &str, place: &str, bytes: &str| {
        let run = Run::program("context_faults").args(&format!("{fault} {place} {bytes}"));
        run.sim("2x128MiB").env("SIMCUDA_CONTEXT_MIB", "8").report()
    };
    for bytes in ["4096", "6000000"] {
        for place in ["other", "second", "none"] {
            // None that a context in error answers: behind such a one it is waited once more.
            for code in [1, 2, 304] {
                let bare = run(&format!("cuMemFree_v2:1={code}"), place, bytes).go();
                bare.succeeds().prints(&format!(
                    "free: {code}, while the kernel waits\n0 words wrong\ncuMemFree_v2(block): 0 CUDA_SUCCESS\n"
                ));
                for call in ["cuCtxSynchronize", "cuCtxPushCurrent_v2"] {
                    let shim = run(&format!("{call}:1={code}"), place, bytes).shim().go();
                    shim.same_as(&bare);
                    assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{call}, {place}, {bytes}");
                }
            }
        }
    }
}

/// A free that does not wait leaves that to whoever gives the memory back.
#[test]
fn memory_freed_lazily_stays_where_the_wait_for_another_context_fails() {
    for call in ["cuCtxSynchronize:1=2", "cuCtxPushCurrent_v2:1=2"] {
        let run = Run::program("context_faults").args(&format!("{call} second 6000000")).sim("2x128MiB");
        let shim = run.env("SIMCUDA_CONTEXT_MIB", "8").env("GPUPOOL_FREE", "lazy").report().shim().go();
        shim.succeeds().prints("free: 0, while the kernel waits\n");
        assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{call}");
    }
}

#[test]
fn a_question_about_a_block_is_answered_whether_or_not_the_current_context_is_told() {
    for bytes in ["4096", "6000000"] {
        for code in CODES {
            let run = Run::program("context_faults").args(&format!("range cuCtxGetCurrent:1={code} {bytes}"));
            let shim = run.sim("2x128MiB").shim().go();
            shim.succeeds().prints(&format!("range: 0, begins 0 before it, {bytes} bytes\n"));
        }
    }
}

#[test]
fn the_current_context_is_the_programs_where_the_driver_refuses_once_to_take_ours_back() {
    // Small memory is not prefetched.
    for (bytes, prefetched) in [("4096", -6), ("6000000", 0)] {
        let run = Run::program("context_faults").args(&format!("stays cuCtxPopCurrent_v2:1=2 {bytes}"));
        let shim = run.sim("2x128MiB").shim().go();
        shim.succeeds().prints(&format!(
            "free: 0, the same context is current, with none below it\n\
             prefetch: {prefetched}, the same context is current, with none below it\n"
        ));
    }
}
