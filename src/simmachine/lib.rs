//! The simulated machine: what the driver (`libcuda.so.1`) and the management library (`libnvidia-ml.so.1`) have to agree
//! on. Settings and links come from the environment, names of the GPUs from their numbers, and who uses how much from
//! a file that all processes of one machine map.

pub mod files;
mod identity;
pub mod links;
mod member;
mod occupancy;
pub mod settings;
mod visitor;

pub use identity::{bus, bus_id, name, uuid_bytes, uuid_text};
pub use member::{Machine, Memory};
pub use occupancy::{Frozen, GRANULE, MAX_PLACE_BYTES, Occupancy, Use, gpu_place, host_place};
pub use visitor::Visitor;

/// Says something on stderr, where that can be written: on a disk that is full, or beyond a limit of the size of files, `eprintln` panics, and would end a program that did nothing
/// wrong.
pub fn say(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{text}\n").as_bytes());
}
