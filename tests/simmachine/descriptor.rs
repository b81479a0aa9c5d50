//! Files that stay open for as long as a process is on the machine. A program that has closed its standard input, output or
//! error, as a daemon does, would get one of them under that number, and print into the machine's accounts.

use std::fs::OpenOptions;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// The first number that stands for nothing.
const FLOOR: i32 = 3;

/// A file under a number of its own, for reading and writing.
pub fn open(path: impl AsRef<Path>) -> Result<OwnedFd> {
    above_standard(OpenOptions::new().read(true).write(true).open(path)?)
}

/// The same description under a number that no standard stream has.
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
