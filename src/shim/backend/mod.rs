//! Where the pool's memory comes from.

pub mod host;
pub mod nvml;
mod sharing;
pub mod vmm;
