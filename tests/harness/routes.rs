//! What the shim hooks, and the comparison of one route to the driver, bare and under the shim.

use crate::{Build, Driver, Output, Run, driver_folder};
use std::collections::BTreeSet;
use std::fs;
use tempfile::NamedTempFile;

const SHIM: &str = "libgpupool.so:";
const DRIVER: &str = "libcuda.so.1:";

/// The rows of the hook table, asked of the shim itself.
pub fn hooks() -> BTreeSet<String> {
    let told = Run::program("hook_names").shim().go();
    told.succeeds();
    let names: BTreeSet<String> = told.stdout.lines().map(str::to_owned).collect();
    assert!(names.contains("cuMemAlloc_v2"), "the shim's list lacks cuMemAlloc_v2: {names:?}");
    names
}

/// The CUDA version of the newest hooked function.
const NEWEST: &str = "13030";

/// A route to the driver and the names asked on it.
pub struct Route {
    names: Vec<String>,
    hooks: BTreeSet<String>,
    driver: Driver,
}

impl Route {
    /// Asks `names` of `driver`.
    pub fn new(names: Vec<String>, driver: Driver) -> Self {
        Self { names, hooks: hooks(), driver }
    }

    /// Asks through `resolve` with these arguments (`dlsym`; `gpa2` and flags), bare and under the shim with these
    /// variables, and returns the hooks that the driver answered for.
    #[track_caller]
    pub fn ask(&self, route: &str, flags: &str, variables: &[(&str, &str)]) -> BTreeSet<String> {
        let file = NamedTempFile::new().unwrap_or_else(|e| panic!("no temporary file: {e}"));
        fs::write(file.path(), self.names.join("\n") + "\n").unwrap_or_else(|e| panic!("cannot write the names: {e}"));
        let run = Run::program("resolve").arg(route).arg(file.path()).arg(flags).driver(self.driver.clone());
        // An older driver keeps back what came later than itself.
        let run = run.env("SIMCUDA_DRIVER", NEWEST);
        let shim = variables.iter().fold(run.clone().shim(), |run, (name, value)| run.env(name, value));
        let shim = shim.go();
        // Mode trace has something to say to whoever asked for it; without a variable there is nothing.
        if variables.is_empty() {
            shim.is_quiet();
        }
        self.compare(&run.go(), &shim)
    }

    /// This route without the rows that this driver is too old for. A library's exports are fixed when it is built, so
    /// for a program that links such a name, or looks it up without a handle, the shim's export is there where the driver
    /// has none; every other route answers as the driver does.
    pub fn of_this_driver(&self) -> Self {
        let known = self.ask("dlsym", "", &[]);
        let names = self.names.iter().filter(|name| known.contains(*name) || !self.hooks.contains(*name));
        Self { names: names.cloned().collect(), hooks: self.hooks.clone(), driver: self.driver.clone() }
    }

    /// Compares bare and shim for a program that links the driver; the hooked functions that it reached.
    #[track_caller]
    pub fn linked(&self) -> BTreeSet<String> {
        let (folder, version) = match &self.driver {
            Driver::In(folder) => (folder.as_path(), folder.file_name().unwrap_or_default().to_string_lossy()),
            Driver::Simulated | Driver::System => (driver_folder(), "simulated".into()),
        };
        let build = Build::program("resolve_linked").output(&format!("resolve_linked-{version}"));
        let run = Run::built(&build.names(&self.names, folder)).driver(self.driver.clone());
        let shim = run.clone().shim().go();
        shim.is_quiet();
        self.compare(&run.go(), &shim)
    }

    /// Line by line: ours where the driver has a function that is hooked, the driver's own answer everywhere else.
    #[track_caller]
    fn compare(&self, bare: &Output, shim: &Output) -> BTreeSet<String> {
        bare.succeeds();
        shim.succeeds();
        let (one, other): (Vec<_>, Vec<_>) = (bare.stdout.lines().collect(), shim.stdout.lines().collect());
        if one.len() != other.len() || one.is_empty() {
            shim.fail(&format!("{} lines, bare {}", other.len(), one.len()));
        }
        let mut reached = BTreeSet::new();
        for (bare_line, shim_line) in one.into_iter().zip(other) {
            let symbol = bare_line.split_once(DRIVER).map(|(_, symbol)| symbol);
            let expected = match symbol.filter(|symbol| self.hooks.contains(*symbol)) {
                Some(symbol) => {
                    reached.insert(symbol.to_owned());
                    bare_line.replace(DRIVER, SHIM)
                }
                None => bare_line.to_owned(),
            };
            if shim_line != expected {
                shim.fail(&format!("bare     {bare_line}\nshim     {shim_line}\nexpected {expected}"));
            }
        }
        reached
    }
}
