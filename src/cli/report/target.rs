//! Files that a report is written to.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Refuses a file that is one of the logs, by whatever name, which would be gone before it was read, and any other log.
///
/// # Errors
/// Exit 2.
pub fn refuse_logs<'a>(path: &Path, logs: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), Failure> {
    match logs.into_iter().find(|log| is_same(path, log)) {
        Some(log) => Err(Failure::usage(format!("{} is the log {}; name another file", path.display(), log.display()))),
        // The first of several logs, where the name of what is to be written was forgotten.
        None if begins_like_a_log(path) => {
            Err(Failure::usage(format!("{} is a log of gpupool's; name the file to write first", path.display())))
        }
        None => Ok(()),
    }
}

/// Whether there is a file that begins as each line of a log does.
fn begins_like_a_log(path: &Path) -> bool {
    const BEGIN: &[u8] = b"{\"v\":";
    let mut begin = [0; BEGIN.len()];
    is_same(path, path) && File::open(path).is_ok_and(|mut file| file.read_exact(&mut begin).is_ok()) && begin == BEGIN
}

/// Refuses two outputs in one file: the later would take the place of the earlier. `outputs`: the option and its file, if it was given.
///
/// # Errors
/// Exit 2.
pub fn refuse_twice(outputs: &[(&str, Option<&PathBuf>)]) -> Result<(), Failure> {
    let given: Vec<(&str, &PathBuf)> =
        outputs.iter().filter_map(|(option, path)| path.map(|path| (*option, path))).collect();
    for (number, (option, path)) in given.iter().enumerate() {
        if let Some((other, _)) = given.iter().take(number).find(|(_, known)| known == path || is_same(known, path)) {
            let why = format!("{other} and {option} both name {}; name another file for one", path.display());
            return Err(Failure::usage(why));
        }
    }
    Ok(())
}

/// Whether both are one file. A device may be written to as often as one likes.
fn is_same(one: &Path, other: &Path) -> bool {
    let identity =
        |path: &Path| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|data| (data.dev(), data.ino()));
    identity(one).is_some_and(|one| identity(other) == Some(one))
}
