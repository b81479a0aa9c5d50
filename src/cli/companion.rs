//! The libraries that come with this executable.

use std::path::{Path, PathBuf};

use crate::elf;
use crate::failure::Failure;

/// `given`, or the library called `name` beside the executable (a build) or in `../lib/gpupool` (an installation).
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
    let executable = std::env::current_exe()
        .map_err(|error| Failure::broken(format!("cannot find this executable: {error}; use {flag}")))?;
    let folder = executable.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(name), folder.join("../lib/gpupool").join(name)];
    places.iter().find_map(|place| existing(place)).ok_or_else(|| {
        let [beside, installed] = places.each_ref().map(|place| place.display().to_string());
        Failure::usage(format!(
            "{name} is neither {beside} nor {installed}\nbuild it with `cargo build --release -p {package}`, or name it with {flag}"
        ))
    })
}

/// The file without links and dots: a program may change its folder before a child of it loads the library.
fn existing(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().filter(|path| path.is_file())
}
