//! Whether the GPUs share an NVLink domain with those of other hosts, and what of that a process here could use (IMEX).

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::json;

use super::check::Check;
use super::probe::Probe;

/// Where the driver has the channels that a process needs to open memory of another host.
const CHANNELS: &str = "dev/nvidia-caps-imex-channels";
/// The hosts of the domain, as the daemon is told of them.
const NODES: &str = "etc/nvidia-imex/nodes_config.cfg";

/// What is known of it; nothing where no GPU is in such a domain.
pub fn check(probe: &Probe, root: &Path) -> Option<Check> {
    let of_hosts = || probe.gpus.iter().filter_map(|gpu| gpu.fabric.as_ref());
    let domains: BTreeSet<(&str, u32)> = of_hosts().map(|fabric| (&*fabric.cluster, fabric.clique)).collect();
    if domains.is_empty() {
        return None;
    }
    let domains: Vec<String> =
        domains.into_iter().map(|(cluster, clique)| format!("{cluster}, clique {clique}")).collect();
    let waiting = of_hosts().filter(|fabric| !fabric.is_ready).count();
    let entries = std::fs::read_dir(root.join(CHANNELS)).into_iter().flatten().flatten();
    let channels = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("channel")).count();
    let hosts = std::fs::read_to_string(root.join(NODES)).ok().map(|text| {
        let is_host = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with('#');
        text.lines().filter(is_host).count()
    });
    let mut words = format!("GPUs are in an NVLink domain with other hosts ({})", domains.join("; "));
    if waiting > 0 {
        words.push_str(&format!("; {waiting} of {} have not joined it yet", probe.gpus.len()));
    }
    words.push_str(&match (channels, hosts) {
        (0, _) => "; there is no IMEX channel here, so no process could open memory of theirs".to_owned(),
        (_, None) => format!("; {channels} IMEX channels"),
        (_, Some(hosts)) => format!("; {channels} IMEX channels, {hosts} hosts"),
    });
    words.push_str("; the pool uses memory of this host alone");
    let facts = json!({"domains": domains, "waiting": waiting, "channels": channels, "hosts": hosts});
    Some(Check::fine("fabric", words).facts(facts))
}
