//! From a process's variables to its settings, by the table.

use crate::outside::Outside;
use crate::problem::Problem;
use crate::ranks::{launcher_variables, local_ranks};
use crate::settings::Settings;
use crate::table::{PREFIX, SETTINGS, Setting, VERDICTS};
use crate::units::few_bytes;
use std::ffi::{OsStr, OsString};

/// One setting as somebody wrote it, `NAME=VALUE`: with or without our prefix, in capitals or not, `-` for `_`. The setting's row, and
/// what it says now, all others being as by default. An empty value is the default.
///
/// This is for a program that runs. A number that is most likely one of GiB (`limit=10`) is refused: at a program's start it is obeyed
/// with a warning, as refusing would leave the program without the pool, but here nothing is lost by asking again, while obeying would move
/// almost all memory away. `10B` says that bytes are meant.
///
/// # Errors
/// There is no such setting, it takes no such value, or that value is hardly what is meant.
pub fn read_one(words: &str) -> Result<(&'static Setting, Settings), Problem> {
    let (name, value) = words.split_once('=').unwrap_or((words, ""));
    let wanted = name.trim().to_uppercase().replace('-', "_");
    let wanted = if wanted.starts_with(PREFIX) { wanted } else { format!("{PREFIX}{wanted}") };
    let problem = |name: &str, reason| Problem { name: name.to_owned(), value: value.to_owned(), reason };
    if !words.contains('=') {
        let reason =
            format!("is not NAME=VALUE; write for example limit=0:20GiB ({name}= with nothing after the = unsets it)");
        return Err(problem(name, reason));
    }
    let Some(row) = SETTINGS.iter().find(|row| row.name == wanted) else {
        return Err(problem(&wanted, unknown_name(&wanted)));
    };
    let mut settings = Settings::default();
    if !value.trim().is_empty() {
        (row.read)(&mut settings, OsStr::new(value)).map_err(|reason| problem(row.name, reason))?;
        settings.said.insert(row.name, value.to_owned());
        if let Some(reason) = few_bytes(row.name, value) {
            return Err(problem(row.name, reason));
        }
    }
    Ok((row, settings))
}

impl Settings {
    /// Reads the settings among `vars`, and what a launcher says of the job's ranks; variables without our prefix are passed
    /// over otherwise, an empty value counts as unset.
    ///
    /// # Errors
    /// Every mistake at once, in the order of `vars`: a person mends them in one go.
    pub fn read(vars: impl Iterator<Item = (OsString, OsString)>) -> Result<Settings, Vec<Problem>> {
        let mut settings = Settings::default();
        let mut problems = Vec::new();
        let (mut launcher, mut outside) = (Vec::new(), Vec::new());
        for (name, value) in vars {
            if launcher_variables().any(|known| OsStr::new(known) == name) {
                launcher.push((name, value));
                continue;
            }
            if Outside::is_variable(&name) {
                outside.push((name, value));
                continue;
            }
            let name = name.to_string_lossy();
            if !name.starts_with(PREFIX) || name == VERDICTS || value.is_empty() {
                continue;
            }
            let read = match SETTINGS.iter().find(|row| row.name == name) {
                Some(row) => (row.read)(&mut settings, &value).map(|()| {
                    settings.said.insert(row.name, shown(&value));
                }),
                None => Err(unknown_name(&name)),
            };
            if let Err(reason) = read {
                problems.push(Problem { name: name.into_owned(), value: shown(&value), reason });
            }
        }
        settings.local_ranks = local_ranks(launcher.into_iter());
        settings.outside = Outside::read(outside.into_iter());
        if let Some(problem) = settings.contradiction() {
            // A list that was malformed has its own complaint already.
            if problems.iter().all(|known| known.name != "GPUPOOL_CONTEXT_DEVICES") {
                problems.push(problem);
            }
        }
        if problems.is_empty() { Ok(settings) } else { Err(problems) }
    }
}

fn shown(value: &OsStr) -> String {
    value.to_string_lossy().into_owned()
}

/// Of `names`, the one that somebody who wrote `name` most likely meant. `given`: letters at its beginning that nobody gets wrong.
pub fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>, given: usize) -> Option<&'a str> {
    let (steps, nearest) = names.map(|known| (strsim::levenshtein(name, known), known)).min()?;
    // Half the letters wrong is no slip, and a wrong guess costs more than a list.
    (steps * 2 <= name.len().saturating_sub(given)).then_some(nearest)
}

/// Why a variable with our prefix is no setting; `None` where it is one.
pub fn no_setting(name: &str) -> Option<String> {
    if name == VERDICTS {
        return Some(format!("{VERDICTS} is set by --fail-on, and by nobody else; leave it out"));
    }
    (!SETTINGS.iter().any(|row| row.name == name)).then(|| unknown_name(name))
}

/// What to say about a name that has our prefix and is in no table.
fn unknown_name(name: &str) -> String {
    match nearest(name, SETTINGS.iter().map(|row| row.name), PREFIX.len()) {
        Some(nearest) => format!("no such setting; did you mean {nearest}?"),
        None => "no such setting; `gpupool run --help` lists them".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_setting_is_read_however_its_name_is_written() {
        for words in ["limit=0:20GiB", "GPUPOOL_LIMIT=0:20GiB", " Limit =0:20GiB"] {
            let (row, settings) = read_one(words).unwrap();
            assert_eq!((row.name, settings.limit.to_string()), ("GPUPOOL_LIMIT", "0:20GiB".to_owned()), "{words}");
        }
        for words in ["limit=10B", "limit=0", "limit=104857600", "limit=0:0,1:10MiB"] {
            read_one(words).unwrap();
        }
        assert_eq!(read_one("move-share=7%").unwrap().1.move_share, 70);
        assert_eq!(read_one("move_share=").unwrap().1.move_share, Settings::default().move_share);
        for (words, expected) in [
            ("limit", "limit: is not NAME=VALUE; write for example limit=0:20GiB (limit= with nothing"),
            ("limits=", "GPUPOOL_LIMITS: no such setting"),
            ("limits=1GiB", "did you mean GPUPOOL_LIMIT?"),
            ("priority=101", "not a whole number from 0 to 100"),
            ("priority=-1", "not a whole number"),
            ("limit=10", "GPUPOOL_LIMIT=10: 10 bytes, as there is no unit; write 10GiB if that is meant"),
            ("limit=0:64MiB,1:70", "70 bytes, as there is no unit"),
        ] {
            let problem = read_one(words).map(|_| ()).unwrap_err().to_string();
            assert!(problem.contains(expected), "{words}: {problem}");
        }
    }

    #[test]
    fn a_slip_is_recognised_and_a_stranger_is_not() {
        assert_eq!(unknown_name("GPUPOOL_LIMITS"), "no such setting; did you mean GPUPOOL_LIMIT?");
        assert_eq!(unknown_name("GPUPOOL_LOGFILE"), "no such setting; did you mean GPUPOOL_LOG_FILE?");
        for stranger in ["GPUPOOL_COMPLETELY_DIFFERENT", "GPUPOOL_COLOUR", "GPUPOOL_"] {
            assert!(unknown_name(stranger).contains("--help"), "{stranger}");
        }
    }
}
