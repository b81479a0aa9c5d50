//! `gpupool suspend --process` and `gpupool checkpoint --process`: behind our own suspension the driver's, which takes contexts, modules and its own memory off the
//! GPUs as well; and CRIU, which stores what is left of the process.
//!
//! What was measured decides what is asked (`tests/bench/RESULTS.md`): the driver takes everything away without a word and cannot bring back memory of `cuMemCreate`
//! that a second GPU may use, or such memory of the host; the process is lost then. So a program is asked first whether it has any.

use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use gpupool_cuda::CuResult;
use gpupool_cuda::checkpoint::{Freezer, Frozen};
use gpupool_wire::control::{Reply, Request};

use crate::control::{self, OTHER_ANSWER};
use crate::pages::Listed;

/// How long the driver may wait for calls that are under way: the program is at rest already.
const TO_LOCK: u32 = 10_000;

fn answered(what: &str) -> impl Fn(CuResult) -> String + '_ {
    move |result| format!("the driver answered {result} to {what}")
}

/// Takes what is left of a suspended program off the GPUs.
///
/// # Errors
/// Why not, in words. The program is suspended as it was.
pub fn freeze(row: &Listed) -> Result<(), String> {
    let pid = row.told.process.identity.pid;
    let freezer = Freezer::load()?;
    match control::ask_one(row, &Request::Freezable)? {
        Reply::Done { .. } => {}
        Reply::Refused { why } => return Err(why),
        _ => return Err(OTHER_ANSWER.to_owned()),
    }
    freezer.lock(pid, TO_LOCK).map_err(answered("cuCheckpointProcessLock"))?;
    if let Err(result) = freezer.checkpoint(pid) {
        let why = answered("cuCheckpointProcessCheckpoint")(result);
        return Err(match freezer.unlock(pid) {
            Ok(()) => why,
            Err(result) => format!("{why}, and {result} to cuCheckpointProcessUnlock: the process may be lost"),
        });
    }
    Ok(())
}

/// Brings back what the driver has taken away, where it has. A driver that cannot be asked has taken nothing.
///
/// # Errors
/// Why not, in words; the process stays as it is.
pub fn thaw(pid: u32) -> Result<(), String> {
    let Ok(freezer) = Freezer::load() else { return Ok(()) };
    let is = freezer.state(pid);
    if is == Ok(Frozen::Failed) {
        return Err(
            "the driver gave it up when its memory was to come back (cuCheckpointProcessGetState); it cannot go on"
                .to_owned(),
        );
    }
    // Another command may do the same at this moment, and then it is done.
    let unless = |is: &[Frozen], result| {
        if freezer.state(pid).is_ok_and(|now| is.contains(&now)) { Ok(()) } else { Err(result) }
    };
    if is == Ok(Frozen::Gone) {
        let restored = freezer.restore(pid).or_else(|result| unless(&[Frozen::Locked, Frozen::Not], result));
        restored.map_err(answered("cuCheckpointProcessRestore; it has nothing on the GPUs still"))?;
    }
    if matches!(is, Ok(Frozen::Gone | Frozen::Locked)) {
        let unlocked = freezer.unlock(pid).or_else(|result| unless(&[Frozen::Not], result));
        unlocked.map_err(answered("cuCheckpointProcessUnlock"))?;
    }
    Ok(())
}

/// Whether the driver could take anything off the GPUs at all.
///
/// # Errors
/// Why not, in words.
pub fn can_freeze() -> Result<(), String> {
    Freezer::load().map(drop)
}

/// CRIU, where it is installed.
pub fn criu() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_program = |file: &PathBuf| {
        std::fs::metadata(file).is_ok_and(|status| status.is_file() && status.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path).map(|folder| folder.join("criu")).find(is_program)
}

/// Whether a folder is this user's own: anybody else could put another one in the place of what is made there, and a CRIU of root's would write to that.
pub fn is_own(folder: &Path) -> bool {
    std::fs::symlink_metadata(folder).is_ok_and(|status| status.uid() == rustix::process::geteuid().as_raw())
}

/// What the copy of a process's metrics page is called beside what CRIU has stored.
const PAGE: &str = "gpupool.page";

/// What a dump of the process is called that belongs to this image of its memory, in the folder of the images.
fn name_of(generation: u64) -> String {
    format!("process-{generation:06}")
}

/// Has CRIU store a process that has nothing on the GPUs, and all that it started, beside the image of this number; it goes on. The folder of that.
///
/// # Errors
/// Why not, in words; nothing of it is left.
pub fn dump(criu: &Path, row: &Listed, folder: &Path, generation: u64) -> Result<PathBuf, String> {
    let pid = row.told.process.identity.pid;
    let whole = folder.join(name_of(generation));
    // Whoever looks for one finds it by its name once it is whole.
    let part = folder.join(format!(".{}.new", name_of(generation)));
    let failed = |what: &'static str, path: &Path| {
        let path = path.display().to_string();
        move |error: std::io::Error| format!("{what} {path} failed: {error}")
    };
    let remove = |path: &Path| match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("removing", path)(error)),
        _ => Ok(()),
    };
    let dump = || {
        // What an earlier try or an image of this number that was removed has left is none of this process.
        remove(&part)?;
        remove(&whole)?;
        std::fs::DirBuilder::new().mode(0o700).create(&part).map_err(failed("making", &part))?;
        let mut command = Command::new(criu);
        command.args(["dump", "--tree", &pid.to_string(), "--images-dir"]).arg(&part);
        // It can be resumed as after any suspension: what is stored is the copy. Without a word about locks of files a program that has one is not stored.
        command.args(["--leave-running", "--shell-job", "--file-locks"]).stdin(Stdio::null());
        let ended = command.output().map_err(failed("starting", criu))?;
        if !ended.status.success() {
            let said = [ended.stderr, ended.stdout].map(|text| String::from_utf8_lossy(&text).into_owned());
            let last = said.iter().find_map(|text| text.lines().rfind(|line| !line.trim().is_empty()));
            let last = last.map_or_else(String::new, |line| format!(": {}", line.trim()));
            return Err(format!("criu dump ended with {}{last}", ended.status));
        }
        // A file that is mapped is not stored, and this one is removed with the process.
        let copy = part.join(PAGE);
        std::fs::copy(&row.page, &copy).map_err(failed("copying the metrics page to", &copy))?;
        std::fs::rename(&part, &whole).map_err(failed("renaming", &part))
    };
    match dump() {
        Ok(()) => Ok(whole),
        Err(why) => match remove(&part) {
            Ok(()) => Err(why),
            Err(other) => Err(format!("{why}; and {other}")),
        },
    }
}

/// Removes dumps whose images are no more.
///
/// # Errors
/// One of them could not be removed, or the folder not be read; in words.
pub fn clean(folder: &Path) -> Result<(), String> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let images = gpupool_store::list(folder).map_err(|error| words(&error))?;
    let is_needed = |name: &str| images.iter().any(|image| name_of(image.generation) == name);
    for entry in std::fs::read_dir(folder).map_err(|error| words(&error))?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let number = name.strip_prefix("process-").and_then(|number| number.parse().ok());
        if number.is_some_and(|number| name_of(number) == name) && !is_needed(name) {
            std::fs::remove_dir_all(entry.path()).map_err(|error| format!("{}: {error}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// How a process comes back that was stored there, and how it goes on here.
pub fn how_back(row: &Listed, dump: &Path) -> String {
    let pid = row.told.process.identity.pid;
    let (copy, page, dump) = (dump.join(PAGE), row.page.display(), dump.display());
    format!(
        "process {pid} has nothing on the GPUs, and all of it is in {dump}; to have it go on: gpupool resume {pid}; to have it back once it has ended: \
         cp -p {} {page} && criu restore --images-dir {dump} --shell-job --file-locks, and then, elsewhere, gpupool resume {pid}",
        copy.display()
    )
}

/// How a process that has nothing on the GPUs goes to a disk: by CRIU, where it is installed.
pub fn what_next(row: &Listed) -> String {
    let (pid, page) = (row.told.process.identity.pid, row.page.display());
    if criu().is_some() {
        format!(
            "process {pid} has nothing on the GPUs; to have it on a disk: cp -p {page} DIR && criu dump --tree {pid} --images-dir DIR --shell-job --file-locks, and to have \
             it back: that copy at its place again, criu restore --images-dir DIR --shell-job --file-locks, and then, elsewhere, gpupool resume {pid}"
        )
    } else {
        format!(
            "process {pid} has nothing on the GPUs and stays in the host's memory: criu, which could store it, is not installed"
        )
    }
}
