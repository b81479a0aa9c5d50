//! The plan for people.

use gpupool_config::format_size;
use gpupool_tiers::{FarLink, Links};

use super::estimate::{Far, Program, Row};
use crate::report::Process;
use crate::terminal::{Page, Table};
use crate::words;

pub fn render(processes: &[Process], program: &Program, rows: &[Row], is_host_given: bool, colours: bool) -> String {
    let mut page = Page::new(colours);
    page.heading("What the logs tell");
    let peak = format_size(program.peak);
    let running = words::count(processes.len() as u64, "process", "processes");
    page.entry("  in use      ", &format!("{peak} at most, by {running} in {}", words::time(program.seconds)));
    let far = match program.far {
        None => "nothing: all memory lay near".to_owned(),
        Some(Far { on_peers, on_host, .. }) => {
            let [peers, host] = [on_peers, on_host].map(|bytes| format_size(bytes as u64));
            format!("{peers} on other GPUs and {host} on the host, in the mean over that time")
        }
    };
    page.entry("  far away    ", &far);
    if let Some(Far { lost, .. }) = program.far {
        let lost = match (lost, program.slowdown()) {
            (Some(lost), Some(slowdown)) => {
                let least = if program.is_vague() { "at least " } else { "" };
                let whose = if processes.len() > 1 { " of the process that lost most" } else { "" };
                format!(
                    "kernels{whose} lost about {}: {least}{slowdown:.2} x the time with all near",
                    words::time(lost)
                )
            }
            _ => "not known: no kernel was seen to read any of it, or the driver does not tell (before CUDA 12.4)"
                .to_owned(),
        };
        page.entry("  its cost    ", &lost);
    }
    machines(&mut page, rows);
    rests_on(&mut page, program, rows, is_host_given);
    page.into_text()
}

fn machines(page: &mut Page, rows: &[Row]) {
    page.heading("What would lie where, at most, and about how long it would take");
    let headings = &["GPUs", "near", "other GPUs", "host", "no room", "read once", "time"];
    let mut table = Table::new(headings, b"lrrrrrr", 4);
    for Row { name, estimate, .. } in rows {
        let peak = estimate.peak;
        let time = match (peak.missing, estimate.slowdown) {
            (1.., _) => "out of memory".to_owned(),
            (0, Some(slowdown)) if slowdown < 1.005 => "1.00 x".to_owned(),
            (0, Some(slowdown)) => format!("{}{slowdown:.2} x", if estimate.is_beyond { "> " } else { "" }),
            (0, None) => "not known".to_owned(),
        };
        let some = |bytes: u64| if bytes == 0 { "-".to_owned() } else { format_size(bytes) };
        let pass = if estimate.pass > 0.0 { milliseconds(estimate.pass) } else { "-".to_owned() };
        let cells =
            [name.clone(), some(peak.near), some(peak.on_peers), some(peak.on_host), some(peak.missing), pass, time];
        table.row(cells.into(), Vec::new());
    }
    page.table(&table);
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}

fn rests_on(page: &mut Page, program: &Program, rows: &[Row], is_host_given: bool) {
    page.heading("What this rests on");
    let mut say = |words: &str| page.entry("  - ", words);
    say(
        "in use: what the pool told while it changed, in steps of 1/64 of a GPU, and not what the program made itself with cuMemCreate",
    );
    say(
        "where it would lie: the default settings; each GPU keeps GPUPOOL_RESERVE and the contexts that this program works in, one that it only borrows from at least what a context takes, and nobody else is there",
    );
    let host = rows.first().map_or(0, |row| row.machine.host);
    let how = if is_host_given { "--host" } else { "as when the log was written; --host says otherwise" };
    say(&format!("the host: {} of it may be taken ({how})", format_size(host)));
    let (near, peer, host) = (Links::measured(Vec::new()).near, FarLink::PEER.kernel, FarLink::HOST.kernel);
    let peer = match rows.first().and_then(|row| row.machine.peer) {
        None => "no GPU reaches another (--link none)".to_owned(),
        Some(FarLink { kernel, .. }) if kernel < peer => format!("{kernel:.0} GB/s from another GPU (--link pcie)"),
        Some(_) => format!("{peer:.0} GB/s from another GPU over NVLink 4"),
    };
    say(&format!(
        "read once: one pass over what is far in the mean, {peer}, {host:.0} from the host over PCIe, where near memory gives {near:.0}; measured on H200"
    ));
    match program.far {
        Some(Far { lost: Some(_), .. }) => say(
            "the time: what is far is read as often, byte by byte, as what was far in the logs, where kernels were looked at and timed. What \
             lay near was not watched: where much more would be far than in the logs, it may cost more",
        ),
        _ => say(
            "the time: not known where anything would be far, since the logs do not tell how often memory is read. A run with \
             GPUPOOL_LIMIT=0:SIZE, so that some is far, and GPUPOOL_LOG_FILE finds it out",
        ),
    }
    say(
        "not in it: memory that moves (GPUPOOL_MOVE), which needs the order of launches, and no log has that; other programs; copies",
    );
}
