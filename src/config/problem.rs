//! A mistake in a setting, told so that it can be mended without looking anything up.

use std::fmt;

/// One setting that cannot be used: its name, its value as it was found, what is wrong and what to write instead.
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
        // A name alone is no assignment of nothing.
        let sign = if self.value.is_empty() { "" } else { "=" };
        write!(out, "{}{sign}{}: {}", self.name, self.value, self.reason)
    }
}

impl std::error::Error for Problem {}
