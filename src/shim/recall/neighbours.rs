//! The other processes: this user's, as their pages tell of them, and all who work on a GPU, as NVML does.

use crate::backing::open;
use crate::clock::monotonic_nanoseconds;
use crate::nvml;
use crate::serve::memory::idle::Part;
use gpupool_lending::Stake;
use gpupool_machine::Uuid;
use gpupool_metrics::folder::{Entry, Folder};
use gpupool_metrics::{Life, Snapshot, identify, moves, now, read};
use std::collections::BTreeSet;
use std::ffi::OsStr;

/// Microseconds for which a page may say nothing of GPUs because it was made before the pool was: it is written once a second.
const NEW: u64 = 3_000_000;

/// The same in nanoseconds, for which it may not tell of everything that was taken.
const LATE: u64 = 1000 * NEW;

/// Another process, which has memory of a GPU or may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    pub pid: u32,
    pub started: u64,
    /// The name of its page.
    pub page: String,
    /// What it has of the GPU.
    pub stake: Stake,
    /// Memory of its program comes to GPUs or leaves them at this moment: it answers behind that, and nobody knows what it has then.
    pub moves: bool,
    /// It answers nobody before somebody lets it go on.
    pub is_halted: bool,
}

impl Neighbour {
    /// Bytes that it has of the GPU.
    pub fn held(&self) -> u64 {
        self.stake.own.saturating_add(self.stake.lent)
    }

    /// Whether it has borrowed memory within the last so many nanoseconds, of this GPU or another one.
    pub fn has_just_borrowed(&self, folder: &Folder, within: u64) -> bool {
        let told = folder.page_to_ring(OsStr::new(&self.page)).ok().and_then(|page| read(&page).ok());
        told.is_some_and(|told| told.took.is_since(monotonic_nanoseconds().saturating_sub(within)))
    }

    /// [`Neighbour::moves`], as of now.
    pub fn moves(&self, folder: &Folder) -> bool {
        folder.page_to_ring(OsStr::new(&self.page)).is_ok_and(|page| moves(&page))
    }
}

/// The processes beside this one that run, or are stopped, and whose pool has this GPU as a place. A page is up to a second old.
pub fn on(folder: &Folder, gpu: &Uuid) -> Vec<Neighbour> {
    let own = std::process::id();
    let others = folder.pages().into_iter().filter(|entry| entry.pid != own);
    let of = |entry: Entry| {
        let (told, is_halted) = told_of_any(folder, &entry)?;
        Some(Neighbour { is_halted, ..neighbour(&entry, &told, gpu)? })
    };
    others.filter_map(of).collect()
}

/// What the pages say of all processes beside this one that run.
pub fn snapshots(folder: &Folder) -> Vec<Snapshot> {
    let own = std::process::id();
    folder.pages().iter().filter(|entry| entry.pid != own).filter_map(|entry| told(folder, entry)).collect()
}

/// What a context takes of this GPU at least, as others tell that have one there; 0 where none does.
pub fn context_on(folder: &Folder, gpu: &Uuid) -> u64 {
    let of = |told: Snapshot| {
        let is_there = |device: u32| told.levels.gpu(device).is_some_and(|known| known.uuid == *gpu);
        let costs = told.contexts.rows.iter().filter(|context| is_there(context.device));
        costs.filter_map(|context| context.cost).filter(|cost| *cost > 0).min()
    };
    snapshots(folder).into_iter().filter_map(of).min().unwrap_or(0)
}

/// What a process beside this one says now that it matters.
pub fn priority_of(pid: u32) -> Option<u32> {
    let folder = Folder::around(super::page()?).ok()?;
    let entry = folder.pages().into_iter().find(|entry| entry.pid == pid)?;
    u32::try_from(told_of_any(&folder, &entry)?.0.levels.priority).ok()
}

/// The numbers of those who have a context on a GPU, under gpupool or not, where NVML tells; in a container the host's.
pub fn numbers(gpu: u32) -> Option<BTreeSet<u32>> {
    let known = open::plan_made()?.topology.gpus.iter().find(|known| known.ordinal == gpu)?;
    // NVML opens files, which a child of a fork would have as well.
    let _part = Part::begin()?;
    Some(nvml::get()?.numbers(&known.uuid)?.into_iter().collect())
}

/// The numbers of all processes beside this one.
pub fn all(folder: &Folder) -> Vec<u32> {
    folder.pages().into_iter().map(|entry| entry.pid).collect()
}

fn told(folder: &Folder, entry: &Entry) -> Option<Snapshot> {
    told_of_any(folder, entry).filter(|(_, is_halted)| !is_halted).map(|(told, _)| told)
}

/// Also of one that is stopped, and whether it is.
fn told_of_any(folder: &Folder, entry: &Entry) -> Option<(Snapshot, bool)> {
    let file = folder.page(entry).ok()?;
    let identity = identify(&file).ok()?;
    let life = identity.life();
    if identity.pid != entry.pid || !(life == Life::Running || life.is_halted()) {
        return None;
    }
    let told = read(&file).ok().filter(|told| !told.ended)?;
    Some((told, life.is_halted()))
}

fn neighbour(entry: &Entry, told: &Snapshot, gpu: &Uuid) -> Option<Neighbour> {
    let levels = &told.levels;
    // Its page tells of loans up to a second late.
    let borrows = told.moves || told.took.is_since(monotonic_nanoseconds().saturating_sub(LATE));
    let priority = u32::try_from(levels.priority).unwrap_or(u32::MAX);
    let Some(known) = levels.gpus.rows.iter().find(|known| known.uuid == *gpu) else {
        // What it has come to have by now it says itself, and whether it matters less.
        let is_new = levels.gpus.rows.is_empty() && now().saturating_sub(told.process.created) < NEW;
        let Entry { pid, started, .. } = *entry;
        // Its page says how much it matters as soon as it says anything.
        let priority = if levels.updated > 0 { priority } else { 0 };
        let stake = Stake { borrows, priority, ..Stake::default() };
        let (page, moves) = (entry.name.clone(), told.moves);
        return is_new.then_some(Neighbour { pid, started, page, stake, moves, is_halted: false });
    };
    let ordinal = known.ordinal;
    let place = levels.places.rows.iter().find(|place| place.is_gpu() && place.number == ordinal);
    let held = place.map_or(0, |place| place.held + place.own);
    let is_lent = |loan: &&gpupool_metrics::Loan| !loan.on_host && loan.number == ordinal;
    let lent = levels.loans.rows.iter().filter(is_lent).map(|loan| loan.bytes).sum::<u64>();
    Some(Neighbour {
        pid: entry.pid,
        started: entry.started,
        page: entry.name.clone(),
        stake: Stake { priority, lent, own: held.saturating_sub(lent), borrows },
        moves: told.moves,
        is_halted: false,
    })
}
