//! The writing side.

use crate::layout::{self, Counter, Group, Header};
use crate::model::{Context, Finding, Label, Levels, Process, Site, Table};
use crate::seqlock;
use crate::sync::{AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// What a page is written into: a file ([`crate::Map`]), or words where there is none.
pub trait Memory {
    /// Stores bytes, whole words of them, from byte `at` on, which begins a word. Each word is stored at once; their order is
    /// not told. `false`: they cannot be stored, or not all.
    fn store(&self, at: usize, bytes: &[u8]) -> bool;
}

impl<M: Memory + ?Sized> Memory for &M {
    fn store(&self, at: usize, bytes: &[u8]) -> bool {
        (**self).store(at, bytes)
    }
}

impl Memory for [AtomicU64] {
    fn store(&self, at: usize, bytes: &[u8]) -> bool {
        let values = bytes.as_chunks().0;
        let words = self.get(at / size_of::<u64>()..).and_then(|words| words.get(..values.len()));
        for (word, value) in words.unwrap_or_default().iter().zip(values) {
            word.store(u64::from_ne_bytes(*value), Ordering::Relaxed);
        }
        words.is_some()
    }
}

/// A page that is being written. One thread owns it; who only ends it shares the memory. What writes answers whether it could.
pub struct Page<M> {
    memory: M,
    /// How often each group was written, for the sequence locks.
    counts: Counts,
}

/// See [`seqlock::write`].
#[derive(Default)]
struct Counts {
    levels: u64,
    contexts: u64,
    sites: u64,
    findings: u64,
    labels: u64,
}

impl<M: Memory> Page<M> {
    /// Says who writes it. The memory is zero, and of [`layout::BYTES`]. `None`: it cannot be written.
    pub fn begin(memory: M, process: &Process) -> Option<Self> {
        memory.store(0, Header::from(process).as_bytes()).then(|| Self { memory, counts: Counts::default() })
    }

    /// What it is written into.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Stores a counter that is kept elsewhere.
    pub fn set(&self, counter: Counter, value: u64) -> bool {
        self.memory.store(counter.at(), &value.to_ne_bytes())
    }

    /// What is held and in use.
    pub fn levels(&mut self, levels: &Levels) -> bool {
        write(&self.memory, &mut self.counts.levels, &*Box::<layout::Levels>::from(levels))
    }

    /// The contexts that live.
    pub fn contexts(&mut self, contexts: &Table<Context>) -> bool {
        write(&self.memory, &mut self.counts.contexts, &*Box::<layout::Contexts>::from(contexts))
    }

    /// Which places in the program hold what.
    pub fn sites(&mut self, sites: &Table<Site>) -> bool {
        write(&self.memory, &mut self.counts.sites, &*Box::<layout::Sites>::from(sites))
    }

    /// What was found lately.
    pub fn findings(&mut self, findings: &Table<Finding>) -> bool {
        write(&self.memory, &mut self.counts.findings, &*Box::<layout::Findings>::from(findings))
    }

    /// The names of blocks.
    pub fn labels(&mut self, labels: &Table<Label>) -> bool {
        write(&self.memory, &mut self.counts.labels, &*Box::<layout::Labels>::from(labels))
    }

    /// The process is about to end. May be said by any thread, while another one writes.
    pub fn end(memory: &M) -> bool {
        memory.store(layout::STATE, &layout::ENDED.to_ne_bytes())
    }
}

fn write<G: Group>(memory: &impl Memory, count: &mut u64, group: &G) -> bool {
    seqlock::write(memory, G::AT, count, group.as_bytes())
}
