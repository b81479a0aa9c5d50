//! `gpupool run --fail-on`: a program that succeeds, and a finding that makes this a failure.
//!
//! What was found comes from the verdicts that each process writes past its log (`gpupool_events::Verdict`): a log has filters,
//! may be full, and is one file for several processes if its name is fixed. A log is written beside them, for the report, only
//! where nothing else was said about logs.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use gpupool_config::{LogPath, Mode, Settings, VERDICTS};
use gpupool_events::{Attendance, Finding, Outside, RankOnGpu, Spare, Verdict, VerdictEnd, finding};

use crate::child::{self, Survivor};
use crate::failure::{Failure, complain};
use crate::folder::Folder;
use crate::report::{self, Found};
use crate::{elf, explain, terminal, words};

/// The exit code when the program succeeded and a finding was made that it should fail on.
const FOUND: u8 = 3;
/// The exit code when the program succeeded and nobody knows whether a finding was made that it should fail on.
const UNKNOWN: u8 = 4;
/// Lines about processes of which not everything is known.
const TOLD: usize = 8;

/// Which findings count.
pub struct FailOn {
    /// Empty: every one.
    codes: Vec<&'static str>,
}

impl FailOn {
    /// From the words of the command line; `None` if there are none.
    ///
    /// # Errors
    /// A word that is no code of a finding.
    pub fn parse(words: &[String]) -> Result<Option<FailOn>, Failure> {
        if words.is_empty() {
            return Ok(None);
        }
        let is_any = |word: &str| word.eq_ignore_ascii_case("any");
        let mut codes = Vec::new();
        for word in words.iter().map(|word| word.trim()) {
            match finding(word) {
                Some(finding) => codes.push(finding.code),
                None if is_any(word) => {}
                None => return Err(no_code(word)),
            }
        }
        if words.iter().any(|word| is_any(word.trim())) {
            codes.clear();
        }
        Ok(Some(FailOn { codes }))
    }

    /// Runs the program, and ends as it does unless a finding counts or might.
    ///
    /// # Errors
    /// Nothing could be found under these settings or in this program (exit 2), or the program could not be started.
    pub fn run(&self, mut command: Command, settings: &Settings) -> Result<ExitCode, Failure> {
        check(settings, &command)?;
        let held = child::hold();
        let records = Records::prepare(settings)?;
        command.env(VERDICTS, records.verdicts());
        if let Some(log) = &records.log {
            command.env("GPUPOOL_LOG_FILE", log);
        }
        let (status, survivors) = child::wait_for_all(command, held)?;
        let judged = self.judge(&records, status.success(), &survivors);
        records.put_away(judged != Judged::Clean);
        // Last: ending as the child did may mean dying of a signal, which runs no destructor.
        Ok(match judged {
            Judged::Found if status.success() => ExitCode::from(FOUND),
            Judged::Unknown if status.success() => ExitCode::from(UNKNOWN),
            _ => child::end_as(status),
        })
    }

    /// Says what was found and what is not known. That a program which failed, or was killed, did not judge itself to the end
    /// is no news.
    fn judge(&self, records: &Records, succeeded: bool, survivors: &[Survivor]) -> Judged {
        let verdicts = match Verdict::read_all(&records.verdicts()) {
            Ok(verdicts) => verdicts,
            Err(error) => {
                let folder = records.verdicts();
                complain(&format!("--fail-on: what was found is not known: {}: {error}", folder.display()));
                return Judged::Unknown;
            }
        };
        let ranks = ranks(&verdicts);
        let counted: Vec<Found> = found(&verdicts, &ranks).into_iter().filter(|found| self.counts(found)).collect();
        counted.iter().for_each(tell);
        let still_there = |pid: Option<u32>| survivors.iter().any(|survivor| Some(survivor.pid) == pid);
        let mut unknown: Vec<String> =
            verdicts.iter().filter(|verdict| !still_there(verdict.pid())).filter_map(unknown).collect();
        unknown.extend(survivors.iter().map(|survivor| {
            let name = terminal::clean(&survivor.name);
            format!("{name} (pid {}) outlives the program; let the program wait for it", survivor.pid)
        }));
        match Attendance::read(&records.verdicts()) {
            Ok(attendance) => {
                unknown.extend(missing(&attendance, &verdicts));
                if attendance.is_cut_off {
                    unknown.push(
                        "processes that could not write their files had more to say than there is room for".to_owned(),
                    );
                }
            }
            Err(error) => unknown.push(format!(
                "the file of who was there, {}, was deleted or cannot be read: {error}",
                records.verdicts().join(Attendance::FILE).display()
            )),
        }
        if self.asks_for(Finding::RANKS_ON_ONE_GPU.code) && !counted.iter().any(is_of_ranks) {
            unknown.extend(ranks.iter().find_map(|(_, rank)| others_unseen(rank)));
        }
        if succeeded {
            tell_unknown(&unknown);
            if verdicts.is_empty() && unknown.is_empty() {
                complain("--fail-on: no process used CUDA: there is nothing to judge");
            }
        }
        match (counted.is_empty(), unknown.is_empty()) {
            (false, _) => Judged::Found,
            (true, false) => Judged::Unknown,
            (true, true) => Judged::Clean,
        }
    }

    fn asks_for(&self, code: &str) -> bool {
        self.codes.is_empty() || self.codes.contains(&code)
    }

    fn counts(&self, found: &Found) -> bool {
        self.asks_for(&found.code)
    }
}

/// The complaint about a word of `--fail-on` that is no code.
fn no_code(word: &str) -> Failure {
    const EXPECTED: &str = "write codes with a comma between them and no space, as GP001,GP005, or any";
    if word.is_empty() {
        Failure::usage(format!("--fail-on: an empty code; {EXPECTED}"))
    } else if word.contains(char::is_whitespace) {
        Failure::usage(format!("--fail-on {word:?}: a space in a code; {EXPECTED}"))
    } else {
        Failure::usage(format!("--fail-on {}; {EXPECTED}", explain::unknown(word)))
    }
}

#[derive(PartialEq, Eq)]
enum Judged {
    Clean,
    Found,
    Unknown,
}

/// Refuses what nothing could ever be found in: a test that cannot fail is worse than none.
fn check(settings: &Settings, command: &Command) -> Result<(), Failure> {
    if settings.mode == Mode::Off {
        return Err(Failure::usage("--fail-on with GPUPOOL_MODE=off: nothing is looked at; use another mode"));
    }
    match elf::why_not_intercepted(command.get_program()) {
        Some(reason) => Err(Failure::usage(format!(
            "--fail-on: {} {reason}, so that nothing in it can be looked at; link it dynamically, and install it without \
             such rights",
            command.get_program().display()
        ))),
        None => Ok(()),
    }
}

/// The contexts of ranks, with the numbers of their processes.
fn ranks(verdicts: &[Verdict]) -> Vec<(usize, RankOnGpu)> {
    let numbered = verdicts.iter().enumerate();
    numbered.flat_map(|(index, verdict)| verdict.on_gpus.iter().map(move |rank| (index, rank.clone()))).collect()
}

/// The findings of all processes, and what only all of them together show.
fn found(verdicts: &[Verdict], ranks: &[(usize, RankOnGpu)]) -> Vec<Found> {
    let made = verdicts.iter().enumerate();
    let mut found =
        report::merge(made.flat_map(|(index, verdict)| verdict.findings.iter().map(move |made| (index, made))));
    found.extend(report::ranks_on_one_gpu(ranks));
    found
}

fn is_of_ranks(found: &Found) -> bool {
    found.code == Finding::RANKS_ON_ONE_GPU.code
}

/// Why it is not known whether a rank shares a GPU with others: this command is a rank itself, so that the others run beside
/// it. A launcher that runs under this command gives numbers of its own, and then all ranks of this host are seen.
fn others_unseen(rank: &RankOnGpu) -> Option<String> {
    let own = gpupool_config::rank(std::env::vars_os())?;
    let is_own = (own.number, &own.job) == (rank.local_rank, &rank.job);
    (is_own && report::is_on_anothers(rank)).then(|| {
        format!(
            "local rank {} has a context on GPU {}, and what the other ranks of its job do is not seen here; put \
             `gpupool run` in front of the launcher",
            rank.local_rank, rank.device
        )
    })
}

/// Of whom nothing is known, by who was there.
fn missing(attendance: &Attendance, verdicts: &[Verdict]) -> Vec<String> {
    let deleted = |pid: u32| format!("pid {pid} used CUDA, and what it wrote was deleted or could not be written");
    let mut missing: Vec<String> = attendance.without_file(verdicts).into_iter().map(deleted).collect();
    let is_told = |pid: u32| verdicts.iter().any(|file| file.pid() == Some(pid) && file.end != VerdictEnd::Complete);
    let outside = attendance.outside.iter().filter(|outside| !is_told(outside.pid) && may_use_cuda(outside));
    missing.extend(outside.map(|outside| {
        let program = if outside.program.is_empty() { "a program" } else { &outside.program };
        let pid = if outside.pid == 0 { String::new() } else { format!(" (pid {})", outside.pid) };
        if outside.is_unheard {
            return format!(
                "{}{pid} was started by a process that had no way to the folder any more in which processes say what they found \
                 (it had become another user's, or had another root folder); put `gpupool run` after what changes that",
                terminal::clean(program)
            );
        }
        format!(
            "{}{pid} ran without libgpupool.so; leave LD_PRELOAD and {VERDICTS} in the environment of every program (env -i, sudo and \
             containers remove them)",
            terminal::clean(program),
        )
    }));
    if !attendance.anybody && verdicts.is_empty() && missing.is_empty() {
        missing.push(
            "no process loaded libgpupool.so; leave LD_PRELOAD in the environment of the program, which must be linked \
             dynamically and installed without rights of its own (setuid)"
                .to_owned(),
        );
    }
    missing
}

/// Whether a program without the library could have used CUDA: the driver is a shared library, which a statically linked program
/// has no loader for. Nor does the loader's own tool, which Python starts without an environment to find any library; on some
/// systems it is a script. A name that is no whole path may be any program's: its folder is not known here. One that was given the
/// library and did not take it was killed first, unless it has rights of its own.
fn may_use_cuda(outside: &Outside) -> bool {
    let path = Path::new(&outside.program);
    if outside.is_given {
        return elf::has_own_rights(path.as_os_str());
    }
    let of_the_loader = path.file_name().is_some_and(|name| name == "ldconfig" || name == "ldconfig.real");
    let is_static = path.is_absolute() && elf::is_static(path.as_os_str());
    !(of_the_loader || is_static)
}

/// One line a finding, on stderr: the program may have written its results to stdout.
fn tell(found: &Found) {
    let title = finding(&found.code).map_or("", |known| known.title);
    complain(&format!("{}: {title}: {}", terminal::clean(&found.code), terminal::clean(&found.what)));
    if let Some(place) = found.site.as_ref().map(|site| words::place(site, terminal::WIDTH)) {
        complain(&format!("  {place}"));
    }
}

fn tell_unknown(unknown: &[String]) {
    for words in unknown.iter().take(TOLD) {
        complain(&format!("--fail-on: not everything that was found is known: {words}"));
    }
    if unknown.len() > TOLD {
        complain(&format!("--fail-on: the same of {} more processes", unknown.len() - TOLD));
    }
}

/// Why not everything is known of a process, if it is not.
fn unknown(verdict: &Verdict) -> Option<String> {
    let who = match &verdict.began {
        Some(began) => format!("{} (pid {})", terminal::clean(&began.exe), began.pid),
        None => verdict.pid().map_or("a process".to_owned(), |pid| format!("pid {pid}")),
    };
    let why = match &verdict.end {
        VerdictEnd::Complete => return None,
        VerdictEnd::Replaced => "became another program (exec) before its contexts and modules were judged".to_owned(),
        VerdictEnd::Open if verdict.began.is_none() => {
            let folder = verdict.path.parent().unwrap_or(Path::new("/"));
            format!("could not write into {}, or was killed at its start", folder.display())
        }
        VerdictEnd::Open => {
            "did not come to its end: it was killed, left by _exit, became another program (exec) that used no CUDA, \
                             or is still running"
                .to_owned()
        }
        VerdictEnd::Apart(why) => format!("ran with nothing looked at in it: {}", terminal::clean(why)),
        VerdictEnd::Damaged(why) => format!("could not write all of it: {}", terminal::clean(why)),
    };
    Some(format!("{who} {why}"))
}

/// What the program and its children write.
struct Records {
    folder: Folder,
    /// `GPUPOOL_LOG_FILE` for the program, if the log is ours.
    log: Option<OsString>,
    /// The folder of another `--fail-on` that this one runs under.
    outer: Option<PathBuf>,
}

impl Records {
    fn prepare(settings: &Settings) -> Result<Records, Failure> {
        let folder = Folder::create("gpupool-log-", "what is found", b"")?;
        let mut log = LogPath::escaped(folder.path().as_os_str());
        log.push("/%p.jsonl");
        let asked = settings.log_file.is_some() || settings.log.is_some();
        let outer = std::env::var_os(VERDICTS).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let records = Records { folder, log: (!asked).then_some(log), outer };
        let verdicts = records.verdicts();
        let attendance = verdicts.join(Attendance::FILE);
        fs::create_dir(&verdicts)
            .map_err(|error| Failure::usage(format!("cannot make the folder {}: {error}", verdicts.display())))?;
        fs::write(&attendance, "")
            .map_err(|error| Failure::usage(format!("cannot make the file {}: {error}", attendance.display())))?;
        let spare = verdicts.join(Spare::FILE);
        // Under a limit on the size of files, or on a full disk, what cannot be written stays unknown.
        if fs::write(&spare, vec![0; Spare::BYTES]).is_err() {
            let _ = fs::remove_file(&spare);
        }
        Ok(records)
    }

    fn verdicts(&self) -> PathBuf {
        self.folder.path().join("verdicts")
    }

    /// Removes everything, or says how to read the logs, which then stay.
    fn put_away(self, wanted: bool) {
        if let Some(outer) = &self.outer {
            hand_on(&self.verdicts(), outer);
        }
        let mut logs = logs_in(self.folder.path());
        if !wanted || logs.is_empty() {
            return;
        }
        let _ = fs::remove_dir_all(self.verdicts());
        self.folder.keep();
        logs.sort();
        let shown: Vec<String> = logs.iter().take(8).map(|path| path.display().to_string()).collect();
        let more = if logs.len() > shown.len() { " …" } else { "" };
        complain(&format!("gpupool report {}{more}", shown.join(" ")));
    }
}

/// Copies the verdicts for whoever waits for this command as for a process of the program.
fn hand_on(from: &Path, to: &Path) {
    let append = |text: &[u8]| {
        let outer = fs::OpenOptions::new().append(true).open(to.join(Attendance::FILE));
        let _ = outer.and_then(|mut file| std::io::Write::write_all(&mut file, text));
    };
    if let Ok(text) = Attendance::text(from) {
        append(&text);
    }
    if Attendance::read(from).is_ok_and(|attendance| attendance.is_cut_off) {
        let _ = Verdict::create(to, 0);
    }
    for (name, text) in Verdict::texts(from).into_iter().flatten() {
        let pid = name.split('-').next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
        // What cannot be copied stays an empty file, which says that something is not known.
        if let Ok((mut file, _)) = Verdict::create(to, pid) {
            let _ = std::io::Write::write_all(&mut file, &text);
        }
    }
}

fn logs_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension() == Some(OsStr::new("jsonl"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_understood_in_any_case_and_strangers_refused() {
        let parse = |words: &[&str]| FailOn::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert!(parse(&[]).unwrap().is_none());
        assert_eq!(parse(&["gp001", "GP005"]).unwrap().unwrap().codes, ["GP001", "GP005"]);
        assert!(parse(&["GP001", "any"]).unwrap().unwrap().codes.is_empty());
        assert!(parse(&["GP001", " gp005 "]).unwrap().is_some());
        for stranger in ["GP1", "", "GP001 GP005"] {
            assert!(parse(&[stranger]).is_err() && parse(&["any", stranger]).is_err(), "{stranger}");
        }
    }
}
