//! Writing to stdout, whoever reads it.

use std::io::{self, Write};

use crate::failure::Failure;
use crate::inherited;

/// Writes to stdout at once. A reader that has left (`| head`) is no failure: it has what it wanted.
///
/// # Errors
/// Anything else that stops the write, such as a full disk.
pub fn print(text: &str) -> Result<(), Failure> {
    is_there()?;
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).or_else(unless_left)
}

/// Writes a line to stdout at once. `false`: its reader has left, and nobody wants another one.
///
/// # Errors
/// Anything else that stops the write.
pub fn print_line(line: &str) -> Result<bool, Failure> {
    is_there()?;
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) => unless_left(error).map(|()| false),
    }
}

/// Whether anything that is printed goes anywhere.
///
/// # Errors
/// Standard output was closed when the command was started.
pub fn is_there() -> Result<(), Failure> {
    if inherited::has_no_stdout() {
        Err(Failure::broken("stdout: it is closed; nothing can be printed"))
    } else {
        Ok(())
    }
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
