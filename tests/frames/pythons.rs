//! The CPythons of this machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

/// One interpreter, and what it says of itself.
pub struct Python {
    pub path: PathBuf,
    /// "3.12.1".
    pub version: String,
    pub minor: u32,
    /// What a program that embeds it is built with, where that is here.
    pub embedding: Option<Embedding>,
}

/// Folder of the headers, the library to link with, and where the standard modules are found.
pub struct Embedding {
    pub include: PathBuf,
    pub library: PathBuf,
    pub prefix: PathBuf,
}

/// Every CPython from 3.10 to 3.14: `python3` and `python3.N` of PATH and of the system, those of pyenv, and a 3.14 that
/// `fetch_python.sh` brings where there is none. Says on stderr which ones these are.
pub fn all() -> &'static [Python] {
    static FOUND: OnceLock<Vec<Python>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let mut seen = BTreeSet::new();
        let mut found: Vec<Python> = candidates().iter().filter_map(|path| ask(path, &mut seen)).collect();
        if !found.iter().any(|python| python.minor == 14) {
            found.extend(fetch().and_then(|path| ask(&path, &mut seen)));
        }
        found.sort_by_key(|python| python.minor);
        for Python { path, version, .. } in &found {
            eprintln!("CPython {version}: {}", path.display());
        }
        for minor in (10..=14).filter(|minor| !found.iter().any(|python| python.minor == *minor)) {
            eprintln!("CPython 3.{minor}: not on this machine, not tested");
        }
        assert!(!found.is_empty(), "no CPython 3.10 to 3.14 on this machine; install one as python3");
        found
    })
}

fn candidates() -> Vec<PathBuf> {
    let names = || (10..=14).map(|minor| format!("python3.{minor}")).chain(["python3".to_owned()]);
    let mut folders: Vec<PathBuf> =
        env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
    folders.push("/usr/bin".into());
    folders.push("/usr/local/bin".into());
    let pyenv = env::var_os("PYENV_ROOT").map(PathBuf::from);
    if let Some(versions) = pyenv.or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".pyenv"))) {
        let versions = fs::read_dir(versions.join("versions")).into_iter().flatten().flatten();
        folders.extend(versions.map(|version| version.path().join("bin")));
    }
    folders.iter().flat_map(|folder| names().map(|name| folder.join(name))).filter(|path| path.exists()).collect()
}

/// What a python says of itself; `None` if it does not run, is no CPython of these versions, or was there before.
fn ask(path: &Path, seen: &mut BTreeSet<String>) -> Option<Python> {
    const QUESTION: &str = "import os, platform, sys, sysconfig
if platform.python_implementation() != 'CPython': sys.exit(1)
print(os.path.realpath(sys.executable) if sys.executable else sys.prefix)
print('%d.%d.%d' % sys.version_info[:3])
print(sys.version_info[1] if sys.version_info[0] == 3 else 0)
print(sys.base_prefix)
print(sysconfig.get_path('include'))
print(os.path.join(sysconfig.get_config_var('LIBDIR'), 'libpython%s.so' % sysconfig.get_config_var('LDVERSION')))";
    let told = Command::new(path).args(["-c", QUESTION]).output().ok().filter(|told| told.status.success())?;
    let told = String::from_utf8(told.stdout).ok()?;
    let mut lines = told.lines();
    let (file, version, minor) = (lines.next()?, lines.next()?, lines.next()?.parse().ok()?);
    let mut folders = lines.map(PathBuf::from);
    let (prefix, include, library) = (folders.next()?, folders.next()?, folders.next()?);
    if !(10..=14).contains(&minor) || !seen.insert(format!("{file} {version}")) {
        return None;
    }
    let embedding =
        (include.join("Python.h").exists() && library.exists()).then_some(Embedding { include, library, prefix });
    Some(Python { path: path.to_path_buf(), version: version.to_owned(), minor, embedding })
}

fn fetch() -> Option<PathBuf> {
    let folder = artifacts().join("cpython-3.14");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("fetch_python.sh");
    let run = Command::new(&script).arg(&folder).status();
    assert!(run.as_ref().is_ok_and(|status| status.success()), "{} failed: {run:?}", script.display());
    Some(folder.join("python3.14")).filter(|path| path.exists())
}

/// `target/PROFILE`, where this test is too.
pub fn artifacts() -> PathBuf {
    let own = env::current_exe().unwrap_or_else(|error| panic!("own path unknown: {error}"));
    match own.ancestors().find(|folder| folder.ends_with("deps")).and_then(Path::parent) {
        Some(folder) => folder.to_path_buf(),
        None => panic!("{} is not in a cargo target folder; run it by cargo", own.display()),
    }
}

/// The library under test. In `deps`, because cargo copies to the folder above only what it was asked to build.
pub fn probe() -> PathBuf {
    let path = artifacts().join("deps/libframes_probe.so");
    assert!(path.exists(), "{} is missing; build it with: cargo build -p frames-probe", path.display());
    path
}
