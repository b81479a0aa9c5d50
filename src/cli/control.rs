//! How a process that runs under gpupool is asked to do something, and what it answers: `suspend`, `resume`, `checkpoint`, `set`, `drain`, `undrain`.
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
use gpupool_wire::control::{ROOM, Reply, Request, Target};
use gpupool_wire::socket::{Failure as Unheard, wait};
use rustix::fs::{AtFlags, FlockOperation, Gid, Uid, chownat, flock, unlinkat};
use serde::Serialize;

use crate::failure::{Failure, complain};
use crate::pages::{Listed, Pages};
use crate::stdout;
use crate::terminal;

/// How long a process has to connect. Its agent does so as soon as it runs: it may be at another request, or in a call of the driver.
const TO_ANSWER: Duration = Duration::from_secs(10);
/// How long it may say nothing while it moves memory, or while nothing is to be waited for: what moves at a time takes less than a second.
const TO_GO_ON: Duration = Duration::from_secs(60);
/// How long it may say nothing once it has begun to write to a disk: at the end that is waited for until it has all of it for good.
const TO_WRITE: Duration = Duration::from_secs(600);
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
    /// Of these, how long its work on the GPUs was waited for.
    pub waited_microseconds: u64,
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

/// Asks all of these at once, and waits for as long as they take.
pub fn ask_all(rows: &[Listed], request: &Request) -> Vec<Told> {
    replies(rows, request, None).into_iter().zip(rows).map(|(reply, row)| told_by(row, reply)).collect()
}

/// What each of these answers, all asked at once; from `until` on nobody is waited for.
pub fn replies(rows: &[Listed], request: &Request, until: Option<Instant>) -> Vec<Result<Reply, String>> {
    let progress = Progress::new(rows.len());
    let told = side_by_side(rows, |at, row| ask(row, request, until, &|done, total| progress.say(at, done, total)));
    progress.end();
    told
}

/// What a process answers that was asked something else.
pub const OTHER_ANSWER: &str = "it answered something else than what it was asked";

fn told_by(row: &Listed, answer: Result<Reply, String>) -> Told {
    let pid = row.told.process.identity.pid;
    let (error, [bytes, stayed_bytes, microseconds, waited_microseconds]) = match answer {
        Ok(Reply::Done { moved, stayed, microseconds, waited }) => (None, [moved, stayed, microseconds, waited]),
        Ok(Reply::Refused { why }) | Err(why) => (Some(why), [0; 4]),
        Ok(_) => (Some(OTHER_ANSWER.to_owned()), [0; 4]),
    };
    Told { pid, error, bytes, stayed_bytes, microseconds, waited_microseconds }
}

/// Asks one process, with its progress on a terminal.
///
/// # Errors
/// Nobody answered; why, in words.
pub fn ask_one(row: &Listed, request: &Request) -> Result<Reply, String> {
    let progress = Progress::new(1);
    let reply = ask(row, request, None, &|done, total| progress.say(0, done, total));
    progress.end();
    reply
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

fn ask(row: &Listed, request: &Request, until: Option<Instant>, progress: &dyn Fn(u64, u64)) -> Result<Reply, String> {
    let silence = match (until, request) {
        // It has that long and no longer, whatever it says meanwhile.
        (Some(until), _) => until.saturating_duration_since(Instant::now()),
        (None, Request::Suspend { patience, .. } | Request::Checkpoint { patience, .. }) => {
            TO_GO_ON + Duration::from_millis(*patience)
        }
        (None, _) => TO_GO_ON,
    };
    let socket = connect(row, request, until)?;
    hear(row, &socket, request, silence, until, progress)
}

/// A connection to the process, which has been asked.
fn connect(row: &Listed, request: &Request, until: Option<Instant>) -> Result<Socket, String> {
    let words =
        |what: &str, error: &dyn std::fmt::Display| format!("{what} beside {} failed: {error}", row.page.display());
    let folder = Folder::around(&row.page).map_err(|refused| refused.to_string())?;
    let page = row.page.file_name().unwrap_or_default();
    let name = row.page.with_extension("call");
    let name = name.file_name().and_then(|name| name.to_str()).ok_or("its page has a name that is none")?;
    let page = folder.page_to_ring(page).map_err(|error| words("opening the page", &error))?;
    // One command at a time listens by that name. Who has just made the file and does not listen yet looks like one that was killed, so the
    // file cannot say who has the turn.
    flock(&page, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| "another command is asking it at this moment".to_owned())?;
    let listener = listen(&folder, name)?;
    let door = Door { folder: &folder, name: name.to_owned() };
    // Whoever is to connect needs to write to it.
    chownat(folder.fd(), name, Some(Uid::from_raw(row.owner)), None::<Gid>, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|error| words("giving the socket to its user", &error))?;
    let socket = accept(&listener, row, &page, until)?;
    drop(door);
    drop(page);
    say(&socket, request)?;
    Ok(socket)
}

fn say(socket: &Socket, request: &Request) -> Result<(), String> {
    let none: [OwnedFd; 0] = [];
    socket.send(&request.encode(), &none).map_err(|error| format!("the connection to it broke: {error}"))
}

/// Its next message, which comes within `silence` of the last one.
fn next(row: &Listed, socket: &Socket, silence: Duration) -> Result<Reply, String> {
    let mut buffer = [0; ROOM];
    let until = Instant::now() + silence;
    loop {
        // Its end is seen at once, and a stop now and then.
        let received = match socket.receive_by(&mut buffer, until.min(Instant::now() + LOOK)) {
            Ok(received) => received.bytes,
            Err(Unheard::TimedOut) if stat(row.told.process.identity.pid).is_some_and(|stat| stat.state == b'T') => {
                return Err(
                    "it was stopped (SIGSTOP) meanwhile; once it goes on, it is as if nobody had asked".to_owned()
                );
            }
            Err(Unheard::TimedOut) if Instant::now() >= until => {
                return Err(format!(
                    "it has said nothing for {} s: a call of the driver in it does not return, perhaps because it waits for work of \
                     another process, or its disk does not; once that is over, it is as if nobody had asked, and an image that was begun is \
                     finished",
                    silence.as_secs()
                ));
            }
            Err(Unheard::TimedOut) => continue,
            Err(failure) => return Err(format!("the connection to it broke: {failure}")),
        };
        if received == 0 {
            return Err("it ended before it had answered, or will not be asked by this user".to_owned());
        }
        return Reply::decode(&buffer[..received]).map_err(|unread| unread.to_string());
    }
}

/// What becomes of it in the end.
fn hear(
    row: &Listed,
    socket: &Socket,
    request: &Request,
    silence: Duration,
    limit: Option<Instant>,
    progress: &dyn Fn(u64, u64),
) -> Result<Reply, String> {
    let mut silence = silence;
    loop {
        let left = limit.map_or(silence, |limit| limit.saturating_duration_since(Instant::now()).min(silence));
        match next(row, socket, left)? {
            Reply::Progress { done, total } => {
                progress(done, total);
                if let Request::Checkpoint { .. } | Request::Suspend { target: Target::Folder(_), .. } = request {
                    silence = TO_WRITE;
                }
            }
            reply => return Ok(reply),
        }
    }
}

/// How long all programs that are suspended together have to stop at the same moment, before those that have are let go on: somebody may wait
/// for work of theirs. They give up before that, unless a call of the driver keeps them from it.
const MOMENT: Duration = Duration::from_secs(4);
/// How long they are left alone then, at least, and how much longer by chance.
const PAUSE: Duration = Duration::from_millis(20);
const CHANCE: Duration = Duration::from_millis(60);

/// Suspends all of these at the same moment, or none of them: programs that work on something together wait for each other on their GPUs. They
/// have `patience` to come to rest all at once.
pub fn suspend_together(rows: &[Listed], target: &Target, patience: Duration) -> Vec<Told> {
    let milliseconds = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    let request = Request::Suspend { target: target.clone(), patience: milliseconds, together: true };
    let connected = side_by_side(rows, |_, row| connect(row, &request, None));
    let sockets: Vec<Socket> = match connected.iter().any(Result::is_err) {
        false => connected.into_iter().flatten().collect(),
        true => return none_of(rows, connected.into_iter().map(Result::err).collect()),
    };
    if let Err(why) = all_at_rest(rows, &sockets, Instant::now() + patience) {
        // The end of the connection lets them go on.
        return none_of(rows, why);
    }
    let progress = Progress::new(rows.len());
    let told = side_by_side(rows, |at, row| {
        let say = |done, total| progress.say(at, done, total);
        told_by(row, hear(row, &sockets[at], &request, TO_GO_ON, None, &say))
    });
    progress.end();
    told
}

/// Has them stop at the same moment, again and again, and stay so once all have.
fn all_at_rest(rows: &[Listed], sockets: &[Socket], until: Instant) -> Result<(), Vec<Option<String>>> {
    loop {
        let why = match one_try(rows, sockets, until)? {
            None => return Ok(()),
            Some(why) => why,
        };
        if Instant::now() >= until {
            return Err(why
                .into_iter()
                .map(|why| why.map(|why| format!("it did not come to rest in time: {why}")))
                .collect());
        }
        // Whatever they do again and again, it is not always the same moment of it.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        std::thread::sleep(PAUSE + CHANCE.mul_f64(f64::from(now.subsec_micros() % 1000) / 1000.0));
    }
}

/// Has them stop at this moment. `None`: all have, and stay so; else what kept each one from it, for those that it did. Fails where one of them
/// never will.
fn one_try(
    rows: &[Listed],
    sockets: &[Socket],
    until: Instant,
) -> Result<Option<Vec<Option<String>>>, Vec<Option<String>>> {
    let said = |request: &Request| -> Result<(), Vec<Option<String>>> {
        let say = |at: usize, row: &Listed| {
            let error = say(&sockets[at], request).err()?;
            // Who does not listen any more has said why: behind the word that there is something it has not heard.
            let mut said = (0..2).map(|_| next(row, &sockets[at], MOMENT));
            Some(said.find_map(|said| said.ok().and_then(|reply| reply.refusal())).unwrap_or(error))
        };
        let failed = side_by_side(rows, say);
        if failed.iter().all(Option::is_none) { Ok(()) } else { Err(failed) }
    };
    said(&Request::Close)?;
    let answers = side_by_side(rows, |at, row| next(row, &sockets[at], MOMENT));
    if answers.iter().all(|answer| matches!(answer, Ok(Reply::Quiet))) {
        said(&Request::Go)?;
        return Ok(None);
    }
    said(&Request::Open)?;
    // Who could not answer, since it waited for one that had stopped, can now.
    let answers = side_by_side(rows, |at, row| match &answers[at] {
        Err(_) => next(row, &sockets[at], until.saturating_duration_since(Instant::now()) + TO_GO_ON),
        answer => answer.clone(),
    });
    let has_failed = |answer: &Result<Reply, String>| !matches!(answer, Ok(Reply::Quiet | Reply::Busy { .. }));
    let why = |answer: Result<Reply, String>| match answer {
        Ok(Reply::Busy { why } | Reply::Refused { why }) | Err(why) => Some(why),
        Ok(Reply::Quiet) => None,
        Ok(_) => Some("it answered nothing that was asked".to_owned()),
    };
    if answers.iter().any(has_failed) {
        let only = |answer| if has_failed(&answer) { why(answer) } else { None };
        return Err(answers.into_iter().map(only).collect());
    }
    // All of them may have stopped, the last one too late.
    Ok(Some(answers.into_iter().map(why).collect()))
}

/// What is told where these are the reasons of some why none of them was suspended.
fn none_of(rows: &[Listed], why: Vec<Option<String>>) -> Vec<Told> {
    let others: Vec<String> = rows
        .iter()
        .zip(&why)
        .filter(|(_, why)| why.is_some())
        .map(|(row, _)| row.told.process.identity.pid.to_string())
        .collect();
    let because = match others.as_slice() {
        [] => "it runs on, since they did not all come to rest at the same moment".to_owned(),
        others => {
            format!("it runs on, since all are suspended together or none, and process {} was not", others.join(", "))
        }
    };
    rows.iter().zip(why).map(|(row, why)| told_by(row, Err(why.unwrap_or_else(|| because.clone())))).collect()
}

/// Does this for each row, all at once.
fn side_by_side<T: Send>(rows: &[Listed], act: impl Fn(usize, &Listed) -> T + Sync) -> Vec<T> {
    let act = &act;
    std::thread::scope(|scope| {
        let begun: Vec<_> = rows.iter().enumerate().map(|(at, row)| scope.spawn(move || act(at, row))).collect();
        // A thread of this command that panics has said so.
        begun.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// For whoever has the turn: what lies there is of a command that was killed.
fn listen(folder: &Folder, name: &str) -> Result<Socket, String> {
    let listen = || Socket::<OwnedFd>::listen_in(folder.fd(), name);
    let listener = match listen() {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            let _ = unlinkat(folder.fd(), name, AtFlags::empty());
            listen()
        }
        answer => answer,
    };
    listener.map_err(|error| format!("listening in {} failed: {error}", folder.path().display()))
}

/// The process's connection.
fn accept(listener: &Socket, row: &Listed, page: &OwnedFd, limit: Option<Instant>) -> Result<Socket, String> {
    let pid = row.told.process.identity.pid;
    let begun = Instant::now();
    let until = limit.map_or(begun + TO_ANSWER, |limit| limit.min(begun + TO_ANSWER));
    while Instant::now() < until {
        ring(std::os::fd::AsFd::as_fd(page))
            .map_err(|error| format!("its page {} cannot be rung at: {error}", row.page.display()))?;
        let _ = wait([listener], Some(RING));
        if stat(pid).is_none_or(|stat| matches!(stat.state, b'Z' | b'X')) {
            return Err("it ended before it had answered".to_owned());
        }
        match listener.accept() {
            Ok(socket) => match socket.peer() {
                Ok(peer) if (peer.pid, peer.uid) == (pid, row.owner) => return Ok(socket),
                // Another command that looks whether somebody listens, or somebody who is not meant.
                _ => {}
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(format!("its connection failed: {error}")),
        }
        // Before it heard anything: nothing was asked of it.
        if stat(pid).is_some_and(|stat| stat.state == b'T') {
            return Err("it is stopped (SIGSTOP) and answers nobody".to_owned());
        }
    }
    Err(format!(
        "it did not answer within {} s: it may be stopped, have ended, or be at the end of a call of the driver",
        begun.elapsed().as_secs()
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
    for Told { pid, error, bytes, stayed_bytes, microseconds, waited_microseconds } in all {
        if let Some(error) = error {
            complain(&format!("process {pid}: {error}"));
            continue;
        }
        if json {
            continue;
        }
        // The wait is the program's, and the rate is that of what came after it.
        let [seconds, waited] =
            [microseconds.saturating_sub(*waited_microseconds), *waited_microseconds].map(|time| time as f64 * 1e-6);
        let waited = if waited >= 0.01 { format!(", after {waited:.2} s of wait for its work") } else { String::new() };
        let rate = (*bytes as f64 / seconds.max(1e-6)) as u64;
        let stayed =
            if *stayed_bytes > 0 { format!("; {} {did_not}", format_size(*stayed_bytes)) } else { String::new() };
        stdout::print(&format!(
            "process {pid}: {} {did} in {seconds:.2} s ({}/s){waited}{stayed}\n",
            format_size(*bytes),
            format_size(rate)
        ))?;
    }
    Ok(all.iter().all(|told| told.error.is_none()))
}
