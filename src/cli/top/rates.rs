//! What a process does a second: differences between two looks at its page.

use std::time::Duration;

use gpupool_metrics::{Counter, Snapshot};
use serde::Serialize;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Moves of memory a second.
    #[serde(rename = "moves_per_second")]
    pub moves: f64,
    /// Bytes a second that came near.
    #[serde(rename = "came_bytes_per_second")]
    pub came: f64,
    /// Bytes a second that went away.
    #[serde(rename = "left_bytes_per_second")]
    pub left: f64,
    /// The part of the time that kernels lost by reading far memory, of each GPU added up.
    #[serde(rename = "lost_to_far_memory")]
    pub lost: f64,
    /// Bytes a second that were allocated.
    #[serde(rename = "allocated_bytes_per_second")]
    pub allocated: f64,
}

impl Rates {
    /// Between two looks so far apart. `None` where there is no time between them, or where a number fell that only grows: then it
    /// is not of the same program.
    pub fn between(before: &Snapshot, after: &Snapshot, apart: Duration) -> Option<Self> {
        let seconds = apart.as_secs_f64();
        let grown = |counters: &[Counter]| {
            let sum = |told: &Snapshot| {
                let values = counters.iter().map(|counter| told.counter(*counter));
                values.fold(0u64, u64::saturating_add)
            };
            sum(after).checked_sub(sum(before)).map(|difference| difference as f64 / seconds)
        };
        let lost = |told: &Snapshot| told.levels.residence.lost_microseconds;
        if seconds <= 0.0 {
            return None;
        }
        Some(Self {
            moves: grown(&[Counter::Moves])?,
            came: grown(&[Counter::CameFromPeersBytes, Counter::CameFromHostBytes])?,
            left: grown(&[Counter::LeftForPeersBytes, Counter::LeftForHostBytes])?,
            lost: lost(after).checked_sub(lost(before))? as f64 / 1e6 / seconds,
            allocated: grown(&[Counter::AllocatedBytes])?,
        })
    }

    /// Bytes a second that changed places.
    pub fn moved(&self) -> f64 {
        self.came + self.left
    }
}
