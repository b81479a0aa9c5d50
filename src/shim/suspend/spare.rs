//! Plain memory of the host that a suspended program was in, and that its next suspension goes to.
//!
//! Memory that is there takes a third more a second than new memory, whose pages the system has to make (RESULTS.md). So it stays for as long as any freed
//! memory does (`GPUPOOL_IDLE`), as far as nobody lacks it: there is at least as much again of the host's memory beside it, which is looked at ten times a second; it is
//! below the limit of what the pool may have of the host; and nothing is made there by this process. Rejected: to leave it to the system to take it (`MADV_FREE`).
//! Pages that are written to afterwards stay where the system counts files (Linux 6.18: 1 GiB that was freed so and written again is in `MemAvailable` still),
//! and so what a suspended program is in would look to everybody as if it could be had.

use crate::backing::host;
use crate::backing::open;
use crate::bell;
use crate::image::plain::Plain;
use crate::process;
use gpupool_config::format_size;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often it is looked whether somebody lacks it.
const LOOK: Duration = Duration::from_millis(100);

struct Spare {
    plain: Vec<Plain>,
    since: Option<Instant>,
}

static SPARE: Mutex<Spare> = Mutex::new(Spare { plain: Vec::new(), since: None });
/// Bytes of that.
static BYTES: AtomicU64 = AtomicU64::new(0);

/// How much there is at most: what was zero was never made.
pub fn bytes() -> u64 {
    BYTES.load(Ordering::Relaxed)
}

/// Whether so much may stay that nobody needs.
pub fn may_stay(bytes: u64) -> bool {
    let below_limit = || {
        let Some(opened) = open::opened() else { return false };
        let accounts = &opened.plan.accounts;
        let hosts = opened.plan.places.iter().map(|spec| spec.place).filter(|place| place.is_host());
        hosts.map(|place| accounts.limit(place).saturating_sub(accounts.taken(place))).sum::<u64>() >= bytes
    };
    process::settings().idle.is_some() && below_limit() && host::available().is_some_and(|beside| beside >= bytes)
}

/// Keeps this for a while if it may stay, beside what there is.
pub fn keep(plain: Vec<Plain>) {
    let more: u64 = plain.iter().map(Plain::bytes).sum();
    // What is not kept goes at the end of this, with the lock open.
    let refused = if may_stay(bytes() + more) {
        let mut spare = SPARE.lock();
        spare.plain.extend(plain);
        spare.since = Some(Instant::now());
        BYTES.fetch_add(more, Ordering::Relaxed);
        Vec::new()
    } else {
        plain
    };
    drop(refused);
}

/// Memory that is there for so many bytes, or as much of it as there is; whoever takes it has all of that, and the rest is given back.
pub fn take(bytes: u64) -> Vec<Plain> {
    let mut taken = Vec::new();
    let mut sum = 0;
    while sum < bytes
        && let Some(plain) = pop()
    {
        sum += plain.bytes();
        taken.push(plain);
    }
    give_back();
    if let Some(last) = taken.last_mut()
        && let Some(unused) = sum.checked_sub(bytes)
    {
        last.shorten(last.bytes() - unused);
    }
    taken
}

fn pop() -> Option<Plain> {
    let plain = SPARE.lock().plain.pop()?;
    BYTES.fetch_sub(plain.bytes(), Ordering::Relaxed);
    Some(plain)
}

/// Gives all of it back; the bytes. Nothing is allocated or freed.
pub fn give_back() -> u64 {
    let mut sum = 0;
    while bytes() > 0
        && let Some(plain) = pop()
    {
        sum += plain.bytes();
    }
    sum
}

/// As [`give_back`], for whoever the host lacks it for.
pub fn reclaim(_: &str) -> u64 {
    let bytes = give_back();
    if bytes > 0 {
        bell::changed();
    }
    bytes
}

/// Gives it back once nobody was suspended for long, or somebody lacks it; how long nothing need be done.
pub fn look() -> Option<Duration> {
    let there = bytes();
    if there == 0 {
        return None;
    }
    let stood = SPARE.lock().since.map_or(Duration::MAX, |since| since.elapsed());
    let left = process::settings().idle.unwrap_or_default().saturating_sub(stood);
    if !left.is_zero() && may_stay(there) {
        return Some(left.min(LOOK));
    }
    let why = if left.is_zero() { "nothing was put there again" } else { "the host's memory is short" };
    let bytes = give_back();
    tracing::debug!(
        target: "gpupool::memory", about = "suspend",
        "{} of plain memory that a suspended program was in were given back: {why}", format_size(bytes)
    );
    bell::changed();
    None
}

/// The child of a fork has none of it.
pub fn after_fork_in_child() {
    BYTES.store(0, Ordering::Relaxed);
}
