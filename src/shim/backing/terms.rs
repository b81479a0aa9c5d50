//! What the places of the pool may hold now, and whom they lend to: worked out from the settings that can change ([`crate::live`]) and
//! from the GPUs that are drained, and written into the accounts, where everybody reads it.

use super::open;
use super::plan::Plan;
use crate::watch::context;
use crate::{bell, live, process};
use gpupool_config::Devices;
use gpupool_cuda::{Device, Driver};
use gpupool_metrics::drains::{self, Uuid};
use gpupool_metrics::folder::Roots;
use gpupool_metrics::stat;
use gpupool_pool::Place;
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The drained GPUs of this process, by UUID.
static DRAINED: Mutex<BTreeSet<Uuid>> = Mutex::new(BTreeSet::new());
/// Whether there is any.
static ARE_ANY: AtomicBool = AtomicBool::new(false);

/// Those of which that is said no more, and since when.
static UNSAID: Mutex<BTreeMap<Uuid, Instant>> = Mutex::new(BTreeMap::new());

/// What somebody else was given of a GPU.
#[derive(Clone)]
pub struct Given {
    /// The most that may be there meanwhile, or `None` where nothing is borrowed there.
    most: Option<u64>,
    /// When that ends.
    until: Instant,
    /// Who may not have taken all of it yet, with the priority that each asked with; `None`: nothing that this program comes to matter is above it.
    whom: Vec<(Whom, Option<u32>)>,
}

/// Who was given memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whom {
    /// The process of this number, and when it started.
    Process(u32, u64),
    /// One that cannot be seen, or nobody in particular: nobody knows when it has ended.
    Unknown,
}

impl Whom {
    fn of(pid: Option<u32>) -> Self {
        let process = pid.and_then(|pid| Some(Self::Process(pid, stat(pid)?.started)));
        process.unwrap_or(Self::Unknown)
    }

    fn lives(&self) -> bool {
        match *self {
            Self::Process(pid, started) => stat(pid).is_some_and(|stat| stat.started == started),
            Self::Unknown => true,
        }
    }

    /// Whether it matters less than a program of priority `own`, by what it says now (`told`), or said when it asked.
    fn is_below(&self, own: u32, asked: Option<u32>, told: &dyn Fn(u32) -> Option<u32>) -> bool {
        let now = match *self {
            Self::Process(pid, _) => asked.map(|asked| told(pid).unwrap_or(asked)),
            Self::Unknown => asked,
        };
        now.is_some_and(|now| now < own)
    }
}

/// GPUs of which somebody else was given memory.
static GIVEN: Mutex<BTreeMap<u32, Given>> = Mutex::new(BTreeMap::new());
/// How often it is looked whether those live who were.
const LIVE: Duration = Duration::from_millis(250);

/// No more than so much is to be on this GPU until then, or nothing new for others (`None`): somebody else (`pid`, if that is one process) was given the
/// rest, and is not to lose it at once. Once all of these have ended that is kept for nobody, and for none of them that comes to matter less than this program, where that
/// is why it was given (`priority`: what it asked with).
pub fn keep_below(ordinal: u32, bytes: Option<u64>, until: Instant, pid: Option<u32>, priority: Option<u32>) {
    let mut given = GIVEN.lock();
    let Given { most, until: before, whom } =
        given.entry(ordinal).or_insert(Given { most: bytes, until, whom: Vec::new() });
    (*most, *before) = (bytes, until);
    let one = Whom::of(pid);
    whom.retain(|(other, _)| *other != one);
    whom.push((one, priority));
    drop(given);
    heed();
}

/// What is kept of this GPU is kept until then at least.
pub fn keep_for_longer(ordinal: u32, until: Instant) {
    if let Some(given) = GIVEN.lock().get_mut(&ordinal) {
        given.until = until.max(given.until);
    }
}

/// What is kept of this GPU now.
pub fn kept_of(ordinal: u32) -> Option<Given> {
    GIVEN.lock().get(&ordinal).cloned()
}

/// That is kept again, and nothing beside it: nothing was given since.
pub fn keep_as(ordinal: u32, kept: Option<Given>) {
    let mut given = GIVEN.lock();
    match kept {
        Some(kept) => _ = given.insert(ordinal, kept),
        None => _ = given.remove(&ordinal),
    }
    drop(given);
    heed();
}

/// Whether that holds for this GPU.
pub fn is_kept_below(ordinal: u32) -> bool {
    GIVEN.lock().contains_key(&ordinal)
}

/// Has that end where its time is over, or for nobody any more; how long until that is to be looked at next. `told`: what a process says that it matters.
pub fn forget_given(told: &dyn Fn(u32) -> Option<u32>) -> Option<Duration> {
    let (now, own) = (Instant::now(), live::priority());
    let mut given = GIVEN.lock();
    let before = given.len();
    let has_it = |(one, asked): &(Whom, Option<u32>)| one.lives() && !one.is_below(own, *asked, told);
    given.retain(|_, given| given.until > now && given.whom.iter().any(has_it));
    let (left, changed) = (given.values().map(|given| (given.until - now).min(LIVE)).min(), given.len() < before);
    drop(given);
    if changed {
        heed();
    }
    left
}

/// What is wrong with a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ill {
    /// Rows of it are replaced at its next reset; until then all of it can be read.
    Rows,
    /// After an error with this Xid it may be that some of it cannot.
    Grave(u64),
}

/// GPUs of which something is wrong, until the end of the process.
static ILL: Mutex<BTreeMap<Uuid, Ill>> = Mutex::new(BTreeMap::new());
/// Whether a GPU is left alone.
static ARE_ANY_GRAVE: AtomicBool = AtomicBool::new(false);

/// Something is wrong with a GPU: nothing new goes there. The graver word counts. Whether that is news.
pub fn note_ill(gpu: &Uuid, ill: Ill) -> bool {
    let mut all = ILL.lock();
    if all.get(gpu).is_some_and(|known| *known >= ill) {
        return false;
    }
    all.insert(*gpu, ill);
    drop(all);
    let Some(plan) = open::plan_made() else { return true };
    let what = match ill {
        Ill::Rows => "has rows of memory to be replaced at its next reset, so it is drained".to_owned(),
        Ill::Grave(xid) => {
            ARE_ANY_GRAVE.store(true, Ordering::Relaxed);
            format!(
                "had a grave error (Xid {xid}): nothing new goes there, and nothing is copied from it unless gpupool drain asks for that"
            )
        }
    };
    tracing::warn!(target: "gpupool::memory", about = "ill", "GPU-{} {what}", gpupool_machine::dashed(gpu));
    close_drained(plan);
    tell_pool();
    true
}

/// The GPUs that are drained because rows of theirs are to be replaced.
pub fn to_be_left() -> Vec<u32> {
    let ill = ILL.lock().clone();
    let plan = open::plan_made().filter(|_| !ill.is_empty());
    plan.into_iter().flat_map(gpus).filter(|(_, uuid)| ill.get(uuid) == Some(&Ill::Rows)).map(|(gpu, _)| gpu).collect()
}

/// Whether nothing is copied from any GPU.
#[inline]
pub fn is_any_left_alone() -> bool {
    ARE_ANY_GRAVE.load(Ordering::Relaxed)
}

/// Whether nothing is copied from this GPU: after a grave error, unless somebody asked for it.
#[inline]
pub fn is_left_alone(ordinal: u32) -> bool {
    ARE_ANY_GRAVE.load(Ordering::Relaxed) && is_among_grave(ordinal)
}

/// Whether this place is such a GPU.
pub fn is_place_left_alone(place: Place) -> bool {
    matches!(place, Place::Gpu(gpu) if is_left_alone(gpu))
}

#[cold]
fn is_among_grave(ordinal: u32) -> bool {
    let Some(gpu) = open::plan_made().and_then(|plan| plan.topology.gpus.get(ordinal as usize)) else { return false };
    matches!(ILL.lock().get(&gpu.uuid), Some(Ill::Grave(_))) && !is_said_drained(&gpu.uuid)
}

/// Other ranks of this process's job, as far as they were found.
static SIBLINGS: AtomicU32 = AtomicU32::new(0);

/// How many other ranks of this job were found.
pub fn siblings() -> u32 {
    SIBLINGS.load(Ordering::Relaxed)
}

/// So many other ranks of this job were found; whether that is news.
pub fn note_siblings(count: u32) -> bool {
    let before = SIBLINGS.swap(count, Ordering::Relaxed);
    if (before > 0) == (count > 0) {
        return before != count;
    }
    if count > 0 {
        tracing::info!(
            target: "gpupool::memory", about = "home_only", siblings = count,
            "{count} other processes of this job work on other GPUs, so this one keeps to its own GPU, to those that nobody works on and to the host; GPUPOOL_DEVICES with a \
             list of GPUs overrides that"
        );
    }
    heed();
    true
}

/// GPUs that nobody works on, and lent to this rank for as long as that is so; when that was found last by who needs memory. Who finds them, and looks whether it still is so, is
/// `recall/idle.rs`.
static IDLE: Mutex<BTreeMap<u32, Instant>> = Mutex::new(BTreeMap::new());

/// Has these GPUs lent for as long as nobody works on them, or no more; which of them were not so before.
pub fn lend_while_idle(gpus: &[u32], lends: bool) -> Vec<u32> {
    let mut idle = IDLE.lock();
    let changed: Vec<u32> = gpus.iter().copied().filter(|gpu| idle.contains_key(gpu) != lends).collect();
    for gpu in gpus {
        if lends {
            idle.insert(*gpu, Instant::now());
        } else {
            idle.remove(gpu);
        }
    }
    drop(idle);
    if !changed.is_empty() {
        heed();
    }
    changed
}

/// Those, and how long ago they were found to be so by who needs memory.
pub fn lent_while_idle() -> Vec<(u32, Duration)> {
    IDLE.lock().iter().map(|(gpu, since)| (*gpu, since.elapsed())).collect()
}

/// Whether a GPU is one of those.
pub fn is_lent_while_idle(ordinal: u32) -> bool {
    IDLE.lock().contains_key(&ordinal)
}

/// [`keeps_to_its_own`], as it was when the terms were worked out last.
static KEEPS_APART: AtomicBool = AtomicBool::new(false);

/// Whether this process is one of several ranks, and only its own GPU, those that nobody works on and the host serve it.
#[inline]
pub fn keeps_apart() -> bool {
    KEEPS_APART.load(Ordering::Relaxed)
}

/// A plan was made, and nothing was taken of its places yet.
pub fn begin(plan: &Plan) {
    let uuids: Vec<Uuid> = gpus(plan).map(|(_, uuid)| uuid).collect();
    note_drained(drains::among(&uuids, roots(), None).into_iter().collect());
    if is_one_of_ranks(true) {
        lend_as_said(plan, true);
    }
    close_drained(plan);
}

/// The settings have changed: what follows for the places.
pub fn heed() {
    let Some(plan) = open::plan_made() else { return };
    limit_as_said(plan);
    lend_as_said(plan, is_one_of_ranks(false));
    tell_pool();
}

fn limit_as_said(plan: &Plan) {
    let limits = live::limit();
    let given: BTreeMap<u32, Option<u64>> = GIVEN.lock().iter().map(|(gpu, given)| (*gpu, given.most)).collect();
    for (ordinal, reserve) in &plan.members {
        let total = plan.memory_of(*ordinal);
        let most = given.get(ordinal).copied().flatten().unwrap_or(u64::MAX);
        let budget = plan.budget_of(*ordinal).unwrap_or(u64::MAX);
        let limit = limits.of(*ordinal).unwrap_or(u64::MAX).min(total.saturating_sub(*reserve)).min(most).min(budget);
        plan.accounts.set_limit(Place::Gpu(*ordinal), limit);
    }
}

/// The limit that a setting of the user's gives a place, where that is what its account holds to at this moment: `GPUPOOL_HOST_LIMIT` of the host, `GPUPOOL_LIMIT` of a GPU.
pub fn said_limit(place: Place) -> Option<u64> {
    match place {
        Place::Host(_) => process::settings().host_limit,
        Place::Gpu(ordinal) => {
            let limit = open::plan_made()?.accounts.limit(place);
            live::limit().of(ordinal).filter(|said| *said == limit)
        }
        Place::Disk | Place::Pageable => None,
    }
}

/// Bytes that a place may still hold by its limit. Plain memory of the host counts as the host's, since it will be that.
pub fn left_at(place: Place) -> u64 {
    let Some(accounts) = open::plan_made().map(|plan| &plan.accounts) else { return 0 };
    let plain = if place.is_host() { accounts.taken(Place::Pageable) } else { 0 };
    accounts.limit(place).saturating_sub(accounts.taken(place) + plain)
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
        lend_as_said(self.0, is_one_of_ranks(false));
        close_drained(self.0);
        tell_pool();
    }
}

/// Of which GPUs less was free than is to stay free when the program was suspended last, and how much: as where others, or the driver for this program's small blocks, took some of that.
static TIGHT: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());
/// How many have memory come to GPUs or leave them.
static MOVING: AtomicU32 = AtomicU32::new(0);
/// How many of these bring memory back.
static BRINGING: AtomicU32 = AtomicU32::new(0);

/// Notes that, before any of the program's memory leaves.
pub fn note_free(driver: &Driver) {
    let Some(plan) = open::plan_made() else { return };
    let free = |ordinal: u32, uuid: Uuid| {
        super::free_on(driver, ordinal, &uuid).filter(|free| *free < plan.kept_free(ordinal))
    };
    let tight = gpus(plan).filter(|(ordinal, _)| plan.members.contains_key(ordinal));
    *TIGHT.lock() = tight.filter_map(|(ordinal, uuid)| Some((ordinal, free(ordinal, uuid)?))).collect();
}

/// All of what left then is back.
pub fn forget_free() {
    TIGHT.lock().clear();
}

/// Memory comes back, until this is dropped: what was there before may leave as little free as it did then. The program is stopped, so nobody else is served.
pub struct Bringing {
    _moves: Moving,
}

pub fn bring() -> Bringing {
    BRINGING.fetch_add(1, Ordering::Relaxed);
    Bringing { _moves: begin_to_move() }
}

impl Drop for Bringing {
    fn drop(&mut self) {
        BRINGING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Memory comes to GPUs or leaves them, until this is dropped, for whatever reason.
pub struct Moving(());

pub fn begin_to_move() -> Moving {
    if MOVING.fetch_add(1, Ordering::Relaxed) == 0 {
        tell_moving();
    }
    Moving(())
}

impl Drop for Moving {
    fn drop(&mut self) {
        if MOVING.fetch_sub(1, Ordering::Relaxed) == 1 {
            tell_moving();
        }
    }
}

/// What moves is in no row of the page before that is over, and others would not wait for whoever has nothing of what they lack: they would have what a third one has for itself,
/// although a loan is about to leave.
fn tell_moving() {
    static TELLING: Mutex<()> = Mutex::new(());
    let _one = TELLING.lock();
    if let Some(page) = bell::page() {
        page.tell_moves(MOVING.load(Ordering::Relaxed) > 0);
    }
}

/// How much of a GPU stays free, of which `usual` bytes do, as far as that concerns who asks at this moment.
pub fn kept_free_now(ordinal: u32, usual: u64) -> u64 {
    if BRINGING.load(Ordering::Relaxed) == 0 {
        return usual;
    }
    TIGHT.lock().get(&ordinal).map_or(usual, |free| usual.min(*free))
}

/// Looks which GPUs are drained, and closes or opens them: those that have become so, and those that are so no more. `page`: where this
/// process's page lies. One that this process only borrows from stays as it was for so long behind the end of its drain (`behind`).
pub fn look_for_drains(page: Option<&Path>, behind: Duration) -> (Vec<u32>, Vec<u32>) {
    let Some(plan) = open::plan_made() else { return (Vec::new(), Vec::new()) };
    let uuids: Vec<Uuid> = gpus(plan).map(|(_, uuid)| uuid).collect();
    let mut now: BTreeSet<Uuid> = drains::among(&uuids, roots(), page.and_then(Path::parent)).into_iter().collect();
    let before = DRAINED.lock().clone();
    let mut unsaid = UNSAID.lock();
    unsaid.retain(|uuid, _| before.contains(uuid) && !now.contains(uuid));
    let borrowed = gpus(plan).filter(|(ordinal, _)| !context::is_on(Device::of(*ordinal))).map(|(_, uuid)| uuid);
    for uuid in borrowed.filter(|uuid| before.contains(uuid) && !now.contains(uuid)).collect::<Vec<_>>() {
        if unsaid.entry(uuid).or_insert_with(Instant::now).elapsed() < behind {
            now.insert(uuid);
        }
    }
    drop(unsaid);
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

/// Whether the drain of any has ended for others already.
pub fn is_any_unsaid() -> bool {
    !UNSAID.lock().is_empty()
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

/// Whether anything may come back to this GPU: it is not drained, and the program works there or it lends.
pub fn may_hold(ordinal: u32) -> bool {
    let lends = || open::plan_made().is_some_and(|plan| plan.lends(ordinal));
    !is_drained(ordinal) && (context::is_on(Device::of(ordinal)) || lends())
}

/// Why nothing may come back to this GPU, in words; `None`: it may ([`may_hold`]).
pub fn why_closed(ordinal: u32) -> Option<String> {
    if may_hold(ordinal) {
        return None;
    }
    let is_given =
        matches!(GIVEN.lock().get(&ordinal), Some(Given { most: None, until, .. }) if *until > Instant::now());
    Some(match live::devices() {
        _ if is_drained(ordinal) => format!("GPU {ordinal} is drained"),
        _ if is_given => format!(
            "what this program borrowed from GPU {ordinal} was just given to another one, so nothing is borrowed there for a while; it comes back by itself"
        ),
        Devices::List(_) => {
            format!(
                "GPU {ordinal} lends to this program no more: GPUPOOL_DEVICES or gpupool set devices= leaves it out"
            )
        }
        Devices::Auto => format!(
            "GPU {ordinal} lends to this program, which is one of several ranks, only while nobody is seen to work there; it comes back by itself \
             once that is so"
        ),
    })
}

/// The drained GPUs of the pool.
pub fn drained() -> Vec<u32> {
    if !ARE_ANY.load(Ordering::Relaxed) {
        return Vec::new();
    }
    let all = open::plan_made().into_iter().flat_map(|plan| plan.members.keys().copied());
    all.filter(|ordinal| is_drained(*ordinal)).collect()
}

/// The most that is to be on this GPU, as far as the user, others or a drain say; `None`: as much as there is room for.
pub fn limit_of(ordinal: u32) -> Option<u64> {
    if is_drained(ordinal) {
        return Some(0);
    }
    let given = GIVEN.lock().get(&ordinal).and_then(|given| given.most);
    lasting_limit_of(ordinal).into_iter().chain(given).min()
}

/// The same as far as it lasts: what was given to others for a while and what a drain empties is not reckoned.
pub fn lasting_limit_of(ordinal: u32) -> Option<u64> {
    let budget = open::plan_made().and_then(|plan| plan.budget_of(ordinal));
    live::limit_of(ordinal).into_iter().chain(budget).min()
}

/// The largest handle of `cuMemCreate` that lies whole on another place, where its GPU has no room: half of what the GPU has, or may have.
/// A larger one is an arena that the program keeps everything in. Whole it would lie on the far side
/// of a link, where half of it or more could be at home; and programs that size one by what they are told of free
/// memory, which is the pool's (XLA), ask for more than any place has. What the GPU lacks only now, since others were given it or it is
/// drained, makes no arena of a small piece.
pub fn largest_whole_of(plan: &Plan, ordinal: u32) -> u64 {
    plan.memory_of(ordinal).min(lasting_limit_of(ordinal).unwrap_or(u64::MAX)) / 2
}

/// The largest handle of `cuMemCreate` of which anything lies on the host, where GPUs have no room for it: a larger one is refused, so that the program asks for less. Of a
/// drained GPU this is as much as the GPU itself would have, and as the driver would put there in spite of the drain.
pub fn largest_on_host_of(plan: &Plan, ordinal: u32) -> u64 {
    if is_drained(ordinal) { plan.memory_of(ordinal) } else { largest_whole_of(plan, ordinal) }
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
    *DRAINED.lock() = now;
}

/// Closes the places of GPUs that are known to be drained or ill, and opens the others.
pub fn close_drained(plan: &Plan) {
    ARE_ANY.store(!DRAINED.lock().is_empty() || !ILL.lock().is_empty(), Ordering::Relaxed);
    let (drained, ill) = (DRAINED.lock().clone(), ILL.lock().clone());
    for (ordinal, uuid) in gpus(plan) {
        plan.accounts.close(Place::Gpu(ordinal), drained.contains(&uuid) || ill.contains_key(&uuid));
    }
}

/// One thread at a time: of two the last to write is to be the last that read.
static SAYING: Mutex<()> = Mutex::new(());

fn lend_as_said(plan: &Plan, keeps_to_its_own: bool) {
    let _one = SAYING.lock();
    KEEPS_APART.store(keeps_to_its_own, Ordering::Relaxed);
    let devices = live::devices();
    for ordinal in plan.members.keys() {
        let is_named = match &devices {
            Devices::Auto => !keeps_to_its_own || is_lent_while_idle(*ordinal),
            Devices::List(list) => list.contains(ordinal),
        };
        let is_given = matches!(GIVEN.lock().get(ordinal), Some(Given { most: None, .. }));
        plan.accounts.lend(Place::Gpu(*ordinal), is_named && !is_given);
    }
}

fn tell_pool() {
    if let Some(opened) = open::opened() {
        opened.pool.heed_accounts();
    }
}

/// Why [`keeps_apart`] is so, in words.
pub fn why_apart() -> &'static str {
    if process::settings().local_ranks.is_some() {
        "its own GPU has no room, and as one of several ranks on this host by its launcher's word this process is lent no other GPU than those that nobody works on"
    } else {
        "its own GPU has no room, and this process was taken for one of several ranks of a job, since others that run the same program from the same place work on other GPUs, so that it is lent no other GPU than those that nobody works on"
    }
}

/// Whether only its own GPU, those that nobody works on and the host serve this process, as one of several ranks.
pub fn keeps_to_its_own() -> bool {
    is_one_of_ranks(false)
}

/// Ranks of one job must not eat each other's memory, unless the user says which GPUs may be used. `says`: it is said in the log.
fn is_one_of_ranks(says: bool) -> bool {
    if live::devices() != Devices::Auto {
        return false;
    }
    let Some((variable, ranks)) = process::settings().local_ranks else { return SIBLINGS.load(Ordering::Relaxed) > 0 };
    if says {
        tracing::info!(
            target: "gpupool::memory", about = "home_only", variable, ranks,
            "{variable}={ranks}: one rank of several on this host, so it keeps to its own GPU, to those that nobody works on and to the host; GPUPOOL_DEVICES \
             with a list of GPUs overrides that"
        );
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn what_is_kept_for_somebody_is_kept_until_the_last_of_them_has_ended() {
        const GPU: u32 = 77;
        let keep = |pid, seconds| keep_below(GPU, Some(0), Instant::now() + Duration::from_secs(seconds), pid, None);
        let mut children = [0, 1].map(|_| Command::new("cat").stdin(Stdio::piped()).spawn().unwrap());
        children.iter().for_each(|child| keep(Some(child.id()), 3600));
        for child in &mut children {
            assert_eq!(forget_given(&|_| None), Some(LIVE));
            assert!(is_kept_below(GPU));
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(forget_given(&|_| None), None);
        assert!(!is_kept_below(GPU));
        // Of somebody who is not known nobody hears that he has ended.
        keep(None, 3600);
        assert_eq!(forget_given(&|_| None), Some(LIVE));
        assert!(is_kept_below(GPU));
        keep(None, 0);
        assert_eq!(forget_given(&|_| None), None);
    }

    #[test]
    fn nothing_is_kept_for_who_has_come_to_matter_less() {
        let one = Whom::Process(1, 1);
        assert!(one.is_below(51, Some(50), &|_| None) && !one.is_below(50, Some(50), &|_| None));
        // What it says now counts.
        assert!(one.is_below(50, Some(80), &|_| Some(49)) && !one.is_below(50, Some(20), &|_| Some(90)));
        // What was given for another reason than that is.
        assert!(!one.is_below(100, None, &|_| Some(0)) && !Whom::Unknown.is_below(100, None, &|_| Some(0)));
    }
}
