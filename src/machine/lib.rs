//! What the machine has, as the kernel tells it to this process.
//!
//! The library asks before it takes host memory, `gpupool doctor` and `gpupool demo` say what it will find: all of them get
//! their answer here, so that they cannot disagree.
//!
//! Architecture Invariant: a question that cannot be answered is `None`, never a panic and never 0. Sandboxes hide `/proc`,
//! `/sys` or single files of them, and "unknown" asks for another decision than "nothing left".

mod cgroup;
mod host;

pub use cgroup::Group;
pub use host::{Host, KEPT_BACK, Memory};
