//! How often the program was suspended and resumed, and what images cost it, over the life of the process: for the metrics page.

use gpupool_metrics::Counter;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Counters of the page that are kept here.
const COUNTED: [Counter; 4] = [Counter::Suspensions, Counter::Resumes, Counter::Images, Counter::ImageStopMicroseconds];
static COUNTS: [AtomicU64; COUNTED.len()] = [const { AtomicU64::new(0) }; COUNTED.len()];

pub(super) fn is_suspended() {
    COUNTS[0].fetch_add(1, Relaxed);
}

pub(super) fn is_resumed() {
    COUNTS[1].fetch_add(1, Relaxed);
}

/// An image is whole, for which the program was stopped for so long.
pub fn has_image(stopped: Duration) {
    COUNTS[2].fetch_add(1, Relaxed);
    COUNTS[3].fetch_add(stopped.as_micros() as u64, Relaxed);
}

/// All of them.
pub fn counters() -> impl Iterator<Item = (Counter, u64)> {
    COUNTED.into_iter().zip(COUNTS.iter().map(|count| count.load(Relaxed)))
}
