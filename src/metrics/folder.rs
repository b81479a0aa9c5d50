//! Where pages lie: a folder of the user's alone, that no other user can look into, replace or fill.
//!
//! `$XDG_RUNTIME_DIR/gpupool`, else `/run/gpupool`, else `/tmp/gpupool-UID`. Each is opened without following a link and
//! looked at by its descriptor, so what was looked at is what is used.

use crate::model::now;
use crate::process::{Identity, Life, stat};
use crate::reader::identify;
use rustix::fs::{
    Access, AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, accessat, chmodat, fchmod, fstat, lstat, mkdirat, openat,
    stat as stat_of, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::{OsStr, OsString};
use std::fmt::{Display, Formatter};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The folder's name where a folder of the user's or the system's is around it.
const NAME: &str = "gpupool";
/// Bits of a mode: what anybody else may do, and what lets anybody else change things.
const OTHERS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// The folders around ours.
#[derive(Clone, Debug)]
pub struct Roots {
    /// `$XDG_RUNTIME_DIR`.
    pub session: Option<PathBuf>,
    /// `/run`.
    pub run: PathBuf,
    /// `/tmp`.
    pub temporary: PathBuf,
    /// `/run/user`, where the sessions of all users are.
    pub sessions: PathBuf,
}

impl Roots {
    /// The folders of this machine. `session` is `XDG_RUNTIME_DIR`, which counts if it is an absolute path.
    pub fn new(session: Option<OsString>) -> Self {
        let session = session.map(PathBuf::from).filter(|path| path.is_absolute());
        Self { session, run: "/run".into(), temporary: "/tmp".into(), sessions: "/run/user".into() }
    }

    /// The folders that this user's pages may lie in, best first.
    pub(crate) fn own(&self) -> Vec<PathBuf> {
        let temporary = self.temporary.join(format!("{NAME}-{}", geteuid().as_raw()));
        self.session.iter().map(|root| root.join(NAME)).chain([self.run.join(NAME), temporary]).collect()
    }

    /// Whether this session is one by itself: somebody set its folder by hand, elsewhere than the system has those of all users. One whose folder
    /// no page can lie in is none, since its pages lie where those of whoever has no session do.
    pub(crate) fn is_apart(&self) -> bool {
        let by_hand = self.session.as_ref().filter(|session| !session.starts_with(&self.sessions));
        by_hand.is_some_and(|session| Self::is_of_use(session))
    }

    /// Whether [`Folder::own`] finds a folder of ours there or makes one, as far as that shows without opening or making anything.
    fn is_of_use(session: &Path) -> bool {
        let own = geteuid().as_raw();
        let Ok(around) = stat_of(session) else { return false };
        let is_closed = around.st_mode & OTHERS_WRITE == 0 || around.st_mode & STICKY != 0;
        let is_ours = around.st_uid == 0 || around.st_uid == own;
        if !FileType::from_raw_mode(around.st_mode).is_dir() || !is_closed || !is_ours {
            return false;
        }
        match lstat(session.join(NAME)) {
            Ok(folder) => {
                let is_folder = FileType::from_raw_mode(folder.st_mode).is_dir();
                is_folder && folder.st_uid == own && folder.st_mode & OTHERS_WRITE == 0
            }
            Err(_) => accessat(CWD, session, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).is_ok(),
        }
    }

    /// The folders whose files concern this user's processes in this session.
    pub(crate) fn concerned(&self) -> Vec<PathBuf> {
        let mut all = self.own();
        all.truncate(if self.is_apart() { 1 } else { all.len() });
        all
    }

    /// The folders that any user's pages may lie in.
    fn everybodys(&self) -> Vec<PathBuf> {
        let listed = |root: &Path, name: &dyn Fn(&OsStr) -> bool| {
            let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
            entries.filter(|entry| name(&entry.file_name())).map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let sessions = listed(&self.sessions, &|_| true).into_iter().map(|session| session.join(NAME));
        // Folders of other commands have names in place of the number.
        let is_a_users = |name: &OsStr| {
            let number = name.to_str().and_then(|name| name.strip_prefix(NAME)?.strip_prefix('-'));
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        };
        sessions.chain(listed(&self.temporary, &is_a_users)).collect()
    }
}

/// A folder that is not used, and why.
#[derive(Debug)]
pub struct Refused {
    /// Which.
    pub path: PathBuf,
    /// Why.
    pub why: Why,
}

/// Why a folder is not used.
#[derive(Debug)]
pub enum Why {
    /// It is not there, or it cannot be made or opened.
    Absent(Errno),
    /// It is a link, or no folder.
    NoFolder,
    /// It is this user's.
    OwnedBy(u32),
    /// Others may write to it; its mode.
    Writable(u32),
    /// Another user may replace it: the folder around it is theirs, or everybody may write there.
    Around(PathBuf),
}

impl Why {
    /// Whether somebody made it who was not to.
    pub fn is_suspicious(&self) -> bool {
        !matches!(self, Why::Absent(_))
    }
}

impl Display for Refused {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}: ", self.path.display())?;
        match &self.why {
            Why::Absent(error) => write!(out, "{error}"),
            Why::NoFolder => out.write_str("it is a link or no folder"),
            Why::OwnedBy(uid) => write!(out, "it is of user {uid}, and this process of user {}", geteuid().as_raw()),
            Why::Writable(mode) => write!(out, "others may write to it (mode {:o})", mode & 0o7777),
            Why::Around(around) => write!(out, "{} lets others replace it", around.display()),
        }
    }
}

/// Why none of these is used, in one line.
#[must_use]
pub fn in_words(refused: &[Refused]) -> String {
    refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A folder of one user's pages.
#[derive(Debug)]
pub struct Folder {
    descriptor: OwnedFd,
    path: PathBuf,
    owner: u32,
}

impl Folder {
    /// The folder for this process's page, made if it is not there; and those that were refused before it was found.
    ///
    /// # Errors
    /// There is none; why, of each.
    pub fn own(roots: &Roots) -> Result<(Self, Vec<Refused>), Vec<Refused>> {
        let mut refused = Vec::new();
        for path in roots.own() {
            match Self::open(&path, true) {
                Ok(folder) => return Ok((folder, refused)),
                Err(why) => refused.push(Refused { path, why }),
            }
        }
        Err(refused)
    }

    /// Every folder that this user may read pages in: for root, those of all users. Also those that are there and cannot be
    /// used.
    pub fn all(roots: &Roots) -> (Vec<Self>, Vec<Refused>) {
        let mut paths = roots.own();
        if geteuid().is_root() {
            paths.extend(roots.everybodys());
        }
        let (mut folders, mut refused) = (Vec::<Self>::new(), Vec::new());
        for path in paths {
            match Self::open(&path, false) {
                // The session's folder of root is among those of all users.
                Ok(folder) if folders.iter().any(|known| known.is_same(&folder)) => {}
                Ok(folder) => folders.push(folder),
                Err(why) if why.is_suspicious() => refused.push(Refused { path, why }),
                Err(_) => {}
            }
        }
        (folders, refused)
    }

    fn open(path: &Path, make: bool) -> Result<Self, Why> {
        let (Some(around), Some(name)) = (path.parent(), path.file_name()) else { return Err(Why::NoFolder) };
        let folder = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, around, folder | OFlags::PATH, Mode::empty()).map_err(Why::Absent)?;
        let Stat { st_uid: above, st_mode: around_mode, .. } = fstat(&root).map_err(Why::Absent)?;
        let is_open = around_mode & OTHERS_WRITE != 0 && around_mode & STICKY == 0;
        let own = geteuid().as_raw();
        if make {
            match mkdirat(&root, name, Mode::RWXU) {
                // A mask may have shut its maker out. By its name, so only where nobody can have put a link there.
                Ok(()) if !is_open && (above == 0 || above == own) => {
                    chmodat(&root, name, Mode::RWXU, AtFlags::empty()).map_err(Why::Absent)?;
                }
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(Why::Absent(error)),
            }
        }
        let descriptor = match openat(&root, name, folder | OFlags::NOFOLLOW, Mode::empty()) {
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(Why::NoFolder),
            answer => answer.map_err(Why::Absent)?,
        };
        let Stat { st_uid: owner, st_mode: mode, .. } = fstat(&descriptor).map_err(Why::Absent)?;
        // Only root reads what is others'.
        if owner != own && (make || own != 0) {
            return Err(Why::OwnedBy(owner));
        }
        if is_open || above != 0 && above != owner {
            return Err(Why::Around(around.to_owned()));
        }
        if mode & OTHERS_WRITE != 0 {
            return Err(Why::Writable(mode));
        }
        // Made by somebody who did not think of it, or under a mask that took too much.
        if make && (mode & OTHERS != 0 || mode & Mode::RWXU.as_raw_mode() != Mode::RWXU.as_raw_mode()) {
            fchmod(&descriptor, Mode::RWXU).map_err(Why::Absent)?;
        }
        Ok(Self { descriptor, path: path.to_owned(), owner })
    }

    fn is_same(&self, other: &Self) -> bool {
        let identity = |folder: &Self| fstat(&folder.descriptor).map(|stat| (stat.st_dev, stat.st_ino));
        identity(self).is_ok_and(|own| identity(other).is_ok_and(|other| own == other))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// The open folder, for files of other kinds in it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// What the page of a process is called.
    pub(crate) fn name_of(&self, identity: &Identity) -> String {
        format!("{}-{}.page", identity.pid, identity.started)
    }

    /// The folder that a page lies in, for files beside it: one that a look at all folders has found.
    ///
    /// # Errors
    /// It is gone, or not what it was.
    pub fn around(page: &Path) -> Result<Self, Refused> {
        let path = page.parent().unwrap_or(page).to_owned();
        Self::open(&path, false).map_err(|why| Refused { path, why })
    }

    /// Opens a page to ring there ([`crate::ring`]): a regular file of the folder's owner.
    ///
    /// # Errors
    /// It is something else, gone, or may not be written.
    pub fn page_to_ring(&self, name: &OsStr) -> std::io::Result<OwnedFd> {
        self.open_page(name, OFlags::RDWR)
    }

    /// The files that are called like pages.
    pub fn pages(&self) -> Vec<Entry> {
        self.names().into_iter().filter_map(|name| Entry::of(name).filter(|entry| !entry.unfinished)).collect()
    }

    fn names(&self) -> Vec<String> {
        self.names_of(FileType::RegularFile)
    }

    fn names_of(&self, kind: FileType) -> Vec<String> {
        let entries = Dir::read_from(&self.descriptor).into_iter().flatten().flatten();
        // Not every file system tells; then opening does.
        entries
            .filter(|entry| entry.file_type() == kind || entry.file_type() == FileType::Unknown)
            .filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned))
            .collect()
    }

    /// Opens a page for reading: a regular file of the folder's owner.
    ///
    /// # Errors
    /// It is something else, or gone.
    pub fn page(&self, entry: &Entry) -> std::io::Result<OwnedFd> {
        self.open_page(OsStr::new(&entry.name), OFlags::RDONLY)
    }

    fn open_page(&self, name: &OsStr, access: OFlags) -> std::io::Result<OwnedFd> {
        // What is no file may be a pipe, whose opening would wait.
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&self.descriptor, name, flags, Mode::empty())?;
        let status = fstat(&file)?;
        let is_file = FileType::from_raw_mode(status.st_mode).is_file();
        if is_file && status.st_uid == self.owner { Ok(file) } else { Err(std::io::ErrorKind::PermissionDenied.into()) }
    }

    /// Removes the pages of processes that are gone, and those that such processes had begun; how many. Others' folders are
    /// theirs to clean.
    pub fn clean(&self) -> usize {
        if self.owner != geteuid().as_raw() {
            return 0;
        }
        self.names_of(FileType::Socket).iter().filter(|name| is_nobodys_door(name)).for_each(|name| {
            let _ = unlinkat(&self.descriptor, name.as_str(), AtFlags::empty());
        });
        let stale = self.names().into_iter().filter_map(Entry::of).filter(|entry| self.is_stale(entry));
        stale.filter(|entry| unlinkat(&self.descriptor, &entry.name, AtFlags::empty()).is_ok()).count()
    }

    fn is_stale(&self, entry: &Entry) -> bool {
        // Mostly true, and asked without opening the page. A process of this number and start elsewhere is none of ours, but
        // its page is then not removed either.
        if stat(entry.pid).is_some_and(|stat| stat.started == entry.started && !matches!(stat.state, b'Z' | b'X')) {
            return false;
        }
        let Ok(file) = self.page(entry) else { return false };
        match identify(&file) {
            Ok(identity) => match identity.life() {
                Life::Elsewhere => identity.is_deserted(),
                life => life.is_over(),
            },
            // It ended before it said whose it is; or it is in another PID namespace, where its number is another one, and is
            // just about to say so, which takes no minute.
            Err(_) => entry.unfinished && is_old(&file),
        }
    }
}

/// Whether a file by which a process was to be asked something (`PID-START.call`) is left of one that is gone.
fn is_nobodys_door(name: &str) -> bool {
    let known = name.strip_suffix(".call").and_then(|stem| Entry::of(format!("{stem}.page")));
    known.is_some_and(|entry| stat(entry.pid).is_none_or(|stat| stat.started != entry.started))
}

/// Whether nobody has written to a file for a minute.
fn is_old(file: &OwnedFd) -> bool {
    let now = (now() / 1_000_000) as i64;
    fstat(file).is_ok_and(|status| now.saturating_sub(status.st_mtime) > 60)
}

/// A file that is called like a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// `PID-START.page`.
    pub name: String,
    /// The process's number.
    pub pid: u32,
    /// When it started, in clock ticks since the boot.
    pub started: u64,
    /// It has no name yet: `.PID-START.page.new`.
    unfinished: bool,
}

impl Entry {
    fn of(name: String) -> Option<Self> {
        let unfinished = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".new"));
        let (pid, started) = unfinished.unwrap_or(&name).strip_suffix(".page")?.split_once('-')?;
        let (pid, started) = (pid.parse().ok()?, started.parse().ok()?);
        Some(Self { pid, started, unfinished: unfinished.is_some(), name })
    }
}
