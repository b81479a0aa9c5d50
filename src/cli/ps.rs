//! `gpupool ps`: the processes that run under gpupool, and what each holds where, by their metrics pages. It asks no process
//! anything: one that is stopped is seen like any other.

use std::collections::BTreeMap;
use std::process::ExitCode;

use gpupool_config::format_size;
use gpupool_machine::{Uuid, dashed};
use gpupool_metrics::{Counter, Label, Snapshot};
use serde::Serialize;

use crate::drain;
use crate::failure::Failure;
use crate::pages::{Listed, Numbers, Pages};
use crate::stdout;
use crate::terminal::{self, Page, Table};
use crate::words::UNSEEN;

/// List the processes that run under gpupool, with their memory by place
#[derive(clap::Args)]
#[command(after_help = "Examples:
  gpupool ps
  gpupool ps --json | jq '.[].process.identity.pid'")]
pub struct Args {
    /// All that their pages say, as one JSON array
    #[arg(long)]
    json: bool,
}

/// How far what belongs to a process stands to the right.
const BELOW: usize = 4;
/// Names of blocks in the list for people.
const LABELS_SHOWN: usize = 8;

/// Prints the list; for root, of all users' processes.
///
/// # Errors
/// Only where nothing can be printed. A page that cannot be read is complained of, and the others are listed.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let mut pages = Pages::new();
    let look = pages.look();
    pages.complain(&look);
    let of_others = look.skipped.iter().filter(|skipped| skipped.reason == "version").count();
    let rows = look.rows;
    if args.json {
        let text = as_json(&rows).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{}\n", terminal::clean_json(&text)))?;
    } else {
        let mut numbers = Numbers::default();
        numbers.learn(&rows);
        stdout::print(&text(&rows, of_others, &drain::drained(), &numbers))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The pages, each with what others borrow of the GPUs that its process works on: that none of them says by itself.
fn as_json(rows: &[Listed]) -> serde_json::Result<String> {
    let mut all = serde_json::to_value(rows)?;
    for (row, told) in rows.iter().zip(all.as_array_mut().into_iter().flatten()) {
        told["lends"] = serde_json::to_value(lends(row, rows))?;
    }
    serde_json::to_string_pretty(&all)
}

/// What another process has of a GPU on which one works.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Lent {
    /// By the numbering of the one that works there: `gpu0`.
    gpu: String,
    /// The other one.
    pid: u32,
    bytes: u64,
    /// Others that work on the same GPU, which lend the same bytes and not as many more.
    with: Vec<u32>,
}

/// What others borrow of the GPUs on which this process has a context, as far as their pages tell.
fn lends(row: &Listed, rows: &[Listed]) -> Vec<Lent> {
    let told = &row.told;
    let gpus = works_on(told);
    let pid = told.process.identity.pid;
    let mut lent: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for other in rows.iter().filter(|other| other.told.process.identity.pid != pid).map(|other| &other.told) {
        for loan in other.levels.loans.rows.iter().filter(|loan| !loan.on_host) {
            let of = other.levels.gpu(loan.number).map(|gpu| gpu.uuid);
            if let Some((gpu, _)) = gpus.iter().find(|(_, uuid)| Some(*uuid) == of) {
                *lent.entry((*gpu, other.process.identity.pid)).or_default() += loan.bytes;
            }
        }
    }
    let lenders_of = |uuid: Uuid, borrower: u32| {
        let lends = |other: &&Listed| {
            let other = &other.told;
            ![pid, borrower].contains(&other.process.identity.pid)
                && works_on(other).iter().any(|(_, known)| *known == uuid)
        };
        rows.iter().filter(lends).map(|other| other.told.process.identity.pid).collect()
    };
    let row = |((gpu, pid), bytes)| {
        let uuid = gpus.iter().find(|(known, _)| *known == gpu).map(|(_, uuid)| *uuid);
        let with = uuid.map_or_else(Vec::new, |uuid| lenders_of(uuid, pid));
        Lent { gpu: format!("gpu{gpu}"), pid, bytes, with }
    };
    lent.into_iter().map(row).collect()
}

/// The GPUs on which a process has a context, by its numbering and by what they are.
fn works_on(told: &Snapshot) -> Vec<(u32, Uuid)> {
    let mut works: Vec<u32> = told.contexts.rows.iter().map(|context| context.device).collect();
    works.sort_unstable();
    works.dedup();
    works.into_iter().filter_map(|gpu| Some((gpu, told.levels.gpu(gpu)?.uuid))).collect()
}

fn text(rows: &[Listed], of_others: usize, drained: &[(u32, Uuid)], numbers: &Numbers) -> String {
    let mut page = Page::new(terminal::colours());
    match (rows.len(), of_others) {
        (0, 0) => {
            page.line("no process runs under gpupool");
            let session = match std::env::var("XDG_RUNTIME_DIR") {
                Ok(here) if !here.is_empty() => format!("with another XDG_RUNTIME_DIR than {here}"),
                _ => "with an XDG_RUNTIME_DIR, as in a login session: here there is none".to_owned(),
            };
            page.entry("  ", &format!("listed are those that have allocated GPU memory; none is with {UNSEEN}, without a folder for pages (gpupool doctor), or, of another session, {session}"));
        }
        (_, 0) => {}
        (_, 1) => page.line("1 process runs under another version of gpupool; that version's `gpupool ps` lists it"),
        (_, more) => page.line(&format!(
            "{more} processes run under other versions of gpupool; those versions' `gpupool ps` lists them"
        )),
    }
    for (number, uuid) in drained {
        let ends = drain::what_ends_it(uuid, &number.to_string());
        page.line(&format!("GPU {number} (GPU-{}) is drained; {ends}", dashed(uuid)));
    }
    if rows.is_empty() {
        return page.into_text();
    }
    let are_named = numbers.are_others(rows.iter().map(|row| &row.told));
    let own = rustix::process::geteuid().as_raw();
    let has_users = rows.iter().any(|row| row.owner != own);
    let has_ranks = rows.iter().any(|row| row.told.process.rank.is_some());
    let (headings, sides): (&'static [&'static str], &'static [u8]) = match (has_users, has_ranks) {
        (false, false) => (&["pid", "state", "mode", "priority", "held", "used", "name"], b"rllrrrl"),
        (true, false) => (&["pid", "user", "state", "mode", "priority", "held", "used", "name"], b"rlllrrrl"),
        (false, true) => (&["pid", "rank", "state", "mode", "priority", "held", "used", "name"], b"rrllrrrl"),
        (true, true) => (&["pid", "user", "rank", "state", "mode", "priority", "held", "used", "name"], b"rlrllrrrl"),
    };
    let mut table = Table::new(headings, sides, BELOW);
    for row @ Listed { told, .. } in rows {
        let mut cells = vec![told.process.identity.pid.to_string()];
        cells.extend(has_users.then(|| user(row.owner)));
        cells.extend(has_ranks.then(|| told.process.rank.map_or_else(String::new, |rank| rank.to_string())));
        cells.extend([
            row.word().to_owned(),
            told.levels.mode.clone(),
            told.levels.priority.to_string(),
            format_size(row.held()),
            format_size(row.used()),
            name(told),
        ]);
        let mut more = listed("", &below(told));
        more.extend(not_counted(&told.levels.mode).map(str::to_owned));
        more.extend(which(told, numbers).filter(|_| are_named));
        more.extend(listed("far: ", &far(told)));
        more.extend(listed("borrows: ", &borrows(told)));
        more.extend(listed("lends: ", &lends(row, rows).iter().map(lent_in_words).collect::<Vec<_>>()));
        more.extend(listed("labels: ", &labels(told)));
        table.row(cells, more);
    }
    page.table(&table);
    page.into_text()
}

/// These as lines below a process; none where there are none.
fn listed(label: &str, parts: &[String]) -> Vec<String> {
    if parts.is_empty() { Vec::new() } else { terminal::list(label, parts, terminal::width() - BELOW) }
}

/// What a process has on GPUs that it was not allocated for. The host lends nobody's memory: what lies there is told as far.
fn borrows(told: &Snapshot) -> Vec<String> {
    let loans = &told.levels.loans;
    let of = |loan: &gpupool_metrics::Loan| {
        format!("{} of {} for gpu{}", format_size(loan.bytes), loan.lender(), loan.borrower)
    };
    let mut all: Vec<String> = loans.rows.iter().filter(|loan| !loan.on_host).map(of).collect();
    all.extend((loans.more > 0).then(|| format!("{} more", loans.more)));
    all
}

fn lent_in_words(lent: &Lent) -> String {
    let with = match lent.with.as_slice() {
        [] => String::new(),
        [one] => format!(" (the same that process {one} lends)"),
        more => {
            let more: Vec<String> = more.iter().map(u32::to_string).collect();
            format!(" (the same that processes {} lend)", more.join(", "))
        }
    };
    format!("{} of {} to process {}{with}", format_size(lent.bytes), lent.gpu, lent.pid)
}

/// Which GPU each number means of those of which a process has something.
fn which<'a>(told: &'a Snapshot, numbers: &'a Numbers) -> impl Iterator<Item = String> + 'a {
    let places = told.levels.places.rows.iter();
    let used = places.filter(|place| place.is_gpu() && (place.drained || place.held > 0 || place.own > 0));
    used.filter_map(|place| {
        let gpu = told.levels.gpu(place.number)?;
        // One that is not known has none.
        gpu.uuid_text()?;
        Some(format!("{} is {}", place.name(), numbers.name(&gpu.uuid)))
    })
}

/// Which program it is: of an interpreter, with what that runs.
fn name(told: &Snapshot) -> String {
    let process = &told.process;
    let (first, rest) = process.command.split_once(' ').unwrap_or((&process.command, ""));
    let first = first.rsplit('/').next().unwrap_or_default();
    let is_interpreter =
        ["python", "pypy", "julia", "ruby", "perl", "node"].iter().any(|known| first.starts_with(known));
    if is_interpreter && !rest.is_empty() { format!("{first} {rest}") } else { process.name.clone() }
}

/// A user's name, where the system's own list has it.
fn user(number: u32) -> String {
    let known = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let of = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        (fields.nth(1)?.parse::<u32>().ok()? == number).then_some(name)
    };
    known.lines().find_map(of).unwrap_or_else(|| number.to_string())
}

/// What a process has where: nothing of places where it has nothing.
fn below(told: &Snapshot) -> Vec<String> {
    let mut parts = Vec::new();
    for place in &told.levels.places.rows {
        if place.drained {
            parts.push(format!("{} drained", place.name()));
        }
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
    if parts.is_empty() { vec!["nothing".to_owned()] } else { parts }
}

/// What nobody counts of a program in this mode, though it has it.
fn not_counted(mode: &str) -> Option<&'static str> {
    match mode {
        "spill" => Some("not counted: what the driver had room for (mode spill)"),
        "trace" => Some("not counted: its memory, which is the driver's (mode trace)"),
        _ => None,
    }
}

/// What lies elsewhere than on the GPU that uses it, and what was done about that.
fn far(told: &Snapshot) -> Vec<String> {
    let residence = &told.levels.residence;
    let sum = |counters: &[Counter]| counters.iter().map(|counter| told.counter(*counter)).sum::<u64>();
    let came = sum(&[Counter::CameFromPeersBytes, Counter::CameFromHostBytes]);
    let left = sum(&[Counter::LeftForPeersBytes, Counter::LeftForHostBytes]);
    let lies = |bytes: u64, place: &str| (bytes > 0).then(|| format!("{} {place}", format_size(bytes)));
    let lies = [lies(residence.on_peers, "on other GPUs"), lies(residence.on_host, "on the host")];
    let mut parts: Vec<String> = lies.into_iter().flatten().collect();
    if came + left > 0 {
        parts.push(format!("moved: {} near, {} away", format_size(came), format_size(left)));
    }
    parts
}

/// How much has which name, as much as one line holds: the rest is in `--json`.
fn labels(told: &Snapshot) -> Vec<String> {
    let of = |label: &Label| {
        let far = label.on_peers + label.on_host;
        let far = if far > 0 { format!(" ({} far)", format_size(far)) } else { String::new() };
        // A name may be of any length, and what follows it is not to be cut.
        let behind = format!(" {}{far}", format_size(label.bytes));
        let room = (terminal::width() - BELOW).saturating_sub("labels: ".len() + behind.len() + 1);
        format!("{}{behind}", terminal::shorten(&terminal::clean(&label.name), room))
    };
    let mut named: Vec<String> = told.labels.rows.iter().take(LABELS_SHOWN).map(of).collect();
    let more = told.labels.rows.len().saturating_sub(LABELS_SHOWN) as u64 + u64::from(told.labels.more);
    named.extend((more > 0).then(|| format!("{more} more")));
    named
}
