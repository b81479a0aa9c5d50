//! Strict mode (`SIMCUDA_STRICT`): memory that unfinished work may still use is not taken away, and what was released
//! shows in whatever reads it.
//!
//! A real GPU lets most of this pass and gives a wrong word or a fault now and then. Here it is a violation each time,
//! whether or not the work came to touch the memory.

use crate::context::Context;
use crate::driver::driver;
use crate::graph::Node;
use crate::physical::{GRANULE, Piece, Store};
use crate::report;
use crate::space::{Kind, Origin, Region};
use crate::stream::{Action, Work};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// What released memory reads as at the beginning of each 2 MiB, or of a small allocation.
const POISON: u8 = 0xdb;
/// How much of it. A page for each frame shows a reader that goes over the frame, and costs little memory and time.
const POISONED: u64 = 4096;

pub fn is_on() -> bool {
    crate::driver::if_initialised().is_some_and(|driver| driver.settings.strict)
}

/// Ranges to which some thread gives access at this moment.
static GIVING: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
/// Times for which a thread that gives access lets others go first: what takes a real driver 70 microseconds is over at once here.
const LETS_OTHERS: u32 = 20;

/// As long as it lives, a thread gives access to a range.
pub struct Giving(u64, u64);

/// A thread gives access to a range. Two at once to the same one are a violation: of a real driver (580.159.04) one of them gets ALREADY_MAPPED, or both succeed and a GPU that was
/// named cannot read there (`tests/programs/probe_grants.c`).
pub fn giving_access(start: u64, end: u64) -> Option<Giving> {
    if !is_on() {
        return None;
    }
    let mut all = GIVING.lock();
    let beside = all.iter().copied().find(|range| range.0 < end && start < range.1);
    all.push((start, end));
    drop(all);
    if let Some((from, to)) = beside {
        report::violation(format!(
            "cuMemSetAccess of {start:#x} to {end:#x} while another thread's of {from:#x} to {to:#x} goes on"
        ));
    }
    (0..LETS_OTHERS).for_each(|_| std::thread::yield_now());
    Some(Giving(start, end))
}

impl Drop for Giving {
    fn drop(&mut self) {
        let mut all = GIVING.lock();
        if let Some(index) = all.iter().position(|range| *range == (self.0, self.1)) {
            all.swap_remove(index);
        }
    }
}

/// Counts what begins and what is unmapped, to tell which was first.
static CLOCK: AtomicU64 = AtomicU64::new(1);

pub fn tick() -> u64 {
    CLOCK.fetch_add(1, Ordering::AcqRel)
}

/// A piece of work that has not finished.
#[derive(Clone)]
pub struct Unfinished {
    /// When it began, if it has.
    pub began: Option<u64>,
    /// The stream that runs it; none for a call that does its work itself.
    pub stream: Option<u64>,
    pub touches: Vec<(u64, u64)>,
    pub node: Node,
    /// What it does, by which it is known again.
    action: Same,
}

/// The action of a piece of work. It is not kept alive, and no other has its address as long as this is there.
type Same = Weak<<Action as std::ops::Deref>::Target>;

impl Unfinished {
    pub fn new(work: &Work, stream: Option<u64>, began: Option<u64>) -> Self {
        let action = Arc::downgrade(&work.action);
        Self { began, stream, touches: work.touches.clone(), node: work.node.clone(), action }
    }

    fn names(&self, start: u64, end: u64) -> bool {
        self.touches.iter().any(|range| range.0 < end && start < range.1)
    }

    /// In words, with where it is.
    fn describe(&self, context: &Context) -> String {
        let what = match &self.node {
            Node::Kernel(kernel, _) if kernel.follows => format!("kernel {}, which follows pointers,", kernel.name),
            Node::Kernel(kernel, _) => format!("kernel {}", kernel.name),
            Node::Memcpy(_) => "a copy".to_owned(),
            Node::Memset(_) => "a fill".to_owned(),
            Node::Graph { works, .. } => format!("a graph of {works} nodes"),
            Node::Host | Node::Empty | Node::MemAlloc(_) | Node::MemFree(_) => "work".to_owned(),
        };
        let place = match self.stream {
            Some(stream) => format!("in stream {stream}"),
            None => "in a call that waits for it".to_owned(),
        };
        let state = if self.began.is_some() { "runs" } else { "is queued" };
        format!("{what} {state} {place} of context {} on GPU {}", context.id, context.device)
    }
}

/// The reservations, by their first address, of which a kernel has used something. In any other no kernel finds its way: nobody told
/// the program of addresses there, or it has not yet put any where a kernel could follow them. A library that maps memory a second time
/// does so in reservations of its own.
static USED_BY_KERNELS: RwLock<BTreeSet<u64>> = RwLock::new(BTreeSet::new());

/// A kernel uses this region.
pub fn used_by_kernel(region: &Region) {
    if let Kind::Vmm { reservation: (start, _), .. } = &region.kind
        && !USED_BY_KERNELS.read().contains(start)
    {
        USED_BY_KERNELS.write().insert(*start);
    }
}

/// A reservation ends, and its addresses may become others'.
pub fn reservation_ended(start: u64) {
    USED_BY_KERNELS.write().remove(&start);
}

/// Who may use the memory of a region besides those that name its addresses: the GPUs, one bit each, whose kernels find it
/// by following pointers.
pub fn reachable_from(kind: &Kind) -> u64 {
    match kind {
        Kind::Vmm { reservation: (start, _), .. } if !USED_BY_KERNELS.read().contains(start) => 0,
        Kind::Vmm { grants, .. } => grants.read | grants.write,
        // The program or the library that frees says that nobody follows a pointer there any more, and the driver waits
        // for the owner's work. Only what names the addresses is sure to be wrong.
        Kind::Plain { .. } | Kind::Host { .. } | Kind::Managed { .. } => 0,
    }
}

/// The work that may use part of a range, described. Asked before the memory is taken away: afterwards the work may have
/// failed and be over.
pub fn users_of(start: u64, end: u64, reachable: u64) -> Vec<String> {
    users(reachable, |work| work.names(start, end))
}

/// The unfinished work that `uses` something, or follows pointers on a GPU that can reach it, described.
fn users(reachable: u64, uses: impl Fn(&Unfinished) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for context in driver().contexts.all() {
        for work in context.unfinished_work() {
            let follows = work.node.follows_pointers() && reachable & 1 << context.device != 0;
            if follows || uses(&work) {
                found.push(work.describe(&context));
            }
        }
    }
    found
}

/// The work whose kernels may find a range by following pointers, and that does not name it.
pub fn followers_of(start: u64, end: u64, reachable: u64) -> Vec<Same> {
    let mut found = Vec::new();
    for context in driver().contexts.all().iter().filter(|context| reachable & 1 << context.device != 0) {
        let follows = |work: &Unfinished| work.node.follows_pointers() && !work.names(start, end);
        found.extend(context.unfinished_work().into_iter().filter(follows).map(|work| work.action));
    }
    found
}

fn say(what: &str, start: u64, end: u64, users: &[String]) {
    if let Some(first) = users.first() {
        let more = if users.len() > 1 { format!(" (and {} more)", users.len() - 1) } else { String::new() };
        report::violation(format!("{what} of {} bytes at {start:#x} while {first}{more}", end - start));
    }
}

/// Addresses that were unmapped while something was not finished that may use them, and may be mapped anew under it.
static VACATED: Mutex<Vec<Vacated>> = Mutex::new(Vec::new());

struct Vacated {
    start: u64,
    end: u64,
    at: u64,
    /// What follows pointers, and was submitted before.
    followers: Vec<Same>,
}

impl Vacated {
    /// Whether this may use what is mapped anew: it had begun before and names it, or had been submitted before and follows pointers.
    fn is_under(&self, work: &Unfinished) -> bool {
        let names = work.names(self.start, self.end) && work.began.is_some_and(|began| began < self.at);
        names || self.followers.iter().any(|follower| follower.ptr_eq(&work.action))
    }

    fn users(&self) -> Vec<String> {
        users(0, |work| self.is_under(work))
    }
}

/// `cuMemUnmap` took mappings away while `users` that name them and `followers` were not finished.
///
/// Of these only the first are wronged in any case. Memory that the program has freed is nobody's any more, wherever a kernel finds pointers to it, as in a
/// driver's own free, which waits for the context that owns it and for no other. Nobody tells here what is freed and what is moved: where the addresses are mapped
/// anew under such a kernel it is a move, and where it uses them in between it faults.
pub fn unmapped(start: u64, end: u64, users: &[String], followers: Vec<Same>) {
    say("cuMemUnmap", start, end, users);
    if is_on() && !(users.is_empty() && followers.is_empty()) {
        let mut vacated = VACATED.lock();
        vacated.retain(|range| !range.users().is_empty());
        vacated.push(Vacated { start, end, at: tick(), followers });
    }
}

/// `cuMemMap` puts memory at addresses.
pub fn mapping(start: u64, end: u64) {
    if !is_on() {
        return;
    }
    for range in VACATED.lock().iter().filter(|range| range.start < end && start < range.end) {
        let (start, end) = (start.max(range.start), end.min(range.end));
        say("mapping anew what was unmapped,", start, end, &range.users());
    }
}

/// The work of the GPUs in `devices`, one bit each, that may use part of a range.
pub fn users_on(start: u64, end: u64, devices: u64) -> Vec<String> {
    if devices == 0 || !is_on() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for context in driver().contexts.all().iter().filter(|context| devices & 1 << context.device != 0) {
        let uses = |work: &Unfinished| work.node.follows_pointers() || work.names(start, end);
        found.extend(context.unfinished_work().iter().filter(|work| uses(work)).map(|work| work.describe(context)));
    }
    found
}

/// `cuMemSetAccess` took access away while `users` were not finished.
pub fn lost_access(start: u64, end: u64, users: &[String]) {
    say("cuMemSetAccess, which takes access away,", start, end, users);
}

/// A plain allocation, pinned, registered or managed memory is about to be given back, after whatever the call waited for.
/// Not that of graphs: it is freed by work which itself counts as using it.
pub fn freeing(region: &Region) {
    if !is_on() || matches!(region.kind, Kind::Plain { origin: Origin::Graph(_), .. }) {
        return;
    }
    let what = match &region.kind {
        Kind::Plain { origin: Origin::Alloc, .. } => "a free",
        Kind::Plain { origin: Origin::Ipc | Origin::Shared, .. } => "closing shared memory",
        Kind::Plain { .. } => "a free in a stream",
        Kind::Host { registered: true, .. } => "an unregistration",
        Kind::Host { .. } => "a free of pinned memory",
        Kind::Managed { .. } => "a free of managed memory",
        Kind::Vmm { .. } => "an unmapping",
    };
    say(what, region.start, region.end(), &users_of(region.start, region.end(), reachable_from(&region.kind)));
    if let Kind::Plain { origin: Origin::Alloc | Origin::Pool(_), physical, .. } = &region.kind
        && !physical.is_shared()
    {
        poison_small(region);
    }
}

/// Overwrites the beginning of an allocation whose frame stays in use.
fn poison_small(region: &Region) {
    let mut left = POISONED.min(region.bytes) as usize;
    for (view, bytes) in region.views(region.start, region.bytes.min(POISONED)) {
        let length = bytes.min(left);
        // SAFETY: the region's own memory, which it holds; the allocation is over, and views are the driver's alias.
        unsafe { std::ptr::write_bytes(view as *mut u8, POISON, length) };
        left -= length;
    }
}

/// Where the frames of a stretch are that hold data, in the driver's view. Called before the stretch is emptied.
pub fn written(store: &Store, piece: &Piece) -> Vec<usize> {
    let mut frames = Vec::new();
    let Some(file) = store.own_descriptor().filter(|_| is_on()) else { return frames };
    let (mut at, end) = (piece.offset, piece.offset + piece.bytes);
    while at < end {
        // SAFETY: plain system call on the store's own descriptor. Its position, which this moves, is used by nobody.
        let data = unsafe { libc::lseek(file, at as i64, libc::SEEK_DATA) };
        let Some(data) = u64::try_from(data).ok().filter(|data| *data < end) else { break };
        let frame = data.max(piece.offset) / GRANULE * GRANULE;
        frames.push(piece.alias + (frame - piece.offset) as usize);
        at = frame + GRANULE;
    }
    frames
}

/// Makes the first page of each of these frames say that it was released.
pub fn poison(frames: &[usize]) {
    for frame in frames {
        // SAFETY: the driver's own view of a frame that was just emptied and that nobody else can take yet.
        unsafe { std::ptr::write_bytes(*frame as *mut u8, POISON, POISONED as usize) };
    }
}
