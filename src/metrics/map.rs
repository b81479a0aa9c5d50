//! A page's file, mapped and never touched.

use crate::folder::Folder;
use crate::layout::{BELL, BYTES, MOVES, TOOK};
use crate::model::{Process, Took};
use crate::page::{Memory, Page};
use crate::reader::Source;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, fallocate, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Resource, getrlimit};
use std::ffi::c_void;
use std::fmt::{Display, Formatter};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::Duration;

/// A page's file. It stays mapped until the process ends, so no descriptor is needed that the program could close, and what was
/// stored stays when the process is killed.
///
/// Nothing here touches the mapping: somebody may cut the file, and its file system may become full or read-only, and then the
/// processor's store would end the program by a signal, however shortly before it was asked whether all is there. So the kernel
/// copies to it (`process_vm_readv` from this process to itself), and answers with an error.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    address: usize,
}

impl Memory for Map {
    fn store(&self, at: usize, bytes: &[u8]) -> bool {
        if at.checked_add(bytes.len()).is_none_or(|end| end > BYTES) {
            return false;
        }
        let to = libc::iovec { iov_base: (self.address + at) as *mut c_void, iov_len: bytes.len() };
        let from = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: the kernel only reads what `from` names, which is the slice; `to` lies within the mapping, which is never
        // unmapped, and which nobody has a reference into.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
        usize::try_from(copied) == Ok(bytes.len())
    }
}

/// For the process itself: what the page says now.
impl Source for Map {
    fn read(&self, at: usize, into: &mut [u8]) -> std::io::Result<()> {
        if at.checked_add(into.len()).is_none_or(|end| end > BYTES) {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let to = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let from = libc::iovec { iov_base: (self.address + at) as *mut c_void, iov_len: into.len() };
        // SAFETY: the kernel writes to the slice alone, and `from` lies within the mapping, which is never unmapped.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
        match usize::try_from(copied) {
            Ok(bytes) if bytes == into.len() => Ok(()),
            Ok(_) => Err(ErrorKind::UnexpectedEof.into()),
            Err(_) => Err(std::io::Error::last_os_error()),
        }
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
    /// What stands in the bell. `None`: the file was cut.
    pub fn bell(&self) -> Option<u32> {
        let mut word = [0; size_of::<u32>()];
        self.read(BELL, &mut word).is_ok().then(|| u32::from_ne_bytes(word))
    }

    /// Says whether the process takes memory of GPUs. By any of its threads, one at a time.
    pub fn tell_took(&self, took: Took) {
        let _ = self.store(TOOK, &took.word().to_ne_bytes());
    }

    /// Says whether memory comes to GPUs or leaves them. By any of its threads, one at a time.
    pub fn tell_moves(&self, moves: bool) {
        let _ = self.store(MOVES, &u64::from(moves).to_ne_bytes());
    }

    /// Rings the process's own bell: for another of its threads. `false`: the file was cut.
    pub fn ring_own(&self, number: u32) -> bool {
        self.store(BELL, &u64::from(number).to_ne_bytes()) && wake(self.address + BELL)
    }

    /// Sleeps while the bell says `seen`, at most for so long. `false`: nobody can sleep there, because the file was cut.
    pub fn sleep(&self, seen: u32, limit: Option<Duration>) -> bool {
        let limit = limit.map(|limit| libc::timespec {
            tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the kernel looks at the word, which lies within the mapping; the time is a local or NULL.
        let answer = unsafe { libc::syscall(libc::SYS_futex, self.address + BELL, libc::FUTEX_WAIT, seen, limit) };
        answer == 0 || last_error() != Errno::FAULT
    }

    /// Makes the page of a process in a folder, where it gets its name when it says whose it is; a page of that name is of the
    /// program that this process was before (`exec`). Also gives the path.
    ///
    /// # Errors
    /// The file cannot be made, there is no room for it, or it cannot be mapped. Nothing is left then.
    pub fn create(folder: &Folder, process: &Process) -> Result<(Page<Map>, PathBuf), NoPage> {
        Self::create_at(folder, process, None)
    }

    /// The same with a new file in the place of the one that is mapped here: who sleeps on this page or writes to it does so on the new one from then on. For
    /// a process that has become another one by the system's word, as one that was stored and brought back (CRIU) has: its page would be taken for
    /// that of a process that is gone.
    ///
    /// # Errors
    /// As of [`Map::create`]; what was mapped is mapped still.
    pub fn create_again(&self, folder: &Folder, process: &Process) -> Result<(Page<Map>, PathBuf), NoPage> {
        Self::create_at(folder, process, Some(*self))
    }

    fn create_at(folder: &Folder, process: &Process, here: Option<Self>) -> Result<(Page<Map>, PathBuf), NoPage> {
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
            let map = Self::of(file.as_fd(), here).map_err(failed("mapping it"))?;
            let refused = || failed("writing it (process_vm_readv)")(last_error());
            let page = Page::begin(map, process).ok_or_else(refused)?;
            renameat(folder.fd(), &unfinished, folder.fd(), &name).map_err(failed("naming it"))?;
            Ok(page)
        })();
        if made.is_err() {
            let _ = unlinkat(folder.fd(), &unfinished, AtFlags::empty());
        }
        made.map(|page| (page, path.clone()))
    }

    fn of(file: BorrowedFd<'_>, here: Option<Self>) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let (start, flags) = match here {
            Some(here) => (here.address as *mut c_void, MapFlags::SHARED | MapFlags::FIXED),
            None => (std::ptr::null_mut(), MapFlags::SHARED),
        };
        // SAFETY: the kernel chooses an address that nothing is mapped at, or replaces the mapping of such a page, which is as long and which nobody has a
        // reference into.
        let address = unsafe { mmap(start, BYTES, protection, flags, file, 0) }?;
        Ok(Self { address: address.addr() })
    }
}

fn wake(word: usize) -> bool {
    // SAFETY: the kernel takes the address for a name and nothing more.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) >= 0 }
}

/// Rings at the page of another process, whose agent wakes from that and looks who is there. To be done again until it answers: a ring
/// may go under in one of its own.
///
/// # Errors
/// The system's: the file may not be written, or was cut.
pub fn ring(page: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut before = [0; size_of::<u64>()];
    rustix::io::pread(page, &mut before, BELL as u64)?;
    // The process itself counts, and leaves this bit alone.
    let after = u64::from_ne_bytes(before) ^ (1 << 31);
    rustix::io::pwrite(page, &after.to_ne_bytes(), BELL as u64)?;
    // SAFETY: the kernel chooses an address that nothing is mapped at.
    let address = unsafe { mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ, MapFlags::SHARED, page, 0) }?;
    let woken = wake(address.addr() + BELL);
    // SAFETY: mapped above, and nobody has a reference into it.
    let _ = unsafe { rustix::mm::munmap(address, BYTES) };
    if woken { Ok(()) } else { Err(last_error()) }
}

/// Why the last system call that the C library made failed.
fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::FAULT, Errno::from_raw_os_error)
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
