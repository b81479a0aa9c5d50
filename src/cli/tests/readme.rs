//! README says what the program does.

use std::path::Path;

use gpupool_config::SETTINGS;
use gpupool_events::FINDINGS;

use crate::common::golden_folder;

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
