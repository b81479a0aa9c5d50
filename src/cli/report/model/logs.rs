//! From files to [`Process`]es, in one pass, keeping no record.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use gpupool_config::format_size;
use gpupool_events::{Event, Reader, Record, Wrong};

use super::process::Process;
use crate::terminal::clean;

/// Bad lines of a log that are told one by one; a file that is no log has nothing else.
const EXAMPLES: usize = 3;
/// Processes of one log. A log belongs to one, and to children that it forked.
const PROCESSES: usize = 256;
/// Bytes between two updates of the progress line, and the least for which there is one.
const PROGRESS_STEP: u64 = 16 << 20;

/// Everything that was read.
#[derive(Default)]
pub struct Logs {
    pub processes: Vec<Process>,
    pub logs: Vec<Log>,
}

/// One file and how well it could be read.
pub struct Log {
    pub path: PathBuf,
    /// Records read.
    pub records: u64,
    /// Lines that are none.
    pub bad_lines: u64,
    /// What is wrong, for a person: the first bad lines, or why there is nothing.
    pub problems: Vec<String>,
    /// There is a file and it is a log, if perhaps an empty or broken one.
    pub readable: bool,
}

impl Logs {
    /// Reads `paths` to their ends.
    pub fn read(paths: &[PathBuf]) -> Logs {
        Logs::read_with(paths, &mut |_, _| {})
    }

    /// Reads `paths` to their ends and shows each record to `look` on the way, with the process that it is of as that was before
    /// it: for what is written while a log is read, since no record is kept. [`Process::met`] tells processes apart.
    pub fn read_with(paths: &[PathBuf], look: &mut dyn FnMut(&Process, &Record)) -> Logs {
        let progress = Progress::new(paths);
        let mut logs = Logs::default();
        let mut seen = HashSet::new();
        for path in paths {
            let number = logs.logs.len();
            let mut log = Log { path: path.clone(), records: 0, bad_lines: 0, problems: Vec::new(), readable: true };
            match open(path) {
                // By whatever other name, it was read.
                Ok(file) if !is_new(&file, &mut seen) => continue,
                Ok(file) => logs.read_one(number, &mut log, file, &progress, look),
                Err(reason) => {
                    log.readable = false;
                    log.problems.push(reason);
                }
            }
            logs.logs.push(log);
        }
        progress.clear();
        // Ranks in their order, host by host, then processes in the order of their start: by the clock of one host, others' may differ.
        logs.processes.sort_by(|a, b| {
            let rank =
                |process: &Process| process.start.as_ref().and_then(|start| start.local_rank).unwrap_or(u32::MAX);
            a.host()
                .cmp(&b.host())
                .then(rank(a).cmp(&rank(b)))
                .then(a.first.total_cmp(&b.first))
                .then(a.pid.cmp(&b.pid))
        });
        logs
    }

    fn read_one(
        &mut self,
        number: usize,
        log: &mut Log,
        file: File,
        progress: &Progress,
        look: &mut dyn FnMut(&Process, &Record),
    ) {
        let first = self.processes.len();
        let mut by_pid = HashMap::new();
        for record in Reader::new(BufReader::with_capacity(1 << 18, Counted { file, progress })) {
            let record = match record {
                Ok(record) => record,
                Err(error) => {
                    log.bad_line(&error.to_string(), matches!(error.wrong, Wrong::Truncated));
                    continue;
                }
            };
            log.records += 1;
            let known = by_pid.get(&record.pid).copied();
            let starts_again = |index: &usize| {
                matches!(record.event, Event::ProcessStart(_)) && self.processes[*index].start.is_some()
            };
            if let Some(index) = known.filter(starts_again) {
                self.processes[index].replaced = true;
            }
            let index = match known.filter(|index| !self.processes[*index].replaced) {
                Some(index) => index,
                None if self.processes.len() - first < PROCESSES => {
                    self.processes.push(Process::new(self.processes.len(), number, &record));
                    by_pid.insert(record.pid, self.processes.len() - 1);
                    self.processes.len() - 1
                }
                None => {
                    log.bad_line(&format!("records of more than {PROCESSES} processes"), false);
                    continue;
                }
            };
            look(&self.processes[index], &record);
            self.processes[index].add(record);
        }
        log.judge();
    }
}

impl Log {
    /// The sentence for a path that is no readable log; `None` where there is nothing to complain about.
    pub fn why_unreadable(&self) -> Option<String> {
        if self.readable {
            return None;
        }
        let what = if self.bad_lines > 0 { "holds no record of gpupool; " } else { "" };
        // One line a log, whatever is in it.
        Some(clean(&format!("{}: {what}{}", self.path.display(), self.problems.join("; "))))
    }

    fn bad_line(&mut self, problem: &str, truncated: bool) {
        self.bad_lines += 1;
        // The end of a log is worth telling whatever came before it.
        if self.problems.len() < EXAMPLES || truncated {
            self.problems.push(problem.to_owned());
        }
    }

    /// Says what the lines together mean.
    fn judge(&mut self) {
        let told = self.problems.len() as u64;
        if self.bad_lines > told {
            self.problems.push(format!("and {} more lines that cannot be read", self.bad_lines - told));
        }
        match (self.records, self.bad_lines) {
            (0, 0) => {
                self.readable = false;
                let words = "empty: expected the JSON lines that `gpupool run --log FILE` writes; its process logged nothing, or \
                             was killed before it could";
                self.problems.push(words.to_owned());
            }
            (0, _) => self.readable = false,
            _ => {}
        }
    }
}

/// Whether this file was not met yet. What is no file (a pipe) gives each of its bytes once anyway.
fn is_new(file: &File, seen: &mut HashSet<(u64, u64)>) -> bool {
    file.metadata().map_or(true, |data| !data.is_file() || seen.insert((data.dev(), data.ino())))
}

/// Opens a file that can be read as a log. A folder can be opened too, and then fails with a message that helps nobody.
fn open(path: &Path) -> Result<File, String> {
    let file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "no such file".to_owned(),
        _ => format!("cannot be opened: {error}"),
    })?;
    match file.metadata() {
        Ok(metadata) if metadata.is_dir() => Err("is a folder; name the logs in it".to_owned()),
        Ok(_) => Ok(file),
        Err(error) => Err(format!("cannot be opened: {error}")),
    }
}

/// How far the reading is, on a terminal's stderr and only where it takes a while.
struct Progress {
    shown: bool,
    total: u64,
    read: Cell<u64>,
}

impl Progress {
    fn new(paths: &[PathBuf]) -> Progress {
        let size = |path: &PathBuf| path.metadata().map_or(0, |metadata| metadata.len());
        let total = paths.iter().map(size).sum();
        Progress { shown: total > PROGRESS_STEP && io::stderr().is_terminal(), total, read: Cell::new(0) }
    }

    fn add(&self, bytes: u64) {
        let before = self.read.get();
        let now = before + bytes;
        self.read.set(now);
        if self.shown && before / PROGRESS_STEP != now / PROGRESS_STEP {
            let percent = (now * 100 / self.total.max(1)).min(100);
            self.say(&format!("reading {percent} % of {}", format_size(self.total)));
        }
    }

    fn clear(&self) {
        if self.shown {
            self.say("");
        }
    }

    /// The line in place of the one before. A terminal that is gone is no reason to stop.
    fn say(&self, words: &str) {
        let mut stderr = io::stderr();
        let _ = write!(stderr, "\r\x1b[K{words}").and_then(|()| stderr.flush());
    }
}

/// A file that reports what was read of it.
struct Counted<'a> {
    file: File,
    progress: &'a Progress,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.progress.add(count as u64);
        Ok(count)
    }
}
