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
/// Who might be taken for one of the job and is not is named on stderr. `or_else`: what else can be done where the job is not whole.
///
/// # Errors
/// As of [`find`] and [`job`]; or nothing is named, or the job is not whole.
pub fn named(pids: &[u32], is_job: bool, or_else: &str) -> Result<Vec<Listed>, Failure> {
    if !is_job {
        return match pids {
            [] => Err(Failure::usage("name a process, as gpupool ps lists them".to_owned())),
            _ => find(pids),
        };
    }
    let job = job(pids)?;
    if let Some(why) = job.not_whole() {
        return Err(Failure::usage(format!(
            "{why}: each has to run under gpupool and to have allocated GPU memory{or_else}"
        )));
    }
    let rows = find(&job.pids())?;
    left_out(&rows).iter().for_each(|line| complain(line));
    Ok(rows)
}

/// The ranks of a job that are found.
pub struct Job {
    /// By their numbers.
    pub rows: Vec<Listed>,
    /// The process by which it is known.
    pid: u32,
}

impl Job {
    /// The numbers of its processes.
    pub fn pids(&self) -> Vec<u32> {
        self.rows.iter().map(|row| row.told.process.identity.pid).collect()
    }

    fn numbers(&self) -> Vec<u32> {
        self.rows.iter().filter_map(|row| row.told.process.rank).collect()
    }

    /// How many ranks it has here, of which each has a number from its launcher.
    fn world(&self) -> Option<u32> {
        self.rows.iter().find_map(|row| row.told.process.rank.and(row.told.process.world))
    }

    fn has(&self) -> String {
        let world = self.world().map_or("an unknown number of".to_owned(), |world| world.to_string());
        let numbers: Vec<String> = self.numbers().iter().map(u32::to_string).collect();
        format!(
            "the job of process {} has {world} ranks, and those found beside it are {}",
            self.pid,
            numbers.join(", ")
        )
    }

    /// Why these are not all ranks that its launcher has started here, each once.
    fn not_whole(&self) -> Option<String> {
        let numbers = self.numbers();
        let is_whole = numbers.is_empty() || self.world().is_none_or(|world| numbers.iter().copied().eq(0..world));
        (!is_whole || numbers.windows(2).any(|pair| pair[0] == pair[1])).then(|| self.has())
    }

    /// Which of them are not there.
    pub fn missing(&self) -> Option<String> {
        let numbers = self.numbers();
        let missing: Vec<u32> =
            (0..self.world()?).filter(|number| !numbers.contains(number)).take(MOST_NAMED).collect();
        (!missing.is_empty()).then(|| format!("{}; {} there", self.has(), are_not(&missing)))
    }
}

/// Of many ranks that are missing so many are named.
pub const MOST_NAMED: usize = 8;

fn are_not(ranks: &[u32]) -> String {
    let numbers: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let (rank, is) = if ranks.len() == 1 { ("rank", "is") } else { ("ranks", "are") };
    format!("{rank} {} {is} not", numbers.join(", "))
}

/// The ranks that are found of the job that the process which is named belongs to, or of the only one there is.
///
/// # Errors
/// Several are named, or one that is of no job; or it is not known which job is meant.
pub fn job(pids: &[u32]) -> Result<Job, Failure> {
    match pids {
        [] => job_here(),
        [pid] => job_of(*pid),
        _ => Err(Failure::usage("--job takes one process of the job".to_owned())),
    }
}

/// Who was started as these ranks of a job were, runs the same, and is none of them; and why not.
pub fn left_out(job: &[Listed]) -> Vec<String> {
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
/// No launcher gave it a number.
fn job_of(pid: u32) -> Result<Job, Failure> {
    let rows = Pages::new().look().rows;
    let is_it = |row: &&Listed| row.told.process.identity.pid == pid && row.state != Life::Elsewhere;
    // One that is stopped has a job as well.
    let one = match rows.iter().find(is_it) {
        Some(one) => one.clone(),
        None => find(&[pid])?.remove(0),
    };
    match ranks_beside(&one, rows) {
        Some(rows) => Ok(Job { rows, pid }),
        None => Err(Failure::usage(format!(
            "process {pid} has no number in a job (LOCAL_RANK and the like), and nothing that was started as it was runs the same on other GPUs; name all processes that belong together"
        ))),
    }
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

/// The first of these processes that would be suspended without others of its job, and those. Those that are suspended already are none of them.
pub fn apart(rows: &[Listed]) -> Option<(&Listed, Vec<u32>)> {
    missed(rows, |row| row.told.levels.suspended == 0)
}

/// The first of these processes of whose job others are not among them, and those, suspended ones included.
pub fn others(rows: &[Listed]) -> Option<(&Listed, Vec<u32>)> {
    missed(rows, |_| true)
}

/// That processes with these numbers run, as the end of a clause.
pub fn that_run(pids: &[u32]) -> String {
    let (processes, run) = if pids.len() == 1 { ("process", "runs") } else { ("processes", "run") };
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    format!("{processes} {} {run}", pids.join(", "))
}

/// The first of these processes of whose job others are not among them, and those: ranks that run and `count`. A launcher that says that it started one alone is believed.
fn missed(rows: &[Listed], count: impl Fn(&Listed) -> bool) -> Option<(&Listed, Vec<u32>)> {
    let identity = |row: &Listed| row.told.process.identity;
    let is_of_several = |row: &&Listed| {
        let process = &row.told.process;
        process.rank.is_none() || [process.world, process.job_world].into_iter().flatten().any(|ranks| ranks > 1)
    };
    let is_missed = |row: &Listed| {
        !identity(row).life().is_over() && count(row) && rows.iter().all(|named| identity(named) != identity(row))
    };
    let all = Pages::new().look().rows;
    rows.iter().filter(is_of_several).find_map(|row| {
        let missed: Vec<Listed> = ranks_beside(row, all.clone())?.into_iter().filter(is_missed).collect();
        let pids: Vec<u32> = missed.iter().map(|row| row.told.process.identity.pid).collect();
        (!pids.is_empty()).then_some((row, pids))
    })
}

/// Why an image of these, which are several, would have a part of their job alone: others of it run, or have been started by a launcher that counts all ranks on this host. (That of
/// Slurm says of hosts with different counts the largest: then the job has more ranks than this host.)
pub fn lacking(rows: &[Listed]) -> Option<String> {
    const WHOLE: &str = "an image of a job has all of its ranks or is none";
    if let Some((one, ranks)) = others(rows) {
        let pid = one.told.process.identity.pid;
        return Some(format!(
            "process {pid} is of a job of which {} as well, and {WHOLE}: gpupool checkpoint {} DIR has all of them",
            that_run(&ranks),
            together(one, rows, &ranks)
        ));
    }
    let process = &rows.first()?.told.process;
    let world = process.world.filter(|world| process.job_world.is_none_or(|all| all == *world))?;
    let numbers: BTreeSet<u32> = rows.iter().filter_map(|row| row.told.process.rank).collect();
    let is_one_job = numbers.len() == rows.len() && rows.iter().all(|row| row.told.process.world == Some(world));
    let missing: Vec<u32> = (0..world).filter(|number| !numbers.contains(number)).take(MOST_NAMED).collect();
    (is_one_job && !missing.is_empty()).then(|| {
        format!(
            "the job of process {} has {world} ranks, and {} among these processes, and {WHOLE}: each has to run under gpupool and to have allocated GPU memory",
            process.identity.pid,
            are_not(&missing)
        )
    })
}

/// What names all of these and the ranks that were found to be missed beside one of them: the job where that is enough, which it is not where two of
/// them have one number, as from a launcher that was told wrongly.
pub fn together(one: &Listed, rows: &[Listed], ranks: &[u32]) -> String {
    let pid = one.told.process.identity.pid;
    if job_of(pid).is_ok_and(|job| job.not_whole().is_none()) {
        return format!("--job {pid}");
    }
    let named = rows.iter().map(|row| row.told.process.identity.pid);
    let pids: Vec<String> = named.chain(ranks.iter().copied()).map(|pid| pid.to_string()).collect();
    pids.join(" ")
}

/// The ranks of the one job of which any are here, by their numbers.
///
/// # Errors
/// There are none, or of several jobs.
fn job_here() -> Result<Job, Failure> {
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
