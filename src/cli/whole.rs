//! `gpupool suspend --process`: behind our own suspension the driver's, which takes contexts, modules and its own memory off the GPUs as well.
//!
//! What was measured decides what is asked (`tests/bench/RESULTS.md`): the driver takes everything away without a word and cannot bring back memory of `cuMemCreate`
//! that a second GPU may use, or such memory of the host; the process is lost then. So a program is asked first whether it has any.

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
    if is == Ok(Frozen::Gone) {
        freezer.restore(pid).map_err(answered("cuCheckpointProcessRestore; it has nothing on the GPUs still"))?;
    }
    if matches!(is, Ok(Frozen::Gone | Frozen::Locked)) {
        freezer.unlock(pid).map_err(answered("cuCheckpointProcessUnlock"))?;
    }
    Ok(())
}

/// How a process that has nothing on the GPUs goes to a disk: by CRIU, where it is installed.
pub fn what_next(pid: u32) -> String {
    let is_there = |folder: std::path::PathBuf| folder.join("criu").is_file();
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(is_there) {
        format!(
            "process {pid} has nothing on the GPUs; to have it on a disk: criu dump --tree {pid} --images-dir DIR --shell-job, and to have it back: \
             criu restore --images-dir DIR --shell-job, then gpupool resume {pid}"
        )
    } else {
        format!(
            "process {pid} has nothing on the GPUs and stays in the host's memory: criu, which could store it, is not installed"
        )
    }
}
