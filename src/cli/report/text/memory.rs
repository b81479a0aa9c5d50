//! The memory of the pool.

use std::collections::BTreeMap;

use gpupool_config::format_size;

use super::chart::chart;
use super::rows::{BELOW, ROWS};
use crate::report::model::{Logs, together};
use crate::terminal::{Page, Table};
use crate::words::{self, LENDER_ASLEEP, LENDER_COST};

/// What the program used of the pool, by place, and by the names that it gave.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    used(page, logs, labels);
    let rows: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.named.iter().map(|(name, line)| (label.as_str(), name.as_str(), line)))
        .filter(|(_, _, line)| line.peak() > 0)
        .collect();
    if !rows.is_empty() {
        chart(page, "Pooled memory by label", &rows, logs);
    }
}

fn used(page: &mut Page, logs: &Logs, labels: &[String]) {
    let rows: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.levels.iter().map(|(place, line)| (label.as_str(), place.as_str(), line)))
        .filter(|(_, _, line)| line.peak() > 0)
        .collect();
    if rows.is_empty() {
        peaks(page, logs, labels);
    } else {
        chart(page, "Pooled memory in use", &rows, logs);
    }
    lenders(page, logs, labels);
}

/// GPUs that only lent memory: what keeping them awake would have brought.
fn lenders(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut alike: BTreeMap<Vec<u32>, Vec<usize>> = BTreeMap::new();
    for (index, process) in logs.processes.iter().enumerate() {
        let asleep: Vec<u32> = process.left_asleep().into_iter().collect();
        if !asleep.is_empty() {
            alike.entry(asleep).or_default().push(index);
        }
    }
    for (asleep, processes) in alike.iter().take(ROWS) {
        let gpus = words::ranges(asleep);
        let advice = format!(
            "GPU {gpus} only lent memory. Such a GPU lowers its clocks where no other process has a context on it, and is read over \
             NVLink {LENDER_ASLEEP}; GPUPOOL_LENDERS=awake keeps it awake, for {LENDER_COST}."
        );
        match together(labels, processes) {
            whose if processes.len() == 1 => page.entry(&format!("  {whose}: "), &advice),
            whose => page.entry("  ", &format!("{whose}: {advice}")),
        }
    }
}

/// The most that was used, which a log without levels still knows.
fn peaks(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut table = Table::new(&["process", "place", "peak", "held at exit"], b"llrr", BELOW);
    let mut any = false;
    for (process, label) in logs.processes.iter().zip(labels) {
        for peak in process.exit.iter().flat_map(|exit| &exit.peak).filter(|peak| peak.peak_used > 0) {
            any = true;
            table.row(
                vec![label.clone(), peak.place.clone(), format_size(peak.peak_used), format_size(peak.held)],
                Vec::new(),
            );
        }
    }
    if any {
        page.heading("Pooled memory");
        page.table(&table);
    }
}
