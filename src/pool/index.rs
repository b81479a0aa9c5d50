//! From an address to the number kept for its block, without a lock: asked for every pointer of every launch.
//!
//! A sorted table behind a sequence number: a reader that meets a change looks again, and after a few times gives up, so it
//! never waits for whoever changes the table. All that readers see is atomic and stays allocated (outgrown tables, and the
//! numbers of blocks that ended, which later blocks get), so in the middle of a change they read what does not fit together,
//! never memory that is gone.
//!
//! The argument: the sequence number is odd before a change writes anything and even, and new, after all of it. A reader
//! whose two looks at it show one even number has read nothing that a later change wrote: having read such a word, it would
//! have seen that change's odd number too (a release fence between that number and the words, an acquire fence between the
//! words and the second look). And it missed nothing of earlier changes, since its first look acquires what they released.

use crate::sync::{AtomicU64, Mutex, Ordering, fence, spin_loop};
use std::sync::OnceLock;

/// How often a reader looks again.
const TRIES: usize = 4;
/// Rows of the smallest table. The model checker is to see tables outgrown.
const FIRST: usize = if cfg!(loom) { 2 } else { 64 };
/// As many sizes of tables as there may ever be: 2³⁰ blocks.
const SIZES: usize = 25;

/// A block in the table.
#[derive(Debug, Default)]
struct Bounds {
    start: AtomicU64,
    end: AtomicU64,
    /// Which number is this block's.
    slot: AtomicU64,
}

/// A block as those know it who change the table.
#[derive(Clone, Copy, Debug)]
struct Known {
    start: u64,
    end: u64,
    slot: u64,
}

#[derive(Debug, Default)]
struct Blocks {
    /// In the order of their addresses.
    known: Vec<Known>,
    /// Slots of blocks that ended.
    spare: Vec<u64>,
    /// Slots ever given.
    slots: u64,
}

impl Blocks {
    /// Whether there was a block that begins here; its slot is spare now.
    fn forget(&mut self, start: u64) -> bool {
        let found = self.known.binary_search_by_key(&start, |known| known.start);
        if let Ok(at) = found {
            let Known { slot, .. } = self.known.remove(at);
            self.spare.push(slot);
        }
        found.is_ok()
    }
}

/// Arrays of [`FIRST`], twice as many, four times as many…, made when first needed, for good.
#[derive(Debug, Default)]
struct Arrays<T>([OnceLock<Box<[T]>>; SIZES]);

impl<T: Default> Arrays<T> {
    fn get(&self, size: usize) -> Option<&[T]> {
        self.0.get(size)?.get().map(Box::as_ref)
    }

    fn make(&self, size: usize) -> Option<&[T]> {
        let array = || (0..FIRST << size).map(|_| T::default()).collect();
        Some(self.0.get(size)?.get_or_init(array))
    }
}

/// The size of the table for so many blocks.
fn size(count: usize) -> usize {
    count.div_ceil(FIRST).next_power_of_two().ilog2() as usize
}

/// Which array has this slot, and where.
fn seat(slot: u64) -> (usize, usize) {
    let from = slot as usize + FIRST;
    let size = (from / FIRST).ilog2() as usize;
    (size, from - (FIRST << size))
}

/// Live blocks that do not overlap, and a number for each that its users may set as they like.
#[derive(Debug, Default)]
pub struct AddressIndex {
    /// Odd while a change is under way.
    sequence: AtomicU64,
    /// Rows in use, of the table whose size this tells.
    count: AtomicU64,
    tables: Arrays<Bounds>,
    numbers: Arrays<AtomicU64>,
    /// Its lock orders the changes.
    blocks: Mutex<Blocks>,
}

impl AddressIndex {
    /// The number of the block that an address lies in. `None` also where changes come too fast to tell. Whoever still holds
    /// the number of a block that was removed may share it with a later block.
    #[inline]
    pub fn find(&self, address: u64) -> Option<&AtomicU64> {
        for _ in 0..TRIES {
            if let Some(found) = self.look(address) {
                return found;
            }
            spin_loop();
        }
        None
    }

    /// `None`: there was a change meanwhile, and nothing is known.
    #[inline]
    pub(crate) fn look(&self, address: u64) -> Option<Option<&AtomicU64>> {
        let before = self.sequence.load(Ordering::Acquire);
        let slot = self.slot(address);
        fence(Ordering::Acquire);
        if before & 1 == 1 || before != self.sequence.load(Ordering::Relaxed) {
            return None;
        }
        Some(slot.and_then(|slot| {
            let (size, at) = seat(slot);
            self.numbers.get(size)?.get(at)
        }))
    }

    /// What the table says at this moment, true or not.
    fn slot(&self, address: u64) -> Option<u64> {
        // Acquire: the table was made before. `OnceLock` sees to that too, but loom cannot know.
        let count = self.count.load(Ordering::Acquire) as usize;
        let rows = self.tables.get(size(count))?.get(..count)?;
        let behind = rows.partition_point(|row| row.start.load(Ordering::Relaxed) <= address);
        let row = rows.get(behind.checked_sub(1)?)?;
        let inside = address < row.end.load(Ordering::Relaxed);
        inside.then(|| row.slot.load(Ordering::Relaxed))
    }

    /// A block begins to live, with the number 0. One that began here before is gone.
    pub fn insert(&self, start: u64, end: u64) {
        let mut blocks = self.blocks.lock();
        blocks.forget(start);
        let slot = blocks.spare.pop().unwrap_or(blocks.slots);
        let (size, at) = seat(slot);
        let Some(number) = self.numbers.make(size).and_then(|numbers| numbers.get(at)) else { return };
        number.store(0, Ordering::Relaxed);
        blocks.slots = blocks.slots.max(slot + 1);
        let at = blocks.known.partition_point(|known| known.start < start);
        blocks.known.insert(at, Known { start, end, slot });
        self.publish(&blocks.known);
    }

    /// The block that begins here is gone; nothing happens where there is none.
    pub fn remove(&self, start: u64) {
        let mut blocks = self.blocks.lock();
        if blocks.forget(start) {
            self.publish(&blocks.known);
        }
    }

    /// Makes these the blocks. One thread at a time.
    fn publish(&self, known: &[Known]) {
        // No lack of tables where there was a slot: both have as many sizes.
        let Some(rows) = self.tables.make(size(known.len())) else { return };
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (row, &Known { start, end, slot }) in rows.iter().zip(known) {
            row.start.store(start, Ordering::Relaxed);
            row.end.store(end, Ordering::Relaxed);
            row.slot.store(slot, Ordering::Relaxed);
        }
        self.count.store(known.len() as u64, Ordering::Release);
        self.sequence.store(sequence + 2, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn address_of(number: Option<&AtomicU64>) -> Option<*const AtomicU64> {
        number.map(std::ptr::from_ref)
    }

    #[test]
    fn finds_the_block_around_an_address_and_none_between() {
        let index = AddressIndex::default();
        assert!(index.find(100).is_none());
        for block in (1..=200).rev() {
            index.insert(block * 100, block * 100 + 50);
        }
        for block in 1..=200 {
            index.find(block * 100).unwrap().store(block, Ordering::Relaxed);
        }
        for block in 1..=200 {
            let number = |offset: u64| Some(index.find(block * 100 + offset)?.load(Ordering::Relaxed));
            assert_eq!((number(0), number(49), number(50)), (Some(block), Some(block), None));
        }
        assert!(index.find(99).is_none());
        for block in 2..=200 {
            index.remove(block * 100);
        }
        assert!(index.find(120).is_some());
        assert!(index.find(220).is_none(), "what is gone is not found, though its row is still in a table");
    }

    #[test]
    fn a_number_goes_to_a_later_block_and_starts_anew() {
        let index = AddressIndex::default();
        index.insert(100, 150);
        let first = index.find(100).unwrap();
        first.store(7, Ordering::Relaxed);
        index.remove(100);
        index.remove(100);
        index.insert(200, 250);
        index.insert(200, 260);
        index.insert(300, 350);
        assert_eq!(address_of(index.find(259)), Some(std::ptr::from_ref(first)));
        assert_eq!(first.load(Ordering::Relaxed), 0);
        assert_ne!(address_of(index.find(300)), Some(std::ptr::from_ref(first)));
    }

    #[test]
    fn a_reader_beside_changes_finds_the_block_that_stays_or_nothing() {
        let index = AddressIndex::default();
        index.insert(100, 150);
        let own = index.find(120).map(|number| std::ptr::from_ref(number) as usize);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let found = index.look(120).map(|found| found.map(|number| std::ptr::from_ref(number) as usize));
                    assert!(found.is_none_or(|found| found == own));
                }
            });
            // Rows move up and down below and above the block, from table to table.
            for _ in 0..20 {
                (2..=300).for_each(|block| index.insert(block * 100, block * 100 + 50));
                for _ in 0..20 {
                    index.insert(10, 60);
                    index.remove(10);
                }
                (2..=300).for_each(|block| index.remove(block * 100));
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(index.find(120).map(|number| std::ptr::from_ref(number) as usize), own);
    }
}
