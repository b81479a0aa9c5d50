//! `gpupool report` on logs written by hand, and on files that are no logs.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use crate::common::{golden, golden_folder, gpupool, on_a_terminal, on_a_terminal_of, output, stderr, stdout};

const START: &str = r#"{"v":1,"t":1,"pid":7,"tid":7,"level":"info","event":"process.start","message":"","version":"0.1.0","mode":"pool","exe":"/bin/x"}"#;

/// In the folder of the logs, so that their paths are the same everywhere.
fn report(arguments: &[&str]) -> Command {
    let mut command = gpupool();
    command.current_dir(golden_folder()).arg("report").args(arguments);
    command
}

/// A log of these bytes.
fn log_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    let made = tempfile::NamedTempFile::new().and_then(|mut file| file.write_all(bytes).map(|()| file));
    made.unwrap_or_else(|error| panic!("no temporary file: {error}"))
}

fn report_on(path: &Path) -> (Option<i32>, String, String) {
    let output = output(gpupool().arg("report").arg(path));
    (output.status.code(), stdout(&output), stderr(&output))
}

#[test]
fn one_process() {
    let output = output(&mut report(&["train.jsonl"]));
    assert!(output.status.success(), "{}", stderr(&output));
    golden("train.txt", &stdout(&output));
}

#[test]
fn what_was_where_when_memory_ran_out() {
    let output = output(&mut report(&["--oom", "oom.jsonl"]));
    assert!(output.status.success(), "{}", stderr(&output));
    golden("oom.txt", &stdout(&output));
}

#[test]
fn a_job_on_many_hosts_keeps_to_a_page() {
    let far = std::fs::read_to_string(golden_folder().join("far.jsonl")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for rank in 0..24 {
        let (host, own) = (rank / 8, rank % 8);
        let start = format!(r#""local_rank":{own},"job_ranks":8,"job":"j","host":"node{host}","exe""#);
        // The clocks of hosts differ, by a day here.
        let t = format!("\"t\":17000{host}");
        let log = far.replace("\"exe\"", &start).replace("\"t\":17000", &t).replace("GPU-1", &format!("GPU-{rank}"));
        let path = folder.path().join(format!("{rank}.jsonl"));
        std::fs::write(&path, log).unwrap();
        paths.push(path);
    }
    let output = output(gpupool().arg("report").args(&paths));
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(text.lines().count() < 80, "{text}");
    for expected in [
        "  node0 ranks 0-7  8 of them",
        "in node0 ranks 0-7, node1 ranks 0-7, node2 ranks 0-7",
        "  24 processes gpu1 ",
        "from the start to 2 min",
        "  24 of them    0     96000    22.0 GiB  8 min  gemm",
        "  24 processes   9600    9.4 TiB  9.4 TiB  12.0 s  4 min  in all",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
}

/// Processes that are no ranks do not say where they ran.
#[test]
fn equal_numbers_of_two_hosts_are_two_processes_with_two_names() {
    let folder = tempfile::tempdir().unwrap();
    let event = |name: &str, fields: &str| {
        format!(r#"{{"v":1,"t":2,"pid":7,"tid":7,"level":"info","event":"{name}","message":"",{fields}}}"#)
    };
    let mut paths = Vec::new();
    for (node, peak) in [("nodeA", 1_u64), ("nodeB", 2)] {
        std::fs::create_dir(folder.path().join(node)).unwrap();
        let end = format!(
            r#""peak":[{{"place":"gpu0","held":0,"peak_used":{}}}],"live_blocks":0,"live_bytes":0,"allocations":{peak},"reuses":0"#,
            peak << 30
        );
        paths.push(Path::new(node).join("x.jsonl"));
        std::fs::write(
            folder.path().join(node).join("x.jsonl"),
            [START, "\n", &event("process.exit", &end), "\n"].concat(),
        )
        .unwrap();
    }
    let text = stdout(&output(gpupool().current_dir(folder.path()).arg("report").arg("--json").args(&paths)));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let told = json["processes"].as_array().unwrap().iter();
    let told: Vec<(&str, u64)> = told
        .map(|it| (it["label"].as_str().unwrap(), it["exit"]["peak"][0]["peak_used"].as_u64().unwrap() >> 30))
        .collect();
    assert_eq!(told, [("pid 7 of nodeA/x.jsonl", 1), ("pid 7 of nodeB/x.jsonl", 2)]);
}

#[test]
fn a_log_without_a_refusal_says_so() {
    let output = output(&mut report(&["--oom", "train.jsonl"]));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("no process of these logs was told OUT_OF_MEMORY"), "{}", stdout(&output));
}

#[test]
fn ranks_are_merged_and_what_can_not_be_read_is_named() {
    // In any order: the ranks say which they are.
    let output = output(&mut report(&["rank2.jsonl", "rank0.jsonl", "rank1.jsonl"]));
    assert!(output.status.success(), "{}", stderr(&output));
    golden("ranks.txt", &stdout(&output));
}

#[test]
fn the_same_as_json() {
    let text = stdout(&output(&mut report(&["--json", "train.jsonl", "rank1.jsonl"])));
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["report"], 1);
    let ranked = &json["processes"][0];
    let alone = &json["processes"][1];
    assert_eq!((ranked["label"].as_str(), alone["label"].as_str()), (Some("rank 1"), Some("pid 4711")));
    let stray = &alone["contexts"][1];
    assert_eq!((&stray["made"]["device"], &stray["used"]), (&0.into(), &false.into()));
    assert_eq!(stray["made"]["site"]["python"][1]["line"], 88);
    assert_eq!(alone["memory"]["places"]["gpu0"]["peak"], 14u64 << 30);
    let pinned = &alone["pinned"];
    assert_eq!(pinned["levels"]["pinned"]["peak"], 832u64 << 20);
    assert_eq!(pinned["levels"]["in_use"]["bytes"].as_array().map(Vec::len), Some(200));
    assert_eq!(pinned["returned"]["idle"], 320u64 << 20);
    assert_eq!(
        (&pinned["sites"][0]["allocations"], &pinned["sites"][1]["live"]),
        (&2400.into(), &(384u64 << 20).into())
    );
    let codes: Vec<&str> =
        json["findings"].as_array().unwrap().iter().filter_map(|found| found["code"].as_str()).collect();
    assert_eq!(codes, ["GP001", "GP005", "GP010"]);
    assert!(json["findings"][0]["fix"].as_str().unwrap().contains("set_device"));
}

#[test]
fn one_rank_on_gpu_0_or_one_gpu_a_rank_is_no_finding() {
    let text = stdout(&output(&mut report(&["rank0.jsonl"])));
    assert!(text.contains("\nFindings\n  none\n"), "{text}");
    // Each rank sees another GPU as its GPU 0.
    let own = |rank: u32| {
        let start = START.replace("\"exe\"", &format!("\"local_rank\":{rank},\"job_ranks\":2,\"exe\""));
        let init = START
            .replace("process.start", "cuda.init")
            .replace("\"exe\"", "\"gpus\":8,\"call\":\"cuInit\",\"thread\":\"t\",\"seconds\":0,\"exe\"");
        let context = START.replace("process.start", "context.create").replace(
            "\"exe\"",
            &format!("\"device\":0,\"kind\":\"primary\",\"call\":\"c\",\"uuid\":\"GPU-{rank}\",\"exe\""),
        );
        log_of(
            format!("{start}\n{init}\n{context}\n").replace("\"pid\":7", &format!("\"pid\":{}", 7 + rank)).as_bytes(),
        )
    };
    let (first, second) = (own(0), own(1));
    let text = stdout(&output(gpupool().arg("report").args([first.path(), second.path()])));
    assert!(text.contains("\nFindings\n  none known\n"), "{text}");
    // The same GPU is one.
    let same = std::fs::read_to_string(second.path()).unwrap().replace("GPU-1", "GPU-0");
    let same = log_of(same.as_bytes());
    let text = stdout(&output(gpupool().arg("report").args([first.path(), same.path()])));
    assert!(text.contains("GP002"), "{text}");
}

/// The library starts some time after its process, and both are told in one clock.
#[test]
fn every_time_counts_from_the_start_of_the_process() {
    let at = |t: f64, event: &str, fields: &str| {
        format!(r#"{{"v":1,"t":{t},"pid":7,"tid":7,"level":"info","event":"{event}","message":"",{fields}}}"#)
    };
    let lines = [
        at(100.0, "process.start", r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#),
        at(100.0, "cuda.init", r#""call":"cuInit","thread":"t","seconds":20.0"#),
        at(101.0, "context.create", r#""id":1,"device":0,"kind":"primary","call":"c","seconds":21.0"#),
        at(104.0, "pool.level", r#""places":[{"place":"gpu0","held":1,"used":1}]"#),
        at(110.0, "process.exit", r#""peak":[],"live_blocks":0,"live_bytes":0,"allocations":1,"reuses":0"#),
    ];
    let (_, text, _) = report_on(log_of((lines.join("\n") + "\n").as_bytes()).path());
    assert!(text.starts_with("Processes, with times from the start of each\n"), "{text}");
    assert!(text.contains("30.0 s  exit"), "{text}");
    assert!(text.contains("CUDA initialised at 20.0 s") && text.contains("primary  21.0 s"), "{text}");
    assert!(text.contains("Pooled memory in use, from the start to 30.0 s"), "{text}");
    // Four fifths of the time are over when there is any.
    let chart = text.lines().find(|line| line.contains("gpu0 ") && line.contains('█')).unwrap();
    assert_eq!(chart.chars().filter(|block| *block == '█').count(), 44 - 44 * 24 / 30, "{chart}");
}

/// What is in use is told in steps of a 64th of a GPU.
#[test]
fn a_peak_between_two_steps_is_the_one_that_the_end_tells() {
    let event = |name: &str, fields: &str| {
        START.replace("process.start", name).replace(r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#, fields)
    };
    let peak = |place: &str, bytes: u64| format!(r#"{{"place":"{place}","held":{bytes},"peak_used":{bytes}}}"#);
    let peaks = [peak("gpu0", 17 << 30), peak("gpu1", 0)].join(",");
    let lines = [
        START.to_owned(),
        event("pool.level", &format!(r#""places":[{{"place":"gpu0","held":{0},"used":{0}}}]"#, 16u64 << 30)),
        event(
            "process.exit",
            &format!(r#""peak":[{peaks}],"live_blocks":0,"live_bytes":0,"allocations":1,"reuses":0"#),
        ),
    ];
    let log = log_of((lines.join("\n") + "\n").as_bytes());
    let json = stdout(&output(gpupool().arg("report").arg("--json").arg(log.path())));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let memory = &json["processes"][0]["memory"];
    assert_eq!(
        (&memory["places"]["gpu0"]["peak"], &memory["all"]["peak"]),
        (&(17u64 << 30).into(), &(17u64 << 30).into())
    );
    let (_, text, _) = report_on(log.path());
    assert!(text.contains("17.0 GiB") && !text.contains("16.0 GiB"), "{text}");
}

#[test]
fn memory_that_the_program_named_is_told_by_its_names() {
    let level = |label: &str, bytes: u64| {
        START.replace("process.start", "label.level").replace(
            r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#,
            &format!(r#""label":"{label}","blocks":1,"bytes":{bytes},"budget":null"#),
        )
    };
    let lines = [START.to_owned(), level("kv", 3 << 30), level("weights", 1 << 30), level("kv", 0)];
    let log = log_of((lines.join("\n") + "\n").as_bytes());
    let (_, text, _) = report_on(log.path());
    assert!(text.contains("Pooled memory by label"), "{text}");
    let line = |name: &str| text.lines().find(|line| line.contains(name) && line.contains("GiB")).unwrap().to_owned();
    assert!(line("kv ").contains("3.0 GiB") && line("weights ").contains("1.0 GiB"), "{text}");
    let json = stdout(&output(gpupool().arg("report").arg("--json").arg(log.path())));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["processes"][0]["memory"]["labels"]["kv"]["peak"], 3u64 << 30);
}

#[test]
fn memory_that_was_far_is_told_over_time_with_who_paid_for_it() {
    let event = |name: &str, fields: &str| {
        START.replace("process.start", name).replace(r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#, fields)
    };
    let lies = |near: u64, on_peers: u64| {
        event("pool.residence", &format!(r#""near":{near},"on_peers":{on_peers},"on_host":0"#))
    };
    let reader = |function: &str, lost: f64| {
        let fields = format!(
            r#""home":0,"function":"{function}","launches":640,"on_peers":{},"on_host":0,"timed":9,"passes":31.5,"lost":{lost},"why":"GPUPOOL_MOVE is off""#,
            3u64 << 30
        );
        event("tier.reader", &fields)
    };
    // What was told last of a function holds; names of templates are long.
    let long = "gemm<".repeat(60);
    let lines = [
        START.to_owned(),
        lies(4 << 30, 3 << 30),
        reader("softmax", 1.5),
        reader("softmax", 4.25),
        reader(&long, 60.0),
        lies(7 << 30, 0),
    ];
    let log = log_of((lines.join("\n") + "\n").as_bytes());
    let (_, text, _) = report_on(log.path());
    assert!(text.contains("Pooled memory near the GPU that uses it, and far"), "{text}");
    let line =
        |name: &str| text.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
    assert!(line(" near  ").ends_with("7.0 GiB") && line("peers ").ends_with("3.0 GiB"), "{text}");
    assert!(!text.contains(" host "), "{text}");
    let functions = text.split("Functions that lost most by far memory").nth(1).unwrap();
    assert!(functions.find("gemm<").unwrap() < functions.find("softmax").unwrap(), "{functions}");
    assert!(line("softmax").contains("3.0 GiB") && line("softmax").contains("4.2 s"), "{text}");
    assert!(functions.contains("not moved because GPUPOOL_MOVE is off"), "{functions}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let json = stdout(&output(gpupool().arg("report").arg("--json").arg(log.path())));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["processes"][0]["memory"]["residence"]["peers"]["peak"], 3u64 << 30);
    assert_eq!(
        (&json["processes"][0]["far"][1]["lost"], &json["processes"][0]["far"][1]["passes"]),
        (&4.25.into(), &31.5.into())
    );
}

/// With nothing but such moves no column is empty, and the numbers are whole.
#[test]
fn what_the_program_moved_itself_says_how_much_went_and_stayed() {
    let fields = format!(r#""address":4096,"bytes":{0},"home":0,"place":"gpu1","stayed":{0}"#, 50 << 20);
    let moved = START
        .replace("process.start", "block.move")
        .replace(r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#, &fields);
    let log = log_of(format!("{START}\n{moved}\n").as_bytes());
    let (_, text, _) = report_on(log.path());
    let table = text.split("Memory that moved").nth(1).unwrap_or_else(|| panic!("{text}"));
    let lines: Vec<&str> = table.lines().skip(1).take(3).collect();
    assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), ["process", "moves", "what", "for"], "{text}");
    assert!(lines[1].ends_with("to gpu1, by the program"), "{text}");
    assert_eq!(lines[2].trim(), "50.0 MiB went, 50.0 MiB stayed", "{text}");
}

/// The record of what lies far is written only once something does; before that everything in use is near.
#[test]
fn what_commands_did_to_a_program_is_told_with_how_long_it_stood_still() {
    let line = |t: f64, event: &str| {
        format!("{{\"v\":1,\"t\":{t},\"pid\":7,\"tid\":7,\"level\":\"info\",\"message\":\"\",{event}}}\n")
    };
    let suspend = |to: &str, stored: &str| {
        format!(
            "\"event\":\"program.suspend\",\"bytes\":1073741824,\"stayed\":2097152,\"to\":\"{to}\",\"microseconds\":3000000,\
             \"waited_microseconds\":1000000{stored}"
        )
    };
    let image = |number: u32, stopped: u32| {
        format!(
            "\"event\":\"program.checkpoint\",\"folder\":\"/scratch/me\",\"generation\":{number},\"bytes\":1073741824,\
             \"stored\":536870912,\"fresh\":268435456,\"unchanged\":0,\"left_out\":0,\"in_stop\":0,\
             \"stopped_microseconds\":{stopped},\"microseconds\":900000"
        )
    };
    let log = [
        line(1000.0, "\"event\":\"process.start\",\"version\":\"0.2.0\",\"mode\":\"pool\",\"exe\":\"/bin/x\""),
        line(1010.0, &suspend("host", "")),
        line(1030.0, "\"event\":\"program.resume\",\"bytes\":1071644672,\"stayed\":0,\"microseconds\":1000000"),
        line(1040.0, &image(1, 20_000)),
        line(1050.0, &image(2, 70_000)),
        line(
            1060.0,
            "\"event\":\"gpu.drain\",\"device\":1,\"uuid\":\"GPU-1\",\"bytes\":4194304,\"stayed\":0,\"microseconds\":5",
        ),
        line(
            1070.0,
            "\"event\":\"gpu.undrain\",\"device\":1,\"uuid\":\"GPU-1\",\"bytes\":2097152,\"stayed\":0,\"microseconds\":5",
        ),
        line(1080.0, &suspend("/scratch/me", ",\"stored\":3145728")),
    ];
    let log = log_of(log.concat().as_bytes());
    let (code, stdout, stderr) = report_on(log.path());
    assert_eq!(code, Some(0), "{stderr}");
    let rows: Vec<Vec<&str>> = stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    let has = |words: &str| {
        let words: Vec<&str> = words.split_whitespace().collect();
        assert!(rows.iter().any(|row| row.ends_with(&words)), "{words:?} in {stdout}");
    };
    // Two of its three seconds, as for one the program still worked, and twenty.
    has("10.0 s 1.0 GiB 2.0 MiB 1022.0 MiB 22.0 s host");
    has("80.0 s 1.0 GiB 2.0 MiB - to the end /scratch/me");
    has("takes 3.0 MiB there");
    has("2 1.0 GiB 512.0 MiB 512.0 MiB 70 ms /scratch/me");
    has("60.0 s 1 4.0 MiB 0 B drained: left it");
    has("70.0 s 1 2.0 MiB 0 B drained no more: came back to it");
    let json = report(&["--json", log.path().to_str().unwrap()]).output().unwrap();
    let told: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let commands = &told["processes"][0]["commands"];
    assert_eq!(commands["suspensions"][0]["stood_still_seconds"], 22.0);
    assert_eq!(commands["suspensions"][1]["resumed"], serde_json::Value::Null);
    assert_eq!(commands["images"][0]["longest_stop_microseconds"], 70_000);
    assert_eq!(commands["drains"][1]["what"], "undrain");
}

#[test]
fn memory_is_near_from_the_start_also_where_it_lies_far_only_later() {
    let event = |t: u32, name: &str, fields: &str| {
        let line = START.replace("process.start", name).replace(r#""t":1"#, &format!(r#""t":{}"#, 1 + t));
        line.replace(r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#, fields)
    };
    let level = |t: u32, gpu0: u64, gpu1: u64| {
        let place = |name: &str, used: u64| format!(r#"{{"place":"{name}","held":{used},"used":{used}}}"#);
        let places = format!(r#""places":[{},{}]"#, place("gpu0", gpu0 << 20), place("gpu1", gpu1 << 20));
        event(t, "pool.level", &places)
    };
    let lies = |t: u32, near: u64, far: u64| {
        let fields = format!(r#""near":{},"on_peers":{},"on_host":0"#, near << 20, far << 20);
        event(t, "pool.residence", &fields)
    };
    let near = |lines: &[String]| {
        let log = log_of((lines.join("\n") + "\n").as_bytes());
        let json = stdout(&output(gpupool().arg("report").arg("--json").arg(log.path())));
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        (json["processes"][0]["memory"]["residence"]["near"]["peak"].as_u64().map(|peak| peak >> 20), log)
    };
    let start = || event(0, "process.start", r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#);
    let (peak, later) = near(&[start(), level(1, 700, 0), level(2, 200, 0), level(3, 0, 200), lies(3, 0, 200)]);
    assert_eq!(peak, Some(700));
    let (_, text, _) = report_on(later.path());
    let line = text.lines().find(|line| line.contains(" near  ")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.ends_with("700.0 MiB"), "{text}");
    // The level that has the first far memory in it is not taken for near.
    let (peak, _) = near(&[start(), level(1, 700, 0), level(2, 800, 300), lies(2, 800, 300)]);
    assert_eq!(peak, Some(800));
    // And of two runs the one of which nothing ever lay far had all of it near.
    let (peak, never) = near(&[start(), level(1, 896, 0)]);
    assert_eq!(peak, None, "no curves where nothing lay elsewhere");
    let changed = stdout(&output(gpupool().args(["diff", "--json"]).args([never.path(), later.path()])));
    let changed: serde_json::Value = serde_json::from_str(&changed).unwrap();
    let changes = changed["changes"].as_array().unwrap();
    let row = changes.iter().find(|change| change["name"] == "near its GPU").unwrap_or_else(|| panic!("{changed}"));
    assert_eq!(
        (row["before"].as_f64(), row["after"].as_f64()),
        (Some(f64::from(896 << 20)), Some(f64::from(700 << 20)))
    );
}

/// A sentence is not cut in its middle, where the setting stands that would change it.
#[test]
fn why_memory_was_not_moved_is_told_whole() {
    let why = "GPUPOOL_MOVE_AT_ONCE holds for so little of it at a time, and it reads each of these bytes about once, so that moving would bring little";
    let fields = format!(
        r#""home":0,"function":"softmax","launches":640,"on_peers":9000,"on_host":0,"timed":9,"passes":31.5,"lost":4.0,"why":"{why}""#
    );
    let reader = START
        .replace("process.start", "tier.reader")
        .replace(r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#, &fields);
    let log = log_of(format!("{START}\n{reader}\n").as_bytes());
    for columns in ["60", "80", "120"] {
        let text = stdout(&output(gpupool().arg("report").arg(log.path()).env("COLUMNS", columns)));
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&format!("not moved because {why}")), "{columns}: {text}");
    }
}

/// Those that a setting had refused were no lack of memory, and are told all the same.
#[test]
fn out_of_memory_that_a_setting_said_names_it() {
    let refused = |why: &str, bytes: u64| {
        let fields = format!(r#""home":1,"bytes":{bytes},"why":"{why}""#);
        START
            .replace("process.start", "pool.refuse")
            .replace(r#""version":"0.1.0","mode":"pool","exe":"/bin/x""#, &fields)
    };
    // What the pool had no room for, the driver may have had.
    let lines = [START.to_owned(), refused("soft", 5 << 20), refused("full", 7 << 20), refused("soft", 1000 << 20)];
    let log = log_of((lines.join("\n") + "\n").as_bytes());
    let text = stdout(&output(gpupool().args(["report", "--oom"]).arg(log.path())));
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected =
        "pid 7 2 refusals by GPUPOOL_SOFT_OOM, the last at 0 s for 1000.0 MiB on GPU 1: once before GPU 1 overflows";
    assert!(words.contains(expected) && words.contains("needs GPUPOOL_SOFT_OOM=off"), "{text}");
    assert!(!text.contains("was told OUT_OF_MEMORY"), "{text}");
    let json = stdout(&output(gpupool().args(["report", "--json"]).arg(log.path())));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let told = &json["processes"][0]["refusals"];
    assert_eq!((&told["times"], &told["by_setting"][0]["setting"]), (&0.into(), &"GPUPOOL_SOFT_OOM".into()), "{told}");
    assert_eq!(told["by_setting"][0]["times"], 2, "{told}");
    assert_eq!(told["by_setting"][0]["last"]["bytes"], 1000u64 << 20, "{told}");

    let log = log_of(format!("{START}\n{}\n", refused("full", 7 << 20)).as_bytes());
    let text = stdout(&output(gpupool().args(["report", "--oom"]).arg(log.path())));
    assert!(text.contains("no process of these logs was told OUT_OF_MEMORY"), "{text}");
}

/// Whoever names a log expects something in it.
#[test]
fn a_log_without_a_record_is_an_error() {
    for bytes in [&b""[..], b"\n"] {
        let log = log_of(bytes);
        let (code, _, said) = report_on(log.path());
        assert_eq!(code, Some(2), "{said}");
        let expected = format!("gpupool: {}: empty: expected the JSON lines that", log.path().display());
        assert!(said.starts_with(&expected), "{said}");
    }
}

/// A terminal breaks a longer line wherever it is, in the middle of a word.
#[test]
fn on_a_narrow_terminal_lines_fit_and_say_the_same() {
    for logs in [&["train.jsonl"][..], &["rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]] {
        let mut narrow = report(logs);
        let text = on_a_terminal_of(40, narrow.env("NO_COLOR", "1")).replace("\r\n", "\n");
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        assert!(text.contains("\n  process  ") && text.contains("\n    program  "), "{text}");
        // One that is wide has no wider lines than a file.
        let wide = on_a_terminal_of(200, report(logs).env("NO_COLOR", "1")).replace("\r\n", "\n");
        assert_eq!(wide, stdout(&output(&mut report(logs))));
    }
    let mut train = report(&["train.jsonl"]);
    let text = on_a_terminal_of(40, train.env("NO_COLOR", "1"));
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("nothing ran in it, ≈519.0 MiB; this process works on GPU 3"), "{text}");
    for command in [&["explain", "GP002"][..], &["explain"]] {
        let text = on_a_terminal_of(40, gpupool().args(command).env("NO_COLOR", "1"));
        let prose = text.lines().map(str::trim_end).filter(|line| !line.starts_with("    "));
        assert!(prose.clone().count() > 10 && prose.clone().all(|line| line.chars().count() <= 40), "{text}");
    }
}

/// What is judged at the end of a process is missing from the log of one that was killed.
#[test]
fn findings_of_a_process_that_was_killed_are_not_said_to_be_none() {
    let whole = std::fs::read_to_string(golden_folder().join("rank0.jsonl")).unwrap();
    let (_, text, _) = report_on(log_of(whole.as_bytes()).path());
    assert!(text.contains("\nFindings\n  none\n") && !text.contains("not in the log"), "{text}");
    let lines: Vec<&str> = whole.lines().filter(|line| !line.contains("\"process.exit\"")).collect();
    let killed = log_of((lines.join("\n") + "\n").as_bytes());
    let (_, text, _) = report_on(killed.path());
    assert!(text.contains("\nFindings\n  none known\n"), "{text}");
    assert!(text.contains("the log of rank 0 ends early") && text.contains("GP001"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&output(gpupool().args(["report", "--json"]).arg(killed.path())))).unwrap();
    assert_eq!((&json["findings_missing"][0], &json["findings"]), (&"rank 0".into(), &serde_json::json!([])));
}

#[test]
fn lines_fit_the_terminal() {
    for logs in [&["train.jsonl"][..], &["rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]] {
        let text = stdout(&output(&mut report(logs)));
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

#[test]
fn a_log_cut_anywhere_shows_what_came_before() {
    let whole = std::fs::read(golden_folder().join("train.jsonl")).unwrap();
    for cut in [whole.len() - 1, whole.len() - 2, whole.len() / 2, 700] {
        let (code, text, complaint) = report_on(log_of(&whole[..cut]).path());
        assert_eq!(code, Some(0), "cut at {cut}: {complaint}");
        assert!(text.contains("pid 4711"), "cut at {cut}: {text}");
        // Without its line feed the last record is still a whole one.
        assert_eq!(text.contains("stops in the middle"), cut != whole.len() - 1, "cut at {cut}: {text}");
    }
}

#[test]
fn what_is_no_log_is_named_and_is_exit_2() {
    let newer = START.replace("\"v\":1", "\"v\":9");
    for (bytes, reason) in [
        (&b"\x7fELF\x02\x01\x01\0\xff\xfe\n\0\0"[..], "holds no record of gpupool; line 1: not a record"),
        (b"epoch 1\nepoch 2\n", "holds no record of gpupool; line 1: not a record"),
        (b"{}\n[]\n", "it names no format"),
        (&[0; 5000][..], "line 1: not a record of gpupool"),
        (&vec![b'x'; 3 << 20], "longer than 1048576 bytes"),
        (newer.as_bytes(), "format 9, this gpupool reads 1; use the one that wrote it"),
    ] {
        let (code, text, complaint) = report_on(log_of(bytes).path());
        assert_eq!(code, Some(2), "{complaint}");
        assert!(complaint.contains(reason) && text.contains("line 1: "), "{text}{complaint}");
    }
}

#[test]
fn a_path_that_can_not_be_read_does_not_hide_the_others() {
    let output = output(&mut report(&["no-such.jsonl", ".", "rank0.jsonl"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).contains("rank 0"), "{}", stdout(&output));
    let expected = "gpupool: no-such.jsonl: no such file\ngpupool: .: is a folder; name the logs in it\n";
    assert_eq!(stderr(&output), expected);
}

#[test]
fn many_bad_lines_are_counted() {
    let (code, text, _) = report_on(log_of(format!("{START}\n{}", "no\n".repeat(1000)).as_bytes()).path());
    assert_eq!(code, Some(0));
    assert!(text.contains("and 997 more lines that cannot be read"), "{text}");
}

#[test]
fn nothing_from_a_log_moves_the_cursor() {
    let hostile = START.replace("/bin/x", "/bin/\\u001b[2J\\u0007\\u202e\\nx").replace("\"pool\"", "\"\\r\"");
    let (code, text, _) = report_on(log_of(hostile.as_bytes()).path());
    assert_eq!(code, Some(0));
    assert!(!text.contains(['\x1b', '\x07', '\r', '\u{202e}']), "{text:?}");
}

#[test]
fn nothing_from_what_is_no_log_moves_the_cursor_either() {
    // What stands in a bad line is in the complaint about it.
    for bad in [
        START.replace("\"info\"", "\"\\u001b[2J\\nx\""),
        START.replace("process.start", "context.create").replace("\"exe\"", "\"device\":\"\\u001b[2J\\u202e\",\"exe\""),
    ] {
        for arguments in [&[][..], &["--json"]] {
            let log = log_of(bad.as_bytes());
            let output = output(gpupool().arg("report").args(arguments).arg(log.path()));
            assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
            let all = stdout(&output) + &stderr(&output);
            assert!(!all.contains(['\x1b', '\x07', '\r', '\u{202e}']), "{all:?}");
            assert_eq!(stderr(&output).lines().count(), 1, "{all}");
        }
    }
    // Nor does a name.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("\x1b[2J\nx");
    let (code, _, complaint) = report_on(&path);
    assert_eq!(code, Some(2));
    assert!(!complaint.contains('\x1b') && complaint.lines().count() == 1, "{complaint:?}");
}

#[test]
fn a_log_that_is_named_twice_is_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    std::fs::copy(golden_folder().join("train.jsonl"), &log).unwrap();
    std::fs::hard_link(&log, folder.path().join("hard")).unwrap();
    std::os::unix::fs::symlink("log", folder.path().join("soft")).unwrap();
    let names = ["log", "./log", "hard", "soft", "log"];
    let once = stdout(&output(gpupool().current_dir(&folder).args(["report", "log"])));
    assert_eq!(stdout(&output(gpupool().current_dir(&folder).arg("report").args(names))), once);
}

#[test]
fn a_log_without_room_is_not_taken_for_a_killed_process() {
    let full = START.replace("process.start", "log.full").replace("\"exe\"", "\"why\":\"No space left\",\"exe\"");
    let (_, text, _) = report_on(log_of(format!("{START}\n{full}\n").as_bytes()).path());
    assert!(!text.contains("killed"), "{text}");
    assert!(text.contains("end log full: there was no room for the rest of the log"), "{text}");
    assert!(text.contains("pid 7: the rest of the log, for which there was no room: No space left"), "{text}");
    // There was room again.
    let lost = START.replace("process.start", "log.lost").replace("\"exe\"", "\"lines\":41,\"why\":\"quota\",\"exe\"");
    let log = log_of(format!("{START}\n{full}\n{lost}\n{lost}\n").as_bytes());
    let (_, text, _) = report_on(log.path());
    assert!(text.contains("pid 7: 82 lines of the log for which there was no room: quota"), "{text}");
    assert!(text.contains("killed") && !text.contains("the rest of the log"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&output(gpupool().args(["report", "--json"]).arg(log.path())))).unwrap();
    assert_eq!(json["processes"][0]["lost"]["lines"], 82);
    assert_eq!(json["processes"][0]["end"], "none");
}

#[test]
fn programs_that_follow_each_other_in_a_process_are_told_apart() {
    let second = START.replace("\"t\":1", "\"t\":5").replace("/bin/x", "/bin/y");
    let (_, text, _) = report_on(log_of(format!("{START}\n{second}\n").as_bytes()).path());
    assert!(text.contains("end exec: the process became another program"), "{text}");
    let rows: Vec<_> = text.lines().filter(|line| line.contains("/bin/")).collect();
    assert!(rows[0].contains("pid 7 ") && rows[0].contains("exec") && rows[0].contains("/bin/x"), "{text}");
    assert!(rows[1].contains("pid 7 program 2") && rows[1].contains("none") && rows[1].contains("/bin/y"), "{text}");
}

#[test]
fn memory_that_is_freed_falls_in_the_chart() {
    let level = |t: u32, used: u64| {
        START.replace("\"t\":1", &format!("\"t\":{t}")).replace("process.start", "pool.level").replace(
            "\"exe\"",
            &format!("\"places\":[{{\"place\":\"gpu0\",\"held\":{},\"used\":{used}}}],\"exe\"", 1u64 << 30),
        )
    };
    // What is held does not matter: a pool that keeps freed memory is not in use.
    let log = format!("{START}\n{}\n{}\n{}\n", level(1, 1 << 30), level(6, 1 << 28), level(11, 0));
    let (_, text, _) = report_on(log_of(log.as_bytes()).path());
    let line = text.lines().find(|line| line.contains("gpu0")).unwrap();
    assert!(line.contains(&format!("{}{}", "█".repeat(20), "▂".repeat(20))), "{text}");
}

#[test]
fn gpus_that_lent_memory_asleep_are_told_and_others_are_not() {
    let line = |t: u32, event: &str, fields: &str| {
        format!(r#"{{"v":1,"t":{t},"pid":7,"tid":7,"level":"info","event":"{event}","message":"",{fields}}}"#)
    };
    let own = line(2, "context.create", r#""device":0,"kind":"primary","id":1,"call":"cuInit","seconds":0.1"#);
    let place = |gpu: u32| format!(r#"{{"place":"gpu{gpu}","held":1073741824,"used":1073741824}}"#);
    let level = line(3, "pool.level", &format!(r#""places":[{},{},{}]"#, place(0), place(1), place(2)));
    let text = |awake: &[u32]| {
        let awake: Vec<String> = awake.iter().map(|gpu| line(4, "lender.awake", &format!(r#""gpu":{gpu}"#))).collect();
        let log = log_of([&[START.to_owned(), own.clone(), level.clone()], &awake[..]].concat().join("\n").as_bytes());
        let json = stdout(&output(gpupool().args(["report", "--json"]).arg(log.path())));
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        (report_on(log.path()).1, json["processes"][0]["lenders"].clone())
    };
    let (asleep, json) = text(&[]);
    assert!(asleep.contains("GPU 1-2 only lent memory") && asleep.contains("GPUPOOL_LENDERS=awake"), "{asleep}");
    assert_eq!(json, serde_json::json!({"awake": [], "asleep": [1, 2]}));
    let (partly, json) = text(&[1]);
    assert!(partly.contains("GPU 2 only lent memory"), "{partly}");
    assert_eq!(json, serde_json::json!({"awake": [1], "asleep": [2]}));
    let (awake, _) = text(&[1, 2]);
    assert!(awake.contains("Pooled memory in use") && !awake.contains("only lent memory"), "{awake}");
}

#[test]
fn colours_are_for_terminals_and_not_where_they_are_unwanted() {
    let plain = stdout(&output(&mut report(&["train.jsonl"])));
    assert!(!plain.contains('\x1b'));
    let coloured = on_a_terminal(report(&["train.jsonl"]).env_remove("NO_COLOR"));
    assert!(coloured.contains("\x1b[1mContexts\x1b[0m"), "{coloured}");
    let unwanted = on_a_terminal(report(&["train.jsonl"]).env("NO_COLOR", "1"));
    assert_eq!(unwanted.replace("\r\n", "\n"), plain);
}

/// Far more than 40 MB of every kind of record that could pile up: pools that grow and shrink, ever new contexts, modules,
/// findings, reasons and places.
fn long_log() -> tempfile::NamedTempFile {
    let mut file = log_of(START.as_bytes());
    let mut text = String::from("\n");
    for i in 0..60_000u64 {
        let site =
            format!(r#""site":{{"python":[{{"file":"/home/ada/generated/file{i}.py","line":{i},"function":"f"}}]}}"#);
        let head =
            format!(r#"{{"v":1,"t":{i}.5,"pid":7,"tid":7,"level":"warn","message":"message number {i}","event":"#);
        for event in [
            format!(r#""pool.level","places":[{{"place":"gpu0","held":{i},"used":{i}}}]"#),
            format!(r#""context.create","id":{i},"device":0,"kind":"created","call":"c",{site}"#),
            format!(r#""module.load","id":{i},"call":"c","kind":"file","path":"/m{i}","seconds":0,{site}"#),
            format!(r#""finding","code":"GP001","what":"what {i}",{site}"#),
            format!(r#""pinned.level","pinned":{i},"requested":{i},"registered":{i}"#),
            format!(r#""pinned.return","bytes":{i},"why":"reason {i}""#),
            format!(
                r#""pinned.site","allocations":1,"requested":{i},"pinned":{i},"peak":0,"live":0,"seconds":0,{site}"#
            ),
            format!(r#""block.free","address":{i},"bytes":{i},"home":0"#),
        ] {
            text.push_str(&format!("{head}{event}}}\n"));
        }
        if text.len() > 1 << 20 || i == 59_999 {
            file.write_all(text.as_bytes()).unwrap_or_else(|error| panic!("{}: {error}", file.path().display()));
            text.clear();
        }
    }
    file
}

#[test]
fn a_long_log_takes_little_memory_and_shows_how_far_it_is() {
    let log = long_log();
    assert!(log.as_file().metadata().unwrap().len() > 40 << 20);
    // The kernel counts what a process had before it was replaced, so its peak would be that of this test. A limit says
    // the same without that: with 16 MiB of data, code aside, the report is written.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -d 16384; exec \"$0\" report \"$1\"", env!("CARGO_BIN_EXE_gpupool")]).arg(log.path());
    let output = output(&mut limited);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("59744 more pinned sites"), "{text}");
    assert!(text.contains("59744 more contexts") && text.contains("59744 more findings"), "{text}");
    let shown = on_a_terminal(gpupool().arg("report").arg(log.path()));
    assert!(shown.contains("\r\x1b[Kreading ") && shown.contains(" % of "), "{shown}");
}

#[test]
fn numbers_and_names_of_any_size_are_shown_in_80_columns() {
    let of = |event: &str, fields: &str| {
        START.replace("process.start", event).replace("\"exe\"", &format!("{fields},\"exe\""))
    };
    let site = r#""site":{"python":[{"file":"/a.py","line":4294967295,"function":"f"}]}"#;
    let most = u64::MAX;
    let lines = [
        START.replace("\"pool\"", &format!("\"{}\"", "m".repeat(400_000))),
        of(
            "context.create",
            &format!(r#""id":1,"device":0,"kind":"k","call":"c","cost":{most},"seconds":1e308,{site}"#),
        ),
        of("context.use", &format!(r#""id":1,"device":0,"launches":{most},"copies":{most},"allocations":{most}"#)),
        of(
            "module.load",
            &format!(r#""id":1,"call":"c","kind":"file","seconds":1e308,"bytes":{most},"memory":{},{site}"#, i64::MAX),
        ),
        of("pinned.level", &format!(r#""pinned":{0},"requested":{0},"registered":{0}"#, 1u64 << 50)),
        of("pinned.return", &format!(r#""bytes":{most},"why":"x""#)),
        of("pool.level", &format!(r#""places":[{{"place":"gpu0","held":1,"used":{}}}]"#, 1u64 << 50))
            .replace("\"t\":1", "\"t\":1e308"),
    ];
    // Twice, so that sums are made.
    let log = log_of((lines.join("\n") + "\n").repeat(2).as_bytes());
    let (code, text, complaint) = report_on(log.path());
    assert_eq!((code, complaint.as_str()), (Some(0), ""), "{text}");
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(!text.contains("\n       -"), "no sum is below zero: {text}");
    let json = stdout(&output(gpupool().args(["report", "--json"]).arg(log.path())));
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok());
}

#[test]
fn what_is_no_file_is_refused_or_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let (code, _, complaint) = report_on(&socket);
    assert_eq!(code, Some(2));
    assert!(complaint.contains("cannot be opened"), "{complaint}");
    // A log out of a pipe, as of `<(zcat log.gz)`.
    let mut piped = Command::new("sh");
    piped.args(["-c", "cat \"$1\" | \"$0\" report /dev/stdin", env!("CARGO_BIN_EXE_gpupool")]);
    let piped = output(piped.arg(golden_folder().join("train.jsonl")));
    golden("train.txt", &stdout(&piped));
}
