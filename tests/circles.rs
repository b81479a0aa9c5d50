//! The files of a crate build on each other in one direction: none uses a file that uses it, by itself or through others.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A path of Rust, or of a module from its crate's root on: `crate::a::b` is `[crate, a, b]`.
type Names = Vec<String>;

/// The code of a file that is not for its own tests, without comments.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code = code.split("#[cfg(all(test, not(loom)))]\nmod tests").next().unwrap_or_default();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

fn is_letter(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// Reads one path, or each of a list in braces, behind `before`; what is left of the text comes back.
fn path<'a>(text: &'a str, before: &[String], found: &mut Vec<Names>) -> &'a str {
    let mut text = text.trim_start();
    if let Some(mut list) = text.strip_prefix('{') {
        while !list.is_empty() && !list.starts_with('}') {
            list = path(list, before, found).trim_start();
            // Behind a name may stand `as other`.
            list = list[list.find([',', '}']).unwrap_or(list.len())..].trim_start_matches(',').trim_start();
        }
        return list.strip_prefix('}').unwrap_or(list);
    }
    let mut names = before.to_vec();
    loop {
        let (name, rest) = text.split_at(text.find(|letter| !is_letter(letter)).unwrap_or(text.len()));
        names.push(name.to_owned());
        match rest.strip_prefix("::") {
            Some(list) if list.starts_with('{') => return path(list, &names, found),
            Some(next) if next.starts_with(is_letter) => text = next,
            _ => {
                found.push(names);
                return rest;
            }
        }
    }
}

/// The paths that begin with one of `words`.
fn paths<'a>(text: &str, words: impl IntoIterator<Item = &'a str>) -> Vec<Names> {
    let mut found = Vec::new();
    for word in words {
        for (at, _) in text.match_indices(&format!("{word}::")) {
            // `super::super::x` is one path, and `a::crate_x::y` none of `crate_x`.
            if !text[..at].ends_with(|letter| is_letter(letter) || letter == ':') {
                path(&text[at..], &[], &mut found);
            }
        }
    }
    found
}

/// A crate's files by the modules that they are, with their code.
fn files(folder: &Path, module: &[String], files: &mut BTreeMap<Names, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let is_root = ["lib", "main"].contains(&name.as_str()) && module.is_empty() || name == "mod";
        let module: Names = module.iter().cloned().chain((!is_root).then_some(name.clone())).collect();
        if path.is_dir() && !["tests", "benches"].contains(&name.as_str()) {
            self::files(&path, &module, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.insert(module, code(&fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Which modules of a crate each of them uses. One that is made of others uses all of them, and what it only passes on is used
/// where it comes from.
fn uses(folder: &Path) -> BTreeMap<Names, BTreeSet<Names>> {
    let mut files = BTreeMap::new();
    self::files(folder, &[], &mut files);
    let parts = |module: &Names| -> Vec<&Names> {
        files.keys().filter(|part| part.split_last().is_some_and(|(_, whole)| whole == module)).collect()
    };
    // Of each module: what its parts are called in it, and where each name is from that it passes on.
    let mut known: BTreeMap<(Names, String), Names> = BTreeMap::new();
    for (module, text) in &files {
        for part in parts(module) {
            let own = part.last().unwrap();
            known.insert((module.clone(), own.clone()), part.clone());
            let lent = text.split(';').filter_map(|item| item.rsplit("use ").next().filter(|_| item.contains("use ")));
            for mut names in lent.flat_map(|item| paths(&format!(" {item}"), [own.as_str()])) {
                known.insert((module.clone(), names.pop().unwrap()), part.clone());
            }
        }
    }
    let used = |module: &Names, text: &String| {
        let mut used: BTreeSet<Names> = parts(module).into_iter().cloned().collect();
        for names in paths(text, ["crate", "super", "self"]) {
            let mut at = module.clone();
            for name in names {
                let part = known.get(&(at.clone(), name.clone()));
                match (name.as_str(), part) {
                    ("crate", _) => at.clear(),
                    ("super", _) => drop(at.pop()),
                    ("self", _) => {}
                    (_, Some(part)) => at.clone_from(part),
                    (_, None) => break,
                }
            }
            used.insert(at);
        }
        used.remove(module);
        used
    };
    let mut uses: BTreeMap<_, _> = files.iter().map(|(module, text)| (module.clone(), used(module, text))).collect();
    // What stands in the root itself is the crate's constants, which are below everything.
    uses.remove(&Names::new());
    uses
}

#[test]
fn no_file_is_used_by_what_it_uses() {
    for folder in ["src/pool", "src/config", "src/events", "src/cli"] {
        let mut left = uses(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder));
        assert!(left.values().map(BTreeSet::len).sum::<usize>() > 3, "{folder}: nothing uses anything");
        // What uses nothing that is left can go; a circle cannot.
        while let Some(name) = left.iter().find(|(_, used)| !used.iter().any(|name| left.contains_key(name))) {
            let name = name.0.clone();
            left.remove(&name);
        }
        let circle = left.iter().map(|(name, used)| {
            let used: Vec<String> =
                used.iter().filter(|used| left.contains_key(*used)).map(|used| used.join("/")).collect();
            format!("{} uses {}", name.join("/"), used.join(", "))
        });
        let circle: Vec<String> = circle.collect();
        assert!(circle.is_empty(), "{folder}: a circle, and what needs it:\n{}", circle.join("\n"));
    }
}
