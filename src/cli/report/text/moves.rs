//! Memory that moved, and what that brought.

use gpupool_config::format_size;

use super::chart::chart;
use super::rows::{BELOW, FOLDED, ROWS, show};
use crate::report::model::{Logs, Moves};
use crate::terminal::{Page, Table};
use crate::words;

/// The section; nothing where nothing moved and nothing was kept from it.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    let moved: Vec<(&String, &Moves)> = labels
        .iter()
        .zip(logs.processes.iter().map(|process| &process.moves))
        .filter(|(_, moves)| moves.is_any())
        .collect();
    if moved.is_empty() {
        return;
    }
    let lines = |(label, moves): &(&'_ String, &'_ Moves)| -> Vec<(String, &'static str)> {
        let any = moves.came.peak() > 0 || moves.left.peak() > 0;
        if any { vec![((*label).clone(), "near"), ((*label).clone(), "away")] } else { Vec::new() }
    };
    let rows: Vec<(String, &str)> = moved.iter().flat_map(lines).collect();
    let line = |(label, what): &(String, &'static str)| {
        let moves = moved.iter().find(|(known, _)| *known == label).map(|(_, moves)| moves);
        moves.map(|moves| if *what == "near" { &moves.came } else { &moves.left })
    };
    let rows: Vec<_> = rows.iter().filter_map(|row| Some((row.0.as_str(), row.1, line(row)?))).collect();
    if !rows.is_empty() {
        chart(page, "Bytes that have come near and that have left so far", &rows, logs);
    }
    page.heading("Memory that moved");
    let mut rows: Vec<(String, Row)> =
        moved.iter().flat_map(|(label, moves)| rows_of(moves).into_iter().map(|row| ((*label).clone(), row))).collect();
    if rows.len() > FOLDED && moved.len() > 1 {
        rows = folded(rows);
    }
    // Of what the program moves itself no time is told: columns that would be empty take the room of the words.
    let is_timed = rows.iter().any(|(_, row)| row.is_timed());
    let mut table = if is_timed {
        Table::new(&["process", "moves", "came near", "left", "took", "saved", "what for"], b"lrrrrrl", BELOW)
    } else {
        Table::new(&["process", "moves", "what for"], b"lrl", BELOW)
    };
    for (label, row) in rows.iter().take(2 * ROWS) {
        let cells = [label.clone(), row.times.to_string()].into_iter();
        let timed = row.timed().into_iter().filter(|_| is_timed);
        table.row(cells.chain(timed).chain([row.what.clone()]).collect(), row.below());
    }
    show(page, table, rows.len().saturating_sub(2 * ROWS));
    for (label, moves) in moved.iter().filter(|(_, moves)| !moves.stops.is_empty()).take(ROWS) {
        for stop in moves.stops.iter().take(2) {
            page.entry(&format!("  {label} "), &format!("GPU {}: {}", stop.home, stop.why));
        }
    }
}

/// What is told in a row; what is not known of its kind is left out.
#[derive(Default)]
struct Row {
    times: u64,
    came: Option<u64>,
    left: Option<u64>,
    took: Option<f64>,
    saved: Option<f64>,
    what: String,
    /// Bytes of other kinds, and how they are called.
    bytes: Vec<(u64, &'static str)>,
}

impl Row {
    fn is_timed(&self) -> bool {
        self.came.is_some() || self.left.is_some() || self.took.is_some() || self.saved.is_some()
    }

    fn timed(&self) -> [String; 4] {
        let size = |bytes: Option<u64>| bytes.map_or_else(String::new, format_size);
        let time = |seconds: Option<f64>| match seconds {
            None => String::new(),
            Some(lost) if lost < 0.0 => format!("-{}", words::time(-lost)),
            Some(seconds) => words::time(seconds),
        };
        [size(self.came), size(self.left), time(self.took), time(self.saved)]
    }

    /// In a line of its own: in the last column, which gives way to the others, numbers would be cut out.
    fn below(&self) -> Vec<String> {
        let bytes = self.bytes.iter().filter(|(bytes, _)| *bytes > 0);
        let bytes: Vec<String> = bytes.map(|(bytes, name)| format!("{} {name}", format_size(*bytes))).collect();
        if bytes.is_empty() { Vec::new() } else { vec![bytes.join(", ")] }
    }

    fn add(&mut self, other: &Row) {
        let sum = |a: Option<u64>, b: Option<u64>| a.zip(b).map(|(a, b)| a.saturating_add(b)).or(a).or(b);
        let time = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a + b).or(a).or(b);
        self.times = self.times.saturating_add(other.times);
        (self.came, self.left) = (sum(self.came, other.came), sum(self.left, other.left));
        (self.took, self.saved) = (time(self.took, other.took), time(self.saved, other.saved));
        self.bytes.iter_mut().zip(&other.bytes).for_each(|((sum, _), (bytes, _))| *sum = sum.saturating_add(*bytes));
    }
}

/// One row for each kind, of all processes.
fn folded(rows: Vec<(String, Row)>) -> Vec<(String, Row)> {
    let mut sums: Vec<(u64, Row)> = Vec::new();
    for (_, row) in rows {
        match sums.iter_mut().find(|(_, known)| known.what == row.what) {
            Some((processes, known)) => {
                *processes += 1;
                known.add(&row);
            }
            None => sums.push((1, row)),
        }
    }
    sums.into_iter().map(|(processes, row)| (words::count(processes, "process", "processes"), row)).collect()
}

/// What is told of a process: the sum at its end, and of what it is made up.
fn rows_of(moves: &Moves) -> Vec<Row> {
    let mut rows = Vec::new();
    if let Some(total) = moves.total.as_ref().filter(|total| total.times > 0) {
        rows.push(Row {
            times: total.times,
            came: Some(total.came),
            left: Some(total.left),
            took: Some(total.took),
            saved: Some(total.saved),
            what: "in all".to_owned(),
            ..Row::default()
        });
    }
    for (why, sum) in &moves.swaps {
        let what = match why.as_str() {
            "launch" => "before a launch",
            "idle" => "while the program waits",
            other => other,
        };
        rows.push(Row {
            times: sum.times,
            came: Some(sum.came),
            left: Some(sum.left),
            took: Some(sum.seconds),
            what: what.to_owned(),
            ..Row::default()
        });
    }
    for (place, sum) in &moves.by_hand {
        let bytes = vec![(sum.bytes, "went"), (sum.stayed, "stayed")];
        rows.push(Row { times: sum.times, what: format!("to {place}, by the program"), bytes, ..Row::default() });
    }
    let repacks = &moves.repacks;
    if repacks.times > 0 {
        let bytes = vec![(repacks.freed, "came free"), (repacks.copied, "copied")];
        let what = "chunks cut anew".to_owned();
        rows.push(Row { times: repacks.times, took: Some(repacks.seconds), what, bytes, ..Row::default() });
    }
    rows
}
