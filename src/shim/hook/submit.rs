//! Bodies: counts launches and copies for the current context. A launch takes two microseconds, and this must not show in it.
//!
//! Three additions: copies are checked against the watched blocks of pinned memory; after a synchronous copy or fill that
//! touches a block with `SYNC_MEMOPS`, the default stream is waited for; and where memory lies far, copies and fills are uses of it
//! ([`crate::tiers::copies`]).
//!
//! The context is looked up before the call: one that is unknown is registered, and its GPU gets access to the pool's memory,
//! before its first work is submitted.

use super::boundary;
use crate::process;
use crate::serve::memory::memops;
use crate::serve::pinned;
use crate::tiers;
use crate::watch::arguments::{self, Reader};
use crate::watch::capture;
use crate::watch::context::{self, Context, Counters};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUDA_MEMCPY3D};
use gpupool_cuda::{self as cuda, CuResult};
use gpupool_interpose::Api;
use std::ffi::c_void;

/// What the current context was used for, looked for before the call; `None` without a context.
pub type Before = Option<&'static Counters>;

/// Before the call. Always inlined, so that the rows ask the loader only once where this thread's variables lie.
#[inline(always)]
pub fn before(api: Api) -> Before {
    context(api).map(|context| context.usage())
}

/// The context that is current before the call.
#[inline(always)]
pub fn context(api: Api) -> Option<Context> {
    match cuda::at_hand().map(context::glance) {
        Some(Ok(context)) => context,
        Some(Err(())) | None => look(api),
    }
}

/// The first of a thread in its context, which may have to be noted first: that takes a lock, allocates, asks the driver,
/// logs and may fail.
#[cold]
fn look(api: Api) -> Option<Context> {
    let mut found = None;
    process::contained(api, || {
        found = context::driver().and_then(context::current);
    });
    found
}

/// After a launch.
#[inline]
pub fn launched(api: Api, before: Before, result: CuResult) {
    count(api, before, result, Counters::launched);
}

/// After a copy or a fill.
#[inline]
pub fn copied(api: Api, before: Before, result: CuResult) {
    count(api, before, result, Counters::copied);
}

/// What a copy calls an address, by its side.
pub trait Address: Copy {
    fn number(self) -> u64;
}

impl Address for u64 {
    #[inline]
    fn number(self) -> u64 {
        self
    }
}

impl Address for *const c_void {
    #[inline]
    fn number(self) -> u64 {
        self as u64
    }
}

impl Address for *mut c_void {
    #[inline]
    fn number(self) -> u64 {
        self as u64
    }
}

/// After a copy of bytes in a row.
#[inline]
pub fn moved(api: Api, before: Before, result: CuResult, dst: impl Address, src: impl Address, bytes: usize) {
    copied(api, before, result);
    if result.is_ok() {
        pinned::after_copy(dst.number(), src.number(), bytes as u64);
    }
    uses(api, result, || [(dst.number(), bytes), (src.number(), bytes)]);
}

/// After a call that reads or writes so many bytes from these addresses on, in a process where that matters.
#[inline]
pub fn uses<const N: usize>(api: Api, result: CuResult, ranges: impl FnOnce() -> [(u64, usize); N]) {
    if arguments::are_read_by(Reader::Tiers) && result.is_ok() {
        tiers::copies::told(api, &ranges());
    }
}

/// After copies of bytes in rows, one for each place of three lists.
#[inline]
pub fn moved_batch(
    api: Api,
    before: Before,
    result: CuResult,
    dst: *const u64,
    src: *const u64,
    sizes: *const usize,
    count: usize,
) {
    copied(api, before, result);
    if arguments::are_read_by(Reader::Tiers) && result.is_ok() {
        for at in 0..count {
            // SAFETY: the driver read as many of all three lists without an error.
            let (dst, src, bytes) = unsafe { (*dst.add(at), *src.add(at), *sizes.add(at)) };
            tiers::copies::told(api, &[(dst, bytes), (src, bytes)]);
        }
    }
}

/// After a copy to the host that is not asynchronous.
#[inline]
pub fn read_back(api: Api, before: Before, result: CuResult, dst: impl Address, src: impl Address, bytes: usize) {
    moved_at_once(api, before, result, dst, src, bytes);
}

/// After a copy of bytes in a row that is not asynchronous.
#[inline]
pub fn moved_at_once(api: Api, before: Before, result: CuResult, dst: impl Address, src: impl Address, bytes: usize) {
    moved(api, before, result, dst, src, bytes);
    finish_at(api, result, &[dst.number(), src.number()]);
}

/// After a fill with so many values.
#[inline]
pub fn filled_later<T>(api: Api, before: Before, result: CuResult, dst: u64, _: T, count: usize) {
    copied(api, before, result);
    uses(api, result, || [(dst, count.saturating_mul(size_of::<T>()))]);
}

/// After such a fill that is not asynchronous.
#[inline]
pub fn filled<T>(api: Api, before: Before, result: CuResult, dst: u64, value: T, count: usize) {
    filled_later(api, before, result, dst, value, count);
    finish_at(api, result, &[dst]);
}

/// After a fill of rows with so many values each.
#[inline]
#[expect(clippy::too_many_arguments, reason = "the driver's call has them")]
pub fn filled_rows_later<T>(
    api: Api,
    before: Before,
    result: CuResult,
    dst: u64,
    pitch: usize,
    _: T,
    width: usize,
    height: usize,
) {
    copied(api, before, result);
    uses(api, result, || [(dst, tiers::copies::rows(pitch, width.saturating_mul(size_of::<T>()), height))]);
}

/// After such a fill that is not asynchronous.
#[inline]
#[expect(clippy::too_many_arguments, reason = "the driver's call has them")]
pub fn filled_rows<T>(
    api: Api,
    before: Before,
    result: CuResult,
    dst: u64,
    pitch: usize,
    value: T,
    width: usize,
    height: usize,
) {
    filled_rows_later(api, before, result, dst, pitch, value, width, height);
    finish_at(api, result, &[dst]);
}

/// After a copy between an array and this address that is not asynchronous.
#[inline]
pub fn copied_array(api: Api, before: Before, result: CuResult, address: u64, bytes: usize) {
    copied(api, before, result);
    uses(api, result, || [(address, bytes)]);
    finish_at(api, result, &[address]);
}

/// After a call that is not asynchronous and names these addresses: it is over when it returns, where one of them lies in a block that
/// this was asked for.
#[inline]
pub fn finish_at(api: Api, result: CuResult, touched: &[u64]) {
    if memops::is_any() && result.is_ok() {
        finish(api, touched);
    }
}

#[cold]
fn finish(api: Api, touched: &[u64]) {
    if !touched.iter().any(|address| memops::waits_at(*address)) {
        return;
    }
    process::contained(api, || {
        // A wait for the default stream may break a capture, and the call's own work is not in one.
        if let Some(driver) = context::driver().filter(|_| !capture::under_way()) {
            // An error of the work is the next call's to hear, as where the driver does not wait.
            let _ = driver.synchronize_default_stream(api.name().ends_with("_ptds"));
        }
    });
}

/// The addresses that a described copy (`CUDA_MEMCPY2D`, `CUDA_MEMCPY3D`) may write and read. Those that the kinds of memory do not
/// ask for are whatever the program left there; an address too many only makes a block count as reached or copied out of, and then
/// it is not judged, or is waited for without need.
macro_rules! sides {
    ($copy:expr, $kind:ty) => {{
        let copy = $copy.cast::<$kind>();
        // SAFETY: the driver read the structure without an error; of it, only fields are read that any bits are a value of.
        unsafe { ([(*copy).dstHost as u64, (*copy).dstDevice], [(*copy).srcHost as u64, (*copy).srcDevice]) }
    }};
}

/// After a copy of rows.
#[inline]
pub fn moved_rows(api: Api, before: Before, result: CuResult, copy: *const c_void) {
    copied(api, before, result);
    // SAFETY: the driver read the description without an error.
    uses(api, result, || unsafe { tiers::copies::of_rows(copy) });
    if result.is_ok() && pinned::copies::is_watching() {
        let (dst, src) = sides!(copy, CUDA_MEMCPY2D);
        pinned::copies::copied_some(&dst, &src);
    }
}

/// After a copy of rows that is not asynchronous.
#[inline]
pub fn rows_at_once(api: Api, before: Before, result: CuResult, copy: *const c_void) {
    moved_rows(api, before, result, copy);
    if memops::is_any() && result.is_ok() {
        let (dst, src) = sides!(copy, CUDA_MEMCPY2D);
        finish(api, [dst, src].as_flattened());
    }
}

/// After a copy of boxes.
#[inline]
pub fn moved_boxes(api: Api, before: Before, result: CuResult, copy: *const c_void) {
    copied(api, before, result);
    // SAFETY: the driver read the description without an error.
    uses(api, result, || unsafe { tiers::copies::of_boxes(copy) });
    if result.is_ok() && pinned::copies::is_watching() {
        let (dst, src) = sides!(copy, CUDA_MEMCPY3D);
        pinned::copies::copied_some(&dst, &src);
    }
}

/// After a copy of boxes that is not asynchronous.
#[inline]
pub fn boxes_at_once(api: Api, before: Before, result: CuResult, copy: *const c_void) {
    moved_boxes(api, before, result, copy);
    if memops::is_any() && result.is_ok() {
        let (dst, src) = sides!(copy, CUDA_MEMCPY3D);
        finish(api, [dst, src].as_flattened());
    }
}

/// After other work: a host function, an event, a prefetch.
#[inline]
pub fn worked(api: Api, before: Before, result: CuResult) {
    count(api, before, result, Counters::worked);
}

/// Counts what the driver took; what it refused is no use of the context.
#[inline]
fn count(api: Api, before: Before, result: CuResult, as_what: impl Fn(&Counters)) {
    if let Some(usage) = before.filter(|_| result.is_ok()) {
        as_what(usage);
    }
    boundary::trace(api, result);
}
