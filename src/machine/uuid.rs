//! How a GPU is told from all others, on this machine and elsewhere.

/// A GPU's UUID, as the driver gives it.
pub type Uuid = [u8; 16];

/// The bytes of a UUID as `nvidia-smi` writes them, without a prefix: `01234567-89ab-…`.
pub fn dashed(uuid: &Uuid) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The UUID in a text as `nvidia-smi -L` writes it, `GPU-` or `MIG-` in front or not.
pub fn from_text(text: &str) -> Option<Uuid> {
    let text = text.trim();
    let text = ["GPU-", "MIG-"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
    let hex: String = text.split('-').collect();
    if !hex.is_ascii() || hex.len() != 32 {
        return None;
    }
    let mut uuid = [0; 16];
    for (byte, at) in uuid.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).ok()?;
    }
    (dashed(&uuid) == text.to_ascii_lowercase()).then_some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_does() {
        let uuid = [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10];
        assert_eq!(dashed(&uuid), "01234567-89ab-cdef-fedc-ba9876543210");
        for text in ["GPU-01234567-89ab-cdef-fedc-ba9876543210", "01234567-89AB-CDEF-fedc-ba9876543210"] {
            assert_eq!(from_text(text), Some(uuid), "{text}");
        }
        let wrong = [
            "",
            "1",
            "GPU-0123456789abcdeffedcba9876543210",
            "GPU-0123456-789ab-cdef-fedc-ba9876543210",
            "GPU-+1234567-89ab-cdef-fedc-ba9876543210",
        ];
        for text in wrong {
            assert_eq!(from_text(text), None, "{text}");
        }
    }
}
