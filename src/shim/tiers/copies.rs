//! Copies and fills use memory, too: what they read and write far away crosses the link once each time.
//!
//! Nothing moves before one of them, since to move what is read once takes longer than to read it. It counts, so that what many of
//! them use comes near where the program waits ([`super::idle`]).

use super::{current_home, launch};
use crate::process;
use crate::watch::capture;
use gpupool_interpose::Api;
use gpupool_tiers::Range;

/// A call has read or written so many bytes from these addresses on.
#[cold]
pub fn told<const N: usize>(api: Api, used: &[(u64, usize); N]) {
    let Some(home) = current_home() else { return };
    if capture::under_way() {
        return;
    }
    let mut ranges = [Range::of(0, 0); N];
    let mut count = 0;
    for &(address, bytes) in used.iter().filter(|(address, bytes)| *bytes > 0 && home.opened.contains(*address)) {
        if let Some(range) = ranges.get_mut(count) {
            *range = Range::of(address, bytes as u64);
            count += 1;
        }
    }
    let Some(ranges) = ranges.get(..count).filter(|ranges| !ranges.is_empty()) else { return };
    let copy = home.tiers.lock().copied(ranges, home);
    if copy.tell_time {
        process::contained(api, || launch::tell_time(home));
    }
}
