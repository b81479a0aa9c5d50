//! Stream-ordered allocation: `cuMemAllocAsync`, `cuMemAllocFromPoolAsync`, `cuMemFreeAsync`.

use crate::context::{Context, current};
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::graph::Node;
use crate::graph_memory::{self, Allocation};
use crate::mempool::{current_of, usable};
use crate::space::{Kind, Origin};
use crate::stream::{Work, resolve};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A free that its stream has not come to.
struct Pending {
    token: u64,
    /// The number of the region; another one at this address is another allocation.
    region: u64,
    stream: u64,
    pool: Option<Handle>,
    bytes: u64,
}

/// By address. The same stream may have the memory again at once, as what is allocated there comes later.
static PENDING: Mutex<BTreeMap<u64, Pending>> = Mutex::new(BTreeMap::new());
static TOKENS: AtomicU64 = AtomicU64::new(1);

pub fn alloc(out: Out<u64>, bytes: usize, stream: Handle) -> Outcome {
    out.required()?;
    out.set(0)?;
    let device = resolve(stream)?.context()?.device;
    alloc_from(out, bytes, current_of(device), stream)
}

/// `cuMemAllocFromPoolAsync`; in a capture, a node that allocates. The address is usable at once: an earlier owner has freed it in its stream's time, or in this
/// stream.
pub fn alloc_from(out: Out<u64>, bytes: usize, handle: Handle, stream: Handle) -> Outcome {
    out.required()?;
    out.set(0)?;
    let stream = resolve(stream)?;
    let pool = usable(handle)?;
    if bytes == 0 {
        return Ok(());
    }
    let bytes = bytes as u64;
    if let Some(capture) = stream.capturing()? {
        let allocation = Allocation::new(pool.device, bytes, pool.access_list())?;
        let address = allocation.address;
        capture.record(graph_memory::alloc_work(allocation));
        return out.set(address);
    }
    if let Some(address) = reclaim(handle, stream.id(), bytes) {
        return out.set(address);
    }
    let taken = pool.reserve.take(bytes)?;
    let kind = Kind::Plain {
        context: stream.context()?.owner(),
        device: pool.device,
        physical: taken.physical,
        offset: taken.offset,
        origin: Origin::Pool(handle),
    };
    driver().space.insert(taken.address, bytes, kind);
    out.set(taken.address)
}

/// Takes a free of the same stream and size back.
fn reclaim(pool: Handle, stream: u64, bytes: u64) -> Option<u64> {
    let mut pending = PENDING.lock();
    let fits = |entry: &Pending| entry.pool == Some(pool) && entry.stream == stream && entry.bytes == bytes;
    let (&address, entry) = pending.iter().find(|(_, entry)| fits(entry))?;
    let region = entry.region;
    pending.remove(&address);
    drop(pending);
    driver().space.find(address).filter(|found| found.id == region).map(|_| address)
}

/// `cuMemFreeAsync`, also for memory of `cuMemAlloc`.
pub fn free_async(address: u64, stream: Handle) -> Outcome {
    let stream = resolve(stream)?;
    if address == 0 {
        return Ok(());
    }
    current()?;
    let region = driver().space.find(address).filter(|region| region.start == address).ok_or(Code::INVALID_VALUE)?;
    let Kind::Plain { origin, .. } = region.kind else { return Err(Code::INVALID_VALUE) };
    if let Some(capture) = stream.capturing()? {
        // Only memory that a graph allocated; anything else is refused and breaks nothing.
        capture.record(graph_memory::free_work(address)?);
        return Ok(());
    }
    if origin == Origin::Ipc {
        return Err(Code::INVALID_VALUE);
    }
    if let Origin::Graph(_) = origin {
        return stream.run_or_submit(graph_memory::free_later(address)?);
    }
    let pool = if let Origin::Pool(handle) = origin { Some(handle) } else { None };
    let token = TOKENS.fetch_add(1, Ordering::Relaxed);
    let entry = Pending { token, region: region.id, stream: stream.id(), pool, bytes: region.bytes };
    {
        let mut pending = PENDING.lock();
        if pending.get(&address).is_some_and(|earlier| earlier.region == region.id) {
            return Err(Code::INVALID_VALUE);
        }
        pending.insert(address, entry);
    }
    // Not captured by the work: it would keep the memory past the free.
    drop(region);
    let action = move |_: &Context| {
        let mut pending = PENDING.lock();
        // Allocated again meanwhile, or the context took it with it.
        if pending.get(&address).is_none_or(|entry| entry.token != token) {
            return Ok(());
        }
        pending.remove(&address);
        drop(pending);
        let _ = driver().space.free(address);
        Ok(())
    };
    let work = Work { action: Arc::new(action), touches: Vec::new(), node: Node::Empty };
    stream.run_or_submit(work).inspect_err(|_| {
        PENDING.lock().remove(&address);
    })
}
