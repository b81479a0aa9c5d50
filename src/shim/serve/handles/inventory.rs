//! Which memory of the program's own is, or may be, elsewhere than it was asked for, and where it is mapped.
//!
//! The driver keeps a handle's number as long as the handle is referenced or its memory is mapped, so the number names the
//! memory here. An entry goes *before* the call that ends it, and comes back if that call fails: the driver may give the
//! number, or the address, to another thread before this one hears of the success.
//!
//! What no place has whole is made of parts, which the program knows by the handle of the first. The driver sees one
//! reference on each as long as the program holds any on the whole.

use gpupool_cuda::{Access, Location, Physical};
use gpupool_pool::{Accounts, Claim, Place, SoftRefusal};
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
    /// Handles that the program holds on it; of a part but the first, 1 as long as it holds any on the whole.
    references: u64,
    /// Address ranges that it is mapped at, or being mapped at.
    mappings: u64,
    /// The handle of the first part, of what is made of parts.
    whole: Option<Physical>,
}

/// A part of what the program asked for in one piece, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub handle: Physical,
    pub place: Place,
    pub bytes: u64,
}

/// What the driver is to be asked for a release.
#[derive(Debug)]
pub enum Release {
    /// To release a handle that is not known here.
    Unknown,
    /// Nothing: the program holds other references on the parts.
    Counted,
    /// To release these, the program's handle first. As they were, for [`Inventory::not_released`].
    Parts(Vec<(Physical, Memory)>),
}

/// What is to be done for a handle that `cuMemRetainAllocationHandle` gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Retained {
    /// Nothing more.
    Plain,
    /// It is of a part. The program is to have this one, and the driver's reference is one too many.
    Whole(Physical),
    /// The first part's handle, and the driver is to take a reference on the other parts, which are mapped at these addresses: the program
    /// held none any more.
    Revived(Physical, Vec<u64>),
}

impl Memory {
    /// Whether it is a part of something.
    pub fn is_part(&self) -> bool {
        self.whole.is_some()
    }

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
    pub handle: Physical,
    /// What the program said about access, one entry a location.
    granted: Vec<Access>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Inventory {
    memory: BTreeMap<Physical, Memory>,
    mappings: BTreeMap<u64, Mapping>,
    /// The parts of what is made of several, by the handle of the first.
    wholes: BTreeMap<Physical, Vec<Part>>,
    /// What the memory made here was charged to before it was made, and is credited to when it goes.
    pub accounts: Option<&'static Accounts>,
    /// By GPU, whether its program is to hear of it before the GPU overflows; until all that went elsewhere is gone.
    soft: BTreeMap<u32, SoftRefusal>,
}

impl Inventory {
    /// Pieces of memory in it.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// What was asked for on this GPU was made, where it had been charged.
    pub fn made(&mut self, asked: u32, parts: &[Part]) {
        let whole = parts.first().filter(|_| parts.len() > 1).map(|first| first.handle);
        for &Part { handle, place, bytes } in parts {
            let origin = Origin::Asked(asked);
            self.memory.insert(handle, Memory { origin, place, bytes, references: 1, mappings: 0, whole });
        }
        if let Some(whole) = whole {
            self.wholes.insert(whole, parts.to_vec());
        }
        if parts.iter().any(|part| part.place != Place::Gpu(asked)) {
            self.soft.entry(asked).or_default().overflowed();
        }
    }

    /// Memory of another process came in; it counts there.
    pub fn imported(&mut self, handle: Physical, place: Place) {
        let memory = Memory { origin: Origin::Imported, place, bytes: 0, references: 1, mappings: 0, whole: None };
        self.memory.insert(handle, memory);
    }

    /// The GPU that the memory of this handle was asked for on, where it is elsewhere.
    pub fn asked_for(&self, handle: Physical) -> Option<u32> {
        self.memory.get(&handle)?.asked_elsewhere()
    }

    /// The parts behind a handle, if there are several.
    pub fn parts(&self, handle: Physical) -> Option<&[Part]> {
        self.wholes.get(&handle).map(Vec::as_slice)
    }

    /// The driver is about to give one more reference on what is mapped at `address`: its handle, where that is known here
    /// and not made of parts. Counted before, because another thread may release the last reference but this one meanwhile.
    pub fn begin_retain(&mut self, address: u64) -> Option<Physical> {
        let handle = self.mapping_at(address)?.1.handle;
        let memory = self.memory.get_mut(&handle).filter(|memory| memory.whole.is_none())?;
        memory.references += 1;
        Some(handle)
    }

    /// It gave none, or one on other memory.
    pub fn not_retained(&mut self, handle: Physical) {
        let _ = self.release_one(handle);
    }

    /// The driver gave one more reference on this handle, for the memory mapped at `address`.
    pub fn retained(&mut self, handle: Physical, address: u64) -> Retained {
        let Some(memory) = self.memory.get_mut(&handle) else { return Retained::Plain };
        let Some(whole) = memory.whole else {
            memory.references += 1;
            return Retained::Plain;
        };
        if let Some(first) = self.memory.get_mut(&whole).filter(|first| first.references > 0) {
            first.references += 1;
            return Retained::Whole(whole);
        }
        let start = self.mapped_whole(address).map_or(0, |(start, _)| start);
        let (mut at, mut others) = (start, Vec::new());
        for part in self.wholes.get(&whole).into_iter().flatten() {
            if part.handle != handle {
                others.push(at);
            }
            at += part.bytes;
        }
        Retained::Revived(whole, others)
    }

    /// The driver did so.
    pub fn revived(&mut self, whole: Physical) {
        for part in self.wholes.get(&whole).into_iter().flatten() {
            if let Some(memory) = self.memory.get_mut(&part.handle) {
                memory.references += 1;
            }
        }
    }

    /// One handle less.
    pub fn release(&mut self, handle: Physical) -> Release {
        let Some(memory) = self.memory.get_mut(&handle).filter(|memory| memory.references > 0) else {
            return Release::Unknown;
        };
        if memory.whole.is_some() && memory.references > 1 {
            memory.references -= 1;
            return Release::Counted;
        }
        let handles = match self.parts(handle) {
            Some(parts) => parts.iter().map(|part| part.handle).collect(),
            None => vec![handle],
        };
        Release::Parts(handles.into_iter().filter_map(|handle| Some((handle, self.release_one(handle)?))).collect())
    }

    fn release_one(&mut self, handle: Physical) -> Option<Memory> {
        let memory = self.memory.get_mut(&handle)?;
        let before = *memory;
        memory.references -= 1;
        self.drop_unused(handle);
        Some(before)
    }

    /// The driver did not release these, of one [`Inventory::release`].
    pub fn not_released(&mut self, parts: &[(Physical, Memory)]) {
        for &(handle, before) in parts {
            match self.memory.get_mut(&handle) {
                Some(memory) => memory.references += 1,
                None => {
                    self.memory.insert(handle, before);
                    if let Some(accounts) = self.accounts {
                        accounts.charge_existing(Claim::Handles, before.place, before.bytes);
                    }
                }
            }
        }
        if let [(_, Memory { whole: Some(whole), .. }), _, ..] = *parts {
            let part = |&(handle, Memory { place, bytes, .. }): &(Physical, Memory)| Part { handle, place, bytes };
            self.wholes.entry(whole).or_insert_with(|| parts.iter().map(part).collect());
        }
    }

    /// The memory is being mapped: its parts, where it is known here.
    pub fn begin_map(&mut self, handle: Physical) -> Vec<Part> {
        let Some(&Memory { place, bytes, .. }) = self.memory.get(&handle) else { return Vec::new() };
        let parts = self.parts(handle).map_or_else(|| vec![Part { handle, place, bytes }], <[Part]>::to_vec);
        for part in &parts {
            if let Some(memory) = self.memory.get_mut(&part.handle) {
                memory.mappings += 1;
            }
        }
        parts
    }

    /// Mapping what was begun, at `address` and of `bytes`, succeeded or not.
    pub fn end_map(&mut self, parts: &[Part], mut address: u64, bytes: u64, succeeded: bool) {
        for part in parts {
            if succeeded {
                // What is not made here has no size here.
                let bytes = if parts.len() > 1 { part.bytes } else { bytes };
                self.mappings.insert(address, Mapping { bytes, handle: part.handle, granted: Vec::new() });
                address += bytes;
            } else {
                self.unmapped(part.handle);
            }
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
    pub fn unmapped(&mut self, handle: Physical) {
        if let Some(memory) = self.memory.get_mut(&handle) {
            memory.mappings -= 1;
            self.drop_unused(handle);
        }
    }

    /// The mapping at this address whose memory the program believes on another GPU: that GPU, and where it is.
    pub fn elsewhere_at(&self, address: u64) -> Option<(u32, Place)> {
        let memory = self.memory.get(&self.mapping_at(address)?.1.handle)?;
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
        let (_, mapping) = self.mapping_at(address)?;
        Some(mapping.granted.iter().find(|known| known.location == location).map_or(0, |known| known.flags))
    }

    /// Whether a program that caches is to hear of it before its GPU overflows with so many bytes.
    pub fn refuse_softly(&mut self, device: u32, bytes: u64) -> bool {
        self.soft.entry(device).or_default().refuse(bytes)
    }

    /// Where what is made of parts is mapped that is mapped at this address, and its bytes.
    pub fn mapped_whole(&self, address: u64) -> Option<(u64, u64)> {
        let (start, mapping) = self.mapping_at(address)?;
        let parts = self.wholes.get(&self.memory.get(&mapping.handle)?.whole?)?;
        let before: u64 = parts.iter().take_while(|part| part.handle != mapping.handle).map(|part| part.bytes).sum();
        Some((start - before, parts.iter().map(|part| part.bytes).sum()))
    }

    fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some((*start, mapping))
    }

    fn in_range(&self, address: u64, bytes: u64) -> impl Iterator<Item = (&u64, &Mapping)> {
        self.mappings.range(address..address.saturating_add(bytes))
    }

    fn drop_unused(&mut self, handle: Physical) {
        let Some(memory) = self.memory.get(&handle).filter(|it| it.references == 0 && it.mappings == 0).copied() else {
            return;
        };
        self.memory.remove(&handle);
        if let Some(accounts) = self.accounts {
            accounts.credit(Claim::Handles, memory.place, memory.bytes);
        }
        if let Some(whole) = memory.whole
            && !self.memory.values().any(|other| other.whole == Some(whole))
        {
            self.wholes.remove(&whole);
        }
        if let Some(device) = memory.asked_elsewhere()
            && !self.memory.values().any(|other| other.asked_elsewhere() == Some(device))
        {
            self.soft.entry(device).or_default().all_gone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_pool::PlaceSpec;

    const PEER: Place = Place::Gpu(1);
    const FIRST: Physical = Physical::from_raw(7);
    const SECOND: Physical = Physical::from_raw(8);

    /// Memory of these sizes at the peer, in one piece for the program.
    fn with(sizes: &[u64]) -> Inventory {
        let accounts: &Accounts = Box::leak(Box::new(Accounts::new(&[PlaceSpec { place: PEER, limit: 15 }])));
        let mut inventory = Inventory { accounts: Some(accounts), ..Inventory::default() };
        assert!(accounts.charge(Claim::Handles, PEER, sizes.iter().sum()));
        let part = |(index, bytes): (usize, &u64)| Part {
            handle: Physical::from_raw(7 + index as u64),
            place: PEER,
            bytes: *bytes,
        };
        inventory.made(0, &sizes.iter().enumerate().map(part).collect::<Vec<_>>());
        inventory
    }

    fn own(inventory: &Inventory) -> u64 {
        inventory.accounts.map_or(0, |accounts| accounts.of(Claim::Handles, PEER))
    }

    fn map(inventory: &mut Inventory, address: u64) {
        let parts = inventory.begin_map(FIRST);
        assert!(!parts.is_empty());
        inventory.end_map(&parts, address, 10, true);
    }

    fn unmap(inventory: &mut Inventory) {
        for (_, mapping) in inventory.take_mappings(0, 1000) {
            inventory.unmapped(mapping.handle);
        }
    }

    #[test]
    fn memory_that_is_released_while_mapped_lives_until_it_is_unmapped() {
        let mut inventory = with(&[10]);
        map(&mut inventory, 100);
        assert!(matches!(inventory.release(FIRST), Release::Parts(parts) if parts.len() == 1));
        assert_eq!(own(&inventory), 10);
        assert_eq!(inventory.elsewhere_at(105), Some((0, PEER)));
        map(&mut inventory, 200);
        unmap(&mut inventory);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0));
    }

    #[test]
    fn memory_stays_known_that_is_released_while_it_is_retained() {
        let mut inventory = with(&[10]);
        map(&mut inventory, 100);
        assert_eq!((inventory.begin_retain(99), inventory.begin_retain(105)), (None, Some(FIRST)));
        assert!(matches!(inventory.release(FIRST), Release::Parts(_)));
        unmap(&mut inventory);
        assert_eq!((inventory.len(), own(&inventory)), (1, 10), "the driver gave a handle of it");
        inventory.not_retained(FIRST);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0), "or did not");
    }

    #[test]
    fn a_failed_call_leaves_everything_as_it_was() {
        let mut inventory = with(&[10]);
        let Release::Parts(before) = inventory.release(FIRST) else { panic!("the driver is to be asked") };
        assert_eq!(inventory.len(), 0);
        inventory.not_released(&before);
        assert_eq!((inventory.len(), own(&inventory)), (1, 10));
        let parts = inventory.begin_map(FIRST);
        inventory.end_map(&parts, 100, 10, false);
        assert_eq!(inventory.elsewhere_at(100), None);
        map(&mut inventory, 100);
        let taken = inventory.take_mappings(100, 10);
        inventory.put_back(taken);
        assert_eq!(inventory.elsewhere_at(109), Some((0, PEER)));
        assert_eq!(inventory.elsewhere_at(110), None);
    }

    #[test]
    fn parts_are_one_to_the_program() {
        let mut inventory = with(&[4, 6]);
        map(&mut inventory, 100);
        assert_eq!(inventory.mapped_whole(107), Some((100, 10)));
        assert_eq!(inventory.retained(SECOND, 107), Retained::Whole(FIRST));
        assert!(matches!(inventory.release(FIRST), Release::Counted));
        assert!(matches!(inventory.release(FIRST), Release::Parts(parts) if parts.len() == 2));
        assert!(matches!(inventory.release(FIRST), Release::Unknown), "there is none left to release");
        assert_eq!(inventory.retained(SECOND, 107), Retained::Revived(FIRST, vec![100]));
        inventory.revived(FIRST);
        unmap(&mut inventory);
        assert_eq!((inventory.len(), own(&inventory)), (2, 10), "held by the handle that was taken again");
        let _ = inventory.release(FIRST);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0));
        assert!(inventory.parts(FIRST).is_none());
    }

    #[test]
    fn the_program_hears_back_what_it_set() {
        let mut inventory = with(&[10]);
        map(&mut inventory, 100);
        let device = |id| Location { kind: Location::DEVICE, id };
        inventory.granted(100, 10, &[Access { location: device(0), flags: 3 }]);
        inventory.granted(100, 10, &[Access { location: device(0), flags: 1 }]);
        assert_eq!(inventory.access_at(100, device(0)), Some(1));
        assert_eq!(inventory.access_at(100, device(1)), Some(0), "granted by us, not by the program");
        assert_eq!(inventory.access_at(99, device(0)), None);
    }

    #[test]
    fn a_caching_program_is_told_again_once_everything_is_back() {
        let mut inventory = with(&[10]);
        assert!(!inventory.refuse_softly(0, 10), "it has overflowed");
        let _ = inventory.release(FIRST);
        assert!(inventory.refuse_softly(0, 10) && !inventory.refuse_softly(0, 10));
    }
}
