//! The file: one record a line, one write a record.

use std::fmt::{self, Write as _};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use gpupool_config::{LogPath, LogPathNames};
use gpupool_events::{Level, LogFull, LogLost, Record, Written};
use once_cell::race::OnceBox;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::emit::FIELDS;
use super::{host_name, output, stderr};
use crate::clock;
use gpupool_interpose::cancel;

/// Above the descriptors that a program opens itself, so that its first file still gets the number it has without us.
const DESCRIPTOR_FLOOR: libc::c_int = 256;
/// No descriptor is held.
const BY_PATH: libc::c_int = -1;
/// Bytes of the disk that are kept for the record which says that there is no more room.
const RESERVE: u64 = 1024;
/// Bytes of the disk that are taken ahead at a time.
const STEP: u64 = 16 << 10;

/// Lines that could not be written, in the life of the process, and why the last one was not (`errno`).
static LOST: AtomicU64 = AtomicU64::new(0);
static WHY: AtomicI32 = AtomicI32::new(0);

/// See [`super::lost`].
pub(super) fn lost() -> Option<(u64, io::Error)> {
    let lines = LOST.load(Ordering::Relaxed);
    (lines > 0).then(|| (lines, io::Error::from_raw_os_error(WHY.load(Ordering::Relaxed))))
}

/// Where the process started, if a relative log was asked for then.
static FOLDER: OnceBox<PathBuf> = OnceBox::new();

/// Before `main`: see [`FOLDER`].
pub fn remember_folder() {
    let asked = std::env::var_os("GPUPOOL_LOG_FILE").filter(|path| !path.is_empty() && Path::new(path).is_relative());
    if let Some(folder) = asked.and_then(|_| std::env::current_dir().ok()) {
        let _ = FOLDER.set(Box::new(folder));
    }
}

/// The inode of the first PID namespace, the same in every kernel (`PROC_PID_INIT_INO`).
const FIRST_NAMESPACE: u64 = 0xeffffffc;

/// This process's PID namespace and its start, where its number is none of the whole machine. `exec` changes neither.
fn contained() -> Option<(u64, u64)> {
    let namespace = std::fs::metadata("/proc/self/ns/pid").ok()?.ino();
    (namespace != FIRST_NAMESPACE).then(|| (namespace, clock::started_at().unwrap_or(0)))
}

/// A log file of this process, created by it.
///
/// Its descriptor has a number above those that programs meet. A process that may not have so many descriptors has none to
/// spare either: for it, and for one that closed ours, the file is opened for each line.
pub(super) struct LogFile {
    path: PathBuf,
    /// The number that is held, or [`BY_PATH`].
    descriptor: AtomicI32,
    /// Device and inode. A program may close every descriptor and reuse our number for a file of its own, or put another
    /// file at our path; without this check our lines would end up in its data.
    identity: (libc::dev_t, libc::ino_t),
    /// When the file was made, where the file system knows: the inode of a removed file is given to the next one.
    birth: Option<(i64, u32)>,
    /// A write stopped half way (disk full), so the next one starts a new line.
    torn: AtomicBool,
    /// Lines lost since `log.lost` was last written.
    lost: AtomicU64,
    /// `log.full` was written, and nothing after it.
    full: AtomicBool,
    /// Bytes of the file, from its start, for which there is room on the disk; `u64::MAX` where that cannot be had.
    room: AtomicU64,
}

impl LogFile {
    /// Creates the file that `template` names for this process, mode 0600. An existing file is never opened, also not
    /// through a link: in a shared folder somebody else may have put it there. The exception is the file that this very
    /// process began, as the program that it was before `exec`.
    ///
    /// # Errors
    /// A sentence that names the variable, the path, the reason and what to do.
    pub(super) fn create(template: &LogPath) -> Result<(LogFile, PathBuf), String> {
        let executable = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let path = template.expand(LogPathNames {
            pid: std::process::id(),
            contained: contained(),
            executable: executable.file_name().unwrap_or_default(),
            host: &host_name(),
        });
        // A relative path would mean another file once the program changes its folder, as it may have by now.
        let path = match FOLDER.get().filter(|_| path.is_relative()) {
            Some(folder) => folder.join(&path),
            None => std::path::absolute(&path).unwrap_or(path),
        };
        let opened = open(&path).map_err(|error| {
            let advice = match error.kind() {
                // Not a device, a folder or a link, which may be somebody's.
                io::ErrorKind::AlreadyExists if path.symlink_metadata().is_ok_and(|there| there.is_file()) => {
                    "remove it, or put %p into the name"
                }
                io::ErrorKind::AlreadyExists => {
                    "the log is a new file: choose another name, or leave it out to have no log"
                }
                io::ErrorKind::NotFound => "create the folder, or choose another path",
                _ => "choose a path that this user may write",
            };
            let template = template.template().display();
            format!(
                "GPUPOOL_LOG_FILE={template}: cannot create {}: {error}; {advice}. Going on without it",
                path.display()
            )
        })?;
        Ok((opened, path))
    }

    /// What to do about an error that does not say so by itself.
    fn remedy(error: &io::Error) -> &'static str {
        match error.raw_os_error() {
            Some(libc::EFBIG) => "; raise the limit on the size of files (ulimit -f)",
            _ => "",
        }
    }

    #[cfg(test)]
    pub(super) fn number(&self) -> libc::c_int {
        self.descriptor.load(Ordering::Relaxed)
    }

    /// Appends one line with one `write`, so that lines of several threads cannot mix.
    fn append(&self, line: &[u8]) {
        // Before the line, in the same write: how many are missing in front of it.
        let missing = self.lost.swap(0, Ordering::Relaxed);
        let mut text = Vec::with_capacity(line.len() + 2);
        if self.torn.swap(false, Ordering::Relaxed) {
            text.push(b'\n');
        }
        if missing > 0 {
            text.extend(lost_record(missing, &io::Error::from_raw_os_error(WHY.load(Ordering::Relaxed))));
        }
        text.extend_from_slice(line);
        text.push(b'\n');
        let written = self.with_descriptor(|descriptor, bytes| {
            self.make_room(descriptor, bytes, text.len() as u64)?;
            output::write_all(descriptor, &text).map_err(|(written, error)| {
                self.torn.store(written > 0, Ordering::Relaxed);
                error
            })
        });
        match written {
            Ok(()) => self.full.store(false, Ordering::Relaxed),
            Err(error) => self.lose(missing, &error),
        }
    }

    /// A line could not be written, and neither could the count of those before it.
    fn lose(&self, before: u64, error: &io::Error) {
        let code = error.raw_os_error().unwrap_or(0);
        self.lost.fetch_add(before + 1, Ordering::Relaxed);
        WHY.store(code, Ordering::Relaxed);
        if LOST.fetch_add(1, Ordering::Relaxed) == 0 {
            let path = self.path.display();
            stderr::warn_now(&format!("{path}: {error}; lines of the log are lost{}", Self::remedy(error)));
        }
        if matches!(code, libc::ENOSPC | libc::EDQUOT | libc::EFBIG) && !self.full.swap(true, Ordering::Relaxed) {
            // What was kept free for it. Where even that is not there, the summary on stderr is what tells.
            let mut record = if self.torn.swap(false, Ordering::Relaxed) { vec![b'\n'] } else { Vec::new() };
            record.extend(full_record(error));
            let told = self.with_descriptor(|descriptor, _| output::write_all(descriptor, &record).map_err(|(_, e)| e));
            if told.is_err() {
                self.torn.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Runs `act` with a descriptor of the file and the file's length.
    fn with_descriptor(&self, act: impl FnOnce(libc::c_int, u64) -> io::Result<()>) -> io::Result<()> {
        let held = self.descriptor.load(Ordering::Relaxed);
        if held != BY_PATH {
            if let Some(length) = self.is_at(held) {
                return act(held, length);
            }
            // The program closed it, and may have a file of its own there; it is not ours to close.
            self.descriptor.store(BY_PATH, Ordering::Relaxed);
        }
        let file = OpenOptions::new()
            .append(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(&self.path)?;
        let file = output::above_standard(file)?;
        let born = output::birth(file.as_raw_fd()) == self.birth;
        match self.is_at(file.as_raw_fd()).filter(|_| born) {
            Some(length) => act(file.as_raw_fd(), length),
            // Somebody removed it and made another.
            None => Err(io::Error::from_raw_os_error(libc::ESTALE)),
        }
    }

    /// The length of the file, if it is this one that the descriptor means.
    fn is_at(&self, descriptor: libc::c_int) -> Option<u64> {
        let status = output::status(descriptor).ok()?;
        ((status.st_dev, status.st_ino) == self.identity).then_some(status.st_size.cast_unsigned())
    }

    /// Sees to it that a line of `bytes` fits behind the `length` bytes of the file, and the last record behind it. On a
    /// full disk a write would fail when it is too late to say so.
    fn make_room(&self, descriptor: libc::c_int, length: u64, bytes: u64) -> io::Result<()> {
        let needed = length.saturating_add(bytes).saturating_add(RESERVE);
        let limit = output::file_size_limit();
        if needed > limit {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let room = self.room.load(Ordering::Relaxed);
        if needed <= room {
            return Ok(());
        }
        let no_room = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        let ahead = needed.saturating_add(STEP).min(limit);
        let reserved = match output::reserve(descriptor, length, ahead) {
            Err(error) if no_room(&error) => output::reserve(descriptor, length, needed).map(|()| needed),
            reserved => reserved.map(|()| ahead),
        };
        match reserved {
            Ok(end) => {
                self.room.fetch_max(end, Ordering::Relaxed);
                Ok(())
            }
            Err(error) if no_room(&error) => Err(error),
            // This file system cannot; a write will tell.
            Err(_) => {
                self.room.store(u64::MAX, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

fn open(path: &Path) -> io::Result<LogFile> {
    let created = OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path);
    let file = match created {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => begun_before_exec(path).ok_or(error)?,
        other => other?,
    };
    let status = output::status(file.as_raw_fd())?;
    let birth = output::birth(file.as_raw_fd());
    Ok(LogFile {
        path: path.to_owned(),
        descriptor: AtomicI32::new(high(file).map_or(BY_PATH, IntoRawFd::into_raw_fd)),
        identity: (status.st_dev, status.st_ino),
        birth,
        torn: AtomicBool::new(false),
        lost: AtomicU64::new(0),
        full: AtomicBool::new(false),
        room: AtomicU64::new(0),
    })
}

/// The log of this process from before `exec`: a file of this user's with no other name, whose first record names this
/// process's number and a time in its life. (A process that had the number earlier is not alive any more.)
fn begun_before_exec(path: &Path) -> Option<File> {
    let file = OpenOptions::new()
        .read(true)
        .append(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)
        .ok()?;
    let status = output::status(file.as_raw_fd()).ok()?;
    // SAFETY: geteuid has no preconditions.
    let ours = status.st_uid == unsafe { libc::geteuid() };
    if !ours || status.st_mode & libc::S_IFMT != libc::S_IFREG || status.st_nlink != 1 {
        return None;
    }
    let mut first = Vec::new();
    BufReader::new(&file).take(1 << 20).read_until(b'\n', &mut first).ok()?;
    let record = Record::from_json(&first).ok()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    // The kernel counts the start of a process in hundredths of a second.
    let in_our_life = record.t >= now - clock::uptime() - 0.02;
    (record.pid == std::process::id() && in_our_life).then_some(file)
}

/// `file` under a high number; `None` where the process may not have so many.
fn high(file: File) -> Option<OwnedFd> {
    output::duplicate(&file, DESCRIPTOR_FLOOR).ok()
}

/// Writes every event it is shown into a [`LogFile`].
pub(super) struct JsonLines {
    file: LogFile,
}

impl JsonLines {
    pub(super) fn new(file: LogFile) -> Self {
        JsonLines { file }
    }
}

impl<S: Subscriber> Layer<S> for JsonLines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let _sheltered = cancel::shelter();
        let mut line = head(match *event.metadata().level() {
            tracing::Level::ERROR => Level::Error,
            tracing::Level::WARN => Level::Warn,
            tracing::Level::INFO => Level::Info,
            tracing::Level::DEBUG => Level::Debug,
            tracing::Level::TRACE => Level::Trace,
        });
        let mut fields = Fields { line: &mut line, named: false, told: false };
        event.record(&mut fields);
        let (named, told) = (fields.named, fields.told);
        if !named {
            line.extend_from_slice(b",\"event\":\"note\"");
        }
        if !told {
            line.extend_from_slice(b",\"message\":\"\"");
        }
        line.push(b'}');
        self.file.append(&line);
    }
}

/// Why lines are missing behind it.
fn full_record(error: &io::Error) -> Vec<u8> {
    record(&LogFull { why: error.to_string() }, "no room for the lines that follow")
}

/// How many are missing before it.
fn lost_record(lines: u64, error: &io::Error) -> Vec<u8> {
    record(&LogLost { lines, why: error.to_string() }, &format!("{lines} lines are missing here"))
}

/// A whole line about the log itself, which comes past the filters.
fn record<E: Written>(event: &E, message: &str) -> Vec<u8> {
    let mut line = head(E::LEVEL);
    for (name, value) in [("event", E::NAME), ("message", message)] {
        line.extend_from_slice(format!(",\"{name}\":{}", serde_json::Value::from(value)).as_bytes());
    }
    event.write_fields(&mut line);
    line.extend_from_slice(b"}\n");
    line
}

/// Everything that comes before the event's own fields, with the object left open.
fn head(level: Level) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let level = level.word();
    let tid = gpupool_interpose::thread_number();
    // The process id is asked anew: a child after fork has another one and the same log.
    let (version, pid) = (gpupool_events::VERSION, std::process::id());
    let (seconds, micros) = (now.as_secs(), now.subsec_micros());
    let mut line = String::with_capacity(256);
    // Writing into a String cannot fail.
    let _ =
        write!(line, "{{\"v\":{version},\"t\":{seconds}.{micros:06},\"pid\":{pid},\"tid\":{tid},\"level\":\"{level}\"");
    line.into_bytes()
}

/// Puts fields into an open JSON object, straight into the line.
struct Fields<'a> {
    line: &'a mut Vec<u8>,
    named: bool,
    told: bool,
}

impl Fields<'_> {
    fn key(&mut self, name: &str) {
        self.line.push(b',');
        self.string(name);
        self.line.push(b':');
        self.named |= name == "event";
        self.told |= name == "message";
    }

    fn string(&mut self, text: &str) {
        // A Vec takes every byte and every str has a JSON form.
        let _ = serde_json::to_writer(&mut *self.line, text);
    }

    fn raw(&mut self, name: &str, json: fmt::Arguments<'_>) {
        self.key(name);
        self.line.extend_from_slice(json.to_string().as_bytes());
    }
}

impl Visit for Fields<'_> {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.raw(field.name(), format_args!("{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.raw(field.name(), format_args!("{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.raw(field.name(), format_args!("{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no NaN; `Value` turns it into null.
        self.raw(field.name(), format_args!("{}", serde_json::Value::from(value)));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.key(field.name());
        self.string(value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == FIELDS {
            self.line.extend_from_slice(format!("{value:?}").as_bytes());
            return;
        }
        self.record_str(field, &format!("{value:?}"));
    }
}
