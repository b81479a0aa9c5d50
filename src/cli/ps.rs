//! `gpupool ps`: the processes that run under gpupool, and what each holds where, by their metrics pages. It asks no process
//! anything: one that is stopped is seen like any other.

use std::path::PathBuf;
use std::process::ExitCode;

use gpupool_config::format_size;
use gpupool_metrics::folder::{Folder, Roots};
use gpupool_metrics::{Life, Snapshot, Unreadable, identify, read};
use serde::Serialize;

use crate::failure::{self, Failure};
use crate::stdout;
use crate::terminal::{self, Page, Table};

/// List the processes that run under gpupool, with their memory by place
#[derive(clap::Args)]
pub struct Args {
    /// All that their pages say, as one JSON array
    #[arg(long)]
    json: bool,
}

/// A process that has a page.
#[derive(Serialize)]
struct Listed {
    state: Life,
    /// The user's number.
    owner: u32,
    page: PathBuf,
    #[serde(flatten)]
    told: Snapshot,
}

/// Prints the list; for root, of all users' processes.
///
/// # Errors
/// Only where nothing can be printed. A page that cannot be read is complained of, and the others are listed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let rows = gather();
    if args.json {
        let text = serde_json::to_string_pretty(&rows).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{text}\n"))?;
    } else {
        stdout::print(&text(&rows))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn gather() -> Vec<Listed> {
    let (folders, refused) = Folder::all(&Roots::new(std::env::var_os("XDG_RUNTIME_DIR")));
    for refused in refused {
        failure::complain(&format!("not read: {refused}"));
    }
    let mut rows = Vec::new();
    for folder in &folders {
        folder.clean();
        for entry in folder.pages() {
            let path = folder.path().join(&entry.name);
            match look(folder, &entry) {
                Ok(Some((state, told))) => rows.push(Listed { state, owner: folder.owner(), page: path, told }),
                // It ended, now or before.
                Ok(None) => {}
                Err(error) => failure::complain(&format!("{}: {error}", path.display())),
            }
        }
    }
    rows.sort_by_key(|row| row.told.process.identity.pid);
    rows
}

/// `None`: its process is gone, runs another program by now, or says that it ends.
fn look(folder: &Folder, entry: &gpupool_metrics::folder::Entry) -> Result<Option<(Life, Snapshot)>, Unreadable> {
    let file = match folder.page(entry) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        answer => answer?,
    };
    let life = identify(&file)?.life();
    if life.is_over() {
        return Ok(None);
    }
    let told = read(&file)?;
    let named = (told.process.identity.pid, told.process.identity.started) == (entry.pid, entry.started);
    if named { Ok((!told.ended).then_some((life, told))) } else { Err(Unreadable::Foreign) }
}

fn text(rows: &[Listed]) -> String {
    let mut page = Page::new(terminal::colours());
    if rows.is_empty() {
        page.line("no process runs under gpupool");
        return page.into_text();
    }
    let mut table = Table::new(&["pid", "state", "mode", "held", "used", "name"], b"rllrrl", 4);
    for Listed { state, told, .. } in rows {
        let sum = |of: fn(&gpupool_metrics::Place) -> u64| told.levels.places.rows.iter().map(of).sum::<u64>();
        let cells = vec![
            told.process.identity.pid.to_string(),
            state.word().to_owned(),
            told.levels.mode.clone(),
            format_size(sum(|place| place.held)),
            format_size(sum(|place| place.used)),
            told.process.name.clone(),
        ];
        table.row(cells, vec![below(told)]);
    }
    page.table(&table);
    page.into_text()
}

/// What a process has where: nothing of places where it has nothing.
fn below(told: &Snapshot) -> String {
    let mut parts = Vec::new();
    for place in &told.levels.places.rows {
        if place.held > 0 {
            parts.push(format!("{} {}", place.name(), format_size(place.held)));
        }
        if place.own > 0 {
            parts.push(format!("{} {} of its own", place.name(), format_size(place.own)));
        }
    }
    if told.levels.pinned.pinned > 0 {
        parts.push(format!("pinned {}", format_size(told.levels.pinned.pinned)));
    }
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") }
}
