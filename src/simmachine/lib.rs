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
