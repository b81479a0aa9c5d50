//! `gpupool checkpoint`: has a running program write images of its GPU memory; see `src/shim/checkpoint`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpupool_config::{format_size, parse_duration};
use gpupool_metrics::{Identity, may_run};
use gpupool_store::{JobWriter, Meeting, Who, rank_folder};
use gpupool_wire::control::{MOST_PATH, Reply, Request, Stored, Together};
use serde::{Deserialize, Serialize};

use crate::control;
use crate::failure::{Failure, complain};
use crate::hosts::{self, Node};
use crate::pages::{Listed, Pages};
use crate::{stdout, terminal, whole};

/// Write an image of a running program's GPU memory to a folder, while the program goes on
#[derive(clap::Args)]
#[command(
    // DIR has to be given, and the numbers in front of it need not.
    allow_missing_positional = true,
    after_help = "The program is stopped for as long as it takes to copy its memory to where there is room on its GPUs, others and the host; \
what finds no room there is written before it goes on. An image is of one moment, and there once it is whole: whatever fails, the older ones stay. \
gpupool store list shows them, gpupool run --restore brings named memory back.

Several processes have images of the same moment: none goes on before the memory of all is copied. Each writes to a folder of its own in DIR \
(rank-0, rank-1, …), and a file in DIR says which belong together: a job's image is there with all of its ranks or not at all. Ranks without a launcher's number are stored in the order of their \
process numbers, or as they are named; to have it come back each is started with that number (LOCAL_RANK, LOCAL_WORLD_SIZE).

Ranks on several hosts have one image where this command is started once on each of them (srun, mpirun, pdsh), with one DIR that all of them share: --node K/N says \
which one this is, --node auto takes that from the launcher. Without a PID the ranks of the one job of this user there are meant. They are stopped at one \
moment on all hosts, and DIR has an image of the job once all of it is whole.

With --every, this command asks again and again. Where it ends, there are no further images, and the program runs on; where the program \
ends, so does it, with 0 if its last image is whole.

What cannot be removed of older images, or was left of a removal, is told and stays, and the new image is whole nevertheless.

With --process one program is stopped, its image is written, and without going on in between it leaves the GPUs whole, as by gpupool suspend --process --to \
host: contexts, modules and what libraries took as well, so that the GPUs show nothing of it. Where criu is installed, it stores the process beside the image, \
in DIR/process-000001 and so on. gpupool resume has the program go on. Where it cannot leave, or criu fails, the image stays and the program is resumed (exit 1).

One rank of a job is refused as long as others of it run here, unless --alone says that it is meant. Where these have ended, it is one process: its image is the one of --alone, and comes back in that rank only.

A folder has the images of one program, and of one rank or of a job: another rank's, another program's (whatever else that was called with) and a rank's folder of a job's images are refused.

Exit status: 0 where the image is whole (with --every the last one, with --process also where the program has left the GPUs), 1 otherwise; 2 where nobody was asked: no such \
process is there, it is stopped, one rank of a job is named without --alone while others of it run here, of several that are named one is missing, or the folder has images of something else.

Examples:
  gpupool checkpoint 4711 /scratch/train
  gpupool checkpoint 4711 /scratch/train --every 10min --keep 3
  gpupool checkpoint --job 4711 /scratch/train     all ranks of the job of 4711
  gpupool checkpoint --process 4711 /scratch/train
  srun --overlap --jobid 17 -N 4 --ntasks-per-node 1 gpupool checkpoint --node auto /shared/train
  gpupool checkpoint --json 4711 /scratch/train | jq .generation"
)]
pub struct Args {
    /// Their numbers, as gpupool ps lists them; of several, in the order of their ranks where no launcher gave them any. May be left out with --job or --node
    #[arg(num_args = 0.., value_parser = control::pid)]
    pid: Vec<u32>,
    /// A folder of its own for these images; made if it is not there. The program writes it, as its own user
    #[arg(value_name = "DIR", required = true)]
    folder: PathBuf,
    /// Write another image so long after one was begun, until the program ends
    #[arg(long, value_parser = pause, value_name = "TIME")]
    every: Option<Duration>,
    /// Keep so many images, the newest, and remove older ones
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), value_name = "NUMBER")]
    keep: Option<u32>,
    /// How long its work on the GPUs has to be over
    #[arg(long, value_parser = time, default_value = "10s", value_name = "TIME")]
    wait: Duration,
    /// All ranks on this host of the job that this process is one of; without a process, of the one job that is there
    #[arg(long)]
    job: bool,
    /// This process alone, although others of the same job run: its image is none of the job, and comes back in that rank only
    #[arg(long, conflicts_with_all = ["job", "node"])]
    alone: bool,
    /// The ranks of a job are on N hosts, and this is host K of them, from 0; auto: as Slurm, mpirun or torchrun says
    #[arg(long, value_parser = Node::parse, value_name = "K/N")]
    node: Option<Node>,
    /// How long the commands of other hosts have to come
    #[arg(long, value_parser = time, default_value = "60s", value_name = "TIME", requires = "node")]
    meet: Duration,
    /// Have the program leave the GPUs whole once its image is there (cuCheckpointProcess*), and criu store the process where it is installed
    #[arg(long)]
    process: bool,
    /// Copy all memory, also what the GPUs see to be as in the image before (by a digest of 128 bits, piece by piece)
    #[arg(long)]
    full: bool,
    /// One JSON object for each image, a line each
    #[arg(long)]
    json: bool,
}

fn time(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

fn pause(text: &str) -> Result<Duration, String> {
    let pause = time(text)?;
    if pause.is_zero() { Err("write a time of more than nothing, as 10min".to_owned()) } else { Ok(pause) }
}

/// How often it is looked whether the program has ended.
const LOOK: Duration = Duration::from_secs(1);

/// What is told with the reason.
const NOT_REMOVED: &str = "older images could not be removed";

/// One image, or why there is none.
#[derive(Serialize)]
struct Told {
    pid: u32,
    folder: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    generation: u64,
    bytes: u64,
    stored_bytes: u64,
    /// What was written now; the rest is in files of older images.
    new_bytes: u64,
    /// Memory that was the same in the image before.
    unchanged_bytes: u64,
    /// Memory that was the same, and was written again as what the image before had of it was damaged.
    damaged_bytes: u64,
    /// Not in the image: of the program's own memory, or the driver's for want of room in the pool.
    left_out_bytes: u64,
    /// What was not even copied, as the GPUs saw that the image before has it.
    not_copied_bytes: u64,
    /// What was copied while the program was stopped, so that it need not wait for the disk: to GPUs, and to the host's memory.
    to_gpus_bytes: u64,
    to_host_bytes: u64,
    /// What the program waited for the disk for.
    in_stop_bytes: u64,
    stopped_microseconds: u64,
    microseconds: u64,
    /// Of memory that was written now, by what that takes on the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    compression_ratio: Option<f64>,
    /// Of memory, in all of the time.
    bytes_per_second: u64,
    /// Why older images, or what was left of such, are there still that were to be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_removed: Option<String>,
    /// With `--process`, of an image that is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<Rest>,
}

/// What became of the rest of a process.
#[derive(Default, Serialize)]
struct Rest {
    /// Why it is not all off the GPUs and, where there is CRIU, stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Whether it has nothing on the GPUs and waits to be resumed.
    is_off_gpus: bool,
    /// Bytes that have left for the host's memory.
    bytes: u64,
    /// What CRIU has stored, where it is installed.
    #[serde(skip_serializing_if = "Option::is_none")]
    dump: Option<PathBuf>,
}

/// Has images written, and says what is in them.
///
/// # Errors
/// The program cannot be asked, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let folder = std::path::absolute(&args.folder);
    let folder = folder.map_err(|error| Failure::usage(format!("{}: {error}", args.folder.display())))?;
    if folder.as_os_str().len() > MOST_PATH {
        return Err(Failure::usage(format!("{}: longer than the {MOST_PATH} bytes of a path", folder.display())));
    }
    are_both_named(args)?;
    if gpupool_store::is_image(&folder) {
        return Err(Failure::usage(format!(
            "{} is one image itself, and no folder of images: name the folder around it for a further one, or another folder",
            folder.display()
        )));
    }
    if args.process {
        can_leave_whole(args)?;
    }
    if let Some(around) = gpupool_store::job_around(&folder) {
        let around = around.display();
        return Err(Failure::usage(format!(
            "{} is a rank's folder in {around}, which has images of a job: what is written there takes the place of a part of them; gpupool checkpoint --job PID {around} is of all ranks, \
             and an image of one goes to another folder",
            folder.display()
        )));
    }
    let rows = control::named(&args.pid, args.job || (args.pid.is_empty() && args.node.is_some()), "")?;
    let is_job = args.job || args.node.is_some() || rows.len() > 1;
    // It would be the newest one, and by --keep the only one, and a part of the job would come back.
    if is_job && let Some(why) = control::lacking(&rows) {
        return Err(Failure::usage(format!("{why}; nothing was done")));
    }
    if !is_job
        && !args.alone
        && let Some((row, ranks)) = control::others(&rows)
    {
        let how = control::together(row, &rows, &ranks);
        let pid = row.told.process.identity.pid;
        return Err(Failure::usage(format!(
            "process {pid} is of a job of which {} as well, and an image of one of them comes back in none of the others: gpupool checkpoint {how} DIR is of all, --alone of this one; \
             nothing was done",
            control::that_run(&ranks)
        )));
    }
    // Whoever restores takes the newest of one kind, and would never see the other.
    let has = |is_any: Option<bool>| is_any.unwrap_or(false);
    if !is_job && has(gpupool_store::jobs(&folder).ok().map(|jobs| !jobs.is_empty())) {
        let folder = folder.display();
        return Err(Failure::usage(format!(
            "{folder} has images of a job: name all of its ranks or --job, or another folder"
        )));
    }
    if is_job && has(gpupool_store::list(&folder).ok().map(|listed| !listed.is_empty())) {
        return Err(Failure::usage(format!(
            "{} has images of one process: name another folder for a job",
            folder.display()
        )));
    }
    // Of several hosts each is stored under its number in the whole job.
    let overall = |row: &Listed| row.told.process.job_rank.filter(|_| args.node.is_some_and(|node| node.count > 1));
    let numbers = rows.iter().map(overall).collect::<Option<Vec<u32>>>().unwrap_or_else(|| numbers_of(&rows));
    for (row, number) in rows.iter().zip(&numbers) {
        let own = if is_job { rank_folder(&folder, *number) } else { folder.clone() };
        if let Some(why) = has_anothers(&own, row, is_job) {
            return Err(Failure::usage(format!("{why}; nothing was done")));
        }
    }
    if is_job && args.node.is_none() && rows.iter().any(|row| row.told.process.rank.is_none()) {
        complain(&without_numbers(&rows, &numbers));
    }
    let ended = |row: &&Listed| has_ended(&row.told.process.identity);
    let mut is_done = false;
    loop {
        let begun = Instant::now();
        is_done = match is_job {
            true => job(args, &folder, &rows, is_done)?,
            false if args.process => one_whole(args, &folder, &rows[0])?,
            false => one(args, &folder, &rows[0], is_done)?,
        };
        if let Some(every) = args.every {
            while begun.elapsed() < every && rows.iter().find(ended).is_none() {
                std::thread::sleep(LOOK.min(every.saturating_sub(begun.elapsed())));
            }
            let Some(row) = rows.iter().find(ended) else { continue };
            let last = if is_done { ", and the last one is whole" } else { "" };
            let pid = row.told.process.identity.pid;
            complain(&format!("process {pid} has ended; no further image is written{last}"));
        }
        return Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
}

/// Under which number each of them is stored: its launcher's, or, where one of them has none, in the order in which they are.
fn numbers_of(rows: &[Listed]) -> Vec<u32> {
    let known: Vec<u32> = rows.iter().filter_map(|row| row.told.process.rank).collect();
    let are_all_different = known.iter().collect::<BTreeSet<_>>().len() == rows.len();
    if are_all_different { known } else { (0..).take(rows.len()).collect() }
}

/// Nobody finds out by a restore alone that its ranks need what the ranks of the image did without.
fn without_numbers(rows: &[Listed], numbers: &[u32]) -> String {
    let named = rows.iter().zip(numbers).take(control::MOST_NAMED);
    let named: Vec<String> =
        named.map(|(row, number)| format!("rank {number} is process {}", row.told.process.identity.pid)).collect();
    let more = if rows.len() > named.len() { " and so on" } else { "" };
    format!(
        "warning: no launcher has given each of these ranks a number (LOCAL_RANK and the like): {}{more}. What is restored from an image of several ranks has to have one: start each again with \
         LOCAL_RANK set to its number here and LOCAL_WORLD_SIZE={}",
        named.join(", "),
        rows.len()
    )
}

/// Why a process is to have no image in this folder: what is there is another rank's or another program's, of which a restore would take the newest, whosever it is, and
/// `--keep` remove what is older. What a process was called with beside its program is no matter: one that is started again mostly has other words.
fn has_anothers(folder: &Path, row: &Listed, is_job: bool) -> Option<String> {
    let process = &row.told.process;
    let pid = process.identity.pid;
    let own = match (process.job_rank, process.job_world) {
        (Some(number), Some(ranks)) => Some((number, ranks)),
        _ => process.rank.zip(process.world),
    };
    let own = own.filter(|(_, ranks)| *ranks > 1);
    for listed in gpupool_store::list(folder).ok()? {
        let Ok(told) = listed.told else { continue };
        let (generation, there) = (listed.generation, folder.display());
        if !may_run(pid, &told.process.command) {
            let shorten = |command: &str| terminal::shorten(&terminal::clean(command), COMMAND);
            return Some(format!(
                "{there} has images of another program (image {generation} is of {}), and process {pid} runs {}: a restore takes the newest one, whosever it is, and --keep removes the others; \
                 name another folder for this program, or move what is there elsewhere",
                shorten(&told.process.command),
                shorten(&process.command)
            ));
        }
        if is_job {
            continue;
        }
        let manifest = gpupool_store::show(folder, Some(generation)).ok();
        let of = manifest.and_then(|manifest| manifest.meta.rank());
        if let (Some(of), Some((own, _))) = (of, own)
            && of.number != own
        {
            return Some(format!(
                "{there} has images of rank {of} (image {generation}), and process {pid} is rank {own}: a restore takes the newest one, and --keep removes the others; gpupool checkpoint --job \
                 {pid} DIR is of all ranks, and an image of this one alone goes to another folder"
            ));
        }
    }
    None
}

/// Columns of a command line in a message.
const COMMAND: usize = 60;

/// Fails where the last word, which is the folder, is more likely a process's number, or where no process is named.
fn are_both_named(args: &Args) -> Result<(), Failure> {
    let last = args.folder.display();
    let is_number = args.folder.to_str().is_some_and(|text| text.parse::<u32>().is_ok()) && !args.folder.exists();
    if is_number {
        return Err(Failure::usage(format!(
            "{last} stands last, where the folder of the images does, and no folder of this name is here: gpupool checkpoint {last} /scratch/train is of process {last}; \
             ./{last} has a folder made"
        )));
    }
    if args.pid.is_empty() && !args.job && args.node.is_none() {
        return Err(Failure::usage(format!(
            "no process is named, of which {last} is to have an image: its number, as gpupool ps lists it, stands in front of the folder: gpupool checkpoint 4711 {last}"
        )));
    }
    Ok(())
}

/// Whether what is asked beside `--process` goes together with it, and the driver can do its part.
fn can_leave_whole(args: &Args) -> Result<(), Failure> {
    let why = if args.every.is_some() {
        "--every goes on while the program does, and after --process it waits to be resumed: leave one of them out"
    } else if args.job || args.node.is_some() || args.pid.len() > 1 {
        "--process takes one process, and not the ranks of a job: leave it out for an image of all of them, or ask for one process after the other"
    } else {
        return whole::can_freeze().map_err(|why| {
            Failure::broken(format!(
                "{why}; nothing was done. Without --process there is an image, and the program goes on"
            ))
        });
    };
    Err(Failure::usage(why))
}

/// Whether a process that answers nothing any more ends: its connections end a moment before it does.
fn is_ending(identity: &Identity) -> bool {
    let until = Instant::now() + LOOK;
    while !has_ended(identity) {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Whether the process that was asked is no more, or is about to be: its page is gone then.
fn has_ended(identity: &Identity) -> bool {
    let is_there = || Pages::new().look().rows.iter().any(|row| row.told.process.identity == *identity);
    identity.life().is_over() || !is_there()
}

fn request(args: &Args, folder: PathBuf, keep: u32, together: Together) -> Request {
    let patience = u64::try_from(args.wait.as_millis()).unwrap_or(u64::MAX);
    Request::Checkpoint { folder, keep, patience, together, leaves: args.process, full: args.full }
}

/// An image of one process, which then leaves the GPUs whole; whether all of that is done. An image that is there stays in any case.
fn one_whole(args: &Args, folder: &Path, row: &Listed) -> Result<bool, Failure> {
    let pid = row.told.process.identity.pid;
    let request = request(args, folder.to_owned(), args.keep.unwrap_or(0), Together::Alone);
    let (image, left) = control::image_and_leave(row, &request);
    let mut told = told(pid, folder, image);
    let Some(left) = left else {
        if args.json {
            json(&told)?;
        }
        return print(args, &told);
    };
    // Whoever reads along sees it before the rest is tried, which takes time as well.
    print(args, &told)?;
    let rest = match &left.error {
        Some(why) => {
            Rest { error: Some(format!("it goes on, since its memory cannot leave: {why}")), ..Rest::default() }
        }
        None => {
            if !args.json {
                control::print(std::slice::from_ref(&left), false, "left the GPUs", "stayed there")?;
            }
            let rest = leave_whole(row, folder, told.generation);
            Rest { bytes: if rest.is_off_gpus { left.bytes } else { 0 }, ..rest }
        }
    };
    let (is_done, dump) = (rest.error.is_none(), rest.dump.clone());
    if let Some(why) = &rest.error {
        complain(&format!("process {pid}: generation {} is whole, and {why}", told.generation));
    }
    if whole::is_own(folder)
        && let Err(error) = whole::clean(folder)
    {
        complain(&format!("what criu stored with older images could not be removed: {error}"));
    }
    told.process = Some(rest);
    if args.json {
        json(&told)?;
    } else if is_done {
        let next = dump.map_or_else(|| whole::what_next(row), |dump| whole::how_back(row, &dump));
        stdout::print(&format!("{}\n", terminal::clean(&next)))?;
    }
    Ok(is_done)
}

/// Has the rest of a process that is suspended leave the GPUs, and CRIU store it where that is installed; where either fails it is resumed.
fn leave_whole(row: &Listed, folder: &Path, generation: u64) -> Rest {
    let pid = row.told.process.identity.pid;
    let dumped = match whole::freeze(row) {
        // In a folder of another user's whoever asks does that, elsewhere.
        Ok(()) => {
            let criu = whole::criu().filter(|_| whole::is_own(folder));
            criu.map(|criu| whole::dump(&criu, row, folder, generation)).transpose()
        }
        Err(why) => Err(format!("the rest of it cannot leave: {why}")),
    };
    match dumped {
        Ok(dump) => Rest { is_off_gpus: true, dump, ..Rest::default() },
        Err(why) => {
            let is_back = whole::thaw(pid).and_then(|()| {
                let told = control::ask_all(std::slice::from_ref(row), &Request::Resume);
                told.into_iter().find_map(|told| told.error).map_or(Ok(()), Err)
            });
            let error = match is_back {
                Ok(()) => format!("it is resumed, since {why}"),
                // Whoever has done so does not wait for this command.
                Err(_) if !is_suspended(pid) => format!("it goes on, since it was resumed meanwhile: {why}"),
                Err(other) => format!("it stays suspended, since {other}; it was to be resumed, since {why}"),
            };
            Rest { error: Some(error), ..Rest::default() }
        }
    }
}

/// What its page says. One that cannot be read says nothing, and then its own answer counts.
fn is_suspended(pid: u32) -> bool {
    let look = Pages::new().look();
    let row = look
        .rows
        .iter()
        .find(|row| row.told.process.identity.pid == pid && !row.told.process.identity.life().is_over());
    row.is_none_or(|row| row.told.levels.suspended > 0)
}

/// An image of one process; whether there is one. Where it ended in the middle of one, the one before is the last, and whole.
fn one(args: &Args, folder: &Path, row: &Listed, was_done: bool) -> Result<bool, Failure> {
    let request = request(args, folder.to_owned(), args.keep.unwrap_or(0), Together::Alone);
    let reply = control::ask_one(row, &request);
    if reply.is_err() && was_done && is_ending(&row.told.process.identity) {
        return Ok(true);
    }
    let told = told(row.told.process.identity.pid, folder, reply);
    if args.json {
        json(&told)?;
    }
    print(args, &told)
}

/// An image of several processes at one moment.
#[derive(Serialize)]
struct JobTold {
    folder: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    generation: u64,
    /// Of this host.
    ranks: Vec<Told>,
    /// Where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hosts: Vec<String>,
    /// As of one process, of the job's.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_removed: Option<String>,
}

/// The same of all of these; whether there is one. As of one process, what one of them ended in the middle of does not count.
fn job(args: &Args, folder: &Path, rows: &[Listed], was_done: bool) -> Result<bool, Failure> {
    let mut told = JobTold {
        folder: folder.to_owned(),
        error: None,
        generation: 0,
        ranks: Vec::new(),
        hosts: Vec::new(),
        not_removed: None,
    };
    // One host alone has nobody to meet.
    let node = args.node.filter(|node| node.count > 1);
    let image = match node {
        Some(node) => hosts_image(args, folder, rows, node, &mut told),
        None => job_image(args, folder, rows, &mut told.ranks),
    };
    if image.is_err() && was_done && rows.iter().any(|row| is_ending(&row.told.process.identity)) {
        return Ok(true);
    }
    let mut all = rows.len();
    match image {
        Ok(Whole { generation, ranks, not_removed }) => {
            (told.generation, all) = (generation, ranks);
            if let Some(error) = &not_removed {
                complain(&format!("{NOT_REMOVED}: {error}"));
            }
            told.not_removed = not_removed;
        }
        Err(why) => told.error = Some(why),
    }
    if args.json {
        json(&told)?;
    }
    // Of a process what became of it is told also where nothing came of all of them.
    for rank in &told.ranks {
        print(args, rank)?;
    }
    if let Some(error) = told.error {
        complain(&format!("no image of the job was written: {error}"));
        return Ok(false);
    }
    // Of several hosts one says what holds for all.
    if !args.json && node.is_none_or(|node| node.number == 0) {
        let folder = terminal::clean(&folder.display().to_string());
        let on = node.map_or(String::new(), |node| format!(" on {} hosts", node.count));
        stdout::print(&format!("generation {} of the job in {folder}: {all} ranks{on}\n", told.generation))?;
    }
    Ok(true)
}

/// An image of a job: its number, of how many ranks it is, and why older ones are still there.
#[derive(Serialize, Deserialize)]
struct Whole {
    generation: u64,
    ranks: usize,
    not_removed: Option<String>,
}

/// Fails where any of these is another user's.
fn are_own(rows: &[Listed]) -> Result<(), String> {
    let own = rustix::process::geteuid().as_raw();
    match rows.iter().find(|row| row.owner != own) {
        None => Ok(()),
        Some(other) => Err(format!(
            "process {} is of user {}, and this command of user {own}; whoever the ranks belong to has to ask",
            other.told.process.identity.pid, other.owner
        )),
    }
}

/// What became of each, and which of them have no image.
fn told_all(rows: &[Listed], folders: &[PathBuf], replies: Vec<Result<Reply, String>>) -> (Vec<Told>, Vec<String>) {
    let pids = rows.iter().map(|row| row.told.process.identity.pid);
    let ranks: Vec<Told> =
        pids.zip(replies).zip(folders).map(|((pid, reply), folder)| told(pid, folder, reply)).collect();
    let failed = ranks.iter().filter(|told| told.error.is_some()).map(|told| told.pid.to_string()).collect();
    (ranks, failed)
}

fn job_image(args: &Args, folder: &Path, rows: &[Listed], ranks: &mut Vec<Told>) -> Result<Whole, String> {
    are_own(rows)?;
    let numbers = numbers_of(rows);
    let folders: Vec<PathBuf> = numbers.iter().map(|number| rank_folder(folder, *number)).collect();
    let writer = JobWriter::create(folder).map_err(|error| error.to_string())?;
    // Which of them are to be removed is known once this one is whole.
    let requests: Vec<Request> =
        folders.iter().map(|folder| request(args, folder.clone(), 0, Together::Host)).collect();
    let replies = control::images_together(rows, &requests, args.wait, &mut control::Nobody)
        .unwrap_or_else(|none| none.each.into_iter().map(Err).collect());
    let (told, failed) = told_all(rows, &folders, replies);
    *ranks = told;
    if !failed.is_empty() {
        // What the others have written is of no use; what cannot be removed now, the next command removes.
        let _ = writer.give_up();
        return Err(format!("there is none of process {}; what was there before is as it was", failed.join(", ")));
    }
    let images: Vec<(u32, u64)> = numbers.into_iter().zip(ranks.iter().map(|told| told.generation)).collect();
    finish(args, writer, &images, Vec::new())
}

fn finish(args: &Args, writer: JobWriter, images: &[(u32, u64)], hosts: Vec<String>) -> Result<Whole, String> {
    let keep = args.keep.and_then(|keep| usize::try_from(keep).ok());
    let (generation, not_removed) = writer.finish(images, hosts, keep).map_err(|error| error.to_string())?;
    Ok(Whole { generation, ranks: images.len(), not_removed: not_removed.map(|error| error.to_string()) })
}

/// A rank, as its host says when it comes.
#[derive(Serialize, Deserialize)]
struct Rank {
    /// In the whole job.
    number: u32,
    /// How many there are, where its launcher says.
    world: Option<u32>,
    pid: u32,
}

/// What a host has at the end: its ranks with their generations, or why not.
type Images = Result<Vec<(u32, u64)>, String>;

/// The same of the ranks of this host, together with those of all others; node 0 writes down that they belong together.
fn hosts_image(args: &Args, folder: &Path, rows: &[Listed], node: Node, told: &mut JobTold) -> Result<Whole, String> {
    are_own(rows)?;
    let ranks = rows.iter().map(ranks_number).collect::<Result<Vec<Rank>, String>>()?;
    let numbers: Vec<u32> = ranks.iter().map(|rank| rank.number).collect();
    let folders: Vec<PathBuf> = numbers.iter().map(|number| rank_folder(folder, *number)).collect();
    let until = Instant::now() + args.meet;
    // A rank that ends takes its command along.
    let is_wanted = || rows.iter().all(|row| !row.told.process.identity.life().is_over());
    let own = (node.who(), ranks);
    let (mut writer, mut meeting) = if node.number == 0 {
        let writer = JobWriter::create(folder).map_err(|error| error.to_string())?;
        (Some(writer), Meeting::lead(folder, node.count, own, until, &is_wanted, are_all_there)?)
    } else {
        (None, Meeting::join(folder, node.count, own, until, &is_wanted)?)
    };
    told.hosts = meeting.nodes().map(|who| who.host.clone()).collect();
    let hosts = told.hosts.clone();
    let requests: Vec<Request> =
        folders.iter().map(|folder| request(args, folder.clone(), 0, Together::Hosts)).collect();
    let replies = match control::images_together(rows, &requests, args.wait, &mut meeting) {
        Ok(replies) => replies,
        Err(control::NoImage { why, each }) => {
            (told.ranks, _) = told_all(rows, &folders, each.into_iter().map(Err).collect());
            let why = meeting.leave(why);
            let _ = writer.map(JobWriter::give_up);
            return Err(why);
        }
    };
    let (all, failed) = told_all(rows, &folders, replies);
    let generations = all.iter().map(|told| told.generation);
    let images: Vec<(u32, u64)> = numbers.into_iter().zip(generations).collect();
    told.ranks = all;
    let word: Images = if failed.is_empty() {
        Ok(images.clone())
    } else {
        Err(format!("there is none of process {}", failed.join(", ")))
    };
    let decide = |words: Vec<(Who, Images)>| -> Result<Whole, String> {
        let (images, why): (Vec<_>, Vec<_>) =
            words.into_iter().map(|(who, images)| images.map_err(|why| (who, Some(why)))).partition(Result::is_ok);
        if let Some(why) = hosts::all_of(why.into_iter().filter_map(Result::err).collect()) {
            return Err(format!("{why}; what was there before is as it was"));
        }
        let mut images: Vec<(u32, u64)> = images.into_iter().flatten().flatten().collect();
        images.sort_unstable();
        match writer.take() {
            Some(writer) => finish(args, writer, &images, hosts),
            None => Err("node 0 alone writes down what belongs together".to_owned()),
        }
    };
    let agreed = meeting.agree("written", word, hosts::WRITTEN, decide);
    // What the others have written is of no use then; what cannot be removed now, the next command removes.
    let _ = writer.map(JobWriter::give_up);
    match agreed {
        Ok(whole) => whole,
        // Node 0 may have been killed behind its last deed, or could tell nobody of it.
        Err(why) => written_down(folder, &images).ok_or(why),
    }
}

fn ranks_number(row: &Listed) -> Result<Rank, String> {
    let process = &row.told.process;
    let pid = process.identity.pid;
    match process.job_rank {
        Some(number) => Ok(Rank { number, world: process.job_world, pid }),
        None => Err(format!(
            "process {pid} has no number in a whole job, by which a rank is known on several hosts: its launcher sets none beside the one of its \
             host (RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID and the like)"
        )),
    }
}

/// Whether these are all ranks of one job, each once.
fn are_all_there(all: &[(Who, Vec<Rank>)]) -> Result<(), String> {
    let mut known: BTreeMap<u32, String> = BTreeMap::new();
    let mut world = None;
    for (who, rank) in all.iter().flat_map(|(who, ranks)| ranks.iter().map(move |rank| (who, rank))) {
        let name = format!("process {} of {who}", rank.pid);
        if world.is_some() && rank.world.is_some() && rank.world != world {
            return Err(format!(
                "{name} is of a job of {} ranks, and others of one of {}",
                or_none(rank.world),
                or_none(world)
            ));
        }
        world = world.or(rank.world);
        if let Some(other) = known.insert(rank.number, name.clone()) {
            return Err(format!("{name} and {other} are both rank {} of their job", rank.number));
        }
    }
    let count = world.unwrap_or_else(|| u32::try_from(known.len()).unwrap_or(u32::MAX));
    let missing: Vec<String> = (0..count)
        .filter(|number| !known.contains_key(number))
        .take(control::MOST_NAMED)
        .map(|number| number.to_string())
        .collect();
    if let Some((number, name)) = known.last_key_value().filter(|(number, _)| **number >= count) {
        return Err(format!("{name} is rank {number} of a job of {count} ranks"));
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the job has {count} ranks, and rank {} is on none of these hosts: each has to run under gpupool and to have allocated GPU memory",
        missing.join(", ")
    ))
}

fn or_none(number: Option<u32>) -> String {
    number.map_or("an unknown number of".to_owned(), |number| number.to_string())
}

/// The image of a job that has these generations of ranks.
fn written_down(folder: &Path, images: &[(u32, u64)]) -> Option<Whole> {
    let jobs = gpupool_store::jobs(folder).ok()?.into_iter().filter_map(|listed| listed.told.ok());
    let has = |job: &gpupool_store::Job, (rank, generation): &(u32, u64)| {
        job.ranks.iter().any(|image| (image.rank, image.generation) == (*rank, *generation))
    };
    let job = jobs.into_iter().find(|job| images.iter().all(|image| has(job, image)))?;
    Some(Whole { generation: job.generation, ranks: job.ranks.len(), not_removed: None })
}

fn json(told: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(told).map_err(|error| Failure::broken(error.to_string()))?;
    stdout::print(&format!("{}\n", terminal::clean_json(&text)))
}

fn told(pid: u32, folder: &Path, reply: Result<Reply, String>) -> Told {
    let (error, stored) = match reply {
        Ok(Reply::Stored(stored)) => (None, stored),
        Ok(Reply::Refused { why }) | Err(why) => (Some(why), Stored::default()),
        Ok(_) => (Some("it answered nothing at the end".to_owned()), Stored::default()),
    };
    let Stored { not_copied, to_gpus, to_host, stopped_microseconds, microseconds, .. } = stored;
    let Stored { generation, bytes, stored, fresh, unchanged, damaged, left_out, in_stop, not_removed, .. } = stored;
    Told {
        pid,
        folder: folder.to_owned(),
        error,
        generation,
        bytes,
        stored_bytes: stored,
        new_bytes: fresh,
        unchanged_bytes: unchanged,
        damaged_bytes: damaged,
        left_out_bytes: left_out,
        not_copied_bytes: not_copied,
        to_gpus_bytes: to_gpus,
        to_host_bytes: to_host,
        in_stop_bytes: in_stop,
        stopped_microseconds,
        microseconds,
        compression_ratio: control::compression(bytes.saturating_sub(unchanged), fresh),
        bytes_per_second: control::rate(bytes, microseconds),
        not_removed: (!not_removed.is_empty()).then_some(not_removed),
        process: None,
    }
}

/// Whether there is an image.
fn print(args: &Args, told: &Told) -> Result<bool, Failure> {
    if let Some(error) = &told.error {
        complain(&format!("process {}: {error}", told.pid));
        return Ok(false);
    }
    if let Some(why) = &told.not_removed {
        complain(&format!("process {}: {NOT_REMOVED}: {why}", told.pid));
    }
    if args.json {
        return Ok(true);
    }
    let seconds = |microseconds: u64| microseconds as f64 * 1e-6;
    let mut line = format!(
        "process {}: generation {} in {}: {} of memory, {} on the disk, in {:.2} s; the program was stopped for {:.3} s",
        told.pid,
        told.generation,
        terminal::clean(&told.folder.display().to_string()),
        format_size(told.bytes),
        format_size(told.stored_bytes),
        seconds(told.microseconds),
        seconds(told.stopped_microseconds)
    );
    if told.unchanged_bytes > 0 {
        line += &format!(
            "; {} had not changed, and {} were written",
            format_size(told.unchanged_bytes),
            format_size(told.new_bytes)
        );
    }
    if told.not_copied_bytes > 0 {
        line += &format!(
            "; {} of it the GPUs saw to be the same, so that they were not copied",
            format_size(told.not_copied_bytes)
        );
    }
    if told.damaged_bytes > 0 {
        line += &format!(
            "; {} that had not changed were damaged in the image before and are written anew (gpupool store verify tells which of the older images \
             are damaged)",
            format_size(told.damaged_bytes)
        );
    }
    if told.to_gpus_bytes > 0 {
        line += &format!("; {} were copied to GPUs meanwhile", format_size(told.to_gpus_bytes));
    }
    if told.to_host_bytes > 0 {
        line += &format!(
            "; {} found no room on GPUs and were copied to the host meanwhile",
            format_size(told.to_host_bytes)
        );
    }
    // With --process all of it is, on purpose.
    if told.in_stop_bytes > 0 && !args.process {
        line +=
            &format!("; {} found no room elsewhere and were written during the stop", format_size(told.in_stop_bytes));
    }
    if told.left_out_bytes > 0 {
        line += &format!("; {} are not in it (its log says why)", format_size(told.left_out_bytes));
    }
    stdout::print(&format!("{line}\n"))?;
    Ok(true)
}
