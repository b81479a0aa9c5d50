//! Pinned host memory: how much there was over time, and which lines of the program asked for it.

use std::collections::BTreeMap;

use gpupool_events::{PinnedLevel, PinnedReturn, PinnedSite};

use super::kept::{LeftOut, keep};
use super::timeline::Timeline;

/// Reasons for returning memory that are kept apart.
const REASONS: usize = 16;

/// What a process did with pinned memory.
#[derive(Default)]
pub struct Pinned {
    /// Bytes that were pinned.
    pinned: Timeline,
    /// Bytes of pinned memory that the program held.
    requested: Timeline,
    /// Bytes of its own memory that the program registered, which are pinned and held too.
    registered: Timeline,
    /// Bytes that went back, by reason.
    pub returned: BTreeMap<String, u64>,
    /// What each line did, the largest first.
    pub sites: Vec<PinnedSite>,
}

impl Pinned {
    /// The level at `seconds` from the start.
    pub fn level(&mut self, seconds: f64, level: &PinnedLevel) {
        self.pinned.add(seconds, level.pinned);
        self.requested.add(seconds, level.requested);
        self.registered.add(seconds, level.registered);
    }

    /// Memory went back.
    pub fn returned(&mut self, returned: PinnedReturn) {
        let known = self.returned.contains_key(&returned.why) || self.returned.len() < REASONS;
        let why = if known { returned.why } else { "other reasons".to_owned() };
        let sum = self.returned.entry(why).or_default();
        *sum = sum.saturating_add(returned.bytes);
    }

    /// What a line did, all together.
    pub fn site(&mut self, site: PinnedSite, more: &mut LeftOut) {
        keep(&mut self.sites, site, "pinned sites", more);
    }

    /// The three quantities over time, by name.
    pub fn lines(&self) -> [(&'static str, &Timeline); 3] {
        [("pinned", &self.pinned), ("in use", &self.requested), ("own", &self.registered)]
    }
}
