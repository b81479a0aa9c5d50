//! Kernels by name. The simulated driver runs its own of these names; a GPU runs the code that is here.

use crate::driver::Driver;
use std::ffi::{CStr, c_void};

/// Loads a pointer, or a number, from parameter `$n` of `$name`.
macro_rules! parameter {
    ($name:literal, $n:literal, pointer, $to:literal) => {
        concat!("ld.param.u64 ", $to, ", [", $name, "_", $n, "];\ncvta.to.global.u64 ", $to, ", ", $to, ";\n")
    };
    ($name:literal, $n:literal, $kind:literal, $to:literal) => {
        concat!("ld.param.", $kind, " ", $to, ", [", $name, "_", $n, "];\n")
    };
}

/// A function that does `$body` for each word: `%rd8` is its number, `%rd9` that in bytes, and `%rd4` how many there are.
macro_rules! entry {
    ($name:literal, $parameters:literal, $load:expr, $body:literal) => {
        concat!(
            ".visible .entry ",
            $name,
            "(",
            $parameters,
            ")\n{\n",
            ".reg .pred %p<2>;\n.reg .b32 %r<8>;\n.reg .b64 %rd<16>;\n",
            $load,
            "mov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\nmov.u32 %r3, %tid.x;\nmad.lo.u32 %r1, %r1, %r2, %r3;\n",
            "cvt.u64.u32 %rd8, %r1;\nmov.u32 %r3, %nctaid.x;\nmul.lo.u32 %r2, %r2, %r3;\ncvt.u64.u32 %rd10, %r2;\n",
            "again:\nsetp.ge.u64 %p1, %rd8, %rd4;\n@%p1 bra done;\nshl.b64 %rd9, %rd8, 2;\n",
            $body,
            "add.s64 %rd8, %rd8, %rd10;\nbra again;\ndone:\nret;\n}\n"
        )
    };
}

const PTX: &str = concat!(
    ".version 7.0\n.target sm_70\n.address_size 64\n",
    entry!(
        "iota_u32",
        ".param .u64 iota_u32_0, .param .u64 iota_u32_1, .param .u32 iota_u32_2",
        concat!(
            parameter!("iota_u32", "0", pointer, "%rd1"),
            parameter!("iota_u32", "1", "u64", "%rd4"),
            parameter!("iota_u32", "2", "u32", "%r5")
        ),
        "add.s64 %rd11, %rd1, %rd9;\ncvt.u32.u64 %r6, %rd8;\nadd.s32 %r6, %r6, %r5;\nst.global.u32 [%rd11], %r6;\n"
    ),
    entry!(
        "copy_u32",
        ".param .u64 copy_u32_0, .param .u64 copy_u32_1, .param .u64 copy_u32_2",
        concat!(
            parameter!("copy_u32", "0", pointer, "%rd1"),
            parameter!("copy_u32", "1", pointer, "%rd2"),
            parameter!("copy_u32", "2", "u64", "%rd4")
        ),
        "add.s64 %rd11, %rd1, %rd9;\nadd.s64 %rd12, %rd2, %rd9;\nld.global.u32 %r6, [%rd12];\nst.global.u32 [%rd11], %r6;\n"
    ),
    entry!(
        "add_u32",
        ".param .u64 add_u32_0, .param .u64 add_u32_1, .param .u64 add_u32_2, .param .u64 add_u32_3",
        concat!(
            parameter!("add_u32", "0", pointer, "%rd1"),
            parameter!("add_u32", "1", pointer, "%rd2"),
            parameter!("add_u32", "2", pointer, "%rd3"),
            parameter!("add_u32", "3", "u64", "%rd4")
        ),
        "add.s64 %rd11, %rd1, %rd9;\nadd.s64 %rd12, %rd2, %rd9;\nadd.s64 %rd13, %rd3, %rd9;\nld.global.u32 %r6, [%rd12];\nld.global.u32 %r7, [%rd13];\nadd.s32 %r6, %r6, %r7;\nst.global.u32 [%rd11], %r6;\n"
    ),
    "\0"
);

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
        assert_eq!(driver.cuModuleLoadData(&mut module, PTX.as_ptr().cast()), 0, "cuModuleLoadData");
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
