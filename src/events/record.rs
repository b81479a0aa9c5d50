//! One line of a log: how it is read, and what can be wrong with it.

use std::{fmt, io};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::event::Event;
use crate::level::Level;

/// The format that this crate writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// The longest line that is kept, bytes. Records are a few hundred; a file that is no log may have no line feed at all.
pub const LONGEST: usize = 1 << 20;

/// One line of a log.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Seconds since 1970, UTC.
    pub t: f64,
    /// Process.
    pub pid: u32,
    /// Kernel's number of the thread.
    pub tid: u32,
    /// How much it matters.
    pub level: Level,
    /// One sentence for a person.
    pub message: String,
    /// What happened, with its numbers.
    pub event: Event,
}

/// What can be wrong with a line.
#[derive(Debug)]
pub enum Wrong {
    /// The last line stops in the middle: its writer was killed, or is still writing.
    Truncated,
    /// No JSON object, or a field is missing or of another type.
    Json(serde_json::Error),
    /// Another format than [`VERSION`], or none named.
    Version(Option<u64>),
    /// No `event` names the line.
    NoEvent,
    /// Longer than any record.
    TooLong,
    /// The file could not be read further.
    Read(io::Error),
}

/// The part that every line has.
#[derive(Deserialize)]
struct Head {
    t: f64,
    pid: u32,
    tid: u32,
    level: Level,
    #[serde(default)]
    message: String,
}

impl Record {
    /// Reads one line, with or without its line feed.
    ///
    /// # Errors
    /// The line is no JSON object, is of a newer format, or lacks a field that its event must have.
    pub fn from_json(line: &[u8]) -> Result<Record, Wrong> {
        let mut fields: Map<String, Value> = serde_json::from_slice(line)?;
        match fields.remove("v").as_ref().and_then(Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            version => return Err(Wrong::Version(version)),
        }
        let Some(Value::String(name)) = fields.remove("event") else {
            return Err(Wrong::NoEvent);
        };
        let head = ["t", "pid", "tid", "level", "message"];
        let head: Map<_, _> = head.iter().filter_map(|key| fields.remove_entry(*key)).collect();
        let head: Head = serde_json::from_value(Value::Object(head))?;
        let event = Event::from_fields(&name, fields)?;
        Ok(Record { t: head.t, pid: head.pid, tid: head.tid, level: head.level, message: head.message, event })
    }
}

impl From<serde_json::Error> for Wrong {
    fn from(error: serde_json::Error) -> Self {
        Wrong::Json(error)
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Truncated => out.write_str("stops in the middle; the process was killed, or is still writing"),
            Wrong::Json(error) => write!(out, "not a record of gpupool: {error}"),
            Wrong::Version(Some(version)) => {
                write!(out, "format {version}, this gpupool reads {VERSION}; use the one that wrote it")
            }
            Wrong::Version(None) => out.write_str("not a record of gpupool: it names no format (\"v\")"),
            Wrong::NoEvent => out.write_str("not a record of gpupool: it names no event"),
            Wrong::TooLong => write!(out, "not a record of gpupool: longer than {LONGEST} bytes"),
            Wrong::Read(error) => write!(out, "cannot be read: {error}"),
        }
    }
}
