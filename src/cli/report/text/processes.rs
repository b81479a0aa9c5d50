//! Which processes there were.

use super::rows::{BELOW, CONTEXT_ROWS, FOLDED, show};
use crate::report::model::{End, Logs, Process, together};
use crate::terminal::{Page, Table, width};
use crate::words;

pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
    page.heading("Processes, with times from the start of each");
    let mut table = Table::new(&["process", "pid", "mode", "time", "end", "program"], b"lrlrll", BELOW);
    let alike = alike(&logs.processes);
    for same in alike.iter().take(CONTEXT_ROWS) {
        let Some(process) = same.first().map(|index| &logs.processes[*index]) else { continue };
        let start = process.start.as_ref();
        let longest = same.iter().map(|index| &logs.processes[*index]).map(|process| process.last - process.origin());
        let pid = if same.len() == 1 { process.pid.to_string() } else { format!("{} of them", same.len()) };
        table.row(
            vec![
                together(labels, same),
                pid,
                start.map_or("?", |start| start.mode.as_str()).to_owned(),
                words::time(longest.fold(0.0, f64::max)),
                process.end().word().to_owned(),
                start.map_or("?", |start| start.exe.as_str()).to_owned(),
            ],
            if same.len() == 1 { initialised(process) } else { Vec::new() },
        );
    }
    show(page, table, alike.len().saturating_sub(CONTEXT_ROWS));
    for end in [End::Exec, End::LogFull, End::None] {
        if let Some(meaning) = end.meaning().filter(|_| logs.processes.iter().any(|process| process.end() == end)) {
            page.entry("  ", &format!("end {}: {meaning}", end.word()));
        }
    }
}

/// Processes by their indices; where there are many, those that run the same program on the same host and ended alike together.
fn alike(processes: &[Process]) -> Vec<Vec<usize>> {
    if processes.len() <= FOLDED {
        return (0..processes.len()).map(|index| vec![index]).collect();
    }
    let what = |process: &Process| {
        let start = process.start.as_ref().map(|start| (start.mode.clone(), start.exe.clone()));
        (process.host().map(str::to_owned), start, process.end().word())
    };
    let mut groups: Vec<(_, Vec<usize>)> = Vec::new();
    for (index, process) in processes.iter().enumerate() {
        let what = what(process);
        match groups.iter_mut().find(|(known, _)| *known == what) {
            Some((_, same)) => same.push(index),
            None => groups.push((what, vec![index])),
        }
    }
    groups.into_iter().map(|(_, same)| same).collect()
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
