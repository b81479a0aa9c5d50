//! The importing side: what this process has open of others' blocks.

use super::peers::{Failure, Lease, failure, no_descriptor};
use super::server;
use crate::backing::topology::Topology;
use crate::bypass::Bypass;
use crate::fence;
use crate::log;
use crate::serve::memory::memops;
use crate::watch::context::Gpus;
use crate::watch::context::{self, Context, Observer};
use gpupool_config::format_size;
use gpupool_cuda::{Access, CuResult, Device, Driver};
use gpupool_events::{IpcClose, IpcImport};
use gpupool_pool::{Block, Place};
use gpupool_wire::blocks::{Answer, BATCH, Chunk, Handle, Layout, Where};
use parking_lot::Mutex;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Tries with connections that break in the middle: another thread of either program closes what it did not open.
const TRIES: u32 = 4;
/// How often [`undo`] makes a call that fails.
const UNDO_TRIES: u32 = 6;
/// Numbers of imported blocks start here, apart from those of the pool's own.
const FIRST_ID: u64 = 1 << 47;

/// One opened handle.
struct Import {
    handle: [u8; 64],
    /// The block as the program sees it.
    block: Block,
    mapped: Mapped,
    /// How often it was opened, less how often it was closed.
    count: u32,
    /// The last close is under way.
    closing: bool,
}

static IMPORTS: Mutex<Vec<Import>> = Mutex::new(Vec::new());
/// How many handles are open, readable without the lock of [`IMPORTS`].
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Closed by the program while a stream was being captured and nothing was left to wait with: unmapped later.
static CLOSED: Mutex<Vec<Closed>> = Mutex::new(Vec::new());

struct Closed {
    _mapped: Mapped,
    /// The ids of the contexts whose work the close would have waited for.
    contexts: [u64; 2],
}

/// Another process's block in this one. Unmapped before the exporter hears that it is: fields are dropped in their order.
struct Mapped {
    range: Range,
    _lease: Lease,
}

/// Whether any block of another process is open here.
#[inline]
pub fn is_any() -> bool {
    COUNT.load(Ordering::Acquire) != 0
}

/// The imported block that an address lies in.
#[inline]
pub fn block_at(address: u64) -> Option<Block> {
    if !is_any() {
        return None;
    }
    let imports = IMPORTS.lock();
    let mut blocks = imports.iter().filter(|import| !import.closing).map(|import| import.block);
    blocks.find(|block| address.wrapping_sub(block.address) < block.bytes)
}

/// Opens a handle, or counts it once more; the address for the program.
pub fn open(driver: &'static Driver, bytes: &[u8; 64], handle: &Handle) -> Result<u64, CuResult> {
    if server::process() == Some(handle.process) {
        // What the driver says to the process that exported.
        return Err(CuResult::INVALID_CONTEXT);
    }
    // No open waits for anybody.
    unmap_unused(driver, &[]);
    if let Some(answer) = reopen(driver, bytes) {
        return answer;
    }
    let begun = Instant::now();
    let mut tries = 0;
    loop {
        tries += 1;
        match fetch(driver, handle) {
            Ok((mapped, layout)) => return enter(driver, bytes, handle, mapped, &layout, begun),
            Err(Failure { broken: true, .. }) if tries < TRIES => {}
            Err(Failure { result, why, .. }) => {
                let pid = handle.pid;
                super::failed("import", format_args!("{} of process {pid}: {why}", format_size(handle.bytes)));
                return Err(result);
            }
        }
    }
}

/// Where a handle is open, for a thread in this context. A context of another GPU has it at an address of its own, and another one of
/// the same GPU is refused, as by the driver (measured). Not in another one that may be ending, in a call of some thread: what is open there
/// goes with it, and this may be the next context, of the same handle, which keeps what it opens.
fn open_already<'a>(
    imports: &'a mut [Import],
    bytes: &[u8; 64],
    current: Option<Context>,
) -> Option<Result<&'a mut Import, CuResult>> {
    let (id, device) = current.map_or((0, None), |context| (context.id, Some(context.device)));
    let is_here = |owner: u64| {
        owner == id
            || context::owner(owner).is_none_or(|(context, _)| device.is_none_or(|device| context.device == device))
                && context::keep(owner).is_some()
    };
    let mut known = imports.iter_mut().filter(|import| import.handle == *bytes && !import.closing);
    let import = known.find(|import| is_here(import.block.owner))?;
    Some(if import.block.owner == id || device.is_none() { Ok(import) } else { Err(CuResult::INVALID_HANDLE) })
}

fn reopen(driver: &Driver, bytes: &[u8; 64]) -> Option<Result<u64, CuResult>> {
    if !is_any() {
        return None;
    }
    let current = context::current(driver);
    let mut imports = IMPORTS.lock();
    let import = open_already(&mut imports, bytes, current)?;
    Some(import.map(|import| {
        import.count += 1;
        import.block.address
    }))
}

fn enter(
    driver: &'static Driver,
    bytes: &[u8; 64],
    handle: &Handle,
    mapped: Mapped,
    layout: &Layout,
    begun: Instant,
) -> Result<u64, CuResult> {
    static NEXT_ID: AtomicU64 = AtomicU64::new(FIRST_ID);
    let current = context::current(driver);
    let owner = current.map_or(0, |context| context.id);
    // It counts as the GPU's that opened it, wherever it lies, as with the driver (measured).
    let of_exporter = || driver.devices().find(|device| driver.uuid_bytes(*device) == layout.home);
    let home = current.map(|context| context.device).or_else(of_exporter).map_or(0, Device::ordinal);
    let address = mapped.range.base + layout.offset;
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let block = Block { address, bytes: handle.bytes, home, owner, id };
    {
        let mut imports = IMPORTS.lock();
        // Another thread may have opened the same handle meanwhile; then this range goes again.
        if let Some(first) = open_already(&mut imports, bytes, current) {
            let address = first.map(|first| {
                first.count += 1;
                first.block.address
            });
            drop(imports);
            drop(mapped);
            return address;
        }
        imports.push(Import { handle: *bytes, block, mapped, count: 1, closing: false });
        COUNT.store(imports.len(), Ordering::Release);
    }
    super::count(&super::IMPORTS);
    let seconds = begun.elapsed().as_secs_f64();
    log::emit(|| {
        let (bytes, chunks, exporter) = (handle.bytes, u64::from(layout.chunks), handle.pid);
        let text = format!("opened {} of process {exporter} at {address:#x}", format_size(bytes));
        (IpcImport { address, bytes, chunks, exporter, seconds }, text)
    });
    Ok(address)
}

/// Closes what [`open`] gave.
pub fn close(driver: &'static Driver, address: u64) -> Result<CuResult, Bypass> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Err(Bypass::NotOurs);
    }
    let owner = {
        let mut imports = IMPORTS.lock();
        let known = imports.iter_mut().find(|import| import.block.address == address && !import.closing);
        let import = known.ok_or(Bypass::NotOurs)?;
        if import.count > 1 {
            import.count -= 1;
            return Ok(CuResult::SUCCESS);
        }
        import.closing = true;
        import.block.owner
    };
    // The driver's own close waits for the context that the handle was opened in and for the current one, and for nobody
    // else, who may be waiting for this very thread. An error of the current context is the answer.
    let contexts = [owner, context::current(driver).map_or(owner, |context| context.id)];
    let answer = wait(driver, &contexts);
    let removed = {
        let mut imports = IMPORTS.lock();
        let index = imports.iter().position(|import| import.block.address == address && import.closing);
        let index = index.ok_or(Bypass::NotOurs)?;
        if answer.is_ok() {
            let import = imports.swap_remove(index);
            COUNT.store(imports.len(), Ordering::Release);
            Some(import)
        } else {
            imports[index].closing = false;
            None
        }
    };
    if let Some(import) = removed {
        let bytes = import.block.bytes;
        memops::ended(&import.block);
        if answer == Ok(true) {
            drop(import.mapped);
            unmap_unused(driver, &contexts);
        } else {
            CLOSED.lock().push(Closed { _mapped: import.mapped, contexts });
        }
        log::emit(|| (IpcClose { address, bytes }, format!("closed {} at {address:#x}", format_size(bytes))));
    }
    Ok(answer.err().unwrap_or(CuResult::SUCCESS))
}

/// Closes what was opened in contexts that are gone.
pub struct OfContexts;

impl Observer for OfContexts {
    fn ended(&self, id: u64) -> usize {
        if let Ok(driver) = gpupool_cuda::get() {
            owner_gone(driver, id);
        }
        0
    }
}

/// Closes what was opened in the context with this id, which is gone.
fn owner_gone(driver: &'static Driver, owner: u64) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let gone: Vec<Import> = {
        let mut imports = IMPORTS.lock();
        let (gone, left) = imports.drain(..).partition(|import| import.block.owner == owner && !import.closing);
        *imports = left;
        COUNT.store(imports.len(), Ordering::Release);
        gone
    };
    gone.iter().for_each(|import| memops::ended(&import.block));
    // The driver has waited for the context, and waits for no other when it ends what was opened in it.
    drop(gone);
    unmap_unused(driver, &[owner]);
}

/// Waits for all work in the contexts with these ids; `false` where nobody can wait now ([`fence::quiesce_owner`]).
fn wait(driver: &Driver, contexts: &[u64]) -> Result<bool, CuResult> {
    for id in contexts {
        match fence::quiesce_owner(driver, *id, Gpus::All) {
            Ok(_) => {}
            Err(CuResult::NOT_READY) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Unmaps those of [`CLOSED`] that nothing uses by now: the work of their contexts is over, or those in `waited_for` have
/// just been waited for. This function waits for nobody.
fn unmap_unused(driver: &Driver, waited_for: &[u64]) {
    let closed = std::mem::take(&mut *CLOSED.lock());
    let is_over = |id: &u64| waited_for.contains(id) || fence::owner_has_finished(driver, *id);
    // What nothing uses is dropped here, unlocked.
    let (_unused, mut used): (Vec<Closed>, Vec<Closed>) =
        closed.into_iter().partition(|closed| closed.contexts.iter().all(is_over));
    CLOSED.lock().append(&mut used);
}

/// Address space with chunks of another process mapped in it, which are unmapped when it is dropped.
struct Range {
    driver: &'static Driver,
    base: u64,
    span: u64,
    /// Bytes that are mapped so far, from `base` on.
    mapped: u64,
}

impl Range {
    fn reserve(driver: &'static Driver, span: u64) -> Result<Self, CuResult> {
        let base = driver.reserve(span)?;
        Ok(Self { driver, base, span, mapped: 0 })
    }

    /// Maps another process's chunk behind those mapped already.
    fn map(&mut self, descriptor: OwnedFd, bytes: u64) -> Result<(), CuResult> {
        let handle = self.driver.import(&descriptor)?;
        drop(descriptor);
        let mapped = self.driver.map(self.base + self.mapped, bytes, handle, 0);
        // The memory lives as long as the mapping.
        undo(|| self.driver.release(handle));
        mapped.ok()?;
        self.mapped += bytes;
        Ok(())
    }

    fn grant(&self, from: u64, to: u64, devices: &[u32]) -> Result<(), CuResult> {
        let list: Vec<_> = devices.iter().copied().map(Access::read_write).collect();
        self.driver.set_access(self.base + from, to - from, &list).ok()
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // Whoever drops it made sure that no work uses the memory.
        let unmap = || self.driver.unmap(self.base, self.mapped);
        if self.mapped > 0 && !undo(unmap) {
            // The addresses stay taken: whatever is mapped there must not be found under another name.
            return;
        }
        undo(|| self.driver.free_reservation(self.base, self.span));
    }
}

/// Makes a call that undoes something, and makes it again after a failure: nothing else would undo it.
fn undo(call: impl Fn() -> CuResult) -> bool {
    (0..UNDO_TRIES).any(|_| call().is_ok())
}

/// Gets a block's chunks from its process and maps them.
fn fetch(driver: &'static Driver, handle: &Handle) -> Result<(Mapped, Layout), Failure> {
    let mut lease = Lease::of(handle)?;
    let topology = Topology::read(driver)
        .map_err(|unanswered| failure(unanswered.result, format_args!("the GPUs do not answer ({unanswered})")))?;
    let mut most = descriptors_left();
    let (mut first, mut range): (u32, Option<(Range, Layout)>) = (0, None);
    // Rows of chunks at one place get access in one call: the cost is mostly per call.
    let mut row: Option<(u64, Place)> = None;
    loop {
        let (layout, chunks, descriptors) = match lease.ask(first, most)? {
            Some((Answer::Chunks { layout, chunks }, descriptors)) => (layout, chunks, descriptors),
            Some(_) => return Err(failure(CuResult::INVALID_VALUE, "its answer makes no sense")),
            None if most > 1 => {
                most = 1;
                continue;
            }
            None => return Err(no_descriptor()),
        };
        let (range, known) = match &mut range {
            Some(range) => range,
            None => {
                let made = Range::reserve(driver, layout.span).map_err(|result| {
                    failure(result, format_args!("no {} of address space ({result})", format_size(layout.span)))
                })?;
                range.insert((made, layout))
            }
        };
        if *known != layout || !layout.holds(handle.bytes) || chunks.len() != descriptors.len() || chunks.is_empty() {
            return Err(failure(CuResult::INVALID_VALUE, "its answer makes no sense"));
        }
        for (chunk, descriptor) in chunks.iter().zip(descriptors) {
            let place = place_here(&topology, chunk)?;
            if let Some((from, before)) = row.filter(|(_, before)| *before != place) {
                give_access(range, &topology, from, before)?;
                row = None;
            }
            row = row.or(Some((range.mapped, place)));
            if chunk.bytes > range.span - range.mapped {
                return Err(failure(CuResult::INVALID_VALUE, "its chunks are larger than it said"));
            }
            range.map(descriptor, chunk.bytes).map_err(|result| Failure {
                // Another thread may have closed this descriptor, whose number is then nobody's, or something else's.
                broken: true,
                ..failure(
                    result,
                    format_args!("the driver did not take a chunk of {} ({result})", format_size(chunk.bytes)),
                )
            })?;
        }
        first += chunks.len() as u32;
        if range.mapped == range.span {
            break;
        }
    }
    let (Some((range, layout)), Some((from, place))) = (range, row) else {
        return Err(failure(CuResult::INVALID_VALUE, "its answer makes no sense"));
    };
    give_access(&range, &topology, from, place)?;
    lease.done();
    Ok((Mapped { range, _lease: lease }, layout))
}

/// Gives every GPU of this process that can reach the place access to what is mapped from `from` on: a copy from a context
/// without access would kill that context.
fn give_access(range: &Range, topology: &Topology, from: u64, place: Place) -> Result<(), Failure> {
    let reaches = |ordinal: u32| match place {
        Place::Gpu(owner) => topology.reach(ordinal, owner),
        Place::Host(_) => true,
        Place::Disk | Place::Pageable => false,
    };
    let gpus = topology.gpus.iter().filter(|gpu| gpu.vmm && reaches(gpu.ordinal));
    let devices: Vec<u32> = gpus.map(|gpu| gpu.ordinal).collect();
    range
        .grant(from, range.mapped, &devices)
        .map_err(|result| failure(result, format_args!("no access to its memory ({result})")))
}

/// Where a chunk is, by this process's numbers.
fn place_here(topology: &Topology, chunk: &Chunk) -> Result<Place, Failure> {
    match chunk.place {
        Where::Host(node) => Ok(Place::Host(node)),
        Where::Gpu(uuid) => {
            let gpu = topology.gpus.iter().find(|gpu| gpu.uuid == uuid);
            gpu.map(|gpu| Place::Gpu(gpu.ordinal)).ok_or_else(|| {
                let name = gpupool_cuda::device::dashed(&uuid);
                failure(
                    CuResult::INVALID_DEVICE,
                    format_args!(
                        "part of it is on GPU-{name}, which this process does not see (CUDA_VISIBLE_DEVICES); let it see \
                         every GPU of the exporter's pool, or limit that with GPUPOOL_DEVICES"
                    ),
                )
            })
        }
    }
}

/// How many descriptors to ask for at a time: a quarter of those that this process may still open, since other threads
/// open some, too.
fn descriptors_left() -> u32 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the output is a local.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |list| list.count() as u64);
    let left = limit.rlim_cur.saturating_sub(open) / 4;
    left.clamp(1, u64::from(BATCH)) as u32
}
