//! The file: one record a line, one write a record.

use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use gpupool_config::{LogPath, LogPathNames};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::stderr;

/// Above the descriptors that a program opens itself, so that its first file still gets the number it has without us.
const DESCRIPTOR_FLOOR: libc::c_int = 256;

/// A log file of this process, created by it.
pub(super) struct LogFile {
    descriptor: OwnedFd,
    /// Device and inode. A program may close every descriptor and reuse our number for a file of its own; without this
    /// check our lines would end up in its data.
    identity: (libc::dev_t, libc::ino_t),
    /// A write stopped half way (disk full), so the next one starts a new line.
    torn: AtomicBool,
    lost: AtomicBool,
}

impl LogFile {
    /// Creates the file that `template` names for this process, mode 0600. An existing file is never opened, also not
    /// through a link: in a shared folder somebody else may have put it there.
    ///
    /// # Errors
    /// A sentence that names the variable, the path, the reason and what to do.
    pub(super) fn create(template: &LogPath) -> Result<(LogFile, PathBuf), String> {
        let executable = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let path = template.expand(LogPathNames {
            pid: std::process::id(),
            executable: executable.file_name().unwrap_or_default(),
            host: &host_name(),
        });
        // A relative path would mean another file once the program changes its folder.
        let path = std::path::absolute(&path).unwrap_or(path);
        let opened = open(&path).map_err(|error| {
            let advice = match error.kind() {
                io::ErrorKind::AlreadyExists => "remove it, or put %p into the name",
                io::ErrorKind::NotFound => "create the folder, or choose another path",
                _ => "choose a path that this user may write",
            };
            let template = template.template().display();
            format!(
                "GPUPOOL_LOG_FILE={template}: can not create {}: {error}; {advice}. Going on without it",
                path.display()
            )
        })?;
        Ok((opened, path))
    }

    #[cfg(test)]
    pub(super) fn number(&self) -> libc::c_int {
        self.descriptor.as_raw_fd()
    }

    /// Appends one line with one `write`, so that lines of several threads can not mix.
    fn append(&self, line: &mut Vec<u8>) {
        line.push(b'\n');
        if identity(self.descriptor.as_raw_fd()).ok() != Some(self.identity) {
            if !self.lost.swap(true, Ordering::Relaxed) {
                stderr::say(
                    libc::STDERR_FILENO,
                    "warning",
                    "the program closed the log file; nothing more is written to it",
                );
            }
            return;
        }
        if self.torn.swap(false, Ordering::Relaxed) {
            line.insert(0, b'\n');
        }
        if stderr::write_once(self.descriptor.as_raw_fd(), line) < line.len() {
            self.torn.store(true, Ordering::Relaxed);
        }
    }
}

fn open(path: &Path) -> io::Result<LogFile> {
    let file = OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)?;
    let identity = identity(file.as_raw_fd())?;
    Ok(LogFile { descriptor: moved_up(file), identity, torn: AtomicBool::new(false), lost: AtomicBool::new(false) })
}

/// The same file under a high number, or under its own where the process may not have so many.
fn moved_up(file: File) -> OwnedFd {
    // SAFETY: `file` owns an open descriptor; F_DUPFD_CLOEXEC takes an integer and touches no memory.
    let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, DESCRIPTOR_FLOOR) };
    if high < 0 {
        return file.into();
    }
    // SAFETY: fcntl succeeded, so `high` is a new descriptor that nobody else owns.
    unsafe { OwnedFd::from_raw_fd(high) }
}

fn identity(descriptor: libc::c_int) -> io::Result<(libc::dev_t, libc::ino_t)> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `status` is writable and of the size that fstat fills; a closed descriptor is answered with EBADF.
    if unsafe { libc::fstat(descriptor, status.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fstat returned 0, so it has filled `status`.
    let status = unsafe { status.assume_init() };
    Ok((status.st_dev, status.st_ino))
}

fn host_name() -> OsString {
    let mut name = vec![0u8; 256];
    // SAFETY: `name` is writable for the length given, less one byte that stays NUL whatever is written.
    let failed = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) } != 0;
    let length = if failed { 0 } else { name.iter().position(|byte| *byte == 0).unwrap_or(0) };
    name.truncate(length);
    OsString::from_vec(name)
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
        let mut line = head(event.metadata().level());
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
        self.file.append(&mut line);
    }
}

/// Everything that comes before the event's own fields, with the object left open.
fn head(level: &Level) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let level = match *level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    };
    // SAFETY: gettid takes nothing and can not fail.
    let tid = unsafe { libc::gettid() };
    // The process id is asked anew: a child after fork has another one and the same log.
    let (version, pid) = (gpupool_events::VERSION, std::process::id());
    let (seconds, micros) = (now.as_secs(), now.subsec_micros());
    let mut line = String::with_capacity(256);
    // Writing into a String can not fail.
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
        match field.name().strip_suffix(".json") {
            // Checked, since one broken value would cost the whole line.
            Some(name) if serde_json::from_str::<serde_json::Value>(value).is_ok() => {
                self.raw(name, format_args!("{value}"));
            }
            Some(name) => {
                self.key(name);
                self.string(value);
            }
            None => {
                self.key(field.name());
                self.string(value);
            }
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}
