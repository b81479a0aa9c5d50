//! Pinned host memory: the same answers and the same data as without the pool, kept when freed, and given back.

use gpupool_events::Event;
use harness::{Output, Run};

fn case(name: &str) -> Run {
    Run::program("pinned_cases").args(name).sim("2x1GiB")
}

/// Modes that serve pinned memory in one way or another.
const SETTINGS: &[&[&str]] = &[
    &[],
    &["GPUPOOL_MODE=spill"],
    &["GPUPOOL_MODE=managed"],
    &["GPUPOOL_MODE=trace"],
    &["GPUPOOL_PINNED=off"],
    &["GPUPOOL_PINNED_LIMIT=1MiB"],
    &["GPUPOOL_PINNED_LIMIT=0"],
    &["GPUPOOL_PINNED_IDLE=0"],
    &["GPUPOOL_FREE=lazy"],
];

#[test]
fn every_question_is_answered_as_without_the_pool() {
    for settings in SETTINGS {
        Run::program("pinned_queries").sim("2x1GiB").same_under_shim(settings).succeeds();
    }
}

#[test]
fn forks_and_ends_of_contexts_are_the_same() {
    for name in ["fork", "destroy", "reset"] {
        for settings in SETTINGS {
            case(name).same_under_shim(settings).succeeds();
        }
    }
}

#[test]
fn nothing_is_left_of_a_context_that_ended() {
    for name in ["destroy", "reset"] {
        let shim = case(name).shim().report().go();
        shim.succeeds();
        assert_eq!(shim.reported("hosts/0/pinned"), 0, "{:#?}", shim.report);
        assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    }
}

const UNMIXED: &str = "6000 blocks, 0 wrong bytes\n";

#[test]
fn eight_threads_never_see_memory_that_a_copy_still_uses() {
    Run::program("pinned_churn").sim("1x1GiB").go().succeeds().prints(UNMIXED);
    for free in ["strict", "lazy"] {
        for more in [("GPUPOOL_PINNED", "pool"), ("GPUPOOL_PINNED_IDLE", "0"), ("GPUPOOL_PINNED_LIMIT", "40MiB")] {
            let run = Run::program("pinned_churn").sim("1x1GiB").shim().report();
            let shim = run.env("GPUPOOL_FREE", free).env(more.0, more.1).go();
            shim.succeeds().prints(UNMIXED);
            assert_eq!(shim.reported("violations"), &serde_json::json!([]), "{free} {more:?}");
        }
    }
}

#[test]
fn memory_freed_while_a_copy_is_queued_stays_whole() {
    let run = Run::program("pinned_running").sim("1x1GiB").report();
    let bare = run.clone().go();
    bare.succeeds().says("round 1: the free returned before the copy ran: no");
    run.clone().shim().go().same_as(&bare);
    let lazy = run.arg("lazy").shim().env("GPUPOOL_FREE", "lazy").go();
    lazy.succeeds().says("round 1: the free returned before the copy ran: yes");
    for output in [&bare, &lazy] {
        for round in 1..=4 {
            output.says(&format!("round {round}: 0 words overwritten"));
        }
        assert_eq!(output.reported("violations"), &serde_json::json!([]));
    }
}

#[test]
fn freed_memory_is_ready_again_for_the_same_flags() {
    let shim = case("reuse").shim().log().go();
    shim.succeeds().says("the same memory again: yes").says("the same memory with other flags: no");
    shim.says("a part of it: yes");
    assert_eq!(reused(&shim), [false, false, true, false, true]);
}

/// Whether each allocation of the log was served from memory that was ready.
fn reused(output: &Output) -> Vec<bool> {
    let events = output.records.iter().map(|record| &record.event);
    events.filter_map(|event| if let Event::PinnedAllocate(made) = event { Some(made.reused) } else { None }).collect()
}

/// As pages of the process, which is how the kernel shows pinned memory on a real machine too.
#[test]
fn idle_memory_goes_back_to_the_system() {
    let run = case("idle").env("SIMCUDA_PINNED", "resident");
    run.clone().go().succeeds().says("kept when freed: no").says("back at the start: yes");
    let shim = run.shim().env("GPUPOOL_PINNED_IDLE", "100ms").log().go();
    shim.succeeds().says("pinned: yes").says("kept when freed: yes").says("back at the start: yes").is_quiet();
    let returned =
        shim.records.iter().any(|record| matches!(&record.event, Event::PinnedReturn(to) if to.why == "idle"));
    assert!(returned, "{:?}", shim.records);
}

#[test]
fn what_goes_beyond_the_limit_is_the_driver_s_and_works() {
    let shim = case("limits").shim().env("GPUPOOL_PINNED_LIMIT", "10MiB").log().report().go();
    shim.succeeds().says("8 blocks used and freed").warns("GP018");
    let events = shim.records.iter().map(|record| &record.event);
    let by = |who: &str| {
        events.clone().filter(|event| matches!(event, Event::PinnedAllocate(made) if made.by == who)).count()
    };
    assert_eq!((by("pool"), by("driver")), (2, 6));
    assert_eq!(shim.reported("hosts/0/pinned"), 0);
}

/// Bare, both calls fail with 900 and end the capture. With memory that is ready nothing has to be asked of the driver.
#[test]
fn inside_a_capture_ready_memory_is_served_and_frees_wait_until_later() {
    let bare = case("capture").go();
    bare.succeeds().says("cuMemHostAlloc(&memory, 3 * MIB, 0): 900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    let shim = case("capture").shim().report().go();
    shim.succeeds().says("cuMemHostAlloc(&memory, 3 * MIB, 0): 0 CUDA_SUCCESS");
    shim.says("cuMemFreeHost(held): 0 CUDA_SUCCESS").says("cuStreamEndCapture(stream, &graph): 0 CUDA_SUCCESS");
    assert!(!shim.stdout.contains(": 90"), "{}", shim.stdout);
    assert_eq!(shim.reported("violations"), &serde_json::json!([]));
    case("relaxed").same_under_shim(&[]).succeeds();
    case("capture_growth").same_under_shim(&[]).succeeds();
}

#[test]
fn a_fault_at_any_call_leaves_nothing_behind() {
    for size in ["4", "3000", "70000"] {
        for code in ["2", "999", "600", "1"] {
            let shim = Run::program("pinned_faults").arg(code).arg(size).sim("1x1GiB").shim().go();
            shim.succeeds();
            for line in shim.stdout.lines() {
                let answer = line.split_once(": ").map_or(line, |(_, answer)| answer);
                let allowed = [format!("allocation answers {code}"), format!("free answers {code}")];
                if !allowed.iter().any(|allowed| allowed == answer) && !line.starts_with("swept ") {
                    shim.fail(&format!("not an answer to a fault {code}: {line}"));
                }
            }
            if !shim.stdout.lines().any(|line| line.starts_with("swept ") && !line.starts_with("swept 0 ")) {
                shim.fail("the sweep made no call");
            }
        }
    }
}

#[test]
fn the_process_tells_what_it_pinned() {
    let shim = case("limits").shim().env("GPUPOOL_SUMMARY", "on").log().go();
    shim.succeeds().warns("gpupool: pinned peak  32.0 MiB, of which 32.0 MiB were asked for");
    let site = shim.event("pinned.site", |event| match event {
        Event::PinnedSite(site) => Some(site.clone()),
        _ => None,
    });
    assert_eq!((site.allocations, site.requested, site.live), (8, 32 << 20, 0));
    assert_eq!((site.peak, site.pinned), (32 << 20, 32 << 20));
    let levels: Vec<(u64, u64)> = shim
        .records
        .iter()
        .filter_map(|record| match &record.event {
            Event::PinnedLevel(level) => Some((level.pinned, level.requested)),
            _ => None,
        })
        .collect();
    assert_eq!(levels.iter().map(|(pinned, _)| *pinned).max(), Some(32 << 20));
    assert_eq!(levels.last(), Some(&(0, 0)), "after the trim nothing is pinned");
}
