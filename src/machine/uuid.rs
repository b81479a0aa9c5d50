//! How a GPU is told from all others, on this machine and elsewhere.

/// A GPU's UUID, as the driver gives it.
pub type Uuid = [u8; 16];

/// The bytes of a UUID as `nvidia-smi` writes them, without a prefix: `01234567-89ab-…`.
pub fn dashed(uuid: &Uuid) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_does() {
        let uuid = [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10];
        assert_eq!(dashed(&uuid), "01234567-89ab-cdef-fedc-ba9876543210");
    }
}
