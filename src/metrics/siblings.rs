//! Which processes are ranks of one job, where no launcher's variable tells of them (`torch.multiprocessing.spawn`, Dask-CUDA, vLLM's workers): those of one session and process
//! group that the same process started, each behind as many shells ([`started`]), that run the same program and see the same GPUs, where some of them work on other GPUs than others do
//! ([`beside`]). Two scripts of one interpreter are two programs ([`runs`]), and so are two notebooks of one server, whose kernels run the same ([`is_kernel`]).

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
    /// A process that sees these GPUs and has contexts on those. `None`: it is nobody's rank. Who works on no GPU is of no job, nor is a notebook: two of one server are two programs of
    /// one user, whatever he does in each of them.
    pub fn new(pid: u32, name: &str, sees: BTreeSet<[u8; 16]>, works_on: BTreeSet<[u8; 16]>) -> Option<Self> {
        let parent = lineage(pid)?.parent;
        let started = started(pid)?;
        let runs = runs(pid);
        let is_kernel = [parent, started.by].iter().any(|by| is_kernel(pid, *by, runs.as_ref()));
        let is_any = !works_on.is_empty() && !is_kernel;
        is_any.then(|| Self { pid, name: name.to_owned(), sees, works_on, started, runs })
    }

    /// The same of a process by its page. One that a launcher gave a number is of the job that this tells of, and of no other.
    pub fn of(told: &Snapshot) -> Option<Self> {
        let process = &told.process;
        let of = || Self::new(process.identity.pid, &process.name, sees(told), works_on(told));
        process.rank.is_none().then(of)?
    }

    /// Whether both run the same and were started alike, and work on different GPUs. Where it is not told what one runs, it may be the same.
    fn is_beside(&self, other: &Self) -> bool {
        let runs = self.runs.as_ref().zip(other.runs.as_ref());
        self.started == other.started
            && self.works_on.is_disjoint(&other.works_on)
            && runs.is_none_or(|(own, theirs)| own.may_be_same_as(theirs))
    }
}

/// The other ranks of the job of this process: who is beside it, who is beside one of these, and so on. So of two ranks on one GPU and a third on another each has the same job, as the third
/// is beside both; of two runs on one GPU alone none has any.
pub fn beside<'a>(own: &Member, all: impl IntoIterator<Item = &'a Snapshot>) -> Vec<&'a Snapshot> {
    // What the page tells first: the rest has to be read of the process.
    let may_be = |told: &&Snapshot| {
        let process = &told.process;
        process.identity.pid != own.pid && process.name == own.name && sees(told) == own.sees
    };
    let others = all.into_iter().filter(may_be);
    let mut others: Vec<_> = others.filter_map(|told| Some((told, Member::of(told)?))).collect();
    let mut job = Vec::new();
    let mut found = Vec::new();
    let mut next = Some(own.clone());
    while let Some(member) = next {
        let (more, rest): (Vec<_>, Vec<_>) = others.into_iter().partition(|(_, other)| member.is_beside(other));
        others = rest;
        for (told, other) in more {
            found.push(told);
            job.push(other);
        }
        next = job.pop();
    }
    found
}

fn sees(told: &Snapshot) -> BTreeSet<[u8; 16]> {
    told.levels.gpus.rows.iter().map(|gpu| gpu.uuid).collect()
}

fn works_on(told: &Snapshot) -> BTreeSet<[u8; 16]> {
    let contexts = told.contexts.rows.iter();
    contexts.filter_map(|context| told.levels.gpu(context.device)).map(|gpu| gpu.uuid).collect()
}
