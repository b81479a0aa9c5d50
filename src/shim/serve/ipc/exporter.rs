//! The exporting side: what this process gives others, and to whom it did.
//!
//! An importer says first that it wants a block, with the secret that came in the handle, and keeps the connection as long as
//! it has any block open. While it has one, the block's memory serves nobody else here, whatever becomes of the block
//! ([`gpupool_pool::Pool::hold`]).

use super::server;
use crate::log;
use crate::secret;
use crate::serve::memory;
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Driver, Physical, Properties};
use gpupool_events::IpcExport;
use gpupool_pool::{Anchor, Block, Piece};
use gpupool_wire::blocks::{Handle, Key, Secret, same_secret};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::Error;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A block that was exported and lives.
struct Export {
    address: u64,
    secret: Secret,
    /// Another process has opened it.
    opened: bool,
}

/// The exported blocks, by their numbers.
static EXPORTED: Mutex<BTreeMap<u64, Export>> = Mutex::new(BTreeMap::new());
/// How many exported blocks there are, readable without the lock of [`EXPORTED`].
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// What a key is to this process.
pub enum Asked {
    /// The address of the exported block that it opens.
    Block(u64),
    /// No block of that number is exported, or none any more.
    Gone,
    /// Whoever asks did not get the handle.
    WrongSecret,
}

/// A handle of the block, which is pinned from here on.
///
/// # Errors
/// The driver's refusal to export the memory (`cuMemExportToShareableHandle`), or OPERATING_SYSTEM where no socket, thread
/// or random number could be had; the log says which.
pub fn export(driver: &Driver, block: &Block) -> std::result::Result<Handle, CuResult> {
    let Block { address, bytes, id, .. } = *block;
    let no_means = |error: Error| {
        super::failed("export", format_args!("no socket, thread or random number for it: {error}"));
        CuResult::OPERATING_SYSTEM
    };
    let process = server::start().map_err(no_means)?;
    let handle = |secret| Handle { pid: std::process::id(), process, key: Key { block: id, secret }, bytes };
    let known = EXPORTED.lock().get(&id).map(|export| export.secret);
    if let Some(secret) = known {
        return Ok(handle(secret));
    }
    let mut secret = Secret::default();
    secret::fill(&mut secret).map_err(no_means)?;
    // From here on the memory stays on these chunks.
    if !memory::anchor(address, bytes, Anchor::Shared) {
        return Err(CuResult::INVALID_VALUE);
    }
    let pieces = memory::pieces(address, bytes);
    // Tried on one chunk, so that what cannot be shared is refused here and not in the importer.
    if let Some(first) = pieces.first()
        && let Err(result) = driver.export(first.handle)
    {
        memory::withdraw_anchor(address, bytes, Anchor::Shared);
        super::failed("export", format_args!("the driver does not share this memory ({result})"));
        return Err(result);
    }
    // Before it is in the list: it may end at any time from then on.
    memory::when_blocks_end(block_ended);
    let (first, secret) = {
        let mut exported = EXPORTED.lock();
        let first = !exported.contains_key(&id);
        let export = exported.entry(id).or_insert(Export { address, secret, opened: false });
        let secret = export.secret;
        COUNT.store(exported.len(), Ordering::Release);
        (first, secret)
    };
    if memory::block_at(address).is_none_or(|block| block.id != id) {
        // Another thread freed it meanwhile, and may not have found it here.
        remove(id);
        return Err(CuResult::INVALID_VALUE);
    }
    if first {
        super::count(&super::EXPORTS);
        log::emit(|| {
            let size = format_size(bytes);
            let text = format!("a handle of {size} at {address:#x}; only processes that run under gpupool can open it");
            (IpcExport { address, bytes, chunks: pieces.len() as u64 }, text)
        });
    }
    Ok(handle(secret))
}

/// Whether every piece of this process's block was made so that it can be given away as a descriptor.
pub fn is_shareable(driver: &Driver, block: &Block) -> bool {
    let pieces = memory::pieces(block.address, block.bytes);
    let is_exportable = |piece: &Piece<Physical>| {
        driver.allowed_handle_types(piece.address).is_ok_and(|types| types & Properties::POSIX_FD != 0)
    };
    !pieces.is_empty() && pieces.iter().all(is_exportable)
}

/// What this key is to this process.
pub fn find(key: &Key) -> Asked {
    match EXPORTED.lock().get(&key.block) {
        Some(export) if same_secret(&export.secret, &key.secret) => Asked::Block(export.address),
        Some(_) => Asked::WrongSecret,
        None => Asked::Gone,
    }
}

/// Another process has this block now.
pub fn was_opened(id: u64) {
    if let Some(export) = EXPORTED.lock().get_mut(&id) {
        export.opened = true;
    }
}

/// A block ended; it cannot be opened any more if it was exported.
#[inline]
fn block_ended(id: u64) {
    if COUNT.load(Ordering::Acquire) != 0 {
        forget(id);
    }
}

#[cold]
fn forget(id: u64) {
    if remove(id).is_some_and(|export| !export.opened) {
        warn_unopened("freed");
    }
}

fn remove(id: u64) -> Option<Export> {
    let mut exported = EXPORTED.lock();
    let export = exported.remove(&id);
    COUNT.store(exported.len(), Ordering::Release);
    export
}

/// At the end of the process: says if memory was exported in vain, and what the thread could not say.
pub fn judge() {
    let unopened = COUNT.load(Ordering::Acquire) != 0 && EXPORTED.lock().values().any(|export| !export.opened);
    if unopened {
        warn_unopened("still there at the end of the process");
    }
    server::judge();
}

fn warn_unopened(when: &str) {
    let advice = if server::has_refused() {
        "who tried was refused, as another user's: run both as one user"
    } else {
        "if another process tried in vain, run that one under gpupool, too"
    };
    log::warn_once(
        "ipc.unopened",
        format_args!("memory shared with cuIpcGetMemHandle was {when} and nobody had opened it; {advice}"),
    );
}
