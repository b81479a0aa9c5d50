//! Whether the program submitted work since a context was last waited for, so that a free need not wait again.
//!
//! Every row that may submit work notes it before and behind the driver's call (`hook/trampoline.rs`); which calls that are is a
//! question of memory, see [`is_harmless`]. The rest is in [`Submissions`], with the proof.
//!
//! **What was submitted before a wait is over after it,** whatever it does: kernels that launch others and graphs that are launched
//! by a kernel belong to the work that launched them; a kernel that never ends keeps the wait from ending; streams that wait for a
//! value, an event or a semaphore wait inside what was submitted. What other processes do with shared memory no wait ever covered,
//! the driver's neither. An error that sticks to a context comes from work in it, or is told by every later wait that somebody has to
//! make; the wait that is told one is not noted, so the next free hears it again, as from the driver.
//!
//! **Where work may be submitted past the hooks every wait is made** ([`goes_unseen`]): the program looked up a function that nobody
//! has looked at here, took a private table of that kind, or has a context though no call that was seen made one; a profiler or a
//! debugger is injected; other processes share the context (MPS), whose errors are this one's as well; or threads are
//! cancelled, which may end them between a submission and its note. It stays so until the process ends, and the log says why at
//! level debug. Two ways past the hooks are not noticed: names that are newer than this list, called by a program that is linked with the
//! driver, and libraries that were loaded with `RTLD_DEEPBIND` or `dlmopen` (README.md says so).

mod names;
mod tables;

pub use names::is_harmless;

use gpupool_pool::{Epoch, Submissions, Waited};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

static SUBMISSIONS: Submissions = Submissions::new();

/// Before a call that may submit work, and behind it.
#[inline(always)]
pub fn note() {
    SUBMISSIONS.note();
}

/// Before a wait begins, to be noted with what was waited for. `None` where work may be submitted unseen.
pub fn before_wait() -> Option<Epoch> {
    let epoch = SUBMISSIONS.before_wait();
    if epoch.is_none() {
        tell_once();
    }
    epoch
}

/// Whether nothing was submitted since this wait, and what was noted of it; `None` where there is something to wait for.
#[inline]
pub fn covered_by(wait: &Waited) -> Option<bool> {
    wait.covers(&SUBMISSIONS)
}

/// Why work may be submitted unseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Unseen {
    /// A function that nobody has looked at was looked up; its name.
    Function = 1,
    /// A table that nobody has looked at was taken; its identifier.
    Table,
    /// There is a context, and no call that was seen made it; how it was found.
    Context,
    /// A library is loaded into every CUDA program; the variable that says so.
    Injected,
    /// Other processes share the context.
    Shared,
    /// A thread is cancelled.
    Cancelled,
    /// A table that nobody has looked at, either, and that cuBLASLt or cuFFT takes in many programs; its identifier.
    CommonTable,
}

impl Unseen {
    const ALL: [Self; 7] =
        [Self::Function, Self::Table, Self::Context, Self::Injected, Self::Shared, Self::Cancelled, Self::CommonTable];

    /// The reason with what it is about.
    pub fn said_of(self, what: impl fmt::Display) -> String {
        match self {
            Self::Function => format!("the program looked up {what}, which is not known to submit nothing"),
            Self::Table | Self::CommonTable => {
                format!("the driver's private table {what} was taken, through which work may be submitted")
            }
            Self::Context => format!("a context was {what}, made by a call that was not seen"),
            Self::Injected => format!("{what} is set, and what it loads may submit work of its own"),
            Self::Shared => format!("other processes share the context of {what} (MPS)"),
            Self::Cancelled => "the program cancels threads, which may end inside a call".to_owned(),
        }
    }
}

/// Letters of what a reason is about that are kept.
const KEPT: usize = 96;

/// What was first given as a reason, by its kind. Written once, by who gave it.
struct Given {
    is_taken: AtomicBool,
    /// Up to the first 0.
    what: [AtomicU8; KEPT],
    is_whole: AtomicBool,
}

static GIVEN: [Given; Unseen::ALL.len()] = [const {
    Given {
        is_taken: AtomicBool::new(false),
        what: [const { AtomicU8::new(0) }; KEPT],
        is_whole: AtomicBool::new(false),
    }
}; Unseen::ALL.len()];
/// The first reason; 0 while there is none.
static WHY: AtomicU8 = AtomicU8::new(0);
static IS_TOLD: AtomicBool = AtomicBool::new(false);

impl Unseen {
    fn given(self) -> &'static Given {
        &GIVEN[self as usize - 1]
    }

    /// What this reason is about; `None` where it was not given.
    fn what(self) -> Option<String> {
        let given = self.given();
        if !given.is_whole.load(Ordering::Acquire) {
            return None;
        }
        let letters = given.what.iter().map(|letter| letter.load(Ordering::Relaxed));
        let letters: Vec<u8> = letters.take_while(|letter| *letter != 0).collect();
        Some(String::from_utf8_lossy(&letters).into_owned())
    }
}

/// From now on every wait is made, for this reason. Allocates nothing and takes no lock, so that it can be called while `dlsym` is.
#[cold]
pub fn goes_unseen(why: Unseen, what: &[u8]) {
    SUBMISSIONS.go_unseen();
    let given = why.given();
    if !given.is_taken.swap(true, Ordering::Relaxed) {
        for (kept, letter) in given.what.iter().zip(what) {
            kept.store(*letter, Ordering::Relaxed);
        }
        given.is_whole.store(true, Ordering::Release);
    }
    let _ = WHY.compare_exchange(0, why as u8, Ordering::Release, Ordering::Relaxed);
}

/// Every reason for which work may be submitted unseen, with what each was first given for.
pub fn reasons() -> Vec<(Unseen, String)> {
    Unseen::ALL.into_iter().filter_map(|why| Some((why, why.what()?))).collect()
}

/// Says the reason, where a wait would not have been made without it.
#[cold]
fn tell_once() {
    let why = WHY.load(Ordering::Acquire);
    let Some((why, what)) = Unseen::ALL.into_iter().find(|it| *it as u8 == why).and_then(|it| Some((it, it.what()?)))
    else {
        return;
    };
    if !IS_TOLD.swap(true, Ordering::Relaxed) {
        let reason = why.said_of(what);
        tracing::debug!(target: "gpupool::memory", about = "waits", "every free waits for its context: {reason}");
    }
}

/// Whether a private table was taken through which contexts can be made.
static MAKES_CONTEXTS: AtomicBool = AtomicBool::new(false);

/// The program has one of the driver's private tables.
pub fn table_taken(id: &[u8; 16], printed: impl FnOnce() -> String) {
    match tables::known(id) {
        Some(tables::Known::Contexts) => MAKES_CONTEXTS.store(true, Ordering::Relaxed),
        Some(tables::Known::Nothing) => {}
        Some(tables::Known::CommonOnly) => goes_unseen(Unseen::CommonTable, printed().as_bytes()),
        None => goes_unseen(Unseen::Table, printed().as_bytes()),
    }
}

/// There is a context that no call which was seen made. Where a table that makes some was taken, that is how; else somebody has
/// functions of the driver past the hooks.
pub fn context_came_unseen(how: &str) {
    note();
    if !MAKES_CONTEXTS.load(Ordering::Relaxed) {
        goes_unseen(Unseen::Context, how.as_bytes());
    }
}

/// What the environment says of libraries that are loaded into every CUDA program: profilers and debuggers.
const INJECTIONS: [&str; 2] = ["CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH"];

/// Looks, as the process starts, for what may submit work unseen.
pub fn look_at_environment() {
    for name in INJECTIONS {
        if std::env::var_os(name).is_some_and(|value| !value.is_empty()) {
            goes_unseen(Unseen::Injected, name.as_bytes());
        }
    }
}
