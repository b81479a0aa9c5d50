//! Where a handle goes that its GPU has no room for: whole to the next place that has, or in parts.

use super::inventory::Part;
use super::with_inventory;
use crate::backing;
use crate::backing::plan::Plan;
use crate::bell;
use crate::bypass::{self, Answer, Bypass};
use crate::log;
use crate::process;
use crate::serve::memory::{self, Asking, Less, oom};
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Device, Driver, Physical, Properties};
use gpupool_events::VmmSteer;
use gpupool_interpose::{Api, Real};
use gpupool_pool::{Claim, FRAME, Place, Room, spread};
use std::collections::BTreeMap;

/// What a program asks `cuMemCreate` for.
pub struct Request {
    /// Bytes, a multiple of the granularity or the driver refuses.
    pub bytes: u64,
    pub properties: Properties,
    /// The GPU of the properties.
    pub device: u32,
}

/// `cuMemCreate` for plain memory of a GPU: there if it has room, else at the next place that has. The program's number is written
/// through `output`.
///
/// A limit of the user's says what is placed at a GPU while others have room. Where none has, the driver is asked without it, as
/// for `cuMemAlloc`, and what it gives then is the program's own and not charged: refused, the program would fail that runs bare.
///
/// # Safety
/// `output` is the program's output argument of that call, and not NULL.
pub unsafe fn create(real: &mut Real<CuResult>, output: *mut Physical, request: &Request) -> CuResult {
    let Request { bytes, device, .. } = *request;
    let home = Place::Gpu(device);
    if let Err(why) = bypass::makes_memory() {
        why.note(real.api);
        return at_home(real, home);
    }
    // A program's first memory may be this, and before there is a plan nobody knows what a drain or others say of the GPU.
    if let Some(driver) = process::driver() {
        let _ = backing::open::plan(driver);
    }
    let Some(limit) = backing::terms::limit_of(device) else {
        let result = at_home_of_all(real, request);
        if result != CuResult::OUT_OF_MEMORY {
            // SAFETY: as for this function; the driver has answered.
            return unsafe { numbered(result, output, request, false) };
        }
        // SAFETY: as for this function.
        let placed = unsafe { elsewhere(real.api, output, request, u64::MAX, "full") };
        return placed.unwrap_or_else(|| refused(request, result));
    };
    let plan = match plan_for(device) {
        Ok((_, plan)) => plan,
        Err(why) => {
            why.note(real.api);
            // SAFETY: as for this function; the driver has answered.
            return unsafe { numbered(at_home(real, home), output, request, false) };
        }
    };
    if !set_aside(plan, home, bytes, limit, real.api) {
        // SAFETY: as for this function.
        let placed = unsafe { elsewhere(real.api, output, request, limit, "limit") };
        return placed.unwrap_or_else(|| {
            Bypass::Full.note(real.api);
            // SAFETY: as for this function; the driver has answered.
            refused(request, unsafe { numbered(at_home(real, home), output, request, false) })
        });
    }
    let result = at_home_of_all(real, request);
    if !result.is_ok() {
        plan.accounts.credit(Claim::Handles, home, bytes);
        if result != CuResult::OUT_OF_MEMORY {
            return result;
        }
        // SAFETY: as for this function.
        let placed = unsafe { elsewhere(real.api, output, request, limit, "full") };
        return placed.unwrap_or_else(|| refused(request, result));
    }
    // SAFETY: as for this function; the driver answered success.
    unsafe { numbered(result, output, request, true) }
}

/// No place had room, and this is what the driver said: which is told if that is OUT_OF_MEMORY.
fn refused(request: &Request, result: CuResult) -> CuResult {
    if result == CuResult::OUT_OF_MEMORY {
        oom::refused(Device::of(request.device), request.bytes, oom::Kind::Handle, oom::Why::Left(Bypass::Full));
    }
    result
}

/// Gives the program a number for what the driver made where it was asked for, if it did.
///
/// # Safety
/// `output` is the program's output argument of `cuMemCreate`, and not NULL; the driver answered `result`.
unsafe fn numbered(result: CuResult, output: *mut Physical, request: &Request, charged: bool) -> CuResult {
    if result.is_ok() && process::driver().is_some() {
        // SAFETY: the driver answered success, so it has written there.
        let handle = unsafe { *output };
        let part = Part { handle, place: Place::Gpu(request.device), bytes: request.bytes };
        // SAFETY: not NULL; the driver has just written there.
        unsafe { *output = made(request, vec![part], charged, None) };
        // A program may have no other memory than this: what it has of it is told by places, which the plan knows.
        if let Some(driver) = process::driver().filter(|_| !charged) {
            let _ = backing::open::plan(driver);
        }
        bell::allocated();
    }
    result
}

/// The program's number for memory that was made as these parts: because it is larger than that, where it is.
fn made(request: &Request, parts: Vec<Part>, charged: bool, most_whole: Option<u64>) -> Physical {
    let (number, is_taken) = with_inventory(|inventory| {
        let is_taken = parts.iter().any(|part| inventory.avoid(part.handle));
        let number = inventory.made(request.device, parts, charged);
        inventory.was_asked_for(number, request.properties.rdma, most_whole);
        (number, is_taken)
    });
    if is_taken {
        tracing::error!(
            target: "gpupool::memory", about = "vmm.number",
            "the driver gives handles like the numbers that gpupool gives programs for them ({:#x}); please report this driver",
            number.raw()
        );
    }
    Physical::from_raw(number.raw())
}

/// The real call, once more after freed runs of the pool there went back to the driver.
fn at_home(real: &mut Real<CuResult>, home: Place) -> CuResult {
    let _taking = backing::reclaim::make_room_at(home);
    let result = real.call();
    if result == CuResult::OUT_OF_MEMORY && memory::give_back_at(Some(home), real.api) {
        return real.call();
    }
    result
}

/// The same, once more after others have freed what it takes.
fn at_home_of_all(real: &mut Real<CuResult>, request: &Request) -> CuResult {
    let home = Place::Gpu(request.device);
    let mut result = at_home(real, home);
    let mut asking = Asking::of(Less::Nothing);
    // What is free there others need not give, nor what they have given for this one before.
    let free = || plan_for(request.device).ok().and_then(|(driver, plan)| plan.free_at(driver, home)).unwrap_or(0);
    // Who is refused though as much is free lacks what nobody can tell.
    let lacks = || Some(request.bytes.saturating_sub(free())).filter(|lacks| *lacks > 0).unwrap_or(request.bytes);
    while result == CuResult::OUT_OF_MEMORY && asking.ask(request.device, lacks()) {
        result = real.call();
    }
    result
}

/// The driver and the plan, where this GPU is a place of it.
fn plan_for(device: u32) -> Answer<(&'static Driver, &'static Plan)> {
    let (driver, device) = (process::driver().ok_or(Bypass::NoDriver)?, Device::of(device));
    let plan = backing::open::plan(driver).ok_or(Bypass::NoPool)?;
    if plan.serves(device) { Ok((driver, plan)) } else { Err(Bypass::LeftOut(device)) }
}

/// Charges `bytes` at a place if, with all that others have there, that is no more than `most`. Freed runs of the pool make
/// room.
fn set_aside(plan: &Plan, place: Place, bytes: u64, most: u64, api: Api) -> bool {
    let fits = || plan.accounts.charge_below(Claim::Handles, &[(place, bytes)], |_| most).is_ok();
    fits() || memory::give_back_at(Some(place), api) && fits()
}

/// Whether a place has that much and its reserve, as far as that can be told. Freed runs of the pool make room.
fn has(driver: &Driver, plan: &Plan, place: Place, bytes: u64, api: Api) -> bool {
    let has = || plan.free_at(driver, place).is_none_or(|free| free >= bytes);
    has() || memory::give_back_at(Some(place), api) && has()
}

/// `None`: no place has room for it.
///
/// # Safety
/// `output` is the program's, of a `cuMemCreate` that asks for what `request` says.
#[cold]
unsafe fn elsewhere(
    api: Api,
    output: *mut Physical,
    request: &Request,
    most: u64,
    why: &'static str,
) -> Option<CuResult> {
    let Request { bytes, device, .. } = *request;
    let (driver, plan) = match plan_for(device) {
        Ok(known) => known,
        Err(why) => {
            why.note(api);
            return None;
        }
    };
    if memory::refuses_far(device, bytes, "a handle of ") {
        oom::refused(Device::of(device), bytes, oom::Kind::Handle, oom::Why::Far);
        return Some(CuResult::OUT_OF_MEMORY);
    }
    if memory::returns_its_cache() && with_inventory(|inventory| inventory.refuse_softly(device, bytes)) {
        memory::say_refused_softly(device, bytes, "a handle of ");
        return Some(CuResult::OUT_OF_MEMORY);
    }
    memory::have_more_lend(device, bytes);
    let limit = |place| if place == Place::Gpu(device) { most.min(plan.limit(place)) } else { plan.limit(place) };
    let most_whole = backing::terms::largest_whole_of(plan, device);
    let too_large = (bytes > most_whole).then_some(most_whole);
    for place in plan.order(device).into_iter().skip(1).filter(|_| too_large.is_none()) {
        if has(driver, plan, place, bytes, api)
            && set_aside(plan, place, bytes, limit(place), api)
            && let Ok(parts) = make(driver, plan, request, &[(place, bytes)])
        {
            // SAFETY: as for this function.
            return Some(unsafe { hand_out(output, request, parts, why, too_large) });
        }
    }
    let parts = in_parts(driver, plan, request, limit, api, false).or_else(|| {
        // The driver would have it lie on the GPU in spite of that, and its own agent would have it leave for the host.
        let is_for_host = backing::terms::is_drained(device) && bytes <= plan.memory_of(device);
        is_for_host.then(|| in_parts(driver, plan, request, limit, api, true)).flatten()
    })?;
    // SAFETY: as for this function.
    Some(unsafe { hand_out(output, request, parts, why, too_large) })
}

/// The request as parts on several GPUs, and the host if it is `with_host`; `None`: they have no room for it together.
fn in_parts(
    driver: &Driver,
    plan: &Plan,
    request: &Request,
    limit: impl Fn(Place) -> u64 + Copy,
    api: Api,
    with_host: bool,
) -> Option<Vec<Part>> {
    let bytes = request.bytes;
    let mut rooms = rooms(driver, plan, request, limit, with_host);
    let trimmed = spread(bytes, &rooms, backing::open::policy(), 0).is_err() && memory::give_back_at(None, api);
    if trimmed {
        rooms = self::rooms(driver, plan, request, limit, with_host);
    }
    // Where memory may move, and where a part of it may be given, it leaves by whole parts.
    let largest = backing::open::largest_chunk(process::settings());
    // Each failure at least halves a room, so this ends. (Where nobody could tell what a place has, the first guess is all.)
    while let Ok(pieces) = spread(bytes, &rooms, backing::open::policy(), 0).map(|pieces| cut(pieces, largest)) {
        let charged = plan.accounts.charge_below(Claim::Handles, &pieces, limit);
        let charged = charged.map_err(|place| (place, CuResult::OUT_OF_MEMORY));
        let (place, result) = match charged.and_then(|()| make(driver, plan, request, &pieces)) {
            Ok(parts) => return Some(parts),
            Err(failed) => failed,
        };
        let asked: u64 = pieces.iter().filter(|(other, _)| *other == place).map(|(_, bytes)| bytes).sum();
        let left = if result == CuResult::OUT_OF_MEMORY { asked / 2 } else { 0 };
        rooms.iter_mut().filter(|room| room.place == place).for_each(|room| room.bytes = left);
    }
    None
}

/// The same pieces in parts of so many bytes at most.
fn cut(pieces: Vec<(Place, u64)>, largest: u64) -> Vec<(Place, u64)> {
    let parts = |(place, bytes): (Place, u64)| {
        (0..bytes.div_ceil(largest)).map(move |nth| (place, largest.min(bytes - nth * largest)))
    };
    pieces.into_iter().flat_map(parts).collect()
}

/// What each GPU could give to a part of a request, best first. Not the host: an arena sized by what several GPUs have
/// would be half there, where a program that hears of OUT_OF_MEMORY asks for less. But of a drained GPU's (`with_host`) the host is the last that is
/// asked before the driver, who would have it lie on that GPU. What is not asked for in whole granules, which the driver refuses, gets nothing.
fn rooms(driver: &Driver, plan: &Plan, request: &Request, limit: impl Fn(Place) -> u64, with_host: bool) -> Vec<Room> {
    let order = if request.bytes.is_multiple_of(FRAME) { plan.order(request.device) } else { Vec::new() };
    let room = |place| {
        let by_limit = limit(place).saturating_sub(plan.accounts.taken(place));
        Room { place, bytes: plan.free_at(driver, place).unwrap_or(u64::MAX).min(by_limit) }
    };
    order.into_iter().filter(|place| with_host || !place.is_host()).map(room).collect()
}

/// Makes the pieces, which are charged, or none; the place where that failed, and how.
fn make(
    driver: &Driver,
    plan: &Plan,
    request: &Request,
    pieces: &[(Place, u64)],
) -> Result<Vec<Part>, (Place, CuResult)> {
    let mut parts: Vec<Part> = Vec::with_capacity(pieces.len());
    for &(place, bytes) in pieces {
        let _taking = backing::reclaim::make_room_at(place);
        match driver.create(bytes, &request.properties.at(place)) {
            Ok(handle) => parts.push(Part { handle, place, bytes }),
            Err(result) => {
                for part in &parts {
                    let _ = driver.release(part.handle);
                }
                pieces.iter().for_each(|&(place, bytes)| plan.accounts.credit(Claim::Handles, place, bytes));
                return Err((place, result));
            }
        }
    }
    Ok(parts)
}

/// # Safety
/// `output` is the program's, of a `cuMemCreate` that asks for what `request` says; `parts` were made for that.
unsafe fn hand_out(
    output: *mut Physical,
    request: &Request,
    parts: Vec<Part>,
    why: &'static str,
    most_whole: Option<u64>,
) -> CuResult {
    let home = request.device;
    let number = made(request, parts.clone(), true, most_whole);
    bell::allocated();
    // SAFETY: not NULL; the driver would write there.
    unsafe { *output = number };
    let (whole, full) = (format_size(request.bytes), if why == "limit" { "at its limit" } else { "full" });
    let mut elsewhere: BTreeMap<Place, u64> = BTreeMap::new();
    for part in parts.iter().filter(|part| part.place != Place::Gpu(home)) {
        *elsewhere.entry(part.place).or_default() += part.bytes;
    }
    for (place, bytes) in elsewhere {
        memory::count_spilled(bytes);
        if place.is_host() {
            memory::report_host(home, bytes, request.bytes);
        }
        let name = place.to_string();
        log::emit(|| {
            let size = format_size(bytes);
            let text = format!("{size} of a handle of {whole} for GPU {home} are on {name}: GPU {home} is {full}");
            (VmmSteer { home, bytes, place: name, why: why.to_owned() }, text)
        });
    }
    CuResult::SUCCESS
}
