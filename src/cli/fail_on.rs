//! `gpupool run --fail-on`: a program that succeeds, and a finding that makes this a failure.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use gpupool_config::{Mode, Settings};
use gpupool_events::finding;

use crate::failure::Failure;
use crate::folder::Folder;
use crate::report::{self, Found};
use crate::{child, explain, terminal};

/// The exit code when the program succeeded and a finding was made that it should fail on.
pub const FOUND: u8 = 3;

/// Which findings count.
pub struct FailOn {
    /// Empty: every one.
    codes: Vec<&'static str>,
}

impl FailOn {
    /// From the words of the command line; `None` if there are none.
    ///
    /// # Errors
    /// A code that there is no finding for.
    pub fn parse(words: &[String]) -> Result<Option<FailOn>, Failure> {
        if words.is_empty() {
            return Ok(None);
        }
        if words.iter().any(|word| word.eq_ignore_ascii_case("any")) {
            return Ok(Some(FailOn { codes: Vec::new() }));
        }
        let code = |word: &String| finding(word).map(|finding| finding.code).ok_or_else(|| explain::unknown(word));
        Ok(Some(FailOn { codes: words.iter().map(code).collect::<Result<_, _>>()? }))
    }

    /// Runs the program with a log, and ends as it does unless a finding counts.
    ///
    /// # Errors
    /// The settings let no finding reach the log (exit 2), or the program could not be started.
    pub fn run(&self, mut command: Command, settings: &Settings) -> Result<ExitCode, Failure> {
        check(settings)?;
        let logs = Logs::prepare(settings)?;
        command.env("GPUPOOL_LOG_FILE", &logs.template);
        let status = child::wait_for(command)?;
        let paths = logs.written();
        if paths.is_empty() {
            eprintln!(
                "gpupool: --fail-on: no log was written: the program did not use CUDA, or could not be intercepted"
            );
        }
        let counted: Vec<Found> = report::findings_of(&paths).into_iter().filter(|found| self.counts(found)).collect();
        if counted.is_empty() {
            // Before ending as the child did, which may mean dying of a signal and runs no destructor.
            drop(logs);
            return Ok(child::end_as(status));
        }
        tell(&counted);
        logs.keep(&paths);
        Ok(if status.success() { ExitCode::from(FOUND) } else { child::end_as(status) })
    }

    fn counts(&self, found: &Found) -> bool {
        self.codes.is_empty() || self.codes.contains(&found.code.as_str())
    }
}

/// Refuses settings under which nothing could ever be found: a test that can not fail is worse than none.
fn check(settings: &Settings) -> Result<(), Failure> {
    if settings.mode == Mode::Off {
        return Err(Failure::usage("--fail-on with GPUPOOL_MODE=off: nothing is looked at; use another mode"));
    }
    match settings.log.as_deref().map(str::trim) {
        Some(level) if ["off", "error"].iter().any(|word| level.eq_ignore_ascii_case(word)) => {
            Err(Failure::usage(format!(
                "--fail-on with GPUPOOL_LOG={level}: findings are warnings and would not be logged; write warn or info"
            )))
        }
        _ => Ok(()),
    }
}

/// One line a finding, on stderr: the program may have written its results to stdout.
fn tell(found: &[Found]) {
    for found in found {
        let title = finding(&found.code).map_or("", |known| known.title);
        eprintln!("gpupool: {}: {title}: {}", terminal::clean(&found.code), terminal::clean(&found.what));
        if let Some(place) = found.site.as_ref().map(|site| report::place(site, terminal::WIDTH)) {
            eprintln!("gpupool:   {place}");
        }
    }
}

/// The logs that the program and its children write.
struct Logs {
    /// `GPUPOOL_LOG_FILE` for the program.
    template: OsString,
    /// What fitted the template before.
    before: BTreeSet<PathBuf>,
    /// Where they are if nobody asked for any.
    folder: Option<Folder>,
}

impl Logs {
    fn prepare(settings: &Settings) -> Result<Logs, Failure> {
        let (template, folder) = match &settings.log_file {
            Some(path) => (absolute(path.template())?, None),
            None => {
                let folder = Folder::create("gpupool-log-", "the log", b"")?;
                let mut template = escaped(folder.path().as_os_str());
                template.push("/%p.jsonl");
                (template, Some(folder))
            }
        };
        let before = matching(&template);
        Ok(Logs { template, before, folder })
    }

    /// The files that have come since. Logs are never written over, so a new one is the program's.
    fn written(&self) -> Vec<PathBuf> {
        matching(&self.template).into_iter().filter(|path| !self.before.contains(path)).collect()
    }

    /// Leaves the logs where they are and says how to read them.
    fn keep(self, paths: &[PathBuf]) {
        if let Some(folder) = self.folder {
            folder.keep();
        }
        let shown: Vec<String> = paths.iter().take(8).map(|path| path.display().to_string()).collect();
        let more = if paths.len() > shown.len() { " …" } else { "" };
        eprintln!("gpupool: gpupool report {}{more}", shown.join(" "));
    }
}

/// The template from the root on: the program may change its folder before it opens the log.
fn absolute(template: &OsStr) -> Result<OsString, Failure> {
    if Path::new(template).is_absolute() {
        return Ok(template.to_owned());
    }
    let folder = std::env::current_dir()
        .map_err(|error| Failure::broken(format!("can not find the current folder: {error}")))?;
    let mut path = escaped(folder.as_os_str());
    path.push("/");
    path.push(template);
    Ok(path)
}

/// A path as a template that stands for itself.
fn escaped(path: &OsStr) -> OsString {
    let bytes = path.as_bytes().iter().flat_map(|byte| match byte {
        b'%' => vec![b'%', b'%'],
        other => vec![*other],
    });
    OsString::from_vec(bytes.collect())
}

/// The files that `template` may stand for, whatever its codes are.
fn matching(template: &OsStr) -> BTreeSet<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for component in Path::new(template).components() {
        found = match component {
            Component::Normal(name) if name.as_bytes().contains(&b'%') => {
                let pieces = pieces(name.as_bytes());
                found.iter().flat_map(|folder| entries(folder, &pieces)).collect()
            }
            other => found.into_iter().map(|folder| folder.join(other)).collect(),
        };
    }
    found.into_iter().filter(|path| path.is_file()).collect()
}

fn entries(folder: &Path, pieces: &[Vec<u8>]) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let names = entries.flatten().filter(|entry| fits(entry.file_name().as_bytes(), pieces));
    names.map(|entry| entry.path()).collect()
}

/// The text between the codes of a name; one piece means that there is no code in it.
fn pieces(name: &[u8]) -> Vec<Vec<u8>> {
    let mut pieces = vec![Vec::new()];
    let mut bytes = name.iter();
    while let Some(byte) = bytes.next() {
        let literal = match byte {
            b'%' => bytes.next().filter(|code| **code == b'%'),
            other => Some(other),
        };
        match (literal, pieces.last_mut()) {
            (Some(literal), Some(piece)) => piece.push(*literal),
            _ => pieces.push(Vec::new()),
        }
    }
    pieces
}

/// Whether `name` is the pieces in their order with anything between them.
fn fits(name: &[u8], pieces: &[Vec<u8>]) -> bool {
    let [first, between @ .., last] = pieces else {
        return pieces.first().is_some_and(|whole| whole == name);
    };
    let Some(mut rest) = name.strip_prefix(&**first).and_then(|rest| rest.strip_suffix(&**last)) else {
        return false;
    };
    for piece in between {
        let Some(at) = (0..=rest.len()).find(|at| rest[*at..].starts_with(piece)) else {
            return false;
        };
        rest = &rest[at + piece.len()..];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_their_template() {
        let fits = |template: &str, name: &str| fits(name.as_bytes(), &pieces(template.as_bytes()));
        assert!(fits("%p.jsonl", "77.jsonl") && fits("a.%h.%p.b", "a.node1.77.b") && fits("100%%", "100%"));
        assert!(fits("%p%e", "anything") && fits("x%p", "x"));
        for (template, name) in
            [("%p.jsonl", "77.json"), ("a.%p", "b.7"), ("ab%pba", "aba"), ("%p-%p-%p", "1-2"), ("100%%", "100x")]
        {
            assert!(!fits(template, name), "{template} {name}");
        }
    }

    #[test]
    fn files_are_found_through_folders_with_codes() {
        let folder = tempfile::tempdir().unwrap();
        for host in ["node1", "node2"] {
            fs::create_dir(folder.path().join(host)).unwrap();
            fs::write(folder.path().join(host).join("7.jsonl"), "").unwrap();
        }
        let mut template = escaped(folder.path().as_os_str());
        template.push("/%h/%p.jsonl");
        assert_eq!(matching(&template).len(), 2);
        assert_eq!(matching(OsStr::new("/no/such/%p")).len(), 0);
    }

    #[test]
    fn codes_are_understood_in_any_case_and_strangers_refused() {
        let parse = |words: &[&str]| FailOn::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert!(parse(&[]).unwrap().is_none());
        assert_eq!(parse(&["gp001", "GP005"]).unwrap().unwrap().codes, ["GP001", "GP005"]);
        assert!(parse(&["GP001", "any"]).unwrap().unwrap().codes.is_empty());
        assert!(parse(&["GP1"]).is_err());
    }
}
