//! Which memory of the program's own is, or may be, elsewhere than it was asked for, and where it is mapped.
//!
//! The driver keeps a handle's number as long as the handle is referenced or its memory is mapped, so the number names the
//! memory here. An entry goes *before* the call that ends it, and comes back if that call fails: the driver may give the
//! number, or the address, to another thread before this one hears of the success.

use super::types::{Access, Location};
use gpupool_pool::Place;
use std::collections::BTreeMap;

/// Who made a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// This process, which asked for it on this GPU.
    Asked(u32),
    /// Another process, which may have asked for it elsewhere.
    Imported,
}

/// One piece of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub origin: Origin,
    pub place: Place,
    pub bytes: u64,
    /// Handles that the program holds on it.
    references: u64,
    /// Address ranges that it is mapped at, or being mapped at.
    mappings: u64,
}

impl Memory {
    /// The GPU that the program believes it on, where it is not there.
    fn asked_elsewhere(&self) -> Option<u32> {
        match self.origin {
            Origin::Asked(device) if self.place != Place::Gpu(device) => Some(device),
            _ => None,
        }
    }
}

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub bytes: u64,
    pub handle: u64,
    /// What the program said about access, one entry a location.
    granted: Vec<Access>,
}

/// What one GPU's program was told instead of being served elsewhere.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    /// OUT_OF_MEMORY once, so that it returns its cache.
    soft: bool,
    /// The last request that was refused for its size.
    arena: Option<u64>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Ledger {
    memory: BTreeMap<u64, Memory>,
    mappings: BTreeMap<u64, Mapping>,
    /// Bytes of memory made here, or about to be, that count at each place.
    own: BTreeMap<Place, u64>,
    told: BTreeMap<u32, Told>,
}

impl Ledger {
    /// Pieces of memory in it.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Bytes that count at a place.
    pub fn own(&self, place: Place) -> u64 {
        self.own.get(&place).copied().unwrap_or(0)
    }

    /// Sets bytes at a place aside for memory about to be made, unless that is more than `most` together.
    pub fn promise(&mut self, place: Place, bytes: u64, most: u64) -> bool {
        let own = self.own.entry(place).or_default();
        let fits = own.checked_add(bytes).is_some_and(|sum| sum <= most);
        if fits {
            *own += bytes;
        }
        fits
    }

    /// Nothing came of the promise, or the memory is gone.
    pub fn withdraw(&mut self, place: Place, bytes: u64) {
        if let Some(own) = self.own.get_mut(&place) {
            *own -= bytes;
        }
    }

    /// Memory was made where it had been promised.
    pub fn made(&mut self, handle: u64, asked: u32, place: Place, bytes: u64) {
        self.memory.insert(handle, Memory { origin: Origin::Asked(asked), place, bytes, references: 1, mappings: 0 });
    }

    /// Memory of another process came in; it counts there.
    pub fn imported(&mut self, handle: u64, place: Place) {
        let memory = Memory { origin: Origin::Imported, place, bytes: 0, references: 1, mappings: 0 };
        self.memory.insert(handle, memory);
    }

    /// The GPU that the memory of this handle was asked for on, where it is elsewhere.
    pub fn asked_for(&self, handle: u64) -> Option<u32> {
        self.memory.get(&handle)?.asked_elsewhere()
    }

    /// One more handle on it.
    pub fn retained(&mut self, handle: u64) {
        if let Some(memory) = self.memory.get_mut(&handle) {
            memory.references += 1;
        }
    }

    /// One handle less. What it was before, for [`Ledger::not_released`].
    pub fn release(&mut self, handle: u64) -> Option<Memory> {
        let memory = self.memory.get_mut(&handle).filter(|memory| memory.references > 0)?;
        let before = *memory;
        memory.references -= 1;
        self.drop_unused(handle);
        Some(before)
    }

    /// The release failed.
    pub fn not_released(&mut self, handle: u64, before: Memory) {
        match self.memory.get_mut(&handle) {
            Some(memory) => memory.references += 1,
            None => {
                self.memory.insert(handle, before);
                *self.own.entry(before.place).or_default() += before.bytes;
            }
        }
    }

    /// The memory is being mapped; whether it is known here.
    pub fn begin_map(&mut self, handle: u64) -> bool {
        let known = self.memory.get_mut(&handle);
        let is_known = known.is_some();
        if let Some(memory) = known {
            memory.mappings += 1;
        }
        is_known
    }

    /// Mapping what was begun succeeded, or not.
    pub fn end_map(&mut self, handle: u64, address: u64, bytes: u64, succeeded: bool) {
        if succeeded {
            self.mappings.insert(address, Mapping { bytes, handle, granted: Vec::new() });
        } else {
            self.unmapped(handle);
        }
    }

    /// Takes the mappings in a range out.
    pub fn take_mappings(&mut self, address: u64, bytes: u64) -> Vec<(u64, Mapping)> {
        let starts: Vec<u64> = self.in_range(address, bytes).map(|(start, _)| *start).collect();
        starts.into_iter().filter_map(|start| Some((start, self.mappings.remove(&start)?))).collect()
    }

    /// They are there still.
    pub fn put_back(&mut self, taken: Vec<(u64, Mapping)>) {
        self.mappings.extend(taken);
    }

    /// One mapping of it less.
    pub fn unmapped(&mut self, handle: u64) {
        if let Some(memory) = self.memory.get_mut(&handle) {
            memory.mappings -= 1;
            self.drop_unused(handle);
        }
    }

    /// The mapping at this address whose memory the program believes on another GPU: that GPU, and where it is.
    pub fn elsewhere_at(&self, address: u64) -> Option<(u32, Place)> {
        let memory = self.memory.get(&self.mapping_at(address)?.handle)?;
        Some((memory.asked_elsewhere()?, memory.place))
    }

    /// The mappings in a range with their memory.
    pub fn mapped_in(&self, address: u64, bytes: u64) -> Vec<(u64, u64, Memory)> {
        let known =
            |(start, mapping): (&u64, &Mapping)| Some((*start, mapping.bytes, *self.memory.get(&mapping.handle)?));
        self.in_range(address, bytes).filter_map(known).collect()
    }

    /// The program set access to a range.
    pub fn granted(&mut self, address: u64, bytes: u64, list: &[Access]) {
        for (_, mapping) in self.mappings.range_mut(address..address.saturating_add(bytes)) {
            for access in list {
                mapping.granted.retain(|known| known.location != access.location);
                mapping.granted.push(*access);
            }
        }
    }

    /// The access that the program itself gave a location at this address; `None` where the driver's answer is that.
    pub fn access_at(&self, address: u64, location: Location) -> Option<i32> {
        let mapping = self.mapping_at(address)?;
        Some(mapping.granted.iter().find(|known| known.location == location).map_or(0, |known| known.flags))
    }

    /// Whether a program that caches is to hear of it before its GPU overflows; once, until all that went elsewhere is
    /// gone.
    pub fn tell_softly(&mut self, device: u32) -> bool {
        !std::mem::replace(&mut self.told.entry(device).or_default().soft, true)
    }

    /// Whether a request is refused for its size: the first one, and each smaller one after it. Who asks again for as much
    /// does not ask for less until it is served.
    pub fn refuse_arena(&mut self, device: u32, bytes: u64) -> bool {
        let arena = &mut self.told.entry(device).or_default().arena;
        let refused = arena.is_none_or(|last| bytes < last);
        if refused {
            *arena = Some(bytes);
        }
        refused
    }

    fn mapping_at(&self, address: u64) -> Option<&Mapping> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some(mapping)
    }

    fn in_range(&self, address: u64, bytes: u64) -> impl Iterator<Item = (&u64, &Mapping)> {
        self.mappings.range(address..address.saturating_add(bytes))
    }

    fn drop_unused(&mut self, handle: u64) {
        let Some(memory) = self.memory.get(&handle).filter(|it| it.references == 0 && it.mappings == 0).copied() else {
            return;
        };
        self.memory.remove(&handle);
        self.withdraw(memory.place, memory.bytes);
        if let Some(device) = memory.asked_elsewhere()
            && !self.memory.values().any(|other| other.asked_elsewhere() == Some(device))
        {
            self.told.remove(&device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Place = Place::Gpu(1);

    fn with_one() -> Ledger {
        let mut ledger = Ledger::default();
        assert!(ledger.promise(PEER, 10, 10));
        ledger.made(7, 0, PEER, 10);
        ledger
    }

    #[test]
    fn memory_that_is_released_while_mapped_lives_until_it_is_unmapped() {
        let mut ledger = with_one();
        assert!(ledger.begin_map(7));
        ledger.end_map(7, 100, 10, true);
        assert!(ledger.release(7).is_some());
        assert_eq!(ledger.own(PEER), 10);
        assert_eq!(ledger.elsewhere_at(105), Some((0, PEER)));
        assert!(ledger.begin_map(7), "a mapping keeps the handle's number");
        ledger.end_map(7, 200, 10, true);
        for (_, mapping) in ledger.take_mappings(0, 1000) {
            ledger.unmapped(mapping.handle);
        }
        assert_eq!((ledger.len(), ledger.own(PEER)), (0, 0));
    }

    #[test]
    fn a_failed_call_leaves_everything_as_it_was() {
        let mut ledger = with_one();
        let before = ledger.release(7).unwrap();
        assert_eq!(ledger.len(), 0);
        ledger.not_released(7, before);
        assert_eq!((ledger.len(), ledger.own(PEER)), (1, 10));
        assert!(ledger.begin_map(7));
        ledger.end_map(7, 100, 10, false);
        assert_eq!(ledger.elsewhere_at(100), None);
        assert!(ledger.begin_map(7));
        ledger.end_map(7, 100, 10, true);
        let taken = ledger.take_mappings(100, 10);
        ledger.put_back(taken);
        assert_eq!(ledger.elsewhere_at(109), Some((0, PEER)));
        assert_eq!(ledger.elsewhere_at(110), None);
    }

    #[test]
    fn promises_count_at_once_and_never_beyond_the_limit() {
        let mut ledger = with_one();
        assert!(!ledger.promise(PEER, 1, 10));
        assert!(ledger.promise(PEER, 1, 11));
        ledger.withdraw(PEER, 1);
        assert!(!ledger.promise(PEER, u64::MAX, u64::MAX));
        assert_eq!(ledger.own(PEER), 10);
    }

    #[test]
    fn the_program_hears_back_what_it_set() {
        let mut ledger = with_one();
        ledger.begin_map(7);
        ledger.end_map(7, 100, 10, true);
        let device = |id| Location { kind: Location::DEVICE, id };
        ledger.granted(100, 10, &[Access { location: device(0), flags: 3 }]);
        ledger.granted(100, 10, &[Access { location: device(0), flags: 1 }]);
        assert_eq!(ledger.access_at(100, device(0)), Some(1));
        assert_eq!(ledger.access_at(100, device(1)), Some(0), "granted by us, not by the program");
        assert_eq!(ledger.access_at(99, device(0)), None);
    }

    #[test]
    fn a_caching_program_is_told_again_once_everything_is_back() {
        let mut ledger = with_one();
        assert!(ledger.tell_softly(0) && !ledger.tell_softly(0));
        assert!(ledger.refuse_arena(0, 5) && ledger.refuse_arena(0, 4) && !ledger.refuse_arena(0, 4));
        let _ = ledger.release(7);
        assert!(ledger.tell_softly(0) && ledger.refuse_arena(0, 9));
    }
}
