//! Which processes a command asks: by their numbers, or all ranks of a job; and why one with such a number cannot be asked.

use std::collections::BTreeSet;
use std::ffi::OsStr;

use gpupool_config::{Mode, Settings, Toggle};
use gpupool_metrics::{Environment, Life, Maps, Member, beside, may_be_of, runs, started, stat};
use rustix::process::geteuid;

use super::asking::{FROZEN, stopped};
use crate::failure::{Failure, complain};
use crate::pages::{Listed, Pages};
use crate::words::UNSEEN;

/// A process's number, as an argument.
///
/// # Errors
/// It is none: in words that say what is.
pub fn pid(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| "this is no process number; gpupool ps lists the processes, 4711 is such a number".to_owned())
}

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
/// Who might be taken for one of the job and is not is named on stderr.
///
/// # Errors
/// As of [`find`], [`job_of`] and [`job_here`]; or nothing is named.
pub fn named(pids: &[u32], is_job: bool) -> Result<Vec<Listed>, Failure> {
    let job = match pids {
        [] if is_job => job_here()?,
        [] => return Err(Failure::usage("name a process, as gpupool ps lists them".to_owned())),
        [pid] if is_job => job_of(*pid)?,
        _ if is_job => return Err(Failure::usage("--job takes one process of the job".to_owned())),
        _ => return find(pids),
    };
    left_out(&job).iter().for_each(|line| complain(line));
    Ok(job)
}

/// Who was started as these ranks of a job were, runs the same, and is none of them; and why not.
fn left_out(job: &[Listed]) -> Vec<String> {
    let Some(one) = job.first().map(|row| &row.told) else { return Vec::new() };
    let pid = one.process.identity.pid;
    // The launcher has said that it started one alone.
    if one.process.world == Some(1) {
        return Vec::new();
    }
    let gpus = |row: &Listed| row.told.levels.gpus.rows.iter().map(|gpu| gpu.uuid).collect::<BTreeSet<_>>();
    let (own, own_runs) = (started(pid), runs(pid));
    let is_alike = |row: &&Listed| {
        let process = &row.told.process;
        row.owner == job[0].owner
            && row.state != Life::Elsewhere
            && process.name == one.process.name
            && job.iter().all(|rank| rank.key() != row.key())
            && own.zip(started(process.identity.pid)).is_some_and(|(own, other)| own.is_like(&other))
            && own_runs.as_ref().zip(runs(process.identity.pid)).is_none_or(|(own, other)| own.may_be_same_as(&other))
    };
    let line = |row: &Listed| {
        let process = &row.told.process;
        let why = match (one.process.rank, process.rank) {
            (Some(_), None) => "its launcher gave it no number (LOCAL_RANK and the like)".to_owned(),
            (None, Some(rank)) => format!("its launcher says that it is rank {rank} of one"),
            (Some(_), Some(_)) => "its launcher says that there are more or fewer ranks".to_owned(),
            (None, None) if row.told.contexts.rows.is_empty() => "it works on no GPU".to_owned(),
            (None, None) if gpus(row) != gpus(&job[0]) => "it sees other GPUs".to_owned(),
            (None, None) => "it is of another process group, or works on the same GPUs as each of it".to_owned(),
        };
        format!("process {} runs the same and is not of the job of process {pid}: {why}", process.identity.pid)
    };
    Pages::new().look().rows.iter().filter(is_alike).map(line).collect()
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
            "process {pid} has no number in a job (LOCAL_RANK and the like), and nothing that was started as it was runs the same on other GPUs; name all processes that belong together"
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
/// number, what looks like a rank beside it ([`Member`]), by its process's number. `None`: it has neither. Whichever of a job is asked about, they are the same.
fn ranks_beside(one: &Listed, rows: Vec<Listed>) -> Option<Vec<Listed>> {
    let process = &one.told.process;
    if process.rank.is_none() {
        let own = Member::of(&one.told)?;
        let (mut all, _): (Vec<Listed>, Vec<_>) =
            rows.into_iter().partition(|row| row.owner == one.owner && row.state != Life::Elsewhere);
        let others: BTreeSet<u32> =
            beside(&own, all.iter().map(|row| &row.told)).iter().map(|told| told.process.identity.pid).collect();
        all.retain(|row| row.key() == one.key() || others.contains(&row.told.process.identity.pid));
        return (!others.is_empty()).then_some(all);
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
            && started(other.identity.pid).is_some_and(|started| started.is_like(&own))
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
    let rows = Pages::new().look().rows;
    let own = geteuid().as_raw();
    let pid = |row: &Listed| row.told.process.identity.pid;
    let mut first: Option<(u32, Vec<u32>)> = None;
    for row in &rows {
        let is_any = row.owner == own && row.state != Life::Elsewhere && !row.told.process.identity.life().is_over();
        let is_known = || first.as_ref().is_some_and(|(_, job)| job.contains(&pid(row)));
        if !is_any || is_known() {
            continue;
        }
        let Some(job) = ranks_beside(row, rows.clone()) else { continue };
        if let Some((other, _)) = first {
            return Err(Failure::usage(format!(
                "ranks of several jobs are here, as processes {other} and {}; name one process of the job that is meant",
                pid(row)
            )));
        }
        first = Some((pid(row), job.iter().map(pid).collect()));
    }
    match first {
        Some((pid, _)) => job_of(pid),
        None => Err(Failure::usage(
            "no process of this user here that is seen to run under gpupool (one with GPUPOOL_METRICS=off is not) has a number in a job (LOCAL_RANK and the like), and no two look like \
             ranks of one; name all processes that belong together"
                .to_owned(),
        )),
    }
}
