//! What the tests of the command line share.

use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::ptr::null_mut;

/// The executable under test, with no setting and no signal of the caller's own.
pub fn gpupool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    usual_signals(&mut command);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["GPUPOOL_", "SIMCUDA_", "LD_"].iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    command
}

/// Starts `command` with every signal as it is by default: tests may run under `nohup`, or in the background of a script.
pub fn usual_signals(command: &mut Command) {
    let reset = || {
        let mut none = std::mem::MaybeUninit::uninit();
        // SAFETY: SIG_DFL is no function that could run, and sigemptyset fills the set before it is used.
        unsafe {
            for signal in 1..=libc::SIGRTMAX() {
                libc::signal(signal, libc::SIG_DFL);
            }
            libc::sigemptyset(none.as_mut_ptr());
            libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), null_mut());
        }
        Ok(())
    };
    // SAFETY: `reset` calls async-signal-safe functions only.
    unsafe { command.pre_exec(reset) };
}

/// What stands for the pool: it has the names by which the pool and the simulated driver are known, and says that it is
/// there.
const LIBRARY: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int gpupool_version, cuInit, cuMemMap;
char GPUPOOL_BUILD[] = VERSION;
__attribute__((constructor)) static void here(void) {
    char path[4096];
    const char *folder = getenv("GPUPOOL_VERDICTS");
    FILE *file;
    if (!folder) return;
    snprintf(path, sizeof path, "%s/processes", folder);
    file = fopen(path, "r+");
    if (!file) return;
    fseek(file, 0, SEEK_END);
    fprintf(file, "loaded %d\nleft %d\n", (int)getpid(), (int)getpid());
    fclose(file);
}
"#;

/// A folder for one test, with a library in it that can be preloaded and does next to nothing: these tests are about the
/// command line, and must not depend on what the real libraries do.
pub struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("no temporary folder: {error}"));
        let bench = Bench { folder };
        bench.library_of(gpupool_config::VERSION);
        bench
    }

    /// Makes the library one of this version.
    pub fn library_of(&self, version: &str) {
        self.compile("empty.so", LIBRARY, &["-shared", "-fPIC", &format!("-DVERSION=\"{version}\"")]);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn library(&self) -> PathBuf {
        self.path("empty.so")
    }

    /// Compiles C into `name` in this folder.
    pub fn compile(&self, name: &str, source: &str, flags: &[&str]) -> PathBuf {
        let (from, to) = (self.path(&format!("{name}.c")), self.path(name));
        std::fs::write(&from, source).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
        let compiled = Command::new("cc").args(flags).arg("-o").arg(&to).arg(&from).status();
        assert!(compiled.is_ok_and(|status| status.success()), "cc could not compile {name}");
        to
    }

    /// `gpupool run` or `gpupool sim` with that library and these flags, up to the `--` before the program.
    pub fn gpupool(&self, command: &str, flags: &[&str]) -> Command {
        let library = if command == "sim" { "--driver" } else { "--library" };
        let mut gpupool = gpupool();
        gpupool.args([command, library]).arg(self.library()).args(flags).arg("--");
        gpupool
    }
}

/// Writes a script that everybody may run. Another process does, as in the harness of the library's tests: a child that a thread beside this
/// one starts holds our descriptors for a moment, and what is open for writing cannot be run.
pub fn script(path: &Path, text: &str) {
    let mut command = Command::new("sh");
    command.args(["-c", r#"printf %s "$1" >"$0" && chmod 755 "$0""#]).arg(path).arg(text);
    assert!(command.status().is_ok_and(|status| status.success()), "{command:?}");
}

/// Runs to the end.
pub fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Compares with a file of `tests/golden`. `UPDATE_GOLDEN=1` writes the file instead; look at the difference then.
pub fn golden(name: &str, text: &str) {
    let path = golden_folder().join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(text == expected, "not as {name}; UPDATE_GOLDEN=1 writes it anew. Now:\n{text}\nexpected:\n{expected}");
}

/// Logs written by hand and what is made of them.
pub fn golden_folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"))
}

/// What `command` writes when its stdout and stderr are a terminal.
pub fn on_a_terminal(command: &mut Command) -> String {
    on_a_terminal_of(0, command)
}

/// The same on a terminal of so many columns; with 0 it does not know.
pub fn on_a_terminal_of(columns: u16, command: &mut Command) -> String {
    let (mut master, mut slave) = (-1, -1);
    let mut size = libc::winsize { ws_row: 0, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: both outputs and the size are locals; the name and the settings may be NULL.
    let opened = unsafe { libc::openpty(&raw mut master, &raw mut slave, null_mut(), null_mut(), &raw mut size) };
    assert_eq!(opened, 0, "no pseudo-terminal: {}", std::io::Error::last_os_error());
    // SAFETY: openpty succeeded, so both are open descriptors of ours, owned once each.
    let (master, slave) = unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
    let stderr = slave.try_clone().unwrap_or_else(|error| panic!("dup: {error}"));
    command.env("TERM", "xterm").stdin(Stdio::null()).stdout(slave).stderr(stderr);
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    // The command still holds the terminal's other end; without it the reading below ends when the child does.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut text = Vec::new();
    // Linux answers EIO once nobody has the other end open; what was read up to there stays.
    let _ = std::fs::File::from(master).read_to_end(&mut text);
    child.wait().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    String::from_utf8_lossy(&text).into_owned()
}

/// stdout as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// stderr as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a step of a test's preparation gives, which must not fail.
#[track_caller]
pub fn made<T, E: std::fmt::Debug>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("the test could not be prepared: {error:?}"))
}
