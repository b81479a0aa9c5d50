//! One finding.

use gpupool_events::finding;
use serde_json::{Value, json};

use crate::report::model::Found;

/// A finding, with what stands about it in `gpupool explain`.
pub fn object(found: &Found, labels: &[String]) -> Value {
    let known = finding(&found.code);
    let processes: Vec<&String> = found.processes.iter().filter_map(|index| labels.get(*index)).collect();
    json!({
        "code": found.code, "title": known.map(|known| known.title), "what": found.what, "site": found.site,
        "facts": found.facts, "devices": found.devices, "processes": processes, "times": found.times,
        "fix": known.map(|known| known.fix_for(found.facts.get("cause").map(String::as_str))),
    })
}
