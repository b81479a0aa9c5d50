//! Memory that moved: how much, why, and what it brought.

use std::collections::BTreeMap;

use gpupool_events::{BlockMove, PoolRepack, TierStop, TierSwap, TierTotal};

use super::kept::{LeftOut, keep};
use super::timeline::Timeline;

/// Reasons that are kept apart, and places.
const REASONS: usize = 16;

/// What moved in a process.
#[derive(Default)]
pub struct Moves {
    /// Swaps by reason (`tier.swap`, which a log has at level `debug`).
    pub swaps: BTreeMap<String, Swaps>,
    /// Bytes that came near so far, and that left, over time.
    pub came: Timeline,
    pub left: Timeline,
    /// What the program had moved itself, by the place it went to.
    pub by_hand: BTreeMap<String, ByHand>,
    /// Chunks that were cut anew.
    pub repacks: Repacks,
    /// Where moving ended because it did not pay.
    pub stops: Vec<TierStop>,
    /// The sum of the process, told at its end.
    pub total: Option<TierTotal>,
}

/// Swaps of one reason.
#[derive(Default)]
pub struct Swaps {
    pub times: u64,
    pub came: u64,
    pub left: u64,
    /// Bytes that could not move.
    pub stayed: u64,
    pub seconds: f64,
    /// For how long of that the program was stopped.
    pub stopped: f64,
}

/// Moves that the program asked for.
#[derive(Default)]
pub struct ByHand {
    pub times: u64,
    pub bytes: u64,
    pub stayed: u64,
}

/// Chunks cut anew.
#[derive(Default)]
pub struct Repacks {
    pub times: u64,
    pub freed: u64,
    pub copied: u64,
    pub seconds: f64,
}

impl Moves {
    /// Memory came near, `now` seconds from the start.
    pub fn swap(&mut self, now: f64, swap: TierSwap) {
        let sum = entry(&mut self.swaps, swap.why);
        sum.times += 1;
        sum.came = sum.came.saturating_add(swap.bytes_in);
        sum.left = sum.left.saturating_add(swap.bytes_out);
        sum.stayed = sum.stayed.saturating_add(swap.stayed);
        sum.seconds += swap.microseconds as f64 * 1e-6;
        sum.stopped += swap.stopped as f64 * 1e-6;
        self.came.add(now, self.came.peak().saturating_add(swap.bytes_in));
        self.left.add(now, self.left.peak().saturating_add(swap.bytes_out));
    }

    /// The program moved something.
    pub fn by_hand(&mut self, moved: BlockMove) {
        let sum = entry(&mut self.by_hand, moved.place);
        sum.times += 1;
        sum.bytes = sum.bytes.saturating_add(moved.bytes);
        sum.stayed = sum.stayed.saturating_add(moved.stayed);
    }

    /// Chunks were cut anew.
    pub fn repack(&mut self, repack: &PoolRepack) {
        self.repacks.times += 1;
        self.repacks.freed = self.repacks.freed.saturating_add(repack.freed);
        self.repacks.copied = self.repacks.copied.saturating_add(repack.copied);
        self.repacks.seconds += repack.microseconds as f64 * 1e-6;
    }

    /// Moving ended for a GPU.
    pub fn stop(&mut self, stop: TierStop, more: &mut LeftOut) {
        keep(&mut self.stops, stop, "stops", more);
    }

    /// Whether anything moved, or was kept from it.
    pub fn is_any(&self) -> bool {
        !(self.swaps.is_empty() && self.by_hand.is_empty() && self.stops.is_empty())
            || self.repacks.times > 0
            || self.total.as_ref().is_some_and(|total| total.times > 0)
    }
}

fn entry<T: Default>(sums: &mut BTreeMap<String, T>, name: String) -> &mut T {
    let known = sums.contains_key(&name) || sums.len() < REASONS;
    sums.entry(if known { name } else { "other".to_owned() }).or_default()
}
