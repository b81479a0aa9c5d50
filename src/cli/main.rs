//! `gpupool`: runs programs with the pool or on GPUs that are not there, and says what their logs tell. One file a command.

mod checkpoint;
mod child;
mod companion;
mod completions;
mod control;
mod demo;
mod diff;
mod doctor;
mod drain;
mod elf;
mod explain;
mod export;
mod fail_on;
mod failure;
mod folder;
mod hosts;
mod images;
mod inherited;
mod kernel;
mod lenders;
mod log_settings;
mod manual;
mod pages;
mod plan;
mod preloadable;
mod ps;
mod report;
mod resume;
mod run;
#[cfg(test)]
mod sample;
mod set;
mod sim;
mod stdout;
mod store;
mod suspend;
mod terminal;
mod top;
mod whole;
mod words;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};

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
    Suspend(suspend::Args),
    Resume(resume::Args),
    Checkpoint(checkpoint::Args),
    Set(set::Args),
    Priority(set::PriorityArgs),
    Drain(drain::Args),
    Undrain(drain::UndrainArgs),
    Store(store::Args),
    Demo(demo::Args),
    Kernel(kernel::Args),
    Completions(completions::Args),
    Manual(manual::Args),
    #[command(hide = true)]
    Lenders(lenders::Args),
}

impl Command {
    /// Whether it looks for programs by their pages.
    fn reads_pages(&self) -> bool {
        matches!(
            self,
            Self::Ps(_)
                | Self::Top(_)
                | Self::Export(_)
                | Self::Suspend(_)
                | Self::Resume(_)
                | Self::Checkpoint(_)
                | Self::Set(_)
                | Self::Priority(_)
                | Self::Drain(_)
                | Self::Undrain(_)
        )
    }
}

/// Whether as many files can be opened at once as a look at the pages takes: a folder, the one around it, a list of what is in it, and a page. A folder that cannot be
/// opened for want of descriptors would count as one that is not there, and programs that run as none.
fn can_open() -> std::io::Result<()> {
    let files: std::io::Result<Vec<_>> = (0..4).map(|_| std::fs::File::open("/")).collect();
    files.map(drop)
}

fn main() -> ExitCode {
    let command = match Command::try_parse_from(options_first(std::env::args_os().collect())) {
        Ok(command) => command,
        Err(instead) => return said(&instead),
    };
    if command.reads_pages()
        && let Err(error) = can_open()
    {
        let why =
            format!("this command cannot open the files that it needs: {error}; ulimit -n has to allow it some more");
        return failure::Failure::broken(why).report();
    }
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
        Command::Suspend(args) => suspend::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Resume(args) => resume::run(&args),
        Command::Set(args) => set::run(&args),
        Command::Priority(args) => set::run_priority(args),
        Command::Drain(args) => drain::run(&args),
        Command::Undrain(args) => drain::run_undrain(&args),
        Command::Store(args) => store::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Kernel(args) => kernel::run(&args),
        Command::Completions(args) => completions::run(&args, Command::command()),
        Command::Manual(args) => manual::run(&args, Command::command()),
        Command::Lenders(args) => lenders::run(&args),
    };
    done.unwrap_or_else(failure::Failure::report)
}

/// The words with the options of `gpupool checkpoint` in front of the others: clap ends its numbers at an option, and takes the folder behind that for one more.
fn options_first(words: Vec<OsString>) -> Vec<OsString> {
    if words.get(1).is_none_or(|word| word != "checkpoint") {
        return words;
    }
    let command = Command::command();
    let of_checkpoint = command.find_subcommand("checkpoint").into_iter().flat_map(clap::Command::get_arguments);
    let with_value: Vec<String> = of_checkpoint
        .filter(|argument| argument.get_action().takes_values())
        .filter_map(|argument| Some(format!("--{}", argument.get_long()?)))
        .collect();
    let mut words = words.into_iter();
    let mut first: Vec<OsString> = words.by_ref().take(2).collect();
    let mut others = Vec::new();
    while let Some(word) = words.next() {
        if word == "--" {
            // What follows is no option, and the others are none either.
            others.insert(0, word);
            others.extend(words);
            break;
        }
        if !word.as_encoded_bytes().starts_with(b"-") || word == "-" {
            others.push(word);
            continue;
        }
        let value = if with_value.iter().any(|option| word == option.as_str()) { words.next() } else { None };
        first.push(word);
        first.extend(value);
    }
    first.extend(others);
    first
}

/// Prints what clap has to say in place of a command: help, version, or what is wrong with the words.
fn said(instead: &clap::Error) -> ExitCode {
    let code = u8::try_from(instead.exit_code()).unwrap_or(2);
    if code == 0
        && let Err(failure) = stdout::is_there()
    {
        return failure.report();
    }
    let printed = instead.print().and_then(|()| std::io::stdout().flush());
    missing(instead).iter().for_each(|line| failure::complain(line));
    match printed {
        // Nobody could be told, and for help that was all there was to do.
        Err(error) if code == 0 => {
            stdout::unless_left(error).map_or_else(failure::Failure::report, |()| ExitCode::SUCCESS)
        }
        _ => ExitCode::from(code),
    }
}

/// What each argument is that is missing: clap names it and no more.
fn missing(error: &clap::Error) -> Vec<String> {
    let Some(ContextValue::Strings(names)) =
        error.get(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::MissingRequiredArgument)
    else {
        return Vec::new();
    };
    // The words in front of options and values are commands.
    let mut command = Command::command();
    command.build();
    for word in std::env::args().skip(1) {
        let Some(below) = command.find_subcommand(&word) else { break };
        command = below.clone();
    }
    let told = |argument: &clap::Arg| {
        let name = argument.to_string();
        let help = argument.get_help().filter(|_| names.contains(&name))?;
        Some(format!("{name}: {help}"))
    };
    command.get_arguments().filter_map(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_checkpoint_stand_anywhere() {
        let put = |words: &str| {
            let words = options_first(words.split(' ').map(OsString::from).collect());
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(put("gpupool checkpoint 1 --every 3s d --keep=2"), "gpupool checkpoint --every 3s --keep=2 1 d");
        assert_eq!(put("gpupool checkpoint --job 1 --json d"), "gpupool checkpoint --job --json 1 d");
        assert_eq!(put("gpupool checkpoint 1 --json -- -d --x"), "gpupool checkpoint --json -- 1 -d --x");
        assert_eq!(put("gpupool checkpoint 1 --keep"), "gpupool checkpoint --keep 1");
        assert_eq!(put("gpupool run a --every 3s b"), "gpupool run a --every 3s b");
    }

    /// The examples of a command and of what is below it, with its name.
    fn examples(command: &clap::Command, found: &mut Vec<(String, Vec<String>)>) {
        for below in command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help") {
            let help = below.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines =
                help.lines().skip_while(|line| *line != "Examples:").skip(1).take_while(|line| line.starts_with("  "));
            found.push((below.get_name().to_owned(), lines.map(str::to_owned).collect()));
            examples(below, found);
        }
    }

    #[test]
    fn every_command_has_examples_that_it_takes() {
        let mut found = Vec::new();
        examples(&Command::command(), &mut found);
        assert!(found.len() >= 13, "{found:?}");
        for (name, lines) in found {
            assert!(!lines.is_empty(), "{name}");
            for line in lines {
                // Behind a wide gap stands what it is for.
                let words = line
                    .trim_start()
                    .split("   ")
                    .next()
                    .unwrap_or_default()
                    .split(['|', '>'])
                    .next()
                    .unwrap_or_default();
                if words.starts_with("gpupool ") {
                    let parsed = Command::try_parse_from(words.split_whitespace());
                    assert!(
                        parsed.is_ok(),
                        "{line}: {}",
                        parsed.err().map(|error| error.to_string()).unwrap_or_default()
                    );
                }
                assert!(line.chars().count() <= 100, "{line}");
            }
        }
    }

    /// What stands behind the options of a command and of what is below it, with its name.
    fn behind_options(command: &clap::Command, found: &mut Vec<(String, String)>) {
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            let help = below.get_after_help().map(ToString::to_string).unwrap_or_default();
            found.push((below.get_name().to_owned(), help));
            behind_options(below, found);
        }
    }

    /// clap breaks lines where the terminal ends; one that was broken before is broken twice.
    #[test]
    fn sentences_of_a_help_are_broken_by_clap_alone() {
        let mut found = Vec::new();
        behind_options(&Command::command(), &mut found);
        for (name, help) in found {
            let lines: Vec<&str> = help.lines().collect();
            for pair in lines.windows(2) {
                let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ') && line != "Examples:";
                assert!(
                    !(is_text(pair[0]) && is_text(pair[1])),
                    "{name}: {:?} goes on by hand: {:?}",
                    pair[0],
                    pair[1]
                );
            }
        }
    }

    /// clap looks itself, where it is built with its assertions, as here (`profile.release.package` in Cargo.toml).
    #[test]
    fn clap_finds_no_command_that_contradicts_itself() {
        Command::command().debug_assert();
    }

    #[test]
    fn commands_that_change_something_say_their_exit_statuses() {
        let mut found = Vec::new();
        behind_options(&Command::command(), &mut found);
        for wanted in ["set", "priority", "suspend", "resume", "checkpoint", "drain", "undrain"] {
            let help = found.iter().find(|(name, _)| name == wanted).map(|(_, help)| help.as_str()).unwrap_or_default();
            let said = help.lines().find(|line| line.starts_with("Exit status: 0 where ")).unwrap_or_default();
            assert!(said.contains("; 2 where "), "{wanted}: {help}");
        }
    }
}
