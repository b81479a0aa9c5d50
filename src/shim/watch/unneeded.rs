//! Which contexts nobody needed. Judged at the end of the process: a GPU may be used late.

use crate::watch::{
    context::{self, Kind, Record, devices},
    finding, module, site,
};
use gpupool_config::format_size;
use gpupool_events::{Finding, Site};
use std::sync::atomic::Ordering::Relaxed;

/// Logs what every context was used for, and makes the findings about contexts.
pub fn judge() {
    let contexts = context::records();
    for context in &contexts {
        context::report_use(context);
    }
    // Without work anywhere there is no telling which context was meant.
    let working: Vec<&Record> = contexts.iter().filter(|context| context.usage.work() > 0).collect();
    if working.is_empty() {
        return;
    }
    // What ended before any work began, or came after it was over, took nothing from it.
    let stray: Vec<&Record> = contexts
        .iter()
        .filter(|context| context.kind != Kind::Created && !context.usage.is_used())
        .filter(|context| working.iter().all(|other| other.device != context.device))
        .filter(|context| working.iter().any(|other| other.met(context)))
        .collect();
    let peered = |context: &&Record| context.peered;
    for context in stray.iter().copied().filter(peered) {
        by_peer_access(context);
    }
    let mut rest: Vec<&Record> = stray.iter().copied().filter(|context| !peered(context)).collect();
    while let Some(first) = rest.first().copied() {
        let (same, others) = rest
            .into_iter()
            .partition::<Vec<_>, _>(|context| site::line(&context.origin.site) == site::line(&first.origin.site));
        match at_once(&same).as_slice() {
            [one] => stray_primary(one, &working),
            several => by_sweep(several),
        }
        rest = others;
    }
    for context in &stray {
        module::loaded_in_vain(context.id, context.device, &working);
    }
}

/// The most of these that lived at one moment: all but one of those began before the last, and none ended before that.
fn at_once<'a>(contexts: &[&'a Record]) -> Vec<&'a Record> {
    let beside = |last: &Record| {
        let there = contexts.iter().copied().filter(|other| other.id <= last.id && other.met(last));
        there.collect::<Vec<_>>()
    };
    let sets = contexts.iter().map(|last| beside(last));
    // Of equal ones the first: where one line is met again and again, that is where it began.
    sets.reduce(|most, set| if set.len() > most.len() { set } else { most }).unwrap_or_default()
}

fn price(contexts: &[&Record]) -> String {
    let about = if contexts.iter().any(|context| context.origin.approximate) { "≈" } else { "" };
    match contexts.iter().filter_map(|context| context.origin.cost).sum() {
        0 => String::new(),
        bytes => format!(", {about}{}", format_size(bytes)),
    }
}

fn facts(context: &Record) -> Vec<(&'static str, String)> {
    let mut facts = vec![("call", context.origin.call.clone()), ("context", context.id.to_string())];
    if let Some(cost) = context.origin.cost {
        facts.push(("cost", cost.to_string()));
    }
    facts
}

/// What made a context, in a sentence: the runtime's function where it shows, which is what a person called.
fn maker(context: &Record) -> &str {
    match (site::runtime_call(&context.origin.site), context.kind) {
        (Some(call), _) => call,
        (None, Kind::Found) => "the CUDA runtime",
        (None, Kind::Appeared) => "a call past the driver's public interface",
        (None, Kind::Primary | Kind::Created) => &context.origin.call,
    }
}

fn stray_primary(context: &Record, working: &[&Record]) {
    let pinned = context.usage.pinned.load(Relaxed);
    let only = match pinned {
        0 => String::new(),
        1 => "; one pinned host allocation was made in it".to_owned(),
        many => format!("; {many} pinned host allocations were made in it"),
    };
    let what = format!(
        "a context on GPU {} was made by {} and nothing ran in it{}{only}; this process works on GPU {}",
        context.device,
        maker(context),
        price(&[context]),
        devices(working)
    );
    finding::make(&Finding::STRAY_CONTEXT, Some(context.device), &context.origin.site, &facts(context), &what);
}

fn by_peer_access(context: &Record) {
    let what = format!(
        "a context on GPU {} was made by {} and nothing was done with it but to enable peer access{}",
        context.device,
        maker(context),
        price(&[context])
    );
    finding::make(&Finding::PEER_ACCESS, Some(context.device), &context.origin.site, &facts(context), &what);
}

fn by_sweep(contexts: &[&Record]) {
    let what = format!(
        "one line made contexts on GPUs {} that lived at the same time, and nothing ran in any of them{}",
        devices(contexts),
        price(contexts)
    );
    let site: &Site = &contexts[0].origin.site;
    finding::make(&Finding::DEVICE_SWEEP, Some(contexts[0].device), site, &facts(contexts[0]), &what);
}
