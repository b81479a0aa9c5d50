//! The program's own physical memory: what is behind each number that it was given, and where it is mapped.
//!
//! If no place has enough room, the memory is made of several parts, and the program sees one number. gpupool keeps driver references
//! on all parts while the program holds any.
//!
//! An entry is removed *before* the call that ends it, and put back if that call fails: the driver may give the handle, or the
//! address, to another thread before this one hears of the success.

use super::anchors::{Anchor, Anchors};
use super::number::{Number, Numbers};
use gpupool_cuda::{Access, Location, Physical};
use gpupool_pool::{Accounts, Claim, Place, SoftRefusal};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;

/// Who made a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// This process, which asked for it on this GPU.
    Asked(u32),
    /// Another process, which may have asked for it elsewhere.
    Imported,
}

/// A part of what the program asked for in one piece, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub handle: Physical,
    pub place: Place,
    /// 0 for memory of another process, of which nothing is counted here.
    pub bytes: u64,
}

/// What memory is made from again whose contents are kept where no GPU reaches them. It is mapped nowhere meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Away {
    /// Where it lay.
    pub from: Place,
    /// Whether it counted towards a limit there.
    pub was_charged: bool,
    /// Of its properties, what a program chooses.
    pub handle_types: c_int,
    pub rdma: u8,
}

/// What the program has one number for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    pub(super) origin: Origin,
    /// In the order in which they are mapped.
    pub(super) parts: Vec<Part>,
    /// Where each of them begins in it: an arena has hundreds, and is asked about by address.
    begins: Vec<u64>,
    /// Whether it counts towards a limit.
    pub(super) charged: bool,
    /// References that the program holds on it.
    pub(super) references: u64,
    /// References that the driver knows of, on each part. No more than the program holds.
    pub(super) held: u64,
    /// Address ranges that it is mapped at, or being mapped at.
    pub(super) mappings: u64,
    /// Calls of the driver that use its handles, and are under way.
    pub(super) calls: u64,
    /// Calls that are about to give one more reference, and keep the entry meanwhile.
    pub(super) retaining: u64,
    /// Whether other physical memory is being put behind the number. Then no such call begins.
    pub(super) moving: bool,
    /// The parts behind which there is no physical memory, by where they begin in it. Such a part says how large it is and where its contents are kept, and has
    /// no handle.
    pub(super) away: BTreeMap<u64, Away>,
    /// Whether network adapters are to reach it (GPUDirect RDMA), as the program asked: what the host has is not made so.
    pub(super) rdma: u8,
    /// What its GPU would have had elsewhere in one piece, where this is made of parts because it is larger.
    most_whole: Option<u64>,
    pub(super) anchors: Anchors,
}

/// Memory that is made of several parts, for who is told why a call cannot have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfParts {
    /// The GPU that it was asked for on.
    pub device: u32,
    pub bytes: u64,
    /// The largest that would have been made in one piece on another GPU; `None` where it was no larger, and no place had room for it.
    pub most_whole: Option<u64>,
}

impl Memory {
    /// What one reference of the program's is to, and one of the driver's.
    fn new(origin: Origin, parts: Vec<Part>, charged: bool) -> Self {
        Self {
            origin,
            begins: begins(&parts),
            parts,
            charged,
            references: 1,
            held: 1,
            mappings: 0,
            calls: 0,
            retaining: 0,
            moving: false,
            away: BTreeMap::new(),
            rdma: 0,
            most_whole: None,
            anchors: Anchors::default(),
        }
    }

    /// The GPU that the program believes it on, where some of it is not there.
    pub(super) fn asked_elsewhere(&self) -> Option<u32> {
        match self.origin {
            Origin::Asked(device) if self.parts.iter().any(|part| part.place != Place::Gpu(device)) => Some(device),
            _ => None,
        }
    }

    /// Whether the driver's answers about it differ from what the program is to hear.
    pub(super) fn is_disguised(&self) -> bool {
        self.parts.len() > 1 || self.asked_elsewhere().is_some()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.begins.last().zip(self.parts.last()).map_or(0, |(begin, part)| begin + part.bytes)
    }

    /// Puts these parts in place of all; those that it had.
    pub(super) fn replace(&mut self, parts: &[Part]) -> Vec<Part> {
        self.begins = begins(parts);
        std::mem::replace(&mut self.parts, parts.to_vec())
    }

    /// The parts that have something of a range of offsets, and where each begins.
    fn parts_in(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, &Part)> {
        let first = self.begins.partition_point(|begin| *begin <= from).saturating_sub(1);
        let all = self.begins.iter().copied().zip(&self.parts).skip(first);
        all.take_while(move |(begin, _)| *begin < to)
    }
}

fn begins(parts: &[Part]) -> Vec<u64> {
    parts.iter().scan(0, |at, part| Some(std::mem::replace(at, *at + part.bytes))).collect()
}

/// A range of addresses at which memory is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub bytes: u64,
    /// Where in the memory it begins.
    pub offset: u64,
    pub(super) number: Number,
    /// What the program said about access, one entry a location.
    pub(super) granted: Vec<Access>,
    /// What it was granted beyond that.
    pub(super) widened: Vec<Access>,
}

/// A mapping, for who places what is behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owned {
    pub start: u64,
    pub bytes: u64,
    /// The GPU that the memory was asked for on; `None` for another process's.
    pub asked: Option<u32>,
    /// Whether it lies wholly in the range that was asked about.
    pub is_inside: bool,
}

/// Memory of the program's own, and where it is mapped whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Own {
    pub address: u64,
    pub bytes: u64,
    /// The GPU that it was asked for on.
    pub asked: u32,
    /// Where it lies.
    pub place: Place,
}

/// What there is of the program's own memory, mapped or not; not what other processes made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Handles.
    pub count: u64,
    /// Bytes behind them.
    pub bytes: u64,
    /// As much of that lies elsewhere than on the GPU that it was asked for on.
    pub far: u64,
}

/// A part of the program's own memory where it is mapped, for who moves it by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnPiece {
    pub start: u64,
    pub bytes: u64,
    /// The GPU that the memory was asked for on.
    pub asked: u32,
    pub place: Place,
    /// Whether it cannot change its pages: something reaches them past this address, or more of the memory is mapped elsewhere.
    pub stays: bool,
}

/// Mapped memory of one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub start: u64,
    pub bytes: u64,
    pub origin: Origin,
    pub place: Place,
    /// Whether it is a part of something.
    pub is_part: bool,
}

impl Piece {
    /// Whether it is not, or not for certain, on the GPU that it was asked for on. Of what is made of parts, those at home count,
    /// too: a copy of the whole runs on one GPU.
    pub fn may_be_elsewhere(&self) -> bool {
        self.is_part || !matches!(self.origin, Origin::Asked(device) if self.place == Place::Gpu(device))
    }
}

/// What a call maps.
#[derive(Debug, PartialEq, Eq)]
pub enum Behind {
    One(Physical),
    Parts(Vec<Part>),
}

/// A reference that was taken off a number.
#[derive(Debug)]
pub struct Releasing {
    number: Number,
    /// As it was before.
    before: Memory,
    /// Whether that was the last of it.
    is_end: bool,
}

impl Releasing {
    /// What the driver is to release.
    pub fn parts(&self) -> &[Part] {
        &self.before.parts
    }
}

/// What the driver is to be asked for a release.
#[derive(Debug)]
pub enum Release {
    /// To release a handle that is not known here.
    Unknown,
    /// Nothing: the program holds more references than the driver knows of.
    Counted,
    /// To release this handle, although the program holds no reference.
    Refused(Physical),
    /// To release these parts.
    Parts(Releasing),
}

/// What is to be done for a handle that `cuMemRetainAllocationHandle` gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Retained {
    /// Nothing: this memory is not known here.
    Unknown,
    /// The program is to have this number.
    As(Number),
    /// The program is to have this number, and the driver's reference is one too many.
    Extra(Number),
    /// The program held no reference any more. It is to have this number, and the driver is to take a reference on the other
    /// parts, which are mapped at these addresses.
    Revived(Number, Vec<u64>),
}

/// Mappings that are about to go.
#[derive(Debug, Default)]
pub struct Unmapping {
    mappings: Vec<(u64, Mapping)>,
    /// The memory of which these were the last.
    ended: Vec<(Number, Memory)>,
}

impl Unmapping {
    pub fn is_empty(&self) -> bool {
        self.mappings.is_empty()
    }

    /// Where each begins, and its bytes.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        self.mappings.iter().map(|(start, mapping)| (*start, mapping.bytes)).collect()
    }
}

/// What is known of memory that the program made, and of memory that others made and it imported.
#[derive(Debug, Default)]
pub struct Inventory {
    pub(super) memory: BTreeMap<Number, Memory>,
    /// Whose the driver's handles are.
    pub(super) numbers: BTreeMap<Physical, Number>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    next: Numbers,
    /// Entries about which the driver's answers differ from what the program is to hear.
    pub(super) disguised: usize,
    /// What the memory made here was charged to before it was made, and is credited to when it goes.
    pub accounts: Option<&'static Accounts>,
    /// By GPU, whether its program is to hear of it before the GPU overflows; until all that went elsewhere is gone.
    pub(super) soft: BTreeMap<u32, SoftRefusal>,
}

impl Inventory {
    /// Entries in it.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Entries about which the driver's answers differ from what the program is to hear; those that are imported may.
    pub fn disguised(&self) -> usize {
        self.disguised
    }

    fn insert(&mut self, number: Number, memory: Memory) {
        for part in &memory.parts {
            self.numbers.insert(part.handle, number);
        }
        self.disguised += usize::from(memory.is_disguised());
        self.memory.insert(number, memory);
    }

    /// Removes what is neither referenced nor mapped.
    fn take_unused(&mut self, number: Number) -> Option<Memory> {
        self.memory.get(&number).filter(|it| it.references == 0 && it.mappings == 0 && it.retaining == 0)?;
        let memory = self.memory.remove(&number)?;
        for part in &memory.parts {
            // The driver may have given the handle anew already.
            if self.numbers.get(&part.handle) == Some(&number) {
                self.numbers.remove(&part.handle);
            }
        }
        self.disguised -= usize::from(memory.is_disguised());
        Some(memory)
    }

    /// The driver has ended memory that was taken out.
    fn ended(&mut self, memory: &Memory) {
        if let Some(accounts) = self.accounts.filter(|_| memory.charged) {
            memory.parts.iter().for_each(|part| accounts.credit(Claim::Handles, part.place, part.bytes));
        }
        self.none_is_elsewhere(memory.asked_elsewhere());
    }

    /// Hears that something that was asked for on this GPU is elsewhere no longer.
    pub(super) fn none_is_elsewhere(&mut self, device: Option<u32>) {
        if let Some(device) = device
            && !self.memory.values().any(|other| other.asked_elsewhere() == Some(device))
        {
            self.soft.entry(device).or_default().all_gone();
        }
    }

    /// Enters memory that was asked for on this GPU and made as these parts; the number that the program is to have.
    pub fn made(&mut self, asked: u32, parts: Vec<Part>, charged: bool) -> Number {
        let number = self.next.next();
        let memory = Memory::new(Origin::Asked(asked), parts, charged);
        if memory.asked_elsewhere().is_some() {
            self.soft.entry(asked).or_default().overflowed();
        }
        self.insert(number, memory);
        number
    }

    /// Whether network adapters are to reach the memory of this number, and, where it is made of parts because it is larger than that, than what.
    pub fn was_asked_for(&mut self, number: Number, rdma: u8, most_whole: Option<u64>) {
        if let Some(memory) = self.memory.get_mut(&number) {
            (memory.rdma, memory.most_whole) = (rdma, most_whole);
        }
    }

    /// Why the memory of this number is made of parts, where it is.
    pub fn of_parts(&self, number: Number) -> Option<OfParts> {
        let memory = self.memory.get(&number).filter(|memory| memory.parts.len() > 1)?;
        let Origin::Asked(device) = memory.origin else { return None };
        Some(OfParts { device, bytes: memory.bytes(), most_whole: memory.most_whole })
    }

    /// The driver gave this handle. Whether it is one of the numbers that no handle should be.
    pub fn avoid(&mut self, handle: Physical) -> bool {
        self.next.avoid(handle)
    }

    /// Memory came in by a descriptor: what the program is to know it by. It is this process's own where the driver answers so;
    /// what another process made is charged to that one only, and keeps the driver's handle, because it never moves.
    pub fn imported(&mut self, handle: Physical, place: Option<Place>) -> Number {
        let same = Number::same(handle);
        if let Some(&number) = self.numbers.get(&handle)
            && let Some(memory) = self.memory.get_mut(&number)
        {
            memory.references += 1;
            memory.held += 1;
            return number;
        }
        if let Some(place) = place {
            let parts = vec![Part { handle, place, bytes: 0 }];
            self.insert(same, Memory::new(Origin::Imported, parts, false));
        }
        same
    }

    /// Bytes that lie on the host, of what was made here.
    pub fn bytes_on_host(&self) -> u64 {
        let parts = self.memory.values().flat_map(|memory| &memory.parts);
        parts.filter(|part| part.place.is_host()).map(|part| part.bytes).sum()
    }

    /// Whether anything came in by a descriptor.
    pub fn is_any_imported(&self) -> bool {
        self.memory.values().any(|memory| memory.origin == Origin::Imported)
    }

    /// The GPU that the memory of this number was asked for on, where it is elsewhere.
    pub fn asked_for(&self, number: Number) -> Option<u32> {
        self.memory.get(&number)?.asked_elsewhere()
    }

    /// Whether other physical memory is just being put behind this number, or behind one that is mapped in the range.
    pub fn is_moving(&self, number: Number) -> bool {
        self.memory.get(&number).is_some_and(|memory| memory.moving)
    }

    /// Whether that holds for anything that is mapped in this range.
    pub fn is_moving_in(&self, address: u64, bytes: u64) -> bool {
        self.mappings.range(address..address.saturating_add(bytes)).any(|(_, mapping)| self.is_moving(mapping.number))
            || self.mapping_at(address).is_some_and(|(_, mapping)| self.is_moving(mapping.number))
    }

    /// A call of the driver is about to use the handles of this number, which are these. [`Inventory::end_call`] is to follow.
    pub fn begin_call(&mut self, number: Number) -> Option<&[Part]> {
        let memory = self.memory.get_mut(&number)?;
        memory.calls += 1;
        Some(&memory.parts)
    }

    /// That call is over.
    pub fn end_call(&mut self, number: Number) {
        if let Some(memory) = self.memory.get_mut(&number) {
            memory.calls = memory.calls.saturating_sub(1);
        }
    }

    /// A call is about to give memory of this number away.
    pub fn anchor(&mut self, number: Number, anchor: Anchor) {
        if let Some(memory) = self.memory.get_mut(&number) {
            memory.anchors.add(anchor);
        }
    }

    /// The call failed that [`Inventory::anchor`] was for.
    pub fn withdraw_anchor(&mut self, number: Number, anchor: Anchor) {
        if let Some(memory) = self.memory.get_mut(&number) {
            memory.anchors.withdraw(anchor);
        }
    }

    /// The numbers of what is mapped in a range, or reaches into it.
    pub fn numbers_in(&self, address: u64, bytes: u64) -> Vec<Number> {
        let before = self.mapping_at(address).filter(|(start, _)| *start < address).map(|(_, mapping)| mapping.number);
        before.into_iter().chain(self.in_range(address, bytes).map(|(_, mapping)| mapping.number)).collect()
    }

    /// The driver is about to give one more reference on what is mapped at `address`: its number, where that is known here.
    /// Noted before, because another thread may release the last reference meanwhile.
    pub fn begin_retain(&mut self, address: u64) -> Option<Number> {
        let number = self.mapping_at(address)?.1.number;
        let memory = self.memory.get_mut(&number)?;
        memory.retaining += 1;
        Some(number)
    }

    /// Ends what [`Inventory::begin_retain`] began: the call failed, or gave a handle of other memory.
    pub fn not_retained(&mut self, number: Number) {
        if let Some(memory) = self.memory.get_mut(&number) {
            memory.retaining -= 1;
        }
        if let Some(memory) = self.take_unused(number) {
            self.ended(&memory);
        }
    }

    /// The driver gave one more reference on this handle, for the memory mapped at `address`.
    pub fn retained(&mut self, expected: Option<Number>, handle: Physical, address: u64) -> Retained {
        let number = self.numbers.get(&handle).copied();
        if expected != number {
            if let Some(expected) = expected {
                self.not_retained(expected);
            }
            if let Some(memory) = number.and_then(|number| self.memory.get_mut(&number)) {
                memory.retaining += 1;
            }
        }
        let Some(number) = number else { return Retained::Unknown };
        let start = self.mapping_at(address).map_or(0, |(start, _)| start);
        let Some(memory) = self.memory.get_mut(&number) else { return Retained::Unknown };
        if memory.parts.len() > 1 && memory.held == 0 {
            let (mut at, mut others) = (start, Vec::new());
            for part in &memory.parts {
                if part.handle != handle {
                    others.push(at);
                }
                at += part.bytes;
            }
            return Retained::Revived(number, others);
        }
        memory.retaining -= 1;
        memory.references += 1;
        if memory.parts.len() > 1 {
            return Retained::Extra(number);
        }
        memory.held += 1;
        Retained::As(number)
    }

    /// Notes that the driver took the references that [`Retained::Revived`] asked for, one on each part.
    pub fn revived(&mut self, number: Number) {
        if let Some(memory) = self.memory.get_mut(&number) {
            memory.retaining -= 1;
            memory.references += 1;
            memory.held += 1;
        }
    }

    /// Takes one of the program's references off this number, before the driver releases it. [`Inventory::end_release`] is to follow
    /// where it is to release parts.
    pub fn release(&mut self, number: Number) -> Release {
        let Some(memory) = self.memory.get_mut(&number) else { return Release::Unknown };
        if memory.references == 0 {
            return Release::Refused(memory.parts[0].handle);
        }
        if memory.references > memory.held {
            memory.references -= 1;
            return Release::Counted;
        }
        memory.references -= 1;
        memory.held -= 1;
        if let Some(before) = self.take_unused(number) {
            return Release::Parts(Releasing { number, before, is_end: true });
        }
        match self.memory.get_mut(&number) {
            Some(memory) => {
                memory.calls += 1;
                Release::Parts(Releasing { number, before: memory.clone(), is_end: false })
            }
            None => Release::Unknown,
        }
    }

    /// How the release ended. Where the driver refused it, the reference is put back.
    pub fn end_release(&mut self, releasing: Releasing, succeeded: bool) {
        let Releasing { number, mut before, is_end } = releasing;
        if !is_end {
            self.end_call(number);
        }
        if succeeded {
            if is_end {
                self.ended(&before);
            }
            return;
        }
        match self.memory.get_mut(&number) {
            Some(memory) => {
                memory.references += 1;
                memory.held += 1;
            }
            None => {
                // Its last mapping may have gone meanwhile.
                if let Some(accounts) = self.accounts.filter(|_| before.charged && !is_end) {
                    before
                        .parts
                        .iter()
                        .for_each(|part| accounts.charge_existing(Claim::Handles, part.place, part.bytes));
                }
                (before.references, before.held, before.mappings) = (1, 1, 0);
                (before.calls, before.retaining) = (0, 0);
                self.insert(number, before);
            }
        }
    }

    /// The driver did not release this part of memory whose other parts it did: nobody can have it any more, but it is there.
    pub fn stranded(&mut self, part: &Part) {
        if let Some(accounts) = self.accounts {
            accounts.charge_existing(Claim::Handles, part.place, part.bytes);
        }
    }

    /// Counts a mapping of this number that is about to be made. Returns what is behind it, `None` where it is not known here.
    /// [`Inventory::end_map`] is to follow.
    pub fn begin_map(&mut self, number: Number) -> Option<Behind> {
        let memory = self.memory.get_mut(&number)?;
        memory.mappings += 1;
        memory.calls += 1;
        Some(match memory.parts[..] {
            [Part { handle, .. }] => Behind::One(handle),
            _ => Behind::Parts(memory.parts.clone()),
        })
    }

    /// Ends what [`Inventory::begin_map`] began: a mapping of `bytes` at `address`, which succeeded or not.
    pub fn end_map(&mut self, number: Number, address: u64, bytes: u64, offset: u64, succeeded: bool) {
        self.end_call(number);
        if succeeded {
            let mapping = Mapping { bytes, offset, number, granted: Vec::new(), widened: Vec::new() };
            self.mappings.insert(address, mapping);
            return;
        }
        if let Some(memory) = self.memory.get_mut(&number) {
            memory.mappings -= 1;
        }
        if let Some(memory) = self.take_unused(number) {
            self.ended(&memory);
        }
    }

    /// Whether a range ends inside memory that is made of parts. The driver would unmap a part, or set access to one.
    pub fn cuts(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        let is_cut = |at: u64| {
            self.mapping_at(at).is_some_and(|(start, mapping)| {
                start < at && self.memory.get(&mapping.number).is_some_and(|memory| memory.parts.len() > 1)
            })
        };
        is_cut(address) || is_cut(end)
    }

    /// Removes the mappings in a range, before the driver unmaps them. [`Inventory::end_unmap`] is to follow.
    pub fn begin_unmap(&mut self, address: u64, bytes: u64) -> Unmapping {
        let mut unmapping = Unmapping::default();
        let starts: Vec<u64> = self.in_range(address, bytes).map(|(start, _)| *start).collect();
        for start in starts {
            let Some(mapping) = self.mappings.remove(&start) else { continue };
            let number = mapping.number;
            unmapping.mappings.push((start, mapping));
            if let Some(memory) = self.memory.get_mut(&number) {
                memory.mappings -= 1;
                memory.calls += 1;
            }
            unmapping.ended.extend(self.take_unused(number).map(|memory| (number, memory)));
        }
        unmapping
    }

    /// How the unmapping ended. Where the driver refused it, the mappings are put back.
    pub fn end_unmap(&mut self, unmapping: Unmapping, succeeded: bool) {
        let Unmapping { mappings, ended } = unmapping;
        for (number, memory) in ended {
            if succeeded {
                self.ended(&memory);
            } else {
                self.insert(number, memory);
            }
        }
        for (start, mapping) in mappings {
            self.end_call(mapping.number);
            if !succeeded {
                if let Some(memory) = self.memory.get_mut(&mapping.number) {
                    memory.mappings += 1;
                }
                self.mappings.insert(start, mapping);
            }
        }
    }

    /// The mapping at this address whose memory the program believes on another GPU: that GPU, and where it is.
    pub fn elsewhere_at(&self, address: u64) -> Option<(u32, Place)> {
        let piece = self.pieces_of(self.mapping_at(address)?).find(|piece| address < piece.start + piece.bytes)?;
        match piece.origin {
            Origin::Asked(device) if piece.place != Place::Gpu(device) => Some((device, piece.place)),
            _ => None,
        }
    }

    /// The mappings in a range, piece by piece.
    pub fn mapped_in(&self, address: u64, bytes: u64) -> Vec<Piece> {
        self.in_range(address, bytes).flat_map(|(start, mapping)| self.pieces_of((*start, mapping))).collect()
    }

    fn pieces_of<'a>(&'a self, (start, mapping): (u64, &'a Mapping)) -> impl Iterator<Item = Piece> + 'a {
        let memory = self.memory.get(&mapping.number);
        let mut at = start;
        memory.into_iter().flat_map(|memory| memory.parts.iter().map(move |part| (memory, part))).map(
            move |(memory, part)| {
                let is_part = memory.parts.len() > 1;
                let bytes = if is_part { part.bytes } else { mapping.bytes };
                let piece = Piece { start: at, bytes, origin: memory.origin, place: part.place, is_part };
                at += bytes;
                piece
            },
        )
    }

    /// The program set access to a range.
    pub fn granted(&mut self, address: u64, bytes: u64, list: &[Access]) {
        for (_, mapping) in self.mappings.range_mut(address..address.saturating_add(bytes)) {
            for access in list {
                mapping.widened.retain(|known| known.location != access.location);
                mapping.granted.retain(|known| known.location != access.location);
                mapping.granted.push(*access);
            }
        }
    }

    /// What is mapped at `address` was granted to these as well.
    pub fn widened(&mut self, address: u64, list: &[Access]) {
        let mapping =
            self.mappings.range_mut(..=address).next_back().filter(|(start, it)| address - **start < it.bytes);
        let Some((_, mapping)) = mapping else { return };
        for access in list {
            mapping.widened.retain(|known| known.location != access.location);
            mapping.widened.push(*access);
        }
    }

    /// The mappings that a range touches.
    pub fn owned_in(&self, address: u64, bytes: u64) -> Vec<Owned> {
        let end = address.saturating_add(bytes);
        let before = self.mapping_at(address).filter(|(start, _)| *start < address);
        let inside = self.in_range(address, bytes).map(|(start, mapping)| (*start, mapping));
        let owned = |(start, mapping): (u64, &Mapping)| Owned {
            start,
            bytes: mapping.bytes,
            asked: self.memory.get(&mapping.number).and_then(|memory| match memory.origin {
                Origin::Asked(device) => Some(device),
                Origin::Imported => None,
            }),
            is_inside: address <= start && start + mapping.bytes <= end,
        };
        before.into_iter().chain(inside).map(owned).collect()
    }

    /// The program's own memory that one mapping has all of, each once, by its parts.
    pub fn all_mapped_whole(&self) -> Vec<Own> {
        let mut seen = BTreeSet::new();
        let mut found = Vec::new();
        for (start, mapping) in &self.mappings {
            let Some(memory) = self.memory.get(&mapping.number) else { continue };
            let Origin::Asked(asked) = memory.origin else { continue };
            if mapping.offset == 0 && mapping.bytes == memory.bytes() && seen.insert(mapping.number) {
                let parts = memory.begins.iter().zip(&memory.parts);
                found.extend(parts.map(|(begin, part)| Own {
                    address: start + begin,
                    bytes: part.bytes,
                    asked,
                    place: part.place,
                }));
            }
        }
        found
    }

    /// All that is mapped of the program's own memory, part by part and once each: for who reads it. Of what is mapped several times, the longest mapping counts.
    pub fn all_mapped(&self) -> Vec<Own> {
        let mut longest: BTreeMap<Number, (u64, &Mapping)> = BTreeMap::new();
        for (start, mapping) in self.mappings.iter().filter(|(_, mapping)| mapping.offset == 0) {
            let known = longest.entry(mapping.number).or_insert((*start, mapping));
            if known.1.bytes < mapping.bytes {
                *known = (*start, mapping);
            }
        }
        let mut found = Vec::new();
        for (number, (start, mapping)) in longest {
            let Some(memory) = self.memory.get(&number).filter(|memory| memory.away.is_empty()) else { continue };
            let Origin::Asked(asked) = memory.origin else { continue };
            let parts = memory.parts_in(0, mapping.bytes);
            found.extend(parts.map(|(begin, part)| Own {
                address: start + begin,
                bytes: part.bytes.min(mapping.bytes - begin),
                asked,
                place: part.place,
            }));
        }
        found.sort_unstable_by_key(|own| own.address);
        found
    }

    /// The parts of the program's own memory that have something of a range.
    pub fn own_pieces(&self, address: u64, bytes: u64) -> Vec<OwnPiece> {
        let end = address.saturating_add(bytes);
        let before = self.mapping_at(address).filter(|(start, _)| *start < address);
        let inside = self.in_range(address, bytes).map(|(start, mapping)| (*start, mapping));
        let mut pieces = Vec::new();
        for (start, mapping) in before.into_iter().chain(inside) {
            let Some(memory) = self.memory.get(&mapping.number).filter(|memory| memory.away.is_empty()) else {
                continue;
            };
            let Origin::Asked(asked) = memory.origin else { continue };
            let is_whole = mapping.offset == 0 && mapping.bytes == memory.bytes();
            let stays = !is_whole || memory.mappings > 1 || memory.anchors.first().is_some();
            if !is_whole {
                let place = memory.parts.first().map_or(Place::Gpu(asked), |part| part.place);
                pieces.push(OwnPiece { start, bytes: mapping.bytes, asked, place, stays });
                continue;
            }
            for (begin, part) in memory.parts_in(address.saturating_sub(start), end.saturating_sub(start)) {
                pieces.push(OwnPiece { start: start + begin, bytes: part.bytes, asked, place: part.place, stays });
            }
        }
        pieces.retain(|piece| piece.start < end && address < piece.start + piece.bytes);
        pieces
    }

    /// Bytes of the program's own memory at a place that are in no account.
    pub fn uncharged_at(&self, place: Place) -> u64 {
        let own = self.memory.values().filter(|memory| matches!(memory.origin, Origin::Asked(_)) && !memory.charged);
        own.flat_map(|memory| &memory.parts).filter(|part| part.place == place).map(|part| part.bytes).sum()
    }

    /// What is mapped at an address: bytes, the GPU that it was asked for on, and whether some of it is elsewhere. `None` for what another process made.
    pub fn own_at(&self, start: u64) -> Option<(u64, u32, bool)> {
        let mapping = self.mappings.get(&start)?;
        let memory = self.memory.get(&mapping.number)?;
        let Origin::Asked(asked) = memory.origin else { return None };
        Some((mapping.bytes, asked, memory.asked_elsewhere().is_some()))
    }

    /// What there is of the program's own memory.
    pub fn live(&self) -> Live {
        let mut live = Live::default();
        for memory in self.memory.values() {
            let Origin::Asked(asked) = memory.origin else { continue };
            live.count += 1;
            live.bytes += memory.bytes();
            let far = memory.parts.iter().filter(|part| part.place != Place::Gpu(asked) && !part.place.is_stored());
            live.far += far.map(|part| part.bytes).sum::<u64>();
        }
        live
    }

    /// Bytes of the program's own memory by the GPU that it was asked for on and the place where it lies, mapped or not.
    pub fn by_home(&self) -> BTreeMap<(u32, Place), u64> {
        let mut lies = BTreeMap::new();
        for memory in self.memory.values() {
            let Origin::Asked(asked) = memory.origin else { continue };
            for part in &memory.parts {
                *lies.entry((asked, part.place)).or_insert(0) += part.bytes;
            }
        }
        lies
    }

    /// Bytes of the program's own memory at a place, mapped or not.
    pub fn own_bytes_at(&self, place: Place) -> u64 {
        let own = self.memory.values().filter(|memory| matches!(memory.origin, Origin::Asked(_)));
        own.flat_map(|memory| &memory.parts).filter(|part| part.place == place).map(|part| part.bytes).sum()
    }

    /// Whether all of the memory that is mapped at this address lies at a place.
    pub fn is_all_at(&self, address: u64, place: Place) -> bool {
        let memory = self.mapping_at(address).and_then(|(_, mapping)| self.memory.get(&mapping.number));
        memory.is_some_and(|memory| memory.parts.iter().all(|part| part.place == place))
    }

    /// How many numbers were given out so far.
    pub fn count_so_far(&self) -> u64 {
        self.next.count()
    }

    /// The part of memory that is mapped at an address: of which number, which of its parts, and where that begins in it.
    pub(super) fn part_at(&self, address: u64) -> Option<(Number, usize, u64)> {
        let (start, mapping) = self.mapping_at(address)?;
        let memory = self.memory.get(&mapping.number)?;
        let offset = mapping.offset + (address - start);
        let nth = memory.begins.partition_point(|begin| *begin <= offset).checked_sub(1)?;
        Some((mapping.number, nth, *memory.begins.get(nth)?))
    }

    /// The part of the program's own memory that is mapped at an address, as [`Inventory::all_mapped_whole`] has it.
    pub fn own_part_at(&self, address: u64) -> Option<Own> {
        let (number, nth, _) = self.part_at(address)?;
        let memory = self.memory.get(&number)?;
        let Origin::Asked(asked) = memory.origin else { return None };
        let Part { place, bytes, .. } = *memory.parts.get(nth)?;
        Some(Own { address, bytes, asked, place })
    }

    /// Whether nothing is behind the part that is mapped at an address, since its contents are kept in files or in plain memory.
    pub fn is_stored_at(&self, address: u64) -> bool {
        let Some((number, _, begin)) = self.part_at(address) else { return false };
        self.memory.get(&number).is_some_and(|memory| memory.away.contains_key(&begin))
    }

    /// The access that the program itself gave a location at this address; `None` where the driver's answer is that.
    pub fn access_at(&self, address: u64, location: Location) -> Option<i32> {
        let (_, mapping) = self.mapping_at(address)?;
        mapping.widened.iter().find(|known| known.location == location)?;
        Some(mapping.granted.iter().find(|known| known.location == location).map_or(0, |known| known.flags))
    }

    /// The most that the program itself gave any GPU of what is mapped at this address.
    pub fn most_given(&self, address: u64) -> Option<i32> {
        let (_, mapping) = self.mapping_at(address)?;
        let given = mapping.granted.iter().filter(|known| known.location.device().is_some());
        given.map(|known| known.flags).max()
    }

    /// Whether the program or the library gave a GPU access to what is mapped at this address.
    pub fn is_readable(&self, address: u64, gpu: u32) -> bool {
        let location = Location::of(Place::Gpu(gpu));
        let Some((_, mapping)) = self.mapping_at(address) else { return false };
        let mut known = mapping.granted.iter().chain(&mapping.widened);
        // Of `CUmemAccess_flags`, the lowest bit is the right to read.
        known.any(|known| known.location == location && known.flags & 1 != 0)
    }

    /// Whether a program that caches is to hear of it before its GPU overflows with so many bytes.
    pub fn refuse_softly(&mut self, device: u32, bytes: u64) -> bool {
        self.soft.entry(device).or_default().refuse(bytes)
    }

    /// Start and bytes of what is mapped at this address, where the driver's answer would not be what the program is to hear: it knows only a part of what is
    /// made of parts, and of memory on the host no start. Who imports memory cannot tell whether that was asked for there, and is told where it starts.
    pub fn range_at(&self, address: u64) -> Option<(u64, u64)> {
        let (start, mapping) = self.mapping_at(address)?;
        let memory = self.memory.get(&mapping.number)?;
        let is_on_host = memory.parts.iter().any(|part| part.place.is_host());
        let is_told = memory.is_disguised() || (memory.origin == Origin::Imported && is_on_host);
        is_told.then_some((start, mapping.bytes))
    }

    pub(super) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some((*start, mapping))
    }

    fn in_range(&self, address: u64, bytes: u64) -> impl Iterator<Item = (&u64, &Mapping)> {
        self.mappings.range(address..address.saturating_add(bytes))
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
    fn with(sizes: &[u64]) -> (Inventory, Number) {
        let accounts: &Accounts = Box::leak(Box::new(Accounts::new(&[PlaceSpec { place: PEER, limit: 15 }])));
        let mut inventory = Inventory { accounts: Some(accounts), ..Inventory::default() };
        assert!(accounts.charge(Claim::Handles, PEER, sizes.iter().sum()));
        let part = |(index, bytes): (usize, &u64)| Part {
            handle: Physical::from_raw(7 + index as u64),
            place: PEER,
            bytes: *bytes,
        };
        let number = inventory.made(0, sizes.iter().enumerate().map(part).collect(), true);
        (inventory, number)
    }

    fn own(inventory: &Inventory) -> u64 {
        inventory.accounts.map_or(0, |accounts| accounts.of(Claim::Handles, PEER))
    }

    fn map(inventory: &mut Inventory, number: Number, address: u64) {
        assert!(inventory.begin_map(number).is_some());
        inventory.end_map(number, address, 10, 0, true);
    }

    fn unmap(inventory: &mut Inventory) {
        let unmapping = inventory.begin_unmap(0, 1000);
        inventory.end_unmap(unmapping, true);
    }

    /// Releases a reference; of how many parts the driver is asked to.
    fn release(inventory: &mut Inventory, number: Number) -> usize {
        match inventory.release(number) {
            Release::Parts(releasing) => {
                let parts = releasing.parts().len();
                inventory.end_release(releasing, true);
                parts
            }
            Release::Counted => 0,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn memory_that_is_released_while_mapped_lives_until_it_is_unmapped() {
        let (mut inventory, number) = with(&[10]);
        map(&mut inventory, number, 100);
        assert_eq!(release(&mut inventory, number), 1);
        assert!(matches!(inventory.release(number), Release::Refused(FIRST)), "for the driver to refuse");
        assert_eq!(own(&inventory), 10);
        assert_eq!(inventory.elsewhere_at(105), Some((0, PEER)));
        map(&mut inventory, number, 200);
        unmap(&mut inventory);
        assert_eq!((inventory.len(), inventory.disguised(), own(&inventory)), (0, 0, 0));
        assert!(matches!(inventory.release(number), Release::Unknown));
    }

    #[test]
    fn memory_stays_known_that_is_released_while_it_is_retained() {
        let (mut inventory, number) = with(&[10]);
        map(&mut inventory, number, 100);
        assert_eq!((inventory.begin_retain(99), inventory.begin_retain(105)), (None, Some(number)));
        assert_eq!(release(&mut inventory, number), 1, "the reference that is under way is not the program's yet");
        unmap(&mut inventory);
        assert_eq!((inventory.len(), own(&inventory)), (1, 10), "the driver is about to give a handle of it");
        assert_eq!(inventory.retained(Some(number), FIRST, 105), Retained::As(number));
        assert_eq!((inventory.len(), own(&inventory)), (1, 10));
        assert_eq!(release(&mut inventory, number), 1);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0));

        let (mut inventory, number) = with(&[10]);
        map(&mut inventory, number, 100);
        assert_eq!(inventory.begin_retain(105), Some(number));
        release(&mut inventory, number);
        unmap(&mut inventory);
        inventory.not_retained(number);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0), "or did not");
    }

    #[test]
    fn a_handle_of_other_memory_than_was_mapped_before_the_call_is_counted_for_that() {
        let (mut inventory, first) = with(&[10]);
        map(&mut inventory, first, 100);
        let second = inventory.made(0, vec![Part { handle: SECOND, place: Place::Gpu(0), bytes: 10 }], false);
        assert_eq!(inventory.begin_retain(100), Some(first));
        assert_eq!(inventory.retained(Some(first), SECOND, 100), Retained::As(second));
        assert_eq!((release(&mut inventory, second), release(&mut inventory, second)), (1, 1));
        assert_eq!(inventory.begin_retain(100), Some(first));
        assert_eq!(inventory.retained(Some(first), Physical::from_raw(99), 100), Retained::Unknown);
        assert_eq!(release(&mut inventory, first), 1);
        unmap(&mut inventory);
        assert_eq!(inventory.len(), 0);
    }

    #[test]
    fn a_failed_call_leaves_everything_as_it_was() {
        let (mut inventory, number) = with(&[10]);
        let Release::Parts(releasing) = inventory.release(number) else { panic!("the driver is to be asked") };
        assert_eq!(inventory.len(), 0);
        inventory.end_release(releasing, false);
        assert_eq!((inventory.len(), inventory.disguised(), own(&inventory)), (1, 1, 10));
        let _ = inventory.begin_map(number);
        inventory.end_map(number, 100, 10, 0, false);
        assert_eq!(inventory.elsewhere_at(100), None);
        map(&mut inventory, number, 100);
        release(&mut inventory, number);
        let unmapping = inventory.begin_unmap(100, 10);
        assert_eq!(inventory.len(), 0, "the driver may give its handle to somebody else now");
        inventory.end_unmap(unmapping, false);
        assert_eq!((inventory.elsewhere_at(109), inventory.elsewhere_at(110)), (Some((0, PEER)), None));
        unmap(&mut inventory);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0));
    }

    #[test]
    fn a_release_that_fails_after_the_last_unmap_leaves_a_reference() {
        let (mut inventory, number) = with(&[10]);
        map(&mut inventory, number, 100);
        let Release::Parts(releasing) = inventory.release(number) else { panic!("the driver is to be asked") };
        unmap(&mut inventory);
        assert_eq!(own(&inventory), 0);
        inventory.end_release(releasing, false);
        assert_eq!((inventory.len(), own(&inventory)), (1, 10));
        assert_eq!(release(&mut inventory, number), 1);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0));
    }

    /// The driver says no start of memory on the host.
    #[test]
    fn what_is_not_where_it_was_asked_for_has_a_start() {
        let (mut inventory, number) = with(&[10]);
        map(&mut inventory, number, 100);
        assert_eq!((inventory.range_at(107), inventory.range_at(110)), (Some((100, 10)), None));
        let mut importer = Inventory::default();
        let number = importer.imported(FIRST, Some(Place::Host(0)));
        map(&mut importer, number, 100);
        let there = importer.imported(SECOND, Some(PEER));
        map(&mut importer, there, 200);
        assert_eq!((importer.range_at(107), importer.range_at(207)), (Some((100, 10)), None));
    }

    #[test]
    fn parts_are_one_to_the_program() {
        let (mut inventory, number) = with(&[4, 6]);
        map(&mut inventory, number, 100);
        assert_eq!(inventory.range_at(107), Some((100, 10)));
        assert!(
            inventory.cuts(100, 4) && inventory.cuts(104, 6) && !inventory.cuts(100, 10) && !inventory.cuts(90, 30)
        );
        assert_eq!(inventory.begin_retain(107), Some(number));
        assert_eq!(inventory.retained(Some(number), SECOND, 107), Retained::Extra(number));
        assert_eq!((release(&mut inventory, number), release(&mut inventory, number)), (0, 2));
        assert!(matches!(inventory.release(number), Release::Refused(FIRST)), "there is none left to release");
        assert_eq!(inventory.begin_retain(107), Some(number));
        assert_eq!(inventory.retained(Some(number), SECOND, 107), Retained::Revived(number, vec![100]));
        inventory.revived(number);
        unmap(&mut inventory);
        assert_eq!((inventory.len(), own(&inventory)), (1, 10), "held by the number that was taken again");
        assert_eq!(release(&mut inventory, number), 2);
        assert_eq!((inventory.len(), own(&inventory)), (0, 0));
        assert!(inventory.numbers.is_empty());
    }

    #[test]
    fn a_handle_that_the_driver_gives_anew_is_the_new_memory_s() {
        let (mut inventory, old) = with(&[10]);
        let Release::Parts(releasing) = inventory.release(old) else { panic!("the driver is to be asked") };
        let new = inventory.made(0, vec![Part { handle: FIRST, place: Place::Gpu(0), bytes: 10 }], false);
        inventory.end_release(releasing, true);
        assert_ne!(old, new);
        assert_eq!(inventory.imported(FIRST, None), new, "as the driver answers about a descriptor of it");
        assert_eq!((release(&mut inventory, new), release(&mut inventory, new)), (1, 1));
        assert_eq!(inventory.len(), 0);
    }

    #[test]
    fn the_program_hears_back_what_it_set() {
        let (mut inventory, number) = with(&[10]);
        map(&mut inventory, number, 100);
        let device = |id| Location { kind: Location::DEVICE, id };
        let access = |id, flags| Access { location: device(id), flags };
        inventory.granted(100, 10, &[access(0, 3)]);
        inventory.widened(100, &[access(1, 3), access(2, 3)]);
        assert_eq!(inventory.access_at(105, device(0)), None, "as the driver says");
        assert_eq!(inventory.access_at(105, device(1)), Some(0), "granted by us, not by the program");
        inventory.granted(100, 10, &[access(1, 1)]);
        assert_eq!(inventory.access_at(105, device(1)), None);
        inventory.widened(100, &[access(1, 3)]);
        assert_eq!((inventory.access_at(105, device(1)), inventory.access_at(99, device(1))), (Some(1), None));
        assert_eq!(
            (inventory.most_given(105), inventory.most_given(99)),
            (Some(3), None),
            "and not what was given last"
        );
    }

    #[test]
    fn a_caching_program_is_told_again_once_everything_is_back() {
        let (mut inventory, number) = with(&[10]);
        assert!(!inventory.refuse_softly(0, 10), "it has overflowed");
        release(&mut inventory, number);
        assert!(inventory.refuse_softly(0, 10) && !inventory.refuse_softly(0, 10));
    }
}
