//! A backend that keeps every rule of the driver and panics at the first one broken.

use gpupool_pool::{Backend, Contents, FRAME, Fault, Mover, Place, Transfer};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// First address of the reservation in these tests: high, so that no address fits 32 bits by luck.
pub const BASE: u64 = 0x7000_0000_0000;
/// First address of second mappings, which are all outside the reservation.
const ALIASES: u64 = 0x10_0000_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    OutOfMemory,
    Unavailable,
    NotReady,
    Failed,
}

/// What the mock's calls fail with: the number of the call that failed.
pub type CallNumber = u64;

struct Memory {
    place: Place,
    bytes: u64,
    mapped_at: Option<u64>,
    /// Where it is mapped a second time.
    alias: Option<u64>,
    /// What the frames contain, 0 for new ones.
    contents: Vec<u64>,
}

struct Mapping {
    bytes: u64,
    handle: u64,
    /// The number of readers when it was granted.
    granted: Option<u64>,
}

#[derive(Default)]
pub struct Inner {
    capacity: BTreeMap<Place, u64>,
    /// Bytes that another process holds.
    pub external: BTreeMap<Place, u64>,
    /// Whether [`Backend::headroom`] knows nothing.
    pub blind: bool,
    /// Whether the device cannot be waited for.
    pub capturing: bool,
    /// Whether GPUs have contexts beside that of the owner who frees.
    pub others: bool,
    /// Whether nothing was submitted since every context was waited for.
    pub at_rest: bool,
    /// GPUs with a kernel that waits for the host: who waits for one of them waits for ever.
    pub held: BTreeSet<u32>,
    /// GPUs that always have more to do: they can be waited for, and are not done when they are asked.
    pub at_work: BTreeSet<u32>,
    memories: BTreeMap<u64, Memory>,
    mappings: BTreeMap<u64, Mapping>,
    handles_made: u64,
    /// The handle behind each second mapping, and the number of readers when it was granted.
    aliases: BTreeMap<u64, (u64, u64)>,
    aliases_made: u64,
    /// Freed ranges that a GPU may still touch, and which.
    busy: Vec<(u64, u64, u32)>,
    /// Grows when a device is added to those that are to reach all memory.
    pub readers: u64,
    /// The number of readers when a GPU was added.
    pub arrived: BTreeMap<u32, u64>,
    /// What was stored of frames before they went to a disk, by address.
    pub disk: BTreeMap<u64, u64>,
    /// Where copies can be made.
    prepared: BTreeSet<(u64, u32)>,
    /// The program is stopped: nothing but copies and mappings of what there is.
    pub stopped: bool,
    /// Fallible calls so far.
    pub calls: u64,
    /// Fails this many calls from this one on.
    pub fault: Option<(CallNumber, u64, FaultKind)>,
    /// The same once more.
    pub second: Option<(CallNumber, u64, FaultKind)>,
    /// Every fallible call and [`Backend::headroom`], by name, with its bytes; of a wait, with a bit for each GPU.
    pub log: Vec<(&'static str, u64)>,
}

/// Is told of the call.
type Probe = Arc<dyn Fn(&'static str) + Send + Sync>;

pub struct Mock {
    inner: Mutex<Inner>,
    /// Runs at the start of every call, outside the mock's own lock.
    probe: Mutex<Option<Probe>>,
}

impl Mock {
    pub fn new(capacity: &[(Place, u64)]) -> Self {
        let inner = Inner { capacity: capacity.iter().copied().collect(), ..Inner::default() };
        Self { inner: Mutex::new(inner), probe: Mutex::new(None) }
    }

    pub fn set_probe(&self, probe: impl Fn(&'static str) + Send + Sync + 'static) {
        *self.probe.lock().unwrap() = Some(Arc::new(probe));
    }

    /// A broken rule panics in the thread that broke it; the others go on to their own checks.
    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, name: &'static str) {
        let probe = self.probe.lock().unwrap().clone();
        if let Some(probe) = probe {
            probe(name);
        }
    }

    fn call(&self, name: &'static str, bytes: u64) -> Result<MutexGuard<'_, Inner>, Fault<CallNumber>> {
        self.tell(name);
        let mut inner = self.inner();
        inner.calls += 1;
        inner.log.push((name, bytes));
        let is_short = matches!(name, "copy" | "digest" | "map" | "unmap" | "grant");
        assert!(is_short || !inner.stopped, "{name} while the program is stopped");
        let number = inner.calls;
        let hits = |fault: &(CallNumber, u64, FaultKind)| (fault.0..fault.0 + fault.1).contains(&number);
        if let Some((.., kind)) = inner.fault.into_iter().chain(inner.second).find(hits) {
            return Err(match kind {
                FaultKind::OutOfMemory => Fault::OutOfMemory(number),
                FaultKind::Unavailable => Fault::Unavailable(number),
                FaultKind::NotReady => Fault::NotReady(number),
                FaultKind::Failed => Fault::Failed(number),
            });
        }
        Ok(inner)
    }
}

impl Inner {
    pub fn held(&self, place: Place) -> u64 {
        self.memories.values().filter(|memory| memory.place == place).map(|memory| memory.bytes).sum()
    }

    pub fn left(&self, place: Place) -> u64 {
        let external = self.external.get(&place).copied().unwrap_or(0);
        self.capacity.get(&place).copied().unwrap_or(0).saturating_sub(self.held(place) + external)
    }

    pub fn is_empty(&self) -> bool {
        self.memories.is_empty() && self.mappings.is_empty() && self.aliases.is_empty()
    }

    /// This GPU may touch this range until the next successful wait for it.
    pub fn note_busy(&mut self, address: u64, bytes: u64, gpu: u32) {
        self.busy.push((address, address + bytes, gpu));
    }

    pub fn is_busy(&self, address: u64, bytes: u64) -> bool {
        self.busy.iter().any(|&(start, end, _)| start < address + bytes && address < end)
    }

    /// Whether a GPU other than this one may touch this range.
    pub fn is_busy_elsewhere(&self, address: u64, bytes: u64, gpu: u32) -> bool {
        self.busy.iter().any(|&(start, end, other)| other != gpu && start < address + bytes && address < end)
    }

    pub fn anything_busy(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Every mapping, in address order.
    pub fn mapped(&self) -> impl Iterator<Item = (u64, u64, Place)> {
        self.mappings.iter().map(|(&address, mapping)| (address, mapping.bytes, self.memories[&mapping.handle].place))
    }

    /// The mapping around an address: where it starts, its size, its place and its handle.
    pub fn mapped_around(&self, address: u64) -> Option<(u64, u64, Place, u64)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        let place = self.memories[&mapping.handle].place;
        (address < start + mapping.bytes).then_some((start, mapping.bytes, place, mapping.handle))
    }

    /// The physical memory of the frame at an address: a handle and an offset in it.
    pub fn frame_at(&self, address: u64) -> Option<(u64, u64)> {
        let (start, _, _, handle) = self.mapped_around(address)?;
        Some((handle, (address - start) / FRAME * FRAME))
    }

    /// The frame at an address contains this now.
    pub fn write(&mut self, address: u64, content: u64) {
        let (handle, offset) = self.frame_at(address).expect("only mapped memory is written");
        self.memories.get_mut(&handle).unwrap().contents[(offset / FRAME) as usize] = content;
    }

    /// What the frame at an address contains.
    pub fn read(&self, address: u64) -> u64 {
        let (handle, offset) = self.frame_at(address).expect("only mapped memory is read");
        self.memories[&handle].contents[(offset / FRAME) as usize]
    }

    /// Second mappings now of what is mapped, too: the size of each.
    pub fn aliases(&self) -> Vec<u64> {
        let memories = self.aliases.values().map(|(handle, _)| &self.memories[handle]);
        memories.filter(|memory| memory.mapped_at.is_some()).map(|memory| memory.bytes).collect()
    }

    /// Memory that is mapped nowhere but a second time: handles, sizes and places.
    pub fn stock(&self) -> Vec<(u64, u64, Place)> {
        let loose = self.memories.iter().filter(|(_, memory)| memory.mapped_at.is_none());
        loose.map(|(&handle, memory)| (handle, memory.bytes, memory.place)).collect()
    }

    /// All work is over.
    pub fn all_done(&mut self) {
        self.busy.clear();
    }

    /// Whether this memory was given back.
    pub fn is_gone(&self, handle: u64) -> bool {
        !self.memories.contains_key(&handle)
    }

    /// Where this handle is mapped.
    pub fn mapped_at(&self, handle: u64) -> Option<u64> {
        self.memories.get(&handle)?.mapped_at
    }

    /// Panics unless this range is mapped and granted at `place` from end to end.
    pub fn assert_usable(&self, address: u64, bytes: u64, place: Place) {
        let mut at = address;
        while at < address + bytes {
            let (&start, mapping) = self.mappings.range(..=at).next_back().expect("a block stands on mapped memory");
            assert!(start + mapping.bytes > at, "nothing is mapped at {at:#x}");
            assert_eq!(mapping.granted, Some(self.readers), "{at:#x} was not granted to everybody");
            assert_eq!(self.memories[&mapping.handle].place, place, "at {at:#x}");
            at = start + mapping.bytes;
        }
    }

    /// The start addresses of the mappings in a range that consists of whole ones.
    fn whole(&self, address: u64, bytes: u64) -> Vec<u64> {
        let mut at = address;
        let mut starts = Vec::new();
        while at < address + bytes {
            let mapping = self.mappings.get(&at).unwrap_or_else(|| panic!("no mapping starts at {at:#x}"));
            starts.push(at);
            at += mapping.bytes;
        }
        assert_eq!(at, address + bytes, "the range ends inside a mapping");
        starts
    }
}

fn assert_frames(address: u64, bytes: u64) {
    assert!(address >= BASE && address.is_multiple_of(FRAME), "address {address:#x}");
    assert!(bytes > 0 && bytes.is_multiple_of(FRAME), "size {bytes}");
}

impl Backend for Mock {
    type Handle = u64;
    type Error = CallNumber;

    fn headroom(&self, place: Place) -> Option<u64> {
        self.tell("headroom");
        let mut inner = self.inner();
        inner.log.push(("headroom", 0));
        (!inner.blind).then(|| inner.left(place))
    }

    fn create(&self, place: Place, bytes: u64) -> Result<u64, Fault<CallNumber>> {
        let mut inner = self.call("create", bytes)?;
        assert_frames(BASE, bytes);
        if inner.left(place) < bytes {
            return Err(Fault::OutOfMemory(inner.calls));
        }
        inner.handles_made += 1;
        let handle = inner.handles_made;
        inner.memories.insert(
            handle,
            Memory { place, bytes, mapped_at: None, alias: None, contents: vec![0; (bytes / FRAME) as usize] },
        );
        Ok(handle)
    }

    fn release(&self, handle: u64, place: Place, bytes: u64) -> Result<(), Fault<CallNumber>> {
        let mut inner = self.call("release", 0)?;
        let memory = inner.memories.remove(&handle).expect("release of a handle that is not held");
        assert_eq!((memory.mapped_at, memory.alias), (None, None), "release of a mapped handle");
        assert_eq!((memory.place, memory.bytes), (place, bytes), "release of what was made elsewhere");
        Ok(())
    }

    fn map(&self, address: u64, bytes: u64, handle: u64) -> Result<(), Fault<CallNumber>> {
        let mut inner = self.call("map", bytes)?;
        assert_frames(address, bytes);
        let below = inner.mappings.range(..address + bytes).next_back();
        if let Some((&start, mapping)) = below {
            assert!(start + mapping.bytes <= address, "{address:#x} is mapped twice");
        }
        let memory = inner.memories.get_mut(&handle).expect("map of a handle that is not held");
        assert!(!memory.place.is_stored(), "what is no memory is mapped");
        assert_eq!(memory.bytes, bytes, "a handle is mapped whole");
        assert_eq!(memory.mapped_at.replace(address), None, "a handle is mapped once");
        inner.mappings.insert(address, Mapping { bytes, handle, granted: None });
        Ok(())
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<(), Fault<CallNumber>> {
        let mut inner = self.call("unmap", bytes)?;
        assert_frames(address, bytes);
        assert!(!inner.is_busy(address, bytes), "unmap of memory that a GPU may still touch");
        for start in inner.whole(address, bytes) {
            let mapping = inner.mappings.remove(&start).unwrap();
            inner.memories.get_mut(&mapping.handle).unwrap().mapped_at = None;
        }
        Ok(())
    }

    fn grant(&self, address: u64, bytes: u64, place: Place) -> Result<(), Fault<CallNumber>> {
        // Who is added while the call is under way is not in it.
        let readers = self.readers();
        let mut inner = self.call("grant", bytes)?;
        if let Some((handle, granted)) = inner.aliases.get_mut(&address) {
            *granted = readers.max(*granted);
            let handle = *handle;
            assert_eq!((inner.memories[&handle].bytes, inner.memories[&handle].place), (bytes, place));
            return Ok(());
        }
        let mut at = address;
        // The driver refuses a range with a hole, or with a part of a mapping, which another thread may just have made.
        while at < address + bytes {
            at += inner.mappings.get(&at).ok_or(Fault::Failed(inner.calls))?.bytes;
        }
        if at != address + bytes {
            return Err(Fault::Failed(inner.calls));
        }
        let starts = inner.whole(address, bytes);
        // One grant covers one place, and what another thread has just moved may be at another one.
        if starts.iter().any(|start| inner.memories[&inner.mappings[start].handle].place != place) {
            return Err(Fault::Failed(inner.calls));
        }
        for start in starts {
            let mapping = inner.mappings.get_mut(&start).unwrap();
            mapping.granted = mapping.granted.max(Some(readers));
        }
        Ok(())
    }

    fn readers(&self) -> u64 {
        self.inner().readers
    }

    fn quiesce(&self, gpus: &[u32]) -> Result<(), Fault<CallNumber>> {
        let mut inner = self.call("quiesce", gpus.iter().fold(0, |set, gpu| set | 1 << gpu))?;
        if inner.capturing {
            return Err(Fault::NotReady(inner.calls));
        }
        assert!(gpus.iter().all(|gpu| !inner.held.contains(gpu)), "this wait for {gpus:?} never ends");
        inner.busy.retain(|(.., gpu)| !gpus.contains(gpu));
        Ok(())
    }

    fn quiesce_owner(&self, owner: u64, gpu: u32) -> Result<bool, Fault<CallNumber>> {
        if !self.inner().others {
            return self.quiesce(&[gpu]).map(|()| true);
        }
        let inner = self.call("quiesce owner", owner)?;
        if inner.capturing { Err(Fault::NotReady(inner.calls)) } else { Ok(false) }
    }

    fn is_at_rest(&self, _owner: u64) -> bool {
        self.inner().at_rest
    }

    fn has_finished(&self, gpu: u32) -> bool {
        let mut inner = self.inner();
        inner.log.push(("look", 1 << gpu));
        let finished = !inner.capturing && !inner.held.contains(&gpu) && !inner.at_work.contains(&gpu);
        if finished {
            inner.busy.retain(|(.., other)| *other != gpu);
        }
        finished
    }

    fn drop_alias(&self, address: u64, bytes: u64) -> Result<(), Fault<CallNumber>> {
        let mut inner = self.call("drop alias", bytes)?;
        let (handle, _) = inner.aliases.remove(&address).expect("a second mapping ends once");
        let memory = inner.memories.get_mut(&handle).unwrap();
        assert_eq!((memory.alias.take(), memory.bytes), (Some(address), bytes));
        Ok(())
    }
}

impl Mover for Mock {
    fn alias(&self, handle: u64, bytes: u64, place: Place) -> Result<u64, Fault<CallNumber>> {
        let mut inner = self.call("alias", bytes)?;
        let address = ALIASES + inner.aliases_made * (1 << 30);
        inner.aliases_made += 1;
        let memory = inner.memories.get_mut(&handle).expect("alias of a handle that is not held");
        assert!(!place.is_stored(), "what is no memory is mapped");
        assert_eq!((memory.bytes, memory.place, memory.alias), (bytes, place, None));
        memory.alias = Some(address);
        let readers = inner.readers;
        inner.aliases.insert(address, (handle, readers));
        Ok(address)
    }

    fn drain(&self) -> Result<(), Fault<CallNumber>> {
        let mut inner = self.call("drain", 0)?;
        if inner.capturing {
            return Err(Fault::NotReady(inner.calls));
        }
        assert!(inner.held.is_empty(), "this wait never ends");
        inner.busy.clear();
        Ok(())
    }

    fn prepare(&self, owner: u64, gpu: u32) -> Result<(), Fault<CallNumber>> {
        self.call("prepare", 0)?.prepared.insert((owner, gpu));
        Ok(())
    }

    fn copy(&self, owner: u64, gpu: u32, transfers: &[Transfer]) -> Result<(), Fault<CallNumber>> {
        let mut inner = self.call("copy", transfers.iter().map(|transfer| transfer.bytes).sum())?;
        assert!(gpu < 2 && owner <= 2, "nobody has a context there");
        assert!(inner.prepared.contains(&(owner, gpu)), "a copy makes nothing itself");
        let mut filled: BTreeMap<u64, u64> = BTreeMap::new();
        for &Transfer { from, to, bytes, stored, .. } in transfers {
            assert_frames(from, bytes);
            let (alias, (handle, readers)) =
                inner.aliases.range(..=to).next_back().map(|row| (*row.0, *row.1)).unwrap();
            assert!(readers >= inner.arrived.get(&gpu).copied().unwrap_or(0), "GPU {gpu} has no access to {to:#x}");
            assert_eq!(inner.memories[&handle].mapped_at, None, "what is in use is copied over");
            for at in (0..bytes).step_by(FRAME as usize) {
                let content = match stored {
                    true => {
                        assert_eq!(inner.frame_at(from + at), None, "what is mapped is read from the disk");
                        inner.disk[&(from + at)]
                    }
                    false => inner.read(from + at),
                };
                let frame = ((to + at - alias) / FRAME) as usize;
                inner.memories.get_mut(&handle).unwrap().contents[frame] = content;
            }
            *filled.entry(handle).or_default() += bytes;
        }
        for (handle, bytes) in filled {
            assert_eq!(inner.memories[&handle].bytes, bytes, "new memory is filled whole");
        }
        Ok(())
    }

    fn digest(&self, owner: u64, gpu: u32, contents: &mut [Contents]) {
        let Ok(inner) = self.call("digest", contents.iter().map(|contents| contents.bytes).sum()) else { return };
        assert!(inner.prepared.contains(&(owner, gpu)), "a look makes nothing itself");
        for Contents { address, bytes, digest } in contents {
            let of_frame = |at: u64| {
                let at = *address + at;
                if inner.frame_at(at).is_some() {
                    return inner.read(at);
                }
                let (alias, (handle, _)) = inner.aliases.range(..=at).next_back().expect("what is looked at is mapped");
                inner.memories[handle].contents[((at - alias) / FRAME) as usize]
            };
            let frames = (0..*bytes).step_by(FRAME as usize).map(of_frame);
            *digest = Some(frames.fold(7, |sum: u128, frame| {
                sum.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835).wrapping_add(u128::from(frame))
            }));
        }
    }
}
