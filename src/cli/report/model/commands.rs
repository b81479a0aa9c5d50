//! What commands did to a process while it ran, or what it did by itself in their place: suspensions, images, drained GPUs.

use std::collections::BTreeMap;

use gpupool_events::{GpuDrain, GpuUndrain, ProgramCheckpoint, ProgramResume, ProgramSuspend};

use super::kept::{LeftOut, keep};

/// Folders that images are told of.
const KEPT_FOLDERS: usize = 64;

/// What was done.
#[derive(Default)]
pub struct Commands {
    pub suspensions: Vec<Suspension>,
    /// By folder.
    pub images: BTreeMap<String, Images>,
    pub drains: Vec<Drain>,
}

/// A suspension, and how it ended.
pub struct Suspension {
    /// When the memory had left, seconds from the origin of the process.
    pub at: f64,
    pub told: ProgramSuspend,
    /// When the program went on, and what came back. `None`: it ended before.
    pub resumed: Option<(f64, ProgramResume)>,
}

impl Suspension {
    /// For how many seconds the program stood still, with what leaving and coming back took. `None`: it is not known to have gone on.
    pub fn seconds(&self) -> Option<f64> {
        let (resumed, _) = self.resumed.as_ref()?;
        let working = (self.told.microseconds.saturating_sub(self.told.waited_microseconds)) as f64 / 1e6;
        Some((resumed - self.at).max(0.0) + working)
    }
}

/// The images of one folder.
#[derive(Default)]
pub struct Images {
    pub times: u64,
    /// The last one.
    pub last: Option<ProgramCheckpoint>,
    /// Bytes that were written for all of them.
    pub fresh: u64,
    /// For how long the program was stopped, in all and at most.
    pub stopped_microseconds: u64,
    pub longest_stop_microseconds: u64,
}

/// What a GPU was drained of, or undrained for.
pub struct Drain {
    /// When that was done, seconds from the origin of the process.
    pub at: f64,
    pub device: u32,
    /// The GPU is drained from then on, or no more.
    pub is_drained: bool,
    /// Bytes that left it, or came back to it.
    pub bytes: u64,
    /// Bytes that stayed there, or where they were.
    pub stayed: u64,
}

impl Commands {
    pub fn suspended(&mut self, at: f64, told: ProgramSuspend, more: &mut LeftOut) {
        keep(&mut self.suspensions, Suspension { at, told, resumed: None }, "suspensions", more);
    }

    pub fn resumed(&mut self, at: f64, told: ProgramResume) {
        // Of one that was left out there is no beginning.
        if let Some(last) = self.suspensions.last_mut().filter(|last| last.resumed.is_none()) {
            last.resumed = Some((at, told));
        }
    }

    pub fn image(&mut self, told: ProgramCheckpoint, more: &mut LeftOut) {
        if self.images.len() >= KEPT_FOLDERS && !self.images.contains_key(&told.folder) {
            *more.entry("images").or_default() += 1;
            return;
        }
        let images = self.images.entry(told.folder.clone()).or_default();
        images.times += 1;
        images.fresh = images.fresh.saturating_add(told.fresh);
        images.stopped_microseconds = images.stopped_microseconds.saturating_add(told.stopped_microseconds);
        images.longest_stop_microseconds = images.longest_stop_microseconds.max(told.stopped_microseconds);
        images.last = Some(told);
    }

    pub fn drained(&mut self, at: f64, told: &GpuDrain, more: &mut LeftOut) {
        let drain = Drain { at, device: told.device, is_drained: true, bytes: told.bytes, stayed: told.stayed };
        keep(&mut self.drains, drain, "drained GPUs", more);
    }

    pub fn undrained(&mut self, at: f64, told: &GpuUndrain, more: &mut LeftOut) {
        let drain = Drain { at, device: told.device, is_drained: false, bytes: told.bytes, stayed: told.stayed };
        keep(&mut self.drains, drain, "drained GPUs", more);
    }
}
