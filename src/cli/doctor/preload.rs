//! What else is preloaded: the loader asks preloaded libraries in their order, and the first that has a name answers for
//! it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::check::Check;
use crate::companion;
use crate::elf;
use crate::terminal;
use crate::words;

/// Names whose answer decides whether calls reach the pool.
const DECIDING: [&str; 4] = ["dlsym", "cuGetProcAddress", "cuGetProcAddress_v2", "cuMemAlloc_v2"];
/// A name that only our library has.
const OURS: &str = "gpupool_version";

/// One preloaded library, in the loader's order.
#[derive(Debug, PartialEq, Eq)]
struct Preloaded {
    /// The library's name or path as it was written.
    entry: String,
    /// `LD_PRELOAD` or `/etc/ld.so.preload`.
    from: &'static str,
    content: Content,
}

#[derive(Debug, PartialEq, Eq)]
enum Content {
    /// gpupool itself. What is wrong with its version, if it is not this command's.
    Ours(Option<String>),
    /// The deciding names that it has.
    Names(Vec<&'static str>),
    /// Why the loader will not take it, or it could not be looked into.
    Unreadable(String),
    /// A name without a folder, which only the loader finds.
    NotLookedInto,
}

/// The order of the preloads, and a check for each one that stands in the way.
pub fn checks() -> Vec<Check> {
    let variable = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    // The loader reads the file with the same separators, and line feeds.
    let file = fs::read("/etc/ld.so.preload").unwrap_or_default();
    let mut list = entries(variable.as_encoded_bytes(), "LD_PRELOAD");
    list.extend(entries(&file, "/etc/ld.so.preload"));
    judge(&list)
}

fn entries(text: &[u8], from: &'static str) -> Vec<Preloaded> {
    let words = text.split(|byte| *byte == b':' || byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    words
        .map(|word| {
            let path = Path::new(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(word));
            Preloaded { entry: path.display().to_string(), from, content: look_into(path) }
        })
        .collect()
}

fn look_into(path: &Path) -> Content {
    if path.parent().is_none_or(|folder| folder.as_os_str().is_empty()) {
        return Content::NotLookedInto;
    }
    match names_of(path) {
        Ok(names) if names.contains(&OURS) => Content::Ours(companion::foreign(path)),
        Ok(names) => Content::Names(names),
        Err(reason) => Content::Unreadable(reason),
    }
}

/// The names of [`DECIDING`] and [`OURS`] that a library defines for others.
fn names_of(path: &Path) -> Result<Vec<&'static str>, String> {
    let wanted: Vec<&'static str> = DECIDING.iter().chain([&OURS]).copied().collect();
    elf::exports(path, &wanted)
}

fn judge(list: &[Preloaded]) -> Vec<Check> {
    let ours = list.iter().position(|preloaded| matches!(preloaded.content, Content::Ours(_)));
    let mut checks = vec![order(list, ours)];
    for (position, preloaded) in list.iter().enumerate() {
        let entry = &preloaded.entry;
        match &preloaded.content {
            Content::Ours(_) if ours.is_some_and(|first| is_another(&list[first].entry, entry)) => {
                checks.push(Check::finding(
                    "preload",
                    format!("{entry} is a second copy of gpupool, and does nothing after the first"),
                    "leave one of them out; `gpupool run` preloads the one that came with it",
                ))
            }
            Content::Ours(Some(warning)) => checks.push(Check::finding(
                "preload",
                warning,
                "another version may not know every setting that this command does",
            )),
            Content::Names(names) if !names.is_empty() => {
                checks.push(conflict(entry, names, ours.map(|ours| position < ours)))
            }
            Content::Unreadable(reason) => checks.push(Check::finding(
                "preload",
                format!("{entry} cannot be looked into ({reason}); the loader most likely ignores it"),
                format!("correct {}", preloaded.from),
            )),
            _ => {}
        }
    }
    checks
}

/// Whether two paths lead to two files, which the loader takes both.
fn is_another(first: &str, second: &str) -> bool {
    let real = |path: &str| fs::canonicalize(path).unwrap_or_else(|_| path.into());
    real(first) != real(second)
}

fn order(list: &[Preloaded], ours: Option<usize>) -> Check {
    let facts = json!(
        list.iter()
            .map(|preloaded| json!({
                "entry": preloaded.entry, "from": preloaded.from, "gpupool": matches!(preloaded.content, Content::Ours(_)),
                "names": match &preloaded.content { Content::Names(names) => names.clone(), _ => Vec::new() },
            }))
            .collect::<Vec<_>>()
    );
    let words = match (list.len(), ours) {
        (0, _) => "nothing is preloaded; `gpupool run` does that".to_owned(),
        (_, Some(0)) => "gpupool comes first".to_owned(),
        (_, Some(position)) => format!("gpupool is number {} of {}", position + 1, list.len()),
        (count, None) => format!(
            "{} without gpupool; `gpupool run` comes before them",
            words::count(count as u64, "library", "libraries")
        ),
    };
    let below = list.iter().enumerate().map(|(number, preloaded)| {
        let mark = if preloaded.content == Content::NotLookedInto { ", found by the loader alone" } else { "" };
        terminal::shorten(
            &terminal::clean(&format!("{}. {}{mark}", number + 1, preloaded.entry)),
            terminal::width() - 9,
        )
    });
    let below = below.collect();
    Check::fine("preload", words).below(below).facts(facts)
}

/// A library that answers for names that the pool must answer for. `before`: whether it comes before gpupool, where
/// gpupool is preloaded.
fn conflict(entry: &str, names: &[&str], before: Option<bool>) -> Check {
    let names = names.join(", ");
    let name = PathBuf::from(entry);
    let name = name.file_name().unwrap_or_default().display().to_string();
    match before {
        Some(true) => Check::finding(
            "preload",
            format!("{entry} answers for {names} before gpupool does, so calls may never reach the pool"),
            format!("put libgpupool.so in front of {name}, or leave {name} out"),
        ),
        _ => Check::finding(
            "preload",
            format!("{entry} also answers for {names}; after gpupool it may miss calls that it waits for"),
            format!("leave {name} out, or check that it does its work: two libraries of this kind seldom go together"),
        ),
    }
    .facts(json!({"entry": entry, "names": names}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preloaded(entry: &str, content: Content) -> Preloaded {
        Preloaded { entry: entry.to_owned(), from: "LD_PRELOAD", content }
    }

    #[test]
    fn the_loaders_separators_are_all_known() {
        let list = entries(b" liba.so:libb.so\tlibc.so\n", "LD_PRELOAD");
        assert_eq!(list.iter().map(|one| one.entry.as_str()).collect::<Vec<_>>(), ["liba.so", "libb.so", "libc.so"]);
        assert!(list.iter().all(|one| one.content == Content::NotLookedInto));
    }

    #[test]
    fn what_is_no_library_is_named() {
        let list = entries(b"/no/such.so:/etc/passwd", "LD_PRELOAD");
        assert!(matches!(&list[0].content, Content::Unreadable(reason) if reason.contains("No such file")));
        assert!(matches!(&list[1].content, Content::Unreadable(reason) if reason.starts_with("no library")));
    }

    #[test]
    fn a_rival_before_or_behind_is_a_finding_and_a_stranger_is_none() {
        let rival = || preloaded("/x/librival.so", Content::Names(vec!["dlsym"]));
        let stranger = || preloaded("/x/libjemalloc.so", Content::Names(Vec::new()));
        let ours = || preloaded("/x/libgpupool.so", Content::Ours(None));
        let words = |list: &[Preloaded]| judge(list).iter().map(|check| check.words.clone()).collect::<Vec<_>>();
        assert_eq!(words(&[]), ["nothing is preloaded; `gpupool run` does that"]);
        assert_eq!(words(&[stranger(), ours()]), ["gpupool is number 2 of 2"]);
        let before = words(&[rival(), ours()]);
        assert!(before[1].contains("answers for dlsym before gpupool does"), "{before:?}");
        let behind = words(&[ours(), rival()]);
        assert_eq!(behind[0], "gpupool comes first");
        assert!(behind[1].contains("after gpupool it may miss"), "{behind:?}");
    }
}
