//! One line.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::event::Event;
use crate::reader::Wrong;

/// The format that this crate writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// How much a record matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// gpupool can not do its work.
    Error,
    /// Something a person should look at.
    Warn,
    /// Contexts, growth, spills.
    Info,
    /// Every pooled call.
    Debug,
    /// Every hooked call.
    Trace,
}

impl Level {
    /// How it is written.
    pub const fn word(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        }
    }
}

/// What a record is about, for `GPUPOOL_LOG=gpupool::memory=debug`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Hooked calls.
    Call,
    /// CUDA contexts and their limits.
    Context,
    /// What a person should change.
    Finding,
    /// Memory of other processes, and theirs of ours.
    Ipc,
    /// The log itself. These come past the filters: they tell why something else does not come.
    Log,
    /// The pool, and the program's own handles.
    Memory,
    /// Code.
    Module,
    /// Pinned host memory.
    Pinned,
    /// The process and its environment.
    Process,
}

impl Target {
    /// How a filter calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Target::Call => "gpupool::call",
            Target::Context => "gpupool::context",
            Target::Finding => "gpupool::finding",
            Target::Ipc => "gpupool::ipc",
            Target::Log => "gpupool::log",
            Target::Memory => "gpupool::memory",
            Target::Module => "gpupool::module",
            Target::Pinned => "gpupool::pinned",
            Target::Process => "gpupool::process",
        }
    }
}

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
