//! GPUs whose memory is ill, as NVML tells it. One with rows to be replaced at its next reset is drained by itself, so that the reset loses nothing. After an
//! error that was not contained nothing new goes to a GPU and nothing is copied from it unless somebody asks (`gpupool drain`): what reads a
//! broken page loses its context, and that would be the program's.
//!
//! A row that is to be replaced (Xid 63) is of either kind. Where errors in it were corrected so far, all of it can be read, and it is drained. Where one was not, it is broken, and
//! the GPU is left alone. NVML counts the two apart; where it tells of the Xid and of no such row, the row is taken to be broken.

use crate::backing::{open, terms};
use crate::bell;
use crate::nvml;
use crate::process;
use crate::serve::memory::{self, idle};
use gpupool_config::Mode;
use gpupool_machine::{Uuid, Xids};
use gpupool_pool::Place;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How often it is looked while the pool has memory on any GPU.
const PERIOD: Duration = Duration::from_secs(5);
/// When it is looked first. A program that begins makes most of its memory in its first moments, and NVML holds the driver's locks for as long as it registers
/// for events and counts rows: a first block of 4 GiB took 3.5 to 9 ms beside that, and 1.6 without (`tests/bench/RESULTS.md`).
const FIRST: Duration = Duration::from_secs(1);
/// A double-bit error, a failed replacement of a row, NVLink, fallen off the bus, and errors that were contained or not.
const GRAVE: [u64; 6] = [48, 64, 74, 79, 94, 95];
/// A row is to be replaced.
const RECORDED: u64 = 63;

pub struct Health {
    /// From the first look on.
    xids: Option<Xids>,
    /// By GPU, how many of its rows were broken at the first look. What was in them was lost before, and the driver gives them to nobody.
    broken: BTreeMap<Uuid, u32>,
    /// When it is looked next; from the first memory on.
    next: Option<Instant>,
}

impl Health {
    /// `None` where nothing is the pool's.
    pub fn new() -> Option<Self> {
        let is_pooled = matches!(process::settings().mode, Mode::Pool | Mode::Spill);
        is_pooled.then_some(Self { xids: None, broken: BTreeMap::new(), next: None })
    }

    /// Looks, if it is time to; how long nothing need be done. `None`: until something changes.
    pub fn look(&mut self) -> Option<Duration> {
        let plan = open::plan_made()?;
        let accounts = memory::accounts()?;
        if plan.members.keys().all(|gpu| accounts.taken(Place::Gpu(*gpu)) == 0) {
            return None;
        }
        let now = Instant::now();
        let left = self.next.get_or_insert(now + FIRST).saturating_duration_since(now);
        if !left.is_zero() {
            return Some(left);
        }
        self.next = Some(now + PERIOD);
        let gpus: Vec<Uuid> = plan.topology.gpus.iter().map(|gpu| gpu.uuid).collect();
        // NVML opens files, which a child of a fork would have as well.
        let Some(_part) = idle::Part::begin() else { return Some(PERIOD) };
        let nvml = nvml::get()?;
        if self.xids.is_none() {
            self.xids = nvml.watch_xids(&gpus);
            tracing::debug!(target: "gpupool::memory", about = "health", "errors of GPUs are heard of from now on");
        }
        let mut is_news = false;
        let mut recorded = BTreeSet::new();
        while let Some((gpu, xid)) = self.xids.as_ref().and_then(nvml::next_xid) {
            is_news |= GRAVE.contains(&xid) && terms::note_ill(&gpu, terms::Ill::Grave(xid));
            if xid == RECORDED {
                recorded.insert(gpu);
            }
        }
        for gpu in &gpus {
            let rows = nvml.remapped_rows(gpu);
            let (broken, is_pending) = rows.map_or((0, false), |rows| (rows.uncorrectable, rows.is_pending));
            let is_broken = broken > *self.broken.entry(*gpu).or_insert(broken);
            if is_pending && !is_broken {
                is_news |= terms::note_ill(gpu, terms::Ill::Rows);
            } else if is_pending || recorded.contains(gpu) {
                is_news |= terms::note_ill(gpu, terms::Ill::Grave(RECORDED));
            }
        }
        if is_news {
            bell::changed();
        }
        Some(PERIOD)
    }
}
