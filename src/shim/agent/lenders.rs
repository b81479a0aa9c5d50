//! Keeps GPUs awake on which this process has memory and no context (`GPUPOOL_LENDERS=awake`): some seconds after the last
//! context on a GPU ended, of any process, it lowers its clocks, and others read its memory more slowly.
//!
//! A context of this process would be one more in the program. So a helper process holds it, one for all programs of a user
//! (`gpupool lenders`), which serves until the last connection ends: whoever is killed is no exception. The agent's thread says
//! over such a connection which GPUs it is about. It starts the helper where there is none, and never waits for it.
//!
//! The program may close the connection, as every descriptor (`serve/ipc/own.rs`); then there is soon another one. A helper that
//! ends by itself, or is ended, is started again after a minute.

use super::launch;
use crate::backing::open;
use crate::log;
use crate::process;
use crate::serve;
use crate::serve::ipc::Own;
use crate::serve::memory::{self, idle};
use crate::watch::context;
use gpupool_config::{Lenders, Mode};
use gpupool_cuda::{CuResult, Device};
use gpupool_events::LenderAwake;
use gpupool_metrics::folder::{Folder, Roots};
use gpupool_pool::{Claim, Place};
use gpupool_wire::Socket;
use gpupool_wire::lenders::{NO_DRIVER, ROOM, Request, State, UNSEEN, Uuid, decode_states, may_be_served};
use gpupool_wire::socket::Failure;
use once_cell::race::OnceBox;
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The least time between two looks, and between two while an answer is outstanding.
const PERIOD: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_millis(100);
/// How often to look whether the connection is still there.
const WATCH: Duration = Duration::from_secs(10);
/// How long a GPU stays awake on which there is no memory any more.
const LINGER: Duration = Duration::from_secs(10);
/// The least time between two starts of the helper.
const PACE: Duration = Duration::from_secs(60);

/// What the helper gets of the program's environment: where programs, libraries and the runtime folder are. Nothing that makes
/// a program of it that is watched, and neither a preload nor the GPUs that this program may see.
const VARIABLES: [&str; 4] = ["PATH", "HOME", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR"];
const PREFIXES: [&str; 3] = ["NVIDIA_", "CUDA_MPS_", "SIMCUDA_"];

/// What is needed to find or start the helper, as it was when the process started: the program may change its environment and
/// its folder later.
struct Surroundings {
    variables: Vec<(OsString, OsString)>,
    /// This library.
    library: Option<PathBuf>,
}

static SURROUNDINGS: OnceBox<Surroundings> = OnceBox::new();

/// Whether lending GPUs are to be kept awake.
pub fn is_wanted() -> bool {
    let settings = process::settings();
    settings.lenders == Lenders::Awake && matches!(settings.mode, Mode::Pool | Mode::Spill | Mode::Managed)
}

/// The process starts.
pub fn prepare() {
    if !is_wanted() {
        return;
    }
    let is_passed_on = |name: &OsStr| {
        let name = name.to_string_lossy();
        VARIABLES.contains(&&*name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let variables = std::env::vars_os().filter(|(name, _)| is_passed_on(name)).collect();
    let _ = SURROUNDINGS.set(Box::new(Surroundings { variables, library: own_file() }));
}

/// The file of this library.
fn own_file() -> Option<PathBuf> {
    // SAFETY: all-zero is a valid Dl_info; the call fills it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a static of this library, and `info` is writable.
    if unsafe { libc::dladdr((&raw const SURROUNDINGS).cast(), &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's string is NUL-terminated and lives as long as this library.
    let name = unsafe { std::ffi::CStr::from_ptr(info.dli_fname) };
    Path::new(OsStr::from_bytes(name.to_bytes())).canonicalize().ok()
}

impl Surroundings {
    fn variable(&self, name: &str) -> Option<&OsString> {
        self.variables.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// What the helper's files are called. Simulated machines have helpers of their own.
    fn name(&self) -> String {
        let Some(machine) = self.variable("SIMCUDA_MACHINE") else { return "lenders".to_owned() };
        let mut hasher = DefaultHasher::new();
        machine.hash(&mut hasher);
        format!("lenders-{:016x}", hasher.finish())
    }

    fn folder(&self) -> Result<Folder, String> {
        let list = |refused: Vec<_>| gpupool_metrics::folder::in_words(&refused);
        Folder::own(&Roots::new(self.variable("XDG_RUNTIME_DIR").cloned())).map(|(folder, _)| folder).map_err(list)
    }

    /// The command: beside the library (a build), where an installation has it, or on `PATH`.
    fn command(&self) -> Result<PathBuf, String> {
        let beside = self.library.iter().filter_map(|library| library.parent());
        // In a Python environment the library lies in lib/python3.X/site-packages/gpupool/lib.
        let places = ["gpupool", "../../bin/gpupool", "../../../../../bin/gpupool"];
        let own = beside.flat_map(|folder| {
            let known = if folder.ends_with("gpupool/lib") { places.as_slice() } else { &places[..2] };
            known.iter().map(|place| folder.join(place)).collect::<Vec<_>>()
        });
        let path = self.variable("PATH").map(OsString::as_os_str).unwrap_or_default();
        let mut all = own.chain(
            std::env::split_paths(path).filter(|folder| folder.is_absolute()).map(|folder| folder.join("gpupool")),
        );
        let is_program = |path: &PathBuf| {
            path.metadata().is_ok_and(|status| status.is_file() && status.permissions().mode() & 0o111 != 0)
        };
        all.find(is_program).ok_or_else(|| {
            let library = self.library.as_deref().unwrap_or(Path::new("libgpupool.so")).display();
            format!("there is no command `gpupool` beside {library} or on PATH, which would do it; install it there")
        })
    }

    fn start(&self) -> Result<Socket<Own>, String> {
        let command = self.command()?;
        let words = |error: &dyn std::fmt::Display| format!("{} cannot be started: {error}", command.display());
        let c_string = |bytes: &[u8]| CString::new(bytes).map_err(|error| words(&error));
        let connection = launch::CONNECTION.to_string();
        let arguments = ["gpupool", "lenders", "--connection", &connection, "--name", &self.name()].map(str::to_owned);
        let arguments = arguments.iter().map(|word| c_string(word.as_bytes())).collect::<Result<Vec<_>, _>>()?;
        let variables = self.variables.iter().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat());
        let variables = variables.map(|variable| c_string(&variable)).collect::<Result<Vec<_>, _>>()?;
        let (own, other) = Socket::<Own>::pair().map_err(|error| words(&error))?;
        let program = c_string(&command.clone().into_os_string().into_vec())?;
        launch::start(program, &arguments, &variables, &other).map_err(|error| words(&error))?;
        Ok(own)
    }
}

/// A connection to the helper.
struct Connection {
    socket: Socket<Own>,
    /// What it was told last.
    told: Vec<Uuid>,
    /// It was told something, and has not answered.
    waits: bool,
    /// It has answered once.
    answered: bool,
    /// This process started the helper for it.
    started: bool,
}

/// What came over a connection.
enum Heard {
    Nothing,
    States(Vec<State>),
    /// Nothing will come any more; why, where that is to be told.
    End(Option<String>),
}

impl Connection {
    fn hear(&self) -> Heard {
        if !self.socket.is_there() {
            return Heard::End(None);
        }
        let mut buffer = [0; ROOM];
        let received = match self.socket.receive(&mut buffer) {
            Ok(received) => received.bytes,
            Err(Failure::System(error)) if error.kind() == std::io::ErrorKind::WouldBlock => return Heard::Nothing,
            Err(_) => 0,
        };
        match decode_states(&buffer[..received]) {
            Ok(states) => Heard::States(states),
            // One that is just leaving answers nobody; the next is started.
            Err(_) if received == 0 => {
                let at_once = self.started && !self.answered;
                Heard::End(at_once.then(|| "the helper ended before it held a context".to_owned()))
            }
            Err(unread) => Heard::End(Some(format!("the helper of another program cannot be used: {unread}"))),
        }
    }
}

/// The agent's part in it.
#[derive(Default)]
pub struct Awake {
    /// GPUs that lend, by ordinal, and when they were last seen to.
    lending: BTreeMap<u32, (Uuid, Instant)>,
    connection: Option<Connection>,
    looked: Option<Instant>,
    /// When the helper was started last.
    started: Option<Instant>,
    /// GPUs of which the log says that they are awake over this connection.
    noted: Vec<Uuid>,
}

impl Awake {
    /// `None` where that is not wanted.
    pub fn new() -> Option<Self> {
        is_wanted().then(Self::default)
    }

    /// Looks, if it is time to, and says what has changed; how long nothing need be done. `None`: until something changes.
    pub fn look(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let waits = |connection: &Option<Connection>| connection.as_ref().is_some_and(|connection| connection.waits);
        let step = if waits(&self.connection) { SOON } else { PERIOD };
        let left = self.looked.map_or(Duration::ZERO, |looked| step.saturating_sub(now - looked));
        if !left.is_zero() {
            return Some(left);
        }
        self.looked = Some(now);
        self.hear();
        self.look_who_lends(now);
        if self.lending.is_empty() {
            self.connection = None;
            return None;
        }
        if self.connection.is_none() {
            self.connect(now);
        }
        self.tell();
        Some(if waits(&self.connection) { SOON } else { WATCH })
    }

    /// GPUs with memory of this process's and no context of its.
    fn look_who_lends(&mut self, now: Instant) {
        let gpus = open::plan_made().map(|plan| plan.topology.gpus.as_slice()).unwrap_or_default();
        let usage = serve::usage().unwrap_or_default();
        let held =
            |place| usage.places.iter().filter(|usage| usage.place == place).map(|usage| usage.held).sum::<u64>();
        let steered = |place| memory::accounts().map_or(0, |accounts| accounts.of(Claim::Handles, place));
        for gpu in gpus {
            let place = Place::Gpu(gpu.ordinal);
            if held(place) + steered(place) > 0 && !context::is_on(Device::of(gpu.ordinal)) {
                self.lending.insert(gpu.ordinal, (gpu.uuid, now));
            }
        }
        self.lending.retain(|_, (_, seen)| now - *seen < LINGER);
    }

    fn connect(&mut self, now: Instant) {
        let Some(surroundings) = SURROUNDINGS.get() else { return };
        // It would leave at once.
        if let Err(why) = may_be_served() {
            return fails(why);
        }
        // Descriptors that a child of a fork would have as well.
        let Some(_part) = idle::Part::begin() else { return };
        let folder = match surroundings.folder() {
            Ok(folder) => folder,
            Err(why) => {
                return fails(format_args!("there is no folder in which programs could find each other: {why}"));
            }
        };
        let new = |socket, started| Connection { socket, told: Vec::new(), waits: false, answered: false, started };
        if let Ok(socket) = Socket::connect_in(folder.fd(), &format!("{}.sock", surroundings.name())) {
            self.connection = Some(new(socket, false));
        } else if self.started.is_none_or(|started| now - started >= PACE) {
            self.started = Some(now);
            match surroundings.start() {
                Ok(socket) => self.connection = Some(new(socket, true)),
                Err(why) => fails(why),
            }
        }
    }

    fn tell(&mut self) {
        let needs: Vec<Uuid> = self.lending.values().map(|(uuid, _)| *uuid).collect();
        let Some(connection) = self.connection.as_mut().filter(|connection| connection.told != needs) else { return };
        // One whose buffer is full is told the next time; the end of one is heard then.
        if connection.socket.is_there()
            && connection.socket.send(&Request::Keep(needs.clone()).encode(), &[] as &[OwnedFd]).is_ok()
        {
            connection.told = needs;
            connection.waits = true;
        }
    }

    fn hear(&mut self) {
        while let Some(connection) = &mut self.connection {
            match connection.hear() {
                Heard::Nothing => return,
                Heard::End(why) => {
                    // The program has closed it, and the helper may be gone for that.
                    if !connection.socket.is_there() {
                        self.started = None;
                    }
                    self.connection = None;
                    // The helper has let them go, or is about to: when they are awake again, that is news.
                    self.noted.clear();
                    if let Some(why) = why {
                        fails(why);
                    }
                }
                Heard::States(states) => {
                    (connection.waits, connection.answered) = (false, true);
                    self.note(&states);
                }
            }
        }
    }

    /// Says which GPUs are awake, each once a connection, and which cannot be.
    fn note(&mut self, states: &[State]) {
        let ordinal = |gpu: &Uuid| self.lending.iter().find(|(_, (uuid, _))| uuid == gpu).map(|(ordinal, _)| *ordinal);
        let mut noted = Vec::new();
        for State { gpu: uuid, result } in states {
            let Some(gpu) = ordinal(uuid) else { continue };
            let why = match *result {
                0 if self.noted.contains(uuid) => continue,
                0 => {
                    noted.push(*uuid);
                    log::emit(|| {
                        let text =
                            format!("GPU {gpu}, which only lends memory, is kept awake by a context of the helper's");
                        (LenderAwake { gpu }, text)
                    });
                    continue;
                }
                UNSEEN => "the helper sees no such GPU (it was started where that is hidden, or this is a part of one)"
                    .to_owned(),
                NO_DRIVER => "the helper cannot load libcuda.so.1".to_owned(),
                code => format!("no context can be had there: {}", CuResult(code)),
            };
            fails(format_args!("GPU {gpu}: {why}"));
        }
        self.noted.extend(noted);
    }
}

/// Says once why GPUs stay asleep.
fn fails(why: impl std::fmt::Display) {
    log::warn_once("lenders", format_args!("GPUPOOL_LENDERS=awake: GPUs that only lend memory stay asleep: {why}"));
}
