//! Names for ranges of memory, by which they come back from an image.

use super::labels::text_of;
use super::{gpupool_error, looking};
use crate::process;
use crate::restore::{self, Unrestored};
use crate::serve::memory::names;
use std::ffi::{c_char, c_int, c_void};

/// Bytes of a name with its NUL, at most.
const NAME_SIZE: usize = 256;

/// Names `bytes` of the pool's memory from `pointer` on, which lie in one block; 0 are all that is left of the block from there. An image of the program's memory
/// (`gpupool checkpoint`) has the name, and a program that is started with that image (`gpupool run --restore`) gets the bytes back in this
/// call: the first time that it names memory so, of the same size, they are there, compared with their hashes, when this returns. All work of
/// the block's context is waited for.
///
/// A name means one range at a time, and ends with the block. NULL takes back the names of what begins at `pointer`, if it has any.
/// Returns 0, `GPUPOOL_NOT_POOLED`, a `CUresult`, or `GPUPOOL_NOT_RESTORED` where there is an image to restore from and these bytes did not come back:
/// the memory has its name then, and the log says why. A name has 1 to 255 bytes of UTF-8.
///
/// # Safety
/// `name` ends with NUL, or is NULL. Nothing else uses the memory during this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_name(pointer: *const c_void, bytes: usize, name: *const c_char) -> c_int {
    // SAFETY: as for this function.
    let name = match unsafe { text_of(name, NAME_SIZE) } {
        Ok(name) => name,
        Err(error) => return error.into(),
    };
    let answer = looking(|| {
        let driver = process::driver().ok_or(gpupool_error::GPUPOOL_NOT_ACTIVE)?;
        let Some(name) = name else {
            return if names::take_back(pointer as u64) { Ok(0) } else { Err(gpupool_error::GPUPOOL_NOT_POOLED) };
        };
        let (named, block) = names::set(pointer as u64, bytes as u64, name).ok_or(gpupool_error::GPUPOOL_NOT_POOLED)?;
        match restore::by_name(driver, &named, &block) {
            Ok(()) => Ok(0),
            Err(Unrestored::Told) => Err(gpupool_error::GPUPOOL_NOT_RESTORED),
            Err(Unrestored::Refused(result)) => Ok(result.0),
        }
    });
    answer.unwrap_or_else(c_int::from)
}

/// Says that the program has built what it is about to load: under `gpupool run --restore DIR --restore-by-order` all blocks of the newest image in DIR are in the
/// program's memory when this returns, in the order in which they were allocated, and `*bytes` says how much that was; else 0. Nothing is written where the blocks
/// differ from those of the image in number, size, order, GPU or place of the call; the log says at which block. All contexts are waited for.
///
/// Returns 0, a `CUresult`, or `GPUPOOL_NOT_RESTORED`. Memory that the driver or `cuMemCreate` gave is not part of it. `bytes` may be NULL.
///
/// # Safety
/// `bytes` is NULL or may be written. Nothing else uses or frees the program's memory during this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_restore(bytes: *mut usize) -> c_int {
    let answer = looking(|| {
        let driver = process::driver().ok_or(gpupool_error::GPUPOOL_NOT_ACTIVE)?;
        Ok(restore::by_order(driver))
    });
    let (code, restored) = match answer {
        Ok(Ok(restored)) => (0, restored),
        Ok(Err(Unrestored::Told)) => (gpupool_error::GPUPOOL_NOT_RESTORED.into(), 0),
        Ok(Err(Unrestored::Refused(result))) => (result.0, 0),
        Err(error) => (error.into(), 0),
    };
    if !bytes.is_null() {
        // SAFETY: as for this function.
        unsafe { bytes.write(restored as usize) };
    }
    code
}
