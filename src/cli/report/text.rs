//! The report for people.

use gpupool_config::format_size;
use gpupool_events::{ContextUse, finding};

use super::findings::Found;
use super::gather::Logs;
use super::model::{Context, End, ModuleGroup, ModuleSum, Process, SiteSum};
use super::timeline::Timeline;
use super::{pinned, words};
use crate::terminal::{Page, Table, WIDTH, clean, shorten, wrap};

const BOLD_YELLOW: &str = "1;33";
/// Rows of a section; whoever wants all takes `--json`.
pub const ROWS: usize = 12;
/// Contexts, which are what the report is for.
pub const CONTEXT_ROWS: usize = 64;
/// Columns of the memory chart.
const CHART: usize = 44;
/// Indent of what stands below a row.
pub const BELOW: usize = 6;

/// The report as text of 80 columns.
pub fn render(logs: &Logs, found: &[Found], colours: bool) -> String {
    let labels = words::labels(&logs.processes);
    let mut page = Page::new(colours);
    if !logs.processes.is_empty() {
        processes(&mut page, logs, &labels);
        contexts(&mut page, logs, &labels);
        findings(&mut page, logs, found, &labels);
        memory(&mut page, logs, &labels);
        pinned::text(&mut page, logs, &labels);
        modules(&mut page, logs, &labels);
        limits(&mut page, logs, &labels);
        call_sites(&mut page, logs);
        warnings(&mut page, logs, &labels);
    }
    problems(&mut page, logs, &labels);
    page.into_text()
}

/// Rows, up to a number; the rest is counted in a line.
pub fn show(page: &mut Page, table: Table, hidden: usize) {
    page.table(&table);
    if hidden > 0 {
        page.line(&format!("  {hidden} more; --json has them"));
    }
}

fn processes(page: &mut Page, logs: &Logs, labels: &[String]) {
    page.heading("Processes");
    let mut table = Table::new(&["process", "pid", "mode", "time", "end", "program"], b"lrlrll", BELOW);
    for (process, label) in logs.processes.iter().zip(labels).take(CONTEXT_ROWS) {
        let start = process.start.as_ref();
        table.row(
            vec![
                label.clone(),
                process.pid.to_string(),
                start.map_or("?", |start| start.mode.as_str()).to_owned(),
                words::time(process.last - process.first),
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
    let by = init.site.as_ref().map(|site| format!(" by {}", words::place(site, WIDTH - BELOW - when.len() - 4)));
    let environment = [("CUDA_VISIBLE_DEVICES", &init.visible_devices), ("CUDA_DEVICE_ORDER", &init.device_order)];
    let set = environment.iter().filter_map(|(name, value)| value.as_ref().map(|value| format!("with {name}={value}")));
    std::iter::once(when.clone() + &by.unwrap_or_default()).chain(set).collect()
}

fn contexts(page: &mut Page, logs: &Logs, labels: &[String]) {
    page.heading("Contexts");
    let all: Vec<(&String, &Context)> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.contexts.iter().map(move |context| (label, context)))
        .collect();
    if all.is_empty() {
        page.line("  none");
        return;
    }
    let mut table = Table::new(&["process", "GPU", "kind", "at", "cost", "used"], b"lrlrrl", BELOW);
    for (label, context) in all.iter().take(CONTEXT_ROWS) {
        let made = &context.made;
        let about = if made.approximate { "\u{2248}" } else { "" };
        let cost = made.cost.map_or("?".to_owned(), |bytes| format!("{about}{}", format_size(bytes)));
        let used = match context.was_used() {
            Some(true) => "yes",
            Some(false) => "never",
            None => "not logged",
        };
        table.row(
            vec![
                (*label).clone(),
                made.device.to_string(),
                made.kind.clone(),
                words::time(made.seconds),
                cost,
                used.to_owned(),
            ],
            origin(context),
        );
    }
    show(page, table, all.len().saturating_sub(CONTEXT_ROWS));
}

/// What was done in a context, in one line.
fn amounts(used: &ContextUse) -> String {
    let amounts = [
        (used.launches, "kernel", "kernels"),
        (used.copies, "copy", "copies"),
        (used.allocations, "allocation", "allocations"),
        (used.modules, "module", "modules"),
    ];
    let words = amounts.iter().filter(|(number, ..)| *number > 0);
    let mut words: Vec<String> = words.map(|(number, one, many)| words::count(*number, one, many)).collect();
    if used.bytes_peak > 0 {
        words.push(format!("{} at most", format_size(used.bytes_peak)));
    }
    words.extend(used.last_use.map(|seconds| format!("last at {}", words::time(seconds))));
    words.join(", ")
}

/// By which line, by which call, and for what.
fn origin(context: &Context) -> Vec<String> {
    let made = &context.made;
    let mut lines = words::places(made.site.as_ref(), WIDTH - BELOW);
    let mut call = format!("by {}", made.runtime_call.as_ref().unwrap_or(&made.call));
    if made.runtime_call.is_some() {
        call.push_str(&format!(" ({})", made.call));
    }
    if let Some(caller) = &made.caller {
        call.push_str(&format!(" of {}", file_name(caller)));
    }
    if !made.thread.is_empty() && made.site.as_ref().is_none_or(|site| site.python.is_empty()) {
        call.push_str(&format!(", thread {}", made.thread));
    }
    if let Some(gone) = &context.gone {
        call.push_str(&format!("; gone by {gone}"));
    }
    lines.push(call);
    if let Some(used) = context.used.as_ref().filter(|_| context.was_used() == Some(true)) {
        lines.extend(wrap(&format!("for {}", amounts(used)), WIDTH - BELOW));
    }
    lines
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn findings(page: &mut Page, logs: &Logs, found: &[Found], labels: &[String]) {
    page.heading("Findings");
    let missing = words::findings_missing(&logs.processes);
    if found.is_empty() {
        page.line(if missing.is_empty() { "  none" } else { "  none known" });
    }
    for (number, found) in found.iter().enumerate() {
        if number > 0 {
            page.line("");
        }
        let known = finding(&found.code);
        let code = page.paint(BOLD_YELLOW, &clean(&found.code));
        page.line(&format!(
            "  {code}  {}",
            known.map_or("a finding of another version of gpupool", |known| known.title)
        ));
        let gpus = match found.devices.as_slice() {
            [] => String::new(),
            [one] => format!(", GPU {one}"),
            several => format!(", GPUs {}", words::ranges(several)),
        };
        let times =
            if found.times > found.processes.len() as u64 { format!(", {} times", found.times) } else { String::new() };
        page.entry("    in     ", &format!("{}{gpus}{times}", words::together(labels, &found.processes)));
        page.entry("    what   ", &found.what);
        for (name, value) in &found.facts {
            page.entry("           ", &format!("{}: {value}", name.replace('_', " ")));
        }
        for (depth, line) in words::places(found.site.as_ref(), WIDTH - 11).iter().enumerate() {
            page.line(&format!("{}{line}", if depth == 0 { "    where  " } else { "           " }));
        }
        if let Some(known) = known {
            page.entry("    fix    ", known.fix);
            page.line(&format!("    more   gpupool explain {}", known.code));
        }
    }
    if !missing.is_empty() {
        if !found.is_empty() {
            page.line("");
        }
        let (whose, verb) = match missing.as_slice() {
            [one] => (format!("the log of {}", labels[*one]), "ends"),
            several => (format!("the logs of {}", words::together(labels, several)), "end"),
        };
        page.entry(
            "  ",
            &format!(
                "{whose} {verb} early: what is judged at the end of a process is not in the log, which is most of what is said \
                 of contexts, modules and the environment (GP001, GP003, GP004, GP005, GP007 to GP009, GP012, GP014, GP015, \
                 GP017)"
            ),
        );
    }
}

/// What the program used of the pool, by place.
fn memory(page: &mut Page, logs: &Logs, labels: &[String]) {
    let rows: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.levels.iter().map(|(place, line)| (label.as_str(), place.as_str(), line)))
        .filter(|(_, _, line)| line.peak() > 0)
        .collect();
    if rows.is_empty() {
        return peaks(page, logs, labels);
    }
    chart(page, "Pooled memory in use", &rows, logs);
}

/// One line of blocks a row of process, name and quantity: its height is the quantity, against the most of all rows.
pub fn chart(page: &mut Page, heading: &str, rows: &[(&str, &str, &Timeline)], logs: &Logs) {
    let end = logs.processes.iter().map(|process| process.last - process.first).fold(0.0, f64::max);
    let most = rows.iter().map(|(_, _, line)| line.peak()).max().unwrap_or(0);
    page.heading(&format!("{heading}, from the start to {}", words::time(end)));
    for (label, name, line) in rows.iter().take(CONTEXT_ROWS) {
        let chart: String = line.parts(CHART, end).into_iter().map(|bytes| block(bytes, most)).collect();
        let peak = format_size(line.peak());
        let (label, name) = (shorten(&clean(label), 12), shorten(&clean(name), 6));
        page.line(&format!("  {label:<12} {name:<6} {chart} {peak:>9}"));
    }
    if rows.len() > CONTEXT_ROWS {
        page.line(&format!("  {} more; --json has them", rows.len() - CONTEXT_ROWS));
    }
}

/// What a log without levels still knows.
fn peaks(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut table = Table::new(&["process", "place", "peak", "held at exit"], b"llrr", BELOW);
    let mut any = false;
    for (process, label) in logs.processes.iter().zip(labels) {
        for peak in process.exit.iter().flat_map(|exit| &exit.peak).filter(|peak| peak.peak_used > 0) {
            any = true;
            table.row(
                vec![label.clone(), peak.place.clone(), format_size(peak.peak_used), format_size(peak.held)],
                Vec::new(),
            );
        }
    }
    if any {
        page.heading("Pooled memory");
        page.table(&table);
    }
}

fn block(bytes: u64, most: u64) -> char {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    // Rounded up: a little is not nothing.
    let height = (u128::from(bytes) * 8).div_ceil(u128::from(most.max(1)));
    BLOCKS[usize::try_from(height).unwrap_or(8).min(8)]
}

fn modules(page: &mut Page, logs: &Logs, labels: &[String]) {
    let mut all: Vec<(&String, &ModuleGroup, &ModuleSum)> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.modules.iter().map(move |(group, sum)| (label, group, sum)))
        .collect();
    if all.is_empty() {
        return;
    }
    all.sort_by(|a, b| (b.2.memory, b.2.bytes).cmp(&(a.2.memory, a.2.bytes)).then(a.1.cmp(b.1)));
    page.heading("Modules");
    let headings = &["process", "GPU", "modules", "kernels", "image", "memory", "time"];
    let mut table = Table::new(headings, b"lrrrrrr", BELOW);
    for (label, group, sum) in all.iter().take(ROWS) {
        let loading = if sum.eager > 0 { ", eager" } else { "" };
        let malloc = if sum.uses_malloc { ", uses device malloc" } else { "" };
        let from = format!("{}{loading}{malloc}: {}", group.kind, group.file);
        table.row(
            vec![
                (*label).clone(),
                group.device.map_or("any".to_owned(), |device| device.to_string()),
                sum.modules.to_string(),
                sum.kernels.to_string(),
                format_size(sum.bytes),
                signed(sum.memory),
                words::time(sum.seconds),
            ],
            vec![from],
        );
    }
    show(page, table, all.len().saturating_sub(ROWS));
}

/// A size that may be below zero.
fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", format_size(bytes.unsigned_abs()))
}

fn limits(page: &mut Page, logs: &Logs, labels: &[String]) {
    let all: Vec<_> = labels
        .iter()
        .zip(&logs.processes)
        .flat_map(|(label, process)| process.limits.iter().map(move |limit| (label, limit)))
        .collect();
    if all.is_empty() {
        return;
    }
    page.heading("Device limits");
    let mut table = Table::new(&["process", "GPU", "limit", "asked for", "answer", "by"], b"lrlrll", BELOW);
    for (label, limit) in all.iter().take(ROWS) {
        let by = limit.site.as_ref().map_or(limit.by.clone(), |site| words::place(site, WIDTH / 2));
        table.row(
            vec![
                (*label).clone(),
                limit.device.to_string(),
                limit.limit.clone(),
                format_size(limit.value),
                if limit.result == 0 { "set".to_owned() } else { format!("error {}", limit.result) },
                by,
            ],
            Vec::new(),
        );
    }
    show(page, table, all.len().saturating_sub(ROWS));
}

/// The lines that cost most, over all processes.
fn call_sites(page: &mut Page, logs: &Logs) {
    let mut sums = std::collections::HashMap::new();
    for (site, sum) in logs.processes.iter().flat_map(|process| &process.sites) {
        let total: &mut SiteSum = sums.entry(site).or_default();
        total.contexts += sum.contexts;
        total.modules += sum.modules;
        total.memory = total.memory.saturating_add(sum.memory);
        total.seconds += sum.seconds;
    }
    if sums.is_empty() {
        return;
    }
    let mut all: Vec<_> = sums.into_iter().map(|(site, sum)| (words::place(site, WIDTH), sum)).collect();
    all.sort_by(|a, b| b.1.memory.cmp(&a.1.memory).then(b.1.seconds.total_cmp(&a.1.seconds)).then(a.0.cmp(&b.0)));
    page.heading("Lines that took GPU memory with contexts and modules");
    let mut table = Table::new(&["memory", "contexts", "modules", "loading", "line"], b"rrrrl", BELOW);
    let hidden = all.len().saturating_sub(ROWS);
    for (place, sum) in all.into_iter().take(ROWS) {
        let numbers = [signed(sum.memory), sum.contexts.to_string(), sum.modules.to_string(), words::time(sum.seconds)];
        table.row(numbers.into_iter().chain([place]).collect(), Vec::new());
    }
    show(page, table, hidden);
}

fn warnings(page: &mut Page, logs: &Logs, labels: &[String]) {
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
fn problems(page: &mut Page, logs: &Logs, labels: &[String]) {
    let left_out = |process: &Process| !process.more.is_empty();
    let incomplete = |process: &Process| left_out(process) || process.full.is_some() || process.lost.is_some();
    if logs.logs.iter().all(|log| log.problems.is_empty()) && !logs.processes.iter().any(incomplete) {
        return;
    }
    page.heading("Not in this report");
    for log in logs.logs.iter().filter(|log| !log.problems.is_empty()) {
        page.line(&format!("  {}", shorten(&clean(&log.path.display().to_string()), WIDTH - 2)));
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

    #[test]
    fn sizes_below_zero_have_a_sign() {
        assert_eq!(signed(-(3 << 20)), "-3.0 MiB");
        assert_eq!(signed(i64::MIN), "-8388608.0 TiB");
    }
}
