//! A temporary folder that goes with the command: at its end, or, if it was killed, when the next one starts.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::failure::{Failure, complain};

/// A file in the folder that its owner holds a lock on. Without one the folder is not ours to remove.
const IN_USE: &str = ".in-use";
/// Where else folders may be made, if the temporary folder's name will not do.
const OTHERS: [&str; 2] = ["/tmp", "/var/tmp"];

/// Removed when it is dropped.
pub struct Folder {
    folder: TempDir,
    /// The lock ends with the process, however it ends.
    _lock: Option<File>,
}

impl Folder {
    /// A folder whose name begins with `prefix` and whose path has none of the bytes in `without`. Removes those with the
    /// same prefix that a killed command left behind.
    ///
    /// # Errors
    /// No folder can be made; says for what and where.
    pub fn create(prefix: &str, purpose: &str, without: &[u8]) -> Result<Folder, Failure> {
        // An empty TMPDIR is none.
        let temporary = Some(std::env::temp_dir()).filter(|folder| !folder.as_os_str().is_empty());
        let temporary = temporary.unwrap_or_else(|| OTHERS[0].into());
        let failed = |reason: String| {
            let temporary = temporary.display();
            Failure::usage(format!(
                "cannot make a folder for {purpose} in {temporary}: {reason}; set TMPDIR to a folder that this user may write"
            ))
        };
        // Absolute and without links, as the program may change its folder.
        let given = temporary.canonicalize().map_err(|error| failed(error.to_string()))?;
        let suits = |path: &Path| !path.as_os_str().as_bytes().iter().any(|byte| without.contains(byte));
        let bases = std::iter::once(given).chain(OTHERS.map(PathBuf::from)).filter(|base| suits(base));
        let mut last: Option<io::Error> = None;
        for base in bases {
            remove_stale(&base, prefix);
            match make(&base, prefix) {
                Ok(folder) => {
                    if let Some(error) = last {
                        complain(&format!(
                            "warning: no folder for {purpose} can be made in {}: {error}; it is in {}",
                            temporary.display(),
                            base.display()
                        ));
                    }
                    return Ok(folder);
                }
                Err(error) => last = last.or(Some(error)),
            }
        }
        Err(failed(last.map_or("no place has a name that will do".to_owned(), |error| error.to_string())))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Leaves it where it is, for good.
    pub fn keep(self) {
        let _ = fs::remove_file(self.path().join(IN_USE));
        let _ = self.folder.keep();
    }
}

fn make(base: &Path, prefix: &str) -> io::Result<Folder> {
    // For nobody else whatever the umask says: what lies in it is loaded into the program. And for its owner, whom a umask can shut out.
    let private = || fs::Permissions::from_mode(0o700);
    let folder = tempfile::Builder::new().prefix(prefix).permissions(private()).tempdir_in(base)?;
    fs::set_permissions(folder.path(), private())?;
    // The name that others look at appears with the lock on it. A file system without locks has folders that stay.
    let lock = locked(folder.path()).ok();
    Ok(Folder { folder, _lock: lock })
}

fn locked(folder: &Path) -> io::Result<File> {
    let new = folder.join(".new");
    let file = OpenOptions::new().write(true).create_new(true).open(&new)?;
    file.lock()?;
    fs::rename(&new, folder.join(IN_USE))?;
    Ok(file)
}

/// Removes this user's folders whose owner is gone. What stands in the way is no reason not to go on.
fn remove_stale(base: &Path, prefix: &str) {
    // SAFETY: geteuid takes nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let ours = |path: &Path| fs::symlink_metadata(path).is_ok_and(|data| data.is_dir() && data.uid() == user);
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_name().as_bytes().starts_with(prefix.as_bytes()) && ours(&path) && is_stale(&path) {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

fn is_stale(folder: &Path) -> bool {
    let lock =
        OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(folder.join(IN_USE));
    lock.is_ok_and(|lock| lock.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_use_or_kept_stays_and_what_was_left_behind_goes() {
        let base = tempfile::tempdir().unwrap();
        let [used, kept, left] = [(); 3].map(|()| make(base.path(), "x-").unwrap());
        let kept_path = kept.path().to_owned();
        kept.keep();
        // As a killed process leaves it: the folder is there, nobody holds the lock.
        let Folder { folder, _lock: lock } = left;
        drop(lock);
        let left = folder.keep();
        remove_stale(base.path(), "y-");
        assert!(left.exists());
        remove_stale(base.path(), "x-");
        assert!(used.path().exists() && kept_path.exists() && !left.exists());
        let path = used.path().to_owned();
        drop(used);
        assert!(!path.exists());
    }
}
