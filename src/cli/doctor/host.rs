//! The host's memory, what a limit leaves of it, and what the pool makes of that.

use std::path::Path;

use gpupool_config::{Mode, Pinned, Settings, format_size};
use gpupool_machine::{Group, Host, KEPT_BACK, Memory};
use serde_json::json;

use super::check::Check;

/// The host's memory, and the tightest limit on it if there is one. `is_refused`: the driver gives none.
pub fn check_here(settings: &Settings, is_refused: bool) -> Check {
    check(&Host::at(Path::new("/")).memory(), settings, is_refused)
}

/// Why the pool takes none of it whatever there is, and why it pins none.
fn takes_none(settings: &Settings, is_refused: bool) -> [Option<String>; 2] {
    let by_mode = || match settings.mode {
        Mode::Trace | Mode::Off => Some(format!("GPUPOOL_MODE={}", settings.mode.word())),
        _ => None,
    };
    let takes = by_mode().or_else(|| match settings.mode {
        _ if settings.host_limit == Some(0) => Some("GPUPOOL_HOST_LIMIT=0".to_owned()),
        // Managed memory is the driver's on the host, too.
        Mode::Managed => None,
        _ => is_refused.then(|| "the driver gives none, see HOST_NUMA".to_owned()),
    });
    let pins = by_mode().or_else(|| match settings.pinned {
        Pinned::Off => Some("GPUPOOL_PINNED=off".to_owned()),
        Pinned::Pool => (settings.pinned_limit == Some(0)).then(|| "GPUPOOL_PINNED_LIMIT=0".to_owned()),
    });
    [takes, pins]
}

fn check(memory: &Memory, settings: &Settings, is_refused: bool) -> Check {
    let group = memory.tightest();
    let [takes_none, pins_none] = takes_none(settings, is_refused);
    let unless = |none: &Option<String>, bytes| if none.is_some() { Some(0) } else { bytes };
    let host_limit = unless(&takes_none, memory.lent(settings.host_limit, settings.ranks()));
    let pinned_limit = unless(&pins_none, settings.pinned_limit.or_else(|| memory.pinned_limit(settings.ranks())));
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
    // A limit that is more than there is: what comes of it is both.
    let now = memory.spare().filter(|spare| host_limit.is_some_and(|limit| limit > *spare));
    let now = now.map_or_else(String::new, |spare| format!(", of which {} are there now,", format_size(spare)));
    words.push_str(&match &takes_none {
        Some(why) => format!("; the pool takes none of it ({why})"),
        None => format!("; the pool takes up to {}{now}", known(host_limit)),
    });
    words.push_str(&match &pins_none {
        Some(why) if takes_none.as_ref() == Some(why) => " and pins none".to_owned(),
        Some(why) => format!(" and pins none ({why})"),
        None => format!(" and pins up to {}", known(pinned_limit)),
    });
    if let Some((variable, ranks)) = settings.local_ranks {
        words.push_str(&format!(" in each of {ranks} ranks ({variable})"));
    }
    let check = match memory.spare() {
        _ if takes_none.is_some() => Check::fine("host", words),
        Some(1..) => Check::fine("host", words),
        Some(0) => {
            let kept = format_size(KEPT_BACK);
            let advice = format!(
                "the pool keeps {kept} back and finds no room on the host; raise the limit of the job or container, or \
                 free memory"
            );
            Check::finding("host", words, advice)
        }
        None if settings.host_limit.is_some() => Check::fine("host", words),
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
        check(memory, &Settings { local_ranks: Some(("LOCAL_WORLD_SIZE", ranks)), ..Settings::default() }, false)
    }

    #[test]
    fn a_setting_beyond_what_there_is_is_told_as_what_comes_of_it() {
        let memory = Memory { installed: Some(64 * GIB), free: Some(48 * GIB), groups: Vec::new() };
        let settings = Settings { host_limit: Some(40 << 40), ..Settings::default() };
        let words = |settings: &Settings| check(&memory, settings, false).words;
        let said = words(&settings);
        assert!(
            said.ends_with("the pool takes up to 64.0 GiB, of which 46.0 GiB are there now, and pins up to 16.0 GiB"),
            "{said}"
        );
        let said = words(&Settings { host_limit: Some(4 * GIB), ..Settings::default() });
        assert!(said.ends_with("the pool takes up to 4.0 GiB and pins up to 16.0 GiB"), "{said}");
    }

    /// Neither a number nor a finding says that there is any where nothing is taken.
    #[test]
    fn what_the_settings_or_the_driver_keep_from_the_pool_is_not_promised() {
        let little = Memory { installed: Some(64 * GIB), free: Some(GIB), groups: Vec::new() };
        let of = |mode| Settings { mode, ..Settings::default() };
        let none = Settings { host_limit: Some(0), pinned: Pinned::Off, ..Settings::default() };
        for (settings, is_refused, end) in [
            (of(Mode::Off), false, "the pool takes none of it (GPUPOOL_MODE=off) and pins none"),
            (of(Mode::Trace), true, "the pool takes none of it (GPUPOOL_MODE=trace) and pins none"),
            (
                of(Mode::Spill),
                true,
                "the pool takes none of it (the driver gives none, see HOST_NUMA) and pins up to 16.0 GiB",
            ),
            (none, false, "the pool takes none of it (GPUPOOL_HOST_LIMIT=0) and pins none (GPUPOOL_PINNED=off)"),
        ] {
            let check = check(&little, &settings, is_refused);
            assert!(check.words.ends_with(end), "{}", check.words);
            assert!(check.advice.is_none() && check.facts["host_limit"] == 0, "{:?} {}", check.advice, check.facts);
        }
        let managed = check(&little, &of(Mode::Managed), true);
        assert!(managed.advice.is_some() && managed.words.contains("takes up to 0 B"), "{}", managed.words);
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
        // What it asks for is done already.
        let said = check(&Memory::default(), &Settings { host_limit: Some(GIB), ..Settings::default() }, false);
        assert!(said.words.contains("takes up to 1.0 GiB") && said.advice.is_none(), "{}", said.words);
    }
}
