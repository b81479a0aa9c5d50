//! What the places of the pool may hold now, and whom they lend to: worked out from the settings that can change ([`crate::live`]) and
//! from the GPUs that are drained, and written into the accounts, where everybody reads it.

use super::open;
use super::plan::Plan;
use crate::{live, process};
use gpupool_config::Devices;
use gpupool_metrics::drains::{self, Uuid};
use gpupool_metrics::folder::Roots;
use gpupool_pool::Place;
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// The drained GPUs of this process, by UUID.
static DRAINED: Mutex<BTreeSet<Uuid>> = Mutex::new(BTreeSet::new());
/// Whether there is any.
static ARE_ANY: AtomicBool = AtomicBool::new(false);

/// A plan was made, and nothing was taken of its places yet.
pub fn begin(plan: &Plan) {
    let uuids: Vec<Uuid> = gpus(plan).map(|(_, uuid)| uuid).collect();
    note_drained(drains::among(&uuids, roots(), None).into_iter().collect());
    if keeps_to_its_own(true) {
        lend_as_said(plan, true);
    }
    close_drained(plan);
}

/// The settings have changed: what follows for the places.
pub fn heed() {
    let Some(plan) = open::plan_made() else { return };
    limit_as_said(plan);
    lend_as_said(plan, keeps_to_its_own(false));
    tell_pool();
}

fn limit_as_said(plan: &Plan) {
    let limits = live::limit();
    for (ordinal, reserve) in &plan.members {
        let total = plan.memory_of(*ordinal);
        let limit = limits.of(*ordinal).unwrap_or(u64::MAX).min(total.saturating_sub(*reserve));
        plan.accounts.set_limit(Place::Gpu(*ordinal), limit);
    }
}

/// Places whose terms are waived, until this is dropped.
pub struct Waived(&'static Plan);

/// Waives the terms of these places, of which only the room there is left: memory that was there comes back, and could lie nowhere else.
/// Nobody else is served meanwhile: the program is stopped.
pub fn waive(places: impl Iterator<Item = Place>) -> Option<Waived> {
    let plan = open::plan_made()?;
    for place in places {
        let Place::Gpu(ordinal) = place else { continue };
        let reserve = plan.members.get(&ordinal).copied().unwrap_or(0);
        plan.accounts.set_limit(place, plan.memory_of(ordinal).saturating_sub(reserve));
        plan.accounts.lend(place, true);
        plan.accounts.close(place, false);
    }
    Some(Waived(plan))
}

impl Drop for Waived {
    fn drop(&mut self) {
        limit_as_said(self.0);
        lend_as_said(self.0, keeps_to_its_own(false));
        close_drained(self.0);
        tell_pool();
    }
}

/// Looks which GPUs are drained, and closes or opens them: those that have become so, and those that are so no more. `page`: where this
/// process's page lies.
pub fn look_for_drains(page: Option<&Path>) -> (Vec<u32>, Vec<u32>) {
    let Some(plan) = open::plan_made() else { return (Vec::new(), Vec::new()) };
    let uuids: Vec<Uuid> = gpus(plan).map(|(_, uuid)| uuid).collect();
    let now: BTreeSet<Uuid> = drains::among(&uuids, roots(), page.and_then(Path::parent)).into_iter().collect();
    let before = DRAINED.lock().clone();
    if now == before {
        return (Vec::new(), Vec::new());
    }
    let ordinals = |of: &BTreeSet<Uuid>, without: &BTreeSet<Uuid>| {
        let changed = gpus(plan).filter(|(_, uuid)| of.contains(uuid) && !without.contains(uuid));
        changed.map(|(ordinal, _)| ordinal).collect::<Vec<u32>>()
    };
    let changed = (ordinals(&now, &before), ordinals(&before, &now));
    note_drained(now);
    close_drained(plan);
    tell_pool();
    changed
}

/// Whether any GPU is drained.
#[inline]
pub fn is_any_drained() -> bool {
    ARE_ANY.load(Ordering::Relaxed)
}

/// Whether this GPU is drained.
#[inline]
pub fn is_drained(ordinal: u32) -> bool {
    is_any_drained() && is_among_drained(ordinal)
}

#[cold]
fn is_among_drained(ordinal: u32) -> bool {
    open::plan_made().is_some_and(|plan| plan.accounts.is_closed(Place::Gpu(ordinal)))
}

/// Whether it is said of this GPU, one of the pool's or not.
pub fn is_said_drained(gpu: &Uuid) -> bool {
    DRAINED.lock().contains(gpu)
}

/// The drained GPUs of the pool.
pub fn drained() -> Vec<u32> {
    if !ARE_ANY.load(Ordering::Relaxed) {
        return Vec::new();
    }
    let all = open::plan_made().into_iter().flat_map(|plan| plan.members.keys().copied());
    all.filter(|ordinal| is_drained(*ordinal)).collect()
}

/// The most that is to be on this GPU, as far as the user or a drain says; `None`: as much as there is room for.
pub fn limit_of(ordinal: u32) -> Option<u64> {
    if is_drained(ordinal) { Some(0) } else { live::limit_of(ordinal) }
}

fn gpus(plan: &Plan) -> impl Iterator<Item = (u32, Uuid)> {
    plan.topology.gpus.iter().map(|gpu| (gpu.ordinal, gpu.uuid))
}

/// As they were when the plan was made: the program may change its environment, and whoever reads that in another thread meanwhile may
/// read what is gone.
fn roots() -> &'static Roots {
    static ROOTS: OnceBox<Roots> = OnceBox::new();
    ROOTS.get_or_init(|| Box::new(Roots::new(std::env::var_os("XDG_RUNTIME_DIR"))))
}

fn note_drained(now: BTreeSet<Uuid>) {
    ARE_ANY.store(!now.is_empty(), Ordering::Relaxed);
    *DRAINED.lock() = now;
}

fn close_drained(plan: &Plan) {
    let drained = DRAINED.lock().clone();
    for (ordinal, uuid) in gpus(plan) {
        plan.accounts.close(Place::Gpu(ordinal), drained.contains(&uuid));
    }
}

fn lend_as_said(plan: &Plan, keeps_to_its_own: bool) {
    let devices = live::devices();
    for ordinal in plan.members.keys() {
        let is_named = match &devices {
            Devices::Auto => !keeps_to_its_own,
            Devices::List(list) => list.contains(ordinal),
        };
        plan.accounts.lend(Place::Gpu(*ordinal), is_named);
    }
}

fn tell_pool() {
    if let Some(opened) = open::opened() {
        opened.pool.heed_accounts();
    }
}

/// Ranks of one job must not eat each other's memory, unless the user says which GPUs may be used. `says`: it is said in the log.
fn keeps_to_its_own(says: bool) -> bool {
    if live::devices() != Devices::Auto {
        return false;
    }
    let Some((variable, ranks)) = process::settings().local_ranks else { return false };
    if says {
        tracing::info!(
            target: "gpupool::memory", about = "home_only", variable, ranks,
            "{variable}={ranks}: one rank of several on this host, so it keeps to its own GPU and the host; GPUPOOL_DEVICES \
             with a list of GPUs overrides that"
        );
    }
    true
}
