//! Who uses the driver, before NVML knows of a context.

use std::fs;

/// How often the part of the driver for memory that GPUs and processor share is counted as used by its own kernel module: each process that has called `cuInit`
/// keeps `/dev/nvidia-uvm` open, and each open file of a module counts as one user of it. Those of other containers are among them. NVML and `nvidia-smi` open other files,
/// so whoever only looks is not.
const USERS: &str = "/sys/module/nvidia_uvm/refcnt";

/// How many files of the driver are open that those open who use CUDA; `None` where nobody tells.
pub fn open_files() -> Option<u64> {
    fs::read_to_string(USERS).ok()?.trim().parse().ok()
}
