//! A quantity over time, drawn with blocks.

use gpupool_config::format_size;

use super::rows::{CONTEXT_ROWS, FOLDED};
use crate::report::model::{Logs, Timeline};
use crate::terminal::{Page, WIDTH, clean, shorten, width};
use crate::words;

/// Columns of the memory chart on a terminal of the usual width.
const CHART: usize = 44;

/// What a line of a chart shows.
struct Row<'a> {
    label: String,
    name: &'a str,
    parts: Vec<u64>,
    peak: u64,
}

/// One line of blocks a row of process, name and quantity: its height is the quantity, against the most of all rows. Many processes are
/// added up, name by name, each from its own start.
pub fn chart<'a>(page: &mut Page, heading: &str, rows: &[(&str, &'a str, &'a Timeline)], logs: &Logs) {
    let end = logs.processes.iter().map(|process| process.last - process.origin()).fold(0.0, f64::max);
    // Names that the program gave are longer than those of places.
    let widest = rows.iter().map(|(_, name, _)| clean(name).chars().count()).max().unwrap_or(0).clamp(6, 16);
    let chart = CHART.saturating_sub(WIDTH - width() + widest - 6).max(4);
    let own = |(label, name, line): &(&str, &'a str, &'a Timeline)| Row {
        label: (*label).to_owned(),
        name,
        parts: line.parts(chart, end),
        peak: line.peak(),
    };
    let is_folded = rows.len() > FOLDED && logs.processes.len() > 1;
    let rows: Vec<Row> = if is_folded { folded(rows, chart, end) } else { rows.iter().map(own).collect() };
    let most = rows.iter().map(|row| row.peak).max().unwrap_or(0);
    page.heading(&format!("{heading}, from the start to {}", words::time(end)));
    for Row { label, name, parts, peak } in rows.iter().take(CONTEXT_ROWS) {
        let blocks: String = parts.iter().map(|bytes| block(*bytes, most)).collect();
        let (label, name) = (shorten(&clean(label), 12), shorten(&clean(name), widest));
        page.line(&format!("  {label:<12} {name:<widest$} {blocks} {:>9}", format_size(*peak)));
    }
    if is_folded {
        page.line("  added up, each from its own start; --json has each process");
    }
    if rows.len() > CONTEXT_ROWS {
        page.line(&format!("  {} more; --json has them", rows.len() - CONTEXT_ROWS));
    }
}

/// One row for each name, in the order in which they came, with all processes that have it.
fn folded<'a>(rows: &[(&str, &'a str, &Timeline)], chart: usize, end: f64) -> Vec<Row<'a>> {
    let mut sums: Vec<(Row<'a>, u64)> = Vec::new();
    for (label, name, line) in rows {
        let parts = line.parts(chart, end);
        match sums.iter_mut().find(|(row, _)| row.name == *name) {
            Some((row, times)) => {
                *times += 1;
                row.label = words::count(*times, "process", "processes");
                row.parts.iter_mut().zip(parts).for_each(|(sum, bytes)| *sum = sum.saturating_add(bytes));
                row.peak = row.parts.iter().copied().max().unwrap_or(0);
            }
            None => sums.push((Row { label: (*label).to_owned(), name, parts, peak: line.peak() }, 1)),
        }
    }
    sums.into_iter().map(|(row, _)| row).collect()
}

fn block(bytes: u64, most: u64) -> char {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    // Rounded up: a little is not nothing.
    let height = (u128::from(bytes) * 8).div_ceil(u128::from(most.max(1)));
    BLOCKS[usize::try_from(height).unwrap_or(8).min(8)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_rise_with_what_they_stand_for() {
        let heights: String = [0, 1, 50, 100].map(|bytes| block(bytes, 100)).into_iter().collect();
        assert_eq!(heights, " ▁▄█");
        assert_eq!(block(u64::MAX, u64::MAX), '█');
        assert_eq!(block(0, 0), ' ');
    }
}
