//! How a GPU is told from all others, on this machine and elsewhere.

/// A GPU's UUID, as the driver gives it.
pub type Uuid = [u8; 16];

/// The bytes of a UUID as `nvidia-smi` writes them, without a prefix: `01234567-89ab-…`.
pub fn dashed(uuid: &Uuid) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
