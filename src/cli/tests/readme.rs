//! README says what the program does.

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
