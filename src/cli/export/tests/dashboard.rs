//! The dashboard for Grafana asks only for what is exported. The files lie in `src/package/deploy`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::tool;
use crate::export::families::ALL;

/// Panels that the current Grafana has; `graph` and `singlestat` went with version 12.
const PANELS: [&str; 5] = ["timeseries", "stat", "table", "bargauge", "row"];

fn dashboard() -> Value {
    serde_json::from_str(include_str!("../../../package/deploy/grafana-dashboard.json")).unwrap()
}

fn panels(dashboard: &Value) -> &[Value] {
    dashboard["panels"].as_array().unwrap()
}

fn targets(panel: &Value) -> impl Iterator<Item = &Value> {
    panel["targets"].as_array().into_iter().flatten()
}

/// What the dashboard asks for, and its words of the answers.
fn queries() -> Vec<(String, String)> {
    let dashboard = dashboard();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of_panels = panels(&dashboard).iter().flat_map(targets);
    let mut queries: Vec<_> = of_panels.map(|target| (text(&target["expr"]), text(&target["legendFormat"]))).collect();
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["query"]["query"].as_str() {
            assert_eq!(variable["definition"], query);
            // `label_values(SELECTOR, LABEL)`: a label of what is selected.
            let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
            let (selector, label) = inner.rsplit_once(", ").unwrap();
            queries.push((format!("count by ({label}) ({selector})"), String::new()));
        }
    }
    queries
}

/// What is wrong with a query: names that nobody exports, and labels that these names do not have.
fn wrong(expression: &str, legend: &str) -> Vec<String> {
    let labels: BTreeMap<&str, Vec<&str>> = ALL.iter().map(|family| (family.name, family.all_labels())).collect();
    let mut wrong = Vec::new();
    // Without what stands in quotation marks, where a label's name would be any text.
    let bare: String = expression.split('"').step_by(2).collect::<Vec<_>>().join("\"");
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut known: BTreeSet<&str> = BTreeSet::new();
    let mut rest = bare.as_str();
    while let Some(at) = rest.find("gpupool_") {
        let name: &str = rest[at..].split(|c| !is_name(c)).next().unwrap_or_default();
        rest = &rest[at + name.len()..];
        let Some(own) = labels.get(name) else {
            wrong.push(format!("nobody exports {name}"));
            continue;
        };
        known.extend(own);
        let selector = rest.strip_prefix('{').and_then(|rest| rest.split('}').next()).unwrap_or_default();
        for matcher in selector.split(',').filter(|matcher| !matcher.is_empty()) {
            let label = matcher.split(|c| !is_name(c)).next().unwrap_or_default();
            if !own.contains(&label) {
                wrong.push(format!("{name} has no label {label}"));
            }
        }
    }
    if known.is_empty() {
        wrong.push("it asks for nothing".to_owned());
    }
    let groups = ["by (", "on (", "without (", "ignoring (", "group_left (", "group_right ("].into_iter();
    let grouped = groups
        .flat_map(|word| bare.split(word).skip(1))
        .flat_map(|rest| rest.split(')').next().unwrap_or_default().split(',').map(str::trim));
    let shown = legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap_or_default().trim());
    for label in grouped.chain(shown) {
        if !known.contains(&label) {
            wrong.push(format!("nothing in it has the label {label}"));
        }
    }
    wrong
}

/// What README tells people to ask.
fn readme() -> Vec<(String, String)> {
    let readme = include_str!("../../../../README.md");
    let (_, table) = readme.split_once("| question | PromQL |\n| --- | --- |\n").unwrap();
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    rows.map(|row| (row.split('`').nth(1).unwrap_or_default().to_owned(), String::new())).collect()
}

#[test]
fn it_asks_only_for_what_is_exported_and_so_does_readme() {
    for (expression, legend) in queries().into_iter().chain(readme()) {
        assert_eq!(wrong(&expression, &legend), [""; 0], "{expression}");
    }
}

#[test]
fn this_test_finds_what_is_wrong() {
    assert_eq!(
        wrong("sum(gpupool_live_gigabytes)", ""),
        ["nobody exports gpupool_live_gigabytes", "it asks for nothing"]
    );
    assert_eq!(wrong(r#"gpupool_live_bytes{pid="a,b"}"#, ""), ["gpupool_live_bytes has no label pid"]);
    assert_eq!(wrong("sum by (host, place) (gpupool_live_bytes)", ""), ["nothing in it has the label place"]);
    assert_eq!(wrong("gpupool_live_bytes", "{{host}} {{gpu}}"), ["nothing in it has the label gpu"]);
    assert_eq!(wrong(r#"sum by (host) (gpupool_live_bytes{host=~"$host"})"#, "{{host}}"), [""; 0]);
}

#[test]
fn it_is_made_of_panels_that_grafana_has_side_by_side() {
    let dashboard = dashboard();
    assert_eq!(dashboard["id"], Value::Null, "an id is the server's to give");
    assert!(dashboard["uid"].is_string() && dashboard["schemaVersion"].as_u64() >= Some(39));
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels(&dashboard) {
        let title = panel["title"].as_str().unwrap();
        assert!(PANELS.contains(&panel["type"].as_str().unwrap()), "{title}");
        assert!(ids.insert(panel["id"].as_u64()), "{title}: its id is another panel's");
        let number = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        assert!(number("x") + number("w") <= 24, "{title}");
        for row in number("y")..number("y") + number("h") {
            for column in number("x")..number("x") + number("w") {
                assert!(taken.insert((row, column)), "{title} lies on another panel");
            }
        }
        assert_eq!(panel["type"] == "row", targets(panel).count() == 0, "{title}");
        for target in targets(panel) {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}: the one that is chosen");
        }
    }
}

#[test]
fn prometheus_understands_every_query() {
    let rules: Vec<Value> = queries()
        .into_iter()
        .chain(readme())
        .enumerate()
        .map(|(number, (expression, _))| {
            let expression = expression.replace("$__rate_interval", "5m");
            serde_json::json!({ "record": format!("gpupool:query{number}"), "expr": expression })
        })
        .collect();
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    // JSON is YAML.
    let groups = serde_json::json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    std::fs::write(file.path(), groups.to_string()).unwrap();
    let path = file.path().to_str().unwrap();
    if let Some(said) = tool(&["check", "rules", path], "") {
        assert!(said.contains(&format!("{} rules found", rules.len())), "{said}");
    }
}

#[test]
fn the_other_files_for_prometheus_are_as_it_wants_them() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../package/deploy/prometheus.yaml");
    if let Some(said) = tool(&["check", "config", "--syntax-only", path], "") {
        assert!(said.contains("SUCCESS"), "{said}");
    }
}
