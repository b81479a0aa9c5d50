//! Files that stay open for as long as a process is on the machine: their numbers, their mappings, and locks on their bytes.
//!
//! A program that has closed its standard input, output or error, as a daemon does, would get one of them under that number,
//! and print into the machine's accounts.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr::null_mut;

/// The first number that stands for nothing.
const FLOOR: i32 = 3;

/// A file under a number of its own, for reading and writing.
pub fn open(path: impl AsRef<Path>) -> Result<OwnedFd> {
    above_standard(OpenOptions::new().read(true).write(true).open(path)?)
}

/// The open file under a number that no standard stream has.
pub fn above_standard(file: impl Into<OwnedFd>) -> Result<OwnedFd> {
    let file = file.into();
    if file.as_raw_fd() >= FLOOR {
        return Ok(file);
    }
    // SAFETY: `file` owns an open descriptor; F_DUPFD_CLOEXEC takes an integer and touches no memory.
    let number = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, FLOOR) };
    if number < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the descriptor was made just now, and nobody else closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A file of zeros in memory, of this process until its descriptor is passed on.
pub fn memory_file(name: &str, bytes: u64) -> Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: the name is a C string; the call returns a new descriptor or -1.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else closes it.
    let file = above_standard(unsafe { OwnedFd::from_raw_fd(fd) })?;
    resize(&file, bytes)?;
    Ok(file)
}

/// Makes a file this long. Not beyond the limit on files, which the kernel answers with a signal that ends the program.
pub fn resize(file: &OwnedFd, bytes: u64) -> Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the output is a local of the right type.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0 && limit.rlim_cur < bytes {
        return Err(Error::new(
            ErrorKind::FileTooLarge,
            format!("files may have {} bytes only; raise that limit (ulimit -f)", limit.rlim_cur),
        ));
    }
    let bytes = i64::try_from(bytes).map_err(|_| Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: plain system call on a descriptor we own.
    if unsafe { libc::ftruncate(file.as_raw_fd(), bytes) } == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Takes room on the disk for a stretch of a file, of which a mapping would have the kernel end the program where there is none.
/// Where the file system cannot do so, room is taken as it is touched.
pub fn reserve(file: &OwnedFd, start: usize, bytes: usize) -> Result<()> {
    loop {
        // SAFETY: plain system call on a descriptor we own.
        if unsafe { libc::fallocate64(file.as_raw_fd(), 0, start as i64, bytes as i64) } == 0 {
            return Ok(());
        }
        match Error::last_os_error() {
            error if error.kind() == ErrorKind::Interrupted => {}
            error if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => return Ok(()),
            error => return Err(error),
        }
    }
}

/// Maps a stretch of a memory file; only what is touched is taken.
pub fn map_file(file: &OwnedFd, offset: u64, bytes: u64) -> Option<usize> {
    map_at(bytes, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd(), offset)
}

pub fn map(bytes: u64, flags: i32, descriptor: RawFd) -> Option<usize> {
    map_at(bytes, flags, descriptor, 0)
}

fn map_at(bytes: u64, flags: i32, descriptor: RawFd, offset: u64) -> Option<usize> {
    if bytes == 0 {
        return Some(0);
    }
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address the kernel picks replaces nothing.
    let address =
        unsafe { libc::mmap(null_mut(), bytes as usize, access, flags, descriptor, i64::try_from(offset).ok()?) };
    (address != libc::MAP_FAILED).then_some(address as usize)
}

fn range_lock(kind: i32, start: i64, bytes: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: bytes,
        l_pid: 0,
    }
}

/// Takes or ends a lock of the descriptor's description: it goes with its last holder, however that ends.
pub fn lock_bytes(file: &impl AsRawFd, kind: i32, start: i64, bytes: i64, command: i32) -> Result<()> {
    let lock = range_lock(kind, start, bytes);
    // SAFETY: plain system call on a descriptor we own, with a description that outlives it.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw const lock) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Whether another description has a lock there.
pub fn is_locked(descriptor: RawFd, start: i64, bytes: i64) -> bool {
    let mut lock = range_lock(libc::F_WRLCK, start, bytes);
    // SAFETY: plain system call with a description that outlives it. It asks whether a lock could be had and takes none.
    let asked = unsafe { libc::fcntl(descriptor, libc::F_OFD_GETLK, &raw mut lock) };
    asked == 0 && lock.l_type != libc::F_UNLCK as libc::c_short
}
