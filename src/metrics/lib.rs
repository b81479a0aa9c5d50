//! The metrics page: what a process that runs under gpupool tells everybody else of itself, while it runs.
//!
//! A page is one file of a fixed size. The process maps it and has the kernel copy to it ([`Page`]), so it is told without a lock,
//! without a descriptor that the program could close, and without a signal where the file was cut; what was stored last is still
//! there when the process is killed or stopped. Readers ([`read()`]) use `pread` and trust nothing of what they find: a page may be cut, foreign, newer, half
//! written, or of a process that is gone ([`Life`]). Where pages lie is the business of [`folder`].
//!
//! | part | written | read |
//! | --- | --- | --- |
//! | who the process is | once, before the file has its name | as it is |
//! | counters | one store each | each by itself |
//! | levels, contexts, call sites, findings, labels | one writer, each under a sequence lock of its own | again until whole, so often |
//!
//! Beside the pages lie small files that all processes of a user heed: which GPUs are drained ([`drains`]).
//!
//! Architecture Invariant: the page never grows, and nobody who writes it ever waits for a reader.

mod door;
pub mod drains;
pub mod folder;
mod layout;
mod line;
#[cfg(not(loom))]
mod map;
mod model;
mod page;
mod process;
mod reader;
mod runs;
mod seqlock;
mod siblings;
mod sync;

#[cfg(all(test, loom))]
mod models;

pub use door::Door;
pub use layout::{BYTES, Counter, VERSION};
pub use line::{Serving, Standing};
#[cfg(not(loom))]
pub use map::{Map, NoPage, ring};
pub use model::{
    Context, Finding, Gpu, Label, Levels, Loan, Pinned, Place, Process, Residence, Site, Snapshot, Table, Took, now,
};
/// Labels that a page has room for.
pub const LABELS: usize = layout::LABELS;
pub use page::{Memory, Page};
pub use process::{
    Identity, Life, Lineage, Started, Stat, has_living_thread, is_all_ending, lineage, may_be_of, started, stat,
};
pub use reader::{Source, Unreadable, identify, moves, read};
pub use runs::{Environment, Maps, Runs, is_kernel, may_run, runs};
pub use siblings::{Member, beside};
