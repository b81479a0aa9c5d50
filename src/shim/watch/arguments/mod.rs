//! What a launch passes to its kernel: the words of its parameters that may be pointers.
//!
//! Launches are looked at only while somebody reads their arguments ([`begin`]); who they are is known by one load, which is all
//! that a launch pays otherwise.

mod layouts;

pub use layouts::{Layout, known, learn, of as layout_of};

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Who reads the arguments of launches.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub enum Reader {
    /// Managed memory that is moved to its place before a launch that names it.
    Managed = 1,
    /// Memory of the pool that comes near where it is used.
    Tiers = 2,
    /// Whoever watches what far memory costs.
    Far = 4,
}

/// The readers there are, a bit each.
static READERS: AtomicU8 = AtomicU8::new(0);

/// Whether anybody reads them.
#[inline]
pub fn are_read() -> bool {
    READERS.load(Ordering::Relaxed) != 0
}

/// Whether this one reads them.
#[inline]
pub fn are_read_by(reader: Reader) -> bool {
    READERS.load(Ordering::Relaxed) & reader as u8 != 0
}

/// This one reads them from now on.
pub fn begin(reader: Reader) {
    READERS.fetch_or(reader as u8, Ordering::Release);
}

/// This one does not read them any more.
pub fn end(reader: Reader) {
    READERS.fetch_and(!(reader as u8), Ordering::Release);
}

/// How often functions were forgotten.
static FORGOTTEN: AtomicU64 = AtomicU64::new(0);

/// How often functions were forgotten: what is known by their handles holds for as long as this stays the same.
pub fn forgotten() -> u64 {
    FORGOTTEN.load(Ordering::Acquire)
}

/// Modules or a context are about to go, and with them functions whose handles may be used again.
pub fn forget_functions() {
    if are_read() {
        FORGOTTEN.fetch_add(1, Ordering::Release);
        layouts::forget();
    }
}

/// What a launch passes to its kernel: a pointer to each parameter, or a list that names one buffer of all.
#[derive(Clone, Copy)]
pub struct Arguments {
    pub parameters: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}

impl Arguments {
    /// The buffer and its bytes, where there is one.
    ///
    /// # Safety
    /// The arguments are those of a launch that the driver takes.
    unsafe fn buffer(self) -> Option<(*const u8, usize)> {
        /// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `…_SIZE`; the list ends with 0.
        const POINTER: usize = 1;
        const SIZE: usize = 2;
        if !self.parameters.is_null() || self.extra.is_null() {
            return None;
        }
        let (mut buffer, mut bytes) = (std::ptr::null::<u8>(), 0);
        for pair in 0..2 {
            // SAFETY: the driver reads the list up to its end, and so does this.
            unsafe {
                let value = self.extra.add(2 * pair + 1);
                match *self.extra.add(2 * pair) as usize {
                    POINTER => buffer = (*value).cast_const().cast(),
                    SIZE => bytes = (*value).cast::<usize>().read_unaligned(),
                    _ => break,
                }
            }
        }
        (!buffer.is_null()).then_some((buffer, bytes))
    }

    /// Calls `each` with every word of the arguments.
    ///
    /// # Safety
    /// The arguments are those of a launch that the driver takes, and the layout is that of its function.
    #[inline]
    pub unsafe fn words(self, layout: &Layout, mut each: impl FnMut(u64)) {
        if !self.parameters.is_null() {
            for word in &layout.words {
                // SAFETY: the program passes a pointer for each parameter of the kernel, to as many bytes as it has.
                unsafe {
                    let parameter = *self.parameters.add(word.parameter as usize);
                    if !parameter.is_null() {
                        each(parameter.byte_add(word.offset as usize).cast::<u64>().read_unaligned());
                    }
                }
            }
        // SAFETY: as for this function.
        } else if let Some((buffer, bytes)) = unsafe { self.buffer() } {
            for word in layout.words.iter().take_while(|word| word.in_buffer as usize + 8 <= bytes) {
                // SAFETY: within the bytes that the program says the buffer has.
                each(unsafe { buffer.add(word.in_buffer as usize).cast::<u64>().read_unaligned() });
            }
        }
    }
}
