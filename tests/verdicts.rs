//! What a process tells `gpupool run --fail-on`: every finding, whatever is logged, and whether that is all.

use gpupool_events::{Verdict, VerdictEnd};
use harness::{Build, Output, Run};
use tempfile::TempDir;

/// One run and the files of its processes, in the order in which they began.
struct Told {
    output: Output,
    verdicts: Vec<Verdict>,
}

impl Told {
    #[track_caller]
    fn fail(&self, why: &str) -> ! {
        self.output.fail(&format!("{why}: {:#?}", self.verdicts))
    }

    /// Each process's findings and how its file ends.
    #[track_caller]
    fn is(&self, expected: &[(&[&str], VerdictEnd)]) {
        let codes = |verdict: &Verdict| verdict.findings.iter().map(|made| made.code.clone()).collect::<Vec<_>>();
        let found: Vec<_> = self.verdicts.iter().map(|verdict| (codes(verdict), verdict.end.clone())).collect();
        let expected: Vec<_> = expected
            .iter()
            .map(|(codes, end)| (codes.iter().map(|code| (*code).to_owned()).collect(), end.clone()))
            .collect();
        if found != expected {
            self.fail(&format!("expected the verdicts {expected:?}"));
        }
    }
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("no temporary folder: {error}"))
}

fn told(run: Run) -> Told {
    let folder = folder();
    let output = run.shim().env("GPUPOOL_VERDICTS", folder.path()).go();
    let verdicts = Verdict::read_all(folder.path()).unwrap_or_else(|error| output.fail(&error.to_string()));
    Told { output, verdicts }
}

/// A program with a stray context (GP001), built as the tests of findings build it.
fn stray() -> Run {
    Run::built(&Build::program("contexts").flag("-rdynamic")).arg("stray").sim("4x1GiB")
}

fn program(name: &str, arguments: &str) -> Run {
    Run::program(name).args(arguments).sim("2x1GiB")
}

const FOUND: (&[&str], VerdictEnd) = (&["GP001"], VerdictEnd::Complete);
const NOTHING: (&[&str], VerdictEnd) = (&[], VerdictEnd::Complete);
const UNKNOWN: (&[&str], VerdictEnd) = (&[], VerdictEnd::Open);

#[test]
fn no_filter_of_the_log_keeps_a_finding_back() {
    for log in ["off", "error", "0", "1", "warn", "gpupool::context=debug", "error,gpupool::memory=info", "[[["] {
        told(stray().env("GPUPOOL_LOG", log)).is(&[FOUND]);
        told(stray().env("GPUPOOL_LOG", log).env("GPUPOOL_LOG_FILE", "log")).is(&[FOUND]);
    }
}

#[test]
fn a_finding_has_its_facts_and_the_process_its_name() {
    let told = told(stray());
    let [Verdict { began: Some(began), findings, .. }] = &told.verdicts[..] else { told.fail("expected one process") };
    assert!(began.exe.ends_with("/contexts") && began.started > 0, "{began:?}");
    assert_eq!(findings[0].device, Some(0));
    assert!(findings[0].site.as_ref().is_some_and(|site| !site.is_empty()), "{findings:?}");
}

/// No log can be made at the name that another has, or where there is no folder.
#[test]
fn without_a_log_a_finding_is_told_all_the_same() {
    told(stray().env("GPUPOOL_LOG_FILE", "/no/such/folder/log")).is(&[FOUND]);
    told(program("forks", "before").env("GPUPOOL_LOG_FILE", "log")).is(&[NOTHING, NOTHING]);
}

#[test]
fn a_process_that_closed_every_descriptor_tells_its_findings() {
    told(program("surroundings", "closed 900")).is(&[NOTHING]);
    told(program("surroundings", "low 8")).is(&[NOTHING]);
}

#[test]
fn an_end_that_tells_nothing_is_no_verdict() {
    for how in ["kill", "_exit", "abort", "segv"] {
        told(program("exits", how)).is(&[UNKNOWN]);
    }
    // The last one clears its environment before it first calls the driver.
    for how in ["return", "exit", "quick_exit", "thread", "atexit", "cleared"] {
        told(program("exits", how)).is(&[NOTHING]);
    }
}

#[test]
fn where_nothing_can_be_written_or_looked_at_there_is_no_verdict() {
    told(program("surroundings", "fsize-kill 10")).is(&[UNKNOWN]);
}

/// The cause is told, and which program it is.
#[test]
fn where_settings_keep_everything_from_being_looked_at_they_are_named() {
    for (name, value, why) in [
        ("GPUPOOL_LIMIT", "much", "GPUPOOL_LIMIT=much: not a size"),
        ("GPUPOOL_LIMIT", "9:1GiB", "GPUPOOL_LIMIT=9:1.0GiB: there is no GPU 9"),
        ("GPUPOOL_MODE", "off", "GPUPOOL_MODE=off"),
    ] {
        let told = told(stray().env(name, value));
        let [Verdict { began: Some(began), end: VerdictEnd::Apart(cause), .. }] = &told.verdicts[..] else {
            told.fail("expected one process that is apart")
        };
        assert!(cause.starts_with(why) && began.exe.ends_with("/contexts"), "{cause}, {began:?}");
    }
}

#[test]
fn children_and_programs_that_follow_have_their_own() {
    told(program("forks", "after")).is(&[NOTHING, (&["GP006"], VerdictEnd::Complete)]);
    told(program("forks", "exec")).is(&[(&[], VerdictEnd::Replaced), NOTHING]);
    assert!(told(Run::program("tasks")).verdicts.is_empty(), "a process without CUDA has nothing to tell");
}

#[test]
fn a_folder_that_is_not_there_is_complained_about() {
    let output = stray().shim().env("GPUPOOL_VERDICTS", "/no/such/folder").go();
    output.succeeds().warns("GPUPOOL_VERDICTS=/no/such/folder: cannot make a file there");
}

#[test]
fn exec_with_pointers_to_nothing_is_refused_as_without_us() {
    let bare = program("bad_exec", "").go();
    bare.succeeds().says("execv(nowhere, words): -1, Bad address");
    told(program("bad_exec", "")).output.same_as(&bare);
}
