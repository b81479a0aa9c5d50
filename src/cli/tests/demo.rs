//! The story, whole, on small simulated GPUs. Needs the libraries beside the executable: `cargo build --workspace` in the
//! same profile makes them.

use crate::common::{gpupool, output, stderr, stdout};

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
fn gpus_too_small_for_the_story_are_refused() {
    let output = output(gpupool().args(["demo", "--gpus", "4x1GiB"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("2 GiB or more"), "{}", stderr(&output));
}
