//! `gpupool diff`: what changed from one run of a program to another, by their logs.

mod changes;

use std::path::PathBuf;
use std::process::ExitCode;

use gpupool_config::format_size;
use serde_json::json;

use crate::failure::Failure;
use crate::report::{Log, Logs};
use crate::terminal::{Page, Table};
use crate::{stdout, terminal, words};
use changes::{Change, Section, Unit};

/// Rows of a section; whoever wants all takes `--json`.
const ROWS: usize = 12;

/// Say what changed between two runs: peaks, call sites, contexts, findings, moves
///
/// Each log is taken as a whole, with all processes in it. Call sites are matched by file and function, so that lines may have moved.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool diff before.jsonl after.jsonl
  gpupool diff --json before.jsonl after.jsonl | jq '.changes[] | select(.section == \"findings\")'")]
pub struct Args {
    /// The log of the first run
    #[arg(value_name = "LOG1")]
    before: PathBuf,
    /// The log of the second run
    #[arg(value_name = "LOG2")]
    after: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints what changed.
///
/// # Errors
/// Exit 2 if a path cannot be read or is no log of gpupool.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let [before, after] = [&args.before, &args.after].map(|path| Logs::read(std::slice::from_ref(path)));
    let unreadable: Vec<String> = before.logs.iter().chain(&after.logs).filter_map(Log::why_unreadable).collect();
    if !unreadable.is_empty() {
        return Err(Failure::usage(unreadable.join("\n")));
    }
    let changes = changes::between(&before, &after);
    let text = if args.json { json_of(&changes) } else { text_of(args, &changes) };
    stdout::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn json_of(changes: &[Change]) -> String {
    let changes = changes.iter().map(|change| {
        json!({
            "section": change.section.word(), "name": change.name, "unit": change.unit.word(), "before": change.before,
            "after": change.after,
        })
    });
    format!("{:#}\n", json!({"diff": 1, "changes": changes.collect::<Vec<_>>()}))
}

fn text_of(args: &Args, changes: &[Change]) -> String {
    let mut page = Page::new(terminal::colours());
    let [before, after] = [&args.before, &args.after].map(|path| terminal::clean(&path.display().to_string()));
    page.entry("", &format!("from {before} to {after}"));
    if changes.is_empty() {
        page.line("  nothing has changed");
    }
    for section in Section::ALL {
        let rows: Vec<&Change> = changes.iter().filter(|change| change.section == section).collect();
        if rows.is_empty() {
            continue;
        }
        page.heading(section.heading());
        let mut table = Table::new(&["before", "after", "change", "what"], b"rrrl", 6);
        for Change { name, unit, before, after, .. } in rows.iter().take(ROWS).copied() {
            let [was, is] =
                [before, after].map(|value| value.map_or_else(|| "-".to_owned(), |value| amount(*unit, value)));
            let change = after.unwrap_or(0.0) - before.unwrap_or(0.0);
            let sign = if change < 0.0 { "-" } else { "+" };
            table.row(vec![was, is, format!("{sign}{}", amount(*unit, change.abs())), name.clone()], Vec::new());
        }
        page.table(&table);
        if rows.len() > ROWS {
            page.line(&format!("  {} more; --json has them", rows.len() - ROWS));
        }
    }
    page.into_text()
}

fn amount(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Bytes => format_size(value as u64),
        Unit::Seconds => words::time(value),
        Unit::Number => format!("{value:.0}"),
    }
}
