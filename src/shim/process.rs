//! What part this process lets the shim play: Idle → Active → Closed, Passing or Forked.
//!
//! Nothing else in the shim is process-wide state of its own: settings, topology and pool hang off the first use.

use crate::log::{self, verdict};
use crate::{agent, context, environment, ipc, leave, module, observers, summary};
use gpupool_config::{Mode, Problem, Rank, Settings};
use gpupool_cuda as cuda;
use gpupool_events::{Panic, ProcessStart};
use gpupool_interpose::{Api, dlsym, guard};
use once_cell::race::OnceBox;
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

/// No driver function was called yet. A process that stays here never notices the shim.
const IDLE: u8 = 0;
/// One thread reads the settings; calls of others pass through until it is done, rather than wait for it.
const STARTING: u8 = 1;
/// Hooks do their work.
const ACTIVE: u8 = 2;
/// As ACTIVE for memory that was handed out, but no new blocks: something inside failed.
const CLOSED: u8 = 3;
/// Everything passes through: switched off, or a bad setting.
const PASSING: u8 = 4;
/// As PASSING, in the child of a fork; its first call of the driver is told about.
const FORKED: u8 = 5;

static STATE: AtomicU8 = AtomicU8::new(IDLE);
static SETTINGS: OnceBox<Settings> = OnceBox::new();
/// Why allocations go to the driver, once they do.
static WHY: OnceBox<CString> = OnceBox::new();

/// Whether hooks do anything in this process; starts the shim at the first call.
#[inline]
pub fn takes_part(api: Api) -> bool {
    match STATE.load(Ordering::Acquire) {
        ACTIVE | CLOSED => true,
        IDLE => start() || resolves(api),
        STARTING => resolves(api),
        FORKED => forked(api),
        _ => false,
    }
}

/// Whether this call hands out functions that the program keeps, while another thread starts the shim: a pointer to the
/// driver's own would bypass the hooks for good. A hook that is called too early passes through by itself.
#[cold]
fn resolves(api: Api) -> bool {
    matches!(api.name(), "cuGetProcAddress" | "cuGetProcAddress_v2")
        && matches!(STATE.load(Ordering::Acquire), STARTING | ACTIVE | CLOSED)
}

/// Whether new blocks may be made.
#[inline]
pub fn is_open() -> bool {
    STATE.load(Ordering::Acquire) == ACTIVE
}

/// Whether the library stands where hooks take effect: before the C library in the search order, by a preload or because
/// the program was linked with it. Where a program has only opened it, contexts, captures and launches go unseen, and no
/// more is known of them than the driver can be asked at the moment.
pub fn is_preloaded() -> bool {
    static KNOWN: OnceBox<bool> = OnceBox::new();
    *KNOWN.get_or_init(|| Box::new(dlsym::is_interposed()))
}

/// The part that the shim plays now, as numbers of the C interface see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Idle,
    Active,
    Closed,
    Passing,
}

/// See [`Part`]. Starts nothing.
pub fn part() -> Part {
    match STATE.load(Ordering::Acquire) {
        IDLE | STARTING => Part::Idle,
        ACTIVE => Part::Active,
        CLOSED => Part::Closed,
        _ => Part::Passing,
    }
}

/// Notes why allocations go to the driver; the first reason stays.
pub fn explain(why: impl Into<Vec<u8>>) {
    let _ = WHY.set(Box::new(CString::new(why).unwrap_or_default()));
}

/// Why allocations go to the driver, empty where they do not.
pub fn why() -> &'static CStr {
    match part() {
        Part::Idle => c"no function of the CUDA driver was called yet",
        Part::Closed => c"an internal error closed the pool; the log says where",
        _ if STATE.load(Ordering::Acquire) == FORKED => AFTER_FORK,
        Part::Active | Part::Passing => WHY.get().map_or(c"", CString::as_c_str),
    }
}

const AFTER_FORK: &CStr = c"this process was forked from one that used CUDA, which does not survive a fork";

/// Whether a control function of the C interface may look at the pool.
pub fn is_active() -> bool {
    matches!(STATE.load(Ordering::Acquire), ACTIVE | CLOSED)
}

/// The child of a fork calls the driver. Giving things back at its end is what it inherited, not use.
#[cold]
fn forked(api: Api) -> bool {
    let ends = ["Free", "Destroy", "Release", "Unload", "PopCurrent"].iter().any(|word| api.name().contains(word));
    if !ends && STATE.compare_exchange(FORKED, PASSING, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        explain(AFTER_FORK.to_bytes());
        let _inside = guard::enter_sheltered();
        let _ = std::panic::catch_unwind(|| {
            environment::used_after_fork(api);
            // Nothing more is found in this process.
            verdict::ended();
        });
    }
    false
}

/// The settings that the process started with. Hooks run only after [`start`] stored them; the fallback is for paths
/// that have none (the exit handler of a process that never became active).
pub fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Box::new(Settings::default()))
}

#[cold]
fn start() -> bool {
    let Some(_inside) = guard::enter_sheltered() else { return false };
    // Called by trampolines outside of their boundary.
    std::panic::catch_unwind(start_inside).unwrap_or_else(|_| {
        STATE.store(PASSING, Ordering::Release);
        false
    })
}

fn start_inside() -> bool {
    if STATE.compare_exchange(IDLE, STARTING, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return false;
    }
    // Before the settings: where these are wrong, nothing is looked at in this process, and `run --fail-on` must know.
    verdict::prepare();
    let settings = match Settings::read(std::env::vars_os()) {
        Ok(settings) => settings,
        Err(problems) => {
            refuse(&problems);
            return false;
        }
    };
    if settings.mode == Mode::Off {
        explain("GPUPOOL_MODE=off");
        STATE.store(PASSING, Ordering::Release);
        return false;
    }
    log::start(&settings);
    verdict::began();
    let mode = settings.mode;
    let _ = SETTINGS.set(Box::new(settings));
    install_panic_report();
    context::observe(observers::OF_CONTEXTS);
    let exe = std::env::current_exe().unwrap_or_default();
    let rank = RANK.get_or_init(|| Box::new(gpupool_config::rank(std::env::vars_os()))).as_ref();
    let host = rank.map(|_| log::host_name().to_string_lossy().into_owned());
    log::emit(|| {
        let event = ProcessStart {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: mode.word().to_owned(),
            exe: exe.display().to_string(),
            local_rank: rank.map(|rank| rank.number),
            job_ranks: rank.and_then(|rank| rank.ranks),
            job: rank.and_then(|rank| rank.job.clone()),
            host,
        };
        (event, format!("gpupool {} in {}, mode {}", env!("CARGO_PKG_VERSION"), exe.display(), mode.word()))
    });
    agent::prepare();
    STATE.store(ACTIVE, Ordering::Release);
    true
}

/// What a launcher said when the shim started; the program may change its environment later.
static RANK: OnceBox<Option<Rank>> = OnceBox::new();

/// Which rank of a job this process is, if a launcher gave it a number.
pub fn rank() -> Option<&'static Rank> {
    RANK.get().and_then(Option::as_ref)
}

/// Says what is wrong with the settings and lets everything pass: a limit that was misspelt must not be half obeyed.
pub fn refuse(problems: &[Problem]) {
    let mut text = String::new();
    for problem in problems {
        text.push_str(&format!("gpupool: error: {problem}\n"));
    }
    text.push_str("gpupool: this program runs without gpupool until that is corrected\n");
    log::write_stderr(&text);
    explain(problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
    STATE.store(PASSING, Ordering::Release);
}

/// A body panicked: no new blocks from now on, what was handed out stays valid. The panic hook has said where.
#[cold]
pub fn broken(api: Api) {
    let _ = STATE.compare_exchange(ACTIVE, CLOSED, Ordering::AcqRel, Ordering::Acquire);
    // It may be the log that failed, and nobody behind this catches its second panic.
    let _ = std::panic::catch_unwind(|| {
        log::emit(|| {
            let name = api.name();
            let text = format!(
                "internal error in {name}: the pool makes no new blocks, memory handed out stays valid; please report it"
            );
            (Panic { place: None, api: Some(name.to_owned()) }, text)
        });
    });
}

/// Reports panics of this library through its own log; the standard library linked into it is its own copy, so a Rust
/// program's panic hook is not touched.
fn install_panic_report() {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map_or_else(|| "unknown".to_owned(), ToString::to_string);
        log::emit(|| (Panic { place: Some(place), api: None }, format!("internal error: {info}")));
    }));
}

unsafe extern "C" {
    /// What `at_quick_exit` calls; that one is no function of the shared C library.
    fn __cxa_at_quick_exit(function: extern "C" fn(*mut c_void), library: *mut c_void) -> c_int;
}

/// See [`crate::register`]. The lists have room for this without allocating in any glibc since 2.36, and a process that
/// never touches CUDA runs only a few comparisons in each handler.
pub fn register() {
    log::remember_stderr();
    log::remember_folder();
    verdict::remember_folder();
    leave::find_next();
    // SAFETY: the handlers are functions of this library, which is never unloaded (build.rs); NULL belongs to no library that
    // could be.
    unsafe {
        libc::pthread_atfork(Some(before_fork), None, Some(after_fork_in_child));
        libc::atexit(at_exit);
        __cxa_at_quick_exit(at_quick_exit, std::ptr::null_mut());
    }
}

/// Remembers where, in case the child uses CUDA. Nothing where the shim is not active.
extern "C" fn before_fork() {
    if is_active()
        && let Some(_inside) = guard::enter_sheltered()
    {
        let _ = std::panic::catch_unwind(environment::before_fork);
    }
}

/// CUDA does not survive a fork, and neither do locks that another thread held: only atomics are touched here, and from
/// now on every call goes straight to the driver, which says NOT_INITIALIZED as it does without us.
extern "C" fn after_fork_in_child() {
    ipc::after_fork_in_child();
    match STATE.load(Ordering::Relaxed) {
        ACTIVE | CLOSED => STATE.store(FORKED, Ordering::Release),
        STARTING => STATE.store(PASSING, Ordering::Release),
        _ => {}
    }
}

/// The other orderly end, which runs none of the handlers of `exit`.
extern "C" fn at_quick_exit(_: *mut c_void) {
    at_exit();
}

/// The process leaves by `_exit`, perhaps in the handler of a signal, in a child of `vfork`, or while other threads are in the
/// middle of something: nothing can be judged here. Where there is nothing to judge, that is said, without a lock or an
/// allocation: of a process that never called the driver, and of one that only asked, as a forked worker may that counts
/// the GPUs. Contexts and what is loaded are all that is judged at the end.
pub fn leaves_at_once() {
    if !verdict::is_asked() {
        return;
    }
    match STATE.load(Ordering::Acquire) {
        IDLE => verdict::left(),
        ACTIVE if !context::was_any() && !module::was_any() => verdict::ended_at_once(),
        _ => {}
    }
}

/// Writes the summary. Nothing is freed: the driver does that, and other threads may still be running.
extern "C" fn at_exit() {
    agent::ended();
    if !matches!(STATE.load(Ordering::Acquire), ACTIVE | CLOSED) {
        if STATE.load(Ordering::Acquire) == IDLE {
            verdict::left();
        }
        return;
    }
    let Some(_inside) = guard::enter_sheltered() else { return };
    // A panic must not cross into libc's exit.
    let judged = std::panic::catch_unwind(summary::write);
    // After an internal error it is not known what would have been found.
    if judged.is_ok() && is_open() {
        let _ = std::panic::catch_unwind(verdict::ended);
    }
}

/// The driver, or one line in the log about why there is none.
pub fn driver() -> Option<&'static cuda::Driver> {
    cuda::get().inspect_err(|reason| log::warn_once("driver", reason)).ok()
}
