//! The simulated machine: what the driver (`libcuda.so.1`) and the management library (`libnvidia-ml.so.1`) have to agree
//! on. Settings and links come from the environment, names of the GPUs from their numbers, and who uses how much from the
//! ledger that all processes of one machine map.

pub mod files;
mod identity;
mod ledger;
pub mod links;
pub mod settings;

pub use identity::{bus, bus_id, name, uuid_bytes, uuid_text};
pub use ledger::{GRANULE, Ledger, MAX_PLACE_BYTES, Machine, Memory, Use, Visitor, gpu_place, host_place};
