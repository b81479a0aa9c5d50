//! The gate in front of every call that submits work, begins a capture or looks at mappings: closed, it leaves one thread alone with
//! devices that are proven quiet, which may then put other memory behind addresses. [`gpupool_pool::Gate`] has the states and the
//! proof that nobody is inside.
//!
//! **Closing** ([`close`]) never waits blindly. What it needs is gathered before: the contexts, kept alive until the gate is open
//! again, and an event of ours in each. Then the gate drains, captures are counted (each begins inside the gate), and the events are put
//! behind all work of every created and primary context. Where they do not come to pass within a moment, or anybody stays inside,
//! or a thread that waits has waited for long enough and opened the gate, nothing happened and it is told what was in the way.
//!
//! **Streams are not asked one by one first,** with `cuStreamQuery`, which puts nothing into them. It would need a list of all
//! streams, so a lock and a record for each that is made, and the per-thread and the libraries' own streams are in no such list. The
//! event costs 0.2 µs a context where nothing runs and 5 to 11 µs beside a kernel (measured).
//!
//! **While it is closed** nothing here allocates, logs, asks the loader or NVML, or waits for another process: a thread that waits at
//! the gate may hold any lock of the program's, the loader's and the allocator's included. What the driver does in its own calls is its
//! own. All signals are blocked on the thread that has closed it, which can neither be cancelled, and it breaks no capture.
//!
//! **Held** ([`Closed::hold`]): a program that is suspended waits at the gate for as long as that lasts, and the agent may allocate and log
//! meanwhile, which it could not otherwise take a request over a socket for. A program that waits there with a lock that the
//! allocator or the log needs would stop the agent; none is known that calls the driver with such a lock. What comes back from a disk is read while
//! the gate is closed again for that, under the same condition.
//!
//! **A context that ends** meanwhile waits until the gate is open, as for any call of ours in it; a process that ends waits for what
//! moves, a few seconds at most, before any handler of its end runs (`run/begin.rs`).

mod kernel;
mod markers;
mod reasons;
#[cfg(test)]
pub(crate) mod tests;
mod threads;

pub use reasons::{Reason, found};
pub use threads::{
    after_fork_in_child, ask, does_whoever_waits_ask, enter, enter_by_hand, enter_if_open, enter_unless, has_asked,
    wait_while_held, whoever_waits_asks,
};

use crate::watch::{
    capture,
    context::{self, Keeping, Lease},
};
use gpupool_cuda::{Context, CuResult, Driver, Marker};
use gpupool_interpose::cancel::{self, Shelter};
use gpupool_pool::{Kept, Moving, Slot};
use once_cell::race::OnceBox;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::Duration;
use threads::GATE;

/// For how long a closing may hold others up.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Until all threads are outside.
    pub wait: Duration,
    /// Then, until all work of all contexts is over.
    pub quiet: Duration,
    /// No thread waits for longer at a gate that is not closed yet: it opens it.
    pub hold: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { wait: Duration::from_millis(2), quiet: Duration::from_micros(200), hold: Duration::from_millis(5) }
    }
}

/// What kept the gate from being closed. It is open, or closed by another thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disturbed {
    /// It is never closed in this process.
    NotHere(Reason),
    /// Another thread has closed it.
    Closed,
    /// This thread is in a gated call itself, as in a callback of the driver.
    OwnCall,
    /// A thread stayed in this call (unknown where several are inside each other) for longer than `waited`.
    Inside { thread: u32, api: Option<&'static str>, waited: Duration },
    /// A stream is being captured.
    Capture,
    /// Work of this context was not over.
    Working { gpu: u32, context: u64 },
    /// A call is under way that may end this context.
    Ends { gpu: u32, context: u64 },
    /// A thread that waited at the gate had waited for long enough, or was called in the handler of a signal there.
    Opened { thread: u32 },
}

impl fmt::Display for Disturbed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotHere(reason) => reason.fmt(f),
            Self::Closed => f.write_str("another thread is moving memory"),
            Self::OwnCall => f.write_str("the thread was in a call of the driver itself"),
            Self::Inside { thread, api, waited } => {
                let api = api.unwrap_or("calls of the driver");
                let waited = match waited.as_millis() {
                    0 => format!("{} µs", waited.as_micros()),
                    milliseconds => format!("{milliseconds} ms"),
                };
                write!(f, "thread {thread} was in {api} for more than {waited}")
            }
            Self::Capture => f.write_str("a stream was being captured"),
            Self::Working { gpu, context } => write!(f, "work was running on GPU {gpu}, in context {context}"),
            Self::Ends { gpu, context } => write!(f, "context {context} on GPU {gpu} was about to end"),
            Self::Opened { thread } => write!(f, "thread {thread} could not be kept waiting for longer"),
        }
    }
}

/// Why the gate is never closed in this process, as far as that is known without a look at open devices and loaded libraries, which
/// [`close_unless`] takes: the weightiest reason. See [`Reason::is_doubt`].
pub fn why_not(driver: &Driver) -> Option<Reason> {
    reasons::known(driver).into_iter().next()
}

/// What only might be a reason, as far as that is known without a look.
pub fn doubts(driver: &Driver) -> impl Iterator<Item = Reason> + use<> {
    reasons::known(driver).into_iter().filter(Reason::is_doubt)
}

/// A context that is watched while the gate is closed, and lives as long as this.
struct Watched {
    /// Taken when this ends.
    marker: Option<Marker<'static>>,
    handle: Context,
    gpu: u32,
    id: u64,
    _lives: Lease,
}

impl Drop for Watched {
    /// The context lives still.
    fn drop(&mut self) {
        if let Some(marker) = self.marker.take() {
            markers::put_back(self.id, marker);
        }
    }
}

/// Every context that work can have been submitted to. One that was only seen to appear has no handle yet, and nothing was submitted to
/// it: it gets one in front of the first call there.
///
/// Events are made once for each context (`markers.rs`), while no other thread is in a gated call.
fn watch(driver: &'static Driver, patience: Duration) -> Result<Vec<Watched>, Disturbed> {
    let (watched, ends) = watch_but_for_ending(driver, patience)?;
    ends.map_or(Ok(watched), Err)
}

/// The same without those that a call is about to end, and one of these.
fn watch_but_for_ending(
    driver: &'static Driver,
    patience: Duration,
) -> Result<(Vec<Watched>, Option<Disturbed>), Disturbed> {
    let mut watched = Vec::new();
    let mut ends = None;
    for context in context::all() {
        let (gpu, id) = (context.device.ordinal(), context.id);
        let Some(handle) = context.live_handle() else { continue };
        let Some(lives) = context::keep(id) else {
            if context.is_gone() {
                continue;
            }
            ends = Some(Disturbed::Ends { gpu, context: id });
            continue;
        };
        let marker = match markers::take(id) {
            Some(marker) => marker,
            None => {
                threads::wait_for_others(patience)?;
                let marker = context::within_own(driver, handle, || driver.marker());
                let marker = marker.unwrap_or(Err(CuResult::CONTEXT_IS_DESTROYED));
                marker.map_err(|error| Disturbed::NotHere(Reason::Broken { gpu, error }))?
            }
        };
        watched.push(Watched { marker: Some(marker), handle, gpu, id, _lives: lives });
    }
    Ok((watched, ends))
}

/// Puts each event behind all work of its context; the first context whose event does not come to pass before `until`, or as long as
/// `goes_on`.
fn first_at_work(driver: &Driver, watched: &[Watched], until: u64, goes_on: impl Fn() -> bool) -> Option<Disturbed> {
    for it in watched {
        let Some(marker) = &it.marker else { continue };
        // SAFETY: the event was made in this context, which is kept alive.
        let put = context::within_own(driver, it.handle, || unsafe { marker.put(it.handle) });
        if let Some(error) = put.map(CuResult::ok).unwrap_or(Err(CuResult::CONTEXT_IS_DESTROYED)).err() {
            return Some(Disturbed::NotHere(Reason::Broken { gpu: it.gpu, error }));
        }
    }
    let spins_until = kernel::after(SPIN);
    for it in watched {
        let Some(marker) = &it.marker else { continue };
        loop {
            match marker.ask() {
                CuResult::SUCCESS => break,
                // Whoever waits for long leaves the processor to the program, of which another thread may have to go on.
                CuResult::NOT_READY if goes_on() && kernel::now() < until => {
                    if kernel::now() < spins_until {
                        std::hint::spin_loop()
                    } else {
                        kernel::sleep_for(SHORTEST)
                    }
                }
                CuResult::NOT_READY => return Some(Disturbed::Working { gpu: it.gpu, context: it.id }),
                error => return Some(Disturbed::NotHere(Reason::Broken { gpu: it.gpu, error })),
            }
        }
    }
    None
}

/// The gate, closed: no other thread submits work, begins a capture or looks at mappings until this is dropped, and the devices were
/// quiet. For the thread that closed it.
pub struct Closed<'a> {
    driver: &'a Driver,
    /// `None` once it is open.
    moving: Cell<Option<Moving>>,
    /// It was held before, and is again behind this.
    was_held: bool,
    limits: Limits,
    watched: Vec<Watched>,
    _keeping: Keeping,
    _alone: Alone<'a>,
}

/// The gate, held: no other thread passes until this is dropped, the process ends or a child is forked.
#[derive(Debug)]
pub struct Held(Option<gpupool_pool::Held>);

/// What holds of the thread that closes the gate: signals and cancellations wait, and its calls break no capture.
struct Alone<'a> {
    relaxed: Option<gpupool_cuda::Relaxed<'a>>,
    signals: libc::sigset_t,
    _sheltered: Shelter,
}

/// So that the thread's calls break nobody's capture.
fn relax(driver: &Driver) -> Option<gpupool_cuda::Relaxed<'_>> {
    #[cfg(test)]
    if tests::IS_STRICT.load(Ordering::Relaxed) {
        return None;
    }
    Some(driver.relax())
}

impl<'a> Alone<'a> {
    fn begin(driver: &'a Driver) -> Self {
        let sheltered = cancel::shelter();
        // SAFETY: both sets are locals, written before they are read; no signal's handler runs on this thread from here on.
        let signals = unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            before
        };
        Self { relaxed: relax(driver), signals, _sheltered: sheltered }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.relaxed = None;
        // SAFETY: the set is what the thread had before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.signals, std::ptr::null_mut()) };
    }
}

/// Closes the gate, once all devices are quiet. Waits for nobody for longer than the limits say, and for nothing that another thread
/// could be waiting to end.
///
/// For a thread that is in no gated call, that holds no lock which a hook takes in front of the driver's call, and that makes no thread
/// while it is closed, which would have all signals blocked as well.
#[cfg(test)]
pub fn close(driver: &'static Driver, limits: &Limits) -> Result<Closed<'static>, Disturbed> {
    close_unless(driver, limits, |_| true)
}

/// As [`close`], where of the reasons against it those count that this says of.
pub fn close_unless(
    driver: &'static Driver,
    limits: &Limits,
    counts: impl Fn(&Reason) -> bool,
) -> Result<Closed<'static>, Disturbed> {
    if let Some(reason) = reasons::all(driver).into_iter().find(counts) {
        return Err(Disturbed::NotHere(reason));
    }
    if threads::is_inside() {
        return Err(Disturbed::OwnCall);
    }
    // Before anybody is held up for it.
    if capture::under_way() {
        return Err(Disturbed::Capture);
    }
    watch_end();
    let watched = watch(driver, limits.wait)?;
    let alone = Alone::begin(driver);
    threads::PATIENCE.store(u64::try_from(limits.hold.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    let draining = GATE.drain(threads::slots(), kernel::after(limits.wait)).map_err(|kept| disturbed(kept, limits))?;
    let in_the_way = if IS_ENDING.load(Ordering::SeqCst) {
        Some(Disturbed::NotHere(Reason::Ending))
    } else if capture::under_way() {
        Some(Disturbed::Capture)
    } else {
        first_at_work(driver, &watched, kernel::after(limits.quiet), || GATE.is_draining(&draining))
    };
    if let Some(what) = in_the_way {
        return Err(if GATE.give_up(draining) { what } else { disturbed(GATE.opened(), limits) });
    }
    let moving = GATE.begin_to_move(draining).map_err(|kept| disturbed(kept, limits))?;
    CLOSER.store(threads::id(), Ordering::Relaxed);
    Ok(Closed {
        driver,
        moving: Cell::new(Some(moving)),
        was_held: false,
        limits: *limits,
        watched,
        _keeping: Keeping::begin(),
        _alone: alone,
    })
}

impl Held {
    /// The program is stopped as by [`close_unless`], although it waits already: for as long as something moves, so that the end of the process
    /// waits for that. No longer needed is a proof that nobody is inside.
    pub fn stop(&self, driver: &'static Driver, limits: &Limits) -> Result<Closed<'static>, Disturbed> {
        self.stop_with(driver, limits, watch(driver, limits.wait)?)
    }

    /// Whether nothing was submitted since it is held. Of contexts that a call is about to end nothing is asked: such a call passes no gate, and submits
    /// nothing.
    pub fn is_still_quiet(&self, driver: &'static Driver) -> Result<(), Disturbed> {
        let limits = Limits::default();
        let (watched, _) = watch_but_for_ending(driver, limits.wait)?;
        self.stop_with(driver, &limits, watched)?.still_quiet()
    }

    fn stop_with(
        &self,
        driver: &'static Driver,
        limits: &Limits,
        watched: Vec<Watched>,
    ) -> Result<Closed<'static>, Disturbed> {
        let alone = Alone::begin(driver);
        let moving = self.0.as_ref().and_then(|held| GATE.move_held(held));
        let moving = moving.ok_or(Disturbed::NotHere(Reason::Ending))?;
        CLOSER.store(threads::id(), Ordering::Relaxed);
        let moving = Cell::new(Some(moving));
        Ok(Closed {
            driver,
            moving,
            was_held: true,
            limits: *limits,
            watched,
            _keeping: Keeping::begin(),
            _alone: alone,
        })
    }
}

impl Drop for Held {
    /// Everybody passes again, unless the end of the process has seen to that.
    fn drop(&mut self) {
        if let Some(held) = self.0.take() {
            GATE.let_go(held);
        }
    }
}

fn disturbed(kept: Kept, limits: &Limits) -> Disturbed {
    match kept {
        Kept::Closed => Disturbed::Closed,
        Kept::NoBarrier => Disturbed::NotHere(Reason::NoBarrier),
        Kept::Opened { by } => Disturbed::Opened { thread: by },
        Kept::Inside { at, what } => {
            let thread = threads::slots().nth(at).map_or(0, Slot::thread);
            Disturbed::Inside { thread, api: what.number().and_then(threads::name), waited: limits.wait }
        }
    }
}

impl Closed<'_> {
    /// Keeps it closed for as long as the program is suspended. Contexts may end meanwhile.
    pub fn hold(self) -> Option<Held> {
        CLOSER.store(0, Ordering::Relaxed);
        self.moving.take().map(|moving| Held(Some(GATE.hold(moving))))
    }

    /// Whether nothing was submitted past the gate: all work of all contexts is still over, and nothing is captured. Asked just
    /// before something is unmapped; where it is not so, nothing may be.
    pub fn still_quiet(&self) -> Result<(), Disturbed> {
        if capture::under_way() {
            return Err(Disturbed::Capture);
        }
        let until = kernel::after(self.limits.quiet);
        first_at_work(self.driver, &self.watched, until, || true).map_or(Ok(()), Err)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        CLOSER.store(0, Ordering::Relaxed);
        if let Some(moving) = self.moving.take() {
            if self.was_held {
                GATE.hold(moving);
            } else {
                GATE.open(moving);
            }
        }
    }
}

/// Waits, with the gate open, until all work that was submitted so far is over: for the thread that is about to submit something which
/// is worth it. Waits no longer than `bound`, and no longer than `still` after `progress` last answered something new; it is asked
/// every now and then. Whether the work is over.
///
/// Nothing is waited for during a capture, and with drivers that put no event behind a context's work.
pub fn wait_until_quiet(
    driver: &'static Driver,
    bound: Duration,
    still: Duration,
    mut progress: impl FnMut() -> u64,
) -> bool {
    let Ok(watched) = watch(driver, Limits::default().wait) else { return false };
    let _relaxed = relax(driver);
    for it in &watched {
        let Some(marker) = &it.marker else { continue };
        // SAFETY: the event was made in this context, which is kept alive.
        let put = || unsafe { marker.put(it.handle) };
        let put = context::within_own(driver, it.handle, || capture::unless_under_way(put)).flatten();
        if put.is_none_or(|result| !result.is_ok()) {
            return false;
        }
    }
    let until = kernel::after(bound);
    let begun = kernel::now();
    let (mut last, mut moved) = (progress(), begun);
    let mut nap = SHORTEST;
    for it in &watched {
        let Some(marker) = &it.marker else { continue };
        loop {
            match marker.ask() {
                CuResult::SUCCESS => break,
                CuResult::NOT_READY => {}
                _ => return false,
            }
            let (now, seen) = (kernel::now(), progress());
            if seen != last {
                (last, moved) = (seen, now);
            }
            if now >= until || now - moved > still.as_nanos() as u64 {
                return false;
            }
            kernel::sleep_for(nap);
            // What the GPU waits for the next look it has nothing to do.
            nap = if now - begun < SOON.as_nanos() as u64 { SHORTEST } else { (nap * 2).min(LONGEST) };
        }
    }
    true
}

/// How long work is waited for without leaving the processor.
const SPIN: Duration = Duration::from_millis(1);
/// Between two looks at work that is waited for longer, or with the gate open. The system adds some fifty to each.
const SHORTEST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_micros(200);
/// For how long work is looked at as often as can be with the gate open: a product of large matrices takes 12 ms.
const SOON: Duration = Duration::from_millis(50);

/// The thread that has closed the gate; 0: none.
static CLOSER: AtomicU32 = AtomicU32::new(0);
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// What has to be done first where the process ends. No lock: the child of a fork may end while another thread of its parent had it.
static BEFORE_END: [OnceBox<fn()>; 2] = [const { OnceBox::new() }; 2];
/// How long the end of the process waits for what moves. A chunk takes a fraction of that.
const END: Duration = Duration::from_secs(5);

unsafe extern "C" {
    /// What `at_quick_exit` calls; that one is no function of the shared C library.
    fn __cxa_at_quick_exit(function: extern "C" fn(*mut c_void), library: *mut c_void) -> c_int;
}

/// From the first attempt on: handlers run in the reverse order of their registration, so these come before the driver's own.
fn watch_end() {
    static ONCE: Once = Once::new();
    ONCE.call_once(hear_end_first);
}

/// Has the end of the process heard of before what was registered so far runs, where nobody has said that it begins ([`process_ends`]).
pub fn hear_end_first() {
    // SAFETY: the handlers are functions of this library, which is never unloaded (build.rs); NULL belongs to no library that
    // could be.
    unsafe {
        libc::atexit(before_exit);
        __cxa_at_quick_exit(before_quick_exit, std::ptr::null_mut());
    }
}

/// Has this called where the process ends, before the gate is opened for that: once, however often it is said; behind what was said before.
pub fn at_end(prepare: fn()) {
    let is_there = |slot: &OnceBox<fn()>| {
        slot.set(Box::new(prepare)).is_ok() || slot.get().is_some_and(|known| std::ptr::fn_addr_eq(*known, prepare))
    };
    let found = BEFORE_END.iter().any(is_there);
    debug_assert!(found, "there are more than two");
}

extern "C" fn before_quick_exit(_: *mut c_void) {
    process_ends();
}

extern "C" fn before_exit() {
    process_ends();
}

/// The process ends: whoever waits goes on, once what moves is in its place, and nobody closes the gate any more.
pub fn process_ends() {
    IS_ENDING.store(true, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    for prepare in BEFORE_END.iter().filter_map(OnceBox::get) {
        prepare();
    }
    if CLOSER.load(Ordering::Relaxed) != threads::id() {
        GATE.is_open_for_end(kernel::after(END));
    }
}

/// Whether the process ends.
pub fn is_ending() -> bool {
    IS_ENDING.load(Ordering::SeqCst)
}
