//! Reads of the interpreter's memory: the only place where an address becomes a value.

use std::num::NonZeroUsize;

/// A non-null address at which an object of the interpreter lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address(NonZeroUsize);

/// Every structure read here is aligned to the machine's word.
const WORD: usize = size_of::<usize>();

impl Address {
    /// `None` for null and for what cannot be an object, which is what a wrong offset most often yields.
    #[inline]
    pub fn new(address: usize) -> Option<Self> {
        NonZeroUsize::new(address).filter(|_| address.is_multiple_of(WORD)).map(Self)
    }

    #[inline]
    pub fn get(self) -> usize {
        self.0.get()
    }

    /// The value at `offset` bytes behind this address.
    ///
    /// # Safety
    /// A live object lies here, and at `offset` it holds a `T`, for which any bits are a value.
    #[inline]
    pub unsafe fn read<T: Copy>(self, offset: usize) -> T {
        // SAFETY: the caller's. Unaligned, because the reads must stay defined even where an offset is odd.
        unsafe { std::ptr::read_unaligned(std::ptr::with_exposed_provenance::<T>(self.get() + offset)) }
    }

    /// The pointer at `offset` bytes behind this address, with `tag` bits cleared.
    ///
    /// # Safety
    /// As for [`Address::read`].
    #[inline]
    pub unsafe fn pointer(self, offset: usize, tag: usize) -> Option<Self> {
        // SAFETY: the caller's.
        Self::new(unsafe { self.read::<usize>(offset) } & !tag)
    }

    /// `length` bytes from `offset` on.
    ///
    /// # Safety
    /// A live object lies here that has these bytes, and nothing writes them or frees it during `'a`.
    pub unsafe fn bytes<'a>(self, offset: usize, length: usize) -> &'a [u8] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.get() + offset), length) }
    }
}
