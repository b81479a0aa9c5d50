//! Quantities of two runs, and which of them differ. Pure.

use std::collections::BTreeMap;

use gpupool_events::Site;

use crate::report::{Logs, NEAR_AND_FAR, Process, findings};

/// What a quantity is about, in the order of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    Run,
    Peaks,
    Growth,
    Labels,
    Contexts,
    Sites,
    Findings,
    Far,
    Moves,
    Pinned,
}

impl Section {
    pub const ALL: [Section; 10] = [
        Section::Run,
        Section::Peaks,
        Section::Growth,
        Section::Labels,
        Section::Contexts,
        Section::Sites,
        Section::Findings,
        Section::Far,
        Section::Moves,
        Section::Pinned,
    ];

    /// In JSON.
    pub fn word(self) -> &'static str {
        match self {
            Section::Run => "run",
            Section::Peaks => "peaks",
            Section::Growth => "growth",
            Section::Labels => "labels",
            Section::Contexts => "contexts",
            Section::Sites => "call_sites",
            Section::Findings => "findings",
            Section::Far => "far",
            Section::Moves => "moves",
            Section::Pinned => "pinned",
        }
    }

    pub fn heading(self) -> &'static str {
        match self {
            Section::Run => "The run",
            Section::Peaks => "Peaks of pooled memory, all processes added up",
            Section::Growth => "Lines that made the pool grow, bytes in the life of the process",
            Section::Labels => "Peaks by label",
            Section::Contexts => "Contexts",
            Section::Sites => "Lines that took GPU memory with contexts and modules",
            Section::Findings => "Findings, how often each was made",
            Section::Far => "Seconds lost by far memory, by function",
            Section::Moves => "Moves",
            Section::Pinned => "Pinned host memory, peaks",
        }
    }
}

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Seconds,
    Number,
}

impl Unit {
    /// In JSON.
    pub fn word(self) -> &'static str {
        match self {
            Unit::Bytes => "bytes",
            Unit::Seconds => "seconds",
            Unit::Number => "number",
        }
    }
}

/// A quantity that is not the same in both runs; none where a run has no such thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub section: Section,
    pub name: String,
    pub unit: Unit,
    pub before: Option<f64>,
    pub after: Option<f64>,
}

impl Change {
    fn size(&self) -> f64 {
        (self.after.unwrap_or(0.0) - self.before.unwrap_or(0.0)).abs()
    }
}

/// Seconds that two runs of the same program differ in by chance.
const CHANCE: f64 = 0.05;

/// All that differs, by section, what has changed most first.
pub fn between(before: &Logs, after: &Logs) -> Vec<Change> {
    let (before, mut after) = (quantities(before), quantities(after));
    let mut changes: Vec<Change> = Vec::new();
    for (key, value) in before {
        let other = after.remove(&key);
        changes.push(change(key, Some(value.1), other.map(|other| other.1), value.0));
    }
    changes.extend(after.into_iter().map(|(key, (unit, value))| change(key, None, Some(value), unit)));
    let is_news = |change: &Change| match change.unit {
        Unit::Seconds => change.size() > CHANCE * change.before.unwrap_or(0.0).max(change.after.unwrap_or(0.0)),
        _ => change.size() > 0.0,
    };
    changes.retain(is_news);
    changes.sort_by(|a, b| {
        a.section.cmp(&b.section).then(b.size().total_cmp(&a.size())).then_with(|| a.name.cmp(&b.name))
    });
    changes
}

fn change((section, name): Key, before: Option<f64>, after: Option<f64>, unit: Unit) -> Change {
    Change { section, name, unit, before, after }
}

type Key = (Section, String);

/// Every number of a run by what it is, processes added up.
fn quantities(logs: &Logs) -> BTreeMap<Key, (Unit, f64)> {
    let mut all = BTreeMap::new();
    let mut add = |section: Section, name: &str, unit: Unit, value: f64| {
        all.entry((section, name.to_owned())).or_insert((unit, 0.0)).1 += value;
    };
    for process in &logs.processes {
        of_process(process, &mut add);
    }
    for found in findings(&logs.processes) {
        let place = found.site.as_ref().map(|site| format!(" at {}", place(site))).unwrap_or_default();
        add(Section::Findings, &format!("{}{place}", found.code), Unit::Number, found.times as f64);
    }
    all
}

fn of_process(process: &Process, add: &mut impl FnMut(Section, &str, Unit, f64)) {
    let bytes = |bytes: u64| bytes as f64;
    add(Section::Run, "processes", Unit::Number, 1.0);
    add(Section::Run, "time", Unit::Seconds, process.last - process.origin());
    add(Section::Run, "OUT_OF_MEMORY", Unit::Number, process.refusals.times as f64);
    if let Some(exit) = &process.exit {
        add(Section::Run, "allocations", Unit::Number, exit.allocations as f64);
        add(Section::Run, "allocations from freed memory", Unit::Number, exit.reuses as f64);
        add(Section::Run, "bytes never freed", Unit::Bytes, bytes(exit.live_bytes));
        add(Section::Run, "bytes never released (cuMemCreate)", Unit::Bytes, bytes(exit.live_handle_bytes));
    }
    // Exact where the process came to its end; else what was told in steps.
    match &process.exit {
        Some(exit) => {
            exit.peak.iter().for_each(|peak| add(Section::Peaks, &peak.place, Unit::Bytes, bytes(peak.peak_used)))
        }
        None => {
            process.levels.iter().for_each(|(place, line)| add(Section::Peaks, place, Unit::Bytes, bytes(line.peak())))
        }
    }
    if process.all.peak() > 0 {
        add(Section::Peaks, "all places at once", Unit::Bytes, bytes(process.all.peak()));
    }
    for (name, line) in NEAR_AND_FAR.iter().zip(["near its GPU", "on other GPUs", "on the host"]) {
        let peak = process.peak_of(name);
        if peak > 0 {
            add(Section::Peaks, line, Unit::Bytes, bytes(peak));
        }
    }
    for (site, sum) in process.grown.sites() {
        add(Section::Growth, &place(site), Unit::Bytes, bytes(sum.bytes));
    }
    if process.grown.elsewhere.bytes > 0 {
        add(Section::Growth, "other places", Unit::Bytes, bytes(process.grown.elsewhere.bytes));
    }
    for (label, line) in &process.named {
        add(Section::Labels, label, Unit::Bytes, bytes(line.peak()));
    }
    for context in &process.contexts {
        let gpu = context.made.device;
        add(Section::Contexts, &format!("GPU {gpu}, contexts"), Unit::Number, 1.0);
        add(Section::Contexts, &format!("GPU {gpu}, their memory"), Unit::Bytes, bytes(context.made.cost.unwrap_or(0)));
        if context.was_used() == Some(false) {
            add(Section::Contexts, &format!("GPU {gpu}, never used"), Unit::Number, 1.0);
        }
    }
    for (site, sum) in &process.sites {
        add(Section::Sites, &place(site), Unit::Bytes, sum.memory.max(0) as f64);
    }
    for reader in process.readers.values() {
        add(Section::Far, &reader.function, Unit::Seconds, reader.lost);
    }
    if let Some(total) = &process.moves.total {
        add(Section::Moves, "moves", Unit::Number, total.times as f64);
        add(Section::Moves, "came near", Unit::Bytes, bytes(total.came));
        add(Section::Moves, "left", Unit::Bytes, bytes(total.left));
        add(Section::Moves, "seconds that they took", Unit::Seconds, total.took);
        add(Section::Moves, "seconds that they saved", Unit::Seconds, total.saved);
    }
    add(Section::Moves, "chunks cut anew", Unit::Number, process.moves.repacks.times as f64);
    for (to, sum) in &process.moves.by_hand {
        add(Section::Moves, &format!("moved by the program to {to}"), Unit::Bytes, bytes(sum.bytes));
    }
    for (name, line) in process.pinned.lines() {
        add(Section::Pinned, name, Unit::Bytes, bytes(line.peak()));
    }
}

/// A place in the program, without its line: that moves with every change above it.
fn place(site: &Site) -> String {
    match (site.program_frame(), site.native.first()) {
        (Some(frame), _) => {
            // Who called it tells places of one function apart.
            let at = site.python.iter().position(|own| own == frame).unwrap_or(0);
            let caller = site.python.get(at + 1).map(|caller| format!(" from {}", caller.function));
            format!("{} in {}{}", frame.file, frame.function, caller.unwrap_or_default())
        }
        (None, Some(frame)) => match &frame.symbol {
            Some(symbol) => format!("{symbol} in {}", frame.object),
            None => format!("{}+{:#x}", frame.object, frame.offset),
        },
        (None, None) => "an unknown place".to_owned(),
    }
}
