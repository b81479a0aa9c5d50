//! Who answers: the pool, managed memory or the driver. Everything that a program asks of device memory begins here: what a mode does
//! with a request in `modes.rs`, what is said of a GPU's memory in `mem_get_info.rs`.

pub mod handles;
pub mod ipc;
pub mod managed;
pub mod mem_get_info;
pub mod memory;
pub mod modes;
pub mod pinned;

use crate::backing::{copies, open};
use gpupool_pool::Usage;

/// What the pool holds and has held, or, in mode managed, what lies where. `None` where neither was opened. Copies for an image that is being written are held, and not in use.
pub fn usage() -> Option<Usage> {
    open::opened().map(copies::usage_without).or_else(managed::managed_usage)
}
