//! One process: what its records say, summed up as they are read.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gpupool_events::{
    AskedOf, ContextCreate, ContextUse, CudaInit, Event, FindingMade, Level, LimitSet, ModuleLoad, ProcessExit,
    ProcessStart, Record, Site, TierReader,
};

use super::commands::Commands;
use super::grown::Grown;
use super::holders::Holders;
use super::kept::{LeftOut, keep};
use super::map::Map;
use super::moves::Moves;
use super::pinned::Pinned;
use super::refusals::Refusals;
use super::timeline::Timeline;

/// Places in the program that are kept, and groups of modules.
const KEPT_SITES: usize = 2048;
/// Places that memory lies at. A machine has a few; a log may say anything.
const KEPT_PLACES: usize = 64;

/// What memory is called by where it lies: on the GPU that uses it, on another one, on the host.
pub const NEAR_AND_FAR: [&str; 3] = ["near", "peers", "host"];

/// One process of one log.
#[derive(Default)]
pub struct Process {
    /// Its number in the order in which processes were met, from 0. Where there are several it stands elsewhere in the list in the end.
    pub met: usize,
    /// The log it comes from, counted from 0.
    pub log: usize,
    /// The process's number.
    pub pid: u32,
    /// Time of the first and of the last record, seconds since 1970.
    pub first: f64,
    pub last: f64,
    /// When the process itself started, where a record says how long ago that was: the library is there only some time later.
    started: Option<f64>,
    pub start: Option<ProcessStart>,
    pub exit: Option<ProcessExit>,
    /// It became another program by `exec`, which is a process of its own here.
    pub replaced: bool,
    /// Why there was no room for its last lines.
    pub full: Option<String>,
    /// Lines that are missing for want of room, and why.
    pub lost: Option<(u64, String)>,
    pub init: Option<CudaInit>,
    pub contexts: Vec<Context>,
    /// Findings and how often each was made.
    pub findings: Vec<(FindingMade, u64)>,
    pub limits: Vec<LimitSet>,
    pub modules: BTreeMap<ModuleGroup, ModuleSum>,
    pub sites: HashMap<Site, SiteSum>,
    /// Bytes in use over time, by place.
    pub levels: BTreeMap<String, Timeline>,
    /// Bytes that the pool held over time, used or not, by place.
    pub held: BTreeMap<String, Timeline>,
    /// Bytes in use over time, at all places together.
    pub all: Timeline,
    /// GPUs that only lent memory and were kept awake (`GPUPOOL_LENDERS`).
    pub kept_awake: BTreeSet<u32>,
    /// Bytes in blocks of each name that the program gave.
    pub named: BTreeMap<String, Timeline>,
    /// Who holds memory, where the log has a line for each block.
    pub holders: Holders,
    /// Places in the program that made the pool grow.
    pub grown: Grown,
    /// What the pool's addresses are made of.
    pub map: Map,
    /// Memory that moved.
    pub moves: Moves,
    /// Memory that left a GPU for others, by that and why: how often, and bytes.
    pub given: BTreeMap<(u32, String), (u64, u64)>,
    /// Whom it asked for memory of a GPU, by that and the number of who was asked.
    pub asked: BTreeMap<(u32, u32), AskedSum>,
    /// What commands did to it.
    pub commands: Commands,
    /// What it was told OUT_OF_MEMORY for.
    pub refusals: Refusals,
    /// Bytes in use over time, by where they lay as seen from the GPUs that use them; empty where nothing ever lay elsewhere.
    pub residence: BTreeMap<&'static str, Timeline>,
    /// Bytes in use over time while nothing had ever lain far: all of it was near, and `pool.residence` is told only from then on.
    still_near: Timeline,
    /// The last of these levels and its time. What makes the first memory far is in the level that comes just before the first `pool.residence`, so
    /// that one counts only where another level follows.
    last_near: Option<(f64, u64)>,
    /// Functions that lost time by far memory, by GPU and name: what was told of each last.
    pub readers: BTreeMap<(u32, String), TierReader>,
    /// Pinned host memory.
    pub pinned: Pinned,
    /// Other warnings and errors, the first ones as they were written.
    pub warnings: Vec<String>,
    /// What was beyond the number kept: contexts, findings, limits, module groups, sites, warnings.
    pub more: LeftOut,
}

/// What another process was asked for and gave.
#[derive(Default)]
pub struct AskedSum {
    /// How often.
    pub times: u64,
    /// Bytes that it was asked for, in all of these.
    pub bytes: u64,
    pub freed: u64,
    /// Why it gave nothing, or no more: what it answered, and how often.
    pub whys: BTreeMap<String, u64>,
}

impl AskedSum {
    /// Reasons that are kept: a process has a few, in its own words.
    const KEPT_WHYS: usize = 8;

    fn add(&mut self, row: AskedOf) {
        self.times += 1;
        self.bytes = self.bytes.saturating_add(row.bytes);
        self.freed = self.freed.saturating_add(row.freed);
        if let Some(why) = row.why.filter(|why| self.whys.len() < Self::KEPT_WHYS || self.whys.contains_key(why)) {
            *self.whys.entry(why).or_default() += 1;
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, with a last word.
    Exit,
    /// By becoming another program.
    Exec,
    /// There was no room for its end.
    LogFull,
    /// The log just stops.
    None,
}

impl End {
    /// In a table and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            End::Exit => "exit",
            End::Exec => "exec",
            End::LogFull => "log full",
            End::None => "none",
        }
    }

    /// What the word means, where that is not plain.
    pub fn meaning(self) -> Option<&'static str> {
        match self {
            End::Exit => None,
            End::Exec => Some("the process became another program, which is the next one of its number."),
            End::LogFull => Some("there was no room for the rest of the log; what came after is not known."),
            End::None => Some(
                "the log stops without a last word; the process was killed, left by _exit, is still running, or GPUPOOL_LOG \
                 leaves that line out.",
            ),
        }
    }
}

/// A context and what became of it.
pub struct Context {
    pub made: ContextCreate,
    pub used: Option<ContextUse>,
    /// The call that destroyed it.
    pub gone: Option<String>,
}

/// Modules are told apart by their GPU, their kind and the file that carries or loads them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModuleGroup {
    pub device: Option<u32>,
    pub kind: String,
    pub file: String,
}

/// Modules of a group, together.
#[derive(Clone, Debug, Default)]
pub struct ModuleSum {
    pub modules: u64,
    pub kernels: u64,
    pub bytes: u64,
    pub memory: i64,
    pub seconds: f64,
    pub eager: u64,
    pub uses_malloc: bool,
}

/// What one line of the program caused.
#[derive(Clone, Debug, Default)]
pub struct SiteSum {
    pub contexts: u64,
    pub modules: u64,
    /// Bytes of GPU memory that these took.
    pub memory: i64,
    /// Seconds in loading modules.
    pub seconds: f64,
}

impl Context {
    /// Whether anything was done in it; `None` where the log does not say, because its process was killed or is running.
    pub fn was_used(&self) -> Option<bool> {
        self.used
            .as_ref()
            .map(|used| used.last_use.is_some() || [used.allocations, used.launches, used.copies] != [0; 3])
    }
}

impl Process {
    /// A process whose first record is this.
    pub fn new(met: usize, log: usize, record: &Record) -> Process {
        Process { met, log, pid: record.pid, first: record.t, last: record.t, ..Process::default() }
    }

    /// The host that it ran on, where it is a rank of a job.
    pub fn host(&self) -> Option<&str> {
        self.start.as_ref().and_then(|start| start.host.as_deref())
    }

    /// What its times count from, seconds since 1970: its start, or its first record where nothing tells.
    pub fn origin(&self) -> f64 {
        self.started.unwrap_or(self.first)
    }

    fn started_before(&mut self, seconds: f64, now: f64) {
        let start = now - seconds;
        if self.started.is_none() && start.is_finite() {
            self.started = Some(start.min(self.first));
        }
    }

    /// How it ended, as far as its log tells.
    pub fn end(&self) -> End {
        match (&self.exit, self.replaced, &self.full) {
            (Some(_), ..) => End::Exit,
            (None, true, _) => End::Exec,
            (None, false, Some(_)) => End::LogFull,
            (None, false, None) => End::None,
        }
    }

    /// GPUs that it had memory on and never a context, and that nothing was done about.
    pub fn left_asleep(&self) -> BTreeSet<u32> {
        let told = self.levels.iter().filter(|(_, line)| line.peak() > 0).map(|(place, _)| place.as_str());
        let peaks = self.exit.iter().flat_map(|exit| &exit.peak).filter(|peak| peak.peak_used > 0);
        let gpus = told
            .chain(peaks.map(|peak| peak.place.as_str()))
            .filter_map(|place| place.strip_prefix("gpu")?.parse().ok());
        let has_context = |gpu: &u32| self.contexts.iter().any(|context| context.made.device == *gpu);
        gpus.filter(|gpu| !has_context(gpu) && !self.kept_awake.contains(gpu)).collect()
    }

    /// The most that lay at each of [`NEAR_AND_FAR`]; of a process of which nothing ever lay far, all that it had in use was near.
    pub fn peak_of(&self, place: &str) -> u64 {
        match self.residence.get(place) {
            Some(line) => line.peak(),
            None if self.residence.is_empty() && place == NEAR_AND_FAR[0] => self.all.peak(),
            None => 0,
        }
    }

    /// Functions that lost time by far memory, those that lost most first.
    pub fn worst_readers(&self) -> Vec<&TierReader> {
        let mut readers: Vec<&TierReader> = self.readers.values().collect();
        readers.sort_by(|a, b| b.lost.total_cmp(&a.lost));
        readers
    }

    /// Takes in one record of this process.
    pub fn add(&mut self, record: Record) {
        self.first = self.first.min(record.t);
        self.last = self.last.max(record.t);
        match record.event {
            Event::ProcessStart(start) => self.start = Some(start),
            Event::ProcessExit(exit) => {
                // The level is told in steps; each place's own peak is exact. That of all places at once is no less than any of theirs.
                for peak in &exit.peak {
                    if let Some(level) = self.levels.get_mut(&peak.place) {
                        level.was_at_least(peak.peak_used);
                        self.all.was_at_least(peak.peak_used);
                    }
                }
                self.exit = Some(exit);
            }
            Event::LogFull(full) => self.full = Some(full.why),
            Event::LogLost(lost) => {
                // There was room again.
                self.full = None;
                let before = self.lost.as_ref().map_or(0, |(lines, _)| *lines);
                self.lost = Some((before.saturating_add(lost.lines), lost.why));
            }
            Event::CudaInit(init) => {
                self.started_before(init.seconds, record.t);
                self.init = Some(init);
            }
            Event::ContextCreate(made) => {
                self.started_before(made.seconds, record.t);
                self.context(made);
            }
            Event::ContextUse(used) => {
                if let Some(context) = self.find_context(used.id, used.device) {
                    context.used = Some(used);
                }
            }
            Event::ContextDestroy(gone) => {
                if let Some(context) = self.find_context(gone.id, gone.device) {
                    context.gone = Some(gone.call);
                }
            }
            Event::ModuleLoad(module) => self.module(module),
            Event::LimitSet(limit) => keep(&mut self.limits, limit, "limits", &mut self.more),
            Event::FindingMade(made) => self.finding(made),
            Event::PoolLevel(level) => {
                let now = record.t - self.origin();
                let all = level.places.iter().fold(0, |all: u64, place| all.saturating_add(place.used));
                self.all.add(now, all);
                if self.residence.is_empty()
                    && let Some((then, bytes)) = self.last_near.replace((now, all))
                {
                    self.still_near.add(then, bytes);
                }
                for place in level.places {
                    if self.levels.len() >= KEPT_PLACES && !self.levels.contains_key(&place.place) {
                        *self.more.entry("places").or_default() += 1;
                        continue;
                    }
                    self.held.entry(place.place.clone()).or_default().add(now, place.held);
                    self.levels.entry(place.place).or_default().add(now, place.used);
                }
            }
            Event::MemorySite(told) => {
                self.grown.name_site(told.id, &told.site);
                self.holders.name_site(told.id, told.site);
            }
            Event::PoolGrow(grow) => self.grown.add(grow.site, grow.bytes, 0),
            Event::PoolSpill(spill) => {
                let far = spill.on_peers.saturating_add(spill.on_host).min(spill.bytes);
                self.grown.add(spill.site, spill.bytes, far);
            }
            Event::BlockAllocate(block) => {
                let now = record.t - self.origin();
                self.holders.allocate(now, &block);
                self.map.look(now, &self.holders);
            }
            Event::PoolMap(map) => {
                self.map.change(&map.changes);
                self.map.look(record.t - self.origin(), &self.holders);
            }
            Event::BlockPlaced(placed) => {
                let now = record.t - self.origin();
                self.holders.lies(now, placed.address, &placed.places);
            }
            Event::BlockFree(block) => {
                let now = record.t - self.origin();
                self.map.look_at_peak(&self.holders);
                self.holders.free(now, block.address);
                self.map.look(now, &self.holders);
            }
            Event::BlockLabel(block) => self.holders.label(record.t - self.origin(), block.address, block.label),
            Event::BlockMove(moved) => self.moves.by_hand(moved),
            Event::TierSwap(swap) => self.moves.swap(record.t - self.origin(), swap),
            Event::TierStop(stop) => self.moves.stop(stop, &mut self.more),
            Event::TierTotal(total) => self.moves.total = Some(total),
            Event::PoolRefuse(refused) => self.refusals.of_pool(record.t, &refused),
            Event::OutOfMemory(told) => self.refusals.add(record.t, told),
            Event::PoolRepack(repack) => self.moves.repack(&repack),
            Event::ProgramSuspend(told) => {
                let now = record.t - self.origin();
                self.commands.suspended(now, told, &mut self.more);
            }
            Event::ProgramResume(told) => self.commands.resumed(record.t - self.origin(), told),
            Event::ProgramCheckpoint(told) => self.commands.image(told, &mut self.more),
            Event::GpuDrain(told) => {
                let now = record.t - self.origin();
                self.commands.drained(now, &told, &mut self.more);
            }
            Event::GpuUndrain(told) => {
                let now = record.t - self.origin();
                self.commands.undrained(now, &told, &mut self.more);
            }
            Event::RecallGive(gave) => {
                let whom = (gave.device, gave.why);
                if self.given.len() < KEPT_PLACES || self.given.contains_key(&whom) {
                    let (times, bytes) = self.given.entry(whom).or_default();
                    (*times, *bytes) = (*times + 1, bytes.saturating_add(gave.freed));
                } else {
                    *self.more.entry("given").or_default() += 1;
                }
            }
            Event::RecallAsk(ask) => {
                for row in ask.whom {
                    let whom = (ask.device, row.pid);
                    if self.asked.len() < KEPT_PLACES || self.asked.contains_key(&whom) {
                        self.asked.entry(whom).or_default().add(row);
                    } else {
                        *self.more.entry("asked").or_default() += 1;
                    }
                }
            }
            Event::PoolResidence(residence) => {
                let now = record.t - self.origin();
                if self.residence.is_empty() {
                    self.residence.insert(NEAR_AND_FAR[0], std::mem::take(&mut self.still_near));
                }
                for (place, bytes) in
                    NEAR_AND_FAR.into_iter().zip([residence.near, residence.on_peers, residence.on_host])
                {
                    self.residence.entry(place).or_default().add(now, bytes);
                }
            }
            Event::TierReader(reader) => {
                let key = (reader.home, reader.function.clone());
                if self.readers.len() < KEPT_SITES || self.readers.contains_key(&key) {
                    self.readers.insert(key, reader);
                } else {
                    *self.more.entry("functions").or_default() += 1;
                }
            }
            Event::LenderAwake(awake) => {
                self.kept_awake.insert(awake.gpu);
            }
            Event::LabelLevel(level) => {
                let now = record.t - self.origin();
                if self.named.len() < KEPT_SITES || self.named.contains_key(&level.label) {
                    self.named.entry(level.label).or_default().add(now, level.bytes);
                } else {
                    *self.more.entry("labels").or_default() += 1;
                }
            }
            Event::PinnedLevel(level) => self.pinned.level(record.t - self.origin(), &level),
            Event::PinnedReturn(returned) => self.pinned.returned(returned),
            Event::PinnedSite(site) => self.pinned.site(site, &mut self.more),
            _ if record.level <= Level::Warn => {
                keep(&mut self.warnings, record.message, "warnings", &mut self.more);
            }
            _ => {}
        }
    }

    /// Keeps a finding once, however often its line is met.
    fn finding(&mut self, made: FindingMade) {
        match self.findings.iter_mut().find(|(known, _)| *known == made) {
            Some((_, times)) => *times += 1,
            None => keep(&mut self.findings, (made, 1), "findings", &mut self.more),
        }
    }

    fn context(&mut self, made: ContextCreate) {
        if let Some(site) = &made.site {
            let sum = self.site(site);
            sum.contexts += 1;
            sum.memory = sum.memory.saturating_add(i64::try_from(made.cost.unwrap_or(0)).unwrap_or(i64::MAX));
        }
        keep(&mut self.contexts, Context { made, used: None, gone: None }, "contexts", &mut self.more);
    }

    /// By its number, or, in a log without numbers, the newest of that GPU that is still there.
    fn find_context(&mut self, id: u64, device: u32) -> Option<&mut Context> {
        let same = |context: &&mut Context| match id {
            0 => context.made.device == device && context.gone.is_none(),
            id => context.made.id == id,
        };
        self.contexts.iter_mut().rev().find(same)
    }

    fn module(&mut self, module: ModuleLoad) {
        if let Some(site) = &module.site {
            let sum = self.site(site);
            sum.modules += 1;
            sum.memory = sum.memory.saturating_add(module.memory.unwrap_or(0));
            sum.seconds += module.seconds;
        }
        let file = module.path.or(module.caller).unwrap_or_else(|| "unknown".to_owned());
        let group = ModuleGroup { device: module.device, kind: module.kind, file };
        if self.modules.len() >= KEPT_SITES && !self.modules.contains_key(&group) {
            *self.more.entry("modules").or_default() += 1;
            return;
        }
        let sum = self.modules.entry(group).or_default();
        sum.modules += 1;
        sum.kernels += u64::from(module.kernels.unwrap_or(0));
        sum.bytes = sum.bytes.saturating_add(module.bytes.unwrap_or(0));
        sum.memory = sum.memory.saturating_add(module.memory.unwrap_or(0));
        sum.seconds += module.seconds;
        sum.eager += u64::from(!module.lazy);
        sum.uses_malloc |= module.uses_malloc;
    }

    /// The sum for a place, which stands for all places that are told by the same line.
    fn site(&mut self, site: &Site) -> &mut SiteSum {
        let mut line = Site::default();
        match (site.program_frame(), site.native.first()) {
            (Some(frame), _) => line.python.push(frame.clone()),
            (None, Some(frame)) => line.native.push(frame.clone()),
            (None, None) => {}
        }
        if self.sites.len() >= KEPT_SITES && !self.sites.contains_key(&line) {
            *self.more.entry("call sites").or_default() += 1;
            line = Site::default();
        }
        self.sites.entry(line).or_default()
    }
}
