//! How much of the memory in use lies near the GPUs that it was allocated for, and how much elsewhere. Memory that the program made by
//! `cuMemCreate` is not in what the log tells; the metrics page adds it, by the GPU that it was asked for on ([`Residence::add`]).

use super::{copies, open};
use crate::clock::monotonic_nanoseconds as now;
use crate::log;
use crate::watch::context;
use gpupool_config::format_size;
use gpupool_events::PoolResidence;
use gpupool_pool::{Place, Usage};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Bytes of live blocks, in whole frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residence {
    /// On the GPU that was current when each was allocated.
    pub near: u64,
    pub on_peers: u64,
    pub on_host: u64,
}

impl Residence {
    pub fn far(&self) -> u64 {
        self.on_peers + self.on_host
    }

    /// Adds what was asked for on one GPU and lies at a place, also to who borrows from whom ([`loans`]).
    pub fn add(&mut self, lies: &BTreeMap<(u32, Place), u64>, loans: &mut BTreeMap<(u32, Place), u64>) {
        for (&(home, place), &bytes) in lies {
            // Plain memory of the host is the host's.
            let place = if place == Place::Pageable { Place::Host(0) } else { place };
            if place == Place::Gpu(home) {
                self.near += bytes;
            } else if !place.is_stored() {
                *(if place.is_host() { &mut self.on_host } else { &mut self.on_peers }) += bytes;
                *loans.entry((home, place)).or_insert(0) += bytes;
            }
        }
    }
}

/// A block lies, or lay, elsewhere than on its GPU. Before that there is nothing to look for.
static WAS_FAR: AtomicBool = AtomicBool::new(false);

/// A block lies elsewhere than on its GPU.
pub fn is_far() {
    WAS_FAR.store(true, Relaxed);
}

/// Whether a block lies, or lay, elsewhere than on its GPU.
pub fn was_far() -> bool {
    WAS_FAR.load(Relaxed)
}

/// Where the memory lies that this usage is of.
pub fn of(usage: &Usage) -> Residence {
    in_sum(usage, &loans(usage))
}

/// The same by who borrows from whom ([`loans`]).
pub fn in_sum(usage: &Usage, loans: &BTreeMap<(u32, Place), u64>) -> Residence {
    // What is on a disk is nowhere that a GPU could use it from.
    let used: u64 = usage.places.iter().filter(|place| !place.place.is_stored()).map(|place| place.used).sum();
    let (mut on_peers, mut on_host) = (0, 0);
    for ((_, place), bytes) in loans {
        *(if place.is_host() { &mut on_host } else { &mut on_peers }) += bytes;
    }
    Residence { near: used.saturating_sub(on_peers + on_host), on_peers, on_host }
}

/// Bytes that were allocated for a GPU and lie at another place.
pub fn loans(usage: &Usage) -> BTreeMap<(u32, Place), u64> {
    let mut loans = BTreeMap::new();
    if !WAS_FAR.load(Relaxed) {
        return loans;
    }
    let mut add = |home: u32, place: Place, bytes: u64| {
        // Plain memory of the host is the host's.
        let place = if place == Place::Pageable { Place::Host(0) } else { place };
        if place != Place::Gpu(home) && !place.is_stored() && bytes > 0 {
            *loans.entry((home, place)).or_insert(0) += bytes;
        }
    };
    match homes()[..] {
        // All blocks are this GPU's: the books of the places say it.
        [home] => usage.places.iter().for_each(|place| add(home, place.place, place.used)),
        ref homes => {
            let Some(opened) = open::opened() else { return loans };
            for &home in homes {
                let blocks = opened.pool.blocks(home);
                // Copies for an image are nobody's loan.
                let blocks = blocks.iter().filter(|block| !copies::is_copy(block));
                let pieces = blocks.flat_map(|block| opened.pool.pieces(block.address, block.bytes));
                pieces.for_each(|piece| add(home, piece.place, piece.bytes));
            }
        }
    }
    loans
}

/// GPUs that blocks may have been allocated for.
fn homes() -> Vec<u32> {
    let mut homes: Vec<u32> = context::all().iter().map(|context| context.device.ordinal()).collect();
    homes.sort_unstable();
    homes.dedup();
    homes
}

/// What was told last.
static TOLD: Mutex<Residence> = Mutex::new(Residence { near: 0, on_peers: 0, on_host: 0 });
/// Until then nothing is looked for: with contexts on several GPUs every block has to be looked at.
static RESTS_UNTIL: AtomicU64 = AtomicU64::new(0);
/// The part of the time that looking may take: one over this.
const SPARINGLY: u64 = 64;

/// Tells the log where this usage lies, once anything was ever far and where that has changed.
pub fn tell(usage: &Usage) {
    if !WAS_FAR.load(Relaxed) || now() < RESTS_UNTIL.load(Relaxed) {
        return;
    }
    let begun = now();
    let residence = of(usage);
    let ended = now();
    RESTS_UNTIL.store(ended + (ended - begun) * SPARINGLY, Relaxed);
    if std::mem::replace(&mut *TOLD.lock(), residence) == residence {
        return;
    }
    log::emit(|| {
        let Residence { near, on_peers, on_host } = residence;
        let [near_size, peers, host] = [near, on_peers, on_host].map(format_size);
        let text = format!("{near_size} are on the GPUs that use them, {peers} on other GPUs, {host} on the host");
        (PoolResidence { near, on_peers, on_host }, text)
    });
}
