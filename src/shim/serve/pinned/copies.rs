//! What copies do with a few blocks of pinned memory that are worth watching: how far into each they reached, and the
//! first one out of each.
//!
//! Copies are on the program's fast path: they look at one counter, and where something is watched at a few addresses.
//! There is no lock and nothing is allocated. The table is written under the holders's lock alone.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Blocks watched at a time. What does not fit is not judged.
const SLOTS: usize = 64;

/// One watched block; free while `end` is 0.
struct Slot {
    start: AtomicU64,
    end: AtomicU64,
    /// Bytes from the start to the last one that a copy touched.
    reach: AtomicU64,
    /// Copies out of the block.
    out: AtomicU32,
    /// Copies into the block: it is filled by the device.
    into: AtomicBool,
    /// The first copy out of it is to be told.
    awaits: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
        reach: AtomicU64::new(0),
        out: AtomicU32::new(0),
        into: AtomicBool::new(false),
        awaits: AtomicBool::new(false),
    }
}; SLOTS];

/// Slots from the first to the last that is in use.
static USED: AtomicUsize = AtomicUsize::new(0);

/// What copies did with a block while it was watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Bytes from the start of the block to the last one that any copy touched.
    pub reach: u64,
    /// Copies out of it.
    pub out: u32,
    /// Whether any went into it: it is filled by the device.
    pub into: bool,
}

/// Whether any block is watched.
#[inline]
pub fn is_watching() -> bool {
    USED.load(Ordering::Relaxed) != 0
}

/// Watches a block. `awaits`: [`copied`] tells of the first copy out of it. False where no slot is free. The caller holds the holders's lock.
pub fn watch(address: u64, bytes: u64, awaits: bool) -> bool {
    let Some(index) = TABLE.iter().position(|slot| slot.end.load(Ordering::Relaxed) == 0) else { return false };
    let slot = &TABLE[index];
    slot.start.store(address, Ordering::Relaxed);
    slot.reach.store(0, Ordering::Relaxed);
    slot.out.store(0, Ordering::Relaxed);
    slot.into.store(false, Ordering::Relaxed);
    slot.awaits.store(awaits, Ordering::Relaxed);
    // Last: whoever sees the end sees the rest. A copy by another thread in the moment in which a slot changes hands may
    // be counted for the new block; no program copies out of memory that is being freed, or not yet handed out.
    slot.end.store(address + bytes, Ordering::Release);
    USED.fetch_max(index + 1, Ordering::Release);
    true
}

/// Watches it no longer. `None`: it was not watched. The caller holds the holders's lock.
pub fn unwatch(address: u64) -> Option<Seen> {
    let slot = slot_of(address)?;
    let seen = look(slot);
    slot.end.store(0, Ordering::Release);
    let used = TABLE.iter().rposition(|slot| slot.end.load(Ordering::Relaxed) != 0).map_or(0, |last| last + 1);
    USED.store(used, Ordering::Release);
    Some(seen)
}

/// What was seen of a watched block so far.
pub fn seen(address: u64) -> Option<Seen> {
    slot_of(address).map(look)
}

fn slot_of(address: u64) -> Option<&'static Slot> {
    let used = USED.load(Ordering::Acquire);
    let watched = |slot: &&Slot| slot.end.load(Ordering::Acquire) != 0 && slot.start.load(Ordering::Relaxed) == address;
    TABLE[..used].iter().find(watched)
}

fn look(slot: &Slot) -> Seen {
    Seen {
        reach: slot.reach.load(Ordering::Relaxed),
        out: slot.out.load(Ordering::Relaxed),
        into: slot.into.load(Ordering::Relaxed),
    }
}

/// After a copy of `bytes` bytes. Returns the start of the block that it came from, if that block awaited its first copy.
#[inline]
pub fn copied(dst: u64, src: u64, bytes: u64) -> Option<u64> {
    let mut first = None;
    for slot in &TABLE[..USED.load(Ordering::Acquire)] {
        let end = slot.end.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Relaxed);
        if (start..end).contains(&src) {
            slot.reach.fetch_max((src - start).saturating_add(bytes), Ordering::Relaxed);
            let before = slot.out.fetch_add(1, Ordering::Relaxed);
            if before == 0 && slot.awaits.load(Ordering::Relaxed) {
                first = Some(start);
            }
        }
        if (start..end).contains(&dst) {
            slot.reach.fetch_max((dst - start).saturating_add(bytes), Ordering::Relaxed);
            slot.into.store(true, Ordering::Relaxed);
        }
    }
    first
}

/// After a copy whose extent is not worked out (rows, boxes): it may have reached everything. Such a copy out of a block is not
/// told as the first, since the data is not in one row; that it was one counts.
pub fn copied_some(dst: &[u64], src: &[u64]) {
    for address in dst {
        let _ = copied(*address, 0, u64::MAX);
    }
    for address in src {
        let _ = copied(0, *address, u64::MAX);
    }
}

/// The program was told how the device calls this memory: a kernel may read all of it, which nobody sees.
pub fn may_be_read(address: u64) {
    if is_watching() {
        copied_some(&[], &[address]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the table is the process's.
    #[test]
    fn a_block_is_known_by_its_addresses_while_it_is_watched() {
        assert!(!is_watching());
        assert!(watch(0x10000, 0x1000, true) && watch(0x20000, 0x1000, false));
        assert_eq!(copied(0x7f, 0x10800, 0x100), Some(0x10000), "the first copy out");
        assert_eq!(copied(0x7f, 0x10000, 0x10), None, "the second");
        assert_eq!(copied(0x20ff0, 0x7f, 0x10), None);
        assert_eq!(copied(0x21000, 0xffff, 1), None, "beside both");
        assert_eq!(seen(0x10000), Some(Seen { reach: 0x900, out: 2, into: false }));
        assert_eq!(unwatch(0x10000), Some(Seen { reach: 0x900, out: 2, into: false }));
        assert_eq!(unwatch(0x10000), None);
        assert_eq!(copied(0, 0x10800, 1), None);
        assert_eq!(unwatch(0x20000), Some(Seen { reach: 0x1000, out: 0, into: true }));
        assert!(!is_watching());

        watch(0x10000, 0x1000, true);
        copied_some(&[0, 0x10010], &[]);
        assert_eq!(copied(0, 0x10000, 1), Some(0x10000));
        assert_eq!(unwatch(0x10000), Some(Seen { reach: u64::MAX, out: 1, into: true }));
        watch(0x10000, 0x1000, true);
        copied_some(&[0, 0x7f], &[0x10010, 0]);
        assert_eq!(copied(0, 0x10000, 1), None, "rows were the first copy out");
        may_be_read(0x10020);
        assert_eq!(unwatch(0x10000), Some(Seen { reach: u64::MAX, out: 3, into: false }));

        for index in 0..SLOTS as u64 {
            assert!(watch(0x100000 * (index + 1), 1, false));
        }
        assert!(!watch(0x1000, 1, false), "the table is full");
        for index in 0..SLOTS as u64 {
            assert!(unwatch(0x100000 * (index + 1)).is_some());
        }
        assert!(!is_watching());
    }
}
