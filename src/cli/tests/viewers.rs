//! The files of `gpupool report` for viewers, as the programs that they are for read them.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::common::{golden_folder, gpupool, output, stderr, stdout};

/// Python's own unpickler, and the arithmetic of PyTorch's viewer: where PyTorch is installed, its own functions.
const LOOK: &str = r#"
import json, pickle, sys
snapshot = pickle.load(open(sys.argv[1], "rb"))
report = json.load(open(sys.argv[2]))
held = {}
used = {}
for segment in snapshot["segments"]:
    place = snapshot["allocator_settings"][f"device {segment['device']}"]
    held[place] = held.get(place, 0) + segment["total_size"]
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at and block["size"] > 0, block
        at += block["size"]
        if block["state"] == "active_allocated":
            used[place] = used.get(place, 0) + block["requested_size"]
            assert block["frames"], block
    assert at == segment["address"] + segment["total_size"], segment
places = {}
for process in report["processes"]:
    for place, line in process["memory"]["places"].items():
        places[place] = places.get(place, 0) + line["used"][-1]
assert {place: size for place, size in places.items() if size} == used, (places, used)
for trace in snapshot["device_traces"]:
    live = {}
    assert [entry["time_us"] for entry in trace] == sorted(entry["time_us"] for entry in trace)
    for entry in trace:
        assert entry["addr" if entry["action"] != "oom" else "device_free"] >= 0 and entry["time_us"] > 0, entry
        if entry["action"] == "alloc":
            assert live.setdefault(entry["addr"], entry["size"]) == entry["size"] and entry["frames"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
try:
    from torch.cuda import _memory_viz
    _memory_viz.segsum(snapshot), _memory_viz.trace(snapshot)
    _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
except ImportError:
    print("no PyTorch is installed: its own functions were not called")
print(json.dumps({"held": held, "actions": [entry["action"] for entry in snapshot["device_traces"][0]]}))
"#;

#[test]
fn pytorch_reads_a_snapshot_with_the_numbers_of_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    // Another process that did the same at the same time.
    let log = golden_folder().join("blocks.jsonl");
    let other = std::fs::read_to_string(&log).unwrap().replace("\"pid\":4711", "\"pid\":4712");
    std::fs::write(path("other"), other).unwrap();
    let written = output(
        gpupool().arg("report").args([&log, &path("other")]).arg("--memory-viz").arg(path("pickle")).arg("--json"),
    );
    assert!(written.status.success(), "{}", stderr(&written));
    std::fs::write(path("json"), stdout(&written)).unwrap();
    let looked = output(Command::new("python3").args(["-c", LOOK]).arg(path("pickle")).arg(path("json")));
    assert!(looked.status.success(), "{}", stderr(&looked));
    let said: Value = serde_json::from_str(stdout(&looked).lines().last().unwrap()).unwrap();
    assert_eq!(said["held"]["gpu0"], 680u64 << 20);
    let actions: Vec<&str> = said["actions"].as_array().unwrap().iter().filter_map(|action| action.as_str()).collect();
    for action in ["segment_map", "segment_unmap", "alloc", "free_requested", "free_completed"] {
        assert!(actions.contains(&action), "{action}: {actions:?}");
    }
}

/// What is wrong with a value by a schema of JSON, as far as speedscope's goes.
fn complaint(schema: &Value, root: &Value, value: &Value, at: &str) -> Option<String> {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.trim_start_matches("#/definitions/");
        return complaint(&root["definitions"][name], root, value, at);
    }
    if let Some(choices) = schema["anyOf"].as_array() {
        let all: Option<Vec<String>> = choices.iter().map(|one| complaint(one, root, value, at)).collect();
        return all.map(|all| all.join(", nor "));
    }
    let is_of_type = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("number") => value.is_number(),
        None => true,
        Some(other) => panic!("the schema has a type {other}"),
    };
    let is_one_of = schema["enum"].as_array().is_none_or(|known| known.contains(value));
    let is_it = schema.get("const").is_none_or(|only| only == value);
    if !(is_of_type && is_one_of && is_it) {
        return Some(format!("{at}: {value} is not {schema}"));
    }
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    if let Some(missing) = required.into_iter().find(|name| value.get(name).is_none()) {
        return Some(format!("{at}: no {missing}"));
    }
    let fields = value.as_object().into_iter().flatten();
    let mut below: Vec<(&Value, &Value, String)> =
        fields.map(|(name, value)| (&schema["properties"][name], value, format!("{at}.{name}"))).collect();
    let items = value.as_array().into_iter().flatten().enumerate();
    below.extend(items.map(|(index, value)| (&schema["items"], value, format!("{at}[{index}]"))));
    below
        .into_iter()
        .filter(|(schema, ..)| schema.is_object())
        .find_map(|(schema, value, at)| complaint(schema, root, value, &at))
}

#[test]
fn speedscope_takes_the_file_by_its_own_schema() {
    let schema = std::fs::read_to_string(golden_folder().join("../speedscope/file-format-schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("speedscope");
    for log in ["blocks.jsonl", "train.jsonl", "rank1.jsonl"] {
        let written = output(gpupool().arg("report").arg(golden_folder().join(log)).arg("--speedscope").arg(&path));
        assert!(written.status.success(), "{}", stderr(&written));
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(complaint(&schema, &schema, &file, ""), None, "{log}");
        assert!(file["profiles"].as_array().is_some_and(|profiles| !profiles.is_empty()), "{log}");
        file["profiles"][0]["unit"] = "bits".into();
        assert!(complaint(&schema, &schema, &file, "").is_some(), "the schema is looked at");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let log = golden_folder().join("blocks.jsonl");
    for file in ["--memory-viz", "--perfetto", "--speedscope"] {
        let failed = output(gpupool().arg("report").arg(&log).args([file, "/dev/null/file"]));
        assert_eq!(failed.status.code(), Some(2));
        assert!(stderr(&failed).starts_with("gpupool: /dev/null/file: cannot be written: "), "{}", stderr(&failed));
        // Not the log itself, which would be gone before it was read.
        let copy = tempfile::NamedTempFile::new().unwrap();
        std::fs::copy(&log, copy.path()).unwrap();
        let failed = output(gpupool().arg("report").arg(copy.path()).arg(file).arg(copy.path()));
        assert!(stderr(&failed).contains(" is the log "), "{}", stderr(&failed));
        assert_eq!(std::fs::read(copy.path()).unwrap(), std::fs::read(&log).unwrap());
    }
}

#[test]
fn a_log_that_stands_where_the_file_to_write_was_forgotten_is_kept() {
    let log = golden_folder().join("blocks.jsonl");
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("train.0.jsonl");
    std::fs::copy(&log, &first).unwrap();
    for option in ["--html", "--memory-viz", "--perfetto", "--speedscope"] {
        let failed = output(gpupool().args(["report", option]).arg(&first).arg(&log));
        assert_eq!(failed.status.code(), Some(2), "{option}");
        assert!(stderr(&failed).contains("is a log of gpupool's; name the file to write first"), "{}", stderr(&failed));
        assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&log).unwrap(), "{option}");
    }
    // What is written is no log, and takes the place of what was written before.
    let page = folder.path().join("page.html");
    for _ in 0..2 {
        let written = output(gpupool().args(["report", "--html"]).arg(&page).arg(&log));
        assert!(written.status.success(), "{}", stderr(&written));
    }
}

#[test]
fn two_outputs_do_not_share_a_file() {
    let log = golden_folder().join("blocks.jsonl");
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (folder.path().join("one"), folder.path().join("other"));
    let both = |first: &str, second: &str, path: &Path| {
        output(gpupool().arg("report").arg(&log).arg(first).arg(&one).arg(second).arg(path))
    };
    let failed = both("--html", "--perfetto", &one);
    assert_eq!(failed.status.code(), Some(2));
    assert!(stderr(&failed).contains("--html and --perfetto both name "), "{}", stderr(&failed));
    assert!(!one.exists(), "nothing was written");
    // By another name.
    std::fs::write(&one, "").unwrap();
    std::os::unix::fs::symlink(&one, &other).unwrap();
    assert_eq!(both("--memory-viz", "--speedscope", &other).status.code(), Some(2));
    std::fs::remove_file(&other).unwrap();
    assert!(both("--memory-viz", "--speedscope", &other).status.success());
}

#[test]
fn the_manual_has_a_page_for_each_command_and_shells_their_words() {
    let folder = tempfile::tempdir().unwrap();
    let made = output(gpupool().args(["manual", "--to"]).arg(folder.path()));
    assert!(made.status.success(), "{}", stderr(&made));
    let page = std::fs::read_to_string(folder.path().join("gpupool-report.1")).unwrap();
    assert!(page.contains(".SH EXAMPLES\n.nf\n") && page.contains("rank*.jsonl"), "{page}");
    assert_eq!(page, stdout(&output(gpupool().args(["manual", "report"]))));
    let all = std::fs::read_dir(folder.path()).unwrap().count();
    assert!(all >= 12, "{all}");
    assert!(!folder.path().join("gpupool-lenders.1").exists());
    let wrong = output(gpupool().args(["manual", "reprot"]));
    assert!(stderr(&wrong).contains("reprot: no such command"), "{}", stderr(&wrong));
    for shell in ["bash", "zsh", "fish"] {
        let words = stdout(&output(gpupool().args(["completions", shell])));
        assert!(words.contains("memory-viz") && words.contains("gpupool"), "{shell}");
    }
}
