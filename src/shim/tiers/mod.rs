//! Memory that a GPU uses and that lies elsewhere comes near while the program runs, in place of what is used less
//! (`GPUPOOL_MOVE`).
//!
//! What should lie near, and which swap is worth it now, is decided by `gpupool-tiers`, for each GPU that computes. This module
//! tells it of blocks and of what launches name ([`launch`]) and of how long some of them take ([`timing`]), and has its swaps
//! carried out ([`swap`]). Copies and fills are uses, too ([`copies`]). What the program has put somewhere stays there ([`placed`]), and so
//! does what copies and fills of graphs use ([`graphs`]).
//! What far memory costs is watched whether it may move or not ([`far`]). Nothing of it happens before the first block of a GPU lies
//! elsewhere.
//!
//! **A panic beside a launch or a copy,** which have no boundary of their own, reaches neither: nothing moves any more ([`beside`]), which
//! is told once. The pool goes on, since nothing of it was being changed.
//!
//! **Which thread moves.** The one that is about to launch what would be slow, and the one whose own wait for the GPU has just
//! returned. Both have the context current that the memory is used in, and both would wait anyway. A thread of ours would have to
//! stop the program at moments that it knows nothing of, and be waited for when contexts end and the process exits.

pub mod ahead;
pub mod copies;
pub mod far;
pub mod graphs;
pub mod idle;
pub mod launch;
pub mod obstacles;
mod own;
mod placed;
mod progress;
mod record;
mod repack;
mod stress;
pub mod swap;
pub mod timing;
pub mod totals;

use crate::backing::open::{self, Opened};
use crate::backing::terms;
use crate::backing::topology::Topology;
use crate::clock::monotonic_nanoseconds as now;
use crate::gate::Reason;
use crate::serve::handles;
use crate::serve::memory::{self, Hearer};
use crate::watch::arguments::{self, Reader};
use crate::watch::context::{self, Context};
use crate::{live, process};
use gpupool_config::{Mode, Move};
use gpupool_cuda::{self as cuda, Device, Driver, Physical};
use gpupool_interpose::{Api, cancel};
use gpupool_pool::{Allocation, Block, Piece, Place};
use gpupool_tiers::{FarLink, Links, Range, Settings, Tiers, Where, Whereabouts};
use once_cell::race::OnceBox;
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// GPUs beyond these keep their memory where it is.
const GPUS: usize = 64;
static HOMES: [OnceBox<Home>; GPUS] = [const { OnceBox::new() }; GPUS];

/// One GPU whose memory lies elsewhere in part.
pub struct Home {
    gpu: u32,
    opened: &'static Opened,
    driver: &'static Driver,
    /// Where its memory can go, by the number that the tiers know each place by.
    places: Vec<Place>,
    tiers: Mutex<Tiers>,
    timing: timing::Timing,
    /// A thread moves something for it. Others do not begin a second swap meanwhile.
    is_moving: AtomicBool,
    /// Until then nothing is tried, on the clock of [`now`]: the last try was in vain.
    rests_until: AtomicU64,
    /// Until then no launch waits for a try: the last one waited in vain.
    waits_rest_until: AtomicU64,
    /// What moves may take where the program waits.
    purse: idle::Purse,
    /// How work that is waited for is seen to go on.
    progress: progress::Progress,
    /// When the pool was told last that a cycle began, on the clock of [`now`].
    told_of_cycle: AtomicU64,
}

/// Nanoseconds from one cycle that the pool is told of to the next, at least. Memory that a program has freed and does not take again
/// for two of them may go to what is far: a loop of fewer launches than that takes may be one of many in the program's own.
const LEAST_CYCLE: u64 = 100_000_000;

/// Has what follows told of blocks.
pub fn start() {
    let settings = process::settings();
    if !matches!(settings.mode, Mode::Pool | Mode::Spill) {
        return;
    }
    memory::hear_of_blocks(Hearer { made, ended, placed: placed::by_program, refuses: far::refuses });
    own::start();
    memory::repack_by(repack::repack);
}

/// What is known of memory may be half changed: nobody is told of anything or asks.
static IS_BROKEN: AtomicBool = AtomicBool::new(false);

/// The GPU's tiers, if its memory lies elsewhere in part and may move.
fn home(gpu: u32) -> Option<&'static Home> {
    HOMES.get(gpu as usize)?.get().filter(|_| !IS_BROKEN.load(Ordering::Relaxed))
}

/// Has a panic of `act` end all moves and nothing else, for what is done in every launch and copy. Unlike [`process::contained`] it costs
/// nothing where there is none, so what may lock for long, log or ask the driver is not done here.
#[inline]
fn beside<T>(api: Api, act: impl FnOnce() -> Option<T>) -> Option<T> {
    // A thread that can be cancelled anywhere would be unwound through what catches panics, which ends the process.
    let _sheltered = cancel::is_known().then(cancel::shelter);
    // AssertUnwindSafe: what may be half changed is not looked at again.
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|_| broke(api))
}

/// The panic hook has said where.
#[cold]
fn broke<T>(api: Api) -> Option<T> {
    let is_first = !IS_BROKEN.swap(true, Ordering::Relaxed);
    arguments::end(Reader::Tiers);
    if is_first {
        process::contained(api, || obstacles::is_broken(api));
    }
    None
}

/// At the end of the process: what far memory cost, and what kept it from moving.
pub fn judge() {
    obstacles::judge();
    far::judge();
}

/// Tells what of a range nobody is to move although its physical memory is nobody else's, in no order.
fn stays(range: Range, tell: &mut dyn FnMut(Range)) {
    placed::within(range, tell);
    graphs::within(range, tell);
}

/// Whether the program itself has put something of this range where it is.
pub fn is_placed(address: u64, bytes: u64) -> bool {
    let mut is_any = false;
    placed::within(Range::of(address, bytes), &mut |_| is_any = true);
    is_any
}

/// The tiers of the GPU whose context is current on this thread.
fn current_home() -> Option<&'static Home> {
    let context = cuda::at_hand().and_then(|driver| context::glance(driver).ok().flatten());
    home_of(context?)
}

/// The tiers of this context's GPU.
#[inline]
fn home_of(context: Context) -> Option<&'static Home> {
    home(context.device.ordinal())
}

/// The part of the time that moves may take, in thousandths. The ranks of a job wait for each other, so the share is the job's.
pub fn share() -> u32 {
    let told = process::rank().and_then(|rank| rank.ranks);
    share_of(live::move_share(), told.or_else(|| Some(terms::siblings() + 1)))
}

fn share_of(share: u32, ranks: Option<u32>) -> u32 {
    (share / ranks.unwrap_or(1).max(1)).max(u32::from(share > 0))
}

/// That part was changed while the process runs.
pub fn heed_share() {
    let share = f64::from(share()) / 1000.0;
    for home in HOMES.iter().filter_map(|entry| entry.get()) {
        home.tiers.lock().set_share(share);
    }
}

/// A block was made.
fn made(allocation: &Allocation) {
    far::made(allocation);
    if process::settings().moving == Move::Off {
        return;
    }
    let Allocation { block, on_peers, on_host, .. } = allocation;
    match home(block.home) {
        Some(home) => {
            record::began(block.home, block.address, block.bytes);
            home.tiers.lock().block_began(block.address, block.bytes);
        }
        None if IS_BROKEN.load(Ordering::Relaxed) => {}
        None if on_peers + on_host > 0 || process::settings().moving == Move::Stress => begin(block.home),
        None => {}
    }
}

/// A block ended.
fn ended(block: &Block) {
    far::ended(block);
    if process::settings().moving == Move::Off {
        return;
    }
    placed::ended(block);
    if let Some(home) = home(block.home) {
        record::ended(block.address);
        home.tiers.lock().block_ended(block.address);
    }
}

/// Something of this GPU's lies elsewhere for the first time.
#[cold]
fn begin(gpu: u32) {
    let Some((opened, driver)) = ready() else { return };
    let Some(entry) = HOMES.get(gpu as usize) else { return };
    // The driver has to say what the parameters of a kernel are, and when all work of a context is over.
    if !driver.knows_parameters() || !driver.records_contexts() {
        return is_too_old(gpu);
    }
    let home = entry.get_or_init(|| Box::new(Home::new(gpu, opened, driver)));
    let mut tiers = home.tiers.lock();
    // Others are told of meanwhile, and wait for the lock; a block that is told of twice is the same block.
    let blocks = opened.pool.blocks(gpu);
    for block in &blocks {
        tiers.block_began(block.address, block.bytes);
    }
    drop(tiers);
    own::each_stretch(gpu, |start, bytes| home.tiers.lock().block_began(start, bytes));
    blocks.iter().for_each(|block| record::began(gpu, block.address, block.bytes));
    arguments::begin(Reader::Tiers);
}

/// Nothing is asked for a move on such a driver, so it is told here.
fn is_too_old(gpu: u32) {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    if !IS_TOLD.swap(true, Ordering::Relaxed) {
        swap::report_off(gpu, &Reason::OldDriver);
    }
}

/// The pool, which a program that makes all of its memory itself has not opened yet, and the driver.
fn ready() -> Option<(&'static Opened, &'static Driver)> {
    let driver = process::driver()?;
    let is_current = || driver.current_context().is_some();
    let opened = open::opened().or_else(|| if is_current() { open::open(driver) } else { None })?;
    Some((opened, driver))
}

/// Whether memory that may move may lie at this address, at a glance.
#[inline(always)]
fn is_ours(opened: &Opened, address: u64) -> bool {
    opened.contains(address) || handles::may_be_own(address)
}

impl Home {
    fn new(gpu: u32, opened: &'static Opened, driver: &'static Driver) -> Self {
        let all: Vec<Place> = opened.plan.places.iter().map(|spec| spec.place).collect();
        // All that it could ever lie at: which of them take something changes.
        let mut places = gpupool_pool::order(gpu, &all, &opened.plan.links);
        places.retain(|place| *place != Place::Gpu(gpu));
        let links = Links::measured(places.iter().map(|place| link(&opened.plan.topology, gpu, *place)).collect());
        let settings = Settings { share: f64::from(share()) / 1000.0, ..Settings::new(links) };
        Self {
            gpu,
            opened,
            driver,
            places,
            tiers: Mutex::new(Tiers::new(settings)),
            timing: timing::Timing::default(),
            is_moving: AtomicBool::new(false),
            rests_until: AtomicU64::new(0),
            waits_rest_until: AtomicU64::new(0),
            purse: idle::Purse::new(now()),
            progress: progress::Progress::default(),
            told_of_cycle: AtomicU64::new(now()),
        }
    }

    /// The program begins to do again what it did.
    fn begin_cycle(&self) {
        let (now, told) = (now(), self.told_of_cycle.load(Ordering::Relaxed));
        let is_due = now.saturating_sub(told) >= LEAST_CYCLE;
        if is_due && self.told_of_cycle.compare_exchange(told, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.opened.pool.begin_cycle(Place::Gpu(self.gpu));
        }
    }

    /// The chunk that a piece is of, as far as it is of the same block.
    fn whole(&self, piece: &Piece<Physical>) -> Option<Range> {
        let block = self.opened.pool.block_at(piece.address)?;
        Some(Range::of(piece.chunk_address, piece.chunk_bytes).meet(&Range::of(block.address, block.bytes)))
    }

    /// Runs `act` unless another thread moves something for this GPU.
    fn alone<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        self.is_moving.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        let done = act();
        self.is_moving.store(false, Ordering::Release);
        Some(done)
    }
}

/// Whether memory may go to this place without a program's atomics changing their meaning, where several GPUs have contexts: whoever
/// they belong to, memory of the pool is granted to all of these. Memory that comes home lies where the program asked for it.
///
/// A context that comes later finds memory where it is by then, as it finds what the pool has placed.
pub fn keeps_atomics(opened: &Opened, place: Place) -> bool {
    let topology = &opened.plan.topology;
    let gpus = topology.gpus.iter().map(|gpu| gpu.ordinal).filter(|gpu| context::is_on(Device::of(*gpu)));
    topology.keeps_atomics(&gpus.collect::<Vec<_>>(), place)
}

/// Bytes that could come to a GPU without another byte's leaving it.
fn near_room(opened: &Opened, gpu: u32) -> u64 {
    let place = Place::Gpu(gpu);
    let accounts = opened.pool.accounts();
    let taken = accounts.taken(place).saturating_add(handles::by_hand::uncharged_at(place));
    accounts.limit(place).saturating_sub(taken) + opened.pool.unneeded(place)
}

/// What the way to a place is reckoned with: NVLink as measured on H200, and everything else as PCIe.
fn link(topology: &Topology, gpu: u32, place: Place) -> FarLink {
    match place {
        Place::Gpu(peer) if topology.has_native_atomics(gpu, peer) => FarLink::PEER,
        Place::Gpu(_) | Place::Host(_) | Place::Disk | Place::Pageable => FarLink::HOST,
    }
}

impl Whereabouts for Home {
    fn pieces(&self, range: Range, tell: &mut dyn FnMut(Range, Where)) {
        for piece in self.opened.pool.pieces(range.start, range.bytes()) {
            let place = match self.places.iter().position(|place| *place == piece.place) {
                Some(index) => Where::Far(index as u8),
                None => Where::Near,
            };
            tell(Range::of(piece.address, piece.bytes), place);
        }
        own::pieces(self, range, &mut |piece, place| {
            if let Some(place) = place {
                tell(own::range_of(piece).meet(&range), place);
            }
        });
    }

    fn fixed(&self, range: Range, tell: &mut dyn FnMut(Range)) {
        for piece in
            self.opened.pool.pieces(range.start, range.bytes()).iter().filter(|piece| !piece.anchors.is_empty())
        {
            tell(Range::of(piece.address, piece.bytes));
        }
        own::pieces(self, range, &mut |piece, _| {
            if own::stays(piece) {
                tell(own::range_of(piece));
            }
        });
        stays(range, tell);
    }

    fn unit(&self, address: u64) -> Option<Range> {
        if let Some(piece) = self.opened.pool.pieces(address, 1).first() {
            return self.whole(piece);
        }
        let mut unit = None;
        own::pieces(self, Range::of(address, 1), &mut |piece, _| unit = Some(own::range_of(piece)));
        unit
    }

    fn near_room(&self) -> u64 {
        near_room(self.opened, self.gpu)
    }

    fn far_room(&self, place: u8) -> u64 {
        let place = self.places.get(usize::from(place));
        place.map_or(0, |place| if ahead::serves(*place) { u64::MAX } else { self.opened.pool.spare_for_moves(*place) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_is_cancelled_beside_a_call_once_somebody_cancels_threads() {
        const DISABLE: std::ffi::c_int = 1;
        unsafe extern "C" {
            fn pthread_setcancelstate(state: std::ffi::c_int, before: *mut std::ffi::c_int) -> std::ffi::c_int;
        }
        // SAFETY: it says how this thread is cancelled, and nobody does.
        unsafe { cancel::set_cancel_type(1, std::ptr::null_mut()) };
        let state = beside(Api("cuLaunchKernel"), || {
            let mut before = 0;
            // SAFETY: the output is a local.
            unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
            Some(before)
        });
        assert_eq!(state, Some(DISABLE));
    }

    #[test]
    fn the_share_is_that_of_all_ranks_on_the_host() {
        assert_eq!(share_of(50, None), 50);
        assert_eq!([share_of(50, Some(1)), share_of(50, Some(8)), share_of(50, Some(0))], [50, 6, 50]);
        assert_eq!([share_of(3, Some(8)), share_of(0, Some(8))], [1, 0], "what was asked for does not become nothing");
    }
}
