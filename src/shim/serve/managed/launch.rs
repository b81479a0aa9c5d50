//! Before a launch: blocks that its arguments name are moved to their places (`GPUPOOL_PREFETCH=launch`).
//!
//! A program, or the driver that makes room on a full GPU, may have moved a block away from where it was placed. The words
//! of the arguments are compared with the addresses of live blocks. A block is moved before the first launch that names it,
//! and again at most every [`PERIOD`]; all such moves together take at most a hundredth of the program's time, because the
//! driver looks at every page, and needs 15 µs for 32 MiB that are where they should be.
//!
//! Not seen: pointers that a kernel finds in memory, launches of graphs, and more than the first words of large parameters.

use super::{OPENED, blocks};
use crate::clock::coarse_now;
use crate::watch::arguments::{self, Arguments, Reader};
use crate::watch::capture;
use crate::{log, process};
use gpupool_cuda::{Driver, Function, Stream};
use gpupool_interpose::Api;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Milliseconds before a block is moved again.
const PERIOD: u64 = 100;
/// The part of the time that may go into moving blocks is 1 in this.
const SHARE: u64 = 100;
/// Blocks that one launch moves; the others are due at the next.
const MOST: usize = 16;

/// Milliseconds of the coarse clock until which only blocks are moved that never were.
static QUIET_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Whether launches are looked at: some block lives, or did.
#[inline]
pub fn scans() -> bool {
    arguments::are_read_by(Reader::Managed)
}

/// Launches are looked at from now on, where the driver tells what their parameters are.
pub(super) fn start(driver: &Driver) {
    if driver.knows_parameters() {
        arguments::begin(Reader::Managed);
    } else {
        log::warn_once(
            "launch",
            "GPUPOOL_PREFETCH=launch: this driver does not tell the parameters of kernels (CUDA 12.4 and newer do); managed \
             memory is moved when it is allocated only",
        );
    }
}

/// Moves the blocks that a launch names, before it, in the order of its stream. Where there is nothing to move: a look into
/// a table for the function, and two compares for every word. Without a function the driver refuses the launch.
///
/// # Safety
/// The arguments are those that the program passes to the driver with this function.
#[inline]
pub unsafe fn before(api: Api, function: Option<Function>, stream: Stream, arguments: Arguments) {
    let Some(layout) = function.and_then(|function| arguments::known(function).or_else(|| learn(api, function))) else {
        return;
    };
    let mut due = Due::default();
    // SAFETY: as for this function.
    unsafe {
        arguments.words(layout, |word| {
            if blocks::may_contain(word) {
                due.look(word);
            }
        });
    }
    if due.count > 0 {
        act(api, stream, &due);
    }
}

/// Addresses in blocks that are due.
#[derive(Default)]
struct Due {
    addresses: [u64; MOST],
    count: usize,
    /// The time, once it was asked for.
    now: Option<u64>,
}

impl Due {
    #[inline]
    fn look(&mut self, address: u64) {
        let Some(due) = blocks::INDEX.find(address) else { return };
        let next = due.load(Ordering::Relaxed);
        if next != 0 {
            let now = *self.now.get_or_insert_with(milliseconds);
            if now < next || now < QUIET_UNTIL.load(Ordering::Relaxed) {
                return;
            }
        }
        if let Some(place) = self.addresses.get_mut(self.count) {
            *place = address;
            self.count += 1;
        }
    }
}

fn milliseconds() -> u64 {
    coarse_now().as_millis() as u64
}

#[cold]
fn learn(api: Api, function: Function) -> Option<&'static arguments::Layout> {
    let opened = OPENED.get()?.as_ref()?;
    process::contained(api, || arguments::learn(opened.driver, function))
}

#[cold]
fn act(api: Api, stream: Stream, due: &Due) {
    if capture::under_way() {
        return;
    }
    let Some(Some(opened)) = OPENED.get() else { return };
    let stream = stream.meant_by(api.name().ends_with("_ptsz"));
    let _ = process::contained(api, || {
        let begin = Instant::now();
        let now = milliseconds();
        for &address in due.addresses.iter().take(due.count) {
            let Some(due) = blocks::INDEX.find(address) else { continue };
            // Another thread's launch, or a second pointer into the same block, may have been first.
            let next = due.load(Ordering::Relaxed);
            let mine = due.compare_exchange(next, now + PERIOD, Ordering::Relaxed, Ordering::Relaxed);
            if next <= now
                && mine.is_ok()
                && let Some(managed) = blocks::at(address)
            {
                opened.prefetch(&managed, stream);
            }
        }
        let pause = begin.elapsed().as_millis() as u64 * SHARE;
        QUIET_UNTIL.fetch_max(now + pause, Ordering::Relaxed);
    });
}
