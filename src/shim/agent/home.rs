//! When freed memory goes home (`GPUPOOL_IDLE`): what nobody used for that time; what is free once the program has freed most of
//! what it had and held it for long or asks for nothing since ([`super::ebb`]); and what is free on a GPU that is nearly full while
//! others use it, too.
//!
//! Where no freed memory is held and nothing changes, nothing is looked at until something does. Else the agent looks four times a second
//! at most, or as often as a short time of the user's asks for. Also where nothing is freed yet: the next change might be that most of it
//! is, and while the bell is mute, which it is for a second behind each change, nobody would tell.
//!
//! The last two are guesses that the memory is not wanted soon. Where most of it is made anew within the time that it could have
//! stayed, the guess was wrong, and the program does such things: it pays for that once, and from then on that sign of the two does not count.
//! Once is the least: a second after the first time that all was freed, a loop that rests for two and a program that has ended its work have
//! made the same calls, and the latter's memory is to be gone by then. Memory that is gone in NVML's eyes is released, and is paid for anew.

use super::ebb::Ebb;
use crate::backing::open;
use crate::backing::topology::Gpu;
use crate::bell;
use crate::nvml;
use crate::process;
use crate::serve::memory::idle;
use gpupool_config::Mode;
use gpupool_pool::{FreedMemory, Place};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The longest and the shortest time between two looks while there is something to look for. Two of the longest and a rest
/// ([`super::ebb::REST`]) are the second within which what a program freed goes home, and which leaves a bare driver's time for it.
pub(super) const LONGEST: Duration = Duration::from_millis(250);
pub(super) const SHORTEST: Duration = Duration::from_millis(100);
/// The least time between two questions to NVML.
const QUESTIONS: Duration = Duration::from_secs(1);
/// Periods in the time that unused memory stays: by so much of it, at most, memory goes late.
const PERIODS: u32 = 4;
/// A GPU is nearly full when less than this part of it is free.
const NEARLY_FULL: u64 = 16;

/// Whether anything goes home in this process.
pub fn is_wanted() -> bool {
    let settings = process::settings();
    settings.idle.is_some() && matches!(settings.mode, Mode::Pool | Mode::Spill)
}

/// Everything that goes home, period.
const ALL: u32 = u32::MAX;

/// Why memory goes before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sign {
    /// The program has freed most of what it had: what it had held for long, or all at once, with nothing asked for since.
    Fell,
    /// Its GPU is nearly full while others use it, too.
    Others,
}

impl Sign {
    /// What the log calls it.
    fn name(self) -> &'static str {
        match self {
            Sign::Fell => "fell",
            Sign::Others => "others",
        }
    }
}

/// Memory that went before its time.
#[derive(Clone, Copy, Debug)]
struct Early {
    sign: Sign,
    at: Instant,
    bytes: u64,
    /// What the pool held after it.
    held: u64,
}

pub struct Home {
    /// How long unused memory stays.
    idle: Duration,
    ebb: Ebb,
    /// The periods that matter still, and when each began.
    periods: VecDeque<(u32, Instant)>,
    looked: Option<Instant>,
    /// The bell was to ring for the first change since then.
    heard: bool,
    asked: Option<Instant>,
    /// There is an NVML to ask.
    asks: bool,
    early: Option<Early>,
    /// The signs by which no guess was wrong yet.
    believed: Vec<Sign>,
}

impl Home {
    /// `None` where nothing goes home.
    pub fn new() -> Option<Self> {
        let idle = process::settings().idle.filter(|_| is_wanted())?;
        Some(Self {
            idle,
            ebb: Ebb::new(idle),
            periods: VecDeque::new(),
            looked: None,
            heard: false,
            asked: None,
            asks: true,
            early: None,
            believed: vec![Sign::Fell, Sign::Others],
        })
    }

    /// Looks, if it is time to, and returns what is to go; how long nothing need be done. `None`: until something changes.
    pub fn look(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let step = (self.idle / PERIODS).clamp(SHORTEST, LONGEST);
        let left = self.looked.map_or(Duration::ZERO, |looked| step.saturating_sub(now - looked));
        if !left.is_zero() {
            return Some(left);
        }
        let freed = idle::freed()?;
        self.looked = Some(now);
        self.ebb.note(now, &freed, self.heard);
        self.heard = bell::is_listening();
        self.learn(&freed, now);
        if freed.is_any() {
            self.return_what_goes(&freed, now);
        }
        // Asked anew: what went is nothing to look for.
        let is_any = freed.is_any() && idle::freed().is_some_and(|freed| freed.is_any());
        let listens = bell::is_listening();
        let next = match (is_any, listens) {
            (true, true) if !self.asks && !self.ebb.is_low() => Some(step.max(self.idle / PERIODS)),
            (true, _) | (false, false) => Some(step),
            (false, true) => None,
        };
        tracing::trace!(
            target: "gpupool::memory", about = "home",
            "looked at what is free: {} of {} bytes were in use; the bell {}; again {}",
            freed.live_bytes, freed.held, if listens { "listens" } else { "is mute" },
            next.map_or_else(|| "at the next change".to_owned(), |next| format!("in {} ms", next.as_millis()))
        );
        next
    }

    fn return_what_goes(&mut self, freed: &FreedMemory, now: Instant) {
        if self.believed.contains(&Sign::Fell) {
            let held_long =
                self.ebb.has_fallen(now).then_some("the program has freed most of what it had held for long");
            let rests =
                self.ebb.rests(now).then_some("the program has freed most of what it had, and asks for nothing since");
            if let Some(why) = held_long.or(rests) {
                self.ebb.forget();
                self.return_early(None, now, Sign::Fell, why);
            }
        }
        self.return_to_others(freed, now);
        self.return_unused(now);
    }

    fn return_unused(&mut self, now: Instant) {
        let is_over = |began: Instant| now - began >= self.idle / PERIODS;
        if self.periods.back().is_none_or(|&(_, began)| is_over(began)) {
            self.begin_period(now);
        }
        // The first period that remains is the last one that began so long ago.
        while self.periods.get(1).is_some_and(|&(_, began)| began + self.idle <= now) {
            self.periods.pop_front();
        }
        if let Some(&(since, began)) = self.periods.front()
            && began + self.idle <= now
        {
            let text = format!("nobody used it for {:?}", self.idle);
            idle::give_back_unused(None, since, "idle", &text);
        }
    }

    fn begin_period(&mut self, now: Instant) {
        if let Some(period) = idle::begin_period() {
            self.periods.push_back((period, now));
        }
    }

    /// Returns what is free, used of late or not.
    fn return_early(&mut self, place: Option<Place>, now: Instant, sign: Sign, text: &str) {
        self.begin_period(now);
        let bytes = idle::give_back_unused(place, ALL, sign.name(), text);
        if bytes > 0 {
            self.early = idle::freed().map(|freed| Early { sign, at: now, bytes, held: freed.held });
        }
    }

    /// GPUs that others use, and that are nearly full, get what is free there.
    fn return_to_others(&mut self, freed: &FreedMemory, now: Instant) {
        let is_believed = self.believed.contains(&Sign::Others);
        if !is_believed || !self.asks || self.asked.is_some_and(|asked| now - asked < QUESTIONS) {
            return;
        }
        let Some(plan) = open::plan_made() else { return };
        // What the front keeps may lie on any GPU.
        let has_free = |place| freed.kept > 0 || freed.whole.iter().any(|(at, _)| *at == place);
        let gpus = plan.topology.gpus.iter().filter(|gpu| has_free(Place::Gpu(gpu.ordinal)));
        let wanted: Vec<u32> = {
            // NVML is loaded and opens files, which a fork must not fall into.
            let Some(_part) = idle::Part::begin() else { return };
            let Some(nvml) = nvml::get() else {
                self.asks = false;
                return;
            };
            self.asked = Some(now);
            let is_full = |gpu: &&Gpu| nvml.free(&gpu.uuid).is_some_and(|free| free < gpu.total / NEARLY_FULL);
            let has_others = |gpu: &&Gpu| nvml.processes(&gpu.uuid).is_some_and(|processes| processes > 1);
            gpus.filter(is_full).filter(has_others).map(|gpu| gpu.ordinal).collect()
        };
        for gpu in wanted {
            let text = format!("GPU {gpu} is nearly full, and others use it, too");
            self.return_early(Some(Place::Gpu(gpu)), now, Sign::Others, &text);
        }
    }

    /// Was what went early made anew before it would have gone in any case?
    fn learn(&mut self, freed: &FreedMemory, now: Instant) {
        let Some(Early { sign, at, bytes, held }) = self.early else { return };
        let was_wrong = freed.held.saturating_sub(held) >= bytes / 2;
        if was_wrong {
            self.believed.retain(|it| *it != sign);
        }
        if now - at > self.idle || was_wrong {
            self.early = None;
        }
    }
}
