//! Writing to stdout, whoever reads it.

use std::io::{self, Write};

use crate::failure::Failure;

/// Writes to stdout at once. A reader that has left (`| head`) is no failure: it has what it wanted.
///
/// # Errors
/// Anything else that stops the write, such as a full disk.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).or_else(unless_left)
}

/// A write to stdout that failed, unless because its reader has left.
///
/// # Errors
/// Every other reason.
pub fn unless_left(error: io::Error) -> Result<(), Failure> {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Ok(()),
        _ => Err(Failure::broken(format!("stdout: {error}"))),
    }
}
