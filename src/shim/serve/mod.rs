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
use gpupool_pool::{Place, PlaceUsage, Usage};

/// What the pool holds and has held, or, in mode managed, what lies where. `None` where neither was opened. Copies for an image that is being written are held, and not in use.
pub fn usage() -> Option<Usage> {
    open::opened().map(copies::usage_without).or_else(managed::managed_usage)
}

/// What the pool has everywhere: nothing, before it has given out its first block. The program may have memory of its own there all the same, and on a disk
/// that the pool has put nothing on.
pub fn places(usage: &Usage) -> Vec<PlaceUsage> {
    let empty = |place, limit| PlaceUsage { place, limit, held: 0, used: 0, peak_used: 0, anchored: 0 };
    let mut places = match open::plan_made().filter(|_| usage.places.is_empty()) {
        Some(plan) => plan.places.iter().map(|spec| empty(spec.place, spec.limit)).collect(),
        None => usage.places.clone(),
    };
    if handles::by_hand::bytes_at(Place::Disk) > 0 && !places.iter().any(|usage| usage.place == Place::Disk) {
        places.push(empty(Place::Disk, 0));
    }
    places
}
