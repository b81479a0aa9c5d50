//! How much memory of the host this process may take.

use crate::process;
use gpupool_machine::{Host, Memory};
use once_cell::race::OnceBox;
use std::path::Path;

/// What the host has at this moment, and what limits this process.
fn memory() -> Memory {
    /// `race`: two threads may both look where the groups are mounted, the second result is dropped.
    static HOST: OnceBox<Host> = OnceBox::new();
    HOST.get_or_init(|| Box::new(Host::at(Path::new("/")))).memory()
}

/// Bytes that could be taken now, less what is kept back for the host itself. `None` where nobody can tell.
pub fn available() -> Option<u64> {
    memory().spare()
}

/// The most that the pool takes of the host's memory in this process. Where nobody can tell what there is, nothing.
pub fn limit() -> u64 {
    let settings = process::settings();
    if settings.host_limit == Some(0) {
        return 0;
    }
    memory().lent(settings.host_limit, settings.ranks()).unwrap_or(0)
}

/// The most that the pool pins in this process. Where nobody can tell what there is, the driver has the last word.
pub fn pinned_limit() -> u64 {
    let settings = process::settings();
    settings.pinned_limit.or_else(|| memory().pinned_limit(settings.ranks())).unwrap_or(u64::MAX)
}
