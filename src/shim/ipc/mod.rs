//! CUDA IPC on pooled memory, between two processes that both run under the shim.
//!
//! The driver has no legacy handle for memory from `cuMemCreate`; what it has is a file descriptor for each chunk. So the
//! 64 bytes that the program carries to the other process name a socket of the exporter and hold a secret, and the importer
//! fetches the chunks there when it opens the handle. From then on it needs the exporter no more: the memory lives until the
//! last process lets go, whoever ends first. The connection stays as long as the importer has anything open, since the
//! exporter must not use that memory for something else.
//!
//! Nothing of this exists in a process that shares nothing: the socket and its thread come with the first export.

mod exporter;
mod importer;
mod own;
mod peers;
mod server;
mod socket;
mod wire;

use crate::{bell, process};
use gpupool_cuda::{CuResult, Driver};
use gpupool_pool::Block;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use wire::Handle;

pub use exporter::{block_ended, judge};
pub use importer::{OfContexts, block_at as imported_at, close};
pub use own::after_fork_in_child;
pub use server::{Server, on_export, take as take_server};

/// The name of the thread that serves other processes. By it they see that this one still can.
pub const THREAD: &str = "gpupool";

/// Blocks of which another process was given a handle, and blocks of other processes that were opened.
static EXPORTS: AtomicU64 = AtomicU64::new(0);
static IMPORTS: AtomicU64 = AtomicU64::new(0);

/// How many blocks were exported, and how many imported.
pub fn counts() -> (u64, u64) {
    (EXPORTS.load(Ordering::Relaxed), IMPORTS.load(Ordering::Relaxed))
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
    bell::changed();
}

/// The bytes of a handle for this block (`cuIpcGetMemHandle`).
///
/// # Errors
/// The driver's code; the log says why.
pub fn export(driver: &Driver, block: &Block) -> Result<[u8; 64], CuResult> {
    exporter::export(driver, block).map(|handle| handle.encode())
}

/// Whether [`export`] would give a handle of this block, as far as that can be told without giving one.
pub fn is_shareable(block: &Block) -> bool {
    process::driver().is_some_and(|driver| exporter::is_shareable(driver, block))
}

/// Opens the handle in these bytes (`cuIpcOpenMemHandle`), and gives the block's address here. `None`: not a handle of
/// ours, the driver's to open.
pub fn open(driver: &'static Driver, bytes: &[u8; 64]) -> Option<Result<u64, CuResult>> {
    let handle = Handle::decode(bytes)?;
    Some(importer::open(driver, bytes, &handle))
}

/// Whether a process of this user is one of our own user's; the reason if not.
fn is_same_user(uid: u32) -> Result<(), String> {
    // SAFETY: geteuid has no preconditions.
    let own = unsafe { libc::geteuid() };
    if uid != own {
        return Err(format!("it is of user {uid}, this one of user {own}"));
    }
    // All users that a user namespace has no number for look like this one.
    let nobody = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok().and_then(|text| text.trim().parse().ok());
    if uid == nobody.unwrap_or(OVERFLOW_UID) {
        return Err(format!("user {uid} stands for every user that this user namespace does not know"));
    }
    Ok(())
}

/// Linux's default for `/proc/sys/kernel/overflowuid`.
const OVERFLOW_UID: u32 = 65534;

/// Says that one of `export`, `import` and `serve` failed, and why.
fn failed(what: &str, why: impl Display) {
    let why = why.to_string();
    tracing::warn!(target: "gpupool::ipc", event = "ipc.failed", what, why, "CUDA IPC, {what} failed: {why}");
}
