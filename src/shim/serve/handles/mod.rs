//! Programs with their own virtual memory management (JAX, PyTorch's expandable segments). What a program makes by `cuMemCreate` has a
//! number of ours in place of the driver's handle ([`number`]), so that the memory behind it may change; whatever reaches its physical
//! pages by another way is noted as an anchor ([`anchors`]) *before* it is given out.
//!
//! A request for a GPU that has no memory left is served at the next place of the pool's order, and everything the program asks
//! about that memory is answered as if it lay where it was asked for. Memory that no place has enough room for is made of parts
//! behind one number, which are mapped one after the other.
//!
//! Memory that never moves keeps the driver's handle: what another process made, and what is of a kind that only one place can give
//! (compressed, shared over a fabric, for sparse arrays or decompression, of the host).

mod anchors;
pub mod by_hand;
mod exchange;
mod inventory;
mod number;
pub mod of_kind;
mod steer;

pub use anchors::Anchor;
pub use inventory::{Behind, OfParts, Part, Release, Releasing, Retained, Unmapping};
pub use number::Number;
pub use steer::{Request, create};

use crate::backing;
use crate::bell;
use crate::bypass;
use crate::serve::memory;
use gpupool_cuda::{Access, CuResult, Driver, Location, Physical};
use gpupool_pool::Place;
use inventory::{Inventory, Origin, Piece};
use once_cell::race::OnceBox;
use parking_lot::{Condvar, Mutex};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

static INVENTORY: Mutex<Option<Inventory>> = Mutex::new(None);
/// Told whenever other memory was put behind a number.
static SETTLED: Condvar = Condvar::new();
/// Entries in the inventory, readable without the lock.
static KNOWN: AtomicUsize = AtomicUsize::new(0);
/// Entries about which the driver's answers are not what the program is to hear.
static DISGUISED: AtomicUsize = AtomicUsize::new(0);

/// Looks at the inventory, or changes it. Nothing in here may call the driver.
fn with_inventory<T>(act: impl FnOnce(&mut Inventory) -> T) -> T {
    with_settled(|_| false, act)
}

/// The same, once `is_moving` says no more that other memory is being put behind what is meant. Whoever does that waits for no call
/// of the program's.
fn with_settled<T>(is_moving: impl Fn(&Inventory) -> bool, act: impl FnOnce(&mut Inventory) -> T) -> T {
    let mut guard = INVENTORY.lock();
    while guard.as_ref().is_some_and(&is_moving) {
        SETTLED.wait(&mut guard);
    }
    let inventory = guard.get_or_insert_default();
    // There is a plan before anything is charged, not always before the first look.
    inventory.accounts = inventory.accounts.or_else(memory::accounts);
    let value = act(inventory);
    KNOWN.store(inventory.len(), Ordering::Release);
    DISGUISED.store(inventory.disguised(), Ordering::Release);
    value
}

/// Whether anything is known of memory of the program's own.
#[inline]
pub fn is_any() -> bool {
    KNOWN.load(Ordering::Acquire) != 0
}

/// Whether the driver's answers about any memory of the program's own are not what it is to hear.
#[inline]
fn is_any_disguised() -> bool {
    DISGUISED.load(Ordering::Acquire) != 0
}

/// Bytes of what the program made itself at a place that are in no account ([`gpupool_pool::Claim::Handles`]).
pub fn uncharged_at(place: Place) -> u64 {
    let of_kind = if let Place::Gpu(gpu) = place { of_kind::bytes_on(gpu) } else { 0 };
    by_hand::uncharged_at(place) + of_kind
}

/// Acts on the inventory where there is anything in it.
#[inline]
fn with_known<T>(act: impl FnOnce(&mut Inventory) -> Option<T>) -> Option<T> {
    if is_any() { with_inventory(act) } else { None }
}

/// The same, once nothing is put behind this number any more.
fn with_number<T>(number: Number, act: impl FnOnce(&mut Inventory) -> Option<T>) -> Option<T> {
    if is_any() { with_settled(|inventory| inventory.is_moving(number), act) } else { None }
}

/// The same, once nothing is put behind a number that is mapped in this range.
fn with_range<T>(address: u64, bytes: u64, act: impl FnOnce(&mut Inventory) -> T) -> Option<T> {
    is_any().then(|| with_settled(|inventory| inventory.is_moving_in(address, bytes), act))
}

/// Acts on what disguises anything, where anything is.
#[inline]
fn with_disguised<T>(act: impl FnOnce(&mut Inventory) -> Option<T>) -> Option<T> {
    if is_any_disguised() { with_inventory(act) } else { None }
}

/// The GPU that the memory of this number was asked for on, where it is elsewhere.
pub fn asked_for(number: Number) -> Option<u32> {
    with_disguised(|inventory| inventory.asked_for(number))
}

/// The GPU that the memory at this address was asked for on, where it is elsewhere, and where it is.
#[inline]
pub fn elsewhere_at(address: u64) -> Option<(u32, Place)> {
    with_disguised(|inventory| inventory.elsewhere_at(address))
}

/// Start and bytes of what is mapped at this address, where the driver knows only a part of it, or does not say where it starts (as of memory on the host).
pub fn range_at(address: u64) -> Option<(u64, u64)> {
    with_known(|inventory| inventory.range_at(address))
}

/// The handle that the driver knows a number by, while a call uses it. It stays that one until this is dropped.
pub struct Use {
    number: Number,
    handle: Physical,
    /// Where this is one of several parts: of what.
    pub of_parts: Option<OfParts>,
}

impl Use {
    /// The driver's handle, of the first part.
    pub fn handle(&self) -> u64 {
        self.handle.raw()
    }

    /// Notes that the call gives the memory away.
    pub fn anchor(&self, anchor: Anchor) {
        with_inventory(|inventory| inventory.anchor(self.number, anchor));
    }

    /// The call failed that [`Use::anchor`] was for.
    pub fn withdraw_anchor(&self, anchor: Anchor) {
        with_inventory(|inventory| inventory.withdraw_anchor(self.number, anchor));
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        with_inventory(|inventory| inventory.end_call(self.number));
    }
}

/// What is behind a number, for a call; `None` where it is not known here, and the driver's to judge.
pub fn use_of(number: Number) -> Option<Use> {
    with_number(number, |inventory| {
        let handle = inventory.begin_call(number)?.first()?.handle;
        Some(Use { number, handle, of_parts: inventory.of_parts(number) })
    })
}

/// Makes a call that gives what is mapped in a range away; what it gives is noted before.
pub fn giving_away(address: u64, bytes: u64, anchor: Anchor, call: impl FnOnce() -> CuResult) -> CuResult {
    let numbers = with_range(address, bytes, |inventory| {
        let numbers = inventory.numbers_in(address, bytes);
        numbers.iter().for_each(|number| {
            let _ = inventory.begin_call(*number);
            inventory.anchor(*number, anchor);
        });
        numbers
    });
    let result = call();
    if let Some(numbers) = numbers.filter(|numbers| !numbers.is_empty()) {
        with_inventory(|inventory| {
            for number in numbers {
                inventory.end_call(number);
                if !result.is_ok() {
                    inventory.withdraw_anchor(number, anchor);
                }
            }
        });
    }
    result
}

/// `cuMemRetainAllocationHandle` is about to be called for an address: the number that it will give, where that is known.
pub fn begin_retain(address: u64) -> Option<Number> {
    with_range(address, 1, |inventory| inventory.begin_retain(address)).flatten()
}

/// `cuMemRetainAllocationHandle` failed, or what had to follow did.
pub fn not_retained(number: Number) {
    with_inventory(|inventory| inventory.not_retained(number));
}

/// `cuMemRetainAllocationHandle` gave this handle for an address.
pub fn retained(expected: Option<Number>, handle: Physical, address: u64) -> Retained {
    with_known(|inventory| Some(inventory.retained(expected, handle, address))).unwrap_or(Retained::Unknown)
}

/// The driver has taken a reference on every part of the memory with this number.
pub fn revived(number: Number) {
    with_inventory(|inventory| inventory.revived(number));
}

/// A number is about to be released.
pub fn release(number: Number) -> Release {
    with_number(number, |inventory| Some(inventory.release(number))).unwrap_or(Release::Unknown)
}

/// Notes how the release ended that [`release`] announced.
pub fn end_release(releasing: Releasing, succeeded: bool) {
    with_inventory(|inventory| inventory.end_release(releasing, succeeded));
    bell::changed();
}

/// The driver did not release a part of memory that is gone for the program.
pub fn stranded(part: &Part) {
    with_inventory(|inventory| inventory.stranded(part));
}

/// A number is about to be mapped: what is behind it. [`end_map`] is to hear of the outcome unless that is nothing known.
pub fn begin_map(number: Number) -> Option<Behind> {
    with_number(number, |inventory| inventory.begin_map(number))
}

/// Notes how the mapping ended that [`begin_map`] announced.
pub fn end_map(number: Number, address: u64, bytes: u64, offset: u64, succeeded: bool) {
    if succeeded {
        widen_bounds(address, bytes);
    }
    with_inventory(|inventory| inventory.end_map(number, address, bytes, offset, succeeded));
    if succeeded {
        tell_mapped(address);
    }
}

/// Who hears of where the program's own memory is mapped.
#[derive(Clone, Copy)]
pub struct Hearer {
    /// So many bytes are mapped from this address on, which were asked for on this GPU; whether some of them lie elsewhere.
    pub mapped: fn(u64, u64, u32, bool),
    /// Those are about to be unmapped.
    pub unmapped: fn(u64, u64),
    /// The program has put those somewhere, where they are to stay, or (`false`) does not mind any more.
    pub placed: fn(u64, u64, bool),
}

static HEARER: OnceBox<Hearer> = OnceBox::new();

/// Has this one told of it, from now on: by who moves it, which most programs do not ask for.
pub fn hear_of_mappings(hearer: Hearer) {
    let _ = HEARER.set(Box::new(hearer));
}

/// What is mapped there since now, or is after all.
fn tell_mapped(start: u64) {
    if let Some(hearer) = HEARER.get()
        && let Some((bytes, asked, is_elsewhere)) = with_inventory(|inventory| inventory.own_at(start))
    {
        (hearer.mapped)(start, bytes, asked, is_elsewhere);
    }
}

/// The program has said where it wants what is mapped there.
fn tell_placed(address: u64, bytes: u64, is_placed: bool) {
    if let Some(hearer) = HEARER.get() {
        (hearer.placed)(address, bytes, is_placed);
    }
}

/// The first address that was ever mapped by the program, and the end of the last: all of its own memory lies between.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static END: AtomicU64 = AtomicU64::new(0);

fn widen_bounds(address: u64, bytes: u64) {
    LOWEST.fetch_min(address, Ordering::Relaxed);
    END.fetch_max(address.saturating_add(bytes), Ordering::Relaxed);
}

/// Whether memory of the program's own may be mapped at this address, at a glance.
#[inline(always)]
pub fn may_be_own(address: u64) -> bool {
    address < END.load(Ordering::Relaxed) && address >= LOWEST.load(Ordering::Relaxed)
}

/// A range is about to be unmapped. An error where it would take a part from memory that is one for the program.
pub fn begin_unmap(address: u64, bytes: u64) -> Result<Unmapping, CuResult> {
    let begin = |inventory: &mut Inventory| match inventory.cuts(address, bytes) {
        true => Err(CuResult::INVALID_VALUE),
        false => Ok(inventory.begin_unmap(address, bytes)),
    };
    let unmapping = with_range(address, bytes, begin).unwrap_or_else(|| Ok(Unmapping::default()))?;
    if let Some(hearer) = HEARER.get() {
        unmapping.ranges().into_iter().for_each(|(start, bytes)| (hearer.unmapped)(start, bytes));
    }
    Ok(unmapping)
}

/// Notes how the unmapping ended for which [`begin_unmap`] took these mappings out; they come back where it failed.
pub fn end_unmap(unmapping: Unmapping, succeeded: bool) {
    if !unmapping.is_empty() {
        let ranges = if succeeded { Vec::new() } else { unmapping.ranges() };
        with_inventory(|inventory| inventory.end_unmap(unmapping, succeeded));
        ranges.into_iter().for_each(|(start, _)| tell_mapped(start));
        bell::changed();
    }
}

/// Memory came in by a descriptor: what the program is to know it by. Where it lies is what the driver says; where it was asked for
/// only the process knows that made it, so it is looked at again when the program says who shall use it.
pub fn imported(handle: Physical, location: Option<Location>) -> Number {
    let place = location.and_then(Location::place).filter(|_| bypass::makes_memory().is_ok());
    with_inventory(|inventory| inventory.imported(handle, place))
}

/// The access that the program itself gave `location`; `None`: the driver's answer is that.
pub fn access_at(address: u64, location: Location) -> Option<c_int> {
    with_known(|inventory| inventory.access_at(address, location))
}

/// Makes the call by which the program sets access to a range. An error where it means a part of what is one for the program.
pub fn set_access(
    driver: &Driver,
    address: u64,
    bytes: u64,
    list: &[Access],
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let by_the_processor = list.iter().any(|access| access.location.kind != Location::DEVICE && access.flags != 0);
    let begun = with_range(address, bytes, |inventory| {
        if inventory.cuts(address, bytes) {
            return Err(CuResult::INVALID_VALUE);
        }
        let numbers = inventory.numbers_in(address, bytes);
        for number in &numbers {
            let _ = inventory.begin_call(*number);
            if by_the_processor {
                inventory.anchor(*number, Anchor::HostAccess);
            }
        }
        Ok(numbers)
    });
    let numbers = match begun {
        None => return call(),
        Some(Err(refused)) => return refused,
        Some(Ok(numbers)) if numbers.is_empty() => return call(),
        Some(Ok(numbers)) => numbers,
    };
    let result = call();
    let end = |inventory: &mut Inventory| numbers.iter().for_each(|number| inventory.end_call(*number));
    let elsewhere = with_inventory(|inventory| {
        let mut elsewhere = Vec::new();
        if result.is_ok() {
            inventory.granted(address, bytes, list);
            elsewhere = inventory.mapped_in(address, bytes);
            elsewhere.retain(Piece::may_be_elsewhere);
        } else if by_the_processor {
            numbers.iter().for_each(|number| inventory.withdraw_anchor(*number, Anchor::HostAccess));
        }
        if elsewhere.is_empty() {
            end(inventory);
        }
        elsewhere
    });
    if elsewhere.is_empty() {
        return result;
    }
    let widened = widen(driver, &elsewhere, list);
    with_inventory(end);
    widened
}

/// Grants memory that lies elsewhere, of what the program has set access to, to every GPU that the pool would grant it to: a copy
/// that names the GPU it was asked for runs, for all the driver knows, on the one it lies on, and without access that kills
/// the context. They get the most that the program has given any GPU so far, now included, and not what it gave now: who may only read would take from another
/// what that was given before.
fn widen(driver: &Driver, elsewhere: &[Piece], list: &[Access]) -> CuResult {
    if !list.iter().any(|access| access.location.device().is_some() && access.flags != 0) {
        return CuResult::SUCCESS;
    }
    let named = |device: u32| list.iter().any(|access| access.location.device() == Some(device));
    for piece in elsewhere {
        let Some(plan) = backing::open::plan(driver) else { break };
        // Ranks that keep to themselves place nothing on each other's GPUs, and NCCL imports much.
        if let (Origin::Imported, Place::Gpu(device)) = (piece.origin, piece.place)
            && (!plan.lends(device) || named(device))
        {
            continue;
        }
        // Nothing where another thread has just unmapped it.
        let Some(flags) = with_inventory(|inventory| inventory.most_given(piece.start)) else { continue };
        let others: Vec<Access> = plan
            .readers(piece.place)
            .filter(|&reader| !named(reader))
            .map(|reader| Access { location: Location::of(Place::Gpu(reader)), flags })
            .collect();
        if others.is_empty() {
            continue;
        }
        let Piece { start, bytes, .. } = *piece;
        let result = driver.set_access(start, bytes, &others);
        if !result.is_ok() {
            tracing::warn!(
                target: "gpupool::memory", about = "vmm.widen",
                "cuMemSetAccess of {bytes} bytes at {start:#x} for the other GPUs of the pool: {result}; the program's call \
                 fails with that, because copies between GPUs would end its context"
            );
            return result;
        }
        with_inventory(|inventory| inventory.widened(start, &others));
    }
    CuResult::SUCCESS
}
