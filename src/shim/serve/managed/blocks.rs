//! The live blocks of managed memory that were placed: ours, and the program's own where it asked for advice.

use super::launch;
use super::places::{Stripes, parts};
use gpupool_pool::{AddressIndex, Block, Place};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// One allocation of `cuMemAllocManaged`.
#[derive(Debug)]
pub struct Managed {
    pub block: Block,
    pub stripes: Stripes,
    /// Whether the program asked for plain device memory and got this; if not, it asked for managed memory, and every
    /// question about it is the driver's to answer.
    pub ours: bool,
    /// The driver was told where the stripes are to live.
    pub placed: AtomicBool,
    /// The GPUs, one bit an ordinal, for which the driver was told to map it.
    pub accessed: AtomicU64,
}

impl Managed {
    /// The stripes as `(place, address, bytes)`.
    pub fn parts(&self) -> impl Iterator<Item = (Place, u64, u64)> {
        parts(self.block.address, self.block.bytes, &self.stripes)
    }

    fn end(&self) -> u64 {
        self.block.address + self.block.bytes
    }

    fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.block.address) < self.block.bytes
    }
}

/// By first address.
static LIVE: Mutex<BTreeMap<u64, Arc<Managed>>> = Mutex::new(BTreeMap::new());
/// From the lowest address of any of them to behind the highest, so that most questions end without the lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);
/// When a launch may prefetch each block again, in milliseconds of the coarse clock; 0: at once, since no launch has named
/// it yet. Kept only where launches are looked at.
pub static INDEX: LazyLock<AddressIndex> = LazyLock::new(AddressIndex::default);

/// Whether an address may lie in a live block. No lock; exact for blocks whose allocation has returned.
#[inline]
pub fn may_contain(address: u64) -> bool {
    address < HIGHEST.load(Ordering::Acquire) && address >= LOWEST.load(Ordering::Relaxed)
}

fn changed(live: &BTreeMap<u64, Arc<Managed>>) {
    let lowest = live.keys().next().copied().unwrap_or(u64::MAX);
    // Blocks do not overlap, so the last to begin is the last to end.
    let highest = live.values().next_back().map_or(0, |last| last.end());
    LOWEST.store(lowest, Ordering::Relaxed);
    HIGHEST.store(highest, Ordering::Release);
}

/// A block begins to live.
pub fn insert(managed: Arc<Managed>) {
    let mut live = LIVE.lock();
    if launch::scans() {
        INDEX.insert(managed.block.address, managed.end());
    }
    live.insert(managed.block.address, managed);
    changed(&live);
}

/// Whether a live block may have part of this range. As [`may_contain`].
#[inline]
pub fn may_meet(address: u64, bytes: u64) -> bool {
    address < HIGHEST.load(Ordering::Acquire) && address.saturating_add(bytes) > LOWEST.load(Ordering::Relaxed)
}

/// Takes every block out that has part of this range.
pub fn remove_within(address: u64, bytes: u64) -> Vec<Arc<Managed>> {
    let mut live = LIVE.lock();
    // Blocks do not overlap, so they end in the order in which they begin.
    let before = live.range(..address.saturating_add(bytes)).rev();
    let met: Vec<_> =
        before.map(|(_, managed)| managed.clone()).take_while(|managed| managed.end() > address).collect();
    for managed in &met {
        live.remove(&managed.block.address);
        if launch::scans() {
            INDEX.remove(managed.block.address);
        }
    }
    changed(&live);
    met
}

/// Takes this very block out. Whether it was there: its address may be another one's by now.
pub fn remove_this(managed: &Managed) -> bool {
    let mut live = LIVE.lock();
    let address = managed.block.address;
    if live.get(&address).is_none_or(|known| known.block.id != managed.block.id) {
        return false;
    }
    live.remove(&address);
    if launch::scans() {
        INDEX.remove(address);
    }
    changed(&live);
    true
}

/// Takes the block that begins at this address out.
pub fn remove(address: u64) -> Option<Arc<Managed>> {
    if !may_contain(address) {
        return None;
    }
    let mut live = LIVE.lock();
    let removed = live.remove(&address);
    if launch::scans() {
        INDEX.remove(address);
    }
    changed(&live);
    removed
}

/// The live block that an address lies in.
pub fn at(address: u64) -> Option<Arc<Managed>> {
    if !may_contain(address) {
        return None;
    }
    let live = LIVE.lock();
    let (_, found) = live.range(..=address).next_back()?;
    found.contains(address).then(|| found.clone())
}

/// Every live block.
pub fn all() -> Vec<Arc<Managed>> {
    LIVE.lock().values().cloned().collect()
}
