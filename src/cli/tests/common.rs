//! What the tests of the command line share.

use std::path::PathBuf;
use std::process::{Command, Output};

/// The executable under test, with no setting of the caller's own.
pub fn gpupool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupool"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["GPUPOOL_", "SIMCUDA_", "LD_"].iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    command
}

/// A folder for one test, with a library in it that can be preloaded and does nothing: these tests are about the command
/// line, and must not depend on what the real libraries do.
pub struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("no temporary folder: {error}"));
        let bench = Bench { folder };
        bench.compile("empty.so", "int gpupool_cli_test_library;", &["-shared", "-fPIC"]);
        bench
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

/// Runs to the end.
pub fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// stdout as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// stderr as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
