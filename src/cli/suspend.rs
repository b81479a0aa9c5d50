//! `gpupool suspend`: has the memory of running programs leave their GPUs; see `src/shim/suspend`.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::TypedValueParser;
use gpupool_config::{format_size, parse_duration};
use gpupool_metrics::Snapshot;
use gpupool_wire::control::{MOST_PATH, Request, Target};

use crate::control::{self, Told};
use crate::failure::{Failure, complain};
use crate::pages::Listed;
use crate::{stdout, terminal, whole};

/// Have the memory of running programs leave their GPUs; they wait where they next use a GPU
#[derive(clap::Args)]
#[command(
    after_help = "Their addresses stay, and gpupool resume brings everything back. What is not the pool's stays on the GPU: contexts, \
modules, what libraries took from the driver themselves. Several programs are suspended together or not at all. \
A rank of a job is suspended together with the others that run here under gpupool (--job, or all of them named) or refused: they wait for it in their \
collectives until it is resumed, and NCCL's watchdog may end them. --alone suspends it nevertheless.

With --process the driver's own checkpoint (driver 570 and later) follows: contexts, modules and what libraries took leave too, and the GPU shows \
nothing of the program. It needs --to host or --to DIR, since the driver could not bring back what lies on other GPUs. Where memory stays that it could not \
bring back, or the driver refuses, the program is resumed as it was. gpupool resume brings all of it back, and nothing else does: a program that ends meanwhile waits for that.

A signal that a program handles while it waits (Ctrl-C) resumes it; so does its end.

Into a folder: each program writes a folder of its own there, which is gone when it is resumed; what is compressed, and how, is \
found out on the way. Nothing leaves before all of it is on the disk, and every part is compared with its hash on the way back.

Exit status: 0 where all that are named are suspended, also where some memory found no other place and stayed; 1 where one is not, and then none is, and where one was suspended before; 2 where \
no such process is there or it is stopped (SIGSTOP), --process has no --to host or --to DIR, or DIR is the folder of one image.

Examples:
  gpupool suspend 4711
  gpupool suspend --to /scratch/me 4711            to a disk
  gpupool suspend --to host --wait 60s 4711 4712   two ranks of a job
  gpupool suspend --job 4711                       all ranks of the job of 4711
  gpupool suspend --process --to host 4711         contexts and modules as well
  gpupool suspend --json 4711 | jq '.[].bytes'"
)]
pub struct Args {
    /// Their numbers, as gpupool ps lists them. May be left out with --job
    #[arg(required_unless_present = "job", value_parser = control::pid)]
    pid: Vec<u32>,
    /// All ranks on this host of the job that this process is one of; without a process, of the one job that is there
    #[arg(long)]
    job: bool,
    /// These alone, where others of the same job are not named: they may wait for them in a collective until these are resumed
    #[arg(long, conflicts_with = "job")]
    alone: bool,
    /// Where the memory goes: to GPUs that the program only borrows from (peers), to the host (host), to either, such GPUs first (any),
    /// or into a folder, which is made if it is not there (./any is one; a name without a slash has to be there)
    #[arg(long, default_value = "any", value_name = "any|peers|host|DIR", value_parser = clap::builder::OsStringValueParser::new().try_map(to))]
    to: Target,
    /// How long each has for its work on the GPUs to be over
    #[arg(long, value_parser = wait, default_value = "10s", value_name = "TIME")]
    wait: Duration,
    /// Have the driver take the rest of the process off the GPUs as well (cuCheckpointProcess*); with --to host or --to DIR
    #[arg(long)]
    process: bool,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

/// A relative path is one of this command's, and not of the program's.
fn to(text: OsString) -> Result<Target, String> {
    match text.to_str() {
        Some("any") => return Ok(Target::Anywhere),
        Some("peers") => return Ok(Target::Peers),
        Some("host") => return Ok(Target::Host),
        Some("") => return Err("write any, peers, host or a folder".to_owned()),
        _ => {}
    }
    let path = std::path::absolute(&text).map_err(|error| error.to_string())?;
    // A misspelt word would make a folder, wherever somebody happens to be, and the memory would be on a disk.
    if !text.as_encoded_bytes().contains(&b'/') && !path.is_dir() {
        let name = text.to_string_lossy();
        return Err(format!(
            "it is neither any, peers nor host, and no folder of this name is here; ./{name} has one made"
        ));
    }
    match path.as_os_str().len() {
        ..=MOST_PATH => Ok(Target::Folder(path)),
        bytes => Err(format!("its absolute path has {bytes} bytes, and {MOST_PATH} at most can be asked for")),
    }
}

/// Where the memory of a process is now, but for the GPUs that it works on; in words. Its page says it before it answers.
fn whereabouts(row: &Listed) -> String {
    let pid = row.told.process.identity.pid;
    let now = control::find(&[pid]).ok().and_then(|rows| rows.into_iter().find(|now| now.key() == row.key()));
    let Some(Listed { told: Snapshot { contexts, levels, .. }, .. }) = now else { return String::new() };
    let works = |gpu: u32| contexts.rows.iter().any(|context| context.device == gpu);
    let mut on_host = 0;
    let mut all = Vec::new();
    for place in &levels.places.rows {
        let bytes = place.held.saturating_add(place.own);
        if place.on_host {
            on_host += bytes;
        } else if place.is_gpu() && bytes > 0 && !works(place.number) {
            all.push(format!("{} on GPU {}", format_size(bytes), place.number));
        }
    }
    all.extend((on_host > 0).then(|| format!("{} on the host", format_size(on_host))));
    let has = if all.is_empty() { String::new() } else { format!(" (it has {} now)", all.join(", ")) };
    has + &what_stays(&levels.mode)
}

/// What is none of the pool's, and so counts neither as gone nor as what could not leave.
fn what_stays(mode: &str) -> String {
    if mode == "spill" { ", without what the driver had room for, which stays there (mode spill)," } else { "" }
        .to_owned()
}

fn wait(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

/// Suspends them, and says what left.
///
/// # Errors
/// One cannot be asked, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    // Known before anybody is stopped for nothing.
    if args.process && !matches!(args.to, Target::Host | Target::Folder(_)) {
        return Err(Failure::usage(
            "--process needs --to host or --to DIR beside it, since the driver cannot bring back what lies on other GPUs; nothing was done",
        ));
    }
    if let Target::Folder(folder) = &args.to
        && gpupool_store::is_image(folder)
    {
        return Err(Failure::usage(format!(
            "--to {}: it is one image, with which all in it goes; name the folder around it, {}, or another one; nothing was done",
            folder.display(),
            folder.parent().unwrap_or(folder).display()
        )));
    }
    let rows = control::named(&args.pid, args.job, "; or name the processes that belong together")?;
    if !args.alone
        && let Some((row, ranks)) = control::apart(&rows)
    {
        let how = control::together(row, &rows, &ranks);
        let mut refused = control::ask_all(std::slice::from_ref(row), &Request::Apart { ranks });
        for why in refused.iter_mut().filter_map(|told| told.error.as_mut()) {
            *why = format!(
                "{why}: gpupool suspend {how} suspends all of them together, --alone only what is named, for which the others may wait in a collective until it is resumed, or be ended by NCCL's \
                 watchdog (GP022)"
            );
        }
        control::print(&refused, args.json, "", "")?;
        return Ok(ExitCode::FAILURE);
    }
    let target = args.to.clone();
    let mut told = match rows.as_slice() {
        [_] => {
            let patience = u64::try_from(args.wait.as_millis()).unwrap_or(u64::MAX);
            let target = target.clone();
            control::ask_all(&rows, &Request::Suspend { target, patience, together: false })
        }
        _ => control::suspend_together(&rows, &target, args.wait),
    };
    let left = match &target {
        Target::Folder(folder) => format!("left the GPUs for {}", terminal::clean(&folder.to_string_lossy())),
        // The host takes what lay on GPUs that it only borrowed from as well.
        Target::Host => "left the GPUs".to_owned(),
        Target::Anywhere | Target::Peers => "left the GPUs that it works on".to_owned(),
    };
    if !matches!(target, Target::Folder(_)) {
        rows.iter().zip(&mut told).for_each(|(row, told)| told.whereabouts = whereabouts(row));
    }
    let done = control::print(&told, args.json, &left, "stayed there")?;
    let is_frozen = !args.process || done && freeze(&rows, args.json)?;
    if done && is_frozen {
        return Ok(ExitCode::SUCCESS);
    }
    // One that waits for another one's collective would wait for good.
    let others: Vec<_> =
        rows.iter().zip(&told).filter(|(_, told)| told.error.is_none()).map(|(row, _)| row.clone()).collect();
    if !others.is_empty() {
        if !done {
            complain("the others are resumed, since programs that are suspended together may wait for each other");
        }
        let failed = control::ask_all(&others, &Request::Resume).into_iter().filter(|told| told.error.is_some());
        for Told { pid, error, .. } in failed {
            complain(&format!("process {pid} could not be resumed: {}", error.unwrap_or_default()));
        }
    }
    Ok(ExitCode::FAILURE)
}

/// Has the driver take the rest of all of them away, or of none; whether it did.
fn freeze(rows: &[Listed], json: bool) -> Result<bool, Failure> {
    for (at, row) in rows.iter().enumerate() {
        let pid = row.told.process.identity.pid;
        if let Err(why) = whole::freeze(row) {
            complain(&format!("process {pid}: it is resumed, since the rest of it cannot leave: {why}"));
            for before in &rows[..at] {
                let pid = before.told.process.identity.pid;
                if let Err(why) = whole::thaw(pid) {
                    complain(&format!("process {pid}: {why}"));
                }
            }
            return Ok(false);
        }
        if !json {
            stdout::print(&format!("{}\n", whole::what_next(row)))?;
        }
    }
    Ok(true)
}
