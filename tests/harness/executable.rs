//! Files that a test makes and then runs.
//!
//! **Another process writes them, never the test's own.** Threads of a test program start programs at any moment, and a child
//! holds copies of all descriptors of its parent until it has become its program. While one of these is open for writing, the
//! system refuses to run that file (`ETXTBSY`, "Text file busy").

use std::path::Path;
use std::process::Command;

/// Copies a program, its mode included; the copy can be run at once.
#[track_caller]
pub fn copy_program(from: &Path, to: &Path) {
    done(Command::new("cp").arg("--").args([from, to]));
}

/// Writes a script that everybody may run; it can be run at once.
#[track_caller]
pub fn script(path: &Path, text: &str) {
    done(Command::new("sh").args(["-c", r#"printf %s "$1" >"$0" && chmod 755 "$0""#]).arg(path).arg(text));
}

#[track_caller]
fn done(command: &mut Command) {
    let status = command.status();
    assert!(status.as_ref().is_ok_and(|status| status.success()), "{command:?}: {status:?}");
}
