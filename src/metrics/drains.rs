//! Which GPUs are drained (`gpupool drain`): files beside the pages, one for each GPU, which say so to every process of their user, also
//! to those that start later.
//!
//! `GPU-UUID.drained` in a folder of pages concerns the folder's user. Root has a folder more, which every process of the machine
//! heeds: `/run/gpupool.drained`. A file counts if it is a regular one of the folder's owner or of root, and the folder one that nobody
//! else can write to; its contents mean nothing.

use crate::folder::{Folder, Refused, Roots, Why};
use crate::model::uuid_text;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fchmod, fstat, lstat, mkdirat, openat, statat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// UUID of a GPU.
pub type Uuid = [u8; 16];

/// The folder in `/run` that root alone writes to.
const MACHINE: &str = "gpupool.drained";
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

fn file_of(gpu: &Uuid) -> String {
    format!("{}.drained", uuid_text(gpu))
}

/// What is said of a path without opening it: a process of somebody else's may close any descriptor, and its next file gets the number.
fn look(path: &Path) -> Option<Stat> {
    lstat(path).ok()
}

/// Whether this is a folder of this user's, or of root's where `owner` is that, in which nobody else can put anything.
fn is_trusted(folder: &Path, owner: u32) -> bool {
    let Some(around) = folder.parent().and_then(look) else { return false };
    let is_closed = around.st_mode & OTHERS_WRITE == 0 || around.st_mode & STICKY != 0;
    let is_ours = |status: Stat| {
        FileType::from_raw_mode(status.st_mode).is_dir() && status.st_uid == owner && status.st_mode & OTHERS_WRITE == 0
    };
    is_closed && (around.st_uid == 0 || around.st_uid == owner) && look(folder).is_some_and(is_ours)
}

/// Whether the file is there and says something.
fn is_said(folder: &Path, owner: u32, gpu: &Uuid) -> bool {
    look(&folder.join(file_of(gpu))).is_some_and(|status| {
        FileType::from_raw_mode(status.st_mode).is_file() && (status.st_uid == owner || status.st_uid == 0)
    })
}

/// The machine's folder; only if it is root's.
fn of_machine(roots: &Roots, make: bool) -> Result<OwnedFd, Why> {
    let run = openat(CWD, &roots.run, OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::PATH, Mode::empty())
        .map_err(Why::Absent)?;
    if make {
        match mkdirat(&run, MACHINE, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(Why::Absent(error)),
        }
    }
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let folder = openat(&run, MACHINE, flags, Mode::empty()).map_err(|error| match error {
        Errno::LOOP | Errno::NOTDIR => Why::NoFolder,
        error => Why::Absent(error),
    })?;
    let Stat { st_uid, st_mode, .. } = fstat(&folder).map_err(Why::Absent)?;
    if st_uid != 0 {
        return Err(Why::OwnedBy(st_uid));
    }
    if st_mode & OTHERS_WRITE != 0 {
        return Err(Why::Writable(st_mode));
    }
    if make {
        // A mask may have shut everybody out, who are to see it.
        fchmod(&folder, Mode::from_raw_mode(0o755)).map_err(Why::Absent)?;
    }
    Ok(folder)
}

/// Those of these GPUs that are drained, for the processes of this user; `page`: the folder of this process's page, wherever that is.
/// Opens nothing.
pub fn among(gpus: &[Uuid], roots: &Roots, page: Option<&Path>) -> Vec<Uuid> {
    let folders = heeded(roots, page);
    let is_drained = |gpu: &&Uuid| folders.iter().any(|(folder, owner)| is_said(folder, *owner, gpu));
    gpus.iter().filter(is_drained).copied().collect()
}

/// The folders that concern the processes of this user and that nobody else can write to, each with its owner.
fn heeded(roots: &Roots, page: Option<&Path>) -> Vec<(PathBuf, u32)> {
    let own = geteuid().as_raw();
    let folders = roots.concerned().into_iter().chain(page.map(Path::to_owned)).map(|folder| (folder, own));
    let folders = folders.chain([(roots.run.join(MACHINE), 0)]);
    folders.filter(|(folder, owner)| is_trusted(folder, *owner)).collect()
}

/// Whether any GPU at all may be drained for the processes of this user: a look before somebody is asked which GPUs there are, which may take
/// long.
pub fn any(roots: &Roots) -> bool {
    let names =
        |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    heeded(roots, None)
        .iter()
        .any(|(folder, _)| names(folder).any(|name| name.as_encoded_bytes().ends_with(b".drained")))
}

/// What has come of [`say`].
#[derive(Debug, Default)]
pub struct Said {
    /// The folders that say so now.
    pub folders: Vec<PathBuf>,
    /// Those where that failed.
    pub refused: Vec<Refused>,
    /// Whether any of them said otherwise before.
    pub is_news: bool,
}

/// Says in every folder that this user may write to, for root in those of all users and the machine's, that a GPU is drained, or that it
/// is no more. What has come of that.
///
/// A session whose folder was set by hand (`XDG_RUNTIME_DIR` elsewhere than in `/run/user`) is one by itself: what is said there concerns
/// nobody else, nor does it concern the session what others say, unless it is root for the whole machine.
pub fn say(gpu: &Uuid, drained: bool, roots: &Roots) -> Said {
    let Said { mut folders, mut refused, mut is_news } = Said::default();
    // The folder of those who have no session, too.
    let without = Roots { session: None, ..roots.clone() };
    for roots in [roots, &without].into_iter().take(if roots.is_apart() { 1 } else { 2 }).filter(|_| drained) {
        match Folder::own(roots) {
            // What is apart has no other folder, and its pages lie elsewhere then.
            Ok((_, before)) if roots.is_apart() => refused.extend(before),
            Ok(_) => {}
            Err(all) => refused.extend(all),
        }
    }
    let concerned = roots.concerned();
    let is_concerned = |folder: &Folder| !roots.is_apart() || concerned.iter().any(|path| path == folder.path());
    for folder in Folder::all(roots).0.into_iter().filter(is_concerned) {
        match write(folder.fd(), gpu, drained) {
            Ok(news) => {
                is_news |= news;
                folders.push(folder.path().to_owned());
            }
            Err(error) => refused.push(Refused { path: folder.path().to_owned(), why: Why::Absent(error) }),
        }
    }
    if geteuid().is_root() && !roots.is_apart() {
        let path = || roots.run.join(MACHINE);
        match of_machine(roots, drained) {
            Ok(folder) => match write(folder.as_fd(), gpu, drained) {
                Ok(news) => is_news |= news,
                Err(error) => refused.push(Refused { path: path(), why: Why::Absent(error) }),
            },
            Err(Why::Absent(Errno::NOENT)) if !drained => {}
            Err(why) => refused.push(Refused { path: path(), why }),
        }
    }
    Said { folders, refused, is_news }
}

/// Where it is still said that a GPU is drained, which this user cannot unsay.
pub fn still_said(gpu: &Uuid, roots: &Roots) -> Option<PathBuf> {
    let folder = roots.run.join(MACHINE);
    (is_trusted(&folder, 0) && is_said(&folder, 0, gpu)).then(|| folder.join(file_of(gpu)))
}

/// Whether it was not so before.
fn write(folder: BorrowedFd<'_>, gpu: &Uuid, drained: bool) -> Result<bool, Errno> {
    let name = file_of(gpu);
    if !drained {
        return match unlinkat(folder, &name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(false),
            answer => answer.map(|()| true),
        };
    }
    let is_there = statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(folder, &name, flags, Mode::from_raw_mode(0o644)).map(|_| !is_there)
}
