//! The pool in numbers.

use super::{gpupool_error, looking};
use crate::serve;
use crate::serve::memory;
use gpupool_pool::{Place, PlaceUsage};
use std::ffi::c_int;

/// One place's memory, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct gpupool_place {
    /// A GPU's CUDA ordinal, or -1 less the number of a host NUMA node (-1 is node 0).
    pub place: c_int,
    /// Live blocks stand on this much of `held`.
    pub used: u64,
    /// Physical memory that the pool holds there.
    pub held: u64,
    /// The most that `used` ever was.
    pub peak_used: u64,
    /// The most that the pool may hold there.
    pub limit: u64,
}

/// The pool of this process in numbers. Fields are only ever added at the end.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct gpupool_statistics {
    /// Set to `sizeof(gpupool_statistics)` by the caller; what is written back is how much of it this library filled.
    pub size: usize,
    /// Blocks that the program holds.
    pub live_blocks: u64,
    /// Bytes it asked for in them.
    pub live_bytes: u64,
    /// The most that `live_bytes` ever was. It may be somewhat more where there were blocks under `GPUPOOL_MIN_SIZE`: threads take and free these
    /// without meeting, so that the most that each of them had, and the most that there was of larger blocks, are added up.
    pub peak_live_bytes: u64,
    /// Bytes of physical memory that the pool holds on the GPUs: live blocks, and freed ones that it keeps.
    pub held_on_gpus: u64,
    /// Bytes held on the host.
    pub held_on_host: u64,
    /// Blocks served so far.
    pub allocations: u64,
    /// Blocks so far that took no new memory of the driver's: they were served from freed memory, or from what was left of memory that was taken
    /// for another block, as all but the first of many small ones.
    pub reuses: u64,
    /// Bytes of blocks, and of handles of `cuMemCreate`, that were not on the GPU that asked when they were made, over the life of the process: a block counts
    /// each time that it is made, also where freed memory serves it. What moved since is not in it; `gpupool_labels` and `gpupool_pieces` tell where memory lies.
    pub spilled_bytes: u64,
    /// Bytes that went back to the driver so far.
    pub trimmed_bytes: u64,
}

/// How a place is written in the C interface. The smallest number is a disk, where pieces of blocks are while the program is suspended.
pub(super) fn number_of(place: Place) -> c_int {
    match place {
        Place::Gpu(ordinal) => ordinal as c_int,
        Place::Host(node) => -1 - node as c_int,
        Place::Pageable => -1,
        Place::Disk => c_int::MIN,
    }
}

/// The place that such a number means.
pub(super) fn place_of(number: c_int) -> Place {
    match u32::try_from(number) {
        Ok(ordinal) => Place::Gpu(ordinal),
        // -1 is node 0: the complement of the bits, and no overflow at the smallest number.
        Err(_) => Place::Host(!number as u32),
    }
}

/// Fills `statistics`, of which the caller has set `size`: with zeros while there is no pool, also where the answer is that
/// gpupool takes no part (`GPUPOOL_NOT_ACTIVE`). Returns 0 or a `gpupool_error`.
///
/// # Safety
/// `statistics` points to `statistics->size` bytes, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_get_statistics(statistics: *mut gpupool_statistics) -> c_int {
    if statistics.is_null() {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    // SAFETY: not NULL, and the caller set its first field.
    let room = unsafe { (*statistics).size };
    if room < size_of::<usize>() {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    let size = room.min(size_of::<gpupool_statistics>());
    let (all, answer) = match looking(|| Ok(now())) {
        Ok(all) => (all, 0),
        Err(error) => (gpupool_statistics::default(), error.into()),
    };
    let all = gpupool_statistics { size, ..all };
    // SAFETY: the caller has room for `size` bytes, and `all` is no smaller.
    unsafe { std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), statistics.cast::<u8>(), size) };
    answer
}

fn now() -> gpupool_statistics {
    let usage = serve::usage().unwrap_or_default();
    let held = |is_meant: fn(Place) -> bool| {
        let there = |usage: &&PlaceUsage| is_meant(usage.place);
        usage.places.iter().filter(there).map(|usage| usage.held).sum()
    };
    gpupool_statistics {
        size: size_of::<gpupool_statistics>(),
        live_blocks: usage.live_blocks,
        live_bytes: usage.live_bytes,
        peak_live_bytes: usage.peak_live_bytes,
        held_on_gpus: held(|place| matches!(place, Place::Gpu(_))),
        held_on_host: held(Place::is_host),
        allocations: usage.allocations,
        reuses: usage.reuses,
        spilled_bytes: memory::spilled(),
        trimmed_bytes: usage.trimmed_bytes,
    }
}

/// Writes up to `capacity` places to `places` and returns how many the pool has (0 while it is not open). A disk that memory of a suspended
/// program is on is none of them.
///
/// # Safety
/// `places` has room for `capacity` elements, or `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_places(places: *mut gpupool_place, capacity: usize) -> usize {
    let mut usage = looking(|| Ok(serve::usage().unwrap_or_default())).unwrap_or_default();
    usage.places.retain(|usage| !usage.place.is_stored());
    for (index, usage) in usage.places.iter().enumerate().take(capacity) {
        let &PlaceUsage { place, used, held, peak_used, limit, .. } = usage;
        // SAFETY: `index` is below `capacity`, for which the caller has room.
        unsafe { places.add(index).write(gpupool_place { place: number_of(place), used, held, peak_used, limit }) };
    }
    usage.places.len()
}
