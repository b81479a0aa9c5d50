//! Which processes are ranks of one job, where no launcher's variable tells of them (`torch.multiprocessing.spawn`, Dask-CUDA, vLLM's workers): those of one session that the same
//! process started, each behind as many shells ([`started`]), that run the same program, see the same GPUs and each work on others of these. Two scripts of one interpreter are two programs ([`runs`]), and so are two
//! notebooks of one server, whose kernels run the same ([`is_kernel`]).

use crate::{Runs, Snapshot, Started, is_kernel, lineage, runs, started};
use std::collections::BTreeSet;

/// What a process is known by to those that may be of its job.
#[derive(Clone, Debug)]
pub struct Member {
    pid: u32,
    /// The name of its executable, as its page tells it.
    name: String,
    sees: BTreeSet<[u8; 16]>,
    works_on: BTreeSet<[u8; 16]>,
    started: Started,
    /// `None`: it is not told.
    runs: Option<Runs>,
}

impl Member {
    /// A process that sees these GPUs and has contexts on those. `None`: it is nobody's rank. Whatever was left to the first process of the machine is of no job, nor is who works on no
    /// GPU, nor a notebook: two of one server are two programs of one user, whatever he does in each of them.
    pub fn new(pid: u32, name: &str, sees: BTreeSet<[u8; 16]>, works_on: BTreeSet<[u8; 16]>) -> Option<Self> {
        let (parent, _) = lineage(pid).filter(|(parent, _)| *parent > 1)?;
        let started = started(pid)?;
        let runs = runs(pid);
        let is_kernel = [parent, started.by].iter().any(|by| is_kernel(pid, *by, runs.as_ref()));
        let is_any = !works_on.is_empty() && !is_kernel;
        is_any.then(|| Self { pid, name: name.to_owned(), sees, works_on, started, runs })
    }

    /// The same of a process by its page.
    pub fn of(told: &Snapshot) -> Option<Self> {
        Self::new(told.process.identity.pid, &told.process.name, sees(told), works_on(told))
    }

    /// Whether another process is a rank beside this one.
    pub fn is_beside(&self, told: &Snapshot) -> bool {
        let pid = told.process.identity.pid;
        let works = works_on(told);
        pid != self.pid
            && told.process.name == self.name
            && sees(told) == self.sees
            && !works.is_empty()
            && works.is_disjoint(&self.works_on)
            && started(pid) == Some(self.started)
            // Read last, as it takes most. Where it is not told, they may.
            && self.runs.as_ref().zip(runs(pid)).is_none_or(|(own, theirs)| own.may_be_same_as(&theirs))
    }
}

fn sees(told: &Snapshot) -> BTreeSet<[u8; 16]> {
    told.levels.gpus.rows.iter().map(|gpu| gpu.uuid).collect()
}

fn works_on(told: &Snapshot) -> BTreeSet<[u8; 16]> {
    let contexts = told.contexts.rows.iter();
    contexts.filter_map(|context| told.levels.gpu(context.device)).map(|gpu| gpu.uuid).collect()
}
