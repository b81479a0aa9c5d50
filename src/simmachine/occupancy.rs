//! Who uses how much of the machine, and which frames of it: one file that every process of a machine maps, or memory of its
//! own for a process that is a machine by itself.
//!
//! A process has a slot, and in it what it uses of each place. What is free is the capacity less the slots of the living:
//! there is no total that a killed process could leave wrong. The proof of life is a lock on a byte of the file that the
//! process's own descriptor holds. It goes with the process, however that ends, and stays while a child of `fork` still has
//! the descriptor, as the real driver's do. Frames that another process may hold have a record of their own, which lives
//! until nobody holds a lock on their stretch of the place's memory file.
//!
//! Changes are made under a mutex that survives the death of its owner. Every step between two stores counts too much
//! rather than too little, and leaves a dead process's slot to be cleared by whoever looks next.

use crate::files::{self, above_standard, is_locked, lock_bytes, map, reserve, resize};
use crate::settings::Settings;
use std::cell::UnsafeCell;
use std::fs::OpenOptions;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};

/// Granularity of physical memory, as measured on H200: minimum and recommended, for device and host.
pub const GRANULE: u64 = 2 << 20;
/// The most that one GPU or host node may have.
pub const MAX_PLACE_BYTES: u64 = 4 << 40;

const GPUS: usize = 32;
const NODES: usize = 16;
pub(crate) const PLACES: usize = GPUS + NODES;
const USES: usize = 6;
/// Processes at a time. A frame's owner is one byte.
pub(crate) const SLOTS: usize = 250;
const RECORDS: usize = 1 << 14;
const FRAMES: usize = (MAX_PLACE_BYTES / GRANULE) as usize;

/// What a frame's byte says beside the number of a slot and 1.
pub(crate) const FREE: u8 = 0;
/// Free, with what a killed process left in it.
pub(crate) const DIRTY: u8 = 254;
/// It has a record.
pub(crate) const SHARED: u8 = 255;

const MAGIC: u64 = 0x7369_6d6d_6163_6831;
/// Bytes of the file that only locks are taken on: of the slots, and of making the file ready.
pub(crate) const LIFE: i64 = 1 << 40;
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
    /// What `cuInit` takes before there is a context.
    Init,
}

/// The place of the GPU with this number in the machine.
pub fn gpu_place(index: usize) -> usize {
    index
}

/// The place of a NUMA node.
pub fn host_place(node: usize) -> usize {
    GPUS + node
}

/// The file's layout. A file of zeros is one that nobody has made ready.
#[repr(C)]
pub struct Occupancy {
    pub(crate) ready: AtomicU64,
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    pub(crate) capacity: [AtomicU64; PLACES],
    /// No frame before this one is free.
    pub(crate) first_free: [AtomicU64; PLACES],
    /// Slots and records beyond these were never used.
    pub(crate) slots_used: AtomicU32,
    pub(crate) records_used: AtomicU32,
    pub(crate) slots: [Slot; SLOTS],
    pub(crate) records: [Record; RECORDS],
    pub(crate) frames: [[AtomicU8; FRAMES]; PLACES],
}

// SAFETY: every field is atomic but the mutex, which is only used through the pthread functions that are made for sharing.
unsafe impl Sync for Occupancy {}

#[repr(C)]
pub(crate) struct Slot {
    pub(crate) taken: AtomicU32,
    pub(crate) pid: AtomicU32,
    pub(crate) start: AtomicU64,
    pub(crate) used: [[AtomicU64; USES]; PLACES],
    pub(crate) contexts: [AtomicU32; PLACES],
    /// Where the process has the place's memory file, and 1; 0 where it has not.
    pub(crate) files: [AtomicI32; PLACES],
    /// See [`Frozen`].
    pub(crate) frozen: AtomicU32,
    /// The driver's answer when its memory is to come back; 0: it does.
    pub(crate) unfit: AtomicI32,
    /// The driver's answer when its memory is to leave; 0: it does.
    pub(crate) refuses: AtomicI32,
    /// How often its memory came back.
    pub(crate) returns: AtomicU32,
}

/// Whether a process was stopped from outside (`cuCheckpointProcess*`), by the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Frozen {
    Not = 0,
    /// It waits at its next call of the driver.
    Locked = 1,
    /// And it has nothing on the GPUs.
    Gone = 2,
}

impl Frozen {
    fn of(number: u32) -> Self {
        [Self::Not, Self::Locked, Self::Gone].get(number as usize).copied().unwrap_or(Self::Not)
    }
}

/// Frames that a process beside the one that made them may hold.
#[repr(C)]
pub(crate) struct Record {
    pub(crate) live: AtomicU32,
    /// The slot that counts them as its own, and 1; 0 where that process has let go or ended.
    pub(crate) owner: AtomicU32,
    pub(crate) place: AtomicU32,
    pub(crate) purpose: AtomicU32,
    pub(crate) offset: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

/// The file of an [`Occupancy`], through a description of this process's own.
pub(crate) struct Shared {
    pub(crate) file: OwnedFd,
    /// Kept beside the descriptor, which the program may close.
    inode: u64,
}

pub(crate) struct Locked<'a>(&'a Occupancy);

impl Occupancy {
    /// Waits for the mutex. Whoever died with it left nothing that has to be put right before the next change.
    pub(crate) fn lock(&self) -> Locked<'_> {
        loop {
            let mut until = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the time is a local; the mutex was initialised before `ready` was set, and it is robust, so that an owner's death is told instead of waited for.
            let answer = unsafe {
                libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut until);
                until.tv_sec += 1;
                libc::pthread_mutex_timedlock(self.mutex.get(), &raw const until)
            };
            match answer {
                libc::ETIMEDOUT => self.free_from_the_dead(),
                libc::EOWNERDEAD => {
                    // SAFETY: this thread has the mutex.
                    unsafe { libc::pthread_mutex_consistent(self.mutex.get()) };
                    return Locked(self);
                }
                _ => return Locked(self),
            }
        }
    }

    /// Says of an owner that is no more what the kernel says of it: that it died. A process that is killed in the middle may not be able to write that any more, since
    /// the page lies in a file on a disk that is just being written; whoever came next waited for good (seen after some dozen kills).
    fn free_from_the_dead(&self) {
        // SAFETY: such a mutex begins with the word that the kernel knows of, which all change by atomic operations alone.
        let word = unsafe { AtomicU32::from_ptr(self.mutex.get().cast()) };
        let seen = word.load(Relaxed);
        let owner = seen & libc::FUTEX_TID_MASK;
        if owner != 0 && !Path::new(&format!("/proc/{owner}")).exists() {
            let died = seen & libc::FUTEX_WAITERS | libc::FUTEX_OWNER_DIED;
            let _ = word.compare_exchange(seen, died, Relaxed, Relaxed);
        }
    }

    /// Fills in a file of zeros. Nobody else may see it as ready before that.
    pub(crate) fn prepare(&self, settings: &Settings) {
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

    pub(crate) fn slots(&self) -> impl Iterator<Item = (usize, &Slot)> {
        let used = self.slots_used.load(Relaxed) as usize;
        self.slots[..used].iter().enumerate().filter(|(_, slot)| slot.taken.load(Acquire) != 0)
    }

    pub(crate) fn records(&self) -> impl Iterator<Item = &Record> {
        let used = self.records_used.load(Relaxed) as usize;
        self.records[..used].iter().filter(|record| record.live.load(Acquire) != 0)
    }

    pub(crate) fn frames_of(&self, place: usize) -> usize {
        (self.capacity[place].load(Relaxed) / GRANULE) as usize
    }

    pub(crate) fn mark(&self, place: usize, offset: u64, bytes: u64, mark: u8) {
        let (first, count) = ((offset / GRANULE) as usize, bytes.div_ceil(GRANULE) as usize);
        for frame in &self.frames[place][first..first + count] {
            frame.store(mark, Relaxed);
        }
        if mark == FREE || mark == DIRTY {
            self.first_free[place].fetch_min(first as u64, Relaxed);
        }
    }

    /// Clears the slot of a process that has ended. What others may hold of its frames is left to their records.
    pub(crate) fn bury(&self, index: usize) {
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
        slot.frozen.store(0, Relaxed);
        slot.unfit.store(0, Relaxed);
        slot.refuses.store(0, Relaxed);
        slot.returns.store(0, Relaxed);
        slot.taken.store(0, Release);
    }

    pub(crate) fn claim(&self, index: usize) {
        let (slot, me) = (&self.slots[index], std::process::id());
        slot.pid.store(me, Relaxed);
        slot.start.store(start_of(me).unwrap_or(0), Relaxed);
        self.slots_used.fetch_max(index as u32 + 1, Relaxed);
        slot.taken.store(1, Release);
    }

    /// Whether any process holds a lock on a stretch of a place's memory, asked through a process that has its file. Whoever
    /// has the file itself asks by its own descriptor ([`crate::Machine`]).
    pub(crate) fn is_open(&self, place: usize, offset: u64, bytes: u64) -> bool {
        let file = self.slots().find_map(|(_, slot)| slot.file(place, ""));
        file.is_some_and(|file| is_locked(file.as_raw_fd(), offset as i64, bytes as i64))
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread locked it in `Occupancy::lock`.
        unsafe { libc::pthread_mutex_unlock(self.0.mutex.get()) };
    }
}

impl Slot {
    pub(crate) fn frozen(&self) -> Frozen {
        Frozen::of(self.frozen.load(Acquire))
    }

    pub(crate) fn on(&self, place: usize) -> u64 {
        if self.frozen() == Frozen::Gone {
            return 0;
        }
        self.used[place].iter().map(|used| used.load(Relaxed)).sum()
    }

    /// A place's memory file through the process that has this slot, under a description of its own.
    pub(crate) fn file(&self, place: usize, name: &str) -> Option<OwnedFd> {
        let descriptor = self.files[place].load(Relaxed).checked_sub(1).filter(|descriptor| *descriptor >= 0)?;
        let path = format!("/proc/{}/fd/{descriptor}", self.pid.load(Relaxed));
        let wanted = format!("/memfd:simcuda-{}", if name.is_empty() { "" } else { &name["simcuda-".len()..] });
        // The number means another file where the process closed its descriptors.
        std::fs::read_link(&path).ok().filter(|link| link.to_string_lossy().starts_with(&wanted))?;
        files::open(path).ok()
    }
}

impl Record {
    pub(crate) fn is_on(&self, place: usize) -> bool {
        self.place.load(Relaxed) as usize == place
    }

    pub(crate) fn range(&self) -> (u64, u64) {
        (self.offset.load(Relaxed), self.bytes.load(Relaxed))
    }
}

/// The file at `path`, mapped, and made ready by whoever comes first.
pub(crate) fn open(path: &Path, settings: &Settings) -> Result<(&'static Occupancy, Shared), String> {
    let failed = |what: &str, error: std::io::Error| {
        format!(
            "SIMCUDA_MACHINE={}: {what}: {error}; name a file in a folder that may be written and has room (gpupool sim makes it in \
             TMPDIR)",
            path.display()
        )
    };
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(|error| failed("cannot be opened", error))?;
    let inode = file.metadata().map_err(|error| failed("cannot be looked at", error))?.ino();
    let file = above_standard(file).map_err(|error| failed("cannot be kept open", error))?;
    lock_bytes(&file, libc::F_WRLCK, MAKING, 1, libc::F_OFD_SETLKW)
        .map_err(|error| failed("cannot be locked", error))?;
    let bytes = size_of::<Occupancy>();
    resize(&file, bytes as u64).map_err(|error| failed("cannot be made larger", error))?;
    let frames = size_of::<[AtomicU8; FRAMES]>();
    // What is not reserved is never touched.
    let places = settings.capacities().into_iter().enumerate();
    let frames =
        places.map(|(place, bytes)| (offset_of!(Occupancy, frames) + place * frames, bytes.div_ceil(GRANULE) as usize));
    for (start, bytes) in [(0, offset_of!(Occupancy, frames))].into_iter().chain(frames).filter(|(_, bytes)| *bytes > 0)
    {
        reserve(&file, start, bytes).map_err(|error| failed("has no room", error))?;
    }
    let address = map(bytes as u64, libc::MAP_SHARED, file.as_raw_fd())
        .ok_or_else(|| failed("cannot be mapped", std::io::Error::last_os_error()))?;
    // SAFETY: the mapping has the size of the layout and is never taken away; zeros are valid for it, and what other processes
    // write there goes through atomics.
    let occupancy = unsafe { &*(address as *const Occupancy) };
    if occupancy.ready.load(Acquire) != MAGIC {
        occupancy.prepare(settings);
    }
    let _ = lock_bytes(&file, libc::F_UNLCK, MAKING, 1, libc::F_OFD_SETLK);
    let same = |(place, bytes): (usize, u64)| occupancy.capacity[place].load(Relaxed) == bytes;
    if !settings.capacities().into_iter().enumerate().all(same) {
        return Err(format!(
            "SIMCUDA_MACHINE={}: this machine was made with other SIMCUDA_GPUS, SIMCUDA_HOST or SIMCUDA_HOST_NODES; give \
             all its processes the same, or name a new file",
            path.display()
        ));
    }
    Ok((occupancy, Shared { file, inode }))
}

impl Shared {
    pub(crate) fn is_locked(&self, index: usize) -> bool {
        is_locked(self.file.as_raw_fd(), LIFE + index as i64, 1)
    }

    /// Whether the process with this slot still is. It has ended when its lock is gone, unless it has the file mapped still
    /// and only closed the descriptor (as a daemon does), or this process closed its own and sees no locks.
    pub(crate) fn is_alive(&self, occupancy: &Occupancy, index: usize) -> bool {
        let slot = &occupancy.slots[index];
        self.is_locked(index) || {
            let pid = slot.pid.load(Relaxed);
            start_of(pid) == Some(slot.start.load(Relaxed)) && maps(pid, self.inode)
        }
    }
}

/// When a process began, in the system's ticks; `None` for one that has ended.
pub(crate) fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; the state is the first field behind it and the start the twentieth.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") { None } else { fields.get(19)?.parse().ok() }
}

fn maps(pid: u32, inode: u64) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    text.lines().any(|line| line.split_whitespace().nth(4).and_then(|field| field.parse().ok()) == Some(inode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_for_an_owner_that_died_and_of_whom_nobody_said_so() {
        let settings = Settings::read(|name| (name == "SIMCUDA_GPUS").then(|| "1x64MiB".to_owned())).unwrap();
        // SAFETY: a file of zeros is one that nobody has made ready, and so is such memory; it is made and freed by its own layout.
        let machine = unsafe { Box::<Occupancy>::new_zeroed().assume_init() };
        machine.prepare(&settings);
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        // SAFETY: nobody else has the mutex, whose first word is its owner.
        unsafe { machine.mutex.get().cast::<u32>().write(gone.id()) };
        drop(machine.lock());
        drop(machine.lock());
    }
}
