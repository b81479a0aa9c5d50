//! Memory for direct I/O: on a page's border, and given back to the system at once.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// What addresses, lengths and places in a file are multiples of for direct I/O, in bytes.
pub const ALIGNMENT: usize = 4096;

/// The next multiple of [`ALIGNMENT`].
pub fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Zeroed memory of our own. It is mapped and not had from the heap: that one aborts the program where there is none.
pub struct Buffer {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone, and threads get at it by the rules of references.
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of `bytes`, rounded up to [`ALIGNMENT`].
    ///
    /// # Errors
    /// There is no such memory.
    pub fn new(bytes: usize) -> Result<Self, Errno> {
        let bytes = padded(bytes.max(1));
        // SAFETY: a new private mapping, at an address that the system chooses.
        let at = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)? };
        // Fewer faults and misses where the system has large pages; nothing is lost where it has none.
        // SAFETY: advice on the mapping just made.
        let _ = unsafe { madvise(at, bytes, Advice::LinuxHugepage) };
        let at = NonNull::new(at.cast::<u8>()).ok_or(Errno::NOMEM)?;
        Ok(Self { at, bytes })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and nobody has a reference any more. It fails for no such mapping.
        let _ = unsafe { munmap(self.at.as_ptr().cast::<c_void>(), self.bytes) };
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` of initialised memory at `at`, for as long as this value lives.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Buffer({} bytes)", self.bytes)
    }
}
