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
//! **One GPU alone** ([`vacate`]): a GPU that is drained, that lends no more, or of which less may be used is left in the same way, half a
//! second at a time, and the program goes on in between and afterwards.
//!
//! **Nothing is lost if something fails.** Memory at other places lies behind its own addresses all the time, so at the end of the process, in
//! the child of a fork, or where a GPU has no room any more, the gate is simply opened: the program goes on, with memory that is far. What is on
//! a disk (`stored.rs`) comes back first; where it cannot, the program stays suspended and can be resumed again.

mod agreement;
mod away;
pub mod bring_home;
mod coming_back;
mod copying;
pub mod given;
mod kept;
mod leaves;
mod parted;
mod parting;
mod put;
mod rearranging;
pub mod spare;
mod stored;
pub mod totals;
mod turns;
pub mod vacate;
mod why;

use crate::backing::level;
use crate::backing::open::{self, Opened};
use crate::backing::residence::Residence;
use crate::backing::{residence, terms};
use crate::gate::{self, Disturbed, Held, Limits};
use crate::image::crew::{Crews, Way};
use crate::serve::handles::{by_hand, of_kind};
use crate::serve::ipc;
use crate::serve::memory::{idle, mempool, places, unpooled};
use crate::serve::{self, pinned};
use crate::watch::{context, finding};
use crate::{bell, log, process};
pub use agreement::{Agreement, Alone};
pub use copying::{Room, room_on_host};
use gpupool_config::{Mode, format_size};
use gpupool_cuda::Driver;
use gpupool_events::{Finding, HostSettle, ProgramResume, ProgramSuspend};
use gpupool_pool::Place;
pub use gpupool_wire::control::Target;
pub use kept::addresses_left;
use leaves::Leaves;
use parking_lot::{Mutex, MutexGuard};
use parted::{Parted, living};
use put::Put;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use why::Why;

/// For the log.
fn word(target: &Target) -> String {
    match target {
        Target::Anywhere => "anywhere".to_owned(),
        Target::Peers => "peers".to_owned(),
        Target::Host => "host".to_owned(),
        Target::Folder(folder) => folder.display().to_string(),
    }
}

/// What was done, in bytes and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Left the GPUs, or came back.
    pub moved: u64,
    /// Of what was to: stayed where it was.
    pub stayed: u64,
    /// Of what left: is in files now.
    pub to_disk: u64,
    /// How long these are.
    pub stored: u64,
    pub took: Duration,
    /// Of that, how long the work was waited for that the program had submitted.
    pub waited: Duration,
}

/// A program that is suspended.
struct Suspended {
    held: Held,
    /// What left, and from where.
    parted: Vec<Parted>,
    /// What of that is mapped nowhere.
    put: Option<Put>,
    /// Of a program that nobody suspended: what was put on the host because somebody needs its GPU ([`vacate`]).
    settles: Option<Settles>,
}

struct Settles {
    /// Since when the program waits for it.
    since: Instant,
    bytes: u64,
}

static STATE: Mutex<Option<Suspended>> = Mutex::new(None);
/// Why the state cannot be had.
const BUSY: &str = "an image of it is being written, or another command moves its memory";
/// Why no image is written of a program.
pub const FIRST: &str = "it is suspended; resume it first";
/// The cause of GP022 where a rank was to be suspended without others of its job.
const SIBLINGS: &str = "siblings";
/// Causes of GP022 that were told.
static SAID: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
/// Microseconds since the epoch; 0 while the program runs.
static SINCE: AtomicU64 = AtomicU64::new(0);

/// How many suspensions are over.
static OVER: AtomicU64 = AtomicU64::new(0);

/// Whether the driver was asked to take the rest of the suspended program away as well.
static IS_WHOLE: AtomicBool = AtomicBool::new(false);

/// Whether something may be where no GPU reaches it.
static IS_PUT: AtomicBool = AtomicBool::new(false);
/// Whether files of what is back are being removed.
static IS_REMOVING: AtomicBool = AtomicBool::new(false);
/// Whether the program ends without what was put away. Its end asks more than once, and would hear of what it has taken away itself, and not of the cause.
static IS_GIVEN_UP: AtomicBool = AtomicBool::new(false);
/// How often something could not be brought back.
static FAILURES: AtomicU32 = AtomicU32::new(0);
/// Why not, the last time, and when that was.
static FAILED: Mutex<Option<(String, Instant)>> = Mutex::new(None);
/// Behind a failure nobody is heard for so long but who names the process: a program that is resumed by whoever waits would read
/// all the time.
const AGAIN: Duration = Duration::from_secs(1);
/// The agent's thread.
static AGENT: AtomicU32 = AtomicU32::new(0);

/// Since when the program is suspended, in microseconds since the epoch; 0: it is not.
pub fn since() -> u64 {
    SINCE.load(Ordering::Relaxed)
}

/// How many suspensions are over. Another number than before: the program was suspended, and has gone on meanwhile.
pub fn over() -> u64 {
    OVER.load(Ordering::Relaxed)
}

/// Whether the program is suspended whole (`gpupool suspend --process`): it has nothing on any GPU, and none of its calls of the driver returns before `gpupool resume`, so the
/// agent makes none meanwhile.
pub fn is_whole() -> bool {
    IS_WHOLE.load(Ordering::Relaxed)
}

/// What is told of such a program.
pub fn whole() -> String {
    format!(
        "the program is suspended whole (gpupool suspend --process); what it has is placed when it is resumed (gpupool resume {})",
        std::process::id()
    )
}

/// The program goes on.
fn goes_on() {
    IS_WHOLE.store(false, Ordering::Relaxed);
    SINCE.store(0, Ordering::Relaxed);
    OVER.fetch_add(1, Ordering::Relaxed);
}

/// The pool. Where the program has only memory of its own, it is opened for that, which goes to places that the pool knows of.
fn opened(driver: &'static Driver) -> Option<&'static Opened> {
    open::opened().or_else(|| {
        let context = context::all().into_iter().next()?;
        context::within_one_on(driver, context.device, || open::open(driver)).flatten()
    })
}

/// Suspends the program: waits until `deadline` for all of its work to be over, as long as that `is_wanted` and as there is an agreement to try, and
/// tells `progress` how many bytes of how many have left.
///
/// # Errors
/// Why not, in words; the program runs on then, with all of its memory where it was.
pub fn suspend(
    target: &Target,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    agreement: &mut dyn Agreement,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Done, String> {
    suspend_behind(target, deadline, is_wanted, agreement, &mut |_, _| Ok(()), progress)
}

/// Why this program is not suspended without `ranks`, processes of the same job that nobody named, in words; it is told as a finding as well. A rank that waits for this one in
/// a collective would hang until it is resumed, and NCCL's watchdog may end it meanwhile.
///
/// The command knows which those are and how all of them are named, and this process does not: it sees no other's page. It is asked all the same, since its log and its report
/// are where findings are. What to do instead is left to each: the command says it behind this, and the finding in its fix.
pub fn refuse_alone(ranks: &[u32]) -> String {
    let pids = ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let (processes, run, them) = match ranks {
        [_] => ("process", "runs", "it is"),
        _ => ("processes", "run", "they are"),
    };
    let is_numbered = process::settings().local_ranks.is_some();
    let why = if is_numbered {
        format!("it is a rank of a job of which {processes} {pids} {run} as well, and {them} not named")
    } else {
        format!(
            "{processes} {pids} {run} the same program, started by the same process, on other GPUs, as ranks of one job do, and {them} not named"
        )
    };
    // Once: whoever asks in a loop has heard it.
    if SAID.lock().insert(SIBLINGS) {
        let what = format!("it was not suspended, and all of its memory stayed: {why}");
        let facts = [("cause", SIBLINGS.to_owned()), ("processes", pids)];
        finding::make_by_itself(&Finding::STAYED_SUSPENDED, None, &facts, &what);
    }
    why
}

/// What is done with a program that is held, before anything of it leaves; it tells how many bytes of how many are done.
pub type First<'a> = dyn FnMut(&Held, &mut dyn FnMut(u64, u64)) -> Result<(), String> + 'a;

/// As [`suspend`]. `first` is done as soon as the program is held, and it is told in the same way how far it is; nothing leaves before.
///
/// # Errors
/// As of [`suspend`], and as of `first`.
pub fn suspend_behind(
    target: &Target,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    agreement: &mut dyn Agreement,
    first: &mut First<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Done, String> {
    let mut state = settled(deadline)?;
    if state.is_some() {
        return Err("it is suspended already".to_owned());
    }
    let (driver, opened) = pool()?;
    let begun = Instant::now();
    let _moving = terms::begin_to_move();
    // What was asked before concerned an earlier time.
    let _ = gate::has_asked();
    gate::hear_end_first();
    if matches!(target, Target::Anywhere | Target::Peers) {
        vacate::have_idle_lend();
    }
    terms::note_free(driver);
    let held = hold(driver, deadline, is_wanted, agreement)?;
    SINCE.store(microseconds(), Ordering::Relaxed);
    let goes_on = || is_wanted() && !gate::is_ending();
    let waited = begun.elapsed();
    if let Err(why) = first(&held, progress) {
        return back_again(state, Suspended { held, parted: Vec::new(), put: None, settles: None }, why);
    }
    // What it took is none of what the leaving takes.
    let begun = Instant::now() - waited;
    // First to peers, which is fastest; then all the rest is copied before any of it leaves.
    let (mut parted, mut stayed) = match target {
        Target::Anywhere | Target::Peers => {
            let leaves = Leaves::Suspended { target: &Target::Peers, put: None, full: None };
            parting::leave(opened, driver, &held, leaves, None, progress)
        }
        Target::Host | Target::Folder(_) => Default::default(),
    };
    let put = match target {
        Target::Folder(folder) => copying::store(opened, driver, folder, &goes_on, progress).map(|put| (put, None)),
        Target::Host | Target::Anywhere => {
            let leaves = Leaves::Suspended { target, put: None, full: None };
            copying::keep(opened, driver, leaves, &mut Crews::new(Way::Out), &goes_on, progress)
        }
        Target::Peers => Ok((None, None)),
    };
    let (mut put, full) = match put {
        Ok(put) => put,
        Err(why) => {
            // What has left is on peers.
            return back_again(state, Suspended { held, parted, put: None, settles: None }, why);
        }
    };
    // What of an earlier suspension was not needed for this one is no use to a program that waits.
    spare::give_back();
    if put.is_some() {
        note_put();
    }
    if *target != Target::Peers {
        // Once all of it is copied it leaves in no time.
        let leaves = Leaves::Suspended { target, put: put.as_ref(), full: full.as_ref() };
        let (left, rest) = parting::leave(opened, driver, &held, leaves, None, &mut |_, _| {});
        parted.extend(left);
        stayed = rest;
        // A call that asks for memory passes no gate, and one that was under way when the program was stopped may have been given some since.
        let more = match &put {
            Some(Put::Host(_)) if why::has_come(&stayed) => {
                let leaves = Leaves::Suspended { target, put: None, full: None };
                copying::keep(opened, driver, leaves, &mut Crews::new(Way::Out), &goes_on, &mut |_, _| {})
                    .unwrap_or((None, None))
            }
            _ => (None, None),
        };
        if let (Some(more), full) = more {
            if let Some(put) = &mut put {
                put.join(more);
            }
            let leaves = Leaves::Suspended { target, put: put.as_ref(), full: full.as_ref() };
            let (left, rest) = parting::leave(opened, driver, &held, leaves, None, &mut |_, _| {});
            parted.extend(left);
            stayed = rest;
        }
    }
    let moved = parted.iter().map(Parted::bytes).sum();
    let refusal = match stayed.first() {
        _ if !is_wanted() => Some("whoever asked for it has gone".to_owned()),
        Some((bytes, Why { text, .. })) if moved == 0 => {
            Some(format!("nothing of it can leave: {} would stay, because {text}", format_size(*bytes)))
        }
        _ => None,
    };
    if let Some(refusal) = refusal {
        return back_again(state, Suspended { held, parted, put, settles: None }, refusal);
    }
    give_back(opened);
    pinned::trim("suspend");
    // Nothing is captured, and the devices are quiet.
    let kept = mempool::trim(driver);
    if kept > 0 {
        stayed.push((
            kept,
            Why::driver("memory of stream-ordered pools (cudaMallocAsync) that is in use is the driver's"),
        ));
    }
    let unpooled = unpooled::bytes();
    if unpooled > 0 {
        stayed.push((unpooled, Why::unpooled()));
    }
    // What the program asked for on the host has nothing to leave.
    let of_kind = of_kind::bytes_on_gpus();
    if of_kind > 0 {
        stayed.push((of_kind, Why::of_kind()));
    }
    let not_whole = by_hand::not_whole_where_it_works();
    if not_whole > 0 {
        stayed.push((not_whole, Why::not_whole()));
    }
    let on_disk = put.as_ref().and_then(Put::on_disk);
    let (to_disk, stored) = on_disk.map_or((0, 0), |stored| (stored.bytes(), stored.bytes_on_disk()));
    let on_disk = on_disk.map(|stored| (stored.bytes_on_disk(), stored.folder().to_owned()));
    let stayed_bytes = stayed.iter().map(|(bytes, _)| bytes).sum();
    let done = Done { moved, stayed: stayed_bytes, to_disk, stored, took: begun.elapsed(), waited };
    *state = Some(Suspended { held, parted, put, settles: None });
    drop(state);
    totals::is_suspended();
    told_anew();
    log::emit(|| {
        let Done { moved, stayed, took, waited, .. } = done;
        let [microseconds, waited_microseconds] = [took, waited].map(|time| time.as_micros() as u64);
        let takes =
            |(bytes, folder): &(u64, PathBuf)| format!("; it takes {} in {}", format_size(*bytes), folder.display());
        let takes = on_disk.as_ref().map(takes).unwrap_or_default();
        let stored = on_disk.map(|(bytes, _)| bytes);
        let event =
            ProgramSuspend { bytes: moved, stayed, to: word(target), stored, microseconds, waited_microseconds };
        let [left, kept] = [moved, stayed].map(format_size);
        (event, format!("suspended: {left} left, {kept} stayed{takes}"))
    });
    for (bytes, Why { cause, text }) in stayed {
        // Once for each cause: a program may be suspended every night.
        if SAID.lock().insert(cause) {
            let what = format!("{} stayed on its GPU while the program was suspended: {text}", format_size(bytes));
            let facts = [("cause", cause.to_owned()), ("bytes", bytes.to_string())];
            finding::make_by_itself(&Finding::STAYED_SUSPENDED, None, &facts, &what);
        }
    }
    Ok(done)
}

/// Everything comes back, since the program is not suspended after all.
fn back_again(
    mut state: MutexGuard<'_, Option<Suspended>>,
    suspended: Suspended,
    refusal: String,
) -> Result<Done, String> {
    *state = Some(suspended);
    drop(state);
    match come_back(&mut |_, _| {}) {
        Ok(_) => Err(refusal),
        Err(why) => Err(format!("{refusal}; and it stays suspended, because {why}")),
    }
}

/// What this process has that can leave or be stored: its driver and its pool.
///
/// # Errors
/// It has none; why, in words.
pub fn pool() -> Result<(&'static Driver, &'static Opened), String> {
    let driver = process::driver().ok_or("it has not used CUDA yet")?;
    let whose = match process::settings().mode {
        Mode::Pool | Mode::Spill => None,
        Mode::Managed => Some("is managed memory, which the driver moves itself"),
        Mode::Trace | Mode::Off => Some("is the driver's"),
    };
    if let Some(whose) = whose {
        return Err(format!(
            "with GPUPOOL_MODE={} its memory {whose}; only the pool's can leave or be stored (modes pool and spill)",
            process::settings().mode.word()
        ));
    }
    Ok((driver, opened(driver).ok_or("it has allocated nothing from the pool yet")?))
}

/// Stops the program as a suspension does, for the length of `act`: until `deadline` it is waited for. Nobody suspends it meanwhile, and nothing of it moves.
/// `act` has to ask at its end whether it was stopped all the time ([`Held::stop`]): the end of the process waits for nobody.
///
/// # Errors
/// It is suspended, or does not come to rest; in words.
pub fn while_stopped<T>(
    driver: &'static Driver,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
    agreement: &mut dyn Agreement,
    act: impl FnOnce(Held, &mut dyn Agreement) -> T,
) -> Result<T, String> {
    let state = settled(deadline)?;
    if state.is_some() {
        return Err(FIRST.to_owned());
    }
    // What was asked before concerned an earlier time.
    let _ = gate::has_asked();
    let held = hold(driver, deadline, is_wanted, agreement)?;
    Ok(act(held, agreement))
}

/// Whether the driver's own checkpoint (`cuCheckpointProcess*`) would bring back what a suspended program still has. It takes everything away and is asked only
/// afterwards whether that can come back, which ends the process where it cannot: memory of `cuMemCreate` that a second GPU may use, or such memory of the
/// host; and memory that others have open comes back as a copy of its own (measured). So nothing of that kind may be there.
///
/// Whoever asks has the driver do so next, or resumes the program: it is suspended whole from now on ([`is_whole`]).
///
/// # Errors
/// Why it would not, in words.
pub fn is_freezable() -> Result<Done, String> {
    let state = STATE.lock();
    if state.as_ref().is_none_or(|state| state.settles.is_some()) {
        return Err("it is not suspended".to_owned());
    }
    let opened = open::opened().ok_or("it has no pool")?;
    let rows = opened.pool.mapped().into_iter().filter(|row| !row.place.is_stored());
    let mapped: u64 = rows.map(|row| row.bytes).sum();
    let own = by_hand::all_mapped().into_iter().filter(|own| !own.place.is_stored());
    let own: u64 = own.map(|own| own.bytes).sum();
    // Also where it is mapped nowhere.
    let on_host = by_hand::bytes_on_host() + of_kind::bytes_on_host();
    let what = match (mapped, own, ipc::is_any_imported() || by_hand::is_any_imported()) {
        (0, 0, _) if on_host > 0 => {
            format!(
                "{} that it made by cuMemCreate are on the host, which costs the process (measured)",
                format_size(on_host)
            )
        }
        (0, 0, false) => {
            IS_WHOLE.store(true, Ordering::Relaxed);
            return Ok(Done::default());
        }
        (0, 0, true) => "memory of other processes is open in it, or has come to it by a descriptor".to_owned(),
        (0, own, _) => format!("{} that it made by cuMemCreate are mapped", format_size(own)),
        (mapped, ..) => {
            format!(
                "{} of the pool are mapped still; gpupool suspend --to DIR has all of it leave, --to host what was on GPUs",
                format_size(mapped)
            )
        }
    };
    Err(format!("the driver would not bring it back: {what}"))
}

/// Freed memory goes to the driver; the bytes.
fn give_back(opened: &Opened) -> u64 {
    let bytes = idle::give_back_unused(None, u32::MAX, "suspend", "the program is suspended");
    bytes + opened.pool.trim_all(&[])
}

/// A call that frees memory waits for nobody, so one that was under way when the program was suspended may end later: what it freed goes as well.
pub fn keep_empty() {
    // What it gave back would wait for the driver.
    if is_whole() {
        return;
    }
    // Whoever suspends or resumes at this moment sees to it.
    let is_suspended = STATE.try_lock().is_some_and(|state| state.is_some());
    if is_suspended
        && let Some(opened) = open::opened()
        && give_back(opened) > 0
    {
        told_anew();
    }
}

/// Suspends a program that nobody has asked to: the first call that waits for it resumes it.
///
/// # Errors
/// As of [`suspend`].
pub fn suspend_by_itself(target: &Target, deadline: Instant) -> Result<Done, String> {
    gate::whoever_waits_asks(true);
    let done = suspend(target, deadline, &|| true, &mut Alone::default(), &mut |_, _| {});
    if done.is_err() {
        gate::whoever_waits_asks(false);
    }
    done
}

/// Has everything come back to where it was, or to where there is room now, and lets the program go on. Of a program that was resumed before, what had no
/// room then is brought back.
///
/// # Errors
/// It is not suspended; or something is on a disk and could not be brought back: the program stays suspended, and has all that it had.
pub fn resume(progress: &mut dyn FnMut(u64, u64)) -> Result<Done, String> {
    let is_suspended = settled(Instant::now() + TO_SETTLE)?.is_some();
    let done = match is_suspended {
        false if bring_home::is_any_left() => {
            let done = bring_home::bring_left(progress);
            if done.moved == 0 && done.stayed == 0 {
                return Err(runs("what had left its GPUs has come back"));
            }
            done
        }
        false => return Err(runs("nothing has left its GPUs that is to come back")),
        true => come_back(progress)?,
    };
    let Done { moved, stayed, .. } = done;
    if is_suspended {
        totals::is_resumed();
        bell::changed();
    }
    if stayed > 0 && is_suspended {
        let drained: Vec<String> =
            away::gpus().into_iter().filter(|gpu| terms::is_drained(*gpu)).map(|gpu| format!("GPU {gpu}")).collect();
        let (why, remedy) = if drained.is_empty() {
            let remedy = format!(
                "It comes back once there is room; gpupool resume {} has that tried at once",
                std::process::id()
            );
            ("there is no room there".to_owned(), remedy)
        } else {
            let gpus = drained.join(", ");
            let has_other = away::gpus().len() > drained.len();
            let rest = if has_other { ", and of other GPUs there is no room" } else { "" };
            let is = if drained.len() > 1 { "are" } else { "is" };
            (
                format!("{gpus} {is} drained{rest}"),
                "What was on a drained GPU comes back once that is undrained (gpupool undrain)".to_owned(),
            )
        };
        tracing::warn!(
            target: "gpupool::memory", about = "suspend",
            "{} could not come back to its GPU when the program was resumed, because {why}; it lies on another GPU or on the host, far from where it is \
             used, and all of it is right. {remedy}",
            format_size(stayed)
        );
    }
    log::emit(|| {
        let event = ProgramResume { bytes: moved, stayed, microseconds: done.took.as_micros() as u64 };
        (
            event,
            format!("resumed: {} came back, {} did not, and lie elsewhere", format_size(moved), format_size(stayed)),
        )
    });
    Ok(done)
}

/// Where the program's memory lies, that of `cuMemCreate` included.
fn where_it_lies() -> Residence {
    let usage = serve::usage().unwrap_or_default();
    let mut loans = residence::loans(&usage);
    let mut lies = residence::in_sum(&usage, &loans);
    lies.add(&by_hand::by_home(), &mut loans);
    lies
}

/// Why nothing is done for a program that runs, of which this is so: also what it has elsewhere, for which somebody may have asked.
fn runs(and: &str) -> String {
    let Residence { on_peers, on_host, .. } = where_it_lies();
    let is_there = |(bytes, place): &(u64, &str)| (*bytes > 0).then(|| format!("{} on {place}", format_size(*bytes)));
    let far: Vec<String> = [(on_peers, "other GPUs"), (on_host, "the host")].iter().filter_map(is_there).collect();
    if far.is_empty() {
        return format!("it is not suspended, and {and}");
    }
    format!(
        "it is not suspended, and {and}: {} had no room when it was asked for, was put there by the program, or gave way to another one. \
         GPUPOOL_MOVE=auto brings near what pays, and a raised limit (gpupool set {} limit=) what it leaves room for",
        far.join(" and "),
        std::process::id()
    )
}

/// What was put away has to come back before the process ends.
fn note_put() {
    AGENT.store(gpupool_interpose::thread_number() as u32, Ordering::Relaxed);
    gate::at_end(come_back_for_end);
    IS_PUT.store(true, Ordering::SeqCst);
}

/// How long the program's memory has to become the host's where somebody waits for that.
const TO_SETTLE: Duration = Duration::from_secs(120);
/// How soon that is tried again where it failed, at first.
const SOON: Duration = Duration::from_millis(10);
/// How long whoever got something has until it asks for more, before what left for it is worked at: a gibibyte of that takes the driver 0.3 s, for which the next
/// question waits, and who needs much often asks block by block (H200: 18 GiB in such blocks took 7 s, 1 s of it copying).
const CALM: Duration = Duration::from_millis(100);
/// When something was put in plain memory last.
static LAST_PUT: Mutex<Option<Instant>> = Mutex::new(None);
/// How long it is worked at without a look at what else is asked.
const SLICE: Duration = Duration::from_secs(1);

/// The state, once nothing is on its way to the host any more.
///
/// # Errors
/// Somebody else has it; or that found no place; in words.
fn settled(deadline: Instant) -> Result<MutexGuard<'static, Option<Suspended>>, String> {
    let mut state = STATE.try_lock_until(deadline).ok_or(BUSY)?;
    while state.as_ref().is_some_and(|state| state.settles.is_some()) {
        if Instant::now() >= deadline {
            return Err(vacate::SETTLES.to_owned());
        }
        settle_in(&mut state, Instant::now() + SLICE)?;
    }
    Ok(state)
}

/// The pool's memory that was put in plain memory of the host, so that its GPU was free at once, becomes memory of the host that GPUs reach, and then the
/// program goes on: some of it at each call. How long nothing need be done; `None`: nothing is there.
pub fn settle() -> Option<Duration> {
    // Whoever has it sees to it.
    let mut state = STATE.try_lock()?;
    state.as_ref().filter(|state| state.settles.is_some())?;
    // When it may be tried again, and how long the pause is behind that.
    static NEXT: Mutex<Option<(Instant, Duration)>> = Mutex::new(None);
    let (at, pause) = NEXT.lock().unwrap_or((Instant::now(), SOON));
    let at = LAST_PUT.lock().map_or(at, |put| at.max(put + CALM));
    let left = at.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        return Some(left);
    }
    let settled = settle_in(&mut state, Instant::now() + SLICE);
    let is_over = state.is_none();
    drop(state);
    match settled {
        Ok(()) => {
            *NEXT.lock() = None;
            (!is_over).then_some(Duration::ZERO)
        }
        Err(why) => {
            *NEXT.lock() = Some((Instant::now() + pause, (2 * pause).min(AGAIN)));
            // Once: what fails for a moment is nobody's concern.
            if pause < AGAIN && 2 * pause >= AGAIN {
                tracing::error!(
                    target: "gpupool::memory", about = "suspend",
                    "the program waits with all that it has, since what left its GPU for another program has no place on the host: {why}. \
                     That is tried again each second"
                );
            }
            Some(pause)
        }
    }
}

/// Something was put in plain memory of the host for somebody who may ask for more in a moment.
fn was_put() {
    *LAST_PUT.lock() = Some(Instant::now());
}

/// Until then.
fn settle_in(state: &mut Option<Suspended>, until: Instant) -> Result<(), String> {
    let (Some(driver), Some(opened)) = (process::driver(), open::opened()) else { return Ok(()) };
    let Some(Suspended { held, put, settles: Some(Settles { since, bytes }), .. }) = &mut *state else {
        return Ok(());
    };
    // Whoever asks now waits for other things as well.
    rearranging::let_go_of_crews();
    let left = match put.as_ref().and_then(Put::on_host) {
        Some(kept) => coming_back::settle(opened, driver, held, kept, until),
        None => Ok(0),
    };
    match left {
        Ok(0) => {}
        Ok(_) => return Ok(()),
        Err(why) => {
            *FAILED.lock() = Some((why.clone(), Instant::now()));
            FAILURES.fetch_add(1, Ordering::Release);
            return Err(why);
        }
    }
    let (stood, bytes) = (since.elapsed(), *bytes);
    if let Some(Suspended { held, put, .. }) = state.take() {
        IS_PUT.store(false, Ordering::Release);
        *FAILED.lock() = None;
        drop(held);
        // The program goes on meanwhile.
        drop(put);
    }
    told_anew();
    log::emit(|| {
        let text = format!(
            "{} that left for plain memory of the host are where GPUs reach them, and the program goes on after {} ms",
            format_size(bytes),
            stood.as_millis()
        );
        (HostSettle { bytes, microseconds: stood.as_micros() as u64 }, text)
    });
    Ok(())
}

/// As [`resume`], without a word.
fn come_back(progress: &mut dyn FnMut(u64, u64)) -> Result<Done, String> {
    let mut state = STATE.lock();
    let Some(Suspended { held, parted, put, .. }) = state.take() else {
        return Err("it is not suspended".to_owned());
    };
    let begun = Instant::now();
    // What was elsewhere before it was suspended, or has left since, goes to where it may lie now with the rest: a GPU that was undrained meanwhile has its
    // memory again once the program goes on. At the end of the process it lies well where it lies.
    let parted = match open::opened() {
        Some(opened) if !gate::is_ending() => bring_home::with_left(opened, parted),
        _ => parted,
    };
    let left = parted.clone();
    let back = match (open::opened(), process::driver()) {
        (Some(opened), Some(driver)) => coming_back::come_back(opened, driver, &held, parted, put.as_ref(), progress),
        _ => Ok((0, 0)),
    };
    let mut elsewhere = 0;
    if let (Ok(_), Some(opened)) = (&back, open::opened()) {
        let left = coming_back::not_back(opened, &left);
        elsewhere = left.iter().map(Parted::bytes).sum();
        if left.is_empty() {
            terms::forget_free();
        }
        bring_home::remember(left);
    }
    let (moved, stayed) = match back {
        // What came to another GPU than it was on is of use there, but has not come back: it is missed where it was, and comes there once that has room.
        Ok((moved, stayed)) => {
            let away = elsewhere.max(stayed);
            (moved.saturating_sub(away - stayed), away)
        }
        Err((why, parted)) => {
            let why = out_again(&held, &parted, put.as_ref(), why);
            // Its driver has answered.
            IS_WHOLE.store(false, Ordering::Relaxed);
            *state = Some(Suspended { held, parted, put, settles: None });
            drop(state);
            *FAILED.lock() = Some((why.clone(), Instant::now()));
            FAILURES.fetch_add(1, Ordering::Release);
            told_anew();
            return Err(why);
        }
    };
    gate::whoever_waits_asks(false);
    IS_REMOVING.store(put.as_ref().is_some_and(|put| put.on_disk().is_some()), Ordering::Release);
    IS_PUT.store(false, Ordering::Release);
    *FAILED.lock() = None;
    // A program that ends at once, or becomes another, leaves no file behind.
    let rest = put.map(Put::unname);
    drop(held);
    goes_on();
    drop(state);
    // The program goes on meanwhile.
    let took = begun.elapsed();
    if let Some(rest) = rest {
        rest.end();
        IS_REMOVING.store(false, Ordering::Release);
    }
    told_anew();
    Ok(Done { moved, stayed, took, ..Done::default() })
}

/// What came back before the rest could not leaves again, so that a program which stays suspended has nothing on its GPUs: the files have all of it, and nobody has written to it
/// since. What was in plain memory of the host is gone from there, and stays where it is; why it failed, with how much that is.
fn out_again(held: &Held, parted: &[Parted], put: Option<&Put>, why: String) -> String {
    let (Some(opened), Some(driver)) = (open::opened(), process::driver()) else { return why };
    // The handlers of a program that ends may use what is back.
    if let Some(stored) = put.and_then(Put::on_disk).filter(|_| !gate::is_ending()) {
        let target = Target::Folder(stored.folder().to_owned());
        let leaves = Leaves::Suspended { target: &target, put, full: None };
        parting::leave(opened, driver, held, leaves, None, &mut |_, _| {});
        give_back(opened);
    }
    let sum = |parted: &[Parted]| parted.iter().map(Parted::bytes).sum::<u64>();
    let own = by_hand::all();
    let is_there = |parted: &Parted| {
        let is_live = |address: u64| own.iter().any(|own| own.address == address);
        matches!(parted.from(), Place::Gpu(_)) && !matches!(*parted, Parted::Own { address, .. } if !is_live(address))
    };
    let mut of_gpus = living(opened, parted.to_vec());
    of_gpus.retain(is_there);
    match sum(&of_gpus).saturating_sub(sum(&coming_back::not_back(opened, &of_gpus))) {
        0 => why,
        back => format!("{why}; {} of {} came back before that", format_size(back), format_size(sum(&of_gpus))),
    }
}

/// Resumes a program where nobody hears why that fails, so that it is told: once, where it stays the same.
fn resume_unheard() {
    if IS_GIVEN_UP.load(Ordering::Relaxed) {
        return;
    }
    let before = FAILED.lock().as_ref().map(|(why, _)| why.clone());
    let Err(why) = resume(&mut |_, _| {}) else { return };
    let is_ending = gate::is_ending();
    IS_GIVEN_UP.store(is_ending, Ordering::Relaxed);
    if before.as_ref() != Some(&why) {
        if is_ending {
            tracing::error!(
                target: "gpupool::memory", about = "suspend",
                "the program ends without what was put away, because {why}. What it does with that memory at its end fails"
            );
            return;
        }
        tracing::error!(
            target: "gpupool::memory", about = "suspend",
            "the program stays suspended, with all that it has, because {why}. Once that is mended: gpupool resume {}",
            std::process::id()
        );
    }
}

/// How often the end of the process looks whether everything is back.
const LOOK: Duration = Duration::from_millis(5);
/// How long it waits for files to be removed: a disk may hang, and the next process that comes there removes them.
const TO_REMOVE: Duration = Duration::from_secs(5);

/// The process ends: handlers of the program may use what is on a disk, so it is brought back first, by the agent. Where it cannot be, they
/// get the driver's answer.
fn come_back_for_end() {
    if AGENT.load(Ordering::Relaxed) == gpupool_interpose::thread_number() as u32 {
        if IS_PUT.load(Ordering::SeqCst) {
            resume_unheard();
        }
        return;
    }
    let failures = FAILURES.load(Ordering::Acquire);
    let is_over = || STATE.try_lock().is_some_and(|state| state.is_none());
    let is_awaited = || IS_PUT.load(Ordering::SeqCst) && !IS_GIVEN_UP.load(Ordering::Relaxed);
    while is_awaited() && FAILURES.load(Ordering::Acquire) == failures && !is_over() {
        gate::ask();
        std::thread::sleep(LOOK);
    }
    let until = Instant::now() + TO_REMOVE;
    while IS_REMOVING.load(Ordering::Acquire) && Instant::now() < until {
        std::thread::sleep(LOOK);
    }
}

/// A thread that waits for the program to be resumed was interrupted by a signal: somebody wants it to go on.
pub fn resume_if_asked() {
    if since() != 0 && (gate::is_ending() || !has_just_failed()) && gate::has_asked() {
        resume_unheard();
    }
}

/// Whether it could not be resumed a moment ago.
pub fn has_just_failed() -> bool {
    FAILED.lock().as_ref().is_some_and(|(_, at)| at.elapsed() < AGAIN)
}

/// Whether the program waits for somebody to resume it.
pub fn waits_for_others() -> bool {
    since() != 0 && !gate::does_whoever_waits_ask()
}

/// Nobody can ask for the program to be resumed any more, so it is; why, in words.
pub fn resume_unreachable(why: &str) {
    if FAILED.lock().is_none() {
        tracing::warn!(
            target: "gpupool::memory", about = "suspend",
            "the program was suspended, and is resumed because nobody could ask for that any more: {why}"
        );
    }
    resume_unheard();
}

/// In the child of a fork: it is not suspended, and has none of the memory.
pub fn after_fork_in_child() {
    goes_on();
    IS_PUT.store(false, Ordering::Relaxed);
    IS_REMOVING.store(false, Ordering::Relaxed);
    spare::after_fork_in_child();
}

/// The least time for which a try to stop the program waits.
const LEAST: Duration = Duration::from_millis(10);

/// Closes the gate, as soon as all of the program's work is over, and it is agreed that it stays closed.
fn hold(
    driver: &'static Driver,
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
        // One that waits for nothing says nothing of what is in the way.
        let wait = hold.min(left).max(LEAST);
        let limits = Limits { wait, quiet: wait, hold: 2 * hold };
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
        let is_over = || Instant::now() + agreement::PAUSE >= deadline;
        if !is_over() {
            agreement.is_disturbed(&disturbed);
        }
        if is_over() {
            return Err(format!("it did not come to rest in time: {disturbed}"));
        }
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
