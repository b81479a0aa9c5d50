//! The file by which somebody listens for a process, beside its page: who has the turn ([`crate::Standing`]) makes it by binding a socket there, and the
//! process connects to it when it is rung for.

use crate::folder::Folder;
use rustix::fs::{AtFlags, FileType, Stat, fstat, statat, unlinkat};
use rustix::io::Errno;
use std::io::{self, ErrorKind};

/// A file's own number, and when it was made or given to its user: numbers are used again.
type Number = (u64, i64, u64);

/// A file that is listened by, removed when that is over, as far as it is the same file still.
#[derive(Debug)]
pub struct Door<'a> {
    folder: &'a Folder,
    name: String,
    /// What tells it from another one of that name. `None`: it was removed before anybody looked.
    number: Option<Number>,
}

impl<'a> Door<'a> {
    /// The one that is there now, of whomever. Whoever has just made it holds it from here on; whoever finds that of somebody who was killed drops it.
    pub fn at(folder: &'a Folder, name: &str) -> Self {
        Self { folder, name: name.to_owned(), number: number_of(folder, name) }
    }

    /// Listens by a file of this name, which `listen` binds, for whoever has the turn. One that is there already is removed where this one `is_first` in the line
    /// ([`crate::Standing`]): it is of somebody who was killed or is stopped, or came late to its place. `None`: somebody who stands before this one listens, or somebody
    /// listens again already.
    ///
    /// An empty folder of that name is removed as well, if it is of the same user as the folder around it.
    ///
    /// # Errors
    /// Those of `listen` but for a file that is there; and a folder that stays there.
    pub fn listen<S>(
        folder: &Folder,
        name: &str,
        is_first: impl FnOnce() -> bool,
        listen: impl Fn() -> io::Result<S>,
    ) -> io::Result<Option<S>> {
        let listen = || match listen() {
            Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(None),
            answer => answer.map(Some),
        };
        match listen()? {
            None if is_first() => {
                drop(Door::at(folder, name));
                match listen()? {
                    None if is_folder(folder, name) => Err(io::Error::other(format!(
                        "{name} is a folder, and not empty or somebody else's, where a socket is to be; remove it"
                    ))),
                    answer => Ok(answer),
                }
            }
            answer => Ok(answer),
        }
    }

    /// Whether whoever is rung for finds this one, and neither none nor somebody else's. Two may believe that it is their turn, where one was
    /// stopped or came late to its place in the line: then one of them has removed the other one's, perhaps before that one had looked at it.
    pub fn is_there(&self) -> bool {
        self.number.is_some() && number_of(self.folder, &self.name) == self.number
    }
}

impl Drop for Door<'_> {
    fn drop(&mut self) {
        if self.is_there() {
            let answer = unlinkat(self.folder.fd(), &*self.name, AtFlags::empty());
            if answer == Err(Errno::ISDIR) && is_of_same_user(self.folder, &self.name) {
                let _ = unlinkat(self.folder.fd(), &*self.name, AtFlags::REMOVEDIR);
            }
        }
    }
}

fn look(folder: &Folder, name: &str) -> Option<Stat> {
    statat(folder.fd(), name, AtFlags::SYMLINK_NOFOLLOW).ok()
}

fn is_folder(folder: &Folder, name: &str) -> bool {
    look(folder, name).is_some_and(|status| FileType::from_raw_mode(status.st_mode).is_dir())
}

fn is_of_same_user(folder: &Folder, name: &str) -> bool {
    look(folder, name).zip(fstat(folder.fd()).ok()).is_some_and(|(inside, around)| inside.st_uid == around.st_uid)
}

fn number_of(folder: &Folder, name: &str) -> Option<Number> {
    let status = look(folder, name)?;
    Some((status.st_ino, status.st_ctime, status.st_ctime_nsec))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Roots;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no folders by descriptor")]
    fn one_that_was_removed_before_it_was_looked_at_is_not_there_and_another_ones_stays() {
        let around = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::own(&Roots::new(Some(around.path().into()))).unwrap();
        let path = folder.path().join("1-2.call");
        assert!(!Door::at(&folder, "1-2.call").is_there(), "there is none");
        std::fs::write(&path, "").unwrap();
        let first = Door::at(&folder, "1-2.call");
        assert!(first.is_there());
        // The number is not used again while this is open.
        let _open = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!first.is_there());
        std::fs::write(&path, "").unwrap();
        let second = Door::at(&folder, "1-2.call");
        assert!(!first.is_there() && second.is_there());
        drop(first);
        assert!(path.exists(), "it is another one's");
        drop(second);
        assert!(!path.exists());
    }

    /// Nobody would ever be asked by that page again.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no folders by descriptor")]
    fn an_empty_folder_in_the_way_is_removed_and_a_full_one_is_told_at_once() {
        let around = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::own(&Roots::new(Some(around.path().into()))).unwrap();
        let path = folder.path().join("1-2.call");
        let listen = || match std::os::unix::net::UnixListener::bind(&path) {
            Err(error) if path.symlink_metadata().is_ok() => Err(io::Error::new(ErrorKind::AddrInUse, error)),
            answer => answer,
        };
        let listens = |is_first: bool| Door::listen(&folder, "1-2.call", || is_first, listen);
        std::fs::create_dir(&path).unwrap();
        assert!(listens(false).unwrap().is_none() && path.is_dir());
        assert!(listens(true).unwrap().is_some() && !path.is_dir());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("full"), "").unwrap();
        let error = listens(true).unwrap_err().to_string();
        assert!(error.contains("1-2.call is a folder, and not empty") && path.is_dir(), "{error}");
    }
}
