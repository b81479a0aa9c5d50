//! What the machine has, as the kernel and NVML tell it to this process.
//!
//! The library asks before it takes memory, `gpupool doctor` and `gpupool demo` say what it will find: all of them get their
//! answer here, so that they cannot disagree.
//!
//! Architecture Invariant: a question that cannot be answered is `None`, never a panic and never 0. Sandboxes hide `/proc`,
//! `/sys` or single files of them, and "unknown" asks for another decision than "nothing left".

mod cgroup;
mod driver;
mod host;
mod nvml;
mod uuid;

pub use cgroup::{DeviceGroup, Group};
pub use driver::open_files;
pub use host::{Host, KEPT_BACK, Memory};
pub use nvml::{Fabric, GpuMemory, MemoryLimits, Nvml, RemappedRows, Xids};
pub use uuid::{Uuid, dashed, from_text};
