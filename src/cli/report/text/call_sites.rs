//! Lines of the program, by what they cost.

use std::collections::HashMap;

use super::rows::{BELOW, ROWS, show};
use crate::report::model::{Logs, SiteSum};
use crate::terminal::{Page, Table, width};
use crate::words;

/// The lines that cost most, over all processes.
pub fn section(page: &mut Page, logs: &Logs) {
    let mut sums = HashMap::new();
    for (site, sum) in logs.processes.iter().flat_map(|process| &process.sites) {
        let total: &mut SiteSum = sums.entry(site).or_default();
        total.contexts += sum.contexts;
        total.modules += sum.modules;
        total.memory = total.memory.saturating_add(sum.memory);
        total.seconds += sum.seconds;
    }
    if sums.is_empty() {
        return;
    }
    let mut all: Vec<_> = sums.into_iter().map(|(site, sum)| (words::place(site, width()), sum)).collect();
    all.sort_by(|a, b| b.1.memory.cmp(&a.1.memory).then(b.1.seconds.total_cmp(&a.1.seconds)).then(a.0.cmp(&b.0)));
    page.heading("Lines that took GPU memory with contexts and modules");
    let mut table = Table::new(&["memory", "contexts", "modules", "loading", "line"], b"rrrrl", BELOW);
    let hidden = all.len().saturating_sub(ROWS);
    for (place, sum) in all.into_iter().take(ROWS) {
        let numbers =
            [words::signed(sum.memory), sum.contexts.to_string(), sum.modules.to_string(), words::time(sum.seconds)];
        table.row(numbers.into_iter().chain([place]).collect(), Vec::new());
    }
    show(page, table, hidden);
}
