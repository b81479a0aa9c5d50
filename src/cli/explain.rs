//! `gpupool explain`: what a finding means and how to mend it.

use std::process::ExitCode;

use gpupool_events::{FINDINGS, finding, nearest_finding};

use crate::failure::Failure;
use crate::stdout;
use crate::terminal::{self, Page};

/// Say what a finding means and how to mend it
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool explain
  gpupool explain GP001")]
pub struct Args {
    /// The code of the finding, as GP001; none lists them all
    #[arg(value_name = "CODE")]
    code: Option<String>,
}

/// Prints the explanation, or the list.
///
/// # Errors
/// Exit 2 for a code that there is none of; names the nearest.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let mut page = Page::new(terminal::colours());
    match &args.code {
        None => list(&mut page),
        Some(code) => explain(&mut page, code)?,
    }
    stdout::print(&page.into_text())?;
    Ok(ExitCode::SUCCESS)
}

fn list(page: &mut Page) {
    for finding in FINDINGS {
        page.entry(&format!("{}  ", finding.code), finding.title);
    }
}

fn explain(page: &mut Page, code: &str) -> Result<(), Failure> {
    let Some(finding) = finding(code.trim()) else {
        return Err(unknown(code));
    };
    page.heading(&format!("{}  {}", finding.code, finding.title));
    page.line("");
    page.text(finding.explain);
    page.line("");
    page.entry("In short: ", &format!("{}.", finding.fix));
    Ok(())
}

/// The complaint about a code that is none of ours.
pub fn unknown(code: &str) -> Failure {
    let nearest = nearest_finding(code);
    let code = if code.is_empty() { "\"\"" } else { code };
    Failure::usage(format!(
        "{}: no such finding; the nearest is {} ({}). `gpupool explain` lists them",
        terminal::clean(code),
        nearest.code,
        nearest.title
    ))
}
