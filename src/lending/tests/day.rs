//! A day of a machine with 8 GPUs, to which 64 programs come, or 160: what waiting, utilisation and moved bytes come of gpupool's rules, beside first come, first served, and
//! nvshare's exclusive turns. `GPUPOOL_FLEET_DAY=1 cargo test --release -p gpupool-lending --test day -- --nocapture` prints the tables of `tests/bench/RESULTS.md`.
//!
//! Who gives way, how much and when it comes back is decided by this crate, as in the library. All else is a model, in steps of a second:
//!
//! - **Jobs** have the form of published traces, by a fixed seed; no trace is read. Run times are log-normal with the median and the 90th percentile of
//!   Alibaba's PAI (23 min, 4.5 h; Weng et al., NSDI 2022), cut at 12 h. Arrivals follow the day, with the most in the afternoon. Of the memory of its GPU
//!   a job needs log-normally much, 55 % of the jobs at most half (Cankur et al., arXiv 2502.18680), cut at 1.8 times. A job keeps its GPU busy
//!   for 20 to 85 % of its time alone, about half in the mean, as Jeon et al. (ATC 2019) saw in Philly. It has 0.7 of its memory at once and the rest in
//!   phases of 10 to 30 min. A quarter has priority 80, half 50, a quarter 20: assumed.
//! - **Sharing a GPU**: who keeps it busy for more than all of the time together is slowed in proportion.
//! - **Far memory** slows a job by 4.6 times the square of the part on other GPUs and 21.6 times the square of that on the host: a curve through what was
//!   measured with `GPUPOOL_MOVE=auto` (1.10, 1.57 and 2.0 to 2.3 at 1.2, 1.56 and 2 times the GPU, and 1.6 with the host alone at 1.2).
//! - **Moves** stop their job for bytes by 370 GB/s between GPUs and 50 GB/s to and from the host.
//! - **Turns** last 30 s; what the next one has not on the GPU comes at 50 GB/s, and others' memory leaves for it.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use gpupool_lending::{Guard, Stake, Terms, in_order, next_round, room, terms};
use std::time::Duration;

const GIB: u64 = 1 << 30;
const GPUS: usize = 8;
const MEMORY: u64 = 80 * GIB;
const RESERVE: u64 = GIB;
const DAY: u64 = 24 * 3600;
const TURN: u64 = 30;
const PEER_RATE: f64 = 370e9;
const HOST_RATE: f64 = 50e9;

/// SplitMix64: the same numbers on every machine.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// From 0 to 1.
    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Of the normal distribution, by the sum of twelve.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.part()).sum::<f64>() - 6.0
    }
}

/// What is known of a job before it runs.
#[derive(Clone, Debug)]
struct Job {
    arrives: u64,
    /// Seconds that it takes alone.
    alone: f64,
    memory: u64,
    busy: f64,
    priority: u32,
    phase: u64,
}

fn jobs(seed: u64, count: usize) -> Vec<Job> {
    let mut numbers = Numbers(seed);
    let mut jobs: Vec<Job> = (0..count)
        .map(|_| {
            // Most come at three in the afternoon, fewest at three in the night.
            let arrives = loop {
                let hour = 24.0 * numbers.part();
                let rate = 0.55 - 0.45 * (std::f64::consts::TAU * (hour - 3.0) / 24.0).cos();
                if numbers.part() < rate {
                    break (hour * 3600.0) as u64;
                }
            };
            let alone = (1380.0 * (1.922 * numbers.normal()).exp()).clamp(60.0, 12.0 * 3600.0);
            let part = (0.452 * (0.8 * numbers.normal()).exp()).clamp(0.02, 1.8);
            let priority = [20, 50, 50, 80][(numbers.next() % 4) as usize];
            let busy = 0.2 + 0.65 * numbers.part();
            let phase = 600 + numbers.next() % 1200;
            Job { arrives, alone, memory: (part * MEMORY as f64) as u64 >> 21 << 21, busy, priority, phase }
        })
        .collect();
    jobs.sort_by_key(|job| job.arrives);
    jobs
}

/// A job that has come.
struct Running {
    job: Job,
    started: Option<u64>,
    ended: Option<u64>,
    /// Seconds of its time alone that are done.
    done: f64,
    /// Seconds for which it is stopped yet.
    stopped: f64,
    home: usize,
    on: [u64; GPUS],
    on_host: u64,
    /// By GPU: when something came back there, how long what is given stays away, and until when nothing comes back.
    guards: [(Option<u64>, Guard, u64); GPUS],
}

impl Running {
    fn new(job: Job) -> Self {
        let guards = [(None, Guard::default(), 0); GPUS];
        Self { job, started: None, ended: None, done: 0.0, stopped: 0.0, home: 0, on: [0; GPUS], on_host: 0, guards }
    }

    fn runs(&self) -> bool {
        self.started.is_some() && self.ended.is_none()
    }

    fn held(&self) -> u64 {
        self.on.iter().sum::<u64>() + self.on_host
    }

    /// What it wants to have by now: less in every second phase.
    fn wants(&self) -> u64 {
        let is_all = (self.done as u64 / self.job.phase) % 2 == 1;
        if is_all { self.job.memory } else { self.job.memory / 10 * 7 }
    }

    fn slowdown(&self) -> f64 {
        let all = self.held().max(1) as f64;
        let on_peers = self.held() - self.on_host - self.on[self.home];
        let (peers, host) = (on_peers as f64 / all, self.on_host as f64 / all);
        1.0 + 4.6 * peers * peers + 21.6 * host * host
    }

    /// Works for a second with this part of its GPU; how long it kept it busy.
    fn work(&mut self, part: f64) -> f64 {
        let free = 1.0 - self.stopped.min(1.0);
        self.stopped = (self.stopped - 1.0).max(0.0);
        let done = free * part / self.slowdown();
        self.done += done;
        done * self.job.busy
    }
}

/// Who runs where and when.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    /// First come, first served: a GPU each, or two for who needs more than one has.
    Exclusive,
    /// The same, with as many on a GPU as its memory holds.
    Packed,
    /// All at once on managed memory, one at a time on each GPU.
    Turns,
    /// All at once, with all memory of the machine.
    Pool { recalls: bool, priorities: bool },
    /// With all memory of the machine, first come, first served, as long as its GPUs hold all.
    Queued,
}

struct Machine {
    all: Vec<Running>,
    taken: [u64; GPUS],
    moved: u64,
    busy: f64,
    used: f64,
    /// Of [`Rule::Turns`]: by GPU, whose turn it is and until when.
    turns: [(usize, u64); GPUS],
}

impl Machine {
    fn free(&self, gpu: usize) -> u64 {
        MEMORY - self.taken[gpu]
    }

    fn put(&mut self, number: usize, gpu: usize, bytes: u64) {
        self.all[number].on[gpu] += bytes;
        self.taken[gpu] += bytes;
    }

    fn take(&mut self, number: usize, gpu: usize, bytes: u64) {
        self.all[number].on[gpu] -= bytes;
        self.taken[gpu] -= bytes;
    }

    /// Its time alone is done.
    fn end(&mut self, now: u64, number: usize) {
        if self.all[number].done >= self.all[number].job.alone {
            (0..GPUS).for_each(|gpu| self.take(number, gpu, self.all[number].on[gpu]));
            (self.all[number].ended, self.all[number].on_host) = (Some(now + 1), 0);
        }
    }

    /// The other GPU with the most room beside the reserve.
    fn roomiest(&self, but: Option<usize>) -> (usize, u64) {
        let rooms = (0..GPUS).filter(|gpu| Some(*gpu) != but).map(|gpu| (gpu, self.free(gpu).saturating_sub(RESERVE)));
        rooms.max_by_key(|(gpu, free)| (*free, GPUS - gpu)).unwrap()
    }

    /// Where a person would start it: where the most memory is free, and of these where the fewest run.
    fn home_for_one(&self) -> usize {
        let count = |gpu| self.all.iter().filter(|job| job.runs() && job.home == gpu).count();
        (0..GPUS).max_by_key(|gpu| (self.free(*gpu) / GIB, GPUS - count(*gpu), GPUS - gpu)).unwrap()
    }

    /// Room for so many bytes, first on other GPUs and then on the host.
    fn put_elsewhere(&mut self, number: usize, mut bytes: u64) -> f64 {
        let mut seconds = 0.0;
        let home = self.all[number].home;
        while bytes > 0 {
            let (gpu, free) = self.roomiest(Some(home));
            let part = free.min(bytes);
            if part == 0 {
                self.all[number].on_host += bytes;
                return seconds + bytes as f64 / HOST_RATE;
            }
            self.put(number, gpu, part);
            bytes -= part;
            seconds += part as f64 / PEER_RATE;
        }
        seconds
    }

    fn allocate(&mut self, now: u64, number: usize, bytes: u64, recalls: bool) {
        let gpu = self.all[number].home;
        let free = self.free(gpu).saturating_sub(RESERVE);
        if free < bytes && recalls {
            self.recall(now, number, gpu, bytes - free);
        }
        let near = self.free(gpu).saturating_sub(RESERVE).min(bytes);
        self.put(number, gpu, near);
        // New memory is not moved.
        self.put_elsewhere(number, bytes - near);
    }

    /// Asks others for memory of a GPU, as `src/shim/recall/ask.rs` does.
    fn recall(&mut self, now: u64, asker: usize, gpu: usize, bytes: u64) {
        let priority = self.all[asker].job.priority;
        let has = |number: &usize| *number != asker && self.all[*number].runs();
        let stakes = (0..self.all.len()).filter(has).map(|number| (self.stake(number, gpu), number));
        let mut others = in_order(stakes, priority);
        let mut freed = 0;
        while freed < bytes && others.first().is_some_and(|offer| offer.bytes > 0) {
            for (offer, share) in next_round(&mut others, bytes - freed, 0) {
                freed += self.give(now, offer.who, gpu, share, priority);
            }
        }
    }

    fn stake(&self, number: usize, gpu: usize) -> Stake {
        let job = &self.all[number];
        let (lent, own) = if job.home == gpu { (0, job.on[gpu]) } else { (job.on[gpu], 0) };
        Stake { priority: job.job.priority, lent, own, borrows: false }
    }

    /// One gives way, as `src/shim/recall/give.rs` does.
    fn give(&mut self, now: u64, number: usize, gpu: usize, bytes: u64, asker: u32) -> u64 {
        let job = &mut self.all[number];
        let Some(Terms { lent, floor }) = terms(job.job.priority, asker, 0) else { return 0 };
        let there = if lent && job.home == gpu { 0 } else { job.on[gpu].saturating_sub(floor) };
        let bytes = bytes.min(there);
        if bytes == 0 {
            return 0;
        }
        let (came, guard, until) = &mut job.guards[gpu];
        let time = came.map_or(gpupool_lending::GUARD, |came| guard.asked(Duration::from_secs(now - came)));
        *until = now + time.as_secs();
        // Who works there has its memory elsewhere; who only borrowed takes it home, or to where there is room.
        let home = self.all[number].home;
        let room = self.free(home).saturating_sub(RESERVE);
        let back = if home == gpu { 0 } else { bytes.min(room) };
        self.put(number, home, back);
        // What leaves is no room for itself.
        let others = self.free(gpu);
        self.put(number, gpu, others);
        let seconds = back as f64 / PEER_RATE + self.put_elsewhere(number, bytes - back);
        self.take(number, gpu, others + bytes);
        self.all[number].stopped += seconds;
        self.moved += bytes;
        bytes
    }

    /// What a program frees lies anywhere.
    fn free_some(&mut self, number: usize, bytes: u64) {
        let (held, mut left) = (self.all[number].held(), bytes);
        for gpu in 0..GPUS {
            let part = (u128::from(self.all[number].on[gpu]) * u128::from(bytes) / u128::from(held.max(1))) as u64;
            self.take(number, gpu, part);
            left -= part;
        }
        let host = left.min(self.all[number].on_host);
        self.all[number].on_host -= host;
        left -= host;
        for gpu in 0..GPUS {
            let part = left.min(self.all[number].on[gpu]);
            self.take(number, gpu, part);
            left -= part;
        }
    }

    /// What lies elsewhere comes home where its time is over and there is room, for a twentieth of the time.
    fn take_back(&mut self, now: u64, number: usize) {
        let home = self.all[number].home;
        if now < self.all[number].guards[home].2 {
            return;
        }
        let mut may = room(self.free(home), RESERVE, u64::MAX);
        let (mut came, mut seconds) = (0, 0.0);
        for gpu in (0..GPUS).filter(|gpu| *gpu != home) {
            let part = self.all[number].on[gpu].min(may).min((0.05 * PEER_RATE) as u64);
            self.take(number, gpu, part);
            (may, came, seconds) = (may - part, came + part, seconds + part as f64 / PEER_RATE);
        }
        let part = self.all[number].on_host.min(may).min((0.05 * HOST_RATE) as u64);
        self.all[number].on_host -= part;
        (came, seconds) = (came + part, seconds + part as f64 / HOST_RATE);
        if came > 0 {
            self.put(number, home, came);
            let job = &mut self.all[number];
            job.stopped += seconds;
            self.moved += came;
            let (when, guard, _) = &mut job.guards[home];
            *when = Some(now);
            guard.came_back();
        }
    }

    /// Starts who may start.
    fn start(&mut self, now: u64, rule: Rule) {
        for number in 0..self.all.len() {
            let job = &self.all[number];
            if job.job.arrives > now {
                break;
            }
            if job.started.is_some() {
                continue;
            }
            let memory = job.job.memory;
            match rule {
                Rule::Exclusive | Rule::Packed => {
                    let lies = |gpu: &usize| self.free(*gpu) == MEMORY;
                    let empty: Vec<usize> = (0..GPUS).filter(lies).collect();
                    let alone = rule == Rule::Exclusive || memory > MEMORY - RESERVE;
                    let count = if memory > MEMORY - RESERVE { 2 } else { 1 };
                    let homes = if alone {
                        empty.into_iter().take(count).collect()
                    } else {
                        let fits = (0..GPUS).filter(|gpu| self.free(*gpu).saturating_sub(RESERVE) >= memory);
                        // The fullest that has room.
                        fits.min_by_key(|gpu| self.free(*gpu)).into_iter().collect::<Vec<_>>()
                    };
                    if homes.len() < count {
                        // Nobody overtakes.
                        return;
                    }
                    homes.iter().for_each(|home| self.put(number, *home, if alone { MEMORY } else { memory }));
                    (self.all[number].home, self.all[number].started) = (homes[0], Some(now));
                }
                Rule::Turns => {
                    let count = |gpu: &usize| self.all.iter().filter(|job| job.runs() && job.home == *gpu).count();
                    let home = (0..GPUS).min_by_key(count).unwrap();
                    (self.all[number].home, self.all[number].started) = (home, Some(now));
                }
                Rule::Pool { .. } | Rule::Queued => {
                    let running = self.all.iter().filter(|job| job.runs());
                    let all = memory + running.map(|job| job.job.memory).sum::<u64>();
                    if rule == Rule::Queued && all > GPUS as u64 * (MEMORY - RESERVE) {
                        return;
                    }
                    let home = self.home_for_one();
                    (self.all[number].home, self.all[number].started) = (home, Some(now));
                }
            }
        }
    }

    /// One second.
    fn step(&mut self, now: u64, rule: Rule) {
        self.start(now, rule);
        let running: Vec<usize> = (0..self.all.len()).filter(|number| self.all[*number].runs()).collect();
        let recalls = match rule {
            Rule::Pool { recalls, .. } => Some(recalls),
            Rule::Queued => Some(true),
            _ => None,
        };
        if let Some(recalls) = recalls {
            for number in &running {
                let (held, wants) = (self.all[*number].held(), self.all[*number].wants());
                if wants > held {
                    self.allocate(now, *number, wants - held, recalls);
                } else if held > wants {
                    self.free_some(*number, held - wants);
                }
                self.take_back(now, *number);
            }
        }
        for gpu in 0..GPUS {
            let here: Vec<usize> = running.iter().copied().filter(|number| self.all[*number].home == gpu).collect();
            if rule == Rule::Turns {
                self.turn(now, gpu, &here);
                continue;
            }
            let wanted: f64 = here.iter().map(|number| self.all[*number].job.busy).sum();
            for number in here {
                // Who has two GPUs or one alone reads nothing from afar.
                let share = if rule == Rule::Exclusive { 1.0 } else { 1.0 / wanted.max(1.0) };
                let job = &mut self.all[number];
                if recalls.is_none() {
                    job.stopped = 0.0;
                    let done = share.min(1.0);
                    job.done += done;
                    self.busy += if now < DAY { done * job.job.busy } else { 0.0 };
                } else {
                    let busy = job.work(share);
                    self.busy += if now < DAY { busy } else { 0.0 };
                }
                self.end(now, number);
            }
        }
        let used = |job: &Running| match rule {
            Rule::Exclusive | Rule::Packed => job.job.memory.min(job.held()),
            _ => job.held() - job.on_host,
        };
        self.used += if now < DAY { running.iter().map(|number| used(&self.all[*number]) as f64).sum() } else { 0.0 };
        if now.is_multiple_of(600) {
            for gpu in 0..GPUS {
                let taken: u64 = self.all.iter().map(|job| job.on[gpu]).sum();
                assert!(taken == self.taken[gpu] && taken <= MEMORY, "{rule:?}: GPU {gpu} holds {taken} at {now}");
            }
        }
    }

    /// A second of the one whose turn it is.
    fn turn(&mut self, now: u64, gpu: usize, here: &[usize]) {
        let Some(first) = here.first() else { return };
        let (whose, until) = self.turns[gpu];
        if now >= until || !here.contains(&whose) {
            let next = here.iter().copied().find(|number| *number > whose).unwrap_or(*first);
            self.turns[gpu] = (next, now + TURN);
        }
        let number = self.turns[gpu].0;
        // What it wants is on the GPU first, as far as that holds it; others' memory leaves for it, of those who wait longest.
        let wants = self.all[number].wants();
        let fits = wants.min(MEMORY - RESERVE);
        let job = &mut self.all[number];
        let missing = fits.saturating_sub(job.on[gpu]);
        let fresh = wants.saturating_sub(job.held());
        if job.held() > wants {
            let more = job.held() - wants;
            self.free_some(number, more);
        }
        let lacking = missing.saturating_sub(self.free(gpu).saturating_sub(RESERVE));
        let mut left = lacking;
        for other in here.iter().copied().filter(|other| *other != number) {
            let part = self.all[other].on[gpu].min(left);
            self.take(other, gpu, part);
            self.all[other].on_host += part;
            left -= part;
            self.moved += part;
        }
        let job = &mut self.all[number];
        let near = missing - left;
        let copied = near.saturating_sub(fresh).min(job.on_host);
        job.stopped += (lacking - left + copied) as f64 / HOST_RATE;
        self.put(number, gpu, near);
        self.moved += copied;
        let job = &mut self.all[number];
        job.on_host = wants - job.on[gpu].min(wants);
        let busy = job.work(1.0);
        self.busy += if now < DAY { busy } else { 0.0 };
        self.end(now, number);
    }
}

/// What came of a day.
#[derive(Debug, PartialEq)]
struct Outcome {
    /// Seconds from coming to beginning.
    waited: Vec<f64>,
    /// Time from coming to the end, in times of the time alone, with the priority.
    stretch: Vec<(u32, f64)>,
    /// Parts of 24 hours.
    busy: f64,
    used: f64,
    moved: u64,
    /// Hours until the last has ended.
    over: f64,
}

fn play(jobs: &[Job], rule: Rule) -> Outcome {
    let equal = matches!(rule, Rule::Pool { priorities: false, .. });
    let all =
        jobs.iter().map(|job| Running::new(Job { priority: if equal { 50 } else { job.priority }, ..job.clone() }));
    let mut machine = Machine {
        all: all.collect(),
        taken: [0; GPUS],
        moved: 0,
        busy: 0.0,
        used: 0.0,
        turns: [(usize::MAX, 0); GPUS],
    };
    let mut now = 0;
    while machine.all.iter().any(|job| job.ended.is_none()) || now < DAY {
        machine.step(now, rule);
        now += 1;
        assert!(now < 20 * DAY, "{rule:?}: it never ends");
    }
    let ended = |job: &Running| (job.ended.unwrap() - job.job.arrives) as f64 / job.job.alone;
    Outcome {
        waited: machine.all.iter().map(|job| (job.started.unwrap() - job.job.arrives) as f64).collect(),
        stretch: machine.all.iter().zip(jobs).map(|(job, known)| (known.priority, ended(job))).collect(),
        busy: machine.busy / (GPUS as f64 * DAY as f64),
        used: machine.used / (GPUS as f64 * MEMORY as f64 * DAY as f64),
        moved: machine.moved,
        over: machine.all.iter().map(|job| job.ended.unwrap()).max().unwrap() as f64 / 3600.0,
    }
}

fn mean(all: impl Iterator<Item = f64> + Clone) -> f64 {
    all.clone().sum::<f64>() / all.count() as f64
}

fn percentile(all: impl Iterator<Item = f64>, part: f64) -> f64 {
    let mut all: Vec<f64> = all.collect();
    all.sort_by(f64::total_cmp);
    all[((all.len() - 1) as f64 * part).round() as usize]
}

impl Outcome {
    fn stretch_of(&self, priority: u32) -> impl Iterator<Item = f64> + Clone {
        self.stretch.iter().filter(move |(known, _)| *known == priority).map(|(_, stretch)| *stretch)
    }

    fn row(&self, name: &str) -> String {
        let minutes = |seconds: f64| seconds / 60.0;
        let all = self.stretch.iter().map(|(_, stretch)| *stretch);
        format!(
            "| {name} | {:.0} % | {:.0} % | {:.0} / {:.0} | {:.2} / {:.1} | {:.2} | {:.2} | {:.2} | {:.1} | {:.1} |",
            100.0 * self.busy,
            100.0 * self.used,
            minutes(mean(self.waited.iter().copied())),
            minutes(percentile(self.waited.iter().copied(), 0.95)),
            percentile(all.clone(), 0.5),
            percentile(all, 0.95),
            mean(self.stretch_of(80)),
            mean(self.stretch_of(50)),
            mean(self.stretch_of(20)),
            self.moved as f64 / (1u64 << 40) as f64,
            self.over,
        )
    }
}

const SEED: u64 = 16;

/// The rules, as the tables call them.
const RULES: [(&str, Rule); 7] = [
    ("first come, first served, a GPU each", Rule::Exclusive),
    ("the same, as many as memory holds", Rule::Packed),
    ("nvshare's turns of 30 s", Rule::Turns),
    ("gpupool, nobody gives way", STILL),
    ("gpupool, all of one priority", EQUALS),
    ("gpupool", POOL),
    ("gpupool, begun in turn while the GPUs hold all", Rule::Queued),
];

const POOL: Rule = Rule::Pool { recalls: true, priorities: true };
const STILL: Rule = Rule::Pool { recalls: false, priorities: true };
const EQUALS: Rule = Rule::Pool { recalls: true, priorities: false };

/// Prints the tables where `GPUPOOL_FLEET_DAY` is set.
#[test]
fn on_a_busy_day_who_matters_has_its_memory_near() {
    let jobs = jobs(SEED, 160);
    let [gives, equals] = [POOL, EQUALS].map(|rule| play(&jobs, rule));
    let of = |outcome: &Outcome, priority| mean(outcome.stretch_of(priority));
    assert!(2.0 * of(&gives, 80) < of(&equals, 80), "{} {}", of(&gives, 80), of(&equals, 80));
    assert!(of(&gives, 80) < of(&gives, 50) && of(&gives, 50) < of(&gives, 20));
    if std::env::var_os("GPUPOOL_FLEET_DAY").is_some() {
        [64, 160].into_iter().for_each(table);
        [64, 96, 128, 160].into_iter().for_each(of_seeds);
    }
}

#[test]
fn on_a_quiet_day_nobody_waits_and_little_moves() {
    let jobs = jobs(SEED, 64);
    let [gives, again, queued, packed] = [POOL, POOL, Rule::Queued, Rule::Packed].map(|rule| play(&jobs, rule));
    assert_eq!(gives, again, "the same day twice");
    assert!(gives.waited.iter().chain(&queued.waited).all(|waited| *waited == 0.0));
    assert!(packed.waited.iter().any(|waited| *waited > 0.0));
    assert!(gives.moved < 1 << 40, "{}", gives.moved);
}

fn table(count: usize) {
    let jobs = jobs(SEED, count);
    let alone: f64 = jobs.iter().map(|job| job.alone).sum::<f64>() / 3600.0;
    let large = jobs.iter().filter(|job| job.memory > MEMORY - RESERVE).count();
    println!("{count} jobs of {alone:.0} hours, {large} of which need more memory than a GPU has");
    println!(
        "| rule | GPUs busy | memory in use | waited, min, mean / P95 | time, median / P95 | mean of priority 80 | 50 | 20 | moved, TiB | over, h |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for (name, rule) in RULES {
        println!("{}", play(&jobs, rule).row(name));
    }
}

/// The same for eight other seeds: the least, the median and the most of each number.
fn of_seeds(count: usize) {
    println!("{count} jobs, seeds 1 to 8");
    println!(
        "| rule | waited, min, mean | time, median | P95 | mean of priority 80 | moved, TiB | over, h | GPUs busy, % | memory in use, % |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let days: Vec<Vec<Job>> = (1..=8).map(|seed| jobs(seed, count)).collect();
    for (name, rule) in RULES {
        let played: Vec<Outcome> = days.iter().map(|jobs| play(jobs, rule)).collect();
        let of = |number: &dyn Fn(&Outcome) -> f64| {
            let all = || played.iter().map(number);
            format!("{:.1}, {:.1}, {:.1}", percentile(all(), 0.0), percentile(all(), 0.5), percentile(all(), 1.0))
        };
        let time = |part| move |day: &Outcome| percentile(day.stretch.iter().map(|(_, stretch)| *stretch), part);
        println!(
            "| {name} | {} | {} | {} | {} | {} | {} | {} | {} |",
            of(&|day| mean(day.waited.iter().copied()) / 60.0),
            of(&time(0.5)),
            of(&time(0.95)),
            of(&|day| mean(day.stretch_of(80))),
            of(&|day| day.moved as f64 / (1u64 << 40) as f64),
            of(&|day| day.over),
            of(&|day| 100.0 * day.busy),
            of(&|day| 100.0 * day.used),
        );
    }
}
