//! A page's file, mapped.

use crate::folder::Folder;
use crate::layout::BYTES;
use crate::model::Process;
use crate::page::Page;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, fallocate, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use rustix::process::{Resource, getrlimit};
use std::ffi::c_void;
use std::fmt::{Display, Formatter};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;

/// The words of a page's file. They stay mapped until the process ends, so no descriptor is needed that the program could
/// close, and what was stored stays when the process is killed.
#[derive(Clone, Copy, Debug)]
pub struct Map(&'static [AtomicU64]);

impl Deref for Map {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        self.0
    }
}

/// A page that could not be made, and what failed.
#[derive(Debug)]
pub struct NoPage {
    path: PathBuf,
    what: &'static str,
    error: Errno,
}

impl Display for NoPage {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}: {} failed: {}", self.path.display(), self.what, self.error)
    }
}

impl Map {
    /// Makes the page of a process in a folder, where it gets its name when it says whose it is; a page of that name is of the
    /// program that this process was before (`exec`). Also gives the path.
    ///
    /// # Errors
    /// The file cannot be made, there is no room for it, or it cannot be mapped. Nothing is left then.
    pub fn create(folder: &Folder, process: &Process) -> Result<(Page<Map>, PathBuf), NoPage> {
        let name = folder.name_of(&process.identity);
        let path = folder.path().join(&name);
        let failed = |what| {
            let path = path.clone();
            move |error| NoPage { path, what, error }
        };
        // The kernel answers a file that grows beyond the limit with a signal, which would be the program's.
        if getrlimit(Resource::Fsize).current.is_some_and(|most| most < BYTES as u64) {
            return Err(failed("making a file of 64 KiB, which RLIMIT_FSIZE forbids,")(Errno::FBIG));
        }
        let unfinished = format!(".{name}.new");
        // Left there by a program that this process was before.
        let _ = unlinkat(folder.fd(), &unfinished, AtFlags::empty());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(folder.fd(), &unfinished, flags, Mode::RUSR | Mode::WUSR).map_err(failed("making it"))?;
        let made = (|| {
            allocate(file.as_fd()).map_err(failed("taking room for it"))?;
            let page = Page::begin(Self::of(file.as_fd()).map_err(failed("mapping it"))?, process);
            renameat(folder.fd(), &unfinished, folder.fd(), &name).map_err(failed("naming it"))?;
            Ok(page)
        })();
        if made.is_err() {
            let _ = unlinkat(folder.fd(), &unfinished, AtFlags::empty());
        }
        made.map(|page| (page, path.clone()))
    }

    fn of(file: BorrowedFd<'_>) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address that nothing is mapped at.
        let address = unsafe { mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file, 0) }?;
        // SAFETY: mapped for reading and writing over this length and never unmapped; pages are aligned for words, all bits
        // are valid, and other processes' writes are no data races of this one's atomics.
        let words = unsafe { std::slice::from_raw_parts(address.cast::<AtomicU64>(), BYTES / size_of::<AtomicU64>()) };
        Ok(Self(words))
    }

    /// Whether every byte can be stored to now. A file that somebody has cut, or whose file system has become read-only or
    /// full, would end the process by a signal; asked before each update, this finds it out without one. Kernels before
    /// 5.14 do not know the question, and the answer is yes.
    pub fn is_there(self) -> bool {
        let address = self.0.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: the range is mapped and never unmapped, and the advice changes no byte of it.
        let answer = unsafe { madvise(address, BYTES, Advice::LinuxPopulateWrite) };
        !matches!(answer, Err(Errno::FAULT | Errno::HWPOISON | Errno::NOMEM))
    }
}

/// Takes the room on the disk now: a store into a hole ends the process by a signal where the disk is full.
fn allocate(file: BorrowedFd<'_>) -> Result<(), Errno> {
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, BYTES as u64) {
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => break,
            answer => return answer,
        }
    }
    let (zeros, mut done) = (vec![0; BYTES], 0);
    while done < BYTES {
        match rustix::io::pwrite(file, &zeros[done..], done as u64) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(bytes) => done += bytes,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
