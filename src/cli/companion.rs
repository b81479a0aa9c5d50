//! The files that come with this executable: the libraries and the demo's program.

use std::path::{Path, PathBuf};

use gpupool_config::VERSION;

use crate::elf;
use crate::failure::Failure;

/// `given`, or the library called `name` that came with this executable ([`beside`]).
///
/// # Errors
/// There is no such file; says where it was looked for and which flag names another. Or it is not what it should be: the
/// loader would pass over it with a warning, and the program would run without it.
pub fn find(companion: Companion, given: Option<&Path>) -> Result<PathBuf, Failure> {
    let Companion { flag, mark, .. } = companion;
    let path = locate(companion, given)?;
    match elf::exports(&path, &[mark]) {
        Ok(names) if names.is_empty() => Err(Failure::usage(format!(
            "{}: not {}, as it has no {mark}; name another library with {flag}",
            path.display(),
            companion.name
        ))),
        Err(reason) => Err(Failure::usage(format!("{}: {reason}; name another library with {flag}", path.display()))),
        Ok(_) => Ok(path),
    }
}

/// What is wrong with a pool's version, if it is not this command's: another installation's library, say, of which not every
/// setting is one that this command knows.
pub fn foreign(library: &Path) -> Option<String> {
    let theirs = elf::text_of(library, "GPUPOOL_BUILD").ok()?;
    let theirs = theirs.unwrap_or_else(|| "a version before 0.2.0".to_owned());
    (theirs != VERSION).then(|| {
        format!(
            "{} is {theirs}, and this command {VERSION}; install both from one package, or name the library with --library",
            library.display()
        )
    })
}

/// A library that is built and installed with this executable.
#[derive(Clone, Copy)]
pub struct Companion {
    name: &'static str,
    /// The flag that names another.
    flag: &'static str,
    package: &'static str,
    /// A name that only such a library defines.
    mark: &'static str,
}

/// The pool.
pub const POOL: Companion =
    Companion { name: "libgpupool.so", flag: "--library", package: "gpupool", mark: "gpupool_version" };
/// The simulated driver.
pub const DRIVER: Companion = Companion { name: "libsimcuda.so", flag: "--driver", package: "simcuda", mark: "cuInit" };

fn locate(companion: Companion, given: Option<&Path>) -> Result<PathBuf, Failure> {
    let Companion { name, flag, package, .. } = companion;
    if let Some(given) = given {
        return existing(given).ok_or_else(|| Failure::usage(format!("{flag} {}: no such file", given.display())));
    }
    let folder =
        own_folder().map_err(|error| Failure::usage(format!("cannot find this executable: {error}; use {flag}")))?;
    existing_in(&folder, name).ok_or_else(|| {
        let [beside, installed] = [folder.join(name), folder.join("../lib/gpupool").join(name)];
        Failure::usage(format!(
            "{name} is neither {} nor {}, nor in a Python package of this installation\n\
             build it with `cargo build --release -p {package}`, install gpupool again, or name it with {flag}",
            beside.display(),
            installed.display()
        ))
    })
}

/// The file called `name` that came with this executable, if it did.
pub fn beside(name: &str) -> Option<PathBuf> {
    existing_in(&own_folder().ok()?, name)
}

fn own_folder() -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.parent().unwrap_or(Path::new("/")).to_owned())
}

/// Beside the executable (a build), where the packages of distributions have it, or in the Python package: `pip --target` lays
/// that beside the folder of commands, and everything else under the library folder of one Python.
fn existing_in(folder: &Path, name: &str) -> Option<PathBuf> {
    let fixed = [folder.to_owned(), folder.join("../lib/gpupool"), folder.join("../gpupool/lib")];
    let found = fixed.iter().find_map(|place| existing(&place.join(name)));
    found.or_else(|| python_packages(&folder.join("..")).iter().find_map(|place| existing(&place.join(name))))
}

/// `PREFIX/lib*/python3*/{site,dist}-packages/gpupool/lib`, in the order of their names.
fn python_packages(prefix: &Path) -> Vec<PathBuf> {
    let listed = |folder: &Path, start: &str| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let named = entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(start.as_bytes()));
        let mut paths: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let libraries = listed(prefix, "lib");
    let pythons = libraries.iter().flat_map(|library| listed(library, "python3"));
    let packages = pythons.flat_map(|python| [python.join("site-packages"), python.join("dist-packages")]);
    packages.map(|packages| packages.join("gpupool/lib")).filter(|place| place.is_dir()).collect()
}

/// The file without links and dots: a program may change its folder before a child of it loads the library.
fn existing(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().filter(|path| path.is_file())
}
