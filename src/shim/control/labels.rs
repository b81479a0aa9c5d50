//! Names for blocks, and how much of a name may lie near.

use super::{gpupool_error, looking};
use crate::process::{self, Part};
use crate::serve::memory::labels::{self, Unlabelled, Usage};
use crate::serve::memory::scope;
use std::ffi::{CStr, c_char, c_int, c_void};

/// Bytes of a label with its NUL, as the struct has them.
const LABEL_SIZE: usize = 64;

/// What has a label, in bytes that were asked for.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gpupool_label_usage {
    /// The label, ended by NUL.
    pub label: [c_char; 64],
    /// Live blocks that have it.
    pub blocks: u64,
    /// Their bytes: the sum of the next three.
    pub bytes: u64,
    /// What of it lies on the GPU that was current when each block was allocated.
    pub at_home: u64,
    /// On other GPUs.
    pub on_peers: u64,
    /// On the host.
    pub on_host: u64,
    /// The most that may be `at_home`; `UINT64_MAX` without a budget.
    pub budget: u64,
}

/// Gives the block of the pool that `pointer` lies in a label, in place of any it had; NULL takes it back. It ends with the block. It
/// is told in the log's events of that block, by `gpupool report` and by `gpupool_labels`.
///
/// A label of which more would lie on its GPU than `gpupool_label_budget` allows has this block moved to the next place with room, as by
/// `gpupool_prefetch`, with what is said there of its use meanwhile. Where it cannot move, the block has the label all the same, and
/// the answer is `GPUPOOL_OVER_BUDGET`. Returns 0, a `CUresult` or a `gpupool_error`; a label has 1 to 63 bytes of UTF-8.
///
/// # Safety
/// `label` ends with NUL, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_label(pointer: *const c_void, label: *const c_char) -> c_int {
    // SAFETY: as for this function.
    let label = match unsafe { name_of(label) } {
        Ok(label) => label,
        Err(error) => return error.into(),
    };
    let answer = looking(|| {
        let driver = process::driver().ok_or(gpupool_error::GPUPOOL_NOT_ACTIVE)?;
        match labels::set(driver, pointer as u64, label) {
            Ok(()) => Ok(0),
            Err(Unlabelled::NotOurs) => Err(gpupool_error::GPUPOOL_NOT_POOLED),
            Err(Unlabelled::OverBudget) => Err(gpupool_error::GPUPOOL_OVER_BUDGET),
            Err(Unlabelled::Refused(result)) => Ok(result.0),
        }
    });
    answer.unwrap_or_else(c_int::from)
}

/// Says how many bytes of the blocks with a label may lie on the GPU that was current when they were allocated; `UINT64_MAX` takes
/// that back. It is enforced at two moments: when a block gets the label (`gpupool_label`), and when one is moved home, where `gpupool_prefetch` answers
/// `GPUPOOL_OVER_BUDGET` and moves nothing. What lies there at the moment of this call stays. Returns 0 or a `gpupool_error`.
///
/// # Safety
/// `label` ends with NUL, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_label_budget(label: *const c_char, bytes: u64) -> c_int {
    // SAFETY: as for this function.
    let label = match unsafe { name_of(label) } {
        Ok(Some(label)) => label,
        Ok(None) => return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into(),
        Err(error) => return error.into(),
    };
    let budget = (bytes < u64::MAX).then_some(bytes);
    let set = || {
        labels::set_budget(label, budget);
        Ok(())
    };
    match looking(set) {
        Ok(()) => 0,
        Err(error) => error.into(),
    }
}

/// From now on, blocks of the pool that the calling thread allocates have a label when the call that allocates them returns, as by
/// `gpupool_label`; NULL or an empty one ends that. What is more than its budget goes elsewhere at once. `outer`, where it is not NULL, is
/// given the label that was set until now, or an empty one: to put it back at the end of a scope, pass it as `label`.
///
/// This may be called before CUDA is used. It costs no lock and reaches no driver. What a framework serves from a cache of its own is
/// not allocated here. Returns 0, `GPUPOOL_INVALID_ARGUMENT`, or `GPUPOOL_NOT_ACTIVE` where everything goes to the driver; `outer` is empty
/// then. A label that is refused changes nothing, and `outer` is the one that stays.
///
/// # Safety
/// `label` ends with NUL, or is NULL; `outer` has room for 64 bytes, or is NULL. They may be the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_label_scope(label: *const c_char, outer: *mut c_char) -> c_int {
    // SAFETY: the first byte of a string of the caller's, if there is one.
    let is_none = label.is_null() || unsafe { *label } == 0;
    // SAFETY: NULL, or a string of the caller's that ends with NUL.
    let checked = if is_none { Ok(None) } else { unsafe { name_of(label) } };
    let answer = checked.and_then(|name| in_scopes().map(|()| scope::set_name(name.unwrap_or_default())));
    let (until_now, answer) = match answer {
        Ok(until_now) => (until_now, 0),
        // The label that is set stays, and to put back what is told then changes nothing.
        Err(error) => {
            (in_scopes().map_or([0; LABEL_SIZE], |()| scope::name().unwrap_or([0; LABEL_SIZE])), error.into())
        }
    };
    if !outer.is_null() {
        // SAFETY: the caller has room for so many bytes; `label`, which may be the same, is not read any more.
        unsafe { outer.cast::<u8>().copy_from_nonoverlapping(until_now.as_ptr(), LABEL_SIZE) };
    }
    answer
}

/// From now on, blocks of the pool that the calling thread allocates are placed elsewhere than on the GPU whose context is current (`far`
/// other than 0), or as always (0): on the other GPUs, the fastest link first, and then on the host. They stay there, whatever
/// `GPUPOOL_MOVE` says, as after `gpupool_prefetch`, and `GPUPOOL_FAR_LIMIT` refuses none of them. Where there is no room elsewhere, a block lies where it would have without this call.
///
/// Requests under `GPUPOOL_MIN_SIZE`, the driver's own memory (`cudaMallocAsync`, managed memory) and what the program makes by
/// `cuMemCreate` are placed as always. Returns what was set until now, 0 or 1, or `GPUPOOL_NOT_ACTIVE` where everything goes to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn gpupool_far_scope(far: c_int) -> c_int {
    in_scopes().map_or_else(c_int::from, |()| scope::set_far(far != 0).into())
}

/// Whether it matters what a thread wants of its blocks: they are, or may become, the pool's.
fn in_scopes() -> Result<(), gpupool_error> {
    match process::part() {
        Part::Idle | Part::Active => Ok(()),
        Part::Closed | Part::Passing => Err(gpupool_error::GPUPOOL_NOT_ACTIVE),
    }
}

/// Writes up to `capacity` labels to `labels`, in the order in which they were first used, and returns how many there are.
///
/// # Safety
/// `labels` has room for `capacity` elements, or `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_labels(labels: *mut gpupool_label_usage, capacity: usize) -> usize {
    let all = looking(|| Ok(labels::usage())).unwrap_or_default();
    for (index, usage) in all.iter().enumerate().take(capacity) {
        // SAFETY: `index` is below `capacity`, for which the caller has room.
        unsafe { labels.add(index).write(of(usage)) };
    }
    all.len()
}

fn of(usage: &Usage) -> gpupool_label_usage {
    let &Usage { ref name, blocks, bytes, at_home, on_peers, on_host, budget } = usage;
    let mut label = [0; LABEL_SIZE];
    // The last one stays 0: no label is longer.
    for (to, byte) in label.iter_mut().zip(name.bytes().take(LABEL_SIZE - 1)) {
        *to = byte as c_char;
    }
    gpupool_label_usage { label, blocks, bytes, at_home, on_peers, on_host, budget: budget.unwrap_or(u64::MAX) }
}

/// # Safety
/// The string ends with NUL and lives as long as the answer is used, or is NULL.
unsafe fn name_of<'a>(label: *const c_char) -> Result<Option<&'a str>, gpupool_error> {
    // SAFETY: as for this function.
    unsafe { text_of(label, LABEL_SIZE) }
}

/// A string that has room in so many bytes with its NUL, and is not empty; `None` for NULL.
///
/// # Safety
/// The string ends with NUL and lives as long as the answer is used, or is NULL.
pub(super) unsafe fn text_of<'a>(text: *const c_char, size: usize) -> Result<Option<&'a str>, gpupool_error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller vouches for the string.
    let name = unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| gpupool_error::GPUPOOL_INVALID_ARGUMENT)?;
    let fits = (1..size).contains(&name.len());
    if fits { Ok(Some(name)) } else { Err(gpupool_error::GPUPOOL_INVALID_ARGUMENT) }
}
