//! Two processes with a bit of everything, as each viewer gets them.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::PathBuf;

use prost::Message;
use serde_json::{Value, json};

use super::perfetto::proto::{Data, Trace, TrackEvent};
use super::{Files, Viewers};
use crate::report::model::{self, Logs};

const MIB: u64 = 1 << 20;
const FIRST: u64 = 0x7000_0000_0000;
const SECOND: u64 = FIRST + 96 * MIB;

/// A record of a process.
fn record(log: &mut String, t: f64, pid: u32, event: &str, mut fields: Value) {
    let level = if event.starts_with("block.") { "debug" } else { "info" };
    for (name, value) in [
        ("v", json!(1)),
        ("t", json!(t)),
        ("pid", json!(pid)),
        ("tid", json!(pid)),
        ("level", json!(level)),
        ("event", json!(event)),
        ("message", json!("what happened")),
    ] {
        fields[name] = value;
    }
    let _ = writeln!(log, "{fields}");
}

/// What each place holds and uses, MiB.
fn level(log: &mut String, t: f64, pid: u32, places: &[(&str, u64, u64)]) {
    let place =
        |(place, held, used): &(&str, u64, u64)| json!({"place": place, "held": held * MIB, "used": used * MIB});
    let places: Vec<Value> = places.iter().map(place).collect();
    record(log, t, pid, "pool.level", json!({"places": places}));
}

fn site(function: &str, line: u32) -> Value {
    let frame = |function: &str, line: u32| json!({"file": "/home/ada/train.py", "line": line, "function": function});
    json!({"python": [frame(function, line), frame("main", 99)]})
}

/// One process with every block, and one of which only sums are known.
fn log() -> String {
    let mut log = String::new();
    let add = &mut log;
    record(add, 1.0, 7, "process.start", json!({"version": "0.2.0", "mode": "pool", "exe": "/usr/bin/train"}));
    let made = json!({"id": 1, "device": 0, "kind": "primary", "call": "cuInit", "seconds": 0.5, "cost": 500 * MIB, "site": site("main", 9)});
    record(add, 1.5, 7, "context.create", made);
    record(add, 2.0, 7, "memory.site", json!({"id": 1, "site": site("weights", 3)}));
    let block = |address: u64, mebibytes: u64, far: u64, site: u64| json!({"address": address, "bytes": mebibytes * MIB, "home": 0, "reused": false, "on_peers": far * MIB, "on_host": 0, "site": site});
    record(add, 2.0, 7, "block.allocate", block(FIRST, 96, 0, 1));
    level(add, 2.0, 7, &[("gpu0", 96, 96), ("gpu1", 0, 0)]);
    record(add, 3.0, 7, "block.allocate", block(SECOND, 64, 40, 2));
    let parts = [("gpu0", 24), ("gpu1", 40)].map(|(place, size)| json!({"place": place, "bytes": size * MIB}));
    record(add, 3.0, 7, "block.placed", json!({"address": SECOND, "places": parts}));
    // The place is told a line late, as another thread may do.
    record(add, 3.0, 7, "memory.site", json!({"id": 2, "site": site("</script>\u{1b}[31m", 5)}));
    let named = json!({"address": SECOND, "bytes": 64 * MIB, "home": 0, "label": "<b>kv</b>"});
    record(add, 3.0, 7, "block.label", named);
    level(add, 3.0, 7, &[("gpu0", 120, 120), ("gpu1", 40, 40)]);
    let swap =
        json!({"home": 0, "why": "launch", "bytes_in": 8 * MIB, "bytes_out": 0, "stayed": 0, "microseconds": 400_000});
    record(add, 4.0, 7, "tier.swap", swap.clone());
    // Told a little late: it seems to have begun before the one in front of it ended.
    record(add, 4.2, 7, "tier.swap", swap);
    record(
        add,
        4.5,
        7,
        "finding",
        json!({"code": "GP001", "device": 0, "what": "a stray context", "site": site("main", 9)}),
    );
    record(add, 5.0, 7, "block.free", json!({"address": FIRST, "bytes": 96 * MIB, "home": 0}));
    level(add, 5.0, 7, &[("gpu0", 50, 24), ("gpu1", 44, 40)]);
    let refused = json!({"home": 0, "bytes": 900 * MIB, "why": "full", "missing": 800 * MIB});
    record(add, 6.0, 7, "pool.refuse", refused);
    record(add, 7.0, 7, "loan.begins", json!({"lender": "gpu2"}));
    record(
        add,
        8.0,
        7,
        "context.destroy",
        json!({"id": 1, "device": 0, "kind": "primary", "call": "cuDevicePrimaryCtxReset"}),
    );
    record(add, 1.0, 8, "process.start", json!({"version": "0.2.0", "mode": "pool", "exe": "/usr/bin/train"}));
    level(add, 2.0, 8, &[("gpu0", 10, 8), ("host0", 6, 6)]);
    log
}

struct Written {
    folder: tempfile::TempDir,
    logs: Logs,
    said: String,
}

impl Written {
    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.path().join(name)).unwrap_or_default()
    }
}

/// All files of this log.
fn written(log: &str) -> Written {
    let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("no temporary folder: {error}"));
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    std::fs::write(path("log"), log).unwrap_or_else(|error| panic!("no log: {error}"));
    let files = Files {
        memory_viz: Some(path("pickle")),
        perfetto: Some(path("perfetto")),
        speedscope: Some(path("speedscope")),
    };
    let mut viewers = Viewers::begin(&files, &[path("log")]).unwrap_or_else(|error| panic!("{error}"));
    let logs = Logs::read_with(&[path("log")], &mut |process, record| viewers.look(process, record));
    let found = model::findings(&logs.processes);
    let said = viewers.finish(&logs, &found).unwrap_or_else(|error| panic!("{error}"));
    Written { folder, logs, said }
}

/// Events of each track, by its process and name.
fn tracks(trace: &Trace) -> BTreeMap<(String, String), Vec<(u64, TrackEvent)>> {
    let mut names: HashMap<u64, (u64, String)> = HashMap::new();
    let mut tracks = BTreeMap::new();
    for packet in &trace.packet {
        match &packet.data {
            Some(Data::Track(track)) => {
                let own = track.process.as_ref().and_then(|process| process.process_name.clone());
                let name = own.or(track.name.clone()).unwrap_or_default();
                names.insert(track.uuid.unwrap_or(0), (track.parent_uuid.unwrap_or(0), name));
            }
            Some(Data::Event(event)) => {
                let list: &mut Vec<_> = tracks.entry(event.track_uuid.unwrap_or(0)).or_default();
                list.push((packet.timestamp.unwrap_or(0), event.clone()));
            }
            None => panic!("a packet that says nothing"),
        }
    }
    let name = |uuid: u64| {
        let (parent, name) = names.get(&uuid).unwrap_or_else(|| panic!("track {uuid} is not described"));
        (names.get(parent).map_or_else(String::new, |(_, name)| name.clone()), name.clone())
    };
    tracks.into_iter().map(|(uuid, events)| (name(uuid), events)).collect()
}

#[test]
fn perfetto_has_the_numbers_of_the_report_and_slices_that_do_not_lap() {
    let written = written(&log());
    let trace = Trace::decode(&written.read("perfetto")[..]).unwrap();
    let tracks = tracks(&trace);
    for process in &written.logs.processes {
        for (place, line) in &process.levels {
            let key = (format!("pid {} train", process.pid), format!("{place} used"));
            let counted: Vec<i64> = tracks[&key].iter().filter_map(|(_, event)| event.counter_value).collect();
            assert_eq!(counted.iter().max().copied(), i64::try_from(line.peak()).ok(), "{key:?}");
        }
    }
    for (key, events) in &tracks {
        let mut open = 0;
        for pair in events.windows(2).filter(|_| events.iter().any(|(_, event)| event.r#type == Some(1))) {
            assert!(pair[0].0 <= pair[1].0, "{key:?}: not in order");
        }
        for (_, event) in events {
            match event.r#type {
                Some(1) => open += 1,
                Some(2) => open -= 1,
                _ => {}
            }
            assert!((0..=1).contains(&open), "{key:?}");
        }
        assert_eq!(open, 0, "{key:?}");
    }
    let of = |name: &str| &tracks[&("pid 7 train".to_owned(), name.to_owned())];
    assert_eq!(of("moves for GPU 0").len(), 4);
    assert_eq!(of("findings")[0].1.name.as_deref(), Some("GP001 A context that nobody uses"));
    let context = of("context 1 on GPU 0");
    assert_eq!((context[0].0, context[1].0), (1_500_000_000, 8_000_000_000));
    assert_eq!(of("other")[0].1.name.as_deref(), Some("loan.begins"), "what a later version tells");
    assert_eq!(of("pool")[0].1.name.as_deref(), Some("pool.refuse"));
}

#[test]
fn speedscope_has_the_bytes_of_the_report_by_place_in_the_program() {
    let written = written(&log());
    let file: Value = serde_json::from_slice(&written.read("speedscope")).unwrap();
    let frames = file["shared"]["frames"].as_array().unwrap();
    let mut ends = BTreeMap::new();
    for profile in file["profiles"].as_array().unwrap() {
        let (samples, weights) = (profile["samples"].as_array().unwrap(), profile["weights"].as_array().unwrap());
        assert_eq!(samples.len(), weights.len());
        assert_eq!(weights.iter().filter_map(Value::as_u64).sum::<u64>(), profile["endValue"]);
        let numbers = samples.iter().flat_map(|stack| stack.as_array().unwrap());
        assert!(numbers.filter_map(Value::as_u64).all(|number| number < frames.len() as u64));
        ends.insert(profile["name"].as_str().unwrap(), profile["endValue"].as_u64().unwrap() / MIB);
    }
    let expected = [
        ("pid 7: blocks at the end", 64),
        ("pid 7: blocks at the peak", 160),
        ("pid 7: blocks that lay elsewhere at the peak", 40),
        ("pid 7: contexts and modules", 500),
    ];
    assert_eq!(ends, BTreeMap::from(expected));
    let at_the_end = &file["profiles"].as_array().unwrap()[1]["samples"][0];
    let names: Vec<&str> = at_the_end
        .as_array()
        .unwrap()
        .iter()
        .map(|at| frames[at.as_u64().unwrap() as usize]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["label <b>kv</b>", "main", "</script>\u{1b}[31m"]);
}

#[test]
fn a_log_of_sums_alone_says_how_to_get_more_and_a_cut_one_is_written_as_far_as_it_goes() {
    let whole = log();
    let sums: String =
        whole.lines().filter(|line| line.contains("\"pid\":8")).map(|line| format!("{line}\n")).collect();
    let said = written(&sums).said;
    assert!(said.contains("pickle: the log tells what places hold, and not which blocks"), "{said}");
    assert!(said.contains("speedscope: empty"), "{said}");
    for end in (0..whole.len()).step_by(97) {
        let cut = written(&whole[..end]);
        assert!(Trace::decode(&cut.read("perfetto")[..]).is_ok() && cut.read("pickle").ends_with(b"."), "{end}");
        assert!(serde_json::from_slice::<Value>(&cut.read("speedscope")).is_ok(), "{end}");
    }
}

#[test]
fn a_log_that_contradicts_itself_does_no_harm() {
    let mut log = log();
    let block = |address: u64, bytes: u64| json!({"address": address, "bytes": bytes, "home": 4_000_000_000_u32, "reused": false, "on_peers": u64::MAX, "on_host": 1, "site": 9});
    let add = &mut log;
    for (address, bytes) in [(0, 0), (u64::MAX, u64::MAX), (1, u64::MAX), (FIRST + 5, 96 * MIB), (FIRST + 7, 1 << 50)] {
        record(add, -1.0, 7, "block.allocate", block(address, bytes));
        record(
            add,
            f64::MAX,
            7,
            "block.placed",
            json!({"address": address, "places": [{"place": "gpu9", "bytes": bytes}, {"place": "gpu9", "bytes": 1}]}),
        );
        record(add, 3.0, 7, "block.free", json!({"address": address, "bytes": 0, "home": 0}));
    }
    for number in 0..100 {
        level(add, 9.0, 7, &[(&format!("place{number}"), 1 << 40, 1 << 43)]);
    }
    let written = written(&log);
    assert!(Trace::decode(&written.read("perfetto")[..]).is_ok());
    assert!(written.read("pickle").ends_with(b"."));
}
