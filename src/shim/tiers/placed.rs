//! Memory that the program has put somewhere itself (`gpupool_prefetch`, `gpupool_advise`): it stays there until its block ends or
//! the program takes that back. What must keep its physical pages for other reasons is known by the pool.

use super::home;
use crate::serve::memory::Placing;
use gpupool_pool::{Block, FRAME};
use gpupool_tiers::Range;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whole frames, as moves are: start and end of each range, none of which touch.
static PLACED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Puts a range in (`is_placed`) or takes it out.
fn set(all: &mut BTreeMap<u64, u64>, range: Range, is_placed: bool) {
    let (mut start, mut end) = (range.start, range.end);
    let touched: Vec<(u64, u64)> =
        all.range(..=end).rev().take_while(|(_, to)| **to >= start).map(|(&a, &b)| (a, b)).collect();
    for (from, to) in touched {
        all.remove(&from);
        if is_placed {
            (start, end) = (start.min(from), end.max(to));
        } else {
            let rests = [(from, start.min(to)), (end.max(from), to)];
            all.extend(rests.into_iter().filter(|(from, to)| from < to));
        }
    }
    if is_placed && start < end {
        all.insert(start, end);
    }
}

/// The frames that have something of a range.
pub(super) fn frames(address: u64, bytes: u64) -> Range {
    let end = address.saturating_add(bytes);
    Range { start: address - address % FRAME, end: end.checked_next_multiple_of(FRAME).unwrap_or(end) }
}

/// Something was said of where so many bytes of a block lie.
pub(super) fn by_program(block: &Block, address: u64, bytes: u64, placing: Placing) {
    let range = frames(address, bytes);
    if placing != Placing::Anchored {
        let mut all = PLACED.lock();
        set(&mut all, range, placing == Placing::Put);
        IS_ANY.store(!all.is_empty(), Ordering::Release);
    }
    if let Some(home) = home(block.home) {
        home.tiers.lock().placed(range);
    }
}

/// Something was said of where the program's own memory lies there.
pub(super) fn own(range: Range, is_placed: bool) {
    if is_placed || IS_ANY.load(Ordering::Acquire) {
        let mut all = PLACED.lock();
        set(&mut all, range, is_placed);
        IS_ANY.store(!all.is_empty(), Ordering::Release);
    }
}

pub(super) fn ended(block: &Block) {
    if IS_ANY.load(Ordering::Acquire) {
        let mut all = PLACED.lock();
        set(&mut all, frames(block.address, block.bytes), false);
        IS_ANY.store(!all.is_empty(), Ordering::Release);
    }
}

/// Tells what of a range was put somewhere, in order of address.
pub(super) fn within(range: Range, tell: &mut dyn FnMut(Range)) {
    if !IS_ANY.load(Ordering::Acquire) {
        return;
    }
    let all = PLACED.lock();
    let before = all.range(..range.start).next_back();
    let of = |(&start, &end): (&u64, &u64)| range.meet(&Range { start, end });
    before.into_iter().chain(all.range(range.start..range.end)).map(of).filter(|part| part.bytes() > 0).for_each(tell);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_and_are_taken_out_in_part() {
        let mut all = BTreeMap::new();
        let mut put = |start, end, is_placed| {
            set(&mut all, Range { start, end }, is_placed);
            all.iter().map(|(&start, &end)| (start, end)).collect::<Vec<_>>()
        };
        assert_eq!(put(10, 20, true), [(10, 20)]);
        assert_eq!(put(40, 50, true), [(10, 20), (40, 50)]);
        assert_eq!(put(20, 30, true), [(10, 30), (40, 50)]);
        assert_eq!(put(15, 45, false), [(10, 15), (45, 50)]);
        assert_eq!(put(0, 60, true), [(0, 60)]);
        assert_eq!(put(20, 30, false), [(0, 20), (30, 60)]);
        assert_eq!(put(0, 60, false), []);
    }
}
