//! The story, whole, on small simulated GPUs. Needs the libraries beside the executable: `cargo build --workspace` in the
//! same profile makes them.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Stdio;

use crate::common::{gpupool, made, output, stderr, stdout};

#[test]
fn every_step_shows_what_it_is_there_to_show() {
    for (gpus, steps) in [("2x2GiB", 4), ("1x2GiB", 2)] {
        let output = output(gpupool().args(["demo", "--gpus", gpus]).env("GPUPOOL_LIMIT", "1KiB"));
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
        assert_eq!(text.matches("\n=> ").count(), steps, "{text}");
        assert_eq!(text.matches("contents right").count(), steps - 1, "{text}");
    }
}

#[test]
fn within_a_simulated_machine_its_gpus_are_shown_and_not_taken_for_real_ones() {
    let gpupool_itself = env!("CARGO_BIN_EXE_gpupool");
    for (gpus, told) in
        [("3x2GiB", "3 simulated GPUs of 2.0 GiB, "), ("1x3GiB,1x2560MiB", "2 simulated GPUs of 3.0 GiB and 2.5 GiB, ")]
    {
        let output = output(gpupool().args(["sim", "--gpus", gpus, "--", gpupool_itself, "demo"]));
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
        assert!(text.starts_with(told), "{text}");
        assert!(text.contains(&format!("$ gpupool sim --gpus {gpus} -- ./two_arrays ")), "{text}");
    }
}

/// As `| head` does.
#[test]
fn a_reader_that_leaves_ends_it_quietly() {
    let mut command = gpupool();
    command.args(["demo", "--gpus", "1x2GiB"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut demo = made(command.spawn());
    // Nobody reads a byte.
    drop(demo.stdout.take());
    let output = made(demo.wait_with_output());
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

/// What is written and read back does not grow with GPUs that are only there in name.
#[test]
fn the_largest_gpus_take_no_longer() {
    let output = output(gpupool().args(["demo", "--gpus", "1x4TiB"]));
    let text = stdout(&output);
    assert!(text.contains("array 1, 3840GiB: allocated"), "{text}{}", stderr(&output));
    for line in text.lines().filter_map(|line| line.strip_suffix(" pages written and read back, all right")) {
        let pages = line.rsplit(' ').next().and_then(|pages| pages.parse::<u64>().ok());
        assert!(pages.is_some_and(|pages| pages < 200_000), "{line}");
    }
}

/// Ctrl-C reaches the whole group.
#[test]
fn an_interrupted_demo_leaves_nothing_and_says_that_it_was() {
    let temporary = made(tempfile::tempdir());
    let mut command = gpupool();
    command.args(["demo", "--gpus", "2x4TiB"]).env("TMPDIR", temporary.path()).process_group(0);
    let mut demo = made(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn());
    let mut out = BufReader::new(made(demo.stdout.take().ok_or("no pipe")));
    let mut line = String::new();
    while !line.starts_with("$ gpupool sim") {
        line.clear();
        assert_ne!(made(out.read_line(&mut line)), 0, "the demo ended before its first step");
    }
    assert_ne!(made(std::fs::read_dir(temporary.path())).count(), 0);
    // SAFETY: plain integers; the group is that of a child that was not waited for.
    assert_eq!(unsafe { libc::kill(-demo.id().cast_signed(), libc::SIGINT) }, 0);
    // Until the last of its processes is gone.
    let mut rest = Vec::new();
    made(made(demo.stderr.take().ok_or("no pipe")).read_to_end(&mut rest));
    assert_eq!(made(demo.wait()).signal(), Some(libc::SIGINT));
    let left: Vec<_> = made(std::fs::read_dir(temporary.path())).flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn gpus_too_small_for_the_story_are_refused() {
    let output = output(gpupool().args(["demo", "--gpus", "4x1GiB"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("2 GiB or more"), "{}", stderr(&output));
}
