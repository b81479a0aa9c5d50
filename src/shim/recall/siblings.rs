//! The other ranks of a job, where no launcher's variable tells of them (`torch.multiprocessing.spawn`, Dask-CUDA, vLLM's workers): processes of one
//! session and one parent that run the same program, see the same GPUs and each work on others of these. They keep to their own GPUs, as ranks do. Two scripts
//! of one interpreter are two programs ([`gpupool_metrics::runs`]), and so are two notebooks of one server, whose kernels run the same ([`gpupool_metrics::is_kernel`]).

use super::neighbours;
use crate::backing::{open, terms};
use crate::watch::context;
use crate::{live, process, tiers};
use gpupool_config::{Devices, Mode, Move};
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Snapshot, is_kernel, lineage, runs};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The least time between two looks.
const PERIOD: Duration = Duration::from_secs(1);

static LOOKED: Mutex<Option<Instant>> = Mutex::new(None);

/// Looks who else is there, if it is time to, and says so to whoever decides what is lent.
pub fn look() {
    let mut looked = LOOKED.lock();
    if looked.is_some_and(|looked| looked.elapsed() < PERIOD) {
        return;
    }
    *looked = Some(Instant::now());
    drop(looked);
    let settings = process::settings();
    let is_free = live::devices() == Devices::Auto && settings.local_ranks.is_none();
    if !is_free || !matches!(settings.mode, Mode::Pool | Mode::Spill) {
        return;
    }
    if let Some(count) = siblings()
        && terms::note_siblings(count)
        && settings.moving != Move::Off
    {
        share_moves(count + 1);
    }
}

fn share_moves(ranks: u32) {
    tiers::heed_share();
    let share = f64::from(tiers::share()) / 10.0;
    tracing::info!(
        target: "gpupool::memory", about = "move_share", ranks,
        "moves may take {share}% of this process's time: GPUPOOL_MOVE_SHARE is for all {ranks} processes of the job on this host together, which wait for \
         each other"
    );
}

fn siblings() -> Option<u32> {
    let plan = open::plan_made().filter(|plan| plan.members.len() > 1)?;
    let page = super::page()?;
    let folder = Folder::around(page).ok()?;
    // Whatever was left to the first process of the machine is nobody's job.
    let own = lineage(std::process::id()).filter(|(parent, _)| *parent > 1)?;
    let seen: BTreeSet<Uuid> = plan.topology.gpus.iter().map(|gpu| gpu.uuid).collect();
    let at_work: BTreeSet<Uuid> = context::all()
        .iter()
        .filter_map(|context| plan.topology.gpus.get(context.device.ordinal() as usize))
        .map(|gpu| gpu.uuid)
        .collect();
    let own_runs = runs(std::process::id());
    // Two notebooks of one server are two programs of one user, whatever he does in each of them.
    if is_kernel(std::process::id(), own.0, own_runs.as_ref()) {
        return Some(0);
    }
    let name = std::env::current_exe().ok()?.file_name()?.to_string_lossy().into_owned();
    let is_sibling = |told: &Snapshot| {
        let gpus = &told.levels.gpus.rows;
        let works: BTreeSet<Uuid> = told
            .contexts
            .rows
            .iter()
            .filter_map(|context| told.levels.gpu(context.device))
            .map(|gpu| gpu.uuid)
            .collect();
        told.process.name == name
            && gpus.iter().map(|gpu| gpu.uuid).collect::<BTreeSet<_>>() == seen
            && !works.is_empty()
            && works.is_disjoint(&at_work)
            && lineage(told.process.identity.pid) == Some(own)
            // Read last, as it takes most. Where it is not told, they may.
            && own_runs.as_ref().zip(runs(told.process.identity.pid)).is_none_or(|(own, theirs)| own.may_be_same_as(&theirs))
    };
    u32::try_from(neighbours::snapshots(&folder).iter().filter(|told| is_sibling(told)).count()).ok()
}
