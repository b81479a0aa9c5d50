//! What the library does in this process: the [`Phase`] (Idle → Starting → Active → Closed, Passing or Forked) and the settings.
//!
//! This is what everything else stands on: it is asked from everywhere and asks nobody. Who moves it on is in `run`.

use crate::log;
use gpupool_config::{Problem, Rank, Settings};
use gpupool_cuda as cuda;
use gpupool_events::Panic;
use gpupool_interpose::{Api, dlsym};
use once_cell::race::OnceBox;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU8, Ordering};

/// How far a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// No driver function was called yet. A process that stays here never notices the library.
    Idle,
    /// One thread reads the settings; calls of others pass through until it is done, rather than wait for it.
    Starting,
    /// Hooks do their work.
    Active,
    /// Something inside failed: live blocks keep working, no new ones are made.
    Closed,
    /// Everything passes through: switched off, or a bad setting.
    Passing,
    /// In the child of a fork: everything passes through, and its first use of the driver is reported as a finding.
    Forked,
}

impl Phase {
    /// In the order of their numbers.
    const ALL: [Self; 6] = [Self::Idle, Self::Starting, Self::Active, Self::Closed, Self::Passing, Self::Forked];
}

/// A number of [`Phase`].
static PHASE: AtomicU8 = AtomicU8::new(Phase::Idle as u8);
static SETTINGS: OnceBox<Settings> = OnceBox::new();
static RANK: OnceBox<Option<Rank>> = OnceBox::new();
/// Why allocations go to the driver, once they do.
static WHY: OnceBox<CString> = OnceBox::new();

/// How far this process is.
#[inline]
pub fn phase() -> Phase {
    Phase::ALL[usize::from(PHASE.load(Ordering::Acquire) % Phase::ALL.len() as u8)]
}

/// Moves on, whatever was before.
pub fn enter(phase: Phase) {
    PHASE.store(phase as u8, Ordering::Release);
}

/// Moves on from one phase to another; `false` where another thread did, or the process is in another phase.
pub fn advance(from: Phase, to: Phase) -> bool {
    PHASE.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// Whether new blocks may be made.
#[inline]
pub fn is_open() -> bool {
    PHASE.load(Ordering::Acquire) == Phase::Active as u8
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
    match phase() {
        Phase::Idle | Phase::Starting => Part::Idle,
        Phase::Active => Part::Active,
        Phase::Closed => Part::Closed,
        Phase::Passing | Phase::Forked => Part::Passing,
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
        _ if phase() == Phase::Forked => AFTER_FORK,
        Part::Active | Part::Passing => WHY.get().map_or(c"", CString::as_c_str),
    }
}

/// Why nothing is done in the child of a fork.
pub const AFTER_FORK: &CStr = c"this process was forked from one that used CUDA, which does not survive a fork";

/// Whether hooks do their work, at least for what was handed out.
#[inline]
pub fn is_active() -> bool {
    let phase = PHASE.load(Ordering::Acquire);
    phase == Phase::Active as u8 || phase == Phase::Closed as u8
}

/// The settings that the process started with. Hooks run only after the start has stored them; the fallback is for paths that
/// have none (the exit handler of a process that never became active).
pub fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Box::new(Settings::default()))
}

/// What the process was told as it started: the program may change its environment later.
pub fn remember(settings: Settings, rank: Option<Rank>) {
    let _ = SETTINGS.set(Box::new(settings));
    let _ = RANK.set(Box::new(rank));
}

/// Which rank of a job this process is, if a launcher gave it a number.
pub fn rank() -> Option<&'static Rank> {
    RANK.get().and_then(Option::as_ref)
}

static VISIBLE_DEVICES: OnceBox<Option<String>> = OnceBox::new();

/// CUDA has read this as `CUDA_VISIBLE_DEVICES`.
pub fn cuda_read(visible_devices: Option<String>) {
    let _ = VISIBLE_DEVICES.set(Box::new(visible_devices));
}

/// `CUDA_VISIBLE_DEVICES` as CUDA read it.
pub fn visible_devices() -> Option<String> {
    VISIBLE_DEVICES.get().cloned().flatten()
}

/// Says what is wrong with the settings and lets everything pass: a limit that was misspelt must not be half obeyed.
pub fn refuse(problems: &[Problem]) {
    let mut text = String::new();
    for problem in problems {
        text.push_str(&format!("gpupool: error: {problem}\n"));
    }
    text.push_str("gpupool: this program runs without gpupool until that is corrected\n");
    log::write_stderr(&text);
    let why = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    log::verdict::apart(&why);
    explain(why);
    enter(Phase::Passing);
}

/// A body panicked: no new blocks from now on, what was handed out stays valid. The panic hook has said where.
#[cold]
pub fn broken(api: Api) {
    advance(Phase::Active, Phase::Closed);
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

/// The driver, or one line in the log about why there is none.
pub fn driver() -> Option<&'static cuda::Driver> {
    cuda::get().inspect_err(|reason| log::warn_once("driver", reason)).ok()
}
