//! What is exported of processes as their pages tell of them.

mod dashboard;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::{Command, Stdio};

use gpupool_metrics::{Counter, Label, Levels};

use super::families::{ALL, Families};
use super::slots::{Labels, Slots};
use crate::pages::{Look, Skipped};
use crate::sample::{GIB, listed, look};

fn exported(look: &Look) -> String {
    let slots = Slots::default().of(&look.rows);
    Families::of("node1", look, &slots).text()
}

/// Samples by what stands in front of their values.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let mut samples = BTreeMap::new();
    for line in lines {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        assert!(samples.insert(name, value.parse().unwrap()).is_none(), "twice: {line}");
    }
    samples
}

#[test]
fn numbers_are_the_pages_in_bytes_and_seconds() {
    let text = exported(&look(vec![listed(812, "train")]));
    let samples = samples(&text);
    let value = |name: &str, labels: &str| {
        let of_process = r#"host="node1",process="train",rank="1",slot="0""#;
        let comma = if labels.is_empty() { "" } else { "," };
        let key = format!("{name}{{{of_process}{comma}{labels}}}");
        *samples.get(key.as_str()).unwrap_or_else(|| panic!("no {key} in\n{text}"))
    };
    let gpu1 = r#"gpu="GPU-02020202-0202-0202-0202-020202020202",place="gpu1""#;
    assert_eq!(value("gpupool_place_used_bytes", gpu1), (20 * GIB) as f64);
    assert_eq!(value("gpupool_place_limit_bytes", r#"place="host0""#), (256 * GIB) as f64, "the host has no GPU");
    assert_eq!(value("gpupool_resident_bytes", r#"residence="peers""#), (20 * GIB) as f64);
    let [own, other] = ["GPU-01010101-0101-0101-0101-010101010101", "GPU-02020202-0202-0202-0202-020202020202"];
    let lent = |lender: &str| value("gpupool_borrowed_bytes", &format!("borrower=\"{own}\",{lender}"));
    assert_eq!(lent(&format!("lender=\"{other}\",place=\"gpu1\"")), (20 * GIB) as f64);
    assert_eq!(lent(r#"place="host0""#), (10 * GIB) as f64, "the host has no UUID");
    assert_eq!(value("gpupool_place_reserve_bytes", gpu1), GIB as f64);
    assert_eq!(value("gpupool_far_read_bytes_total", ""), 1_000_000.0 * (Counter::FarReadBytes as u64 + 1) as f64);
    assert_eq!(value("gpupool_far_lost_seconds_total", ""), 1.5);
    assert_eq!(value("gpupool_move_saved_seconds", ""), -0.25);
    assert_eq!(value("gpupool_contexts", gpu1), 1.0);
    assert_eq!(value("gpupool_contexts_unused", gpu1), 1.0);
    assert_eq!(value("gpupool_findings_total", ""), 3.0);
    assert_eq!(value("gpupool_recent_findings", r#"code="GP001""#), 2.0);
    assert_eq!(value("gpupool_process_first_allocation_timestamp_seconds", ""), 1_700_000_000.5);
    let moved = value("gpupool_moved_bytes_total", r#"direction="near",residence="host""#);
    assert_eq!(moved, 1_000_000.0 * (Counter::CameFromHostBytes as u64 + 1) as f64);
    assert_eq!(value("gpupool_moving_seconds_total", ""), (Counter::MovingMicroseconds as u64 + 1) as f64);
    assert_eq!(value("gpupool_label_bytes", r#"label="kv",residence="peers""#), (20 * GIB) as f64);
    assert_eq!(value("gpupool_label_budget_bytes", r#"label="kv""#), (10 * GIB) as f64);
    let info = r#"pid="812",user="1000",mode="pool",version="0.2.0""#;
    assert_eq!(value("gpupool_process_info", info), 1.0);
}

#[test]
fn every_name_keeps_to_the_conventions_and_the_pid_stands_in_one_place() {
    let mut row = listed(812, "train");
    row.told.levels.suspended = 1_700_000_000_500_000;
    let text =
        exported(&Look { rows: vec![row], skipped: vec![Skipped { reason: "torn", pid: None, why: String::new() }] });
    for family in ALL {
        let name = family.name;
        let kind = text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} ")));
        assert_eq!(kind == Some("counter"), name.ends_with("_total"), "{name}: {kind:?}");
        assert!(text.contains(&format!("# HELP {name} ")), "{name} is not written");
        let units = ["bytes", "seconds", "total", "info"];
        for unit in ["kib", "mib", "gib", "microseconds", "milliseconds", "percent"] {
            assert!(!name.contains(unit), "{name} is in {unit}, not one of {units:?}");
        }
        assert_eq!(family.all_labels().contains(&"pid"), name == "gpupool_process_info");
    }
    let names: BTreeSet<_> = ALL.iter().map(|family| family.name).collect();
    assert_eq!(names.len(), ALL.len());
}

#[test]
fn a_hostile_name_is_one_label_and_moves_no_cursor() {
    let name = "a\"} 1\nevil{x=\"\\\\\x1b[2J\u{202e}";
    let mut row = listed(812, name);
    row.told.levels.mode = "m\x07\"".to_owned();
    row.told.levels.gpus.rows[0].name = "\x1b]0;title\x07".to_owned();
    row.told.findings.rows[0].code = "GP\n001".to_owned();
    row.told.labels.rows[0].name = name.to_owned();
    let text = exported(&look(vec![row]));
    assert!(text.lines().all(|line| line.starts_with("gpupool_") || line.starts_with("# ")), "{text}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' || c == '\u{202e}'), "{text}");
    let one = "process=\"a\\\"} 1\u{fffd}evil{x=\\\"\\\\\\\\\u{fffd}[2J\u{fffd}\",rank=";
    assert!(text.contains(one), "{text}");
    assert!(text.contains("gpupool_recent_findings{") && text.contains(r#"code="other"} 1"#), "{text}");
    assert_eq!(tool(&["check", "metrics"], &text).unwrap_or_default(), "");
}

/// A program may name its blocks by what it serves, without end.
#[test]
fn names_of_blocks_are_a_bounded_number_of_series_that_add_up_to_all_of_them() {
    let mut row = listed(812, "serve");
    let kv = row.told.labels.rows[0].clone();
    let named = |nth: u64| Label { name: format!("request {nth}"), bytes: GIB, near: GIB, on_peers: 0, ..kv.clone() };
    row.told.labels = (0..60).map(named).collect::<Vec<_>>().into();
    row.told.labels.more = 9;
    let text = exported(&look(vec![row]));
    let samples = samples(&text);
    let of = |family: &'static str| samples.iter().filter(move |(name, _)| name.starts_with(family));
    assert_eq!(of("gpupool_label_bytes{").count(), 3 * 17);
    assert_eq!(of("gpupool_label_bytes{").map(|(_, bytes)| bytes).sum::<f64>(), (60 * GIB) as f64);
    let other = of("gpupool_label_bytes{").find(|(name, _)| name.contains(r#"label="other",residence="near""#));
    assert_eq!(other.map(|(_, bytes)| *bytes), Some((44 * GIB) as f64));
    assert_eq!(of("gpupool_label_budget_bytes{").count(), 16);
    assert_eq!(of("gpupool_labels{").map(|(_, count)| *count).collect::<Vec<_>>(), [69.0]);
}

#[test]
fn promtool_finds_nothing_to_complain_of() {
    let rows = (1..4).map(|pid| listed(pid, "train")).collect();
    let skipped = vec![Skipped { reason: "torn", pid: None, why: String::new() }];
    assert_eq!(tool(&["check", "metrics"], &exported(&Look { rows, skipped })).unwrap_or_default(), "");
}

/// What Prometheus' own tool says to this input, if it is installed.
fn tool(arguments: &[&str], input: &str) -> Option<String> {
    let mut tool = Command::new("promtool");
    tool.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = tool.spawn() else {
        println!("no promtool is installed: its check was not made");
        return None;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{said}\n{input}");
    Some(said)
}

#[test]
fn a_page_that_has_told_nothing_yet_is_exported() {
    let mut row = listed(812, "train");
    row.told.levels = Levels::default();
    let text = exported(&look(vec![row]));
    assert!(text.contains("gpupool_live_bytes{") && !text.contains("gpupool_process_updated_timestamp"), "{text}");
}

#[test]
fn processes_of_one_name_keep_their_slots_as_long_as_they_live() {
    let mut slots = Slots::default();
    let (mut one, mut two, mut three) = (listed(1, "train"), listed(2, "train"), listed(3, "train"));
    (one.told.process.created, two.told.process.created, three.told.process.created) = (30, 10, 40);
    let other = listed(4, "serve");
    let numbers = |labels: &[Labels]| labels.iter().map(|labels| labels.slot).collect::<Vec<_>>();
    let both = slots.of(&[one.clone(), two.clone(), other]);
    assert_eq!(numbers(&both), [1, 0, 0], "the oldest first, and each name by itself");
    assert_eq!(numbers(&slots.of(std::slice::from_ref(&one))), [1], "the other one ended");
    assert_eq!(numbers(&slots.of(&[one.clone(), three])), [1, 0], "a new one takes the place that became free");
    // A program that the process becomes is another one, whose counters begin anew.
    let mut became = one.clone();
    became.told.process.identity.image += 16;
    assert_eq!(numbers(&slots.of(&[became])), [0]);
}

#[test]
fn there_are_series_for_so_many_processes_only() {
    let rows: Vec<_> = (0..1030).map(|pid| listed(pid, &format!("p{pid}"))).collect();
    let text = exported(&look(rows));
    assert!(text.contains("gpupool_exporter_omitted_processes{host=\"node1\"} 6\n"));
    assert_eq!(text.lines().filter(|line| line.starts_with("gpupool_process_info{")).count(), 1024);
}
