//! What the policy is told, written down, so that a program can be played again without a GPU (`src/tiers/tests/recorded`).
//!
//! With `GPUPOOL_LOG=gpupool::launches=trace` there is a line for each block, launch, copy and wait that `gpupool-tiers` hears of; with
//! `gpupool::memory=trace` beside it the times and answers, too. A target of its own, since there are thousands of these lines a second.

use gpupool_tiers::Range;
use std::fmt;
use tracing::Level;

const TARGET: &str = "gpupool::launches";

/// Whether anybody wants to read it: an atomic load where nobody does.
#[inline(always)]
pub(super) fn is_on() -> bool {
    tracing::enabled!(target: TARGET, Level::TRACE)
}

struct Words<'a>(&'a [u64]);

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|word| write!(f, " {word:x}"))
    }
}

struct Ranges<'a>(&'a [Range]);

impl fmt::Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|range| write!(f, " {:x}+{}", range.start, range.bytes()))
    }
}

#[cold]
pub(super) fn launch(id: u64, function: u64, shape: u64, words: &[u64]) {
    tracing::trace!(target: TARGET, about = "launch", "{id} {function:x} {shape:x}{}", Words(words));
}

#[cold]
pub(super) fn copy(ranges: &[Range]) {
    tracing::trace!(target: TARGET, about = "copy", "{}", Ranges(ranges));
}

pub(super) fn began(gpu: u32, address: u64, bytes: u64) {
    tracing::trace!(target: TARGET, about = "begin", "{address:x} {bytes} of GPU {gpu}");
}

pub(super) fn ended(address: u64) {
    tracing::trace!(target: TARGET, about = "end", "{address:x}");
}

pub(super) fn waited() {
    tracing::trace!(target: TARGET, about = "idle", "waited");
}
