//! How a process that runs under gpupool is asked to do something, and what it answers: `suspend`, `resume`, `checkpoint`, `set`, `drain`, `undrain`.
//!
//! The command listens by a file beside the process's metrics page, which is the user's alone, and rings at the page; the process connects
//! ([`gpupool_wire::control`]). Who connects is known by the kernel's word, so nobody else's process is taken for it.

use std::ffi::OsStr;
use std::io::{ErrorKind, IsTerminal, Write};
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use gpupool_config::{Mode, Settings, Toggle, format_size};
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Door, Life, Serving, Standing, is_all_ending, may_be_of, ring, stat};
use gpupool_wire::Socket;
use gpupool_wire::blocks::Handle;
use gpupool_wire::control::{ROOM, Reply, Request, Target};
use gpupool_wire::socket::{Credentials, Failure as Unheard, wait};
use rustix::fs::{AtFlags, Gid, Uid, chownat};
use rustix::process::geteuid;
use serde::Serialize;

use crate::failure::{Failure, complain};
use crate::pages::{Listed, Pages};
use crate::stdout;
use crate::terminal;
use crate::words::UNSEEN;

/// How long a process has to connect. Its agent does so as soon as it runs: it may be at another request, or in a call of the driver.
const TO_ANSWER: Duration = Duration::from_secs(10);
/// How long it may say nothing while it moves memory, or while nothing is to be waited for: what moves at a time takes less than a second.
const TO_GO_ON: Duration = Duration::from_secs(60);
/// How long it may say nothing once it has begun to write to a disk: at the end that is waited for until it has all of it for good.
const TO_WRITE: Duration = Duration::from_secs(600);
/// How often it is looked at while it does what it was asked.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is rung for meanwhile.
const RING: Duration = Duration::from_millis(50);
/// How often who waits for its turn to ask looks whether it has come.
const TURN: Duration = Duration::from_millis(10);

/// What is told of a process that is frozen.
const FROZEN: &str = "its control group is frozen, as of a container that is paused, and it answers nobody; let it go on (docker unpause, systemctl thaw), then again";

/// What is told of one that is stopped.
fn stopped(pid: u32) -> String {
    format!("it is stopped (SIGSTOP) and answers nobody; kill -CONT {pid}, then again")
}

/// Why there is no answer.
pub struct NoAnswer {
    pub why: String,
    /// Whether it was asked: it may have done some of it, or all.
    pub was_asked: bool,
}

/// What became of one process.
#[derive(Clone, Debug, Serialize)]
pub struct Told {
    pub pid: u32,
    /// Why nothing was done; what follows is 0 then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Bytes that moved.
    pub bytes: u64,
    /// Bytes that were to, and did not.
    pub stayed_bytes: u64,
    /// Of those that moved, what is in files now.
    pub disk_bytes: u64,
    /// What they take there.
    pub stored_bytes: u64,
    /// The former by the latter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression_ratio: Option<f64>,
    pub microseconds: u64,
    /// Of these, how long its work on the GPUs was waited for.
    pub waited_microseconds: u64,
    /// Of those that moved, in the time without that wait.
    pub bytes_per_second: u64,
    /// Of all that it has now, what lies on other GPUs than those that use it, and what on the host; where that is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_other_gpus_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_host_bytes: Option<u64>,
    /// Where its memory is now, in words, where that is said.
    #[serde(skip)]
    pub whereabouts: String,
    /// Why some of it stayed, in words, where that is said.
    #[serde(skip)]
    pub because: String,
}

/// How many bytes of memory a byte on the disk is of, in thousandths; nothing where nothing was written.
pub fn compression(bytes: u64, stored: u64) -> Option<f64> {
    (stored > 0).then(|| (bytes as f64 / stored as f64 * 1e3).round() / 1e3)
}

/// So many bytes in so many microseconds.
pub fn rate(bytes: u64, microseconds: u64) -> u64 {
    (bytes as f64 / (microseconds.max(1) as f64 * 1e-6)) as u64
}

/// The processes with these numbers, each once.
///
/// # Errors
/// One of them does not run under gpupool, or cannot be asked from here.
pub fn find(pids: &[u32]) -> Result<Vec<Listed>, Failure> {
    let look = Pages::new().look();
    let mut found: Vec<Listed> = Vec::new();
    for pid in pids {
        if found.iter().any(|known| known.told.process.identity.pid == *pid) {
            continue;
        }
        let mut rows =
            look.rows.iter().filter(|row| row.told.process.identity.pid == *pid && row.state != Life::Elsewhere);
        let Some(row) = rows.next() else {
            let unread = look.skipped.iter().find(|skipped| skipped.pid == Some(*pid));
            return Err(Failure::usage(match unread {
                Some(skipped) => format!("process {pid} cannot be asked, and nothing was done: {}", skipped.why),
                None => unknown(*pid),
            }));
        };
        if row.state == Life::Stopped {
            return Err(Failure::usage(format!("process {pid}: nothing was done: {}", stopped(*pid))));
        }
        if row.state == Life::Frozen {
            return Err(Failure::usage(format!("process {pid}: nothing was done: {FROZEN}")));
        }
        found.push(row.clone());
    }
    Ok(found)
}

/// Why no page is of a process with this number, as far as that can be told.
fn unknown(pid: u32) -> String {
    let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}"));
    if stat(pid).is_none() {
        return format!("there is no process {pid} here; gpupool ps lists those that run under gpupool");
    }
    if !geteuid().is_root() && !may_be_of(pid, geteuid().as_raw()) {
        return format!("process {pid} is another user's: only that one and root may ask it");
    }
    let variables = read("environ").unwrap_or_default();
    let variables = variables.split(|byte| *byte == 0).filter_map(|variable| {
        let at = variable.iter().position(|byte| *byte == b'=')?;
        let text = |part: &[u8]| OsStr::from_bytes(part).to_owned();
        Some((text(&variable[..at]), text(&variable[at + 1..])))
    });
    let settings = Settings::read(variables).ok();
    let is_loaded = read("maps").is_ok_and(|maps| maps.windows(LIBRARY.len()).any(|part| part == LIBRARY));
    match settings {
        Some(settings) if is_loaded && settings.metrics == Toggle::Off => {
            format!(
                "process {pid} runs with GPUPOOL_METRICS=off: it has no page, so no command can ask it; start it without that setting"
            )
        }
        Some(settings) if is_loaded && settings.mode == Mode::Off => {
            format!("process {pid} runs with GPUPOOL_MODE=off, so gpupool has no part in it")
        }
        _ if is_loaded => format!(
            "process {pid} runs under gpupool and has no page that this command finds: it has allocated no GPU memory yet, or its page lies elsewhere \
             (another XDG_RUNTIME_DIR, or none: gpupool doctor in its surroundings tells)"
        ),
        _ => format!(
            "process {pid} is not known to run under gpupool here; gpupool ps lists those that do, but for those that have \
             allocated no GPU memory yet, and those with {UNSEEN}"
        ),
    }
}

/// A part of the path under which a process maps the library.
const LIBRARY: &[u8] = b"/libgpupool.so";

/// The processes that a command is to ask: those with these numbers or, with `--job`, all ranks of the job that the one which is named belongs to, or of the only one there is.
///
/// # Errors
/// As of [`find`], [`job_of`] and [`job_here`]; or nothing is named.
pub fn named(pids: &[u32], is_job: bool) -> Result<Vec<Listed>, Failure> {
    match pids {
        [] if is_job => job_here(),
        [] => Err(Failure::usage("name a process, as gpupool ps lists them".to_owned())),
        [pid] if is_job => job_of(*pid),
        _ if is_job => Err(Failure::usage("--job takes one process of the job".to_owned())),
        _ => find(pids),
    }
}

/// The ranks of the job that a process belongs to, by their numbers: what the same launcher started for the same user.
///
/// # Errors
/// No launcher gave it a number, or there are fewer of them here than the launcher started.
pub fn job_of(pid: u32) -> Result<Vec<Listed>, Failure> {
    let one = find(&[pid])?.remove(0);
    let process = &one.told.process;
    let Some(ranks) = ranks_beside(&one, Pages::new().look().rows) else {
        return Err(Failure::usage(format!(
            "process {pid} has no number in a job (LOCAL_RANK and the like); name all processes that belong together"
        )));
    };
    let numbers: Vec<u32> = ranks.iter().filter_map(|row| row.told.process.rank).collect();
    let is_whole = process.world.is_none_or(|world| numbers.iter().copied().eq(0..world));
    if !is_whole || numbers.windows(2).any(|pair| pair[0] == pair[1]) {
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        return Err(Failure::usage(format!(
            "the job of process {pid} has {} ranks, and those found beside it are {}: each has to run under gpupool and to have allocated GPU \
             memory; or name the processes that belong together",
            process.world.map_or("an unknown number of".to_owned(), |world| world.to_string()),
            numbers.join(", ")
        )));
    }
    let pids: Vec<u32> = ranks.iter().map(|row| row.told.process.identity.pid).collect();
    find(&pids)
}

/// Which of these are ranks of the same job as this one, which is one of them, by their numbers: what the same launcher started for the same user. `None`: no launcher gave it a
/// number.
fn ranks_beside(one: &Listed, rows: Vec<Listed>) -> Option<Vec<Listed>> {
    let process = &one.told.process;
    let (Some(_), Some(parent)) = (process.rank, parent(process.identity.pid)) else { return None };
    let is_rank = |row: &Listed| {
        let other = &row.told.process;
        row.owner == one.owner
            && row.state != Life::Elsewhere
            && other.rank.is_some()
            && other.world == process.world
            && self::parent(other.identity.pid) == Some(parent)
    };
    let mut ranks: Vec<Listed> = rows.into_iter().filter(is_rank).collect();
    ranks.sort_by_key(|row| row.told.process.rank);
    Some(ranks)
}

/// The first of these processes that would be suspended without others of its job, and those: ranks that run, and are not among `rows`. Those that are suspended already are
/// none of them. A launcher that says that it started one alone is believed.
pub fn apart(rows: &[Listed]) -> Option<(&Listed, Vec<u32>)> {
    let identity = |row: &Listed| row.told.process.identity;
    let is_of_several = |row: &&Listed| {
        let process = &row.told.process;
        [process.world, process.job_world].into_iter().flatten().any(|ranks| ranks > 1)
    };
    let is_missed = |row: &Listed| {
        !identity(row).life().is_over()
            && row.told.levels.suspended == 0
            && rows.iter().all(|named| identity(named) != identity(row))
    };
    let all = Pages::new().look().rows;
    rows.iter().filter(is_of_several).find_map(|row| {
        let missed: Vec<Listed> = ranks_beside(row, all.clone())?.into_iter().filter(is_missed).collect();
        let pids: Vec<u32> = missed.iter().map(|row| row.told.process.identity.pid).collect();
        (!pids.is_empty()).then_some((row, pids))
    })
}

/// The ranks of the one job of which any are here, by their numbers.
///
/// # Errors
/// There are none, or of several jobs.
pub fn job_here() -> Result<Vec<Listed>, Failure> {
    let look = Pages::new().look();
    let own = geteuid().as_raw();
    let is_rank = |row: &&Listed| {
        let process = &row.told.process;
        row.owner == own && row.state != Life::Elsewhere && process.rank.is_some() && !process.identity.life().is_over()
    };
    let pids: Vec<u32> = look.rows.iter().filter(is_rank).map(|row| row.told.process.identity.pid).collect();
    let Some(first) = pids.first() else {
        return Err(Failure::usage(
            "no process of this user here has a number in a job (LOCAL_RANK and the like) and is seen to run under gpupool (one with GPUPOOL_METRICS=off is not); name \
             all processes that belong together"
                .to_owned(),
        ));
    };
    let ranks = job_of(*first)?;
    match pids.iter().find(|pid| ranks.iter().all(|rank| rank.told.process.identity.pid != **pid)) {
        None => Ok(ranks),
        Some(other) => Err(Failure::usage(format!(
            "ranks of several jobs are here, as processes {first} and {other}; name one process of the job that is meant"
        ))),
    }
}

fn parent(pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

/// Asks all of these at once, and waits for as long as they take.
pub fn ask_all(rows: &[Listed], request: &Request) -> Vec<Told> {
    let replies = replies(rows, request, None).into_iter().zip(rows);
    replies.map(|(reply, row)| told_by(row, reply.map_err(|none| none.why))).collect()
}

/// What each of these answers, all asked at once; from `until` on nobody is waited for.
pub fn replies(rows: &[Listed], request: &Request, until: Option<Instant>) -> Vec<Result<Reply, NoAnswer>> {
    let progress = Progress::new(rows.len());
    let told = side_by_side(rows, |at, row| ask(row, request, until, &|done, total| progress.say(at, done, total)));
    progress.end();
    told
}

/// What a process answers that was asked something else.
pub const OTHER_ANSWER: &str = "it answered something else than what it was asked";

fn told_by(row: &Listed, answer: Result<Reply, String>) -> Told {
    let pid = row.told.process.identity.pid;
    let none = Told {
        pid,
        error: None,
        bytes: 0,
        stayed_bytes: 0,
        disk_bytes: 0,
        stored_bytes: 0,
        compression_ratio: None,
        microseconds: 0,
        waited_microseconds: 0,
        bytes_per_second: 0,
        on_other_gpus_bytes: None,
        on_host_bytes: None,
        whereabouts: String::new(),
        because: String::new(),
    };
    match answer {
        Ok(Reply::Done { moved, stayed, to_disk, stored, microseconds, waited }) => Told {
            bytes: moved,
            stayed_bytes: stayed,
            disk_bytes: to_disk,
            stored_bytes: stored,
            compression_ratio: compression(to_disk, stored),
            microseconds,
            waited_microseconds: waited,
            bytes_per_second: rate(moved, microseconds.saturating_sub(waited)),
            ..none
        },
        Ok(Reply::Refused { why }) | Err(why) => Told { error: Some(why), ..none },
        Ok(_) => Told { error: Some(OTHER_ANSWER.to_owned()), ..none },
    }
}

/// Asks one process, with its progress on a terminal.
///
/// # Errors
/// Nobody answered; why, in words.
pub fn ask_one(row: &Listed, request: &Request) -> Result<Reply, String> {
    let progress = Progress::new(1);
    let reply = ask(row, request, None, &|done, total| progress.say(0, done, total));
    progress.end();
    reply.map_err(|none| none.why)
}

/// Asks one process for an image behind which its memory leaves: what became of the image, and, where there is one, of that.
pub fn image_and_leave(row: &Listed, request: &Request) -> (Result<Reply, String>, Option<Told>) {
    let progress = Progress::new(1);
    let say = |done, total| progress.say(0, done, total);
    let socket = connect(row, request, None);
    let hear = || hear(row, socket.as_ref().map_err(Clone::clone)?, request, silence(request), None, &say);
    let image = hear();
    let left = matches!(image, Ok(Reply::Stored(_))).then(|| told_by(row, hear()));
    progress.end();
    (image, left)
}

/// How long a process may say nothing that has been asked this.
fn silence(request: &Request) -> Duration {
    match request {
        Request::Suspend { patience, .. } | Request::Checkpoint { patience, .. } => {
            TO_GO_ON + Duration::from_millis(*patience)
        }
        _ => TO_GO_ON,
    }
}

fn ask(
    row: &Listed,
    request: &Request,
    until: Option<Instant>,
    progress: &dyn Fn(u64, u64),
) -> Result<Reply, NoAnswer> {
    // It has that long and no longer, whatever it says meanwhile.
    let silence = until.map_or_else(|| silence(request), |until| until.saturating_duration_since(Instant::now()));
    let none = |was_asked| move |why| NoAnswer { why, was_asked };
    let socket = connect(row, request, until).map_err(none(false))?;
    hear(row, &socket, request, silence, until, progress).map_err(none(true))
}

/// A connection to the process, which has been asked.
fn connect(row: &Listed, request: &Request, until: Option<Instant>) -> Result<Connected, String> {
    let words =
        |what: &str, error: &dyn std::fmt::Display| format!("{what} beside {} failed: {error}", row.page.display());
    if let Some(why) = out_of_reach(row) {
        return Err(why);
    }
    let folder = Folder::around(&row.page).map_err(|refused| refused.to_string())?;
    let page = row.page.file_name().unwrap_or_default();
    let name = row.page.with_extension("call");
    let name = name.file_name().and_then(|name| name.to_str()).ok_or("its page has a name that is none")?;
    let page = folder.page_to_ring(page).map_err(|error| words("opening the page", &error))?;
    let at_most = |limit: Instant| until.map_or(limit, |until| until.min(limit));
    let turn_by = at_most(Instant::now() + TO_ANSWER);
    // It has its time to answer from the moment on at which the others are done, however long that took.
    let mut answer_by: Option<Instant> = None;
    // Where the file system knows no such locks, whoever comes last is next.
    let standing = Standing::at_end(page.as_fd()).ok();
    let socket = loop {
        wait_for_turn(row, &page, standing, turn_by)?;
        let answer_by = *answer_by.get_or_insert_with(|| at_most(Instant::now() + TO_ANSWER));
        let listener = listen(&folder, name)?;
        // Whoever is to connect needs to write to it.
        let given = chownat(folder.fd(), name, Some(Uid::from_raw(row.owner)), None::<Gid>, AtFlags::SYMLINK_NOFOLLOW);
        let door = Door::at(&folder, name);
        given.map_err(|error| words("giving the socket to its user", &error))?;
        // Who goes on after a stop, or came late to its place in the line, finds that somebody else listens.
        if let Some(socket) = accept(&listener, row, &page, &door, answer_by)? {
            break socket;
        }
    };
    if let Some(standing) = standing {
        standing.leave(page.as_fd());
    }
    if let Some(at) = word_of(request) {
        Serving::begin(page.as_fd(), at);
    }
    say(&socket, request)?;
    Ok(Connected { socket, _page: page })
}

/// What keeps a process from others for as long as it takes, as these are told.
const WORDS: [&str; 5] = ["gpupool suspend", "gpupool resume", "gpupool drain", "gpupool undrain", "gpupool set"];

/// Which of them this is.
fn word_of(request: &Request) -> Option<usize> {
    match request {
        Request::Suspend { .. } => Some(0),
        Request::Resume => Some(1),
        Request::Drain { .. } => Some(2),
        Request::Undrain { .. } => Some(3),
        Request::Set(_) => Some(4),
        _ => None,
    }
}

/// A process that has been asked.
struct Connected {
    socket: Socket,
    /// Which is said to be served as long as it is open.
    _page: OwnedFd,
}

impl Deref for Connected {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.socket
    }
}

/// Waits until nobody who came earlier asks the process, also programs that lack memory.
fn wait_for_turn(row: &Listed, page: &OwnedFd, standing: Option<Standing>, until: Instant) -> Result<(), String> {
    while let Some(standing) = standing
        && let Ok(Some(_)) = standing.before(page.as_fd())
    {
        if let Some(why) = out_of_reach(row) {
            return Err(why);
        }
        if Instant::now() >= until {
            let what = Serving::look(page.as_fd()).and_then(|at| WORDS.get(at));
            return Err(what.map_or_else(
                || "others were asking it all the time, other commands or programs that lack memory".to_owned(),
                |what| format!("another command is at it ({what}); once that is over it can be asked again"),
            ));
        }
        std::thread::sleep(TURN);
    }
    Ok(())
}

fn say(socket: &Socket, request: &Request) -> Result<(), String> {
    let none: [OwnedFd; 0] = [];
    socket.send(&request.encode(), &none).map_err(|error| format!("the connection to it broke: {error}"))
}

/// Its next message, which comes within `silence` of the last one.
fn next(row: &Listed, socket: &Socket, silence: Duration) -> Result<Reply, String> {
    let mut buffer = [0; ROOM];
    let until = Instant::now() + silence;
    let mut has_broken = false;
    loop {
        // Its end is seen at once, and a stop now and then.
        let received = match socket.receive_by(&mut buffer, until.min(Instant::now() + LOOK)) {
            Ok(received) => received.bytes,
            Err(Unheard::TimedOut) if stat(row.told.process.identity.pid).is_some_and(|stat| stat.state == b'T') => {
                return Err(format!(
                    "it was stopped (SIGSTOP) before it had answered; what it was asked for it does not begin once it goes on; kill -CONT {}, then again",
                    row.told.process.identity.pid
                ));
            }
            Err(Unheard::TimedOut) if Instant::now() >= until => {
                return Err(format!(
                    "it has said nothing for {} s: a call of the driver in it does not return, perhaps because it waits for work of \
                     another process, or its disk does not; once that is over, it is as if nobody had asked, and an image that was begun is \
                     finished; ask again then, or end it (kill {})",
                    silence.as_secs(),
                    row.told.process.identity.pid
                ));
            }
            Err(Unheard::TimedOut) => continue,
            // That it has not heard all is told before what it said last, which is why.
            Err(_) if !has_broken => {
                has_broken = true;
                continue;
            }
            Err(failure) => return Err(format!("the connection to it broke: {failure}")),
        };
        if received == 0 {
            let identity = row.told.process.identity;
            // Of a process that ends its descriptors go once none of its threads does anything any more.
            let what = if identity.life().is_over() || is_all_ending(identity.pid) {
                "it ended before it had answered"
            } else {
                "it closed the connection before it had answered: its program closes descriptors that it did not open, or this user may not ask it; ask again"
            };
            return Err(what.to_owned());
        }
        return Reply::decode(&buffer[..received]).map_err(|unread| unread.to_string());
    }
}

/// What becomes of it in the end.
fn hear(
    row: &Listed,
    socket: &Socket,
    request: &Request,
    silence: Duration,
    limit: Option<Instant>,
    progress: &dyn Fn(u64, u64),
) -> Result<Reply, String> {
    let mut silence = silence;
    loop {
        let left = limit.map_or(silence, |limit| limit.saturating_duration_since(Instant::now()).min(silence));
        match next(row, socket, left)? {
            Reply::Progress { done, total } => {
                progress(done, total);
                if let Request::Checkpoint { .. } | Request::Suspend { target: Target::Folder(_), .. } = request {
                    silence = TO_WRITE;
                }
            }
            reply => return Ok(reply),
        }
    }
}

/// Who speaks to programs of other hosts, which do the same at the same moment.
pub trait Company {
    /// Says what keeps those of this host from this step, if anything does, and hears what keeps any from it.
    ///
    /// # Errors
    /// Somebody takes part no more; who and why.
    fn agree(&mut self, step: Step, why_not: Option<String>) -> Result<Option<String>, String>;
}

/// What all of them come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// They run, and may be stopped.
    Ready,
    /// They have stopped.
    Rest,
    /// Their memory is copied.
    Copied,
}

/// There are no others.
pub struct Nobody;

impl Company for Nobody {
    fn agree(&mut self, _: Step, why_not: Option<String>) -> Result<Option<String>, String> {
        Ok(why_not)
    }
}

/// Why all of them run on: what kept each of these from it, and what those of other hosts.
#[derive(Default)]
struct Refusal {
    own: Vec<Option<String>>,
    elsewhere: Option<String>,
}

impl From<Vec<Option<String>>> for Refusal {
    fn from(own: Vec<Option<String>>) -> Self {
        Self { own, elsewhere: None }
    }
}

/// Why none of them writes an image.
pub struct NoImage {
    /// In one text, with the numbers of those that it is about.
    pub why: String,
    /// What is told of each.
    pub each: Vec<String>,
}

/// Where others keep them from it.
fn elsewhere(why: String) -> Refusal {
    Refusal { own: Vec::new(), elsewhere: Some(why) }
}

/// What keeps these from a step, in one text.
fn in_one(rows: &[Listed], why: &[Option<String>]) -> Option<String> {
    let of_one = |(row, why): (&Listed, &Option<String>)| {
        Some(format!("process {}: {}", row.told.process.identity.pid, why.as_ref()?))
    };
    let all: Vec<String> = rows.iter().zip(why).filter_map(of_one).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// How long all programs that are suspended together have to stop at the same moment, before those that have are let go on: somebody may wait
/// for work of theirs. They give up before that, unless a call of the driver keeps them from it.
const MOMENT: Duration = Duration::from_secs(4);
/// How long they are left alone then, at least, and how much longer by chance.
const PAUSE: Duration = Duration::from_millis(20);
const CHANCE: Duration = Duration::from_millis(60);

/// Suspends all of these at the same moment, or none of them: programs that work on something together wait for each other on their GPUs. They
/// have `patience` to come to rest all at once.
pub fn suspend_together(rows: &[Listed], target: &Target, patience: Duration) -> Vec<Told> {
    let milliseconds = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    let request = Request::Suspend { target: target.clone(), patience: milliseconds, together: true };
    let sockets = match connect_all(rows, |_| &request) {
        Ok(sockets) => sockets,
        Err(why) => return told_none(rows, why.into()),
    };
    if let Err(why) = all_at_rest(rows, &sockets, Instant::now() + patience, &mut Nobody) {
        // The end of the connection lets them go on.
        return told_none(rows, why);
    }
    let progress = Progress::new(rows.len());
    let told = side_by_side(rows, |at, row| {
        let say = |done, total| progress.say(at, done, total);
        told_by(row, hear(row, &sockets[at], &request, TO_GO_ON, None, &say))
    });
    progress.end();
    told
}

/// A connection to each of these, or why there is none to one of them. One after the other, in the order of their numbers, whatever order they were named in: a process
/// is asked by one command at a time, so that two commands which got to the same processes in different orders would wait for each other.
fn connect_all<'a>(
    rows: &[Listed],
    request: impl Fn(usize) -> &'a Request,
) -> Result<Vec<Connected>, Vec<Option<String>>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|at| (rows[*at].told.process.identity.pid, rows[*at].told.process.identity.started));
    let mut connected: Vec<Option<Connected>> = rows.iter().map(|_| None).collect();
    for at in order {
        match connect(&rows[at], request(at), None) {
            Ok(socket) => connected[at] = Some(socket),
            Err(why) => return Err((0..rows.len()).map(|other| (other == at).then(|| why.clone())).collect()),
        }
    }
    Ok(connected.into_iter().flatten().collect())
}

/// Asks each of these something that all of them do at the same moment or none does, those of other hosts too, for which they have `patience` to come to rest
/// all at once: to write an image of themselves. What they have copied is of that moment, since none goes on before the last one has.
///
/// # Errors
/// None of them writes an image.
pub fn images_together(
    rows: &[Listed],
    requests: &[Request],
    patience: Duration,
    company: &mut dyn Company,
) -> Result<Vec<Result<Reply, String>>, NoImage> {
    let none = |refusal: Refusal| {
        let why = in_one(rows, &refusal.own).or_else(|| refusal.elsewhere.clone());
        let why = why.unwrap_or_else(|| "they did not all come to rest at the same moment".to_owned());
        NoImage { why, each: none_of(rows, refusal, "an image is of all of them or of none") }
    };
    let sockets = connect_all(rows, |at| &requests[at]).map_err(|why| none(why.into()))?;
    all_at_rest(rows, &sockets, Instant::now() + patience, company).map_err(none)?;
    let progress = Progress::new(rows.len());
    let heard = |at: usize, row: &Listed| {
        hear(row, &sockets[at], &requests[at], TO_GO_ON, None, &|done, total| progress.say(at, done, total))
    };
    let why = |answer: Result<Reply, String>| match answer {
        Ok(Reply::Quiet) => None,
        Ok(Reply::Refused { why }) | Err(why) => Some(why),
        Ok(_) => Some(OTHER_ANSWER.to_owned()),
    };
    let own: Vec<Option<String>> = side_by_side(rows, heard).into_iter().map(why).collect();
    let agreed = company.agree(Step::Copied, in_one(rows, &own));
    if let Some(why) = agreed.unwrap_or_else(Some) {
        progress.end();
        return Err(none(Refusal { elsewhere: own.iter().all(Option::is_none).then_some(why), own }));
    }
    // Who does not hear it has ended, which its answer says.
    let _ = side_by_side(rows, |at, _| say(&sockets[at], &Request::Go));
    let told = side_by_side(rows, heard);
    progress.end();
    Ok(told)
}

/// Has them stop at the same moment, again and again, and stay so once all have.
fn all_at_rest(
    rows: &[Listed],
    sockets: &[Connected],
    until: Instant,
    company: &mut dyn Company,
) -> Result<(), Refusal> {
    loop {
        if let Some(why) = company.agree(Step::Ready, None).map_err(elsewhere)? {
            return Err(elsewhere(why));
        }
        let why = match one_try(rows, sockets, until, company)? {
            None => return Ok(()),
            Some(why) => why,
        };
        if Instant::now() >= until {
            let own = why.own.into_iter();
            return Err(Refusal {
                own: own.map(|why| why.map(|why| format!("it did not come to rest in time: {why}"))).collect(),
                ..why
            });
        }
        // Whatever they do again and again, it is not always the same moment of it.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        std::thread::sleep(PAUSE + CHANCE.mul_f64(f64::from(now.subsec_micros() % 1000) / 1000.0));
    }
}

/// Has them stop at this moment. `None`: all have, and stay so; else what kept each one from it, for those that it did. Fails where one of them
/// never will.
fn one_try(
    rows: &[Listed],
    sockets: &[Connected],
    until: Instant,
    company: &mut dyn Company,
) -> Result<Option<Refusal>, Refusal> {
    let said = |request: &Request| -> Result<(), Vec<Option<String>>> {
        let say = |at: usize, row: &Listed| {
            let error = say(&sockets[at], request).err()?;
            // Who does not listen any more has said why.
            let mut said = (0..2).map(|_| next(row, &sockets[at], MOMENT));
            let said = said.find_map(|said| said.ok().and_then(Reply::refusal));
            let has_ended = || row.told.process.identity.life().is_over();
            Some(said.unwrap_or_else(|| if has_ended() { "it ended before it had answered".to_owned() } else { error }))
        };
        let failed = side_by_side(rows, say);
        if failed.iter().all(Option::is_none) { Ok(()) } else { Err(failed) }
    };
    said(&Request::Close)?;
    let answers = side_by_side(rows, |at, row| next(row, &sockets[at], MOMENT));
    let why = |answer: Result<Reply, String>| match answer {
        Ok(Reply::Busy { why } | Reply::Refused { why }) | Err(why) => Some(why),
        Ok(Reply::Quiet) => None,
        Ok(_) => Some("it answered nothing that was asked".to_owned()),
    };
    let own: Vec<Option<String>> = answers.iter().cloned().map(why).collect();
    let Some(others) = company.agree(Step::Rest, in_one(rows, &own)).map_err(elsewhere)? else {
        said(&Request::Go)?;
        return Ok(None);
    };
    // Who has refused listens no more, and the end of their connections lets the others go on.
    if answers.iter().any(|answer| matches!(answer, Ok(Reply::Refused { .. }))) {
        let refusal = |answer: Result<Reply, String>| answer.ok().and_then(Reply::refusal);
        return Err(answers.into_iter().map(refusal).collect::<Vec<_>>().into());
    }
    said(&Request::Open)?;
    // Who could not answer, since it waited for one that had stopped, can now.
    let answers = side_by_side(rows, |at, row| match &answers[at] {
        Err(_) => next(row, &sockets[at], until.saturating_duration_since(Instant::now()) + TO_GO_ON),
        answer => answer.clone(),
    });
    let has_failed = |answer: &Result<Reply, String>| !matches!(answer, Ok(Reply::Quiet | Reply::Busy { .. }));
    if answers.iter().any(has_failed) {
        let only = |answer| if has_failed(&answer) { why(answer) } else { None };
        return Err(answers.into_iter().map(only).collect::<Vec<_>>().into());
    }
    // All of them may have stopped, the last one too late.
    let elsewhere = own.iter().all(Option::is_none).then_some(others);
    Ok(Some(Refusal { own: answers.into_iter().map(why).collect(), elsewhere }))
}

fn told_none(rows: &[Listed], why: Refusal) -> Vec<Told> {
    let all = none_of(rows, why, "all are suspended together or none");
    rows.iter().zip(all).map(|(row, why)| told_by(row, Err(why))).collect()
}

/// What is told where these are the reasons of some why nothing was done with any; `rule` says why it is all or none.
fn none_of(rows: &[Listed], Refusal { mut own, elsewhere }: Refusal, rule: &str) -> Vec<String> {
    own.resize(rows.len(), None);
    let others: Vec<String> = rows
        .iter()
        .zip(&own)
        .filter(|(_, why)| why.is_some())
        .map(|(row, _)| row.told.process.identity.pid.to_string())
        .collect();
    let because = match (others.as_slice(), elsewhere) {
        ([], None) => "it is left as it was, since they did not all come to rest at the same moment".to_owned(),
        ([], Some(why)) => format!("it is left as it was, since {rule}: {why}"),
        (others, _) => format!("it is left as it was, since {rule}, and process {} was not ready", others.join(", ")),
    };
    own.into_iter().map(|why| why.unwrap_or_else(|| because.clone())).collect()
}

/// Does this for each row, all at once.
fn side_by_side<T: Send>(rows: &[Listed], act: impl Fn(usize, &Listed) -> T + Sync) -> Vec<T> {
    let act = &act;
    std::thread::scope(|scope| {
        let begun: Vec<_> = rows.iter().enumerate().map(|(at, row)| scope.spawn(move || act(at, row))).collect();
        // A thread of this command that panics has said so.
        begun.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// For whoever has the turn: what lies there is of a command that was killed.
fn listen(folder: &Folder, name: &str) -> Result<Socket, String> {
    let listen = || Socket::<OwnedFd>::listen_in(folder.fd(), name);
    let listener = match listen() {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            drop(Door::at(folder, name));
            listen()
        }
        answer => answer,
    };
    listener.map_err(|error| format!("listening in {} failed: {error}", folder.path().display()))
}

/// The process's connection; `None`: somebody else listens for it now.
fn accept(
    listener: &Socket,
    row: &Listed,
    page: &OwnedFd,
    door: &Door<'_>,
    until: Instant,
) -> Result<Option<Socket>, String> {
    let pid = row.told.process.identity.pid;
    let begun = Instant::now();
    let mut left: Option<Instant> = None;
    let knocks = sockets_of(row);
    while Instant::now() < until {
        ring(std::os::fd::AsFd::as_fd(page))
            .map_err(|error| format!("its page {} cannot be rung at: {error}", row.page.display()))?;
        // What serves others its blocks waits for sockets, and hears of a connection alone. Its end says that nothing is wanted.
        drop(knocks.iter().map(|name| Socket::<OwnedFd>::connect(name, Instant::now() + RING)).collect::<Vec<_>>());
        let _ = wait([listener], Some(RING));
        match row.told.process.identity.life() {
            Life::Gone => return Err("it ended before it had answered".to_owned()),
            // Before it heard anything: nothing was asked of it.
            Life::Frozen => return Err(FROZEN.to_owned()),
            _ => {}
        }
        // The system tells the same of a process that ends, whose threads go one after the other: that of this thread is over soon.
        if stat(pid).is_none_or(|stat| stat.state != b'Z') || is_all_ending(pid) {
            left = None;
        } else if left.get_or_insert_with(Instant::now).elapsed() >= LOOK {
            return Err(
                "its main thread has left (pthread_exit), and the system finds its memory no more, by which it would be called".to_owned()
            );
        }
        match listener.accept() {
            Ok(socket) => match socket.peer() {
                Ok(peer) if (peer.pid, peer.uid) == (pid, row.owner) => return Ok(Some(socket)),
                // Another command that looks whether somebody listens, or somebody who is not meant.
                _ => {}
            },
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(format!("its connection failed: {error}")),
        }
        // Before it heard anything: nothing was asked of it.
        if stat(pid).is_some_and(|stat| stat.state == b'T') {
            return Err(stopped(pid));
        }
        if !door.is_there() {
            return Ok(None);
        }
    }
    if is_all_ending(pid) {
        return Err("it is ending, which takes long: the system takes its memory down".to_owned());
    }
    // It was heard before.
    if let Some(what) = Serving::look(page.as_fd()).and_then(|at| WORDS.get(at)) {
        return Err(format!("another command is at it ({what}); once that is over it can be asked again"));
    }
    Err(format!(
        "it did not answer within {} s: a call of the driver in it may not return, as where it waits for work that never ends, or it is stopped (as all of a \
         container that is paused); ask again once it goes on, or end it (kill {pid})",
        begun.elapsed().as_secs()
    ))
}

/// The sockets at which a process of this user's serves blocks; another user's sends this one away, and says so.
fn sockets_of(row: &Listed) -> Vec<String> {
    let name = format!("@{}", Handle::sockets(row.told.process.identity.pid));
    let of_it = |line: &str| {
        line.split_whitespace().last().filter(|path| path.starts_with(&name)).map(|path| path[1..].to_owned())
    };
    let all =
        if row.owner == geteuid().as_raw() { std::fs::read_to_string("/proc/net/unix") } else { Ok(String::new()) };
    all.unwrap_or_default().lines().filter_map(of_it).collect()
}

/// Why a process that runs hears nothing of this command, where that is certain: it does not heed this user, or does not find its page any more, as another user or with
/// another root folder.
fn out_of_reach(row: &Listed) -> Option<String> {
    let pid = row.told.process.identity.pid;
    // As it looks at whoever asks.
    if !geteuid().is_root()
        && let Err(why) = (Credentials { pid, uid: row.owner }).is_same_user()
    {
        return Some(format!("it does nothing that this user asks for: {why}; ask as root"));
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    // The last of them is the one that counts for files.
    let acts: Option<u32> = uids.and_then(|uids| uids.split_whitespace().last()?.parse().ok());
    let again = "Once that is as it was, it can be asked again";
    if let Some(user) = acts.filter(|user| *user != row.owner && *user != 0) {
        let page = row.page.display();
        return Some(format!(
            "it acts as user {user} now (seteuid), and does not get to {page} of user {}. {again}",
            row.owner
        ));
    }
    let look = |path: &Path| std::fs::metadata(path).ok().map(|status| (status.dev(), status.ino()));
    let mounts = |whose: &str| std::fs::read_link(format!("/proc/{whose}/ns/mnt")).ok();
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let here = look(&root)?;
    // In a container it may see the same file by another path.
    if mounts("self")? != mounts(&pid.to_string())? || Some(here) == look(Path::new("/")) {
        return None;
    }
    let inside = look(&root.join(row.page.strip_prefix("/").ok()?));
    let other = std::fs::read_link(&root).unwrap_or_default();
    (inside != look(&row.page)).then(|| {
        format!(
            "its root folder is {} now (chroot), and {} is not in there. {again}",
            other.display(),
            row.page.display()
        )
    })
}

/// How far all of them are together, on a terminal.
struct Progress {
    shown: bool,
    rows: Mutex<Vec<(u64, u64)>>,
    begun: Instant,
}

impl Progress {
    fn new(rows: usize) -> Self {
        let shown = std::io::stderr().is_terminal();
        Self { shown, rows: Mutex::new(vec![(0, 0); rows]), begun: Instant::now() }
    }

    fn say(&self, at: usize, done: u64, total: u64) {
        let Ok(mut rows) = self.rows.lock() else { return };
        rows[at] = (done, total);
        if self.shown {
            let (done, total) = rows.iter().fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
            let rate = (done as f64 / self.begun.elapsed().as_secs_f64().max(1e-3)) as u64;
            let line = format!("\r{} of {}, {}/s   ", format_size(done), format_size(total), format_size(rate));
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }

    fn end(&self) {
        if self.shown && self.rows.lock().is_ok_and(|rows| rows.iter().any(|row| row.1 > 0)) {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }
}

/// Prints what became of each; `did` and `did_not` stand behind sizes. Whether all of it was done.
///
/// # Errors
/// Nothing can be printed.
pub fn print(all: &[Told], json: bool, did: &str, did_not: &str) -> Result<bool, Failure> {
    if json {
        let text = serde_json::to_string_pretty(all).map_err(|error| Failure::broken(error.to_string()))?;
        stdout::print(&format!("{}\n", terminal::clean_json(&text)))?;
    }
    for told in all {
        let Told { pid, error, bytes, stayed_bytes, microseconds, waited_microseconds, whereabouts, .. } = told;
        if let Some(error) = error {
            complain(&format!("process {pid}: {error}"));
            continue;
        }
        if json {
            continue;
        }
        // The wait is the program's, and the rate is that of what came after it.
        let [seconds, waited] =
            [microseconds.saturating_sub(*waited_microseconds), *waited_microseconds].map(|time| time as f64 * 1e-6);
        let waited = if waited >= 0.01 { format!(", after {waited:.2} s of wait for its work") } else { String::new() };
        let takes = match told.compression_ratio {
            // Of what did not become smaller there is nothing more to say.
            Some(ratio) if ratio < 1.005 => format!("; {} on the disk", format_size(told.stored_bytes)),
            Some(ratio) => format!("; {} on the disk, {ratio:.2} times less", format_size(told.stored_bytes)),
            None => String::new(),
        };
        let stayed = if *stayed_bytes > 0 {
            format!("; {} {did_not}{}", format_size(*stayed_bytes), told.because)
        } else {
            String::new()
        };
        stdout::print(&format!(
            "process {pid}: {} {did}{whereabouts} in {seconds:.2} s ({}/s){waited}{takes}{stayed}\n",
            format_size(*bytes),
            format_size(told.bytes_per_second)
        ))?;
    }
    Ok(all.iter().all(|told| told.error.is_none()))
}
