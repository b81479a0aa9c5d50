//! Modules: code that was loaded on the GPUs.

use gpupool_config::format_size;

use super::rows::{BELOW, ROWS, show};
use crate::report::model::{Logs, ModuleGroup, ModuleSum};
use crate::terminal::{Page, Table};
use crate::words;

pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut all: Vec<(&String, &ModuleGroup, &ModuleSum)> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.modules.iter().map(move |(group, sum)| (label, group, sum)))
        .collect();
    if all.is_empty() {
        return;
    }
    all.sort_by(|a, b| (b.2.memory, b.2.bytes).cmp(&(a.2.memory, a.2.bytes)).then(a.1.cmp(b.1)));
    page.heading("Modules");
    let headings = &["process", "GPU", "modules", "kernels", "image", "memory", "time"];
    let mut table = Table::new(headings, b"lrrrrrr", BELOW);
    for (label, group, sum) in all.iter().take(ROWS) {
        let loading = if sum.eager > 0 { ", eager" } else { "" };
        let malloc = if sum.uses_malloc { ", uses device malloc" } else { "" };
        let from = format!("{}{loading}{malloc}: {}", group.kind, group.file);
        table.row(
            vec![
                (*label).clone(),
                group.device.map_or("any".to_owned(), |device| device.to_string()),
                sum.modules.to_string(),
                sum.kernels.to_string(),
                format_size(sum.bytes),
                words::signed(sum.memory),
                words::time(sum.seconds),
            ],
            vec![from],
        );
    }
    show(page, table, all.len().saturating_sub(ROWS));
}
