//! The story, whole, on small simulated GPUs. Needs the libraries beside the executable: `cargo build --workspace` in the
//! same profile makes them.

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

#[test]
fn gpus_too_small_for_the_story_are_refused() {
    let output = output(gpupool().args(["demo", "--gpus", "4x1GiB"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("2 GiB or more"), "{}", stderr(&output));
}
