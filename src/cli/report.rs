//! `gpupool report`: what the logs of a program, or of all ranks of a job, say.

mod html;
mod json;
mod model;
mod target;
mod text;
mod viewers;

use std::path::PathBuf;
use std::process::ExitCode;

use crate::failure::Failure;
use crate::{stdout, terminal};
pub use model::{Found, Log, Logs, NEAR_AND_FAR, Process, findings, is_on_anothers, merge, ranks_on_one_gpu};
use viewers::Viewers;

/// Say what logs tell: contexts, findings, memory over time, pinned memory, modules
///
/// Logs are written by `gpupool run --log FILE` or GPUPOOL_LOG_FILE. Several logs are taken for the ranks of one job.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool report train.4711.jsonl
  gpupool report rank*.jsonl                                         all ranks of a job
  gpupool report --json train.jsonl | jq '.findings[].code'
  gpupool report --perfetto train.perfetto-trace train.jsonl
  gpupool report --memory-viz train.pickle --speedscope train.speedscope.json train.jsonl")]
pub struct Args {
    /// Logs, one a process
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Show what was where when a program was told OUT_OF_MEMORY, and which setting would have helped
    #[arg(long, conflicts_with = "json")]
    oom: bool,
    /// Write a page that opens in any browser and needs no network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    files: viewers::Files,
}

/// Prints the report.
///
/// # Errors
/// Exit 2 if a path cannot be read or is no log of gpupool; the others are shown all the same.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    args.files.refuse_twice(args.html.as_ref())?;
    let mut viewers = Viewers::begin(&args.files, &args.logs)?;
    let logs = Logs::read_with(&args.logs, &mut |process, record| viewers.look(process, record));
    let found = model::findings(&logs.processes);
    let mut written = viewers.finish(&logs, &found)?;
    if let Some(path) = &args.html {
        written.push_str(&html::write(path, &logs, &found)?);
    }
    let text = match written {
        _ if args.json => json::render(&logs, &found),
        written if args.oom => written + &text::oom::page(&logs, terminal::colours()),
        written if !written.is_empty() => written,
        _ => text::render(&logs, &found, terminal::colours()),
    };
    stdout::print(&text)?;
    let unreadable: Vec<String> = logs.logs.iter().filter_map(model::Log::why_unreadable).collect();
    if unreadable.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(Failure::usage(unreadable.join("\n"))) }
}
