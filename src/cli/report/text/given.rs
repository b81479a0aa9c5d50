//! Memory that goes between programs: what left GPUs because somebody else needed it there, and whom a program asked for some.

use gpupool_config::format_size;

use super::rows::{BELOW, ROWS, show};
use crate::report::model::{AskedSum, Logs, Process};
use crate::terminal::{Page, Table};

/// Both, by process and GPU.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    left(page, logs, labels);
    asked(page, logs, labels);
}

/// Whom each asked, how much that one gave, and why not all of it.
fn asked(page: &mut Page, logs: &Logs, labels: &[String]) {
    let rows = |(label, process): (&String, &Process)| {
        let row = |((device, pid), sum): (&(u32, u32), &AskedSum)| {
            let whys: Vec<String> = sum.whys.iter().map(|(why, times)| format!("{} ({times})", reason(why))).collect();
            vec![
                label.clone(),
                device.to_string(),
                pid.to_string(),
                sum.times.to_string(),
                format_size(sum.bytes),
                format_size(sum.freed),
                whys.join(", "),
            ]
        };
        process.asked.iter().map(row).collect::<Vec<_>>()
    };
    let all: Vec<_> = labels.iter().zip(&logs.processes).flat_map(rows).collect();
    if all.is_empty() {
        return;
    }
    page.heading("Other programs that were asked for memory of a GPU");
    let more = all.len().saturating_sub(ROWS);
    let mut table =
        Table::new(&["process", "GPU", "asked", "times", "bytes", "gave", "why not (times)"], b"lrrrrrl", BELOW);
    all.into_iter().take(ROWS).for_each(|row| table.row(row, Vec::new()));
    show(page, table, more);
}

fn reason(why: &str) -> String {
    match why {
        "nothing" => "it had none to give",
        "silent" => "did not answer in time",
        "busy" => "was answering others",
        "stopped" => "is stopped",
        "ended" => "ended, what it had is free",
        // In its own words, or a later version's.
        other => other.strip_prefix("refused: ").unwrap_or(other),
    }
    .to_owned()
}

/// For whom how much left.
fn left(page: &mut Page, logs: &Logs, labels: &[String]) {
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
