//! From a process's variables to its settings, by the table.

use crate::problem::Problem;
use crate::ranks::{launcher_variables, local_ranks};
use crate::settings::Settings;
use crate::table::{PREFIX, SETTINGS, VERDICTS};
use std::ffi::{OsStr, OsString};

impl Settings {
    /// Reads the settings among `vars`, and what a launcher says of the job's ranks; variables without our prefix are passed
    /// over otherwise, an empty value counts as unset.
    ///
    /// # Errors
    /// Every mistake at once, in the order of `vars`: a person mends them in one go.
    pub fn read(vars: impl Iterator<Item = (OsString, OsString)>) -> Result<Settings, Vec<Problem>> {
        let mut settings = Settings::default();
        let mut problems = Vec::new();
        let mut launcher = Vec::new();
        for (name, value) in vars {
            if launcher_variables().any(|known| OsStr::new(known) == name) {
                launcher.push((name, value));
                continue;
            }
            let name = name.to_string_lossy();
            if !name.starts_with(PREFIX) || name == VERDICTS || value.is_empty() {
                continue;
            }
            let read = match SETTINGS.iter().find(|row| row.name == name) {
                Some(row) => (row.read)(&mut settings, &value),
                None => Err(unknown_name(&name)),
            };
            if let Err(reason) = read {
                problems.push(Problem { name: name.into_owned(), value: shown(&value), reason });
            }
        }
        settings.local_ranks = local_ranks(launcher.into_iter());
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
    fn a_slip_is_recognised_and_a_stranger_is_not() {
        assert_eq!(unknown_name("GPUPOOL_LIMITS"), "no such setting; did you mean GPUPOOL_LIMIT?");
        assert_eq!(unknown_name("GPUPOOL_LOGFILE"), "no such setting; did you mean GPUPOOL_LOG_FILE?");
        for stranger in ["GPUPOOL_COMPLETELY_DIFFERENT", "GPUPOOL_COLOUR", "GPUPOOL_"] {
            assert!(unknown_name(stranger).contains("--help"), "{stranger}");
        }
    }
}
