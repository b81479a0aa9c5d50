//! A group of words that are written together by one thread and read whole by anybody, also through a file.
//!
//! The first word counts: it is odd while the others change. A reader that finds it odd, or another than before, has read
//! a mixture and reads again. So the writer never waits, and a reader waits only for a write that is under way.

use crate::page::Memory;
use crate::reader::Source;
use crate::sync::{Ordering, fence, pause};
use std::io::Result;

/// How often a reader tries. A write takes microseconds, and there is one a second; whoever finds a group being written so
/// often looks at a process that was stopped or killed in the middle.
const TRIES: u32 = if cfg!(any(loom, miri)) { 2 } else { 200 };

/// Writes the group that begins at byte `at`. Only one thread may do so at a time, which keeps the count. `false`: it cannot be
/// written, and what is there now is not whole.
pub(crate) fn write(memory: &(impl Memory + ?Sized), at: usize, count: &mut u64, value: &[u8]) -> bool {
    // What failed in the middle has left it odd.
    let writing = *count | 1;
    *count = writing;
    let begun = memory.store(at, &writing.to_ne_bytes());
    // No word changes before the count is odd: a reader that sees one changed sees that, too, behind its own fence.
    fence(Ordering::Release);
    if !begun || !memory.store(at + size_of::<u64>(), value) {
        return false;
    }
    // The count is not even before every word has changed.
    fence(Ordering::Release);
    *count = writing.wrapping_add(1);
    memory.store(at, &count.to_ne_bytes())
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
