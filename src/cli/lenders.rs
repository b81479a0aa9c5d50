//! The helper that keeps GPUs awake which only lend memory (`GPUPOOL_LENDERS=awake`): it holds a context on each as long as any
//! program's connection names it, and ends with the last connection. The library starts it; nobody else has a use for it.
//!
//! There is one for each user and machine: it has the lock of a file in the runtime folder, and a socket beside it. A program
//! that finds nobody listening starts this command with one end of a connection. Whoever then gets the lock serves; whoever
//! does not passes its connection on to the one that has, so programs that start at once need not agree before.
//!
//! Helpers of several users do not talk, and need not: a context of anybody's keeps a GPU awake. Where NVML lists one of theirs on a GPU, this one
//! makes no context there, which would take half a GiB for nothing, and looks every second whether that is so yet; a GPU stays awake for two seconds
//! after the last. One helper for all users would have to be trusted by all of them (it decides what GPUs a program is told to be awake), and outlive
//! the session of whoever happened to start it. In a container, where NVML tells numbers of processes that mean nothing, and where others' names
//! are hidden, each user's helper has a context as if it were alone. Two that look at the same moment both have one.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use gpupool_cuda::{CuResult, Device};
use gpupool_machine::Nvml;
use gpupool_metrics::folder::{Folder, Roots};
use gpupool_wire::lenders::{NO_DRIVER, ROOM, Request, State, UNSEEN, Uuid, encode_states};
use gpupool_wire::socket::{Failure as Lost, wait};
use gpupool_wire::{Socket, Unread};

use crate::failure::Failure;

/// How long to look for the helper that has the lock. One that ends has closed its contexts by then.
const PATIENCE: Duration = Duration::from_secs(30);
const NAP: Duration = Duration::from_millis(10);
/// How often to look whether the helper of another user still keeps a GPU awake: a GPU does not fall asleep sooner.
const LOOK: Duration = Duration::from_secs(1);
/// What the kernel calls a process of this command.
const COMMAND: &str = "gpupool";

/// Keep lending GPUs awake: how the library starts the command for itself
#[derive(clap::Args)]
pub struct Args {
    /// The descriptor of the first connection
    #[arg(long)]
    connection: RawFd,
    /// What the files in the runtime folder are called
    #[arg(long)]
    name: String,
}

/// Serves until the last connection ends, or hands this one to whoever serves.
///
/// # Errors
/// There is no folder, lock or socket; nobody reads it, and the end of the connection tells the program.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let broken = |what: &str, error: std::io::Error| Failure::broken(format!("lenders: {what}: {error}"));
    let first = connection(args.connection).map_err(|error| broken("no connection", error))?;
    let roots = Roots::new(std::env::var_os("XDG_RUNTIME_DIR"));
    let (folder, _) = Folder::own(&roots).map_err(|_| Failure::broken("lenders: no folder for a lock"))?;
    let (lock, socket) = (format!("{}.lock", args.name), format!("{}.sock", args.name));
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(_locked) = lock_of(&folder, &lock).map_err(|error| broken("no lock", error))? {
            let served = serve(first, &folder, &socket).map_err(|error| broken("no socket", error));
            // Before it is free: who has it open already sees that it is another file than the one of that name.
            let _ = std::fs::remove_file(in_folder(&folder, &lock));
            return served;
        }
        if let Ok(other) = Socket::<OwnedFd>::connect_in(folder.fd(), &socket)
            && other.send(&Request::Adopt.encode(), &[&first]).is_ok()
        {
            return Ok(ExitCode::SUCCESS);
        }
        if Instant::now() > until {
            return Err(Failure::broken("lenders: the helper that has the lock does not answer"));
        }
        sleep(NAP);
    }
}

fn connection(number: RawFd) -> std::io::Result<Socket> {
    // SAFETY: the number is tested by the call.
    if number < 3 || unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: it is open, and this process was started with it for this purpose; nothing here has opened a file yet.
    Socket::adopt(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The file of this name, made if it is not there, with its lock; `None` while somebody else has it.
fn lock_of(folder: &Folder, name: &str) -> std::io::Result<Option<File>> {
    let path = in_folder(folder, name);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(&path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let own = file.metadata()?;
    let named = std::fs::symlink_metadata(path).ok();
    let is_named = named.is_some_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino()));
    Ok(is_named.then_some(file))
}

fn in_folder(folder: &Folder, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", folder.fd().as_raw_fd())
}

/// One program.
struct Program {
    socket: Socket,
    /// The GPUs that it needs awake.
    needs: Vec<Uuid>,
}

impl Program {
    /// `None` for a process of another user, which the folder keeps out already.
    fn new(socket: Socket) -> Option<Self> {
        socket.peer().ok()?.is_same_user().ok()?;
        Some(Self { socket, needs: Vec::new() })
    }
}

fn serve(first: Socket, folder: &Folder, name: &str) -> std::io::Result<ExitCode> {
    let mut programs: Vec<Program> = Program::new(first).into_iter().collect();
    let mut awake = Awake::default();
    loop {
        // Left by one that was killed, or just now by this one.
        let _ = std::fs::remove_file(in_folder(folder, name));
        let listener = Socket::<OwnedFd>::listen_in(folder.fd(), name)?;
        while !programs.is_empty() {
            turn(&listener, &mut programs, &mut awake)?;
        }
        // From here on nobody finds it; who has found it before is served.
        std::fs::remove_file(in_folder(folder, name))?;
        while let Ok(socket) = listener.accept() {
            programs.extend(Program::new(socket));
        }
        if programs.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// Waits until somebody says something, connects or ends, and does what it asks for.
fn turn(listener: &Socket, programs: &mut Vec<Program>, awake: &mut Awake) -> std::io::Result<()> {
    let sockets = std::iter::once(listener).chain(programs.iter().map(|program| &program.socket));
    let ready = wait(sockets, awake.relies_on_others.then_some(LOOK))?;
    let mut came = Vec::new();
    let mut asked = Vec::new();
    let mut ended = |program: &mut Program| {
        match listen_to(&program.socket) {
            Said::Nothing => {}
            Said::Keep(needs) => {
                program.needs = needs;
                asked.push(program.socket.as_fd().as_raw_fd());
            }
            Said::Connection(socket) => came.push(socket),
            Said::End => return true,
        }
        false
    };
    let mut ready_programs = ready[1..].iter();
    programs.retain_mut(|program| !(ready_programs.next() == Some(&true) && ended(program)));
    let before = std::mem::take(&mut awake.results);
    let results = awake.hold(programs.iter().flat_map(|program| &program.needs).copied());
    // No answer to a question: whoever kept it awake has ended, and no context can be had there.
    let falls_asleep = |gpu: &Uuid| before.get(gpu) == Some(&0) && results.get(gpu).is_some_and(|result| *result != 0);
    let is_told = |program: &&Program| {
        asked.contains(&program.socket.as_fd().as_raw_fd()) || program.needs.iter().any(falls_asleep)
    };
    for program in programs.iter().filter(is_told) {
        let state = |gpu: &Uuid| State { gpu: *gpu, result: results.get(gpu).copied().unwrap_or(UNSEEN) };
        let states: Vec<State> = program.needs.iter().map(state).collect();
        // Whoever does not read it has ended or will ask again.
        let _ = program.socket.send(&encode_states(&states), &[] as &[OwnedFd]);
    }
    awake.results = results;
    while ready[0]
        && let Ok(socket) = listener.accept()
    {
        came.push(socket);
    }
    programs.extend(came.into_iter().filter_map(Program::new));
    Ok(())
}

enum Said {
    Nothing,
    Keep(Vec<Uuid>),
    Connection(Socket),
    End,
}

fn listen_to(socket: &Socket) -> Said {
    let mut buffer = [0; ROOM];
    let mut received = match socket.receive(&mut buffer) {
        Ok(received) if received.bytes > 0 => received,
        Err(Lost::System(error)) if error.kind() == std::io::ErrorKind::WouldBlock => return Said::Nothing,
        _ => return Said::End,
    };
    match Request::decode(&buffer[..received.bytes]) {
        Ok(Request::Keep(needs)) => Said::Keep(needs),
        Ok(Request::Adopt) => match received.descriptors.pop().map(Socket::adopt) {
            Some(Ok(socket)) => Said::Connection(socket),
            _ => Said::End,
        },
        Err(unread) => {
            if let Some(answer) = Unread::answer(&unread) {
                let _ = socket.send(&answer, &[] as &[OwnedFd]);
            }
            Said::End
        }
    }
}

/// The GPUs with a context of this process.
#[derive(Default)]
struct Awake {
    held: BTreeMap<Uuid, Device>,
    initialised: bool,
    /// Some of the others are kept awake by helpers of other users.
    relies_on_others: bool,
    /// How it went with each GPU when it was looked at last.
    results: BTreeMap<Uuid, i32>,
}

/// Whether the helper of another user has a context on this GPU. Who takes that name and has a context there keeps it awake, whoever it is.
fn has_another_helper(gpu: &Uuid) -> bool {
    let processes = Nvml::get().ok().and_then(|nvml| nvml.processes(gpu)).unwrap_or_default();
    let others = processes.iter().filter(|(pid, _)| *pid != std::process::id());
    others.map(|(pid, _)| name_of(*pid)).any(|name| is_helper_called(&name))
}

/// What a process is called; nothing where it has ended.
pub fn name_of(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// Whether a process that has a context on a GPU is a helper, by its name: nothing else that is called so has one.
pub fn is_helper_called(name: &str) -> bool {
    name == COMMAND
}

impl Awake {
    /// Has a context on these GPUs and no others; how it went with each (see [`State::result`]).
    fn hold(&mut self, needed: impl Iterator<Item = Uuid>) -> BTreeMap<Uuid, i32> {
        self.relies_on_others = false;
        let mut results: BTreeMap<Uuid, i32> = needed.map(|gpu| (gpu, UNSEEN)).collect();
        if results.is_empty() && self.held.is_empty() {
            return results;
        }
        let Ok(driver) = gpupool_cuda::get() else {
            results.values_mut().for_each(|result| *result = NO_DRIVER);
            return results;
        };
        if !self.initialised {
            let result = driver.initialise();
            if result != CuResult::SUCCESS {
                results.values_mut().for_each(|code| *code = result.0);
                return results;
            }
            self.initialised = true;
        }
        self.held.retain(|gpu, device| {
            let needed = results.contains_key(gpu);
            if !needed {
                let _: CuResult = driver.release_primary(*device);
            }
            needed
        });
        for (gpu, result) in &mut results {
            if self.held.contains_key(gpu) {
                *result = 0;
            } else if has_another_helper(gpu) {
                (*result, self.relies_on_others) = (0, true);
            } else if let Some(device) = driver.devices().find(|device| driver.uuid_bytes(*device) == *gpu) {
                *result = driver.retain_primary(device).map_or_else(|error| error.0, |_| 0);
                if *result == 0 {
                    self.held.insert(*gpu, device);
                }
            }
        }
        results
    }
}
