//! The driver's private tables of functions (`cuGetExportTable`) that were looked at.
//!
//! NVIDIA documents none. What is said of them here is known from projects that stand in for the driver, from which library
//! takes which (`GPUPOOL_LOG=debug` has a line for each), and from what programs of the runtime then do: launches, copies and fills
//! of it, static or shared, come through the hooks (measured with CUDA 13 on driver 580). One that is not in this list may do
//! anything: profilers, debuggers, video codecs and OptiX submit work through tables of their own.

/// What may come of a table that submits nothing to a pooled block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// A context, made or retained.
    Contexts,
    /// Nothing that concerns memory.
    Nothing,
    /// Nobody knows, but it is known who takes it, in many programs, and how few of its functions are called.
    CommonOnly,
}

/// An identifier as the driver is given it.
type Id = [u8; 16];

const TABLES: &[(Id, Known)] = &[
    // The runtime's own: primary contexts, and modules from the program's fat binaries. Loading one writes its own globals.
    (id(0x6CFB_D56B, 0xF45B, 0x4AE7, 0x8987_D939_12FD_9DF9), Known::Contexts),
    // How the runtime starts, since CUDA 12.
    (id(0x51F9_CFF8, 0x4621, 0x4E8B, 0xB9E2_FB46_9E7C_0DD9), Known::Contexts),
    // Contexts past what is checked of a public call, for older runtimes.
    (id(0x8C0B_A50C, 0x0410, 0x9A92, 0x89A7_D0DF_10E7_7286), Known::Contexts),
    // What tools keep for each thread.
    (id(0x815A_D842, 0xF623, 0x47CB, 0x8298_F6E7_8A3A_ECDC), Known::Nothing),
    // Where the runtime tells tools of its calls.
    (id(0x8C79_94A0, 0x742E, 0x742E, 0x93F2_0800_200C_0A66), Known::Nothing),
    // What libraries keep for each context.
    (id(0x6E33_93C6, 0x2111, 0x11DF, 0xA8C3_68F3_55D8_9593), Known::Nothing),
    // Whether the driver is NVIDIA's.
    (id(0x5520_08D4, 0xE6BD, 0x4B70, 0x8D34_BA12_3C66_E1F2), Known::Nothing),
    // Whether a context is one.
    (id(0x6088_3E26, 0xD27C, 0x4361, 0x92F6_BBD5_006D_FA7E), Known::Nothing),
    // Taken by the run-time compiler, which works without a GPU and has no context or stream to submit to.
    (id(0xD351_91DA, 0xE63A, 0x41CC, 0xA5C0_4F26_D533_E328), Known::Nothing),
    // cuBLASLt. Of its ninety-two functions one is called, once for each product (measured with CUDA 13: PyTorch, CuPy, JAX), and all
    // kernels of those products come through the hooks.
    (id(0x608C_3121, 0x1497, 0x4832, 0x8CA6_41FF_7324_C8F2), Known::CommonOnly),
    // cuBLASLt. Two of its sixteen are called, once each as the first product is made.
    (id(0x26DC_3417, 0x0D80, 0x4547, 0x8726_C0F1_E7DD_8BCA), Known::CommonOnly),
    // cuFFT, which calls one function, once. It is made for tools.
    (id(0xBE3F_166E, 0x58B9, 0x4D44, 0x835C_E182_AFF1_991E), Known::CommonOnly),
];

/// The bytes of an identifier as it is printed: its first three groups are little-endian numbers.
const fn id(first: u32, second: u16, third: u16, rest: u64) -> Id {
    let (a, b, c, d) = (first.to_le_bytes(), second.to_le_bytes(), third.to_le_bytes(), rest.to_be_bytes());
    [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]]
}

/// What is known of a table; `None` for one that was not looked at.
pub fn known(id: &Id) -> Option<Known> {
    TABLES.iter().find(|(known, _)| known == id).map(|(_, what)| *what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_s_tables_are_known_by_their_bytes_and_others_are_not() {
        let runtime = *b"\x6b\xd5\xfb\x6c\x5b\xf4\xe7\x4a\x89\x87\xd9\x39\x12\xfd\x9d\xf9";
        assert_eq!(known(&runtime), Some(Known::Contexts));
        assert_eq!(known(&[0; 16]), None);
        let lt = *b"\x21\x31\x8c\x60\x97\x14\x32\x48\x8c\xa6\x41\xff\x73\x24\xc8\xf2";
        assert_eq!(known(&lt), Some(Known::CommonOnly), "common, and not known to be harmless");
    }
}
