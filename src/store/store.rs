//! The folder that generations lie in: whose it is, which there are, and who may change it.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, access, chmodat, fstat, fstatvfs, mkdirat, openat, stat};
use rustix::io::{Errno, pread};
use rustix::process::geteuid;

use crate::disk::{Disk, File, Folder};
use crate::error::{Error, Result};
use crate::manifest::{HEAD, Manifest, hash};
use crate::signals;

/// The manifest's name in a generation's folder.
const MANIFEST: &str = "manifest";
/// The name of the file whose lock says that somebody writes here.
const LOCK: &str = "lock";
/// The longest manifest that is read, in bytes: that of a hundred TB.
const LONGEST: u64 = 4 << 30;
/// Bits of a mode: what lets others change things, but what is theirs in a folder where everybody may write.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// An open folder of generations.
#[derive(Debug)]
pub struct Store {
    pub folder: Folder,
}

/// Holds the folder against other writers until it is dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
    process: u32,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The child of a fork has a copy, and the lock stays its parent's.
        if self.process == std::process::id() {
            // So that nobody is told of a process that has gone on.
            let _ = self.file.truncate(0);
            self.file.unlock();
        }
    }
}

/// What is in a file that tells of others.
pub fn read_whole(file: &File) -> Result<Vec<u8>> {
    let bytes = file.bytes()?;
    if bytes > LONGEST {
        return Err(Error::damaged(file.path(), format!("{bytes} bytes, which no manifest has")));
    }
    let mut text = Vec::new();
    let bytes = usize::try_from(bytes).unwrap_or(0);
    text.try_reserve_exact(bytes).map_err(|_| Error::io(file.path(), "read", Errno::NOMEM))?;
    text.resize(bytes, 0);
    file.read(&mut text, 0)?;
    Ok(text)
}

/// Whether this is what is in a file first.
pub fn begins_with(file: &File, head: &str) -> Result<bool> {
    let mut found = vec![0; head.len()];
    if file.bytes()? < head.len() as u64 {
        return Ok(false);
    }
    file.read(&mut found, 0)?;
    Ok(found == head.as_bytes())
}

/// What a generation's folder is called.
pub fn name_of(generation: u64) -> String {
    format!("gen-{generation:06}")
}

/// Before it is whole.
pub fn unfinished_name_of(generation: u64) -> String {
    format!(".{}.new", name_of(generation))
}

/// While it is being removed.
fn leaving_name_of(generation: u64) -> String {
    format!(".{}.gone", name_of(generation))
}

/// More images than anybody writes: a folder with a higher number is somebody else's, and would leave none for the next image.
const MOST: u64 = 1_000_000_000_000;

/// Of a folder that is called so.
pub fn number_of(name: &str) -> Option<u64> {
    let number = name.strip_prefix("gen-")?.parse().ok()?;
    (name_of(number) == name && number < MOST).then_some(number)
}

fn is_stale(name: &str) -> bool {
    let name = name.strip_prefix('.');
    let name = name.and_then(|name| name.strip_suffix(".new").or_else(|| name.strip_suffix(".gone")));
    name.is_some_and(|name| number_of(name).is_some())
}

/// Whether a folder is an image: a generation with all that it has, whatever it is called.
pub fn is_image(path: &Path) -> bool {
    openat(CWD, path, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).is_ok_and(is_generation)
}

fn is_generation(folder: impl AsFd) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = openat(folder, MANIFEST, flags, Mode::empty()) else { return false };
    let mut head = [0; HEAD.len()];
    pread(file, &mut head[..], 0).is_ok_and(|bytes| bytes == head.len() && head == *HEAD.as_bytes())
}

/// What is written into an image goes with it, and whoever removes older images meets a folder that none of them has.
fn inside_an_image(path: &Path, image: &Path) -> Error {
    let image = image.display();
    Error::refused(
        path,
        format!(
            "{image} is an image itself, and would have others inside it; name the folder around it, or another one"
        ),
    )
}

/// Whether a folder could be one of [`own_folder`], which is not made for that.
///
/// # Errors
/// Why it could not.
pub fn may_be_own(path: &Path) -> Result<()> {
    let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let may_write = |folder: &Path, doing| {
        access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|errno| Error::io(path, doing, errno))
    };
    match Store::open(path, false, &Disk::default()) {
        Err(Error::NoFolder { .. }) => {
            let around = path.parent().unwrap_or(path);
            if !around.is_dir() {
                return Err(no_folder_around(path, around));
            }
            if is_image(around) {
                return Err(inside_an_image(path, around));
            }
            may_write(around, "make")
        }
        Err(other) => Err(other),
        Ok(store) => {
            let (owner, own) = (store.folder.stat()?.st_uid, geteuid().as_raw());
            if owner != own {
                return Err(of_another(path, owner, own));
            }
            if is_image(path) {
                return Err(inside_an_image(path, path));
            }
            may_write(path, "write to")
        }
    }
}

/// Only the last one is made: a slip in a path above is no wish for a tree of folders.
fn no_folder_around(path: &Path, around: &Path) -> Error {
    let above = around.display();
    Error::refused(path, format!("the folder around it, {above}, has to be there and is not; make it first"))
}

fn of_another(path: &Path, owner: u32, own: u32) -> Error {
    Error::refused(path, format!("it is of user {owner}, and this process of user {own}"))
}

/// Makes a folder, if it is not there, for others to lie in that are written to, and looks whether it is one that such may lie in:
/// the same rule as for those themselves, since whoever replaces it replaces them.
///
/// # Errors
/// It cannot be made, is a link, another user's, others may change it, or it is a generation.
pub fn own_folder(path: &Path) -> Result<()> {
    Store::open(path, true, &Disk::default()).map(drop)
}

impl Store {
    /// Opens the folder; with `make` for writing, and then it is made if it is not there.
    ///
    /// # Errors
    /// It is not there, a link, another user's, or others may change it. Root may read everybody's.
    pub fn open(path: &Path, make: bool, disk: &Disk) -> Result<Self> {
        let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let failed = |errno| Error::io(path, "open", errno);
        // What a path that ends in `..` names has a name of its own; links on the way count then, which nobody can put there behind the look at it.
        let ends_above = matches!(path.components().next_back(), Some(std::path::Component::ParentDir));
        let path =
            &if ends_above { std::fs::canonicalize(path).unwrap_or_else(|_| path.clone()) } else { path.clone() };
        let (Some(around), Some(name)) = (path.parent(), path.file_name()) else {
            let what = if ends_above {
                "it ends in .., and there is no such folder"
            } else {
                "it is the root folder; choose one below it"
            };
            return Err(Error::refused(path, what));
        };
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = match openat(CWD, around, flags | OFlags::PATH, Mode::empty()) {
            Err(Errno::NOENT) if !make => return Err(Error::NoFolder { path: path.clone() }),
            Err(Errno::NOENT) => return Err(no_folder_around(path, around)),
            answer => answer.map_err(failed)?,
        };
        if make && is_generation(&root) {
            return Err(inside_an_image(path, around));
        }
        let above = fstat(&root).map_err(failed)?;
        let own = geteuid().as_raw();
        let is_open = above.st_mode & OTHERS_WRITE != 0 && above.st_mode & STICKY == 0;
        let mut made = false;
        if make {
            match mkdirat(&root, name, Mode::RWXU) {
                // A mask may have shut its maker out. By its name, so only where nobody can have put a link there.
                Ok(()) => {
                    made = true;
                    if !is_open && (above.st_uid == 0 || above.st_uid == own) {
                        chmodat(&root, name, Mode::RWXU, AtFlags::empty())
                            .map_err(|errno| Error::io(path, "set the mode of", errno))?;
                    }
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(Error::io(path, "make", errno)),
            }
        }
        let descriptor = match openat(&root, name, flags | OFlags::NOFOLLOW, Mode::empty()) {
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(Error::refused(path, "it is a link or no folder")),
            Err(Errno::NOENT) => return Err(Error::NoFolder { path: path.clone() }),
            answer => answer.map_err(failed)?,
        };
        let folder = Folder::of(descriptor, path, disk)?;
        let found = folder.stat()?;
        if found.st_uid != own && (make || own != 0) {
            return Err(of_another(path, found.st_uid, own));
        }
        if make && is_generation(folder.descriptor()?) {
            return Err(inside_an_image(path, path));
        }
        if is_open || above.st_uid != 0 && above.st_uid != found.st_uid {
            return Err(Error::refused(
                path,
                format!(
                    "{} lets others replace it; choose a folder inside one that its owner alone may write to (mode 700)",
                    around.display()
                ),
            ));
        }
        if found.st_mode & OTHERS_WRITE != 0 {
            let mode = found.st_mode & 0o7777;
            // A folder that is meant for everybody, as /tmp is, must stay so.
            let remedy = if mode & STICKY != 0 { "name a folder of your own in it" } else { "chmod 700 it" };
            return Err(Error::refused(path, format!("others may write to it (mode {mode:o}); {remedy}")));
        }
        if made {
            // It is on the disk before anything in it is.
            let around = openat(CWD, around, flags, Mode::empty()).map_err(failed)?;
            Folder::of(around, path.parent().unwrap_or(path), disk)?.sync()?;
        }
        Ok(Self { folder })
    }

    /// Takes the folder for writing.
    ///
    /// # Errors
    /// [`Error::Busy`].
    pub fn lock(&self) -> Result<Lock> {
        let file = self.folder.lock_file(LOCK)?;
        if !file.try_lock()? {
            let mut text = vec![0; usize::try_from(file.bytes()?.min(16)).unwrap_or(0)];
            let pid = file.read(&mut text, 0).ok().and_then(|()| String::from_utf8(text).ok()?.trim().parse().ok());
            return Err(Error::Busy { path: self.folder.path().to_owned(), pid });
        }
        let process = std::process::id();
        let lock = Lock { file, process };
        lock.file.truncate(0)?;
        let said = signals::aside(|| lock.file.write(format!("{process}\n").as_bytes(), 0));
        said.unwrap_or_else(|| Err(Error::io(lock.file.path(), "start a thread to write", Errno::AGAIN)))?;
        Ok(lock)
    }

    /// Removes what a writer left that did not get to its end, or a removal. Only for who has the lock.
    ///
    /// # Errors
    /// Some of it cannot be removed; the rest is gone. That keeps nobody from writing: what is there takes none of the names of [`Store::next`].
    pub fn clean(&self) -> Result<()> {
        let names = self.folder.names()?;
        let stale = names.iter().filter(|name| is_stale(name));
        let stays = stale.fold(None, |stays: Option<Error>, name| stays.or(self.folder.remove_folder(name).err()));
        stays.map_or(Ok(()), Err)
    }

    /// The number of the generation that is written next: higher than all there are, and its names are nobody's.
    pub fn next(&self) -> Result<u64> {
        let names = self.folder.names()?;
        let newest = self.generations()?.into_iter().find(|generation| self.is_own(*generation).unwrap_or(true));
        let is_free = |number: &u64| {
            let own = [name_of(*number), unfinished_name_of(*number), leaving_name_of(*number)];
            !names.iter().any(|name| own.contains(name))
        };
        let first = newest.map_or(1, |newest| newest.saturating_add(1));
        (first..MOST).find(is_free).ok_or_else(|| Error::refused(self.folder.path(), "it has no number for one more"))
    }

    /// Whether what is called as a generation is one, and not a file, a link or a folder of somebody else's.
    ///
    /// # Errors
    /// It cannot be looked at, or what it says of itself is damaged from its first letter on.
    fn is_own(&self, generation: u64) -> Result<bool> {
        let folder = match self.folder.folder(&name_of(generation)) {
            Err(Error::Refused { .. } | Error::Io { errno: Errno::NOENT, .. }) => return Ok(false),
            answer => answer?,
        };
        let file = match folder.open(MANIFEST, false) {
            Err(Error::Refused { .. } | Error::Io { errno: Errno::NOENT, .. }) => return Ok(false),
            answer => answer?,
        };
        if begins_with(&file, HEAD)? {
            return Ok(true);
        }
        Err(Error::refused(file.path(), "gpupool wrote no such manifest, so the folder around it stays as it is"))
    }

    /// The numbers of all generations, newest first, whether they are whole or not.
    pub fn generations(&self) -> Result<Vec<u64>> {
        let mut numbers: Vec<u64> = self.folder.names()?.iter().filter_map(|name| number_of(name)).collect();
        numbers.sort_unstable_by(|a, b| b.cmp(a));
        Ok(numbers)
    }

    /// A generation's folder and what it says of itself.
    pub fn manifest(&self, generation: u64) -> Result<(Folder, Manifest)> {
        self.sealed(generation).map(|(folder, manifest, _)| (folder, manifest))
    }

    /// The same, with what only this generation has of all that were ever written: the hash of all that it says.
    pub fn sealed(&self, generation: u64) -> Result<(Folder, Manifest, u64)> {
        let (folder, text) = self.manifest_text(generation)?;
        let path = folder.path().join(MANIFEST);
        let manifest = Manifest::decode(&text, &path)?;
        if manifest.generation != generation {
            let what = format!("it is of generation {}, expected {generation}", manifest.generation);
            return Err(Error::damaged(&path, what));
        }
        Ok((folder, manifest, hash(&text)))
    }

    /// The same as it is written.
    pub fn manifest_text(&self, generation: u64) -> Result<(Folder, Vec<u8>)> {
        let folder = match self.folder.folder(&name_of(generation)) {
            Err(Error::Io { path, errno: Errno::NOENT, .. }) => return Err(Error::Absent { path }),
            answer => answer?,
        };
        let file = folder.open(MANIFEST, false)?;
        // What is none is not read whole to find that out.
        let text = if begins_with(&file, HEAD)? { read_whole(&file)? } else { vec![0; HEAD.len()] };
        Ok((folder, text))
    }

    /// Writes what makes a generation whole, and gives it its name; the hash that [`Store::sealed`] will have.
    pub fn publish(&self, unfinished: &Folder, manifest: &Manifest) -> Result<u64> {
        let file = unfinished.create(MANIFEST, false)?;
        let text = manifest.encode()?;
        file.write(&text, 0)?;
        file.sync()?;
        unfinished.sync()?;
        // A folder that was moved away, or removed with all that is in it, is still written to by its descriptor.
        let path = self.folder.path();
        let there = stat(path).map_err(|errno| Error::io(path, "find", errno))?;
        if (there.st_dev, there.st_ino) != self.folder.identity() {
            return Err(Error::refused(path, "another folder took its place meanwhile"));
        }
        let (from, to) = (unfinished_name_of(manifest.generation), name_of(manifest.generation));
        self.folder.rename(&from, &to)?;
        self.folder.sync().inspect_err(|_| {
            // Nobody may find what its writer was told is not there.
            let _ = self.folder.rename(&to, &from);
        })?;
        Ok(hash(&text))
    }

    /// Removes a generation. Only for who has the lock.
    ///
    /// # Errors
    /// Something in it cannot be removed. What is seen before leaves all of it as it is.
    pub fn remove(&self, generation: u64) -> Result<()> {
        let folder = match self.folder.folder(&name_of(generation)) {
            Err(Error::Io { path, errno: Errno::NOENT, .. }) => return Err(Error::Absent { path }),
            answer => answer?,
        };
        if let Some(name) = folder.folder_in()? {
            let path = folder.path().join(name);
            return Err(Error::refused(&path, "no image has a folder in it, so the image around it stays as it is"));
        }
        let leaving = leaving_name_of(generation);
        // First of all it is none any more: half of one is never seen.
        self.folder.rename(&name_of(generation), &leaving)?;
        self.folder.remove_folder(&leaving)
    }

    /// The same, if it is one.
    pub fn remove_own(&self, generation: u64) -> Result<()> {
        if self.is_own(generation)? { self.remove(generation) } else { Ok(()) }
    }

    /// As [`Store::remove`], but that what its files take is given back by [`Store::remove_rest`], and when the answer is dropped.
    pub fn unname(&self, generation: u64) -> Result<Vec<File>> {
        let leaving = leaving_name_of(generation);
        self.folder.rename(&name_of(generation), &leaving)?;
        self.folder.unname_folder(&leaving)
    }

    /// Removes what a file system kept of such a generation.
    pub fn remove_rest(&self, generation: u64) -> Result<()> {
        match self.folder.remove_folder(&leaving_name_of(generation)) {
            Err(Error::Io { errno: Errno::NOENT, .. }) => Ok(()),
            answer => answer,
        }
    }

    /// Removes all but the newest `keep` that are whole. Only for who has the lock.
    ///
    /// # Errors
    /// One cannot be removed, or is of a newer gpupool, which alone knows what is in it: the others are removed all the same then.
    pub fn keep(&self, keep: usize) -> Result<()> {
        let mut whole = 0;
        let mut stays = None;
        for generation in self.generations()? {
            let why = match self.manifest(generation) {
                Err(error @ Error::Newer { .. }) => (whole >= keep).then_some(error),
                _ if whole >= keep => self.remove_own(generation).err(),
                told => {
                    whole += usize::from(told.is_ok());
                    None
                }
            };
            stays = stays.or(why);
        }
        stays.map_or(Ok(()), Err)
    }

    /// Whether `needed` bytes fit.
    ///
    /// # Errors
    /// [`Error::NoRoom`].
    pub fn has_room(&self, needed: u64) -> Result<()> {
        let path = self.folder.path();
        let room = fstatvfs(self.folder.descriptor()?).map_err(|errno| Error::io(path, "look at", errno))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if free >= needed { Ok(()) } else { Err(Error::NoRoom { path: path.to_owned(), needed, free }) }
    }
}
