//! `gpupool resume`: what `gpupool suspend` has had leave comes back.

use std::process::ExitCode;

use gpupool_wire::control::Request;

use crate::control;
use crate::failure::{Failure, complain};
use crate::whole;

/// Have the memory of suspended programs come back to their GPUs, and let them go on
#[derive(clap::Args)]
#[command(
    after_help = "Where a GPU has no room any more, another GPU of the program's pool takes the memory, or it stays where it is, and the
program goes on. What is on a disk has to come back: where it cannot be read, or there is no room for it on any GPU and on the host,
the program stays suspended with all that it has, and can be resumed again once that is mended.

Examples:
  gpupool resume 4711
  gpupool resume --json 4711 4712"
)]
pub struct Args {
    /// Their numbers, as gpupool ps lists them
    #[arg(required = true)]
    pid: Vec<u32>,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

/// Resumes them, and says what came back.
///
/// # Errors
/// One cannot be asked, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let rows = control::find(&args.pid)?;
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
    let told = control::ask_all(&rows, &Request::Resume);
    let done = control::print(&told, args.json, "came back", "did not, for want of room")?;
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
