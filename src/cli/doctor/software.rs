//! Our own library, the interpreter and the settings.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use gpupool_config::{Mode, PREFIX, Settings, Toggle};
use gpupool_metrics::folder;
use gpupool_python::versions::UNDERSTOOD;
use serde_json::{Value, json};

use super::check::Check;
use crate::companion;
use crate::folder::Folder;
use crate::images;
use crate::log_settings;
use crate::preloadable;
use crate::terminal;

/// Prints the version, whether there is a GIL, and which interpreter it is.
const ASK_PYTHON: &str = "import sys; print(sys.version_info[0], sys.version_info[1], \
                          getattr(sys, '_is_gil_enabled', lambda: True)(), sys.implementation.name)";

/// Whether there is a library to preload.
pub fn library(given: Option<&Path>) -> Check {
    match companion::find(companion::POOL, given) {
        Ok(path) => {
            if let Err(failure) = preloadable::path(path.clone()) {
                return Check::broken(
                    "library",
                    failure.to_string(),
                    "`gpupool run` does not start until that is corrected",
                );
            }
            let facts = json!(path.to_string_lossy());
            match companion::foreign(&path) {
                None => Check::fine("library", path.display().to_string()),
                Some(warning) => Check::finding(
                    "library",
                    warning,
                    "another version may not know every setting that this command does",
                ),
            }
            .facts(facts)
        }
        Err(failure) => {
            let advice = "build it with `cargo build --release -p gpupool`, or name it with --library";
            Check::broken("library", failure.to_string(), advice)
        }
    }
}

/// Which interpreters' lines can be named in the log, and whether the one here is among them.
pub fn python() -> Check {
    let minors = UNDERSTOOD.map(|version| version.minor);
    let (first, last) = (minors[0], minors[minors.len() - 1]);
    let words = format!("lines of CPython 3.{first} to 3.{last} can be named");
    let here = ask_python();
    let facts = json!({"understood": minors.map(|minor| format!("3.{minor}")), "here": here});
    let check = match here.as_deref().map(|here| here.split_whitespace().collect::<Vec<_>>()) {
        None => Check::fine("python", format!("{words}; there is no python3 here")),
        Some(words_of_it) => match words_of_it.as_slice() {
            ["3", minor, gil, "cpython"] if minor.parse().is_ok_and(|minor| minors.contains(&minor)) => {
                if *gil == "True" {
                    Check::fine("python", format!("{words}; python3 is 3.{minor}"))
                } else {
                    Check::finding(
                        "python",
                        format!("{words}; python3 is a free-threaded 3.{minor}, whose lines cannot be"),
                        "findings name native functions there; use a build with the GIL to see lines",
                    )
                }
            }
            other => {
                let it = match other {
                    [major, minor, _, "cpython"] => format!("{major}.{minor}"),
                    [major, minor, _, name] => format!("{name} {major}.{minor}"),
                    unknown => unknown.join(" "),
                };
                Check::finding(
                    "python",
                    format!("{words}; python3 is {}", terminal::clean(&it)),
                    "findings name native functions there; use one of these versions to see lines",
                )
            }
        },
    };
    check.facts(facts)
}

fn ask_python() -> Option<String> {
    let answer = Command::new("python3")
        .args(["-I", "-S", "-c", ASK_PYTHON])
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    answer.status.success().then(|| String::from_utf8_lossy(&answer.stdout).trim().to_owned())
}

/// Whether there is a folder for what `run --fail-on` and `sim` write; neither starts without one.
pub fn temporary() -> Option<Check> {
    let error = Folder::create("gpupool-doctor-", "`gpupool sim` and `gpupool run --fail-on`", b"").err()?;
    Some(Check::finding("temporary", error.to_string(), "neither of them starts until that is corrected"))
}

/// Whether a process that starts here has a folder for its page, by which commands and other processes find it. The folder is made as it would make it.
pub fn page() -> Option<Check> {
    if Settings::read(std::env::vars_os()).is_ok_and(|settings| settings.metrics == Toggle::Off) {
        return None;
    }
    let refused = folder::Folder::own(&folder::Roots::new(std::env::var_os("XDG_RUNTIME_DIR"))).err()?;
    let words = format!("there is no folder for the page of a process: {}", folder::in_words(&refused));
    let advice = "gpupool ps, suspend and set find nobody, and programs do not ask each other for memory; give XDG_RUNTIME_DIR a folder that this user \
                  alone may write to (a container with a read-only root: --tmpfs /run/gpupool:mode=700)";
    Some(Check::finding("page", words, advice))
}

/// What launchers said of the job's ranks that is not understood.
pub fn ranks() -> Vec<Check> {
    let advice = "it is passed over, and the process is taken for the only one where nothing else tells; start it by the launcher, \
                  or unset the variable";
    let passed_over = gpupool_config::passed_over(std::env::vars_os());
    passed_over.into_iter().map(|problem| Check::finding("ranks", terminal::clean(&problem), advice)).collect()
}

/// The settings as the library will read them. `gpus`: the memory of each GPU, where there is a driver.
pub fn settings(gpus: Option<&[u64]>) -> Vec<Check> {
    let set: BTreeMap<String, String> = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, value)| name.starts_with(PREFIX) && !value.is_empty())
        .collect();
    let facts: Value = json!(set);
    let (mut of_the_log, mut of_gpus, mut without_effect) = (Vec::new(), Vec::new(), Vec::new());
    let mut checks = Vec::new();
    let problems = match Settings::read(std::env::vars_os()) {
        Ok(settings) if settings.mode == Mode::Off => {
            // `run` refuses these whatever the mode is.
            of_the_log = log_settings::problems(&settings);
            without_effect = settings.without_effect();
            let words = "GPUPOOL_MODE=off: nothing is intercepted";
            checks.push(Check::finding("settings", words, "unset GPUPOOL_MODE to use the pool").facts(facts.clone()));
            Vec::new()
        }
        Ok(settings) => {
            of_the_log = log_settings::problems(&settings);
            without_effect = settings.without_effect();
            // Of a setting without effect its folder does not matter.
            let of_folders = [
                (
                    images::none_come_back(&settings),
                    "`gpupool run` refuses to start with it; with a bare preload nothing comes back, and the program goes on",
                ),
                (
                    images::none_yet(&settings),
                    "gpupool checkpoint PID and this folder write one; until then the program begins anew",
                ),
                (
                    images::none_goes_there(&settings),
                    "the program is not suspended as long as that is so, and its log says so once",
                ),
            ];
            checks.extend(
                of_folders
                    .into_iter()
                    .filter_map(|(what, advice)| Some(Check::finding("settings", what?, advice).facts(facts.clone()))),
            );
            // Where the driver serves all, nothing looks at them.
            if settings.mode != Mode::Trace {
                of_gpus = gpus.map(|gpus| settings.check_gpus(gpus)).unwrap_or_default();
            }
            Vec::new()
        }
        Err(problems) => problems,
    };
    if !problems.is_empty() {
        let advice = "`gpupool run` refuses to start with it, and a bare preload does nothing";
        return problems
            .iter()
            .map(|problem| Check::broken("settings", problem.to_string(), advice).facts(facts.clone()))
            .collect();
    }
    if !of_the_log.is_empty() {
        let advice = "`gpupool run` refuses to start with it; a bare preload complains and goes on with the default";
        checks
            .extend(of_the_log.iter().map(|problem| Check::finding("settings", problem, advice).facts(facts.clone())));
    }
    let advice = "`gpupool run` starts it all the same: what this machine lacks the library finds out as the program first uses a GPU, says it, and leaves all memory to \
                  the driver";
    checks.extend(
        of_gpus.iter().map(|problem| Check::broken("settings", problem.to_string(), advice).facts(facts.clone())),
    );
    let advice = "the program starts all the same, and its log says so once; leave it out, or change what it needs";
    checks.extend(
        without_effect
            .iter()
            .map(|problem| Check::finding("settings", problem.to_string(), advice).facts(facts.clone())),
    );
    let without_unit = gpupool_config::without_unit(std::env::vars_os());
    checks.extend(without_unit.iter().map(|problem| {
        Check::finding("settings", problem.to_string(), "it is obeyed as it stands").facts(facts.clone())
    }));
    if !checks.is_empty() {
        return checks;
    }
    let words = if set.is_empty() { "all as by default" } else { "as follows, the rest as by default" };
    let below = set
        .iter()
        .map(|(name, value)| terminal::shorten(&terminal::clean(&format!("{name}={value}")), terminal::width() - 9));
    vec![Check::fine("settings", words).below(below.collect()).facts(facts)]
}
