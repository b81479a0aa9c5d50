//! Findings.

use gpupool_events::finding;

use crate::report::model::{Found, Logs, findings_missing, together};
use crate::terminal::{Page, clean, width};
use crate::words;

const BOLD_YELLOW: &str = "1;33";

pub fn section(page: &mut Page, logs: &Logs, found: &[Found], labels: &[String]) {
    page.heading("Findings");
    let missing = findings_missing(&logs.processes);
    if found.is_empty() {
        page.line(if missing.is_empty() { "  none" } else { "  none known" });
    }
    for (number, found) in found.iter().enumerate() {
        if number > 0 {
            page.line("");
        }
        let known = finding(&found.code);
        let title = known.map_or("a finding of another version of gpupool", |known| known.title);
        page.entry_in(BOLD_YELLOW, &format!("  {}  ", clean(&found.code)), title);
        let gpus = match found.devices.as_slice() {
            [] => String::new(),
            [one] => format!(", GPU {one}"),
            several => format!(", GPUs {}", words::ranges(several)),
        };
        let times =
            if found.times > found.processes.len() as u64 { format!(", {} times", found.times) } else { String::new() };
        page.entry("    in     ", &format!("{}{gpus}{times}", together(labels, &found.processes)));
        page.entry("    what   ", &found.what);
        for (depth, line) in words::places(found.site.as_ref(), width() - 11).iter().enumerate() {
            page.line(&format!("{}{line}", if depth == 0 { "    where  " } else { "           " }));
        }
        if let Some(known) = known {
            page.entry("    fix    ", known.fix_for(found.facts.get("cause").map(String::as_str)));
            page.line(&format!("    more   gpupool explain {}", known.code));
        }
    }
    if !missing.is_empty() {
        if !found.is_empty() {
            page.line("");
        }
        let (whose, verb) = match missing.as_slice() {
            [one] => (format!("the log of {}", labels[*one]), "ends"),
            several => (format!("the logs of {}", together(labels, several)), "end"),
        };
        page.entry(
            "  ",
            &format!(
                "{whose} {verb} early: what is judged at the end of a process is not in the log, which is most of what is said \
                 of contexts, modules and the environment (GP001, GP003, GP004, GP005, GP007 to GP009, GP012, GP014, GP015, \
                 GP017, GP019, GP021)"
            ),
        );
    }
}
