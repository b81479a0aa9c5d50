//! README says what the program does.

use std::collections::BTreeSet;
use std::path::Path;

use gpupool_config::SETTINGS;
use gpupool_events::FINDINGS;

use crate::common::{golden_folder, gpupool, output, stdout};

/// README as it is, and what stands in it between the markers called `name`.
fn readme() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn between<'a>(readme: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = readme.split_once(&format!("<!-- {name} -->\n"))?;
    rest.split_once(&format!("<!-- /{name} -->\n")).map(|(found, _)| found)
}

/// The table of settings as README has it.
fn settings() -> String {
    // A | inside a cell would end it.
    let cell = |text: &str| text.replace('|', "\\|");
    let mut table = "| setting | values | default | meaning |\n| --- | --- | --- | --- |\n".to_owned();
    for row in SETTINGS {
        table.push_str(&format!(
            "| `{}` | {} | {} | {} |\n",
            row.name,
            cell(row.values),
            cell(row.default),
            cell(row.help)
        ));
    }
    table
}

/// The table of findings as README has it.
fn findings() -> String {
    let mut table = "| code | finding |\n| --- | --- |\n".to_owned();
    for finding in FINDINGS {
        table.push_str(&format!("| {} | {} |\n", finding.code, finding.title));
    }
    table
}

#[test]
fn readme_lists_settings_and_findings_as_they_are() {
    let readme = readme();
    for (name, table) in [("settings", settings()), ("findings", findings())] {
        let found = between(&readme, name);
        assert_eq!(found, Some(table.as_str()), "put this between the markers {name} of README.md:\n{table}");
    }
}

#[test]
fn readme_shows_a_finding_as_the_report_does() {
    let report = std::fs::read_to_string(golden_folder().join("train.txt")).unwrap();
    let (_, finding) = report.split_once("Findings\n").unwrap();
    let (finding, _) = finding.split_once("\n\n").unwrap();
    assert!(readme().contains(finding), "put this into README.md:\n{finding}");
}

/// What a heading is called in a link to it.
fn slug(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[test]
fn links_lead_to_files_and_headings_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for page in ["README.md", "CONTRIBUTING.md", "src/README.md", "tests/README.md"] {
        let file = root.join(page);
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{page}: {error}"));
        let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
        for link in links.filter(|link| !link.contains("://")) {
            let (to, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if to.is_empty() { file.clone() } else { file.with_file_name(to) };
            assert!(target.exists(), "{page} links to {link}: {} is not there", target.display());
            if !heading.is_empty() {
                let target = std::fs::read_to_string(target).unwrap();
                let mut headings = target.lines().filter(|line| line.starts_with('#'));
                let is_there = headings.any(|line| slug(line.trim_start_matches('#').trim()) == heading);
                assert!(is_there, "{page} links to {link}: no such heading");
            }
        }
    }
}

/// Who looks for the tests of something finds the file by its row.
#[test]
fn each_file_of_tests_has_a_row_in_their_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let table = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| `")).collect();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let stem = path.file_stem().unwrap().to_str().unwrap();
        // Of one with more files the folder is named.
        let names = [format!("`{stem}.rs`"), format!("`{stem}`")];
        let is_named =
            |row: &&str| row.split('|').nth(1).is_some_and(|cell| names.iter().any(|name| cell.contains(name)));
        assert!(rows.iter().any(is_named), "{stem}.rs has no row in tests/README.md");
    }
}

/// What stands behind `gpupool::` in string literals of these sources, tests aside.
fn subjects_in(folder: &Path, subjects: &mut BTreeSet<String>) {
    let broken = |error: std::io::Error| -> ! { panic!("{}: {error}", folder.display()) };
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| broken(error)) {
        let path = entry.unwrap_or_else(|error| broken(error)).path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        if path.is_dir() && !is_test {
            subjects_in(&path, subjects);
        } else if !is_test && path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| broken(error));
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            for rest in code.flat_map(|line| line.split("\"gpupool::").skip(1)) {
                subjects.insert(rest.chars().take_while(char::is_ascii_lowercase).collect());
            }
        }
    }
}

/// A directive of `GPUPOOL_LOG` is refused by its list of subjects, and the code says them where it logs.
#[test]
fn the_subjects_of_the_log_are_those_that_the_library_logs_about_and_the_page_names() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut logged = BTreeSet::new();
    for folder in ["shim", "events"] {
        subjects_in(&sources.join(folder), &mut logged);
    }
    let known: BTreeSet<String> = gpupool_config::SUBJECTS.iter().map(|subject| (*subject).to_owned()).collect();
    assert_eq!(logged, known);
    let page = readme();
    let (_, list) = page.split_once("sets the level of one subject by itself").unwrap();
    let (list, _) = list.split_once("\n\n").unwrap();
    for subject in known {
        assert!(list.contains(&format!("`{subject}`")), "README.md does not name {subject} in:{list}");
    }
}

/// Who writes a program for simulated GPUs reads it in one of two places.
#[test]
fn the_kernels_of_simulated_gpus_are_those_of_the_page_and_of_the_driver() {
    let page = readme();
    let (_, rest) = page.split_once("### Kernels on simulated GPUs").unwrap();
    let (table, _) = rest.split_once("\n## ").unwrap();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() > 4, "{rows:?}");
    let help = stdout(&output(gpupool().args(["sim", "--help"])));
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/../simcuda/kernels.rs");
    let driver = std::fs::read_to_string(driver).unwrap();
    for row in &rows {
        let [signature, effect] = [row[0], row[1]].map(|cell| cell.replace('`', ""));
        let (name, _) = signature.split_once('(').unwrap();
        let is_told = help
            .lines()
            .any(|line| line.trim_start().strip_prefix(&signature).is_some_and(|rest| rest.trim() == effect));
        assert!(is_told, "gpupool sim --help does not say `{signature}`: {effect}\n{help}");
        assert!(driver.contains(&format!("name: \"{name}\"")), "the simulated driver has no {name}");
    }
    let told = help.split_once("Kernels (").unwrap().1.split_once("Examples:").unwrap().0;
    assert_eq!(told.lines().filter(|line| line.contains("_u32(")).count(), rows.len());
}
