//! What a program said, and the ways a test asks about it. Every failure shows all of it.

use gpupool_events::{Event, Record};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Everything one run left behind.
#[derive(Debug)]
pub struct Output {
    /// The command with the variables that were set for it.
    pub description: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    /// The JSON log, when [`crate::Run::log`] asked for one.
    pub records: Vec<Record>,
    /// The simulated driver's report, when [`crate::Run::report`] asked for one and the process ended in order.
    pub report: Option<Value>,
    /// What the simulated driver says was taken from under unfinished work, by any process of the run.
    pub violations: Vec<String>,
    /// Files that the program left in its folder, the log and the report aside.
    pub files: Vec<String>,
    /// What is in its folder for metrics pages: the folder of ours, once anything was allocated.
    pub pages: Vec<String>,
}

impl Output {
    /// Ends the test with `why` and all that is known of the run.
    #[track_caller]
    pub fn fail(&self, why: &str) -> ! {
        let log: String = self.records.iter().map(|record| format!("  {record:?}\n")).collect();
        panic!(
            "{why}\n$ {}\n{}\n--- stdout\n{}--- stderr\n{}--- log\n{log}",
            self.description, self.status, self.stdout, self.stderr
        )
    }

    /// The exit code is 0.
    #[track_caller]
    pub fn succeeds(&self) -> &Self {
        self.exits(0)
    }

    /// The exit code is `code`.
    #[track_caller]
    pub fn exits(&self, code: i32) -> &Self {
        if self.status.code() != Some(code) {
            self.fail(&format!("expected exit code {code}"));
        }
        self
    }

    /// The program was ended by this signal.
    #[track_caller]
    pub fn killed_by(&self, signal: i32) -> &Self {
        if self.status.signal() != Some(signal) {
            self.fail(&format!("expected to end by signal {signal}"));
        }
        self
    }

    /// Standard output is exactly this.
    #[track_caller]
    pub fn prints(&self, text: &str) -> &Self {
        if self.stdout != text {
            self.fail(&format!("expected other stdout (bare: what is expected)\n{}", differences(text, &self.stdout)));
        }
        self
    }

    /// `text` is a line of standard output.
    #[track_caller]
    pub fn says(&self, text: &str) -> &Self {
        if !self.stdout.lines().any(|line| line == text) {
            self.fail(&format!("expected the line on stdout: {text}"));
        }
        self
    }

    /// `text` is somewhere on standard error.
    #[track_caller]
    pub fn warns(&self, text: &str) -> &Self {
        if !self.stderr.contains(text) {
            self.fail(&format!("expected on stderr: {text}"));
        }
        self
    }

    /// Standard error is empty.
    #[track_caller]
    pub fn is_quiet(&self) -> &Self {
        if !self.stderr.is_empty() {
            self.fail("expected nothing on stderr");
        }
        self
    }

    /// The program left no file, and made no folder for metrics pages.
    #[track_caller]
    pub fn leaves_no_file(&self) -> &Self {
        if !(self.files.is_empty() && self.pages.is_empty()) {
            self.fail(&format!("expected no file to be left, found {:?} and {:?}", self.files, self.pages));
        }
        self
    }

    /// Has the status and the standard output of `other`.
    #[track_caller]
    pub fn same_as(&self, other: &Output) -> &Self {
        if self.status != other.status || self.stdout != other.stdout {
            let differing = differences(&other.stdout, &self.stdout);
            self.fail(&format!(
                "differs from the bare run\n$ {}\n{}\n{differing}--- its stderr\n{}",
                other.description, other.status, other.stderr
            ));
        }
        self
    }

    /// The log's records of one event, by its name on the wire.
    pub fn events(&self, name: &str) -> Vec<&Record> {
        self.records.iter().filter(|record| record.event.name() == name).collect()
    }

    /// What `pick` takes of the log's events, in their order.
    pub fn picked<T>(&self, pick: impl Fn(&Event) -> Option<T>) -> Vec<T> {
        self.records.iter().filter_map(|record| pick(&record.event)).collect()
    }

    /// The log's first event that `pick` accepts.
    #[track_caller]
    pub fn event<T>(&self, what: &str, pick: impl Fn(&Event) -> Option<T>) -> T {
        match self.records.iter().find_map(|record| pick(&record.event)) {
            Some(found) => found,
            None => self.fail(&format!("expected in the log: {what}")),
        }
    }

    /// The report at this path of keys, `gpus/0/contexts`.
    #[track_caller]
    pub fn reported(&self, path: &str) -> &Value {
        let report = self.report.as_ref().unwrap_or(&Value::Null);
        match report.pointer(&format!("/{path}")) {
            Some(value) => value,
            None => self.fail(&format!("expected {path} in the driver's report {report:#}")),
        }
    }
}

/// Lines that only one of two texts has, in order, at most twenty of them.
fn differences(bare: &str, shim: &str) -> String {
    let bare: Vec<&str> = bare.lines().collect();
    let shim: Vec<&str> = shim.lines().collect();
    let mut text = String::new();
    for at in 0..bare.len().max(shim.len()) {
        let (one, other) = (bare.get(at), shim.get(at));
        if one != other {
            text +=
                &format!("line {}: bare {:?}\n         shim {:?}\n", at + 1, one.unwrap_or(&""), other.unwrap_or(&""));
            if text.lines().count() >= 40 {
                break;
            }
        }
    }
    text
}
