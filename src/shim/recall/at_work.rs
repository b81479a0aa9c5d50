//! Who works on a GPU, as far as anybody tells: NVML lists the processes that have a context there, this one included. Beside it count
//! the GPUs of ranks of this job that may have to start yet, and what programs under gpupool say of their contexts: the driver's own checkpoint takes those off
//! the GPU (`gpupool suspend --process`) and needs the room again at once when it brings them back.

use super::neighbours;
use crate::backing::open;
use crate::backing::plan::Plan;
use crate::backing::terms;
use crate::backing::topology::Gpu;
use crate::bell;
use crate::nvml::{self, Nvml};
use crate::process;
use crate::serve::memory::idle::Part;
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use std::collections::BTreeSet;

/// What a GPU is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Nobody,
    /// Who, where that is told.
    Somebody(Option<u32>),
}

/// The GPUs of the pool of which `counts` is so, and who works on each; `None`: nobody knows. Where NVML is missing there are none.
pub fn on(plan: &Plan, counts: impl Fn(&Gpu) -> bool) -> Vec<(u32, Option<Work>)> {
    let Some(nvml) = nvml::get() else { return Vec::new() };
    let theirs = theirs(plan, &nvml);
    let members = plan.topology.gpus.iter().filter(|gpu| plan.members.contains_key(&gpu.ordinal) && counts(gpu));
    members.map(|gpu| (gpu.ordinal, work_on(gpu, &theirs, &nvml))).collect()
}

/// The same for the agent, of these GPUs. `None`: not now.
pub fn on_these(gpus: &[u32]) -> Option<Vec<(u32, Option<Work>)>> {
    let plan = open::plan_made()?;
    // NVML opens files, which a child of a fork would have as well.
    let _part = Part::begin()?;
    Some(on(plan, |gpu| gpus.contains(&gpu.ordinal)))
}

/// Has a GPU that this rank was to leave lend to it again where nobody works there any more; whether nobody does, `None` where that cannot be told now.
/// `then` ends the sentence that the log tells it with.
pub fn lends_again(gpu: u32, then: &str) -> Option<bool> {
    let is_idle = on_these(&[gpu])?.into_iter().any(|(_, work)| work == Some(Work::Nobody));
    if is_idle && !terms::lend_while_idle(&[gpu], true).is_empty() {
        // It is looked again who comes there.
        bell::wake();
        tracing::info!(
            target: "gpupool::memory", about = "idle_lent", device = gpu,
            "nobody works on GPU {gpu} any more, so it lends to this rank {then}"
        );
    }
    Some(is_idle)
}

/// Whether this is the helper that keeps GPUs awake, which works on none.
pub fn is_helper(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"gpupool\n")
}

fn work_on(gpu: &Gpu, theirs: &BTreeSet<Uuid>, nvml: &Nvml) -> Option<Work> {
    if theirs.contains(&gpu.uuid) {
        return Some(Work::Somebody(None));
    }
    let who = nvml.numbers(&gpu.uuid)?.into_iter().find(|pid| !is_helper(*pid));
    Some(who.map_or(Work::Nobody, |pid| Work::Somebody(Some(pid))))
}

/// GPUs of ranks by the launcher's count, and of programs under gpupool by their pages.
fn theirs(plan: &Plan, nvml: &Nvml) -> BTreeSet<Uuid> {
    let ranks = process::settings().local_ranks.map_or(0, |(_, ranks)| ranks);
    let seen = plan.topology.gpus.iter().filter(|gpu| gpu.ordinal < ranks).map(|gpu| gpu.uuid);
    // Each rank may see the GPUs in another order, its own one first, or others than this one does: of as many ranks the machine's first GPUs are
    // somebody's as well.
    let first = (0..ranks).map_while(|index| nvml.uuid_of(index));
    let mut theirs: BTreeSet<Uuid> = seen.chain(first).collect();
    let folder = super::page().and_then(|page| Folder::around(page).ok());
    for told in folder.iter().flat_map(neighbours::snapshots) {
        let works = told.contexts.rows.iter().filter_map(|context| told.levels.gpu(context.device));
        theirs.extend(works.map(|gpu| gpu.uuid));
    }
    theirs
}
