//! Settings that are changed while the program runs (`gpupool set`): which can be, and what follows.
//!
//! All that is asked for at once is looked at before any of it is done, so that nobody has half of it. What was read once and decided much
//! since (the mode, who serves small requests, what contexts are made with) cannot be changed, and that is said.

use super::again::{Again, may_try, one_try};
use crate::backing::{open, terms};
use crate::recall;
use crate::serve::memory::idle;
use crate::suspend::vacate::{self, Rest, Vacated, Which};
use crate::suspend::{self, bring_home};
use crate::watch::context;
use crate::{bell, live, log, process, tiers};
use gpupool_config::{Devices, Limits, Mode, PREFIX, Settings, format_size, read_one};
use gpupool_events::SettingChange;
use gpupool_pool::Place;
use gpupool_wire::control::Change;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the program's GPUs have to come to rest, so that memory can leave one.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often it is looked whether anything is left of what was to leave.
const PERIOD: Duration = Duration::from_secs(1);

/// A setting that can be changed.
struct Row {
    name: &'static str,
    /// What it says now, as it is written.
    says: fn() -> String,
    /// Whether it could say this, of which the reader of settings knows nothing; why not, in words.
    check: fn(&Settings) -> Result<(), String>,
    /// Has it say this; what followed, in words.
    change: fn(&Settings, &dyn Fn() -> bool) -> String,
}

const ROWS: [Row; 6] = [
    Row { name: "GPUPOOL_DEVICES", says: || live::devices().to_string(), check: check_devices, change: change_devices },
    Row { name: "GPUPOOL_LIMIT", says: || live::limit().to_string(), check: check_limit, change: change_limit },
    Row {
        name: "GPUPOOL_GUARANTEE",
        says: || live::guarantee().to_string(),
        check: |settings| check_limits(settings, &settings.guarantee),
        change: |settings, _| {
            live::set_guarantee(settings.guarantee.clone());
            String::new()
        },
    },
    Row {
        name: "GPUPOOL_MOVE_SHARE",
        says: || format!("{}%", f64::from(live::move_share()) / 10.0),
        check: |_| Ok(()),
        change: |settings, _| {
            live::set_move_share(settings.move_share);
            tiers::heed_share();
            String::new()
        },
    },
    Row {
        name: "GPUPOOL_PRIORITY",
        says: || live::priority().to_string(),
        check: |_| Ok(()),
        change: |settings, _| {
            live::set_priority(settings.priority);
            recall::priority_has_changed();
            String::new()
        },
    },
    Row {
        name: "GPUPOOL_LOG",
        says: || live::log().unwrap_or_default(),
        check: |settings| log::check(settings.log.as_deref()),
        change: change_log,
    },
];

/// Changes these, each `NAME=VALUE`, as long as that `is_wanted`. Of none: what all that can be changed say now.
///
/// # Errors
/// One of them cannot be: why, in one line. None has changed then.
pub fn set(all: &[String], is_wanted: &dyn Fn() -> bool) -> Result<Vec<Change>, String> {
    if all.is_empty() {
        let now = now(&Settings::default());
        let says = |row: &Row| {
            let says = (row.says)();
            let note = now.why_without_effect(row.name).unwrap_or_default();
            Change { name: row.name.to_owned(), old: says.clone(), new: says, note }
        };
        return Ok(ROWS.iter().map(says).collect());
    }
    let mut asked: Vec<(&Row, Settings)> = Vec::new();
    for words in all {
        let (setting, settings) = read_one(words).map_err(|problem| problem.to_string())?;
        let row = ROWS.iter().find(|row| row.name == setting.name).ok_or_else(|| {
            let those: Vec<String> = ROWS.iter().map(|row| row.name[PREFIX.len()..].to_lowercase()).collect();
            format!(
                "{} is read when the program starts and cannot be changed while it runs; what can be: {}",
                setting.name,
                those.join(", ")
            )
        })?;
        if asked.iter().any(|(other, _)| other.name == row.name) {
            return Err(format!("{} is given twice; write it once", row.name));
        }
        (row.check)(&settings).map_err(|why| format!("{words}: {why}"))?;
        asked.push((row, settings));
    }
    let changes = asked.into_iter().map(|(row, settings)| {
        let old = (row.says)();
        let note = (row.change)(&settings, is_wanted);
        // Whoever changes what changes nothing hears so.
        let idle = now(&settings).without_effect().into_iter().find(|problem| problem.name == row.name);
        let note = [note, idle.map(|problem| problem.reason).unwrap_or_default()];
        let note: Vec<String> = note.into_iter().filter(|note| !note.is_empty()).collect();
        let note = note.join("; ");
        let new = (row.says)();
        log::emit(|| {
            let event = SettingChange { name: row.name.to_owned(), old: old.clone(), new: new.clone() };
            (event, format!("{} was {old:?} and is {new:?} now (gpupool set)", row.name))
        });
        Change { name: row.name.to_owned(), old, new, note }
    });
    let changes = changes.collect();
    bell::changed();
    Ok(changes)
}

/// What the settings say now, as far as it decides whether others have an effect; `said`: the one that was given.
fn now(said: &Settings) -> Settings {
    let began = process::settings();
    Settings {
        mode: began.mode,
        metrics: began.metrics,
        moving: began.moving,
        limit: live::limit(),
        guarantee: live::guarantee(),
        said: said.said.clone(),
        ..Settings::default()
    }
}

/// What the plan knows of GPUs: those that the settings name have to be there, and places of the pool.
fn check_gpus(settings: &Settings, named: &[u32]) -> Result<(), String> {
    let plan = open::plan_made().ok_or_else(|| match process::settings().mode {
        Mode::Pool | Mode::Spill | Mode::Managed => "the program has no pool yet: it has allocated no GPU memory".to_owned(),
        mode => format!("the program has no pool, as GPUPOOL_MODE={} leaves its memory to the driver; of what can be set the log alone has an effect there", mode.word()),
    })?;
    let totals: Vec<u64> = plan.topology.gpus.iter().map(|gpu| gpu.total).collect();
    if let Some(problem) = settings.check_gpus(&totals).first() {
        return Err(problem.reason.clone());
    }
    match named.iter().find(|gpu| !plan.members.contains_key(gpu)) {
        Some(gpu) => Err(format!(
            "GPU {gpu} is no place of this pool, because GPUPOOL_DEVICES left it out when the program started, or it has no virtual \
             memory management. What can be lent is settled then; a program that starts with all GPUs that it may ever need in GPUPOOL_DEVICES, or with \
             auto, is kept from some of them by gpupool set PID devices=..., and is lent them again by the same"
        )),
        None => Ok(()),
    }
}

fn check_limit(settings: &Settings) -> Result<(), String> {
    check_limits(settings, &settings.limit)
}

fn check_limits(settings: &Settings, limits: &Limits) -> Result<(), String> {
    let named: Vec<u32> = match limits {
        Limits::PerGpu(limits) => limits.keys().copied().collect(),
        Limits::Unset | Limits::Every(_) => Vec::new(),
    };
    check_gpus(settings, &named)
}

fn check_devices(settings: &Settings) -> Result<(), String> {
    match &settings.devices {
        Devices::Auto => check_gpus(settings, &[]),
        Devices::List(list) => check_gpus(settings, list).and_then(|()| check_own(list)),
    }
}

/// A list has the GPUs that the program works on as well: without one of them its pool would have no memory there, and all of it would lie far.
fn check_own(list: &[u32]) -> Result<(), String> {
    let contexts = context::all();
    let own: BTreeSet<u32> = contexts.iter().map(|context| context.device.ordinal()).collect();
    let is_lost =
        |gpu: &&u32| !list.contains(gpu) && open::plan_made().is_some_and(|plan| plan.members.contains_key(gpu));
    let Some(gpu) = own.iter().find(is_lost) else { return Ok(()) };
    let whole: BTreeSet<u32> = list.iter().chain(&own).copied().collect();
    let whole: Vec<String> = whole.iter().map(u32::to_string).collect();
    Err(format!(
        "the program works on GPU {gpu}, and the list of those that its memory may lie on leaves that out; devices={} has it as well",
        whole.join(",")
    ))
}

fn change_limit(settings: &Settings, is_wanted: &dyn Fn() -> bool) -> String {
    let plan = open::plan_made();
    let limits = || -> Vec<(u32, u64)> {
        let gpus =
            plan.into_iter().flat_map(|plan| plan.members.keys().map(|gpu| (*gpu, plan.limit(Place::Gpu(*gpu)))));
        gpus.collect()
    };
    let before = limits();
    live::set_limit(settings.limit.clone());
    terms::heed();
    let taken =
        |gpu: u32| plan.map_or((0, 0), |plan| (plan.accounts.taken(Place::Gpu(gpu)), plan.limit(Place::Gpu(gpu))));
    let left = leave(is_wanted, |gpu| {
        vacate::give_back(gpu, Which::Most(0));
        let (taken, limit) = taken(gpu);
        Some(taken.saturating_sub(limit)).filter(|bytes| *bytes > 0).map(Which::Most)
    });
    // What has no room any more on one may have some on another, and so comes last.
    let until = Instant::now() + PATIENCE;
    let mut said: Vec<String> = Some(left).filter(|said| !said.is_empty()).into_iter().collect();
    for ((gpu, before), (_, now)) in before.into_iter().zip(limits()) {
        if now > before {
            let Vacated { moved, rest, .. } = bring_home::bring_home(gpu, until, is_wanted, &mut |_, _| {});
            said.extend((moved > 0).then(|| format!("{} came to GPU {gpu}", format_size(moved))));
            said.extend(
                rest.iter().map(|rest| {
                    format!("{} stays elsewhere than on GPU {gpu}: {}", format_size(rest.bytes), rest.what)
                }),
            );
        } else if now < before && !terms::is_drained(gpu) {
            said.extend(stays(gpu, &vacate::beyond_the_pool(gpu, now)));
            if process::settings().mode == Mode::Spill {
                said.push(format!("what the driver had room for on GPU {gpu} stays as well: in mode spill it is not the pool's, and no limit counts it"));
            }
        }
    }
    said.join("; ")
}

/// What stays on a GPU, in words.
fn stays(gpu: u32, rest: &[Rest]) -> impl Iterator<Item = String> {
    rest.iter().map(move |rest| format!("{} stays on GPU {gpu}: {}", format_size(rest.bytes), rest.what))
}

fn change_devices(settings: &Settings, is_wanted: &dyn Fn() -> bool) -> String {
    live::set_devices(settings.devices.clone());
    terms::heed();
    leave(is_wanted, |gpu| open::plan_made().filter(|plan| !plan.lends(gpu)).map(|_| Which::Lent))
}

/// Has what `which` says leave each GPU of the pool; what did and what did not, in words.
fn leave(is_wanted: &dyn Fn() -> bool, which: impl Fn(u32) -> Option<Which>) -> String {
    let until = Instant::now() + PATIENCE;
    let mut said = Vec::new();
    IS_NARROWED.store(true, Ordering::Relaxed);
    for gpu in gpus_that_hold() {
        let Some(which) = which(gpu) else { continue };
        let there = against(gpu).map_or(0, |(_, bytes)| bytes);
        let done = vacate::vacate(gpu, which, until, is_wanted, &mut |_, _| {});
        AGAIN.lock().0.note(gpu, there, &done, Instant::now());
        let Vacated { moved, rest, .. } = done;
        if moved > 0 {
            said.push(format!("{} moved away from GPU {gpu}", format_size(moved)));
        }
        said.extend(stays(gpu, &rest));
    }
    said.join("; ")
}

/// Whether `gpupool set` had anything leave GPUs, so that it is looked whether that holds.
static IS_NARROWED: AtomicBool = AtomicBool::new(false);
/// What became of that, and when it was looked last.
static AGAIN: Mutex<(Again, Option<Instant>)> = Mutex::new((Again::new(), None));

/// What is on a GPU against what `gpupool set` has said, and how much: lent by one that lends no more, or beyond a limit.
fn against(gpu: u32) -> Option<(Which, u64)> {
    let is_left_out = matches!(live::devices(), Devices::List(list) if !list.contains(&gpu));
    let lent = if is_left_out { vacate::loose_on(gpu, true) } else { 0 };
    if lent > 0 {
        return Some((Which::Lent, lent));
    }
    let limit = terms::lasting_limit_of(gpu)?;
    let beyond = || {
        let taken = open::plan_made().map_or(0, |plan| plan.accounts.taken(Place::Gpu(gpu)));
        taken.saturating_sub(limit)
    };
    // Freed memory that is kept there serves nobody.
    if beyond() == 0 || vacate::give_back(gpu, Which::Most(0)) > 0 && beyond() == 0 {
        return None;
    }
    let bytes = beyond().min(vacate::loose_on(gpu, false));
    Some((Which::Most(bytes), bytes)).filter(|_| bytes > 0)
}

/// Has that leave which is on GPUs against what was set, if it is time to: what could not leave then, and what has come since, as from a thread that had chosen the GPU
/// before. How long nothing need be done.
pub fn look() -> Option<Duration> {
    let is_narrowed = IS_NARROWED.load(Ordering::Relaxed);
    if !is_narrowed || !may_try() {
        return Some(PERIOD).filter(|_| is_narrowed && suspend::since() == 0);
    }
    let mut all = AGAIN.lock();
    let (again, looked) = &mut *all;
    if looked.is_some_and(|looked| looked.elapsed() < PERIOD) {
        return Some(PERIOD);
    }
    *looked = Some(Instant::now());
    let mut next = None;
    for gpu in gpus_that_hold().into_iter().filter(|gpu| !terms::is_left_alone(*gpu)) {
        let there = against(gpu);
        let due = again.due(gpu, there.map_or(0, |(_, bytes)| bytes), Instant::now());
        let Some((which, bytes)) = there.filter(|_| due == Some(Duration::ZERO)) else {
            next = next.into_iter().chain(due).min();
            continue;
        };
        let done = vacate::vacate(gpu, which, Instant::now() + PATIENCE, &one_try(), &mut |_, _| {});
        again.note(gpu, bytes, &done, Instant::now());
        if done.moved > 0 {
            let moved = format_size(done.moved);
            tracing::info!(target: "gpupool::memory", about = "moves", device = gpu, "{moved} more left GPU {gpu}, as gpupool set had it");
        }
        next = next.into_iter().chain(again.due(gpu, bytes, Instant::now())).min();
    }
    next
}

/// The GPUs of the pool that are not drained: those are emptied in any case.
fn gpus_that_hold() -> Vec<u32> {
    let gpus = open::plan_made().into_iter().flat_map(|plan| plan.members.keys().copied());
    gpus.filter(|gpu| !terms::is_drained(*gpu)).collect()
}

fn change_log(settings: &Settings, _: &dyn Fn() -> bool) -> String {
    // The filter is behind a lock that a child of a fork must not find locked.
    let Some(_part) = idle::Part::begin() else {
        return "it was not changed, because the program starts another process at this moment or ends; try again"
            .to_owned();
    };
    match log::change(settings.log.as_deref()) {
        Ok(()) => live::set_log(settings.log.clone().unwrap_or_default()),
        Err(why) => return why,
    }
    String::new()
}
