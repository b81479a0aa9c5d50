//! Two mappings of the same memory in strict mode: what is written through one is not seen through the other until the writing
//! operation is complete, and by a grid that began before that, never (the programming guide, on mappings of the same memory).
//!
//! A real GPU mostly shows such a reader the new words, or the old ones. Here it reads words that nobody wrote.

use crate::space::{Kind, Span};
use crate::strict::{is_on, tick};
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What an incoherent word reads as.
pub const INCOHERENT: u32 = 0xa11a_5ed0;
/// A copy that read incoherently shows it once in so many bytes.
const STRIDE: usize = 4096;
/// Writes that are remembered after their end. A reader that began before more than these is taken for coherent.
const REMEMBERED: usize = 256;

thread_local! {
    /// When the work that this thread runs began; for a call that does its work itself, later than everything.
    static BEGAN: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// A stretch of memory in use through a mapping.
struct Use {
    /// The driver's own view, which all mappings of the same memory share.
    start: usize,
    end: usize,
    mapping: u64,
    write: bool,
    stale: AtomicBool,
}

impl Use {
    fn crosses(&self, other: &Use) -> bool {
        self.mapping != other.mapping && self.start < other.end && other.start < self.end
    }
}

#[derive(Default)]
struct Uses {
    open: Vec<Arc<Use>>,
    /// Finished writes, with the moment of their end.
    written: VecDeque<(Arc<Use>, u64)>,
}

static USES: Mutex<Uses> = Mutex::new(Uses { open: Vec::new(), written: VecDeque::new() });

/// The memory that an operation reads or writes, until it is dropped.
pub struct Guard(Vec<Arc<Use>>);

/// An operation begins to read or write what is behind these spans.
pub fn open(spans: &[Span], write: bool) -> Guard {
    if !is_on() {
        return Guard(Vec::new());
    }
    let began = BEGAN.with(Cell::get);
    let uses = spans.iter().filter_map(|span| {
        let region = span.region.as_ref().filter(|region| matches!(region.kind, Kind::Vmm { .. }))?;
        let (start, end) = (span.alias, span.alias + span.bytes);
        Some(Arc::new(Use { start, end, mapping: region.id, write, stale: AtomicBool::new(false) }))
    });
    let guard = Guard(uses.collect());
    let mut all = USES.lock();
    for new in &guard.0 {
        for old in all.open.iter().filter(|old| old.crosses(new)) {
            if write {
                old.stale.store(true, Ordering::Release);
            } else if old.write {
                new.stale.store(true, Ordering::Release);
            }
        }
        if !write && all.written.iter().any(|(old, ended)| *ended > began && old.crosses(new)) {
            new.stale.store(true, Ordering::Release);
        }
    }
    all.open.extend(guard.0.iter().cloned());
    guard
}

impl Guard {
    /// Whether something was or is being written through another mapping, so that what was read means nothing.
    pub fn is_stale(&self) -> bool {
        self.0.iter().any(|used| !used.write && used.stale.load(Ordering::Acquire))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.0.is_empty() {
            return;
        }
        let mut all = USES.lock();
        all.open.retain(|used| !self.0.iter().any(|own| Arc::ptr_eq(own, used)));
        let ended = tick();
        all.written.extend(self.0.iter().filter(|used| used.write).map(|used| (used.clone(), ended)));
        let surplus = all.written.len().saturating_sub(REMEMBERED);
        all.written.drain(..surplus);
    }
}

/// What the calling thread runs in `body` began at this moment.
pub fn since<T>(began: u64, body: impl FnOnce() -> T) -> T {
    let before = BEGAN.replace(began);
    let result = body();
    BEGAN.set(before);
    result
}

/// Makes what a copy brought show that it was read incoherently.
pub fn spoil(spans: &[Span]) {
    for span in spans {
        for at in (span.alias..span.alias + span.bytes.saturating_sub(3)).step_by(STRIDE) {
            // SAFETY: four bytes within a span that the copy has just written and still holds; they need not be aligned.
            unsafe { (at as *mut u32).write_unaligned(INCOHERENT) };
        }
    }
}
