//! `gpupool demo`: the story in four steps, on real GPUs or on simulated ones.
//!
//! Each step is a command line that a reader can type; the demo runs it, shows what it prints and checks that this is what
//! the step is there to show.

mod machine;
mod step;
mod workshop;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::child;
use crate::failure::Failure;
use crate::folder::Folder;
use machine::Machine;
use workshop::{Workshop, show};

/// See it work: arrays that do not fit on one GPU, without and with the pool
///
/// Uses the GPUs of this machine, leaving 2 GiB free on each, or simulated ones where there are none; within gpupool sim, GPUs like its. Where
/// gpupool was built and not installed it needs a C compiler: the program that it runs is plain C and knows nothing of gpupool.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool demo
  gpupool demo --gpus 4x32GiB                                        simulated ones")]
pub struct Args {
    /// Use simulated GPUs, as 4x32GiB, also where there are real ones
    #[arg(long, value_name = "COUNTxSIZE", value_parser = crate::sim::gpus)]
    gpus: Option<String>,
    /// The folder to work in: how the command starts itself
    #[arg(long, hide = true)]
    workshop: Option<PathBuf>,
}

/// Tells the story in a process of its own, so that its folder goes also where a signal ends it.
///
/// # Errors
/// There is no folder to be had, or this executable cannot be started.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    if let Some(folder) = &args.workshop {
        return tell(folder, args.gpus.as_deref());
    }
    let held = child::hold();
    let folder = Folder::create("gpupool-demo-", "the demo", b"")?;
    let gpupool =
        std::env::current_exe().map_err(|error| Failure::broken(format!("cannot find this executable: {error}")))?;
    let mut command = Command::new(gpupool);
    command.arg("demo").arg("--workshop").arg(folder.path());
    command.args(args.gpus.iter().flat_map(|gpus| ["--gpus", gpus]));
    let status = child::wait_for(command, held);
    // Removed before anything else: ending as the child did may mean dying of a signal, which runs no destructor.
    drop(folder);
    Ok(child::end_as(status?))
}

/// Runs the story.
///
/// # Errors
/// There is no driver to run on, or neither the program nor a C compiler (exit 1), or a step did not show what it should (exit 1).
fn tell(folder: &Path, gpus: Option<&str>) -> Result<ExitCode, Failure> {
    let workshop = Workshop::open(folder)?;
    let machine = Machine::find(&workshop, gpus)?;
    let story = machine.story();
    let mut out = std::io::stdout().lock();
    show(&mut out, format_args!("{machine}"))?;
    let mut failed = 0;
    for (number, step) in story.iter().enumerate() {
        show(&mut out, format_args!("\n{}. {}", number + 1, step.title))?;
        let shown = match step.run(&workshop, machine.prefix(), number + 1, &mut out)? {
            Ok(shown) => shown,
            Err(instead) => {
                failed += 1;
                format!("NOT AS EXPECTED: {instead}")
            }
        };
        show(&mut out, format_args!("=> {shown}"))?;
    }
    match failed {
        0 => Ok(ExitCode::SUCCESS),
        _ => Err(Failure::broken(format!("{failed} of {} steps did not show what they should", story.len()))),
    }
}
