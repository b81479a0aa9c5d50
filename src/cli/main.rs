//! `gpupool`: runs programs with the pool or on GPUs that are not there, and says what their logs tell. One file a command.

mod child;
mod companion;
mod demo;
mod doctor;
mod explain;
mod fail_on;
mod failure;
mod folder;
mod inherited;
mod report;
mod run;
mod sim;
mod terminal;

use std::process::ExitCode;

use clap::Parser;

/// The memory of every GPU, and then of the host, for one unmodified CUDA program.
#[derive(Parser)]
#[command(name = "gpupool", version, arg_required_else_help = true)]
enum Command {
    Run(run::Args),
    Sim(sim::Args),
    Report(report::Args),
    Explain(explain::Args),
    Doctor(doctor::Args),
    Demo(demo::Args),
}

fn main() -> ExitCode {
    let done = match Command::parse() {
        Command::Run(args) => run::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Report(args) => report::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Demo(args) => demo::run(&args),
    };
    done.unwrap_or_else(failure::Failure::report)
}
