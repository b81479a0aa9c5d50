//! What the program holds in pinned memory, by the place in the program that asked for it (the call site).
//!
//! Finding the call site costs microseconds, so it is done when the driver pins, which is slower anyway. Memory that the pool
//! had ready is counted for the site that last asked for that size; every sixteenth time the site is looked up again.

use super::callers::{self, Framework};
use super::copies::{self, Seen};
use crate::watch::site;
use gpupool_events::Site;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// How often the place of an allocation of ready memory is looked at.
const SAMPLE: u8 = 16;
/// Sizes whose place is remembered; a program with more has them looked up anew.
const SIZES: usize = 4096;
/// Places that are kept apart; further ones are one.
const PLACES: usize = 1024;
/// The number of that one.
const OTHER: usize = 0;
/// The driver, too, pins whole pages.
const PAGE: u64 = 4096;
/// Allocations after which a program has its buffers.
const WARM_UP: u64 = 64;
/// New peaks after the warm-up, with work on the GPU between each two of them, that are no coincidence.
const PEAKS: u64 = 64;
/// Bytes that nobody minds.
pub const WORTH_SAYING: u64 = 16 << 20;

/// Who pinned a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The pool.
    Pool,
    /// The driver.
    Driver,
    /// The program, which registered memory of its own.
    Program,
}

impl By {
    pub fn word(self) -> &'static str {
        match self {
            By::Pool => "pool",
            By::Driver => "driver",
            By::Program => "program",
        }
    }
}

/// One allocation or registration.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub address: u64,
    /// Bytes asked for.
    pub bytes: u64,
    pub flags: u32,
    pub by: By,
    /// The context that it ends with.
    pub context: u64,
    /// Bytes that had to be pinned for it.
    pub pinned: u64,
    /// How long that took.
    pub nanos: u64,
    /// Launches and copies in that context so far.
    pub work: u64,
    /// Whether to tell of its first copy, if other pinned memory may hold the same data.
    pub watch: bool,
}

/// A piece of memory that the program holds.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    pub bytes: u64,
    pub flags: u32,
    pub by: By,
    context: u64,
    place: usize,
    work: u64,
    /// What other pinned memory held its data when it was copied for the first time.
    pub twin: Option<Twin>,
    /// The program has copied out of it.
    straight: bool,
    watched: bool,
}

/// Other pinned memory with the same data.
#[derive(Clone, Copy, Debug)]
pub struct Twin {
    pub address: u64,
    /// A number for the data.
    pub content: u64,
}

/// Buffers whose data was in pinned memory already, of one cause.
#[derive(Clone, Debug, Default)]
pub struct Staged {
    pub buffers: u64,
    pub bytes: u64,
    /// Where the last of them was allocated or copied.
    pub site: Site,
    /// Who pinned the memory that its data was in.
    pub source: Site,
    contents: Vec<u64>,
    said: bool,
}

/// A buffer that was for nothing, unless the program copies out of the other memory as well.
#[derive(Clone, Debug)]
struct Suspect {
    twin: Twin,
    cause: String,
    bytes: u64,
    site: Site,
    source: usize,
}

/// One place in the program, and all that came of it.
#[derive(Clone, Debug, Default)]
pub struct Place {
    pub site: Site,
    /// See [`callers::cause`].
    cause: String,
    /// The framework whose allocator asked, where it rounds sizes up or keeps what it was given.
    pub framework: Option<Framework>,
    pub allocations: u64,
    /// Bytes asked for, over the life of the process.
    pub requested: u64,
    /// Bytes that were pinned for it, over the life of the process.
    pub pinned: u64,
    pub live: u64,
    /// Live allocations and registrations of this place.
    pub blocks: u64,
    pub peak: u64,
    pub nanos: u64,
    /// Bytes that no copy reached, of blocks that copies did reach; how many blocks, and their bytes.
    pub unreached: u64,
    pub unreached_blocks: u64,
    pub unreached_of: u64,
    /// New peaks of the process since this place last freed something, and the work done at the last.
    peaks: u64,
    last_work: u64,
    /// Findings that were made about it.
    pub said: Said,
}

/// What is said once a place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Said {
    pub growing: bool,
    pub registered_twice: bool,
}

/// What the process has pinned, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// All of it: segments of the pool, allocations of the driver, registered memory.
    pub pinned: u64,
    /// What the program asked for in it.
    pub requested: u64,
    /// The registered part of both.
    pub registered: u64,
}

#[derive(Default)]
struct Holders {
    places: Vec<Place>,
    by_frames: BTreeMap<u64, usize>,
    by_identity: BTreeMap<String, usize>,
    /// The place that last asked for a size, and how often it is to be believed.
    by_size: BTreeMap<u64, (usize, u8)>,
    live: BTreeMap<u64, Live>,
    /// By cause.
    staged: BTreeMap<String, Staged>,
    /// No more than first copies that were looked at.
    suspects: Vec<Suspect>,
    allocations: u64,
    requested: u64,
    /// Bytes pinned outside the pool, registered ones among them.
    outside: u64,
    registered: u64,
    peak: Level,
}

static HOLDERS: Mutex<Option<Holders>> = Mutex::new(None);

/// Runs `act` on the holders. Nothing in `act` calls the driver, logs or looks at frames.
fn with<T>(act: impl FnOnce(&mut Holders) -> T) -> T {
    act(HOLDERS.lock().get_or_insert_default())
}

/// A place of which `count` new peaks in a row came, with `live` bytes by now.
pub struct Growing {
    pub site: Site,
    pub live: u64,
    pub peaks: u64,
}

/// Notes an allocation. `frames` and `site` are asked for where the place has to be looked at. Returns the finding that it
/// completes, if any.
pub fn allocated(entry: &Entry, frames: impl FnOnce() -> u64, site: impl FnOnce() -> Site) -> Option<Growing> {
    if entry.pinned == 0
        && let Some(growing) = with(|holders| holders.recall(entry.bytes).map(|place| holders.add(entry, place)))
    {
        return growing;
    }
    let frames = frames();
    let place = match with(|holders| holders.by_frames.get(&frames).copied()) {
        Some(place) => place,
        None => {
            let site = site();
            with(|holders| holders.learn(frames, site))
        }
    };
    with(|holders| {
        holders.remember(entry.bytes, place);
        holders.add(entry, place)
    })
}

/// Takes out what starts at this address, before it is freed: afterwards another thread may get the same address. Also
/// says how many copies were made out of it, if it was watched.
pub fn take(address: u64) -> Option<(Live, u32)> {
    with(|holders| holders.remove(address))
}

/// Puts back what [`take`] took out, because the free failed.
pub fn put_back(address: u64, live: Live) {
    with(|holders| holders.insert(address, live));
}

/// Forgets all that ended with this context.
pub fn context_gone(context: u64) {
    with(|holders| {
        let gone: Vec<u64> =
            holders.live.iter().filter(|(_, live)| live.context == context).map(|(address, _)| *address).collect();
        for address in gone {
            holders.remove(address);
        }
    });
}

/// What is pinned now, where the pool holds `pool` bytes of it.
pub fn level(pool: u64) -> Level {
    with(|holders| {
        let level = holders.level(pool);
        holders.peak.pinned = holders.peak.pinned.max(level.pinned);
        level
    })
}

/// The highest that each part of [`level`] ever was, not at the same moment.
pub fn peak() -> Level {
    with(|holders| holders.peak)
}

/// Bytes of live memory that copies of `bytes` bytes could be equal to, apart from the block at `except`: address and
/// size, the nearest in size first.
pub fn others(except: u64, bytes: u64) -> Vec<(u64, u64)> {
    with(|holders| {
        let suits = |live: &Live| live.bytes >= bytes && !live.is_slow_to_read();
        let others = holders.live.iter().filter(|(address, live)| **address != except && suits(live));
        let mut others: Vec<(u64, u64)> = others.map(|(address, live)| (*address, live.bytes)).collect();
        others.sort_by_key(|(_, bytes)| *bytes);
        others
    })
}

/// Whether the block at this address may turn out to be a second buffer: memory that the program registered is its own,
/// and what the device has filled is no copy of other memory.
pub fn may_be_staged(address: u64) -> bool {
    let filled = copies::seen(address).is_none_or(|seen| seen.into);
    !filled && with(|holders| holders.live.get(&address).is_some_and(|live| live.by != By::Program))
}

/// Notes that the data of the block at this address was in pinned memory already, at `twin`. Not where the program has
/// copied out of that memory: it knows how to, and has its reasons to take another way as well. Nor where a copy has filled
/// it: then the data came from the GPU, and not by way of that memory. Of memory that is not watched neither is known.
pub fn mark_staged(address: u64, twin: Twin) {
    let copied = copies::seen(twin.address).is_none_or(|seen| seen.out > 0 || seen.into);
    with(|holders| {
        let straight = copied || holders.live.get(&twin.address).is_none_or(|live| live.straight);
        if let Some(live) = holders.live.get_mut(&address).filter(|_| !straight) {
            live.twin = Some(twin);
        }
    });
}

/// Takes the mark off the block at this address, and what lies there.
pub fn take_mark(address: u64) -> Option<Live> {
    with(|holders| {
        let live = holders.live.get_mut(&address)?;
        let marked = *live;
        live.twin.take().map(|_| marked)
    })
}

/// A buffer was for nothing, as far as that shows. Whether the program also copies out of the other memory is known when that
/// is freed, or at the end: both may have been filled before either was copied.
pub fn suspect(live: &Live, twin: Twin, site: Site) {
    with(|holders| {
        let Some(source) = holders.live.get(&twin.address).map(|other| other.place) else { return };
        let cause = holders.places[live.place].cause.clone();
        holders.suspects.push(Suspect { twin, cause, bytes: live.bytes, site, source });
    });
}

/// At the end of the process: what was not copied out of until now never is.
pub fn settle_all() {
    with(|holders| {
        let mut twins: Vec<u64> = holders.suspects.iter().map(|suspect| suspect.twin.address).collect();
        twins.sort_unstable();
        twins.dedup();
        for twin in twins {
            let copied = copies::seen(twin).is_some_and(|seen| seen.out > 0);
            let straight = copied || holders.live.get(&twin).is_none_or(|live| live.straight);
            holders.settle(twin, straight);
        }
    });
}

/// The accounts that have become certain, each once: so many buffers with different data were for nothing that it can be no
/// coincidence. A program that computes a pattern into each buffer has the same data in other pinned memory, too, but always
/// that.
pub fn certainly_staged() -> Vec<Staged> {
    /// Different contents.
    const CERTAIN: usize = 3;
    with(|holders| {
        let certain = holders.staged.values_mut().filter(|staged| !staged.said && staged.contents.len() >= CERTAIN);
        certain
            .map(|staged| {
                staged.said = true;
                staged.clone()
            })
            .collect()
    })
}

/// The first copy out of this block was looked at; watched for that alone, it is not watched any more.
pub fn was_looked_at(address: u64) {
    with(|holders| {
        let Some(live) = holders.live.get_mut(&address) else { return };
        live.straight = true;
        if live.watched && live.twin.is_none() && holders.places[live.place].framework.is_none_or(|it| !it.rounds) {
            live.watched = false;
            copies::unwatch(address);
        }
    });
}

/// The place that allocated the memory at this address, and its bytes.
pub fn place_of(address: u64) -> Option<(Site, u64)> {
    with(|holders| {
        let live = holders.live.get(&address)?;
        Some((holders.places[live.place].site.clone(), live.bytes))
    })
}

/// The place that registered memory which overlaps this.
pub fn overlapping(address: u64, bytes: u64) -> Option<Site> {
    with(|holders| {
        let before = holders.live.range(..address.saturating_add(bytes));
        let registered = |(start, live): &(&u64, &Live)| live.by == By::Program && **start + live.bytes > address;
        let (_, live) = before.rev().find(registered)?;
        Some(holders.places[live.place].site.clone())
    })
}

/// The place of memory that was just taken out.
pub fn site_of(live: &Live) -> Site {
    with(|holders| holders.places[live.place].site.clone())
}

/// The place with these frames, and whether memory was registered there twice before.
pub fn first_registered_twice(frames: u64, site: impl FnOnce() -> Site) -> bool {
    let known = with(|holders| holders.by_frames.get(&frames).copied());
    let site = known.is_none().then(site);
    with(|holders| {
        let place = known.unwrap_or_else(|| holders.learn(frames, site.unwrap_or_default()));
        !std::mem::replace(&mut holders.places[place].said.registered_twice, true)
    })
}

/// A place that holds pinned memory.
#[derive(Clone, Debug)]
pub struct Holder {
    pub text: String,
    pub live: u64,
    pub blocks: u64,
    /// Bytes asked for, over the life of the process.
    pub total: u64,
}

/// The places that hold most, and how many more hold any.
pub fn holders() -> (Vec<Holder>, u32) {
    /// As many as the page has room for.
    const MOST: usize = 64;
    with(|holders| {
        let mut holding: Vec<&Place> = holders.places.iter().filter(|place| place.live > 0).collect();
        holding.sort_by_key(|place| std::cmp::Reverse(place.live));
        let more = holding.len().saturating_sub(MOST) as u32;
        let holder = |place: &&Place| Holder {
            text: site::line(&place.site),
            live: place.live,
            blocks: place.blocks,
            total: place.requested,
        };
        (holding.iter().take(MOST).map(holder).collect(), more)
    })
}

/// Places that hold pinned memory, in how many blocks and bytes; what holds most first.
pub fn sites() -> Vec<(Site, u64, u64)> {
    with(|holders| {
        let holding = holders.places.iter().filter(|place| place.live > 0);
        let mut sites: Vec<_> = holding.map(|place| (place.site.clone(), place.blocks, place.live)).collect();
        sites.sort_by_key(|(_, _, live)| std::cmp::Reverse(*live));
        sites
    })
}

/// A place, and what it still holds at the end: bytes, pieces, and how many stretches of work lie between those.
pub struct Remains {
    pub place: Place,
    pub pieces: u64,
    pub stretches: u64,
}

/// Every place, the one with the highest peak first.
pub fn remains() -> Vec<Remains> {
    with(|holders| {
        let watched: Vec<u64> =
            holders.live.iter().filter(|(_, live)| live.watched).map(|(address, _)| *address).collect();
        for address in watched {
            if let (Some(seen), Some(live)) = (copies::seen(address), holders.live.get(&address).copied()) {
                holders.note_reach(&live, seen);
            }
        }
        let mut accounts: Vec<Remains> =
            holders.places.iter().map(|place| Remains { place: place.clone(), pieces: 0, stretches: 0 }).collect();
        let mut work: Vec<Vec<u64>> = vec![Vec::new(); accounts.len()];
        for live in holders.live.values() {
            accounts[live.place].pieces += 1;
            work[live.place].push(live.work);
        }
        for (account, mut work) in accounts.iter_mut().zip(work) {
            work.sort_unstable();
            work.dedup();
            account.stretches = work.len() as u64;
        }
        accounts.retain(|account| account.place.allocations > 0);
        accounts.sort_by_key(|account| std::cmp::Reverse(account.place.peak));
        accounts
    })
}

impl Live {
    /// Write-combined memory is read at a hundredth of the speed.
    fn is_slow_to_read(&self) -> bool {
        const WRITE_COMBINED: u32 = 4;
        self.by != By::Program && self.flags & WRITE_COMBINED != 0
    }
}

impl Holders {
    fn recall(&mut self, bytes: u64) -> Option<usize> {
        let (place, left) = self.by_size.get_mut(&bytes)?;
        *left = left.checked_sub(1)?;
        Some(*place)
    }

    fn remember(&mut self, bytes: u64, place: usize) {
        if self.by_size.len() >= SIZES {
            self.by_size.clear();
        }
        self.by_size.insert(bytes, (place, SAMPLE - 1));
    }

    /// The number of a place whose frames are new. Threads and loops reach one line by several ways; it is one place.
    fn learn(&mut self, frames: u64, site: Site) -> usize {
        if self.places.is_empty() {
            self.places.push(Place::default());
        }
        let identity = callers::identity(&site);
        let place = match self.by_identity.get(&identity) {
            Some(place) => *place,
            None if self.places.len() >= PLACES => OTHER,
            None => {
                let (cause, framework) = (callers::cause(&site), callers::framework(&site));
                self.places.push(Place { cause, framework, site, ..Place::default() });
                self.by_identity.insert(identity, self.places.len() - 1);
                self.places.len() - 1
            }
        };
        if self.by_frames.len() < 4 * PLACES {
            self.by_frames.insert(frames, place);
        }
        place
    }

    fn add(&mut self, entry: &Entry, place: usize) -> Option<Growing> {
        let Entry { address, bytes, flags, by, context, work, .. } = *entry;
        // Freed in a way that nobody saw.
        self.remove(address);
        self.allocations += 1;
        let account = &mut self.places[place];
        account.allocations += 1;
        account.requested += bytes;
        account.pinned += entry.pinned;
        account.nanos += entry.nanos;
        let rounded = account.framework.is_some_and(|it| it.rounds) && bytes.is_power_of_two() && bytes >= 1 << 20;
        let awaits = entry.watch && !self.staged.get(&account.cause).is_some_and(|staged| staged.said);
        let watched = (rounded || awaits) && copies::watch(address, bytes, awaits);
        let peak = self.peak.requested;
        self.insert(address, Live { bytes, flags, by, context, place, work, twin: None, straight: false, watched });
        if self.requested > peak && self.allocations > WARM_UP { self.places[place].reached_peak(work) } else { None }
    }

    fn insert(&mut self, address: u64, live: Live) {
        self.live.insert(address, live);
        let account = &mut self.places[live.place];
        account.live += live.bytes;
        account.blocks += 1;
        account.peak = account.peak.max(account.live);
        self.requested += live.bytes;
        if live.by != By::Pool {
            self.outside += live.bytes.next_multiple_of(PAGE);
        }
        if live.by == By::Program {
            self.registered += live.bytes;
        }
        self.peak.requested = self.peak.requested.max(self.requested);
        self.peak.registered = self.peak.registered.max(self.registered);
    }

    fn remove(&mut self, address: u64) -> Option<(Live, u32)> {
        let live = self.live.remove(&address)?;
        let seen = if live.watched { copies::unwatch(address) } else { None };
        self.settle(address, live.straight || seen.is_some_and(|seen| seen.out > 0));
        if let Some(seen) = seen {
            self.note_reach(&live, seen);
        }
        let account = &mut self.places[live.place];
        account.live -= live.bytes;
        account.blocks -= 1;
        account.peaks = 0;
        self.requested -= live.bytes;
        if live.by != By::Pool {
            self.outside -= live.bytes.next_multiple_of(PAGE);
        }
        if live.by == By::Program {
            self.registered -= live.bytes;
        }
        Some((live, seen.map_or(0, |seen| seen.out)))
    }

    /// The memory at this address is not copied out of any more; `straight`: it was. Then what is suspected of a detour was
    /// none, else it is counted.
    fn settle(&mut self, twin: u64, straight: bool) {
        for suspect in self.suspects.extract_if(.., |suspect| suspect.twin.address == twin) {
            if straight {
                continue;
            }
            let staged = self.staged.entry(suspect.cause).or_default();
            staged.buffers += 1;
            staged.bytes += suspect.bytes;
            staged.source = self.places[suspect.source].site.clone();
            staged.site = suspect.site;
            if !staged.contents.contains(&suspect.twin.content) {
                staged.contents.push(suspect.twin.content);
            }
        }
    }

    /// A block that no copy ever touched may be used in another way, and says nothing.
    fn note_reach(&mut self, live: &Live, seen: Seen) {
        let account = &mut self.places[live.place];
        if account.framework.is_some_and(|it| it.rounds) && live.bytes.is_power_of_two() && seen.reach > 0 {
            let reach = seen.reach.min(live.bytes).next_multiple_of(PAGE);
            account.unreached += live.bytes.saturating_sub(reach);
            account.unreached_of += live.bytes;
            account.unreached_blocks += 1;
        }
    }

    fn level(&self, pool: u64) -> Level {
        Level { pinned: pool + self.outside, requested: self.requested, registered: self.registered }
    }
}

impl Place {
    /// An allocation here, after so much work, was a new peak of the process: whether there were too many of those.
    fn reached_peak(&mut self, work: u64) -> Option<Growing> {
        if self.last_work == work {
            return None;
        }
        self.last_work = work;
        self.peaks += 1;
        if self.peaks < PEAKS || self.live < WORTH_SAYING || self.said.growing {
            return None;
        }
        self.said.growing = true;
        Some(Growing { site: self.site.clone(), live: self.live, peaks: self.peaks })
    }
}
