//! The exporting side: one thread, from the first export on, that gives other processes of the same user the chunks of
//! exported blocks.
//!
//! The thread serves all connections by turns and never waits for one of them, so an importer that hangs delays nobody. It
//! keeps nothing between two requests: whether the block still lives is looked up each time.

use super::socket::{Socket, readable, wait};
use super::wire::{Answer, BATCH, Chunk, Handle, Layout, Request, Token, Where};
use crate::driver::{CuResult, Driver};
use crate::hook::guard;
use crate::{log, memory, process};
use gpupool_config::format_size;
use gpupool_pool::{Block, Piece, Pin, Place};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::{Error, Result};
use std::os::fd::{FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const POSIX_FD: i32 = 1;
/// Connections served at a time; the oldest gives way to a new one. An importer holds one only while it opens a block.
const CONNECTIONS: usize = 64;
/// How long to leave new connections waiting when this process has no descriptor left for one.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(100);

/// The token, once the thread runs.
static TOKEN: OnceLock<Token> = OnceLock::new();
/// Held while the thread is started, so that there is one.
static STARTING: Mutex<()> = Mutex::new(());
/// The listening socket, for the child of a fork to close; -1 for none.
static LISTENER: AtomicI32 = AtomicI32::new(-1);
/// Exported blocks that live, by number, and whether anyone opened them.
static EXPORTED: Mutex<BTreeMap<u64, bool>> = Mutex::new(BTreeMap::new());
/// How many there are, readable without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The token of this process; `None` where nothing was exported.
pub fn token() -> Option<&'static Token> {
    TOKEN.get()
}

/// A handle of the block, which lives and is pinned from here on.
///
/// # Errors
/// The driver's refusal to export the memory (`cuMemExportToShareableHandle`), or OPERATING_SYSTEM where no socket or
/// thread could be had; the log says which.
pub fn export(driver: &Driver, block: &Block) -> std::result::Result<Handle, CuResult> {
    let pieces = memory::pieces(block.address, block.bytes);
    // Tried on one chunk, so that what can not be shared is refused here and not in the importer.
    if let Some(first) = pieces.first() {
        descriptor_of(driver, first).inspect_err(|result| {
            super::failed("export", format_args!("the driver does not share this memory ({result})"));
        })?;
    }
    let token = start().map_err(|error| {
        super::failed("export", format_args!("no socket or thread for it: {error}"));
        CuResult::OPERATING_SYSTEM
    })?;
    memory::pin(block.address, block.bytes, Pin::Shared);
    let new = {
        let mut exported = EXPORTED.lock();
        let new = !exported.contains_key(&block.id);
        exported.entry(block.id).or_insert(false);
        COUNT.store(exported.len(), Ordering::Release);
        new
    };
    let Block { address, bytes, id, .. } = *block;
    if new {
        tracing::info!(
            target: "gpupool::ipc", event = "ipc.export", address, bytes, chunks = pieces.len(),
            "a handle of {} at {address:#x}; only processes that run under gpupool can open it", format_size(bytes)
        );
    }
    Ok(Handle { pid: std::process::id(), token: *token, block: id, address, bytes })
}

/// Whether the block that starts at this address was exported.
#[inline]
pub fn is_exported(address: u64) -> bool {
    COUNT.load(Ordering::Acquire) != 0
        && memory::block_at(address).is_some_and(|block| EXPORTED.lock().contains_key(&block.id))
}

/// An exported block ended, if this was one.
#[inline]
pub fn block_ended(id: u64) {
    if COUNT.load(Ordering::Acquire) != 0 {
        forget(id);
    }
}

#[cold]
fn forget(id: u64) {
    let opened = {
        let mut exported = EXPORTED.lock();
        let opened = exported.remove(&id);
        COUNT.store(exported.len(), Ordering::Release);
        opened
    };
    if opened == Some(false) {
        warn_unopened("freed");
    }
}

/// At the end of the process: says if memory was exported in vain.
pub fn judge() {
    let unopened = COUNT.load(Ordering::Acquire) != 0 && EXPORTED.lock().values().any(|opened| !opened);
    if unopened {
        warn_unopened("still there at the end of the process");
    }
}

fn warn_unopened(when: &str) {
    log::warn_once(
        "ipc.unopened",
        format_args!(
            "memory shared with cuIpcGetMemHandle was {when} and nobody had opened it; if another process tried in vain, \
             run that one under gpupool, too"
        ),
    );
}

/// In the child of a fork, which has no such thread: importers must not wait for it when the parent is gone.
pub fn after_fork_in_child() {
    let listener = LISTENER.swap(-1, Ordering::AcqRel);
    if listener >= 0 {
        // SAFETY: the parent's descriptor, of which this process has a copy that nobody uses.
        unsafe { libc::close(listener) };
    }
}

/// Starts the thread, unless it runs.
fn start() -> Result<&'static Token> {
    if let Some(token) = TOKEN.get() {
        return Ok(token);
    }
    let _starting = STARTING.lock();
    if let Some(token) = TOKEN.get() {
        return Ok(token);
    }
    let mut token = Token::default();
    // SAFETY: the output is of that length.
    let random = unsafe { libc::getrandom(token.as_mut_ptr().cast(), token.len(), 0) };
    if usize::try_from(random) != Ok(token.len()) {
        return Err(Error::last_os_error());
    }
    let listener = Socket::listen(&Handle::socket(std::process::id(), &token))?;
    let fd = listener.fd();
    let signals = BlockedSignals::all();
    std::thread::Builder::new().name("gpupool-ipc".to_owned()).spawn(move || serve(&listener))?;
    drop(signals);
    LISTENER.store(fd, Ordering::Release);
    Ok(TOKEN.get_or_init(|| token))
}

/// All signals blocked on this thread until dropped: a thread started meanwhile has them blocked for good, and none of the
/// program's handlers ever runs on it.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn all() -> Self {
        // SAFETY: all-zero is a valid value of this C type; the calls write the two locals.
        unsafe {
            let (mut every, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut every);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const every, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

fn serve(listener: &Socket) -> ! {
    // Every driver call of this thread is ours.
    let _inside = guard::enter();
    let mut connections: Vec<Socket> = Vec::new();
    let mut accepting = true;
    loop {
        let limit = (!accepting).then_some(WITHOUT_DESCRIPTORS);
        let mut list: Vec<_> = connections.iter().map(|connection| readable(connection.fd())).collect();
        if accepting {
            list.push(readable(listener.fd()));
        }
        if wait(&mut list, limit).is_err() {
            // More descriptors than this process may still have, or the kernel is out of memory: nobody is served for a
            // while, and the importers that are sent away say so.
            (connections, accepting) = (Vec::new(), false);
            continue;
        }
        let ready = |index: usize| list.get(index).is_some_and(|entry| entry.revents != 0);
        let arrived = accepting && ready(connections.len());
        let mut index = 0;
        connections.retain(|connection| {
            index += 1;
            !ready(index - 1) || catch_unwind(AssertUnwindSafe(|| answer(connection))).unwrap_or(false)
        });
        accepting = true;
        if arrived {
            match listener.accept() {
                Ok(connection) => {
                    if connections.len() == CONNECTIONS {
                        connections.remove(0);
                    }
                    connections.extend(admit(connection));
                }
                Err(error) => accepting = !matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)),
            }
        }
    }
}

/// A connection of the same user's; others are told no.
fn admit(connection: Socket) -> Option<Socket> {
    // SAFETY: geteuid has no preconditions.
    let own = unsafe { libc::geteuid() };
    match connection.peer() {
        Ok(peer) if peer.uid == own => Some(connection),
        Ok(peer) => {
            let _ = connection.send(&Answer::Refused.encode(), &[]);
            super::failed(
                "serve",
                format_args!("process {} of user {} may not open memory of user {own}", peer.pid, peer.uid),
            );
            None
        }
        Err(error) => {
            super::failed("serve", format_args!("who connected is unknown: {error}"));
            None
        }
    }
}

/// Answers what this connection has sent; whether it may ask more.
fn answer(connection: &Socket) -> bool {
    // One byte more than a request, so that a longer message is not taken for one.
    let mut buffer = [0; Request::SIZE + 1];
    let Ok(received) = connection.receive(&mut buffer) else { return false };
    let Some(request) = Request::decode(&buffer[..received.bytes]) else { return false };
    let (answer, descriptors) = process::driver().map_or((Answer::Gone, Vec::new()), |driver| chunks(driver, &request));
    connection.send(&answer.encode(), &descriptors).is_ok()
}

/// The chunks of a block that are asked for, with a descriptor each.
fn chunks(driver: &Driver, request: &Request) -> (Answer, Vec<OwnedFd>) {
    let gone = || (Answer::Gone, Vec::new());
    let is_exported = EXPORTED.lock().contains_key(&request.block);
    let Some(block) = is_exported.then(|| block_of(request)).flatten() else { return gone() };
    let pieces = memory::pieces(block.address, block.bytes);
    let Some(first) = pieces.first() else { return gone() };
    let layout = Layout {
        chunks: pieces.len() as u32,
        span: pieces.iter().map(|piece| piece.chunk_bytes).sum(),
        offset: block.address - first.chunk_address,
        home: driver.uuid_bytes(block.home as i32),
    };
    let (mut chunks, mut descriptors) = (Vec::new(), Vec::new());
    for piece in pieces.iter().skip(request.first as usize).take(request.most.clamp(1, BATCH) as usize) {
        let place = match piece.place {
            Place::Gpu(ordinal) => Where::Gpu(driver.uuid_bytes(ordinal as i32)),
            Place::Host(node) => Where::Host(node),
        };
        match descriptor_of(driver, piece) {
            Ok(descriptor) => descriptors.push(descriptor),
            // No descriptor left for more, perhaps: what there is goes, and the importer asks on.
            Err(_) if !chunks.is_empty() => break,
            Err(result) => {
                super::failed("serve", format_args!("a chunk of {:#x} was not exported ({result})", block.address));
                return (Answer::Failed(result.0), Vec::new());
            }
        }
        chunks.push(Chunk { bytes: piece.chunk_bytes, place });
    }
    // Only of a block that lived all the while are these the chunks: no other block ever gets its number.
    if block_of(request).is_none() {
        return gone();
    }
    if let Some(opened) = EXPORTED.lock().get_mut(&request.block) {
        *opened = true;
    }
    (Answer::Chunks { layout, chunks }, descriptors)
}

fn block_of(request: &Request) -> Option<Block> {
    memory::block_at(request.address).filter(|block| (block.id, block.address) == (request.block, request.address))
}

/// A descriptor of the chunk's memory (`cuMemExportToShareableHandle`).
fn descriptor_of(driver: &Driver, piece: &Piece<u64>) -> std::result::Result<OwnedFd, CuResult> {
    let mut descriptor: i32 = -1;
    // SAFETY: the output is of the type that this kind of handle has; the handle is valid while the block lives.
    unsafe { (driver.cuMemExportToShareableHandle)((&raw mut descriptor).cast(), piece.handle, POSIX_FD, 0) }.ok()?;
    // SAFETY: the descriptor is new and nobody else closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
