//! `gpupool suspend`: has the memory of running programs leave their GPUs; see `src/shim/suspend`.

use std::process::ExitCode;
use std::time::Duration;

use gpupool_config::parse_duration;
use gpupool_wire::control::{Request, Target};

use crate::control::{self, Told};
use crate::failure::{Failure, complain};

/// Have the memory of running programs leave their GPUs; they wait where they next use a GPU
#[derive(clap::Args)]
#[command(
    after_help = "Their addresses stay, and gpupool resume brings everything back. What is not the pool's stays on the GPU: contexts,
modules, what libraries took from the driver themselves. Several programs are suspended together or not at all.
A signal that a program handles while it waits (Ctrl-C) resumes it; so does its end.

Examples:
  gpupool suspend 4711
  gpupool suspend --to host --wait 60s 4711 4712   two ranks of a job
  gpupool suspend --json 4711 | jq '.[].bytes'"
)]
pub struct Args {
    /// Their numbers, as gpupool ps lists them
    #[arg(required = true)]
    pid: Vec<u32>,
    /// Where the memory goes: to GPUs that the program only borrows from, to the host, or to either, such GPUs first
    #[arg(long, default_value = "any")]
    to: To,
    /// How long each has for its work on the GPUs to be over
    #[arg(long, value_parser = wait, default_value = "10s", value_name = "TIME")]
    wait: Duration,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum To {
    Any,
    Peers,
    Host,
}

fn wait(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

/// Suspends them, and says what left.
///
/// # Errors
/// One cannot be asked, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let rows = control::find(&args.pid)?;
    let target = match args.to {
        To::Any => Target::Anywhere,
        To::Peers => Target::Peers,
        To::Host => Target::Host,
    };
    let told = match rows.as_slice() {
        [_] => {
            let patience = u64::try_from(args.wait.as_millis()).unwrap_or(u64::MAX);
            control::ask_all(&rows, Request::Suspend { target, patience, together: false })
        }
        _ => control::suspend_together(&rows, target, args.wait),
    };
    let done = control::print(&told, args.json, "left the GPUs", "stayed there")?;
    if done {
        return Ok(ExitCode::SUCCESS);
    }
    // One that waits for another one's collective would wait for good.
    let others: Vec<_> =
        rows.iter().zip(&told).filter(|(_, told)| told.error.is_none()).map(|(row, _)| row.clone()).collect();
    if !others.is_empty() {
        complain("the others are resumed, since programs that are suspended together may wait for each other");
        let failed = control::ask_all(&others, Request::Resume).into_iter().filter(|told| told.error.is_some());
        for Told { pid, error, .. } in failed {
            complain(&format!("process {pid} could not be resumed: {}", error.unwrap_or_default()));
        }
    }
    Ok(ExitCode::FAILURE)
}
