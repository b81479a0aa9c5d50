//! `gpupool set`: other settings for a program that runs; see `src/shim/agent/set.rs`.

use std::process::ExitCode;

use gpupool_config::read_one;
use gpupool_wire::control::{Change, MOST_TEXT, Reply, Request};
use serde::Serialize;

use crate::control::{self, NoAnswer, OTHER_ANSWER};
use crate::failure::{Failure, complain};
use crate::stdout;
use crate::terminal;

/// Show or change settings of a running program: limit, devices, move_share, priority, guarantee, log
#[derive(clap::Args)]
#[command(
    after_help = "Without a setting it says what these are now. A setting is written with or without GPUPOOL_ in front. All that are given change, or none. What lies beyond a limit \
leaves for other GPUs or the host, and so does what a GPU that lends no more has for others; what cannot is told. \
A setting with nothing after the = is unset, as if it had never been given: limit= takes all limits away. \
Other settings are read once, when a program starts.

Exit status: 0 where all of them hold now, also where memory beyond a limit could not leave; 1 where the program refused them or did not answer; 2 where one \
of them is no setting, or no such process is there or it is stopped.

Examples:
  gpupool set 4711                           what they are
  gpupool set 4711 limit=0:20GiB
  gpupool set 4711 limit=                    no limit any more
  gpupool set 4711 devices=0,1 priority=80   lent to by GPU 0 and 1 alone
  gpupool set --json 4711 log=gpupool::memory=debug | jq '.changes[].old'"
)]
pub struct Args {
    /// Its number, as gpupool ps lists it
    #[arg(value_parser = pid)]
    pid: u32,
    /// The settings
    #[arg(value_name = "NAME=VALUE")]
    settings: Vec<String>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Say how much a running program matters beside others: 0 to 100
#[derive(clap::Args)]
#[command(
    after_help = "Memory of a program gives way to programs of a higher priority that need it; without a word from anybody it is 50. The same as \
gpupool set PID priority=N.

Exit status: 0 where it holds now; 1 where the program refused it or did not answer; 2 where N is no number from 0 to 100, or no such process is there or it is stopped.

Examples:
  gpupool priority 4711 80   programs of a lower priority give way to it when it next lacks memory"
)]
pub struct PriorityArgs {
    /// Its number, as gpupool ps lists it
    #[arg(value_parser = control::pid)]
    pid: u32,
    /// How much it matters
    #[arg(value_name = "N")]
    priority: String,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// A process's number. Where the first word is a setting, the number is what was forgotten.
fn pid(text: &str) -> Result<u32, String> {
    control::pid(text).map_err(|why| {
        let what = if text.contains('=') { "this is a setting".to_owned() } else { why };
        format!("{what}; the number of the process comes first, as gpupool ps lists it: gpupool set 4711 limit=0:20GiB")
    })
}

/// The same as [`run`] with that setting.
///
/// # Errors
/// As there.
pub fn run_priority(args: PriorityArgs) -> Result<ExitCode, Failure> {
    run(&Args { pid: args.pid, settings: vec![format!("priority={}", args.priority)], json: args.json })
}

#[derive(Serialize)]
struct Told<'a> {
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    changes: Option<Vec<Changed<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<Vec<Shown<'a>>>,
}

#[derive(Serialize)]
struct Shown<'a> {
    name: &'a str,
    value: &'a str,
}

#[derive(Serialize)]
struct Changed<'a> {
    name: &'a str,
    old: &'a str,
    new: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    note: &'a str,
}

/// Changes them, and says what they were and are; or says what those that can be changed are.
///
/// # Errors
/// One of them is no setting, the process cannot be asked, or nothing can be printed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let shows = args.settings.is_empty();
    for words in &args.settings {
        read_one(words).map_err(|problem| Failure::usage(problem.to_string()))?;
    }
    let length: usize = args.settings.iter().map(|words| words.len() + 1).sum();
    if length > MOST_TEXT {
        return Err(Failure::usage(format!(
            "these settings have {length} bytes, and what a program can be told at once has room for {MOST_TEXT}; say less at a time"
        )));
    }
    let rows = control::find(&[args.pid])?;
    let reply = control::replies(&rows, &Request::Set(args.settings.clone()), None).pop();
    let (changes, error) =
        match reply.unwrap_or_else(|| Err(NoAnswer { why: "nobody was asked".to_owned(), was_asked: false })) {
            Ok(Reply::Changed(changes)) => (changes, None),
            Err(NoAnswer { why, .. }) if shows => (Vec::new(), Some(why)),
            Ok(Reply::Refused { why }) => (Vec::new(), Some(format!("{why}; nothing has changed"))),
            Err(NoAnswer { why, was_asked: false }) => (Vec::new(), Some(format!("nothing has changed: {why}"))),
            // It may have been stopped, or ended, between the change and the answer.
            Err(NoAnswer { why, was_asked: true }) => {
                (Vec::new(), Some(format!("{why}; whether anything has changed its log tells (setting.change)")))
            }
            Ok(_) => (Vec::new(), Some(OTHER_ANSWER.to_owned())),
        };
    if args.json {
        let told = Told {
            pid: args.pid,
            error: error.as_deref(),
            changes: (!shows).then(|| {
                changes.iter().map(|Change { name, old, new, note }| Changed { name, old, new, note }).collect()
            }),
            settings: shows.then(|| changes.iter().map(|it| Shown { name: &it.name, value: &it.new }).collect()),
        };
        let text = serde_json::to_string_pretty(&told).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{}\n", terminal::clean_json(&text)))?;
    }
    if let Some(error) = error {
        complain(&format!("process {}: {error}", args.pid));
        return Ok(ExitCode::FAILURE);
    }
    for Change { name, old, new, note } in changes.iter().filter(|_| !args.json) {
        let shown = |value: &str| if value.is_empty() { "(unset)".to_owned() } else { value.to_owned() };
        let note = if note.is_empty() { String::new() } else { format!(" ({note})") };
        let before = if shows { String::new() } else { format!("{} -> ", shown(old)) };
        let line = format!("{name}: {before}{}{note}", shown(new));
        stdout::print(&format!("{}\n", terminal::clean(&line)))?;
    }
    Ok(ExitCode::SUCCESS)
}
