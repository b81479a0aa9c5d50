//! The log: what the library says, and where it goes.
//!
//! The code says what happened once, as a `tracing` event with typed fields:
//! ```text
//! tracing::info!(target: "gpupool::pool", event = "pool.grow", home, bytes, on_peers, on_host, "pool grew by {size}");
//! tracing::info!(target: "gpupool::process", event = "process.exit", peak.json = %json!(peak), live_blocks, …, "ends");
//! ```
//! `event` is a name of `gpupool_events::Event` and the fields are that event's; a line without `event` is a `note`. A
//! field called `x.json` holds JSON text and is written as `x`, because `tracing` has no lists. The names of the record's
//! head (`v`, `t`, `pid`, `tid`, `level`) are taken.
//!
//! Warnings and errors go to stderr as text. `GPUPOOL_LOG_FILE` adds a file of JSON lines. Nothing here writes to stdout,
//! starts a thread, calls the driver or keeps a line in memory: a process that is killed has said all it had to say.
//!
//! Architecture Invariant: no lock is held across a write, so a full pipe stalls only the thread that meets it.

mod filter;
mod json;
mod stderr;
mod summary;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use gpupool_config::{Mode, Settings};
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};

pub use stderr::warnings;
pub use summary::{PlaceSummary, Summary, write_summary};

static STARTED: AtomicBool = AtomicBool::new(false);
static FILE_PATH: OnceLock<PathBuf> = OnceLock::new();

/// Runs its body the first time this place is reached, for warnings that every allocation could repeat.
#[allow(
    unused_macros,
    reason = "for warnings on hot paths, of which there may be none"
)]
macro_rules! once {
    ($($body:tt)*) => {{
        static SAID: ::std::sync::atomic::AtomicBool = ::std::sync::atomic::AtomicBool::new(false);
        if !SAID.swap(true, ::std::sync::atomic::Ordering::Relaxed) {
            $($body)*
        }
    }};
}
#[allow(unused_imports, reason = "as above")]
pub(crate) use once;

/// Opens the log. Later calls do nothing. No failure reaches the program: what can not be opened is said on stderr, and
/// the rest goes on.
pub fn start(settings: &Settings) {
    if STARTED.swap(true, Ordering::AcqRel) {
        return;
    }
    let mut complaints = Vec::new();
    let file =
        settings
            .log_file
            .as_ref()
            .and_then(|template| match json::LogFile::create(template) {
                Ok((file, path)) => {
                    // The only caller, so the cell is empty.
                    let _ = FILE_PATH.set(path);
                    Some(file)
                }
                Err(complaint) => {
                    complaints.push(complaint);
                    None
                }
            });
    if settings.mode == Mode::Trace && file.is_none() && settings.log.is_none() {
        complaints.push(
            "GPUPOOL_MODE=trace: nothing to write to; set GPUPOOL_LOG_FILE=/tmp/gpupool.%p.jsonl"
                .to_owned(),
        );
    }
    let subscriber = subscriber(settings, file, libc::STDERR_FILENO, &mut complaints);
    // Refused only where somebody else in this library installed one, and then that one is the log.
    let _ = tracing::subscriber::set_global_default(subscriber);
    for complaint in complaints {
        // Not an event: GPUPOOL_LOG=off would swallow the one line that tells why there is no log.
        stderr::say(libc::STDERR_FILENO, "warning", &complaint);
        stderr::count_warning();
    }
}

/// The JSON log of this process, once [`start`] has opened it.
pub fn file_path() -> Option<&'static Path> {
    FILE_PATH.get().map(PathBuf::as_path)
}

/// File and stderr, each behind its own filter.
fn subscriber(
    settings: &Settings,
    file: Option<json::LogFile>,
    stderr: libc::c_int,
    complaints: &mut Vec<String>,
) -> impl Subscriber + Send + Sync + 'static {
    let default = match (&file, settings.mode) {
        (None, _) => LevelFilter::WARN,
        (Some(_), Mode::Trace) => LevelFilter::TRACE,
        (Some(_), _) => LevelFilter::INFO,
    };
    let mut asked = || filter::parse(settings.log.as_deref(), default, complaints);
    let (file, text) = match file {
        Some(file) => (
            Some(json::JsonLines::new(file).with_filter(asked())),
            filter::plain(LevelFilter::WARN),
        ),
        None => (None, asked()),
    };
    tracing_subscriber::registry()
        .with(file)
        .with(stderr::Text::new(stderr).with_filter(text))
        .with(stderr::Tally.with_filter(LevelFilter::WARN))
}

#[cfg(test)]
mod tests;
