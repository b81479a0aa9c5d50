//! Physical memory: one sparse file for each GPU and host node, mapped once as a whole.
//!
//! The driver reaches all of it through that alias mapping. Device addresses are never mapped for the processor, so a
//! program that follows a device pointer crashes as it would with a real GPU, and data outlives any change of addresses.

use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::residence;
use crate::strict;
use parking_lot::Mutex;
use simmachine::files::{self, map_file};
use simmachine::{Machine, gpu_place, host_place};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

pub use simmachine::files::memory_file;
pub use simmachine::{GRANULE, Use};

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// By ordinal.
    Gpu(usize),
    /// By NUMA node.
    Host(u32),
}

/// Bytes that this process uses, by purpose.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreUsage {
    pub plain: u64,
    pub vmm: u64,
    pub contexts: u64,
    pub pinned: u64,
    pub managed: u64,
    pub peak: u64,
}

impl StoreUsage {
    pub fn total(&self) -> u64 {
        self.plain + self.vmm + self.contexts + self.pinned + self.managed
    }

    fn counter(&mut self, purpose: Use) -> &mut u64 {
        match purpose {
            Use::Plain => &mut self.plain,
            Use::Vmm => &mut self.vmm,
            Use::Context | Use::Init => &mut self.contexts,
            Use::Pinned => &mut self.pinned,
            Use::Managed => &mut self.managed,
        }
    }
}

/// All physical memory of one place. What is free of it is the machine's to say, of all processes.
pub struct Store {
    pub place: Place,
    pub capacity: u64,
    /// Its number among the machine's places.
    number: usize,
    base: usize,
    file: i32,
    /// Device and number of that file.
    inode: (u64, u64),
    /// Of this process; nothing else is locked while this is.
    usage: Mutex<StoreUsage>,
}

impl Store {
    /// `index` is the place's number in the machine, which every process knows it by.
    pub fn new(machine: &Machine, place: Place, index: usize, capacity: u64) -> Result<Self, String> {
        let number = match place {
            Place::Gpu(_) => gpu_place(index),
            Place::Host(_) => host_place(index),
        };
        let memory = machine.memory(number, &file_name(place, index))?;
        let (base, file) = (memory.base, memory.file.as_raw_fd());
        let inode = inode_of(file).unwrap_or_default();
        Ok(Self { place, capacity, number, base, file, inode, usage: Mutex::default() })
    }

    /// Bytes in use, by all processes of the machine.
    pub fn used(&self) -> u64 {
        driver().machine.used(self.number)
    }

    /// Bytes that nobody uses.
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.used())
    }

    pub fn usage(&self) -> StoreUsage {
        *self.usage.lock()
    }

    /// Counts `bytes` against the capacity; OUT_OF_MEMORY if they are not there. Managed pages make room, as they do on a
    /// real GPU.
    pub fn charge(&self, bytes: u64, purpose: Use) -> Outcome {
        loop {
            let Err(missing) = self.try_charge(bytes, purpose) else { return Ok(()) };
            let managed = self.usage.lock().managed;
            match self.place {
                Place::Gpu(device) if missing <= managed && residence::evict(device, missing) => {}
                _ => return Err(Code::OUT_OF_MEMORY),
            }
        }
    }

    /// Counts `bytes` against the capacity if they are free now; no managed memory leaves for them. Whether it did.
    pub fn charge_if_free(&self, bytes: u64, purpose: Use) -> bool {
        self.try_charge(bytes, purpose).is_ok()
    }

    /// The error is how many bytes are missing.
    fn try_charge(&self, bytes: u64, purpose: Use) -> Result<(), u64> {
        driver().machine.charge(self.number, purpose, bytes)?;
        let mut usage = self.usage.lock();
        *usage.counter(purpose) += bytes;
        usage.peak = usage.peak.max(usage.total());
        Ok(())
    }

    pub fn refund(&self, bytes: u64, purpose: Use) {
        driver().machine.refund(self.number, purpose, bytes);
        self.forget(bytes, purpose);
    }

    fn forget(&self, bytes: u64, purpose: Use) {
        *self.usage.lock().counter(purpose) -= bytes;
    }

    /// Takes `bytes`, a multiple of [`GRANULE`]. Fresh memory reads as zero; in strict mode,
    /// memory that was released before does not.
    pub fn allocate(&'static self, bytes: u64, purpose: Use) -> Outcome<Arc<Physical>> {
        self.charge(bytes, purpose)?;
        // What was charged is there: frames are given back before their charge is.
        let Some(extents) = driver().machine.take(self.number, bytes) else {
            self.refund(bytes, purpose);
            return Err(Code::OUT_OF_MEMORY);
        };
        let pieces = extents
            .iter()
            .map(|&(offset, bytes)| Piece { alias: self.base + offset as usize, offset, bytes })
            .collect();
        let backing = Backing::Own { records: OnceLock::new() };
        Ok(Arc::new(Physical { store: self, pieces, bytes, purpose, backing }))
    }

    /// Memory of another process (or of this one) by descriptor. Counted where it was made, not here.
    pub fn import(&'static self, file: OwnedFd, offset: u64, bytes: u64, purpose: Use) -> Outcome<Arc<Physical>> {
        mark_open(&file, offset, bytes)?;
        let base = map_file(&file, offset, bytes).ok_or(Code::OPERATING_SYSTEM)?;
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
        self.file
    }

    /// Descriptor of the whole store; `None` where the program closed that number and has another file there.
    pub fn own_descriptor(&self) -> Option<i32> {
        inode_of(self.file).filter(|inode| *inode == self.inode).map(|_| self.file)
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
    /// Made by this process, in its store's file. `records`: the machine's, of each piece, once another process may have
    /// been given it.
    Own {
        records: OnceLock<Vec<usize>>,
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
            Backing::Own { .. } | Backing::Vacant => self.store.descriptor(),
            Backing::Foreign(file) => file.as_raw_fd(),
        }
    }

    /// From here on another process may hold this memory, beyond its end in this one.
    pub fn note_shared(&self) -> Outcome {
        let Backing::Own { records } = &self.backing else { return Ok(()) };
        static SHARING: Mutex<()> = Mutex::new(());
        let _one = SHARING.lock();
        if records.get().is_some() {
            return Ok(());
        }
        let (machine, place) = (&driver().machine, self.store.number);
        let mut made = Vec::new();
        for piece in &self.pieces {
            match machine.share(place, self.purpose, piece.offset, piece.bytes) {
                Some(record) => made.push(record),
                None => {
                    let taken_back = made.iter().zip(&self.pieces);
                    taken_back.for_each(|(&record, _)| machine.take_back(record));
                    return Err(Code::OPERATING_SYSTEM);
                }
            }
        }
        records.get_or_init(|| made);
        Ok(())
    }

    /// Whether another process may hold it.
    pub fn is_shared(&self) -> bool {
        match &self.backing {
            Backing::Own { records } => records.get().is_some(),
            Backing::Foreign(_) => true,
            Backing::Vacant => false,
        }
    }

    /// Keeps this memory for as long as `file`, a descriptor of the file it lies in, is open anywhere.
    pub fn hold_by(&self, file: &OwnedFd) -> Outcome {
        self.note_shared()?;
        self.pieces.iter().try_for_each(|piece| mark_open(file, piece.offset, piece.bytes))
    }

    /// A descriptor that names this memory to any process ([`shared_range`]), and keeps it until its last copy is closed.
    /// The memory lies in its store's file, so that exportable memory costs no descriptor before it is exported, as with a
    /// real GPU; the descriptor's position says which stretch it is.
    pub fn share(&self) -> Outcome<OwnedFd> {
        // Scattered memory cannot be named so; memory has to be nearly full for that to happen.
        let [piece] = self.pieces[..] else { return Err(Code::NOT_SUPPORTED) };
        let file = reopen(self.file())?;
        let position = ((piece.offset / GRANULE) << 32) | (piece.bytes / GRANULE);
        // SAFETY: plain system call on a descriptor we own; a position beyond the end of a file is legal.
        let placed = unsafe { libc::lseek(file.as_raw_fd(), position as i64, libc::SEEK_SET) };
        if placed < 0 {
            return Err(Code::OPERATING_SYSTEM);
        }
        self.note_shared()?;
        mark_open(&file, piece.offset, piece.bytes)?;
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
            Backing::Own { records } => {
                let (machine, place) = (&driver().machine, self.store.number);
                self.store.forget(self.bytes, self.purpose);
                match records.get() {
                    Some(records) => records.iter().for_each(|&record| machine.end_shared(record)),
                    None => {
                        for piece in &self.pieces {
                            let written = strict::written(self.store, piece);
                            let poison = || strict::poison(&written);
                            machine.give(place, self.purpose, piece.offset, piece.bytes, poison);
                        }
                    }
                }
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

fn inode_of(descriptor: i32) -> Option<(u64, u64)> {
    // SAFETY: all-zero is a valid value of this C struct.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: plain system call; the output is a local.
    (unsafe { libc::fstat(descriptor, &raw mut found) } == 0).then_some((found.st_dev, found.st_ino))
}

/// The file of a descriptor once more, under a description with a position and locks of its own.
pub fn reopen(descriptor: i32) -> Outcome<OwnedFd> {
    files::open(format!("/proc/self/fd/{descriptor}")).map_err(|_| Code::OPERATING_SYSTEM)
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
    files::lock_bytes(file, libc::F_RDLCK, offset as i64, bytes as i64, libc::F_OFD_SETLK)
        .map_err(|_| Code::OPERATING_SYSTEM)
}

pub fn alias(file: &OwnedFd, bytes: u64) -> Option<usize> {
    map_file(file, 0, bytes)
}

/// Ends a mapping that [`alias`] made, for an owner that is being dropped: nobody uses it any more.
pub fn unalias(base: usize, bytes: u64) {
    // SAFETY: the mapping was made for that owner alone, and views of it are used only while the owner is held.
    unsafe { libc::munmap(base as *mut _, bytes as usize) };
}
