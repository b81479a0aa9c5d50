//! Who may be asked for memory of a GPU: what the pages say that others have there, without those that are stopped and those that are left alone for a while. In which order, and what follows from
//! what they answer, is `gpupool-lending`'s ([`gpupool_lending::Asking`]).

use super::neighbours::{self, Neighbour};
use gpupool_config::format_size;
use gpupool_lending::{self as lending, Offer};
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long who did not answer in time is left alone.
const LEFT_ALONE: Duration = Duration::from_secs(10);
/// And who gave nothing of a GPU, as long as its page says of that GPU what it said then.
const AGAIN: Duration = Duration::from_millis(500);

/// Who is not asked.
static SPARED: Mutex<Vec<Spared>> = Mutex::new(Vec::new());

/// One that is not asked for a while.
struct Spared {
    pid: u32,
    started: u64,
    /// Only for this GPU, of which it gave nothing though its page said that it had so many bytes; `None`: for any.
    gpu: Option<(Uuid, u64)>,
    until: Instant,
}

/// Those who have memory of one GPU, or may have, by number; and what they give to a program of this priority.
pub(super) struct Whom<'a> {
    folder: &'a Folder,
    gpu: Uuid,
    /// The number that this process knows it by.
    ordinal: u32,
    priority: u32,
    known: BTreeMap<u32, Neighbour>,
}

impl<'a> Whom<'a> {
    pub fn new(folder: &'a Folder, (gpu, ordinal): (Uuid, u32), priority: u32) -> Self {
        Self { folder, gpu, ordinal, priority, known: BTreeMap::new() }
    }

    /// What these give on which terms, as their pages say now.
    pub fn offers(&mut self) -> Vec<Offer<u32>> {
        let (halted, others): (Vec<Neighbour>, Vec<Neighbour>) =
            neighbours::on(self.folder, &self.gpu).into_iter().partition(|other| other.is_halted);
        let has_some = |other: &&Neighbour| other.stake.gives(self.priority) > 0;
        halted.iter().filter(has_some).for_each(|other| tell_left_out(other, self.ordinal));
        let others: Vec<Neighbour> = others.into_iter().filter(|other| !is_spared(other, &self.gpu)).collect();
        let offers = lending::in_order(others.iter().map(|other| (other.stake, other.pid)), self.priority);
        self.known.extend(others.into_iter().map(|other| (other.pid, other)));
        offers
    }

    /// One of those that were ever among them.
    pub fn by_number(&self, pid: u32) -> Option<&Neighbour> {
        self.known.get(&pid)
    }

    /// It did not answer, and is not asked for a while.
    pub fn leave_alone(&self, pid: u32) {
        self.spare(pid, |_| None, LEFT_ALONE);
    }

    /// It gave nothing of this GPU, and is not asked for that for a while.
    pub fn has_none(&self, pid: u32) {
        self.spare(pid, |other| Some((self.gpu, other.held())), AGAIN);
    }

    fn spare(&self, pid: u32, gpu: impl Fn(&Neighbour) -> Option<(Uuid, u64)>, time: Duration) {
        let spared = |other: &Neighbour| {
            let until = Instant::now() + time;
            Spared { pid, started: other.started, gpu: gpu(other), until }
        };
        SPARED.lock().extend(self.by_number(pid).map(spared));
    }
}

fn is_spared(other: &Neighbour, gpu: &Uuid) -> bool {
    let now = Instant::now();
    let mut spared = SPARED.lock();
    spared.retain(|spared| spared.until > now);
    let is_other = |spared: &Spared| (spared.pid, spared.started) == (other.pid, other.started);
    // Who had none may have some by now that had just been on its way there, or is.
    let is_as_it_was =
        |spared: &Spared| spared.gpu.is_none_or(|(of, held)| of == *gpu && other.held() <= held && !other.moves);
    spared.iter().any(|spared| is_other(spared) && is_as_it_was(spared))
}

/// Who gave nothing may give something now.
pub(super) fn ask_anew() {
    SPARED.lock().retain(|spared| spared.gpu.is_none());
}

/// Who was told to be left out, by number and when it started.
static TOLD: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());

/// Says once of a process that it is not asked because it is stopped: it may be so for hours, and whoever looks for the reason finds that it has what others lack.
fn tell_left_out(other: &Neighbour, gpu: u32) {
    if TOLD.lock().insert((other.pid, other.started)) {
        let (pid, has) = (other.pid, format_size(other.held()));
        tracing::info!(
            target: "gpupool::memory", about = "recall.stopped", device = gpu, process = pid,
            "process {pid} is not asked for memory of GPU {gpu}, of which it has {has} and this one lacks some: it is stopped (SIGSTOP, a debugger or a paused container) and gives \
             nothing before it goes on (said once)"
        );
    }
}
