//! The other process: a child that plays its own sequence, and now and then meets this one to share memory.

use crate::play::Case;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

/// Lines to and from the other process. An end that is gone reads as empty lines: what is missing shows in the transcript.
pub struct Channel {
    from: Box<dyn BufRead + Send>,
    to: Box<dyn Write + Send>,
}

impl Channel {
    pub fn send(&mut self, line: &str) {
        let _ = writeln!(self.to, "{line}").and_then(|()| self.to.flush());
    }

    pub fn receive(&mut self) -> String {
        let mut line = String::new();
        let _ = self.from.read_line(&mut line);
        line.trim_end().to_owned()
    }

    /// The child's own end.
    pub fn to_parent() -> Self {
        Self { from: Box::new(BufReader::new(std::io::stdin())), to: Box::new(std::io::stdout()) }
    }
}

/// The child, and the transcript that it writes to its standard error, which is otherwise unused.
pub struct Peer {
    child: Child,
    transcript: std::thread::JoinHandle<String>,
}

impl Peer {
    pub fn start(case: &Case) -> (Self, Channel) {
        let exe = std::env::current_exe().unwrap_or_else(|error| panic!("own path: {error}"));
        let mut child = Command::new(exe)
            .args(["peer".to_owned(), case.arguments()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("no second process: {error}"));
        let pipe = "a pipe was asked for";
        let (to, from): (ChildStdin, _) = match (child.stdin.take(), child.stdout.take()) {
            (Some(to), Some(from)) => (to, from),
            _ => unreachable!("{pipe}"),
        };
        let mut said = child.stderr.take().unwrap_or_else(|| unreachable!("{pipe}"));
        let transcript = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = said.read_to_string(&mut text);
            text
        });
        (Self { child, transcript }, Channel { from: Box::new(BufReader::new(from)), to: Box::new(to) })
    }

    /// Its transcript, once it has ended: the lines that begin like one, since the shim warns on stderr, too.
    pub fn end(mut self) -> String {
        let text = self.transcript.join().unwrap_or_default();
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let is_told = |line: &&str| ["round ", "  t", "left:", "panic:"].iter().any(|start| line.starts_with(start));
        let lines: String = text.lines().filter(is_told).map(|line| format!("{line}\n")).collect();
        format!("second process: {status}\n{lines}")
    }
}
