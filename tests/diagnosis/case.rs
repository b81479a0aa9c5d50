//! One program under `gpupool run` on the simulated machine, what was found, and what the report makes of its log.

use crate::normal::normal;
use gpupool_events::{Event, FindingMade, Reader};
use harness::{Build, Output, Run, library, repository};
use std::io::BufReader;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};
use tempfile::TempDir;

const GPUS: &str = "4x8GiB";

/// A program to be run, in a folder whose path has the same length everywhere: a report shortens long paths.
pub struct Case {
    folder: TempDir,
    command: Vec<PathBuf>,
    variables: Vec<(String, String)>,
    fault: Option<String>,
    machine: Option<PathBuf>,
    nvml: bool,
    same_bare: bool,
    code: i32,
}

/// What a case left behind.
pub struct Told {
    output: Output,
    folder: TempDir,
    log: PathBuf,
}

/// By `cp`: a file that this process had open for writing could not be executed while a child of another test's thread,
/// forked in that moment, still has it open.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status();
    assert!(copied.is_ok_and(|status| status.success()), "cannot copy {} to {}", from.display(), to.display());
}

pub fn folder() -> TempDir {
    let folder = tempfile::Builder::new().prefix("gp-").rand_bytes(6).tempdir_in("/tmp");
    folder.unwrap_or_else(|e| panic!("no folder in /tmp: {e}"))
}

impl Case {
    fn new(folder: TempDir, command: Vec<PathBuf>, arguments: &str) -> Self {
        let command = command.into_iter().chain(arguments.split_whitespace().map(PathBuf::from)).collect();
        Self {
            folder,
            command,
            variables: Vec::new(),
            fault: None,
            machine: None,
            nvml: false,
            same_bare: true,
            code: 0,
        }
    }

    /// A program of `tests/programs` whose functions have names at run time.
    pub fn program(name: &str, arguments: &str) -> Self {
        let folder = folder();
        let program = folder.path().join(name);
        copy(&Build::program(name).flag("-rdynamic").path(), &program);
        Self::new(folder, vec![program], arguments)
    }

    /// A client of `tests/clients`, and the package that it calls CUDA through, installed.
    pub fn client(name: &str, arguments: &str) -> Self {
        let (folder, clients) = (folder(), repository().join("tests/clients"));
        let (client, packages) = (folder.path().join(name), folder.path().join("site-packages"));
        copy(&clients.join(name), &client);
        fs::create_dir(&packages).unwrap_or_else(|e| panic!("cannot make {}: {e}", packages.display()));
        copy(&clients.join("cuda_calls.py"), &packages.join("cuda_calls.py"));
        let python = repository().join(".venv/bin/python3");
        assert!(python.exists(), "{} is missing; scripts/test.sh makes it", python.display());
        let case = Self::new(folder, vec![python, client], arguments);
        let packages = packages.display().to_string();
        case.env("PYTHONPATH", &packages).env("PYTHONDONTWRITEBYTECODE", "1")
    }

    /// Installs what stands for CuPy of this version beside the package of [`Case::client`].
    pub fn cupy(self, version: &str) -> Self {
        let packages = self.folder.path().join("site-packages");
        for folder in ["cupy".to_owned(), format!("cupy_cuda12x-{version}.dist-info")] {
            fs::create_dir(packages.join(&folder)).unwrap_or_else(|e| panic!("cannot make {folder}: {e}"));
        }
        copy(&repository().join("tests/clients/cupy_stand_in.py"), &packages.join("cupy/__init__.py"));
        self.env("CUPY_VERSION", version)
    }

    /// One more argument: a library built from `tests/programs`.
    pub fn library(mut self, name: &str) -> Self {
        let library = self.folder.path().join(format!("lib{name}.so"));
        copy(&Build::library(name, name).path(), &library);
        self.command.push(library);
        self
    }

    /// A variable of the environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A driver call that fails, as `SIMCUDA_FAULT` writes it.
    pub fn fault(mut self, fault: &str) -> Self {
        self.fault = Some(fault.to_owned());
        self
    }

    /// On the simulated machine of this file, which several programs may name. Each `gpupool sim` has one of its own otherwise.
    pub fn on_machine(mut self, file: PathBuf) -> Self {
        self.machine = Some(file);
        self
    }

    /// With NVML, which tells exactly what the driver alone lets one guess.
    pub fn nvml(mut self) -> Self {
        self.nvml = true;
        self
    }

    /// The program is meant to fare otherwise than bare.
    pub fn differs(mut self) -> Self {
        self.same_bare = false;
        self
    }

    /// The program ends with this code, also bare.
    pub fn fails_alike(mut self, code: i32) -> Self {
        self.code = code;
        self
    }

    /// The program ends with this code, and fares otherwise than bare.
    pub fn fails_with(self, code: i32) -> Self {
        self.fails_alike(code).differs()
    }

    fn with_variables(&self, run: Run) -> Run {
        let variables = self.variables.iter();
        variables.fold(run, |run, (name, value)| run.env(name, value))
    }

    /// Runs it to its end, also bare: what it prints and how it ends is the same.
    #[track_caller]
    pub fn go(self) -> Told {
        let (gpupool, log) = (library("gpupool"), self.folder.path().join("log.jsonl"));
        let mut run = Run::command(&gpupool).args("sim --gpus").arg(GPUS);
        if let Some(fault) = &self.fault {
            run = run.arg("--fault").arg(fault);
        }
        if !self.nvml {
            run = run.arg("--no-nvml");
        }
        run = run.arg("--");
        if let Some(file) = &self.machine {
            run = run.arg("env").arg(format!("SIMCUDA_MACHINE={}", file.display()));
        }
        run = run.arg(&gpupool).args("run --log").arg(&log).arg("--");
        let run = self.command.iter().fold(run, |run, word| run.arg(word));
        let mut output = self.with_variables(run).go();
        if self.same_bare {
            let bare = self.command[1..].iter().fold(Run::command(&self.command[0]), |run, word| run.arg(word));
            let bare = bare.env("SIMCUDA_GPUS", GPUS).env("SIMCUDA_FAULT", self.fault.as_deref().unwrap_or(""));
            output.same_as(&self.with_variables(bare).go());
        }
        output.exits(self.code);
        let file = fs::File::open(&log).unwrap_or_else(|e| output.fail(&format!("no log: {e}")));
        for line in Reader::new(BufReader::new(file)) {
            match line.map_err(|error| error.to_string()) {
                Ok(record) => output.records.push(record),
                Err(error) => output.fail(&format!("the log is damaged: {error}")),
            }
        }
        for record in &output.records {
            if let Event::Other { name, .. } = &record.event {
                output.fail(&format!("the log has an event that nobody knows: {name}"));
            }
        }
        Told { output, folder: self.folder, log }
    }
}

impl Deref for Told {
    type Target = Output;

    fn deref(&self) -> &Output {
        &self.output
    }
}

impl Told {
    /// Every finding of the log.
    pub fn findings(&self) -> Vec<&FindingMade> {
        let events = self.records.iter().map(|record| &record.event);
        events.filter_map(|event| if let Event::FindingMade(made) = event { Some(made) } else { None }).collect()
    }

    /// The findings are these, in this order, and each was said on stderr once.
    #[track_caller]
    pub fn finds(&self, codes: &[&str]) -> &Self {
        let found: Vec<&str> = self.findings().iter().map(|made| made.code.as_str()).collect();
        if found != codes {
            self.fail(&format!("expected the findings {codes:?}, not {found:?}"));
        }
        let said = self.stderr.lines().filter(|line| line.starts_with("gpupool: warning: GP0")).count();
        if said != codes.len() {
            self.fail(&format!("expected {} findings on stderr, not {said}", codes.len()));
        }
        self
    }

    /// Nothing is wrong, and nothing is said.
    #[track_caller]
    pub fn finds_nothing(&self) -> &Self {
        self.finds(&[]).is_quiet();
        self
    }

    /// The program's line that the only finding names: `contexts.py:12 in warm_up`, `look in contexts`.
    #[track_caller]
    pub fn place(&self) -> String {
        let [made] = self.findings()[..] else { self.fail("expected one finding") };
        let Some(site) = &made.site else { self.fail("the finding has no place") };
        let file = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
        match (site.program_frame(), site.native.first()) {
            (Some(frame), _) => format!("{}:{} in {}", file(&frame.file), frame.line, frame.function),
            (None, Some(frame)) => {
                format!("{} in {}", frame.symbol.as_deref().unwrap_or("no name"), file(&frame.object))
            }
            (None, None) => "unknown".to_owned(),
        }
    }

    /// What stderr and the report say is what `expected/NAME.txt` holds.
    #[track_caller]
    pub fn reads(&self, name: &str) -> &Self {
        let text = format!("--- stderr\n{}--- gpupool report\n{}", self.stderr, report(&[self]));
        compare(name, &normal(&text, &[self]));
        self
    }

    /// The folder that it ran in and the log is in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The ids of processes in its log.
    pub fn processes(&self) -> Vec<u32> {
        let mut processes: Vec<u32> = self.records.iter().map(|record| record.pid).collect();
        processes.sort_unstable();
        processes.dedup();
        processes
    }
}

/// `gpupool report` on the logs of these.
#[track_caller]
pub fn report(all: &[&Told]) -> String {
    let run = all.iter().fold(Run::command(library("gpupool")).arg("report"), |run, told| run.arg(&told.log));
    let output = run.go();
    output.succeeds().is_quiet();
    if let Some(line) = output.stdout.lines().find(|line| line.chars().count() > 80) {
        output.fail(&format!("wider than a terminal: {line}"));
    }
    output.stdout
}

/// The files of texts that people read.
pub fn expected_folder() -> PathBuf {
    repository().join("tests/diagnosis/expected")
}

/// Compares with a file of `expected`. `UPDATE_EXPECTED=1` writes the file instead; look at the difference then.
#[track_caller]
pub fn compare(name: &str, text: &str) {
    let path = expected_folder().join(format!("{name}.txt"));
    if env::var_os("UPDATE_EXPECTED").is_some() {
        fs::write(&path, text).unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
    }
    let expected = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(text == expected, "not as {name}; UPDATE_EXPECTED=1 writes it anew. Now:\n{text}\nexpected:\n{expected}");
}
