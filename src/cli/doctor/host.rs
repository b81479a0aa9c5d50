//! The host's memory, what a limit leaves of it, and what the pool makes of that.

use std::path::Path;

use gpupool_config::{Settings, format_size};
use gpupool_machine::{Group, Host, KEPT_BACK, Memory};
use serde_json::json;

use super::check::Check;

/// The host's memory, and the tightest limit on it if there is one.
pub fn checks() -> Vec<Check> {
    // Settings that cannot be read are another check's finding; without them the defaults are told.
    let settings = Settings::read(std::env::vars_os()).unwrap_or_default();
    vec![check(&Host::at(Path::new("/")).memory(), &settings)]
}

fn check(memory: &Memory, settings: &Settings) -> Check {
    let group = memory.tightest();
    let host_limit = memory.lent(settings.host_limit, settings.ranks());
    let pinned_limit = settings.pinned_limit.or_else(|| memory.pinned_limit(settings.ranks()));
    let facts = json!({
        "total": memory.installed, "available": memory.free, "cgroup": group.map(|group| json!({
            "folder": group.folder, "limit": group.limit, "used": group.used,
        })),
        "ranks": settings.ranks(), "host_limit": host_limit, "pinned_limit": pinned_limit,
    });
    let known = |bytes: Option<u64>| bytes.map_or("?".to_owned(), format_size);
    let mut words = format!("{} of {} available", known(memory.free), known(memory.installed));
    if let Some(Group { folder, limit, used }) = group {
        words.push_str(&format!(
            "; {} allows {}, {} of it are in use",
            folder.display(),
            format_size(*limit),
            format_size(*used)
        ));
    }
    words.push_str(&format!("; the pool takes up to {} and pins up to {}", known(host_limit), known(pinned_limit)));
    if let Some((variable, ranks)) = settings.local_ranks {
        words.push_str(&format!(" in each of {ranks} ranks ({variable})"));
    }
    let check = match memory.spare() {
        Some(1..) => Check::fine("host", words),
        Some(0) => {
            let kept = format_size(KEPT_BACK);
            let advice = format!(
                "the pool keeps {kept} back and finds no room on the host; raise the limit of the job or container, or \
                 free memory"
            );
            Check::finding("host", words, advice)
        }
        None => Check::finding(
            "host",
            words,
            "neither /proc/meminfo nor the kernel tells how much memory there is, so the pool takes none of the host's; \
             set GPUPOOL_HOST_LIMIT",
        ),
    };
    check.facts(facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn told(memory: &Memory, ranks: u32) -> Check {
        check(memory, &Settings { local_ranks: Some(("LOCAL_WORLD_SIZE", ranks)), ..Settings::default() })
    }

    #[test]
    fn a_setting_beyond_what_there_is_is_told_as_what_comes_of_it() {
        let memory = Memory { installed: Some(64 * GIB), free: Some(48 * GIB), groups: Vec::new() };
        let settings = Settings { host_limit: Some(40 << 40), ..Settings::default() };
        let check = check(&memory, &settings);
        assert!(check.words.contains("the pool takes up to 64.0 GiB and"), "{}", check.words);
    }

    #[test]
    fn the_tightest_limit_is_named_and_what_is_made_of_it() {
        let group = |folder: &str, limit| Group { folder: folder.into(), limit: limit * GIB, used: GIB };
        let groups = vec![group("/sys/fs/cgroup/job/step", 30), group("/sys/fs/cgroup/job", 11)];
        let check = told(&Memory { installed: Some(64 * GIB), free: Some(48 * GIB), groups }, 2);
        assert_eq!(
            check.words,
            "48.0 GiB of 64.0 GiB available; /sys/fs/cgroup/job allows 11.0 GiB, 1.0 GiB of it are in use; the pool takes \
             up to 2.0 GiB and pins up to 1.4 GiB in each of 2 ranks (LOCAL_WORLD_SIZE)"
        );
        assert_eq!(check.facts["cgroup"]["limit"], 11 * GIB);
        assert!(check.advice.is_none());
    }

    #[test]
    fn too_little_and_unknown_memory_are_findings() {
        let little = told(&Memory { installed: Some(4 * GIB), free: Some(GIB), groups: Vec::new() }, 1);
        assert!(little.advice.is_some_and(|advice| advice.contains("keeps 2.0 GiB back")));
        let unknown = told(&Memory::default(), 1);
        assert!(unknown.words.starts_with("? of ? available") && unknown.advice.is_some(), "{}", unknown.words);
    }
}
