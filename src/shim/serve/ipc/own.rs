//! Descriptors of ours among the program's.
//!
//! A program may close every descriptor there is (a daemon does, before it goes on), and its next file gets the number of one
//! of ours. So each is known by what it leads to, and looked at before it is used or closed. They have high numbers where the
//! process may have such, so that the program's own files get the numbers that they have without us.

use gpupool_wire::Keep;
use std::io::{Error, Result};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// The lowest number that one of ours gets, if it may.
const FLOOR: libc::c_int = 256;

/// One of our descriptors, for the child of a fork, where nothing but atomics can be read.
struct Entry {
    /// -1 for none.
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

/// Descriptors of ours in this process. Any for which there is no entry left stay open in the child, which does no more harm
/// than a late end of a connection.
static LIST: [Entry; 128] =
    [const { Entry { fd: AtomicI32::new(-1), device: AtomicU64::new(0), inode: AtomicU64::new(0) } }; 128];

/// A descriptor of ours, known by what it leads to.
#[derive(Debug)]
pub struct Own {
    descriptor: ManuallyDrop<OwnedFd>,
    identity: (u64, u64),
}

/// Device and inode of what a descriptor leads to; a socket's is like no other's.
fn identity(fd: RawFd) -> Result<(u64, u64)> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the output is of the size that fstat fills; a number that is no descriptor is answered with EBADF.
    if unsafe { libc::fstat(fd, status.as_mut_ptr()) } != 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: fstat answered 0, so it has filled it.
    let status = unsafe { status.assume_init() };
    Ok((status.st_dev, status.st_ino))
}

impl Own {
    fn number(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

impl AsFd for Own {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Keep for Own {
    fn keep(low: OwnedFd) -> Result<Self> {
        // SAFETY: the call takes integers and touches no memory.
        let high = unsafe { libc::fcntl(low.as_raw_fd(), libc::F_DUPFD_CLOEXEC, FLOOR) };
        // SAFETY: fcntl succeeded, so this is a new descriptor that nobody else owns.
        let descriptor = if high < 0 { low } else { unsafe { OwnedFd::from_raw_fd(high) } };
        let identity = identity(descriptor.as_raw_fd())?;
        let own = Self { descriptor: ManuallyDrop::new(descriptor), identity };
        let free = |entry: &&Entry| entry.fd.compare_exchange(-1, -2, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if let Some(entry) = LIST.iter().find(free) {
            entry.device.store(identity.0, Ordering::Relaxed);
            entry.inode.store(identity.1, Ordering::Relaxed);
            entry.fd.store(own.number(), Ordering::Release);
        }
        Ok(own)
    }

    fn is_there(&self) -> bool {
        identity(self.number()).is_ok_and(|found| found == self.identity)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let this = |entry: &&Entry| {
            entry.fd.load(Ordering::Acquire) == self.number() && entry.inode.load(Ordering::Relaxed) == self.identity.1
        };
        if let Some(entry) = LIST.iter().find(this) {
            entry.fd.store(-1, Ordering::Release);
        }
        if self.is_there() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.descriptor) };
        }
    }
}

/// In the child of a fork: what is ours is the parent's, and an end of a connection that stays open here would hide from the
/// other side that the parent is gone. Async-signal-safe.
pub fn after_fork_in_child() {
    for entry in &LIST {
        let fd = entry.fd.swap(-1, Ordering::AcqRel);
        let known = (entry.device.load(Ordering::Relaxed), entry.inode.load(Ordering::Relaxed));
        if fd >= 0 && identity(fd).is_ok_and(|found| found == known) {
            // SAFETY: a copy of a descriptor of ours, which nobody uses in this process.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_descriptor_that_the_program_closed_and_used_again_is_the_programs() {
        let own = Own::keep(File::open("/dev/null").unwrap().into()).unwrap();
        let number = own.number();
        assert!(own.is_there());
        let other = File::open("/proc/self/stat").unwrap();
        // SAFETY: both are open descriptors; the program puts its own file under our number.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        assert!(!own.is_there());
        drop(own);
        let theirs = identity(other.as_raw_fd()).unwrap();
        assert_eq!(identity(number).unwrap(), theirs, "it is still open");
        // SAFETY: put there above, and nobody else's.
        unsafe { libc::close(number) };
    }
}
