//! What every step of the demo needs: the compiled program, its folder, and somewhere to show what happens.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::Failure;
use crate::{companion, stdout};

const SOURCE: &str = include_str!("two_arrays.c");
const PROGRAM: &str = "two_arrays";

/// Writes a line. A reader that has left (`| head`) has what it wanted, and the rest of the story is for nobody.
pub fn show(out: &mut dyn Write, line: std::fmt::Arguments<'_>) -> Result<(), Failure> {
    writeln!(out, "{line}").map_err(|error| stdout::unless_left(error).err().unwrap_or_else(Failure::nothing))
}

/// A copy that can be run, whatever the installer made of the file's mode.
fn place(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::copy(from, to)?;
    std::fs::set_permissions(to, Permissions::from_mode(0o755))
}

fn compile(folder: &Path) -> Result<(), Failure> {
    let compiled = Command::new("cc")
        .args(["-O2", "-o", PROGRAM, "two_arrays.c", "-ldl"])
        .current_dir(folder)
        .status()
        .map_err(|error| Failure::broken(format!("cc, the C compiler: {error}")))?;
    if compiled.success() {
        Ok(())
    } else {
        Err(Failure::broken(format!("cc could not compile two_arrays.c ({compiled})")))
    }
}

/// A folder with the compiled program, in which every step runs, so that the command lines shown are the ones run.
pub struct Workshop {
    folder: PathBuf,
    /// This executable.
    gpupool: PathBuf,
}

impl Workshop {
    /// Puts the program into the folder: the one that came with this executable, or compiled here.
    pub fn open(folder: &Path) -> Result<Workshop, Failure> {
        let failed = |what: &str, error: std::io::Error| Failure::broken(format!("{what}: {error}"));
        let gpupool = std::env::current_exe().map_err(|error| failed("cannot find this executable", error))?;
        std::fs::write(folder.join("two_arrays.c"), SOURCE)
            .map_err(|error| failed("cannot write two_arrays.c", error))?;
        match companion::beside(PROGRAM) {
            Some(ready) => place(&ready, &folder.join(PROGRAM))
                .map_err(|error| failed(&format!("cannot copy {}", ready.display()), error))?,
            None => compile(folder)?,
        }
        Ok(Workshop { folder: folder.to_owned(), gpupool })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command from the words that are shown for it. Settings of the caller's own are left out: the story is about the
    /// defaults.
    pub fn command(&self, words: &[String]) -> Command {
        let executable = |word: &str| match word {
            "gpupool" => self.gpupool.clone().into_os_string(),
            "./two_arrays" => self.folder().join(PROGRAM).into_os_string(),
            other => other.into(),
        };
        let mut executables = words.iter().map(|word| executable(word));
        let mut command = Command::new(executables.next().unwrap_or_default());
        command.args(executables).current_dir(self.folder());
        if words.get(1).is_some_and(|word| word == "sim") {
            // It counts the real GPUs, and would hide simulated ones.
            command.env_remove("CUDA_VISIBLE_DEVICES");
        }
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            let ours = ["GPUPOOL_", "SIMCUDA_"].iter().any(|prefix| name.starts_with(prefix));
            if ours || gpupool_config::launcher_variables().any(|known| known == name) {
                command.env_remove(&*name);
            }
        }
        // The table under each step says the same, and more.
        command.env("GPUPOOL_SUMMARY", "off");
        command
    }
}
