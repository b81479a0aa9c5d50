//! Memory that lay far from the GPU that used it.

use gpupool_config::format_size;
use gpupool_events::TierReader;

use super::chart::chart;
use super::rows::BELOW;
use crate::report::model::{Logs, NEAR_AND_FAR};
use crate::terminal::{Page, Table};
use crate::words;

/// Functions that are shown of each process.
const SHOWN: usize = 8;
/// Seconds that are worth a line.
const WORTH: f64 = 0.001;

/// Where memory lay over time, and the functions that paid most for what was far.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut rows = Vec::new();
    for (label, process) in labels.iter().zip(&logs.processes) {
        let lines = NEAR_AND_FAR.into_iter().filter_map(|place| process.residence.get_key_value(place));
        rows.extend(lines.filter(|(_, line)| line.peak() > 0).map(|(place, line)| (label.as_str(), *place, line)));
    }
    if !rows.is_empty() {
        chart(page, "Pooled memory near the GPU that uses it, and far", &rows, logs);
    }
    let mut table = Table::new(&["process", "GPU", "launches", "far in one", "lost", "function"], b"lrrrrl", BELOW);
    let mut any = false;
    for (process, label) in logs.processes.iter().zip(labels) {
        for reader in process.worst_readers().into_iter().filter(|reader| reader.lost >= WORTH).take(SHOWN) {
            any = true;
            let TierReader { home, function, launches, on_peers, on_host, lost, .. } = reader;
            let cells = vec![
                label.clone(),
                home.to_string(),
                launches.to_string(),
                format_size(on_peers.saturating_add(*on_host)),
                words::time(*lost),
                function.clone(),
            ];
            table.row(cells, below(reader));
        }
    }
    if any {
        page.heading("Functions that lost most by far memory, as estimated");
        page.table(&table);
    }
}

fn below(reader: &TierReader) -> Vec<String> {
    let mut below = vec![format!("not moved because {}", reader.why)];
    below.extend(reader.site.as_ref().map(ToString::to_string));
    below
}
