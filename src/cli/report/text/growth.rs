//! Lines of the program that asked for pooled memory.

use std::collections::HashMap;

use gpupool_config::format_size;
use gpupool_events::Site;

use super::rows::{BELOW, ROWS, show};
use crate::report::model::{GrownSum, Holder, Logs};
use crate::terminal::{Page, Table, width};
use crate::words;

/// Who held memory when most was in use, where the log has a line for each block; else whom the pool grew for.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    if logs.processes.iter().any(|process| process.holders.is_known()) {
        held(page, logs, labels);
    } else {
        grown(page, logs);
    }
}

fn held(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut rows: Vec<(&String, [u64; 2], &Holder, Option<&Site>)> = Vec::new();
    for (label, process) in labels.iter().zip(&logs.processes) {
        let holders = &process.holders;
        rows.extend(holders.all().into_iter().map(|one| (label, holders.at_peak(one), one, holders.site(one))));
    }
    rows.retain(|(_, [bytes, _], ..)| *bytes > 0);
    rows.sort_by_key(|(_, bytes, ..)| std::cmp::Reverse(*bytes));
    if rows.is_empty() {
        return;
    }
    page.heading("Who held pooled memory when its process held most");
    let mut table = Table::new(&["process", "bytes", "far", "blocks ever", "label"], b"lrrrl", BELOW);
    for (label, [bytes, far], holder, site) in rows.iter().take(ROWS) {
        let name = holder.label.clone().unwrap_or_default();
        let cells = vec![(*label).clone(), format_size(*bytes), format_size(*far), holder.blocks.to_string(), name];
        table.row(cells, words::places(*site, width() - BELOW));
    }
    show(page, table, rows.len().saturating_sub(ROWS));
}

fn grown(page: &mut Page, logs: &Logs) {
    let mut sums: HashMap<&Site, GrownSum> = HashMap::new();
    for (site, sum) in logs.processes.iter().flat_map(|process| process.grown.sites()) {
        let all = sums.entry(site).or_default();
        all.times += sum.times;
        all.bytes = all.bytes.saturating_add(sum.bytes);
        all.far = all.far.saturating_add(sum.far);
    }
    if sums.is_empty() {
        return;
    }
    let mut rows: Vec<(String, &Site, GrownSum)> =
        sums.into_iter().map(|(site, sum)| (words::place(site, width()), site, sum)).collect();
    rows.sort_by(|a, b| b.2.bytes.cmp(&a.2.bytes).then_with(|| a.0.cmp(&b.0)));
    page.heading("Lines that made the pool grow");
    let mut table = Table::new(&["bytes", "far then", "times", ""], b"rrrl", BELOW);
    let hidden = rows.len().saturating_sub(ROWS);
    for (_, site, sum) in rows.into_iter().take(ROWS) {
        let cells = vec![format_size(sum.bytes), format_size(sum.far), sum.times.to_string(), String::new()];
        table.row(cells, words::places(Some(site), width() - BELOW));
    }
    show(page, table, hidden);
    page.entry("  ", "in the life of the process; memory that is used again is not in it (GPUPOOL_LOG=gpupool::memory=debug tells of each block)");
}
