//! The writing side.

use crate::layout::{self, Counter, Group, Header};
use crate::model::{Context, Finding, Levels, Process, Site, Table};
use crate::seqlock;
use crate::sync::{AtomicU64, Ordering};
use std::ops::Deref;
use zerocopy::IntoBytes;

/// The words of a page: a mapped file ([`crate::Map`]), or any others where there is no file.
pub trait Memory: Deref<Target = [AtomicU64]> {}

impl<T: Deref<Target = [AtomicU64]>> Memory for T {}

/// A page that is being written. One thread owns it; who only counts or ends it shares the memory.
pub struct Page<M>(M);

impl<M: Memory> Page<M> {
    /// Says who writes it. The memory is zero, and of [`layout::BYTES`].
    pub fn begin(memory: M, process: &Process) -> Self {
        for (word, bytes) in memory.iter().zip(Header::from(process).as_bytes().as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        Self(memory)
    }

    /// Its words.
    pub fn memory(&self) -> &M {
        &self.0
    }

    /// Stores a counter that is kept elsewhere.
    pub fn set(&self, counter: Counter, value: u64) {
        if let Some(word) = self.0.get(counter.at() / size_of::<u64>()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Adds to a counter that is kept here alone.
    pub fn add(&self, counter: Counter, value: u64) {
        if let Some(word) = self.0.get(counter.at() / size_of::<u64>()) {
            word.fetch_add(value, Ordering::Relaxed);
        }
    }

    /// What is held and in use.
    pub fn levels(&mut self, levels: &Levels) {
        self.write(&*Box::<layout::Levels>::from(levels));
    }

    /// The contexts that live.
    pub fn contexts(&mut self, contexts: &Table<Context>) {
        self.write(&*Box::<layout::Contexts>::from(contexts));
    }

    /// Which places in the program hold what.
    pub fn sites(&mut self, sites: &Table<Site>) {
        self.write(&*Box::<layout::Sites>::from(sites));
    }

    /// What was found lately.
    pub fn findings(&mut self, findings: &Table<Finding>) {
        self.write(&*Box::<layout::Findings>::from(findings));
    }

    fn write<G: Group>(&mut self, group: &G) {
        let words = 1 + size_of::<G>() / size_of::<u64>();
        if let Some(room) = self.0.get(G::AT / size_of::<u64>()..).and_then(|room| room.get(..words)) {
            seqlock::write(room, group.as_bytes());
        }
    }

    /// The process is about to end. May be said by any thread, while another one writes.
    pub fn end(memory: &[AtomicU64]) {
        if let Some(word) = memory.get(layout::STATE / size_of::<u64>()) {
            word.store(layout::ENDED, Ordering::Relaxed);
        }
    }
}
