//! Whoever watches over the machine's memory says that it is short, in systemd's protocol (`MEMORY_PRESSURE_WATCH`): what can be spared goes back then.
//!
//! The variable names a file: one of the kernel's that tells of pressure (PSI; `MEMORY_PRESSURE_WRITE` is written to it and says from when on), a FIFO or a socket.
//! The agent sleeps at its page, so that others can ring, and waits for no descriptor; it looks at this one while there is something to spare. What was said
//! meanwhile is there then.
//!
//! What can be spared is freed memory that the pool keeps, on GPUs and on the host, what a suspended program was in there, and freed pinned memory; each as far as no GPU may be at work on it.

use crate::log;
use crate::serve::ipc::Own;
use crate::serve::memory::idle;
use crate::serve::pinned;
use crate::suspend::spare;
use crate::watch::capture;
use gpupool_config::format_size;
use gpupool_events::MemoryPressure;
use gpupool_wire::Keep;
use once_cell::race::OnceBox;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often it is looked while there is something to spare. The kernel tells of pressure once in two seconds at most, as systemd asks it to.
const PERIOD: Duration = Duration::from_millis(500);
/// The longest that is written to the file.
const MOST: usize = 4096;

/// What the environment said as the process started: the file, and what is written to it; or what it names that cannot be watched, and why.
type Said = std::result::Result<(PathBuf, Vec<u8>), (PathBuf, &'static str)>;
static SAID: OnceBox<Option<Said>> = OnceBox::new();

/// Reads that, before the program can change it.
pub fn prepare() {
    let _ = SAID.set(Box::new(said(|name| std::env::var_os(name))));
}

/// Whether anybody would say so.
pub fn is_wanted() -> bool {
    SAID.get().is_some_and(Option::is_some)
}

fn said(variable: impl Fn(&str) -> Option<OsString>) -> Option<Said> {
    let path = PathBuf::from(variable("MEMORY_PRESSURE_WATCH")?);
    // Which says that nothing is to be watched.
    if path == Path::new("/dev/null") {
        return None;
    }
    if !path.is_absolute() {
        return Some(Err((path, "it is no absolute path")));
    }
    let words = variable("MEMORY_PRESSURE_WRITE").map_or_else(|| Some(Vec::new()), |text| decoded(&text));
    Some(match words {
        Some(words) => Ok((path, words)),
        None => Err((path, "MEMORY_PRESSURE_WRITE is no base64 of 4096 bytes at most")),
    })
}

/// What base64 stands for; `None` where this is none, or too long.
fn decoded(text: &OsStr) -> Option<Vec<u8>> {
    let (mut bits, mut count, mut bytes) = (0u32, 0, Vec::new());
    let text = text.as_bytes();
    let letters = text.iter().position(|byte| *byte == b'=').map_or(text, |end| &text[..end]);
    for letter in letters {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    (bytes.len() <= MOST && text.len().is_multiple_of(4)).then_some(bytes)
}

/// What is looked at.
pub struct Pressure {
    file: Own,
    /// Whether it says so by something that can be read, and not as an exception.
    is_read: bool,
}

/// Whether a file is one of the kernel's own (`/proc/pressure/memory`, a control group's `memory.pressure`). Any other would be written over, and tells
/// of no pressure.
fn is_the_kernels(path: &Path) -> Result<bool> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut about = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the path ends with a NUL, and the room is for what the call writes.
    if unsafe { libc::statfs(path.as_ptr(), about.as_mut_ptr()) } != 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the call has succeeded, and has written all of it.
    let kind = unsafe { about.assume_init() }.f_type;
    Ok([libc::PROC_SUPER_MAGIC, libc::CGROUP_SUPER_MAGIC, libc::CGROUP2_SUPER_MAGIC].contains(&kind))
}

impl Pressure {
    /// `None` where nobody says anything, or what was named cannot be watched, which is told once.
    pub fn new() -> Option<Self> {
        let (path, why) = match SAID.get()?.as_ref()? {
            Ok((path, words)) => match Self::open(path, words) {
                Ok(opened) => return Some(opened),
                Err(error) => (path, error.to_string()),
            },
            Err((path, why)) => (path, (*why).to_owned()),
        };
        tracing::warn!(
            target: "gpupool::memory", about = "pressure",
            "MEMORY_PRESSURE_WATCH={}: {why}; memory is given back as if nobody told of pressure", path.display()
        );
        None
    }

    fn open(path: &Path, words: &[u8]) -> Result<Self> {
        let kind = path.metadata()?.file_type();
        if kind.is_socket() {
            let mut socket = File::from(connect(path)?);
            socket.write_all(words)?;
            return Ok(Self { file: Own::keep(socket.into())?, is_read: true });
        }
        if !kind.is_file() && !kind.is_fifo() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "it is neither a file of the kernel's nor a FIFO nor a socket",
            ));
        }
        if kind.is_file() && !is_the_kernels(path)? {
            return Err(Error::new(ErrorKind::InvalidInput, "it is an ordinary file, which tells of nothing"));
        }
        // Whoever wrote to a FIFO would read that itself.
        let words = if kind.is_fifo() { &[][..] } else { words };
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        let mut file = File::options().read(true).write(!words.is_empty()).custom_flags(flags).open(path)?;
        file.write_all(words)?;
        Ok(Self { file: Own::keep(file.into())?, is_read: kind.is_fifo() })
    }

    /// Gives back what can be spared if somebody says that memory is short; how long nothing need be done. `None`: until something changes.
    pub fn look(&mut self) -> Option<Duration> {
        if self.is_told().ok()? {
            give_back();
        }
        is_any().then_some(PERIOD)
    }

    /// Whether somebody has said so since the last time.
    ///
    /// # Errors
    /// Nobody says anything here any more.
    fn is_told(&mut self) -> Result<bool> {
        if !self.file.is_there() {
            return Err(ErrorKind::NotFound.into());
        }
        let events = if self.is_read { libc::POLLIN } else { libc::POLLPRI };
        let mut entry = libc::pollfd { fd: self.file.as_fd().as_raw_fd(), events, revents: 0 };
        // SAFETY: one entry, a local, and no waiting.
        let answer = unsafe { libc::poll(&raw mut entry, 1, 0) };
        if answer <= 0 || entry.revents & events == 0 {
            return Ok(false);
        }
        if !self.is_read {
            // The kernel says both where the control group is gone.
            return Ok(entry.revents & libc::POLLERR == 0);
        }
        // What it says is that it says something.
        let (mut buffer, mut sum) = ([0u8; 512], 0);
        loop {
            // SAFETY: the buffer is a local of that length; the descriptor does not block.
            let bytes = unsafe { libc::read(self.file.as_fd().as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
            match usize::try_from(bytes) {
                Ok(0) if sum == 0 => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(0) | Err(_) => return Ok(sum > 0),
                Ok(bytes) => sum += bytes,
            }
        }
    }
}

/// A connection to whoever listens there, without waiting for it.
fn connect(path: &Path) -> Result<OwnedFd> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: all-zero is a valid value of this C struct.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // A zero ends it.
    if bytes.len() >= address.sun_path.len() {
        return Err(Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    address.sun_path.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from as libc::c_char);
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes integers and touches no memory.
    let number = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if number < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: socket succeeded, so this is a new descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address is a local of that size.
    let answer = unsafe { libc::connect(number, (&raw const address).cast(), length) };
    if answer == 0 { Ok(socket) } else { Err(Error::last_os_error()) }
}

/// Whether there is anything to spare.
fn is_any() -> bool {
    idle::freed().is_some_and(|freed| freed.is_any()) || pinned::is_any_unused() || spare::bytes() > 0
}

fn give_back() {
    let bytes = spare::reclaim("pressure")
        + idle::give_back_unused(None, u32::MAX, "pressure", "the machine's memory is short");
    // The driver has something locked meanwhile, which the child of a fork would have as well.
    let part = if capture::under_way() { None } else { idle::Part::begin() };
    let pinned = part.map_or(0, |_part| pinned::trim_quiet("pressure"));
    log::emit(|| {
        let [freed, unpinned] = [bytes, pinned].map(format_size);
        let text = format!(
            "memory is short on this machine: {freed} of the pool and {unpinned} of pinned memory were given back"
        );
        (MemoryPressure { bytes, pinned }, text)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_base64_says() {
        let of = |text: &str| decoded(OsStr::new(text));
        assert_eq!(of("c29tZSAyMDAwMDAgMjAwMDAwMAA=").as_deref(), Some(&b"some 200000 2000000\0"[..]));
        assert_eq!((of("").as_deref(), of("+/8=").as_deref()), (Some(&b""[..]), Some(&[0xfb, 0xff][..])));
        assert_eq!((of("c29tZ"), of("c29t ZSA=")), (None, None));
    }

    #[test]
    fn what_is_off_or_no_path_is_not_watched() {
        let of = |path: &'static str, words: Option<&'static str>| {
            said(|name| if name.ends_with("WATCH") { Some(path.into()) } else { words.map(OsString::from) })
        };
        assert!(of("/dev/null", None).is_none());
        assert!(matches!(of("run/it", None), Some(Err((_, "it is no absolute path")))));
        let text = "MEMORY_PRESSURE_WRITE is no base64 of 4096 bytes at most";
        assert!(matches!(of("/run/it", Some("!")), Some(Err((_, why))) if why == text));
        assert_eq!(of("/run/it", Some("YQ==")), Some(Ok(("/run/it".into(), b"a".to_vec()))));
        assert_eq!(said(|_| None), None);
    }
}
