//! A name for the library that `LD_PRELOAD` can hold.
//!
//! The loader splits the variable at spaces and colons and replaces `$ORIGIN` and the like; it knows no way to quote them. A
//! virtual environment in `My Projects` has such a path, so the library gets a link in this user's runtime folder, which nobody
//! else may write to. The link stays: what the program starts has the same variable, and nobody knows when the last of it ends.
//! Each path has one link of its own, however often it is used.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use gpupool_metrics::folder::{Folder, Roots};

use crate::failure::Failure;

/// `library`, or a link to it whose path the loader takes as one.
///
/// # Errors
/// There is no folder for the link, or it cannot be made there; says where, and what to do.
pub fn path(library: PathBuf) -> Result<PathBuf, Failure> {
    if is_one_word(&library) {
        return Ok(library);
    }
    let failed = |reason: String| {
        Failure::usage(format!(
            "{}: LD_PRELOAD cannot hold a path with a space, ':' or '$', and no link to it can be made: {reason}; move the \
             library, or set XDG_RUNTIME_DIR to a folder of this user's",
            library.display()
        ))
    };
    let roots = Roots::new(std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| is_one_word(Path::new(folder))));
    let (folder, _) = Folder::own(&roots).map_err(|refused| {
        let reasons: Vec<String> = refused.iter().map(ToString::to_string).collect();
        failed(reasons.join("; "))
    })?;
    linked(folder.path(), &library).map_err(|error| failed(format!("{}: {error}", folder.path().display())))
}

fn is_one_word(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| b":;$".contains(byte) || byte.is_ascii_whitespace())
}

/// A link in a folder of its own in `folder`, under a name that no other path gets, and called as the library is: that is what programs and
/// people know it by. Others may make the same one at the same time.
fn linked(folder: &Path, library: &Path) -> std::io::Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    library.hash(&mut hasher);
    let own = folder.join(format!("library-{:016x}", hasher.finish()));
    std::fs::create_dir_all(&own)?;
    let link = own.join("libgpupool.so");
    match symlink(library, &link) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        made => made?,
    }
    match link.read_link()? {
        leads_to if leads_to == library => Ok(link),
        other => Err(std::io::Error::other(format!("{} leads to {}; remove it", link.display(), other.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_the_loader_would_split_gets_one_link_and_another_path_another() {
        let folder = tempfile::tempdir().unwrap();
        for path in ["/a b/x.so", "/a:b/x.so", "/$ORIGIN/x.so"] {
            assert!(!is_one_word(Path::new(path)), "{path}");
            let link = linked(folder.path(), Path::new(path)).unwrap();
            assert!(is_one_word(&link));
            assert_eq!(linked(folder.path(), Path::new(path)).unwrap(), link);
            assert_eq!(link.read_link().unwrap(), Path::new(path));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
        assert_eq!(path(PathBuf::from("/a/x.so")).unwrap(), Path::new("/a/x.so"));
    }
}
