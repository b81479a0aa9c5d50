//! The other ranks of a job, where no launcher's variable tells of them ([`gpupool_metrics::Member`]). They keep to their own GPUs, as ranks do.

use super::{idle, neighbours};
use crate::backing::{open, terms};
use crate::watch::context;
use crate::{live, process, tiers};
use gpupool_config::{Devices, Mode, Move};
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Member, beside};
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
    let was_alone = !terms::keeps_to_its_own();
    if let Some(count) = siblings()
        && terms::note_siblings(count)
    {
        if was_alone && count > 0 {
            idle::begin();
        }
        if settings.moving != Move::Off {
            share_moves(count + 1);
        }
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

/// How many other ranks of this job there are; `None` where that cannot be seen.
fn siblings() -> Option<u32> {
    let plan = open::plan_made().filter(|plan| plan.members.len() > 1)?;
    let page = super::page()?;
    let folder = Folder::around(page).ok()?;
    let seen: BTreeSet<Uuid> = plan.topology.gpus.iter().map(|gpu| gpu.uuid).collect();
    let at_work: BTreeSet<Uuid> = context::all()
        .iter()
        .filter_map(|context| plan.topology.gpus.get(context.device.ordinal() as usize))
        .map(|gpu| gpu.uuid)
        .collect();
    let name = std::env::current_exe().ok()?.file_name()?.to_string_lossy().into_owned();
    let Some(own) = Member::new(std::process::id(), &name, seen, at_work) else { return Some(0) };
    u32::try_from(beside(&own, &neighbours::snapshots(&folder)).len()).ok()
}

/// How many ranks of its job beside this one there are on this host: as the launcher says, or as they are found now.
pub fn others() -> u32 {
    match process::settings().local_ranks {
        Some((_, ranks)) => ranks.saturating_sub(1),
        None => siblings().unwrap_or_else(terms::siblings),
    }
}
