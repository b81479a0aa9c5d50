//! Contexts: who made them, and what for.

use gpupool_config::format_size;
use gpupool_events::{ContextCreate, ContextUse};

use super::rows::{BELOW, CONTEXT_ROWS, FOLDED, show};
use crate::report::model::{Context, Logs, together};
use crate::terminal::{Page, Table, width, wrap};
use crate::words;

pub fn section(page: &mut Page, logs: &Logs, labels: &[String]) {
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
    if all.len() > FOLDED {
        return folded(page, logs, labels);
    }
    let mut table = Table::new(&["process", "GPU", "kind", "at", "cost", "used"], b"lrlrrl", BELOW);
    for (label, context) in all.iter().take(CONTEXT_ROWS) {
        let made = &context.made;
        let about = if made.approximate { "\u{2248}" } else { "" };
        let cost = made.cost.map_or("?".to_owned(), |bytes| format!("{about}{}", format_size(bytes)));
        let used = word(context.was_used());
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

fn word(used: Option<bool>) -> &'static str {
    match used {
        Some(true) => "yes",
        Some(false) => "never",
        None => "not logged",
    }
}

/// Contexts that the same line made by the same call, and that were used or were not, as one row: the ranks of a job make theirs alike.
fn folded(page: &mut Page, logs: &Logs, labels: &[String]) {
    type Alike<'a> = (Vec<usize>, Vec<&'a Context>);
    let mut groups: Vec<Alike> = Vec::new();
    for (index, process) in logs.processes.iter().enumerate() {
        for context in &process.contexts {
            let same = |other: &Context| {
                let what = |made: &ContextCreate| (made.kind.clone(), made.call.clone(), made.site.clone());
                what(&other.made) == what(&context.made) && other.was_used() == context.was_used()
            };
            match groups.iter_mut().find(|(_, known)| known.first().is_some_and(|known| same(known))) {
                Some((processes, known)) => {
                    processes.push(index);
                    known.push(context);
                }
                None => groups.push((vec![index], vec![context])),
            }
        }
    }
    let mut table = Table::new(&["contexts", "kind", "cost", "used", "GPUs"], b"rlrll", BELOW);
    let hidden = groups.len().saturating_sub(CONTEXT_ROWS);
    for (mut processes, contexts) in groups.into_iter().take(CONTEXT_ROWS) {
        let Some(first) = contexts.first() else { continue };
        processes.dedup();
        let mut gpus: Vec<u32> = contexts.iter().map(|context| context.made.device).collect();
        gpus.sort_unstable();
        gpus.dedup();
        let cost = contexts.iter().filter_map(|context| context.made.cost).fold(0, u64::saturating_add);
        let cells = vec![
            contexts.len().to_string(),
            first.made.kind.clone(),
            format_size(cost),
            word(first.was_used()).to_owned(),
            words::ranges(&gpus),
        ];
        let mut below = vec![format!("in {}", together(labels, &processes))];
        below.extend(words::places(first.made.site.as_ref(), width() - BELOW));
        table.row(cells, below);
    }
    show(page, table, hidden);
    page.line("  those that are alike in one row, with their cost together; --json has each");
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
    let mut lines = words::places(made.site.as_ref(), width() - BELOW);
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
        lines.extend(wrap(&format!("for {}", amounts(used)), width() - BELOW));
    }
    lines
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
