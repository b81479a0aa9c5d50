//! Other physical memory behind a number of the program's: everything of a move but the wait for work that uses the memory.
//!
//! It needs that the inventory knows every range where memory is mapped, with exactly who may use it there, and whatever else
//! reaches its pages. Until everything is mapped where it was, the old memory is kept: by the program's own references, or by one that
//! is taken for that time where the program has released its own and mappings alone keep the memory.
//!
//! **Nothing behind a number** ([`put_away`]): contents that somebody keeps by their addresses need no physical memory until a GPU uses them. The
//! ranges stay reserved and the inventory keeps what is mapped there, so that [`bring_in`] puts all of it back. No call of the program's may come near the number or
//! its addresses meanwhile; whoever keeps the contents sees to that.

use super::anchors::Anchor;
use super::inventory::{Away, Inventory, Mapping, Origin, Part};
use super::number::Number;
use super::{SETTLED, with_inventory};
use crate::backing::reclaim;
use gpupool_cuda::{Access, CuResult, Driver, Location, Physical, Properties};
use gpupool_pool::{Claim, Place};
use std::collections::BTreeSet;
use std::ops::Range;

/// Why memory stays on its physical pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// Nothing is known here of what is meant, or only the driver has its handle.
    Unknown,
    /// Another process made it.
    Imported,
    /// Something reaches its pages past its addresses.
    Anchored(Anchor),
    /// A part of it is mapped somewhere, and not all.
    MappedInPart,
    /// A call that uses it is under way.
    InUse,
    /// There is no room for it.
    NoRoom,
    /// The driver refused this; everything is as it was.
    Refused(CuResult),
    /// The driver refused this and then to put back what had been there: at this address nothing is mapped any more.
    Lost(CuResult, u64),
}

/// Memory behind a number while other memory is being put there: no call of the program's uses it meanwhile.
struct Moving {
    number: Number,
    /// All parts, before and behind those that change, too.
    all: Vec<Part>,
    /// Which of them change, and where they begin in the memory.
    which: Range<usize>,
    offset: u64,
    /// Whether other parts stay, which others may reach than those that change.
    is_part: bool,
    /// References of the driver's on each part.
    held: u64,
    /// Whether network adapters are to reach it.
    rdma: u8,
    mappings: Vec<(u64, Mapping)>,
}

impl Inventory {
    /// Whether the physical pages of this number's memory may change, all of which are there.
    fn may_move(&self, number: Number) -> Result<(), Stays> {
        self.may_change(number)?;
        let is_there = self.memory.get(&number).is_some_and(|memory| memory.away.is_empty());
        if is_there { Ok(()) } else { Err(Stays::InUse) }
    }

    /// The same of those that are there.
    fn may_change(&self, number: Number) -> Result<(), Stays> {
        let memory = self.memory.get(&number).ok_or(Stays::Unknown)?;
        if memory.origin == Origin::Imported {
            return Err(Stays::Imported);
        }
        if let Some(anchor) = memory.anchors.first() {
            return Err(Stays::Anchored(anchor));
        }
        if memory.calls > 0 || memory.retaining > 0 || memory.moving {
            return Err(Stays::InUse);
        }
        let is_whole = |mapping: &Mapping| mapping.offset == 0 && mapping.bytes == memory.bytes();
        let mut mappings = self.mappings.values().filter(|mapping| mapping.number == number);
        if mappings.all(is_whole) { Ok(()) } else { Err(Stays::MappedInPart) }
    }

    /// The same of the part that is mapped at this address.
    fn may_change_at(&self, address: u64) -> Result<(), Stays> {
        let (number, ..) = self.part_at(address).ok_or(Stays::Unknown)?;
        self.may_change(number)?;
        if self.is_stored_at(address) { Err(Stays::InUse) } else { Ok(()) }
    }

    /// Whether nothing need be behind what is mapped at this address while its contents are kept: it may change its pages.
    pub fn may_go(&self, address: u64) -> bool {
        self.may_change_at(address).is_ok()
    }

    /// All of this number's memory is about to change its pages, or the part alone that begins at this offset. The caller has asked whether it may.
    fn begin_move(&mut self, number: Number, part: Option<u64>) -> Result<Moving, Stays> {
        let memory = self.memory.get_mut(&number).ok_or(Stays::Unknown)?;
        let (which, offset) = match part {
            None => (0..memory.parts.len(), 0),
            Some(offset) => {
                let mut begins = memory.parts.iter().scan(0, |at, part| Some(std::mem::replace(at, *at + part.bytes)));
                let nth = begins.position(|begin| begin == offset).ok_or(Stays::Unknown)?;
                (nth..nth + 1, offset)
            }
        };
        memory.moving = true;
        let (all, held, rdma) = (memory.parts.clone(), memory.held, memory.rdma);
        let of_it = self.mappings.iter().filter(|(_, mapping)| mapping.number == number);
        let mappings = of_it.map(|(start, mapping)| (*start, mapping.clone())).collect();
        Ok(Moving { number, all, which, offset, is_part: part.is_some(), held, rdma, mappings })
    }

    /// Ends what [`Inventory::begin_move`] began, with this in place of what changed, which was charged, or what there was before.
    fn end_move(&mut self, moving: &Moving, new: Option<Part>, readers: &[u32]) {
        let Some(memory) = self.memory.get_mut(&moving.number) else { return };
        memory.moving = false;
        let Some(new) = new else { return };
        memory.held = memory.held.min(1);
        let (before, behind) = (&moving.all[..moving.which.start], &moving.all[moving.which.end..]);
        let all: Vec<Part> = before.iter().chain(&[new]).chain(behind).copied().collect();
        self.replace(moving.number, &all, true);
        if !moving.is_part {
            return self.widen_for(&moving.mappings, readers);
        }
        self.widen_part_for(&moving.mappings, readers);
    }

    /// These parts are behind a number from here on, charged or not, and what was there before is not. As many as before stand for those one by one, and then what is
    /// the same as before stays: parts without a handle differ in nothing else.
    /// Memory of several parts is charged, always.
    fn replace(&mut self, number: Number, new: &[Part], charged: bool) {
        let Some(memory) = self.memory.get_mut(&number) else { return };
        let (was_charged, was_elsewhere, was_disguised) =
            (memory.charged, memory.asked_elsewhere(), memory.is_disguised());
        let old = memory.replace(new);
        memory.charged = charged;
        let (is_elsewhere, is_disguised) = (memory.asked_elsewhere(), memory.is_disguised());
        self.disguised = self.disguised + usize::from(is_disguised) - usize::from(was_disguised);
        let stays = |nth: usize| old.len() == new.len() && old.get(nth) == new.get(nth);
        for (_, part) in old.iter().enumerate().filter(|(nth, _)| !stays(*nth)) {
            if self.numbers.get(&part.handle) == Some(&number) {
                self.numbers.remove(&part.handle);
            }
            if let Some(accounts) = self.accounts.filter(|_| was_charged) {
                accounts.credit(Claim::Handles, part.place, part.bytes);
            }
        }
        for part in new.iter().filter(|part| part.handle != NO_HANDLE) {
            self.numbers.insert(part.handle, number);
        }
        match is_elsewhere {
            Some(device) => self.soft.entry(device).or_default().overflowed(),
            None => self.none_is_elsewhere(was_elsewhere),
        }
    }

    /// A part of what is mapped at these is where these reach it; who may use the others may still.
    fn widen_part_for(&mut self, mappings: &[(u64, Mapping)], readers: &[u32]) {
        for (start, _) in mappings {
            if let Some(known) = self.mappings.get_mut(start) {
                let more = known.for_readers(readers);
                known.widened.extend(more);
            }
        }
    }

    fn widen_for(&mut self, mappings: &[(u64, Mapping)], readers: &[u32]) {
        for (start, mapping) in mappings {
            if let Some(known) = self.mappings.get_mut(start) {
                known.widened = mapping.widened_for(readers);
            }
        }
    }

    /// What [`put_away`] took away is behind its number no more; it is counted where it is kept.
    fn end_away(&mut self, moving: &Moving, away: Away, place: Place) {
        let bytes = moving.bytes();
        if let Some(accounts) = self.accounts {
            accounts.charge_existing(Claim::Handles, place, bytes);
        }
        let mut all = moving.all.clone();
        all[moving.which.clone()].fill(Part { handle: NO_HANDLE, place, bytes });
        self.replace(moving.number, &all, true);
        if let Some(memory) = self.memory.get_mut(&moving.number) {
            memory.moving = false;
            memory.away.insert(moving.offset, away);
            // Of several parts the others are there still. Each comes back with as many as those have: nothing is released meanwhile.
            if !moving.is_part {
                memory.held = 0;
            }
        }
    }

    /// What is away of these is on its way back, until [`Inventory::end_returns`].
    fn begin_return(&mut self, addresses: &[u64]) -> Vec<Coming> {
        let mut all = Vec::with_capacity(addresses.len());
        let mut begun = BTreeSet::new();
        for &address in addresses {
            let Some((number, nth, offset)) = self.part_at(address) else { continue };
            let of_it = self.mappings.iter().filter(|(_, mapping)| mapping.number == number);
            let mappings = of_it.map(|(start, mapping)| (*start, mapping.clone())).collect();
            let Some(memory) = self.memory.get_mut(&number) else { continue };
            let Some(&away) = memory.away.get(&offset).filter(|_| !memory.moving || begun.contains(&number)) else {
                continue;
            };
            memory.moving = true;
            begun.insert(number);
            let (bytes, is_held, is_part) = (memory.parts[nth].bytes, memory.references > 0, memory.parts.len() > 1);
            all.push(Coming { number, nth, offset, is_part, address, bytes, away, is_held, mappings });
        }
        all
    }

    /// How that ended for one of them: with this behind the number, or with nothing as before.
    fn end_return(&mut self, coming: &Coming, new: Option<Part>, readers: &[u32]) {
        let Some((memory, part)) = self.memory.get_mut(&coming.number).zip(new) else { return };
        memory.away.remove(&coming.offset);
        if !coming.is_part {
            memory.held = u64::from(coming.is_held);
        }
        let mut all = memory.parts.clone();
        all[coming.nth] = part;
        self.replace(coming.number, &all, coming.is_charged_at(part.place));
        if coming.is_part {
            self.widen_part_for(&coming.mappings, readers);
        } else if part.place != coming.away.from {
            self.widen_for(&coming.mappings, readers);
        }
    }

    /// None of these is on its way any more.
    fn end_returns(&mut self, coming: &[Coming]) {
        for Coming { number, .. } in coming {
            if let Some(memory) = self.memory.get_mut(number) {
                memory.moving = false;
            }
        }
    }
}

/// Of memory that is away. No driver gives it, and every one refuses it.
const NO_HANDLE: Physical = Physical::from_raw(0);

/// Memory that is away while it is brought back.
struct Coming {
    number: Number,
    /// Which of its parts, and where that begins in it.
    nth: usize,
    offset: u64,
    /// Whether there are others, which others may reach.
    is_part: bool,
    /// By which its contents are kept.
    address: u64,
    bytes: u64,
    away: Away,
    /// Whether the program has a reference on it, beside its mappings.
    is_held: bool,
    mappings: Vec<(u64, Mapping)>,
}

impl Coming {
    /// Whether it counts towards a limit at a place: where it lay, if it did before.
    fn is_charged_at(&self, place: Place) -> bool {
        place != self.away.from || self.away.was_charged
    }

    /// Who may use it at a place that these reach.
    fn access_at(&self, mapping: &Mapping, place: Place, readers: &[u32]) -> Vec<Access> {
        if place == self.away.from && !self.is_part { mapping.access() } else { mapping.access_for(readers) }
    }

    fn properties(&self, place: Place) -> Properties {
        let Away { handle_types, rdma, .. } = self.away;
        Properties { handle_types, rdma, ..Properties::of(place) }.at(place)
    }

    /// Maps this wherever the memory was mapped, or nowhere.
    fn put_everywhere(&self, driver: &Driver, part: Part, readers: &[u32]) -> CuResult {
        for (nth, (start, mapping)) in self.mappings.iter().enumerate() {
            let access = self.access_at(mapping, part.place, readers);
            let result = put(driver, *start + self.offset, &[part], &access);
            if !result.is_ok() {
                for (start, _) in &self.mappings[..nth] {
                    let _ = again(|| driver.unmap(*start + self.offset, self.bytes));
                }
                return result;
            }
        }
        CuResult::SUCCESS
    }
}

impl Mapping {
    /// Who may use it: what the program said, and what it was granted beyond that.
    fn access(&self) -> Vec<Access> {
        let beyond = |access: &&Access| !self.widened.iter().any(|known| known.location == access.location);
        self.granted.iter().filter(beyond).chain(&self.widened).copied().collect()
    }

    /// Who is granted it beyond what the program said, at a place that these reach: those who were before as far as they reach it, since the
    /// driver maps nothing for others, and those that the program said nothing about.
    fn widened_for(&self, readers: &[u32]) -> Vec<Access> {
        let is_said = |access: &Access| self.granted.iter().any(|known| known.location == access.location);
        let reaches = |access: &Access| access.location.device().is_none_or(|gpu| readers.contains(&gpu));
        let kept = self.widened.iter().copied().filter(|access| is_said(access) || reaches(access));
        kept.chain(self.for_readers(readers)).collect()
    }

    /// Who may use it there.
    fn access_for(&self, readers: &[u32]) -> Vec<Access> {
        Mapping { widened: self.widened_for(readers), ..self.clone() }.access()
    }

    /// Those of `readers` that the program said nothing about, with the most that it gave any GPU.
    fn for_readers(&self, readers: &[u32]) -> Vec<Access> {
        let access = self.access();
        let flags = access.iter().filter(|known| known.location.device().is_some()).map(|known| known.flags).max();
        let reader = |id: &u32| Access { location: Location::of(Place::Gpu(*id)), flags: flags.unwrap_or(0) };
        let is_new = |reader: &Access| reader.flags != 0 && !access.iter().any(|it| it.location == reader.location);
        readers.iter().map(reader).filter(is_new).collect()
    }
}

/// How often a call is made that nothing can be done without: to put back what was mapped before, or to take away what is in the way.
const TRIES: usize = 8;

/// Makes such a call.
pub(super) fn again(call: impl Fn() -> CuResult) -> CuResult {
    let mut result = call();
    for _ in 1..TRIES {
        if result.is_ok() {
            break;
        }
        result = call();
    }
    result
}

/// Maps these parts, where nothing is, for all of these.
fn put(driver: &Driver, start: u64, parts: &[Part], access: &[Access]) -> CuResult {
    let mut at = start;
    let mut result = CuResult::SUCCESS;
    for part in parts {
        result = driver.map(at, part.bytes, part.handle, 0);
        if !result.is_ok() {
            break;
        }
        at += part.bytes;
    }
    if result.is_ok() && !access.is_empty() {
        result = driver.set_access(start, at - start, access);
    }
    if !result.is_ok() && at > start {
        // What stays mapped there would be in the way of what comes next.
        let _ = again(|| driver.unmap(start, at - start));
    }
    result
}

/// Puts `new` where `old` is mapped. After an error `old` is there again, unless it says that it is lost.
fn swap(
    driver: &Driver,
    start: u64,
    bytes: u64,
    old: (&[Part], &[Access]),
    new: (&[Part], &[Access]),
) -> Result<(), Stays> {
    driver.unmap(start, bytes).ok().map_err(Stays::Refused)?;
    let result = put(driver, start, new.0, new.1);
    if result.is_ok() {
        return Ok(());
    }
    match again(|| put(driver, start, old.0, old.1)).is_ok() {
        true => Err(Stays::Refused(result)),
        false => Err(Stays::Lost(result, start)),
    }
}

impl Moving {
    /// The parts that change.
    fn old(&self) -> &[Part] {
        &self.all[self.which.clone()]
    }

    /// Who may use them where they are: the GPUs that reach them there, of all who may use any of the memory.
    fn access_before(&self, mapping: &Mapping, readers: &dyn Fn(Place) -> Vec<u32>) -> Vec<Access> {
        match *self.old() {
            [Part { place, .. }] if self.is_part => mapping.access_for(&readers(place)),
            _ => mapping.access(),
        }
    }

    /// Their bytes.
    fn bytes(&self) -> u64 {
        self.old().iter().map(|part| part.bytes).sum()
    }

    /// Takes a reference on the old memory where the program has none any more.
    fn keep(&self, driver: &Driver) -> Result<(), Stays> {
        if self.held > 0 {
            return Ok(());
        }
        let (start, _) = self.mappings.first().ok_or(Stays::Unknown)?;
        let mut at = *start + self.offset;
        for (index, part) in self.old().iter().enumerate() {
            if let Err(refused) = driver.retain_at(at) {
                self.old()[..index].iter().for_each(|part| {
                    let _ = again(|| driver.release(part.handle));
                });
                return Err(Stays::Refused(refused));
            }
            at += part.bytes;
        }
        Ok(())
    }

    /// Gives back what [`Moving::keep`] took.
    fn let_go(&self, driver: &Driver) {
        if self.held == 0 {
            for part in self.old() {
                let _ = again(|| driver.release(part.handle));
            }
        }
    }

    /// Puts `new` behind every mapping, or behind none.
    fn swap_all(&self, driver: &Driver, new: Part, readers: &dyn Fn(Place) -> Vec<u32>) -> Result<(), Stays> {
        let mut done: Vec<&(u64, Mapping)> = Vec::new();
        let (bytes, there) = (self.bytes(), readers(new.place));
        let before = |mapping: &Mapping| self.access_before(mapping, readers);
        for mapped in &self.mappings {
            let (start, mapping) = mapped;
            let after = mapping.access_for(&there);
            let (old, new) = ((self.old(), &before(mapping)[..]), (&[new][..], &after[..]));
            if let Err(refused) = swap(driver, *start + self.offset, bytes, old, new) {
                let mut refused = refused;
                for (start, mapping) in done.into_iter().rev() {
                    let unmapped = again(|| driver.unmap(*start + self.offset, bytes));
                    refused = if unmapped.is_ok() {
                        self.put_back(driver, *start, &before(mapping), refused)
                    } else {
                        Stays::Lost(unmapped, *start + self.offset)
                    };
                }
                return Err(refused);
            }
            done.push(mapped);
        }
        Ok(())
    }

    /// Maps the old memory again where nothing is; why it stays, or that it is lost.
    fn put_back(&self, driver: &Driver, start: u64, access: &[Access], refused: Stays) -> Stays {
        let start = start + self.offset;
        let result = again(|| put(driver, start, self.old(), access));
        if result.is_ok() { refused } else { Stays::Lost(result, start) }
    }

    /// Takes it out of all mappings, or of none.
    fn unmap_all(&self, driver: &Driver, readers: &dyn Fn(Place) -> Vec<u32>) -> Result<(), Stays> {
        for (nth, (start, _)) in self.mappings.iter().enumerate() {
            if let Err(refused) = driver.unmap(*start + self.offset, self.bytes()).ok() {
                let done = self.mappings[..nth].iter();
                return Err(done.fold(Stays::Refused(refused), |refused, (start, mapping)| {
                    self.put_back(driver, *start, &self.access_before(mapping, readers), refused)
                }));
            }
        }
        Ok(())
    }
}

/// How much of a number's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Much {
    All,
    /// The part of it that begins at the address.
    Part,
    /// The same where there are several parts, and all of it where there is one.
    Each,
}

/// Moves what is mapped at an address to another place, with its data. No work that uses it is queued or running, and none is begun
/// meanwhile: the caller sees to that. `copy` copies so many bytes to one address from another and waits until that is done, on the
/// GPU `copier`, which reaches both places; `readers` are the GPUs that must reach memory of a place. Nothing was unmapped before `copy`
/// is called, and nothing is if it fails.
pub fn move_to(
    driver: &Driver,
    (address, much): (u64, Much),
    place: Place,
    readers: &dyn Fn(Place) -> Vec<u32>,
    copier: u32,
    copy: impl FnOnce(u64, u64, u64) -> CuResult,
) -> Result<(), Stays> {
    let moving = with_inventory(|inventory| {
        let (start, mapping) = inventory.mapping_at(address).ok_or(Stays::Unknown)?;
        let number = mapping.number;
        let has_parts = || inventory.memory.get(&number).is_some_and(|memory| memory.parts.len() > 1);
        let is_part = much == Much::Part || much == Much::Each && has_parts();
        // Others of several parts may be away meanwhile.
        match is_part {
            true => inventory.may_change_at(address)?,
            false => inventory.may_move(number)?,
        }
        inventory.begin_move(number, is_part.then_some(address - start))
    })?;
    let bytes = moving.bytes();
    let accounts = with_inventory(|inventory| inventory.accounts);
    let has_room = accounts.is_none_or(|accounts| accounts.charge(Claim::Handles, place, bytes));
    let kept = moving.keep(driver);
    let made = match has_room {
        true => kept.and_then(|()| filled(driver, &moving, place, bytes, copier, copy)),
        false => Err(Stays::NoRoom),
    };
    let moved = made.and_then(|handle| {
        let new = Part { handle, place, bytes };
        if let Err(refused) = moving.swap_all(driver, new, readers) {
            let _ = again(|| driver.release(handle));
            return Err(refused);
        }
        Ok(new)
    });
    with_inventory(|inventory| inventory.end_move(&moving, moved.ok(), &readers(place)));
    SETTLED.notify_all();
    if kept.is_ok() {
        moving.let_go(driver);
    }
    match moved {
        Ok(new) => {
            for part in moving.old() {
                for _ in 0..moving.held {
                    let _ = again(|| driver.release(part.handle));
                }
            }
            if moving.held == 0 {
                // The program had released it: its mappings alone keep it.
                let _ = again(|| driver.release(new.handle));
            }
            Ok(())
        }
        Err(refused) => {
            if let Some(accounts) = accounts.filter(|_| has_room) {
                accounts.credit(Claim::Handles, place, bytes);
            }
            Err(refused)
        }
    }
}

/// Takes the physical memory of what is mapped at an address away, of several parts the one that begins there. Somebody keeps its contents by that address in files or in plain
/// memory (`place`). As for [`move_to`], nobody uses it meanwhile, and nobody may before [`bring_in`] has brought it back; `readers` as there.
pub fn put_away(driver: &Driver, address: u64, place: Place, readers: &dyn Fn(Place) -> Vec<u32>) -> Result<(), Stays> {
    let moving = with_inventory(|inventory| {
        inventory.may_change_at(address)?;
        let (number, _, begin) = inventory.part_at(address).ok_or(Stays::Unknown)?;
        let memory = inventory.memory.get(&number).ok_or(Stays::Unknown)?;
        let (was_charged, is_part) = (memory.charged, memory.parts.len() > 1);
        Ok((inventory.begin_move(number, is_part.then_some(begin))?, was_charged))
    });
    let (moving, was_charged) = moving?;
    let kept = moving.keep(driver);
    let taken = kept.and_then(|()| {
        let [Part { handle, place: from, .. }] = *moving.old() else { return Err(Stays::MappedInPart) };
        let Properties { handle_types, .. } = driver.properties_of(handle).map_err(Stays::Refused)?;
        moving.unmap_all(driver, readers)?;
        Ok(Away { from, was_charged, handle_types, rdma: moving.rdma })
    });
    with_inventory(|inventory| match taken {
        Ok(away) => inventory.end_away(&moving, away, place),
        Err(_) => inventory.end_move(&moving, None, &[]),
    });
    SETTLED.notify_all();
    if kept.is_ok() {
        moving.let_go(driver);
    }
    taken?;
    for part in moving.old() {
        for _ in 0..moving.held {
            let _ = again(|| driver.release(part.handle));
        }
    }
    Ok(())
}

/// Brings what [`put_away`] took from these addresses to a place. `copy` fetches the contents: each so many bytes to an address, of those that are kept by
/// another, on the GPU `copier`, which reaches the place. What else is mapped there is left alone.
///
/// # Errors
/// Some of it, or all, is away still; why.
pub fn bring_in(
    driver: &Driver,
    addresses: &[u64],
    place: Place,
    readers: &[u32],
    copier: u32,
    copy: impl FnOnce(&[(u64, u64, u64)]) -> CuResult,
) -> Result<(), Stays> {
    let (coming, accounts) = with_inventory(|inventory| (inventory.begin_return(addresses), inventory.accounts));
    let counted = |coming: &&Coming| coming.is_charged_at(place);
    let charged: u64 = coming.iter().filter(counted).map(|coming| coming.bytes).sum();
    let has_room = accounts.is_none_or(|accounts| charged == 0 || accounts.charge(Claim::Handles, place, charged));
    let made = if has_room { loaded(driver, &coming, place, copier, copy) } else { Err(Stays::NoRoom) };
    let put = |coming: &Coming, part: Part| match coming.put_everywhere(driver, part, readers) {
        CuResult::SUCCESS => Ok(part),
        refused => {
            let _ = again(|| driver.release(part.handle));
            Err(Stays::Refused(refused))
        }
    };
    let mut answer = made.as_ref().map(|_| ()).map_err(|stays| *stays);
    for (nth, coming) in coming.iter().enumerate() {
        let part = made.as_ref().ok().and_then(|parts| parts.get(nth)).copied();
        let there = part.and_then(|part| put(coming, part).inspect_err(|stays| answer = Err(*stays)).ok());
        if let Some(accounts) = accounts.filter(|_| has_room && there.is_none() && counted(&coming)) {
            accounts.credit(Claim::Handles, place, coming.bytes);
        }
        with_inventory(|inventory| inventory.end_return(coming, there, readers));
        if let Some(part) = there.filter(|_| !coming.is_held) {
            // The program had released it: its mappings alone keep it.
            let _ = again(|| driver.release(part.handle));
        }
    }
    with_inventory(|inventory| inventory.end_returns(&coming));
    SETTLED.notify_all();
    answer
}

/// New memory at a place for all of these, with what is kept of each.
fn loaded(
    driver: &Driver,
    coming: &[Coming],
    place: Place,
    copier: u32,
    copy: impl FnOnce(&[(u64, u64, u64)]) -> CuResult,
) -> Result<Vec<Part>, Stays> {
    let mut parts: Vec<Part> = Vec::with_capacity(coming.len());
    let mut result = CuResult::SUCCESS;
    for it in coming {
        let bytes = it.bytes;
        let _taking = reclaim::make_room_at(place);
        match driver.create(bytes, &it.properties(place)) {
            Ok(handle) => parts.push(Part { handle, place, bytes }),
            Err(refused) => {
                result = refused;
                break;
            }
        }
    }
    let total = parts.iter().map(|part| part.bytes).sum();
    if result.is_ok() && total > 0 {
        // Nothing of it can be seen where the program knows it before all of it is there.
        result = match driver.reserve(total) {
            Err(refused) => refused,
            Ok(window) => {
                let mut result = put(driver, window, &parts, &[Access::read_write(copier)]);
                if result.is_ok() {
                    let mut to = window;
                    let fetched = coming.iter().map(|coming| {
                        to += coming.bytes;
                        (to - coming.bytes, coming.address, coming.bytes)
                    });
                    result = copy(&fetched.collect::<Vec<_>>());
                    // What stays mapped there would keep the memory for good.
                    let unmapped = again(|| driver.unmap(window, total));
                    result = if result.is_ok() { unmapped } else { result };
                }
                let _ = again(|| driver.free_reservation(window, total));
                result
            }
        };
    }
    if result.is_ok() {
        return Ok(parts);
    }
    for part in parts {
        let _ = again(|| driver.release(part.handle));
    }
    Err(Stays::Refused(result))
}

/// New memory at a place with what the old one holds.
fn filled(
    driver: &Driver,
    moving: &Moving,
    place: Place,
    bytes: u64,
    copier: u32,
    copy: impl FnOnce(u64, u64, u64) -> CuResult,
) -> Result<Physical, Stays> {
    let first = moving.old().first().ok_or(Stays::Unknown)?;
    // What lies on the host was made without the flag for network adapters.
    let properties = Properties { rdma: moving.rdma, ..driver.properties_of(first.handle).map_err(Stays::Refused)? };
    let _taking = reclaim::make_room_at(place);
    let handle = driver.create(bytes, &properties.at(place)).map_err(Stays::Refused)?;
    let part = Part { handle, place, bytes };
    let access = [Access::read_write(copier)];
    // The old memory is mapped beside the new one, since the program may have let no GPU that copies read it where it is.
    let result = match driver.reserve(2 * bytes) {
        Err(refused) => refused,
        Ok(window) => {
            let beside = window + bytes;
            let mut result = put(driver, window, &[part], &access);
            if result.is_ok() {
                result = put(driver, beside, moving.old(), &access);
                if result.is_ok() {
                    result = copy(window, beside, bytes);
                    let unmapped = again(|| driver.unmap(beside, bytes));
                    result = if result.is_ok() { unmapped } else { result };
                }
                // What stays mapped there would keep the memory for good.
                let unmapped = again(|| driver.unmap(window, bytes));
                result = if result.is_ok() { unmapped } else { result };
            }
            let _ = again(|| driver.free_reservation(window, 2 * bytes));
            result
        }
    };
    if result.is_ok() {
        return Ok(handle);
    }
    let _ = again(|| driver.release(handle));
    Err(Stays::Refused(result))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::handles;
    use parking_lot::{Mutex, MutexGuard};
    use std::ffi::{CStr, CString, c_char, c_int, c_void};
    use std::sync::OnceLock;
    use std::thread;

    const BYTES: u64 = 8 << 20;
    const HOME: Place = Place::Gpu(0);
    const PEER: Place = Place::Gpu(1);

    /// The simulated driver, for one test at a time: which of its calls fails is said for the whole process.
    struct Machine {
        driver: &'static Driver,
        _alone: MutexGuard<'static, ()>,
    }

    /// Where the simulated driver is built to.
    fn library() -> String {
        let test = std::env::current_exe().unwrap();
        let found = test.parent().unwrap().parent().unwrap().join("libsimcuda.so");
        assert!(found.exists(), "{}: cargo build --release --workspace makes it", found.display());
        found.to_str().unwrap().to_owned()
    }

    /// A function of the simulated driver that the library itself does not call; its C signature is the caller's to state.
    fn simulated<F: Copy>(name: &CStr) -> F {
        let library = CString::new(library()).unwrap();
        // SAFETY: the library stays loaded, as the driver has it, and both texts are NUL-terminated.
        let found = unsafe { libc::dlsym(libc::dlopen(library.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
        assert!(!found.is_null() && size_of::<F>() == size_of_val(&found), "{name:?}");
        // SAFETY: the callers name functions with the signatures that the simulated driver gives them, and functions are pointers.
        unsafe { std::mem::transmute_copy(&found) }
    }

    impl Machine {
        fn start() -> Self {
            static ALONE: Mutex<()> = Mutex::new(());
            static DRIVER: OnceLock<Driver> = OnceLock::new();
            let _alone = ALONE.lock();
            let driver = DRIVER.get_or_init(|| {
                let driver = Driver::load(library()).unwrap();
                // SAFETY: the function takes a number.
                assert_eq!(unsafe { simulated::<unsafe extern "C" fn(u32) -> c_int>(c"cuInit")(0) }, 0);
                driver
            });
            let mut context: *mut c_void = std::ptr::null_mut();
            // SAFETY: the output is a local, and the context is made before it is current.
            unsafe {
                assert_eq!(
                    simulated::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>(c"cuDevicePrimaryCtxRetain")(
                        &raw mut context,
                        0
                    ),
                    0
                );
                assert_eq!(simulated::<unsafe extern "C" fn(*mut c_void) -> c_int>(c"cuCtxSetCurrent")(context), 0);
            }
            Self { driver, _alone }
        }

        /// Calls from here on fail that this list names.
        fn fail(&self, calls: &str) {
            let calls = CString::new(calls).unwrap();
            let arm = simulated::<unsafe extern "C" fn(*const c_char) -> c_int>(c"simcuda_fault_arm");
            // SAFETY: the text is NUL-terminated.
            let armed = unsafe { arm(calls.as_ptr()) };
            assert_eq!(armed, 0);
        }

        fn used(&self, gpu: c_int) -> u64 {
            // SAFETY: the function takes a number.
            unsafe { simulated::<unsafe extern "C" fn(c_int) -> u64>(c"simcuda_used")(gpu) }
        }

        fn handles(&self) -> u64 {
            // SAFETY: the function takes nothing.
            unsafe { simulated::<unsafe extern "C" fn() -> u64>(c"simcuda_handles")() }
        }

        fn write(&self, address: u64, value: u32) {
            // SAFETY: the driver checks addresses.
            let result = unsafe {
                simulated::<unsafe extern "C" fn(u64, u32, usize) -> c_int>(c"cuMemsetD32_v2")(
                    address,
                    value,
                    BYTES as usize / 4,
                )
            };
            assert_eq!(result, 0);
        }

        /// The first and the last word.
        fn read(&self, address: u64) -> (u32, u32) {
            let mut words = (0, 0);
            let copy = simulated::<unsafe extern "C" fn(*mut u32, u64, usize) -> c_int>(c"cuMemcpyDtoH_v2");
            // SAFETY: the outputs are locals of that size.
            unsafe {
                assert_eq!(copy(&raw mut words.0, address, 4), 0);
                assert_eq!(copy(&raw mut words.1, address + BYTES - 4, 4), 0);
            }
            words
        }

        fn access(&self, address: u64, gpu: c_int) -> u64 {
            let (mut flags, location) = (77, Location { kind: Location::DEVICE, id: gpu });
            let get = simulated::<unsafe extern "C" fn(*mut u64, *const Location, u64) -> c_int>(c"cuMemGetAccess");
            // SAFETY: the output and the location are locals.
            assert_eq!(unsafe { get(&raw mut flags, &raw const location, address) }, 0);
            flags
        }

        fn copy(&self) -> impl FnOnce(u64, u64, u64) -> CuResult {
            let copy = simulated::<unsafe extern "C" fn(u64, u64, usize) -> CuResult>(c"cuMemcpyDtoD_v2");
            // SAFETY: the driver checks addresses.
            move |to, from, bytes| unsafe { copy(to, from, bytes as usize) }
        }

        fn moves(&self, address: u64, place: Place, readers: &[u32]) -> Result<(), Stays> {
            move_to(self.driver, (address, Much::All), place, &|_| readers.to_vec(), 0, self.copy())
        }
    }

    /// A program's memory, mapped twice: for all at one address, and to be read by GPU 0 at another.
    struct Program<'a> {
        machine: &'a Machine,
        number: Number,
        writable: u64,
        readable: u64,
    }

    impl<'a> Program<'a> {
        fn new(machine: &'a Machine) -> Self {
            Self::of_parts(machine, &[HOME])
        }

        /// In as many parts, all of one size, each at its place.
        fn of_parts(machine: &'a Machine, places: &[Place]) -> Self {
            let driver = machine.driver;
            let bytes = BYTES / places.len() as u64;
            let part = |place: &Place| {
                let handle = driver.create(bytes, &gpupool_cuda::Properties::of(*place)).unwrap();
                Part { handle, place: *place, bytes }
            };
            let parts: Vec<Part> = places.iter().map(part).collect();
            let charged = parts.len() > 1;
            let number = with_inventory(|inventory| inventory.made(0, parts, charged));
            let window = driver.reserve(2 * BYTES).unwrap();
            let program = Self { machine, number, writable: window, readable: window + BYTES };
            program.map(program.writable, 3);
            program.map(program.readable, 1);
            machine.write(program.writable, 7);
            program
        }

        fn map(&self, address: u64, flags: c_int) {
            let driver = self.machine.driver;
            match handles::begin_map(self.number).unwrap() {
                handles::Behind::One(handle) => assert_eq!(driver.map(address, BYTES, handle, 0), CuResult::SUCCESS),
                handles::Behind::Parts(parts) => assert_eq!(put(driver, address, &parts, &[]), CuResult::SUCCESS),
            }
            handles::end_map(self.number, address, BYTES, 0, true);
            let access = [Access { location: Location { kind: Location::DEVICE, id: 0 }, flags }];
            let call = || driver.set_access(address, BYTES, &access);
            assert_eq!(handles::set_access(driver, address, BYTES, &access, call), CuResult::SUCCESS);
        }

        fn is_at(&self) -> Place {
            let used = handles::use_of(self.number).unwrap();
            let handle = Physical::from_raw(used.handle());
            self.machine.driver.properties_of(handle).unwrap().location.place().unwrap()
        }

        fn may_move(&self) -> Result<(), Stays> {
            with_inventory(|inventory| inventory.may_move(self.number))
        }

        /// What it holds and who may use it, as the program sees it; readers beyond the program's own are not in it.
        fn seen(&self) -> [((u32, u32), u64); 2] {
            [self.writable, self.readable].map(|at| (self.machine.read(at), self.machine.access(at, 0)))
        }

        fn release(&self) {
            let handles::Release::Parts(releasing) = handles::release(self.number) else { panic!("it is held") };
            for part in releasing.parts() {
                assert_eq!(self.machine.driver.release(part.handle), CuResult::SUCCESS);
            }
            handles::end_release(releasing, true);
        }

        fn unmap(&self) {
            let unmapping = handles::begin_unmap(self.writable, 2 * BYTES).unwrap();
            assert_eq!(self.machine.driver.unmap(self.writable, 2 * BYTES), CuResult::SUCCESS);
            handles::end_unmap(unmapping, true);
            assert_eq!(self.machine.driver.free_reservation(self.writable, 2 * BYTES), CuResult::SUCCESS);
        }
    }

    const SEEN: [((u32, u32), u64); 2] = [((7, 7), 3), ((7, 7), 1)];

    #[test]
    fn memory_changes_its_place_behind_all_its_mappings_with_who_may_use_each() {
        let machine = Machine::start();
        let before = (machine.used(0), machine.used(1), machine.handles());
        let program = Program::new(&machine);
        assert_eq!((program.seen(), program.is_at()), (SEEN, HOME));
        machine.moves(program.readable, PEER, &[0, 1]).unwrap();
        assert_eq!((program.seen(), program.is_at()), (SEEN, PEER));
        assert_eq!((machine.access(program.writable, 1), machine.access(program.readable, 1)), (3, 1));
        assert_eq!((machine.used(0), machine.used(1)), (before.0, before.1 + BYTES));
        // To the program nothing has happened.
        assert_eq!(handles::elsewhere_at(program.writable + 5), Some((0, PEER)));
        assert_eq!(handles::asked_for(program.number), Some(0));
        let peer = Location::of(PEER);
        assert_eq!(
            (handles::access_at(program.writable, peer), handles::access_at(program.readable, peer)),
            (Some(0), Some(0))
        );
        machine.write(program.writable, 8);
        assert_eq!(machine.read(program.readable), (8, 8), "one memory behind both");
        machine.moves(program.writable, Place::Host(0), &[0, 1]).unwrap();
        machine.moves(program.writable, HOME, &[0, 1]).unwrap();
        assert_eq!((machine.read(program.readable), program.is_at()), ((8, 8), HOME));
        assert_eq!((machine.used(1), handles::elsewhere_at(program.writable)), (before.1, None));
        program.release();
        program.unmap();
        assert_eq!((machine.used(0), machine.used(1), machine.handles()), before);
    }

    #[test]
    fn a_number_counts_as_many_references_after_a_move_and_dies_with_the_last() {
        let machine = Machine::start();
        let before = (machine.used(0), machine.used(1), machine.handles());
        let program = Program::new(&machine);
        let expected = handles::begin_retain(program.writable);
        let given = machine.driver.retain_at(program.writable).unwrap();
        assert_eq!(handles::retained(expected, given, program.writable), handles::Retained::As(program.number));
        machine.moves(program.writable, PEER, &[0]).unwrap();
        assert_eq!(machine.handles(), before.2 + 1, "the driver has one reference, the program two");
        assert!(matches!(handles::release(program.number), handles::Release::Counted));
        program.release();
        assert_eq!((program.seen(), machine.handles()), (SEEN, before.2), "its mappings keep it");
        machine.moves(program.writable, HOME, &[0]).unwrap();
        assert_eq!((program.seen(), machine.handles()), (SEEN, before.2), "and are all that does");
        program.unmap();
        assert_eq!((machine.used(0), machine.used(1)), (before.0, before.1));
        assert!(handles::use_of(program.number).is_none());
    }

    #[test]
    fn what_reaches_its_pages_otherwise_keeps_memory_where_it_is() {
        let machine = Machine::start();
        let program = Program::new(&machine);
        let used = handles::use_of(program.number).unwrap();
        assert_eq!(program.may_move(), Err(Stays::InUse));
        used.anchor(Anchor::Exported);
        drop(used);
        assert_eq!(program.may_move(), Err(Stays::Anchored(Anchor::Exported)));
        assert_eq!(machine.moves(program.writable, PEER, &[0]), Err(Stays::Anchored(Anchor::Exported)));
        handles::use_of(program.number).unwrap().withdraw_anchor(Anchor::Exported);
        assert_eq!(program.may_move(), Ok(()));
        for (result, expected) in [
            (CuResult::INVALID_VALUE, Ok(())),
            (CuResult::SUCCESS, Err(Stays::Anchored(Anchor::Descriptor))),
            (CuResult::INVALID_VALUE, Err(Stays::Anchored(Anchor::Descriptor))),
        ] {
            let call = || {
                // The anchor is there before anybody can have what the call gives.
                let anchored = with_inventory(|inventory| inventory.memory[&program.number].anchors.first());
                assert_eq!(anchored, Some(Anchor::Descriptor));
                result
            };
            assert_eq!(handles::giving_away(program.readable + 4096, 4096, Anchor::Descriptor, call), result);
            assert_eq!(program.may_move(), expected);
        }
        program.release();
        program.unmap();
        let other = Program::new(&machine);
        let host = [Access { location: Location { kind: Location::HOST_NUMA, id: 0 }, flags: 3 }];
        for (result, expected) in
            [(CuResult::NOT_SUPPORTED, Ok(())), (CuResult::SUCCESS, Err(Stays::Anchored(Anchor::HostAccess)))]
        {
            assert_eq!(handles::set_access(machine.driver, other.writable, BYTES, &host, || result), result);
            assert_eq!(other.may_move(), expected);
        }
        other.release();
        other.unmap();
        assert_eq!(machine.moves(other.writable, PEER, &[0]), Err(Stays::Unknown));
        let imported = with_inventory(|inventory| inventory.imported(Physical::from_raw(99), Some(HOME)));
        assert_eq!(with_inventory(|inventory| inventory.may_move(imported)), Err(Stays::Imported));
        let handles::Release::Parts(releasing) = handles::release(imported) else { panic!("it is held") };
        handles::end_release(releasing, true);
    }

    #[test]
    fn a_call_that_fails_half_way_leaves_memory_as_it_was() {
        let machine = Machine::start();
        // SAFETY: the function takes nothing.
        let calls = || unsafe { simulated::<unsafe extern "C" fn() -> u64>(c"simcuda_calls")() };
        let program = Program::new(&machine);
        let start = calls();
        machine.moves(program.writable, PEER, &[0, 1]).unwrap();
        let calls = calls() - start;
        program.release();
        program.unmap();
        for together in [1, 2] {
            let mut refused = 0;
            for nth in 1..=calls {
                let before = (machine.used(0), machine.used(1), machine.handles());
                let program = Program::new(&machine);
                let faults: Vec<String> = (nth..nth + together).map(|call| format!("*:{call}=999")).collect();
                machine.fail(&faults.join(","));
                let moved = machine.moves(program.writable, PEER, &[0, 1]);
                machine.fail("");
                assert_eq!(program.seen(), SEEN, "{together} calls from the {nth}th");
                assert_eq!(program.may_move(), Ok(()));
                match moved {
                    Ok(()) => assert_eq!(program.is_at(), PEER),
                    Err(Stays::Refused(_)) => {
                        refused += 1;
                        assert_eq!(program.is_at(), HOME);
                    }
                    Err(other) => panic!("{other:?}"),
                }
                program.release();
                program.unmap();
                if together == 1 && moved.is_err() {
                    assert_eq!((machine.used(0), machine.used(1), machine.handles()), before, "the {nth}th call");
                }
            }
            assert!(refused >= 12, "{refused} of {calls}");
        }
    }

    fn take_away(machine: &Machine, address: u64, place: Place) -> Result<(), Stays> {
        put_away(machine.driver, address, place, &|_| vec![0, 1])
    }

    /// Fetches what is kept of [`Program::new`]'s memory.
    fn fetched(list: &[(u64, u64, u64)]) -> CuResult {
        let set = simulated::<unsafe extern "C" fn(u64, u32, usize) -> CuResult>(c"cuMemsetD32_v2");
        // SAFETY: the driver checks addresses.
        let of = |(to, _, bytes): &(u64, u64, u64)| unsafe { set(*to, 7, *bytes as usize / 4) };
        list.iter().map(of).find(|result| !result.is_ok()).unwrap_or(CuResult::SUCCESS)
    }

    #[test]
    fn what_is_away_takes_no_memory_and_comes_back_to_all_its_mappings_at_any_place() {
        let machine = Machine::start();
        for (place, is_held) in [(HOME, true), (PEER, true), (Place::Host(0), false), (HOME, false)] {
            let before = (machine.used(0), machine.used(1), machine.handles());
            let programs = [Program::new(&machine), Program::new(&machine)];
            let starts = [programs[0].writable, programs[1].readable];
            if !is_held {
                programs[0].release();
            }
            for start in starts {
                assert_eq!(take_away(&machine, start, Place::Pageable), Ok(()));
                assert_eq!(take_away(&machine, start, Place::Pageable), Err(Stays::InUse), "it is away");
                assert_eq!(machine.moves(start, PEER, &[0]), Err(Stays::InUse));
            }
            assert_eq!((machine.used(0), machine.used(1), machine.handles()), before);
            assert!(starts.iter().all(|start| handles::by_hand::is_away(*start)));
            assert_eq!(bring_in(machine.driver, &starts, place, &[0, 1], 0, fetched), Ok(()));
            assert!(!handles::by_hand::is_any_away());
            for program in &programs {
                assert_eq!((program.seen(), program.may_move()), (SEEN, Ok(())));
                // Who did not use it where it lay does not there.
                assert_eq!(machine.access(program.writable, 1) != 0, place != HOME);
            }
            assert_eq!(programs[1].is_at(), place);
            programs[1].release();
            if is_held {
                programs[0].release();
            }
            programs.iter().for_each(Program::unmap);
            assert_eq!((machine.used(0), machine.used(1), machine.handles()), before);
        }
    }

    /// Whether each of so many parts is away that are mapped from an address on.
    fn are_away(start: u64, parts: usize) -> Vec<bool> {
        let step = BYTES as usize / parts;
        (0..BYTES).step_by(step).map(|offset| handles::by_hand::is_away(start + offset)).collect()
    }

    #[test]
    fn of_several_parts_each_goes_and_comes_back_by_itself() {
        let machine = Machine::start();
        let quarter = BYTES / 4;
        for is_held in [true, false] {
            let before = (machine.used(0), machine.used(1), machine.handles());
            let program = Program::of_parts(&machine, &[HOME, HOME, PEER, PEER]);
            if !is_held {
                program.release();
            }
            let [at_home, at_peer] = [[0, 1], [2, 3]].map(|parts| parts.map(|nth| program.writable + nth * quarter));
            for (nth, start) in (1..).zip([at_home[1], at_peer[0], at_home[0], at_peer[1]]) {
                assert_eq!(take_away(&machine, start, Place::Disk), Ok(()));
                assert_eq!(take_away(&machine, start, Place::Disk), Err(Stays::InUse), "it is away");
                assert_eq!(machine.moves(start, PEER, &[0]), Err(Stays::InUse));
                assert_eq!(are_away(program.readable, 4).into_iter().filter(|is_away| *is_away).count(), nth);
            }
            assert_eq!((machine.used(0), machine.used(1), machine.handles()), before);
            // Some of it has no room there.
            assert_eq!(bring_in(machine.driver, &at_peer[..1], HOME, &[0, 1], 0, fetched), Ok(()));
            assert_eq!(are_away(program.writable, 4), [true, true, false, true]);
            assert_eq!(program.may_move(), Err(Stays::InUse));
            // And some goes elsewhere and back where the rest is away.
            let moves = |start: u64, place| {
                move_to(machine.driver, (start, Much::Each), place, &|_| vec![0, 1], 0, machine.copy())
            };
            assert_eq!(moves(at_peer[0], Place::Host(0)), Ok(()));
            assert_eq!(moves(at_peer[0], HOME), Ok(()));
            assert_eq!(moves(at_peer[1], HOME), Err(Stays::InUse), "it is away");
            let machine_before = (machine.used(0), machine.handles());
            assert_eq!(bring_in(machine.driver, &at_peer, PEER, &[0, 1], 0, fetched), Ok(()));
            assert_eq!((machine.used(0), machine.used(1)), (machine_before.0, before.1 + quarter));
            assert_eq!(bring_in(machine.driver, &at_home, HOME, &[0, 1], 0, fetched), Ok(()));
            assert_eq!((program.seen(), program.may_move()), (SEEN, Ok(())));
            let peers = [0, 3].map(|nth| machine.access(program.readable + nth * quarter, 1));
            assert_eq!(peers, [1, 1], "who reaches a part may use it as much as any other");
            machine.write(program.writable, 8);
            assert_eq!(machine.read(program.readable), (8, 8), "one memory behind both");
            if is_held {
                program.release();
            }
            program.unmap();
            assert_eq!((machine.used(0), machine.used(1), machine.handles()), before);
        }
    }

    #[test]
    fn parts_that_are_away_are_alike_and_are_counted_one_by_one() {
        let specs = [HOME, Place::Disk].map(|place| gpupool_pool::PlaceSpec { place, limit: 100 });
        let accounts: &gpupool_pool::Accounts = Box::leak(Box::new(gpupool_pool::Accounts::new(&specs)));
        let counted = || [HOME, Place::Disk].map(|place| accounts.of(Claim::Handles, place));
        let mut inventory = Inventory::default();
        inventory.accounts = Some(accounts);
        assert!(accounts.charge(Claim::Handles, HOME, 20));
        let part = |raw| Part { handle: Physical::from_raw(raw), place: HOME, bytes: 10 };
        let number = inventory.made(0, vec![part(7), part(8)], true);
        assert!(inventory.begin_map(number).is_some());
        inventory.end_map(number, 1000, 20, 0, true);
        for (offset, expected) in [(0, [10, 10]), (10, [0, 20])] {
            let moving = inventory.begin_move(number, Some(offset)).unwrap();
            let away = Away { from: HOME, was_charged: true, handle_types: 0, rdma: 0 };
            inventory.end_away(&moving, away, Place::Disk);
            assert_eq!(counted(), expected);
        }
        for (address, expected) in [(1010, [10, 10]), (1000, [20, 0])] {
            let coming = inventory.begin_return(&[address]);
            assert!(accounts.charge(Claim::Handles, HOME, 10));
            inventory.end_return(&coming[0], Some(part(9 + address)), &[]);
            inventory.end_returns(&coming);
            assert_eq!(counted(), expected);
        }
    }

    #[test]
    fn a_call_that_fails_on_the_way_out_or_back_leaves_what_was_or_what_is_to_be() {
        each_call_fails_out_and_back(&[HOME]);
    }

    #[test]
    fn a_call_that_fails_on_the_way_out_or_back_of_a_part_leaves_each_as_it_was_or_is_to_be() {
        each_call_fails_out_and_back(&[HOME, PEER]);
    }

    fn each_call_fails_out_and_back(places: &[Place]) {
        let machine = Machine::start();
        // SAFETY: the function takes nothing.
        let calls = || unsafe { simulated::<unsafe extern "C" fn() -> u64>(c"simcuda_calls")() };
        let starts =
            |start: u64| -> Vec<u64> { (start..start + BYTES).step_by(BYTES as usize / places.len()).collect() };
        let out = |program: &Program<'_>| {
            starts(program.writable).into_iter().try_for_each(|start| take_away(&machine, start, Place::Disk))
        };
        let back = |program: &Program<'_>| bring_in(machine.driver, &starts(program.readable), HOME, &[0], 0, fetched);
        let counted = |act: &dyn Fn()| {
            let start = calls();
            act();
            calls() - start
        };
        let program = Program::of_parts(&machine, places);
        let to_leave = counted(&|| out(&program).unwrap());
        let to_come = counted(&|| back(&program).unwrap());
        program.release();
        program.unmap();
        assert!(to_leave >= 4 && to_come >= 8, "{to_leave} and {to_come}");
        for (is_out, nth) in (1..=to_leave).map(|nth| (true, nth)).chain((1..=to_come).map(|nth| (false, nth))) {
            for together in [1, 2] {
                let before = (machine.used(0), machine.used(1), machine.handles());
                let program = Program::of_parts(&machine, places);
                if !is_out {
                    out(&program).unwrap();
                }
                let faults: Vec<String> = (nth..nth + together).map(|call| format!("*:{call}=999")).collect();
                machine.fail(&faults.join(","));
                let done = if is_out { out(&program) } else { back(&program) };
                machine.fail("");
                let away = are_away(program.writable, places.len());
                let is_as_meant = away.iter().all(|is_away| *is_away == is_out);
                assert_eq!(is_as_meant, done.is_ok(), "{done:?}: {away:?}, {together} calls from the {nth}th");
                if !away.contains(&false) {
                    let now = (machine.used(0), machine.used(1), machine.handles());
                    assert_eq!(now, before, "the {nth}th call");
                }
                assert_eq!(program.may_move().is_ok(), !away.contains(&true), "{together} calls from the {nth}th");
                assert_eq!(back(&program), Ok(()));
                assert_eq!((program.seen(), program.may_move()), (SEEN, Ok(())), "{together} calls from the {nth}th");
                program.release();
                program.unmap();
                assert_eq!((machine.used(0), machine.used(1), machine.handles()), before, "the {nth}th call");
            }
        }
    }

    #[test]
    fn a_call_that_comes_while_memory_moves_has_what_is_there_afterwards() {
        let machine = Machine::start();
        let program = Program::new(&machine);
        let before = handles::use_of(program.number).unwrap().handle();
        let (number, copy) = (program.number, machine.copy());
        let mut caller = None;
        let (begins, began) = std::sync::mpsc::channel();
        let moved = move_to(machine.driver, (program.writable, Much::All), PEER, &|_| vec![0], 0, |to, from, bytes| {
            caller = Some(thread::spawn(move || {
                begins.send(()).unwrap();
                handles::use_of(number).unwrap().handle()
            }));
            began.recv().unwrap();
            copy(to, from, bytes)
        });
        assert_eq!(moved, Ok(()));
        let seen = caller.unwrap().join().unwrap();
        assert_ne!(seen, before);
        assert_eq!(seen, handles::use_of(program.number).unwrap().handle());
        program.release();
        program.unmap();
    }
}
