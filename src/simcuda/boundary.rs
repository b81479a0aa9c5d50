//! The way into every driver call: is the driver up, is a fault due, and under which default stream does it run.

use crate::error::{Code, Outcome};
use parking_lot::Mutex;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// What a call needs before it can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Answers before `cuInit` too.
    Nothing,
    Init,
}

/// What the null stream means in this call: `_ptds` and `_ptsz` exports say the thread's own stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultStream {
    Legacy,
    PerThread,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// `cuInit` has not run, or failed.
    Idle,
    Ready,
    /// Exit handlers have run.
    Gone,
    /// This process is a fork of one that had called `cuInit`.
    Forked,
}

static PHASE: AtomicU8 = AtomicU8::new(Phase::Idle as u8);
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Spares the fault list's lock in the usual run without faults.
pub static FAULTS_ARMED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static DEFAULT_STREAM: Cell<DefaultStream> = const { Cell::new(DefaultStream::Legacy) };
}

pub fn phase() -> Phase {
    match PHASE.load(Ordering::Acquire) {
        1 => Phase::Ready,
        2 => Phase::Gone,
        3 => Phase::Forked,
        _ => Phase::Idle,
    }
}

pub fn set_phase(phase: Phase) {
    PHASE.store(phase as u8, Ordering::Release);
}

/// Driver calls so far, refused ones included.
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// The meaning of the null stream in the call under way.
pub fn default_stream() -> DefaultStream {
    DEFAULT_STREAM.get()
}

/// Runs the body of one exported call. A panic in it is a bug of the simulation and aborts at the `extern "C"` border,
/// which is better than a made-up error code: a test would blame the program.
pub fn enter(export: &'static str, needs: Needs, default: DefaultStream, body: impl FnOnce() -> Outcome) -> c_int {
    CALLS.fetch_add(1, Ordering::Relaxed);
    if needs == Needs::Init {
        crate::checkpoint::pass();
    }
    match (phase(), needs) {
        (Phase::Ready, _) | (Phase::Idle | Phase::Forked, Needs::Nothing) => {}
        (Phase::Gone, _) => return Code::DEINITIALIZED.0,
        (Phase::Idle | Phase::Forked, _) => return Code::NOT_INITIALIZED.0,
    }
    if FAULTS_ARMED.load(Ordering::Relaxed)
        && let Some(code) = crate::fault::strike(export)
    {
        return code.0;
    }
    BEFORE.act_if_due(export);
    DEFAULT_STREAM.set(default);
    let answer = body().err().unwrap_or(Code::SUCCESS).0;
    AFTER.act_if_due(export);
    answer
}

/// What is called once beside a call that is awaited.
struct Act {
    /// The export; `None` is any.
    export: Option<&'static str>,
    /// Such calls up to it, itself included.
    left: u64,
    act: extern "C" fn(),
}

/// What is due at one end of a call.
pub struct Due {
    act: Mutex<Option<Act>>,
    /// Spares the lock in the usual run without one.
    armed: AtomicBool,
}

/// See `simcuda_before` and `simcuda_after`.
pub static BEFORE: Due = Due::new();
pub static AFTER: Due = Due::new();

impl Due {
    const fn new() -> Self {
        Self { act: Mutex::new(None), armed: AtomicBool::new(false) }
    }

    /// Awaits the next call of an export, or of so many the last where that is said behind its name: `cuMemMap:3`, `*:17` (any call).
    pub fn set(&self, what: Option<(&'static str, extern "C" fn())>) {
        let act = what.map(|(call, act)| {
            let counted = call.split_once(':').and_then(|(name, nth)| Some((name, nth.parse().ok()?)));
            let (name, left) = counted.unwrap_or((call, 1));
            Act { export: (name != "*").then_some(name), left: u64::max(left, 1), act }
        });
        let mut slot = self.act.lock();
        self.armed.store(act.is_some(), Ordering::Relaxed);
        *slot = act;
    }

    fn act_if_due(&self, export: &str) {
        if !self.armed.load(Ordering::Relaxed) {
            return;
        }
        let due = self.act.lock().take_if(|act| {
            act.left -= u64::from(act.export.is_none_or(|name| name == export));
            act.left == 0
        });
        if let Some(due) = due {
            self.armed.store(false, Ordering::Relaxed);
            (due.act)();
        }
    }
}
