//! Memory that lay far from the GPU that used it.

use gpupool_config::format_size;
use gpupool_events::TierReader;

use super::chart::chart;
use super::rows::{BELOW, CONTEXT_ROWS, FOLDED, show};
use crate::report::model::{Logs, NEAR_AND_FAR, together};
use crate::terminal::{Page, Table, clean, width, wrap};
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
    let mut readers: Vec<(Vec<usize>, TierReader)> = Vec::new();
    for (index, process) in logs.processes.iter().enumerate() {
        let worst = process.worst_readers().into_iter().filter(|reader| reader.lost >= WORTH).take(SHOWN);
        readers.extend(worst.map(|reader| (vec![index], reader.clone())));
    }
    if readers.len() > FOLDED && logs.processes.len() > 1 {
        readers = folded(readers);
    }
    if readers.is_empty() {
        return;
    }
    page.heading("Functions that lost most by far memory, as estimated");
    let mut table = Table::new(&["process", "GPU", "launches", "far in one", "lost", "function"], b"lrrrrl", BELOW);
    let hidden = readers.len().saturating_sub(CONTEXT_ROWS);
    for (processes, reader) in readers.iter().take(CONTEXT_ROWS) {
        let TierReader { home, function, launches, on_peers, on_host, lost, .. } = reader;
        let whose = match processes[..] {
            [_] => together(labels, processes),
            _ => format!("{} of them", processes.len()),
        };
        let cells = vec![
            whose,
            home.to_string(),
            launches.to_string(),
            format_size(on_peers.saturating_add(*on_host)),
            words::time(*lost),
            function.clone(),
        ];
        table.row(cells, below(reader));
    }
    show(page, table, hidden);
}

/// A function at one line of the program as one row, whatever process ran it: what all lost, and the most that one launch named. What
/// lost most comes first.
fn folded(readers: Vec<(Vec<usize>, TierReader)>) -> Vec<(Vec<usize>, TierReader)> {
    let mut sums: Vec<(Vec<usize>, TierReader)> = Vec::new();
    for (processes, reader) in readers {
        let same = |other: &TierReader| {
            (&other.function, &other.site, &other.why, other.home)
                == (&reader.function, &reader.site, &reader.why, reader.home)
        };
        match sums.iter_mut().find(|(_, known)| same(known)) {
            Some((known, sum)) => {
                known.extend(processes);
                sum.launches = sum.launches.saturating_add(reader.launches);
                sum.lost += reader.lost;
                if sum.on_peers.saturating_add(sum.on_host) < reader.on_peers.saturating_add(reader.on_host) {
                    (sum.on_peers, sum.on_host) = (reader.on_peers, reader.on_host);
                }
            }
            None => sums.push((processes, reader)),
        }
    }
    sums.sort_by(|(_, a), (_, b)| b.lost.total_cmp(&a.lost));
    sums
}

fn below(reader: &TierReader) -> Vec<String> {
    // A sentence, in which the setting that is why must not be cut out.
    let mut below = wrap(&clean(&format!("not moved because {}", reader.why)), width() - BELOW);
    below.extend(reader.site.as_ref().map(ToString::to_string));
    below
}
