//! What uses what. The crates and the modules of the library are floors: each uses only what stands above it in the tables of
//! `src/README.md`. The files of the other crates build on each other in one direction: none uses a file that uses it, by
//! itself or through others.

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
        } else if name != "tests" && path.extension().is_some_and(|extension| extension == "rs") {
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
    for folder in ["src/pool", "src/tiers", "src/config", "src/events", "src/cli"] {
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

/// The rows of the table in `src/README.md` whose head begins with `head`, by their first cell.
fn table(head: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("src/README.md")).unwrap();
    let (_, table) = text.split_once(&format!("\n| {head}")).unwrap_or_else(|| panic!("no table {head}"));
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.split('|').nth(1).unwrap().trim().to_owned()).collect()
}

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What stands between backticks.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Every use of something that does not stand above its user, in `order`, and what stands nowhere.
fn upward(order: &[String], uses: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let floor = |name: &String| order.iter().position(|known| known == name);
    let mut wrong = Vec::new();
    for (user, used) in uses {
        match floor(user) {
            None => wrong.push(format!("{user} is not in the table")),
            Some(own) => {
                let bad = used.iter().filter(|name| floor(name).is_none_or(|floor| floor >= own));
                wrong.extend(bad.map(|name| format!("{user} uses {name}")));
            }
        }
    }
    wrong
}

/// The folder or file that a module of the library is in; of the two large folders, the part of it.
fn floor(module: &Names) -> String {
    let parts = if ["watch", "serve"].contains(&module[0].as_str()) { 2 } else { 1 };
    module.iter().take(parts).cloned().collect::<Vec<_>>().join("/")
}

#[test]
fn the_library_s_modules_use_only_those_above_them_in_the_table() {
    let order: Vec<String> = table("modules, from the bottom").iter().flat_map(|cell| quoted(cell)).collect();
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, used) in uses(&root().join("src/shim")) {
        let own = floor(&module);
        let used: Vec<String> =
            used.iter().filter(|name| !name.is_empty()).map(floor).filter(|name| *name != own).collect();
        found.entry(own).or_default().extend(used);
    }
    // Of these the one is no module, and the other only a list of its parts.
    found.remove("build");
    found.remove("watch");
    assert!(found.len() > 10 && found.values().map(BTreeSet::len).sum::<usize>() > 50, "{found:?}");
    let missing: Vec<_> = order.iter().filter(|name| !found.contains_key(*name)).collect();
    assert!(missing.is_empty(), "in the table and not in src/shim: {missing:?}");
    let wrong = upward(&order, &found);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_crates_use_only_those_above_them_in_the_table() {
    let cargo = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(root())
        .output()
        .unwrap();
    let told: serde_json::Value = serde_json::from_slice(&cargo.stdout).unwrap();
    let packages = told["packages"].as_array().unwrap();
    let name = |package: &serde_json::Value| package["name"].as_str().unwrap().to_owned();
    let ours: BTreeSet<String> = packages.iter().map(name).collect();
    let uses = packages.iter().map(|package| {
        let of = package["dependencies"].as_array().unwrap().iter();
        let for_it = of.filter(|dependency| dependency["kind"].is_null()).map(name);
        (name(package), for_it.filter(|name| ours.contains(name)).collect())
    });
    let order: Vec<String> = table("crate, from the bottom").iter().flat_map(|cell| quoted(cell)).collect();
    let wrong = upward(&order, &uses.collect());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_upward_use_is_found() {
    let order = ["low", "high"].map(str::to_owned);
    let uses = |user: &str, used: &str| BTreeMap::from([(user.to_owned(), BTreeSet::from([used.to_owned()]))]);
    assert!(upward(&order, &uses("high", "low")).is_empty());
    assert_eq!(upward(&order, &uses("low", "high")), ["low uses high"]);
    assert_eq!(upward(&order, &uses("low", "low")), ["low uses low"]);
    assert_eq!(upward(&order, &uses("other", "low")), ["other is not in the table"]);
}

/// Besides the trampolines, which pass a program's call on. (A call by the driver's table does not compile elsewhere: its
/// fields are the crate's own.)
#[test]
fn only_the_cuda_crate_calls_the_driver() {
    let mut files = BTreeMap::new();
    self::files(&root().join("src/shim"), &[], &mut files);
    let raw = files.iter().filter(|(module, text)| {
        let is_trampoline = module.join("/") == "hook/trampoline";
        let types_a_function = text.contains("extern \"C\" fn(") && text.contains("-> CuResult");
        !is_trampoline && (types_a_function && text.contains("transmute") || text.contains("libcuda.so.1\", RTLD"))
    });
    let raw: Vec<String> = raw.map(|(module, _)| module.join("/")).collect();
    assert!(raw.is_empty(), "{raw:?}");
}
