//! What is missing from the report, and what else was warned of.

use super::rows::ROWS;
use crate::report::model::{Logs, Process};
use crate::terminal::{Page, clean, shorten, width};
use crate::words;

/// Warnings that have no section of their own.
pub fn warnings(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut all: Vec<(usize, &String)> = Vec::new();
    for (index, process) in logs.processes.iter().enumerate() {
        all.extend(process.warnings.iter().map(|warning| (index, warning)));
    }
    if all.is_empty() {
        return;
    }
    page.heading("Other warnings");
    for (index, warning) in all.iter().take(ROWS) {
        page.entry(&format!("  {}: ", shorten(&labels[*index], 24)), warning);
    }
    if all.len() > ROWS {
        page.line(&format!("  {} more; --json has them", all.len() - ROWS));
    }
}

/// What is missing from the report, and why.
pub fn missing(page: &mut Page, logs: &Logs, labels: &[String]) {
    let left_out = |process: &Process| !process.more.is_empty();
    let incomplete = |process: &Process| left_out(process) || process.full.is_some() || process.lost.is_some();
    if logs.logs.iter().all(|log| log.problems.is_empty()) && !logs.processes.iter().any(incomplete) {
        return;
    }
    page.heading("Not in this report");
    for log in logs.logs.iter().filter(|log| !log.problems.is_empty()) {
        page.line(&format!("  {}", shorten(&clean(&log.path.display().to_string()), width() - 2)));
        for problem in &log.problems {
            page.entry("    ", problem);
        }
    }
    for (process, label) in logs.processes.iter().zip(labels) {
        if let Some((lines, why)) = &process.lost {
            let lines = words::count(*lines, "line", "lines");
            page.entry(&format!("  {label}: "), &format!("{lines} of the log for which there was no room: {why}"));
        }
        if let Some(why) = &process.full {
            page.entry(&format!("  {label}: "), &format!("the rest of the log, for which there was no room: {why}"));
        }
    }
    for (process, label) in logs.processes.iter().zip(labels).filter(|(process, _)| left_out(process)) {
        let more: Vec<String> = process.more.iter().map(|(what, number)| format!("{number} more {what}")).collect();
        page.entry(&format!("  {label}: "), &more.join(", "));
    }
}
