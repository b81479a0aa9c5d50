//! Copies and fills use memory, too: what they read and write far away crosses the link once each time.
//!
//! Nothing moves before one of them, since to move what is read once takes longer than to read it. It counts, so that what many of
//! them use comes near where the program waits ([`super::idle`]).

use super::{beside, current_home, is_ours, launch, record};
use crate::process;
use crate::watch::capture;
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUDA_MEMCPY3D};
use gpupool_interpose::Api;
use gpupool_tiers::Range;
use std::ffi::c_void;

/// What is smaller is not told: to read it from afar takes less than a microsecond. Libraries clear four bytes before a product or send
/// some to a buffer that is elsewhere each time, and a program that repeats itself would not be seen to.
const LEAST: usize = 64 << 10;

/// A call has read or written so many bytes from these addresses on.
#[cold]
pub fn told<const N: usize>(api: Api, used: &[(u64, usize); N]) {
    beside(api, || tell(api, used));
}

fn tell<const N: usize>(api: Api, used: &[(u64, usize); N]) -> Option<()> {
    let home = current_home().filter(|_| !capture::under_way())?;
    let mut ranges = [Range::of(0, 0); N];
    let mut count = 0;
    for &(address, bytes) in used.iter().filter(|(address, bytes)| *bytes >= LEAST && is_ours(home.opened, *address)) {
        if let Some(range) = ranges.get_mut(count) {
            *range = Range::of(address, bytes as u64);
            count += 1;
        }
    }
    let ranges = ranges.get(..count).filter(|ranges| !ranges.is_empty())?;
    let copy = home.tiers.lock().copied(ranges, home);
    if record::is_on() {
        process::contained(api, || record::copy(ranges));
    }
    #[cfg(test)]
    launch::plant::panic();
    if copy.tell_time {
        process::contained(api, || launch::tell_time(home));
    }
    None
}

/// Bytes from the first to the last of so many rows.
pub fn rows(pitch: usize, width: usize, height: usize) -> usize {
    if height == 0 { 0 } else { pitch.saturating_mul(height - 1).saturating_add(width) }
}

/// `CU_MEMORYTYPE_DEVICE` and `CU_MEMORYTYPE_UNIFIED`: the side is an address that the GPU uses.
const ADDRESSES: [u32; 2] = [2, 4];

/// What one side of a described copy reads or writes, where it is an address of the GPU's.
fn side(kind: u32, device: u64, [pitch, height]: [usize; 2], at: [usize; 3], extent: [usize; 3]) -> (u64, usize) {
    let [x, y, z] = at;
    let [width, rows_of_each, depth] = extent;
    let pitch = if pitch == 0 { width } else { pitch };
    let slice = pitch.saturating_mul(if height == 0 { rows_of_each } else { height });
    let start = z.saturating_mul(slice).saturating_add(y.saturating_mul(pitch)).saturating_add(x);
    let bytes = rows(slice, rows(pitch, width, rows_of_each), depth);
    if ADDRESSES.contains(&kind) { (device.saturating_add(start as u64), bytes) } else { (0, 0) }
}

/// What a copy of rows (`CUDA_MEMCPY2D`) writes and reads; no bytes where that is no address of the GPU's.
///
/// # Safety
/// The driver read or wrote this description without an error.
pub unsafe fn of_rows(copy: *const c_void) -> [(u64, usize); 2] {
    let copy = copy.cast::<CUDA_MEMCPY2D>();
    // SAFETY: the caller vouches for the structure; the kinds are read as numbers, since newer drivers may have others.
    unsafe {
        let kinds = [
            (&raw const (*copy).dstMemoryType).cast::<u32>().read(),
            (&raw const (*copy).srcMemoryType).cast::<u32>().read(),
        ];
        let extent = [(*copy).WidthInBytes, (*copy).Height, 1];
        [
            side(kinds[0], (*copy).dstDevice, [(*copy).dstPitch, 0], [(*copy).dstXInBytes, (*copy).dstY, 0], extent),
            side(kinds[1], (*copy).srcDevice, [(*copy).srcPitch, 0], [(*copy).srcXInBytes, (*copy).srcY, 0], extent),
        ]
    }
}

/// The same of a copy of boxes (`CUDA_MEMCPY3D`).
///
/// # Safety
/// As for [`of_rows`].
pub unsafe fn of_boxes(copy: *const c_void) -> [(u64, usize); 2] {
    let copy = copy.cast::<CUDA_MEMCPY3D>();
    // SAFETY: the caller vouches for the structure; the kinds are read as numbers, since newer drivers may have others.
    unsafe {
        let kinds = [
            (&raw const (*copy).dstMemoryType).cast::<u32>().read(),
            (&raw const (*copy).srcMemoryType).cast::<u32>().read(),
        ];
        let extent = [(*copy).WidthInBytes, (*copy).Height, (*copy).Depth];
        let dst = [(*copy).dstXInBytes, (*copy).dstY, (*copy).dstZ];
        let src = [(*copy).srcXInBytes, (*copy).srcY, (*copy).srcZ];
        [
            side(kinds[0], (*copy).dstDevice, [(*copy).dstPitch, (*copy).dstHeight], dst, extent),
            side(kinds[1], (*copy).srcDevice, [(*copy).srcPitch, (*copy).srcHeight], src, extent),
        ]
    }
}
