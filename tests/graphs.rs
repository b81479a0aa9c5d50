//! Captures and graphs: nothing of ours ends a capture that the driver would leave alone, and replays find their memory.

use harness::{Build, Run, repository};

fn graphs(part: &str) -> Run {
    Run::program("graphs").arg(part).sim("2x512MiB").env("GPUPOOL_RESERVE", "16MiB")
}

const SETTINGS: [&[&str]; 3] = [&[], &["GPUPOOL_FREE=lazy"], &["GPUPOOL_MODE=spill"]];

/// Line by line as bare, but for what the pool serves: there a call that the driver would refuse, and end the capture with,
/// succeeds and leaves the capture as it is.
#[test]
fn a_capture_survives_whatever_it_would_survive_bare() {
    let bare = graphs("captures").go();
    bare.succeeds();
    for settings in SETTINGS {
        let shim = settings.iter().fold(graphs("captures").shim(), |run, setting| {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            run.env(name, value)
        });
        let shim = shim.report().go();
        shim.succeeds();
        assert_eq!(shim.reported("violations"), &serde_json::json!([]));
        let (bare, shim): (Vec<_>, Vec<_>) = (bare.stdout.lines().collect(), shim.stdout.lines().collect());
        assert_eq!(bare.len(), 3 * 2 * 7);
        assert_eq!(bare.len(), shim.len());
        let mut better = 0;
        for (bare, shim) in bare.iter().zip(&shim) {
            let pooled =
                (bare.contains("6 MiB") || bare.contains("4 KiB")) && bare.ends_with(": 900, end of the capture: 901");
            let intended = bare.replace(": 900, end of the capture: 901", ": 0, end of the capture: 0");
            better += u32::from(pooled && **shim == intended);
            assert!(bare == shim || pooled && **shim == intended, "{settings:?}\nbare {bare}\nshim {shim}");
        }
        let pools = settings != ["GPUPOOL_MODE=spill"];
        assert_eq!(better > 0, pools, "{settings:?}: {shim:#?}");
    }
}

#[test]
fn replays_find_their_memory_and_leave_that_of_others_alone() {
    for part in ["replay", "nodes"] {
        for settings in SETTINGS {
            let run = graphs(part).report().same_under_shim(settings);
            run.succeeds().says("replay 3: 0 wrong, of others 0 and 0");
            assert_eq!(run.reported("violations"), &serde_json::json!([]));
        }
    }
}

#[test]
fn memory_may_be_allocated_while_capturing() {
    graphs("inside").go().exits(1);
    for free in ["strict", "lazy"] {
        let run = graphs("inside").shim().env("GPUPOOL_FREE", free).report().go();
        run.succeeds().says("replay 0: 0 wrong, of others 0 and 0").says("replay 3: 0 wrong, of others 0 and 0");
        assert_eq!(run.reported("violations"), &serde_json::json!([]));
    }
}

/// The pool keeps what was freed; a graph that needs memory gets it all the same.
#[test]
fn a_launch_that_needs_memory_gets_what_the_pool_keeps() {
    let run = graphs("room").env("SIMCUDA_GPUS", "2x64MiB").env("GPUPOOL_RESERVE", "4MiB");
    run.same_under_shim(&[]).says("cuGraphLaunch(exec, stream): 0 CUDA_SUCCESS");
}

/// What is logged is not what is done: the same memory for the same calls, whichever way the program got its functions.
#[test]
fn no_level_of_the_log_changes_who_gets_memory() {
    let mut by_address = Build::program("graphs").output("graphs_by_address").flag("-include");
    let header = repository().join("tests/programs/by_proc_address.h");
    by_address = by_address.flag(header.to_str().unwrap_or_default());
    for name in ["cuGraphLaunch", "cuMemAlloc_v2", "cuLaunchKernel"] {
        by_address = by_address.flag(&format!("-Wl,--wrap={name}"));
    }
    for program in [Run::program("graphs"), Run::built(&by_address)] {
        let run = program.arg("room").sim("2x64MiB").env("GPUPOOL_RESERVE", "4MiB");
        for level in ["off", "error", "info", "debug", "trace", "0", "error,gpupool::memory=info"] {
            let told = run.same_under_shim(&[&format!("GPUPOOL_LOG={level}"), "GPUPOOL_LOG_FILE=log"]);
            told.says("cuGraphLaunch(exec, stream): 0 CUDA_SUCCESS");
        }
    }
}
