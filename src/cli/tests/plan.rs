//! `gpupool plan` and `gpupool diff` on logs written by hand.

use crate::common::{golden, golden_folder, gpupool, output, stderr, stdout};

/// In the folder of the logs, so that their paths are the same everywhere.
fn said(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = output(gpupool().current_dir(golden_folder()).args(arguments));
    (output.status.code(), stdout(&output), stderr(&output))
}

#[test]
fn other_machines_are_planned_for() {
    let (code, text, stderr) = said(&[
        "plan",
        "far.jsonl",
        "--gpus",
        "1x80GiB",
        "--gpus",
        "2x80GiB",
        "--gpus",
        "1x141GiB",
        "--gpus",
        "4x24GiB",
        "--host",
        "8GiB",
    ]);
    assert_eq!(code, Some(0), "{stderr}");
    golden("plan.txt", &text);
}

#[test]
fn the_plan_as_json_and_by_itself() {
    let (_, text, _) = said(&["plan", "far.jsonl", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let machines: Vec<&str> =
        json["machines"].as_array().unwrap().iter().filter_map(|one| one["gpus"].as_str()).collect();
    assert_eq!(machines, ["1x80GiB", "2x80GiB", "4x80GiB", "8x80GiB"], "of the size that the log tells");
    // On the machine that the log is of.
    let own = &json["machines"][1];
    let peers = own["peak"]["on_peers"].as_u64().map(|bytes| bytes.abs_diff(22 << 30));
    // The context has its place here, which the log was written without.
    assert!(peers.is_some_and(|off| off < 1 << 30) && own["peak"]["missing"] == 0, "{own:#}");
    let [there, here] = [&own["slowdown"], &json["slowdown"]].map(|of| of.as_f64().unwrap());
    assert!((there - here).abs() < 0.01, "{there} planned, {here} in the log");
}

#[test]
fn what_cannot_be_planned_is_refused_with_what_to_write() {
    let wrong = [
        (vec!["plan", "far.jsonl", "--gpus", "lots"], "2x16GiB"),
        (vec!["plan", "far.jsonl", "--limit", "70XB"], "70XB"),
        (vec!["plan", "nowhere.jsonl"], "no such file"),
        (vec!["plan", "rank0.jsonl"], "no process of these logs used memory"),
        (vec!["diff", "far.jsonl", "nowhere.jsonl"], "no such file"),
    ];
    for (arguments, expected) in wrong {
        let (code, text, stderr) = said(&arguments);
        assert_eq!((code, text.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

#[test]
fn logs_that_say_what_cannot_be_do_no_harm() {
    let log = std::fs::read_to_string(golden_folder().join("far.jsonl")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let most = format!(":{}", u64::MAX);
    // As large as numbers get, and the line that has them cut in the middle.
    let mad = log
        .replace(":83751862272", &most)
        .replace(":23622320128", &most)
        .replace(":84825604096", &most)
        .replace("\"cost\":548405248", "\"cost\":18446744073709551615");
    let mad = mad.replace("100.0", "-1e308") + &log[..log.len() / 3];
    let path = folder.path().join("mad.jsonl");
    std::fs::write(&path, mad).unwrap();
    let path = path.display().to_string();
    for arguments in [
        vec!["plan", &path, "--gpus", "2x80GiB"],
        vec!["plan", &path],
        vec!["diff", &path, "far.jsonl"],
        vec!["report", &path],
        vec!["report", "--oom", &path],
    ] {
        let (code, _, stderr) = said(&arguments);
        assert!(matches!(code, Some(0 | 2)) && !stderr.contains("panicked"), "{arguments:?}: {code:?} {stderr}");
    }
}

#[test]
fn two_runs_are_compared() {
    let (code, text, stderr) = said(&["diff", "far.jsonl", "far_less.jsonl"]);
    assert_eq!(code, Some(0), "{stderr}");
    golden("diff.txt", &text);
    let (_, same, _) = said(&["diff", "far.jsonl", "far.jsonl"]);
    assert!(same.contains("nothing has changed"), "{same}");
    let (_, text, _) = said(&["diff", "--json", "far.jsonl", "far_less.jsonl"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let findings: Vec<_> =
        json["changes"].as_array().unwrap().iter().filter(|one| one["section"] == "findings").collect();
    assert_eq!(findings.len(), 1, "{text}");
    assert_eq!((&findings[0]["before"], &findings[0]["after"]), (&1.0.into(), &serde_json::Value::Null));
}
