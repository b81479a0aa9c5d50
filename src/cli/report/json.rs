//! The report for programs.

mod commands;
mod finding;
mod holders;
mod moves;
mod parts;
mod pinned;
mod process;

use serde_json::{Value, json};

use crate::report::model::{Found, Log, Logs, findings_missing, labels};
use crate::terminal::clean_json;

/// Number of this form. Fields may be added to it; one that changes its meaning makes a new number.
const FORM: u32 = 1;

/// The report as one JSON object. Sizes are bytes, times are seconds.
pub fn render(logs: &Logs, found: &[Found]) -> String {
    clean_json(&format!("{:#}\n", value(logs, found)))
}

/// The same as a value, for what shows its numbers in another form.
pub fn value(logs: &Logs, found: &[Found]) -> Value {
    let labels = labels(logs);
    json!({
        "report": FORM,
        "logs": logs.logs.iter().map(log).collect::<Vec<_>>(),
        "processes": logs.processes.iter().zip(&labels).map(|(one, label)| process::object(one, label)).collect::<Vec<_>>(),
        "findings_missing": findings_missing(&logs.processes).iter().map(|index| &labels[*index]).collect::<Vec<_>>(),
        "findings": found.iter().map(|found| finding::object(found, &labels)).collect::<Vec<_>>(),
    })
}

fn log(log: &Log) -> Value {
    json!({
        "path": log.path.display().to_string(), "readable": log.readable, "records": log.records,
        "bad_lines": log.bad_lines, "problems": log.problems,
    })
}
