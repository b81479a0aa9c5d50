//! How does memory of a GPU get into a store on a disk, and back?
//!
//! A [`Shuttle`] takes it through a few pinned buffers: while the threads of the store compress and write some, the copy engine fills
//! others. Two streams take turns, so that one copy is under way while the one before it is handed over. One big pinned buffer would take longer to pin
//! than to fill.
//!
//! **Whoever uses one** sees to it that nobody writes to what is saved and nobody uses what is loaded: by holding the gate, or because
//! the memory is nobody else's. Addresses of the pool reach over pieces at different places, and so may what is saved at once.
//!
//! **A shuttle keeps its context alive** and its buffers until the store has given all of them back, so it ends as soon as what was
//! handed over is written: a program that ends its context meanwhile waits for that.

mod buffers;
pub mod crew;
pub mod plain;
#[cfg(test)]
mod tests;

use crate::backing::mover;
use crate::backing::open::Opened;
use crate::gate;
use crate::guard;
use crate::log;
use crate::process;
use crate::watch::context::{self, Lease};
use buffers::{Buffers, Lent};
use gpupool_cuda::{Context, CuResult, Driver, Stream};
use gpupool_metrics::Identity;
use gpupool_store::{Key, Meta, OfRanks, PART, Process, Reader, Writer, signals};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The fewest and the most buffers. As many as the store has threads that each work on one, and those that are being filled.
const FEWEST: usize = 4;
const MOST: usize = 18;
/// How often a copy is waited for where the driver refuses to: what was begun must be over before anybody unmaps what it reads or writes. Only in
/// a context that is broken does no wait succeed, and nothing runs there.
const TRIES: u32 = 5;
/// Copies under way at once.
const UNDER_WAY: usize = 2;

/// Why bytes did not get there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// No context of this GPU lives in which they could be copied, or each is about to end.
    NoContext { gpu: u32 },
    /// The driver refused a copy, or what a copy needs.
    Driver { gpu: u32, doing: &'static str, result: CuResult },
    /// The store could not take or give them.
    Store(gpupool_store::Error),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoContext { gpu } => {
                write!(
                    f,
                    "GPU {gpu} has no context that its memory could be copied in, or none that is not about to end"
                )
            }
            Self::Driver { gpu, doing, result } => write!(f, "the driver answered {result} to {doing} on GPU {gpu}"),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl From<gpupool_store::Error> for Failed {
    fn from(error: gpupool_store::Error) -> Self {
        Self::Store(error)
    }
}

/// What a store is told about this process.
pub fn meta(opened: &Opened) -> Meta {
    let command = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let command = String::from_utf8_lossy(command.strip_suffix(b"\0").unwrap_or(&command)).replace('\0', " ");
    let started = Identity::own().map_or(0, |identity| identity.started);
    Meta {
        process: Process { pid: std::process::id(), started, command },
        host: log::host_name().to_string_lossy().into_owned(),
        gpupool: env!("CARGO_PKG_VERSION").to_owned(),
        gpus: opened.plan.topology.gpus.iter().map(|gpu| gpupool_machine::dashed(&gpu.uuid)).collect(),
        notes: rank().map(OfRanks::note).into_iter().collect(),
    }
}

/// Which rank this process is; `None` where no launcher says that there are several.
pub fn rank() -> Option<OfRanks> {
    let rank = process::rank()?;
    let of = match (rank.overall, rank.overall_ranks) {
        (Some(number), Some(ranks)) => OfRanks { number, ranks },
        _ => OfRanks { number: rank.number, ranks: rank.ranks? },
    };
    (of.ranks > 1).then_some(of)
}

/// Where the parts of a stretch begin, counted from its beginning, and how long they are. They are cut where the block has a multiple of [`PART`], so that
/// the same bytes of a block are a part whatever else is stored with them: only so is a part found again that has not changed.
pub fn parts(offset: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let from = done;
        let next = PART as u64 - (offset + from) % PART as u64;
        let length = next.min(bytes - from);
        done += length;
        (length > 0).then_some((from, length as usize))
    })
}

/// Bytes of a stored block, and where they go.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    pub block: u64,
    pub offset: u64,
    pub address: u64,
    pub bytes: u64,
}

/// What a thread loads at a time: bytes of a block that lie within what it has between two multiples of [`PART`].
#[derive(Debug, PartialEq, Eq)]
struct Cell {
    block: u64,
    offset: u64,
    bytes: usize,
    /// Where they go, one after the other: addresses, and how many bytes.
    to: Vec<(u64, usize)>,
}

/// These stretches in the order in which they were stored. What lies in the same part is read once, however many chunks of the pool it goes to.
fn cells(stretches: &[Stretch]) -> Vec<Cell> {
    let mut stretches = stretches.to_vec();
    stretches.sort_unstable_by_key(|stretch| (stretch.block, stretch.offset));
    let mut cells: Vec<Cell> = Vec::new();
    for Stretch { block, offset, address, bytes } in stretches {
        for (done, bytes) in parts(offset, bytes) {
            let (offset, address) = (offset + done, address + done);
            let part = |offset: u64| offset / PART as u64;
            match cells.last_mut() {
                Some(cell)
                    if cell.block == block
                        && cell.offset + cell.bytes as u64 == offset
                        && part(cell.offset) == part(offset) =>
                {
                    cell.bytes += bytes;
                    cell.to.push((address, bytes));
                }
                _ => cells.push(Cell { block, offset, bytes, to: vec![(address, bytes)] }),
            }
        }
    }
    cells
}

/// Bytes that are on their way to a buffer.
struct Filling {
    lent: Lent,
    stream: Stream,
    key: Key,
    offset: u64,
}

/// Takes memory of one GPU's blocks to a store and back.
pub struct Shuttle {
    driver: &'static Driver,
    owner: u64,
    gpu: u32,
    context: u64,
    handle: Context,
    streams: [Stream; UNDER_WAY],
    buffers: Buffers,
    filling: VecDeque<Filling>,
    /// How many copies were begun, for whose turn it is.
    begun: usize,
    /// Last, as it is what everything above needs.
    _lives: Lease,
}

impl Shuttle {
    /// For blocks of this owner ([`gpupool_pool::Block::owner`]) with this home. It makes streams and pins memory, which waits for kernels that
    /// run.
    pub fn new(driver: &'static Driver, owner: u64, gpu: u32) -> Result<Self, Failed> {
        Self::for_bytes(driver, owner, gpu, u64::MAX)
    }

    /// The same with no more buffers than so many bytes need: pinning takes longer than filling.
    pub fn for_bytes(driver: &'static Driver, owner: u64, gpu: u32, bytes: u64) -> Result<Self, Failed> {
        let (context, handle, lives) = mover::context_for(owner, gpu).ok_or(Failed::NoContext { gpu })?;
        let count = std::thread::available_parallelism().map_or(FEWEST, |many| many.get() + UNDER_WAY);
        let needed = usize::try_from(bytes.div_ceil(PART as u64)).unwrap_or(MOST).max(UNDER_WAY);
        let count = count.clamp(FEWEST, MOST).min(needed);
        let make = || {
            let _relaxed = driver.relax();
            let failed = |doing| move |result| Failed::Driver { gpu, doing, result };
            let end = |stream| {
                // SAFETY: made here, and nobody else knows it.
                let _: CuResult = unsafe { driver.destroy_stream(stream) };
            };
            let first = driver.create_stream().map_err(failed("making a stream"))?;
            let second = driver.create_stream().inspect_err(|_| end(first)).map_err(failed("making a stream"))?;
            let buffers = Buffers::pin(driver, count).inspect_err(|_| [first, second].into_iter().for_each(end));
            Ok(([first, second], buffers.map_err(failed("pinning host memory"))?))
        };
        let (streams, buffers) = context::within_own(driver, handle, make).unwrap_or(Err(Failed::NoContext { gpu }))?;
        let filling = VecDeque::new();
        Ok(Self { driver, owner, gpu, context, handle, streams, buffers, filling, begun: 0, _lives: lives })
    }

    /// Stores memory as a part of a block, from this offset on. It returns before all of it is copied: [`saved`](Self::saved) waits for that.
    pub fn save(&mut self, writer: &Writer, key: Key, offset: u64, address: u64, bytes: u64) -> Result<(), Failed> {
        for (done, bytes) in parts(offset, bytes) {
            while self.filling.len() >= UNDER_WAY {
                self.hand_over(writer)?;
            }
            let lent = self.buffers.take(bytes);
            self.begin(lent, (key, offset + done), address + done)?;
        }
        Ok(())
    }

    /// Waits until all that was to be saved is copied and with the store; its memory may change from then on.
    pub fn saved(&mut self, writer: &Writer) -> Result<(), Failed> {
        while !self.filling.is_empty() {
            self.hand_over(writer)?;
        }
        Ok(())
    }

    /// The same beside a program that runs, for memory that nobody else uses: each copy passes the gate, so that nothing moves meanwhile, and is over
    /// before the next one begins. All of it is with the store when this returns. A call that is about to end the context goes on: the rest is copied in
    /// another one of this GPU.
    pub fn save_beside(
        &mut self,
        writer: &Writer,
        key: Key,
        offset: u64,
        address: u64,
        bytes: u64,
    ) -> Result<(), Failed> {
        for (done, bytes) in parts(offset, bytes) {
            if context::keep(self.context).is_none() {
                // Nothing is on its way between two parts.
                *self = Self::new(self.driver, self.owner, self.gpu)?;
            }
            // A disk is waited for outside of the gate.
            let lent = self.buffers.take(bytes);
            {
                let _inside = gate::enter_by_hand();
                let stream = self.begin(lent, (key, offset + done), address + done)?;
                self.wait_for(stream)?;
            }
            self.hand_over(writer)?;
        }
        Ok(())
    }

    /// Begins to fill a buffer, in turn on one of the streams.
    fn begin(&mut self, lent: Lent, (key, offset): (Key, u64), address: u64) -> Result<Stream, Failed> {
        let stream = self.streams[self.begun % UNDER_WAY];
        let copy = || {
            let _relaxed = self.driver.relax();
            let bytes = lent.as_ref().len() as u64;
            // SAFETY: the stream lives as long as this does. The buffer has so many bytes, and is read by `hand_over` once the stream has
            // come to this copy.
            unsafe { self.driver.copy_to_host(stream, lent.start(), address, bytes) }.ok()
        };
        self.within(copy).map_err(self.failed("a copy to the host"))?;
        self.begun += 1;
        self.filling.push_back(Filling { lent, stream, key, offset });
        Ok(stream)
    }

    fn hand_over(&mut self, writer: &Writer) -> Result<(), Failed> {
        let Some(Filling { lent, stream, key, offset }) = self.filling.pop_front() else { return Ok(()) };
        if let Err(failed) = self.wait_for(stream) {
            // Nobody knows whether the copy is over.
            lent.lose();
            return Err(failed);
        }
        Ok(writer.submit(key, offset, lent)?)
    }

    fn wait_for(&self, stream: Stream) -> Result<(), Failed> {
        let wait = || {
            let _relaxed = self.driver.relax();
            // SAFETY: the stream lives as long as this does.
            unsafe { self.driver.synchronize_stream(stream) }.ok()
        };
        let waited = (1..TRIES).find_map(|_| self.within(wait).ok());
        waited.map_or_else(|| self.within(wait), Ok).map_err(self.failed("a wait for a copy"))
    }

    /// Waits for all work of the context, so that nothing of it still writes to what is about to be loaded.
    pub fn wait_for_context(&self) -> Result<(), Failed> {
        let wait = || {
            let _relaxed = self.driver.relax();
            self.driver.synchronize().ok()
        };
        self.within(wait).map_err(self.failed("a wait for the context"))
    }

    /// Brings bytes of a stored block back, from this offset of it on. All of them are there, and compared with their hashes, when it returns.
    pub fn load(&self, reader: &Reader, block: u64, offset: u64, address: u64, bytes: u64) -> Result<(), Failed> {
        self.load_all(reader, &[Stretch { block, offset, address, bytes }])
    }

    /// Brings all of these back, by as many threads as there are buffers. Each reads, decompresses and copies on its own, so that while some wait for the disk
    /// others compute: were they to wait for one another, either would lie idle in turn. All of it is there, and compared with its hashes, when this returns.
    pub fn load_all(&self, reader: &Reader, stretches: &[Stretch]) -> Result<(), Failed> {
        if self.buffers.has_lost() {
            return Err(Failed::NoContext { gpu: self.gpu });
        }
        let cells = cells(stretches);
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = |stream| {
            let load = || {
                let _relaxed = self.driver.relax();
                let mut loaded = Ok(());
                while loaded.is_ok() && failed.lock().is_none() {
                    let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    loaded = self.load_cell(reader, cell, stream);
                }
                loaded
            };
            let lost = Failed::NoContext { gpu: self.gpu };
            if let Err(error) = context::within_own(self.driver, self.handle, load).unwrap_or(Err(lost)) {
                failed.lock().get_or_insert(error);
            }
        };
        let (threads, mut streams) = (self.buffers.count().min(cells.len()), self.streams.iter().copied().cycle());
        let own = self.streams[UNDER_WAY - 1];
        std::thread::scope(|scope| {
            let work = &work;
            // Where the system has no thread to spare, fewer load.
            for stream in streams.by_ref().take(threads.saturating_sub(1)) {
                let body = move || {
                    // Every driver call of this thread is ours.
                    let _inside = guard::enter();
                    work(stream);
                };
                if signals::spawn_in(scope, body).is_err() {
                    break;
                }
            }
            work(own);
        });
        failed.into_inner().map_or(Ok(()), Err)
    }

    fn load_cell(&self, reader: &Reader, cell: &Cell, stream: Stream) -> Result<(), Failed> {
        let mut lent = self.buffers.take(cell.bytes);
        reader.read_here(cell.block, cell.offset, lent.as_mut())?;
        let mut from = lent.start().cast_const();
        let mut copied = Ok(());
        for &(address, bytes) in &cell.to {
            // SAFETY: the stream lives as long as this does. The pieces of a cell are as long as it is, and the buffer is written to again once
            // the stream was waited for.
            copied = unsafe { self.driver.copy_to_device(stream, address, from, bytes as u64) }.ok();
            if copied.is_err() {
                break;
            }
            from = from.wrapping_add(bytes);
        }
        if let Err(failed) = self.wait_for(stream) {
            // Nobody knows whether the copy is over.
            lent.lose();
            return Err(failed);
        }
        copied.map_err(self.failed("a copy to the GPU"))
    }

    /// Reads back what was loaded into a whole block, and compares it with the block's hashes; `false`: it is something else.
    pub fn has_arrived(&mut self, reader: &Reader, block: u64, address: u64) -> Result<bool, Failed> {
        let lost = Failed::NoContext { gpu: self.gpu };
        let all = self.buffers.take_all().ok_or(lost)?;
        let parts = reader.block(block).map(|block| &block.parts[..]).unwrap_or_default();
        let stream = self.streams[0];
        for part in parts {
            for done in (0..part.bytes).step_by(PART) {
                let bytes = (part.bytes - done).min(PART as u64);
                let room = &mut all.bytes[..usize::try_from(bytes).unwrap_or(0)];
                let (offset, to) = (part.offset + done, room.as_mut_ptr());
                let copy = || {
                    let _relaxed = self.driver.relax();
                    // SAFETY: the stream lives as long as this does. The buffer has so many bytes, and is read once the stream was waited for.
                    unsafe { self.driver.copy_to_host(stream, to, address + offset, bytes) }.ok()
                };
                let copied = self.within(copy).map_err(self.failed("a copy to the host"));
                if let Err(failed) = copied.and_then(|()| self.wait_for(stream)) {
                    // Nobody knows whether the copy is over.
                    std::mem::forget(all);
                    self.buffers.lose_all();
                    return Err(failed);
                }
                if !reader.is(block, part, offset, room) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn within<T>(&self, act: impl FnOnce() -> Result<T, CuResult>) -> Result<T, CuResult> {
        context::within_own(self.driver, self.handle, act).unwrap_or(Err(CuResult::CONTEXT_IS_DESTROYED))
    }

    fn failed(&self, doing: &'static str) -> impl Fn(CuResult) -> Failed + use<> {
        let gpu = self.gpu;
        move |result| Failed::Driver { gpu, doing, result }
    }
}

impl Drop for Shuttle {
    fn drop(&mut self) {
        // What was begun is over before its buffer is anybody else's.
        while let Some(Filling { lent, stream, .. }) = self.filling.pop_front() {
            if self.wait_for(stream).is_err() {
                lent.lose();
            }
        }
        // The store's threads read what they have, so the context stays until then, also one that is in error.
        self.buffers.wait();
        let end = || {
            let _relaxed = self.driver.relax();
            self.buffers.unpin();
            for stream in self.streams {
                // SAFETY: made by `new` in this context, and nobody uses it after this.
                let _: CuResult = unsafe { self.driver.destroy_stream(stream) };
            }
            Ok(())
        };
        let _ = self.within(end);
    }
}
