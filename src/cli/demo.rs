//! `gpupool demo`: the story in four steps, on real GPUs or on simulated ones.
//!
//! Each step is a command line that a reader can type; the demo runs it, shows what it prints and checks that this is what
//! the step is there to show.

mod machine;
mod step;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::failure::Failure;
use machine::Machine;

const SOURCE: &str = include_str!("demo/two_arrays.c");
const PROGRAM: &str = "two_arrays";

/// See it work: arrays that do not fit on one GPU, without and with the pool
///
/// Uses the GPUs of this machine, leaving 2 GiB free on each, or simulated ones where there are none. Needs a C compiler:
/// the program that it runs is plain C and knows nothing of gpupool.
#[derive(clap::Args)]
pub struct Args {
    /// Use simulated GPUs, as 4x32GiB, also where there are real ones
    #[arg(long, value_name = "COUNTxSIZE", value_parser = crate::sim::gpus)]
    gpus: Option<String>,
}

/// Runs the story.
///
/// # Errors
/// There is no C compiler or no driver to run on (exit 1), or a step did not show what it should (exit 1).
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let workshop = Workshop::open()?;
    let machine = Machine::find(&workshop, args.gpus.as_deref())?;
    let story = machine.story();
    let mut out = std::io::stdout().lock();
    show(&mut out, format_args!("{machine}"))?;
    let mut failed = 0;
    for (number, step) in story.iter().enumerate() {
        show(&mut out, format_args!("\n{}. {}", number + 1, step.title))?;
        let shown = match step.run(&workshop, &machine, number + 1, &mut out)? {
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

/// Writes a line. `println!` would panic when the reader (`| head`) has left.
fn show(out: &mut dyn Write, line: std::fmt::Arguments<'_>) -> Result<(), Failure> {
    writeln!(out, "{line}").map_err(|error| Failure::broken(format!("stdout: {error}")))
}

/// A folder with the compiled program, in which every step runs, so that the command lines shown are the ones run.
struct Workshop {
    folder: tempfile::TempDir,
    /// This executable.
    gpupool: PathBuf,
}

impl Workshop {
    fn open() -> Result<Workshop, Failure> {
        let failed = |what: &str, error: std::io::Error| Failure::broken(format!("{what}: {error}"));
        let gpupool = std::env::current_exe().map_err(|error| failed("can not find this executable", error))?;
        let folder = tempfile::Builder::new()
            .prefix("gpupool-demo-")
            .tempdir()
            .map_err(|error| failed("can not make a temporary folder", error))?;
        let source = folder.path().join("two_arrays.c");
        std::fs::write(&source, SOURCE).map_err(|error| failed("can not write two_arrays.c", error))?;
        let compiled = Command::new("cc")
            .args(["-O2", "-o", PROGRAM, "two_arrays.c", "-ldl"])
            .current_dir(folder.path())
            .status()
            .map_err(|error| failed("cc, the C compiler", error))?;
        if !compiled.success() {
            return Err(Failure::broken(format!("cc could not compile two_arrays.c ({compiled})")));
        }
        Ok(Workshop { folder, gpupool })
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A command from the words that are shown for it. Settings of the caller's own are left out: the story is about the
    /// defaults.
    fn command(&self, words: &[String]) -> Command {
        let executable = |word: &str| match word {
            "gpupool" => self.gpupool.clone().into_os_string(),
            "./two_arrays" => self.folder().join(PROGRAM).into_os_string(),
            other => other.into(),
        };
        let mut executables = words.iter().map(|word| executable(word));
        let mut command = Command::new(executables.next().unwrap_or_default());
        command.args(executables).current_dir(self.folder());
        if words.get(1).is_some_and(|word| word == "sim") {
            // It counts the real GPUs, and would hide simulated ones.
            command.env_remove("CUDA_VISIBLE_DEVICES");
        }
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            let ours = ["GPUPOOL_", "SIMCUDA_"].iter().any(|prefix| name.starts_with(prefix));
            if ours || gpupool_config::launcher_variables().any(|known| known == name) {
                command.env_remove(&*name);
            }
        }
        // The table under each step says the same, and more.
        command.env("GPUPOOL_SUMMARY", "off");
        command
    }
}
