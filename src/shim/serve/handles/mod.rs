//! Programs with their own virtual memory management (JAX, PyTorch's expandable segments): `cuMemCreate` for a GPU that
//! has no memory left is served at the next place of the pool's order, and everything the program asks about that memory
//! is answered as if it lay where it was asked for.
//!
//! Memory that no place has enough room for is made of parts behind one handle, which are mapped one after the other. Handles
//! whose memory is where it was asked for are not known here, unless the user set a limit on that GPU: then they count.

mod inventory;
mod steer;

pub use inventory::{Mapping, Part, Release, Retained};
pub use steer::{Request, create};

use crate::backing;
use crate::bypass;
use crate::serve::memory;
use gpupool_cuda::{Access, CuResult, Driver, Location, Physical};
use gpupool_pool::{Lenders, Place};
use inventory::{Inventory, Memory, Origin};
use parking_lot::Mutex;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

static INVENTORY: Mutex<Option<Inventory>> = Mutex::new(None);
/// Pieces of memory in the inventory, readable without the lock.
static KNOWN: AtomicUsize = AtomicUsize::new(0);

/// Looks at the inventory, or changes it. Nothing in here may call the driver.
fn with_inventory<T>(act: impl FnOnce(&mut Inventory) -> T) -> T {
    let mut inventory = INVENTORY.lock();
    let inventory = inventory.get_or_insert_default();
    // There is a plan before anything is charged, not always before the first look.
    inventory.accounts = inventory.accounts.or_else(memory::accounts);
    let value = act(inventory);
    KNOWN.store(inventory.len(), Ordering::Release);
    value
}

/// Whether anything is known of memory of the program's own.
#[inline]
pub fn is_any() -> bool {
    KNOWN.load(Ordering::Acquire) != 0
}

/// Acts on the inventory where there is anything in it.
#[inline]
fn with_known<T>(act: impl FnOnce(&mut Inventory) -> Option<T>) -> Option<T> {
    if is_any() { with_inventory(act) } else { None }
}

/// The GPU that the memory of this handle was asked for on, where it is elsewhere.
pub fn asked_for(handle: Physical) -> Option<u32> {
    with_known(|inventory| inventory.asked_for(handle))
}

/// The GPU that the memory at this address was asked for on, where it is elsewhere, and where it is.
#[inline]
pub fn elsewhere_at(address: u64) -> Option<(u32, Place)> {
    with_known(|inventory| inventory.elsewhere_at(address))
}

/// Where memory that is made of parts starts and its bytes, if one of its parts is mapped at this address.
pub fn mapped_whole(address: u64) -> Option<(u64, u64)> {
    with_known(|inventory| inventory.mapped_whole(address))
}

/// Whether the memory of this handle is made of parts.
pub fn is_of_parts(handle: Physical) -> bool {
    with_known(|inventory| inventory.parts(handle).map(drop)).is_some()
}

/// `cuMemRetainAllocationHandle` is about to be called for an address: the handle that it will give, where that is known.
pub fn begin_retain(address: u64) -> Option<Physical> {
    with_known(|inventory| inventory.begin_retain(address))
}

/// `cuMemRetainAllocationHandle` failed, or gave another handle than [`begin_retain`] had said.
pub fn not_retained(handle: Physical) {
    with_inventory(|inventory| inventory.not_retained(handle));
}

/// `cuMemRetainAllocationHandle` gave this handle for an address.
pub fn retained(handle: Physical, address: u64) -> Retained {
    with_known(|inventory| Some(inventory.retained(handle, address))).unwrap_or(Retained::Plain)
}

/// The driver has taken a reference on every part of the memory with this handle.
pub fn revived(whole: Physical) {
    with_inventory(|inventory| inventory.revived(whole));
}

/// A handle is about to be released.
pub fn release(handle: Physical) -> Release {
    with_known(|inventory| Some(inventory.release(handle))).unwrap_or(Release::Unknown)
}

/// The driver did not release these parts, which [`release`] had taken out: they are put back.
pub fn not_released(parts: &[(Physical, Memory)]) {
    with_inventory(|inventory| inventory.not_released(parts));
}

/// A handle is about to be mapped: what is behind it. [`end_map`] is to hear of the outcome unless that is nothing known.
pub fn begin_map(handle: Physical) -> Vec<Part> {
    with_known(|inventory| Some(inventory.begin_map(handle))).unwrap_or_default()
}

/// Notes how the mapping ended that [`begin_map`] announced.
pub fn end_map(parts: &[Part], address: u64, bytes: u64, succeeded: bool) {
    if !parts.is_empty() {
        with_inventory(|inventory| inventory.end_map(parts, address, bytes, succeeded));
    }
}

/// A range is about to be unmapped.
pub fn begin_unmap(address: u64, bytes: u64) -> Vec<(u64, Mapping)> {
    with_known(|inventory| Some(inventory.take_mappings(address, bytes))).unwrap_or_default()
}

/// Notes how the unmapping ended for which [`begin_unmap`] took these mappings out; they come back where it failed.
pub fn end_unmap(taken: Vec<(u64, Mapping)>, succeeded: bool) {
    if taken.is_empty() {
        return;
    }
    with_inventory(|inventory| {
        if succeeded {
            taken.iter().for_each(|(_, mapping)| inventory.unmapped(mapping.handle));
        } else {
            inventory.put_back(taken);
        }
    });
}

/// Another process's memory came in. Where it lies is what the driver says; where it was asked for only that process
/// knows, so it is looked at again when the program says who shall use it.
pub fn imported(handle: Physical, location: Location) {
    if let Some(place) = location.place()
        && bypass::makes_memory().is_ok()
    {
        with_inventory(|inventory| inventory.imported(handle, place));
    }
}

/// The access that the program itself gave `location`; `None`: the driver's answer is that.
pub fn access_at(address: u64, location: Location) -> Option<c_int> {
    with_known(|inventory| inventory.access_at(address, location))
}

/// The program has set access to a range, and the driver did so. Memory in it that lies elsewhere is granted to every GPU
/// that the pool would grant it to: a copy that names the GPU it was asked for runs, for all the driver knows, on the one
/// it lies on, and without access that kills the context.
pub fn widen(driver: &Driver, address: u64, bytes: u64, list: &[Access]) -> CuResult {
    let Some(mapped) = with_known(|inventory| {
        inventory.granted(address, bytes, list);
        Some(inventory.mapped_in(address, bytes))
    }) else {
        return CuResult::SUCCESS;
    };
    let Some(flags) = list.iter().filter(|access| access.location.device().is_some()).map(|access| access.flags).max()
    else {
        return CuResult::SUCCESS;
    };
    if flags == 0 {
        return CuResult::SUCCESS;
    }
    for (start, bytes, memory) in mapped {
        let named = |device: u32| list.iter().any(|access| access.location.device() == Some(device));
        let Some(plan) = backing::open::plan(driver) else { break };
        let elsewhere = match (memory.origin, memory.place) {
            // Of what is made of parts, those at home too: a copy of the whole runs on one GPU.
            (Origin::Asked(device), place) => place != Place::Gpu(device) || memory.is_part(),
            // Ranks that keep to themselves place nothing on each other's GPUs, and NCCL imports much.
            (Origin::Imported, Place::Gpu(device)) => plan.lenders == Lenders::All && !named(device),
            (Origin::Imported, Place::Host(_)) => true,
        };
        if !elsewhere {
            continue;
        }
        let others: Vec<Access> = plan
            .readers(memory.place)
            .filter(|&reader| !named(reader))
            .map(|reader| Access { location: Location::of(Place::Gpu(reader)), flags })
            .collect();
        if others.is_empty() {
            continue;
        }
        let result = driver.set_access(start, bytes, &others);
        if !result.is_ok() {
            tracing::warn!(
                target: "gpupool::memory", about = "vmm.widen",
                "cuMemSetAccess of {bytes} bytes at {start:#x} for the other GPUs of the pool: {result}; the program's call \
                 fails with that, because copies between GPUs would end its context"
            );
            return result;
        }
    }
    CuResult::SUCCESS
}
