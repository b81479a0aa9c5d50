//! What README says is intercepted, made from the table.

use super::table::for_each_hook;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

macro_rules! rows {
    ($($name:ident($($p:ident: $t:ty),* $(,)?) => $subject:ident::$body:ident($($a:ident),*);)*) => {
        /// Name and subject of every row.
        const ROWS: &[(&str, &str)] = &[$((stringify!($name), stringify!($subject))),*];
    };
}
for_each_hook!(rows);

/// What happens to a call, in README's order, and the subjects of the bodies that do it.
const TREATMENTS: &[(&str, &[&str])] = &[
    ("Answered by gpupool or the driver, as `GPUPOOL_MODE` says", &["memory", "host"]),
    ("The driver's first; what it has no memory for is made elsewhere", &["mapping", "stream_ordered"]),
    ("Made with the driver's handle in the place of the number that the program has", &["handle"]),
    ("Answered for memory of gpupool's as for an ordinary allocation", &["query", "ipc"]),
    ("Made again, when the driver has no memory, after freed memory went back to it", &["retry"]),
    (
        "Watched: contexts, modules, captures, graphs, waits, and how functions are found",
        &["context", "current", "module", "stream", "resolve", "rest", "graph"],
    ),
    ("Counted", &["submit", "launch"]),
    ("Passed on, and in the log at level `trace`", &["pass"]),
];

/// A name without its version and its kind of stream.
fn base(name: &str) -> &str {
    let name = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    match name.rsplit_once("_v") {
        Some((base, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => base,
        _ => name,
    }
}

/// Beginnings of a name that end where a word ends, the shortest first: `cuMem`, `cuMemPool`.
fn beginnings(name: &str) -> impl Iterator<Item = &str> {
    let word_starts = name.char_indices().skip(3).filter(|(_, letter)| letter.is_ascii_uppercase() || *letter == '2');
    word_starts.map(|(at, _)| &name[..at])
}

/// The names of one treatment. Four and more that begin alike, as no name of another treatment does, are one entry.
fn list(names: &BTreeSet<&str>, others: &BTreeSet<&str>) -> String {
    let mut entries: Vec<String> = Vec::new();
    for name in names {
        let family = beginnings(name).find(|start| {
            names.iter().filter(|name| name.starts_with(start)).count() >= 4
                && !others.iter().any(|name| name.starts_with(start))
        });
        let entry = family.map_or_else(|| format!("`{name}`"), |family| format!("`{family}…`"));
        if entries.last() != Some(&entry) {
            entries.push(entry);
        }
    }
    entries.join(", ")
}

fn table() -> String {
    let mut groups: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
    for (name, subject) in ROWS {
        let group = TREATMENTS.iter().position(|(_, subjects)| subjects.contains(subject));
        let group = group.unwrap_or_else(|| panic!("name a treatment for the bodies of {subject}, as of {name}"));
        groups.entry(group).or_default().insert(base(name));
    }
    let mut text = "| what happens | calls |\n| --- | --- |\n".to_owned();
    for (group, names) in &groups {
        let others = groups.iter().filter(|(other, _)| *other != group).flat_map(|(_, names)| names).copied().collect();
        text.push_str(&format!("| {} | {} |\n", TREATMENTS[*group].0, list(names, &others)));
    }
    text
}

/// `BLESS=1 cargo test -p gpupool listing` writes it.
#[test]
fn readme_says_what_is_intercepted() {
    let (begin, end) = ("<!-- hooks -->\n", "<!-- /hooks -->\n");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = readme.split_once(begin).expect("README.md has the marker");
    let (_, after) = rest.split_once(end).expect("README.md has the end of the marker");
    let wanted = format!("{before}{begin}{}{end}{after}", table());
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
        return;
    }
    assert!(readme == wanted, "BLESS=1 cargo test -p gpupool listing\n{}", table());
}

#[test]
fn versions_and_kinds_of_streams_are_one_call() {
    for name in ["cuMemPrefetchAsync", "cuMemPrefetchAsync_ptsz", "cuMemPrefetchAsync_v2", "cuMemPrefetchAsync_v2_ptsz"]
    {
        assert_eq!(base(name), "cuMemPrefetchAsync");
    }
}
