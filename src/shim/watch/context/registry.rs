//! Which contexts live, by which handles they are known, what is under way with them, and what is kept of those that ended.
//!
//! A handle is not a name for ever: a primary context has the same one in each of its lives, and the driver gives the
//! handle of a destroyed context to a later one. What tells two lives apart is the driver's number of a context
//! (`cuCtxGetId`), which is never given twice. So an entry has both, and an entry of another life is another context.
//!
//! Nothing in here calls the driver: it is all under one lock, which is never held while the driver runs.

use super::{Context, Counters, Kind};
use gpupool_cuda::{self as cuda, AtomicContext, Device, GreenContext};
use gpupool_events::Site;
use gpupool_pool::Waited;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Contexts that ended and are kept whole for the judgement at the end of the process. Of later ones, what they were used
/// for is logged when they end.
const KEPT: usize = 256;
/// Counters that lie idle before one of them is used again, so that a thread which counted a launch late does not count it
/// for another context.
const RESTING: usize = 64;

/// What is counted of one context. Never freed, because a launch on another thread may be counting here while the context
/// ends; used again for a later context instead, so there are as many as contexts lived at a time.
#[derive(Debug, Default)]
pub struct Tally {
    /// The context's id; 0 while it has none.
    pub(super) id: AtomicU64,
    /// Its handle; none while that is not known, and once it is gone.
    pub(super) handle: AtomicContext,
    pub usage: Counters,
    /// Peer access from or to it was enabled before anything was done with it.
    pub peered: AtomicBool,
    /// The last wait for its work, and whether it was the only context on its GPU then.
    pub waited: Waited,
}

/// How a context came to be, for people.
#[derive(Debug)]
pub struct Origin {
    /// What made it.
    pub call: String,
    pub site: Site,
    /// Bytes that the GPU lost with it, and whether some of it may be somebody else's.
    pub cost: Option<u64>,
    pub approximate: bool,
}

/// All that is known of one context, live or gone.
#[derive(Clone, Debug)]
pub struct Record {
    pub id: u64,
    pub device: Device,
    pub kind: Kind,
    pub origin: Arc<Origin>,
    pub usage: Arc<Counters>,
    pub peered: bool,
    /// The newest context when this one ended; what is newer came after it. `u64::MAX` while it lives.
    pub until: u64,
}

impl Record {
    /// Whether both lived at some moment.
    pub fn met(&self, other: &Self) -> bool {
        self.id.max(other.id) <= self.until.min(other.until)
    }
}

/// What all contexts of the process did together.
#[derive(Clone, Copy, Debug)]
pub struct Totals {
    /// Allocations of device memory, the driver's and the pool's.
    pub allocations: u64,
    /// Bytes of pooled blocks that began.
    pub pooled_bytes: u64,
}

impl Totals {
    fn add(&mut self, usage: &Counters) {
        self.allocations += usage.allocations();
        self.pooled_bytes += usage.began();
    }
}

/// Which context a call is about: the handle, where it is known already, and the driver's number, where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    pub handle: Option<cuda::Context>,
    pub life: Option<u64>,
}

impl Name {
    /// Whether both are known to be of different contexts.
    fn differs(self, other: Self) -> bool {
        self.life.zip(other.life).is_some_and(|(own, other)| own != other)
    }
}

#[derive(Debug)]
struct Entry {
    context: Context,
    name: Name,
    origin: Arc<Origin>,
    /// Threads that have pushed it for a moment.
    leases: u32,
    /// Calls under way that may end it: by its handle, or as the primary context that it is. Of the latter those that could be the
    /// end when they began: a reference that is taken meanwhile may be one to the next life, which keeps this one from nothing.
    ending: u32,
}

/// What is known of a device.
#[derive(Debug, Default)]
struct OfDevice {
    /// Entries of its primary context: one, or while it ends and begins at the same time two.
    primaries: Vec<u64>,
    /// Contexts there, of either kind, how often there came to be one where there was none, and what they cost.
    live: u32,
    arrivals: u64,
    /// When there came to be one last.
    arrived: Option<Instant>,
    cost: u64,
    /// Kernels launched in those that are gone.
    gone_launches: u64,
    /// How often the primary one was seen being retained and not released.
    retained: u64,
    /// Calls under way that give one reference back, and that take all.
    releases: u64,
    resets: u64,
}

impl OfDevice {
    fn is_ending(&self) -> bool {
        self.releases + self.resets > 0
    }

    /// Whether one of those may be the end. References that nobody saw being taken make it answer yes too often.
    fn may_end(&self) -> bool {
        self.resets > 0 || self.releases > 0 && self.releases >= self.retained
    }
}

/// How a call gives up the primary context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Release,
    Reset,
}

/// The answer to a look-up.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// `settled`: no call is under way that may end it.
    Known {
        context: Context,
        settled: bool,
    },
    /// The handle is known, and by the driver's number it is another context by now: nobody saw this one end.
    Renamed(Context),
    Unknown,
}

/// The lives of a primary context that a call under way may end.
pub struct Lives {
    pub named: Vec<(u64, Name)>,
    /// Whether it could be the last release, or was a reset, when it began.
    doomed: bool,
}

/// A context that was taken out.
pub struct Ended {
    pub context: Context,
    /// Its record, where it is not kept for the judgement.
    pub unkept: Option<Record>,
}

#[derive(Debug)]
struct Green {
    device: Device,
    /// What `cuCtxFromGreenCtx` gave for it.
    handles: Vec<cuda::Context>,
}

#[derive(Debug)]
pub struct Registry {
    entries: BTreeMap<u64, Entry>,
    handles: BTreeMap<cuda::Context, Vec<u64>>,
    /// Handles that created and green contexts had which ended. They may be current on some thread still. As many as the
    /// driver ever had in use at a time, since it gives them again.
    spent: BTreeSet<cuda::Context>,
    devices: BTreeMap<Device, OfDevice>,
    /// Green contexts by their own handle, and their devices by the handle that they have as contexts. What is made in one
    /// belongs to the primary context, so there is no entry of its own: nothing of ours ever pushes such a handle.
    greens: BTreeMap<GreenContext, Green>,
    of_green: BTreeMap<cuda::Context, Device>,
    idle: VecDeque<&'static Tally>,
    /// What was counted of those that are gone.
    gone_totals: Totals,
    gone: Vec<Record>,
    last_id: u64,
}

/// The counters of recent contexts, by the last bits of their id: for look-ups at every free, without the lock.
static BY_ID: [AtomicPtr<Tally>; 256] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 256];

fn place_of(id: u64) -> &'static AtomicPtr<Tally> {
    &BY_ID[id as usize % BY_ID.len()]
}

/// The counters of a recent live context, without a lock.
#[inline]
pub fn recent(id: u64) -> Option<&'static Tally> {
    let known = place_of(id).load(Ordering::Acquire);
    // SAFETY: the place is null or has counters, which are never freed.
    let known = unsafe { known.as_ref() }?;
    (known.id.load(Ordering::Acquire) == id).then_some(known)
}

/// Whether a context with this id, or a later one in its place, was ever entered. Without a lock.
pub fn is_known_of(id: u64) -> bool {
    !place_of(id).load(Ordering::Acquire).is_null()
}

impl Registry {
    pub const fn new() -> Self {
        Self {
            entries: BTreeMap::new(),
            handles: BTreeMap::new(),
            spent: BTreeSet::new(),
            devices: BTreeMap::new(),
            greens: BTreeMap::new(),
            of_green: BTreeMap::new(),
            idle: VecDeque::new(),
            gone_totals: Totals { allocations: 0, pooled_bytes: 0 },
            gone: Vec::new(),
            last_id: 0,
        }
    }

    fn is_ending(&self, entry: &Entry) -> bool {
        entry.ending > 0 || entry.context.is_primary() && self.device_of(entry).is_some_and(OfDevice::is_ending)
    }

    /// Whether a call is under way that may be the end of this context.
    fn may_end(&self, entry: &Entry) -> bool {
        entry.ending > 0 || entry.context.is_primary() && self.device_of(entry).is_some_and(OfDevice::may_end)
    }

    fn device_of(&self, entry: &Entry) -> Option<&OfDevice> {
        self.devices.get(&entry.context.device)
    }

    /// Whether a context that ended had this handle, and one that has it now is another. Not so of primary contexts: whoever
    /// has one current has its next life current.
    pub fn is_given_again(&self, handle: cuda::Context) -> bool {
        self.spent.contains(&handle)
    }

    /// The context of this name.
    pub fn find(&self, name: Name) -> Found {
        let Some(handle) = name.handle else { return Found::Unknown };
        if let Some(device) = self.of_green.get(&handle) {
            let primary = self.devices.get(device).and_then(|device| device.primaries.last());
            return primary.map_or(Found::Unknown, |id| self.known(*id));
        }
        let Some(ids) = self.handles.get(&handle) else { return Found::Unknown };
        let entries = || ids.iter().rev().filter_map(|id| self.entries.get(id));
        let same = |entry: &&Entry| match name.life.zip(entry.name.life) {
            Some((own, other)) => own == other,
            // By the handle alone, what may be ending may be the life before.
            None => !self.may_end(entry),
        };
        if let Some(entry) = entries().find(same) {
            return self.known(entry.context.id);
        }
        let unseen = entries().find(|entry| entry.name.differs(name) && !self.is_ending(entry));
        unseen.map_or(Found::Unknown, |entry| Found::Renamed(entry.context))
    }

    /// The context with this id, whose end nobody saw, is in another life. For us it is the same one: what was made since
    /// with the old life in mind must not be taken away with it.
    pub fn lives_on(&mut self, id: u64, life: Option<u64>) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.name.life = life;
        let device = entry.context.device;
        self.references_are_unknown(device);
    }

    /// A life of the primary context ended, or will, by no call that gives back a reference and was seen: how many of those that
    /// were counted are the next life's is not known. Counting too few makes every release a possible end, which only costs waits.
    fn references_are_unknown(&mut self, device: Device) {
        if let Some(device) = self.devices.get_mut(&device) {
            device.retained = 0;
        }
    }

    fn known(&self, id: u64) -> Found {
        match self.entries.get(&id) {
            Some(entry) => Found::Known { context: entry.context, settled: !self.is_ending(entry) },
            None => Found::Unknown,
        }
    }

    /// The context that has this handle, if there is one: where the driver cannot be asked for more.
    pub fn by_handle(&self, handle: cuda::Context) -> Option<Context> {
        match self.find(Name { handle: Some(handle), life: None }) {
            Found::Known { context, .. } => Some(context),
            Found::Renamed(_) | Found::Unknown => None,
        }
    }

    /// Gives a primary context that appeared on this device its name, which is known now.
    pub fn name_waiting(&mut self, name: Name, device: Device) -> Option<Context> {
        let handle = name.handle?;
        let primaries = &self.devices.get(&device)?.primaries;
        let waiting = |id: &&u64| {
            self.entries.get(*id).is_some_and(|entry| entry.name.handle.is_none() && !self.is_ending(entry))
        };
        let id = *primaries.iter().find(waiting)?;
        let entry = self.entries.get_mut(&id)?;
        entry.name = name;
        entry.context.tally.handle.store(name.handle, Ordering::Release);
        self.handles.entry(handle).or_default().push(id);
        Some(entry.context)
    }

    /// The handle of the primary context that is known to live on this device; `None` where there is none, or it is not
    /// known.
    pub fn primary_handle(&self, device: Device) -> Option<cuda::Context> {
        self.handle_of(*self.devices.get(&device)?.primaries.last()?)
    }

    /// The primary context that is known to live on this device.
    pub fn primary(&self, device: Device) -> Option<Context> {
        let id = self.devices.get(&device)?.primaries.last()?;
        self.entries.get(id).map(|entry| entry.context)
    }

    /// Whether a primary context is known to live on this device.
    pub fn has_primary(&self, device: Device) -> bool {
        self.devices.get(&device).is_some_and(|device| !device.primaries.is_empty())
    }

    /// Enters a new context. `Err`: it is known, because another thread was first.
    pub fn enter(&mut self, name: Name, device: Device, kind: Kind, origin: Arc<Origin>) -> Result<Context, Context> {
        let first = match name.handle {
            None => self.devices.get(&device).and_then(|device| device.primaries.last()).map(|id| self.known(*id)),
            Some(_) => Some(self.find(name)),
        };
        match first {
            Some(Found::Known { context, .. }) => return Err(context),
            Some(Found::Renamed(context))
                if (context.device, context.kind) == (device, kind)
                    || context.is_primary() && kind != Kind::Created =>
            {
                self.lives_on(context.id, name.life);
                return Err(context);
            }
            _ => {}
        }
        if kind != Kind::Created
            && let Some(context) = self.name_waiting(name, device)
        {
            return Err(context);
        }
        self.last_id += 1;
        let id = self.last_id;
        let tally = match self.idle.len() > RESTING {
            true => self.idle.pop_front(),
            false => None,
        };
        let tally = tally.unwrap_or_else(|| Box::leak(Box::default()));
        tally.usage.restart();
        tally.peered.store(false, Ordering::Relaxed);
        tally.waited.forget();
        tally.handle.store(name.handle, Ordering::Release);
        tally.id.store(id, Ordering::Release);
        place_of(id).store(std::ptr::from_ref(tally).cast_mut(), Ordering::Release);
        let context = Context { id, device, kind, tally };
        let of_device = self.devices.entry(device).or_default();
        if of_device.live == 0 {
            of_device.arrivals += 1;
            of_device.arrived = Some(Instant::now());
        }
        of_device.live += 1;
        of_device.cost += origin.cost.unwrap_or(0);
        if context.is_primary() {
            of_device.primaries.push(id);
        }
        if let Some(handle) = name.handle {
            self.handles.entry(handle).or_default().push(id);
        }
        self.entries.insert(id, Entry { context, name, origin, leases: 0, ending: 0 });
        Ok(context)
    }

    /// Takes contexts out: they ended.
    fn take(&mut self, ids: &[u64]) -> Vec<Ended> {
        let mut ended = Vec::new();
        for id in ids {
            let Some(entry) = self.entries.remove(id) else { continue };
            let context = entry.context;
            let record = Record { until: self.last_id, ..record(&entry, Arc::new(context.tally.usage.copy())) };
            context.tally.id.store(0, Ordering::Release);
            context.tally.handle.store(None, Ordering::Release);
            if let Some(handle) = entry.name.handle
                && let Some(ids) = self.handles.get_mut(&handle)
            {
                ids.retain(|other| other != id);
                if ids.is_empty() {
                    self.handles.remove(&handle);
                }
            }
            if !context.is_primary() {
                self.spent.extend(entry.name.handle);
            }
            if let Some(device) = self.devices.get_mut(&context.device) {
                device.primaries.retain(|other| other != id);
                device.live -= 1;
                device.gone_launches += record.usage.launches.load(Ordering::Relaxed);
                device.cost = device.cost.saturating_sub(entry.origin.cost.unwrap_or(0));
            }
            self.gone_totals.add(&record.usage);
            self.idle.push_back(context.tally);
            let unkept = if self.is_worth_keeping(&record) {
                self.gone.push(record);
                None
            } else {
                Some(record)
            };
            ended.push(Ended { context, unkept });
        }
        ended
    }

    /// Whoever worked on a GPU first is always kept: it tells where the process works.
    fn is_worth_keeping(&self, record: &Record) -> bool {
        let works = |other: &Record| other.device == record.device && other.usage.work() > 0;
        self.gone.len() < KEPT || works(record) && !self.gone.iter().any(works)
    }

    /// How often a first context came to this device.
    pub fn arrivals(&self, device: Device) -> u64 {
        self.devices.get(&device).map_or(0, |device| device.arrivals)
    }

    /// How often a first context came to any device.
    pub fn all_arrivals(&self) -> u64 {
        self.devices.values().map(|device| device.arrivals).sum()
    }

    /// A reference to the primary context of this device was taken.
    pub fn retained(&mut self, device: Device) {
        self.devices.entry(device).or_default().retained += 1;
    }

    /// A call begins that gives up the primary context. Returns the lives that it may end.
    pub fn begin_primary(&mut self, device: Device, by: By) -> Lives {
        let of_device = self.devices.entry(device).or_default();
        match by {
            By::Release => of_device.releases += 1,
            By::Reset => of_device.resets += 1,
        }
        let doomed = of_device.may_end();
        let primaries = of_device.primaries.clone();
        let name = |id: &u64| {
            let entry = self.entries.get_mut(id)?;
            entry.ending += u32::from(doomed);
            Some((*id, entry.name))
        };
        Lives { named: primaries.iter().filter_map(name).collect(), doomed }
    }

    /// That call is over; those of its lives ended.
    pub fn end_primary(
        &mut self,
        device: Device,
        by: By,
        succeeded: bool,
        lives: &Lives,
        over: &[(u64, Name)],
    ) -> Vec<Ended> {
        for (id, _) in lives.named.iter().filter(|_| lives.doomed) {
            if let Some(entry) = self.entries.get_mut(id) {
                entry.ending -= 1;
            }
        }
        let of_device = self.devices.entry(device).or_default();
        match by {
            By::Release => {
                of_device.releases -= 1;
                of_device.retained = of_device.retained.saturating_sub(succeeded.into());
            }
            By::Reset => {
                of_device.resets -= 1;
                of_device.retained = if succeeded { 0 } else { of_device.retained };
            }
        }
        // One that took another life for its own meanwhile goes on.
        let is_over = |(id, name): &&(u64, Name)| self.entries.get(id).is_some_and(|entry| !entry.name.differs(*name));
        let over: Vec<u64> = over.iter().filter(is_over).map(|(id, _)| *id).collect();
        self.take(&over)
    }

    /// A call begins that may end the contexts of this handle. Returns which those are.
    pub fn begin_handle(&mut self, handle: cuda::Context) -> Vec<u64> {
        let ids = self.handles.get(&handle).cloned().unwrap_or_default();
        for id in &ids {
            if let Some(entry) = self.entries.get_mut(id) {
                entry.ending += 1;
            }
        }
        ids
    }

    /// That call is over; whether they ended.
    pub fn end_handle(&mut self, ids: &[u64], over: bool) -> Vec<Ended> {
        if over {
            let ended = self.take(ids);
            for primary in ended.iter().filter(|ended| ended.context.is_primary()) {
                self.references_are_unknown(primary.context.device);
            }
            return ended;
        }
        for id in ids {
            if let Some(entry) = self.entries.get_mut(id) {
                entry.ending -= 1;
            }
        }
        Vec::new()
    }

    /// Whether anybody has one of these pushed that may be ending now.
    pub fn is_leased(&self, mut ids: impl Iterator<Item = u64>) -> bool {
        ids.any(|id| self.entries.get(&id).is_some_and(|entry| entry.leases > 0 && self.may_end(entry)))
    }

    /// Lends a context of this handle to a thread that pushes it: it lives until that is given back. `None`: it is not
    /// known to live. `Err`: it may be ending; ask again after a call that ends something is over.
    pub fn lease(&mut self, handle: cuda::Context) -> Option<Result<u64, ()>> {
        let id = *self.handles.get(&handle)?.last()?;
        self.lease_by_id(id)
    }

    /// As [`lease`](Self::lease), for a thread that keeps contexts alive: whoever is about to end one of these waits for that thread,
    /// which must not wait for it.
    pub fn lease_again(&mut self, handle: cuda::Context) -> Option<Result<u64, ()>> {
        let id = *self.handles.get(&handle)?.last()?;
        let entry = self.entries.get_mut(&id)?;
        if entry.leases > 0 {
            entry.leases += 1;
            return Some(Ok(id));
        }
        self.lease_by_id(id)
    }

    /// Counts one who keeps the context with this id alive; `Err` while a call is under way that may end it.
    pub fn lease_by_id(&mut self, id: u64) -> Option<Result<u64, ()>> {
        if self.may_end(self.entries.get(&id)?) {
            return Some(Err(()));
        }
        self.entries.get_mut(&id)?.leases += 1;
        Some(Ok(id))
    }

    pub fn give_back(&mut self, id: u64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.leases -= 1;
        }
    }

    /// A green context was made on this device.
    pub fn green_began(&mut self, green: GreenContext, device: Device) {
        self.greens.insert(green, Green { device, handles: Vec::new() });
    }

    pub fn is_any_green(&self) -> bool {
        !self.greens.is_empty()
    }

    /// `cuCtxFromGreenCtx` gave this handle.
    pub fn green_is(&mut self, green: GreenContext, handle: cuda::Context) {
        let Some(known) = self.greens.get_mut(&green) else { return };
        if !known.handles.contains(&handle) {
            known.handles.push(handle);
        }
        self.of_green.insert(handle, known.device);
    }

    /// A green context is about to be destroyed: its handles name nothing from here on. Returns its device and handles.
    pub fn green_ends(&mut self, green: GreenContext) -> Option<(Device, Vec<cuda::Context>)> {
        let Green { device, handles } = self.greens.remove(&green)?;
        for handle in &handles {
            self.of_green.remove(handle);
        }
        self.spent.extend(&handles);
        Some((device, handles))
    }

    /// The handle of a context; `None` for one that is gone or has none yet.
    pub fn handle_of(&self, id: u64) -> Option<cuda::Context> {
        self.entries.get(&id)?.name.handle
    }

    pub fn by_id(&self, id: u64) -> Option<Context> {
        self.entries.get(&id).map(|entry| entry.context)
    }

    /// The contexts that live, oldest first.
    pub fn live(&self) -> Vec<Context> {
        self.entries.values().map(|entry| entry.context).collect()
    }

    pub fn is_on(&self, device: Device) -> bool {
        self.devices.get(&device).is_some_and(|device| device.live > 0)
    }

    /// Whether there has been one on this device for as long.
    pub fn is_on_for(&self, device: Device, time: Duration) -> bool {
        let of_device = self.devices.get(&device).filter(|device| device.live > 0);
        of_device.and_then(|device| device.arrived).is_some_and(|arrived| arrived.elapsed() >= time)
    }

    /// What the contexts on a device took of it.
    pub fn cost_on(&self, device: Device) -> u64 {
        self.devices.get(&device).map_or(0, |device| device.cost)
    }

    /// See [`super::usual_cost`].
    pub fn usual_cost(&self) -> Option<u64> {
        let costs = |approximate: bool| {
            let all = self
                .entries
                .values()
                .map(|entry| &entry.origin)
                .filter(move |origin| origin.approximate == approximate);
            all.filter_map(|origin| origin.cost).filter(|cost| *cost > 0)
        };
        costs(false).max().or_else(|| costs(true).min())
    }

    /// The context with this id, while it lives, and whether it is the only one on its device.
    pub fn owner(&self, id: u64) -> Option<(Context, bool)> {
        let context = self.by_id(id)?;
        Some((context, self.devices.get(&context.device).is_some_and(|device| device.live == 1)))
    }

    /// Kernels launched in contexts of this device that are gone.
    pub fn gone_launches(&self, device: Device) -> u64 {
        self.devices.get(&device).map_or(0, |device| device.gone_launches)
    }

    /// The contexts that live, oldest first, and what was counted of all there ever were.
    pub fn living(&self) -> (Vec<Record>, Totals) {
        let mut totals = self.gone_totals;
        let living = self.entries.values().map(|entry| record(entry, Arc::new(entry.context.tally.usage.copy())));
        let living: Vec<Record> = living.inspect(|record| totals.add(&record.usage)).collect();
        (living, totals)
    }

    /// Every context that is known, oldest first.
    pub fn records(&self) -> Vec<Record> {
        let live = self.entries.values().map(|entry| record(entry, Arc::new(entry.context.tally.usage.copy())));
        let mut records: Vec<Record> = self.gone.iter().cloned().chain(live).collect();
        records.sort_by_key(|record| record.id);
        records
    }
}

fn record(entry: &Entry, usage: Arc<Counters>) -> Record {
    let Context { id, device, kind, tally } = entry.context;
    let peered = tally.peered.load(Ordering::Relaxed);
    Record { id, device, kind, origin: entry.origin.clone(), usage, peered, until: u64::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Arc<Origin> {
        let site = Site { python: Vec::new(), native: Vec::new(), truncated: false };
        Arc::new(Origin { call: "a test".to_owned(), site, cost: Some(3), approximate: false })
    }

    const GPU_0: Device = Device::of(0);

    fn handle(number: usize) -> cuda::Context {
        cuda::Context::from_raw(std::ptr::without_provenance_mut(number)).unwrap()
    }

    fn green(number: usize) -> GreenContext {
        GreenContext::from_raw(std::ptr::without_provenance_mut(number)).unwrap()
    }

    fn name(number: usize, life: u64) -> Name {
        Name { handle: Some(handle(number)), life: Some(life) }
    }

    fn enter(registry: &mut Registry, name: Name, device: u32, kind: Kind) -> Context {
        registry.enter(name, Device::of(device), kind, origin()).unwrap()
    }

    #[test]
    fn the_next_life_of_a_handle_is_another_context_while_the_last_one_ends() {
        let mut registry = Registry::new();
        let first = enter(&mut registry, name(0x10, 1), 0, Kind::Primary);
        registry.retained(GPU_0);
        let lives = registry.begin_primary(GPU_0, By::Reset);
        assert_eq!(registry.find(name(0x10, 1)), Found::Known { context: first, settled: false });
        let next = enter(&mut registry, name(0x10, 2), 0, Kind::Primary);
        assert_ne!(first, next);
        let ended = registry.end_primary(GPU_0, By::Reset, true, &lives, &lives.named);
        assert_eq!(ended.iter().map(|ended| ended.context).collect::<Vec<_>>(), [first]);
        assert!(first.is_gone() && !next.is_gone());
        assert_eq!(registry.find(name(0x10, 2)), Found::Known { context: next, settled: true });
        assert_eq!(registry.by_handle(handle(0x10)), Some(next));
    }

    #[test]
    fn a_driver_that_does_not_number_contexts_is_believed_once_nothing_ends() {
        let mut registry = Registry::new();
        let unnumbered = Name { handle: Some(handle(0x10)), life: None };
        let first = enter(&mut registry, unnumbered, 0, Kind::Primary);
        (0..2).for_each(|_| registry.retained(GPU_0));
        let lives = registry.begin_primary(GPU_0, By::Release);
        assert!(matches!(registry.find(unnumbered), Found::Known { context, .. } if context == first), "not the last");
        registry.end_primary(GPU_0, By::Release, true, &lives, &[]);
        assert_eq!(lives.named.len(), 1);
        let lives = registry.begin_primary(GPU_0, By::Release);
        assert_eq!(registry.find(unnumbered), Found::Unknown, "it may be the next one");
        let next = enter(&mut registry, unnumbered, 0, Kind::Primary);
        registry.end_primary(GPU_0, By::Release, true, &lives, &lives.named);
        assert!(first.is_gone() && !next.is_gone());
    }

    #[test]
    fn a_release_that_leaves_the_context_leaves_its_record() {
        let mut registry = Registry::new();
        let context = enter(&mut registry, name(0x10, 1), 0, Kind::Primary);
        let lives = registry.begin_primary(GPU_0, By::Release);
        assert!(matches!(registry.find(name(0x10, 1)), Found::Known { settled: false, .. }));
        assert!(registry.end_primary(GPU_0, By::Release, true, &lives, &[]).is_empty());
        assert_eq!(registry.find(name(0x10, 1)), Found::Known { context, settled: true });
    }

    #[test]
    fn what_lives_on_in_a_life_that_nobody_saw_begin_does_not_end_with_the_last() {
        let mut registry = Registry::new();
        let context = enter(&mut registry, name(0x10, 1), 0, Kind::Primary);
        let first = registry.begin_primary(GPU_0, By::Release);
        registry.end_primary(GPU_0, By::Release, true, &first, &[]);
        assert_eq!(registry.find(name(0x10, 2)), Found::Renamed(context));
        registry.lives_on(context.id, Some(2));
        let second = registry.begin_primary(GPU_0, By::Release);
        assert!(registry.end_primary(GPU_0, By::Release, true, &second, &first.named).is_empty());
        assert!(!context.is_gone());
    }

    #[test]
    fn nobody_is_lent_a_context_that_may_be_ending() {
        let mut registry = Registry::new();
        let context = enter(&mut registry, name(0x10, 1), 0, Kind::Created);
        assert_eq!(registry.lease(handle(0x10)), Some(Ok(context.id)));
        let ids = registry.begin_handle(handle(0x10));
        assert!(registry.is_leased(ids.iter().copied()));
        assert_eq!(registry.lease(handle(0x10)), Some(Err(())));
        assert_eq!(registry.lease_again(handle(0x10)), Some(Ok(context.id)), "but to who keeps it alive already");
        registry.give_back(context.id);
        registry.give_back(context.id);
        assert_eq!(registry.lease_again(handle(0x10)), Some(Err(())), "nobody keeps it any more");
        assert!(!registry.is_leased(ids.iter().copied()));
        registry.end_handle(&ids, false);
        assert_eq!(registry.lease(handle(0x10)), Some(Ok(context.id)));
        registry.give_back(context.id);
        let ids = registry.begin_handle(handle(0x10));
        registry.end_handle(&ids, true);
        assert_eq!(registry.lease(handle(0x10)), None);
    }

    /// The driver makes the next life while the last one is still being taken down, and its reference is none to the last.
    #[test]
    fn nobody_is_lent_a_primary_context_that_is_ending_although_the_next_life_is_retained() {
        let mut registry = Registry::new();
        let first = enter(&mut registry, name(0x10, 1), 0, Kind::Primary);
        registry.retained(GPU_0);
        let lives = registry.begin_primary(GPU_0, By::Release);
        registry.retained(GPU_0);
        assert_eq!(registry.lease_by_id(first.id), Some(Err(())), "it may be gone by now");
        let next = enter(&mut registry, name(0x10, 2), 0, Kind::Primary);
        assert_eq!(registry.lease_by_id(next.id), Some(Ok(next.id)));
        registry.give_back(next.id);
        registry.end_primary(GPU_0, By::Release, true, &lives, &lives.named);
        assert_eq!(registry.lease_by_id(first.id), None);

        // Had that reference been one to the same life, it would go on, and may be lent again.
        let lives = registry.begin_primary(GPU_0, By::Release);
        registry.retained(GPU_0);
        assert_eq!(registry.lease_by_id(next.id), Some(Err(())));
        registry.end_primary(GPU_0, By::Release, true, &lives, &[]);
        assert_eq!(registry.lease_by_id(next.id), Some(Ok(next.id)));
    }

    /// What is counted of a life that ended past every hook is nothing that holds the next one.
    #[test]
    fn references_to_a_life_whose_end_nobody_saw_keep_nobody_alive() {
        let seen_renamed = |registry: &mut Registry, id| registry.lives_on(id, Some(2));
        let seen_gone = |registry: &mut Registry, id| {
            registry.end_handle(&[id], true);
            enter(registry, name(0x10, 2), 0, Kind::Found);
        };
        for unseen in [&seen_renamed as &dyn Fn(&mut Registry, u64), &seen_gone] {
            let mut registry = Registry::new();
            let first = enter(&mut registry, name(0x10, 1), 0, Kind::Primary);
            (0..2).for_each(|_| registry.retained(GPU_0));
            unseen(&mut registry, first.id);
            registry.retained(GPU_0);
            registry.begin_primary(GPU_0, By::Release);
            assert_eq!(registry.lease(handle(0x10)), Some(Err(())), "the one release is the last");
        }
    }

    #[test]
    fn a_context_that_appeared_is_one_however_many_saw_it() {
        let mut registry = Registry::new();
        let nameless = Name { handle: None, life: None };
        let first = enter(&mut registry, nameless, 0, Kind::Appeared);
        assert_eq!(registry.enter(nameless, GPU_0, Kind::Appeared, origin()), Err(first));
        assert_eq!(registry.enter(name(0x10, 1), GPU_0, Kind::Found, origin()), Err(first));
        assert_eq!(registry.enter(nameless, GPU_0, Kind::Appeared, origin()), Err(first));
        assert_eq!(registry.by_handle(handle(0x10)), Some(first));
        assert_eq!(registry.records().len(), 1);
    }

    #[test]
    fn contexts_meet_that_lived_at_the_same_time() {
        let mut registry = Registry::new();
        let end = |registry: &mut Registry, number| {
            let ids = registry.begin_handle(handle(number));
            registry.end_handle(&ids, true)
        };
        enter(&mut registry, name(0x10, 1), 0, Kind::Primary);
        enter(&mut registry, name(0x20, 2), 1, Kind::Primary);
        end(&mut registry, 0x10);
        enter(&mut registry, name(0x30, 3), 2, Kind::Primary);
        end(&mut registry, 0x20);
        let records = registry.records();
        let [first, second, third] = &records[..] else { panic!("{records:?}") };
        assert!(first.met(second) && second.met(first) && second.met(third) && third.met(second));
        assert!(!first.met(third) && !third.met(first));
    }

    #[test]
    fn a_green_context_is_the_primary_one_until_it_ends() {
        let mut registry = Registry::new();
        let primary = enter(&mut registry, name(0x10, 1), 0, Kind::Primary);
        registry.green_began(green(0x900), GPU_0);
        registry.green_is(green(0x900), handle(0x90));
        assert_eq!(registry.by_handle(handle(0x90)), Some(primary));
        assert_eq!(registry.lease(handle(0x90)), None, "its own handle is pushed by nobody");
        assert_eq!(registry.green_ends(green(0x900)), Some((GPU_0, vec![handle(0x90)])));
        assert_eq!(registry.by_handle(handle(0x90)), None);
    }

    impl Registry {
        /// All that is kept, of whatever kind: what a look-up or the next context may have to go through.
        fn kept(&self) -> usize {
            let of_handles: usize = self.handles.values().map(Vec::len).sum();
            let of_devices: usize = self.devices.values().map(|device| 1 + device.primaries.len()).sum();
            let of_greens: usize = self.greens.values().map(|green| 1 + green.handles.len()).sum();
            self.entries.len()
                + of_handles
                + self.spent.len()
                + of_devices
                + of_greens
                + self.of_green.len()
                + self.idle.len()
                + self.gone.len()
        }
    }

    #[test]
    fn ten_thousand_contexts_leave_no_more_behind_than_a_thousand() {
        const HANDLES: u64 = 3;
        let mut registry = Registry::new();
        let mut live = |lives: std::ops::Range<u64>| {
            for life in lives {
                enter(&mut registry, name(0x10, 2 * life), 0, Kind::Primary);
                registry.retained(GPU_0);
                let number = 0x20 + (life % HANDLES) as usize;
                enter(&mut registry, name(number, 2 * life + 1), 0, Kind::Created);
                registry.green_began(green(0x900), GPU_0);
                registry.green_is(green(0x900), handle(0x90));
                assert!(registry.green_ends(green(0x900)).is_some());
                let ids = registry.begin_handle(handle(number));
                assert_eq!(registry.end_handle(&ids, true).len(), 1);
                let lives = registry.begin_primary(GPU_0, By::Release);
                assert_eq!(registry.end_primary(GPU_0, By::Release, true, &lives, &lives.named).len(), 1);
            }
            registry.kept()
        };
        let after_a_thousand = live(1..1_001);
        assert_eq!(live(1_001..10_001), after_a_thousand);
        // Records for the judgement, counters at rest, the handles that are used again, and one GPU.
        assert!(after_a_thousand <= KEPT + RESTING + 2 + HANDLES as usize + 1 + 1, "{after_a_thousand}");
    }

    #[test]
    fn what_is_kept_of_many_contexts_is_bounded_and_tells_where_there_was_work() {
        let mut registry = Registry::new();
        for life in 1..=5000 {
            let device = if life <= 4990 { 0 } else { 1 };
            let context = enter(&mut registry, name(0x10, life), device, Kind::Created);
            context.usage.launched();
            let ids = registry.begin_handle(handle(0x10));
            let ended = registry.end_handle(&ids, true);
            assert_eq!(ended[0].unkept.is_some(), life > KEPT as u64 && life != 4991);
        }
        assert_eq!(registry.records().len(), KEPT + 1);
        assert_eq!((registry.gone_launches(GPU_0), registry.gone_launches(Device::of(1))), (4990, 10));
        assert!(registry.idle.len() <= RESTING + 1, "counters are used again");
        assert!(registry.entries.is_empty() && registry.handles.is_empty());
        assert_eq!((registry.is_on(GPU_0), registry.cost_on(GPU_0)), (false, 0));
    }
}
