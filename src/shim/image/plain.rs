//! Plain memory of this process, of large pages.

use std::io;
use std::ptr;

/// What the processor maps at once: a whole one is made, and given back, in one piece.
const LARGE_PAGE: usize = 2 << 20;
/// What is given back in one call: the program may run, and waits for such a call where it maps memory.
const AT_ONCE: usize = 1 << 30;

/// Plain memory, zero at first. Nothing of it is there before it is touched. A child of a fork has none of it, and no core dump.
pub struct Plain {
    /// What was mapped.
    mapped: usize,
    length: usize,
    process: u32,
}

impl Plain {
    /// So many bytes.
    ///
    /// # Errors
    /// The system's: it counts what may be touched as if it was.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let length = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_add(LARGE_PAGE));
        let length = length.ok_or(io::ErrorKind::OutOfMemory)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, at an address that the system chooses.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), length, access, kind, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Without large pages it is slower. In a child it would be there twice, and nobody looks for it in a core dump.
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
            // SAFETY: the range was mapped above, and none of these changes what is in it.
            let _ = unsafe { libc::madvise(mapped, length, advice) };
        }
        Ok(Self { mapped: mapped as usize, length, process: std::process::id() })
    }

    /// Ends behind so many bytes, of whole pages, where it is larger: the rest goes, and nobody may be using it.
    pub fn shorten(&mut self, bytes: u64) {
        let Some(rest) = self.bytes().checked_sub(bytes).filter(|_| self.process == std::process::id()) else { return };
        let keeps = self.length - rest as usize;
        for at in (keeps..self.length).step_by(AT_ONCE) {
            let length = AT_ONCE.min(self.length - at);
            // SAFETY: mapped by `new`, and behind all that is its from here on; the caller has it alone.
            let _ = unsafe { libc::munmap((self.mapped + at) as *mut libc::c_void, length) };
        }
        self.length = keeps;
    }

    /// How many bytes it was made for.
    pub fn bytes(&self) -> u64 {
        (self.length - LARGE_PAGE) as u64
    }

    /// The first byte, of a large page.
    pub fn start(&self) -> usize {
        self.mapped.next_multiple_of(LARGE_PAGE)
    }

    /// Gives the pages of this part of such memory back, which is zero again from here on; of whole pages.
    ///
    /// # Safety
    /// It is a part of memory that was made by `new` and lives, and nobody needs what is in it.
    pub unsafe fn give_back(start: usize, bytes: u64) {
        for done in (0..bytes).step_by(AT_ONCE) {
            let length = (bytes - done).min(AT_ONCE as u64) as usize;
            // SAFETY: the caller's. Where the system refuses, the pages go with the rest.
            let _ = unsafe { libc::madvise((start + done as usize) as *mut libc::c_void, length, libc::MADV_DONTNEED) };
        }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // In a child others may have these addresses.
        if self.process != std::process::id() {
            return;
        }
        for at in (0..self.length).step_by(AT_ONCE) {
            let length = AT_ONCE.min(self.length - at);
            // SAFETY: mapped by `new`, and whoever was told its address is gone.
            let _ = unsafe { libc::munmap((self.mapped + at) as *mut libc::c_void, length) };
        }
    }
}
