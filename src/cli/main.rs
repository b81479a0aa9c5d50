//! `gpupool`: runs programs with the pool or on GPUs that are not there, and says what their logs tell. One file a command.

mod child;
mod companion;
mod demo;
mod diff;
mod doctor;
mod elf;
mod explain;
mod export;
mod fail_on;
mod failure;
mod folder;
mod inherited;
mod kernel;
mod lenders;
mod log_settings;
mod pages;
mod plan;
mod preloadable;
mod ps;
mod report;
mod run;
#[cfg(test)]
mod sample;
mod sim;
mod stdout;
mod terminal;
mod top;
mod words;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

/// The memory of every GPU, and then of the host, for one unmodified CUDA program.
#[derive(Parser)]
#[command(name = "gpupool", version = gpupool_config::VERSION, arg_required_else_help = true)]
enum Command {
    Run(run::Args),
    Sim(sim::Args),
    Report(report::Args),
    Plan(plan::Args),
    Diff(diff::Args),
    Explain(explain::Args),
    Doctor(doctor::Args),
    Ps(ps::Args),
    Top(top::Args),
    Export(export::Args),
    Demo(demo::Args),
    Kernel(kernel::Args),
    #[command(hide = true)]
    Lenders(lenders::Args),
}

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(instead) => return said(&instead),
    };
    let done = match command {
        Command::Run(args) => run::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Report(args) => report::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Ps(args) => ps::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Kernel(args) => kernel::run(&args),
        Command::Lenders(args) => lenders::run(&args),
    };
    done.unwrap_or_else(failure::Failure::report)
}

/// Prints what clap has to say in place of a command: help, version, or what is wrong with the words.
fn said(instead: &clap::Error) -> ExitCode {
    let code = u8::try_from(instead.exit_code()).unwrap_or(2);
    let printed = instead.print().and_then(|()| std::io::stdout().flush());
    match printed {
        // Nobody could be told, and for help that was all there was to do.
        Err(error) if code == 0 => {
            stdout::unless_left(error).map_or_else(failure::Failure::report, |()| ExitCode::SUCCESS)
        }
        _ => ExitCode::from(code),
    }
}
