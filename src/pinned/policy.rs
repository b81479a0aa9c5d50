//! How much to pin, and how much to keep: the numbers that bound what is held above what is in use.
//!
//! Segments are of two kinds by outcome alone: one that a block fills is wholly free again when the block ends, and can be
//! given back; one that several blocks share is stuck while any of them lives. The free rest of shared segments is what
//! the bound has to pay for, so both ways to make such a rest, a new segment and the splitting of a kept one, are held
//! against [`slack`], and what is wholly free goes back before the sum passes [`ceiling`].

use crate::{GRANULE, PAGE};

/// The least that [`slack`] is: below that, pinning anew for every few blocks would cost more than it saves.
const LEAST_SLACK: u64 = 64 << 10;
/// The most that it is: a segment is given back only whole, and one of this size costs 20 ms, a frame of a film.
const MOST_SLACK: u64 = 64 << 20;

/// The free bytes that may lie beside live blocks before a new block gets a segment to itself, for this peak of what is
/// in use: a thirty-second, so that one rest from splitting and one from growth stay below a tenth together.
pub(crate) fn slack(peak: u64) -> u64 {
    (peak / 32).clamp(LEAST_SLACK, MOST_SLACK)
}

/// How much is pinned for small blocks at once, when so much is pinned for them already: twice as much each time, within
/// the slack. A program with much in large blocks and a few small ones does not pay for many small ones.
pub(crate) fn together(small: u64, slack: u64) -> u64 {
    small.clamp(LEAST_SLACK, slack)
}

/// The most that may be pinned while a segment is wholly free: a tenth above the peak.
pub(crate) fn ceiling(peak: u64) -> u64 {
    peak.saturating_add(peak / 10)
}

/// What is pinned for a block of so many bytes: as many of them as go into `together`, at least one, in whole pages. A
/// multiple, not `together` itself: blocks of one size, which is what most programs allocate, then leave no rest.
pub(crate) fn segment(bytes: u64, together: u64) -> u64 {
    let pages = bytes * (together / bytes).max(1);
    pages.checked_next_multiple_of(PAGE).unwrap_or(pages)
}

/// The bytes behind a block of so many, or `None` where no memory could be that big.
pub(crate) fn footprint(bytes: u64) -> Option<u64> {
    let unit = if bytes < PAGE { GRANULE } else { PAGE };
    bytes.checked_next_multiple_of(unit).filter(|&bytes| bytes <= i64::MAX as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_hold_whole_numbers_of_equal_blocks() {
        assert_eq!(segment(512, 64 << 10), 64 << 10);
        assert_eq!(segment(5 << 10, 64 << 10), 60 << 10);
        assert_eq!(segment(1_536, 64 << 10), 64 << 10, "42 of them, in whole pages");
        assert_eq!(segment(300 << 20, 64 << 20), 300 << 20);
    }

    #[test]
    fn a_footprint_is_exact_to_the_page() {
        assert_eq!(footprint(1), Some(512));
        assert_eq!(footprint(4_095), Some(4_096));
        assert_eq!(footprint((64 << 20) + 1), Some((64 << 20) + PAGE));
        assert_eq!(footprint(u64::MAX), None);
    }
}
