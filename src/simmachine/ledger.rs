//! Who uses how much of the machine, and which frames of it: one file that every process of a machine maps, or memory of its
//! own for a process that is a machine by itself.
//!
//! A process has a slot, and in it what it uses of each place. What is free is the capacity less the slots of the living:
//! there is no total that a killed process could leave wrong. The proof of life is a lock on a byte of the file that the
//! process' own descriptor holds. It goes with the process, however that ends, and stays while a child of `fork` still has
//! the descriptor, as the real driver's do. Frames that another process may hold have a record of their own, which lives
//! until nobody holds a lock on their stretch of the place's memory file.
//!
//! Changes are made under a mutex that survives the death of its owner. Every step between two stores counts too much
//! rather than too little, and leaves a dead process' slot to be cleared by whoever looks next.

use crate::files::{self, above_standard, is_locked, lock_bytes, map, map_file, memory_file};
use crate::settings::Settings;
use std::cell::UnsafeCell;
use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};

/// Granularity of physical memory, as measured on H200: minimum and recommended, for device and host.
pub const GRANULE: u64 = 2 << 20;
/// The most that one GPU or host node may have.
pub const MAX_PLACE_BYTES: u64 = 4 << 40;

const GPUS: usize = 32;
const NODES: usize = 16;
const PLACES: usize = GPUS + NODES;
const USES: usize = 5;
/// Processes at a time. A frame's owner is one byte.
const SLOTS: usize = 250;
const RECORDS: usize = 1 << 14;
const FRAMES: usize = (MAX_PLACE_BYTES / GRANULE) as usize;

/// What a frame's byte says beside the number of a slot and 1.
const FREE: u8 = 0;
/// Free, with what a killed process left in it.
const DIRTY: u8 = 254;
/// It has a record.
const SHARED: u8 = 255;

const MAGIC: u64 = 0x7369_6d6d_6163_6831;
/// Bytes of the file that only locks are taken on: of the slots, and of making the file ready.
const LIFE: i64 = 1 << 40;
const MAKING: i64 = LIFE + SLOTS as i64;

/// What memory is used for; reports count by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// `cuMemAlloc` and its relatives.
    Plain,
    /// `cuMemCreate`.
    Vmm,
    Context,
    /// Pinned host memory.
    Pinned,
    /// Pages of managed memory that are here now.
    Managed,
}

/// The place of the GPU with this number in the machine.
pub fn gpu_place(index: usize) -> usize {
    index
}

/// The place of a NUMA node.
pub fn host_place(node: usize) -> usize {
    GPUS + node
}

/// The file's layout. All zeros is a ledger that nobody has made ready.
#[repr(C)]
pub struct Ledger {
    ready: AtomicU64,
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    capacity: [AtomicU64; PLACES],
    /// No frame before this one is free.
    first_free: [AtomicU64; PLACES],
    /// Slots and records beyond these were never used.
    slots_used: AtomicU32,
    records_used: AtomicU32,
    slots: [Slot; SLOTS],
    records: [Record; RECORDS],
    frames: [[AtomicU8; FRAMES]; PLACES],
}

// SAFETY: every field is atomic but the mutex, which is only used through the pthread functions that are made for sharing.
unsafe impl Sync for Ledger {}

#[repr(C)]
struct Slot {
    taken: AtomicU32,
    pid: AtomicU32,
    start: AtomicU64,
    used: [[AtomicU64; USES]; PLACES],
    contexts: [AtomicU32; PLACES],
    /// Where the process has the place's memory file, and 1; 0 where it has not.
    files: [AtomicI32; PLACES],
}

/// Frames that a process beside the one that made them may hold.
#[repr(C)]
struct Record {
    live: AtomicU32,
    /// The slot that counts them as its own, and 1; 0 where that process has let go or ended.
    owner: AtomicU32,
    place: AtomicU32,
    purpose: AtomicU32,
    offset: AtomicU64,
    bytes: AtomicU64,
}

/// All memory of one place: its file, and where this process sees the whole of it.
pub struct Memory {
    pub file: OwnedFd,
    pub base: usize,
}

/// A process' view of the machine that it is part of.
pub struct Machine {
    ledger: &'static Ledger,
    /// `None` for a machine of one process.
    file: Option<Shared>,
    slot: usize,
    places: [OnceLock<Memory>; PLACES],
}

/// Somebody who looks at the machine without being part of it.
pub struct Visitor {
    ledger: &'static Ledger,
    file: Option<Shared>,
}

/// The ledger's file, through a description of this process' own.
struct Shared {
    file: OwnedFd,
    /// Kept beside the descriptor, which the program may close.
    inode: u64,
}

struct Locked<'a>(&'a Ledger);

impl Ledger {
    /// Waits for the mutex. Whoever died with it left nothing that has to be put right before the next change.
    fn lock(&self) -> Locked<'_> {
        // SAFETY: the mutex was initialised before the ledger was called ready; it is robust, so that an owner's death is
        // told instead of waited for.
        unsafe {
            if libc::pthread_mutex_lock(self.mutex.get()) == libc::EOWNERDEAD {
                libc::pthread_mutex_consistent(self.mutex.get());
            }
        }
        Locked(self)
    }

    /// Fills in an empty ledger. Nobody else may see it as ready before that.
    fn prepare(&self, settings: &Settings) {
        // SAFETY: the attribute is a local that lives across its calls, and nobody uses the mutex yet.
        unsafe {
            let mut kind: libc::pthread_mutexattr_t = std::mem::zeroed();
            libc::pthread_mutexattr_init(&raw mut kind);
            libc::pthread_mutexattr_setpshared(&raw mut kind, libc::PTHREAD_PROCESS_SHARED);
            libc::pthread_mutexattr_setrobust(&raw mut kind, libc::PTHREAD_MUTEX_ROBUST);
            libc::pthread_mutex_init(self.mutex.get(), &raw const kind);
            libc::pthread_mutexattr_destroy(&raw mut kind);
        }
        for (place, bytes) in settings.capacities().into_iter().enumerate() {
            self.capacity[place].store(bytes, Relaxed);
        }
        self.ready.store(MAGIC, Release);
    }

    fn slots(&self) -> impl Iterator<Item = (usize, &Slot)> {
        let used = self.slots_used.load(Relaxed) as usize;
        self.slots[..used].iter().enumerate().filter(|(_, slot)| slot.taken.load(Acquire) != 0)
    }

    fn records(&self) -> impl Iterator<Item = &Record> {
        let used = self.records_used.load(Relaxed) as usize;
        self.records[..used].iter().filter(|record| record.live.load(Acquire) != 0)
    }

    fn frames_of(&self, place: usize) -> usize {
        (self.capacity[place].load(Relaxed) / GRANULE) as usize
    }

    fn mark(&self, place: usize, offset: u64, bytes: u64, mark: u8) {
        let (first, count) = ((offset / GRANULE) as usize, bytes.div_ceil(GRANULE) as usize);
        for frame in &self.frames[place][first..first + count] {
            frame.store(mark, Relaxed);
        }
        if mark == FREE || mark == DIRTY {
            self.first_free[place].fetch_min(first as u64, Relaxed);
        }
    }

    /// Clears the slot of a process that has ended. What others may hold of its frames is left to their records.
    fn bury(&self, index: usize) {
        let (slot, mark) = (&self.slots[index], index as u8 + 1);
        for record in self.records().filter(|record| record.owner.load(Relaxed) == u32::from(mark)) {
            let place = record.place.load(Relaxed) as usize;
            self.mark(place, record.offset.load(Relaxed), record.bytes.load(Relaxed), SHARED);
            record.owner.store(0, Relaxed);
        }
        for place in 0..PLACES {
            for (at, frame) in self.frames[place][..self.frames_of(place)].iter().enumerate() {
                if frame.load(Relaxed) == mark {
                    frame.store(DIRTY, Relaxed);
                    self.first_free[place].fetch_min(at as u64, Relaxed);
                }
            }
            slot.used[place].iter().for_each(|used| used.store(0, Relaxed));
            slot.contexts[place].store(0, Relaxed);
            slot.files[place].store(0, Relaxed);
        }
        slot.taken.store(0, Release);
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread locked it in `Ledger::lock`.
        unsafe { libc::pthread_mutex_unlock(self.0.mutex.get()) };
    }
}

impl Slot {
    fn on(&self, place: usize) -> u64 {
        self.used[place].iter().map(|used| used.load(Relaxed)).sum()
    }
}

impl Record {
    fn is_on(&self, place: usize) -> bool {
        self.place.load(Relaxed) as usize == place
    }

    fn range(&self) -> (u64, u64) {
        (self.offset.load(Relaxed), self.bytes.load(Relaxed))
    }
}

/// The ledger in `file`, made ready by whoever comes first.
fn open(path: &Path, settings: &Settings) -> Result<(&'static Ledger, Shared), String> {
    let failed = |what: &str, error: std::io::Error| {
        format!("SIMCUDA_MACHINE={}: {what}: {error}; name a file in a folder that may be written", path.display())
    };
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(|error| failed("cannot be opened", error))?;
    let inode = file.metadata().map_err(|error| failed("cannot be looked at", error))?.ino();
    let file = above_standard(file).map_err(|error| failed("cannot be kept open", error))?;
    lock_bytes(&file, libc::F_WRLCK, MAKING, 1, libc::F_OFD_SETLKW)
        .map_err(|error| failed("cannot be locked", error))?;
    let bytes = size_of::<Ledger>();
    // SAFETY: plain system call on a descriptor we own.
    if unsafe { libc::ftruncate(file.as_raw_fd(), bytes as i64) } != 0 {
        return Err(failed("cannot be made larger", std::io::Error::last_os_error()));
    }
    let address = map(bytes as u64, libc::MAP_SHARED, file.as_raw_fd())
        .ok_or_else(|| failed("cannot be mapped", std::io::Error::last_os_error()))?;
    // SAFETY: the mapping has the ledger's size and is never taken away; all zeros is a ledger, and what other processes
    // write there goes through atomics.
    let ledger = unsafe { &*(address as *const Ledger) };
    if ledger.ready.load(Acquire) != MAGIC {
        ledger.prepare(settings);
    }
    let _ = lock_bytes(&file, libc::F_UNLCK, MAKING, 1, libc::F_OFD_SETLK);
    let same = |(place, bytes): (usize, u64)| ledger.capacity[place].load(Relaxed) == bytes;
    if !settings.capacities().into_iter().enumerate().all(same) {
        return Err(format!(
            "SIMCUDA_MACHINE={}: this machine was made with other SIMCUDA_GPUS, SIMCUDA_HOST or SIMCUDA_HOST_NODES; give \
             all its processes the same, or name a new file",
            path.display()
        ));
    }
    Ok((ledger, Shared { file, inode }))
}

impl Shared {
    fn is_locked(&self, index: usize) -> bool {
        is_locked(self.file.as_raw_fd(), LIFE + index as i64, 1)
    }

    /// Whether the process with this slot still is. It has ended when its lock is gone, unless it has the file mapped still
    /// and only closed the descriptor (as a daemon does), or this process closed its own and sees no locks.
    fn is_alive(&self, ledger: &Ledger, index: usize) -> bool {
        let slot = &ledger.slots[index];
        self.is_locked(index) || {
            let pid = slot.pid.load(Relaxed);
            start_of(pid) == Some(slot.start.load(Relaxed)) && maps(pid, self.inode)
        }
    }
}

/// When a process began, in the system's ticks; `None` for one that has ended.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; the state is the first field behind it and the start the twentieth.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") { None } else { fields.get(19)?.parse().ok() }
}

fn maps(pid: u32, inode: u64) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    text.lines().any(|line| line.split_whitespace().nth(4).and_then(|field| field.parse().ok()) == Some(inode))
}

impl Machine {
    /// The machine that `SIMCUDA_MACHINE` names, or one of this process' own.
    pub fn join(settings: &Settings) -> Result<Self, String> {
        let places = [const { OnceLock::new() }; PLACES];
        let Some(path) = &settings.machine else {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let address = map(size_of::<Ledger>() as u64, flags, -1).ok_or("no room for the machine's ledger")?;
            // SAFETY: zeroed memory of the ledger's size, never taken away.
            let ledger = unsafe { &*(address as *const Ledger) };
            ledger.prepare(settings);
            ledger.claim(0);
            return Ok(Self { ledger, file: None, slot: 0, places });
        };
        let (ledger, file) = open(path, settings)?;
        let guard = ledger.lock();
        // What this process was before an `exec` has the same number and start, and no lock.
        let me = std::process::id();
        for (index, slot) in ledger.slots() {
            let mine = slot.pid.load(Relaxed) == me && Some(slot.start.load(Relaxed)) == start_of(me);
            if !file.is_locked(index) && (mine || !file.is_alive(ledger, index)) {
                ledger.bury(index);
            }
        }
        let free = (0..SLOTS).find(|&index| ledger.slots[index].taken.load(Relaxed) == 0);
        let slot =
            free.ok_or_else(|| format!("SIMCUDA_MACHINE={}: {SLOTS} processes are on it already", path.display()))?;
        lock_bytes(&file.file, libc::F_WRLCK, LIFE + slot as i64, 1, libc::F_OFD_SETLK)
            .map_err(|error| format!("SIMCUDA_MACHINE={}: cannot be locked: {error}", path.display()))?;
        ledger.claim(slot);
        drop(guard);
        Ok(Self { ledger, file: Some(file), slot, places })
    }

    pub fn ledger(&self) -> &'static Ledger {
        self.ledger
    }

    fn mine(&self) -> &Slot {
        &self.ledger.slots[self.slot]
    }

    fn mark(&self) -> u8 {
        self.slot as u8 + 1
    }

    /// The memory of a place, which a living process of this machine has or which begins here.
    pub fn memory(&self, place: usize, name: &str) -> Result<&Memory, String> {
        let _guard = self.ledger.lock();
        if let Some(memory) = self.places[place].get() {
            return Ok(memory);
        }
        self.reap();
        let capacity = self.ledger.capacity[place].load(Relaxed);
        let what = format!("{capacity} bytes for {name}");
        let holders = || self.ledger.slots().filter(|(_, slot)| slot.files[place].load(Relaxed) != 0);
        let file = match holders().find_map(|(_, slot)| slot.file(place, name)) {
            Some(file) => file,
            None => {
                // Whatever was there went with the last process that had it. Where all who have it closed their descriptors
                // (a daemon; a child of `fork` that keeps the memory of a killed parent), their frames stay counted, and
                // nobody can be given them any more.
                if holders().next().is_none() {
                    self.ledger.mark(place, 0, capacity, FREE);
                    let left = self.ledger.records().filter(|record| record.is_on(place));
                    left.for_each(|record| record.live.store(0, Release));
                }
                memory_file(name, capacity).ok_or_else(|| format!("memfd_create of {what} failed"))?
            }
        };
        let base = map_file(&file, 0, capacity)
            .ok_or_else(|| format!("mmap of {what} failed; lower SIMCUDA_GPUS or SIMCUDA_HOST"))?;
        self.mine().files[place].store(file.as_raw_fd() + 1, Relaxed);
        Ok(self.places[place].get_or_init(|| Memory { file, base }))
    }

    /// Bytes in use at a place, by all processes.
    pub fn used(&self, place: usize) -> u64 {
        let _guard = self.ledger.lock();
        self.reap();
        self.sum(place)
    }

    fn sum(&self, place: usize) -> u64 {
        let slots: u64 = self.ledger.slots().map(|(_, slot)| slot.on(place)).sum();
        let shared = self.ledger.records().filter(|record| record.is_on(place));
        slots + shared.map(|record| record.bytes.load(Relaxed)).sum::<u64>()
    }

    /// Counts `bytes` against a place, or says how many are missing.
    pub fn charge(&self, place: usize, purpose: Use, bytes: u64) -> Result<(), u64> {
        let _guard = self.ledger.lock();
        let free = || self.ledger.capacity[place].load(Relaxed).saturating_sub(self.sum(place));
        let mut left = free();
        if bytes > left {
            self.reap();
            left = free();
        }
        if bytes > left {
            return Err(bytes - left);
        }
        self.mine().used[place][purpose as usize].fetch_add(bytes, Relaxed);
        if purpose == Use::Context {
            self.mine().contexts[place].fetch_add(1, Relaxed);
        }
        Ok(())
    }

    pub fn refund(&self, place: usize, purpose: Use, bytes: u64) {
        if purpose == Use::Context {
            self.mine().contexts[place].fetch_sub(1, Relaxed);
        }
        self.mine().used[place][purpose as usize].fetch_sub(bytes, Relaxed);
    }

    /// Frames of a place for bytes that were charged, in one stretch if there is one: a GPU's page tables make fragmentation
    /// of physical memory invisible too. They read as zero.
    pub fn take(&self, place: usize, bytes: u64) -> Option<Vec<(u64, u64)>> {
        let guard = self.ledger.lock();
        let frames = &self.ledger.frames[place][..self.ledger.frames_of(place)];
        let wanted = bytes.div_ceil(GRANULE) as usize;
        let is_free = |at: usize| matches!(frames[at].load(Relaxed), FREE | DIRTY);
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let (mut first, mut at) = (None, self.ledger.first_free[place].load(Relaxed) as usize);
        let mut found = 0;
        while at < frames.len() {
            if !is_free(at) {
                at += 1;
                continue;
            }
            let start = at;
            while at < frames.len() && at - start < wanted && is_free(at) {
                at += 1;
            }
            first = first.or(Some(start));
            if at - start == wanted {
                (runs, found) = (vec![(start, wanted)], wanted);
                break;
            }
            if found < wanted {
                let count = (at - start).min(wanted - found);
                runs.push((start, count));
                found += count;
            }
        }
        if found < wanted {
            return None;
        }
        let mut dirty = Vec::new();
        for &(start, count) in &runs {
            for (index, frame) in frames[start..start + count].iter().enumerate() {
                if frame.swap(self.mark(), Relaxed) == DIRTY {
                    dirty.push(start + index);
                }
            }
        }
        // Frames before the first free one stay taken; the search has passed them.
        if let Some(first) = first {
            let next = runs.iter().find(|run| run.0 == first).map_or(first, |run| run.0 + run.1);
            self.ledger.first_free[place].store(next as u64, Relaxed);
        }
        drop(guard);
        for frame in dirty {
            self.punch(place, frame as u64 * GRANULE, GRANULE);
        }
        Some(runs.into_iter().map(|(start, count)| (start as u64 * GRANULE, count as u64 * GRANULE)).collect())
    }

    /// Gives frames back, and what was charged for them. `mark` may write into them once they are emptied.
    pub fn give(&self, place: usize, purpose: Use, offset: u64, bytes: u64, mark: impl FnOnce()) {
        self.punch(place, offset, bytes);
        mark();
        let _guard = self.ledger.lock();
        self.ledger.mark(place, offset, bytes, FREE);
        self.refund(place, purpose, bytes);
    }

    /// Whether another description holds a lock on a stretch of a place's memory.
    fn is_open(&self, place: usize, offset: u64, bytes: u64) -> bool {
        match self.places[place].get() {
            Some(memory) => is_locked(memory.file.as_raw_fd(), offset as i64, bytes as i64),
            None => self.ledger.is_open(place, offset, bytes),
        }
    }

    /// From here on other processes may hold these frames, beyond their end in this one. `None` where there are too many.
    pub fn share(&self, place: usize, purpose: Use, offset: u64, bytes: u64) -> Option<usize> {
        let _guard = self.ledger.lock();
        let index = self.ledger.records.iter().position(|record| record.live.load(Relaxed) == 0)?;
        let record = &self.ledger.records[index];
        record.owner.store(u32::from(self.mark()), Relaxed);
        record.place.store(place as u32, Relaxed);
        record.purpose.store(purpose as u32, Relaxed);
        record.offset.store(offset, Relaxed);
        record.bytes.store(bytes, Relaxed);
        self.ledger.records_used.fetch_max(index as u32 + 1, Relaxed);
        record.live.store(1, Release);
        self.ledger.mark(place, offset, bytes, SHARED);
        self.refund(place, purpose, bytes);
        Some(index)
    }

    /// Undoes [`Machine::share`] before anybody was given the frames.
    pub fn take_back(&self, index: usize) {
        let _guard = self.ledger.lock();
        let record = &self.ledger.records[index];
        self.reclaim(record);
    }

    /// This process lets go of frames that it shared: they are free now, or when the last other holder lets go.
    pub fn end_shared(&self, index: usize) {
        let _guard = self.ledger.lock();
        self.ledger.records[index].owner.store(0, Relaxed);
        self.end_if_closed(&self.ledger.records[index]);
    }

    fn end_if_closed(&self, record: &Record) {
        let (place, (offset, bytes)) = (record.place.load(Relaxed) as usize, record.range());
        if self.is_open(place, offset, bytes) {
            return;
        }
        self.reclaim(record);
        // Whoever cannot clear the frames leaves that to the next who takes them.
        let mark = if self.punch(place, offset, bytes) { FREE } else { DIRTY };
        self.ledger.mark(place, offset, bytes, mark);
        self.mine().used[place][record.purpose.load(Relaxed) as usize].fetch_sub(bytes, Relaxed);
    }

    /// Makes the frames of a record this process' own again. A death on the way leaves no frames that are nobody's, nor a
    /// record of frames that somebody else has taken.
    fn reclaim(&self, record: &Record) {
        let (place, (offset, bytes)) = (record.place.load(Relaxed) as usize, record.range());
        self.ledger.mark(place, offset, bytes, self.mark());
        self.mine().used[place][record.purpose.load(Relaxed) as usize].fetch_add(bytes, Relaxed);
        record.live.store(0, Release);
    }

    /// Clears what processes that have ended left. Under the mutex.
    fn reap(&self) {
        if let Some(file) = &self.file {
            let others = self.ledger.slots().filter(|(index, _)| *index != self.slot);
            let ended = others.filter(|(index, _)| !file.is_alive(self.ledger, *index));
            ended.for_each(|(index, _)| self.ledger.bury(index));
        }
        let left = self.ledger.records().filter(|record| record.owner.load(Relaxed) == 0);
        left.for_each(|record| self.end_if_closed(record));
    }

    /// Returns the pages to the system, so that the stretch reads as zero; whether this process could.
    fn punch(&self, place: usize, offset: u64, bytes: u64) -> bool {
        let Some(memory) = self.places[place].get() else { return false };
        let address = memory.base + offset as usize;
        // SAFETY: a stretch of the place's own mapping, whose frames nobody holds or this process has just taken. By
        // address and not by descriptor, which the program may have closed and opened again as something else.
        unsafe { libc::madvise(address as *mut _, bytes as usize, libc::MADV_REMOVE) == 0 }
    }
}

impl Ledger {
    fn claim(&self, index: usize) {
        let (slot, me) = (&self.slots[index], std::process::id());
        slot.pid.store(me, Relaxed);
        slot.start.store(start_of(me).unwrap_or(0), Relaxed);
        self.slots_used.fetch_max(index as u32 + 1, Relaxed);
        slot.taken.store(1, Release);
    }

    /// As [`Machine::is_open`], for a process that does not have the place's memory, through one that has.
    fn is_open(&self, place: usize, offset: u64, bytes: u64) -> bool {
        let file = self.slots().find_map(|(_, slot)| slot.file(place, ""));
        file.is_some_and(|file| is_locked(file.as_raw_fd(), offset as i64, bytes as i64))
    }
}

impl Slot {
    /// A place's memory file through the process that has this slot, under a description of its own.
    fn file(&self, place: usize, name: &str) -> Option<OwnedFd> {
        let descriptor = self.files[place].load(Relaxed).checked_sub(1).filter(|descriptor| *descriptor >= 0)?;
        let path = format!("/proc/{}/fd/{descriptor}", self.pid.load(Relaxed));
        let wanted = format!("/memfd:simcuda-{}", if name.is_empty() { "" } else { &name["simcuda-".len()..] });
        // The number means another file where the process closed its descriptors.
        std::fs::read_link(&path).ok().filter(|link| link.to_string_lossy().starts_with(&wanted))?;
        files::open(path).ok()
    }
}

impl Visitor {
    /// Looks at the machine that `SIMCUDA_MACHINE` names.
    pub fn of(settings: &Settings) -> Option<Result<Self, String>> {
        let path = settings.machine.as_ref()?;
        Some(open(path, settings).map(|(ledger, file)| Self { ledger, file: Some(file) }))
    }

    /// Looks at a machine of one process, from inside.
    ///
    /// # Safety
    /// `ledger` is what [`Machine::ledger`] returned in this process.
    pub unsafe fn within(ledger: *const Ledger) -> Self {
        // SAFETY: a ledger is never taken away.
        Self { ledger: unsafe { &*ledger }, file: None }
    }

    fn living(&self) -> impl Iterator<Item = (usize, &Slot)> {
        let alive = |index| self.file.as_ref().is_none_or(|file| file.is_alive(self.ledger, index));
        self.ledger.slots().filter(move |(index, _)| alive(*index))
    }

    /// Bytes in use at a place, by all processes that are there.
    pub fn used(&self, place: usize) -> u64 {
        let _guard = self.ledger.lock();
        let slots: u64 = self.living().map(|(_, slot)| slot.on(place)).sum();
        let held = |record: &&Record| {
            let (offset, bytes) = record.range();
            let owner = (record.owner.load(Relaxed) as usize).checked_sub(1);
            record.is_on(place)
                && (owner.is_some_and(|owner| self.living().any(|(index, _)| index == owner))
                    || self.ledger.is_open(place, offset, bytes))
        };
        slots + self.ledger.records().filter(held).map(|record| record.bytes.load(Relaxed)).sum::<u64>()
    }

    /// Processes with a context on a GPU, and the bytes they use there.
    pub fn on_gpu(&self, place: usize) -> Vec<(u32, u64)> {
        let _guard = self.ledger.lock();
        let with_context = self.living().filter(|(_, slot)| slot.contexts[place].load(Relaxed) > 0);
        let bytes = |index: usize, slot: &Slot| {
            let own = |record: &&Record| record.is_on(place) && record.owner.load(Relaxed) == index as u32 + 1;
            slot.on(place) + self.ledger.records().filter(own).map(|record| record.bytes.load(Relaxed)).sum::<u64>()
        };
        with_context.map(|(index, slot)| (slot.pid.load(Relaxed), bytes(index, slot))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of this test alone, with one GPU of which 8 frames are free.
    fn machine() -> Machine {
        let settings = Settings::read(|name| (name == "SIMCUDA_GPUS").then(|| "1x64MiB".to_owned())).unwrap();
        let machine = Machine::join(&settings).unwrap();
        machine.memory(0, "simcuda-gpu-0").unwrap();
        // All but 8 of the 32 frames.
        machine.charge(0, Use::Plain, 24 * GRANULE).unwrap();
        assert_eq!(machine.take(0, 24 * GRANULE), Some(vec![(0, 24 * GRANULE)]));
        machine
    }

    fn take(machine: &Machine, frames: u64) -> Option<Vec<(u64, u64)>> {
        machine.charge(0, Use::Vmm, frames * GRANULE).ok()?;
        let taken = machine.take(0, frames * GRANULE).unwrap();
        Some(taken.into_iter().map(|(offset, bytes)| (offset / GRANULE, bytes / GRANULE)).collect())
    }

    fn give(machine: &Machine, frame: u64, frames: u64) {
        machine.give(0, Use::Vmm, frame * GRANULE, frames * GRANULE, || ());
    }

    #[test]
    fn frames_come_in_one_stretch_where_there_is_one_and_else_in_several() {
        let machine = machine();
        assert_eq!([take(&machine, 2), take(&machine, 3)], [Some(vec![(24, 2)]), Some(vec![(26, 3)])]);
        give(&machine, 24, 2);
        assert_eq!(take(&machine, 3), Some(vec![(29, 3)]), "the first stretch that is long enough");
        assert_eq!(take(&machine, 3), None);
        give(&machine, 30, 2);
        assert_eq!(take(&machine, 4), Some(vec![(24, 2), (30, 2)]));
        give(&machine, 26, 1);
        assert_eq!([take(&machine, 2), take(&machine, 1)], [None, Some(vec![(26, 1)])]);
        assert_eq!(machine.used(0), 64 << 20);
    }

    #[test]
    fn what_is_missing_is_told_and_nothing_charged() {
        let machine = machine();
        assert_eq!(machine.charge(0, Use::Pinned, 8 * GRANULE + 5), Err(5));
        assert_eq!(machine.used(0), 24 * GRANULE);
        assert_eq!(machine.charge(0, Use::Pinned, 8 * GRANULE), Ok(()));
        assert_eq!(machine.charge(0, Use::Context, 1), Err(1));
        machine.refund(0, Use::Pinned, 8 * GRANULE);
        assert_eq!(machine.used(0), 24 * GRANULE);
    }

    #[test]
    fn shared_frames_are_kept_while_a_lock_on_them_is_held() {
        let machine = machine();
        assert_eq!(take(&machine, 4), Some(vec![(24, 4)]));
        let record = machine.share(0, Use::Vmm, 24 * GRANULE, 4 * GRANULE).unwrap();
        let memory = machine.memory(0, "simcuda-gpu-0").unwrap();
        let path = format!("/proc/self/fd/{}", memory.file.as_raw_fd());
        let holder = OpenOptions::new().read(true).write(true).open(path).unwrap();
        lock_bytes(&holder, libc::F_RDLCK, 24 << 21, 4 << 21, libc::F_OFD_SETLK).unwrap();
        machine.end_shared(record);
        assert_eq!((machine.used(0), take(&machine, 5)), (28 * GRANULE, None));
        drop(holder);
        assert_eq!((machine.used(0), take(&machine, 5)), (24 * GRANULE, Some(vec![(24, 5)])));
    }
}
