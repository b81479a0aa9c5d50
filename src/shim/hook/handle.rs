//! Bodies: calls that are given a handle of physical memory. What the program has is a number of ours for most of it; the driver is
//! called with the handle behind that ([`crate::serve::handles`]).
//!
//! Every body has the real call as a function of that one argument, since the others are the program's own.

use super::Real;
use crate::serve::handles::of_kind;
use crate::serve::handles::{self, Anchor, Behind, Number, OfParts, Part, Release, Use};
use crate::serve::memory;
use crate::watch::context;
use crate::{log, process};
use cudarc::driver::sys::CUdeviceptr;
use gpupool_config::format_size;
use gpupool_cuda::{ArrayMapping, CuResult, Driver, Location, Physical, Properties};
use gpupool_interpose::Api;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// A handle of which nothing is known is the driver's to judge, but for a number of ours: a program that kept one too long would end
/// in the driver, which follows every handle (measured).
fn unknown(with: impl Fn(u64) -> CuResult, handle: u64) -> CuResult {
    if Number::from_raw(handle).is_own() { CuResult::INVALID_VALUE } else { with(handle) }
}

/// An argument of a call that no body sees, since the program has become another (a fork) or the call came from inside another one.
pub trait Unseen {
    /// What the driver is to have for it.
    fn unseen(self) -> Self;
}

impl Unseen for u64 {
    /// The driver refuses 0, where it would follow a number of ours.
    fn unseen(self) -> Self {
        if Number::from_raw(self).is_own() { 0 } else { self }
    }
}

impl Unseen for *mut c_void {
    /// A list is the program's, and is left as it is.
    fn unseen(self) -> Self {
        self
    }
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn release(_: &mut Real, with: impl Fn(u64) -> CuResult, handle: u64) -> CuResult {
    let releasing = match handles::release(Number::from_raw(handle)) {
        Release::Unknown => {
            let releasing = of_kind::release(handle);
            let result = unknown(with, handle);
            if let Some(releasing) = releasing.filter(|_| !result.is_ok()) {
                of_kind::still_held(releasing);
            }
            return result;
        }
        Release::Refused(refused) => return with(refused.raw()),
        Release::Counted => return CuResult::SUCCESS,
        Release::Parts(releasing) => releasing,
    };
    let [first, others @ ..] = releasing.parts() else { return CuResult::INVALID_VALUE };
    let result = with(first.handle.raw());
    if result.is_ok()
        && let Some(driver) = process::driver()
    {
        // Made by `handles::create`, with references that the program knows nothing of.
        others.iter().filter(|part| !let_go(driver, part.handle).is_ok()).for_each(handles::stranded);
    }
    handles::end_release(releasing, result.is_ok());
    result
}

/// Releases a reference that the program knows nothing of, and tries once more where that fails: nobody else ever will.
pub fn let_go(driver: &Driver, handle: Physical) -> CuResult {
    let result = driver.release(handle);
    if result.is_ok() { result } else { driver.release(handle) }
}

/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn map(
    _: &mut Real,
    with: impl Fn(u64) -> CuResult,
    handle: u64,
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    flags: c_ulonglong,
) -> CuResult {
    let number = Number::from_raw(handle);
    let Some(behind) = handles::begin_map(number) else {
        let result = unknown(with, handle);
        if result.is_ok() {
            of_kind::mapped(address, bytes as u64, handle);
        }
        return result;
    };
    let result = match (behind, process::driver()) {
        (Behind::One(handle), _) => with(handle.raw()),
        (Behind::Parts(parts), Some(driver)) => map_parts(driver, address, bytes as u64, offset, &parts, flags),
        (Behind::Parts(_), None) => CuResult::INVALID_VALUE,
    };
    handles::end_map(number, address, bytes as u64, offset as u64, result.is_ok());
    result
}

/// Maps all parts one after the other, or none. As the driver, only from their beginning and all of them.
fn map_parts(driver: &Driver, address: u64, bytes: u64, offset: usize, parts: &[Part], flags: u64) -> CuResult {
    let whole: u64 = parts.iter().map(|part| part.bytes).sum();
    if bytes == 0 {
        return CuResult::INVALID_VALUE;
    }
    if offset != 0 || bytes != whole {
        return CuResult::NOT_SUPPORTED;
    }
    let mut done = 0;
    for part in parts {
        let result = driver.map(address + done, part.bytes, part.handle, flags);
        if !result.is_ok() {
            if done > 0 {
                let _ = driver.unmap(address, done);
            }
            return result;
        }
        done += part.bytes;
    }
    CuResult::SUCCESS
}

/// # Safety
/// `properties` is the program's output argument of that call.
pub unsafe fn properties(
    _: &mut Real,
    with: impl Fn(u64) -> CuResult,
    handle: u64,
    properties: *mut Properties,
) -> CuResult {
    let number = Number::from_raw(handle);
    let Some(used) = handles::use_of(number) else { return unknown(with, handle) };
    let result = with(used.handle());
    if result.is_ok()
        && let Some(asked) = handles::asked_for(number)
    {
        // SAFETY: the driver answered success, so it has written there.
        unsafe { (*properties).location = Location { kind: Location::DEVICE, id: asked as c_int } };
    }
    result
}

/// A descriptor is of one piece of memory, so what is made of parts has none. What the driver would refuse for any handle made as this
/// one was, it refuses in its own words.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn export(
    real: &mut Real,
    with: impl Fn(u64) -> CuResult,
    handle: u64,
    shared: *mut c_void,
    kind: c_int,
    flags: c_ulonglong,
) -> CuResult {
    let api = real.api;
    let is_refused = |first: Physical| {
        let types = process::driver().and_then(|driver| driver.properties_of(first).ok()).map(|it| it.handle_types);
        // Measured, of handles that are whole: `tests/programs/expected/handle_answers.txt`.
        shared.is_null() || flags != 0 || types.is_some_and(|types| types & kind == 0)
    };
    given_away(handle, Anchor::Exported, with, is_refused, api)
}

/// Binds memory to a multicast object.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn bind_multicast(real: &mut Real, with: impl Fn(u64) -> CuResult, handle: u64) -> CuResult {
    given_away(handle, Anchor::Multicast, with, |_| false, real.api)
}

/// Binds memory to a logical endpoint.
///
/// # Safety
/// Called by a row's trampoline with that call's parameters.
pub unsafe fn bind_endpoint(real: &mut Real, with: impl Fn(u64) -> CuResult, handle: u64) -> CuResult {
    given_away(handle, Anchor::Endpoint, with, |_| false, real.api)
}

/// Makes a call that gives memory away, which takes it in one piece. `is_refused`: whether the driver refuses it for one of its parts,
/// too, and so is to be asked.
fn given_away(
    handle: u64,
    anchor: Anchor,
    with: impl Fn(u64) -> CuResult,
    is_refused: impl FnOnce(Physical) -> bool,
    api: Api,
) -> CuResult {
    let Some(used) = handles::use_of(Number::from_raw(handle)) else { return unknown(with, handle) };
    if let Some(of) = used.of_parts
        && !is_refused(Physical::from_raw(used.handle()))
    {
        say_no_parts(api, anchor, of);
        return CuResult::NOT_SUPPORTED;
    }
    used.anchor(anchor);
    let result = with(used.handle());
    if !result.is_ok() {
        used.withdraw_anchor(anchor);
    }
    result
}

/// Says that a call cannot have what is made of parts, why it is, and what helps: once for each of the two reasons, and once more of exports.
#[cold]
fn say_no_parts(api: Api, anchor: Anchor, of: OfParts) {
    let OfParts { device, bytes, most_whole } = of;
    let (call, bytes) = (api.name(), format_size(bytes));
    let (why, remedy) = match most_whole {
        None => (
            format!("neither GPU {device} nor another place had room for all of it"),
            "create smaller handles".to_owned(),
        ),
        Some(most) => (
            format!(
                "GPU {device} had no room for all of it, and of a handle of more than half of that GPU's memory or limit as much lies \
                 there as it has room for, although another GPU may have room for all of it"
            ),
            format!("create handles of {} at most", format_size(most)),
        ),
    };
    let about = match (anchor == Anchor::Exported, most_whole.is_some()) {
        (true, false) => "vmm.export",
        (true, true) => "vmm.export.large",
        (false, false) => "vmm.parts",
        (false, true) => "vmm.parts.large",
    };
    log::warn_once(
        about,
        format_args!(
            "{call} of a handle of {bytes} for GPU {device}: NOT_SUPPORTED, because it is made of parts: {why}; {remedy}, or set \
             GPUPOOL_DEVICES to the program's own GPU and GPUPOOL_HOST_LIMIT=0 to be told OUT_OF_MEMORY instead"
        ),
    );
}

/// Maps memory into sparse arrays. The list is the program's, so a copy of it gets the driver's handles.
///
/// # Safety
/// `list` is the program's argument of that call.
pub unsafe fn map_arrays(
    real: &mut Real,
    with: impl Fn(*mut c_void) -> CuResult,
    list: *mut c_void,
    count: c_uint,
) -> CuResult {
    let mut own = match list.is_null() {
        true => Vec::new(),
        // SAFETY: not NULL, and the program promised the driver `count` entries; any bits are a value of the structure.
        false => unsafe { std::slice::from_raw_parts(list.cast::<ArrayMapping>(), count as usize) }.to_vec(),
    };
    let mut used: Vec<Use> = Vec::new();
    for entry in own.iter_mut().filter(|entry| entry.maps_a_handle()) {
        let number = Number::from_raw(entry.handle);
        let Some(known) = handles::use_of(number) else {
            if number.is_own() {
                return CuResult::INVALID_VALUE;
            }
            continue;
        };
        if let Some(of) = known.of_parts {
            say_no_parts(real.api, Anchor::Array, of);
            return CuResult::NOT_SUPPORTED;
        }
        entry.handle = known.handle();
        used.push(known);
    }
    let list = if used.is_empty() { list } else { own.as_mut_ptr().cast() };
    used.iter().for_each(|known| known.anchor(Anchor::Array));
    let mut result = with(list);
    if result == CuResult::OUT_OF_MEMORY && memory::give_back(real.api) {
        result = with(list);
    }
    if !result.is_ok() {
        used.iter().for_each(|known| known.withdraw_anchor(Anchor::Array));
    } else if let Some(context) = context::driver().and_then(context::current) {
        context.usage.worked();
    }
    result
}
