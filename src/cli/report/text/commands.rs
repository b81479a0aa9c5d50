//! What commands did to programs while they ran: suspensions, images, drained GPUs.

use gpupool_config::format_size;

use super::rows::{BELOW, ROWS, show};
use crate::report::model::Logs;
use crate::terminal::{Page, Table};
use crate::words;

/// By process: each suspension, the images of each folder, and each drained GPU.
pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    suspensions(page, logs, labels);
    images(page, logs, labels);
    drains(page, logs, labels);
}

fn suspensions(page: &mut Page, logs: &Logs, labels: &[String]) {
    let all: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.commands.suspensions.iter().map(move |suspension| (label, suspension)))
        .collect();
    if all.is_empty() {
        return;
    }
    page.heading("Suspensions");
    let headings = &["process", "at", "left", "stayed", "came back", "stood still", "to"];
    let mut table = Table::new(headings, b"lrrrrrl", BELOW);
    for (label, suspension) in all.iter().take(ROWS) {
        let told = &suspension.told;
        let back = suspension.resumed.as_ref().map(|(_, resumed)| format_size(resumed.bytes));
        let row = vec![
            (*label).clone(),
            words::time(suspension.at),
            format_size(told.bytes),
            format_size(told.stayed),
            back.unwrap_or_else(|| "-".to_owned()),
            suspension.seconds().map_or_else(|| "to the end".to_owned(), words::time),
            told.to.clone(),
        ];
        let stored = told.stored.map(|bytes| format!("takes {} there", format_size(bytes)));
        table.row(row, stored.into_iter().collect());
    }
    show(page, table, all.len().saturating_sub(ROWS));
}

fn images(page: &mut Page, logs: &Logs, labels: &[String]) {
    let all: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.commands.images.iter().map(move |images| (label, images)))
        .collect();
    if all.is_empty() {
        return;
    }
    page.heading("Images (gpupool checkpoint)");
    let headings = &["process", "images", "memory", "on the disk", "written", "longest stop", "folder"];
    let mut table = Table::new(headings, b"lrrrrrl", BELOW);
    for (label, (folder, images)) in all.iter().take(ROWS) {
        let (memory, stored) = images.last.as_ref().map_or((0, 0), |last| (last.bytes, last.stored));
        let row = vec![
            (*label).clone(),
            images.times.to_string(),
            format_size(memory),
            format_size(stored),
            format_size(images.fresh),
            words::time(images.longest_stop_microseconds as f64 / 1e6),
            (*folder).clone(),
        ];
        table.row(row, Vec::new());
    }
    show(page, table, all.len().saturating_sub(ROWS));
}

fn drains(page: &mut Page, logs: &Logs, labels: &[String]) {
    let all: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.commands.drains.iter().map(move |drain| (label, drain)))
        .collect();
    if all.is_empty() {
        return;
    }
    page.heading("Drained GPUs");
    let mut table = Table::new(&["process", "at", "GPU", "moved", "stayed", "what"], b"lrrrrl", BELOW);
    for (label, drain) in all.iter().take(ROWS) {
        let what = if drain.is_drained { "drained: left it" } else { "drained no more: came back to it" };
        let row = vec![
            (*label).clone(),
            words::time(drain.at),
            drain.device.to_string(),
            format_size(drain.bytes),
            format_size(drain.stayed),
            what.to_owned(),
        ];
        table.row(row, Vec::new());
    }
    show(page, table, all.len().saturating_sub(ROWS));
}
