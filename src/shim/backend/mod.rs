//! Where the pool's memory comes from.

pub mod host;
pub mod nvml;
pub mod vmm;
