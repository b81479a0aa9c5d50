//! What is written can be read, and what others wrote does not stop a reader.

use std::io::{self, BufReader, Read};

use gpupool_events::{
    Event, Level, LineError, NativeFrame, Panic, PlacePeak, PoolGrow, ProcessExit, PyFrame, Reader, Record, Site,
    Written,
};

const GROW: &str = r#"{"v":1,"t":1.5,"pid":7,"tid":9,"level":"info","event":"pool.grow","message":"grew","home":0,"bytes":64,"on_peers":32,"on_host":0}"#;

fn records(text: &str) -> Vec<Result<Record, LineError>> {
    Reader::new(text.as_bytes()).collect()
}

/// A line as the library writes it.
fn written<E: Written>(event: &E) -> String {
    let head = format!(r#"{{"v":1,"t":0.25,"pid":1,"tid":1,"level":"{}","event":"{}""#, E::LEVEL.word(), E::NAME);
    let mut line = head.into_bytes();
    event.write_fields(&mut line);
    line.push(b'}');
    String::from_utf8(line).unwrap_or_else(|error| panic!("{error}"))
}

fn read(line: &str) -> Record {
    Record::from_json(line.as_bytes()).unwrap_or_else(|wrong| panic!("{line}: {wrong}"))
}

/// A line would have two fields of one name, and a reader takes the one or the other: whom memory was given to passed for who had given it.
#[test]
fn no_field_of_an_event_is_called_as_one_that_every_line_has() {
    let events = include_str!("../event.rs");
    let field = |line: &str| {
        let (name, _) = line.strip_prefix("        ")?.split_once(": ")?;
        name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_').then(|| name.to_owned())
    };
    let fields: Vec<String> = events.lines().filter_map(field).collect();
    assert!(fields.len() > 100, "{fields:?}");
    for head in ["v", "t", "pid", "tid", "level", "event", "message"] {
        assert!(!fields.iter().any(|field| field == head), "a field of an event is called {head}");
    }
}

fn complaint(record: &Result<Record, LineError>) -> String {
    record.as_ref().err().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn a_line_becomes_its_event() {
    let read = records(&format!("{GROW}\n"));
    let event = Event::PoolGrow(PoolGrow { home: 0, bytes: 64, on_peers: 32, on_host: 0, site: None });
    let expected = Record { t: 1.5, pid: 7, tid: 9, level: Level::Info, message: "grew".to_owned(), event };
    assert_eq!(read.len(), 1);
    assert_eq!(read[0].as_ref().unwrap(), &expected);
}

#[test]
fn lists_and_absent_fields_survive_the_way_there_and_back() {
    let peak = vec![
        PlacePeak { place: "gpu0".to_owned(), held: 3, peak_used: 2, limit: Some(9) },
        PlacePeak { place: "host0".to_owned(), ..PlacePeak::default() },
    ];
    let exit = ProcessExit {
        peak,
        live_blocks: 0,
        live_bytes: 0,
        live_handles: 0,
        live_handle_bytes: 0,
        allocations: 1 << 60,
        reuses: 0,
    };
    let line = written(&exit);
    assert!(!line.contains('\n') && !line.contains("null"), "{line}");
    assert_eq!(read(&line).event, Event::ProcessExit(exit));
    let panic = Panic { place: None, api: Some("a\n\"b\"".to_owned()) };
    let line = written(&panic);
    assert!(!line.contains('\n') && !line.contains("place"), "{line}");
    assert_eq!(read(&line).event, Event::Panic(panic));
}

#[test]
fn every_known_name_is_read_as_its_own_event() {
    for name in Event::NAMES {
        let line = format!(r#"{{"v":1,"t":0,"pid":1,"tid":1,"level":"info","event":"{name}","message":""}}"#);
        match Record::from_json(line.as_bytes()) {
            Ok(record) => {
                assert_eq!(record.event.name(), *name);
                assert!(!matches!(record.event, Event::Other { .. }), "{name}");
            }
            // Most events have fields that must be there, and the error must say which.
            Err(wrong) => assert!(wrong.to_string().contains("missing field"), "{name}: {wrong}"),
        }
    }
}

#[test]
fn unknown_events_and_fields_are_kept_or_passed_over() {
    let more = GROW.replace("\"bytes\"", "\"colour\":[1],\"bytes\"");
    let other = GROW.replace("pool.grow", "tier.move");
    let read = records(&format!("{more}\n\n{other}\n"));
    assert_eq!(read[0].as_ref().unwrap(), &Record::from_json(GROW.as_bytes()).unwrap());
    let Event::Other { name, fields } = &read[1].as_ref().unwrap().event else { panic!("{read:?}") };
    assert_eq!((name.as_str(), fields["on_peers"].as_u64()), ("tier.move", Some(32)));
}

#[test]
fn a_bad_line_is_named_and_the_next_one_read() {
    let newer = GROW.replace("\"v\":1", "\"v\":2");
    let nameless = GROW.replace("event", "evt");
    let lacking = GROW.replace("\"bytes\":64,", "");
    let read = records(&format!("{GROW}\nnot json\n{newer}\n{nameless}\n{lacking}\n[]\n{GROW}\n"));
    assert_eq!(read.len(), 7);
    assert!(complaint(&read[1]).starts_with("line 2: not a record of gpupool"));
    assert_eq!(complaint(&read[2]), "line 3: format 2, this gpupool reads 1; use the one that wrote it");
    assert_eq!(complaint(&read[3]), "line 4: not a record of gpupool: it names no event");
    assert!(complaint(&read[4]).contains("missing field `bytes`"), "{}", complaint(&read[4]));
    assert!(complaint(&read[5]).starts_with("line 6:"));
    assert!(read[6].is_ok());
}

#[test]
fn a_last_line_cut_off_is_called_that_and_a_whole_one_without_line_feed_counts() {
    for cut in 1..GROW.len() {
        let read = records(&format!("{GROW}\n{}", &GROW[..cut]));
        assert_eq!(read.len(), 2, "cut at {cut}");
        assert!(
            complaint(&read[1]).starts_with("line 2: stops in the middle"),
            "cut at {cut}: {}",
            complaint(&read[1])
        );
    }
    assert!(records(GROW)[0].is_ok());
    assert!(records("").is_empty());
}

#[test]
fn bytes_that_are_no_text_are_a_bad_line() {
    let read: Vec<_> = Reader::new(&b"\xff\xfe\n"[..]).collect();
    assert!(complaint(&read[0]).starts_with("line 1: not a record"));
}

#[test]
fn a_read_error_ends_the_log() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("gone"))
        }
    }
    let read: Vec<_> = Reader::new(BufReader::new(Broken)).collect();
    assert_eq!(read.len(), 1);
    assert_eq!(complaint(&read[0]), "line 1: cannot be read: gone");
}

#[test]
fn a_context_of_an_older_log_is_read() {
    let line = br#"{"v":1,"t":1,"pid":7,"tid":9,"level":"info","event":"context.create","message":"","device":3,"kind":"primary","call":"cuDevicePrimaryCtxRetain"}"#;
    let Event::ContextCreate(context) = Record::from_json(line).unwrap().event else { panic!("another event") };
    assert_eq!((context.id, context.device, context.cost, context.site), (0, 3, None, None));
}

#[test]
fn a_site_is_nested_and_absent_parts_are_empty() {
    let line = br#"{"v":1,"t":1,"pid":7,"tid":9,"level":"warn","event":"finding","message":"","code":"GP001","device":0,"what":"w","site":{"python":[{"file":"a.py","line":3,"function":"f"}]},"facts":{"value_now":"3"}}"#;
    let record = Record::from_json(line).unwrap();
    let Event::FindingMade(made) = &record.event else { panic!("another event") };
    let site = made.site.as_ref().unwrap();
    assert_eq!(site.to_string(), "a.py:3 in f");
    assert!(site.native.is_empty() && !site.truncated);
    assert_eq!(made.facts["value_now"], "3");
    assert_eq!(read(&written(made)).event, record.event);
}

#[test]
fn a_site_is_told_by_its_innermost_frame() {
    let native = NativeFrame { object: "/lib/libwork.so".to_owned(), symbol: Some("step".to_owned()), offset: 0x1a40 };
    let mut site = Site { native: vec![native], ..Site::default() };
    assert_eq!(site.to_string(), "step in /lib/libwork.so+0x1a40");
    site.native[0].symbol = None;
    assert_eq!(site.to_string(), "/lib/libwork.so+0x1a40");
    site.python.push(PyFrame { file: "a.py".to_owned(), line: 0, function: "<module>".to_owned() });
    assert_eq!(site.to_string(), "a.py in <module>");
    assert_eq!(Site::default().to_string(), "an unknown place");
    assert!(Site::default().is_empty() && !site.is_empty());
}

#[test]
fn events_nobody_writes_any_more_are_kept_as_they_are() {
    let line = GROW.replace("pool.grow", "fork");
    assert!(matches!(Record::from_json(line.as_bytes()).unwrap().event, Event::Other { .. }));
}

#[test]
fn the_line_of_the_program_is_found_behind_packages_and_the_standard_library() {
    let frame = |file: &str| PyFrame { file: file.to_owned(), line: 1, function: "f".to_owned() };
    let program = |files: &[&str]| {
        let site = Site { python: files.iter().map(|file| frame(file)).collect(), ..Site::default() };
        site.program_frame().map(|frame| frame.file.clone())
    };
    let torch = "/venv/lib/python3.12/site-packages/torch/cuda/__init__.py";
    let debian = "/usr/lib/python3/dist-packages/cupy/core.py";
    assert_eq!(
        program(&[torch, debian, "/usr/lib/python3.12/runpy.py", "<frozen runpy>", "/python3.x/train.py"]).as_deref(),
        Some("/python3.x/train.py")
    );
    assert_eq!(program(&[torch, "<stdin>"]).as_deref(), Some("<stdin>"));
    assert_eq!(program(&[torch, debian]).as_deref(), Some(torch));
    assert_eq!(program(&[]), None);
}

#[test]
fn a_line_longer_than_any_record_is_passed_over() {
    let text = format!("{}\n{GROW}\n{}", "x".repeat(3 << 20), "y".repeat(1 << 20));
    let read = records(&text);
    assert_eq!(read.len(), 3);
    assert_eq!(complaint(&read[0]), "line 1: not a record of gpupool: longer than 1048576 bytes");
    assert!(read[1].is_ok());
    assert!(complaint(&read[2]).starts_with("line 3: not a record of gpupool: longer"));
}
