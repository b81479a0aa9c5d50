//! How a process that runs under gpupool is asked to do something, and what it answers: `suspend` and `resume`.
//!
//! The command listens by a file beside the process's metrics page, which is the user's alone, and rings at the page; the process connects
//! ([`gpupool_wire::control`]). Who connects is known by the kernel's word, so nobody else's process is taken for it.

use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use gpupool_config::format_size;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Life, ring, stat};
use gpupool_wire::Socket;
use gpupool_wire::control::{ROOM, Reply, Request};
use gpupool_wire::socket::{Failure as Unheard, wait};
use rustix::fs::{AtFlags, Gid, Uid, chownat, unlinkat};
use serde::Serialize;

use crate::failure::{Failure, complain};
use crate::pages::{Listed, Pages};
use crate::stdout;
use crate::terminal;

/// How long a process has to connect. Its agent does so as soon as it runs: it may be at another request, or in a call of the driver.
const TO_ANSWER: Duration = Duration::from_secs(10);
/// How often it is looked at while it does what it was asked.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is rung for meanwhile.
const RING: Duration = Duration::from_millis(50);

/// What became of one process.
#[derive(Clone, Debug, Serialize)]
pub struct Told {
    pub pid: u32,
    /// Why nothing was done; what follows is 0 then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Bytes that moved.
    pub bytes: u64,
    /// Bytes that were to, and did not.
    pub stayed_bytes: u64,
    pub microseconds: u64,
}

/// The processes with these numbers, each once.
///
/// # Errors
/// One of them does not run under gpupool, or cannot be asked from here.
pub fn find(pids: &[u32]) -> Result<Vec<Listed>, Failure> {
    let look = Pages::new().look();
    let mut found: Vec<Listed> = Vec::new();
    for pid in pids {
        if found.iter().any(|known| known.told.process.identity.pid == *pid) {
            continue;
        }
        let mut rows =
            look.rows.iter().filter(|row| row.told.process.identity.pid == *pid && row.state != Life::Elsewhere);
        let Some(row) = rows.next() else {
            let version = look.skipped.iter().find(|skipped| skipped.why.contains(&format!("/{pid}-")));
            return Err(Failure::usage(match version {
                Some(skipped) => format!("process {pid} cannot be asked: {}", skipped.why),
                None => format!(
                    "no process {pid} that runs under gpupool and has allocated GPU memory is known to this user here; gpupool ps lists them"
                ),
            }));
        };
        if row.state == Life::Stopped {
            return Err(Failure::usage(format!(
                "process {pid} is stopped (SIGSTOP) and answers nobody; kill -CONT {pid}, then again"
            )));
        }
        found.push(row.clone());
    }
    Ok(found)
}

/// Asks all of these at once.
pub fn ask_all(rows: &[Listed], request: Request) -> Vec<Told> {
    let progress = Progress::new(rows.len());
    let told: Vec<Told> = std::thread::scope(|scope| {
        let asked: Vec<_> = rows
            .iter()
            .enumerate()
            .map(|(at, row)| {
                let progress = &progress;
                scope.spawn(move || told_by(row, ask(row, request, &|done, total| progress.say(at, done, total))))
            })
            .collect();
        let ended = asked.into_iter().zip(rows);
        ended
            .map(|(asked, row)| asked.join().unwrap_or_else(|_| told_by(row, Err("this command failed".to_owned()))))
            .collect()
    });
    progress.end();
    told
}

fn told_by(row: &Listed, answer: Result<Reply, String>) -> Told {
    let pid = row.told.process.identity.pid;
    let (error, [bytes, stayed_bytes, microseconds]) = match answer {
        Ok(Reply::Done { moved, stayed, microseconds }) => (None, [moved, stayed, microseconds]),
        Ok(Reply::Refused { why }) | Err(why) => (Some(why), [0; 3]),
        Ok(Reply::Progress { .. }) => (Some("it answered nothing at the end".to_owned()), [0; 3]),
    };
    Told { pid, error, bytes, stayed_bytes, microseconds }
}

/// The file that this command listens by, removed when it is over.
struct Door<'a> {
    folder: &'a Folder,
    name: String,
}

impl Drop for Door<'_> {
    fn drop(&mut self) {
        let _ = unlinkat(self.folder.fd(), &self.name, AtFlags::empty());
    }
}

fn ask(row: &Listed, request: Request, progress: &dyn Fn(u64, u64)) -> Result<Reply, String> {
    let words =
        |what: &str, error: &dyn std::fmt::Display| format!("{what} beside {} failed: {error}", row.page.display());
    let folder = Folder::around(&row.page).map_err(|refused| refused.to_string())?;
    let page = row.page.file_name().unwrap_or_default();
    let name = row.page.with_extension("call");
    let name = name.file_name().and_then(|name| name.to_str()).ok_or("its page has a name that is none")?;
    let page = folder.page_to_ring(page).map_err(|error| words("opening the page", &error))?;
    let listener = listen(&folder, name)?;
    let door = Door { folder: &folder, name: name.to_owned() };
    // Whoever is to connect needs to write to it.
    chownat(folder.fd(), name, Some(Uid::from_raw(row.owner)), None::<Gid>, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|error| words("giving the socket to its user", &error))?;
    let socket = accept(&listener, row, &page)?;
    drop(door);
    let none: [OwnedFd; 0] = [];
    socket.send(&request.encode(), &none).map_err(|error| words("asking it", &error))?;
    let mut buffer = [0; ROOM];
    loop {
        // For as long as it takes: it says how far it is, and its end is seen.
        let received = match socket.receive_by(&mut buffer, Instant::now() + LOOK) {
            Ok(received) => received.bytes,
            Err(Unheard::TimedOut) if stat(row.told.process.identity.pid).is_some_and(|stat| stat.state == b'T') => {
                return Err(
                    "it was stopped (SIGSTOP) meanwhile; once it goes on, it is as if nobody had asked".to_owned()
                );
            }
            Err(Unheard::TimedOut) => continue,
            Err(failure) => return Err(format!("the connection to it broke: {failure}")),
        };
        if received == 0 {
            return Err("it ended before it had answered, or will not be asked by this user".to_owned());
        }
        match Reply::decode(&buffer[..received]) {
            Ok(Reply::Progress { done, total }) => progress(done, total),
            Ok(reply) => return Ok(reply),
            Err(unread) => return Err(unread.to_string()),
        }
    }
}

fn listen(folder: &Folder, name: &str) -> Result<Socket, String> {
    for _ in 0..2 {
        match Socket::<OwnedFd>::listen_in(folder.fd(), name) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => return Err(format!("listening in {} failed: {error}", folder.path().display())),
        }
        match Socket::<OwnedFd>::connect_in(folder.fd(), name) {
            // Left by a command that was killed.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                let _ = unlinkat(folder.fd(), name, AtFlags::empty());
            }
            _ => break,
        }
    }
    Err("another command is asking it at this moment".to_owned())
}

/// The process's connection.
fn accept(listener: &Socket, row: &Listed, page: &OwnedFd) -> Result<Socket, String> {
    let pid = row.told.process.identity.pid;
    let until = Instant::now() + TO_ANSWER;
    while Instant::now() < until {
        ring(std::os::fd::AsFd::as_fd(page))
            .map_err(|error| format!("its page {} cannot be rung at: {error}", row.page.display()))?;
        let _ = wait([listener], Some(RING));
        match listener.accept() {
            Ok(socket) => match socket.peer() {
                Ok(peer) if (peer.pid, peer.uid) == (pid, row.owner) => return Ok(socket),
                // Another command that looks whether somebody listens, or somebody who is not meant.
                _ => {}
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(format!("its connection failed: {error}")),
        }
    }
    Err(format!(
        "it did not answer within {} s: it may be stopped, have ended, or be at the end of a call of the driver",
        TO_ANSWER.as_secs()
    ))
}

/// How far all of them are together, on a terminal.
struct Progress {
    shown: bool,
    rows: Mutex<Vec<(u64, u64)>>,
    begun: Instant,
}

impl Progress {
    fn new(rows: usize) -> Self {
        let shown = std::io::stderr().is_terminal();
        Self { shown, rows: Mutex::new(vec![(0, 0); rows]), begun: Instant::now() }
    }

    fn say(&self, at: usize, done: u64, total: u64) {
        let Ok(mut rows) = self.rows.lock() else { return };
        rows[at] = (done, total);
        if self.shown {
            let (done, total) = rows.iter().fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
            let rate = (done as f64 / self.begun.elapsed().as_secs_f64().max(1e-3)) as u64;
            let line = format!("\r{} of {}, {}/s   ", format_size(done), format_size(total), format_size(rate));
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }

    fn end(&self) {
        if self.shown && self.rows.lock().is_ok_and(|rows| rows.iter().any(|row| row.1 > 0)) {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }
}

/// Prints what became of each; `did` and `did_not` stand behind sizes. Whether all of it was done.
///
/// # Errors
/// Nothing can be printed.
pub fn print(all: &[Told], json: bool, did: &str, did_not: &str) -> Result<bool, Failure> {
    if json {
        let text = serde_json::to_string_pretty(all).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{}\n", terminal::clean_json(&text)))?;
    }
    for Told { pid, error, bytes, stayed_bytes, microseconds } in all {
        if let Some(error) = error {
            complain(&format!("process {pid}: {error}"));
            continue;
        }
        if json {
            continue;
        }
        let seconds = *microseconds as f64 * 1e-6;
        let rate = (*bytes as f64 / seconds.max(1e-6)) as u64;
        let stayed =
            if *stayed_bytes > 0 { format!("; {} {did_not}", format_size(*stayed_bytes)) } else { String::new() };
        stdout::print(&format!(
            "process {pid}: {} {did} in {seconds:.2} s ({}/s){stayed}\n",
            format_size(*bytes),
            format_size(rate)
        ))?;
    }
    Ok(all.iter().all(|told| told.error.is_none()))
}
