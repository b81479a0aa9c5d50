//! Double staging: a program copies data that is pinned already into a new pinned buffer, and that one to the device.
//!
//! Seen at the first copy out of a new buffer, by its content: if other pinned or registered memory holds the same bytes,
//! the new buffer was for nothing. To be sure, the bytes must vary (zeros are everywhere), and either one line of Python
//! allocated the buffer and copied it, as CuPy does inside `asarray`, or the buffer is freed after that one copy.
//!
//! Equal bytes are no proof that one was copied from the other. A benchmark computes its pattern into a new buffer each time,
//! and what it measures is pinned memory with that pattern in it: so several buffers with different data must have been for
//! nothing, of one cause. And a program that also copies straight out of the other memory, before or later, compares the ways,
//! or has a reason, or has filled both. So it is said when the other memory is freed, or at the end of the process.
//!
//! The other memory may be freed by another thread at any moment, so it is read by `process_vm_readv`, which then fails.

use super::holders::{self, Live, Staged, Twin};
use super::{callers, copies};
use crate::guard;
use crate::own_memory::read;
use crate::watch::{finding, site};
use gpupool_config::format_size;
use gpupool_events::{Finding, Site};
use memchr::memmem;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// Copies that are looked at in the life of a process: each takes ten milliseconds at most.
const CHECKS: i32 = 32;
/// Below this nobody's time is lost.
pub const WORTH_LOOKING: u64 = 64 << 10;
/// Bytes compared of one copy, from its start.
const COMPARED: u64 = 16 << 20;
/// Bytes of other memory searched for one copy.
const SEARCHED: u64 = 16 << 20;
/// Bytes read at a time.
const WINDOW: usize = 1 << 20;
/// Bytes that the search looks for before anything is compared.
const NEEDLE: usize = 64;
/// Values of eight bytes that must differ among the samples of a content.
const VARIETY: usize = 8;
/// Places whose start is compared before any is searched.
const CANDIDATES: usize = 256;

static CHECKS_LEFT: AtomicI32 = AtomicI32::new(CHECKS);

/// Whether first copies are still looked at.
pub fn is_looking() -> bool {
    CHECKS_LEFT.load(Ordering::Relaxed) > 0
}

/// After the first copy out of the block at `start`: `bytes` bytes from `source` on. Runs outside the boundary of a hook,
/// so nothing may escape from here.
#[cold]
pub fn first_copy(start: u64, source: u64, bytes: u64) {
    let Some(_inside) = guard::enter_sheltered() else { return };
    let _ = std::panic::catch_unwind(|| look(start, source, bytes));
}

fn look(start: u64, source: u64, bytes: u64) {
    let others = holders::others(start, bytes);
    let worth_it = bytes >= WORTH_LOOKING && !others.is_empty() && holders::may_be_staged(start);
    let twin =
        if worth_it && CHECKS_LEFT.fetch_sub(1, Ordering::Relaxed) > 0 { find(source, bytes, &others) } else { None };
    if let Some(twin) = twin {
        holders::mark_staged(start, twin);
        let here = site::here();
        if holders::place_of(start).is_some_and(|(place, _)| callers::same_line(&place, &here))
            && let Some(live) = holders::take_mark(start)
        {
            suspect(here, &live);
        }
    }
    holders::was_looked_at(start);
}

/// A block is freed: one that was marked by [`look`], or one that others were marked for. `copies`: how many were made out of
/// it.
pub fn freed(live: &Live, copies: u32) {
    if live.twin.is_some() && copies == 1 {
        suspect(holders::site_of(live), live);
    }
    say_certain();
}

/// At the end of the process.
pub fn judge() {
    holders::settle_all();
    say_certain();
}

/// Whether there was any suspect.
static SUSPECTED: AtomicBool = AtomicBool::new(false);

fn suspect(site: Site, live: &Live) {
    if let Some(twin) = live.twin {
        holders::suspect(live, twin, site);
        SUSPECTED.store(true, Ordering::Relaxed);
    }
}

fn say_certain() {
    if SUSPECTED.load(Ordering::Relaxed) {
        holders::certainly_staged().iter().for_each(say);
    }
}

fn say(staged: &Staged) {
    let Staged { buffers, bytes, site, source, .. } = staged;
    let mut facts = vec![("bytes", bytes.to_string()), ("buffers", buffers.to_string())];
    let by = if source.is_empty() { String::new() } else { format!(", by {}", site::line(source)) };
    if !source.is_empty() {
        facts.push(("pinned_by", site::line(source)));
    }
    let version = callers::cupy_version(site);
    let cupy = version.as_ref().map_or(String::new(), |version| format!("; this is CuPy {version}"));
    if let Some(version) = version {
        facts.push(("cupy", version));
    }
    let what = format!(
        "{buffers} pinned buffers of {} together were filled and copied to the GPU once each, with data that was in pinned \
         memory already{by}{cupy}",
        format_size(*bytes)
    );
    finding::make(&Finding::STAGED_TWICE, None, site, &facts, &what);
}

/// The start of other memory that holds the `bytes` bytes at `source`, and a number for those.
fn find(source: u64, bytes: u64, others: &[(u64, u64)]) -> Option<Twin> {
    let (needle, at, content) = needle(source, bytes)?;
    let twin = |address: &u64| Some(Twin { address: *address, content });
    let holds = |address: u64| equal(source, address, bytes.min(COMPARED)).then_some(());
    // Mostly the data starts where the other memory does.
    for (address, _) in others.iter().take(CANDIDATES) {
        let mut there = [0; NEEDLE];
        if read(address + at, &mut there) && there == needle && holds(*address).is_some() {
            return twin(address);
        }
    }
    let mut left = SEARCHED;
    for (address, size) in others {
        let searched = left.min(*size);
        let end = address + searched;
        left -= searched;
        if search(*address + at, end, &needle, |found| {
            found + bytes - at <= address + size && holds(found - at).is_some()
        }) {
            return twin(address);
        }
    }
    None
}

/// Looks for `needle` from `from` to `end`, and asks `accept` about each place where it is.
fn search(from: u64, end: u64, needle: &[u8; NEEDLE], accept: impl Fn(u64) -> bool) -> bool {
    /// Data with the needle in it so often is a pattern.
    const PLACES: usize = 16;
    let mut window = vec![0; WINDOW];
    let (mut at, mut places) = (from, 0);
    while at + NEEDLE as u64 <= end {
        let length = (end - at).min(WINDOW as u64) as usize;
        if !read(at, &mut window[..length]) {
            return false;
        }
        for found in memmem::find_iter(&window[..length], needle) {
            places += 1;
            if accept(at + found as u64) {
                return true;
            }
            if places >= PLACES {
                return false;
            }
        }
        // The needle may lie across the end of the window.
        at += (length - NEEDLE + 1) as u64;
    }
    false
}

/// The most varied of sixteen samples, where in the data it is, and a number for all of them; `None` where all together
/// hardly vary.
fn needle(source: u64, bytes: u64) -> Option<([u8; NEEDLE], u64, u64)> {
    const SAMPLES: u64 = 16;
    let mut words = Vec::new();
    let mut hasher = DefaultHasher::new();
    let mut best: Option<(usize, [u8; NEEDLE], u64)> = None;
    for index in 0..SAMPLES {
        let at = ((bytes - NEEDLE as u64) / (SAMPLES - 1) * index) & !7;
        let mut sample = [0; NEEDLE];
        if !read(source + at, &mut sample) {
            return None;
        }
        sample.hash(&mut hasher);
        let of = distinct(sample.chunks_exact(8).map(<[u8]>::to_vec).collect());
        if best.is_none_or(|(most, ..)| of.len() > most) {
            best = Some((of.len(), sample, at));
        }
        words.extend(of);
    }
    let (_, sample, at) = best?;
    (distinct(words).len() >= VARIETY).then_some((sample, at, hasher.finish()))
}

fn distinct(mut words: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    words.sort_unstable();
    words.dedup();
    words
}

fn equal(one: u64, other: u64, bytes: u64) -> bool {
    let (mut first, mut second) = (vec![0; WINDOW], vec![0; WINDOW]);
    let mut at = 0;
    while at < bytes {
        let length = (bytes - at).min(WINDOW as u64) as usize;
        let both = read(one + at, &mut first[..length]) && read(other + at, &mut second[..length]);
        if !both || first[..length] != second[..length] {
            return false;
        }
        at += length as u64;
    }
    true
}

/// After a copy, on its fast path: [`copies`] knows what is watched.
#[inline]
pub fn after_copy(dst: u64, src: u64, bytes: u64) {
    if copies::is_watching()
        && let Some(start) = copies::copied(dst, src, bytes)
    {
        first_copy(start, src, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varied(bytes: usize) -> Vec<u8> {
        (0..bytes / 8).flat_map(|word| (word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
    }

    fn at(memory: &[u8]) -> u64 {
        memory.as_ptr() as u64
    }

    fn found(data: &[u8], others: &[(u64, u64)]) -> Option<u64> {
        find(at(data), data.len() as u64, others).map(|twin| twin.address)
    }

    #[test]
    fn the_same_bytes_are_found_wherever_they_start() {
        let data = varied(3 << 20);
        let copied = data[WINDOW + 9..WINDOW + 9 + (128 << 10)].to_vec();
        let others = [(at(&data), data.len() as u64)];
        assert_eq!(found(&copied, &others), Some(at(&data)));
        let mut wrong = copied.clone();
        wrong[100_000] ^= 1;
        assert_eq!(found(&wrong, &others), None);
    }

    #[test]
    fn different_data_has_different_numbers() {
        let number =
            |data: &[u8]| find(at(data), data.len() as u64, &[(at(data), data.len() as u64)]).map(|twin| twin.content);
        let data = varied(1 << 20);
        let other: Vec<u8> = data.iter().map(|byte| byte ^ 1).collect();
        assert_eq!(number(&data), number(&data.clone()));
        assert_ne!(number(&data), number(&other));
    }

    #[test]
    fn what_hardly_varies_proves_nothing() {
        let zeros = vec![0; 1 << 20];
        let pattern: Vec<u8> = (0..1u32 << 20).map(|index| (index % 4) as u8).collect();
        for data in [zeros, pattern] {
            let other = data.clone();
            assert_eq!(found(&data, &[(at(&other), other.len() as u64)]), None);
        }
    }

    #[test]
    fn memory_that_is_gone_is_not_found() {
        let data = varied(1 << 20);
        assert_eq!(found(&data, &[(0x1000, 1 << 20)]), None);
        assert!(!read(0x1000, &mut [0; 8]));
    }

    #[test]
    fn data_cut_off_by_the_end_of_the_other_memory_is_not_the_same() {
        let data = varied(2 << 20);
        let copied = data[1 << 20..].to_vec();
        let others = [(at(&data), (2 << 20) - 8)];
        assert_eq!(found(&copied, &others), None);
    }
}
