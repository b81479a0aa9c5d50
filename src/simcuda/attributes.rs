//! `cuDeviceGetAttribute`: an H200's answers where the simulation has none of its own.

use crate::settings::Settings;
use std::ffi::c_int;

/// Compute capability, major and minor.
pub const CAPABILITY: (c_int, c_int) = (9, 0);

/// The value of attribute number `attribute` (`CUdevice_attribute`), or `None` for a number CUDA 13.0 does not have.
pub fn value(settings: &Settings, index: usize, attribute: c_int) -> Option<c_int> {
    let vmm = c_int::from(settings.vmm);
    let host_vmm = c_int::from(settings.vmm && settings.host.is_some());
    Some(match attribute {
        // Launch limits.
        1..=3 => 1024,
        4 => 64,
        5 => c_int::MAX,
        6 | 7 => 65_535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => c_int::MAX,
        12 | 82 => 65_536,
        39 => 2048,
        81 => 233_472,
        97 => 232_448,
        106 => 32,
        111 => 1024,
        // Clocks, units, caches. kHz where a rate.
        13 => 1_980_000,
        16 => 132,
        36 => 3_201_000,
        37 => 6144,
        38 => 60 << 20,
        40 => 3,
        87 => 2,
        108 => 39_321_600,
        109 => 134_213_632,
        // Alignment.
        14 | 30 => 512,
        51 => 32,
        // Abilities.
        15 | 19 | 31 | 32 | 41 | 44 | 78 | 79 | 80 | 83 | 90 | 95 | 98 | 99 => 1,
        86 => c_int::from(settings.host_atomics),
        89 => c_int::from(settings.concurrent_managed),
        17 | 18 | 20 | 35 | 84 | 88 | 100 | 101 => 0,
        91 | 113 | 114 | 115 | 120 | 122 | 123 | 125 | 127 | 129 => 1,
        // Stream memory operations of the first kind went away with CUDA 12; sparse arrays and interop are not simulated.
        92 | 93 | 94 | 96 | 107 | 112 | 117 | 121 | 132 => 0,
        // MPS_ENABLED.
        133 => c_int::from(settings.mps),
        118 => 0,
        119 => 1,
        126 => 4,
        // PCI: bus, device, domain, board.
        33 => simmachine::bus(index),
        34 | 50 => 0,
        85 => index as c_int,
        139 => 0x2335_10de,
        140 => 0x18be_10de,
        75 => CAPABILITY.0,
        76 => CAPABILITY.1,
        // Virtual memory management: device, descriptors, RDMA, fabric; then host nodes.
        102 | 103 => vmm,
        110 => c_int::from(settings.vmm && settings.rdma),
        116 | 124 => c_int::from(settings.rdma),
        128 => vmm,
        104 | 105 | 135 | 138 => 0,
        130 => 0,
        131 => -1,
        134 => (index as u32 % settings.host_nodes) as c_int,
        136 | 137 => 0,
        141 => host_vmm,
        142..=145 => 0,
        // Textures and surfaces: sizes a program may plan with, although arrays are not simulated.
        21 | 22 | 42 | 45 | 55 | 61 | 69 | 77 => 32_768,
        23 | 27 | 28 | 46 | 56 | 62 | 63 | 70 | 71 | 73 | 74 => 32_768,
        24..=26 | 47..=49 | 58..=60 => 16_384,
        29 | 64 | 43 => 2048,
        52 | 53 | 65..=67 | 57 => 32_768,
        54 | 68 => 2046,
        72 => 2_097_120,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_up_to_the_last_is_answered_and_no_other() {
        let settings = Settings::read(|_| None).unwrap();
        for attribute in 1..=145 {
            assert!(value(&settings, 0, attribute).is_some(), "attribute {attribute}");
        }
        for attribute in [0, -1, 999, c_int::MAX] {
            assert_eq!(value(&settings, 0, attribute), None);
        }
    }
}
