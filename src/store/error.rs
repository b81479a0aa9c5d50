//! What can go wrong, each as one line that names the path.

use std::fmt::{Display, Formatter};
use std::path::{Path, PathBuf};

use gpupool_config::format_size;
use rustix::io::Errno;

/// Why something was not stored or not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The system refused an operation.
    Io {
        /// On what.
        path: PathBuf,
        /// What was to be done: "write", "create", "rename" and so on.
        doing: &'static str,
        /// Its reason.
        errno: Errno,
    },
    /// The file system has too little room for what is about to be written.
    NoRoom {
        /// The folder.
        path: PathBuf,
        /// Bytes that may be needed.
        needed: u64,
        /// Bytes that this user may still take.
        free: u64,
    },
    /// The folder or a file in it is not one that may be trusted.
    Refused {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Somebody else writes into the folder, or keeps what lies in it.
    Busy {
        /// The folder.
        path: PathBuf,
        /// The process that said it does; `None` where it has not said so yet.
        pid: Option<u32>,
    },
    /// A newer gpupool wrote it.
    Newer {
        /// The manifest.
        path: PathBuf,
        /// Its format's version.
        version: u32,
        /// The newest that is read here.
        newest: u32,
    },
    /// There is no such generation, or none at all.
    Absent {
        /// The folder, or the generation in it.
        path: PathBuf,
    },
    /// The folder itself is not there.
    NoFolder {
        /// Which.
        path: PathBuf,
    },
    /// A file is not what was written.
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Bytes of a block are not what was written.
    Part {
        /// The file that they are stored in.
        path: PathBuf,
        /// The block's id.
        block: u64,
        /// Its address in the program.
        address: u64,
        /// Where in the block they begin, in bytes.
        offset: u64,
        /// What was expected there.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The program closed a descriptor of ours, and its number may lead to a file of the program's.
    Lost {
        /// What it led to.
        path: PathBuf,
    },
    /// The caller asks for what cannot be: an unknown block, bytes outside of one, a block that was not handed over whole.
    Misuse {
        /// What is wrong.
        what: String,
    },
}

impl Error {
    pub(crate) fn io(path: &Path, doing: &'static str, errno: Errno) -> Self {
        Self::Io { path: path.to_owned(), doing, errno }
    }

    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), what: what.into() }
    }

    pub(crate) fn refused(path: &Path, why: impl Into<String>) -> Self {
        Self::Refused { path: path.to_owned(), why: why.into() }
    }

    pub(crate) fn misuse(what: impl Into<String>) -> Self {
        Self::Misuse { what: what.into() }
    }

    /// Whether there is too little room: seen before anything was written, or met on the way.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::NoRoom { .. } | Self::Io { errno: Errno::NOSPC | Errno::DQUOT, .. })
    }
}

impl Display for Error {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io { path, doing, errno } => {
                write!(out, "{}: cannot {doing}: {errno}", path.display())?;
                if self.is_full() { out.write_str("; make room there or choose another folder") } else { Ok(()) }
            }
            Self::NoRoom { path, needed, free } => write!(
                out,
                "{}: {} may be needed, and {} are free; make room there or choose another folder",
                path.display(),
                format_size(*needed),
                format_size(*free)
            ),
            Self::Refused { path, why } => write!(out, "{}: {why}", path.display()),
            Self::Busy { path, pid: Some(pid) } => {
                write!(out, "{}: process {pid} uses this folder; choose another one", path.display())
            }
            Self::Busy { path, pid: None } => {
                write!(out, "{}: another process uses this folder; choose another one", path.display())
            }
            Self::Newer { path, version, newest } => write!(
                out,
                "{}: its format is version {version}, and this gpupool reads up to {newest}; use the gpupool that wrote it",
                path.display()
            ),
            Self::Absent { path } => write!(out, "{}: no generation is stored there", path.display()),
            Self::NoFolder { path } => write!(out, "{}: there is no such folder", path.display()),
            Self::Damaged { path, what } => write!(out, "{}: damaged: {what}", path.display()),
            Self::Part { path, block, address, offset, expected, found } => write!(
                out,
                "{}: block {block} at {address:#x}, offset {offset}: expected {expected}, found {found}",
                path.display()
            ),
            Self::Lost { path } => {
                write!(out, "{}: the program closed the descriptor that led to it", path.display())
            }
            Self::Misuse { what } => out.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

/// Of everything here.
pub type Result<T> = std::result::Result<T, Error>;
