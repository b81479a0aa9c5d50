//! Which places in the program (call sites) hold the pool's blocks: for the log, the metrics page, and what is told when memory runs out.
//!
//! Finding a place out costs microseconds. It is done when the pool grows, which takes longer by far, and for every block of which the log
//! has a line; of memory that is used again, only for the first, second, fourth … block of a thread and then for one of [`SELDOM`], so that
//! an allocation pays a nanosecond for it. Nothing is done when a block ends. A block that was not looked at counts for the place that last
//! asked for as many bytes.

use crate::clock::monotonic_nanoseconds as now;
use crate::log;
use crate::watch::site;
use gpupool_events::{MemorySite, Site};
use gpupool_interpose::cancel::Map;
use gpupool_pool::Block;
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::Arc;

/// Blocks of reused memory between two that are looked at, once a thread has made enough of them.
const SELDOM: u32 = 4096;
/// Places that are kept apart; further ones are one, [`OTHERS`].
const PLACES: usize = 1024;
/// Ways through the code that are known by their place; with more, some are found out again.
const WAYS: usize = 1 << 14;
/// Sizes whose place is remembered.
const SIZES: usize = 4096;
/// Blocks whose place is remembered; what has ended is forgotten when there are so many.
const BLOCKS: usize = 1 << 16;
/// The number of all places beyond [`PLACES`].
const OTHERS: u64 = PLACES as u64;

/// Where a block was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The number of the place, from 1.
    pub site: u64,
    /// Not the block itself was looked at, but another one of its size.
    pub is_guessed: bool,
}

#[derive(Default)]
struct Sites {
    /// Place `n` is at index `n - 1`.
    places: Vec<Arc<Site>>,
    /// Bytes that each asked for in blocks that were looked at.
    asked: Vec<u64>,
    by_way: Map<u64, u64>,
    by_size: Map<u64, u64>,
    /// By address: the block's number, which tells it from a later one there, and its place.
    blocks: Map<u64, (u64, u64)>,
    /// Blocks that were noted since those that have ended were last forgotten.
    noted: usize,
}

static SITES: Mutex<Option<Sites>> = Mutex::new(None);

/// Nothing in `act` calls the driver, logs, or takes a lock.
fn with<T>(act: impl FnOnce(&mut Sites) -> T) -> T {
    act(SITES.lock().get_or_insert_default())
}

thread_local! {
    /// Blocks of reused memory up to the next that is looked at, and how many it were the last time. `const` and without a destructor:
    /// legal at any time.
    static NEXT: Cell<(u32, u32)> = const { Cell::new((1, 1)) };
}

/// A block was made: the number of the place that asked for it, where that was looked at.
#[inline]
pub fn made(block: &Block, reused: bool) -> Option<u64> {
    let (left, gap) = NEXT.get();
    if reused && !log::has_every_block() {
        if left > 1 {
            NEXT.set((left - 1, gap));
            return None;
        }
        let gap = (gap * 2).min(SELDOM);
        NEXT.set((gap, gap));
    }
    Some(note(block))
}

#[cold]
#[inline(never)]
fn note(block: &Block) -> u64 {
    let way = site::fingerprint();
    let known = with(|sites| sites.by_way.get(&way).copied());
    let site = known.unwrap_or_else(|| learn(way, site::here()));
    let is_full = with(|sites| sites.note(block, site));
    if is_full {
        forget_ended();
    }
    site
}

fn learn(way: u64, site: Site) -> u64 {
    let (number, is_new) = with(|sites| sites.number(&site));
    if is_new {
        log::emit(|| {
            let text = format!("place {number} that asks for memory: {}", site::line(&site));
            (MemorySite { id: number, site }, text)
        });
    }
    with(|sites| {
        if sites.by_way.len() >= WAYS {
            sites.by_way.clear();
        }
        sites.by_way.insert(way, number);
    });
    number
}

impl Sites {
    /// The place's number, and whether it was met for the first time.
    fn number(&mut self, site: &Site) -> (u64, bool) {
        let at = self.places.iter().position(|place| **place == *site);
        if let Some(at) = at {
            return (at as u64 + 1, false);
        }
        if self.places.len() as u64 + 1 >= OTHERS {
            let is_new = self.places.len() as u64 + 1 == OTHERS;
            if is_new {
                self.places.push(Arc::default());
            }
            return (OTHERS, false);
        }
        self.places.push(Arc::new(site.clone()));
        (self.places.len() as u64, true)
    }

    /// Whether it is time to forget blocks that have ended.
    fn note(&mut self, block: &Block, site: u64) -> bool {
        if self.by_size.len() >= SIZES {
            self.by_size.clear();
        }
        self.by_size.insert(block.bytes, site);
        self.noted += 1;
        self.asked.resize(self.places.len(), 0);
        if let Some(asked) = (site as usize).checked_sub(1).and_then(|index| self.asked.get_mut(index)) {
            *asked = asked.saturating_add(block.bytes);
        }
        if self.blocks.len() < BLOCKS || self.blocks.contains_key(&block.address) {
            self.blocks.insert(block.address, (block.id, site));
        }
        let is_full = self.blocks.len() >= BLOCKS && self.noted >= BLOCKS;
        if is_full {
            self.noted = 0;
        }
        is_full
    }

    fn of(&self, block: &Block) -> Option<Asked> {
        match self.blocks.get(&block.address) {
            Some(&(id, site)) if id == block.id => Some(Asked { site, is_guessed: false }),
            _ => self.by_size.get(&block.bytes).map(|&site| Asked { site, is_guessed: true }),
        }
    }
}

/// What is known of blocks that have ended goes. The pool is asked without a lock of this module's.
fn forget_ended() {
    let known: Vec<(u64, u64)> = with(|sites| sites.blocks.iter().map(|(address, (id, _))| (*address, *id)).collect());
    let ended = known.into_iter().filter(|(address, id)| super::block_at(*address).is_none_or(|block| block.id != *id));
    for (address, id) in ended.collect::<Vec<_>>() {
        with(|sites| {
            if sites.blocks.get(&address).is_some_and(|(now, _)| *now == id) {
                sites.blocks.remove(&address);
            }
        });
    }
}

/// Where a block was asked for, as far as that is known.
pub fn of(block: &Block) -> Option<Asked> {
    with(|sites| sites.of(block))
}

/// The place of this number.
pub fn place(number: u64) -> Option<Arc<Site>> {
    with(|sites| sites.places.get(usize::try_from(number).ok()?.checked_sub(1)?).cloned())
}

/// A place that holds blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The line that a person looks for.
    pub text: String,
    /// Bytes asked for in its live blocks.
    pub live: u64,
    /// Its live blocks that have frames of their own.
    pub blocks: u64,
    /// Bytes that it asked for in blocks that were looked at, over the life of the process.
    pub total: u64,
}

/// What was found last, and until when nobody looks again.
type Found = (Vec<Holder>, u32, u64);

/// The places that hold most, and how many others hold anything. Every live block is looked at for it, so that it is done seldom enough to
/// take no more than a part of the time; in between this is what it was.
pub fn holders() -> (Vec<Holder>, u32) {
    /// As many as the page has room for.
    const MOST: usize = 64;
    /// The part of the time that looking may take: one over this.
    const SPARINGLY: u64 = 256;
    static FOUND: Mutex<Option<Found>> = Mutex::new(None);
    let begun = now();
    if let Some((holders, more, until)) = &*FOUND.lock()
        && begun < *until
    {
        return (holders.clone(), *more);
    }
    let mut sums: Map<u64, (u64, u64)> = Map::default();
    for block in super::live() {
        if let Some(asked) = of(&block) {
            let (live, blocks) = sums.entry(asked.site).or_default();
            *live += block.bytes;
            *blocks += 1;
        }
    }
    let mut sums: Vec<(u64, (u64, u64))> = sums.into_iter().collect();
    sums.sort_by_key(|&(site, (live, _))| (std::cmp::Reverse(live), site));
    let more = sums.len().saturating_sub(MOST) as u32;
    let holder = |(number, (live, blocks)): (u64, (u64, u64))| {
        let (site, total) = with(|sites| {
            let index = (number as usize).checked_sub(1)?;
            Some((sites.places.get(index)?.clone(), sites.asked.get(index).copied().unwrap_or(0)))
        })?;
        Some(Holder { text: site::line(&site), live, blocks, total })
    };
    let holders: Vec<Holder> = sums.into_iter().take(MOST).filter_map(holder).collect();
    let ended = now();
    *FOUND.lock() = Some((holders.clone(), more, ended + (ended - begun) * SPARINGLY));
    (holders, more)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_events::PyFrame;

    fn at(line: u32) -> Site {
        let frame = PyFrame { file: "train.py".to_owned(), line, function: "step".to_owned() };
        Site { python: vec![frame], ..Site::default() }
    }

    fn block(address: u64, bytes: u64, id: u64) -> Block {
        Block { address, bytes, home: 0, owner: 1, id }
    }

    #[test]
    fn a_block_that_was_not_looked_at_is_guessed_by_its_size() {
        let mut sites = Sites::default();
        assert_eq!(sites.number(&at(1)), (1, true));
        assert_eq!(sites.number(&at(2)), (2, true));
        assert_eq!(sites.number(&at(1)), (1, false), "a place is known again");
        sites.note(&block(0x1000, 64, 1), 1);
        sites.note(&block(0x2000, 96, 2), 2);
        let asked = |address, bytes, id| sites.of(&block(address, bytes, id));
        assert_eq!(asked(0x1000, 64, 1), Some(Asked { site: 1, is_guessed: false }));
        assert_eq!(
            asked(0x1000, 96, 3),
            Some(Asked { site: 2, is_guessed: true }),
            "a later block at the same address"
        );
        assert_eq!(asked(0x3000, 5, 4), None);
    }

    #[test]
    fn more_places_and_blocks_than_there_is_room_for_do_no_harm() {
        let mut sites = Sites::default();
        for line in 0..2 * PLACES as u32 {
            let (number, _) = sites.number(&at(line));
            assert!((1..=OTHERS).contains(&number));
        }
        assert_eq!(sites.number(&at(u32::MAX)), (OTHERS, false));
        assert_eq!(sites.places.len(), PLACES);
        let full: Vec<u64> = (0..3 * BLOCKS as u64).filter(|id| sites.note(&block(id << 21, *id, *id), 1)).collect();
        assert_eq!(full.len(), 3, "looked through once for each time that so many came");
        assert!(sites.blocks.len() <= BLOCKS && sites.by_size.len() <= SIZES);
    }
}
