//! Memory that left GPUs because somebody else needed it there.

use gpupool_config::format_size;

use super::rows::{BELOW, ROWS, show};
use crate::report::model::Logs;
use crate::terminal::{Page, Table};

/// By process and GPU, for whom how much left.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    let all: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.given.iter().map(move |given| (label, given)))
        .collect();
    if all.is_empty() {
        return;
    }
    page.heading("Memory that left GPUs for other programs");
    let mut table = Table::new(&["process", "GPU", "bytes", "times", "for"], b"lrrrl", BELOW);
    for (label, ((device, why), (times, bytes))) in all.iter().take(ROWS) {
        let row = vec![(*label).clone(), device.to_string(), format_size(*bytes), times.to_string(), whom(why)];
        table.row(row, Vec::new());
    }
    show(page, table, all.len().saturating_sub(ROWS));
}

fn whom(why: &str) -> String {
    match why {
        "asked" => "one under gpupool that asked",
        "context" => "one without gpupool that had come",
        "growth" => "one about to come: memory in use grew",
        "works" => "one that works there, where nobody did",
        "reserve" => "one that was there: the reserve",
        // What a later version tells.
        other => other,
    }
    .to_owned()
}
