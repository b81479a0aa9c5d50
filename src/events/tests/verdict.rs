//! Verdicts: what a process wrote is read back, and what it could not write is seen to be missing.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use gpupool_events::{Began, FindingMade, Verdict, VerdictEnd, VerdictLine};

/// A folder of its own for one test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("gpupool-verdict-{test}-{}", std::process::id()));
        fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Folder(path)
    }

    /// A process's file with these lines.
    fn file(&self, pid: u32, lines: &[VerdictLine]) -> PathBuf {
        let (mut file, path) = Verdict::create(&self.0, pid).unwrap_or_else(|error| panic!("{error}"));
        for line in lines {
            let line = line.to_json().unwrap_or_else(|error| panic!("{line:?}: {error}"));
            file.write_all(line.as_bytes()).unwrap_or_else(|error| panic!("{error}"));
        }
        path
    }

    fn read(&self) -> Vec<Verdict> {
        Verdict::read_all(&self.0).unwrap_or_else(|error| panic!("{error}"))
    }

    fn only(&self) -> Verdict {
        let mut all = self.read();
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn began(pid: u32, started: u64, t: f64) -> VerdictLine {
    VerdictLine::Began(Began::new(pid, started, t, "/bin/x".to_owned()))
}

fn found(code: &str) -> VerdictLine {
    VerdictLine::Finding(FindingMade {
        code: code.to_owned(),
        device: None,
        what: "a\n\u{1b}[2J".to_owned(),
        site: None,
        facts: BTreeMap::new(),
    })
}

#[test]
fn what_was_written_is_read() {
    let folder = Folder::new("whole");
    folder.file(7, &[began(7, 3, 1.5), found("GP001"), found("GP005"), VerdictLine::Ended { findings: 2 }]);
    let read = folder.only();
    assert_eq!(read.end, VerdictEnd::Complete);
    assert_eq!(read.findings.iter().map(|finding| finding.code.as_str()).collect::<Vec<_>>(), ["GP001", "GP005"]);
    assert_eq!(read.findings[0].what, "a\n\u{1b}[2J");
    assert_eq!(read.began.unwrap().pid, 7);
}

#[test]
fn a_process_that_did_not_come_to_its_end_is_open() {
    for lines in [vec![], vec![began(7, 3, 1.5)], vec![began(7, 3, 1.5), found("GP001")]] {
        let folder = Folder::new("open");
        folder.file(7, &lines);
        assert_eq!(folder.only().end, VerdictEnd::Open, "{lines:?}");
    }
}

#[test]
fn a_line_that_is_missing_or_cut_off_is_noticed() {
    let folder = Folder::new("missing");
    folder.file(7, &[began(7, 3, 1.5), found("GP001"), VerdictLine::Ended { findings: 2 }]);
    assert_eq!(folder.only().end, VerdictEnd::Damaged("2 findings were made and 1 are here".to_owned()));

    let folder = Folder::new("cut");
    let path = folder.file(8, &[began(8, 3, 1.5)]);
    let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(br#"{"verdict":"find"#).unwrap();
    file.write_all(format!("\n{}", found("GP002").to_json().unwrap()).as_bytes()).unwrap();
    let read = folder.only();
    assert!(matches!(read.end, VerdictEnd::Damaged(_)), "{read:?}");
    assert_eq!(read.findings.len(), 1, "what is whole counts");
}

#[test]
fn a_newer_format_is_refused() {
    let folder = Folder::new("newer");
    let path = folder.file(7, &[]);
    fs::write(path, "{\"verdict\":\"began\",\"v\":2,\"pid\":7,\"started\":1,\"t\":1.0,\"exe\":\"x\"}\n").unwrap();
    assert_eq!(folder.only().end, VerdictEnd::Damaged("format 2, this gpupool reads 1".to_owned()));
}

#[test]
fn a_process_that_became_another_program_has_two_files() {
    let folder = Folder::new("exec");
    folder.file(7, &[began(7, 3, 1.5)]);
    folder.file(7, &[began(7, 3, 2.5), VerdictLine::Ended { findings: 0 }]);
    // A later process that was given the same number.
    folder.file(7, &[began(7, 900, 9.5)]);
    let ends: Vec<VerdictEnd> = folder.read().into_iter().map(|verdict| verdict.end).collect();
    assert_eq!(ends, [VerdictEnd::Replaced, VerdictEnd::Complete, VerdictEnd::Open]);
}
