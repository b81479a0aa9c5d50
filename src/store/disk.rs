//! Files and folders by descriptors of ours, in a program that may close every descriptor there is.
//!
//! Each is known by what it leads to (device and inode), and looked at before it is used or closed: the program's next file may
//! have got its number. A program that does so between the look and the use is not caught.
//!
//! Everything that changes the file system goes through here, so that tests can have each such operation fail.

use std::fmt::{Debug, Formatter};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, chmodat, fchmod, fcntl_getfl, fcntl_setfl,
    fdatasync, flock, fstat, fsync, ftruncate, linkat, mkdirat, openat, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::{Errno, fcntl_dupfd_cloexec, pread, pwrite};

use crate::error::{Error, Result};

/// The lowest number that a descriptor of ours gets, if it may: a program's own files then have the numbers that they have
/// without us, and nothing that it prints lands in ours.
const FLOOR: i32 = 256;

/// What tests let fail: called before each operation that changes the file system, with its name.
type Fault = dyn Fn(&'static str) -> std::result::Result<(), Errno> + Send + Sync;

/// Where faults come from, if any do.
#[derive(Clone, Default)]
pub struct Disk {
    fault: Option<Arc<Fault>>,
    /// The same for what only looks.
    unread: Option<Arc<Fault>>,
}

impl Debug for Disk {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str("Disk")
    }
}

impl Disk {
    #[cfg(test)]
    pub fn with_faults(fault: impl Fn(&'static str) -> std::result::Result<(), Errno> + Send + Sync + 'static) -> Self {
        Self { fault: Some(Arc::new(fault)), unread: None }
    }

    /// With faults of what only looks as well.
    #[cfg(test)]
    pub fn with_unread(
        self,
        fault: impl Fn(&'static str) -> std::result::Result<(), Errno> + Send + Sync + 'static,
    ) -> Self {
        Self { unread: Some(Arc::new(fault)), ..self }
    }

    fn may(&self, path: &Path, doing: &'static str) -> Result<()> {
        Self::ask(self.fault.as_ref(), path, doing)
    }

    fn may_look(&self, path: &Path, doing: &'static str) -> Result<()> {
        Self::ask(self.unread.as_ref(), path, doing)
    }

    fn ask(fault: Option<&Arc<Fault>>, path: &Path, doing: &'static str) -> Result<()> {
        let Some(fault) = fault else { return Ok(()) };
        fault(doing).map_err(|errno| Error::io(path, doing, errno))
    }
}

/// A descriptor of ours and what it leads to.
#[derive(Debug)]
struct Own {
    descriptor: ManuallyDrop<OwnedFd>,
    identity: (u64, u64),
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

impl Own {
    fn keep(low: OwnedFd) -> std::result::Result<Self, Errno> {
        let descriptor = fcntl_dupfd_cloexec(&low, FLOOR).unwrap_or(low);
        let identity = identity(&fstat(&descriptor)?);
        Ok(Self { descriptor: ManuallyDrop::new(descriptor), identity })
    }

    fn is_there(&self) -> bool {
        fstat(&*self.descriptor).is_ok_and(|stat| identity(&stat) == self.identity)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if self.is_there() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.descriptor) };
        }
    }
}

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    own: Own,
    path: PathBuf,
    disk: Disk,
}

/// An open file.
#[derive(Debug)]
pub struct File {
    own: Own,
    path: PathBuf,
    disk: Disk,
    direct: AtomicBool,
}

impl Folder {
    /// Of a descriptor; `path` is for messages.
    pub fn of(descriptor: OwnedFd, path: &Path, disk: &Disk) -> Result<Self> {
        let own = Own::keep(descriptor).map_err(|errno| Error::io(path, "open", errno))?;
        Ok(Self { own, path: path.to_owned(), disk: disk.clone() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode.
    pub fn identity(&self) -> (u64, u64) {
        self.own.identity
    }

    fn fd(&self) -> Result<BorrowedFd<'_>> {
        if self.own.is_there() { Ok(self.own.descriptor.as_fd()) } else { Err(Error::Lost { path: self.path.clone() }) }
    }

    pub fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        self.fd()
    }

    pub fn stat(&self) -> Result<Stat> {
        fstat(self.fd()?).map_err(|errno| Error::io(&self.path, "look at", errno))
    }

    /// The names in it, without `.` and `..`.
    pub fn names(&self) -> Result<Vec<String>> {
        self.disk.may_look(&self.path, "list")?;
        let failed = |errno| Error::io(&self.path, "list", errno);
        let mut names = Vec::new();
        for entry in Dir::read_from(self.fd()?).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // What is not UTF-8 is none of ours.
            if let Ok(name) = entry.file_name().to_str()
                && name != "."
                && name != ".."
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Opens a folder in it, which is no link.
    pub fn folder(&self, name: &str) -> Result<Self> {
        let path = self.path.join(name);
        self.disk.may_look(&path, "open")?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(self.fd()?, name, flags, Mode::empty()) {
            Err(Errno::LOOP | Errno::NOTDIR) => Err(Error::refused(&path, "it is a link or no folder")),
            Err(errno) => Err(Error::io(&path, "open", errno)),
            Ok(descriptor) => Self::of(descriptor, &path, &self.disk),
        }
    }

    /// Makes a folder in it that nobody else can look into, whatever the mask is.
    pub fn make(&self, name: &str) -> Result<Self> {
        let path = self.path.join(name);
        self.disk.may(&path, "make")?;
        let fd = self.fd()?;
        mkdirat(fd, name, Mode::RWXU).map_err(|errno| Error::io(&path, "make", errno))?;
        // A mask may have shut its maker out. By its name, where only this user can have put anything.
        let set = chmodat(fd, name, Mode::RWXU, AtFlags::empty());
        set.map_err(|errno| Error::io(&path, "set the mode of", errno))?;
        self.folder(name)
    }

    /// Creates a file in it that nobody else can read, whatever the mask is; with direct I/O where that is wanted and the file
    /// system takes it.
    pub fn create(&self, name: &str, direct: bool) -> Result<File> {
        let path = self.path.join(name);
        self.disk.may(&path, "create")?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let descriptor = openat(self.fd()?, name, flags, mode).map_err(|errno| Error::io(&path, "create", errno))?;
        fchmod(&descriptor, mode).map_err(|errno| Error::io(&path, "set the mode of", errno))?;
        let file = self.file_of(descriptor, &path)?;
        // Not at the opening: a file system that does not take the flag has created the file before it says so.
        if direct {
            file.set_direct(true);
        }
        Ok(file)
    }

    /// Opens a file for what is not its contents: the lock. Created where it is not there.
    pub fn lock_file(&self, name: &str) -> Result<File> {
        let path = self.path.join(name);
        self.disk.may(&path, "create")?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let descriptor = match openat(self.fd()?, name, flags, mode) {
            Err(Errno::LOOP) => return Err(Error::refused(&path, "it is a link")),
            answer => answer.map_err(|errno| Error::io(&path, "open", errno))?,
        };
        fchmod(&descriptor, mode).map_err(|errno| Error::io(&path, "set the mode of", errno))?;
        self.file_of(descriptor, &path)
    }

    /// Opens a regular file of the folder's owner, for reading.
    pub fn open(&self, name: &str, direct: bool) -> Result<File> {
        let path = self.path.join(name);
        self.disk.may_look(&path, "open")?;
        // What is no file may be a pipe, whose opening would wait.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let descriptor = match openat(self.fd()?, name, flags, Mode::empty()) {
            Err(Errno::LOOP) => return Err(Error::refused(&path, "it is a link")),
            answer => answer.map_err(|errno| Error::io(&path, "open", errno))?,
        };
        let file = self.file_of(descriptor, &path)?;
        let stat = file.stat()?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(Error::refused(&path, "it is no file"));
        }
        let owner = self.stat()?.st_uid;
        if stat.st_uid != owner {
            return Err(Error::refused(
                &path,
                format!("it is of user {}, and its folder of user {owner}", stat.st_uid),
            ));
        }
        if direct {
            file.set_direct(true);
        }
        Ok(file)
    }

    fn file_of(&self, descriptor: OwnedFd, path: &Path) -> Result<File> {
        let own = Own::keep(descriptor).map_err(|errno| Error::io(path, "open", errno))?;
        Ok(File { own, path: path.to_owned(), disk: self.disk.clone(), direct: AtomicBool::new(false) })
    }

    /// Gives an entry another name, which nothing has yet.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let path = self.path.join(from);
        self.disk.may(&path, "rename")?;
        let fd = self.fd()?;
        let renamed = match renameat_with(fd, from, fd, to, RenameFlags::NOREPLACE) {
            // Some network file systems know no flags. The lock keeps others from making that name meanwhile, and a folder
            // takes the place of an empty one only.
            Err(Errno::INVAL | Errno::NOSYS) => renameat(fd, from, fd, to),
            answer => answer,
        };
        renamed.map_err(|errno| Error::io(&path, "rename", errno))
    }

    /// Gives a file of it a second name, in another folder.
    pub fn link(&self, name: &str, to: &Self, new: &str) -> Result<()> {
        let path = to.path.join(new);
        self.disk.may(&path, "link")?;
        linkat(self.fd()?, name, to.fd()?, new, AtFlags::empty()).map_err(|errno| Error::io(&path, "link", errno))
    }

    /// Removes a file.
    pub fn remove(&self, name: &str) -> Result<()> {
        self.unlink(name, AtFlags::empty())
    }

    /// Removes a folder with the files in it, or as many of them as can be.
    ///
    /// # Errors
    /// Why the first of them that is still there cannot be removed.
    pub fn remove_folder(&self, name: &str) -> Result<()> {
        let folder = self.folder(name)?;
        let stays = folder.names()?.iter().fold(None, |stays: Option<Error>, name| stays.or(folder.remove(name).err()));
        stays.map_or_else(|| self.unlink(name, AtFlags::REMOVEDIR), Err)
    }

    /// The name of a folder in it, if there is any.
    pub fn folder_in(&self) -> Result<Option<String>> {
        let fd = self.fd()?;
        let is_folder = |name: &String| {
            let stat = statat(fd, name, AtFlags::SYMLINK_NOFOLLOW);
            stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir())
        };
        Ok(self.names()?.into_iter().find(is_folder))
    }

    /// As [`Folder::remove_folder`], in as little time as names take: what its files take is given back once the answer is dropped. A network file system
    /// may keep a name of each until then, and the folder with it.
    pub fn unname_folder(&self, name: &str) -> Result<Vec<File>> {
        let folder = self.folder(name)?;
        let names = folder.names()?;
        // One that cannot be opened goes with its name.
        let files = names.iter().filter_map(|name| folder.open(name, false).ok()).collect();
        names.iter().try_for_each(|name| folder.remove(name))?;
        let _ = self.unlink(name, AtFlags::REMOVEDIR);
        Ok(files)
    }

    fn unlink(&self, name: &str, flags: AtFlags) -> Result<()> {
        let path = self.path.join(name);
        self.disk.may(&path, "remove")?;
        unlinkat(self.fd()?, name, flags).map_err(|errno| Error::io(&path, "remove", errno))
    }

    /// Waits until its entries are on the disk.
    pub fn sync(&self) -> Result<()> {
        self.disk.may(&self.path, "sync")?;
        fsync(self.fd()?).map_err(|errno| Error::io(&self.path, "sync", errno))
    }
}

impl File {
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn fd(&self) -> Result<BorrowedFd<'_>> {
        if self.own.is_there() { Ok(self.own.descriptor.as_fd()) } else { Err(Error::Lost { path: self.path.clone() }) }
    }

    pub fn stat(&self) -> Result<Stat> {
        fstat(self.fd()?).map_err(|errno| Error::io(&self.path, "look at", errno))
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> Result<u64> {
        Ok(u64::try_from(self.stat()?.st_size).unwrap_or(0))
    }

    /// Whether it passes the page cache by.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Turns direct I/O on or off; a file system that does not have it refuses, and it stays off.
    fn set_direct(&self, wanted: bool) {
        let Ok(fd) = self.fd() else { return };
        let set = fcntl_getfl(fd).and_then(|mut flags| {
            flags.set(OFlags::DIRECT, wanted);
            fcntl_setfl(fd, flags)
        });
        if set.is_ok() {
            self.direct.store(wanted, Ordering::Relaxed);
        }
    }

    /// Writes all of `bytes` at a place.
    pub fn write(&self, mut bytes: &[u8], mut at: u64) -> Result<()> {
        self.disk.may(&self.path, "write")?;
        while !bytes.is_empty() {
            match pwrite(self.fd()?, bytes, at) {
                Ok(0) => return Err(Error::io(&self.path, "write", Errno::IO)),
                Ok(written) => {
                    bytes = &bytes[written..];
                    at += written as u64;
                }
                Err(Errno::INTR) => {}
                // It took the flag and does not keep to it, or wants a larger alignment, or the last write ended short.
                Err(Errno::INVAL) if self.is_direct() => self.set_direct(false),
                Err(errno) => return Err(Error::io(&self.path, "write", errno)),
            }
        }
        Ok(())
    }

    /// Reads all of `bytes` from a place.
    pub fn read(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        self.disk.may_look(&self.path, "read")?;
        let mut had = 0;
        while had < bytes.len() {
            match pread(self.fd()?, &mut bytes[had..], at + had as u64) {
                Ok(0) => {
                    let (ends, needed) = (at + had as u64, at + bytes.len() as u64);
                    return Err(Error::damaged(
                        &self.path,
                        format!("it ends at {ends}, expected {needed} bytes or more"),
                    ));
                }
                Ok(more) => had += more,
                Err(Errno::INTR) => {}
                Err(Errno::INVAL) if self.is_direct() => self.set_direct(false),
                Err(errno) => return Err(Error::io(&self.path, "read", errno)),
            }
        }
        Ok(())
    }

    /// Sets its length.
    pub fn truncate(&self, bytes: u64) -> Result<()> {
        ftruncate(self.fd()?, bytes).map_err(|errno| Error::io(&self.path, "truncate", errno))
    }

    /// Waits until its contents are on the disk.
    pub fn sync_data(&self) -> Result<()> {
        self.disk.may(&self.path, "sync")?;
        fdatasync(self.fd()?).map_err(|errno| Error::io(&self.path, "sync", errno))
    }

    /// Waits until its contents and all that is known of it are on the disk.
    pub fn sync(&self) -> Result<()> {
        self.disk.may(&self.path, "sync")?;
        fsync(self.fd()?).map_err(|errno| Error::io(&self.path, "sync", errno))
    }

    /// Takes the file's lock. `false`: another has it.
    pub fn try_lock(&self) -> Result<bool> {
        match flock(self.fd()?, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(Error::io(&self.path, "lock", errno)),
        }
    }

    /// Gives the file's lock back, for the copies of the descriptor in forked children too.
    pub fn unlock(&self) {
        if let Ok(fd) = self.fd() {
            // Closing does it otherwise.
            let _ = flock(fd, FlockOperation::Unlock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_descriptor_that_the_program_closed_and_used_again_is_the_programs() {
        let around = tempfile::tempdir().unwrap();
        let descriptor = std::fs::File::open(around.path()).unwrap().into();
        let folder = Folder::of(descriptor, around.path(), &Disk::default()).unwrap();
        let file = folder.create("ours", true).unwrap();
        let theirs = around.path().join("theirs");
        let other = std::fs::File::create(&theirs).unwrap();
        let number = file.own.descriptor.as_raw_fd();
        assert!(number >= FLOOR);
        // SAFETY: both are open descriptors; the program puts its own file under our number.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        let lost = Error::Lost { path: around.path().join("ours") };
        assert_eq!(file.write(&[1; 4096], 0), Err(lost.clone()));
        assert_eq!(file.sync_data(), Err(lost));
        drop(file);
        assert!(std::fs::read(&theirs).unwrap().is_empty());
        // SAFETY: put there above; it is open as long as nobody but us closed it.
        assert_eq!(unsafe { libc::close(number) }, 0, "it is the program's to close");
    }
}
