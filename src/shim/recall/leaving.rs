//! What leaves GPUs unasked, for those who have come there and cannot ask: who they are, `strangers.rs` and `idle.rs` find out; when it is tried, and again, is
//! decided in one place for both ([`gpupool_lending::Leaving`]).

use super::at_work;
use super::give::{self, Gives};
use super::neighbours;
use crate::backing::topology::Gpu;
use crate::backing::{open, terms};
use crate::suspend::vacate::Vacated;
use crate::watch::finding;
use crate::{nvml, process};
use gpupool_config::format_size;
use gpupool_cuda::Device;
use gpupool_events::Finding;
use gpupool_lending::{self as lending, Due, Leaving, Terms, Whom};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How many times as long as an allocation waits for others (`GPUPOOL_RECALL_WAIT`) what leaves may take in one go: as long as who asks waits for who is heard to give way.
const LONGER: u32 = super::turns::LONGER;
/// And at most.
const MOST: Duration = Duration::from_secs(10);

/// Whether it was found that something borrowed has room nowhere else: once is enough, of whichever GPU.
static IS_FOUND: AtomicBool = AtomicBool::new(false);

static LEAVING: Mutex<Leaving> = Mutex::new(Leaving::new());

/// So many bytes of what this process has there for other GPUs are to leave a GPU for those.
pub(super) fn begin(gpu: u32, whom: Whom, bytes: u64) {
    LEAVING.lock().begin(gpu, whom, bytes, Instant::now());
}

/// Whether something is to leave a GPU that was lent for as long as nobody worked there.
pub(super) fn is_for_workers(gpu: u32) -> bool {
    LEAVING.lock().is_for_workers(gpu)
}

/// Has as much leave as is lacking of what is kept free there, if anything is.
pub(super) fn keep_reserve(gpu: &Gpu) {
    let reserve = open::plan_made().map_or(0, |plan| plan.kept_free(gpu.ordinal));
    let free = nvml::get().and_then(|nvml| nvml.free(&gpu.uuid)).unwrap_or(u64::MAX);
    if free < reserve {
        begin(gpu.ordinal, Whom::Reserve, reserve - free);
    } else {
        has_reserve(gpu.ordinal);
    }
}

/// As much is free there again as is kept free, or nobody asks for it any more.
pub(super) fn has_reserve(gpu: u32) {
    LEAVING.lock().retain(|of, whom| of != gpu || *whom != Whom::Reserve);
}

/// Whoever was about to come to a GPU is seen there, or does not come: nothing leaves for that any more.
pub(super) fn has_come(gpu: u32) {
    LEAVING.lock().retain(|of, whom| of != gpu || *whom != Whom::Comer);
}

/// Has what is due leave, if it is time to; how long nothing need be done. `None`: until something is to leave.
pub fn look() -> Option<Duration> {
    let now = Instant::now();
    let all = LEAVING.lock().all();
    for (gpu, _) in &all {
        let is_any = give::borrows(*gpu);
        LEAVING.lock().note(*gpu, is_any, now);
    }
    let due = LEAVING.lock().due(now);
    let wanted: Vec<Due> = due.into_iter().filter_map(still_wanted).collect();
    if !wanted.is_empty() {
        try_all(&wanted);
    }
    let over = LEAVING.lock().take_in_vain();
    if let Some(in_vain) = over {
        tracing::info!(
            target: "gpupool::memory", about = "stays_lent", tries = in_vain.0, held_ms = in_vain.1.as_millis() as u64,
            "nothing has to leave other GPUs for anybody any more; {}", held_up(in_vain)
        );
    }
    LEAVING.lock().wait(Instant::now())
}

/// What tries in vain have cost the program, in words.
fn held_up((tries, time): (u32, Duration)) -> String {
    let tries = if tries == 1 { "one try in vain has".to_owned() } else { format!("{tries} tries in vain have") };
    format!("{tries} held this program up for {} ms in all", time.as_millis())
}

/// This, for those of them who are there still. Where nobody is, it is to leave no more; and a GPU that nobody works on any more is lent as before, so that it is looked at who
/// comes there next.
fn still_wanted(due: Due) -> Option<Due> {
    let Due { gpu, mut whom, bytes } = due;
    let is_wanted = match &mut whom {
        // Who looks at the GPU ends it.
        Whom::Reserve | Whom::Comer => true,
        // Where nobody tells, they are taken to be there.
        Whom::Strangers(pids) => match neighbours::numbers(gpu) {
            Some(there) => {
                pids.retain(|pid| there.contains(pid));
                !pids.is_empty()
            }
            None => true,
        },
        // The user has said which GPUs lend, or the other ranks have left.
        Whom::Workers(_) if !terms::keeps_to_its_own() => false,
        Whom::Workers(_) if terms::is_lent_while_idle(gpu) => false,
        Whom::Workers(_) => at_work::lends_again(gpu, "as before, and what had not left it yet stays") != Some(true),
    };
    LEAVING.lock().retain(|of, all| {
        if of == gpu {
            *all = whom.clone();
        }
        of != gpu || is_wanted
    });
    is_wanted.then_some(Due { gpu, whom, bytes })
}

fn try_all(due: &[Due]) {
    let begun = Instant::now();
    let first = process::settings().recall_wait.map_or(MOST, |wait| (LONGER * wait).min(MOST));
    let deadline = begun + first;
    // Those in vain wait no longer together than one of them.
    let mut rest = LEAVING.lock().patience();
    let mut all: Vec<(&Due, Vacated)> = Vec::new();
    for due in due {
        let begun = Instant::now();
        let (pid, why) = (due.whom.one(), why(&due.whom));
        let gives = Gives { bytes: due.bytes, terms: Terms { lent: true, floor: 0 }, pid, priority: None, why, rest };
        let done = give::give(due.gpu, gives, deadline, &|| true, &mut |_, _| {});
        if done.moved == 0 {
            rest = rest.saturating_sub(begun.elapsed());
        }
        all.push((due, done));
        if rest.is_zero() {
            break;
        }
    }
    let ended = Instant::now();
    let has_moved = all.iter().any(|(_, done)| done.moved > 0);
    let next = LEAVING.lock().tried(begun, ended, has_moved);
    for (due, done) in all {
        if !give::borrows(due.gpu) {
            continue;
        }
        // Nothing comes back, and nothing more goes there, before the next try.
        terms::keep_for_longer(due.gpu, next + lending::GUARD);
        if done.moved == 0 && LEAVING.lock().tells(due.gpu) {
            tell(due, &done, next - ended);
        }
    }
}

/// For [`gpupool_events::RecallGive`].
fn why(whom: &Whom) -> &'static str {
    match whom {
        Whom::Workers(_) => "works",
        Whom::Strangers(_) => "context",
        Whom::Reserve => "reserve",
        Whom::Comer => "growth",
    }
}

fn tell(due: &Due, done: &Vacated, pause: Duration) {
    let gpu = due.gpu;
    let who = due.whom.one().map_or_else(|| "another program".to_owned(), |pid| format!("process {pid}"));
    let lacks: u64 = done.rest.iter().filter(|rest| rest.lacks_room()).map(|rest| rest.bytes).sum();
    if lacks > 0 && !IS_FOUND.swap(true, Ordering::Relaxed) {
        // One part of it stands for all: each names every place.
        let why = done.rest.iter().find(|rest| rest.lacks_room()).map_or("", |rest| &rest.what);
        let what = format!(
            "{} that this process borrows from GPU {gpu} could not leave when another one came to work there: {why}",
            format_size(lacks)
        );
        let facts = [("bytes", lacks.to_string())];
        finding::make_by_itself(&Finding::STAYED_LENT, Some(Device::of(gpu)), &facts, &what);
    }
    let why: Vec<String> =
        done.rest.iter().map(|rest| format!("{} stayed, because {}", format_size(rest.bytes), rest.what)).collect();
    let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join("; ")) };
    let in_vain = LEAVING.lock().in_vain();
    tracing::info!(
        target: "gpupool::memory", about = "stays_lent", device = gpu, tries = in_vain.0, held_ms = in_vain.1.as_millis() as u64,
        "nothing of what this process has on GPU {gpu} for other GPUs could leave for {who} yet{why}; {}. It is tried again in {} ms, and then more and more seldom, for \
         as long as somebody is there",
        held_up(in_vain),
        pause.as_millis()
    );
}
