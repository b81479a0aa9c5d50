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

use crate::bypass::{Answer, Bypass};
use crate::{bell, log, process};
use gpupool_cuda::{CuResult, Driver};
use gpupool_events::IpcFailed;
use gpupool_pool::Block;
use gpupool_wire::Unread;
use gpupool_wire::blocks::Handle;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

pub use exporter::judge;
pub use importer::{OfContexts, block_at as imported_at, close, is_any as is_any_imported};
pub use own::{Own, after_fork_in_child};
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

/// Opens the handle in these bytes (`cuIpcOpenMemHandle`), and gives the block's address here.
pub fn open(driver: &'static Driver, bytes: &[u8; 64]) -> Answer<Result<u64, CuResult>> {
    let unread = match Handle::decode(bytes) {
        Ok(handle) => return Ok(importer::open(driver, bytes, &handle)),
        Err(unread) => unread,
    };
    // The driver refuses one of another version, and cannot say why.
    if let Unread::Version(_) = unread {
        failed("import", format_args!("the process that gave the handle cannot be asked: {unread}"));
    }
    Err(Bypass::NotOurs)
}

/// A socket of ours among the program's descriptors.
type Socket = gpupool_wire::Socket<own::Own>;

/// Says that one of `export`, `import` and `serve` failed, and why.
fn failed(what: &str, why: impl Display) {
    let why = why.to_string();
    log::emit(|| {
        let text = format!("CUDA IPC, {what} failed: {why}");
        (IpcFailed { what: what.to_owned(), why }, text)
    });
}
