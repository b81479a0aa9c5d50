//! The device address space: what every address means.
//!
//! Addresses are real: reservations hold their range of the process (`PROT_NONE`), so no host pointer can ever be equal
//! to a device pointer. What is behind an address is looked up here and reached through the alias of its memory.

use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::extents::Extents;
use crate::ffi::Handle;
use crate::physical::{GRANULE, Physical, Place, Store, Use};
use crate::residence;
use crate::strict;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The largest reservation the real driver grants.
pub const LARGEST_RESERVATION: u64 = 64 << 40;
/// Range for `cuMemAlloc`; virtual only, so generous.
const ARENA: u64 = 8 << 40;
/// Requests below this share 2 MiB slabs.
const SLAB_LIMIT: u64 = 1 << 20;
/// Alignment of every address that `cuMemAlloc` gives.
const SMALL_ALIGN: u64 = 512;

/// Which devices may use a VMM mapping, one bit an ordinal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Grants {
    pub read: u64,
    pub write: u64,
    /// The processor may too (host memory granted to its node).
    pub host: bool,
    /// From whom access was taken, after so many returns of the process's memory (`checkpoint.rs`).
    pub taken: u64,
    pub taken_after: u32,
}

/// What the GPUs that may use a mapping hold for it, one bit an ordinal, until it is unmapped.
pub struct Tables {
    /// On each of them.
    bytes: u64,
    held: Mutex<u64>,
}

impl Tables {
    fn new(mapped: u64) -> Arc<Self> {
        let bytes = mapped / GRANULE * driver().settings.page_tables;
        Arc::new(Self { bytes, held: Mutex::new(0) })
    }

    /// Takes them on these GPUs; OUT_OF_MEMORY where one has no room for them.
    pub fn take(&self, devices: u64) -> Outcome {
        let mut held = self.held.lock();
        if self.bytes == 0 {
            return Ok(());
        }
        let wanted = devices & !*held;
        for (device, gpu) in driver().gpus.iter().enumerate().filter(|(device, _)| wanted & 1 << device != 0) {
            gpu.store.charge(self.bytes, Use::Context)?;
            *held |= 1 << device;
        }
        Ok(())
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        let held = *self.held.get_mut();
        for (_, gpu) in driver().gpus.iter().enumerate().filter(|(device, _)| held & 1 << device != 0) {
            gpu.store.refund(self.bytes, Use::Context);
        }
    }
}

#[derive(Clone)]
pub enum Kind {
    /// `cuMemAlloc`, a memory pool, or an opened IPC handle.
    Plain {
        context: u64,
        device: usize,
        physical: Arc<Physical>,
        offset: u64,
        origin: Origin,
    },
    Vmm {
        physical: Arc<Physical>,
        handle: u64,
        grants: Grants,
        reservation: (u64, u64),
        tables: Arc<Tables>,
    },
    /// Host memory the driver knows: `registered` by the program, or else allocated by the driver.
    Host {
        context: u64,
        device: usize,
        flags: u32,
        registered: bool,
    },
    Managed {
        context: u64,
        device: usize,
    },
}

/// Who made a plain allocation, which decides who may free it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Alloc,
    Pool(Handle),
    /// Memory of another process, through a legacy handle.
    Ipc,
    /// Memory of another process' pool.
    Shared,
    /// Memory of a graph, with the devices that may use it, one bit each.
    Graph(u64),
}

/// A mapped or allocated stretch of addresses.
#[derive(Clone)]
pub struct Region {
    pub start: u64,
    pub bytes: u64,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`: never given twice.
    pub id: u64,
    pub kind: Kind,
}

impl Region {
    pub fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// Where the driver sees `address..address + bytes`, which lies within the region.
    pub fn views(&self, address: u64, bytes: u64) -> Vec<(usize, usize)> {
        let into = address - self.start;
        match &self.kind {
            Kind::Plain { physical, offset, .. } => physical.views(offset + into, bytes).collect(),
            Kind::Vmm { physical, .. } => physical.views(into, bytes).collect(),
            Kind::Host { .. } | Kind::Managed { .. } => vec![(address as usize, bytes as usize)],
        }
    }
}

/// A stretch of bytes to read or write; the region, if any, keeps its memory alive.
pub struct Span {
    pub alias: usize,
    pub bytes: usize,
    pub region: Option<Region>,
}

pub struct Space {
    map: RwLock<Map>,
    arena: (u64, u64),
    mapped: AtomicU64,
}

struct Map {
    regions: BTreeMap<u64, Region>,
    reservations: BTreeMap<u64, u64>,
    arena: Extents,
    slabs: BTreeMap<u64, Slab>,
}

/// 2 MiB that small allocations of one context share.
struct Slab {
    device: usize,
    context: u64,
    physical: Arc<Physical>,
    free: Extents,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A number for a region, handle or context that is never used again.
pub fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl Space {
    pub fn new() -> Result<Self, String> {
        let start = hold(ARENA, GRANULE, 0)
            .ok_or_else(|| format!("mmap of {ARENA} bytes of address space failed; is RLIMIT_AS set?"))?;
        let map = Map {
            regions: BTreeMap::new(),
            reservations: BTreeMap::new(),
            arena: Extents::new(start, ARENA),
            slabs: BTreeMap::new(),
        };
        Ok(Self { map: RwLock::new(map), arena: (start, ARENA), mapped: AtomicU64::new(0) })
    }

    /// The region that holds `address`.
    pub fn find(&self, address: u64) -> Option<Region> {
        self.map.read().find(address).cloned()
    }

    /// All regions, for the report.
    pub fn regions(&self) -> Vec<Region> {
        self.map.read().regions.values().cloned().collect()
    }

    /// The regions that a range meets.
    pub fn within(&self, start: u64, end: u64) -> Vec<Region> {
        let map = self.map.read();
        map.find(start)
            .into_iter()
            .chain(map.regions.range(start + 1..end).map(|(_, region)| region))
            .cloned()
            .collect()
    }

    pub fn reservations(&self) -> Vec<(u64, u64)> {
        self.map.read().reservations.iter().map(|(&start, &bytes)| (start, bytes)).collect()
    }

    /// Bytes mapped by `cuMemMap` now.
    pub fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }

    /// What backs `address..address + bytes`, in order. Addresses nobody gave out are the program's own host memory where
    /// `pageable` allows that; anything else that is not mapped is INVALID_VALUE.
    pub fn spans(&self, address: u64, bytes: u64, pageable: bool) -> Outcome<Vec<Span>> {
        let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let map = self.map.read();
        let mut spans = Vec::new();
        let mut at = address;
        while at < end {
            let Some(region) = map.find(at) else {
                if !pageable || at != address || at == 0 || self.in_arena(at) || map.reservation(at).is_some() {
                    return Err(Code::INVALID_VALUE);
                }
                return Ok(vec![Span { alias: address as usize, bytes: bytes as usize, region: None }]);
            };
            let length = region.end().min(end) - at;
            spans.extend(region.views(at, length).into_iter().map(|(alias, bytes)| Span {
                alias,
                bytes,
                region: Some(region.clone()),
            }));
            at += length;
        }
        Ok(spans)
    }

    fn in_arena(&self, address: u64) -> bool {
        address.wrapping_sub(self.arena.0) < self.arena.1
    }

    /// Memory for `cuMemAlloc` on `store`, the place of `device`.
    pub fn allocate(
        &self,
        store: &'static Store,
        device: usize,
        context: u64,
        origin: Origin,
        bytes: u64,
    ) -> Outcome<u64> {
        let mut map = self.map.write();
        let plain = |physical, offset| Kind::Plain { context, device, physical, offset, origin };
        if bytes >= SLAB_LIMIT {
            let rounded = bytes.checked_next_multiple_of(GRANULE).ok_or(Code::OUT_OF_MEMORY)?;
            let physical = store.allocate(rounded, Use::Plain)?;
            let start = map.arena.take(rounded, GRANULE).ok_or(Code::OUT_OF_MEMORY)?;
            map.insert(start, bytes, plain(physical, 0));
            return Ok(start);
        }
        let rounded = bytes.next_multiple_of(SMALL_ALIGN);
        if let Some((start, slab, at)) = map.slabs.iter_mut().find_map(|(&start, slab)| {
            let at =
                ((slab.device, slab.context) == (device, context)).then(|| slab.free.take(rounded, SMALL_ALIGN))??;
            Some((start, slab.physical.clone(), at))
        }) {
            map.insert(start + at, bytes, plain(slab, at));
            return Ok(start + at);
        }
        let physical = store.allocate(GRANULE, Use::Plain)?;
        let start = map.arena.take(GRANULE, GRANULE).ok_or(Code::OUT_OF_MEMORY)?;
        let mut free = Extents::new(0, GRANULE);
        let at = free.take(rounded, SMALL_ALIGN).ok_or(Code::OUT_OF_MEMORY)?;
        map.slabs.insert(start, Slab { device, context, physical: physical.clone(), free });
        map.insert(start + at, bytes, plain(physical, at));
        Ok(start + at)
    }

    /// Addresses for memory that is not the arena's own, from a frame's border on.
    pub fn take_addresses(&self, bytes: u64) -> Outcome<u64> {
        let rounded = bytes.checked_next_multiple_of(GRANULE).ok_or(Code::OUT_OF_MEMORY)?;
        self.map.write().arena.take(rounded, GRANULE).ok_or(Code::OUT_OF_MEMORY)
    }

    pub fn give_addresses(&self, start: u64, bytes: u64) {
        self.map.write().arena.give(start, bytes.next_multiple_of(GRANULE));
    }

    /// Enters an allocation at addresses that were taken for it.
    pub fn insert(&self, start: u64, bytes: u64, kind: Kind) {
        self.map.write().insert(start, bytes, kind);
    }

    /// Puts other memory behind a plain allocation.
    pub fn back(&self, address: u64, memory: Arc<Physical>) {
        let mut map = self.map.write();
        if let Some(Region { kind: Kind::Plain { physical, .. }, .. }) = map.regions.get_mut(&address) {
            *physical = memory;
        }
    }

    /// Gives an allocation in imported memory, `(offset, bytes)`, an address (`cuIpcOpenMemHandle`): as far behind a frame's border as
    /// it lies there (measured).
    pub fn attach(
        &self,
        physical: Arc<Physical>,
        device: usize,
        context: u64,
        (offset, bytes): (u64, u64),
    ) -> Outcome<u64> {
        let start = self.take_addresses(physical.bytes)? + offset;
        self.insert(start, bytes, Kind::Plain { context, device, physical, offset, origin: Origin::Ipc });
        Ok(start)
    }

    /// Ends the plain allocation that starts at `address`; its memory goes back when the last user lets go.
    pub fn free(&self, address: u64) -> Outcome {
        if strict::is_on()
            && let Some(region) = self.find(address).filter(|region| region.start == address)
        {
            strict::freeing(&region);
        }
        let mut map = self.map.write();
        let region = map.regions.remove(&address).ok_or(Code::INVALID_VALUE)?;
        if let Kind::Plain { origin: Origin::Pool(pool), .. } = region.kind {
            drop(map);
            let bytes = region.bytes;
            drop(region);
            crate::mempool::give_back(pool, address, bytes);
            return Ok(());
        }
        let slab_start = address & !(GRANULE - 1);
        match map.slabs.get_mut(&slab_start) {
            Some(slab) => {
                slab.free.give(address - slab_start, region.bytes.next_multiple_of(SMALL_ALIGN));
                if slab.free.is_whole(GRANULE) {
                    map.slabs.remove(&slab_start);
                    map.arena.give(slab_start, GRANULE);
                }
            }
            // What was imported may begin behind a frame's border.
            None => map.arena.give(slab_start, (address - slab_start + region.bytes).next_multiple_of(GRANULE)),
        }
        drop(map);
        drop(region);
        Ok(())
    }

    /// Enters host or managed memory at its own address; ALREADY_REGISTERED if part of it is, INVALID_VALUE if part of it is
    /// known otherwise.
    pub fn insert_host(&self, start: u64, bytes: u64, kind: Kind) -> Outcome {
        let mut map = self.map.write();
        let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        if let Some(region) = map.meets(start, end) {
            let registered = matches!(region.kind, Kind::Host { registered: true, .. });
            return Err(if registered { Code::HOST_MEMORY_ALREADY_REGISTERED } else { Code::INVALID_VALUE });
        }
        map.insert(start, bytes, kind);
        Ok(())
    }

    /// Removes the region that starts at `address` if `matches`; INVALID_VALUE otherwise.
    pub fn remove(&self, address: u64, matches: impl Fn(&Kind) -> bool) -> Outcome<Region> {
        if strict::is_on()
            && let Some(region) = self.find(address).filter(|region| region.start == address && matches(&region.kind))
        {
            strict::freeing(&region);
        }
        let mut map = self.map.write();
        if !map.regions.get(&address).is_some_and(|region| matches(&region.kind)) {
            return Err(Code::INVALID_VALUE);
        }
        map.regions.remove(&address).ok_or(Code::INVALID_VALUE)
    }

    /// `cuMemAddressReserve`.
    pub fn reserve(&self, bytes: u64, align: u64, hint: u64) -> Outcome<u64> {
        if bytes > LARGEST_RESERVATION {
            return Err(Code::OUT_OF_MEMORY);
        }
        let start = hold(bytes, align.max(GRANULE), hint).ok_or(Code::OUT_OF_MEMORY)?;
        self.map.write().reservations.insert(start, bytes);
        Ok(start)
    }

    /// `cuMemAddressFree`: exactly one reservation, with nothing mapped in it.
    pub fn unreserve(&self, start: u64, bytes: u64) -> Outcome {
        let mut map = self.map.write();
        if map.reservations.get(&start) != Some(&bytes) || map.overlaps(start, start + bytes) {
            return Err(Code::INVALID_VALUE);
        }
        map.reservations.remove(&start);
        strict::reservation_ended(start);
        // Under the lock: once unmapped the range may be somebody else's, and must not be ours any more.
        release(start, bytes);
        Ok(())
    }

    /// `cuMemMap` of a whole handle.
    pub fn map(&self, start: u64, physical: Arc<Physical>, handle: u64) -> Outcome {
        let bytes = physical.bytes;
        let tables = Tables::new(bytes);
        let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let mut map = self.map.write();
        let reservation =
            map.reservation(start).filter(|(at, length)| end <= at + length).ok_or(Code::INVALID_VALUE)?;
        if map.overlaps(start, end) {
            return Err(Code::INVALID_VALUE);
        }
        map.insert(start, bytes, Kind::Vmm { physical, handle, grants: Grants::default(), reservation, tables });
        self.mapped.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// `cuMemUnmap`: whole mappings, whatever holes are between them. Returns them, for the caller to drop unlocked.
    pub fn unmap(&self, start: u64, bytes: u64) -> Outcome<Vec<Region>> {
        let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let mut map = self.map.write();
        map.reservation(start).filter(|(at, length)| end <= at + length).ok_or(Code::INVALID_VALUE)?;
        let is_cut = |at: u64| map.find(at).is_some_and(|region| region.start < at);
        let is_other = |region: &Region| !matches!(region.kind, Kind::Vmm { .. });
        if is_cut(start) || is_cut(end) || map.regions.range(start..end).any(|(_, region)| is_other(region)) {
            return Err(Code::INVALID_VALUE);
        }
        let starts: Vec<u64> = map.regions.range(start..end).map(|(at, _)| *at).collect();
        let regions: Vec<Region> = starts.iter().filter_map(|at| map.regions.remove(at)).collect();
        self.mapped.fetch_sub(regions.iter().map(|region| region.bytes).sum(), Ordering::Relaxed);
        Ok(regions)
    }

    /// What every address means.
    pub fn each(&self, mut look: impl FnMut(&Kind)) {
        self.map.read().regions.values().for_each(|region| look(&region.kind));
    }

    /// `cuMemSetAccess`: `change` gets the grants of each whole mapping in the range.
    pub fn set_access(
        &self,
        start: u64,
        bytes: u64,
        mut change: impl FnMut(&Physical, &mut Grants) -> Outcome,
    ) -> Outcome<Vec<Region>> {
        let mut map = self.map.write();
        let starts = map.whole_mappings(start, bytes)?;
        let mut changed = Vec::with_capacity(starts.len());
        for at in &starts {
            let mut region = map.regions.get(at).cloned().ok_or(Code::INVALID_VALUE)?;
            if let Kind::Vmm { physical, grants, .. } = &mut region.kind {
                change(physical, grants)?;
            }
            changed.push(region);
        }
        map.regions.extend(changed.iter().map(|region| (region.start, region.clone())));
        Ok(changed)
    }
}

impl Map {
    fn insert(&mut self, start: u64, bytes: u64, kind: Kind) {
        self.regions.insert(start, Region { start, bytes, id: next_id(), kind });
    }

    fn find(&self, address: u64) -> Option<&Region> {
        self.regions.range(..=address).next_back().map(|(_, region)| region).filter(|region| address < region.end())
    }

    fn reservation(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.reservations.range(..=address).next_back()?;
        (address - start < bytes).then_some((start, bytes))
    }

    fn meets(&self, start: u64, end: u64) -> Option<&Region> {
        self.regions.range(..end).next_back().map(|(_, region)| region).filter(|region| region.end() > start)
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.meets(start, end).is_some()
    }

    fn whole_mappings(&self, start: u64, bytes: u64) -> Outcome<Vec<u64>> {
        let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        let mut starts = Vec::new();
        let mut at = start;
        while at < end {
            let region = self
                .regions
                .get(&at)
                .filter(|region| matches!(region.kind, Kind::Vmm { .. }))
                .ok_or(Code::INVALID_VALUE)?;
            starts.push(at);
            at = region.end();
        }
        if at != end || starts.is_empty() { Err(Code::INVALID_VALUE) } else { Ok(starts) }
    }
}

/// Takes a range of the process' addresses out of use. A `hint` that is free is honoured, as the driver's is.
fn hold(bytes: u64, align: u64, hint: u64) -> Option<u64> {
    let map = |at: u64, bytes: u64, flags| {
        // SAFETY: an inaccessible mapping in unused addresses (the kernel picks them, or refuses with NOREPLACE).
        let address = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
            libc::mmap(at as *mut _, bytes as usize, libc::PROT_NONE, flags, -1, 0)
        };
        (address != libc::MAP_FAILED).then_some(address as u64)
    };
    if hint != 0
        && hint.is_multiple_of(align)
        && let Some(start) = map(hint, bytes, libc::MAP_FIXED_NOREPLACE)
    {
        return Some(start);
    }
    let start = map(0, bytes.checked_add(align)?, 0)?;
    let aligned = start.next_multiple_of(align);
    release(start, aligned - start);
    release(aligned + bytes, start + align - aligned);
    Some(aligned)
}

fn release(start: u64, bytes: u64) {
    if bytes > 0 {
        // SAFETY: the range belongs to a reservation made by `hold` that nobody uses any more.
        unsafe { libc::munmap(start as *mut _, bytes as usize) };
    }
}

/// Physical memory that lost its data, in the driver's view.
static SPOILT: RwLock<Vec<(usize, usize)>> = RwLock::new(Vec::new());

/// Makes what is behind these spans answer whoever uses it with an uncorrectable error, wherever it is mapped.
pub fn spoil(spans: &[Span]) {
    SPOILT.write().extend(spans.iter().map(|span| (span.alias, span.alias + span.bytes)));
}

/// What has to be done before `device` uses memory: managed pages go where they belong. ILLEGAL_ADDRESS where a graph has
/// no memory behind its addresses, ECC_UNCORRECTABLE where the memory lost its data.
pub fn access(spans: &[Span], device: usize) -> Outcome {
    let spoilt = SPOILT.read();
    if spans.iter().any(|span| spoilt.iter().any(|range| span.alias < range.1 && range.0 < span.alias + span.bytes)) {
        return Err(Code::ECC_UNCORRECTABLE);
    }
    drop(spoilt);
    for span in spans {
        match span.region.as_ref().map(|region| &region.kind) {
            Some(Kind::Plain { physical, .. }) if physical.is_vacant() => return Err(Code::ILLEGAL_ADDRESS),
            // Managed memory is its own alias.
            Some(Kind::Managed { .. }) => residence::touch(span.alias as u64, span.bytes as u64, device),
            _ => {}
        }
    }
    Ok(())
}

/// Whether `device` may touch what is behind this span with ordinary copies.
pub fn granted(span: &Span, device: usize, write: bool) -> bool {
    match span.region.as_ref().map(|region| &region.kind) {
        Some(Kind::Vmm { grants, .. }) => {
            let mask = if write { grants.write } else { grants.read };
            mask & 1 << device != 0
        }
        _ => true,
    }
}

/// The device that owns the memory of a region, or `None` for host memory.
pub fn owner(kind: &Kind) -> Option<usize> {
    match kind {
        Kind::Plain { physical, .. } | Kind::Vmm { physical, .. } => match physical.place() {
            Place::Gpu(device) => Some(device),
            Place::Host(_) => None,
        },
        Kind::Host { .. } | Kind::Managed { .. } => None,
    }
}
