//! Whether somebody begins to use CUDA, so that it is to be looked more often who has come ([`gpupool_lending::Coming`]).

use crate::serve::memory::idle::Part;
use gpupool_interpose::cancel;
use gpupool_lending::Coming;
use parking_lot::Mutex;
use std::time::{Duration, Instant};

static COMING: Mutex<Coming> = Mutex::new(Coming::new());

/// How long the next look may wait behind one that has taken so long: all that look who has come ask for it each time.
pub fn pause(took: Duration) -> Duration {
    let now = Instant::now();
    // The child of a fork would have the file open as well.
    let open = Part::begin().and_then(|_part| {
        let _sheltered = cancel::shelter();
        gpupool_machine::open_files()
    });
    let mut coming = COMING.lock();
    if coming.note(open, now) {
        tracing::debug!(
            target: "gpupool::memory", about = "awaited",
            "a program begins to use CUDA; for a while it is looked more often whether it has a context on a GPU that is borrowed from"
        );
    }
    coming.pause(took, now)
}
