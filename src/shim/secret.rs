//! Numbers that nobody outside of the process can know.

use std::io::{Error, ErrorKind, Result};

/// Fills a buffer with them.
///
/// # Errors
/// The system has none.
pub fn fill(buffer: &mut [u8]) -> Result<()> {
    // SAFETY: the output is of that length.
    let written = unsafe { libc::getrandom(buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    match usize::try_from(written) {
        Ok(written) if written == buffer.len() => Ok(()),
        Ok(_) => Err(ErrorKind::Interrupted.into()),
        Err(_) => Err(Error::last_os_error()),
    }
}
