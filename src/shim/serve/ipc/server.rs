//! The exporting side's server, from the first export on: it gives other processes of the same user the chunks of exported
//! blocks, and knows which of them have what. The agent's thread runs it, turn by turn.
//!
//! It serves all connections by turns and never waits for one of them: no call on a connection blocks, what says nothing
//! for long is sent away, and a line of the log that could block is counted instead. So neither an importer that hangs nor
//! another user who only connects delays anybody.
//!
//! The program may close every descriptor of the process, these among them. A descriptor that is no longer ours is let go
//! of unused, and the socket is opened again under its name.

use super::Socket;
use super::exporter::{self, Asked};
use crate::process;
use crate::serve::memory;
use gpupool_cuda::{Device, Driver};
use gpupool_metrics::stat;
use gpupool_pool::{Block, Place};
use gpupool_wire::Unread;
use gpupool_wire::blocks::{Answer, BATCH, Chunk, Handle, Key, Layout, Question, Request, Where};
use gpupool_wire::socket::wait;
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::Result;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Connections of processes that have nothing open; the oldest gives way to a new one.
const SILENT: usize = 64;
/// Connections in all. Those that have something open are never sent away for another.
const CONNECTIONS: usize = 1024;
/// How long a connection that has nothing open may say nothing. An importer that opens a block asks at once.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long to leave new connections waiting when this process has no descriptor left for one, or no socket.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(100);
/// How often to look whether a process has ended whose connection says nothing of it.
const LOOKS: [Duration; 2] = [Duration::from_millis(5), Duration::from_secs(1)];

/// No descriptor goes with a message.
const NONE: &[OwnedFd] = &[];

/// The public part of this process's name, once it is served under it.
static PROCESS: OnceLock<u64> = OnceLock::new();
/// Held while the server is made, so that there is one.
static STARTING: Mutex<()> = Mutex::new(());
/// The server that is made and not yet with the thread that runs it.
static MADE: Mutex<Option<Server>> = Mutex::new(None);
/// Starts the thread that runs the server, or wakes it.
static START_THREAD: OnceBox<fn() -> Result<()>> = OnceBox::new();

/// Who runs the server, from the first export on: `call` has the thread [`take`] it.
pub fn on_export(call: fn() -> Result<()>) {
    let _ = START_THREAD.set(Box::new(call));
}

/// The server, for the thread that runs it.
pub fn take() -> Option<Server> {
    MADE.lock().take()
}

/// The public part of this process's name; `None` where nothing was exported.
pub fn process() -> Option<u64> {
    PROCESS.get().copied()
}

/// Has the server run, unless it does.
pub fn start() -> Result<u64> {
    if let Some(process) = PROCESS.get() {
        return Ok(*process);
    }
    let _starting = STARTING.lock();
    if let Some(process) = PROCESS.get() {
        return Ok(*process);
    }
    let mut random = [0; 8];
    crate::secret::fill(&mut random)?;
    let process = u64::from_ne_bytes(random);
    let name = Handle::socket(std::process::id(), process);
    let listener = Socket::listen(&name)?;
    let server = Server { name, listener: Some(listener), connections: Vec::new(), left: Vec::new(), accepting: true };
    *MADE.lock() = Some(server);
    START_THREAD.get().map_or(Err(std::io::ErrorKind::Unsupported.into()), |start| start()).inspect_err(|_| {
        drop(take());
    })?;
    Ok(*PROCESS.get_or_init(|| process))
}

/// A process, and when it started, in ticks: the number alone may be another's by now.
#[derive(Clone, Copy)]
struct Importer {
    pid: u32,
    started: u64,
}

impl Importer {
    /// `None` where it cannot be seen (another PID namespace, no /proc), so that nobody could say whether it has ended.
    fn of(pid: u32) -> Option<Self> {
        let started = stat(pid)?.started;
        Some(Self { pid, started })
    }

    fn has_ended(self) -> bool {
        stat(self.pid).is_none_or(|now| now.started != self.started || matches!(now.state, b'Z' | b'X'))
    }
}

/// Blocks that one importer has open: their addresses, and how often each.
#[derive(Default)]
struct Holds(BTreeMap<u64, (u64, u32)>);

impl Holds {
    fn add(&mut self, address: u64, id: u64) {
        self.0.entry(id).or_insert((address, 0)).1 += 1;
    }

    fn remove(&mut self, id: u64) {
        let Some((address, count)) = self.0.get_mut(&id) else { return };
        memory::let_go(*address, id);
        *count -= 1;
        if *count == 0 {
            self.0.remove(&id);
        }
    }
}

impl Drop for Holds {
    /// The importer is gone, and has nothing open any more.
    fn drop(&mut self) {
        for (id, (address, count)) in std::mem::take(&mut self.0) {
            (0..count).for_each(|_| memory::let_go(address, id));
        }
    }
}

struct Connection {
    socket: Socket,
    importer: Option<Importer>,
    holds: Holds,
    /// When it last said something.
    heard: Instant,
}

/// What a process has open whose connection is no more, although the process may be.
struct Left {
    /// `None`: nobody can say whether it has ended, so it has not.
    importer: Option<Importer>,
    /// Let go of when this is dropped.
    _holds: Holds,
    looks: u32,
}

/// The socket and what is connected to it.
pub struct Server {
    name: String,
    listener: Option<Socket>,
    connections: Vec<Connection>,
    left: Vec<Left>,
    /// New connections are not taken for a moment.
    accepting: bool,
}

impl Server {
    /// Waits, for at most `limit`, until somebody says something, and answers.
    pub fn turn(&mut self, limit: Option<Duration>) {
        self.drop_what_is_not_ours();
        let listener = self.listener.as_ref().filter(|_| self.accepting);
        let sockets = self.connections.iter().map(|connection| &connection.socket).chain(listener);
        let limit = self.limit().into_iter().chain(limit).min();
        let waited = wait(sockets, limit);
        self.accepting = true;
        self.left.retain_mut(|left| !left.is_over());
        let Ok(mut ready) = waited else {
            // More descriptors than this process may still have, or the kernel is out of memory: those who have nothing
            // open are sent away, and say so.
            self.connections.retain(|connection| !connection.holds.0.is_empty());
            self.accepting = false;
            return;
        };
        // What is ready was ours when the wait began; the program may have closed it since.
        self.drop_if_replaced(&mut ready);
        // The listener is behind the connections.
        let arrived = ready.get(self.connections.len()).is_some_and(|ready| *ready);
        self.answer_all(&ready);
        if arrived {
            self.accept();
        }
    }

    /// How long to wait for somebody to say something.
    fn limit(&self) -> Option<Duration> {
        let silent = self.connections.iter().filter(|connection| connection.holds.0.is_empty());
        let patience = silent.map(|connection| PATIENCE.saturating_sub(connection.heard.elapsed())).min();
        let closed = (self.listener.is_none() || !self.accepting).then_some(WITHOUT_DESCRIPTORS);
        let looks = self.left.iter().filter_map(Left::pause).min();
        [patience, closed, looks].into_iter().flatten().min()
    }

    /// Lets go of descriptors that the program has closed, and opens the socket again.
    fn drop_what_is_not_ours(&mut self) {
        if self.listener.as_ref().is_none_or(|listener| !listener.is_there()) {
            self.listener = None;
            self.listener = Socket::listen(&self.name).ok();
        }
        let (there, closed): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.connections).into_iter().partition(|connection| connection.socket.is_there());
        self.connections = there;
        self.left.extend(closed.into_iter().filter_map(|connection| connection.leave(true)));
        self.connections.retain(|connection| !connection.holds.0.is_empty() || connection.heard.elapsed() < PATIENCE);
    }

    /// Marks as not ready what is no longer what was waited for.
    fn drop_if_replaced(&self, ready: &mut [bool]) {
        let sockets = self.connections.iter().map(|connection| &connection.socket).chain(&self.listener);
        for (ready, socket) in ready.iter_mut().zip(sockets) {
            *ready = *ready && socket.is_there();
        }
    }

    fn answer_all(&mut self, ready: &[bool]) {
        let mut kept = Vec::with_capacity(self.connections.len());
        for (index, mut connection) in std::mem::take(&mut self.connections).into_iter().enumerate() {
            let ready = ready.get(index).is_some_and(|ready| *ready);
            if !ready || catch_unwind(AssertUnwindSafe(|| connection.answer())).unwrap_or(false) {
                kept.push(connection);
            } else {
                self.left.extend(connection.leave(false));
            }
        }
        self.connections = kept;
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        match listener.accept() {
            Ok(socket) => {
                let silent = |connection: &Connection| connection.holds.0.is_empty();
                if self.connections.iter().filter(|connection| silent(connection)).count() >= SILENT
                    && let Some(oldest) = self.connections.iter().position(silent)
                {
                    self.connections.remove(oldest);
                }
                if self.connections.len() < CONNECTIONS {
                    self.connections.extend(admit(socket));
                }
            }
            Err(error) => self.accepting = !matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)),
        }
    }
}

impl Left {
    fn is_over(&mut self) -> bool {
        self.looks += 1;
        self.importer.is_some_and(Importer::has_ended)
    }

    /// Until the next look: soon at first, since most processes whose connection ended are about to end.
    fn pause(&self) -> Option<Duration> {
        self.importer.map(|_| if self.looks < 20 { LOOKS[0] } else { LOOKS[1] })
    }
}

/// A connection of the same user's; others are told no.
fn admit(socket: Socket) -> Option<Connection> {
    let refuse = |socket: &Socket, why: String| {
        // Before the answer, behind which the program may free the memory and is told that nobody opened it.
        REFUSED.tell(&why);
        let _ = socket.send(&Answer::Refused.encode(Question::UNREAD), NONE);
    };
    match socket.peer() {
        Ok(peer) => match peer.is_same_user() {
            Ok(()) => {
                let importer = Importer::of(peer.pid);
                Some(Connection { socket, importer, holds: Holds::default(), heard: Instant::now() })
            }
            Err(why) => {
                refuse(&socket, format!("process {} may not open memory of this one: {why}", peer.pid));
                None
            }
        },
        Err(error) => {
            refuse(&socket, format!("who connected is unknown: {error}"));
            None
        }
    }
}

/// Failures of one kind that this thread meets, each of which somebody else may bring about as often as they like.
struct Failures {
    count: AtomicU64,
    told: AtomicU64,
}

/// Connections sent away for whose they were.
static REFUSED: Failures = Failures { count: AtomicU64::new(0), told: AtomicU64::new(0) };
/// Connections of processes that speak another version.
static VERSIONS: Failures = Failures { count: AtomicU64::new(0), told: AtomicU64::new(0) };
/// Chunks that the driver did not export.
static FAILED: Failures = Failures { count: AtomicU64::new(0), told: AtomicU64::new(0) };

impl Failures {
    /// Says it the first time and then each time that they have doubled, unless whoever reads standard error has stopped to
    /// do so: this thread must not wait for them.
    fn tell(&self, why: &str) {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() && stderr_takes() {
            self.told.store(count, Ordering::Relaxed);
            let times = if count == 1 { String::new() } else { format!(" ({count} times so far)") };
            super::failed("serve", format_args!("{why}{times}"));
        }
    }
}

/// Whether a line on standard error would be taken at once. A closed one takes everything.
fn stderr_takes() -> bool {
    let mut entry = [libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 }];
    // SAFETY: the list is of that length.
    unsafe { libc::poll(entry.as_mut_ptr(), 1, 0) != 0 }
}

/// Whether any connection was sent away for whose it was.
pub fn has_refused() -> bool {
    REFUSED.count.load(Ordering::Relaxed) > 0
}

/// Whether this process may open no file more, which is why the driver answers that the system failed.
fn has_no_descriptor() -> bool {
    let opened = std::fs::File::open("/dev/null");
    opened.is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)))
}

/// At the end of the process: how much was not said one by one.
pub fn judge() {
    let count = |failures: &Failures| failures.count.load(Ordering::Relaxed);
    if REFUSED.told.load(Ordering::Relaxed) < count(&REFUSED) {
        super::failed("serve", format_args!("{} connections in all were refused", count(&REFUSED)));
    }
    if VERSIONS.told.load(Ordering::Relaxed) < count(&VERSIONS) {
        super::failed("serve", format_args!("{} processes in all spoke another version", count(&VERSIONS)));
    }
    if FAILED.told.load(Ordering::Relaxed) < count(&FAILED) {
        super::failed("serve", format_args!("{} chunks in all were not exported by the driver", count(&FAILED)));
    }
}

impl Connection {
    /// Answers what has been said; whether more may be.
    fn answer(&mut self) -> bool {
        let mut buffer = [0; Request::BUFFER];
        let Ok(received) = self.socket.receive(&mut buffer) else { return false };
        let (request, key) = match Request::decode(&buffer[..received.bytes]) {
            Ok(said) => said,
            Err(unread) => {
                self.answer_unread(unread);
                return false;
            }
        };
        self.heard = Instant::now();
        if request == Request::LetGo {
            self.holds.remove(key.block);
            return true;
        }
        let to = Question::of(&request, &key);
        let address = match exporter::find(&key) {
            Asked::Block(address) => address,
            Asked::Gone => return self.say(&Answer::Gone, to, NONE),
            Asked::WrongSecret => return false,
        };
        match request {
            Request::Hold => self.hold(address, key, to),
            Request::Chunks { first, most } if self.holds.0.contains_key(&key.block) => {
                let gone = (Answer::Gone, Vec::new());
                let (answer, descriptors) = process::driver()
                    .map_or(gone, |driver| chunks(driver, address, key.block, first as usize, most as usize));
                self.say(&answer, to, &descriptors)
            }
            _ => false,
        }
    }

    /// Tells a process of another version which one is spoken here, before its connection is closed.
    fn answer_unread(&self, unread: Unread) {
        if let Some(answer) = unread.answer() {
            let _ = self.socket.send(&answer, NONE);
            VERSIONS.tell(&format!("a process cannot open memory of this one: {unread}"));
        }
    }

    fn hold(&mut self, address: u64, key: Key, to: Question) -> bool {
        let Some(block) = memory::hold(address, key.block) else { return self.say(&Answer::Gone, to, NONE) };
        self.holds.add(block.address, block.id);
        exporter::was_opened(block.id);
        self.say(&Answer::Held, to, NONE)
    }

    fn say(&self, answer: &Answer, to: Question, descriptors: &[OwnedFd]) -> bool {
        self.socket.send(&answer.encode(to), descriptors).is_ok()
    }

    /// The connection is over; what its importer may still have. `closed_here`: this process closed it, which says nothing
    /// about the importer.
    fn leave(self, closed_here: bool) -> Option<Left> {
        let Connection { importer, holds, .. } = self;
        let ended = importer.is_none_or(Importer::has_ended) && !(closed_here && importer.is_none());
        (!ended && !holds.0.is_empty()).then_some(Left { importer, _holds: holds, looks: 0 })
    }
}

/// The chunks of a block that are asked for, with a descriptor each.
fn chunks(driver: &Driver, address: u64, id: u64, from: usize, most: usize) -> (Answer, Vec<OwnedFd>) {
    let gone = || (Answer::Gone, Vec::new());
    let Some(block) = block_of(address, id) else { return gone() };
    let pieces = memory::pieces(block.address, block.bytes);
    let Some(first) = pieces.first() else { return gone() };
    let layout = Layout {
        chunks: pieces.len() as u32,
        span: pieces.iter().map(|piece| piece.chunk_bytes).sum(),
        offset: block.address - first.chunk_address,
        home: driver.uuid_bytes(Device::of(block.home)),
    };
    let (mut chunks, mut descriptors) = (Vec::new(), Vec::new());
    for piece in pieces.iter().skip(from).take(most.clamp(1, BATCH as usize)) {
        let place = match piece.place {
            Place::Gpu(ordinal) => Where::Gpu(driver.uuid_bytes(Device::of(ordinal))),
            Place::Host(node) => Where::Host(node),
            // What others have open stays in memory.
            Place::Disk | Place::Pageable => return gone(),
        };
        match driver.export(piece.handle) {
            Ok(descriptor) => descriptors.push(descriptor),
            // No descriptor left for more, perhaps: what there is goes, and the importer asks on.
            Err(_) if !chunks.is_empty() => break,
            Err(result) => {
                let why = match has_no_descriptor() {
                    true => " because this process has no descriptor left; raise its limit (ulimit -n)",
                    false => "",
                };
                FAILED.tell(&format!("a chunk of {:#x} was not exported ({result}){why}", block.address));
                return (Answer::Failed(result.0), Vec::new());
            }
        }
        chunks.push(Chunk { bytes: piece.chunk_bytes, place });
    }
    // Only of a block that lived all the while are these the chunks: no other block ever gets its number.
    if block_of(address, id).is_none() {
        return gone();
    }
    (Answer::Chunks { layout, chunks }, descriptors)
}

fn block_of(address: u64, id: u64) -> Option<Block> {
    memory::block_at(address).filter(|block| (block.id, block.address) == (id, address))
}
