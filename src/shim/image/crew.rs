//! Several threads that take memory of one GPU to plain memory of the host and back, each through two small pinned buffers of its own: while
//! the copy engine fills one, the processor empties the other.
//!
//! Plain memory is faster than what the driver makes (GB/s on H200: `cuMemCreate` of host memory makes 3.4, and 4.4 by eight threads; plain
//! memory that was never touched takes 38 from sixteen threads, buffers of 2 MiB and large pages; the way back is 46 by these and 52 by eight threads and
//! buffers of 8 MiB; RESULTS.md). Pinning it in place and copying straight there makes 19, as pinning and unpinning take longer than copying.
//!
//! **Whoever uses one** sees to it that nobody uses the memory meanwhile, as for a [`Shuttle`](super::Shuttle).

use super::plain::Plain;
use super::{Failed, TRIES};
use crate::backing::{mover, numa};
use crate::guard;
use crate::watch::context::{self, Lease};
use gpupool_cuda::{Context, CuResult, Driver, Stream};
use gpupool_store::signals;
use std::collections::{BTreeMap, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

/// Buffers of each thread.
const BUFFERS: usize = 2;
/// What a thread takes on at a time.
const UNIT: u64 = 8 << 20;
/// So much of what is carried is worth a byte of buffers, which have to be pinned.
const WORTH: u64 = 16;

/// Which way memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the host, where what is zero is not written if it is there already, so that it takes no memory.
    Out,
    Back,
}

impl Way {
    /// Bytes of a buffer. Out: the processor's cache keeps what the copy engine writes to a small one until a thread reads it.
    fn buffer(self) -> u64 {
        match self {
            Self::Out => 2 << 20,
            Self::Back => 8 << 20,
        }
    }

    /// The most threads for one GPU. Out: each makes the pages that it fills.
    fn threads(self) -> u64 {
        match self {
            Self::Out => 16,
            Self::Back => 8,
        }
    }
}

/// Memory of the GPU, and plain memory of as many bytes that it goes to or comes from.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub address: u64,
    /// Where it is on the host.
    pub host: usize,
    pub bytes: u64,
    /// Whether something else may lie there, on the way out. Otherwise it is zero.
    pub used: bool,
}

/// Pinned memory of [`Way::buffer`] bytes, and the stream that copies to it or from it.
#[derive(Clone, Copy)]
struct Buffer {
    stream: Stream,
    start: usize,
}

/// The threads' buffers and streams. The threads themselves are there while something is carried.
pub struct Crew {
    driver: &'static Driver,
    gpu: u32,
    handle: Context,
    /// [`BUFFERS`] of them for each thread.
    buffers: Vec<Buffer>,
    way: Way,
    /// All buffers, pinned.
    memory: ManuallyDrop<Plain>,
    /// Something may still write to the buffers.
    is_lost: AtomicBool,
    /// Last, as it is what everything above needs.
    _lives: Lease,
}

impl Crew {
    /// For blocks of this owner ([`gpupool_pool::Block::owner`]) with this home, of which so many bytes are to go this way, while so many
    /// crews work at once. It makes streams and pins memory, which waits for kernels that run.
    ///
    /// # Errors
    /// The context is gone, or the driver refuses.
    pub fn new(
        driver: &'static Driver,
        owner: u64,
        gpu: u32,
        way: Way,
        bytes: u64,
        crews: usize,
    ) -> Result<Self, Failed> {
        let (_, handle, lives) = mover::context_for(owner, gpu).ok_or(Failed::NoContext { gpu })?;
        let count = Self::buffers_for(way, bytes, crews);
        let make = || {
            let _relaxed = driver.relax();
            let _near = numa::prefer_near(driver);
            let failed = |doing| move |result| Failed::Driver { gpu, doing, result };
            let pinning = failed("pinning host memory");
            let memory = Plain::new(count * way.buffer()).map_err(|_| pinning(CuResult::OUT_OF_MEMORY))?;
            driver.register(memory.start() as u64, count * way.buffer()).ok().map_err(pinning)?;
            let (start, memory, is_lost) = (memory.start(), ManuallyDrop::new(memory), AtomicBool::new(false));
            let mut crew = Self { driver, gpu, handle, buffers: Vec::new(), way, memory, is_lost, _lives: lives };
            for number in 0..count {
                let stream = driver.create_stream().map_err(failed("making a stream"))?;
                crew.buffers.push(Buffer { stream, start: start + (number * way.buffer()) as usize });
            }
            Ok(crew)
        };
        context::within_own(driver, handle, make).unwrap_or(Err(Failed::NoContext { gpu }))
    }

    /// How many buffers are worth it for so many bytes, while so many crews work at once.
    fn buffers_for(way: Way, bytes: u64, crews: usize) -> u64 {
        let cores = thread::available_parallelism().map_or(1, |many| many.get() / crews.max(1)) as u64;
        let worth = bytes / (WORTH * BUFFERS as u64 * way.buffer());
        cores.max(4).min(way.threads()).min(worth).max(1) * BUFFERS as u64
    }

    /// In the context.
    fn within(&self, act: impl FnOnce() -> Result<(), Failed>) -> Result<(), Failed> {
        let inside = || {
            let _relaxed = self.driver.relax();
            act()
        };
        context::within_own(self.driver, self.handle, inside).unwrap_or(Err(Failed::NoContext { gpu: self.gpu }))
    }

    fn failed(&self, doing: &'static str) -> impl Fn(CuResult) -> Failed + use<> {
        let gpu = self.gpu;
        move |result| Failed::Driver { gpu, doing, result }
    }

    fn wait_for(&self, stream: Stream) -> Result<(), Failed> {
        // SAFETY: the stream lives as long as this does.
        let wait = || unsafe { self.driver.synchronize_stream(stream) }.ok();
        (1..TRIES).find_map(|_| wait().ok()).map_or_else(wait, Ok).map_err(self.failed("a wait for a copy"))
    }

    /// Some thread's work: as many units as are left, until one fails.
    fn work(&self, own: &[Buffer], work: &Work<'_>) {
        let carry = || match self.way {
            Way::Out => self.take_out(own, work),
            Way::Back => self.bring_back(own, work),
        };
        let worked = self.within(|| {
            let _near = numa::prefer_near(self.driver);
            let carried = carry();
            // What was begun is over before anybody else has the buffers or unmaps the memory.
            let waited: Vec<_> = own.iter().map(|buffer| self.wait_for(buffer.stream)).collect();
            if waited.iter().any(Result::is_err) {
                self.is_lost.store(true, Ordering::Release);
            }
            carried.and(waited.into_iter().collect())
        });
        if let Err(failed) = worked {
            let _ = work.told.send(Err(failed));
        }
    }

    fn take_out(&self, own: &[Buffer], work: &Work<'_>) -> Result<(), Failed> {
        let empty = |(buffer, part): (Buffer, Part)| {
            self.wait_for(buffer.stream)?;
            // SAFETY: the copy that filled the buffer is over, and only this thread has it. The memory of the host is that of whoever called
            // `carry`, and no other thread has this part of it.
            unsafe { put(buffer.start, part.host, part.bytes as usize, part.used) };
            work.tell(part.bytes);
            Ok(())
        };
        let mut filling: VecDeque<(Buffer, Part)> = VecDeque::with_capacity(BUFFERS);
        let mut turns = own.iter().copied().cycle();
        while let Some(unit) = work.next() {
            for (part, buffer) in unit.cut(self.way.buffer()).zip(&mut turns) {
                if filling.len() == BUFFERS
                    && let Some(oldest) = filling.pop_front()
                {
                    empty(oldest)?;
                }
                // SAFETY: the stream lives as long as this does. The buffer has so many bytes, nothing else is on its way to it, and it is
                // read once the stream was waited for.
                let copied = unsafe {
                    self.driver.copy_to_host(buffer.stream, buffer.start as *mut u8, part.address, part.bytes)
                };
                copied.ok().map_err(self.failed("a copy to the host"))?;
                filling.push_back((buffer, part));
            }
        }
        filling.into_iter().try_for_each(empty)
    }

    fn bring_back(&self, own: &[Buffer], work: &Work<'_>) -> Result<(), Failed> {
        let mut turns = own.iter().copied().cycle();
        while let Some(unit) = work.next() {
            for (part, buffer) in unit.cut(self.way.buffer()).zip(&mut turns) {
                let Buffer { stream, start } = buffer;
                // What this buffer held is on the GPU then.
                self.wait_for(stream)?;
                // SAFETY: only this thread has the buffer, which is pinned memory of so many bytes; the memory of the host is that of whoever
                // called `carry`. The stream lives as long as this does, and the buffer is written to again once it was waited for.
                let copied = unsafe {
                    std::ptr::copy_nonoverlapping(part.host as *const u8, start as *mut u8, part.bytes as usize);
                    self.driver.copy_to_device(stream, part.address, start as *const u8, part.bytes)
                };
                copied.ok().map_err(self.failed("a copy to the GPU"))?;
            }
            work.tell(unit.bytes);
        }
        Ok(())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let (driver, handle) = (self.driver, self.handle);
        let _ = context::within_own(driver, handle, || {
            let _relaxed = driver.relax();
            // What may still be written to, or is pinned still, stays.
            if !self.is_lost.load(Ordering::Acquire)
                && (0..TRIES).any(|_| self.driver.unregister(self.memory.start() as u64).is_ok())
            {
                // SAFETY: this happens once, and nobody uses the memory any more.
                unsafe { ManuallyDrop::drop(&mut self.memory) };
            }
            for Buffer { stream, .. } in &self.buffers {
                // SAFETY: made by `new` in this context, and nobody uses it after this.
                let _: CuResult = unsafe { driver.destroy_stream(*stream) };
            }
        });
    }
}

/// Crews for one way, each for an owner and a home, that are used again as long as this lives: to pin the buffers of one takes as long as it takes to carry a
/// gibibyte (RESULTS.md). Meanwhile the contexts live, and a call that ends one waits: also while the program is held, since such calls pass no gate.
pub struct Crews {
    way: Way,
    all: BTreeMap<(u64, u32), Crew>,
}

impl Crews {
    pub fn new(way: Way) -> Self {
        Self { way, all: BTreeMap::new() }
    }

    /// Sees to it that there is one for each of these, with as many buffers as so many bytes are worth, and for each the parts that it is to carry.
    ///
    /// # Errors
    /// As of [`Crew::new`].
    pub fn with<'a>(
        &'a mut self,
        driver: &'static Driver,
        of: BTreeMap<(u64, u32), Vec<Part>>,
    ) -> Result<Vec<(&'a Crew, Vec<Part>)>, Failed> {
        for (&(owner, gpu), parts) in &of {
            let bytes = parts.iter().map(|part| part.bytes).sum();
            let wanted = Crew::buffers_for(self.way, bytes, of.len());
            let is_fit = |crew: &Crew| !crew.is_lost.load(Ordering::Acquire) && crew.buffers.len() as u64 >= wanted;
            if !self.all.get(&(owner, gpu)).is_some_and(is_fit) {
                // Its buffers go before others are pinned.
                self.all.remove(&(owner, gpu));
                self.all.insert((owner, gpu), Crew::new(driver, owner, gpu, self.way, bytes, of.len())?);
            }
        }
        let work = of.into_iter().filter_map(|(whose, parts)| Some((self.all.get(&whose)?, parts)));
        Ok(work.collect())
    }
}

/// What the threads of one crew have in common while they work.
struct Work<'a> {
    units: &'a [Part],
    next: AtomicUsize,
    is_over: &'a AtomicBool,
    told: mpsc::Sender<Result<u64, Failed>>,
}

impl Work<'_> {
    fn next(&self) -> Option<Part> {
        let at = || self.next.fetch_add(1, Ordering::Relaxed);
        if self.is_over.load(Ordering::Relaxed) { None } else { self.units.get(at()).copied() }
    }

    fn tell(&self, bytes: u64) {
        let _ = self.told.send(Ok(bytes));
    }
}

/// Has all crews carry these at once, and returns when that is over. `heard` is told of bytes that were carried, and says whether to go on.
///
/// # Errors
/// Why not all of it was carried; `None`: since that was not wanted any more.
///
/// # Safety
/// The memory of the host is there, nobody uses it or the GPU's meanwhile, and no two parts have any of it in common. On the way out what is not `used` is zero.
pub unsafe fn carry(crews: &[(&Crew, Vec<Part>)], heard: &mut dyn FnMut(u64) -> bool) -> Result<(), Option<Failed>> {
    let units: Vec<Vec<Part>> =
        crews.iter().map(|(_, parts)| parts.iter().flat_map(|part| part.cut(UNIT)).collect()).collect();
    let (told, hears) = mpsc::channel();
    let is_over = AtomicBool::new(false);
    let works: Vec<Work<'_>> = units
        .iter()
        .map(|units| Work { units, next: AtomicUsize::new(0), is_over: &is_over, told: told.clone() })
        .collect();
    drop(told);
    let mut carried = Ok(());
    thread::scope(|scope| {
        for ((crew, _), work) in crews.iter().zip(works) {
            let work = Arc::new(work);
            let begin = |own| {
                let its = Arc::clone(&work);
                let body = move || {
                    // Every driver call of this thread is ours.
                    let _inside = guard::enter();
                    crew.work(own, &its);
                };
                signals::spawn_in(scope, body).is_ok()
            };
            let begun = crew.buffers.chunks(BUFFERS).take_while(|own| begin(*own)).count();
            // Where the system has no thread to spare, this one does it.
            if begun == 0
                && let Some(own) = crew.buffers.chunks(BUFFERS).next()
            {
                crew.work(own, &work);
            }
        }
        for heard_of in hears {
            match heard_of {
                Ok(bytes) if heard(bytes) => {}
                Ok(_) => {
                    is_over.store(true, Ordering::Relaxed);
                    if carried.is_ok() {
                        carried = Err(None);
                    }
                }
                Err(failed) => {
                    is_over.store(true, Ordering::Relaxed);
                    carried = Err(Some(failed));
                }
            }
        }
    });
    carried
}

impl Part {
    /// In pieces of so many bytes.
    fn cut(self, bytes: u64) -> impl Iterator<Item = Part> {
        (0..self.bytes).step_by(bytes as usize).map(move |done| Part {
            address: self.address + done,
            host: self.host + done as usize,
            bytes: bytes.min(self.bytes - done),
            used: self.used,
        })
    }
}

/// Bytes that are looked at together.
const LOOK: usize = 64 << 10;

/// Copies a buffer to memory that is zero, or was `used` for something else, but for what is zero in both. What was never touched is not looked at: that would
/// make a page where the system has no large one of zeros.
///
/// # Safety
/// Both have so many bytes, nobody writes to the buffer, and nobody else uses the memory.
unsafe fn put(buffer: usize, host: usize, bytes: usize, used: bool) {
    // SAFETY: the caller's.
    let (from, to) = unsafe {
        (std::slice::from_raw_parts(buffer as *const u8, bytes), std::slice::from_raw_parts_mut(host as *mut u8, bytes))
    };
    for (from, to) in from.chunks(LOOK).zip(to.chunks_mut(LOOK)) {
        if !is_zero(from) || used && !is_zero(to) {
            to.copy_from_slice(from);
        }
    }
}

/// Ends early where it is not, as it mostly is not.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(64).all(|few| few.iter().fold(0, |all, byte| all | byte) == 0)
}
