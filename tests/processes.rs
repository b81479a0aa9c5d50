//! Forks, exec, and every way to end: the same output and the same status as without us.

use harness::Run;
use std::os::unix::process::ExitStatusExt;

/// SIGABRT, SIGSEGV, SIGKILL, SIGTERM by number, as the exit status names them on Linux.
const ENDINGS: &[(&str, Result<i32, i32>)] = &[
    ("return", Ok(4)),
    ("exit", Ok(6)),
    ("_exit", Ok(5)),
    ("thread", Ok(7)),
    ("atexit", Ok(4)),
    ("late", Ok(4)),
    ("again", Ok(4)),
    ("dangling", Ok(4)),
    ("abort", Err(6)),
    ("segv", Err(11)),
    ("kill", Err(9)),
    ("signal", Err(15)),
];

#[test]
fn every_way_to_end_gives_the_same_status() {
    for (how, expected) in ENDINGS {
        let shim = Run::program("exits").arg(how).sim("2x1GiB").same_under_shim(&[]);
        match expected {
            Ok(code) => shim.exits(*code),
            Err(signal) => shim.killed_by(*signal),
        };
        shim.is_quiet();
    }
}

/// The C library ends such a process with its last thread, which must not be ours: with exit handlers, the program's mask of
/// signals, and the same status.
#[test]
fn a_process_whose_main_thread_leaves_ends_with_its_last_thread() {
    for settings in [&[][..], &["GPUPOOL_MODE=managed"], &["GPUPOOL_METRICS=off"]] {
        let shim = Run::program("main_leaves").sim("2x1GiB").same_under_shim(settings);
        shim.exits(0).says("at exit: SIGTERM taken, SIGUSR1 blocked").says("at exit: freed and allocated").is_quiet();
    }
}

/// As long as a thread of the program runs, it is the program's alone to end.
#[test]
fn a_process_whose_main_thread_left_is_ended_by_a_signal() {
    let mut program = Run::program("main_leaves").arg("stays").sim("2x1GiB").shim().start(None);
    assert_eq!(program.ask(""), "the main thread has left");
    // The system tells of it what it tells of its main thread, which is over.
    let listed = program.gpupool("ps --json");
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let pid = serde_json::Value::from(program.pid());
    let row = listed.as_array().unwrap().iter().find(|row| row["process"]["identity"]["pid"] == pid);
    assert_eq!(row.map(|row| &row["state"]), Some(&serde_json::Value::from("running")), "{listed}");
    let refused = program.gpupool(&format!("suspend --to host {pid}"));
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("its main thread has left"), "{refused}");
    program.signal(libc::SIGTERM);
    let (status, _) = program.end();
    assert_eq!(status.signal(), Some(libc::SIGTERM), "{status}");
}

/// Once the driver is gone, it alone answers: also for what was freed before.
#[test]
fn what_is_freed_again_after_the_driver_ended_gets_its_answer() {
    for settings in [&[][..], &["GPUPOOL_FREE=lazy"], &["GPUPOOL_MODE=managed"]] {
        let shim = Run::program("exits").arg("again").sim("2x1GiB").same_under_shim(settings);
        shim.exits(4).says(
            "after the driver's own handlers: freed again 4, an inner byte 4, in a stream 4, pinned memory again 4, for the \
             first time 4",
        );
        for what in ["a block", "a freed one", "pinned memory"] {
            shim.says(&format!("asked of {what}: one attribute 4, two 4, its range 4, to set one 4"));
        }
    }
}

#[test]
fn the_log_of_a_killed_process_is_whole_up_to_its_end() {
    let shim = Run::program("exits").arg("kill").sim("2x1GiB").shim().log().go();
    shim.killed_by(9);
    assert_eq!(shim.events("pool.open").len(), 1, "{:?}", shim.records);
    assert!(shim.events("process.exit").is_empty(), "a killed process cannot have written its end");
}

#[test]
fn a_process_that_ends_in_order_says_so_in_the_log() {
    let shim = Run::program("exits").arg("exit").sim("2x1GiB").shim().log().go();
    shim.exits(6);
    assert_eq!(shim.events("process.exit").len(), 1, "{:?}", shim.records);
}

#[test]
fn a_child_forked_before_cuda_starts_has_a_pool_of_its_own() {
    let shim = Run::program("forks").arg("before").sim("2x1GiB").same_under_shim(&[]);
    shim.succeeds().is_quiet().says("child: contents right").says("child ended with 3, signal 0");
}

#[test]
fn a_child_forked_after_cuda_started_gets_the_drivers_refusal() {
    let shim = Run::program("forks").arg("after").sim("2x1GiB").same_under_shim(&[]);
    shim.succeeds().says("child ended with 2, signal 0").says("parent again: contents right");
    shim.warns("gpupool: warning: GP006: ");
}

#[test]
fn exec_starts_anew() {
    let shim = Run::program("forks").arg("exec").sim("2x1GiB").same_under_shim(&[]);
    shim.exits(9).is_quiet().says("after exec: contents right");
}

#[test]
fn the_program_after_exec_goes_on_with_the_log() {
    let shim = Run::program("forks").arg("exec").sim("2x1GiB").shim().log().go();
    shim.exits(9).is_quiet().says("after exec: contents right");
    let starts = shim.events("process.start");
    assert_eq!(starts.len(), 2, "{:?}", shim.records);
    assert_eq!(starts[0].pid, starts[1].pid);
    assert_eq!(shim.events("process.exit").len(), 1, "{:?}", shim.records);
    let own = Run::program("forks").arg("exec").sim("2x1GiB").shim().env("GPUPOOL_LOG_FILE", "log-%p").go();
    own.exits(9).is_quiet();
    assert_eq!(own.files.len(), 1, "{:?}", own.files);
}

#[test]
fn each_process_has_its_own_log_file() {
    let shim = Run::program("forks").arg("before").sim("2x1GiB").shim().env("GPUPOOL_LOG_FILE", "log-%p-%e.jsonl").go();
    shim.succeeds();
    assert_eq!(shim.files.len(), 2, "parent and child: {:?}", shim.files);
    assert!(shim.files.iter().all(|file| file.ends_with("-forks.jsonl")), "{:?}", shim.files);
}
