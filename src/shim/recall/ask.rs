//! Asking: by the thread whose allocation lacks memory, as a command asks (`src/cli/control.rs`). It listens beside the page of each process that
//! may give way, rings, and hears what each has freed.

use super::neighbours::{self, Neighbour};
use crate::backing::{self, open};
use crate::serve::ipc::Own;
use crate::serve::memory::{self, Lacks, Less};
use crate::{bell, live, log, process};
use gpupool_config::{Mode, format_size};
use gpupool_events::RecallAsk;
use gpupool_interpose::cancel;
use gpupool_lending::{self as lending, Growth, Offer, What};
use gpupool_machine::Uuid;
use gpupool_metrics::folder::Folder;
use gpupool_metrics::{Door, Standing, has_living_thread, is_all_ending, ring, stat};
use gpupool_pool::Place;
use gpupool_wire::control::{GUARANTEED, ROOM, Reply, Request};
use gpupool_wire::socket::wait;
use gpupool_wire::{Keep, Socket};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// How often who has not connected yet is rung for, and it is looked whether the turn has come to ask who is being asked by others.
const RING: Duration = Duration::from_millis(10);
/// How long who did not answer in time is left alone.
const LEFT_ALONE: Duration = Duration::from_secs(10);
/// And who gave nothing of a GPU, as long as its page says of that GPU what it said then.
const AGAIN: Duration = Duration::from_millis(500);
/// How long those have to say that they have some of whom nothing is known to be there.
const SHORT: Duration = Duration::from_millis(150);
/// How long one is in the middle of borrowing at most, in nanoseconds: from the driver's call to the block.
const IN_THE_MIDDLE: u64 = 100_000_000;
/// Within which time a page tells what has changed.
const WRITTEN: Duration = Duration::from_millis(1_100);
/// How many times as long who is heard to go on is waited for. 100 GiB take the host three seconds.
pub(super) const LONGER: u32 = 3;
/// How long it is waited until what an ended process had is free.
const BACK: Duration = Duration::from_millis(300);
/// What is left of the time for who answers at the last moment, at most.
const MARGIN: Duration = Duration::from_millis(100);

/// One thread asks at a time: who is asked by two threads of one process would be asked for the same memory twice.
static ASKING: Mutex<()> = Mutex::new(());
/// By GPU, what was got by asking, and when the last answer to that came.
static GROWTH: Mutex<BTreeMap<u32, (Growth, Instant)>> = Mutex::new(BTreeMap::new());
/// Who is not asked.
static SPARED: Mutex<Vec<Spared>> = Mutex::new(Vec::new());

/// One that is not asked for a while.
struct Spared {
    pid: u32,
    started: u64,
    /// Only for this GPU, of which it gave nothing though its page said that it had so many bytes; `None`: for any.
    gpu: Option<(Uuid, u64)>,
    until: Instant,
}

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

/// `borrows`: this process does not work on that GPU.
fn try_to_ask(&Lacks { gpu: home, bytes, less, since }: &Lacks, borrows: bool) -> Option<u64> {
    let begun = Instant::now();
    let wait = process::settings().recall_wait?;
    // It has been heard of memory that left where it asks once more.
    let latest = since.unwrap_or(begun) + LONGER * wait;
    let until = (begun + wait).min(latest);
    let margin = MARGIN.min(wait / 4);
    let folder = Folder::around(super::page()?).ok()?;
    // What the program makes itself is asked for before there is a pool.
    let driver = process::driver()?;
    let plan = open::plan(driver)?;
    let (place, gpu) = (Place::Gpu(home), plan.topology.gpus.get(home as usize)?.uuid);
    let _one = ASKING.try_lock_until(until)?;
    let free = || plan.free_at(driver, place).unwrap_or(0);
    let free_first = free();
    let has = super::give::on_gpu(home).saturating_add(free_first);
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
            let takes = neighbours::context_on(&folder, &gpu).min(lending::CONTEXT);
            takes.saturating_sub(backing::free_on(driver, home, &gpu).unwrap_or(u64::MAX))
        }
    };
    let bytes = bytes.max(least);
    // What becomes free is the reserve's first.
    let bytes = bytes.saturating_add(plan.lacks_at(driver, home));
    let room = most.saturating_sub(has.saturating_add(bytes));
    let grows = |(growth, answered): &mut (Growth, Instant)| growth.ahead(answered.elapsed(), room);
    // Who asks again because others took what came free is not on its way to more.
    let mut ahead = if since.is_some() { 0 } else { GROWTH.lock().get_mut(&home).map_or(0, grows) };
    let wanted = bytes.saturating_add(ahead);
    let priority = match live::priority() {
        _ if is_guaranteed => GUARANTEED,
        // Loans are called back by equals that work there, and by nobody else.
        own if borrows => own.checked_sub(1)?,
        own => own,
    };
    // What these give on which terms, as their pages say now.
    let offers = || {
        let (halted, others): (Vec<Neighbour>, Vec<Neighbour>) =
            neighbours::on(&folder, &gpu).into_iter().partition(|other| other.is_halted);
        halted.iter().filter(|other| other.stake.gives(priority) > 0).for_each(|other| tell_left_out(other, home));
        let others = others.into_iter().filter(|other| !is_spared(other, &gpu));
        lending::in_order(others.map(|other| (other.stake, other)), priority)
    };
    let mut left = offers();
    // Nobody gives anything for what would not be there in the end. Pages are late, and who is refused a context mostly ends.
    let is_in_vain = |left: &[Offer<Neighbour>]| {
        let is_known = left.iter().all(|of| of.what.is_known());
        !left.is_empty() && is_known && left.iter().map(|of| of.bytes).sum::<u64>() < least
    };
    if is_in_vain(&left) {
        std::thread::sleep(WRITTEN.min(until.saturating_duration_since(Instant::now())));
        left = offers();
        if is_in_vain(&left) {
            tell_in_vain(home, least);
            return None;
        }
    }
    let (mut freed, mut silent, mut asked, mut busy) = (0, 0, BTreeSet::new(), BTreeSet::new());
    let (mut asked_ahead, mut any_ended, mut any_own, mut any_free) = (0, false, false, false);
    let mut looked = Some(Instant::now());
    // Who has said nothing so far; it is asked again behind the others.
    let mut late: Vec<Offer<Neighbour>> = Vec::new();
    while freed < bytes && Instant::now() + margin < until {
        if left.is_empty() {
            left = std::mem::take(&mut late);
        }
        let Some(what) = left.first().map(|offer| offer.what) else { break };
        if !what.is_loans() && !any_own && !asked.is_empty() {
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
            left = offers();
            left.retain(|offer| late.iter().all(|late| late.who.pid != offer.who.pid));
            continue;
        }
        let knows = what.is_known();
        let beyond = if knows { std::mem::take(&mut ahead) } else { 0 };
        let now = lending::next_round(&mut left, bytes - freed, beyond);
        if knows {
            asked_ahead += now.iter().map(|(_, share)| share).sum::<u64>().saturating_sub(bytes - freed);
        }
        // Who hangs in a kernel says nothing for all of the time; so others are asked in half of what is left of it.
        let is_other = |of: &Offer<Neighbour>| now.iter().all(|(offer, _)| offer.who.pid != of.who.pid);
        let half = until.saturating_duration_since(Instant::now()) / 2;
        let by = if left.iter().chain(&late).any(is_other) { Instant::now() + half } else { until };
        let first = if knows { by } else { by.min(Instant::now() + SHORT) };
        let (mut of_ended, free_before): (Option<u64>, u64) = (None, free());
        let mut in_the_middle = false;
        let asks =
            Asks { folder: &folder, gpu, priority, loans: what.is_loans(), first, until: by, end: until, wait, latest };
        let questions: Vec<(&Neighbour, u64)> = now.iter().map(|(offer, share)| (&offer.who, *share)).collect();
        for ((offer, share), answer) in now.iter().zip(asks.all(&questions)) {
            let other = &offer.who;
            asked.insert(other.pid);
            match answer {
                Answer::Freed { bytes, loans } if bytes > 0 => {
                    freed += bytes;
                    let rest = offer.bytes.saturating_sub(bytes);
                    let more = match what {
                        _ if bytes < *share => None,
                        _ if loans > 0 => Some((What::Loans, loans)),
                        What::Own if rest > 0 => Some((What::Own, rest)),
                        // Who gave all that was known may have more.
                        What::Own | What::New => Some((What::New, 0)),
                        What::Loans | What::NewLoans => None,
                    };
                    left.extend(more.map(|(what, bytes)| Offer { what, bytes, ..offer.clone() }));
                }
                // All that it had is free, or soon is.
                Answer::Ended => {
                    *of_ended.get_or_insert(0) += if knows { *share } else { 0 };
                    left.retain(|of| of.who.pid != other.pid);
                }
                Answer::Busy => {
                    busy.insert(other.pid);
                    late.extend(Some(offer.clone()).filter(|_| knows));
                }
                // What is on its way to become a block's is none yet, and cannot be given.
                Answer::Freed { .. } if begun.elapsed() < SHORT && other.has_just_borrowed(&folder, IN_THE_MIDDLE) => {
                    left.push(offer.clone());
                    in_the_middle = true;
                }
                // Of its belongings it may have some to give yet; and who was asked for loans of which nobody knows is waited for a short time only.
                Answer::Freed { .. } if left.iter().any(|of| of.who.pid == other.pid) => {}
                Answer::None if !knows && left.iter().any(|of| of.who.pid == other.pid) => {}
                Answer::Silent => {
                    late.push(offer.clone());
                    late.extend(left.extract_if(.., |of| of.who.pid == other.pid));
                }
                Answer::None if knows => {
                    silent += 1;
                    spare(other, None, LEFT_ALONE);
                    left.retain(|of| of.who.pid != other.pid);
                }
                // Once it goes on it is asked again.
                Answer::Halted => {
                    silent += 1;
                    left.retain(|of| of.who.pid != other.pid);
                }
                _ => spare(other, Some((gpu, other.held())), AGAIN),
            }
        }
        if let Some(bytes) = of_ended {
            any_ended = true;
            freed += bytes;
            wait_for_free(free, free_before.saturating_add(bytes.max(1)), until);
        }
        lending::sort(&mut left);
        if in_the_middle {
            std::thread::sleep(RING);
        }
    }
    // Who answers others all the time may be asked again at once.
    let hung = late.into_iter().map(|offer| offer.who).filter(|who| !busy.contains(&who.pid));
    let hung: BTreeMap<u32, Neighbour> = hung.map(|who| (who.pid, who)).collect();
    hung.values().for_each(|other| spare(other, None, LEFT_ALONE));
    silent += hung.len() as u32;
    if freed > 0 {
        let mut all = GROWTH.lock();
        let (growth, answered) = all.entry(home).or_insert((Growth::default(), Instant::now()));
        growth.got(freed.min(wanted));
        *answered = Instant::now();
    }
    if !asked.is_empty() {
        log::emit(|| {
            let microseconds = begun.elapsed().as_micros() as u64;
            let (size, got) = (format_size(bytes), format_size(freed));
            let ahead =
                if asked_ahead > 0 { format!(" and {} ahead", format_size(asked_ahead)) } else { String::new() };
            let were = |count: usize| if count == 1 { "was" } else { "were" };
            let pids = asked.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            let (asked, busy) = (asked.len(), busy.len());
            let processes = if asked == 1 { "process" } else { "processes" };
            let text = format!(
                "{asked} other {processes} ({pids}) {} asked for {size}{ahead} of GPU {home}, and freed {got}; {silent} did not answer, and {busy} {} answering \
                 others all the time",
                were(asked),
                were(busy)
            );
            let asked = u32::try_from(asked).unwrap_or(u32::MAX);
            (RecallAsk { device: home, bytes, ahead: asked_ahead, freed, asked, silent, microseconds }, text)
        });
    }
    // Of one that has ended nobody knows what it had by then, nor whose it was that others have freed.
    Some(freed.max(u64::from(any_ended || any_free)))
}

/// Waits until so much of a GPU is free as processes had that have ended: what the driver takes back with the last thread may show a little later. Not for long, since another one may have
/// taken it by then.
fn wait_for_free(free: impl Fn() -> u64, enough: u64, until: Instant) {
    let until = until.min(Instant::now() + BACK);
    while free() < enough && Instant::now() < until {
        std::thread::sleep(RING);
    }
}

fn is_spared(other: &Neighbour, gpu: &Uuid) -> bool {
    let now = Instant::now();
    let mut spared = SPARED.lock();
    spared.retain(|spared| spared.until > now);
    let is_other = |spared: &Spared| (spared.pid, spared.started) == (other.pid, other.started);
    // Who had none may have some by now that had just been on its way there, or is.
    let is_as_it_was =
        |spared: &Spared| spared.gpu.is_none_or(|(of, held)| of == *gpu && other.held() <= held && !other.moves);
    spared.iter().any(|spared| is_other(spared) && is_as_it_was(spared))
}

fn spare(other: &Neighbour, gpu: Option<(Uuid, u64)>, time: Duration) {
    SPARED.lock().push(Spared { pid: other.pid, started: other.started, gpu, until: Instant::now() + time });
}

/// Who gave nothing may give something now.
pub(super) fn ask_anew() {
    SPARED.lock().retain(|spared| spared.gpu.is_none());
}

/// Who was told to be left out, by number and when it started.
static TOLD: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());

/// Says once of a process that it is not asked because it is stopped: it may be so for hours, and whoever looks for the reason finds that it has what others lack.
fn tell_left_out(other: &Neighbour, gpu: u32) {
    if TOLD.lock().insert((other.pid, other.started)) {
        let (pid, has) = (other.pid, format_size(other.held()));
        tracing::info!(
            target: "gpupool::memory", about = "recall.stopped", device = gpu, process = pid,
            "process {pid} is not asked for memory of GPU {gpu}, of which it has {has} and this one lacks some: it is stopped (SIGSTOP, a debugger or a paused container) and gives \
             nothing before it goes on (said once)"
        );
    }
}

/// Says that nobody was asked.
fn tell_in_vain(gpu: u32, lacks: u64) {
    tracing::info!(
        target: "gpupool::memory", about = "recall.in_vain", device = gpu, lacks,
        "nobody was asked for {} that a context lacks on GPU {gpu}, since all others together would give less", format_size(lacks)
    );
}

/// What is asked of whom it concerns.
struct Asks<'a> {
    folder: &'a Folder,
    gpu: Uuid,
    priority: u32,
    /// Only for what they have there for other GPUs.
    loans: bool,
    /// Nobody is waited for longer who says nothing, by this time or for so long after it last said something; and nobody at all by the last.
    first: Instant,
    /// By this time, whose memory moves meanwhile: it answers between two steps of that or behind it, and what has come or gone then no page tells yet.
    end: Instant,
    /// By this time, who has said that it has some.
    until: Instant,
    wait: Duration,
    latest: Instant,
}

/// The page of who is asked, and our place in the line of those who ask it, commands and other processes.
struct Turn {
    page: Own,
    /// `None`: the file system knows no such lines, and whoever comes last is next.
    standing: Option<Standing>,
    /// Who stood before us when that was looked at last.
    before: Option<Standing>,
}

impl Turn {
    fn wait_for(page: OwnedFd) -> Option<Self> {
        let page = Own::keep(page).ok()?;
        let standing = Standing::at_end(page.as_fd()).ok();
        Some(Self { page, standing, before: None })
    }

    /// Whether it has come. `None`: the program has closed the descriptor.
    fn has_come(&mut self) -> Option<bool> {
        if !self.page.is_there() {
            return None;
        }
        self.before = self.standing.and_then(|standing| standing.before(self.page.as_fd()).ok().flatten());
        Some(self.before.is_none())
    }

    fn ring(&self) -> bool {
        self.page.is_there() && ring(self.page.as_fd()).is_ok()
    }
}

impl Drop for Turn {
    /// The child of a fork may have the descriptor as well, and would keep the place.
    fn drop(&mut self) {
        if let Some(standing) = self.standing.filter(|_| self.page.is_there()) {
            standing.leave(self.page.as_fd());
        }
    }
}

/// What one has freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// So much. `loans`: what it still has there for other GPUs.
    Freed { bytes: u64, loans: u64 },
    /// It has ended, and the driver has taken back all that it had.
    Ended,
    /// It is stopped, and answers nobody before it goes on.
    Halted,
    /// It will not answer, or has said nothing in the short time for which one is waited for that is not known to have any.
    None,
    /// It has said nothing for as long as anybody is waited for.
    Silent,
    /// It was answering those who had come earlier.
    Busy,
}

impl Answer {
    const NOTHING: Self = Self::Freed { bytes: 0, loans: 0 };
}

/// How far one is.
enum Asked<'a> {
    /// Nothing has been done yet.
    New,
    /// Others came earlier, and ask it at this moment.
    Waits(Turn),
    /// It was rung for. The door is gone before the turn is: the next one has a door of the same name.
    Called { listener: Socket<Own>, door: Door<'a>, turn: Turn },
    /// It has heard what is wanted. `has_some`: it has said so.
    Heard { socket: Socket<Own>, has_some: bool },
    /// It ends, and the driver takes back what it had once its last thread is gone.
    Ends,
    /// It has answered, or will not.
    Over(Answer),
}

/// What one has said since it was heard last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    Nothing,
    /// It has some of what is wanted, and may have to wait until that can leave.
    HasSome,
    /// It is at work for who asks; or it has answered somebody who came earlier.
    GoesOn,
}

impl Says {
    fn after(goes_on: bool) -> Self {
        if goes_on { Self::GoesOn } else { Self::Nothing }
    }
}

impl Asked<'_> {
    /// What is known of it when it is waited for no longer.
    fn so_far(&self) -> Answer {
        match self {
            Asked::Over(answer) => *answer,
            // Who came earlier is not at fault, nor is who answers them.
            Asked::Waits(turn) if turn.before.is_some() => Answer::Busy,
            _ => Answer::None,
        }
    }
}

impl Asks<'_> {
    /// What each of these has freed of what it is asked for, all asked at once. Nobody is waited for because another one goes on.
    fn all(&self, others: &[(&Neighbour, u64)]) -> Vec<Answer> {
        let mut all: Vec<(Asked<'_>, Instant)> = others.iter().map(|_| (Asked::New, self.first)).collect();
        let mut rung = None;
        loop {
            let rings = rung.is_none_or(|rung: Instant| rung.elapsed() >= RING);
            if rings {
                rung = Some(Instant::now());
            }
            for ((other, bytes), (asked, until)) in others.iter().zip(&mut all) {
                match self.go_on(other, *bytes, asked, rings) {
                    Says::Nothing => {}
                    Says::HasSome => *until = (*until).max(self.until),
                    Says::GoesOn => *until = (*until).max(Instant::now() + self.wait).min(self.latest),
                }
                let now = Instant::now();
                if now >= *until && *until < self.end && other.moves(self.folder) {
                    // By then its page is written, or it has answered.
                    *until = (now + SHORT).min(self.end);
                } else if now >= *until {
                    // Its turn is the next one's from here on.
                    let was_waited_for = *until >= self.until;
                    let so_far = asked.so_far();
                    *asked =
                        Asked::Over(if was_waited_for && so_far == Answer::None { Answer::Silent } else { so_far });
                }
            }
            let under_way = all.iter().filter(|(asked, _)| !matches!(asked, Asked::Over(_)));
            let Some(until) = under_way.map(|(_, until)| *until).max() else { break };
            let sockets = all.iter().filter_map(|(asked, _)| match asked {
                Asked::Called { listener, .. } => Some(listener),
                Asked::Heard { socket, .. } => Some(socket),
                Asked::New | Asked::Waits(_) | Asked::Ends | Asked::Over(_) => None,
            });
            let sockets: Vec<&Socket<Own>> = sockets.filter(|socket| socket.is_there()).collect();
            let left = until.saturating_duration_since(Instant::now()).min(RING);
            if sockets.is_empty() {
                std::thread::sleep(left);
            } else if wait(sockets, Some(left)).is_err() {
                break;
            }
        }
        all.iter().map(|(asked, _)| asked.so_far()).collect()
    }

    /// What it says now.
    fn go_on<'a>(&'a self, other: &Neighbour, bytes: u64, asked: &mut Asked<'a>, rings: bool) -> Says {
        if rings && !matches!(asked, Asked::Over(_)) {
            match fate(other) {
                Fate::Runs => {}
                Fate::Halted => *asked = Asked::Over(Answer::Halted),
                Fate::Ends => *asked = Asked::Ends,
                Fate::Over => *asked = Asked::Over(Answer::Ended),
            }
        }
        let mut says = Says::Nothing;
        match asked {
            Asked::Over(_) | Asked::Ends => {}
            Asked::New => *asked = self.begin(other),
            Asked::Waits(turn) if rings => {
                let before = turn.before;
                match turn.has_come() {
                    Some(true) => {
                        let Asked::Waits(turn) = std::mem::replace(asked, Asked::Over(Answer::None)) else {
                            return Says::Nothing;
                        };
                        *asked = self.call(other, turn);
                        says = Says::after(before.is_some());
                    }
                    Some(false) => says = Says::after(before.is_some() && turn.before != before),
                    None => *asked = Asked::Over(Answer::None),
                }
            }
            Asked::Waits(_) => {}
            Asked::Called { door, .. } if rings && !door.is_there() => {
                let over = std::mem::replace(asked, Asked::Over(Answer::None));
                *asked = if let Asked::Called { turn, .. } = over { Asked::Waits(turn) } else { over };
            }
            Asked::Called { listener, turn, .. } => {
                if !listener.is_there() || rings && !turn.ring() {
                    *asked = Asked::Over(Answer::None);
                } else if let Ok(socket) = listener.accept() {
                    // Another one that looks whether somebody listens, or somebody who is not meant, is let go.
                    let is_meant = socket.peer().is_ok_and(|peer| peer.pid == other.pid && peer.is_same_user().is_ok());
                    let left = self.latest.saturating_duration_since(Instant::now()).saturating_sub(MARGIN / 2);
                    let patience = u64::try_from(left.as_millis()).unwrap_or(0);
                    let request =
                        Request::GiveWay { gpu: self.gpu, bytes, priority: self.priority, loans: self.loans, patience };
                    let none: [OwnedFd; 0] = [];
                    if is_meant {
                        let said = socket.send(&request.encode(), &none).is_ok();
                        *asked = if said { Asked::Heard { socket, has_some: false } } else { unheard(other) };
                    }
                }
            }
            Asked::Heard { socket, has_some } => {
                let mut buffer = [0; ROOM];
                if !socket.is_there() {
                    *asked = Asked::Over(Answer::None);
                } else {
                    match socket.receive(&mut buffer) {
                        Ok(received) => match Reply::decode(&buffer[..received.bytes]) {
                            Ok(Reply::Done { moved, stayed, .. }) => {
                                *asked = Asked::Over(Answer::Freed { bytes: moved, loans: stayed });
                            }
                            // First it says that it has some. After that it says so only while it is at work: it has come to rest, begins with what is
                            // next, or more has left. While it waits for a kernel it says nothing.
                            Ok(Reply::Progress { .. }) => {
                                says = if std::mem::replace(has_some, true) { Says::GoesOn } else { Says::HasSome };
                            }
                            Ok(Reply::Refused { .. }) => *asked = Asked::Over(Answer::NOTHING),
                            Ok(_) => *asked = Asked::Over(Answer::None),
                            Err(_) => *asked = unheard(other),
                        },
                        Err(gpupool_wire::socket::Failure::System(error)) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(_) => *asked = unheard(other),
                    }
                }
            }
        }
        says
    }

    /// Goes to the end of the line of those who ask one, and begins if nobody else is there.
    fn begin(&self, other: &Neighbour) -> Asked<'_> {
        let page = self.folder.page_to_ring(OsStr::new(&other.page)).ok();
        let Some(mut turn) = page.and_then(Turn::wait_for) else { return Asked::Over(Answer::None) };
        match turn.has_come() {
            Some(true) => self.call(other, turn),
            Some(false) => Asked::Waits(turn),
            None => Asked::Over(Answer::None),
        }
    }

    /// Listens beside the page of one, and rings.
    fn call(&self, other: &Neighbour, mut turn: Turn) -> Asked<'_> {
        let Some(name) = other.page.strip_suffix(".page").map(|stem| format!("{stem}.call")) else {
            return Asked::Over(Answer::None);
        };
        let listen = || Socket::<Own>::listen_in(self.folder.fd(), &name);
        match Door::listen(self.folder, &name, || turn.has_come() == Some(true), listen) {
            Ok(Some(listener)) if turn.ring() => Asked::Called { listener, door: Door::at(self.folder, &name), turn },
            Ok(Some(_)) => {
                drop(Door::at(self.folder, &name));
                Asked::Over(Answer::None)
            }
            Ok(None) if turn.page.is_there() => Asked::Waits(turn),
            Ok(None) | Err(_) => Asked::Over(Answer::None),
        }
    }
}

/// What one is at.
enum Fate {
    Runs,
    /// It is stopped.
    Halted,
    /// It ends, and has its memory yet.
    Ends,
    /// It has ended: with its last thread the system has closed its files, and the driver has taken back what it had.
    Over,
}

fn fate(other: &Neighbour) -> Fate {
    let Some(stat) = stat(other.pid) else { return Fate::Over };
    if stat.started.abs_diff(other.started) > 1 {
        return Fate::Over;
    }
    match stat.state {
        b'T' | b't' => Fate::Halted,
        b'Z' | b'X' if !has_living_thread(other.pid) => Fate::Over,
        _ if is_all_ending(other.pid) => Fate::Ends,
        _ => Fate::Runs,
    }
}

/// Of one whose connection has broken: it ends, which begins with that, or it will not answer.
fn unheard<'a>(other: &Neighbour) -> Asked<'a> {
    match fate(other) {
        Fate::Over => Asked::Over(Answer::Ended),
        Fate::Ends => Asked::Ends,
        Fate::Halted | Fate::Runs => Asked::Over(Answer::None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_lending::Stake;
    use gpupool_metrics::{BYTES, Identity};

    /// This process, by the page of this name.
    fn neighbour(page: &str) -> Neighbour {
        let own = Identity::own().unwrap();
        let stake = Stake { priority: 1, ..Stake::default() };
        Neighbour { pid: own.pid, started: own.started, page: page.to_owned(), stake, moves: false, is_halted: false }
    }

    /// Nobody who says nothing is waited for longer than until then.
    fn asks(folder: &Folder, until: Instant, wait: Duration, latest: Instant) -> Asks<'_> {
        Asks { folder, gpu: [0; 16], priority: 1, loans: false, first: until, until, end: until, wait, latest }
    }

    /// One long copy is seen from outside by no byte that has left.
    #[test]
    fn who_says_that_it_is_at_work_is_waited_for_though_no_more_has_left() {
        let around = tempfile::tempdir().unwrap();
        let folder = Folder::around(&around.path().join("page")).unwrap();
        std::fs::write(around.path().join("1-1.page"), vec![0; BYTES]).unwrap();
        let other = neighbour("1-1.page");
        // A third of it is what a busy machine may hold a thread up for.
        let (begun, wait) = (Instant::now(), Duration::from_secs(6));
        let asks = asks(&folder, begun + wait, wait, begun + LONGER * wait);
        let answers = std::thread::scope(|scope| {
            scope.spawn(|| {
                let socket = loop {
                    if let Ok(socket) = Socket::<OwnedFd>::connect_in(folder.fd(), "1-1.call") {
                        break socket;
                    }
                    std::thread::yield_now();
                };
                let mut buffer = [0; ROOM];
                assert!(socket.receive_by(&mut buffer, begun + LONGER * wait).is_ok());
                // It has some; it has come to rest and copies; it is done. Between two of these it would still be waited for, and not between the first and the last.
                let (at_work, none) = (Reply::Progress { done: 0, total: 7 }.encode(), [] as [OwnedFd; 0]);
                let done = Reply::Done { moved: 7, stayed: 0, to_disk: 0, stored: 0, microseconds: 0, waited: 0 };
                for (at, words) in [(0, &at_work), (2, &at_work), (4, &done.encode())] {
                    while Instant::now() < begun + at * wait / 3 {
                        std::thread::yield_now();
                    }
                    let _ = socket.send(words, &none);
                }
            });
            asks.all(&[(&other, 1)])
        });
        assert_eq!(answers, [Answer::Freed { bytes: 7, loans: 0 }]);
    }

    /// Both looked when nobody stood in the line yet, as of two that come in the same millisecond.
    #[test]
    fn who_finds_that_another_one_listens_who_came_earlier_waits_for_its_turn() {
        let around = tempfile::tempdir().unwrap();
        let folder = Folder::around(&around.path().join("page")).unwrap();
        let path = around.path().join("1-1.page");
        std::fs::write(&path, vec![0; BYTES]).unwrap();
        let other = neighbour("1-1.page");
        let (now, wait) = (Instant::now(), Duration::from_secs(60));
        let asks = asks(&folder, now + wait, wait, now + wait);
        let earlier = std::fs::File::options().write(true).open(&path).unwrap();
        let place = Standing::at_end(earlier.as_fd()).unwrap();
        let listener = Socket::<OwnedFd>::listen_in(folder.fd(), "1-1.call").unwrap();
        let door = Door::at(&folder, "1-1.call");
        // A process has one place in a millisecond.
        let turn = loop {
            let turn = Turn::wait_for(folder.page_to_ring(OsStr::new("1-1.page")).unwrap()).unwrap();
            if turn.standing.is_some() {
                break turn;
            }
        };
        let Asked::Waits(turn) = asks.call(&other, turn) else { panic!("it has taken the other one's place") };
        assert!(turn.before == Some(place) && door.is_there());
        drop((earlier, listener));
        assert!(matches!(asks.call(&other, turn), Asked::Called { .. }), "the other one is gone, its door is not");
    }

    #[test]
    fn nobody_is_waited_for_because_another_one_goes_on() {
        const LONG: Duration = Duration::from_secs(60);
        // Longer than a busy machine holds a thread up for.
        const SOON: Duration = Duration::from_secs(3);
        let around = tempfile::tempdir().unwrap();
        let folder = Folder::around(&around.path().join("page")).unwrap();
        let others = ["1-1.page", "2-1.page"].map(|page| {
            std::fs::write(around.path().join(page), vec![0; BYTES]).unwrap();
            (neighbour(page), 1)
        });
        let begun = Instant::now();
        // Of neither it is known what it has.
        let (until, latest) = (begun + SOON, begun + 3 * LONG);
        let asks = asks(&folder, until, LONG, latest);
        let answers = std::thread::scope(|scope| {
            scope.spawn(|| {
                let none: [OwnedFd; 0] = [];
                let door = around.path().join("2-1.call");
                while !door.exists() {
                    std::thread::yield_now();
                }
                let socket = loop {
                    if let Ok(socket) = Socket::<OwnedFd>::connect_in(folder.fd(), "2-1.call") {
                        break socket;
                    }
                };
                let mut buffer = [0; ROOM];
                assert!(socket.receive_by(&mut buffer, begun + LONG).is_ok());
                // It has some, and is at work.
                for _ in 0..2 {
                    socket.send(&Reply::Progress { done: 0, total: 7 }.encode(), &none).unwrap();
                }
                // Until it would have been given up, had it not said anything.
                while Instant::now() < begun + 2 * SOON {
                    std::thread::yield_now();
                }
                socket
                    .send(
                        &Reply::Done { moved: 7, stayed: 0, to_disk: 0, stored: 0, microseconds: 0, waited: 0 }
                            .encode(),
                        &none,
                    )
                    .unwrap();
            });
            asks.all(&others.each_ref().map(|(other, bytes)| (other, *bytes)))
        });
        assert_eq!(answers, [Answer::Silent, Answer::Freed { bytes: 7, loans: 0 }]);
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
    }
}
