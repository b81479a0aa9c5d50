//! The log through its own door: events in, lines and text out.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;

use gpupool_events::{
    BlockFree, Event, Level, PlacePeak, PoolGrow, PoolRefuse, ProcessExit, PyFrame, Reader, Record, Site,
};
use tracing::subscriber::with_default;

use super::*;

/// A folder of its own for one test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("gpupool-log-{test}-{}", std::process::id()));
        fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn settings(vars: &[(&str, &str)]) -> Settings {
    let vars = vars.iter().map(|(name, value)| ((*name).into(), (*value).into()));
    Settings::read(vars).unwrap_or_else(|problems| panic!("{problems:?}"))
}

/// What `body` logs under these settings: the records of the file if there is one, the text on stderr, the complaints.
fn log(vars: &[(&str, &str)], body: impl FnOnce()) -> (Vec<Record>, String, Vec<String>) {
    let settings = settings(vars);
    let (file, path) = match &settings.log_file {
        Some(template) => json::LogFile::create(template).map(|(file, path)| (Some(file), Some(path))),
        None => Ok((None, None)),
    }
    .unwrap_or_else(|complaint| panic!("{complaint}"));
    let (mut text, stderr) = pipe();
    let mut complaints = Vec::new();
    with_default(subscriber(&settings, file, stderr.as_raw_fd(), &mut complaints).0, body);
    drop(stderr);
    let mut said = String::new();
    let _ = text.read_to_string(&mut said);
    let records = path.and_then(|path| File::open(path).ok()).map(|file| Reader::new(BufReader::new(file)));
    let records = records.into_iter().flatten().map(|line| line.unwrap_or_else(|error| panic!("{error}"))).collect();
    (records, said, complaints)
}

fn pipe() -> (File, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two descriptors that pipe2 writes.
    let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(made, 0);
    // SAFETY: pipe2 returned 0, so both are open and owned by nobody yet.
    unsafe { (File::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) }
}

fn one_of_each_level() {
    tracing::error!(target: "gpupool::memory", "e");
    tracing::warn!(target: "gpupool::memory", "w");
    tracing::info!(target: "gpupool::memory", "i");
    tracing::debug!(target: "gpupool::context", "d");
    tracing::trace!(target: "gpupool::context", "t");
}

fn levels(records: &[Record]) -> Vec<Level> {
    records.iter().map(|record| record.level).collect()
}

#[test]
fn an_event_is_a_record_with_its_own_types() {
    let folder = Folder::new("types");
    let path = folder.0.join("log");
    let (records, _, _) = log(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())], || {
        emit(|| (PoolGrow { home: 1, bytes: 1 << 62, on_peers: 5, on_host: 0, site: None }, "grew\n\"1\""));
        let peak = vec![PlacePeak { place: "gpu0".to_owned(), held: 1, peak_used: 2, limit: None }];
        emit(|| {
            (
                ProcessExit {
                    peak,
                    live_blocks: 0,
                    live_bytes: 0,
                    live_handles: 0,
                    live_handle_bytes: 0,
                    allocations: 3,
                    reuses: 1,
                },
                "ends",
            )
        });
        tracing::info!(ratio = 0.5, not_a_number = f64::NAN, negative = -1, flag = true);
        let (home, bytes, why) = (0, 8, "full".to_owned());
        emit(|| (PoolRefuse { home, bytes, why, missing: None }, ""));
    });
    assert_eq!(records[0].message, "grew\n\"1\"");
    assert_eq!(
        records[0].event,
        Event::PoolGrow(PoolGrow { home: 1, bytes: 1 << 62, on_peers: 5, on_host: 0, site: None })
    );
    assert_eq!(records[0].pid, std::process::id());
    assert!(records[0].t > 1.7e9 && records[0].tid > 0);
    let Event::ProcessExit(exit) = &records[1].event else { panic!("{records:?}") };
    assert_eq!((exit.peak.len(), exit.peak[0].peak_used, exit.allocations), (1, 2, 3));
    assert_eq!(records[2].event.name(), "note");
    let line = fs::read_to_string(&path).unwrap();
    let note = line.lines().nth(2).unwrap();
    assert!(note.contains(r#""ratio":0.5,"not_a_number":null,"negative":-1,"flag":true"#), "{note}");
    let last = line.lines().last().unwrap();
    let rest = r#","level":"info","message":"","event":"pool.refuse","home":0,"bytes":8,"why":"full"}"#;
    assert!(last.ends_with(rest), "what is not known is not in the line: {last}");
}

#[test]
fn an_event_that_nobody_takes_is_not_made() {
    let made = std::cell::Cell::new(0);
    let block = || {
        made.set(made.get() + 1);
        (BlockFree { address: 1, bytes: 2, home: 0, label: None }, "")
    };
    let folder = Folder::new("unmade");
    for (name, filter, expected) in [("a", "info", 0), ("b", "debug,gpupool::memory=info", 0), ("c", "debug", 1)] {
        let path = folder.0.join(name);
        let vars = [("GPUPOOL_LOG_FILE", path.to_str().unwrap()), ("GPUPOOL_LOG", filter)];
        let (records, text, _) = log(&vars, || emit(block));
        assert_eq!((records.len(), made.replace(0), text.as_str()), (expected, expected, ""), "{filter}");
    }
    let (_, text, _) = log(&[("GPUPOOL_LOG", "gpupool::memory=debug")], || {
        emit(|| (BlockFree { address: 1, bytes: 2, home: 0, label: None }, format!("freed at {}", 1)));
    });
    assert_eq!(text, "gpupool: debug: freed at 1\n");
}

#[test]
fn the_file_is_new_private_and_absolute() {
    let folder = Folder::new("private");
    let template = folder.0.join("%p.%e");
    let vars = [("GPUPOOL_LOG_FILE", template.to_str().unwrap())];
    let template = settings(&vars).log_file.unwrap();
    let (file, path) = json::LogFile::create(&template).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(path.is_absolute());
    let complaint = json::LogFile::create(&template).err().unwrap();
    assert!(complaint.starts_with("GPUPOOL_LOG_FILE=") && complaint.contains("put %p into the name"), "{complaint}");
    drop(file);

    let link = folder.0.join("link");
    std::os::unix::fs::symlink(folder.0.join("elsewhere"), &link).unwrap();
    for (path, advice) in [
        (&link, "choose another name"),
        (&"/dev/null".into(), "choose another name"),
        (&folder.0.join("no/folder"), "create the folder"),
        (&"/proc/x".into(), "another path"),
    ] {
        let template = settings(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())]).log_file.unwrap();
        let complaint = json::LogFile::create(&template).err().unwrap();
        assert!(complaint.contains(advice) && complaint.contains("Going on without it"), "{complaint}");
    }
    assert!(!folder.0.join("elsewhere").exists());
}

#[test]
fn without_a_file_only_warnings_show() {
    assert_eq!(log(&[], one_of_each_level).1, "gpupool: error: e\ngpupool: warning: w\n");
    assert_eq!(log(&[("GPUPOOL_LOG", "error")], one_of_each_level).1, "gpupool: error: e\n");
    assert_eq!(log(&[("GPUPOOL_LOG", "off")], one_of_each_level).1, "");
    let all = "gpupool: error: e\ngpupool: warning: w\ngpupool: info: i\n";
    assert_eq!(log(&[("GPUPOOL_LOG", "gpupool::memory=trace")], one_of_each_level).1, all);
}

#[test]
fn with_a_file_the_filter_is_the_files() {
    use Level::{Debug, Error, Info, Trace, Warn};
    let folder = Folder::new("filter");
    for (name, var, expected) in [
        ("a", None, vec![Error, Warn, Info]),
        ("b", Some(("GPUPOOL_MODE", "trace")), vec![Error, Warn, Info, Debug, Trace]),
        ("c", Some(("GPUPOOL_LOG", "warn")), vec![Error, Warn]),
        ("d", Some(("GPUPOOL_LOG", "error,gpupool::context=debug")), vec![Error, Debug]),
    ] {
        let path = folder.0.join(name);
        let mut vars = vec![("GPUPOOL_LOG_FILE", path.to_str().unwrap())];
        vars.extend(var);
        let (records, text, complaints) = log(&vars, one_of_each_level);
        assert_eq!(levels(&records), expected, "{name}");
        assert_eq!(text, "gpupool: error: e\ngpupool: warning: w\n", "{name}");
        assert!(complaints.is_empty());
    }
}

#[test]
fn a_bad_filter_is_told_and_the_default_used() {
    for bad in ["dbug", "gpupool=loud", "info,other::crate=debug", "gpupool[{x=1}]=debug", "[span]=info"] {
        let (_, text, complaints) = log(&[("GPUPOOL_LOG", bad)], one_of_each_level);
        assert_eq!(text, "gpupool: error: e\ngpupool: warning: w\n", "{bad}");
        assert_eq!(complaints.len(), 1, "{bad}");
        assert!(complaints[0].starts_with(&format!("GPUPOOL_LOG={bad}: ")), "{complaints:?}");
    }
}

#[test]
fn a_repeated_warning_shows_once_and_is_recorded_each_time() {
    let folder = Folder::new("repeat");
    let path = folder.0.join("log");
    let (records, text, _) = log(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())], || {
        for round in 0..6 {
            tracing::warn!("again");
            tracing::warn!("round {}", round / 3);
            warn_once("the test", format_args!("first time only, {round}"));
        }
    });
    assert_eq!(
        text,
        "gpupool: warning: again\ngpupool: warning: round 0\ngpupool: warning: first time only, 0\ngpupool: warning: round 1\n"
    );
    assert_eq!(records.len(), 13);
}

#[test]
fn lines_of_many_threads_stay_whole() {
    let folder = Folder::new("threads");
    let path = folder.0.join("log");
    let settings = settings(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())]);
    let (file, path) = json::LogFile::create(settings.log_file.as_ref().unwrap()).unwrap();
    let (_text, stderr) = pipe();
    let dispatch = tracing::Dispatch::new(subscriber(&settings, Some(file), stderr.as_raw_fd(), &mut Vec::new()).0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                tracing::dispatcher::with_default(&dispatch, || {
                    (0..200).for_each(|n| tracing::info!("{}", "x".repeat(n)));
                });
            });
        }
    });
    let records: Result<Vec<_>, _> = Reader::new(BufReader::new(File::open(path).unwrap())).collect();
    assert_eq!(records.unwrap().len(), 1600);
}

#[test]
fn a_reader_that_left_does_not_kill_the_process() {
    let (text, stderr) = pipe();
    drop(text);
    let (written, error) = output::write_all(stderr.as_raw_fd(), b"nobody reads this\n").unwrap_err();
    assert_eq!((written, error.raw_os_error()), (0, Some(libc::EPIPE)));
}

#[test]
fn a_log_the_program_closed_goes_on_and_never_lands_in_its_files() {
    let folder = Folder::new("closed");
    let path = folder.0.join("log");
    let template = settings(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())]).log_file.unwrap();
    let (file, _) = json::LogFile::create(&template).unwrap();
    let precious = File::create(folder.0.join("precious")).unwrap();
    let (_text, stderr) = pipe();
    let number = file.number();
    // SAFETY: both descriptors are open and owned by this test; dup2 makes the log's number mean the other file.
    let made = unsafe { libc::dup2(precious.as_raw_fd(), number) };
    assert_eq!(made, number);
    let subscriber = subscriber(&Settings::default(), Some(file), stderr.as_raw_fd(), &mut Vec::new()).0;
    with_default(subscriber, || tracing::info!("goes on"));
    assert_eq!(fs::metadata(folder.0.join("precious")).unwrap().len(), 0);
    assert!(fs::read_to_string(&path).unwrap().contains("goes on"));
}

#[test]
fn a_log_that_was_removed_is_not_made_again() {
    let folder = Folder::new("removed");
    let path = folder.0.join("log");
    let template = settings(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())]).log_file.unwrap();
    let (file, _) = json::LogFile::create(&template).unwrap();
    // SAFETY: the log's descriptor; the log finds it closed, as a program leaves it.
    unsafe { libc::close(file.number()) };
    // Over the log, while that still has its inode: times of birth are too coarse to tell two files of one test apart.
    fs::write(folder.0.join("other"), "somebody else's\n").unwrap();
    fs::rename(folder.0.join("other"), &path).unwrap();
    let (_text, stderr) = pipe();
    let subscriber = subscriber(&Settings::default(), Some(file), stderr.as_raw_fd(), &mut Vec::new()).0;
    with_default(subscriber, || tracing::info!("nowhere"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "somebody else's\n");
}

/// As a program that `exec` made of another one finds it.
#[test]
fn the_log_that_this_process_began_is_continued_and_no_other() {
    let folder = Folder::new("exec");
    let line = |pid: u32, t: f64| {
        format!(r#"{{"v":1,"t":{t:.6},"pid":{pid},"tid":1,"level":"info","event":"note","message":"m"}}"#)
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let own = std::process::id();
    for (name, text, continued) in [
        ("own", line(own, now) + "\n", true),
        ("others", line(own + 1, now) + "\n", false),
        ("earlier", line(own, now - 86400.0 * 365.0) + "\n", false),
        ("data", "1,2,3\n".to_owned(), false),
        ("empty", String::new(), false),
    ] {
        let path = folder.0.join(name);
        fs::write(&path, &text).unwrap();
        let template = settings(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())]).log_file.unwrap();
        assert_eq!(json::LogFile::create(&template).is_ok(), continued, "{name}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "{name}");
    }
    let link = folder.0.join("link");
    fs::hard_link(folder.0.join("own"), &link).unwrap();
    let template = settings(&[("GPUPOOL_LOG_FILE", link.to_str().unwrap())]).log_file.unwrap();
    assert!(json::LogFile::create(&template).is_err(), "a file with two names may be somebody's data");
}

/// No text that reaches a line ends it or makes it another.
#[test]
fn hostile_bytes_stay_inside_their_field() {
    let folder = Folder::new("hostile");
    let path = folder.0.join("log");
    let name = String::from_utf8_lossy(b"/tmp/a\"b\\c\nd\r\x1b[2J\0\xff\xc2\x9b\xe2\x80\xa8 e.py").into_owned();
    let site = Site {
        python: vec![PyFrame {
            file: name.clone(),
            line: 3,
            function: "f\u{1b}]0;x\u{7}\ngpupool: error: forged".to_owned(),
        }],
        ..Site::default()
    };
    let (records, text, _) = log(&[("GPUPOOL_LOG_FILE", path.to_str().unwrap())], || {
        crate::watch::finding::make(
            &gpupool_events::Finding::STRAY_CONTEXT,
            Some(gpupool_cuda::Device::of(1)),
            &site,
            &[("file", name.clone())],
            "what\n\u{1b}[31mred",
        );
    });
    let [Record { event: Event::FindingMade(made), .. }] = &records[..] else { panic!("{records:?}") };
    assert_eq!(made.site.as_ref(), Some(&site));
    assert_eq!((&made.facts["file"], made.what.as_str()), (&name, "what\n\u{1b}[31mred"));
    assert!(text.lines().all(|line| line.starts_with("gpupool: warning: ") || line.starts_with("  ")), "{text:?}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
}

/// The library's code by file, without its tests and comments.
fn code(folder: &Path, files: &mut Vec<String>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
        if path.is_dir() {
            code(&path, files);
        } else if path.extension().is_some_and(|end| end == "rs") && path.file_name().is_some_and(|it| it != "tests.rs")
        {
            let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            files.push(lines.collect::<Vec<_>>().join("\n"));
        }
    }
}

/// Whether this file makes a value of a struct of `gpupool_events`.
fn makes(file: &str, name: &str) -> bool {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let imports = file.split("use gpupool_events::").skip(1).filter_map(|rest| rest.split(';').next());
    let imported = imports.flat_map(|list| list.split(|letter| !is_word(letter))).any(|word| word == name);
    let literal = format!("{name} {{");
    imported && file.match_indices(&literal).any(|(at, _)| !file[..at].ends_with(is_word))
}

/// What a reader is promised somebody says. That it has every field, the compiler sees to: an event has no default.
#[test]
fn every_event_of_the_schema_is_written_and_by_its_type() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    code(folder, &mut files);
    assert!(files.iter().any(|file| makes(file, "PoolGrow")) && !files.iter().any(|file| makes(file, "Pool")));
    let schema = fs::read_to_string(folder.join("../events/event.rs")).unwrap();
    for wire in Event::NAMES {
        let row = schema.lines().find(|line| line.contains(&format!(" = \"{wire}\" ")));
        let name = row.and_then(|row| row.trim().split(' ').next()).unwrap();
        // A note is a sentence without an event, and every call of `tracing` in this library makes one.
        let written = if *wire == "note" {
            files.iter().any(|file| file.contains("tracing::info!(") && file.contains("about = "))
        } else {
            files.iter().any(|file| makes(file, name))
        };
        assert!(written, "{wire}: nothing makes a {name}; write it, or take it out of the schema");
        let by_hand = format!("\"{wire}\"");
        assert!(!files.iter().any(|file| file.contains(&format!("event = {by_hand}"))), "{wire} is written by hand");
    }
}
