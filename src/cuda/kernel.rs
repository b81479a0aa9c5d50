//! Kernels of the library's own: the driver makes them for the GPU that is there, and they run in the program's context.

use crate::{CuResult, Driver, Function, Module, Stream};
use gpupool_interpose::cancel;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

/// `digest_u32(from, words, out, slots, k0, k1, k2, k3)` and `copy_u32(to, from, words)`.
const DIGEST: &CStr = c"digest_u32";
const COPY: &CStr = c"copy_u32";
/// Their texts for the driver (PTX).
const TEXTS: [(&CStr, &str); 2] =
    [(DIGEST, concat!(include_str!("digest.ptx"), "\0")), (COPY, concat!(include_str!("copy.ptx"), "\0"))];
/// `CU_JIT_INPUT_PTX`.
const PTX: c_int = 1;

/// A launch of one: enough threads that the memory of any GPU is read as fast as it can be.
const BLOCKS: u32 = 256;
const THREADS: u32 = 512;

/// What addresses and sizes have to be a multiple of.
pub const AT_ONCE: u64 = 16;
/// The sums that one digest is made of: two of each block.
pub const SUMS: usize = 2 * BLOCKS as usize;

/// What digests are made with besides the memory: where nobody outside of the process knows them, nobody can write two different contents that have the same one. Any
/// numbers will do. Digests of different keys have nothing to do with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys(pub [u64; 4]);

/// The digest that is made of these sums, [`SUMS`] of them.
pub fn digest_of(sums: impl Iterator<Item = u64>) -> u128 {
    let mut both = [0_u64; 2];
    for (index, sum) in sums.enumerate() {
        both[index % 2] = both[index % 2].wrapping_add(sum);
    }
    u128::from(both[0]) << 64 | u128::from(both[1])
}

/// The kernels in a context, with which they end.
#[derive(Clone, Copy)]
pub struct Kernels {
    digest: Function,
    copy: Function,
}

impl Driver {
    /// Has the driver translate the kernels for the GPU of the current context (`cuLinkCreate`, `cuLinkAddData`, `cuLinkComplete`): some
    /// milliseconds of the processor's (8.3 on H200), and files of the driver's are read for it. It waits for no work of the GPU's, and
    /// nothing is loaded there. The answer is what [`Self::load_kernels`] takes.
    pub fn translate_kernels(&self) -> Result<Box<[u8]>, CuResult> {
        let _sheltered = cancel::shelter();
        let (Some(create), Some(add), Some(complete), Some(destroy)) =
            (self.cuLinkCreate_v2, self.cuLinkAddData_v2, self.cuLinkComplete, self.cuLinkDestroy)
        else {
            return Err(CuResult::NOT_SUPPORTED);
        };
        let mut link = None;
        // SAFETY: the output is a local, and there are no options.
        unsafe { create(0, null_mut(), null_mut(), &raw mut link) }.ok()?;
        let link = link.ok_or(CuResult::INVALID_VALUE)?;
        let (mut image, mut bytes) = (null_mut(), 0);
        let added = TEXTS.iter().try_for_each(|(name, text)| {
            let start = text.as_ptr().cast::<c_void>().cast_mut();
            // SAFETY: the text ends with a zero and is only read, although the type lacks the word; there are no options, and the link was made above.
            unsafe { add(link, PTX, start, text.len(), name.as_ptr(), 0, null_mut(), null_mut()) }.ok()
        });
        // SAFETY: the outputs are locals, and the link was made above.
        let completed = added.and_then(|()| unsafe { complete(link, &raw mut image, &raw mut bytes) }.ok());
        let translated = completed.and_then(|()| {
            if image.is_null() || bytes == 0 {
                return Err(CuResult::INVALID_VALUE);
            }
            // SAFETY: the driver has just said that so many bytes lie there, which it keeps until the link ends.
            Ok(Box::from(unsafe { std::slice::from_raw_parts(image.cast::<u8>().cast_const(), bytes) }))
        });
        // SAFETY: the link was made above, and nobody else knows it.
        let _: CuResult = unsafe { destroy(link) };
        translated
    }

    /// Loads what [`Self::translate_kernels`] made into the current context (`cuModuleLoadData`, `cuModuleGetFunction`), with which it
    /// ends. The driver takes some of the GPU's memory for that, and may wait for all work of the context; where there is none it takes
    /// 0.08 ms (H200).
    ///
    /// # Safety
    /// The image is of `translate_kernels`, for a GPU of the same kind.
    pub unsafe fn load_kernels(&self, image: &[u8]) -> Result<Kernels, CuResult> {
        let (Some(load), Some(get)) = (self.cuModuleLoadData, self.cuModuleGetFunction) else {
            return Err(CuResult::NOT_SUPPORTED);
        };
        let mut module: Option<Module> = None;
        // SAFETY: the output is a local, and the caller vouches for the image, which says itself how long it is.
        unsafe { load(&raw mut module, image.as_ptr().cast()) }.ok()?;
        let named = |name: &CStr| {
            let mut function = None;
            // SAFETY: the output is a local, and the module was loaded above.
            unsafe { get(&raw mut function, module, name.as_ptr()) }.ok()?;
            function.ok_or(CuResult::INVALID_VALUE)
        };
        Ok(Kernels { digest: named(DIGEST)?, copy: named(COPY)? })
    }

    /// Has the GPU add up what is in memory, in the order of a stream of the current context (`cuLaunchKernel`): [`SUMS`] numbers are at `to`
    /// once the stream has come that far, for [`digest_of`]. Address and size are multiples of [`AT_ONCE`].
    ///
    /// # Safety
    /// The kernels are of [`Self::load_kernels`] in the current context, and the stream is one of that context and lives. The memory is mapped
    /// with access for the context's GPU until then: a kernel that reads what it may not is an error that the context does not survive. `to` is
    /// pinned memory that the GPU reaches at that address, and nobody else uses it until then.
    pub unsafe fn digest(
        &self,
        kernels: Kernels,
        stream: Stream,
        from: u64,
        bytes: u64,
        to: *mut u64,
        Keys([k0, k1, k2, k3]): Keys,
    ) -> CuResult {
        let Some(launch) = self.cuLaunchKernel else { return CuResult::NOT_SUPPORTED };
        // One that is even would lose its upper bits to an index that is.
        let mut values = [from, bytes / 4, to as u64, u64::from(BLOCKS), k0, k1 | 1, k2, k3 | 1];
        let mut parameters = values.each_mut().map(|value| (&raw mut *value).cast::<c_void>());
        // SAFETY: the kernel has these eight parameters, of eight bytes each, which the driver reads before it returns; the caller vouches for
        // function, stream and memory.
        unsafe { launch(kernels.digest, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, parameters.as_mut_ptr(), null_mut()) }
    }

    /// Has the GPU copy, in the order of a stream of the current context (`cuLaunchKernel`). For memory of two other GPUs: over NVLink a copy engine of a third one brings
    /// 83 GB/s from one to the other and a kernel 289 (four H100, RESULTS.md, 2026-11-27); of memory of its own an engine copies 393. Addresses and size are multiples of [`AT_ONCE`].
    ///
    /// # Safety
    /// As for [`Self::digest`], of both ranges, which do not overlap.
    pub unsafe fn copy_by_kernel(&self, kernels: Kernels, stream: Stream, to: u64, from: u64, bytes: u64) -> CuResult {
        let Some(launch) = self.cuLaunchKernel else { return CuResult::NOT_SUPPORTED };
        let mut values = [to, from, bytes / 4];
        let mut parameters = values.each_mut().map(|value| (&raw mut *value).cast::<c_void>());
        // SAFETY: the kernel has these three parameters, of eight bytes each, which the driver reads before it returns; the caller vouches for
        // kernels, stream and memory.
        unsafe { launch(kernels.copy, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, parameters.as_mut_ptr(), null_mut()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_made_of_all_sums_of_each_kind() {
        let sums = || (0..SUMS as u64).map(|index| index.wrapping_mul(1 << 60));
        let whole = digest_of(sums());
        for changed in [0, 1, 2, SUMS - 1] {
            let other = sums().enumerate().map(|(index, sum)| if index == changed { sum.wrapping_add(1) } else { sum });
            assert_ne!(digest_of(other), whole);
        }
    }
}
