//! Who is about to come to a GPU that is borrowed from, before NVML lists it there: by the GPU's memory in use ([`look_at`]), for which what is borrowed leaves, and by the driver's open files
//! ([`pause`]), for which it is only looked more often ([`gpupool_lending::Coming`]).
//!
//! It is looked at first, and where it tells that nobody has come NVML's list is asked seldom ([`glance`]): that can hold its asker up for 54 ms where one GPU is visible and 108 ms where two are, just while somebody comes (four H100, driver 580.159.04, 2026-11-27), where the memory in use is told in 8 µs. With
//! the list asked first what leaves was begun 96 ms before the context was made, instead of 200 and more.
//!
//! Only where nobody has a context: whoever has one may take memory at any moment, and is no comer for that. What is there then is borrowed, and the number grows by a borrower of ours, by one of ours that calls
//! `cuInit`, or by a program that cannot ask. The first two are told apart by what they say themselves ([`taking`]) and by what the kernel tells of processes that have no page yet.

use super::{at_work, give, leaving, neighbours};
use crate::backing::topology::Gpu;
use crate::clock::monotonic_nanoseconds;
use crate::serve::memory::idle::Part;
use crate::{log, nvml, taking};
use gpupool_config::format_size;
use gpupool_events::RecallSign;
use gpupool_interpose::cancel;
use gpupool_lending::{AWAITED, Alarm, Coming, Heed, InUse, Listed, Whom};
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Environment, Maps, Snapshot, now as now_in_pages, stat};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

static COMING: Mutex<Coming> = Mutex::new(Coming::new());
static WATCHED: Mutex<BTreeMap<u32, Watched>> = Mutex::new(BTreeMap::new());
/// By number and start, those of ours without a page that a growth was put down to, and when first: `cuInit` is called once.
static BEGUN: Mutex<BTreeMap<(u32, u64), Instant>> = Mutex::new(BTreeMap::new());

/// What is known of a GPU that is borrowed from, or was when somebody was about to come.
#[derive(Default)]
struct Watched {
    used: InUse,
    /// Whether it is known, and the next look can be compared with it.
    is_known: bool,
    /// When that was asked, in nanoseconds of the monotonic clock.
    asked: u64,
    listed: Listed,
    alarm: Alarm,
}

impl Watched {
    /// So much is in use; by how much more than at the last look.
    fn note(&mut self, gpu: u32, used: Option<u64>) -> Option<u64> {
        // Also where it was not told before: who came while the list was asked for is in it from the beginning.
        if used.is_some() && used != self.used.last() {
            self.listed.change();
        }
        if self.is_known != used.is_some() {
            self.is_known = used.is_some();
            let when = if self.is_known { "from now on, as nobody has a context there" } else { "no more" };
            tracing::debug!(
                target: "gpupool::memory", about = "awaited", device = gpu,
                "how much of GPU {gpu} is in use is looked at {when}"
            );
        }
        self.used.note(used)
    }
}

/// How long the next look may wait behind one that has taken so long: all that look who has come ask for it each time.
pub fn pause(took: Duration) -> Duration {
    let now = Instant::now();
    // The child of a fork would have the file open as well.
    let open = Part::begin().and_then(|_part| {
        let _sheltered = cancel::shelter();
        gpupool_machine::open_files()
    });
    let mut coming = COMING.lock();
    if coming.note(open, now) {
        tracing::debug!(
            target: "gpupool::memory", about = "awaited",
            "a program begins to use CUDA; for a while it is looked more often whether it has a context on a GPU that is borrowed from"
        );
    }
    coming.pause(took, now)
}

/// Whether somebody is awaited on a GPU: it is looked at also once nothing is there any more.
pub fn is_awaited(gpu: u32) -> bool {
    WATCHED.lock().get(&gpu).is_some_and(|watched| watched.alarm.awaits())
}

/// A GPU is looked at no more: what comes to be in use there meanwhile is no sign once it is looked at again.
pub fn stop(gpu: u32) {
    if let Some(watched) = WATCHED.lock().get_mut(&gpu) {
        watched.note(gpu, None);
    }
}

/// What a look at the memory in use alone tells of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glance {
    /// Nobody has come since the list was asked for.
    Nobody,
    /// The list is to be asked for.
    AskList,
    /// Somebody is about to come, and all that is borrowed is to leave: before anything is asked that may take long.
    Leaves,
}

/// Looks at a GPU on which nobody had a context when that was asked last, if it is such a one, and has all leave that is borrowed there if its memory in use grew by none of ours. The list is to be asked for in the look behind one
/// that saw that change, twice a second in any case, and where it is not told.
pub fn glance(gpu: &Gpu) -> Glance {
    let state = || {
        let mut all = WATCHED.lock();
        let watched = all.entry(gpu.ordinal).or_default();
        (watched.is_known, watched.listed.is_due(Instant::now()))
    };
    // What is seen to change now is a reason to ask in the next look.
    let (is_known, is_due) = state();
    if is_known && look_at(gpu, true) {
        return Glance::Leaves;
    }
    if is_due || !state().0 { Glance::AskList } else { Glance::Nobody }
}

/// The list of a GPU was asked for. `is_empty`: nobody has a context there, as of now.
pub fn listed(gpu: &Gpu, is_empty: bool) {
    let mut all = WATCHED.lock();
    let watched = all.entry(gpu.ordinal).or_default();
    watched.listed.note(is_empty, Instant::now());
    let is_known = watched.is_known;
    drop(all);
    if !is_empty || !is_known {
        look_at(gpu, is_empty);
    }
}

/// Looks how much of a GPU is in use, and has all leave that is borrowed there if that grew by none of ours; whether it does. `is_empty`: nobody has a context there, as far as is known.
fn look_at(gpu: &Gpu, is_empty: bool) -> bool {
    let ordinal = gpu.ordinal;
    let now = monotonic_nanoseconds();
    let used = if is_empty { in_use(gpu) } else { None };
    let mut all = WATCHED.lock();
    let watched = all.entry(ordinal).or_default();
    let more = watched.note(ordinal, used);
    let before = std::mem::replace(&mut watched.asked, now);
    let was_distrusted = watched.alarm.is_distrusted();
    let over = if is_empty {
        watched.alarm.look(Instant::now())
    } else {
        watched.alarm.came();
        None
    };
    let is_distrusted = watched.alarm.is_distrusted();
    drop(all);
    // Whoever was awaited has room for a context, or needs none any more: one of ours that has come asks for what it needs.
    if was_distrusted && !is_distrusted {
        leaving::has_reserve(ordinal);
    }
    if !is_empty {
        leaving::has_come(ordinal);
        return false;
    }
    if let Some(time) = over {
        leaving::has_come(ordinal);
        tracing::info!(
            target: "gpupool::memory", about = "awaited", device = ordinal,
            "nobody came to GPU {ordinal} after all, so what left it comes back where there is room then; for {} s nothing leaves it before somebody is seen there",
            time.as_secs()
        );
    } else if !is_awaited(ordinal) {
        leaving::has_come(ordinal);
    }
    let leaves = more.zip(used).is_some_and(|(bytes, used)| grew(gpu, bytes, used, before));
    // Nothing leaves for a sign that may be false, but what whoever comes has taken of the room for its context: one that cannot make that is never seen.
    if WATCHED.lock().get(&ordinal).is_some_and(|watched| watched.alarm.is_distrusted()) {
        leaving::keep_reserve(gpu);
    }
    leaves
}

/// Bytes of a GPU that are in use, where that is told.
fn in_use(gpu: &Gpu) -> Option<u64> {
    // NVML opens files, which a child of a fork would have as well.
    let _part = Part::begin()?;
    nvml::get()?.used(&gpu.uuid)
}

/// A GPU's memory in use grew by so much since then, to what it is; whether all leaves for that.
fn grew(known: &Gpu, bytes: u64, used: u64, since: u64) -> bool {
    let gpu = known.ordinal;
    let Some(bytes) = unexplained(known, bytes, used, since) else { return false };
    let now = Instant::now();
    COMING.lock().expect(now);
    let heed = WATCHED.lock().entry(gpu).or_default().alarm.rings(bytes, now);
    let borrowed = give::on_gpu(gpu);
    let leaves = match heed {
        Heed::Same => return false,
        Heed::Leave => true,
        Heed::Look(_) => false,
    };
    log::emit(|| {
        let then = match heed {
            Heed::Look(time) => format!(
                "; as nobody came behind the last such sign, nothing leaves for another {} s before somebody is seen there",
                time.as_secs()
            ),
            Heed::Leave | Heed::Same => {
                format!(", and all {} that this process has there leave", format_size(borrowed))
            }
        };
        let text = format!(
            "somebody is about to come to GPU {gpu}: its memory in use grew by {}, and no process under gpupool took that{then}",
            format_size(bytes)
        );
        (RecallSign { device: gpu, bytes, borrowed, leaves }, text)
    });
    if leaves {
        leaving::begin(gpu, Whom::Comer, u64::MAX);
    }
    leaves
}

/// So much of a growth that nobody explains who is there, if any of it.
///
/// Who took it may have ended before it was looked for, which takes some ms: then that has gone as well, and nobody comes. So it is asked once more how much is in use. Rejected: to wait before that, since
/// whoever comes has no more time than there is.
fn unexplained(gpu: &Gpu, bytes: u64, used: u64, since: u64) -> Option<u64> {
    let ordinal = gpu.ordinal;
    let tell = |who: &str| {
        tracing::debug!(
            target: "gpupool::memory", about = "awaited", device = ordinal,
            "the memory in use of GPU {ordinal} grew by {}, by {who}", format_size(bytes)
        );
    };
    if let Some(who) = explained(since) {
        tell(&who);
        return None;
    }
    let asked = monotonic_nanoseconds();
    let Some(again) = in_use(gpu) else { return Some(bytes) };
    let mut all = WATCHED.lock();
    let watched = all.entry(ordinal).or_default();
    watched.note(ordinal, Some(again));
    watched.asked = asked;
    drop(all);
    let left = again.saturating_sub(used.saturating_sub(bytes));
    if left == 0 {
        tell("a process that has ended since");
        return None;
    }
    Some(left)
}

/// Who of ours took memory since then, or begins to use CUDA; in words.
fn explained(since: u64) -> Option<String> {
    if taking::last().is_since(since) {
        return Some("this process".to_owned());
    }
    let folder = Folder::around(super::page()?).ok()?;
    let told = neighbours::snapshots(&folder);
    if let Some(taker) = told.iter().find(|told| told.took.is_since(since)) {
        return Some(format!("process {}", taker.process.identity.pid));
    }
    // The page of one that calls `cuInit` and allocates between two looks says nothing of what that call took, for it was made behind it.
    let since_then = monotonic_nanoseconds().saturating_sub(since) / 1000;
    let is_new = |told: &&Snapshot| now_in_pages().saturating_sub(told.process.created) <= since_then;
    if let Some(new) = told.iter().find(is_new) {
        return Some(format!("process {} under gpupool, which has just begun to use CUDA", new.process.identity.pid));
    }
    let known: BTreeSet<u32> = neighbours::all(&folder).into_iter().collect();
    beginner(&known).map(|pid| format!("process {pid} under gpupool, which begins to use CUDA"))
}

/// One of ours that has no page, as it has allocated nothing yet, and that no earlier growth was put down to: `cuInit` takes memory of each GPU that it sees, or may. Processes of other containers and users
/// are not seen, and count as those that cannot ask.
fn beginner(known: &BTreeSet<u32>) -> Option<u32> {
    let _sheltered = cancel::shelter();
    // An open folder of /proc is a file that the child of a fork would have as well.
    let _part = Part::begin()?;
    let (user, folder) = (std::fs::metadata("/proc/self").ok()?.uid(), session("self")?);
    let now = Instant::now();
    let mut begun = BEGUN.lock();
    begun.retain(|(pid, started), _| stat(*pid).is_some_and(|stat| stat.started == *started));
    let numbers = std::fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        (entry.metadata().ok()?.uid() == user).then_some(pid)
    });
    let own = std::process::id();
    for pid in numbers.filter(|pid| *pid != own && !known.contains(pid)) {
        let Some(stat) = stat(pid) else { continue };
        let is_fresh = || begun.get(&(pid, stat.started)).is_none_or(|first| now < *first + AWAITED);
        if is_fresh() && session(&pid.to_string()).is_some_and(|of| of == folder) && uses_cuda_with_us(pid) {
            begun.entry((pid, stat.started)).or_insert(now);
            return Some(pid);
        }
    }
    None
}

/// Where a process looks for others: one of another session has its page elsewhere, and is not known to have one. `None`: it is not to be read.
fn session(process: &str) -> Option<Option<Vec<u8>>> {
    let environment = Environment::of(process)?;
    Some(environment.get("XDG_RUNTIME_DIR").map(|folder| folder.as_bytes().to_vec()))
}

/// Whether a process has the driver loaded, and this library or the command, whose helper keeps GPUs awake.
fn uses_cuda_with_us(pid: u32) -> bool {
    Maps::of(pid).is_some_and(|maps| maps.has_driver() && (maps.has_library() || at_work::is_helper(pid)))
}
