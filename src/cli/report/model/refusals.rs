//! What a process was told OUT_OF_MEMORY for.

use std::collections::{BTreeMap, VecDeque};

use gpupool_events::{OutOfMemory, PoolRefuse};

/// Refusals that are kept of the first ones of a process, and of the last: the first say what was too much, the last what it died of.
const KEPT: usize = 8;

/// The refusals that a log tells of, in their order. The library tells ever fewer of them.
#[derive(Default)]
pub struct Refusals {
    first: Vec<Refusal>,
    last: VecDeque<Refusal>,
    /// How many there were in all, told or not.
    pub times: u64,
    /// Requests that a setting had refused, by the word for why: no place was asked for them.
    pub by_setting: BTreeMap<SettingThatRefuses, BySetting>,
}

/// A setting on whose account a program is told OUT_OF_MEMORY although there is room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SettingThatRefuses {
    SoftOom,
    FarLimit,
}

impl SettingThatRefuses {
    /// By the word in `pool.refuse`; the other words tell of requests that the driver was asked for next.
    fn of(why: &str) -> Option<Self> {
        match why {
            "soft" => Some(Self::SoftOom),
            "far" => Some(Self::FarLimit),
            _ => None,
        }
    }

    /// As the user writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::SoftOom => "GPUPOOL_SOFT_OOM",
            Self::FarLimit => "GPUPOOL_FAR_LIMIT",
        }
    }
}

/// What a setting had refused.
#[derive(Clone, Copy, Debug, Default)]
pub struct BySetting {
    pub times: u64,
    /// When it was last, seconds since 1970, for how many bytes and on which GPU.
    pub last: f64,
    pub bytes: u64,
    pub home: u32,
}

/// One of them.
pub struct Refusal {
    /// When, seconds since 1970.
    pub t: f64,
    /// All that was told of it.
    pub told: OutOfMemory,
}

impl Refusals {
    /// One more.
    pub fn add(&mut self, t: f64, told: OutOfMemory) {
        self.times = self.times.max(told.number);
        let refusal = Refusal { t, told };
        if self.first.len() < KEPT {
            self.first.push(refusal);
            return;
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(refusal);
    }

    /// One of the pool, which counts here where a setting is why.
    pub fn of_pool(&mut self, t: f64, refused: &PoolRefuse) {
        let Some(setting) = SettingThatRefuses::of(&refused.why) else { return };
        let BySetting { times, .. } = self.by_setting.get(&setting).copied().unwrap_or_default();
        let last = BySetting { times: times + 1, last: t, bytes: refused.bytes, home: refused.home };
        self.by_setting.insert(setting, last);
    }

    /// Those that are kept.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Refusal> {
        self.first.iter().chain(&self.last)
    }
}
