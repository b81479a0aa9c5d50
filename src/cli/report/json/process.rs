//! One process.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gpupool_events::Site;
use serde_json::{Map, Value, json};

use super::parts::{PARTS, seconds_per_part};
use super::{commands, holders, moves, pinned};
use crate::report::model::{BySetting, Context, GrownSum, Process, Refusal, SettingThatRefuses, Timeline};

/// Everything that is known of a process.
pub fn object(process: &Process, label: &str) -> Value {
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
    let end = process.last - process.origin();
    let over_time = |lines: &BTreeMap<String, Timeline>| -> Map<String, Value> {
        let line = |line: &Timeline| json!({"peak": line.peak(), "last": line.last(), "used": line.parts(PARTS, end)});
        lines.iter().map(|(name, of)| (name.clone(), line(of))).collect()
    };
    let (levels, held, named) = (over_time(&process.levels), over_time(&process.held), over_time(&process.named));
    let all = json!({"peak": process.all.peak(), "last": process.all.last(), "used": process.all.parts(PARTS, end)});
    let residence = process.residence.iter().map(|(place, line)| ((*place).to_owned(), line.clone())).collect();
    let residence = over_time(&residence);
    let readers: Vec<Value> = process.worst_readers().into_iter().map(|reader| json!(reader)).collect();
    let mut sites: Vec<_> = process.sites.iter().collect();
    sites.sort_by_key(|(site, sum)| (Reverse(sum.memory), site.to_string()));
    let sites: Vec<Value> = sites
        .into_iter()
        .map(|(site, sum)| {
            json!({
                "site": site, "contexts": sum.contexts, "modules": sum.modules, "memory": sum.memory,
                "seconds": sum.seconds,
            })
        })
        .collect();
    let given: Vec<Value> = process
        .given
        .iter()
        .map(|((device, why), (times, bytes))| json!({"device": device, "why": why, "times": times, "bytes": bytes}))
        .collect();
    let asked: Vec<Value> = process
        .asked
        .iter()
        .map(|((device, pid), sum)| {
            json!({"device": device, "pid": pid, "times": sum.times, "bytes": sum.bytes, "freed": sum.freed, "why": sum.whys})
        })
        .collect();
    json!({
        "label": label, "log": process.log, "pid": process.pid, "first": process.first, "last": process.last, "origin": process.origin(),
        "start": process.start, "init": process.init, "exit": process.exit, "end": process.end().word(),
        "lost": process.lost.as_ref().map(|(lines, why)| json!({"lines": lines, "why": why})), "full": process.full,
        "contexts": process.contexts.iter().map(context).collect::<Vec<_>>(), "modules": modules,
        "limits": process.limits, "sites": sites, "warnings": process.warnings, "left_out": process.more,
        "lenders": {"awake": process.kept_awake, "asleep": process.left_asleep()},
        "memory": {"seconds_per_part": seconds_per_part(end), "all": all, "places": levels, "held": held, "labels": named, "residence": residence},
        "grown": process.grown.sites().into_iter().map(grown).collect::<Vec<_>>(),
        "refusals": {"times": process.refusals.times, "told": process.refusals.all().map(|one| refusal(process, one)).collect::<Vec<_>>(),
            "by_setting": process.refusals.by_setting.iter().map(|(setting, told)| by_setting(process, *setting, told)).collect::<Vec<_>>()},
        "holders": holders::object(&process.holders), "moves": moves::object(&process.moves), "far": readers,
        "given": given, "asked": asked, "commands": commands::object(&process.commands),
        "pinned": pinned::object(&process.pinned, end),
    })
}

fn grown((site, sum): (&Site, GrownSum)) -> Value {
    json!({"site": site, "times": sum.times, "bytes": sum.bytes, "far": sum.far})
}

fn refusal(process: &Process, refusal: &Refusal) -> Value {
    json!({"seconds": refusal.t - process.origin(), "told": refusal.told})
}

fn by_setting(process: &Process, setting: SettingThatRefuses, told: &BySetting) -> Value {
    let BySetting { times, last, bytes, home } = told;
    json!({"setting": setting.name(), "times": times, "last": {"seconds": last - process.origin(), "bytes": bytes, "gpu": home}})
}

fn context(context: &Context) -> Value {
    json!({"made": context.made, "use": context.used, "used": context.was_used(), "destroyed_by": context.gone})
}
