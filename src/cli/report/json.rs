//! The report for programs.

use gpupool_events::finding;
use serde_json::{Value, json};

use super::findings::Found;
use super::gather::{Log, Logs};
use super::model::{Context, Process};
use super::{pinned, words};

/// Number of this form. Fields may be added to it; one that changes its meaning makes a new number.
const FORM: u32 = 1;
/// Parts that each place's time is cut into.
pub const PARTS: usize = 200;

/// The report as one JSON object. Sizes are bytes, times are seconds.
pub fn render(logs: &Logs, found: &[Found]) -> String {
    let labels = words::labels(&logs.processes);
    let report = json!({
        "report": FORM,
        "logs": logs.logs.iter().map(log).collect::<Vec<_>>(),
        "processes": logs.processes.iter().zip(&labels).map(|(one, label)| process(one, label)).collect::<Vec<_>>(),
        "findings_missing": words::findings_missing(&logs.processes).iter().map(|index| &labels[*index]).collect::<Vec<_>>(),
        "findings": found.iter().map(|found| one_finding(found, &labels)).collect::<Vec<_>>(),
    });
    format!("{report:#}\n")
}

fn log(log: &Log) -> Value {
    json!({
        "path": log.path.display().to_string(), "readable": log.readable, "records": log.records,
        "bad_lines": log.bad_lines, "problems": log.problems,
    })
}

fn process(process: &Process, label: &str) -> Value {
    let modules: Vec<Value> = process
        .modules
        .iter()
        .map(|(group, sum)| {
            json!({
                "device": group.device, "kind": group.kind, "file": group.file, "modules": sum.modules,
                "kernels": sum.kernels, "bytes": sum.bytes, "memory": sum.memory, "seconds": sum.seconds,
                "eager": sum.eager, "uses_malloc": sum.uses_malloc,
            })
        })
        .collect();
    let end = process.last - process.first;
    let levels: serde_json::Map<String, Value> = process
        .levels
        .iter()
        .map(|(place, line)| (place.clone(), json!({"peak": line.peak(), "used": line.parts(PARTS, end)})))
        .collect();
    let mut sites: Vec<_> = process.sites.iter().collect();
    sites.sort_by_key(|(site, sum)| (std::cmp::Reverse(sum.memory), site.to_string()));
    let sites: Vec<Value> = sites
        .into_iter()
        .map(|(site, sum)| {
            json!({
                "site": site, "contexts": sum.contexts, "modules": sum.modules, "memory": sum.memory,
                "seconds": sum.seconds,
            })
        })
        .collect();
    json!({
        "label": label, "log": process.log, "pid": process.pid, "first": process.first, "last": process.last,
        "start": process.start, "init": process.init, "exit": process.exit, "end": process.end().word(),
        "lost": process.lost.as_ref().map(|(lines, why)| json!({"lines": lines, "why": why})), "full": process.full,
        "contexts": process.contexts.iter().map(context).collect::<Vec<_>>(), "modules": modules,
        "limits": process.limits, "sites": sites, "warnings": process.warnings, "left_out": process.more,
        "memory": {"seconds_per_part": end / PARTS as f64, "places": levels}, "pinned": pinned::json(&process.pinned, end),
    })
}

fn context(context: &Context) -> Value {
    json!({"made": context.made, "use": context.used, "used": context.was_used(), "destroyed_by": context.gone})
}

fn one_finding(found: &Found, labels: &[String]) -> Value {
    let known = finding(&found.code);
    let processes: Vec<&String> = found.processes.iter().filter_map(|index| labels.get(*index)).collect();
    json!({
        "code": found.code, "title": known.map(|known| known.title), "what": found.what, "site": found.site,
        "facts": found.facts, "devices": found.devices, "processes": processes, "times": found.times,
        "fix": known.map(|known| known.fix),
    })
}
