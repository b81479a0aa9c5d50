//! Reading a log, line by line, whatever shape its writer left it in.

use std::fmt;
use std::io::{self, BufRead, Read as _};

use crate::record::{LONGEST, Record, Wrong};

/// The records of one log. A bad line is an error of its own and the next line is read after it; only a read error ends
/// the log early.
pub struct Reader<R> {
    input: R,
    line: u64,
    buffer: Vec<u8>,
    ended: bool,
}

/// A line that is no record.
#[derive(Debug)]
pub struct LineError {
    /// Its number, the first line being 1.
    pub line: u64,
    /// What is wrong with it.
    pub wrong: Wrong,
}

impl fmt::Display for LineError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "line {}: {}", self.line, self.wrong)
    }
}

impl std::error::Error for LineError {}

impl<R: BufRead> Reader<R> {
    /// Reads from the start of `input`.
    pub fn new(input: R) -> Self {
        Reader { input, line: 0, buffer: Vec::new(), ended: false }
    }

    fn read(&mut self) -> Option<Result<Record, Wrong>> {
        loop {
            self.buffer.clear();
            self.line += 1;
            match self.input.by_ref().take(LONGEST as u64).read_until(b'\n', &mut self.buffer) {
                Ok(0) => return None,
                Ok(LONGEST) if !self.buffer.ends_with(b"\n") => return Some(Err(self.pass_over_line())),
                Ok(_) if self.buffer.trim_ascii().is_empty() => {}
                Ok(_) => break,
                Err(error) => return Some(Err(self.end(error))),
            }
        }
        let whole = self.buffer.ends_with(b"\n");
        Some(match Record::from_json(&self.buffer) {
            // Every record is one write that ends in a line feed, so a bad line without one was cut off, if it is one.
            Err(Wrong::Json(_)) if !whole && self.buffer.starts_with(b"{") => Err(Wrong::Truncated),
            other => other,
        })
    }

    fn end(&mut self, error: io::Error) -> Wrong {
        self.ended = true;
        Wrong::Read(error)
    }

    /// Goes on behind a line that does not fit.
    fn pass_over_line(&mut self) -> Wrong {
        match self.input.skip_until(b'\n') {
            Ok(_) => Wrong::TooLong,
            Err(error) => self.end(error),
        }
    }
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Record, LineError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let read = self.read()?;
        Some(read.map_err(|wrong| LineError { line: self.line, wrong }))
    }
}
