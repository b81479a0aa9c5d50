//! `errno`, which belongs to the program: a call of the driver's that succeeds leaves it alone, and what is done beside it (files that
//! are not there, maps that are full) does not.

use std::ffi::c_int;

/// What `errno` of this thread was; it is that again when this is dropped. Stays on the thread that made it.
#[derive(Debug)]
pub struct Errno {
    place: *mut c_int,
    was: c_int,
}

impl Errno {
    /// Keeps what it is now.
    #[inline]
    pub fn keep() -> Self {
        // SAFETY: the function has no requirements, and its answer is valid for as long as this thread is.
        let place = unsafe { libc::__errno_location() };
        // SAFETY: `place` is this thread's `errno`.
        Self { place, was: unsafe { *place } }
    }
}

impl Drop for Errno {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: a raw pointer keeps this type on the thread that made it, whose `errno` this is.
        unsafe { *self.place = self.was }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn what_fails_in_between_leaves_no_trace() {
        // SAFETY: no requirements; the pointer is this thread's own.
        unsafe { *libc::__errno_location() = libc::EDOM }
        let kept = Errno::keep();
        // SAFETY: a descriptor that is none is answered with EBADF.
        assert_eq!(unsafe { libc::close(-1) }, -1);
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
        drop(kept);
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EDOM));
    }
}
