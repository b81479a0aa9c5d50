//! README says what the program does.

use gpupool_config::SETTINGS;

const BEGIN: &str = "<!-- settings -->\n";
const END: &str = "<!-- /settings -->\n";

/// The table as README has it.
fn table() -> String {
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

#[test]
fn readme_lists_the_settings_as_they_are() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let readme = std::fs::read_to_string(path).unwrap();
    let found = readme.split_once(BEGIN).and_then(|(_, rest)| rest.split_once(END)).map(|(found, _)| found);
    assert_eq!(found, Some(table().as_str()), "put this between the markers of README.md:\n{}", table());
}
