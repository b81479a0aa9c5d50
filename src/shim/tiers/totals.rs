//! What moves did over the life of the process, counted for the metrics page and the summary.

use super::HOMES;
use crate::log::MovedSummary;
use gpupool_metrics::Counter;
use gpupool_pool::Place;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of the page that are kept here, in no order.
const COUNTED: [Counter; 13] = [
    Counter::Moves,
    Counter::CameFromPeersBytes,
    Counter::CameFromHostBytes,
    Counter::LeftForPeersBytes,
    Counter::LeftForHostBytes,
    Counter::MovingMicroseconds,
    Counter::AwaitingMicroseconds,
    Counter::StopsSlower,
    Counter::StopsUnpaid,
    Counter::StopsNotQuiet,
    Counter::StopsNoRoom,
    Counter::StopsGraphs,
    Counter::StopsOff,
];
static COUNTS: [AtomicU64; Counter::ALL.len()] = [const { AtomicU64::new(0) }; Counter::ALL.len()];

pub fn add(counter: Counter, more: u64) {
    COUNTS[counter as usize].fetch_add(more, Relaxed);
}

fn count(counter: Counter) -> u64 {
    COUNTS[counter as usize].load(Relaxed)
}

/// So many bytes changed places for this GPU.
pub(super) fn changed_places(gpu: u32, from: Place, to: Place, bytes: u64) {
    let home = Place::Gpu(gpu);
    if to == home {
        add(if from.is_host() { Counter::CameFromHostBytes } else { Counter::CameFromPeersBytes }, bytes);
    } else {
        add(if to.is_host() { Counter::LeftForHostBytes } else { Counter::LeftForPeersBytes }, bytes);
    }
}

/// All of them.
pub fn counters() -> impl Iterator<Item = (Counter, u64)> {
    COUNTED.into_iter().map(|counter| (counter, count(counter)))
}

/// Bytes that came near.
pub fn came() -> u64 {
    count(Counter::CameFromPeersBytes) + count(Counter::CameFromHostBytes)
}

/// For the summary.
pub fn summary() -> MovedSummary {
    MovedSummary {
        times: count(Counter::Moves),
        came: came(),
        left: count(Counter::LeftForPeersBytes) + count(Counter::LeftForHostBytes),
        took: count(Counter::MovingMicroseconds) as f64 * 1e-6,
        saved: saved_microseconds() as f64 * 1e-6,
    }
}

/// Microseconds that launches took less than they would have where memory first lay, as far as that was measured.
pub fn saved_microseconds() -> i64 {
    let homes = HOMES.iter().filter_map(once_cell::race::OnceBox::get);
    homes.map(|home| (home.tiers.lock().saved_ns() / 1e3) as i64).sum()
}
