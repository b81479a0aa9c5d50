//! A preload reaches every process that the program starts. In those that never call CUDA it must not be noticed.

use harness::{Build, Output, Run, library, repository};
use std::path::PathBuf;

fn interposer(identity: u32) -> PathBuf {
    Build::library("interposer", &format!("interposer{identity}")).flag(&format!("-DIDENTITY={identity}")).path()
}

/// The interposers with the shim at each place among them, against the interposers alone.
fn interposed(shim_at: usize) -> Output {
    let mut list = vec![interposer(1), interposer(2)];
    list.insert(shim_at, library("libgpupool.so"));
    list.into_iter().fold(Run::program("interposed"), Run::preload).go()
}

#[test]
fn lookups_by_other_preloaded_libraries_are_as_without_us() {
    let bare = Run::program("interposed").preload(interposer(1)).preload(interposer(2)).go();
    bare.succeeds().says("interposer 1: RTLD_NEXT interposer_report is in libinterposer2.so");
    for shim_at in 0..3 {
        let shim = interposed(shim_at);
        // Constructors run in the order of loading, which a third library may change; what each one finds may not.
        let sorted = |output: &Output| {
            let mut lines: Vec<_> = output.stdout.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        if shim.status != bare.status || sorted(&shim) != sorted(&bare) {
            shim.fail(&format!("with the shim at {shim_at}; bare:\n{}", bare.stdout));
        }
    }
}

/// Runs a command that has nothing to do with CUDA both ways: same everything, nothing left behind.
fn unnoticed(run: Run) -> Output {
    let bare = run.clone().go();
    // The log is asked for, so that a shim that wrote one without need would be caught.
    let shim = run.shim().env("GPUPOOL_LOG_FILE", "log-%p.jsonl").env("GPUPOOL_SUMMARY", "on").go();
    shim.same_as(&bare);
    if shim.stderr != bare.stderr {
        shim.fail(&format!("other stderr; bare:\n{}", bare.stderr));
    }
    shim.leaves_no_file();
    shim
}

#[test]
fn true_and_false_are_the_same() {
    unnoticed(Run::command("/bin/true")).succeeds();
    unnoticed(Run::command("/bin/false")).exits(1);
}

#[test]
fn a_process_without_cuda_has_no_thread_and_no_file_of_ours() {
    unnoticed(Run::program("tasks")).succeeds().says("threads: 1");
}

#[test]
fn bash_and_its_children_are_the_same() {
    let script = "echo $((6*7)); cat <<< text | tr a-z A-Z; false; echo $?; trap 'echo bye' EXIT; exec 3>&2; echo err >&3; exit 3";
    unnoticed(Run::command("bash").arg("-c").arg(script)).exits(3);
}

#[test]
fn a_fork_heavy_script_is_the_same() {
    let script =
        "for i in $(seq 100); do (exit $((i % 7))) || echo $i; done; seq 20 | while read n; do (echo $n); done | wc -l";
    unnoticed(Run::command("bash").arg("-c").arg(script)).succeeds().says("20");
}

#[test]
fn python_multiprocessing_is_the_same() {
    let script = repository().join("tests/clients/many_processes.py");
    let shim = unnoticed(Run::command("python3").env("PYTHONDONTWRITEBYTECODE", "1").arg(script));
    shim.succeeds().says("forkserver [0, 1, 4, 9, 16, 25, 36, 49]");
}

#[test]
fn a_bad_setting_is_not_mentioned_where_cuda_is_not_used() {
    let bare = Run::command("/bin/true").go();
    let shim = Run::command("/bin/true").shim().env("GPUPOOL_MODE", "sideways").go();
    shim.same_as(&bare).is_quiet();
}
