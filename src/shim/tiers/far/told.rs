//! What is said of far memory: who reads it and what that costs, why it was not moved (GP019), and that `GPUPOOL_FAR_LIMIT` is exceeded.

use super::ledger::{Function, Seen, Window};
use super::{Watch, now, watch, watches};
use crate::log;
use crate::process;
use crate::tiers::{self, obstacles, totals};
use crate::watch::{capture, finding};
use gpupool_config::{Move, format_size};
use gpupool_cuda::Device;
use gpupool_events::{Finding, Site, TierLimit, TierReader};
use gpupool_pool::Place;
use parking_lot::Mutex;
use std::sync::atomic::Ordering::Relaxed;

/// A finding is worth a word if so much was lost, nanoseconds, and such a part of the time, by a function that was launched so often.
const LEAST_LOST: f64 = 500e6;
const LEAST_SHARE: f64 = 0.1;
const LEAST_LAUNCHES: u64 = 8;
/// Below this part of its last launches a function reads far memory no more.
const GONE: f64 = 0.05;
/// Functions in the log.
const FUNCTIONS: usize = 16;
/// What a function has to have lost for a record, nanoseconds.
const WORTH_A_RECORD: f64 = 1e6;
/// A name in a sentence; templates of C++ have hundreds of letters.
const NAME: usize = 60;
/// When it is looked whether there is something to say for the first time, nanoseconds from the beginning; then after twice as long.
pub(super) const FIRST: u64 = 10_000_000_000;

/// Why memory that a function reads did not come near.
struct Cause {
    key: &'static str,
    text: String,
}

/// Looks whether there is something to say, now and then: a process may not live to its end.
pub(super) fn now_and_then(watch: &Watch) {
    let age = watch.ledger.lock().age(now());
    let next = watch.next_tell.load(Relaxed);
    if age >= next && watch.next_tell.compare_exchange(next, age.saturating_mul(2), Relaxed, Relaxed).is_ok() {
        tell(watch);
    }
}

/// At the end of the process.
pub fn judge() {
    watches().for_each(tell);
}

fn tell(watch: &Watch) {
    let (functions, lost, age) = {
        let ledger = watch.ledger.lock();
        let functions: Vec<Function<Site>> = ledger.functions().into_iter().take(FUNCTIONS).cloned().collect();
        (functions, ledger.lost_ns(), ledger.age(now()) as f64)
    };
    for function in functions.iter().filter(|function| function.lost_ns >= WORTH_A_RECORD) {
        report(watch, function);
    }
    if lost < LEAST_LOST || lost < LEAST_SHARE * age {
        return;
    }
    let is_worth = |function: &&Function<Site>| {
        let came_near = totals::came() > 0 && function.recently < GONE;
        !came_near
            && function.launches >= LEAST_LAUNCHES
            && function.lost_ns >= LEAST_LOST / 2.0
            && function.lost_ns >= LEAST_SHARE / 2.0 * age
    };
    let mut causes: Vec<(Cause, &Function<Site>, usize)> = Vec::new();
    for function in functions.iter().filter(is_worth) {
        let cause = why(watch, function);
        match causes.iter_mut().find(|(known, ..)| known.key == cause.key) {
            Some((_, _, others)) => *others += 1,
            None => causes.push((cause, function, 0)),
        }
    }
    for (cause, function, others) in causes {
        if is_new(watch.gpu, cause.key) {
            find(watch, &cause, function, others, age);
        }
    }
}

/// Whether a cause was not told of this GPU before.
fn is_new(gpu: u32, cause: &'static str) -> bool {
    static TOLD: Mutex<Vec<(u32, &str)>> = Mutex::new(Vec::new());
    let mut told = TOLD.lock();
    let is_new = !told.contains(&(gpu, cause));
    if is_new {
        told.push((gpu, cause));
    }
    is_new
}

fn seconds(ns: f64) -> f64 {
    ns * 1e-9
}

fn report(watch: &Watch, function: &Function<Site>) {
    log::emit(|| {
        let Function { name, site, launches, last: Seen { on_peers, on_host, .. }, timed, lost_ns, .. } = function;
        let event = TierReader {
            home: watch.gpu,
            function: name.clone(),
            launches: *launches,
            on_peers: *on_peers,
            on_host: *on_host,
            timed: *timed,
            passes: (*timed > 0).then_some(function.passes()),
            lost: seconds(*lost_ns),
            why: why(watch, function).text,
            site: site.clone(),
        };
        let text = format!("GPU {}: {} lost about {:.3} s by far memory", watch.gpu, short(name), event.lost);
        (event, text)
    });
}

/// A name for a sentence.
fn short(name: &str) -> String {
    let mut short: String = name.chars().take(NAME).collect();
    if short.len() < name.len() {
        short.push('…');
    }
    short
}

fn why(watch: &Watch, function: &Function<Site>) -> Cause {
    let cause = |key, text: &str| Cause { key, text: text.to_owned() };
    let seen = &function.last;
    let reads_once = function.timed > 0 && function.passes() < 2.0;
    // A small part of what is far would change nothing.
    let is_much = |bytes: u64| bytes > 0 && bytes >= seen.far() / 4;
    if seen.is_drained {
        return Cause { key: "drained", text: format!("GPU {} is drained", watch.gpu) };
    }
    // With GPUPOOL_MOVE it comes near by what it is worth, as everything does.
    if process::settings().moving == Move::Off && is_much(seen.away) {
        let text = format!(
            "{} of it had to leave GPU {} (as for a suspension or another program) and come back once there is room",
            format_size(seen.away),
            watch.gpu
        );
        return Cause { key: "away", text };
    }
    if process::settings().moving == Move::Off {
        let more = if reads_once {
            ", and it reads each of these bytes about once, so that moving would bring little"
        } else {
            ""
        };
        return Cause { key: "off", text: format!("GPUPOOL_MOVE is off{more}") };
    }
    if let Some(text) = obstacles::off() {
        return Cause { key: "process", text };
    }
    if capture::has_graphs() {
        return cause("graphs", "the program has made a CUDA graph of which it is not known what it uses");
    }
    if seen.anchored > 0 && seen.anchored == seen.far() {
        return cause(
            "anchored",
            "it must stay where it is: other processes or devices have it, or the program asked for that",
        );
    }
    let limit = watch.opened.pool.accounts().limit(Place::Gpu(watch.gpu));
    if seen.bytes > limit {
        let [bytes, limit] = [seen.bytes, limit].map(format_size);
        return Cause {
            key: "large",
            text: format!("one launch names {bytes}, and GPU {} may hold {limit}", watch.gpu),
        };
    }
    if let Some(text) = obstacles::stopped(watch.gpu) {
        return Cause { key: "stopped", text: format!("moving stopped: {text}") };
    }
    if let Some(text) = obstacles::disturbed() {
        return Cause { key: "quiet", text: format!("the GPUs did not come to rest: {text}") };
    }
    if reads_once {
        return cause("once", "it reads each of these bytes about once, which copying them costs as much as");
    }
    // As it was at its last launch: at the end the program has freed everything.
    let (room, free) = (seen.room, seen.free);
    if is_much(room) {
        let text =
            format!("GPU {} has had room for {} of it only lately, or too little to pay", watch.gpu, format_size(room));
        return Cause { key: "room", text };
    }
    if is_much(free) {
        let text = format!(
            "what GPU {} has free of the program's memory, {}, is about to be used again or lies beside memory that is in use",
            watch.gpu,
            format_size(free)
        );
        return Cause { key: "freed", text };
    }
    if is_much(seen.others) {
        let text = format!(
            "others have {} of GPU {} that this program might have by its limits",
            format_size(seen.others),
            watch.gpu
        );
        return Cause { key: "others", text };
    }
    cause("full", "nothing that lies near and may leave is used so much less that an exchange pays")
}

/// One digit: it is an estimate.
fn round(number: f64) -> u64 {
    let ten = 10f64.powf(number.log10().floor());
    ((number / ten).round() * ten) as u64
}

fn find(watch: &Watch, cause: &Cause, function: &Function<Site>, others: usize, age: f64) {
    let Seen { on_peers, on_host, .. } = function.last;
    let far = format_size(on_peers + on_host);
    let place = match (on_peers > 0, on_host > 0) {
        (true, true) => "other GPUs and the host",
        (true, false) => "another GPU",
        _ => "the host",
    };
    // A kernel that overlaps others, or a simulated one, may take longer than the time that passed.
    let (lost, age) = (seconds(function.lost_ns.min(age)), seconds(age));
    let again =
        if function.passes() >= 2.0 { format!(" about {} times", round(function.passes())) } else { String::new() };
    let others = match others {
        0 => String::new(),
        1 => "; so it is with another function".to_owned(),
        many => format!("; so it is with {many} other functions"),
    };
    let what = format!(
        "{} reads {far} on {place}{again} in a launch, which cost about {lost:.1} s of {age:.1} s; it was not moved because {}{others}",
        short(&function.name),
        cause.text
    );
    let facts = [
        ("function", function.name.clone()),
        ("launches", function.launches.to_string()),
        ("on_peers", on_peers.to_string()),
        ("on_host", on_host.to_string()),
        ("passes", format!("{:.1}", function.passes())),
        ("cause", cause.key.to_owned()),
    ];
    let site = function.site.clone().unwrap_or_default();
    finding::make(&Finding::FAR_MEMORY, Some(Device::of(watch.gpu)), &site, &facts, &what);
}

/// For how many windows in a row too much has to be lost: where memory may move, it takes some rounds before it does.
fn patience() -> u32 {
    if process::settings().moving == Move::Off { 1 } else { 3 }
}

/// Enough time has passed to say what part of it was lost.
pub(super) fn window(watch: &Watch, window: Window) {
    let Some(limit) = process::settings().far_limit else { return };
    let is_beyond = window.share * 1000.0 > f64::from(limit.share) && !window.moved;
    let windows = if is_beyond { watch.beyond.load(Relaxed).saturating_add(1) } else { 0 };
    watch.beyond.store(windows, Relaxed);
    if windows == patience() && is_new(watch.gpu, "limit") {
        let worst = watch.ledger.lock().functions().first().map(|function| (*function).clone());
        let Some(worst) = worst else { return };
        let why = why(watch, &worst).text;
        log::emit(|| {
            let event = TierLimit {
                home: watch.gpu,
                share: window.share,
                limit: f64::from(limit.share) / 1000.0,
                refuses: limit.refuses,
                function: worst.name.clone(),
                why: why.clone(),
            };
            let percent = |share: f64| format!("{:.0} %", share * 100.0);
            let then = if limit.refuses { "; what would be far gets OUT_OF_MEMORY from now on" } else { "" };
            let text = format!(
                "GPUPOOL_FAR_LIMIT={}: kernels on GPU {} lose about {} of the time by far memory, most of it in {}; nothing came near, \
                 because {why}{then} (said once)",
                limit,
                watch.gpu,
                percent(window.share),
                short(&worst.name)
            );
            (event, text)
        });
    }
}

/// Whether a block of this GPU's that would lie elsewhere is refused.
pub fn refuses(gpu: u32) -> bool {
    process::settings().far_limit.is_some_and(|limit| limit.refuses)
        && watch(gpu).is_some_and(|watch| {
            // A program that asks again and again and launches nothing loses nothing.
            let over = watch.ledger.lock().window(now(), totals::came());
            if let Some(over) = over {
                window(watch, over);
            }
            watch.beyond.load(Relaxed) >= patience()
        })
}

/// Microseconds that launches have lost by far memory, as estimated.
pub fn lost_microseconds() -> u64 {
    watches().map(|watch| (watch.ledger.lock().lost_ns() / 1e3) as u64).sum()
}

/// Far bytes that launches have read, each as often as it crossed the link, as estimated.
pub fn read_bytes() -> u64 {
    watches().map(|watch| watch.ledger.lock().read_bytes() as u64).sum()
}

/// Seconds lost by the GPU that lost most, and how long its memory has been far.
pub fn worst() -> Option<(f64, f64)> {
    let of = |watch: &Watch| {
        let ledger = watch.ledger.lock();
        (seconds(ledger.lost_ns()), seconds(ledger.age(tiers::now()) as f64))
    };
    watches().map(of).max_by(|a, b| a.0.total_cmp(&b.0))
}
