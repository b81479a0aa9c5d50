//! `gpupool doctor`: what this machine and this environment let the pool do. One file a subject under `doctor/`.

mod check;
mod driver;
mod fabric;
mod host;
mod matrix;
mod preload;
mod probe;
mod software;

use std::path::PathBuf;
use std::process::ExitCode;

use gpupool_config::Settings;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::stdout;
use crate::terminal::{self, Page};
use check::{Check, State};

/// Check this machine and this environment: driver, GPUs, links, host, preloads, settings
///
/// Exit code 0: all is well. 1: gpupool works, with the restrictions named. 2: it does not, or nobody can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool doctor
  gpupool run -- gpupool doctor                                      in a program's surroundings
  gpupool doctor --json >doctor.json                                 for an issue")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The library to look for [default: libgpupool.so that came with this program]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// Ask the driver and print the answers: how the command starts itself
    #[arg(long, hide = true)]
    probe: bool,
}

/// Looks at everything and prints what it saw.
///
/// # Errors
/// stdout cannot be written.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    if args.probe {
        return probe::answer();
    }
    // Settings that cannot be read are a check's finding; for the others the defaults hold.
    let settings = Settings::read(std::env::vars_os()).unwrap_or_default();
    let (mut checks, known) = driver::checks(&settings);
    checks.push(host::check_here(&settings, known.refuses_host));
    checks.push(software::library(args.library.as_deref()));
    checks.extend(preload::checks());
    checks.push(software::python());
    checks.extend(software::settings(known.totals.as_deref()));
    checks.extend(software::ranks());
    checks.extend(software::temporary());
    checks.extend(software::page());
    let state = checks.iter().map(|check| check.state).max().unwrap_or(State::Fine);
    let printed = stdout::print(&if args.json { as_json(&checks, state) } else { as_text(&checks) });
    printed.map_err(|failure| failure.with_code(State::Broken.code()))?;
    Ok(ExitCode::from(state.code()))
}

fn as_text(checks: &[Check]) -> String {
    let mut page = Page::new(terminal::colours());
    for check in checks {
        let (mark, colour) = check.state.mark();
        let label = format!("{mark}{:<11}", check.name);
        let mut lines = terminal::wrap(&terminal::clean(&check.words), terminal::width() - label.len()).into_iter();
        let first = lines.next().unwrap_or_default();
        let mark = page.paint(colour, mark);
        page.line(&format!("{mark}{:<11}{first}", check.name));
        for line in lines {
            page.line(&format!("{:18}{line}", ""));
        }
        for line in &check.below {
            page.line(&format!("{:9}{line}", ""));
        }
        if let Some(advice) = &check.advice {
            page.entry("         -> ", advice);
        }
    }
    page.into_text()
}

fn as_json(checks: &[Check], state: State) -> String {
    let checks: Vec<Value> = checks
        .iter()
        .map(|check| {
            json!({
                "name": check.name, "state": check.state.word(), "what": check.words, "advice": check.advice,
                "facts": check.facts,
            })
        })
        .collect();
    terminal::clean_json(&format!("{:#}\n", json!({"doctor": 1, "state": state.word(), "checks": checks})))
}
