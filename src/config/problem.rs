//! A mistake in a setting, told so that it can be mended without looking anything up.

use std::fmt;

use crate::table::{PREFIX, SETTINGS};

/// One setting that can not be used: its name, its value as it was found, what is wrong and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The variable, `GPUPOOL_LIMIT`.
    pub name: String,
    /// Its value; bytes that are no UTF-8 are shown as U+FFFD.
    pub value: String,
    /// What was expected and what to write.
    pub reason: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}={}: {}", self.name, self.value, self.reason)
    }
}

impl std::error::Error for Problem {}

/// What to say about a name that has our prefix and is in no table.
pub(crate) fn unknown_name(name: &str) -> String {
    let nearest = SETTINGS.iter().map(|row| (distance(name, row.name), row.name)).min();
    match nearest {
        // Half the letters wrong is no slip, and a wrong guess costs more than a list.
        Some((steps, nearest)) if steps * 2 <= name.len() - PREFIX.len() => {
            format!("no such setting; did you mean {nearest}?")
        }
        _ => "no such setting; `gpupool run --help` lists them".to_owned(),
    }
}

/// Levenshtein distance in bytes. Names are short ASCII, so the plain two-row table does.
fn distance(a: &str, b: &str) -> usize {
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.bytes().enumerate() {
            let substituted = above[j] + usize::from(x != y);
            row.push(substituted.min(above[j + 1] + 1).min(row[j] + 1));
        }
        above = row;
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        for (a, b, steps) in
            [("", "", 0), ("abc", "abc", 0), ("", "abc", 3), ("limit", "limits", 1), ("mode", "node", 1)]
        {
            assert_eq!(distance(a, b), steps, "{a} {b}");
            assert_eq!(distance(b, a), steps, "{b} {a}");
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
