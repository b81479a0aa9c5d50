//! Which processes a command asks: by their numbers, or all ranks of a job; and why one with such a number cannot be asked.

use std::ffi::OsStr;

use gpupool_config::{Mode, Settings, Toggle};
use gpupool_metrics::{Environment, Life, Maps, Member, may_be_of, started, stat};
use rustix::process::geteuid;

use super::asking::{FROZEN, stopped};
use crate::failure::Failure;
use crate::pages::{Listed, Pages};
use crate::words::UNSEEN;

/// The processes with these numbers, each once.
///
/// # Errors
/// One of them does not run under gpupool, or cannot be asked from here.
pub fn find(pids: &[u32]) -> Result<Vec<Listed>, Failure> {
    let look = Pages::new().look();
    let mut found: Vec<Listed> = Vec::new();
    for pid in pids {
        if found.iter().any(|known| known.told.process.identity.pid == *pid) {
            continue;
        }
        let mut rows =
            look.rows.iter().filter(|row| row.told.process.identity.pid == *pid && row.state != Life::Elsewhere);
        let Some(row) = rows.next() else {
            let unread = look.skipped.iter().find(|skipped| skipped.pid == Some(*pid));
            return Err(Failure::usage(match unread {
                Some(skipped) => format!("process {pid} cannot be asked, and nothing was done: {}", skipped.why),
                None => unknown(*pid),
            }));
        };
        if row.state == Life::Stopped {
            return Err(Failure::usage(format!("process {pid}: nothing was done: {}", stopped(*pid))));
        }
        if row.state == Life::Frozen {
            return Err(Failure::usage(format!("process {pid}: nothing was done: {FROZEN}")));
        }
        found.push(row.clone());
    }
    Ok(found)
}

/// Why no page is of a process with this number, as far as that can be told.
fn unknown(pid: u32) -> String {
    if stat(pid).is_none() {
        return format!("there is no process {pid} here; gpupool ps lists those that run under gpupool");
    }
    if !geteuid().is_root() && !may_be_of(pid, geteuid().as_raw()) {
        return format!("process {pid} is another user's: only that one and root may ask it");
    }
    let environment = Environment::of(pid);
    let owned = |(name, value): (&OsStr, &OsStr)| (name.to_owned(), value.to_owned());
    let variables = environment.as_ref().into_iter().flat_map(Environment::variables).map(owned);
    let settings = Settings::read(variables).ok();
    let is_loaded = Maps::of(pid).is_some_and(|maps| maps.has_library());
    match settings {
        Some(settings) if is_loaded && settings.metrics == Toggle::Off => {
            format!(
                "process {pid} runs with GPUPOOL_METRICS=off: it has no page, so no command can ask it; start it without that setting"
            )
        }
        Some(settings) if is_loaded && settings.mode == Mode::Off => {
            format!("process {pid} runs with GPUPOOL_MODE=off, so gpupool has no part in it")
        }
        _ if is_loaded => format!(
            "process {pid} runs under gpupool and has no page that this command finds: it has allocated no GPU memory yet, or its page lies elsewhere \
             (another XDG_RUNTIME_DIR, or none: gpupool doctor in its surroundings tells)"
        ),
        _ => format!(
            "process {pid} is not known to run under gpupool here; gpupool ps lists those that do, but for those that have \
             allocated no GPU memory yet, and those with {UNSEEN}"
        ),
    }
}

/// The processes that a command is to ask: those with these numbers or, with `--job`, all ranks of the job that the one which is named belongs to, or of the only one there is.
///
/// # Errors
/// As of [`find`], [`job_of`] and [`job_here`]; or nothing is named.
pub fn named(pids: &[u32], is_job: bool) -> Result<Vec<Listed>, Failure> {
    match pids {
        [] if is_job => job_here(),
        [] => Err(Failure::usage("name a process, as gpupool ps lists them".to_owned())),
        [pid] if is_job => job_of(*pid),
        _ if is_job => Err(Failure::usage("--job takes one process of the job".to_owned())),
        _ => find(pids),
    }
}

/// The ranks of the job that a process belongs to, by their numbers: what the same launcher started for the same user.
///
/// # Errors
/// No launcher gave it a number, or there are fewer of them here than the launcher started.
fn job_of(pid: u32) -> Result<Vec<Listed>, Failure> {
    let one = find(&[pid])?.remove(0);
    let process = &one.told.process;
    let Some(ranks) = ranks_beside(&one, Pages::new().look().rows) else {
        return Err(Failure::usage(format!(
            "process {pid} has no number in a job (LOCAL_RANK and the like), and nothing beside it runs the same on other GPUs; name all processes that belong together"
        )));
    };
    let numbers: Vec<u32> = ranks.iter().filter_map(|row| row.told.process.rank).collect();
    let is_whole = process.rank.is_none() || process.world.is_none_or(|world| numbers.iter().copied().eq(0..world));
    if !is_whole || numbers.windows(2).any(|pair| pair[0] == pair[1]) {
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        return Err(Failure::usage(format!(
            "the job of process {pid} has {} ranks, and those found beside it are {}: each has to run under gpupool and to have allocated GPU \
             memory; or name the processes that belong together",
            process.world.map_or("an unknown number of".to_owned(), |world| world.to_string()),
            numbers.join(", ")
        )));
    }
    let pids: Vec<u32> = ranks.iter().map(|row| row.told.process.identity.pid).collect();
    find(&pids)
}

/// Which of these are ranks of the same job as this one, which is one of them: by their numbers, what the same launcher started for the same user; where no launcher gave it a
/// number, what looks like a rank beside it ([`Member`]). `None`: it has neither.
fn ranks_beside(one: &Listed, rows: Vec<Listed>) -> Option<Vec<Listed>> {
    let process = &one.told.process;
    if process.rank.is_none() {
        let own = Member::of(&one.told)?;
        let is_beside =
            |row: &Listed| row.owner == one.owner && row.state != Life::Elsewhere && own.is_beside(&row.told);
        let beside: Vec<Listed> = rows.into_iter().filter(is_beside).collect();
        return (!beside.is_empty()).then(|| std::iter::once(one.clone()).chain(beside).collect());
    }
    // Whatever else its parent started with a number, the launcher started one for this host.
    if process.world == Some(1) {
        return Some(vec![one.clone()]);
    }
    let own = started(process.identity.pid)?;
    let is_rank = |row: &Listed| {
        let other = &row.told.process;
        row.owner == one.owner
            && row.state != Life::Elsewhere
            && other.rank.is_some()
            && other.world == process.world
            && started(other.identity.pid) == Some(own)
    };
    let mut ranks: Vec<Listed> = rows.into_iter().filter(is_rank).collect();
    ranks.sort_by_key(|row| row.told.process.rank);
    Some(ranks)
}

/// The first of these processes that would be suspended without others of its job, and those: ranks that run, and are not among `rows`. Those that are suspended already are
/// none of them. A launcher that says that it started one alone is believed.
pub fn apart(rows: &[Listed]) -> Option<(&Listed, Vec<u32>)> {
    let identity = |row: &Listed| row.told.process.identity;
    let is_of_several = |row: &&Listed| {
        let process = &row.told.process;
        process.rank.is_none() || [process.world, process.job_world].into_iter().flatten().any(|ranks| ranks > 1)
    };
    let is_missed = |row: &Listed| {
        !identity(row).life().is_over()
            && row.told.levels.suspended == 0
            && rows.iter().all(|named| identity(named) != identity(row))
    };
    let all = Pages::new().look().rows;
    rows.iter().filter(is_of_several).find_map(|row| {
        let missed: Vec<Listed> = ranks_beside(row, all.clone())?.into_iter().filter(is_missed).collect();
        let pids: Vec<u32> = missed.iter().map(|row| row.told.process.identity.pid).collect();
        (!pids.is_empty()).then_some((row, pids))
    })
}

/// The command that suspends all of these together with the ranks that [`apart`] found beside one of them: by the job's name where that is enough, which it is not where two of
/// them have one number, as from a launcher that was told wrongly.
pub fn how_together(one: &Listed, rows: &[Listed], ranks: &[u32]) -> String {
    let pid = one.told.process.identity.pid;
    if job_of(pid).is_ok() {
        return format!("gpupool suspend --job {pid}");
    }
    let named = rows.iter().map(|row| row.told.process.identity.pid);
    let pids: Vec<String> = named.chain(ranks.iter().copied()).map(|pid| pid.to_string()).collect();
    format!("gpupool suspend {}", pids.join(" "))
}

/// The ranks of the one job of which any are here, by their numbers.
///
/// # Errors
/// There are none, or of several jobs.
fn job_here() -> Result<Vec<Listed>, Failure> {
    let look = Pages::new().look();
    let own = geteuid().as_raw();
    let is_rank = |row: &&Listed| {
        let process = &row.told.process;
        row.owner == own && row.state != Life::Elsewhere && process.rank.is_some() && !process.identity.life().is_over()
    };
    let pids: Vec<u32> = look.rows.iter().filter(is_rank).map(|row| row.told.process.identity.pid).collect();
    let Some(first) = pids.first() else {
        return Err(Failure::usage(
            "no process of this user here has a number in a job (LOCAL_RANK and the like) and is seen to run under gpupool (one with GPUPOOL_METRICS=off is not); name \
             all processes that belong together"
                .to_owned(),
        ));
    };
    let ranks = job_of(*first)?;
    match pids.iter().find(|pid| ranks.iter().all(|rank| rank.told.process.identity.pid != **pid)) {
        None => Ok(ranks),
        Some(other) => Err(Failure::usage(format!(
            "ranks of several jobs are here, as processes {first} and {other}; name one process of the job that is meant"
        ))),
    }
}
