//! Pointer routing against NVIDIA's own libcuda, which answers symbol lookups without a GPU. Three major versions come from
//! Debian's archive; where it cannot be reached, the reason is printed and nothing is claimed.

use harness::{Driver, Route, Run, artifact_folder, repository};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A folder a driver version, fetched once and kept in the target folder; none where they cannot be had.
fn drivers() -> &'static [PathBuf] {
    static DRIVERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    DRIVERS.get_or_init(|| {
        let folder = artifact_folder().join("harness/libcuda");
        if fetched(&folder).len() < 3 {
            let script = repository().join("tests/clients/fetch_libcuda.sh");
            let told = Run::command("sh").arg(script).arg(&folder).go();
            // 3 is the script's way to say that this machine cannot fetch; all else is a fault of the script.
            if told.status.code() == Some(3) {
                print!("{}", told.stdout);
                return Vec::new();
            }
            told.succeeds();
        }
        fetched(&folder)
    })
}

fn fetched(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<_> = entries.filter(|path| path.join("libcuda.so.1").exists()).collect();
    found.sort();
    found
}

/// Every `cu…` name that the library exports.
fn exports(driver: &Path) -> Vec<String> {
    let listed = Run::command("nm").args("-D --defined-only").arg(driver.join("libcuda.so.1")).go();
    listed.succeeds();
    let names = listed.stdout.lines().filter_map(|line| line.split_whitespace().nth(2));
    let names = names.map(|name| name.split_once('@').map_or(name, |(name, _)| name));
    let names: Vec<String> = names.filter(|name| name.starts_with("cu")).map(str::to_owned).collect();
    assert!(names.len() > 500, "{} exports only {} names", driver.display(), names.len());
    names
}

#[test]
fn three_major_versions_are_covered() {
    let majors: std::collections::BTreeSet<_> = drivers()
        .iter()
        .filter_map(|path| path.file_name()?.to_str()?.split_once('.').map(|(major, _)| major))
        .collect();
    assert!(majors.is_empty() || majors.len() >= 3, "{majors:?}");
}

#[test]
fn every_export_resolves_as_bare_except_our_rows() {
    for driver in drivers() {
        let route = Route::new(exports(driver), Driver::In(driver.clone()));
        let by_dlsym = route.ask("dlsym", "", &[]);
        assert!(by_dlsym.len() > 40, "{}: only {by_dlsym:?}", driver.display());
        for (form, flags) in [("gpa1", "0"), ("gpa1", "2"), ("gpa2", "0"), ("gpa2", "1"), ("gpa2", "2")] {
            let reached = route.ask(form, flags, &[]);
            assert!(reached.contains("cuMemAlloc_v2"), "{}: {form} flags {flags}: {reached:?}", driver.display());
        }
    }
}

#[test]
fn a_linked_program_gets_our_rows() {
    for driver in drivers() {
        let route = Route::new(exports(driver), Driver::In(driver.clone())).of_this_driver();
        assert_eq!(route.linked(), route.ask("dlsym", "", &[]), "{}", driver.display());
    }
}

#[test]
fn corner_answers_are_the_drivers() {
    for driver in drivers() {
        Run::program("resolver_answers").driver(Driver::In(driver.clone())).same_under_shim(&[]).succeeds().is_quiet();
    }
}

#[test]
fn without_a_gpu_init_fails_as_bare() {
    for driver in drivers() {
        let run = Run::program("bad_input").driver(Driver::In(driver.clone()));
        let bare = run.clone().go();
        run.shim().go().same_as(&bare);
    }
}
