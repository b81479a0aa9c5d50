//! The libraries that come with this executable.

use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// `given`, or the library called `name` beside the executable (a build) or in `../lib/gpupool` (an installation).
///
/// # Errors
/// There is no such file; says where it was looked for and which flag names another.
pub fn find(name: &str, given: Option<&Path>, flag: &str, package: &str) -> Result<PathBuf, Failure> {
    if let Some(given) = given {
        return existing(given).ok_or_else(|| Failure::usage(format!("{flag} {}: no such file", given.display())));
    }
    let executable = std::env::current_exe()
        .map_err(|error| Failure::broken(format!("can not find this executable: {error}; use {flag}")))?;
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
