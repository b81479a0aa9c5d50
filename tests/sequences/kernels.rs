//! Kernels by name. The PTX declares them and has no code: the simulated driver runs its own.

use crate::driver::Driver;
use std::ffi::{CStr, c_void};

const PTX: &CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry iota_u32(.param .u64 iota_u32_0, .param .u64 iota_u32_1, .param .u32 iota_u32_2) { ret; }
.visible .entry copy_u32(.param .u64 copy_u32_0, .param .u64 copy_u32_1, .param .u64 copy_u32_2) { ret; }
.visible .entry add_u32(.param .u64 add_u32_0, .param .u64 add_u32_1, .param .u64 add_u32_2, .param .u64 add_u32_3) { ret; }
";

/// Functions of one context.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kernels {
    /// `to[i] = start + i`.
    pub iota: usize,
    /// `to[i] = from[i]`.
    pub copy: usize,
    /// `to[i] = one[i] + other[i]`.
    pub add: usize,
}

impl Kernels {
    /// Loads them into the current context.
    pub fn load(driver: &Driver) -> Self {
        let mut module = 0;
        assert_eq!(driver.cuModuleLoadData(&mut module, PTX.as_ptr()), 0, "cuModuleLoadData");
        let function = |name: &CStr| {
            let mut function = 0;
            assert_eq!(driver.cuModuleGetFunction(&mut function, module, name.as_ptr()), 0, "{name:?}");
            function
        };
        Self { iota: function(c"iota_u32"), copy: function(c"copy_u32"), add: function(c"add_u32") }
    }
}

/// Launches a function whose parameters are 64-bit numbers (a 32-bit one reads its low half).
pub fn launch(driver: &Driver, function: usize, stream: usize, parameters: &[u64]) -> i32 {
    let pointers: Vec<*const c_void> = parameters.iter().map(|value| std::ptr::from_ref(value).cast()).collect();
    driver.cuLaunchKernel(function, 4, 1, 1, 64, 1, 1, 0, stream, pointers.as_ptr(), std::ptr::null())
}
