//! What names a GPU, by its number in the machine: fixed, so that runs compare.

/// The 16 bytes of a GPU's UUID, different for each index.
pub fn uuid_bytes(index: usize) -> [u8; 16] {
    let mut bytes = *b"simcuda-gpu-\0\0\0\0";
    bytes[12..].copy_from_slice(&(index as u32).to_be_bytes());
    bytes
}

/// `GPU-…` as nvidia-smi prints it.
pub fn uuid_text(index: usize) -> String {
    let hex: String = uuid_bytes(index).iter().map(|byte| format!("{byte:02x}")).collect();
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
