//! `gpupool plan`: where the memory of a program would lie on other machines, by its log, and about what that would cost.

mod estimate;
mod machine;
mod text;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use gpupool_config::{parse_size, without_unit};
use gpupool_tiers::FarLink;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::report::{Logs, Process};
use crate::{stdout, terminal};
use estimate::{Program, Row};
use machine::Machine;

/// Say where the memory of a program would lie on other machines, and about how slow it would be
///
/// Rests on one log, or those of processes that ran at the same time: on what was in use over time and, where memory lay on another GPU
/// or the host, on what that cost. What it cannot know it says.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool plan train.jsonl
  gpupool plan train.jsonl --gpus 2x80GiB --gpus 8x40GiB
  gpupool plan rank*.jsonl --gpus 4x80GiB --limit 60GiB --host 0")]
pub struct Args {
    /// Logs, one a process
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// A machine's GPUs; may be given several times
    #[arg(long, value_name = "COUNTxSIZE", value_parser = gpus)]
    gpus: Vec<Gpus>,
    /// The most that the pool may take of each GPU
    #[arg(long, value_name = "SIZE", value_parser = size)]
    limit: Option<u64>,
    /// The most that the pool may take of the host [default: what it could take when the log was written]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    host: Option<u64>,
    /// How the GPUs reach each other
    #[arg(long, value_name = "LINK", default_value = "nvlink")]
    link: Link,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Link {
    Nvlink,
    Pcie,
    None,
}

/// A machine's GPUs, as they were written and by their sizes.
#[derive(Clone)]
struct Gpus {
    written: String,
    sizes: Vec<u64>,
}

fn gpus(text: &str) -> Result<Gpus, String> {
    let written = text.replace('×', "x");
    Ok(Gpus { sizes: simmachine::settings::gpus(&written)?, written })
}

fn size(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    // Of these the same is meant as of a place's limit.
    let few = without_unit(std::iter::once(("GPUPOOL_LIMIT".into(), text.into())));
    few.into_iter().next().map_or(Ok(bytes), |problem| Err(problem.reason))
}

/// Prints the plan.
///
/// # Errors
/// Exit 2 if a path cannot be read or is no log of gpupool, or none of them tells of memory.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let logs = Logs::read(&args.logs);
    let unreadable: Vec<String> = logs.logs.iter().filter_map(crate::report::Log::why_unreadable).collect();
    if !unreadable.is_empty() {
        return Err(Failure::usage(unreadable.join("\n")));
    }
    let hosts: BTreeSet<&str> = logs.processes.iter().filter_map(Process::host).collect();
    if hosts.len() > 1 {
        let why = format!(
            "the logs are of {} hosts, whose memory is not shared: plan for those of one host at a time",
            hosts.len()
        );
        return Err(Failure::usage(why));
    }
    let program = Program::of(&logs.processes);
    if program.peak == 0 {
        let why = "no process of these logs used memory of the pool, or the log does not tell (pool.level, from level info on)";
        return Err(Failure::usage(why.to_owned()));
    }
    let host = args.host.unwrap_or_else(|| of_host(&logs.processes));
    let peer = match args.link {
        Link::Nvlink => Some(FarLink::PEER),
        Link::Pcie => Some(FarLink::HOST),
        Link::None => None,
    };
    let asked = if args.gpus.is_empty() { usual(&logs.processes, &program)? } else { args.gpus.clone() };
    let rows = asked.into_iter().map(|Gpus { written, sizes }| {
        let machine = Machine { gpus: sizes, limit: args.limit, host, peer };
        Row { name: written, estimate: program.on(&machine), machine }
    });
    let rows: Vec<Row> = rows.collect();
    let text = if args.json {
        format!("{:#}\n", value(&program, &rows))
    } else {
        text::render(&logs.processes, &program, &rows, args.host.is_some(), terminal::colours())
    };
    stdout::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What the pool could take of the host, by the logs.
fn of_host(processes: &[Process]) -> u64 {
    let limit = |process: &Process| -> u64 {
        let peaks = process.exit.iter().flat_map(|exit| &exit.peak);
        peaks
            .filter(|peak| peak.place.starts_with("host"))
            .map(|peak| peak.limit.unwrap_or(0))
            .fold(0, u64::saturating_add)
    };
    processes.iter().map(limit).max().unwrap_or(0)
}

/// No GPU has more memory than this, bytes.
const MOST: u64 = 1 << 50;

/// Four machines with GPUs of the log's size, from one on, or from half as many as the program works on.
fn usual(processes: &[Process], program: &Program) -> Result<Vec<Gpus>, Failure> {
    let limits = processes.iter().flat_map(|process| process.exit.iter().flat_map(|exit| &exit.peak));
    let limits = limits.filter(|peak| peak.place.starts_with("gpu")).filter_map(|peak| peak.limit);
    let Some(limit) = limits.max().filter(|limit| (1..=MOST).contains(limit)) else {
        let why =
            "the logs do not tell how large the GPUs were, since no process came to its end: write --gpus 4x80GiB";
        return Err(Failure::usage(why.to_owned()));
    };
    // The limit is what a GPU has less the reserve, which is a sixteenth of it or 1 GiB; with GPUPOOL_LIMIT it is that.
    let size = (limit / 15 * 16).min(limit.saturating_add(1 << 30)).next_multiple_of(64 << 20);
    let counts = (0..16).map(|power| 1usize << power).filter(|count| *count * 2 > program.homes().max(1)).take(4);
    let written =
        if size.is_multiple_of(1 << 30) { format!("{}GiB", size >> 30) } else { format!("{}MiB", size >> 20) };
    let gpus = counts.map(|count| Gpus { written: format!("{count}x{written}"), sizes: vec![size; count] });
    Ok(gpus.collect())
}

fn value(program: &Program, rows: &[Row]) -> Value {
    let machines = rows.iter().map(|Row { name, machine, estimate }| {
        let peak = estimate.peak;
        json!({
            "gpus": name, "limit": machine.limit, "host": machine.host,
            "peak": {"near": peak.near, "on_peers": peak.on_peers, "on_host": peak.on_host, "missing": peak.missing},
            "mean": {"on_peers": estimate.on_peers, "on_host": estimate.on_host},
            "seconds_to_read_far_once": estimate.pass, "slowdown": estimate.slowdown, "beyond_the_log": estimate.is_beyond,
        })
    });
    let far =
        program.far.map(|far| json!({"on_peers": far.on_peers, "on_host": far.on_host, "seconds_lost": far.lost}));
    json!({
        "plan": 1, "seconds": program.seconds, "peak": program.peak, "far": far, "slowdown": program.slowdown(),
        "machines": machines.collect::<Vec<_>>(),
    })
}
