//! The log: what the library says, and where it goes.
//!
//! The code says once what happened, as the struct that the log's reader gets, or as a sentence where there is nothing to
//! count:
//! ```text
//! log::emit(|| (PoolGrow { home, bytes, on_peers, on_host, site }, format!("pool grew by {size}")));
//! tracing::info!(target: "gpupool::python", about = "python", "Python frames are not read: {reason}");
//! ```
//! The second is a `note`. `tracing` filters both, by target and level; an event's are those of its type. The names of the
//! record's head (`v`, `t`, `pid`, `tid`, `level`, `event`) are taken.
//!
//! Warnings and errors go to stderr as text. `GPUPOOL_LOG_FILE` adds a file of JSON lines. Nothing here writes to stdout,
//! starts a thread, calls the driver or keeps a line in memory: a process that is killed has said all it had to say.
//!
//! Architecture Invariant: no lock is held across a write, so a full pipe stalls only the thread that meets it.

mod emit;
mod filter;
mod json;
mod output;
mod stderr;
mod summary;
pub mod verdict;

use std::ffi::{CStr, CString, OsString};
use std::fmt::Display;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use gpupool_config::{Mode, Settings, VERDICTS};
use parking_lot::Mutex;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::reload;

pub use emit::emit;
pub use json::remember_folder;
pub use stderr::{remember_stderr, warnings};
pub use summary::{MovedSummary, PlaceSummary, Summary, write_summary};

static STARTED: AtomicBool = AtomicBool::new(false);
static FILE_PATH: OnceLock<PathBuf> = OnceLock::new();
/// The same for C.
static FILE_NAME: OnceLock<CString> = OnceLock::new();
/// What [`has_every_block`] and [`has_events_of_memory`] answer.
static EVERY_BLOCK: AtomicBool = AtomicBool::new(false);
static EVENTS_OF_MEMORY: AtomicBool = AtomicBool::new(false);
/// The log is one that `gpupool run --fail-on` made for itself, and removes or names when the program has ended.
static BORROWED: AtomicBool = AtomicBool::new(false);
static WARNED: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Puts another filter in the place of the one that `GPUPOOL_LOG` asked for.
type Refilter = Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>;
static REFILTER: OnceLock<Refilter> = OnceLock::new();
/// What holds where `GPUPOOL_LOG` says nothing.
static DEFAULT: OnceLock<LevelFilter> = OnceLock::new();

/// Opens the log. Later calls do nothing. No failure reaches the program: what cannot be opened is said on stderr, and
/// the rest goes on.
pub fn start(settings: &Settings) {
    if STARTED.swap(true, Ordering::AcqRel) {
        return;
    }
    let mut complaints = Vec::new();
    let file = settings.log_file.as_ref().and_then(|template| match json::LogFile::create(template) {
        Ok((file, path)) => {
            let verdicts = std::env::var_os(VERDICTS).map(PathBuf::from);
            let beside = verdicts.is_some_and(|verdicts| verdicts.parent().is_some_and(|it| path.parent() == Some(it)));
            BORROWED.store(beside, Ordering::Relaxed);
            // The only caller, so the cells are empty; a path that was opened has no NUL.
            let _ = FILE_NAME.set(CString::new(path.as_os_str().as_bytes()).unwrap_or_default());
            let _ = FILE_PATH.set(path);
            Some(file)
        }
        Err(complaint) => {
            complaints.push(complaint);
            None
        }
    });
    if settings.mode == Mode::Trace && file.is_none() && settings.log.is_none() {
        complaints
            .push("GPUPOOL_MODE=trace: nothing to write to; set GPUPOOL_LOG_FILE=/tmp/gpupool.%p.jsonl".to_owned());
    }
    let _ = DEFAULT.set(default_level(settings, file.is_some()));
    note_what_is_taken(asked(settings, file.is_some(), &mut Vec::new()));
    let (subscriber, refilter) = subscriber(settings, file, libc::STDERR_FILENO, &mut complaints);
    let _ = REFILTER.set(refilter);
    // Refused only where somebody else in this library installed one, and then that one is the log.
    let _ = tracing::subscriber::set_global_default(subscriber);
    for complaint in complaints {
        // Not an event: GPUPOOL_LOG=off would swallow the one line that tells why there is no log.
        stderr::warn_now(&complaint);
    }
}

fn note_what_is_taken(filter: EnvFilter) {
    let (every_block, events) = filter::takes_of_memory(filter);
    EVERY_BLOCK.store(every_block, Ordering::Relaxed);
    EVENTS_OF_MEMORY.store(events, Ordering::Relaxed);
}

/// Whether the log could be changed to these directives (`None`: the default).
///
/// # Errors
/// They are none; why, in words.
pub fn check(asked: Option<&str>) -> Result<(), String> {
    asked.map_or(Ok(()), gpupool_config::check_log)
}

/// Has the log say what these directives ask for from now on (`None`: the default), in the file if there is one, and else on stderr. Calls
/// that nobody counts are handed out past the hooks where nobody listens to them when the program asks for them; those stay unheard.
///
/// # Errors
/// There is no log, or they are no directives.
pub fn change(asked: Option<&str>) -> Result<(), String> {
    let (Some(refilter), Some(default)) = (REFILTER.get(), DEFAULT.get()) else {
        return Err("this process has no log".to_owned());
    };
    let mut complaints = Vec::new();
    let filter = || filter::parse(asked, *default, &mut Vec::new());
    refilter(filter::parse(asked, *default, &mut complaints))?;
    note_what_is_taken(filter());
    complaints.into_iter().next().map_or(Ok(()), Err)
}

/// Warns about a condition that lasts, the first time only. `about` names the condition: what is said may differ from
/// call to call, and every allocation may come by here.
pub fn warn_once(about: &'static str, message: impl Display) {
    // After a fork the lock may be held by a thread that no longer exists; saying it again is the lesser evil.
    let new = WARNED.try_lock().is_none_or(|mut warned| {
        let new = !warned.contains(&about);
        if new {
            warned.push(about);
        }
        new
    });
    if new {
        tracing::warn!(target: "gpupool::once", about, "{message}");
    }
}

/// Whether the log has a line for every block: who is asked for what only such a line needs need not find it out otherwise.
///
/// Found out once. To ask for a target where no event follows (`tracing::enabled!`) leaves a mark in each layer that does not take it, and
/// the next event of a kind that every layer takes is lost there: warnings would not reach stderr.
#[inline]
pub fn has_every_block() -> bool {
    EVERY_BLOCK.load(Ordering::Relaxed)
}

/// Whether anything of level info about memory is said; found out once, too.
pub fn has_events_of_memory() -> bool {
    EVENTS_OF_MEMORY.load(Ordering::Relaxed)
}

/// Writes `text` to stderr as it is, in one write, past every filter: for what must be said before there is a log.
pub fn write_stderr(text: &str) {
    stderr::write(libc::STDERR_FILENO, text);
}

/// Lines of the log that were lost, and why the last one was.
pub fn lost() -> Option<(u64, std::io::Error)> {
    json::lost()
}

/// The JSON log of this process, once [`start`] has opened it.
pub fn file_path() -> Option<&'static Path> {
    FILE_PATH.get().map(PathBuf::as_path)
}

/// The path of [`file_path`]; empty where there is none.
pub fn file_name() -> &'static CStr {
    FILE_NAME.get().map_or(c"", CString::as_c_str)
}

/// Where the log's file lies, if it stays after the process: what a summary may tell the user to read.
pub fn lasting_file() -> Option<&'static Path> {
    file_path().filter(|_| !BORROWED.load(Ordering::Relaxed))
}

/// The name of this host.
pub fn host_name() -> OsString {
    let mut name = vec![0u8; 256];
    // SAFETY: `name` is writable for the length given, less one byte that stays NUL whatever is written.
    let failed = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) } != 0;
    let length = if failed { 0 } else { name.iter().position(|byte| *byte == 0).unwrap_or(0) };
    name.truncate(length);
    OsString::from_vec(name)
}

fn default_level(settings: &Settings, has_file: bool) -> LevelFilter {
    match (has_file, settings.mode) {
        (false, _) => LevelFilter::WARN,
        (true, Mode::Trace) => LevelFilter::TRACE,
        (true, _) => LevelFilter::INFO,
    }
}

/// What `GPUPOOL_LOG` asks for, where there is a file or none.
fn asked(settings: &Settings, has_file: bool, complaints: &mut Vec<String>) -> EnvFilter {
    filter::parse(settings.log.as_deref(), default_level(settings, has_file), complaints)
}

/// File and stderr, each behind its own filter; and what puts another one in the place of the one that was asked for.
fn subscriber(
    settings: &Settings,
    file: Option<json::LogFile>,
    stderr: libc::c_int,
    complaints: &mut Vec<String>,
) -> (impl Subscriber + Send + Sync + 'static, Refilter) {
    let asked = asked(settings, file.is_some(), complaints);
    let is_file = file.is_some();
    let (of_file, of_text) =
        if is_file { (asked, filter::plain(LevelFilter::WARN)) } else { (filter::plain(LevelFilter::OFF), asked) };
    let ((of_file, file_handle), (of_text, text_handle)) = (reload::Layer::new(of_file), reload::Layer::new(of_text));
    let subscriber = tracing_subscriber::registry()
        .with(file.map(|file| json::JsonLines::new(file).with_filter(of_file)))
        .with(stderr::Text::new(stderr).with_filter(of_text))
        .with(stderr::Tally.with_filter(LevelFilter::WARN));
    let refilter: Refilter = Box::new(move |filter| {
        let done = if is_file { file_handle.reload(filter) } else { text_handle.reload(filter) };
        done.map_err(|error| error.to_string())
    });
    (subscriber, refilter)
}

#[cfg(test)]
mod tests;
