//! Where the things under test are: beside the test executable, as cargo lays them out.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, io, process};
use tempfile::TempDir;

/// `target/release` or `target/debug`: the folder above the `deps` that this test runs from, or the one that a program of
/// this package lies in. What lies there was built by
/// the same cargo invocation settings as the test, so a debug test never runs a release library.
pub fn artifact_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let executable = env::current_exe().unwrap_or_else(|e| panic!("own path unknown: {e}"));
        let folder = executable.ancestors().find(|folder| folder.ends_with("deps")).unwrap_or(&executable);
        match folder.parent().filter(|folder| folder.join("deps").is_dir()) {
            Some(folder) => folder.to_path_buf(),
            None => panic!("{} is not in a cargo target folder; run it by cargo test", executable.display()),
        }
    })
}

/// A built artifact by file name: `libgpupool.so`, `libsimcuda.so`, `gpupool`.
pub fn library(name: &str) -> PathBuf {
    let path = artifact_folder().join(name);
    if !path.exists() {
        let release = if artifact_folder().ends_with("release") { " --release" } else { "" };
        panic!("{} is missing; build it with: cargo build --workspace{release}", path.display());
    }
    path
}

/// The root of the repository, for Python clients and their virtual environment.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The folder that stands in for a driver installation: `libcuda.so.1` and `libcuda.so` are the simulated driver.
pub fn driver_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = scratch("driver");
        for name in ["libcuda.so.1", "libcuda.so"] {
            replace_link(&library("libsimcuda.so"), &folder.join(name));
        }
        folder
    })
}

/// `target/PROFILE/harness/NAME`, made if it is not there.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let folder = artifact_folder().join("harness").join(name);
    fs::create_dir_all(&folder).unwrap_or_else(|e| panic!("cannot make {}: {e}", folder.display()));
    folder
}

/// A name beside `path` that no other test process uses, to be renamed onto it: test binaries may run at the same time.
pub(crate) fn unfinished(path: &Path) -> PathBuf {
    path.with_extension(format!("{}.unfinished", process::id()))
}

/// A folder with the simulated `libcuda.so.1` and a `libnvidia-ml.so.1` beside it.
pub fn driver_folder_with_nvml() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = scratch("driver-nvml");
        for name in ["libcuda.so.1", "libcuda.so"] {
            replace_link(&library("libsimcuda.so"), &folder.join(name));
        }
        replace_link(&library("libsimnvml.so"), &folder.join("libnvidia-ml.so.1"));
        folder
    })
}

fn replace_link(target: &Path, link: &Path) {
    let made = unfinished(link);
    let _ = fs::remove_file(&made);
    if let Err(e) = std::os::unix::fs::symlink(target, &made).and_then(|()| fs::rename(&made, link)) {
        panic!("cannot link {} to {}: {e}", link.display(), target.display());
    }
}

/// A folder with the simulated driver without these exports, as an older one has them: under another name they are not found by their own.
pub fn driver_without(names: &[&str]) -> io::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let mut bytes = fs::read(library("libsimcuda.so"))?;
    for name in names {
        let (name, mut at) = (format!("\0{name}\0").into_bytes(), 0);
        let mut found = 0;
        while let Some(next) = bytes[at..].windows(name.len()).position(|window| window == name) {
            bytes[at + next + 1] = b'X';
            (at, found) = (at + next + 1, found + 1);
        }
        assert!(found > 0, "{names:?}");
    }
    fs::write(folder.path().join("libcuda.so.1"), bytes)?;
    Ok(folder)
}
