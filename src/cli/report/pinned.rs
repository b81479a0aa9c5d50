//! Pinned host memory: how much there was over time, and which lines of the program asked for it.

use std::collections::BTreeMap;

use gpupool_config::format_size;
use gpupool_events::{PinnedLevel, PinnedReturn, PinnedSite};
use serde_json::{Map, Value, json};

use super::gather::Logs;
use super::json::PARTS;
use super::model::{LeftOut, Process};
use super::text::{BELOW, CONTEXT_ROWS, ROWS, chart, show};
use super::timeline::Timeline;
use super::words;
use crate::terminal::{Page, Table, WIDTH};

/// Reasons for returning memory that are kept apart.
const REASONS: usize = 16;

/// What a process did with pinned memory.
#[derive(Default)]
pub struct Pinned {
    /// Bytes that were pinned.
    pinned: Timeline,
    /// Bytes that the program held of them.
    requested: Timeline,
    /// The part of both that was its own memory, registered.
    registered: Timeline,
    /// Bytes that went back, by reason.
    returned: BTreeMap<String, u64>,
    /// The largest first.
    sites: Vec<PinnedSite>,
}

impl Pinned {
    /// The level at `seconds` from the start.
    pub fn level(&mut self, seconds: f64, level: &PinnedLevel) {
        self.pinned.add(seconds, level.pinned);
        self.requested.add(seconds, level.requested);
        self.registered.add(seconds, level.registered);
    }

    /// Memory went back.
    pub fn returned(&mut self, returned: PinnedReturn) {
        let known = self.returned.contains_key(&returned.why) || self.returned.len() < REASONS;
        let why = if known { returned.why } else { "other reasons".to_owned() };
        let sum = self.returned.entry(why).or_default();
        *sum = sum.saturating_add(returned.bytes);
    }

    /// What a line did, all together.
    pub fn site(&mut self, site: PinnedSite, more: &mut LeftOut) {
        super::model::keep(&mut self.sites, site, "pinned sites", more);
    }

    fn lines(&self) -> [(&'static str, &Timeline); 3] {
        [("pinned", &self.pinned), ("in use", &self.requested), ("own", &self.registered)]
    }
}

/// The section for people; nothing where no memory was pinned.
pub fn text(page: &mut Page, logs: &Logs, labels: &[String]) {
    let processes: Vec<(&String, &Process)> = labels.iter().zip(&logs.processes).collect();
    let rows: Vec<_> = processes
        .iter()
        .flat_map(|(label, process)| process.pinned.lines().map(|(name, line)| (label.as_str(), name, line)))
        .filter(|(_, _, line)| line.peak() > 0)
        .collect();
    if !rows.is_empty() {
        chart(page, "Pinned host memory", &rows, logs);
        if rows.iter().any(|(_, name, _)| *name == "own") {
            page.line("  own: the program's own memory, registered");
        }
        for (label, process) in processes.iter().take(CONTEXT_ROWS) {
            let returned = process.pinned.returned.iter();
            let returned: Vec<String> =
                returned.map(|(why, bytes)| format!("{} ({why})", format_size(*bytes))).collect();
            if !returned.is_empty() {
                page.entry(&format!("  {label} returned "), &returned.join(", "));
            }
        }
    }
    let mut sites: Vec<(&String, &PinnedSite)> = processes
        .iter()
        .flat_map(|(label, process)| process.pinned.sites.iter().map(move |site| (*label, site)))
        .collect();
    if sites.is_empty() {
        return;
    }
    sites.sort_by_key(|(_, site)| std::cmp::Reverse((site.pinned, site.requested)));
    page.heading("Lines that pinned host memory");
    let headings = &["process", "calls", "asked for", "pinned for it", "peak", "at exit", "time"];
    let mut table = Table::new(headings, b"lrrrrrr", BELOW);
    for (label, site) in sites.iter().take(ROWS) {
        let place = words::place(&site.site.clone().unwrap_or_default(), WIDTH - BELOW);
        table.row(
            vec![
                (*label).clone(),
                site.allocations.to_string(),
                format_size(site.requested),
                format_size(site.pinned),
                format_size(site.peak),
                format_size(site.live),
                words::time(site.seconds),
            ],
            vec![place],
        );
    }
    show(page, table, sites.len().saturating_sub(ROWS));
}

/// The section of a process of so many seconds, for programs.
pub fn json(pinned: &Pinned, seconds: f64) -> Value {
    let level = |(name, line): (&str, &Timeline)| {
        (name.replace(' ', "_"), json!({"peak": line.peak(), "bytes": line.parts(PARTS, seconds)}))
    };
    json!({
        "seconds_per_part": seconds / PARTS as f64, "levels": pinned.lines().map(level).into_iter().collect::<Map<_, _>>(),
        "returned": pinned.returned, "sites": pinned.sites,
    })
}
