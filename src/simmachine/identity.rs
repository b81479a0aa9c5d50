//! What names a GPU, by its number in the machine: fixed, so that runs compare, but for the UUID on a machine of several processes.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The 16 bytes of a GPU's UUID, different for each index and, where `SIMCUDA_MACHINE` names one, for each machine: by its UUID a GPU is known to
/// programs of one user that are on different machines, and what is said of a GPU (`gpupool drain`) must not concern another machine's.
pub fn uuid_bytes(machine: Option<&Path>, index: usize) -> [u8; 16] {
    let mut bytes = *b"simcuda-gpu-\0\0\0\0";
    if let Some(path) = machine {
        // FNV-1a.
        let add = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        let hash = path.as_os_str().as_bytes().iter().fold(0x811c_9dc5_u32, add);
        bytes[8..12].copy_from_slice(&hash.to_be_bytes());
    }
    bytes[12..].copy_from_slice(&(index as u32).to_be_bytes());
    bytes
}

/// `GPU-…` as nvidia-smi prints it.
pub fn uuid_text(machine: Option<&Path>, index: usize) -> String {
    let hex: String = uuid_bytes(machine, index).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// PCI bus of the GPU with this index: one each, from 0x10 on.
pub fn bus(index: usize) -> i32 {
    0x10 + index as i32
}

/// PCI address of the GPU with this index, with so many digits of the domain: the driver writes 4, NVML 8.
pub fn bus_id(index: usize, domain_digits: usize) -> String {
    format!("{:0domain_digits$X}:{:02X}:00.0", 0, bus(index))
}

pub fn name(capacity: u64) -> String {
    format!("Simulated GPU {} GiB", capacity >> 30)
}
