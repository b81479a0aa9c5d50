//! `gpupool resume`: what `gpupool suspend` has had leave comes back.

use std::process::ExitCode;

use gpupool_config::format_size;
use gpupool_metrics::Levels;
use gpupool_wire::control::Request;

use crate::control::{self, Told};
use crate::failure::{Failure, complain};
use crate::pages::{Listed, Pages};
use crate::{stdout, whole};

/// Have the memory of suspended programs come back to their GPUs, and let them go on
#[derive(clap::Args)]
#[command(
    after_help = "Where a GPU has no room any more, another GPU of the program's pool takes the memory, or it stays where it is, and the \
program goes on. What is on a disk has to come back: where it cannot be read, or there is no room for it on any GPU and on the host, \
the program stays suspended with all that it has, and can be resumed again once that is mended.

Exit status: 0 where all that are named go on, also with memory elsewhere for want of room; 1 where one stays suspended, was not suspended and had nothing to come back, cannot be asked or, of several \
or of a job, has ended; 2 where no such process is there or it is stopped (SIGSTOP).

Examples:
  gpupool resume 4711
  gpupool resume --job 4711      all ranks of the job of 4711
  gpupool resume --json 4711 4712"
)]
pub struct Args {
    /// Their numbers, as gpupool ps lists them. May be left out with --job
    #[arg(required_unless_present = "job", value_parser = control::pid)]
    pid: Vec<u32>,
    /// All ranks on this host of the job that this process is one of; without a process, of the one job that is there
    #[arg(long)]
    job: bool,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

/// Resumes them, and says what came back.
///
/// # Errors
/// One cannot be asked, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let (mut rows, are_all) = found(args)?;
    // Who names the job means those of its ranks that are suspended: one of them may have been resumed alone.
    if args.job && rows.iter().any(|row| row.told.levels.suspended > 0) {
        rows.retain(|row| row.told.levels.suspended > 0);
    }
    let mut lost = Vec::new();
    for row in &rows {
        let pid = row.told.process.identity.pid;
        if let Err(why) = whole::thaw(pid) {
            complain(&format!("process {pid}: {why}"));
            lost.push(pid);
        }
    }
    if !lost.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    let mut told = control::ask_all(&rows, &Request::Resume);
    let now = Pages::new().look();
    let mut others = Vec::new();
    // One that another command resumed while this one waited for its turn, or that resumed itself, is what was asked for.
    for (told, before) in told.iter_mut().zip(&rows).filter(|(told, _)| told.error.is_some()) {
        let is_it = |row: &&Listed| row.told.process.identity == before.told.process.identity;
        let was = before.told.levels.suspended;
        if was > 0 && now.rows.iter().find(is_it).is_some_and(|row| row.told.levels.suspended == 0) {
            told.error = None;
            others.push(told.pid);
        }
    }
    for (told, before) in told.iter_mut().zip(&rows) {
        let identity = before.told.process.identity;
        let levels = now.rows.iter().find(|row| row.told.process.identity == identity).map(|row| &row.told.levels);
        if before.told.levels.suspended == 0 {
            " to GPUs that it had left (it was not suspended)".clone_into(&mut told.whereabouts);
        }
        told.because = levels.map_or_else(|| NO_ROOM.to_owned(), because);
        // How a program is that was not resumed says nothing of what came back.
        let residence = levels.filter(|_| told.error.is_none()).map(|levels| &levels.residence);
        told.on_other_gpus_bytes = residence.map(|residence| residence.on_peers);
        told.on_host_bytes = residence.map(|residence| residence.on_host);
    }
    let (here, resumed): (Vec<_>, Vec<_>) =
        told.iter().cloned().partition(|told| args.json || !others.contains(&told.pid));
    let done = control::print(&here, args.json, "came back", "did not")?;
    for Told { pid, .. } in resumed {
        stdout::print(&format!("process {pid} is resumed already: by another command, or by itself\n"))?;
    }
    Ok(if done && are_all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Why something has not come back, of a program that says where it has what, and how much it has on other GPUs and how much on the host now: no room helps to come back to a
/// GPU that is drained.
fn because(levels: &Levels) -> String {
    let has = [(levels.residence.on_peers, "on other GPUs"), (levels.residence.on_host, "on the host")];
    let has = has.into_iter().filter(|(bytes, _)| *bytes > 0);
    let has: Vec<String> = has.map(|(bytes, place)| format!("{} {place}", format_size(bytes))).collect();
    let has = if has.is_empty() { String::new() } else { format!(" (it has {} now)", has.join(", ")) };
    let drained = levels.places.rows.iter().filter(|place| place.is_gpu() && place.drained);
    let gpus: Vec<String> = drained.filter_map(|place| levels.gpu(place.number)?.uuid_text()).collect();
    if gpus.is_empty() {
        return format!("{NO_ROOM}{has}");
    }
    let ends = gpus.iter().map(|gpu| format!("gpupool undrain {gpu}")).collect::<Vec<_>>().join(", ");
    format!(
        "{has}: {} is drained, and what was there comes back with {ends}; what is of other GPUs, once there is room",
        gpus.join(", ")
    )
}

/// Why something has not come back, where nothing else is known.
const NO_ROOM: &str = ", for want of room";

/// Those that are named and there, and whether they are all: that one of several has ended keeps no other one suspended.
fn found(args: &Args) -> Result<(Vec<Listed>, bool), Failure> {
    let mut lacks = None;
    let pids = if args.job {
        let job = control::job(&args.pid)?;
        control::left_out(&job.rows).iter().for_each(|line| complain(line));
        lacks = job.missing().map(|what| format!("{what}; those that are there are resumed"));
        job.pids()
    } else {
        args.pid.clone()
    };
    let mut missing: Vec<Failure> = Vec::new();
    let there: Vec<u32> = pids
        .into_iter()
        .filter(|pid| control::find(&[*pid]).map_err(|failure| missing.push(failure)).is_ok())
        .collect();
    if there.is_empty() && !missing.is_empty() {
        return Err(missing.swap_remove(0));
    }
    lacks.iter().for_each(|what| complain(what));
    missing.iter().for_each(|failure| complain(&failure.to_string()));
    Ok((control::find(&there)?, missing.is_empty() && lacks.is_none()))
}
