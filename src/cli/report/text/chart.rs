//! A quantity over time, drawn with blocks.

use gpupool_config::format_size;

use super::rows::CONTEXT_ROWS;
use crate::report::model::{Logs, Timeline};
use crate::terminal::{Page, WIDTH, clean, shorten, width};
use crate::words;

/// Columns of the memory chart on a terminal of the usual width.
const CHART: usize = 44;

/// One line of blocks a row of process, name and quantity: its height is the quantity, against the most of all rows.
pub fn chart(page: &mut Page, heading: &str, rows: &[(&str, &str, &Timeline)], logs: &Logs) {
    let end = logs.processes.iter().map(|process| process.last - process.origin()).fold(0.0, f64::max);
    let most = rows.iter().map(|(_, _, line)| line.peak()).max().unwrap_or(0);
    // Names that the program gave are longer than those of places.
    let widest = rows.iter().map(|(_, name, _)| clean(name).chars().count()).max().unwrap_or(0).clamp(6, 16);
    let chart = CHART.saturating_sub(WIDTH - width() + widest - 6).max(4);
    page.heading(&format!("{heading}, from the start to {}", words::time(end)));
    for (label, name, line) in rows.iter().take(CONTEXT_ROWS) {
        let blocks: String = line.parts(chart, end).into_iter().map(|bytes| block(bytes, most)).collect();
        let peak = format_size(line.peak());
        let (label, name) = (shorten(&clean(label), 12), shorten(&clean(name), widest));
        page.line(&format!("  {label:<12} {name:<widest$} {blocks} {peak:>9}"));
    }
    if rows.len() > CONTEXT_ROWS {
        page.line(&format!("  {} more; --json has them", rows.len() - CONTEXT_ROWS));
    }
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
