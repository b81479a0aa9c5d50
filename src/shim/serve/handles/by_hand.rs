//! Memory of the program's own that the program places itself: what it made by `cuMemCreate` goes whole, wherever it is mapped.

use super::exchange::{self, Much, Stays};
use super::inventory::Inventory;
pub use super::inventory::{Live, Own, OwnPiece};
use super::of_kind;
use super::{may_be_own, with_inventory, with_range};
use crate::backing::open::{self, Opened};
use crate::fence;
use crate::gate;
use crate::log;
use crate::serve::memory::by_hand::Unplaced;
use crate::watch::capture;
use crate::watch::context::{self, Gpus};
use gpupool_config::format_size;
use gpupool_cuda::{CuResult, Device, Driver, Stream};
use gpupool_events::BlockMove;
use gpupool_pool::{Backend, Fault, Mover, Place, Transfer};
use std::collections::BTreeMap;

/// No context, in the terms of [`gpupool_pool::Block::owner`]: whichever of a GPU is there copies what has this one as its owner. No context owns handles.
pub const NOBODY: u64 = u64::MAX;

/// Whether memory of the program's own is mapped at this address, as far as that is known here; also what only the driver can place.
pub fn is_own(address: u64) -> bool {
    let is_known = |inventory: &mut Inventory| inventory.mapping_at(address).is_some();
    with_range(address, 1, is_known).unwrap_or(false) || !of_kind::mapped_in(address, 1).is_empty()
}

/// Moves what the program has mapped in a range to a place, once all work that may use it is over: the handles of which a mapping
/// lies wholly in the range. `stream` is one of the program's: not while it is being captured.
pub fn place(driver: &'static Driver, address: u64, bytes: u64, place: Place, stream: Stream) -> Result<(), Unplaced> {
    let opened = open::open(driver).ok_or(Unplaced::NotOurs)?;
    let mappings = with_range(address, bytes, |inventory| inventory.owned_in(address, bytes)).unwrap_or_default();
    // It lies where it was asked for, and nowhere else.
    let of_kind = of_kind::mapped_in(address, bytes);
    let is_at = |gpu: &Option<u32>| gpu.map(Place::Gpu) == Some(place);
    let (at, elsewhere): (Vec<_>, Vec<_>) = of_kind.iter().partition(|(_, gpu)| is_at(gpu));
    let [there, elsewhere] = [at, elsewhere].map(|all| all.into_iter().map(|(bytes, _)| bytes).sum::<u64>());
    let is_place = || opened.plan.places.iter().any(|spec| spec.place == place);
    let Some(home) = mappings.iter().find_map(|mapping| mapping.asked) else {
        return match (mappings.is_empty(), there, elsewhere) {
            (true, 0, 0) => Err(Unplaced::NotOurs),
            _ if !is_place() => Err(Unplaced::NoPlace),
            (true, _, 0) => Ok(()),
            _ => Err(Unplaced::Stayed),
        };
    };
    let _captured = capture::look(driver, stream);
    if capture::under_way() {
        return Err(Unplaced::Refused(CuResult::STREAM_CAPTURE_UNSUPPORTED));
    }
    if !is_place() {
        return Err(Unplaced::NoPlace);
    }
    let goes = |asked: u32| opened.plan.order(asked).contains(&place);
    if !mappings.iter().filter_map(|mapping| mapping.asked).all(goes) {
        return Err(Unplaced::OutOfReach);
    }
    fence::wait(driver, Gpus::All).map_err(Unplaced::Refused)?;
    let (mut moved, mut there, mut stayed) = (0, there, elsewhere);
    let mut refused = None;
    for mapping in mappings {
        let bytes = mapping.bytes;
        // What is mapped twice in the range has moved with the first.
        let is_there = || with_inventory(|inventory| inventory.is_all_at(mapping.start, place));
        // A handle of which the range has a part cannot move, but it may be where it should be.
        if mapping.asked.is_some() && is_there() {
            there += bytes;
            continue;
        }
        let Some(asked) = mapping.asked.filter(|_| mapping.is_inside) else {
            stayed += bytes;
            continue;
        };
        let alone = || Some(gate::enter_by_hand());
        match move_much(driver, opened, (mapping.start, Much::All), bytes, place, asked, alone) {
            Ok(()) => moved += bytes,
            Err(Unplaced::Stayed) => stayed += bytes,
            Err(other) => {
                refused = Some(other);
                break;
            }
        }
    }
    log::emit(|| {
        let but = if stayed > 0 { format!("; {} stayed", format_size(stayed)) } else { String::new() };
        let event = BlockMove { address, bytes: moved, home, place: place.to_string(), stayed, label: None };
        (event, format!("moved {} of the program's own at {address:#x} to {place}{but}", format_size(moved)))
    });
    super::tell_placed(address, bytes, true);
    match refused {
        Some(refused) => Err(refused),
        None if stayed > 0 || moved + there == 0 => Err(Unplaced::Stayed),
        None => Ok(()),
    }
}

/// The program does not mind any more where so many bytes lie, which [`place`] has put somewhere.
pub fn is_anywhere(address: u64, bytes: u64) {
    super::tell_placed(address, bytes, false);
}

/// What there is now, kinds that only the driver can place included.
pub fn live() -> Live {
    let mut live = if super::is_any() { with_inventory(|inventory| inventory.live()) } else { Live::default() };
    live.count += of_kind::count();
    live.bytes += of_kind::bytes();
    live
}

/// Bytes by the GPU that they were asked for on and the place where they lie. Kinds that only the driver can place are not in it: these lie where they were
/// asked for.
pub fn by_home() -> BTreeMap<(u32, Place), u64> {
    if super::is_any() { with_inventory(|inventory| inventory.by_home()) } else { BTreeMap::new() }
}

/// All that is mapped whole, once each, and part by part where it has several.
pub fn all() -> Vec<Own> {
    if super::is_any() { with_inventory(|inventory| inventory.all_mapped_whole()) } else { Vec::new() }
}

/// All that is mapped, whole or not, for who reads it.
pub fn all_mapped() -> Vec<Own> {
    if super::is_any() { with_inventory(|inventory| inventory.all_mapped()) } else { Vec::new() }
}

/// Bytes of it that lie on the host, mapped or not.
pub fn bytes_on_host() -> u64 {
    if super::is_any() { with_inventory(|inventory| inventory.bytes_on_host()) } else { 0 }
}

/// Whether there is any that came in by a descriptor.
pub fn is_any_imported() -> bool {
    super::is_any() && with_inventory(|inventory| inventory.is_any_imported())
}

/// From where memory of the program's own is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// This GPU, which has a context, may read it where the program has mapped it.
    There(u32),
    /// The program lets none of those read it that have one; this GPU may by a second mapping, which the caller takes down ([`drop_alias`]).
    Aliased(u32, u64),
}

/// Finds from where this can be read, while nobody unmaps it; `None`: no GPU that the program works on reaches where it lies.
///
/// # Errors
/// The driver's answer to a second mapping.
pub fn readable(driver: &Driver, opened: &Opened, own: &Own) -> Result<Option<Read>, CuResult> {
    let &Own { bytes, place, .. } = own;
    let gpu = match reader(opened, own) {
        Some((gpu, true)) => return Ok(Some(Read::There(gpu))),
        Some((gpu, false)) => gpu,
        None => return Ok(None),
    };
    // The program may have released its own reference.
    let handle = driver.retain_at(own.address)?;
    let alias = opened.pool.backend().alias(handle, bytes, place).map_err(error_of);
    let released = exchange::again(|| driver.release(handle));
    let address = alias?;
    if !released.is_ok() {
        drop_alias(opened, address, bytes);
        return Err(released);
    }
    Ok(Some(Read::Aliased(gpu, address)))
}

/// Which GPU reads this, and whether it may where the program has mapped it.
fn reader(opened: &Opened, own: &Own) -> Option<(u32, bool)> {
    let &Own { address, asked, place, .. } = own;
    let working = |gpu: &u32| context::is_on(Device::of(*gpu));
    // What was asked for on one GPU is read by that one where that can be: it has its buffers already.
    let others = opened.plan.topology.gpus.iter().map(|gpu| gpu.ordinal).filter(|gpu| *gpu != asked);
    let all = std::iter::once(asked).chain(others).filter(working);
    let may = |gpu: &u32| with_range(address, 1, |inventory| inventory.is_readable(address, *gpu)).unwrap_or(false);
    let reachers: Vec<u32> = opened.plan.readers(place).collect();
    let reaches = |gpu: &u32| reachers.contains(gpu);
    // Who may read one part of several may read all, and does not reach each.
    let there = || all.clone().find(|gpu| may(gpu) && reaches(gpu)).or_else(|| all.clone().find(may));
    there().map(|gpu| (gpu, true)).or_else(|| all.clone().find(reaches).map(|gpu| (gpu, false)))
}

/// Takes a second mapping down that [`readable`] made. One that stayed would keep the memory for good.
pub fn drop_alias(opened: &Opened, address: u64, bytes: u64) {
    let _ = exchange::again(|| {
        opened.pool.backend().drop_alias(address, bytes).map_or_else(error_of, |()| CuResult::SUCCESS)
    });
}

/// What [`all`] has at this address.
pub fn at(address: u64) -> Option<Own> {
    with_range(address, 1, |inventory| inventory.own_part_at(address)).flatten()
}

/// Why something cannot be stored and taken away then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unstored {
    /// Something reaches its pages past its addresses, or a call uses it.
    Stays,
    /// No GPU that the program works on reaches where it lies.
    OutOfReach,
}

/// Why this cannot be stored, if it cannot; [`readable`] finds from where it is read.
pub fn why_unstored(opened: &Opened, own: &Own) -> Option<Unstored> {
    match with_range(own.address, 1, |inventory| inventory.may_go(own.address)) {
        Some(true) => reader(opened, own).is_none().then_some(Unstored::OutOfReach),
        _ => Some(Unstored::Stays),
    }
}

/// Bytes of the program's own memory at a place, mapped or not.
pub fn bytes_at(place: Place) -> u64 {
    if super::is_any() { with_inventory(|inventory| inventory.own_bytes_at(place)) } else { 0 }
}

/// Bytes of the program's own memory on the GPUs that it works on which no mapping has all of: nobody moves or stores these.
pub fn not_whole_where_it_works() -> u64 {
    let whole = all();
    let mut gpus: Vec<u32> = context::all().iter().map(|context| context.device.ordinal()).collect();
    gpus.sort_unstable();
    gpus.dedup();
    let on = |gpu: u32| {
        let place = Place::Gpu(gpu);
        let mapped: u64 = whole.iter().filter(|own| own.place == place).map(|own| own.bytes).sum();
        bytes_at(place).saturating_sub(mapped)
    };
    gpus.into_iter().map(on).sum()
}

/// Whether what is mapped at this address may be taken off its GPU while somebody keeps its contents, which that GPU, `asked`, can read there.
pub fn may_go(address: u64, asked: u32) -> bool {
    let may = |inventory: &mut Inventory| inventory.may_go(address) && inventory.is_readable(address, asked);
    context::is_on(Device::of(asked)) && with_range(address, 1, may).unwrap_or(false)
}

/// How many handles the program has made or been given so far: another number than before tells that there may be more.
pub fn count_so_far() -> u64 {
    if super::is_any() { with_inventory(|inventory| inventory.count_so_far()) } else { 0 }
}

/// Whether nothing is behind what the program has mapped at this address: its contents are kept by [`put_away`]'s caller.
pub fn is_away(address: u64) -> bool {
    let is_away = |inventory: &mut Inventory| Some(inventory.is_stored_at(address));
    super::with_known(is_away).unwrap_or(false)
}

/// Whether anything of the program's own memory is. A context is what it is copied back with.
pub fn is_any_away() -> bool {
    [Place::Pageable, Place::Disk].into_iter().any(|place| bytes_at(place) > 0)
}

/// Takes what [`all`] says is mapped at `start` off its place, while what `alone` gives is held: its contents are kept by its address in files or in plain memory (`to`), and the
/// program waits until [`bring_in`] has brought it back.
///
/// # Errors
/// It stays; why.
pub fn put_away<A>(
    driver: &Driver,
    opened: &Opened,
    start: u64,
    bytes: u64,
    to: Place,
    alone: impl Fn() -> Option<A>,
) -> Result<(), Unplaced> {
    let readers = |place: Place| opened.plan.readers(place).collect();
    let answer = match alone() {
        Some(_alone) => exchange::put_away(driver, start, to, &readers),
        None => Err(Stays::InUse),
    };
    answer.map_err(|stays| unplaced(stays, bytes, to))
}

/// Brings what [`put_away`] took from these addresses to a place, of what was asked for on one GPU. The contents come from where stored memory of the pool's does
/// ([`Transfer::stored`]). Freed memory of the pool makes room at the place.
///
/// # Errors
/// Some of it is away still; why.
pub fn bring_in<A>(
    driver: &Driver,
    opened: &Opened,
    starts: &[u64],
    bytes: u64,
    place: Place,
    asked: u32,
    alone: impl Fn() -> Option<A>,
) -> Result<(), Unplaced> {
    let copier = copier(driver, opened, asked, place);
    let copy = |fetched: &[(u64, u64, u64)]| {
        let transfer = |&(to, from, bytes): &(u64, u64, u64)| Transfer {
            from,
            to,
            bytes,
            inward: true,
            stored: true,
            between: false,
        };
        copied(opened, copier, &fetched.iter().map(transfer).collect::<Vec<_>>())
    };
    let comes = |readers: &[u32]| exchange::bring_in(driver, starts, place, readers, copier, copy);
    to_place(opened, place, bytes, alone, comes)
}

/// The GPU that copies to a place: what was asked for on one GPU is reached by that one wherever it lies, but who copies needs a context there.
fn copier(driver: &Driver, opened: &Opened, asked: u32, place: Place) -> u32 {
    if context::is_on(Device::of(asked)) {
        return asked;
    }
    // The agent has no current one. Which other GPU is used is the same, as long as it reaches the place: windows for the copy are granted to it.
    let living = context::all().into_iter().filter(|context| context.live_handle().is_some());
    let all = driver.current_device().into_iter().chain(living.map(|context| context.device));
    let all: Vec<u32> = all.map(|device| device.ordinal()).collect();
    let reachers: Vec<u32> = opened.plan.readers(place).collect();
    all.iter().find(|gpu| reachers.contains(gpu)).or(all.first()).copied().unwrap_or(asked)
}

fn copied(opened: &Opened, copier: u32, transfers: &[Transfer]) -> CuResult {
    let backend = opened.pool.backend();
    let copied = backend.prepare(NOBODY, copier).and_then(|()| backend.copy(NOBODY, copier, transfers));
    copied.map_or_else(error_of, |()| CuResult::SUCCESS)
}

/// Makes this exchange, by which so many bytes come to a place that these GPUs have to reach, while what `alone` gives is held; once more where there was no
/// room, and freed memory of the pool has made some.
fn to_place<A>(
    opened: &Opened,
    place: Place,
    bytes: u64,
    alone: impl Fn() -> Option<A>,
    exchange: impl Fn(&[u32]) -> Result<(), Stays>,
) -> Result<(), Unplaced> {
    let readers: Vec<u32> = opened.plan.readers(place).collect();
    let attempt = || match alone() {
        Some(_alone) => exchange(&readers),
        None => Err(Stays::InUse),
    };
    let answer = attempt();
    let has_none = matches!(answer, Err(Stays::NoRoom | Stays::Refused(CuResult::OUT_OF_MEMORY)));
    let answer = if has_none && opened.pool.trim(Some(place), Some(bytes), &[]) > 0 { attempt() } else { answer };
    answer.map_err(|stays| unplaced(stays, bytes, place))
}

/// Moves what [`all`] says is mapped at `start`, while what `alone` gives is held: nobody else uses it then. Freed memory of the pool makes room at the
/// place.
///
/// # Errors
/// It stays; why.
pub fn move_behind<A>(
    driver: &Driver,
    opened: &Opened,
    start: u64,
    bytes: u64,
    place: Place,
    asked: u32,
    alone: impl Fn() -> Option<A>,
) -> Result<(), Unplaced> {
    move_much(driver, opened, (start, Much::Each), bytes, place, asked, alone)
}

fn move_much<A>(
    driver: &Driver,
    opened: &Opened,
    which: (u64, Much),
    bytes: u64,
    place: Place,
    asked: u32,
    alone: impl Fn() -> Option<A>,
) -> Result<(), Unplaced> {
    let copier = copier(driver, opened, asked, place);
    let inward = place == Place::Gpu(asked);
    let copy = |to: u64, from: u64, bytes: u64| {
        copied(opened, copier, &[Transfer { from, to, bytes, inward, stored: false, between: false }])
    };
    let readers = |place: Place| opened.plan.readers(place).collect();
    let moves = |_: &[u32]| exchange::move_to(driver, which, place, &readers, copier, copy);
    to_place(opened, place, bytes, alone, moves)
}

/// Moves the part that begins at an address, which nobody uses: the caller has stopped the program. `is_quiet` is asked between the copy and
/// the moment from which the old memory is not there any more.
///
/// # Errors
/// It stays; why. `CUDA_ERROR_NOT_READY`: somebody used it after all.
pub fn move_part(
    driver: &Driver,
    opened: &Opened,
    piece: &OwnPiece,
    place: Place,
    mut is_quiet: impl FnMut() -> bool,
) -> Result<(), Unplaced> {
    let &OwnPiece { start, bytes, asked, .. } = piece;
    let copier = copier(driver, opened, asked, place);
    let inward = place == Place::Gpu(asked);
    let is_other = |place: Place| matches!(place, Place::Gpu(gpu) if gpu != copier);
    let between = is_other(piece.place) && is_other(place);
    let is_quiet = std::cell::RefCell::new(&mut is_quiet);
    let copy = |to: u64, from: u64, bytes: u64| {
        let result = copied(opened, copier, &[Transfer { from, to, bytes, inward, stored: false, between }]);
        if result.is_ok() && !(is_quiet.borrow_mut())() { CuResult::NOT_READY } else { result }
    };
    let readers = |place: Place| opened.plan.readers(place).collect();
    let moves = |_: &[u32]| exchange::move_to(driver, (start, Much::Part), place, &readers, copier, copy);
    to_place(opened, place, bytes, || Some(()), moves)
}

/// The parts of the program's own memory that have something of a range, each whole, in order of address. What is mapped in part is one, and stays.
pub fn pieces(address: u64, bytes: u64) -> Vec<OwnPiece> {
    if may_be_own(address) || may_be_own(address.saturating_add(bytes).saturating_sub(1)) {
        with_inventory(|inventory| inventory.own_pieces(address, bytes))
    } else {
        Vec::new()
    }
}

/// Bytes at a place that are in no account: they went where they were asked to go, and no limit counts them.
pub fn uncharged_at(place: Place) -> u64 {
    if super::is_any() { with_inventory(|inventory| inventory.uncharged_at(place)) } else { 0 }
}

/// What whoever moves it is told, and the log of what is lost.
fn unplaced(stays: Stays, bytes: u64, place: Place) -> Unplaced {
    match stays {
        Stays::Unknown => Unplaced::NotOurs,
        Stays::Imported | Stays::Anchored(_) | Stays::MappedInPart | Stays::InUse => Unplaced::Stayed,
        Stays::NoRoom => Unplaced::NoRoom,
        Stays::Refused(result) => Unplaced::Refused(result),
        Stays::Lost(result, at) => {
            tracing::error!(
                target: "gpupool::memory", about = "vmm.lost",
                "memory of the program's own was to go to {place}: cuMemMap of {} at {at:#x} answered {result}, also for what had \
                 been there before; nothing is mapped there any more, and its contents are lost. What uses it fails; end the program",
                format_size(bytes)
            );
            Unplaced::Refused(result)
        }
    }
}

fn error_of(fault: Fault<CuResult>) -> CuResult {
    match fault {
        Fault::OutOfMemory(result) | Fault::Unavailable(result) | Fault::NotReady(result) | Fault::Failed(result) => {
            result
        }
    }
}
