//! Programs to which the system gives little: limits, and descriptors that are closed, few, or used again. With a log that
//! has much to say, they get what they get bare.

use gpupool_events::Event;
use harness::{Build, Output, Run, copy_program, driver_folder, library};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};

fn surroundings(arguments: &str) -> Run {
    Run::program("surroundings").args(arguments).sim("2x1GiB")
}

/// Runs the program bare and under the shim with a log at level debug: it must fare alike.
#[track_caller]
fn same_with_a_log(arguments: &str) -> Output {
    let bare = surroundings(arguments).go();
    let shim = surroundings(arguments).shim().log().env("GPUPOOL_SUMMARY", "on").go();
    shim.same_as(&bare);
    shim
}

#[test]
fn a_log_that_may_not_grow_costs_the_program_nothing() {
    for bytes in [0, 4096, 20000] {
        same_with_a_log(&format!("fsize-kill {bytes}")).succeeds().says("failed: 0");
    }
}

/// Where the program was linked with the library, since the loader drops a preload of such a program.
#[test]
fn a_program_with_the_rights_of_its_file_is_left_alone_whatever_its_environment_names() {
    const GROUP: u32 = 65534;
    let artifacts = library("libgpupool.so").parent().unwrap().display().to_string();
    let linked = Build::program("rights")
        .output("rights_linked")
        .flag("-Wl,--no-as-needed,--disable-new-dtags")
        .flag(&format!("-Wl,-rpath,{}:{artifacts}", driver_folder().display()))
        .flag(&format!("-L{artifacts}"))
        .flag("-lgpupool");
    let folder = tempfile::tempdir().unwrap();
    let (program, log) = (folder.path().join("program"), folder.path().join("log"));
    let verdicts = folder.path().join("verdicts");
    fs::create_dir(&verdicts).unwrap();
    copy_program(&linked.path(), &program);
    let go = || {
        let run = Run::command(&program).sim("1x1GiB").env("GPUPOOL_LOG_FILE", &log).env("GPUPOOL_VERDICTS", &verdicts);
        let output = run.env("GPUPOOL_SUMMARY", "on").go();
        output.succeeds().says("its word: 7");
        output
    };
    let told = || (log.exists(), fs::read_dir(&verdicts).unwrap().count() > 0);
    go().says("rights of its file: 0").warns("gpupool: contexts: GPU 0 primary");
    assert_eq!(told(), (true, true), "it is linked with the library, which works there");
    fs::remove_file(&log).unwrap();
    fs::read_dir(&verdicts).unwrap().for_each(|file| fs::remove_file(file.unwrap().path()).unwrap());
    if chown(&program, None, Some(GROUP)).is_err() {
        println!("only root can give a file to any group: not checked");
        return;
    }
    fs::set_permissions(&program, fs::Permissions::from_mode(0o2755)).unwrap();
    let output = go();
    output.says("rights of its file: 1");
    assert_eq!((told(), output.stderr.as_str()), ((false, false), ""));
}

#[test]
fn a_program_that_becomes_another_user_keeps_its_memory_and_its_log() {
    let shim = Run::program("rights").arg("65534").sim("1x1GiB").log().env("GPUPOOL_LOG", "debug").same_under_shim(&[]);
    shim.succeeds();
    if shim.stdout.contains("not allowed") {
        println!("only root can become another user: not checked");
        return;
    }
    assert_eq!(shim.stdout.matches("its word: 7").count(), 4);
    assert_eq!(shim.events("block.allocate").len(), 4);
    assert_eq!(shim.events("process.exit").len(), 1);
}

#[test]
fn the_signal_of_a_file_that_grows_too_large_is_the_programs_alone() {
    let shim = same_with_a_log("fsize 20000");
    shim.says("signals before: 0, its own write: -1, File too large, signals: 1");
}

#[test]
fn lost_lines_are_counted_in_the_log_and_at_the_end() {
    let shim = same_with_a_log("fsize-kill 20000");
    let Some(Event::LogFull(full)) = shim.records.last().map(|record| record.event.clone()) else {
        shim.fail("expected log.full at the end of the log")
    };
    assert!(full.why.contains("File too large"), "{full:?}");
    shim.warns("lines of it were lost: ").warns("File too large");
}

#[test]
fn a_log_that_gets_room_again_says_what_is_missing() {
    let shim = same_with_a_log("fsize-later 20000");
    let full = shim.records.iter().position(|record| matches!(record.event, Event::LogFull(_)));
    let lost = shim.records.iter().position(|record| matches!(record.event, Event::LogLost(_)));
    let (Some(full), Some(lost)) = (full, lost) else { shim.fail("expected log.full and log.lost") };
    assert_eq!(lost, full + 1, "{:?}", shim.records);
    let Event::LogLost(told) = &shim.records[lost].event else { shim.fail("no log.lost") };
    // At level debug, each of the 200 rounds has two lines.
    let here = shim.events("block.allocate").len() + shim.events("block.free").len();
    assert_eq!(here as u64 + told.lines, 800, "{told:?}");
    assert_eq!(shim.events("process.exit").len(), 1);
    shim.warns("lines of it were lost: File too large");
}

#[test]
fn limits_are_met_as_bare() {
    for arguments in ["as 4096", "as 300", "nproc 1", "core 0", "nofile 64", "nofile 16"] {
        same_with_a_log(arguments);
    }
    // Bare, too, the loader needs one descriptor at a time.
    for descriptors in 3..=10 {
        same_with_a_log(&format!("nofile {descriptors}"));
    }
}

/// The driver itself begins on 32 KiB, and not on 20 (two H200, driver 580.159.04).
#[test]
fn the_first_calls_need_little_stack() {
    for kib in ["32", "64"] {
        let run = Run::program("small_stack").arg(kib).sim("2x1GiB").nvml();
        for settings in
            [&[][..], &["GPUPOOL_LOG=debug"], &["GPUPOOL_LOG=gpupool::memory=debug,warn"], &["GPUPOOL_MODE=managed"]]
        {
            run.same_under_shim(settings).succeeds().says(&format!("served on {kib} KiB"));
        }
        run.shim().log().env("GPUPOOL_SUMMARY", "on").go().succeeds();
    }
}

#[test]
fn a_file_that_got_the_number_of_stderr_gets_no_text_of_ours() {
    let shim = same_with_a_log("stderr");
    shim.says("data holds 10 bytes: data is 2");
}

/// Programs look at `errno` behind calls of their own in between.
#[test]
fn a_call_that_succeeds_leaves_errno_alone() {
    let bare = Run::program("errno").sim("2x64MiB").go();
    for settings in
        [&[][..], &[("GPUPOOL_LOG_FILE", "log.%p")], &[("GPUPOOL_SUMMARY", "on")], &[("GPUPOOL_LOG", "trace")]]
    {
        let run = Run::program("errno").sim("2x64MiB").shim();
        settings.iter().fold(run, |run, (name, value)| run.env(name, value)).go().same_as(&bare);
    }
    for line in bare.stdout.lines() {
        assert!(line.ends_with("errno 77"), "{line}");
    }
}

#[test]
fn a_full_pipe_that_nobody_reads_stops_no_program() {
    let run = || Run::program("full_stderr").sim("1x64MiB").env("GPUPOOL_RESERVE", "16MiB");
    let shim =
        run().env("GPUPOOL_HOST_LIMIT", "100MiB").env("GPUPOOL_LOG", "debug").env("GPUPOOL_SUMMARY", "on").shim().go();
    shim.succeeds().says("flags of the pipe: 0");
    let Some((before, then)) = shim.stdout.split_once("then:") else { shim.fail("it did not come so far") };
    assert!(!before.contains("gpupool"), "{before}");
    assert!(then.contains(" lines before this one were lost: nobody read them"), "{then}");
    assert!(then.contains("2.0 MiB at "), "the line itself: {then}");
}

#[test]
fn the_log_never_takes_the_numbers_of_the_standard_streams() {
    // The driver has files, too; ours must not be among them, nor keep the program from opening its own. Without the agent's thread,
    // which has a folder open for a moment as it starts: of two threads that open files, either may get the lower number.
    let same_with_a_log = |arguments: &str| {
        let bare = surroundings(arguments).go();
        let run = surroundings(arguments).shim().log().env("GPUPOOL_SUMMARY", "on");
        let shim = run.env("GPUPOOL_METRICS", "off").env("GPUPOOL_IDLE", "off").go();
        shim.same_as(&bare);
        shim
    };
    for descriptors in [3, 5, 6, 7, 8, 64, 300] {
        same_with_a_log(&format!("low {descriptors}"));
    }
    let roomy = same_with_a_log("low 64");
    roomy.says("child ended with 0, signal 0");
    assert!(matches!(roomy.records.last().map(|record| &record.event), Some(Event::ProcessExit(_))), "no whole log");
}

#[test]
fn a_program_that_closes_everything_gets_the_numbers_for_itself() {
    let shim = same_with_a_log("closed 400");
    shim.says("child ended with 0, signal 0").says("data holds 0 bytes: ");
    let Some(Event::ProcessExit(_)) = shim.records.last().map(|record| record.event.clone()) else {
        shim.fail("expected the log to go on to its end")
    };
}

/// The request waits when the call begins, or comes from a write in its middle: the log's. (Bare it would be met inside the
/// simulated driver, which ends the process then; the real one is C.)
#[test]
fn a_thread_that_is_cancelled_in_a_call_ends_behind_it() {
    let run = |kind: &str| Run::built(&Build::program("cancelled").flag("-rdynamic")).arg(kind).sim("2x1GiB").shim();
    for (kind, requests) in [("deferred", 16), ("asynchronous", 8)] {
        let logged = run(kind).env("GPUPOOL_LOG", "trace").env("GPUPOOL_LOG_FILE", "log").go();
        // The environment is changed once: the second time it is what it was, and there is nothing to write.
        logged.warns(if kind == "deferred" { "cancelled in a write: 7" } else { "cancelled in a write: 8" });
        for told in [logged, run(kind).env("GPUPOOL_LOG", "off").go()] {
            told.succeeds().says("afterwards: 0");
            let ended = told.stdout.lines().filter(|line| line.ends_with(": 0, cancelled")).count();
            if ended != requests {
                told.fail("expected every call to be answered, and every thread to be cancelled behind it");
            }
        }
    }
}

/// What the driver does there, bare, is prepared for it; what is ours on the stack is not.
#[test]
fn a_thread_that_is_cancelled_in_the_driver_s_part_of_its_first_allocation_ends_behind_it() {
    for call in ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        let told = Run::program("first_on_thread").arg(call).sim("1x1GiB").shim().go();
        told.succeeds().prints("cancelled\n");
    }
}

/// Wherever the library reads, writes or waits, cancelling the thread is forbidden: a request would unwind through it.
#[test]
fn nothing_of_ours_can_be_cancelled() {
    let points = Build::library("cancel_points", "cancel_points").path();
    let runs = [
        ("steps", "a:600 a:900 c:0 c:1 f:0 a:300 t s i g:1 a:100 f:1"),
        // Beyond both GPUs: what the host has is looked up.
        ("steps", "a:900 a:900 a:500 f:2"),
        ("pinned_cases", "reuse"),
        ("contexts", "stray"),
        ("modules", "malloc"),
        ("variables", "setenv"),
        ("forks", "after"),
        ("forks", "exec"),
        ("surroundings", "closed 300"),
        ("managed_stripes", ""),
        ("stream_ordered", ""),
        ("shared_handles", ""),
        // What is made once in a process is made by a thread that has made nothing else.
        ("first_on_thread", ""),
        ("own_threads", ""),
        ("late_together", "1 2"),
        ("ipc", "A:alloc:0:65536 A:fill:0:100 A:get:0:4096 B:open:0 B:check:0:100 B:close:0 A:free:0 A:exit B:exit"),
    ];
    for (program, arguments) in runs {
        for settings in [
            &[("GPUPOOL_LOG", "trace")][..],
            &[("GPUPOOL_LOG", "warn")],
            &[("GPUPOOL_LOG", "off"), ("GPUPOOL_MODE", "managed")],
        ] {
            // The tests of findings build the same programs, and want functions with names.
            let built = Build::program(program).flag("-rdynamic");
            let run = Run::built(&built).args(arguments).sim("2x1GiB").preload(points.clone()).shim();
            let run = settings.iter().fold(run, |run, (name, value)| run.env(name, value));
            let told = run.env("GPUPOOL_LOG_FILE", "log-%p").env("GPUPOOL_SUMMARY", "on").go();
            if told.stderr.contains("can be cancelled in") || told.stderr.is_empty() {
                told.fail(&format!("{program} {arguments}: expected a summary, and no place to be cancelled in"));
            }
        }
    }
}

/// Another thread's call ends while a line is being written, whatever the line is about: nobody holds a lock meanwhile.
#[test]
fn a_write_that_takes_long_stops_nobody_else() {
    let busy = Build::library("busy_writes", "busy_writes").path();
    for (program, arguments) in [
        ("modules", "elsewhere"),
        ("contexts", "stray"),
        ("variables", "setenv"),
        ("pinned_cases", "reuse"),
        ("steps", "a:600 a:900 c:0 c:1 f:0 a:300 t s i g:1 a:100 f:1"),
    ] {
        let built = Build::program(program).flag("-rdynamic");
        let run = Run::built(&built).args(arguments).sim("4x1GiB").preload(busy.clone()).shim();
        let told = run.env("GPUPOOL_LOG", "trace").env("GPUPOOL_LOG_FILE", "log").go();
        if !told.stderr.contains("busy writes: ") || told.stderr.contains("busy writes: 0") {
            told.fail("expected that something was written while the other thread was busy");
        }
    }
}
