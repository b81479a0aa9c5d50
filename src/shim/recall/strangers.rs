//! Programs that do not run under gpupool, or are another user's: they cannot ask. As soon as one has a context on a GPU where this process only borrows,
//! all that is borrowed there leaves, before that program allocates; and afterwards `GPUPOOL_RESERVE` stays free for it. For one that was there
//! before anything was borrowed that stays free from the beginning, as it grows.
//!
//! NVML tells which processes there are, in a container by numbers of another namespace. There a program under gpupool looks like any other, and is given
//! way to once, when it comes.

use super::give::{self, Gives};
use super::neighbours;
use crate::backing::{open, topology::Gpu};
use crate::serve::memory::idle;
use crate::watch::context;
use crate::{clock, nvml, process};
use gpupool_config::Mode;
use gpupool_cuda::Device;
use gpupool_lending::Terms;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::stat;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// How often it is looked while something is borrowed. A context takes 110 ms to make.
const PERIOD: Duration = Duration::from_millis(50);
/// How often it is looked whether the reserve is free.
const RESERVE: Duration = Duration::from_millis(500);
/// Seconds for which a program has run that may have come after what it finds borrowed there: that is not looked at the moment it is lent.
const YOUNG: f64 = 2.0;
/// How long what is borrowed has to leave.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is known of a GPU that is borrowed from.
struct Borrowed {
    known: BTreeSet<u32>,
    /// Those of them that cannot ask.
    strange: BTreeSet<u32>,
    looked: Instant,
}

#[derive(Default)]
pub struct Strangers {
    borrowed: BTreeMap<u32, Borrowed>,
    looked: Option<Instant>,
}

impl Strangers {
    /// `None` where nothing is borrowed, or nobody tells of others.
    pub fn new() -> Option<Self> {
        let settings = process::settings();
        (matches!(settings.mode, Mode::Pool | Mode::Spill) && settings.recall_wait.is_some()).then(Self::default)
    }

    /// Looks, if it is time to, and gives way; how long nothing need be done. `None`: until something changes.
    pub fn look(&mut self) -> Option<Duration> {
        let left = self.looked.map_or(Duration::ZERO, |looked| PERIOD.saturating_sub(looked.elapsed()));
        if !left.is_zero() {
            return (!self.borrowed.is_empty()).then_some(left);
        }
        let gpus: Vec<&'static Gpu> =
            open::plan_made()?.topology.gpus.iter().filter(|gpu| borrows(gpu.ordinal)).collect();
        self.borrowed.retain(|ordinal, _| gpus.iter().any(|gpu| gpu.ordinal == *ordinal));
        if gpus.is_empty() || nvml::get().is_none() {
            return None;
        }
        self.looked = Some(Instant::now());
        for gpu in gpus {
            // NVML opens files, which a child of a fork would have as well.
            let there = idle::Part::begin().and_then(|_part| nvml::get()?.numbers(&gpu.uuid));
            if let Some(there) = there {
                self.look_at(gpu, there.into_iter().collect());
            }
        }
        Some(PERIOD)
    }

    fn look_at(&mut self, gpu: &Gpu, there: BTreeSet<u32>) {
        let Some(borrowed) = self.borrowed.get_mut(&gpu.ordinal) else {
            let strange = strangers(&there.iter().copied().collect::<Vec<_>>());
            let young = strange.iter().copied().find(|pid| is_young(*pid));
            let strange = strange.into_iter().collect();
            self.borrowed.insert(gpu.ordinal, Borrowed { known: there, strange, looked: Instant::now() });
            if young.is_some() {
                leave(gpu.ordinal, u64::MAX, young);
            }
            return;
        };
        let new: Vec<u32> = there.difference(&borrowed.known).copied().collect();
        borrowed.strange.retain(|pid| there.contains(pid));
        borrowed.known = there;
        let strange = strangers(&new);
        if let Some(pid) = strange.first() {
            borrowed.strange.extend(&strange);
            leave(gpu.ordinal, u64::MAX, Some(*pid));
        } else if !borrowed.strange.is_empty() && borrowed.looked.elapsed() >= RESERVE {
            borrowed.looked = Instant::now();
            let reserve = open::plan_made().and_then(|plan| plan.members.get(&gpu.ordinal)).copied().unwrap_or(0);
            let free = nvml::get().and_then(|nvml| nvml.free(&gpu.uuid)).unwrap_or(u64::MAX);
            if free < reserve {
                leave(gpu.ordinal, reserve - free, None);
            }
        }
    }
}

/// Whether this process has memory on a GPU that it does not work on.
pub(super) fn borrows(gpu: u32) -> bool {
    give::on_gpu(gpu) > 0 && !context::is_on(Device::of(gpu))
}

/// Has so much of what is borrowed there leave; how much did.
pub(super) fn leave(gpu: u32, bytes: u64, pid: Option<u32>) -> u64 {
    let gives = Gives { bytes, terms: Terms { lent: true, floor: 0 }, pid };
    give::give(gpu, gives, Instant::now() + PATIENCE, &|| true, &mut |_, _| {}).moved
}

fn is_young(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| clock::seconds_since(stat.started) < YOUNG)
}

/// Whether this is the helper that keeps GPUs awake.
pub(super) fn is_helper(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"gpupool\n")
}

/// Those of these that are none of the user's under gpupool, and not the helper that keeps GPUs awake.
fn strangers(new: &[u32]) -> Vec<u32> {
    if new.is_empty() {
        return Vec::new();
    }
    let known = super::page().and_then(|page| Folder::around(page).ok()).map(|folder| neighbours::all(&folder));
    let known = known.unwrap_or_default();
    // One that has allocated nothing yet has no page. Of another user's program root can see that it has the library, too, but neither can ask the other.
    let user_of = |process: &str| std::fs::metadata(format!("/proc/{process}")).ok().map(|process| process.uid());
    let user = user_of("self");
    let is_ours = |pid: u32| {
        user_of(&pid.to_string()) == user
            && std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("libgpupool"))
    };
    let is_known = |pid: u32| pid == std::process::id() || known.contains(&pid) || is_helper(pid) || is_ours(pid);
    new.iter().copied().filter(|pid| !is_known(*pid)).collect()
}
