//! The files of a folder build on each other in one direction: none uses a file that uses it, by itself or through others.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The code of a file that is not for its own tests, without comments.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code = code.split("#[cfg(all(test, not(loom)))]\nmod tests").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The names behind every `before` in a text: of `crate::a::b` it is `a`, of `crate::{a, b}` both.
fn names(text: &str, before: &str) -> Vec<String> {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut names = Vec::new();
    for rest in text.split(before).skip(1) {
        let list = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or_default(),
            None => rest.split(|letter| !is_word(letter)).next().unwrap_or_default(),
        };
        names.extend(list.split(',').map(|name| name.trim().split("::").next().unwrap_or_default().to_owned()));
    }
    names
}

/// Which files of this folder each of them uses.
fn uses(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            files.insert(name, code(&fs::read_to_string(&path).unwrap()));
        }
    }
    let root = files.remove("lib").unwrap();
    // Where the names come from that the crate's root passes on.
    let mut owners = BTreeMap::new();
    for line in root.replace('\n', " ").split(';').filter_map(|line| line.trim().strip_prefix("pub use ")) {
        let (file, rest) = line.split_once("::").unwrap();
        for name in names(&format!("::{rest}"), "::") {
            owners.insert(name, file.to_owned());
        }
    }
    let of = |text: &String, own: &String| {
        let used = names(text, "crate::").into_iter().map(|name| owners.get(&name).cloned().unwrap_or(name));
        used.filter(|name| files.contains_key(name) && name != own).collect()
    };
    files.iter().map(|(name, text)| (name.clone(), of(text, name))).collect()
}

#[test]
fn no_file_is_used_by_what_it_uses() {
    for folder in ["src/pool", "src/config"] {
        let mut left = uses(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder));
        assert!(left.values().map(BTreeSet::len).sum::<usize>() > 5, "{folder}: nothing uses anything");
        // What uses nothing that is left can go; a circle cannot.
        while let Some(name) = left.iter().find(|(_, used)| used.iter().all(|name| !left.contains_key(name))) {
            let name = name.0.clone();
            left.remove(&name);
        }
        let circle: Vec<_> = left.iter().map(|(name, used)| format!("{name} uses {used:?}")).collect();
        assert!(circle.is_empty(), "{folder}: a circle, and what needs it:\n{}", circle.join("\n"));
    }
}
