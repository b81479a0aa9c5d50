//! Compiles the C programs of `tests/programs` when they are newer than what was built from them.

use crate::artifacts::{driver_folder, repository, scratch, unfinished};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;
use std::{env, fs};

/// How one C file becomes one binary.
#[derive(Clone, Debug, Default)]
pub struct Build {
    source: String,
    output: String,
    flags: Vec<String>,
}

impl Build {
    /// The program `tests/programs/NAME.c`, linked to libcuda where it uses it.
    pub fn program(name: &str) -> Self {
        Self { source: format!("{name}.c"), output: name.to_owned(), flags: Vec::new() }
    }

    /// The program `tests/programs/NAME.c` as a shared library called `lib{output}.so`.
    pub fn library(name: &str, output: &str) -> Self {
        Self::program(name).output(&format!("lib{output}.so")).flag("-shared").flag("-fPIC")
    }

    /// Another name for the binary.
    pub fn output(mut self, name: &str) -> Self {
        self.output = name.to_owned();
        self
    }

    /// One more argument of the compiler.
    pub fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    /// Compiles with these names in `names.inc` and links the driver in `folder`, for `resolve_linked.c`. Weak references
    /// alone do not make a library needed, so the linker is told.
    pub fn names(self, names: &[String], folder: &Path) -> Self {
        let names_folder = scratch(&format!("{}.names", self.output));
        let text: String = names.iter().map(|name| format!("NAME({name})\n")).collect();
        let file = names_folder.join("names.inc");
        fs::write(&file, text).unwrap_or_else(|e| panic!("cannot write {}: {e}", file.display()));
        self.flag(&format!("-I{}", names_folder.display()))
            .flag("-Wl,--no-as-needed")
            .flag(&format!("-L{}", folder.display()))
            .flag("-l:libcuda.so.1")
    }

    /// The path of the binary, compiled if the sources are newer.
    pub fn path(&self) -> PathBuf {
        /// One compilation at a time: tests of one binary run in threads.
        static BUILT: Mutex<Option<HashMap<PathBuf, PathBuf>>> = Mutex::new(None);
        // A test that failed to compile something poisons nothing that others need.
        let mut built = BUILT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let built = built.get_or_insert_with(HashMap::new);
        let binary = self.binary();
        built.entry(binary.clone()).or_insert_with(|| self.compile(binary)).clone()
    }

    /// Its place: the same program compiled in another way, by a test that runs beside this one, is another file.
    fn binary(&self) -> PathBuf {
        let folder = scratch("programs");
        if self.flags.is_empty() {
            return folder.join(&self.output);
        }
        let mut hasher = DefaultHasher::new();
        self.flags.hash(&mut hasher);
        let folder = folder.join(format!("{:016x}", hasher.finish()));
        fs::create_dir_all(&folder).unwrap_or_else(|e| panic!("cannot make {}: {e}", folder.display()));
        folder.join(&self.output)
    }

    fn compile(&self, binary: PathBuf) -> PathBuf {
        let folder = repository().join("tests/programs");
        if is_current(&binary, &[folder.as_path()]) && !self.flags.iter().any(|flag| flag.starts_with("-I")) {
            return binary;
        }
        let made = unfinished(&binary);
        let mut command = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
        // Where a program does not call the driver, --as-needed keeps libcuda out of it.
        command
            .args(["-std=c11", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"])
            .args(&self.flags)
            .arg("-o")
            .arg(&made)
            .arg(folder.join(&self.source))
            .args(["-Wl,--as-needed", "-lcuda", "-ldl"])
            .arg(format!("-L{}", driver_folder().display()));
        let output =
            command.output().unwrap_or_else(|e| panic!("no C compiler ({command:?}): {e}; install gcc or set CC"));
        if !output.status.success() {
            panic!("{command:?} failed:\n{}", String::from_utf8_lossy(&output.stderr));
        }
        fs::rename(&made, &binary).unwrap_or_else(|e| panic!("cannot write {}: {e}", binary.display()));
        binary
    }
}

/// The compiled program of that name.
pub fn program(name: &str) -> PathBuf {
    Build::program(name).path()
}

/// Whether `binary` is newer than every file in `folders`. All of them, because headers are shared.
fn is_current(binary: &Path, folders: &[&Path]) -> bool {
    let modified = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    let Some(built) = modified(binary) else { return false };
    let newest = folders
        .iter()
        .flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten())
        .filter_map(|entry| modified(&entry.path()))
        .max()
        .unwrap_or(SystemTime::UNIX_EPOCH);
    built > newest
}
