//! Limits of the device that were set.

use gpupool_config::format_size;

use super::rows::{BELOW, ROWS, show};
use crate::report::model::Logs;
use crate::terminal::{Page, Table, width};
use crate::words;

pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    let all: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.limits.iter().map(move |limit| (label, limit)))
        .collect();
    if all.is_empty() {
        return;
    }
    page.heading("Device limits");
    let mut table = Table::new(&["process", "GPU", "limit", "asked for", "answer", "by"], b"lrlrll", BELOW);
    for (label, limit) in all.iter().take(ROWS) {
        let by = limit.site.as_ref().map_or(limit.by.clone(), |site| words::place(site, width() / 2));
        table.row(
            vec![
                (*label).clone(),
                limit.device.to_string(),
                limit.limit.clone(),
                format_size(limit.value),
                if limit.result == 0 { "set".to_owned() } else { format!("error {}", limit.result) },
                by,
            ],
            Vec::new(),
        );
    }
    show(page, table, all.len().saturating_sub(ROWS));
}
