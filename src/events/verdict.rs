//! What each process found, past the log: no filter, no full log and no two processes with one log's name may change the
//! answer of `gpupool run --fail-on`.
//!
//! `run` makes an empty folder and names it in the variable `GPUPOOL_VERDICTS` (`gpupool_config::VERDICTS`). A process
//! makes a file of its own there, `PID-N`, before it does anything else, and appends one JSON object a line, one write
//! each:
//!
//! ```json
//! {"verdict":"began","v":1,"pid":7,"started":8123,"t":1767225600.25,"exe":"/usr/bin/python3"}
//! {"verdict":"gpu","device":0,"local_rank":1,"job_ranks":8,"job":"…","host":"…","gpus":8,"uuid":"GPU-…","site":{…}}
//! {"verdict":"finding","code":"GP001","device":1,"what":"…","site":{…},"facts":{…}}
//! {"verdict":"ended","findings":1}
//! ```
//!
//! In place of all but the first, `{"verdict":"apart","why":"GPUPOOL_MODE=off"}` where nothing is looked at.
//!
//! A process writes `ended` when it has judged everything and every finding before is written. So a file without that line,
//! or with fewer findings than the line counts, or with nothing at all, is of a process of which not everything is known:
//! it was killed, left by `_exit`, or there was no room. A process that calls no driver function makes no file.
//!
//! That nobody found anything says something only where somebody looked. So `run` also makes the file `processes`
//! ([`Attendance`]), to which each process appends a line as the library is loaded into it, as it first calls the driver, as
//! it leaves without having done so, and as it becomes or starts another program. If that one does not say that the library
//! was loaded into it, it runs without, unless it was given all that the library needs and was killed before it could. Who was loaded into and says nothing more was killed before it called the driver:
//! it used no CUDA.
//!
//! The folder is one for all processes of a run, and each has a file rather than a place in a common one: an empty file
//! tells that a process was there even where not one byte may be written (RLIMIT_FSIZE, a full disk).
//!
//! A process that has become another user's or has another root folder can write into none of them. What it has to say then is in
//! the file `spare` ([`Spare`]), which every process mapped as the library was loaded into it: behind the lines of its own file, or
//! as those of a file `PID-0`. A program that such a process becomes or starts cannot map it, which the lines `exec-unheard` and
//! `spawn-unheard` of `processes` say.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::event::FindingMade;
use crate::shared::RankOnGpu;
use crate::spare::{Spare, Spared};

/// The format that this crate writes, and the newest that it reads.
const VERSION: u32 = 1;

/// One line of a process's file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "lowercase")]
pub enum VerdictLine {
    /// The first line.
    Began(Began),
    /// A rank of a job made a context on a GPU: whether others did, too, shows in their files.
    Gpu(RankOnGpu),
    /// Something a person should change.
    Finding(FindingMade),
    /// Nothing is looked at in this process.
    Apart {
        /// The setting that says so, or that cannot be used.
        why: String,
    },
    /// Everything was judged and said.
    Ended {
        /// How many findings stand in the file.
        findings: u64,
    },
}

/// Who writes the file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Began {
    v: u32,
    /// The process's number, as it knows it.
    pub pid: u32,
    /// When the process started, in clock ticks since the machine's start; `exec` does not change it. 0 where unknown.
    pub started: u64,
    /// Seconds since 1970, UTC.
    pub t: f64,
    /// Path of the executable.
    pub exe: String,
}

impl Began {
    /// In today's format.
    pub fn new(pid: u32, started: u64, t: f64, exe: String) -> Began {
        Began { v: VERSION, pid, started, t, exe }
    }
}

impl VerdictLine {
    /// The line with its line feed.
    ///
    /// # Errors
    /// Never for what can be read; a time that is not finite has no JSON.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self).map(|line| line + "\n")
    }
}

/// How a process's file ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerdictEnd {
    /// Everything was judged, and all that was found is here.
    Complete,
    /// The process became another program (`exec`), which has a file of its own. What is judged at the end of a process
    /// was not judged for the program before.
    Replaced,
    /// The process did not say that it was done: killed, ended by `_exit`, still running, or unable to write.
    Open,
    /// The process let every call pass and looked at nothing; the words name the setting that is the cause.
    Apart(String),
    /// The file is not what a process writes; the words say why.
    Damaged(String),
}

/// The file of one process.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Path of the file.
    pub path: PathBuf,
    /// The file's first line; absent where not even that could be written.
    pub began: Option<Began>,
    /// The rank's first context on each of its GPUs.
    pub on_gpus: Vec<RankOnGpu>,
    /// What was found, in the order of finding.
    pub findings: Vec<FindingMade>,
    /// Whether the process said everything that it found.
    pub end: VerdictEnd,
}

impl Verdict {
    /// Makes a new, empty file for the process `pid` in `folder`, readable by its user only.
    ///
    /// # Errors
    /// The folder is gone, full, or of another user.
    pub fn create(folder: &Path, pid: u32) -> io::Result<(File, PathBuf)> {
        let mut number = 1u64;
        loop {
            // A program that became another one by `exec` has its number already, and so has one in another container.
            let path = folder.join(format!("{pid}-{number}"));
            match OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => return Ok((file, path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// The process's number, by the name of its file.
    pub fn pid(&self) -> Option<u32> {
        self.path.file_name()?.to_str()?.split('-').next()?.parse().ok()
    }

    /// Reads every file in `folder`, in the order in which their processes began.
    ///
    /// # Errors
    /// The folder or a file in it cannot be read.
    pub fn read_all(folder: &Path) -> io::Result<Vec<Verdict>> {
        let mut verdicts: Vec<Verdict> =
            Verdict::texts(folder)?.into_iter().map(|(name, text)| Verdict::read(folder.join(name), &text)).collect();
        let began = |verdict: &Verdict| verdict.began.as_ref().map_or(f64::MAX, |began| began.t);
        verdicts.sort_by(|a, b| began(a).total_cmp(&began(b)).then_with(|| a.path.cmp(&b.path)));
        for at in 0..verdicts.len() {
            if verdicts[at].end == VerdictEnd::Open
                && let Some(began) = &verdicts[at].began
                && began.started != 0
                && verdicts[at + 1..].iter().any(|later| later.is_of(began))
            {
                verdicts[at].end = VerdictEnd::Replaced;
            }
        }
        Ok(verdicts)
    }

    /// What each process wrote, by the name of its file: what is in the file, and behind it what went to the spare one.
    ///
    /// # Errors
    /// The folder or a file in it cannot be read.
    pub fn texts(folder: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
        let mut texts = BTreeMap::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != Attendance::FILE && name != Spare::FILE {
                texts.insert(name, fs::read(entry.path())?);
            }
        }
        for (name, text) in Spared::read(folder).lines.into_iter().filter(|(name, _)| name != Attendance::FILE) {
            let whole = texts.entry(name).or_default();
            // The last line in the file may have been cut off.
            whole.push(b'\n');
            whole.extend_from_slice(&text);
        }
        Ok(texts)
    }

    /// Whether this is the same process as that of another file.
    fn is_of(&self, other: &Began) -> bool {
        self.began.as_ref().is_some_and(|began| (began.pid, began.started) == (other.pid, other.started))
    }

    fn read(path: PathBuf, text: &[u8]) -> Verdict {
        let mut verdict =
            Verdict { path, began: None, on_gpus: Vec::new(), findings: Vec::new(), end: VerdictEnd::Open };
        let mut ended = None;
        for (index, line) in text.split(|byte| *byte == b'\n').enumerate() {
            if line.is_empty() {
                // A line that was cut off is ended by the next one's writer.
                continue;
            }
            match serde_json::from_slice(line) {
                Ok(VerdictLine::Began(began)) if began.v == VERSION => verdict.began = Some(began),
                Ok(VerdictLine::Began(Began { v, .. })) => {
                    verdict.end = VerdictEnd::Damaged(format!("format {v}, this gpupool reads {VERSION}"));
                    break;
                }
                Ok(VerdictLine::Gpu(rank)) => {
                    if verdict.on_gpus.iter().all(|known| known.device != rank.device) {
                        verdict.on_gpus.push(rank);
                    }
                }
                Ok(VerdictLine::Finding(finding)) => verdict.findings.push(finding),
                Ok(VerdictLine::Apart { why }) => verdict.end = VerdictEnd::Apart(why),
                Ok(VerdictLine::Ended { findings }) => ended = Some(findings),
                // What follows may still be whole: a finding that can be read counts whatever is beside it.
                Err(error) => verdict.end = VerdictEnd::Damaged(format!("line {}: {error}", index + 1)),
            }
        }
        // Behind all lines: those of the spare file are read last, and may have been written first.
        let found = verdict.findings.len();
        match ended {
            Some(findings) if findings > found as u64 => {
                verdict.end = VerdictEnd::Damaged(format!("{findings} findings were made and {found} are here"));
            }
            Some(_) if verdict.end == VerdictEnd::Open && verdict.began.is_none() => {
                verdict.end = VerdictEnd::Damaged("what it wrote first was deleted".to_owned());
            }
            Some(_) if verdict.end == VerdictEnd::Open => verdict.end = VerdictEnd::Complete,
            _ => {}
        }
        verdict
    }
}

/// A line of the file `processes`: `loaded 7`, or with a program `exec 7 /usr/bin/env`. Written where nothing may be allocated and no lock be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Present {
    /// The library was loaded into this process; once more after `exec`.
    Loaded,
    /// The process calls the driver, so it has a file of its own.
    Used,
    /// The process leaves and has not called the driver, or could not become another program.
    Left,
    /// The process becomes the program that is named, unless that fails.
    Becomes,
    /// The process becomes the program that is named, with an environment in which the library is loaded.
    BecomesGiven,
    /// The process was started as the program that is named. Whoever started it says so afterwards, with the number 0 where it
    /// does not know the process's.
    Started,
    /// The process was started as the program that is named, with an environment in which the library is loaded.
    StartedGiven,
    /// The process becomes the program that is named, and could not say so in this file: nor can that program, most likely.
    BecomesUnheard,
    /// The process was started as the program that is named, by one that could not say so in this file.
    StartedUnheard,
}

impl Present {
    /// How it is written.
    pub fn word(self) -> &'static str {
        match self {
            Present::Loaded => "loaded",
            Present::Used => "used",
            Present::Left => "left",
            Present::Becomes => "exec",
            Present::BecomesGiven => "exec-given",
            Present::Started => "spawn",
            Present::StartedGiven => "spawn-given",
            Present::BecomesUnheard => "exec-unheard",
            Present::StartedUnheard => "spawn-unheard",
        }
    }

    /// What is said in its place where it cannot be said in this file, but only in the spare one.
    #[must_use]
    pub fn unheard(self) -> Present {
        match self {
            Present::Becomes | Present::BecomesGiven => Present::BecomesUnheard,
            Present::Started | Present::StartedGiven => Present::StartedUnheard,
            other => other,
        }
    }
}

/// A process that runs a program without the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Its number, as whoever started the program knows it; 0 where nobody does.
    pub pid: u32,
    /// The program, as it was named; empty where it had no name.
    pub program: String,
    /// Whether its environment had what the library needs: then it was killed before it said anything, or has rights of its own.
    pub is_given: bool,
    /// Whether whoever started it had no way into the folder any more, so that it has none either, library or not.
    pub is_unheard: bool,
}

/// Which processes the library was loaded into, and how far each is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attendance {
    /// Whether there was any.
    pub anybody: bool,
    /// Processes that became a program without the library, or were started as one.
    pub outside: Vec<Outside>,
    /// Processes that called the driver, once for each file that they must have.
    pub used: Vec<u32>,
    /// Whether more was said than the spare file has room for, or somebody was killed while saying it.
    pub is_cut_off: bool,
}

impl Attendance {
    /// The file's name. It is made by whoever makes the folder, and by nobody else: where it is gone, somebody deleted it.
    pub const FILE: &str = "processes";

    /// Reads the file in `folder`.
    ///
    /// # Errors
    /// It is gone, or cannot be read.
    pub fn read(folder: &Path) -> io::Result<Attendance> {
        // The name of a program may be any bytes.
        let attendance = Attendance::of(&String::from_utf8_lossy(&Attendance::text(folder)?));
        Ok(Attendance { is_cut_off: Spared::read(folder).is_cut_off, ..attendance })
    }

    /// The file's lines, and behind them those that went to the spare one.
    ///
    /// # Errors
    /// It is gone, or cannot be read.
    pub fn text(folder: &Path) -> io::Result<Vec<u8>> {
        let mut text = fs::read(folder.join(Attendance::FILE))?;
        let spared = Spared::read(folder).lines.into_iter().filter(|(name, _)| name == Attendance::FILE);
        spared.for_each(|(_, line)| text.extend_from_slice(&line));
        Ok(text)
    }

    fn of(text: &str) -> Attendance {
        let mut attendance = Attendance::default();
        let mut loaded = HashSet::new();
        for line in text.lines() {
            let mut words = line.splitn(3, ' ');
            let (Some(word), Some(Ok(pid))) = (words.next(), words.next().map(str::parse)) else { continue };
            let is_one_of = |known: [Present; 2]| known.iter().any(|known| known.word() == word);
            let is_given = is_one_of([Present::BecomesGiven, Present::StartedGiven]);
            let is_unheard = is_one_of([Present::BecomesUnheard, Present::StartedUnheard]);
            let program = words.next().unwrap_or_default().to_owned();
            let outside = Outside { pid, program, is_given, is_unheard };
            if is_one_of([Present::Started, Present::StartedGiven]) || word == Present::StartedUnheard.word() {
                // The program may have been quicker.
                if !loaded.contains(&pid) {
                    attendance.outside.push(outside);
                }
                continue;
            }
            attendance.outside.retain(|outside| outside.pid != pid);
            if is_one_of([Present::Becomes, Present::BecomesGiven]) || word == Present::BecomesUnheard.word() {
                attendance.outside.push(outside);
            } else if word == Present::Loaded.word() {
                attendance.anybody = true;
                loaded.insert(pid);
            } else if word == Present::Used.word() {
                attendance.used.push(pid);
            }
        }
        attendance
    }

    /// Processes whose file is not among these, although they must have one.
    pub fn without_file(&self, verdicts: &[Verdict]) -> Vec<u32> {
        let mut files: Vec<u32> = verdicts.iter().filter_map(Verdict::pid).collect();
        let mut without = self.used.clone();
        without.retain(|pid| files.iter().position(|file| file == pid).map(|at| files.swap_remove(at)).is_none());
        without
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_becomes_a_program_that_does_not_say_it_was_loaded_into_is_outside() {
        let of = |text: &str| Attendance::of(text);
        let outside = |text: &str| of(text).outside.into_iter().map(|outside| outside.program).collect::<Vec<_>>();
        assert_eq!(of(""), Attendance::default());
        assert_eq!(of("loaded 7\nleft 7\n"), Attendance { anybody: true, ..Attendance::default() });
        for known in [
            "loaded 7\n",
            "loaded 7\nexec 7 x\nloaded 7\nused 7\n",
            "exec 7 x\nleft 7\n",
            "spawn 7 x\nloaded 7\n",
            "loaded 7\nleft 7\nspawn 7 x\n",
        ] {
            assert_eq!(outside(known), Vec::<String>::new(), "{known}");
        }
        assert_eq!(outside("loaded 7\nexec 7 x\nexec 7 /a b\nloaded 8\n"), ["/a b"]);
        assert_eq!(outside("spawn 7 x\nexec 8\n"), ["x", ""]);
        let given = of("exec 7 x\nexec-given 7 y\nspawn-given 8 x\nspawn 0 z\nspawn-given 9 x\nloaded 9\n").outside;
        let given: Vec<_> = given.iter().map(|outside| (outside.pid, outside.is_given)).collect();
        assert_eq!(given, [(7, true), (8, true), (0, false)]);
        assert_eq!(outside("loaded 7\nexec 7 y\nspawn 7 x\n"), ["y"]);
        let unheard = of("loaded 7\nexec-unheard 7 x\nspawn-unheard 8 y\nloaded 9\nspawn-unheard 9 z\n").outside;
        let unheard: Vec<_> = unheard.iter().map(|outside| (outside.pid, outside.is_unheard)).collect();
        assert_eq!(unheard, [(7, true), (8, true)]);
        assert_eq!(of("used 9\nused 9\n"), Attendance { used: vec![9, 9], ..Attendance::default() });
        assert_eq!(of("rubbish\nloaded x\n"), Attendance::default());
    }

    #[test]
    fn each_program_of_a_process_must_have_its_file() {
        let file = |name: &str| Verdict {
            path: name.into(),
            began: None,
            on_gpus: Vec::new(),
            findings: Vec::new(),
            end: VerdictEnd::Open,
        };
        let attendance = Attendance { anybody: true, used: vec![7, 7, 8], ..Attendance::default() };
        assert_eq!(attendance.without_file(&[file("/v/7-1"), file("/v/7-2"), file("/v/8-1")]), Vec::<u32>::new());
        assert_eq!(attendance.without_file(&[file("/v/7-2")]), [7, 8]);
    }
}
