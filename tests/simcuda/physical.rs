//! Physical memory: one sparse file for each GPU and host node, mapped once as a whole.
//!
//! The driver reaches all of it through that alias mapping. Device addresses are never mapped for the processor, so a
//! program that follows a device pointer crashes as it would with a real GPU, and data outlives any change of addresses.

use crate::error::{Code, Outcome};
use crate::extents::Extents;
use crate::residence;
use crate::strict;
use parking_lot::{Mutex, MutexGuard};
use std::ffi::CString;
use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Granularity of physical memory, as measured on H200: minimum and recommended, for device and host.
pub const GRANULE: u64 = 2 << 20;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// By ordinal.
    Gpu(usize),
    /// By NUMA node.
    Host(u32),
}

/// What memory is used for; the report and the probes count by it.
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

/// Bytes in use, by purpose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub plain: u64,
    pub vmm: u64,
    pub contexts: u64,
    pub pinned: u64,
    pub managed: u64,
    pub peak: u64,
}

impl Usage {
    pub fn total(&self) -> u64 {
        self.plain + self.vmm + self.contexts + self.pinned + self.managed
    }

    fn counter(&mut self, purpose: Use) -> &mut u64 {
        match purpose {
            Use::Plain => &mut self.plain,
            Use::Vmm => &mut self.vmm,
            Use::Context => &mut self.contexts,
            Use::Pinned => &mut self.pinned,
            Use::Managed => &mut self.managed,
        }
    }
}

/// All physical memory of one place.
pub struct Store {
    pub place: Place,
    pub capacity: u64,
    file: OwnedFd,
    base: usize,
    state: Mutex<State>,
    /// Mirror of the total, so that `cuMemGetInfo` takes no lock.
    used: AtomicU64,
    /// Mirror of the length of `lingering`.
    lingers: AtomicUsize,
}

struct State {
    free: Extents,
    usage: Usage,
    /// Freed here, and still open in another process.
    lingering: Vec<(Piece, Use)>,
}

impl Store {
    /// `index` is the place's number in the machine, which every process knows it by.
    pub fn new(place: Place, index: usize, capacity: u64) -> Result<Self, String> {
        let what = format!("{capacity} bytes for {place:?}");
        let file =
            memory_file(&file_name(place, index), capacity).ok_or_else(|| format!("memfd_create of {what} failed"))?;
        let base = alias(&file, capacity)
            .ok_or_else(|| format!("mmap of {what} failed; lower SIMCUDA_GPUS or SIMCUDA_HOST"))?;
        let state = State { free: Extents::new(0, capacity), usage: Usage::default(), lingering: Vec::new() };
        let (used, lingers) = (AtomicU64::new(0), AtomicUsize::new(0));
        Ok(Self { place, capacity, file, base, state: Mutex::new(state), used, lingers })
    }

    pub fn used(&self) -> u64 {
        self.reap();
        self.used.load(Ordering::Relaxed)
    }

    pub fn usage(&self) -> Usage {
        self.reap();
        self.state.lock().usage
    }

    /// Takes back what other processes have let go of since it was freed here.
    fn reap(&self) {
        if self.lingers.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut state = self.state.lock();
        let (open, closed): (Vec<_>, Vec<_>) = state.lingering.drain(..).partition(|(piece, _)| self.is_open(piece));
        state.lingering = open;
        self.lingers.store(state.lingering.len(), Ordering::Relaxed);
        for (piece, purpose) in closed {
            self.take_back(&mut state, &piece, purpose);
        }
    }

    /// Whether another process can still reach this stretch: it holds a descriptor from [`Physical::share`].
    fn is_open(&self, piece: &Piece) -> bool {
        let mut lock = range_lock(libc::F_WRLCK, piece.offset, piece.bytes);
        // SAFETY: plain system call on a descriptor we own, with a description that outlives it. It asks whether a lock
        // could be had and takes none.
        let asked = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        asked == 0 && lock.l_type != libc::F_UNLCK as libc::c_short
    }

    fn take_back(&self, state: &mut State, piece: &Piece, purpose: Use) {
        let written = strict::written(&self.file, piece.offset, piece.bytes);
        punch(&self.file, piece);
        strict::poison(&self.file, &written);
        state.free.give(piece.offset, piece.bytes);
        self.refund_in(state, piece.bytes, purpose);
    }

    /// Counts `bytes` against the capacity; OUT_OF_MEMORY if they are not there. For contexts and pinned memory, whose
    /// bytes are not in the file.
    pub fn charge(&self, bytes: u64, purpose: Use) -> Outcome {
        self.charged(bytes, purpose).map(drop)
    }

    /// As [`Store::charge`], without making managed memory leave.
    pub fn charge_if_free(&self, bytes: u64, purpose: Use) -> bool {
        self.charge_in(&mut self.state.lock(), bytes, purpose).is_ok()
    }

    /// Charges, and returns the state still locked. Managed pages make room, as they do on a real GPU.
    fn charged(&self, bytes: u64, purpose: Use) -> Outcome<MutexGuard<'_, State>> {
        self.reap();
        loop {
            let mut state = self.state.lock();
            let Err(code) = self.charge_in(&mut state, bytes, purpose) else { return Ok(state) };
            let missing = bytes.saturating_sub(self.capacity - state.usage.total());
            let managed = state.usage.managed;
            drop(state);
            match self.place {
                Place::Gpu(device) if missing <= managed && residence::evict(device, missing) => {}
                _ => return Err(code),
            }
        }
    }

    pub fn refund(&self, bytes: u64, purpose: Use) {
        self.refund_in(&mut self.state.lock(), bytes, purpose);
    }

    fn charge_in(&self, state: &mut State, bytes: u64, purpose: Use) -> Outcome {
        let total = state.usage.total();
        if bytes > self.capacity - total {
            return Err(Code::OUT_OF_MEMORY);
        }
        *state.usage.counter(purpose) += bytes;
        state.usage.peak = state.usage.peak.max(total + bytes);
        self.used.store(total + bytes, Ordering::Relaxed);
        Ok(())
    }

    fn refund_in(&self, state: &mut State, bytes: u64, purpose: Use) {
        *state.usage.counter(purpose) -= bytes;
        self.used.store(state.usage.total(), Ordering::Relaxed);
    }

    /// Takes `bytes`, a multiple of [`GRANULE`]. Fresh memory reads as zero; in strict mode,
    /// memory that was released before does not.
    pub fn allocate(&'static self, bytes: u64, purpose: Use) -> Outcome<Arc<Physical>> {
        let mut state = self.charged(bytes, purpose)?;
        // Contexts are charged without taking extents, so whatever was charged is there.
        let extents = state.free.take_scattered(bytes).ok_or(Code::OUT_OF_MEMORY)?;
        let pieces = extents
            .iter()
            .map(|&(offset, bytes)| Piece { alias: self.base + offset as usize, offset, bytes })
            .collect();
        let backing = Backing::Extents { shared: AtomicBool::new(false) };
        Ok(Arc::new(Physical { store: self, pieces, bytes, purpose, backing }))
    }

    /// Memory of another process (or of this one) by descriptor. Counted where it was made, not here.
    pub fn import(&'static self, file: OwnedFd, offset: u64, bytes: u64, purpose: Use) -> Outcome<Arc<Physical>> {
        mark_open(&file, offset, bytes)?;
        let base = alias_at(&file, offset, bytes).ok_or(Code::OPERATING_SYSTEM)?;
        let pieces = vec![Piece { alias: base, offset, bytes }];
        Ok(Arc::new(Physical { store: self, pieces, bytes, purpose, backing: Backing::Foreign(file) }))
    }

    /// Stands for memory that is not there: addresses of a graph's allocation between its launches.
    pub fn vacant(&'static self, bytes: u64) -> Arc<Physical> {
        let pieces = vec![Piece { alias: 0, offset: 0, bytes }];
        Arc::new(Physical { store: self, pieces, bytes, purpose: Use::Plain, backing: Backing::Vacant })
    }

    /// Descriptor of the whole store.
    pub fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

/// A stretch of physical memory and where the driver sees it.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub alias: usize,
    pub offset: u64,
    pub bytes: u64,
}

enum Backing {
    /// Of this process, in its store's file. `shared`: another process may have been given it.
    Extents {
        shared: AtomicBool,
    },
    Foreign(OwnedFd),
    Vacant,
}

/// One physical allocation. It goes back to its store when the last of handle, mappings and running copies lets go.
pub struct Physical {
    pub store: &'static Store,
    pub pieces: Vec<Piece>,
    pub bytes: u64,
    purpose: Use,
    backing: Backing,
}

impl Physical {
    pub fn place(&self) -> Place {
        self.store.place
    }

    pub fn is_vacant(&self) -> bool {
        matches!(self.backing, Backing::Vacant)
    }

    /// The file that the pieces are stretches of.
    pub fn file(&self) -> i32 {
        match &self.backing {
            Backing::Extents { .. } | Backing::Vacant => self.store.descriptor(),
            Backing::Foreign(file) => file.as_raw_fd(),
        }
    }

    /// From here on another process may hold this memory, beyond its end in this one.
    pub fn note_shared(&self) {
        if let Backing::Extents { shared } = &self.backing {
            shared.store(true, Ordering::Relaxed);
        }
    }

    /// Whether another process may hold it.
    pub fn is_shared(&self) -> bool {
        match &self.backing {
            Backing::Extents { shared } => shared.load(Ordering::Relaxed),
            Backing::Foreign(_) => true,
            Backing::Vacant => false,
        }
    }

    /// Keeps this memory for as long as `file`, a descriptor of the file it lies in, is open anywhere.
    pub fn hold_by(&self, file: &OwnedFd) -> Outcome {
        self.note_shared();
        self.pieces.iter().try_for_each(|piece| mark_open(file, piece.offset, piece.bytes))
    }

    /// A descriptor that names this memory to any process ([`shared_range`]), and keeps it until its last copy is closed.
    /// The memory lies in its store's file, so that exportable memory costs no descriptor before it is exported, as with a
    /// real GPU; the descriptor's position says which stretch it is.
    pub fn share(&self) -> Outcome<OwnedFd> {
        // Scattered memory can not be named so; memory has to be nearly full for that to happen.
        let [piece] = self.pieces[..] else { return Err(Code::NOT_SUPPORTED) };
        let file = reopen(self.file())?;
        let position = ((piece.offset / GRANULE) << 32) | (piece.bytes / GRANULE);
        // SAFETY: plain system call on a descriptor we own; a position beyond the end of a file is legal.
        let placed = unsafe { libc::lseek(file.as_raw_fd(), position as i64, libc::SEEK_SET) };
        if placed < 0 {
            return Err(Code::OPERATING_SYSTEM);
        }
        mark_open(&file, piece.offset, piece.bytes)?;
        self.note_shared();
        Ok(file)
    }

    /// The driver's view of `offset..offset + bytes`, in order.
    pub fn views(&self, offset: u64, bytes: u64) -> impl Iterator<Item = (usize, usize)> {
        let mut skip = offset;
        let mut left = bytes;
        self.pieces.iter().filter_map(move |piece| {
            if skip >= piece.bytes {
                skip -= piece.bytes;
                return None;
            }
            let length = (piece.bytes - skip).min(left);
            let view = (piece.alias + skip as usize, length as usize);
            skip = 0;
            left -= length;
            (length > 0).then_some(view)
        })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        match &self.backing {
            Backing::Extents { shared } => {
                let shared = shared.load(Ordering::Relaxed);
                let mut state = self.store.state.lock();
                for piece in &self.pieces {
                    if shared && self.store.is_open(piece) {
                        state.lingering.push((*piece, self.purpose));
                    } else {
                        self.store.take_back(&mut state, piece, self.purpose);
                    }
                }
                self.store.lingers.store(state.lingering.len(), Ordering::Relaxed);
            }
            Backing::Foreign(_) => self.pieces.iter().for_each(|piece| unalias(piece.alias, piece.bytes)),
            Backing::Vacant => {}
        }
    }
}

/// The name of a memory file says whose memory it is, also to the process that receives its descriptor.
fn file_name(place: Place, index: usize) -> String {
    match place {
        Place::Gpu(_) => format!("simcuda-gpu-{index}"),
        Place::Host(_) => format!("simcuda-host-{index}"),
    }
}

/// The file of a descriptor once more, under a description with a position and locks of its own.
pub fn reopen(descriptor: i32) -> Outcome<OwnedFd> {
    let file = OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{descriptor}"));
    file.map(OwnedFd::from).map_err(|_| Code::OPERATING_SYSTEM)
}

/// Whose memory file a descriptor is, of any process: `gpu` or `host`, and its number in the machine.
pub fn owner_of(descriptor: i32) -> Option<(String, usize)> {
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:simcuda-")?.strip_suffix(" (deleted)")?;
    let (kind, index) = name.split_once('-')?;
    Some((kind.to_owned(), index.parse().ok()?))
}

/// What a descriptor from [`Physical::share`] names: its owner, offset and bytes in the file. `None` for any other
/// descriptor.
pub fn shared_range(descriptor: i32) -> Option<(String, usize, u64, u64)> {
    let (kind, index) = owner_of(descriptor)?;
    // SAFETY: plain system call on a descriptor that was just looked at; it moves nothing.
    let position = unsafe { libc::lseek(descriptor, 0, libc::SEEK_CUR) };
    let position = u64::try_from(position).ok().filter(|position| *position > 0)?;
    Some((kind, index, (position >> 32) * GRANULE, (position & 0xffff_ffff) * GRANULE))
}

/// Says that this description has a stretch open, for as long as any copy of it is. A lock and not a count in the file: it
/// goes with its last holder, however that ends.
fn mark_open(file: &OwnedFd, offset: u64, bytes: u64) -> Outcome {
    let lock = range_lock(libc::F_RDLCK, offset, bytes);
    // SAFETY: plain system call on a descriptor we own, with a description that outlives it.
    let locked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if locked == 0 { Ok(()) } else { Err(Code::OPERATING_SYSTEM) }
}

fn range_lock(kind: i32, offset: u64, bytes: u64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset as i64,
        l_len: bytes as i64,
        l_pid: 0,
    }
}

/// A file of zeros in memory, of this process until its descriptor is passed on.
pub fn memory_file(name: &str, bytes: u64) -> Option<OwnedFd> {
    let name = CString::new(name).ok()?;
    // SAFETY: the name is a C string; the call returns a new descriptor or -1.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the descriptor is new and nobody else closes it.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain system call on a descriptor we own.
    let sized = unsafe { libc::ftruncate(file.as_raw_fd(), i64::try_from(bytes).ok()?) };
    (sized == 0).then_some(file)
}

pub fn alias(file: &OwnedFd, bytes: u64) -> Option<usize> {
    alias_at(file, 0, bytes)
}

fn alias_at(file: &OwnedFd, offset: u64, bytes: u64) -> Option<usize> {
    if bytes == 0 {
        return Some(0);
    }
    // SAFETY: a new mapping at an address the kernel picks replaces nothing. NORESERVE: only what is touched is taken.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            i64::try_from(offset).ok()?,
        )
    };
    (address != libc::MAP_FAILED).then_some(address as usize)
}

/// Ends a mapping that [`alias`] made, for an owner that is being dropped: nobody uses it any more.
pub fn unalias(base: usize, bytes: u64) {
    // SAFETY: the mapping was made for that owner alone, and views of it are used only while the owner is held.
    unsafe { libc::munmap(base as *mut _, bytes as usize) };
}

/// Returns the pages to the system; the stretch reads as zero for its next owner.
fn punch(file: &OwnedFd, piece: &Piece) {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: plain system call on a descriptor we own, within its size.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, piece.offset as i64, piece.bytes as i64) };
}
