//! A program's memory leaves the GPUs and comes back, at the same addresses and without the program's knowledge: `gpupool suspend` and
//! `gpupool resume`, carried out by the agent's thread.
//!
//! **Suspended** means that the gate is held ([`crate::gate::Held`]): whoever submits work, looks at mappings or asks for memory waits there;
//! questions, frees and everything on the processor go on. The devices were quiet when it was closed, so nothing that was submitted is
//! lost, and nobody has to be trusted to do nothing. Then the memory leaves as any other move goes, a gibibyte at a time, and what is freed
//! by that goes home to the driver.
//!
//! **What stays** is what cannot lie elsewhere without somebody's noticing: memory that other processes have open, that a network card or
//! another library knows by its pages, contexts, modules and what the driver itself has of stream-ordered pools. It is told (GP022).
//!
//! **Nothing is lost if something fails.** Memory that is elsewhere lies behind its own addresses all the time, so at the end of the process, in
//! the child of a fork, or where a GPU has no room any more, the gate is simply opened: the program goes on, with memory that is far.

mod agreement;
mod parting;

use crate::backing::{level, open, residence};
use crate::gate::{self, Disturbed, Held, Limits};
use crate::serve::memory::{idle, places};
use crate::serve::pinned;
use crate::watch::{context, finding, site};
use crate::{bell, log, process};
pub use agreement::{Agreement, Alone};
use gpupool_config::{Mode, format_size};
use gpupool_events::{Finding, ProgramResume, ProgramSuspend};
use gpupool_pool::Place;
pub use gpupool_wire::control::Target;
use parking_lot::Mutex;
use parting::{Parted, Why};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Whether memory may go to this place, of those that it does not leave.
fn takes(target: Target, place: Place) -> bool {
    match place {
        Place::Gpu(_) => target != Target::Host,
        Place::Host(_) => target != Target::Peers,
    }
}

/// For the log.
fn word(target: Target) -> &'static str {
    match target {
        Target::Anywhere => "anywhere",
        Target::Peers => "peers",
        Target::Host => "host",
    }
}

/// What was done, in bytes and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Left the GPUs, or came back.
    pub moved: u64,
    /// Of what was to: stayed where it was.
    pub stayed: u64,
    pub took: Duration,
}

/// A program that is suspended.
struct Suspended {
    held: Held,
    /// What left, and from where.
    parted: Vec<Parted>,
}

static STATE: Mutex<Option<Suspended>> = Mutex::new(None);
/// Causes of GP022 that were told.
static SAID: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
/// Microseconds since the epoch; 0 while the program runs.
static SINCE: AtomicU64 = AtomicU64::new(0);

/// Since when the program is suspended, in microseconds since the epoch; 0: it is not.
pub fn since() -> u64 {
    SINCE.load(Ordering::Relaxed)
}

/// Suspends the program: waits until `deadline` for all of its work to be over, as long as that `is_wanted` and as there is an agreement to try, and
/// tells `progress` how many bytes of how many have left.
///
/// # Errors
/// Why not, in words; the program runs on then, with all of its memory where it was.
pub fn suspend(
    target: Target,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    agreement: &mut dyn Agreement,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Done, String> {
    let mut state = STATE.lock();
    if state.is_some() {
        return Err("it is suspended already".to_owned());
    }
    let driver = process::driver().ok_or("it has not used CUDA yet")?;
    if !matches!(process::settings().mode, Mode::Pool | Mode::Spill) {
        return Err(format!(
            "GPUPOOL_MODE={} leaves its memory to the driver; only the pool's can leave (modes pool and spill)",
            process::settings().mode.word()
        ));
    }
    // Its own memory goes to places that the pool knows of.
    let opened = open::opened().or_else(|| {
        let context = context::all().into_iter().next()?;
        context::within_one_on(driver, context.device, || open::open(driver)).flatten()
    });
    let opened = opened.ok_or("it has allocated nothing from the pool yet")?;
    let begun = Instant::now();
    // What was asked before concerned an earlier time.
    let _ = gate::has_asked();
    let held = hold(driver, deadline, is_wanted, agreement)?;
    SINCE.store(microseconds(), Ordering::Relaxed);
    let (parted, stayed) = parting::leave(opened, driver, &held, target, progress);
    let moved = parted.iter().map(Parted::bytes).sum();
    let refusal = match stayed.first() {
        _ if !is_wanted() => Some("whoever asked for it has gone".to_owned()),
        Some((bytes, Why { text, .. })) if moved == 0 => {
            Some(format!("nothing of it can leave: {} would stay, because {text}", format_size(*bytes)))
        }
        _ => None,
    };
    if let Some(refusal) = refusal {
        parting::come_back(opened, driver, &held, parted, &mut |_, _| {});
        drop(held);
        SINCE.store(0, Ordering::Relaxed);
        told_anew();
        return Err(refusal);
    }
    idle::give_back_unused(None, u32::MAX, "suspend", "the program is suspended");
    opened.pool.trim_all(&[]);
    pinned::trim("suspend");
    let done = Done { moved, stayed: stayed.iter().map(|(bytes, _)| bytes).sum(), took: begun.elapsed() };
    *state = Some(Suspended { held, parted });
    drop(state);
    told_anew();
    log::emit(|| {
        let Done { moved, stayed, took } = done;
        let event =
            ProgramSuspend { bytes: moved, stayed, to: word(target).to_owned(), microseconds: took.as_micros() as u64 };
        (event, format!("suspended: {} left the GPUs, {} stayed", format_size(moved), format_size(stayed)))
    });
    for (bytes, Why { cause, text }) in stayed {
        // Once for each cause: a program may be suspended every night.
        if SAID.lock().insert(cause) {
            let what = format!("{} stayed on its GPU while the program was suspended: {text}", format_size(bytes));
            let facts = [("cause", cause.to_owned()), ("bytes", bytes.to_string())];
            finding::make(&Finding::STAYED_SUSPENDED, None, &site::here(), &facts, &what);
        }
    }
    Ok(done)
}

/// Suspends a program that nobody has asked to: the first call that waits for it resumes it.
///
/// # Errors
/// As of [`suspend`].
pub fn suspend_by_itself(target: Target, deadline: Instant) -> Result<Done, String> {
    gate::whoever_waits_asks(true);
    let done = suspend(target, deadline, &|| true, &mut Alone, &mut |_, _| {});
    if done.is_err() {
        gate::whoever_waits_asks(false);
    }
    done
}

/// Has everything come back to where it was, or to where there is room now, and lets the program go on.
///
/// # Errors
/// It is not suspended.
pub fn resume(progress: &mut dyn FnMut(u64, u64)) -> Result<Done, String> {
    let Some(Suspended { held, parted }) = STATE.lock().take() else {
        return Err("it is not suspended".to_owned());
    };
    let begun = Instant::now();
    let (moved, stayed) = match (open::opened(), process::driver()) {
        (Some(opened), Some(driver)) => parting::come_back(opened, driver, &held, parted, progress),
        _ => (0, 0),
    };
    gate::whoever_waits_asks(false);
    drop(held);
    SINCE.store(0, Ordering::Relaxed);
    let done = Done { moved, stayed, took: begun.elapsed() };
    told_anew();
    if stayed > 0 {
        residence::is_far();
        tracing::warn!(
            target: "gpupool::memory", about = "suspend",
            "{} could not come back to its GPU when the program was resumed, because there is no room there; it lies far from where it is \
             used, and all of it is right. GPUPOOL_MOVE=auto brings it near once there is room",
            format_size(stayed)
        );
    }
    log::emit(|| {
        let event = ProgramResume { bytes: moved, stayed, microseconds: done.took.as_micros() as u64 };
        (event, format!("resumed: {} came back, {} did not", format_size(moved), format_size(stayed)))
    });
    Ok(done)
}

/// A thread that waits for the program to be resumed was interrupted by a signal: somebody wants it to go on.
pub fn resume_if_asked() {
    if since() != 0 && gate::has_asked() {
        let _ = resume(&mut |_, _| {});
    }
}

/// Whether the program waits for somebody to resume it.
pub fn waits_for_others() -> bool {
    since() != 0 && !gate::does_whoever_waits_ask()
}

/// Nobody can ask for the program to be resumed any more, so it is; why, in words.
pub fn resume_unreachable(why: &str) {
    tracing::warn!(
        target: "gpupool::memory", about = "suspend",
        "the program was suspended, and is resumed because nobody could ask for that any more: {why}"
    );
    let _ = resume(&mut |_, _| {});
}

/// In the child of a fork: it is not suspended, and has none of the memory.
pub fn after_fork_in_child() {
    SINCE.store(0, Ordering::Relaxed);
}

/// Closes the gate, as soon as all of the program's work is over, and it is agreed that it stays closed.
fn hold(
    driver: &'static gpupool_cuda::Driver,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    agreement: &mut dyn Agreement,
) -> Result<Held, String> {
    let gone = || "whoever asked for it has gone".to_owned();
    loop {
        if !is_wanted() || !agreement.may_close() {
            return Err(gone());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // The program is held up for the length of a try, as it is afterwards in any case.
        let hold = agreement.hold();
        let limits = Limits { wait: hold.min(left), quiet: hold.min(left), hold: 2 * hold };
        let disturbed = match gate::close_unless(driver, &limits, |reason| !reason.is_doubt()) {
            Ok(closed) => match closed.hold() {
                Some(held) if agreement.is_quiet() => return Ok(held),
                // Dropped, so that the program goes on.
                Some(_) => continue,
                None => return Err("the process ends".to_owned()),
            },
            Err(disturbed) => disturbed,
        };
        if let Disturbed::NotHere(reason) = &disturbed {
            return Err(format!("memory cannot move in this process, because {reason}"));
        }
        if Instant::now() + agreement::PAUSE >= deadline {
            return Err(format!("it did not come to rest in time: {disturbed}"));
        }
        agreement.is_disturbed(&disturbed);
    }
}

/// The log and the page say where everything lies now.
fn told_anew() {
    level::report();
    places::tell_all();
    bell::changed();
}

fn microseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}
