//! What keeps memory from moving, as it was met last, and the findings about that: moves that did not pay (GP020), GPUs that did not come
//! to rest (GP021).

use super::{home, totals};
use crate::gate::{self, Disturbed, Reason};
use crate::log;
use crate::watch::{finding, site};
use gpupool_cuda::{Device, Driver};
use gpupool_events::{Finding, Site};
use gpupool_interpose::Api;
use gpupool_metrics::Counter;
use gpupool_tiers::Why;
use parking_lot::Mutex;

/// Tries in a row, also such where the program waits for some of its work while other work goes on, that the same thing has to disturb before that is said while the program runs.
const OFTEN: u32 = 8;

#[derive(Default)]
struct Met {
    /// Why nothing moves in this process.
    off: Option<String>,
    /// What disturbed the last tries: its kind, in words, how many in a row, nanoseconds that these took, and where the last one was.
    disturbed: Option<(&'static str, String, u32, u64, u32, Site)>,
    /// Something moved once.
    moved: bool,
    /// Kinds that were told, by GPU.
    told: Vec<(u32, &'static str)>,
    /// What only might be a reason against it, and was told.
    doubts: Vec<Reason>,
}

static MET: Mutex<Met> =
    Mutex::new(Met { off: None, disturbed: None, moved: false, told: Vec::new(), doubts: Vec::new() });

/// Nothing moves in this process, which was met where the program is now. Whether that is a finding, and so was told.
pub(super) fn is_off(gpu: u32, reason: &Reason) -> bool {
    let text = reason.to_string();
    let is_finding = is_past(reason);
    if is_finding && is_new(gpu, "past") {
        let what = format!("memory stays where it is in this process, because {text}");
        let facts = [("cause", "past".to_owned())];
        finding::make(&Finding::NEVER_QUIET, Some(Device::of(gpu)), &site::here(), &facts, &what);
    }
    MET.lock().off = Some(text);
    is_finding
}

/// What is known of memory may be half changed, since something panicked beside this call.
pub(super) fn is_broken(api: Api) {
    totals::add(Counter::StopsOff, 1);
    MET.lock().off = Some("of an internal error".to_owned());
    let name = api.name();
    log::warn_once(
        "books",
        format_args!(
            "internal error beside {name}: memory stays where it is from now on; please report it (said once)"
        ),
    );
}

/// Whether work may be, or was, submitted past the hooks.
fn is_past(reason: &Reason) -> bool {
    matches!(reason, Reason::Unseen(..) | Reason::Passed(_))
}

/// Why nothing moves in this process, if that was met.
pub(super) fn off() -> Option<String> {
    MET.lock().off.clone()
}

/// Something moved.
pub(super) fn moved(driver: &Driver) {
    let mut met = MET.lock();
    met.moved = true;
    met.disturbed = None;
    drop(met);
    tell_doubts(driver);
}

/// Memory was mapped anew although there are doubts: each is told once, so that whoever looks for a wrong word finds it.
pub(super) fn tell_doubts(driver: &Driver) {
    for doubt in gate::doubts(driver) {
        let mut met = MET.lock();
        if met.doubts.contains(&doubt) {
            continue;
        }
        met.doubts.push(doubt.clone());
        drop(met);
        tracing::info!(
            target: "gpupool::memory", about = "moves",
            "memory moves although {doubt}: all work is seen to be over before, whoever submitted it, and what opens a device for others \
             to reach memory by ends all moves (GPUPOOL_MOVE=off: none; said once)"
        );
    }
}

/// What disturbed the last try.
pub(super) fn disturbed() -> Option<String> {
    MET.lock().disturbed.as_ref().map(|(_, text, ..)| text.clone())
}

/// Why moving has stopped for a GPU.
pub(super) fn stopped(gpu: u32) -> Option<String> {
    let home = home(gpu)?;
    let why = home.tiers.lock().told(0, home).stopped?;
    Some(in_words(&why))
}

/// What was found when moving stopped.
pub(super) fn in_words(why: &Why) -> String {
    match why {
        Why::Slower { before_ns, now_ns } => {
            format!("a round takes {:.1} ms, and took {:.1} ms before anything moved", now_ns / 1e6, before_ns / 1e6)
        }
        Why::Unpaid { spent_ns, saved_ns } => {
            format!("moving took {:.1} ms and saved {:.1} ms", spent_ns / 1e6, saved_ns / 1e6)
        }
    }
}

fn is_new(gpu: u32, kind: &'static str) -> bool {
    let mut met = MET.lock();
    let is_new = !met.told.contains(&(gpu, kind));
    if is_new {
        met.told.push((gpu, kind));
    }
    is_new
}

/// The guard stopped moves. Where the program is now is where something would have moved again.
pub(super) fn did_not_pay(gpu: u32, why: &Why) {
    let kind = match why {
        Why::Slower { .. } => "slower",
        Why::Unpaid { .. } => "unpaid",
    };
    if is_new(gpu, kind) {
        let what = format!("moving memory for GPU {gpu} did not pay and was stopped for now: {}", in_words(why));
        let facts = [("cause", kind.to_owned())];
        finding::make(&Finding::MOVES_UNPAID, Some(Device::of(gpu)), &site::here(), &facts, &what);
    }
}

/// The kind of what was in the way; none where the program has no part in it, or it is told elsewhere.
fn kind(disturbed: &Disturbed) -> Option<&'static str> {
    match disturbed {
        Disturbed::NotHere(_) | Disturbed::Closed | Disturbed::OwnCall => None,
        Disturbed::Inside { .. } => Some("inside"),
        Disturbed::Capture => Some("capture"),
        Disturbed::Working { .. } => Some("working"),
        Disturbed::Ends { .. } => Some("ends"),
        Disturbed::Opened { .. } => Some("opened"),
    }
}

/// A move came to nothing because of this, after so many nanoseconds.
pub(super) fn was_disturbed(gpu: u32, what: &Disturbed, took_ns: u64) {
    if let Some(kind) = kind(what) {
        was_kept(gpu, kind, what.to_string(), took_ns);
    }
}

/// A move came to nothing because no work was seen to end, after so many nanoseconds.
pub(super) fn was_stuck(gpu: u32, text: String, took_ns: u64) {
    was_kept(gpu, "working", text, took_ns);
}

fn was_kept(gpu: u32, kind: &'static str, text: String, took_ns: u64) {
    let site = site::here();
    let is_often = {
        let mut met = MET.lock();
        let before = met.disturbed.take().filter(|(known, ..)| *known == kind);
        let (times, lost) = before.map_or((0, 0), |(_, _, times, lost, ..)| (times, lost));
        met.disturbed = Some((kind, text, times + 1, lost + took_ns, gpu, site));
        times + 1 >= OFTEN
    };
    if is_often {
        find();
    }
}

/// At the end of the process: something would have moved and never did.
pub fn judge() {
    if !MET.lock().moved {
        find();
    }
}

fn find() {
    let Some((kind, text, times, lost, gpu, site)) = MET.lock().disturbed.clone() else { return };
    if !is_new(gpu, kind) {
        return;
    }
    let times_in_words = if times == 1 { "once".to_owned() } else { format!("{times} times in a row") };
    let what = format!(
        "memory would have come near to GPU {gpu} and could not, and {:.1} ms of waiting were in vain ({times_in_words}): {text}",
        lost as f64 * 1e-6
    );
    let facts = [("cause", kind.to_owned()), ("times", times.to_string())];
    finding::make(&Finding::NEVER_QUIET, Some(Device::of(gpu)), &site, &facts, &what);
}
