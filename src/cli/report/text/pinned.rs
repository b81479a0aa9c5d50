//! Pinned host memory, and the lines that asked for it.

use gpupool_config::format_size;
use gpupool_events::PinnedSite;

use super::chart::chart;
use super::rows::{BELOW, CONTEXT_ROWS, ROWS, show};
use crate::report::model::{Logs, Process};
use crate::terminal::{Page, Table, width};
use crate::words;

/// The section; nothing where no memory was pinned.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    let processes: Vec<(&String, &Process)> = labels.iter().zip(&logs.processes).collect();
    let rows: Vec<_> = processes
        .iter()
        .flat_map(|(label, process)| process.pinned.lines().map(|(name, line)| (label.as_str(), name, line)))
        .filter(|(_, _, line)| line.peak() > 0)
        .collect();
    if !rows.is_empty() {
        chart(page, "Pinned host memory", &rows, logs);
        if rows.iter().any(|(_, name, _)| *name == "own") {
            page.entry("  ", "own: the program's own memory, registered");
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
        let place = words::place(&site.site.clone().unwrap_or_default(), width() - BELOW);
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
