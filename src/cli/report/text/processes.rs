//! Which processes there were.

use super::rows::{BELOW, CONTEXT_ROWS, show};
use crate::report::model::{End, Logs, Process};
use crate::terminal::{Page, Table, width};
use crate::words;

pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    page.heading("Processes, with times from the start of each");
    let mut table = Table::new(&["process", "pid", "mode", "time", "end", "program"], b"lrlrll", BELOW);
    for (process, label) in logs.processes.iter().zip(labels).take(CONTEXT_ROWS) {
        let start = process.start.as_ref();
        table.row(
            vec![
                label.clone(),
                process.pid.to_string(),
                start.map_or("?", |start| start.mode.as_str()).to_owned(),
                words::time(process.last - process.origin()),
                process.end().word().to_owned(),
                start.map_or("?", |start| start.exe.as_str()).to_owned(),
            ],
            initialised(process),
        );
    }
    show(page, table, logs.processes.len().saturating_sub(CONTEXT_ROWS));
    for end in [End::Exec, End::LogFull, End::None] {
        if let Some(meaning) = end.meaning().filter(|_| logs.processes.iter().any(|process| process.end() == end)) {
            page.entry("  ", &format!("end {}: {meaning}", end.word()));
        }
    }
}

/// When CUDA was initialised and by which line: what is set in the environment later has no effect.
fn initialised(process: &Process) -> Vec<String> {
    let Some(init) = &process.init else {
        return Vec::new();
    };
    let when = format!("CUDA initialised at {}", words::time(init.seconds));
    let by = init
        .site
        .as_ref()
        .map(|site| format!(" by {}", words::place(site, width().saturating_sub(BELOW + when.len() + 4))));
    let environment = [("CUDA_VISIBLE_DEVICES", &init.visible_devices), ("CUDA_DEVICE_ORDER", &init.device_order)];
    let set = environment.iter().filter_map(|(name, value)| value.as_ref().map(|value| format!("with {name}={value}")));
    std::iter::once(when.clone() + &by.unwrap_or_default()).chain(set).collect()
}
