//! The agent: the one thread of ours in a process, from its first allocation on.
//!
//! It keeps the metrics page (`gpupool_metrics`), and serves other processes the blocks that this one exported
//! ([`crate::serve::ipc`]), returns freed memory that nobody needs (`home.rs`) or that the machine lacks (`pressure.rs`), and sees that GPUs which
//! only lend memory stay awake, where that is wanted (`lenders.rs`). All signals are blocked on it. It never makes a context and asks the driver nothing that needs one.
//!
//! It looks at what has changed at most once a second, and sleeps without waking once two looks found nothing new
//! ([`crate::bell`]). What it looks at is counted already, for the summary and the C interface; nothing is counted for the
//! page, and nobody waits for it. A look takes the locks of the pool and of pinned memory for some microseconds, one after
//! the other, and none of them is held while the page is written.
//!
//! The program may close any descriptor at any moment, and its next file gets the number. So the agent has none for the page:
//! the thread that made the first allocation made the page too, before its call returned, and what is left of it is a
//! mapping. The sleep is on an address ([`crate::bell`]), not on a descriptor; who wants something of the process rings there (`control.rs`). Where blocks are exported it waits for sockets, which
//! no change can interrupt without a descriptor that the program's threads would have to write to; there it looks at the
//! flag once a second. A command that wants something connects to the socket as well, which ends that wait.
//!
//! It keeps no process from its end ([`last`]): where the main thread leaves by `pthread_exit`, it looks whether it is alone.
//!
//! What happens to it: a fork leaves it to the parent, since the child passes everything through. At `exec` it is gone, and
//! the program that comes then makes a page of the same name, which replaces this one. At the exit the page is removed.
//! Whoever is killed leaves one behind, which the next of the same user removes.

mod again;
mod control;
mod dormant;
mod drains;
mod ebb;
mod health;
mod home;
mod last;
mod launch;
mod lenders;
mod look;
mod pressure;
mod set;

pub use last::watch_main_thread;

use crate::backing::{kernels, map};
use crate::bell;
use crate::guard;
use crate::latest::Latest;
use crate::process;
use crate::recall::{self, strangers::Strangers};
use crate::serve::ipc;
use crate::serve::memory::idle;
use crate::suspend;
use crate::tiers;
use dormant::Dormant;
use gpupool_config::Toggle;
use gpupool_interpose::cancel;
use gpupool_metrics::folder::{Folder, Refused, Roots, in_words};
use gpupool_metrics::{BYTES, Identity, Map, Page, Process, now};
use gpupool_store::signals::stack_of;
use health::Health;
use home::Home;
use lenders::Awake;
use look::Look;
use parking_lot::Mutex;
use pressure::Pressure;
use std::fmt::Display;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The least time between two looks.
const PERIOD: Duration = Duration::from_secs(1);
/// The longest wait of a suspended process that serves exported blocks.
const SOON: Duration = Duration::from_millis(20);
/// Looks in a row that find nothing new before it sleeps.
const SETTLED: u32 = 2;
/// The size of the thread's stack: what it calls has no deep recursion and no large locals.
const STACK: usize = 512 << 10;

/// The page of this process.
struct Published {
    identity: Identity,
    path: PathBuf,
    /// The file's device and number.
    file: Option<(u64, u64)>,
    memory: Map,
}

impl Published {
    /// In this process: the child of a fork has none.
    fn own() -> Option<&'static Self> {
        PUBLISHED.get().filter(|published| published.identity.pid == std::process::id())
    }

    /// Whether whoever looks for this process finds it: the page is where it was made, and says whose it is.
    fn is_found(&self) -> bool {
        let file = file_of(&self.path);
        file.is_some()
            && file == self.file
            && gpupool_metrics::read(&self.memory).is_ok_and(|told| told.process.identity == self.identity)
    }
}

/// A page's device and number, if there is one at this path.
fn file_of(page: &Path) -> Option<(u64, u64)> {
    let status = page.symlink_metadata().ok()?;
    (status.is_file() && status.len() == BYTES as u64).then(|| (status.dev(), status.ino()))
}

static PUBLISHED: Latest<Published> = Latest::new();
/// Made, and not yet with the thread.
static MADE: Mutex<Option<Page<Map>>> = Mutex::new(None);
/// Whether the thread runs. Held while it is started, so that there is one.
static RUNS: Mutex<bool> = Mutex::new(false);

/// Hooks take part in this process: from its first allocation on there is an agent.
pub fn prepare() {
    lenders::prepare();
    pressure::prepare();
    recall::ask::prepare();
    bell::at_first(at_first_allocation);
    ipc::on_export(start);
}

/// Something was allocated for the first time.
fn at_first_allocation() {
    let has_page = process::settings().metrics == Toggle::On;
    let has_work = home::is_wanted() || lenders::is_wanted() || dormant::is_wanted() || pressure::is_wanted();
    if !has_page && !has_work {
        return;
    }
    let _sheltered = cancel::shelter();
    if has_page {
        match make_page() {
            Ok(page) => *MADE.lock() = Some(page),
            Err(why) => tracing::warn!(
                target: "gpupool::metrics", about = "metrics",
                "metrics: no page, so no command finds this process and no other process asks it for memory: {why}. It needs a descriptor, /proc and one folder that this user alone may write to (a container with a read-only root: --tmpfs /run/gpupool:mode=700); GPUPOOL_METRICS=off where that is meant"
            ),
        }
    }
    if (has_work || MADE.lock().is_some())
        && let Err(error) = start()
    {
        remove();
        note(format_args!(
            "no page, and freed memory stays until it is needed, and lending GPUs asleep, because there can be no further thread: {error}"
        ));
    }
}

fn note(what: impl Display) {
    tracing::info!(target: "gpupool::metrics", about = "metrics", "metrics: {what}");
}

fn make_page() -> Result<Page<Map>, String> {
    let identity = Identity::own().ok_or("the system does not tell when this process started")?;
    let (folder, refused) =
        Folder::own(&Roots::new(std::env::var_os("XDG_RUNTIME_DIR"))).map_err(|all| in_words(&all))?;
    let suspicious: Vec<Refused> = refused.into_iter().filter(|refused| refused.why.is_suspicious()).collect();
    if !suspicious.is_empty() {
        note(format_args!("the page is in {}, since {}", folder.path().display(), in_words(&suspicious)));
    }
    folder.clean();
    let (page, path) = Map::create(&folder, &told_of(identity)).map_err(|error| error.to_string())?;
    bell::sleeps_at(*page.memory());
    publish(identity, path, &page);
    Ok(page)
}

/// The process is found by this page from here on.
fn publish(identity: Identity, path: PathBuf, page: &Page<Map>) {
    recall::is_found_by(&path);
    let file = file_of(&path);
    PUBLISHED.set(Published { identity, path, file, memory: *page.memory() });
}

/// A new page, where the process was stored and brought back (CRIU): it has started anew by the system's word, and whoever reads the old page takes it for
/// one of a process that is gone. So nobody could resume it.
fn page_anew() -> Option<Page<Map>> {
    let published = Published::own()?;
    let identity = Identity::own().filter(|identity| *identity != published.identity)?;
    let made = Folder::own(&Roots::new(std::env::var_os("XDG_RUNTIME_DIR"))).map_err(|all| in_words(&all));
    let made = made.and_then(|(folder, _)| {
        published.memory.create_again(&folder, &told_of(identity)).map_err(|error| error.to_string())
    });
    let (page, path) =
        made.inspect_err(|why| note(format_args!("no page for a process that was brought back: {why}"))).ok()?;
    remove();
    note(format_args!("the process was stored and brought back, and has the page {}", path.display()));
    publish(identity, path, &page);
    Some(page)
}

fn told_of(identity: Identity) -> Process {
    let executable = std::env::current_exe().unwrap_or_default();
    let name = executable.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let command = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    let command = String::from_utf8_lossy(command.strip_suffix(b"\0").unwrap_or(&command)).replace('\0', " ");
    let rank = process::rank();
    let ranks = process::settings().local_ranks.map(|(_, ranks)| ranks);
    Process {
        identity,
        rank: rank.map(|rank| rank.number),
        world: rank.and_then(|rank| rank.ranks).or(ranks),
        job_rank: rank.and_then(|rank| rank.overall),
        job_world: rank.and_then(|rank| rank.overall_ranks),
        created: now(),
        library: env!("CARGO_PKG_VERSION").to_owned(),
        name,
        command,
    }
}

/// Starts the thread, or wakes it for what there is for it.
///
/// # Errors
/// There can be no further thread.
fn start() -> io::Result<()> {
    let mut runs = RUNS.lock();
    if !*runs {
        let signals = BlockedSignals::all();
        let before = signals.0;
        let thread = std::thread::Builder::new().name(ipc::THREAD.to_owned()).stack_size(stack_of(STACK));
        thread.spawn(move || run(&before))?;
        drop(signals);
        *runs = true;
        tiers::ahead::begin();
    }
    bell::wake();
    Ok(())
}

/// All signals blocked on this thread until dropped: a thread started meanwhile has them blocked for good, and none of the
/// program's handlers ever runs on it.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn all() -> Self {
        // SAFETY: all-zero is a valid value of this C type; the calls write the two locals.
        unsafe {
            let (mut every, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut every);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const every, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// Has one of the agent's parts look; how long it has nothing to do then. One that panicked looks no more: what it meets once, it meets again.
fn looks<T>(part: &mut Option<T>, look: impl FnOnce(&mut T) -> Option<Duration>) -> Option<Duration> {
    catch_unwind(AssertUnwindSafe(|| part.as_mut().and_then(look))).unwrap_or_else(|_| {
        *part = None;
        None
    })
}

/// `signals`: which ones the program has blocked.
fn run(signals: &libc::sigset_t) {
    // Every driver call of this thread is ours.
    let inside = guard::enter();
    bell::sleeps_here();
    let mut agent = Agent {
        home: Home::new(),
        awake: Awake::new(),
        dormant: Dormant::new(),
        strangers: Strangers::new(),
        health: Health::new(),
        pressure: Pressure::new(),
        ..Agent::default()
    };
    let (mut siblings, mut idle, mut leaving, mut ahead, mut learns) = (true, Some(()), Some(()), Some(()), Some(()));
    loop {
        let rung = bell::rung();
        agent.server = agent.server.take().or_else(ipc::take_server);
        agent.page = agent.page.take().or_else(|| MADE.lock().take());
        let limit = catch_unwind(AssertUnwindSafe(|| agent.look())).unwrap_or_else(|_| {
            // The panic hook has said where. What a look meets once, it meets again.
            agent.page = None;
            None
        });
        if last::has_main_left() && last::is_alone() {
            break;
        }
        let home = looks(&mut agent.home, Home::look);
        let awake = looks(&mut agent.awake, Awake::look);
        let dormant = looks(&mut agent.dormant, Dormant::look);
        let health = looks(&mut agent.health, Health::look);
        let pressure = looks(&mut agent.pressure, Pressure::look);
        looks(&mut ahead, |()| {
            tiers::ahead::look();
            None
        });
        looks(&mut learns, |()| {
            kernels::learn_for_lenders();
            None
        });
        let given = catch_unwind(AssertUnwindSafe(|| recall::give::look(&mut || agent.look_at_once()))).unwrap_or(None);
        // What it meets that panics, it meets again.
        siblings = siblings && catch_unwind(recall::siblings::look).is_ok();
        let lent = looks(&mut idle, |()| recall::idle::look());
        // A request may take long, and whoever has come waits.
        looks(&mut leaving, |()| recall::leaving::look());
        if suspend::since() != 0
            && let Ok(Some(page)) = catch_unwind(page_anew)
        {
            agent.page = Some(page);
            agent.told = None;
            agent.look_at_once();
        }
        // What a request meets that panics, it is told by the end of the connection.
        let control = catch_unwind(AssertUnwindSafe(|| control::look(&mut || agent.look_at_once()))).unwrap_or(None);
        // A request may have brought memory to a GPU that is only borrowed from.
        let strangers = looks(&mut agent.strangers, Strangers::look);
        let leaves = looks(&mut leaving, |()| recall::leaving::look());
        agent.wait(
            rung,
            [limit, home, awake, dormant, strangers, health, pressure, given, lent, control, leaves]
                .into_iter()
                .flatten()
                .min(),
        );
    }
    // From here on it is the program's last thread, and what its handlers call, the program calls.
    drop(inside);
    last::end(signals)
}

#[derive(Default)]
struct Agent {
    page: Option<Page<Map>>,
    home: Option<Home>,
    awake: Option<Awake>,
    dormant: Option<Dormant>,
    strangers: Option<Strangers>,
    health: Option<Health>,
    pressure: Option<Pressure>,
    server: Option<ipc::Server>,
    /// What the page says.
    told: Option<Look>,
    /// When it was looked last.
    looked: Option<Instant>,
    /// Looks since then that found nothing new.
    same: u32,
    /// The last wait, since the main thread has left.
    pause: Duration,
}

impl Agent {
    /// Looks, if it is time to; how long nothing need be done. `None`: until something changes.
    fn look(&mut self) -> Option<Duration> {
        if self.page.is_none() && self.home.is_none() && self.awake.is_none() && self.dormant.is_none() {
            return None;
        }
        if self.same > 0 && !bell::is_listening() {
            self.same = 0;
        }
        if self.same >= SETTLED {
            return None;
        }
        let left = self.looked.map_or(Duration::ZERO, |looked| PERIOD.saturating_sub(looked.elapsed()));
        if !left.is_zero() {
            return Some(left);
        }
        self.looked = Some(Instant::now());
        bell::listen();
        let look = Look::now();
        if self.told.as_ref() == Some(&look) {
            self.same += 1;
        } else {
            bell::mute();
            self.same = 0;
            if self.page.as_mut().is_some_and(|page| !look.tell(page)) {
                self.page = None;
                note("the page is written no more: its file was cut, or its file system takes nothing");
            }
            self.told = Some(look);
            // Calls leave that out where it was told a moment ago, and whoever reads the log of a program that waits now is to find it.
            map::tell_now();
        }
        (self.same < SETTLED).then_some(PERIOD)
    }

    /// Looks, whenever it looked last.
    fn look_at_once(&mut self) {
        self.looked = None;
        self.same = 0;
        self.look();
    }

    fn wait(&mut self, rung: u32, limit: Option<Duration>) {
        let limit = if last::has_main_left() {
            self.pause = last::pause_after(self.pause);
            Some(limit.map_or(self.pause, |limit| limit.min(self.pause)))
        } else {
            limit
        };
        match (&mut self.server, limit) {
            (Some(server), _) => {
                // Nobody who rings ends this wait; whoever waits to be resumed does not wait for it.
                let most = if suspend::since() != 0 { SOON } else { PERIOD };
                server.turn(Some(limit.map_or(most, |limit| limit.min(most))));
            }
            (None, limit) => bell::sleep(rung, limit),
        }
    }
}

/// This thread is about to fork: no memory is on its way to the driver when it does.
pub fn before_fork() {
    idle::before_fork();
}

/// It has forked; in the parent.
pub fn after_fork_in_parent() {
    idle::after_fork_in_parent();
}

/// It has forked; in the child.
pub fn after_fork_in_child() {
    idle::after_fork_in_child();
}

/// The process ends: the page says so to whoever has it open, and is removed. Nothing where this process has none, which
/// the child of a fork has not.
pub fn ended() {
    idle::ended();
    if let Some(published) = Published::own() {
        Page::<Map>::end(&published.memory);
        remove();
    }
}

/// Where the page lies, in the process that made it.
fn page_path() -> Option<&'static Path> {
    Published::own().map(|published| published.path.as_path())
}

fn remove() {
    if let Some(Published { path, .. }) = PUBLISHED.get() {
        let _sheltered = cancel::shelter();
        let _ = std::fs::remove_file(path);
        // Whoever was about to ask something sees that the process ends, and may have been killed itself.
        let _ = std::fs::remove_file(path.with_extension("call"));
    }
}
