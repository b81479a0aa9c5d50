//! The host's memory, and what a container leaves of it.

use std::fs;
use std::path::Path;

use gpupool_config::format_size;
use serde_json::json;

use super::Check;

/// What the pool keeps back for the host itself.
const KEPT_BACK: u64 = 2 << 30;

/// The host's memory, and a container's limit if there is one.
pub fn checks() -> Vec<Check> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = field(&meminfo, "MemTotal");
    let available = field(&meminfo, "MemAvailable");
    let group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| tightest(&text));
    let left = group.as_ref().map(|group| group.limit.saturating_sub(group.used));
    let usable = available.unwrap_or(0).min(left.unwrap_or(u64::MAX));
    let facts = json!({
        "total": total, "available": available, "cgroup": group.as_ref().map(|group| json!({
            "folder": group.folder, "limit": group.limit, "used": group.used,
        })),
    });
    let known = |bytes: Option<u64>| bytes.map_or("?".to_owned(), format_size);
    let mut words = format!("{} of {} available", known(available), known(total));
    if let Some(group) = &group {
        words.push_str(&format!(
            "; this container may use {}, {} of it are in use",
            format_size(group.limit),
            format_size(group.used)
        ));
    }
    let check = if usable > KEPT_BACK {
        Check::fine("host", words)
    } else {
        let kept = format_size(KEPT_BACK);
        Check::finding(
            "host",
            words,
            format!(
                "the pool keeps {kept} back and finds no room on the host; raise the container's limit or free memory"
            ),
        )
    };
    vec![check.facts(facts)]
}

fn field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A limit on memory and what is used of it, bytes.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    folder: String,
    limit: u64,
    used: u64,
}

/// The group among this process's own and those around it that leaves the least. A container sees its own group as the
/// root; a service or a job of a scheduler has limits on the way there.
fn tightest(cgroup: &str) -> Option<Group> {
    let mut groups = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (root, names) = match controllers {
            "" => ("/sys/fs/cgroup", ["memory.max", "memory.current"]),
            list if list.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            _ => continue,
        };
        let inside = Path::new(path.trim_start_matches('/'));
        groups.extend(inside.ancestors().filter_map(|folder| read_group(&Path::new(root).join(folder), names)));
    }
    groups.into_iter().min_by_key(|group| group.limit.saturating_sub(group.used))
}

/// The limit of one group. `max`, and the number that version 1 writes for no limit, are none.
fn read_group(folder: &Path, [limit, used]: [&str; 2]) -> Option<Group> {
    const NONE: u64 = 1 << 60;
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number(limit).filter(|limit| *limit < NONE)?;
    Some(Group { folder: folder.display().to_string(), limit, used: number(used)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_are_kib() {
        let text = "MemTotal:       24589672 kB\nMemAvailable:   20000000 kB\nHugePages_Total: 3\n";
        assert_eq!(field(text, "MemTotal"), Some(24_589_672 << 10));
        assert_eq!(field(text, "MemAvailable"), Some(20_000_000 << 10));
        assert_eq!(field(text, "MemFree"), None);
        assert_eq!(field(text, "HugePages_Total"), None);
    }

    #[test]
    fn a_groups_limit_is_a_number_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let names = ["memory.max", "memory.current"];
        assert_eq!(read_group(folder.path(), names), None);
        write("memory.current", "1000\n");
        write("memory.max", "max\n");
        assert_eq!(read_group(folder.path(), names), None);
        write("memory.max", "9223372036854771712\n");
        assert_eq!(read_group(folder.path(), names), None);
        write("memory.max", "4096\n");
        let group = read_group(folder.path(), names).unwrap();
        assert_eq!((group.limit, group.used), (4096, 1000));
    }

    #[test]
    fn lines_that_are_no_groups_are_passed_over() {
        assert_eq!(tightest("nonsense\n4:cpu:/x\n0::/no/such/group\n"), None);
    }
}
