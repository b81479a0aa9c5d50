//! What this process finds, for `gpupool run --fail-on`: past every filter, and past the log.
//!
//! The process has a file of its own in the folder that `GPUPOOL_VERDICTS` names; [`gpupool_events::Verdict`] is its format.
//! The file is opened for each line and no descriptor is held, since a program may close it or have none to spare. A line that
//! could not be written waits for the next one. While one is missing the file lacks its last line, and whoever reads it
//! knows that not everything is known.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use gpupool_config::VERDICTS;
use gpupool_events::{Began, FindingMade, Verdict, VerdictLine};
use once_cell::race::OnceBox;
use parking_lot::Mutex;

use super::{file_path, output, stderr};
use gpupool_interpose::cancel;

/// The file of one process. It is made once and never freed; a child of a fork makes its own.
struct Own {
    pid: u32,
    path: PathBuf,
    /// Findings made, written or not.
    made: AtomicU64,
    /// Lines that could not be written yet, whole.
    waiting: Mutex<Vec<u8>>,
}

static OWN: AtomicPtr<Own> = AtomicPtr::new(std::ptr::null_mut());

/// The file of this process, if one was asked for and made.
fn own() -> Option<&'static Own> {
    // SAFETY: null, or a value that was leaked.
    let own = unsafe { OWN.load(Ordering::Acquire).as_ref() };
    own.filter(|own| own.pid == std::process::id())
}

/// The folder that was named when the library was loaded.
static FOLDER: OnceBox<OsString> = OnceBox::new();

/// Before `main`: a program may clear or change its environment before it first calls the driver.
pub fn remember_folder() {
    if let Some(folder) = std::env::var_os(VERDICTS).filter(|folder| !folder.is_empty()) {
        let _ = FOLDER.set(Box::new(folder));
    }
}

/// Makes the file, empty: from now on this process is known to have something to say.
pub fn prepare() {
    let Some(folder) = FOLDER.get() else { return };
    let _sheltered = cancel::shelter();
    let pid = std::process::id();
    match Verdict::create(Path::new(folder), pid) {
        Ok((_, path)) => {
            let own = Own { pid, path, made: AtomicU64::new(0), waiting: Mutex::new(Vec::new()) };
            OWN.store(Box::into_raw(Box::new(own)), Ordering::Release);
        }
        Err(error) => stderr::warn_now(&format!(
            "{VERDICTS}={}: can not make a file there: {error}; what is found in this process does not reach --fail-on",
            folder.display()
        )),
    }
}

/// Says who this is, once the log is there.
pub fn began() {
    let Some(own) = own() else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let exe = std::env::current_exe().unwrap_or_default().display().to_string();
    let log = file_path().map(|path| path.display().to_string());
    own.write(&VerdictLine::Began(Began::new(own.pid, started(), now, exe, log)));
}

/// Something was found.
pub fn found(finding: FindingMade) {
    if own().is_none() && !OWN.load(Ordering::Acquire).is_null() {
        // The child of a fork: it has said nothing yet, and what its parent says is the parent's.
        prepare();
        began();
    }
    let Some(own) = own() else { return };
    own.made.fetch_add(1, Ordering::Relaxed);
    own.write(&VerdictLine::Finding(finding));
}

/// Everything was judged.
pub fn ended() {
    let Some(own) = own() else { return };
    own.write(&VerdictLine::Ended { findings: own.made.load(Ordering::Relaxed) });
}

impl Own {
    /// Appends a line, behind those that wait. No lock is held while it is written.
    fn write(&self, line: &VerdictLine) {
        let Ok(line) = line.to_json() else { return };
        let mut text = std::mem::take(&mut *self.waiting.lock());
        text.extend_from_slice(line.as_bytes());
        if let Err((written, _)) = self.append(&text) {
            // What was written of it is told from what is written again by the line's end in between; the reader sees
            // from it that the file is damaged, and from the last line what it holds.
            let mut waiting = self.waiting.lock();
            if written > 0 {
                text.insert(0, b'\n');
            }
            text.extend_from_slice(&waiting);
            *waiting = text;
        }
    }

    fn append(&self, text: &[u8]) -> Result<(), (usize, io::Error)> {
        let _sheltered = cancel::shelter();
        let file = OpenOptions::new().append(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(&self.path);
        let file = file.and_then(output::above_standard).map_err(|error| (0, error))?;
        output::write_all(file.as_raw_fd(), text)
    }
}

/// Field 22 of `/proc/self/stat`, the start of this process in clock ticks since the machine's; 0 where it is not told.
fn started() -> u64 {
    let _sheltered = cancel::shelter();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)?.parse().ok());
    ticks.unwrap_or(0)
}
