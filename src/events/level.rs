//! How much a record matters, and what it is about: what the filters of `GPUPOOL_LOG` go by.

use serde::Deserialize;

/// How much a record matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// gpupool cannot do its work.
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
