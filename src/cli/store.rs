//! `gpupool store`: what lies in a folder of stored GPU memory, and whether it is what was written. It changes nothing.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use gpupool_config::format_size;
use gpupool_store::{Block, Codec, Error, Job, Listed, ListedJob, Manifest, RankImage, Verified, VerifiedJob};

use crate::failure::Failure;
use crate::stdout;
use crate::terminal::{self, Page, Table, clean};
use crate::words;

/// Say what a folder of stored GPU memory has, and whether it is whole
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool store list /scratch/train
  gpupool store show /scratch/train
  gpupool store verify /scratch/train --generation 7")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    List(List),
    Show(Show),
    Verify(Verify),
}

/// List the generations of a folder, newest first
///
/// A generation that is not whole, or that a newer gpupool wrote, is listed with what is wrong. Of a job's folder the images of the
/// job are listed. Exit 1 where nothing is stored there.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool store list /scratch/train
  gpupool store list --json /scratch/train | jq '.[].stored'")]
struct List {
    /// The folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Say what a generation holds: whose memory, which blocks, how they are stored
///
/// Of a job's folder, whose memory each rank's image is; the blocks are in the rank's own folder. Exit 1 where nothing is stored there.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool store show /scratch/train
  gpupool store show --generation 7 --json /scratch/train | jq '.blocks[].label'")]
struct Show {
    /// The folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Its number [default: the newest]
    #[arg(long, value_name = "NUMBER")]
    generation: Option<u64>,
    /// Print the manifest, as JSON; of a job, which generation of each rank belongs to it
    #[arg(long)]
    json: bool,
}

/// Read all that is stored and compare every hash
///
/// Exit 1 where anything is not what was written (the file, the block and the offset are named), or no such generation is stored there.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool store verify /scratch/train
  gpupool store verify /scratch/train --generation 7 --threads 4")]
struct Verify {
    /// The folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Only this one [default: all]
    #[arg(long, value_name = "NUMBER")]
    generation: Option<u64>,
    /// How many threads read [default: one for each processor, 16 at most]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints what was asked for.
///
/// # Errors
/// The folder is not there, may not be trusted or has nothing; or, of `verify`, something is wrong.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    match &args.action {
        Action::List(List { folder, json }) => {
            let jobs = gpupool_store::jobs(folder).map_err(failed)?;
            if !jobs.is_empty() {
                print(*json, &jobs, || jobs_of(&jobs))?;
                return Ok(ExitCode::SUCCESS);
            }
            let listed = gpupool_store::list(folder).map_err(failed)?;
            if listed.is_empty() {
                if *json {
                    print(true, &listed, String::new)?;
                }
                return Err(nothing_in(folder));
            }
            print(*json, &listed, || list_of(&listed))?;
        }
        Action::Show(Show { folder, generation, json }) => {
            let jobs = gpupool_store::jobs(folder).map_err(failed)?;
            if !jobs.is_empty() {
                let job = job_in(folder, jobs, *generation)?;
                print(*json, &job, || job_of(folder, &job))?;
                return Ok(ExitCode::SUCCESS);
            }
            let manifest =
                gpupool_store::show(folder, *generation).map_err(|error| told(folder, error, *generation))?;
            print(*json, &manifest, || blocks_of(&manifest))?;
        }
        Action::Verify(Verify { folder, generation, threads, json }) => {
            let threads = threads.map_or(0, usize::from);
            let jobs = gpupool_store::jobs(folder).map_err(failed)?;
            if !jobs.is_empty() {
                let verified = gpupool_store::verify_jobs(folder, jobs, *generation, threads);
                let verified = verified.map_err(|error| match (error, *generation) {
                    (Error::Absent { .. }, Some(generation)) => absent(folder, "the job", generation),
                    (other, _) => failed(other),
                })?;
                print(*json, &verified, || job_verdicts_of(&verified))?;
                let is_whole = verified.iter().all(VerifiedJob::is_whole);
                return Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE });
            }
            let verified = gpupool_store::verify(folder, *generation, threads);
            let verified = verified.map_err(|error| told(folder, error, *generation))?;
            print(*json, &verified, || verdicts_of(&verified))?;
            if verified.iter().any(|one| !one.wrong.is_empty()) {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn failed(error: Error) -> Failure {
    Failure::broken(format!("store: {error}"))
}

/// The same, and where the folder itself has nothing, which ones in it have.
fn told(folder: &Path, error: Error, generation: Option<u64>) -> Failure {
    match (error, generation) {
        (Error::Absent { path }, _) if path == folder => nothing_in(folder),
        (Error::Absent { .. }, Some(generation)) => absent(folder, "it", generation),
        (other, _) => failed(other),
    }
}

/// One that was asked for is not there, which is no damage.
fn absent(folder: &Path, what: &str, generation: u64) -> Failure {
    let folder = folder.display();
    Failure::broken(format!(
        "store: {folder}: {what} has no generation {generation}; gpupool store list {folder} tells which there are"
    ))
}

/// How many folders are named where another one was meant.
const NAMED: usize = 4;

/// The folder has no generation: maybe one in it was meant. `gpupool suspend --to DIR` makes one for each process, and nobody is told its name.
fn nothing_in(folder: &Path) -> Failure {
    let names = gpupool_store::folders_in(folder).unwrap_or_default();
    let shown: Vec<String> = names.iter().take(NAMED).map(|name| folder.join(name).display().to_string()).collect();
    let instead = match names.len() {
        0 => String::new(),
        1 => format!("; name the folder in it that has some: {}", shown.join(", ")),
        many => {
            let more = many.saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("; name one of the folders in it that have some: {}{more}", shown.join(", "))
        }
    };
    let nothing = Error::Absent { path: folder.to_owned() };
    Failure::broken(format!("store: {nothing}{instead}"))
}

/// An image of a job. `None`: the newest.
fn job_in(folder: &Path, jobs: Vec<ListedJob>, generation: Option<u64>) -> Result<Job, Failure> {
    let wanted = jobs.into_iter().find(|job| generation.is_none_or(|wanted| wanted == job.generation));
    let Some(ListedJob { told, .. }) = wanted else {
        return Err(absent(folder, "the job", generation.unwrap_or(0)));
    };
    told.map_err(failed)
}

fn job_of(folder: &Path, job: &Job) -> String {
    let mut page = Page::new(terminal::colours());
    let Job { generation, written, ranks, hosts } = job;
    let of = if hosts.is_empty() { String::new() } else { format!(", of the hosts {}", hosts.join(", ")) };
    page.heading(&format!("generation {generation} of a job, written {}{}", ago(*written), clean(&of)));
    let bytes = ranks.iter().map(|image| image.bytes).sum();
    let count = words::count(ranks.len() as u64, "rank", "ranks");
    page.entry("  memory   ", &format!("{} of {count}", format_size(bytes)));
    page.heading("Ranks");
    let headings = &["rank", "generation", "memory", "stored", "blocks", "pid", "host", "command"];
    let mut table = Table::new(headings, b"rrrrrrll", 4);
    for RankImage { rank, generation, bytes, .. } in ranks {
        let mut cells = vec![rank.to_string(), generation.to_string(), format_size(*bytes)];
        match gpupool_store::show(&gpupool_store::rank_folder(folder, *rank), Some(*generation)) {
            Ok(Manifest { meta, stored, blocks, .. }) => cells.extend([
                format_size(stored),
                blocks.len().to_string(),
                meta.process.pid.to_string(),
                meta.host,
                meta.process.command,
            ]),
            // It was there a moment ago, when the job's image was looked at.
            Err(_) => cells.extend(["?"; 5].map(str::to_owned)),
        }
        table.row(cells, Vec::new());
    }
    page.table(&table);
    if let Some(RankImage { rank, generation, .. }) = ranks.first() {
        let first = gpupool_store::rank_folder(folder, *rank);
        let command = format!("gpupool store show {} --generation {generation}", first.display());
        page.entry("  ", &format!("{command} has the blocks of rank {rank}, and so on"));
    }
    page.into_text()
}

fn print<T: serde::Serialize>(json: bool, told: &T, text: impl FnOnce() -> String) -> Result<(), Failure> {
    if !json {
        return stdout::print(&text());
    }
    let text = serde_json::to_string_pretty(told).map_err(|error| Failure::broken(error.to_string()))?;
    stdout::print(&format!("{}\n", terminal::clean_json(&text)))
}

/// How long ago something was, in the largest unit.
fn ago(written: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (number, unit) = match now.saturating_sub(written) {
        seconds @ 0..120 => (seconds, "s"),
        seconds @ 120..7_200 => (seconds / 60, "min"),
        seconds @ 7_200..172_800 => (seconds / 3_600, "h"),
        seconds => (seconds / 86_400, "days"),
    };
    format!("{number} {unit} ago")
}

fn jobs_of(jobs: &[ListedJob]) -> String {
    let mut page = Page::new(terminal::colours());
    page.line("images of a job; those of a rank are in its folder, rank-0 and so on");
    let mut table = Table::new(&["generation", "ranks", "memory", "written", "of each rank"], b"rrrll", 4);
    for ListedJob { generation, told } in jobs {
        let mut cells = vec![generation.to_string()];
        match told {
            Ok(job) => cells.extend([
                match job.hosts.len() {
                    0 => job.ranks.len().to_string(),
                    hosts => format!("{} of {hosts} hosts", job.ranks.len()),
                },
                format_size(job.ranks.iter().map(|image| image.bytes).sum()),
                ago(job.written),
                job.ranks.iter().map(|image| image.generation.to_string()).collect::<Vec<_>>().join(", "),
            ]),
            Err(_) => cells.extend(["?"; 4].map(str::to_owned)),
        }
        table.row(cells, Vec::new());
    }
    page.table(&table);
    for ListedJob { generation, told } in jobs {
        if let Err(error) = told {
            page.entry(&format!("  {generation}: "), &error.to_string());
        }
    }
    page.into_text()
}

fn job_verdicts_of(verified: &[VerifiedJob]) -> String {
    let mut page = Page::new(terminal::colours());
    for job in verified {
        let VerifiedJob { generation, error, ranks } = job;
        let verdict = if job.is_whole() { "whole" } else { "not whole" };
        page.line(&format!("generation {generation} of the job: {verdict}"));
        if let Some(error) = error {
            page.entry("  ", &error.to_string());
        }
        for (rank, Verified { generation, bytes, wrong }) in ranks {
            if wrong.is_empty() {
                page.line(&format!("  rank {rank}, generation {generation}: whole, {} of memory", format_size(*bytes)));
            }
            wrong.iter().for_each(|error| page.entry(&format!("  rank {rank}: "), &error.to_string()));
        }
    }
    page.into_text()
}

fn list_of(listed: &[Listed]) -> String {
    let mut page = Page::new(terminal::colours());
    let headings = &["generation", "memory", "stored", "blocks", "pid", "host", "written", "command"];
    let mut table = Table::new(headings, b"rrrrrlll", 4);
    for Listed { generation, told } in listed {
        let mut cells = vec![generation.to_string()];
        match told {
            Ok(told) => cells.extend([
                format_size(told.bytes),
                format_size(told.stored),
                told.blocks.to_string(),
                told.process.pid.to_string(),
                told.host.clone(),
                ago(told.written),
                told.process.command.clone(),
            ]),
            Err(_) => cells.extend(["?"; 7].map(str::to_owned)),
        }
        table.row(cells, Vec::new());
    }
    page.table(&table);
    // Not in the table, which shortens what it has.
    for Listed { generation, told } in listed {
        if let Err(error) = told {
            page.entry(&format!("  {generation}: "), &error.to_string());
        }
    }
    page.into_text()
}

fn blocks_of(manifest: &Manifest) -> String {
    let mut page = Page::new(terminal::colours());
    let Manifest { generation, written, meta, bytes, stored, blocks, .. } = manifest;
    let process = &meta.process;
    page.heading(&format!("generation {generation}, written {} by gpupool {}", ago(*written), clean(&meta.gpupool)));
    page.entry("  process  ", &format!("{} on {}: {}", process.pid, meta.host, process.command));
    page.entry("  GPUs     ", &meta.gpus.join(", "));
    page.entry(
        "  memory   ",
        &format!("{} in {} blocks, {} on the disk", format_size(*bytes), blocks.len(), format_size(*stored)),
    );
    if manifest.unchanged > 0 {
        let (unchanged, fresh) = (format_size(manifest.unchanged), format_size(manifest.fresh()));
        page.entry(
            "           ",
            &format!("{unchanged} as in the generation before; {fresh} were written for this one"),
        );
    }
    for (name, text) in &meta.notes {
        page.entry(&format!("  {}  ", clean(name)), text);
    }
    page.heading("Blocks");
    let mut table = Table::new(&["id", "address", "memory", "stored", "home", "how", "name"], b"rrrrlll", 4);
    for Block { about, parts } in blocks {
        let home = about.home.map_or("host".to_owned(), |gpu| format!("GPU {gpu}"));
        let how = Codec::ALL.into_iter().filter(|codec| parts.iter().any(|part| part.codec == *codec));
        let how: Vec<&str> = how.map(Codec::word).collect();
        let stored = parts.iter().map(|part| part.stored).sum();
        let names: Vec<&str> = about.names.iter().map(|named| named.name.as_str()).collect();
        let names = names.join(", ");
        let told =
            [&names, &about.label, &about.site].map(|text| text.trim()).into_iter().filter(|text| !text.is_empty());
        let mut told = told.map(str::to_owned);
        let name = told.next().unwrap_or_default();
        let cells = vec![
            about.id.to_string(),
            format!("{:#x}", about.address),
            format_size(about.bytes),
            format_size(stored),
            home,
            how.join(", "),
            name,
        ];
        let below = told.collect();
        table.row(cells, below);
    }
    page.table(&table);
    page.into_text()
}

fn verdicts_of(verified: &[Verified]) -> String {
    let mut page = Page::new(terminal::colours());
    for Verified { generation, bytes, wrong } in verified {
        if wrong.is_empty() {
            page.line(&format!("generation {generation}: whole, {} of memory", format_size(*bytes)));
            continue;
        }
        page.line(&format!("generation {generation}: {} wrong", wrong.len()));
        wrong.iter().for_each(|error| page.entry("  ", &error.to_string()));
    }
    page.into_text()
}
