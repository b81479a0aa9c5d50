//! Memory of this process that may be gone.

use std::ffi::c_void;

/// Reads it. False where it is gone, or where a sandbox forbids to look.
pub fn read(address: u64, into: &mut [u8]) -> bool {
    let to = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let from = libc::iovec { iov_base: address as *mut c_void, iov_len: into.len() };
    // SAFETY: `to` is the slice; whatever `from` says, the kernel checks it.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    usize::try_from(read) == Ok(into.len())
}
