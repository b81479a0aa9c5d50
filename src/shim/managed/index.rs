//! From an address to when its block may be prefetched again, without a lock: asked for every pointer of every launch.
//!
//! A sorted table behind a sequence number: a reader that meets a change looks again, and after a few times gives up, which
//! costs a prefetch and nothing else. All in it is atomic, so a reader in the middle of a change reads numbers that do not
//! fit together, never memory that is gone: tables that were outgrown and slots of blocks that ended stay allocated, the
//! latter for later blocks.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

/// How often a reader looks again.
const TRIES: usize = 4;

/// When a block may be prefetched again, in milliseconds of the coarse clock; 0: at once, since no launch has named it yet.
#[derive(Debug, Default)]
pub struct Slot {
    pub next: AtomicU64,
}

static SPARE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

/// A slot for as long as a block lives.
#[derive(Debug)]
pub struct Held(&'static Slot);

impl Held {
    pub fn new() -> Self {
        let spare = SPARE.lock().pop();
        let slot = spare.unwrap_or_else(|| Box::leak(Box::default()));
        slot.next.store(0, Ordering::Relaxed);
        Self(slot)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        SPARE.lock().push(self.0);
    }
}

/// One block; all zero, and so never found, where there is none.
#[derive(Default)]
struct Entry {
    start: AtomicU64,
    end: AtomicU64,
    slot: AtomicPtr<Slot>,
}

struct Table {
    entries: Box<[Entry]>,
}

/// The table and the number of its last change.
pub struct Index {
    /// Odd while a change is under way.
    sequence: AtomicU64,
    count: AtomicU64,
    table: AtomicPtr<Table>,
}

impl Index {
    pub const fn new() -> Self {
        let table = AtomicPtr::new(std::ptr::null_mut());
        Self { sequence: AtomicU64::new(0), count: AtomicU64::new(0), table }
    }

    /// The slot of the block that an address lies in.
    #[inline]
    pub fn find(&self, address: u64) -> Option<&'static Slot> {
        for _ in 0..TRIES {
            let before = self.sequence.load(Ordering::Acquire);
            let found = self.look(address);
            fence(Ordering::Acquire);
            if before & 1 == 0 && before == self.sequence.load(Ordering::Relaxed) {
                return found;
            }
            std::hint::spin_loop();
        }
        None
    }

    fn look(&self, address: u64) -> Option<&'static Slot> {
        let count = self.count.load(Ordering::Relaxed) as usize;
        // SAFETY: null or a table that was leaked when it was put there.
        let table = unsafe { self.table.load(Ordering::Acquire).as_ref() }?;
        let entries = table.entries.get(..count)?;
        let behind = entries.partition_point(|entry| entry.start.load(Ordering::Relaxed) <= address);
        let entry = entries.get(behind.checked_sub(1)?)?;
        let inside = address < entry.end.load(Ordering::Relaxed);
        let slot = entry.slot.load(Ordering::Relaxed);
        // SAFETY: null or a slot, which are never freed.
        unsafe { slot.as_ref() }.filter(|_| inside)
    }

    /// Makes these the blocks, `(start, end, slot)` in the order of their addresses. One thread at a time.
    pub fn replace<'a>(&self, count: usize, blocks: impl Iterator<Item = (u64, u64, &'a Held)>) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        // SAFETY: null or a table that was leaked when it was put there.
        let known = unsafe { self.table.load(Ordering::Relaxed).as_ref() };
        let table = known.filter(|table| table.entries.len() >= count).unwrap_or_else(|| {
            let entries = (0..count.next_power_of_two().max(64)).map(|_| Entry::default()).collect();
            let table: &'static Table = Box::leak(Box::new(Table { entries }));
            self.table.store(std::ptr::from_ref(table).cast_mut(), Ordering::Release);
            table
        });
        for (entry, (start, end, held)) in table.entries.iter().zip(blocks) {
            entry.start.store(start, Ordering::Relaxed);
            entry.end.store(end, Ordering::Relaxed);
            entry.slot.store(std::ptr::from_ref(held.0).cast_mut(), Ordering::Relaxed);
        }
        self.count.store(count as u64, Ordering::Relaxed);
        self.sequence.store(sequence + 2, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn fill(index: &Index, blocks: &[(u64, u64, Held)]) {
        index.replace(blocks.len(), blocks.iter().map(|(start, end, held)| (*start, *end, held)));
    }

    fn blocks(count: u64) -> Vec<(u64, u64, Held)> {
        (1..=count).map(|number| (number * 100, number * 100 + 50, Held::new())).collect()
    }

    #[test]
    fn finds_the_block_around_an_address_and_none_between() {
        let index = Index::new();
        assert!(index.find(100).is_none());
        let mut live = blocks(200);
        fill(&index, &live);
        for number in 1..=200 {
            let slot = |offset: u64| index.find(number * 100 + offset).map(std::ptr::from_ref);
            let held = std::ptr::from_ref(live[number as usize - 1].2.0);
            assert_eq!((slot(0), slot(49), slot(50)), (Some(held), Some(held), None));
        }
        assert!(index.find(99).is_none());
        live.truncate(1);
        fill(&index, &live);
        assert!(index.find(120).is_some());
        assert!(index.find(220).is_none(), "what is gone is not found, though its row is still in the table");
    }

    #[test]
    fn a_reader_beside_changes_finds_the_block_that_stays_or_nothing() {
        let index = Index::new();
        let live = blocks(300);
        let own = std::ptr::from_ref(live[0].2.0) as usize;
        fill(&index, &live[..1]);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut found = 0;
                while found < 10_000 {
                    if let Some(slot) = index.find(120) {
                        assert_eq!(std::ptr::from_ref(slot) as usize, own);
                        found += 1;
                    }
                }
                done.store(true, Ordering::Relaxed);
            });
            for round in 0.. {
                fill(&index, &live[..1 + round % 300]);
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
    }
}
