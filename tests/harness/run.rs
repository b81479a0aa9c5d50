//! One run of one program: what it is, the driver it finds, and whether the shim is preloaded.

use crate::artifacts::{driver_folder, driver_folder_with_nvml, library, repository};
use crate::{Build, Output, Running};
use gpupool_events::Reader;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{BufReader, Read};
use std::os::unix::fs::{DirBuilderExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{env, fs, thread};

/// What a program gets for `libcuda.so.1`.
#[derive(Clone, Debug, Default)]
pub enum Driver {
    /// The simulated driver.
    #[default]
    Simulated,
    /// The `libcuda.so.1` in this folder.
    In(PathBuf),
    /// Only what the system has: on most machines that run tests, nothing.
    System,
}

/// The file that a machine of several processes has in the run's folder.
const MACHINE: &str = "machine";

/// The folder that a run's processes have for their metrics pages, as `XDG_RUNTIME_DIR`.
pub(crate) const SESSION: &str = "session";

/// The file in the run's folder that a log is written to.
pub(crate) const LOG: &str = "log.jsonl";

/// A program that hangs is ended after this long, and its test fails with what it had said.
const LIMIT: Duration = Duration::from_secs(120);

/// A run to be made; each method returns it changed, [`Run::go`] makes it.
#[derive(Clone, Debug)]
pub struct Run {
    program: OsString,
    arguments: Vec<OsString>,
    variables: BTreeMap<String, OsString>,
    preload: Vec<PathBuf>,
    driver: Driver,
    logged: bool,
    reported: bool,
    may_violate: bool,
    machine: bool,
    nvml: bool,
    user: Option<u32>,
}

impl Run {
    /// A program of `tests/programs`.
    pub fn program(name: &str) -> Self {
        Self::built(&Build::program(name))
    }

    /// A program compiled in its own way.
    pub fn built(build: &Build) -> Self {
        Self::command(build.path())
    }

    /// Any command.
    pub fn command(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            arguments: Vec::new(),
            variables: BTreeMap::new(),
            preload: Vec::new(),
            driver: Driver::Simulated,
            logged: false,
            reported: false,
            may_violate: false,
            machine: false,
            nvml: false,
            user: None,
        }
    }

    /// A Python client of `tests/clients`, in the project's virtual environment.
    pub fn client(name: &str) -> Self {
        let python = repository().join(".venv/bin/python3");
        if !python.exists() {
            panic!(
                "{} is missing; make it with: python3 -m venv .venv && .venv/bin/pip install -r tests/clients/requirements.txt \
                 (scripts/test.sh does so)",
                python.display()
            );
        }
        // Bytecode written into the repository by one run would be a file that the next one finds.
        Self::command(python).env("PYTHONDONTWRITEBYTECODE", "1").arg(repository().join("tests/clients").join(name))
    }

    /// One more argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Arguments separated by blanks.
    pub fn args(self, arguments: &str) -> Self {
        arguments.split_whitespace().fold(self, |run, argument| run.arg(argument))
    }

    /// A variable of the environment.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.variables.insert(name.to_owned(), value.as_ref().to_owned());
        self
    }

    /// The simulated machine's GPUs, `4x256MiB`. A context costs 16 MiB there instead of 523, so that small GPUs, whose
    /// memory a test can afford to write, are mostly free.
    pub fn sim(self, gpus: &str) -> Self {
        self.env("SIMCUDA_GPUS", gpus).env("SIMCUDA_CONTEXT_MIB", "16")
    }

    /// Puts all processes of the run on one machine, whose GPUs and host they share. Otherwise each has one of its own.
    pub fn machine(mut self) -> Self {
        self.machine = true;
        self
    }

    /// Puts the simulated NVML beside the simulated driver. Without it programs find none, as in many containers.
    pub fn nvml(mut self) -> Self {
        self.nvml = true;
        self
    }

    /// Takes it away again, where whoever made the run has put it there.
    pub fn without_nvml(mut self) -> Self {
        self.nvml = false;
        self
    }

    /// As another user, to whom the run's folder is given ([`Run::start`] alone); only root can.
    pub fn user(mut self, user: u32) -> Self {
        self.user = Some(user);
        self
    }

    /// Another driver than the simulated one.
    pub fn driver(mut self, driver: Driver) -> Self {
        self.driver = driver;
        self
    }

    /// Preloads the shim, after whatever was preloaded before.
    pub fn shim(self) -> Self {
        self.preload(library("libgpupool.so"))
    }

    /// Preloads any library.
    pub fn preload(mut self, library: PathBuf) -> Self {
        self.preload.push(library);
        self
    }

    /// Has the shim write its log at level debug, to be found in [`Output::records`].
    pub fn log(mut self) -> Self {
        self.logged = true;
        self
    }

    /// Has the simulated driver write its report, to be found in [`Output::report`].
    pub fn report(mut self) -> Self {
        self.reported = true;
        self
    }

    /// The simulated driver is strict: a run in which memory was taken from under unfinished work fails its test. Not this
    /// one, which is looked at for that by [`Output::violations`].
    pub fn may_violate(mut self) -> Self {
        self.may_violate = true;
        self
    }

    /// Runs it bare and then under the shim with `settings` (`NAME=VALUE`), and expects the same output and status.
    #[track_caller]
    pub fn same_under_shim(&self, settings: &[&str]) -> Output {
        let bare = self.clone().go();
        let mut run = self.clone().shim();
        for setting in settings {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            run = run.env(name, value);
        }
        let shim = run.go();
        shim.same_as(&bare);
        shim
    }

    /// Runs it to its end.
    #[track_caller]
    pub fn go(self) -> Output {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("no temporary folder: {e}"));
        let session = folder.path().join(SESSION);
        make_session(&session);
        let (log, report) = (folder.path().join(LOG), folder.path().join("report.json"));
        let violations = folder.path().join("violations");
        let mut command = self.command_in(folder.path(), &log, &report);
        command.env("SIMCUDA_VIOLATIONS", &violations);
        let description = describe(&command);
        let (status, stdout, stderr) = wait(command, &description);
        let mut output = Output {
            description,
            status,
            stdout,
            stderr,
            records: Vec::new(),
            report: fs::read_to_string(&report).ok().and_then(|text| serde_json::from_str(&text).ok()),
            files: files_in(folder.path(), &[&log, &report, &violations, &folder.path().join(MACHINE), &session]),
            pages: files_in(&session, &[]),
            // No process makes the file before it has something to say.
            violations: fs::read_to_string(&violations).unwrap_or_default().lines().map(str::to_owned).collect(),
        };
        if self.logged {
            match fs::File::open(&log) {
                Ok(file) => {
                    for line in Reader::new(BufReader::new(file)) {
                        match line {
                            Ok(record) => output.records.push(record),
                            Err(error) => output.fail(&format!("the log is damaged: {error}")),
                        }
                    }
                }
                // A program that never calls the driver makes no log.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => output.fail(&format!("the log cannot be read: {e}")),
            }
        }
        if !self.may_violate && !output.violations.is_empty() {
            output.fail(&format!("did what a real driver punishes now and then:\n{}", output.violations.join("\n")));
        }
        output
    }

    /// Starts it, to be told what to do line by line. Its standard error is the test's. `session`: another folder for pages
    /// than one of its own.
    #[track_caller]
    pub fn start(self, session: Option<&Path>) -> Running {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("no temporary folder: {e}"));
        make_session(&folder.path().join(SESSION));
        let mut command = self.command_in(folder.path(), &folder.path().join(LOG), &folder.path().join("report"));
        if let Some(session) = session {
            command.env("XDG_RUNTIME_DIR", session);
        }
        if let Some(user) = self.user {
            for path in [folder.path(), &folder.path().join(SESSION)] {
                chown(path, Some(user), Some(user))
                    .unwrap_or_else(|e| panic!("cannot give {} away: {e}", path.display()));
            }
            command.uid(user).gid(user);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {}: {e}", describe(&command)));
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = BufReader::new(output.unwrap_or_else(|| panic!("no pipe to it")));
        Running { child, input, output, folder }
    }

    fn command_in(&self, folder: &Path, log: &Path, report: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).current_dir(folder).env_clear().stdin(Stdio::null());
        command.env("PATH", env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()));
        command.env("HOME", folder).env("TMPDIR", folder).env("LC_ALL", "C");
        command.env("XDG_RUNTIME_DIR", folder.join(SESSION));
        match &self.driver {
            Driver::Simulated if self.nvml => drop(command.env("LD_LIBRARY_PATH", driver_folder_with_nvml())),
            Driver::Simulated => drop(command.env("LD_LIBRARY_PATH", driver_folder())),
            Driver::In(folder) => drop(command.env("LD_LIBRARY_PATH", folder)),
            Driver::System => {}
        }
        command.env("SIMCUDA_STRICT", "on");
        if self.machine {
            command.env("SIMCUDA_MACHINE", folder.join(MACHINE));
        }
        if self.reported {
            command.env("SIMCUDA_REPORT", report);
        }
        if self.logged {
            command.env("GPUPOOL_LOG_FILE", log).env("GPUPOOL_LOG", "debug");
        }
        command.envs(&self.variables);
        if !self.preload.is_empty() {
            let list: Vec<_> = self.preload.iter().map(|path| path.as_os_str()).collect();
            command.env("LD_PRELOAD", list.join(OsStr::new(":")));
        }
        command
    }
}

/// The command as a person would type it, with the variables that matter.
fn describe(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| Some((name.to_str()?, value?.to_string_lossy())));
    let variables: String = variables
        .filter(|(name, _)| !["PATH", "HOME", "TMPDIR", "LC_ALL", "XDG_RUNTIME_DIR"].contains(name))
        .map(|(name, value)| format!("{name}={value} "))
        .collect();
    let arguments: String = command.get_args().map(|argument| format!(" {}", argument.to_string_lossy())).collect();
    format!("{variables}{}{arguments}", command.get_program().to_string_lossy())
}

/// Reads both streams to their ends while the program runs: a pipe that nobody empties would stop it.
#[track_caller]
fn wait(mut command: Command, description: &str) -> (std::process::ExitStatus, String, String) {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("cannot start {description}: {e}"));
    let (send, receive) = mpsc::channel();
    let streams: [(usize, Option<Box<dyn Read + Send>>); 2] =
        [(0, child.stdout.take().map(|s| Box::new(s) as _)), (1, child.stderr.take().map(|s| Box::new(s) as _))];
    for (index, stream) in streams {
        let (send, mut stream) = (send.clone(), stream.unwrap_or_else(|| panic!("no pipe to {description}")));
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read until an error is still what the program said.
            let _ = stream.read_to_end(&mut bytes);
            let _ = send.send((index, String::from_utf8_lossy(&bytes).into_owned()));
        });
    }
    let mut texts = [String::new(), String::new()];
    let mut hung = false;
    for _ in 0..2 {
        let received = receive.recv_timeout(LIMIT).or_else(|_| {
            hung = true;
            let _ = child.kill();
            receive.recv_timeout(LIMIT)
        });
        match received {
            Ok((index, text)) => texts[index] = text,
            Err(e) => panic!("{description} does not end and cannot be ended: {e}"),
        }
    }
    let status = child.wait().unwrap_or_else(|e| panic!("lost {description}: {e}"));
    let [stdout, stderr] = texts;
    if hung {
        panic!("{description} did not end within {LIMIT:?}\n--- stdout\n{stdout}--- stderr\n{stderr}");
    }
    (status, stdout, stderr)
}

fn make_session(session: &Path) {
    fs::DirBuilder::new().mode(0o700).create(session).unwrap_or_else(|e| panic!("no folder for pages: {e}"));
}

/// Names of what lies in `folder`, except these files.
fn files_in(folder: &Path, except: &[&Path]) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| !except.contains(&path.as_path())).map(|path| path.display().to_string()).collect()
}
