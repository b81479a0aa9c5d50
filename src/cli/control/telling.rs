//! What is told of processes that were asked: their progress on a terminal while they are at it, and what became of each.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::Instant;

use gpupool_config::format_size;
use gpupool_wire::control::Reply;
use serde::Serialize;

use crate::failure::{Failure, complain};
use crate::pages::Listed;
use crate::stdout;
use crate::terminal;

/// What became of one process.
#[derive(Clone, Debug, Serialize)]
pub struct Told {
    pub pid: u32,
    /// Why nothing was done; what follows is 0 then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Bytes that moved.
    pub bytes: u64,
    /// Bytes that were to, and did not.
    pub stayed_bytes: u64,
    /// Of those that moved, what is in files now.
    pub disk_bytes: u64,
    /// What they take there.
    pub stored_bytes: u64,
    /// The former by the latter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_ratio: Option<f64>,
    pub microseconds: u64,
    /// Of these, how long its work on the GPUs was waited for.
    pub waited_microseconds: u64,
    /// Of those that moved, in the time without that wait.
    pub bytes_per_second: u64,
    /// Of all that it has now, what lies on other GPUs than those that use it, and what on the host; where that is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_other_gpus_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_host_bytes: Option<u64>,
    /// Where its memory is now, in words, where that is said.
    #[serde(skip)]
    pub whereabouts: String,
    /// Why some of it stayed, in words, where that is said.
    #[serde(skip)]
    pub because: String,
}

/// How many bytes of memory a byte on the disk is of, in thousandths; nothing where nothing was written.
pub fn compression(bytes: u64, stored: u64) -> Option<f64> {
    (stored > 0).then(|| (bytes as f64 / stored as f64 * 1e3).round() / 1e3)
}

/// So many bytes in so many microseconds.
pub fn rate(bytes: u64, microseconds: u64) -> u64 {
    (bytes as f64 / (microseconds.max(1) as f64 * 1e-6)) as u64
}

/// What a process answers that was asked something else.
pub const OTHER_ANSWER: &str = "it answered something else than what it was asked";

pub(super) fn told_by(row: &Listed, answer: Result<Reply, String>) -> Told {
    let pid = row.told.process.identity.pid;
    let none = Told {
        pid,
        error: None,
        bytes: 0,
        stayed_bytes: 0,
        disk_bytes: 0,
        stored_bytes: 0,
        compression_ratio: None,
        microseconds: 0,
        waited_microseconds: 0,
        bytes_per_second: 0,
        on_other_gpus_bytes: None,
        on_host_bytes: None,
        whereabouts: String::new(),
        because: String::new(),
    };
    match answer {
        Ok(Reply::Done { moved, stayed, to_disk, stored, microseconds, waited }) => Told {
            bytes: moved,
            stayed_bytes: stayed,
            disk_bytes: to_disk,
            stored_bytes: stored,
            compression_ratio: compression(to_disk, stored),
            microseconds,
            waited_microseconds: waited,
            bytes_per_second: rate(moved, microseconds.saturating_sub(waited)),
            ..none
        },
        Ok(Reply::Refused { why }) | Err(why) => Told { error: Some(why), ..none },
        Ok(_) => Told { error: Some(OTHER_ANSWER.to_owned()), ..none },
    }
}

/// How far all of them are together, on a terminal.
pub(super) struct Progress {
    shown: bool,
    rows: Mutex<Vec<(u64, u64)>>,
    begun: Instant,
}

impl Progress {
    pub(super) fn new(rows: usize) -> Self {
        let shown = std::io::stderr().is_terminal();
        Self { shown, rows: Mutex::new(vec![(0, 0); rows]), begun: Instant::now() }
    }

    pub(super) fn say(&self, at: usize, done: u64, total: u64) {
        let Ok(mut rows) = self.rows.lock() else { return };
        rows[at] = (done, total);
        if self.shown {
            let (done, total) = rows.iter().fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
            let rate = (done as f64 / self.begun.elapsed().as_secs_f64().max(1e-3)) as u64;
            let line = format!("\r{} of {}, {}/s   ", format_size(done), format_size(total), format_size(rate));
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }

    pub(super) fn end(&self) {
        if self.shown && self.rows.lock().is_ok_and(|rows| rows.iter().any(|row| row.1 > 0)) {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }
}

/// Prints what became of each; `did` and `did_not` stand behind sizes. Whether all of it was done.
///
/// # Errors
/// Nothing can be printed.
pub fn print(all: &[Told], json: bool, did: &str, did_not: &str) -> Result<bool, Failure> {
    if json {
        let text = serde_json::to_string_pretty(all).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{}\n", terminal::clean_json(&text)))?;
    }
    for told in all {
        let Told { pid, error, bytes, stayed_bytes, microseconds, waited_microseconds, whereabouts, .. } = told;
        if let Some(error) = error {
            complain(&format!("process {pid}: {error}"));
            continue;
        }
        if json {
            continue;
        }
        // The wait is the program's, and the rate is that of what came after it.
        let [seconds, waited] =
            [microseconds.saturating_sub(*waited_microseconds), *waited_microseconds].map(|time| time as f64 * 1e-6);
        let waited = if waited >= 0.01 { format!(", after {waited:.2} s of wait for its work") } else { String::new() };
        let takes = match told.compression_ratio {
            // Of what did not become smaller there is nothing more to say.
            Some(ratio) if ratio < 1.005 => format!("; {} on the disk", format_size(told.stored_bytes)),
            Some(ratio) => format!("; {} on the disk, {ratio:.2} times less", format_size(told.stored_bytes)),
            None => String::new(),
        };
        let stayed = if *stayed_bytes > 0 {
            format!("; {} {did_not}{}", format_size(*stayed_bytes), told.because)
        } else {
            String::new()
        };
        stdout::print(&format!(
            "process {pid}: {} {did}{whereabouts} in {seconds:.2} s ({}/s){waited}{takes}{stayed}\n",
            format_size(*bytes),
            format_size(told.bytes_per_second)
        ))?;
    }
    Ok(all.iter().all(|told| told.error.is_none()))
}
