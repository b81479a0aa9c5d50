//! The importing side's connections: one to an exporter as long as anything of its is open here, more only while several
//! threads ask at once.

use super::{Socket, THREAD};
use gpupool_cuda::CuResult;
use gpupool_wire::blocks::{Answer, Handle, Key, Question, Request};
use gpupool_wire::{Unread, socket};
use parking_lot::Mutex;
use std::fmt::Display;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long an exporter may take over one answer. One that has ended is noticed at once, by the end of the connection. One that
/// does not answer is stopped, by a debugger or a scheduler that moves jobs, or has no processor left for its thread, and is
/// waited for as long as a person would before he takes the program for hung. Less would refuse memory that is there on a
/// crowded machine; the driver itself, bare, needs no answer of the exporter's.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Pauses between tries with an exporter that was there and did not answer: one whose program has closed its descriptors
/// opens the socket again within a moment, one that has ended does not.
const PAUSES: [Duration; 6] = [
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

/// Why a block could not be opened.
pub struct Failure {
    /// What the program gets.
    pub result: CuResult,
    /// What the log says.
    pub why: String,
    /// The connection broke in the middle, which says nothing about the block: worth another try.
    pub broken: bool,
}

pub fn failure(result: CuResult, why: impl Display) -> Failure {
    Failure { result, why: why.to_string(), broken: false }
}

/// A connection to an exporter.
struct Peer {
    process: u64,
    /// The exporter's number in this process's namespace; 0 where it has none there.
    pid: u32,
    socket: Socket,
    /// A thread asks something on it, or nobody may any more: what it answers might be to an earlier question.
    busy: AtomicBool,
}

/// No descriptor goes with a question.
const NONE: &[OwnedFd] = &[];

static PEERS: Mutex<Vec<Weak<Peer>>> = Mutex::new(Vec::new());

/// Why there is no answer.
enum NoAnswer {
    /// The connection has ended.
    Ended(String),
    /// The exporter did not answer in time.
    TimedOut,
    /// Descriptors were lost on the way.
    DescriptorsLost,
    /// The exporter speaks another version of the protocol.
    Version(Unread),
}

/// A block of another process that this one may have: from here until this is dropped its memory serves nobody else there.
pub struct Lease {
    peer: Arc<Peer>,
    key: Key,
    /// Where the connection is this thread's, for [`Lease::ask`].
    asks: bool,
}

impl Lease {
    /// Asks the exporter for the block.
    pub fn of(handle: &Handle) -> Result<Self, Failure> {
        let mut pauses = PAUSES.iter();
        // The exporter's number here, once it was there; the one in the handle is of the exporter's own namespace.
        let mut seen: Option<u32> = None;
        // One that nobody can look at may be alive.
        let may_live = |seen: Option<u32>| match seen {
            Some(0) => true,
            known => may_serve(known.unwrap_or(handle.pid)),
        };
        loop {
            let (peer, new) = match idle(handle.process) {
                Some(peer) => (peer, false),
                None => match connect(handle) {
                    Ok(peer) => (peer, true),
                    Err(unreachable) => {
                        let again = match unreachable.kind {
                            Kind::Absent => may_live(seen),
                            Kind::Broken => true,
                            Kind::Foreign => false,
                        };
                        let Some(pause) = pauses.next().filter(|_| again) else {
                            return Err(failure(CuResult::INVALID_VALUE, unreachable.why));
                        };
                        std::thread::sleep(*pause);
                        continue;
                    }
                },
            };
            match ask(&peer, Request::Hold, &handle.key) {
                Ok((Answer::Held, _)) => return Ok(Self { peer, key: handle.key, asks: true }),
                Ok((answer, _)) => {
                    peer.busy.store(false, Ordering::Release);
                    return Err(unwanted(&answer));
                }
                Err(NoAnswer::TimedOut) => return Err(timed_out(&peer)),
                Err(NoAnswer::DescriptorsLost) => return Err(no_descriptor()),
                Err(NoAnswer::Version(version)) => return Err(failure(CuResult::INVALID_VALUE, version)),
                Err(NoAnswer::Ended(why)) => {
                    if new {
                        seen = Some(peer.pid);
                        let Some(pause) = pauses.next().filter(|_| may_live(seen)) else {
                            return Err(failure(CuResult::INVALID_VALUE, why));
                        };
                        std::thread::sleep(*pause);
                    }
                }
            }
        }
    }

    /// Asks for chunks from `first` on. `None`: descriptors were lost on the way, fewer have to be asked for.
    pub fn ask(&self, first: u32, most: u32) -> Result<Option<(Answer, Vec<OwnedFd>)>, Failure> {
        match ask(&self.peer, Request::Chunks { first, most }, &self.key) {
            Ok((answer @ Answer::Chunks { .. }, descriptors)) => Ok(Some((answer, descriptors))),
            Ok((answer, _)) => Err(unwanted(&answer)),
            Err(NoAnswer::DescriptorsLost) => Ok(None),
            Err(NoAnswer::TimedOut) => Err(timed_out(&self.peer)),
            Err(NoAnswer::Version(version)) => Err(failure(CuResult::INVALID_VALUE, version)),
            Err(NoAnswer::Ended(why)) => Err(Failure { result: CuResult::INVALID_VALUE, why, broken: true }),
        }
    }

    /// This thread has nothing more to ask; others may use the connection.
    pub fn done(&mut self) {
        if std::mem::replace(&mut self.asks, false) {
            self.peer.busy.store(false, Ordering::Release);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The last lease of a connection ends it, which says the same of all blocks. An exporter that cannot be told waits
        // for that end, too.
        if self.peer.socket.is_there() {
            let _ = self.peer.socket.send(&Request::LetGo.encode(&self.key), NONE);
        }
        // The connection stays busy: whoever drops this in the middle of its questions may leave an answer behind.
    }
}

/// A connection to this process that nobody asks anything on now; it is the caller's to ask on.
fn idle(process: u64) -> Option<Arc<Peer>> {
    let mut peers = PEERS.lock();
    peers.retain(|peer| peer.strong_count() > 0);
    let known = peers.iter().filter_map(Weak::upgrade);
    let free = |peer: &Arc<Peer>| peer.process == process && !peer.busy.swap(true, Ordering::AcqRel);
    // Found one at a time: whichever are passed over are dropped after the lock, lest one be the last and end here.
    let mut passed = Vec::new();
    let found = known.inspect(|peer| passed.push(Arc::clone(peer))).find(free);
    drop(peers);
    found
}

/// Whether a process of that number is there, as far as this one sees, and has not ended: one that nobody has waited for yet
/// keeps its number, and takes signals.
fn is_alive(pid: u32) -> bool {
    let Some(number) = i32::try_from(pid).ok().filter(|pid| *pid > 0) else { return false };
    // SAFETY: the call takes numbers only.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
    let Ok(descriptor @ 0..) = RawFd::try_from(opened) else {
        // ESRCH, or a kernel before 5.3 or a sandbox that knows no such call.
        // SAFETY: signal 0 is sent to nobody; the call only says whether it could be.
        return unsafe { libc::kill(number, 0) } == 0 && !matches!(state(pid), Some('Z' | 'X'));
    };
    // SAFETY: the descriptor is new and nobody else closes it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let mut ended = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which is a local; the call does not wait.
    unsafe { libc::poll(&raw mut ended, 1, 0) != 1 }
}

/// Whether a process of that number is there that may answer: one that has become another program (`exec`) has the number still,
/// but no thread of ours. Where `/proc` does not tell, it may.
fn may_serve(pid: u32) -> bool {
    if !is_alive(pid) {
        return false;
    }
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    let is_ours =
        |folder: PathBuf| std::fs::read(folder.join("comm")).is_ok_and(|name| name.trim_ascii() == THREAD.as_bytes());
    threads.flatten().any(|thread| is_ours(thread.path()))
}

/// What a process does, as `/proc/PID/stat` says: `T` is stopped, `t` is held by a debugger, `Z` has ended. Its name, in brackets
/// before that, may hold anything.
fn state(pid: u32) -> Option<char> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let name_ends = text.iter().rposition(|byte| *byte == b')')?;
    text.get(name_ends + 2).map(|byte| char::from(*byte))
}

/// Why there is no connection.
struct Unreachable {
    kind: Kind,
    why: String,
}

enum Kind {
    /// Nobody listens.
    Absent,
    /// Another thread of this program closed the descriptor.
    Broken,
    /// Whoever listens is not to be asked, or it failed otherwise.
    Foreign,
}

impl Unreachable {
    fn of(error: &std::io::Error, why: String) -> Self {
        let kind = match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => Kind::Absent,
            // EISCONN: the number is by now that of another thread's connection.
            Some(libc::EBADF | libc::ENOTSOCK | libc::EISCONN) => Kind::Broken,
            _ => Kind::Foreign,
        };
        Self { kind, why }
    }
}

fn connect(handle: &Handle) -> Result<Arc<Peer>, Unreachable> {
    let name = Handle::socket(handle.pid, handle.process);
    let socket = Socket::connect(&name, Instant::now() + PATIENCE).map_err(|error| {
        let cause = match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => "this process has no descriptor left; raise its limit (ulimit -n)",
            _ => "it ended, became another program, or is in another network namespace (container)",
        };
        let why = format!("it cannot be reached ({error}): {cause}");
        Unreachable::of(&error, why)
    })?;
    // The secret is for the exporter alone: anybody may take a name that its owner has left.
    let pid = match socket.peer() {
        Ok(peer) => {
            peer.is_same_user().map_err(|why| {
                until_refused(&socket);
                Unreachable { kind: Kind::Foreign, why }
            })?;
            peer.pid
        }
        Err(error) => return Err(Unreachable::of(&error, format!("whose it is is unknown: {error}"))),
    };
    let peer = Arc::new(Peer { process: handle.process, pid, socket, busy: AtomicBool::new(true) });
    PEERS.lock().push(Arc::downgrade(&peer));
    Ok(peer)
}

/// Waits until an exporter of another user's has seen who connected, which it answers with a refusal. Once the program here has
/// its error it may have that memory freed, and the exporter then says why nobody opened it. It is asked nothing: one that sees
/// this process as its own user's takes the end of what is said for the end of the connection.
fn until_refused(socket: &Socket) {
    if socket.end_sending().is_ok() {
        let _ = socket.receive_by(&mut [0; Answer::BUFFER], Instant::now() + PATIENCE);
    }
}

/// Asks on a connection that is this thread's. Where no answer comes, nobody asks on it any more.
fn ask(peer: &Peer, request: Request, key: &Key) -> Result<(Answer, Vec<OwnedFd>), NoAnswer> {
    let failed = |error: std::io::Error| NoAnswer::Ended(format!("the connection failed: {error}"));
    if !peer.socket.is_there() {
        return Err(NoAnswer::Ended("this program closed the connection".to_owned()));
    }
    peer.socket.send(&request.encode(key), NONE).map_err(failed)?;
    let mut buffer = [0; Answer::BUFFER];
    let received = peer.socket.receive_by(&mut buffer, Instant::now() + PATIENCE).map_err(|failure| match failure {
        socket::Failure::TimedOut => NoAnswer::TimedOut,
        socket::Failure::DescriptorsLost => NoAnswer::DescriptorsLost,
        socket::Failure::System(error) => failed(error),
    })?;
    if received.bytes == 0 {
        return Err(NoAnswer::Ended("it ended, or does not know this handle".to_owned()));
    }
    match Answer::decode(&buffer[..received.bytes]) {
        Ok((Answer::Refused, _)) => Ok((Answer::Refused, received.descriptors)),
        Ok((answer, to)) if to == Question::of(&request, key) => Ok((answer, received.descriptors)),
        Ok(_) => Err(NoAnswer::Ended("this program closed the connection, and it answered somebody else".to_owned())),
        Err(Unread::Nonsense) => Err(NoAnswer::Ended(Unread::Nonsense.to_string())),
        Err(version @ Unread::Version(_)) => Err(NoAnswer::Version(version)),
    }
}

/// Why a block cannot be opened for which not even one descriptor could be had.
pub fn no_descriptor() -> Failure {
    failure(CuResult::OPERATING_SYSTEM, socket::Failure::DescriptorsLost)
}

fn timed_out(peer: &Peer) -> Failure {
    let why = match state(peer.pid) {
        Some('T') => "; it is stopped (SIGSTOP)",
        Some('t') => "; a debugger holds it",
        _ => "",
    };
    failure(CuResult::INVALID_VALUE, format_args!("it did not answer within {} s{why}", PATIENCE.as_secs()))
}

fn unwanted(answer: &Answer) -> Failure {
    let why = match answer {
        Answer::Gone => "it freed that memory".to_owned(),
        Answer::Failed(code) => {
            format!("it could not export the memory ({}); its own warnings say more", CuResult(*code))
        }
        Answer::Refused => "it belongs to another user".to_owned(),
        Answer::Held | Answer::Chunks { .. } => "its answer makes no sense".to_owned(),
    };
    failure(CuResult::INVALID_VALUE, why)
}

#[cfg(test)]
mod tests {
    use super::{THREAD, is_alive, may_serve, state};
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_ended_is_not_alive_though_nobody_waited_for_it() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        assert!(is_alive(pid));
        let mut input = child.stdin.take().unwrap();
        input.write_all(b"the end").unwrap();
        drop(input);
        // SAFETY: all-zero is a valid value of this C struct.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the output is a local. The child stays to be waited for.
        let waited = unsafe { libc::waitid(libc::P_PID, pid, &raw mut info, libc::WEXITED | libc::WNOWAIT) };
        assert_eq!((waited, state(pid)), (0, Some('Z')));
        // SAFETY: signal 0 is sent to nobody.
        assert_eq!(unsafe { libc::kill(pid as i32, 0) }, 0, "its number is taken");
        assert!(!is_alive(pid));
        child.wait().unwrap();
        assert!(!is_alive(pid));
        assert!(!is_alive(0) && !is_alive(u32::MAX));
    }

    /// As an exporter that has become `cat`.
    #[test]
    fn a_process_without_a_thread_of_ours_serves_nobody() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert!(is_alive(child.id()) && !may_serve(child.id()));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!may_serve(child.id()));

        let (end, ends) = std::sync::mpsc::channel::<()>();
        let (runs, is_there) = std::sync::mpsc::channel();
        let serve = move || {
            runs.send(()).unwrap();
            ends.recv().unwrap();
        };
        let thread = std::thread::Builder::new().name(THREAD.to_owned()).spawn(serve).unwrap();
        is_there.recv().unwrap();
        assert!(may_serve(std::process::id()));
        end.send(()).unwrap();
        thread.join().unwrap();
    }
}
