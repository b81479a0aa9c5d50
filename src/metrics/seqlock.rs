//! A group of words that are written together by one thread and read whole by anybody, also through a file.
//!
//! The first word counts: it is odd while the others change. A reader that finds it odd, or another than before, has read
//! a mixture and reads again. So the writer never waits, and a reader waits only for a write that is under way.

use crate::reader::Source;
use crate::sync::{AtomicU64, Ordering, fence, pause};
use std::io::Result;

/// How often a reader tries. A write takes microseconds, and there is one a second; whoever finds a group being written so
/// often looks at a process that was stopped or killed in the middle.
const TRIES: u32 = if cfg!(any(loom, miri)) { 2 } else { 200 };

/// Writes a group. Only one thread may do so at a time, which the caller's exclusive page sees to. Words beyond the shorter
/// of the two stay.
pub(crate) fn write(group: &[AtomicU64], value: &[u8]) {
    let Some((sequence, words)) = group.split_first() else { return };
    // A writer that was ended in the middle has left it odd.
    let writing = sequence.load(Ordering::Relaxed) | 1;
    sequence.store(writing, Ordering::Relaxed);
    // No word changes before the count is odd: a reader that sees one changed sees that, too, behind its own fence.
    fence(Ordering::Release);
    for (word, bytes) in words.iter().zip(value.as_chunks().0) {
        word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
    }
    sequence.store(writing.wrapping_add(1), Ordering::Release);
}

/// Reads the group that begins at byte `at` into `value`. `false`: it was being written each time.
pub(crate) fn read(source: &(impl Source + ?Sized), at: usize, value: &mut [u8]) -> Result<bool> {
    for _ in 0..TRIES {
        let before = word(source, at)?;
        fence(Ordering::Acquire);
        if before % 2 == 0 {
            source.read(at + size_of::<u64>(), value)?;
            fence(Ordering::Acquire);
            if word(source, at)? == before {
                return Ok(true);
            }
        }
        pause();
    }
    Ok(false)
}

fn word(source: &(impl Source + ?Sized), at: usize) -> Result<u64> {
    let mut bytes = [0; size_of::<u64>()];
    source.read(at, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
