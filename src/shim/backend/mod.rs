//! Where the pool's memory comes from.

pub mod host;
mod nvml;
pub mod vmm;
