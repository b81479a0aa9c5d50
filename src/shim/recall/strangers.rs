//! Programs that do not run under gpupool, or are another user's: they cannot ask. As soon as one has a context on a GPU where this process only borrows,
//! all that is borrowed there leaves, before that program allocates; and afterwards `GPUPOOL_RESERVE` stays free for it. For one that was there
//! before anything was borrowed that stays free from the beginning, as it grows. When that is tried, and again, [`super::leaving`] decides. GPUs that are lent only while nobody
//! works there are [`super::idle`]'s.
//!
//! NVML tells which processes there are, as soon as they have a context; how often it is asked, what leaves before that, and when the memory in use is looked at instead, [`super::coming`] says. In a container it tells them by numbers of another namespace. There a program under gpupool looks like any other, and is given
//! way to once, when it comes.

use super::coming::{self, Glance};
use super::{at_work, give, leaving, neighbours};
use crate::backing::{open, terms, topology::Gpu};
use crate::{clock, nvml, process};
use gpupool_config::Mode;
use gpupool_lending::Whom;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Maps, stat};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// How often it is looked whether the reserve is free.
const RESERVE: Duration = Duration::from_millis(500);
/// Seconds for which a program has run that may have come after what it finds borrowed there: that is not looked at the moment it is lent.
const YOUNG: f64 = 2.0;

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
    /// When the next look is, while something is borrowed.
    next: Option<Instant>,
}

impl Strangers {
    /// `None` where nothing is borrowed, or nobody tells of others.
    pub fn new() -> Option<Self> {
        let settings = process::settings();
        (matches!(settings.mode, Mode::Pool | Mode::Spill) && settings.recall_wait.is_some()).then(Self::default)
    }

    /// Looks, if it is time to, who has come; how long nothing need be done. `None`: until something changes.
    pub fn look(&mut self) -> Option<Duration> {
        let begun = Instant::now();
        let left = self.next.map_or(Duration::ZERO, |next| next.saturating_duration_since(begun));
        if !left.is_zero() {
            return (!self.borrowed.is_empty()).then_some(left);
        }
        let gpus: Vec<&'static Gpu> = open::plan_made()?
            .topology
            .gpus
            .iter()
            .filter(|gpu| give::borrows(gpu.ordinal) || coming::is_awaited(gpu.ordinal))
            .filter(|gpu| !is_loan(gpu.ordinal))
            .collect();
        self.borrowed.retain(|ordinal, _| {
            let is_looked_at = gpus.iter().any(|gpu| gpu.ordinal == *ordinal);
            if !is_looked_at {
                coming::stop(*ordinal);
            }
            is_looked_at
        });
        if gpus.is_empty() || nvml::get().is_none() {
            return None;
        }
        let told: Vec<(&Gpu, Glance)> = gpus.into_iter().map(|gpu| (gpu, coming::glance(gpu))).collect();
        // What leaves for a sign is begun before a list can hold this thread up, of whichever GPU: that is asked for in the next look.
        let leaves = told.iter().any(|(_, glance)| *glance == Glance::Leaves);
        let is_to_ask = |gpu: &Gpu, glance| glance == Glance::AskList || !self.borrowed.contains_key(&gpu.ordinal);
        let asked = told.into_iter().filter(|(gpu, glance)| !leaves && is_to_ask(gpu, *glance)).map(|(gpu, _)| gpu);
        for gpu in asked.collect::<Vec<_>>() {
            if let Some(there) = neighbours::numbers(gpu.ordinal) {
                let is_empty = there.iter().all(|pid| at_work::is_helper(*pid));
                self.look_at(gpu, there);
                coming::listed(gpu, is_empty);
            }
        }
        let pause = coming::pause(begun.elapsed());
        self.next = Some(Instant::now() + pause);
        Some(pause)
    }

    fn look_at(&mut self, gpu: &Gpu, there: BTreeSet<u32>) {
        let Some(borrowed) = self.borrowed.get_mut(&gpu.ordinal) else {
            let strange = strangers(&there.iter().copied().collect::<Vec<_>>());
            let young: BTreeSet<u32> = strange.iter().copied().filter(|pid| is_young(*pid)).collect();
            let strange = strange.into_iter().collect();
            self.borrowed.insert(gpu.ordinal, Borrowed { known: there, strange, looked: Instant::now() });
            if !young.is_empty() {
                leaving::begin(gpu.ordinal, Whom::Strangers(young), u64::MAX);
            }
            return;
        };
        let new: Vec<u32> = there.difference(&borrowed.known).copied().collect();
        let was_any = !borrowed.strange.is_empty();
        borrowed.strange.retain(|pid| there.contains(pid));
        if was_any && borrowed.strange.is_empty() {
            leaving::has_reserve(gpu.ordinal);
        }
        borrowed.known = there;
        let strange = strangers(&new);
        if !strange.is_empty() {
            borrowed.strange.extend(&strange);
            leaving::begin(gpu.ordinal, Whom::Strangers(strange.into_iter().collect()), u64::MAX);
        } else if !borrowed.strange.is_empty() && borrowed.looked.elapsed() >= RESERVE {
            borrowed.looked = Instant::now();
            leaving::keep_reserve(gpu);
        }
    }
}

/// Whether this GPU is, or was, lent for as long as nobody works there.
fn is_loan(gpu: u32) -> bool {
    terms::is_lent_while_idle(gpu) || leaving::is_for_workers(gpu)
}

fn is_young(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| clock::seconds_since(stat.started) < YOUNG)
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
    let is_ours = |pid: u32| user_of(&pid.to_string()) == user && Maps::of(pid).is_some_and(|maps| maps.has_library());
    let is_known =
        |pid: u32| pid == std::process::id() || known.contains(&pid) || at_work::is_helper(pid) || is_ours(pid);
    new.iter().copied().filter(|pid| !is_known(*pid)).collect()
}
