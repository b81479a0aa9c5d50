//! What lies where in the pool's addresses, told over time: only where the log has every block, since it is the ground that they stand on.

use super::open;
use crate::clock::monotonic_nanoseconds as now;
use crate::log;
use gpupool_config::format_size;
use gpupool_events::{MapChange, PoolMap};
use gpupool_pool::{Mapped, Place};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// What was told last.
static TOLD: Mutex<Vec<Mapped>> = Mutex::new(Vec::new());
/// How often somebody wanted it told since whoever tells it now began to look.
static ASKED: AtomicU32 = AtomicU32::new(0);
/// Until then nothing is looked for: every chunk is looked at each time.
static RESTS_UNTIL: AtomicU64 = AtomicU64::new(0);
/// The part of the time that looking may take: one over this.
const SPARINGLY: u64 = 16;

/// Tells what has changed, unless that was looked for a moment ago.
pub fn tell() {
    if log::has_every_block() && now() >= RESTS_UNTIL.load(Relaxed) {
        tell_now();
    }
}

/// Tells what has changed. One thread at a time tells it, so that its lines are in order; another one leaves its part to that.
pub fn tell_now() {
    if !log::has_every_block() || ASKED.fetch_add(1, Relaxed) > 0 {
        return;
    }
    loop {
        let asked = ASKED.load(Relaxed);
        let begun = now();
        let changes = look();
        let ended = now();
        RESTS_UNTIL.store(ended + (ended - begun) * SPARINGLY, Relaxed);
        if !changes.is_empty() {
            let bytes = format_size(changes.iter().map(|change| change.bytes).sum());
            log::emit(|| (PoolMap { changes }, format!("{bytes} of the pool's addresses lie elsewhere than before")));
        }
        if ASKED.compare_exchange(asked, 0, Relaxed, Relaxed).is_ok() {
            break;
        }
    }
}

fn look() -> Vec<MapChange> {
    let Some(opened) = open::opened() else { return Vec::new() };
    let after = opened.pool.mapped();
    let mut told = TOLD.lock();
    let changes = changes(&told, &after);
    *told = after;
    changes
}

/// Where the one list, in address order, says something else than the other.
fn changes(before: &[Mapped], after: &[Mapped]) -> Vec<MapChange> {
    let mut changes: Vec<(u64, u64, Option<Place>)> = Vec::new();
    let (mut old, mut new) = (before.iter().copied().peekable(), after.iter().copied().peekable());
    let mut at = 0;
    while let Some(first) = [old.peek(), new.peek()].into_iter().flatten().map(|row| row.address.max(at)).min() {
        // Up to where both stay as they are.
        let here = |row: Option<&Mapped>| match row {
            Some(row) if row.address.max(at) <= first => (Some(row.place), row.address + row.bytes),
            Some(row) => (None, row.address),
            None => (None, u64::MAX),
        };
        let ((was, old_end), (is, new_end)) = (here(old.peek()), here(new.peek()));
        let end = old_end.min(new_end);
        if was != is {
            match changes.last_mut() {
                Some((_, last, place)) if *last == first && *place == is => *last = end,
                _ => changes.push((first, end, is)),
            }
        }
        at = end;
        while old.next_if(|row| row.address + row.bytes <= at).is_some() {}
        while new.next_if(|row| row.address + row.bytes <= at).is_some() {}
    }
    let change = |(address, end, place): (u64, u64, Option<Place>)| MapChange {
        address,
        bytes: end - address,
        place: place.map(|place| place.to_string()),
    };
    changes.into_iter().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[(u64, u64, u32)]) -> Vec<Mapped> {
        let row = |&(address, bytes, gpu): &(u64, u64, u32)| Mapped { address, bytes, place: Place::Gpu(gpu) };
        rows.iter().map(row).collect()
    }

    fn told(before: &[(u64, u64, u32)], after: &[(u64, u64, u32)]) -> Vec<(u64, u64, Option<String>)> {
        let changes = changes(&rows(before), &rows(after));
        changes.into_iter().map(|change| (change.address, change.bytes, change.place)).collect()
    }

    #[test]
    fn only_what_lies_elsewhere_is_told() {
        let gpu = |number: u32| Some(format!("gpu{number}"));
        assert_eq!(told(&[], &[(10, 5, 0), (20, 5, 1)]), [(10, 5, gpu(0)), (20, 5, gpu(1))]);
        assert_eq!(told(&[(10, 5, 0)], &[(10, 5, 0)]), []);
        assert_eq!(told(&[(10, 5, 0)], &[(10, 9, 0)]), [(15, 4, gpu(0))]);
        assert_eq!(told(&[(10, 10, 0)], &[(10, 3, 0), (13, 4, 1), (17, 3, 0)]), [(13, 4, gpu(1))]);
        assert_eq!(told(&[(10, 5, 0), (30, 5, 1)], &[(32, 3, 1)]), [(10, 5, None), (30, 2, None)]);
        assert_eq!(told(&[(10, 10, 0)], &[]), [(10, 10, None)]);
    }
}
