//! Asking: by the thread whose allocation lacks memory, as a command asks (`src/cli/control.rs`). What is lacking is asked of those who may have some ([`super::whom`]), in rounds ([`super::turns`]), until there is
//! enough, nobody is left or the time is over.

use super::neighbours::{self, Neighbour};
use super::turns::{Asks, LONGER, MARGIN, RING, SHORT};
use super::whom::Whom;
use crate::backing::plan::Plan;
use crate::backing::{self, open};
use crate::serve::memory::{self, Lacks, Less};
use crate::{bell, live, log, process};
use gpupool_config::{Mode, format_size};
use gpupool_cuda::Driver;
use gpupool_events::{AskedOf, RecallAsk};
use gpupool_interpose::cancel;
use gpupool_lending::{self as lending, Answer, Asking, Growth, Then, Told, What};
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use gpupool_pool::Place;
use gpupool_wire::control::GUARANTEED;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long one is in the middle of borrowing at most, in nanoseconds: from the driver's call to the block.
const IN_THE_MIDDLE: u64 = 100_000_000;
/// Within which time a page tells what has changed.
const WRITTEN: Duration = Duration::from_millis(1_100);
/// How long it is waited until what an ended process had is free.
const BACK: Duration = Duration::from_millis(300);

/// One thread asks at a time: who is asked by two threads of one process would be asked for the same memory twice.
static ASKING: Mutex<()> = Mutex::new(());
/// By GPU, what was got by asking, and when the last answer to that came.
static GROWTH: Mutex<BTreeMap<u32, (Growth, Instant)>> = Mutex::new(BTreeMap::new());

/// Allocations ask from here on.
pub fn prepare() {
    let settings = process::settings();
    if settings.recall_wait.is_some() && matches!(settings.mode, Mode::Pool | Mode::Spill) {
        memory::ask_by(ask);
        memory::widen_by(super::idle::widen);
    }
}

/// Asks others for what lacks of a GPU; the bytes that they say they have freed.
fn ask(lacks: &Lacks) -> u64 {
    let _sheltered = cancel::shelter();
    // Others are found beside the page, which a process has from its first allocation on.
    bell::allocated();
    try_to_ask(lacks, false).unwrap_or(0)
}

/// Asks those that matter less for what lacks of a GPU that nobody works on, which this process only borrows from as they do; the bytes that they say they have
/// freed. Of equals who came first keeps what it has.
pub(super) fn ask_as_borrower(lacks: &Lacks) -> u64 {
    try_to_ask(lacks, true).unwrap_or(0)
}

/// What is asked for.
struct Wanted {
    bytes: u64,
    /// Beside these, of those who are asked in any case: this process takes more and more.
    ahead: u64,
    /// Less than that is of no use.
    least: u64,
    priority: u32,
}

impl Wanted {
    /// `borrows`: this process does not work on that GPU. `None`: nobody gives anything for that.
    fn of(
        &Lacks { gpu: home, bytes, less, since }: &Lacks,
        borrows: bool,
        (driver, plan): (&'static Driver, &Plan),
        (folder, gpu): (&Folder, &Uuid),
        free: u64,
    ) -> Option<Self> {
        let place = Place::Gpu(home);
        let has = super::give::on_gpu(home).saturating_add(free);
        let guarantee = live::guarantee_of(home);
        // Beyond what it is guaranteed a program is not above all: the allocation looks once more, and asks for the rest as any other.
        let guaranteed = if borrows { 0 } else { lending::guaranteed(has, bytes, guarantee) };
        let guaranteed = if less == Less::Part || guaranteed == bytes { guaranteed } else { 0 };
        let is_guaranteed = guaranteed > 0;
        let (bytes, most) =
            if is_guaranteed { (guaranteed, guarantee.min(plan.limit(place))) } else { (bytes, plan.limit(place)) };
        let least = match less {
            Less::Part | Less::Nothing => 0,
            Less::Context => {
                // What others tell of theirs may be more than these took.
                let takes = neighbours::context_on(folder, gpu).min(lending::CONTEXT);
                takes.saturating_sub(backing::free_on(driver, home, gpu).unwrap_or(u64::MAX))
            }
        };
        let bytes = bytes.max(least);
        // What becomes free is the reserve's first.
        let bytes = bytes.saturating_add(plan.lacks_at(driver, home));
        let room = most.saturating_sub(has.saturating_add(bytes));
        let grows = |(growth, answered): &mut (Growth, Instant)| growth.ahead(answered.elapsed(), room);
        // Who asks again because others took what came free is not on its way to more.
        let ahead = if since.is_some() { 0 } else { GROWTH.lock().get_mut(&home).map_or(0, grows) };
        let priority = match live::priority() {
            _ if is_guaranteed => GUARANTEED,
            // Loans are called back by equals that work there, and by nobody else.
            own if borrows => own.checked_sub(1)?,
            own => own,
        };
        Some(Self { bytes, ahead, least, priority })
    }
}

fn try_to_ask(lacks: &Lacks, borrows: bool) -> Option<u64> {
    let (home, since) = (lacks.gpu, lacks.since);
    let begun = Instant::now();
    let wait = process::settings().recall_wait?;
    // It has been heard of memory that left where it asks once more.
    let latest = since.unwrap_or(begun) + LONGER * wait;
    let mut until = (begun + wait).min(latest);
    let margin = MARGIN.min(wait / 4);
    let folder = Folder::around(super::page()?).ok()?;
    // What the program makes itself is asked for before there is a pool.
    let driver = process::driver()?;
    let plan = open::plan(driver)?;
    let gpu = plan.topology.gpus.get(home as usize)?.uuid;
    let _one = ASKING.try_lock_until(until)?;
    let free = || plan.free_at(driver, Place::Gpu(home)).unwrap_or(0);
    let free_first = free();
    let Wanted { bytes, mut ahead, least, priority } =
        Wanted::of(lacks, borrows, (driver, plan), (&folder, &gpu), free_first)?;
    let wanted = bytes.saturating_add(ahead);
    let mut whom = Whom::new(&folder, (gpu, home), priority);
    let mut offers = whom.offers();
    // Pages are late, and who is refused a context mostly ends.
    if lending::is_in_vain(&offers, least) {
        std::thread::sleep(WRITTEN.min(until.saturating_duration_since(Instant::now())));
        offers = whom.offers();
        if lending::is_in_vain(&offers, least) {
            tell_in_vain(home, least);
            return None;
        }
    }
    let mut asking = Asking::new(offers);
    let (mut freed, mut asked_ahead) = (0, 0);
    let (mut any_ended, mut any_own, mut any_free) = (false, false, false);
    let mut looked = Some(Instant::now());
    while freed < bytes && Instant::now() + margin < until {
        let Some(what) = asking.next_kind() else { break };
        if !what.is_loans() && !any_own && !asking.told().is_empty() {
            // What others asked for meanwhile may be more than they took: the allocation looks at what is free before anybody's belongings are asked for.
            let came = free().saturating_sub(free_first);
            any_free = came >= bytes || came > 0 && since.is_none();
            if freed > 0 || any_free {
                break;
            }
        }
        any_own |= !what.is_loans();
        if what == What::Own && looked.take().is_some_and(|looked| looked.elapsed() > MARGIN / 2) {
            // Loans may have been taken since.
            asking.learn(whom.offers());
            continue;
        }
        let knows = what.is_known();
        let beyond = if knows { std::mem::take(&mut ahead) } else { 0 };
        let round = asking.round(bytes - freed, beyond);
        if knows {
            asked_ahead += round.iter().map(|(_, share)| share).sum::<u64>().saturating_sub(bytes - freed);
        }
        // Who hangs in a kernel says nothing for all of the time; so others are asked in half of what is left of it.
        let half = until.saturating_duration_since(Instant::now()) / 2;
        let by = if asking.has_others(&round, false) { Instant::now() + half } else { until };
        let first = if knows { by } else { by.min(Instant::now() + SHORT) };
        // And who has begun to give and comes to a standstill keeps nobody from those who are known to have some.
        let patience = if asking.has_others(&round, true) { wait / 2 } else { wait };
        let asks = Asks {
            folder: &folder,
            gpu,
            priority,
            loans: what.is_loans(),
            first,
            until: by,
            end: until,
            wait,
            patience,
            latest,
        };
        let questions: Vec<(&Neighbour, u64)> =
            round.iter().filter_map(|(offer, share)| Some((whom.by_number(offer.who)?, *share))).collect();
        let free_before = free();
        let (mut of_ended, mut asks_again): (Option<u64>, bool) = (None, false);
        let (answers, heard) = asks.all(&questions);
        // The time is for silence: what is heard of memory that leaves does not take it from others.
        until = heard.map_or(until, |heard| until.max(heard + wait).min(latest));
        for ((offer, share), answer) in round.iter().zip(answers) {
            let borrows = || {
                let other = whom.by_number(offer.who);
                other.is_some_and(|other| other.has_just_borrowed(&folder, IN_THE_MIDDLE))
            };
            match asking.answered(offer, *share, answer, borrows) {
                Then::Nothing => {}
                Then::Freed(bytes) => freed += bytes,
                Then::Ended(bytes) => *of_ended.get_or_insert(0) += bytes,
                Then::Again => asks_again = true,
                Then::LeaveAlone => whom.leave_alone(offer.who),
                Then::HasNone => whom.has_none(offer.who),
            }
        }
        if let Some(bytes) = of_ended {
            any_ended = true;
            freed += bytes;
            wait_for_free(free, free_before.saturating_add(bytes.max(1)), until);
        }
        if asks_again {
            std::thread::sleep(RING);
        }
    }
    asking.hung().into_iter().for_each(|pid| whom.leave_alone(pid));
    if freed > 0 {
        let mut all = GROWTH.lock();
        let (growth, answered) = all.entry(home).or_insert((Growth::default(), Instant::now()));
        growth.got(freed.min(wanted));
        *answered = Instant::now();
    }
    if !asking.told().is_empty() {
        if lacks.less == Less::Context {
            memory::was_answered(home, in_words(&asking));
        }
        let microseconds = begun.elapsed().as_micros() as u64;
        tell(
            &asking,
            RecallAsk {
                device: home,
                bytes,
                ahead: asked_ahead,
                freed,
                asked: number(asking.told().len()),
                silent: number(asking.silent()),
                microseconds,
                whom: asking.told().iter().map(|(pid, told)| asked_of(*pid, told)).collect(),
            },
        );
    }
    // Of one that has ended nobody knows what it had by then, nor whose it was that others have freed.
    Some(freed.max(u64::from(any_ended || any_free)))
}

/// What each of those said who were asked, for a program that is refused.
fn in_words(asking: &Asking) -> String {
    let of = |(pid, told): (&u32, &Told)| {
        let said = match &told.why {
            Some(Answer::Refused(why)) => format!("refused ({why})"),
            Some(Answer::Ended) => "has ended".to_owned(),
            Some(Answer::Halted) => "is stopped".to_owned(),
            Some(Answer::Busy) => "answered others all the time".to_owned(),
            Some(Answer::None | Answer::Silent) => {
                "did not answer in time: it may be computing, and a longer GPUPOOL_RECALL_WAIT waits for that"
                    .to_owned()
            }
            Some(Answer::Freed { .. }) | None => format!("freed {}", format_size(told.freed)),
        };
        format!("process {pid} {said}")
    };
    let all: Vec<String> = asking.told().iter().map(of).collect();
    format!("of those that were asked for room {}", all.join("; "))
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn asked_of(pid: u32, told: &Told) -> AskedOf {
    let why = told.why.as_ref().map(|answer| match answer {
        Answer::Freed { .. } => "nothing".to_owned(),
        Answer::Refused(why) => format!("refused: {why}"),
        Answer::Ended => "ended".to_owned(),
        Answer::Halted => "stopped".to_owned(),
        Answer::None | Answer::Silent => "silent".to_owned(),
        Answer::Busy => "busy".to_owned(),
    });
    AskedOf { pid, bytes: told.asked, freed: told.freed, why }
}

fn tell(asking: &Asking, event: RecallAsk) {
    log::emit(|| {
        let (size, got) = (format_size(event.bytes), format_size(event.freed));
        let ahead = if event.ahead > 0 { format!(" and {} ahead", format_size(event.ahead)) } else { String::new() };
        let were = |count: usize| if count == 1 { "was" } else { "were" };
        let pids = asking.told().keys().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let (asked, busy) = (asking.told().len(), asking.busy());
        let processes = if asked == 1 { "process" } else { "processes" };
        let text = format!(
            "{asked} other {processes} ({pids}) {} asked for {size}{ahead} of GPU {}, and freed {got}; {} did not answer, and {busy} {} answering \
             others all the time",
            were(asked),
            event.device,
            event.silent,
            were(busy)
        );
        (event, text)
    });
}

/// Waits until so much of a GPU is free as processes had that have ended: what the driver takes back with the last thread may show a little later. Not for long, since another one may have
/// taken it by then.
fn wait_for_free(free: impl Fn() -> u64, enough: u64, until: Instant) {
    let until = until.min(Instant::now() + BACK);
    while free() < enough && Instant::now() < until {
        std::thread::sleep(RING);
    }
}

/// Says that nobody was asked.
fn tell_in_vain(gpu: u32, lacks: u64) {
    tracing::info!(
        target: "gpupool::memory", about = "recall.in_vain", device = gpu, lacks,
        "nobody was asked for {} that a context lacks on GPU {gpu}, since all others together would give less", format_size(lacks)
    );
}
