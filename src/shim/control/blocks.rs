//! What is known of one block, and what can be asked of it.

use super::statistics::{number_of, place_of};
use super::{gpupool_error, looking};
use crate::address::{self, Known};
use crate::process;
use crate::serve::handles;
use crate::serve::managed;
use crate::serve::memory::{self, by_hand, by_hand::Unplaced};
use gpupool_cuda::{CuResult, Driver, Stream};
use gpupool_pool::Place;
use std::ffi::{c_int, c_uint, c_void};

/// A part of a block that lies at one place.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct gpupool_piece {
    /// Its first byte.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// Where it is: a GPU's CUDA ordinal, or -1 less the number of a host NUMA node; `INT_MIN` on a disk, while the program is
    /// suspended to one.
    pub place: c_int,
    /// Why it must stay on the physical memory it is on, 0 where it may move: 1 shared with other processes by CUDA IPC, 2
    /// its physical handle was retained, 4 a descriptor of it was given out, 8 `gpupool_anchor` or
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`; added up.
    pub anchors: c_uint,
}

/// What can be said of memory; the numbers of `CUmem_advise`. What each means for memory of the pool: see `gpupool_advise`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
#[allow(dead_code, reason = "programs name them; here the number goes on to the driver")]
pub enum gpupool_advice {
    /// Mostly read: every processor that reads gets a copy. The place means nothing.
    GPUPOOL_READ_MOSTLY = 1,
    /// Takes `GPUPOOL_READ_MOSTLY` back.
    GPUPOOL_NOT_READ_MOSTLY = 2,
    /// Keep it at the place, and let others that can reach it there.
    GPUPOOL_PREFERRED_LOCATION = 3,
    /// Takes `GPUPOOL_PREFERRED_LOCATION` back. The place means nothing.
    GPUPOOL_NO_PREFERRED_LOCATION = 4,
    /// Map it for the processor at the place, wherever it is.
    GPUPOOL_ACCESSED_BY = 5,
    /// Takes `GPUPOOL_ACCESSED_BY` back.
    GPUPOOL_NOT_ACCESSED_BY = 6,
}

/// Writes where the parts of `bytes` from `pointer` on lie, in address order, as far as the block that `pointer` lies in
/// goes; of managed memory, where it was placed. `count` holds the room of `pieces` before the call, and how many there are
/// after it. Returns 0 or a `gpupool_error`; memory that the driver serves is `GPUPOOL_NOT_POOLED`.
///
/// # Safety
/// `count` points to a number or is NULL, and `pieces` has room for that many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_pieces(
    pointer: *const c_void,
    bytes: usize,
    pieces: *mut gpupool_piece,
    count: *mut usize,
) -> c_int {
    if count.is_null() || bytes == 0 {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    let found = match looking(|| merged(pointer as u64, bytes as u64)) {
        Ok(found) => found,
        Err(error) => return error.into(),
    };
    // SAFETY: not NULL, and the caller's.
    let room = if pieces.is_null() { 0 } else { unsafe { *count } };
    for (index, piece) in found.iter().enumerate().take(room) {
        // SAFETY: `index` is below what the caller has room for.
        unsafe { pieces.add(index).write(*piece) };
    }
    // SAFETY: as above.
    unsafe { *count = found.len() };
    0
}

/// The pieces, neighbours of one kind in one.
fn merged(address: u64, bytes: u64) -> Result<Vec<gpupool_piece>, gpupool_error> {
    // The frames behind its last byte are the pool's affair.
    let left = memory::block_at(address).map_or(0, |block| block.address + block.bytes - address);
    let pooled = memory::pieces(address, bytes.min(left)).into_iter().map(|piece| gpupool_piece {
        address: piece.address,
        bytes: piece.bytes,
        place: number_of(piece.place),
        anchors: piece.anchors.bits().into(),
    });
    let managed = managed::parts(address, bytes).into_iter().map(|(place, address, bytes)| gpupool_piece {
        address,
        bytes,
        place: number_of(place),
        anchors: 0,
    });
    let mut merged: Vec<gpupool_piece> = Vec::new();
    for piece in pooled.chain(managed) {
        match merged.last_mut().filter(|last| (last.place, last.anchors) == (piece.place, piece.anchors)) {
            Some(last) => last.bytes += piece.bytes,
            None => merged.push(piece),
        }
    }
    if merged.is_empty() { Err(gpupool_error::GPUPOOL_NOT_POOLED) } else { Ok(merged) }
}

/// Keeps `bytes` from `pointer` on, which must lie in one block, on the physical memory that they are on, until
/// `gpupool_release_anchor` or the end of the block: for memory that something outside CUDA knows by its physical pages, as a network
/// adapter does. `gpupool_prefetch` leaves it where it is. Returns 0 or a `gpupool_error`.
///
/// # Safety
/// None: any address may be asked about.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_anchor(pointer: *const c_void, bytes: usize) -> c_int {
    answer(|| memory::anchor(pointer as u64, bytes as u64, gpupool_pool::Anchor::Asked), bytes)
}

/// Takes back one `gpupool_anchor` of exactly this range. Returns 0 or a `gpupool_error`, of a range that has no such anchor `GPUPOOL_NOT_POOLED`.
///
/// # Safety
/// None: any address may be asked about.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_release_anchor(pointer: *const c_void, bytes: usize) -> c_int {
    answer(|| memory::release_anchor(pointer as u64, bytes as u64), bytes)
}

fn answer(act: impl FnOnce() -> bool + std::panic::UnwindSafe, bytes: usize) -> c_int {
    if bytes == 0 {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    match looking(|| if act() { Ok(()) } else { Err(gpupool_error::GPUPOOL_NOT_POOLED) }) {
        Ok(()) => 0,
        Err(error) => error.into(),
    }
}

/// Gives advice (a `gpupool_advice`) on `bytes` from `pointer` on.
///
/// Of memory of the pool, `GPUPOOL_PREFERRED_LOCATION` moves the range to the place and has it stay there, for as long as `gpupool_prefetch` does.
/// `GPUPOOL_NO_PREFERRED_LOCATION` moves nothing; from then on `GPUPOOL_MOVE` may. `GPUPOOL_ACCESSED_BY` answers 0
/// where the GPU can reach the memory, which it may use as soon as it has a context, and `GPUPOOL_NOT_SUPPORTED` where it cannot, and for the host;
/// `GPUPOOL_NOT_ACCESSED_BY` changes nothing and answers 0. A GPU that the program does not see is `GPUPOOL_INVALID_ARGUMENT` for both. There is one copy of memory of the pool, so that
/// `GPUPOOL_READ_MOSTLY` and `GPUPOOL_NOT_READ_MOSTLY` are `GPUPOOL_NOT_SUPPORTED`.
///
/// Memory that the program made by `cuMemCreate` goes to a `GPUPOOL_PREFERRED_LOCATION`, too; other advice on it is the driver's to
/// answer. On managed memory, gpupool's or the program's own, it is `cuMemAdvise` with a place; so it is on plain memory of the process where
/// the driver places that, too (`CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS`). All else is `GPUPOOL_NOT_POOLED`: other memory that the driver
/// serves, freed memory, an address where there is no memory, NULL, and a range that goes on past the end of the block of the pool that it begins in.
/// Returns 0, a `CUresult` or a `gpupool_error`.
///
/// # Safety
/// What is said of memory of the pool at `gpupool_prefetch`, where it moves; any address may be asked about.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_advise(pointer: *const c_void, bytes: usize, advice: c_int, place: c_int) -> c_int {
    use gpupool_advice::*;
    // The enum of C has no gaps, and its numbers are the driver's.
    if !(GPUPOOL_READ_MOSTLY as c_int..=GPUPOOL_NOT_ACCESSED_BY as c_int).contains(&advice) {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    // Whosever the memory is: the driver would answer for managed memory, and for an address that nobody knows, with words of its own.
    if bytes == 0 {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    let (address, bytes, place) = (pointer as u64, bytes as u64, place_of(place));
    if advice == GPUPOOL_PREFERRED_LOCATION as c_int && is_own(address) {
        return of_pool(|driver| handles::by_hand::place(driver, address, bytes, place, Stream::DEFAULT));
    }
    if advice == GPUPOOL_NO_PREFERRED_LOCATION as c_int && is_own(address) {
        return of_pool(|_| {
            handles::by_hand::is_anywhere(address, bytes);
            Ok(())
        });
    }
    if !is_pooled(address) {
        return of_managed(address, |driver| driver.advise(address, bytes, advice, place));
    }
    of_pool(|driver| match advice {
        _ if !by_hand::is_in_one_block(address, bytes) => Err(Unplaced::NotOurs),
        it if it == GPUPOOL_PREFERRED_LOCATION as c_int => {
            by_hand::place(driver, address, bytes, place, Stream::DEFAULT)
        }
        it if it == GPUPOOL_ACCESSED_BY as c_int => match place {
            Place::Gpu(gpu) if by_hand::is_reached(address, bytes, gpu)? => Ok(()),
            Place::Gpu(_) | Place::Host(_) | Place::Disk | Place::Pageable => Err(Unplaced::OutOfReach),
        },
        it if it == GPUPOOL_NOT_ACCESSED_BY as c_int => match place {
            Place::Gpu(gpu) => by_hand::is_reached(address, bytes, gpu).map(|_| ()),
            Place::Host(_) | Place::Disk | Place::Pageable => Ok(()),
        },
        it if it == GPUPOOL_NO_PREFERRED_LOCATION as c_int => by_hand::is_anywhere(address, bytes),
        _ => Err(Unplaced::OutOfReach),
    })
}

/// Moves `bytes` from `pointer` on, which must lie in one block, to a place.
///
/// Memory of the pool lies there when the call returns; its addresses and contents stay. `GPUPOOL_MOVE=auto` moves other memory by itself and leaves this
/// where it is. It leaves that place where the program says something else, for a drain, a suspension, a lower limit or a GPU that lends no more
/// (`gpupool set`), and where another program needs the GPU. What moves are the pages of 2 MiB that lie wholly in the range, the last one of a block included where the range has the block's last byte. The call waits for all
/// work that was submitted before, on every GPU. Nothing may use the chunks (`gpupool_pieces`) that the range touches from the call to its
/// return, and nobody may free their block; all other memory may be in use, also by kernels that run meanwhile. Room for both copies is
/// needed while they are made. A chunk that the range covers in part is divided: the rest of it stays at its place and needs room
/// there once more. What stays elsewhere is told by `GPUPOOL_STAYED`: memory that must keep its physical pages, chunks that
/// another block stands on, too, and a range without a whole page; the other chunks moved. What lies at the place already is 0, whatever it is. Freed memory on a chunk that moves goes
/// with what the chunk vacates: back to the driver, or to the next move, and is freed memory of the pool until then. Where a place has
/// no room the answer is 2 (`CUDA_ERROR_OUT_OF_MEMORY`), and while any stream is being captured 900
/// (`CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`); then nothing has moved. A place that the block's GPU cannot reach or may not borrow from is
/// `GPUPOOL_NOT_SUPPORTED`, and one that the settings have left out of the pool (`GPUPOOL_DEVICES`, `GPUPOOL_HOST_LIMIT=0`) `GPUPOOL_INVALID_ARGUMENT`.
///
/// Memory that the program made by `cuMemCreate` moves in the same way, a whole handle at a time wherever it is mapped: the handles of
/// which a mapping lies wholly in the range. Nothing may use them meanwhile, at any of their addresses. Numbers, addresses, contents and
/// what the driver says of them stay the program's. Handles that another process made, of which one was given a descriptor, that
/// are mapped in part or that only one place can have are `GPUPOOL_STAYED`, and so is a range with no more than a part of a mapping; what this process made and lies
/// at the place already is 0.
///
/// Managed memory, gpupool's or the program's own, moves in the order of the stream: `cuMemPrefetchAsync`; plain memory of the process, too, where
/// the driver places that. Other memory that the driver serves, as small blocks for which the pool had no room, stays where it is:
/// `GPUPOOL_NOT_POOLED`, which is the answer, too, for freed memory, an address where there is no memory, NULL, and a range that goes on past the end of the
/// block of the pool that it begins in.
/// Returns 0, a `CUresult` or a `gpupool_error`.
///
/// # Safety
/// `stream` is a stream of the current context, or NULL; what is said above of the memory of the pool holds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_prefetch(
    pointer: *const c_void,
    bytes: usize,
    place: c_int,
    stream: *mut c_void,
) -> c_int {
    // As for `gpupool_advise`.
    if bytes == 0 {
        return gpupool_error::GPUPOOL_INVALID_ARGUMENT.into();
    }
    let (address, bytes) = (pointer as u64, bytes as u64);
    let (place, stream) = (place_of(place), Stream::from_raw(stream.cast()));
    if is_pooled(address) {
        return of_pool(|driver| by_hand::place(driver, address, bytes, place, stream));
    }
    if is_own(address) {
        return of_pool(|driver| handles::by_hand::place(driver, address, bytes, place, stream));
    }
    // SAFETY: as for this function.
    of_managed(address, |driver: &Driver| unsafe { driver.prefetch(address, bytes, place, stream) })
}

fn is_pooled(address: u64) -> bool {
    looking(|| Ok(matches!(address::known(address), Known::Pooled(_)))) == Ok(true)
}

/// Whether the program made what is mapped there by `cuMemCreate`, in whichever way.
fn is_own(address: u64) -> bool {
    looking(|| Ok(handles::by_hand::is_own(address))) == Ok(true)
}

/// Runs what places memory of the pool, or of the program's own.
fn of_pool(act: impl FnOnce(&'static Driver) -> Result<(), Unplaced> + std::panic::UnwindSafe) -> c_int {
    let answer = looking(|| {
        let driver = process::driver().ok_or(gpupool_error::GPUPOOL_NOT_ACTIVE)?;
        match act(driver) {
            Ok(()) => Ok(0),
            Err(Unplaced::NoRoom) => Ok(CuResult::OUT_OF_MEMORY.0),
            Err(Unplaced::Refused(result)) => Ok(result.0),
            Err(Unplaced::NotOurs) => Err(gpupool_error::GPUPOOL_NOT_POOLED),
            Err(Unplaced::NoPlace) => Err(gpupool_error::GPUPOOL_INVALID_ARGUMENT),
            Err(Unplaced::OutOfReach) => Err(gpupool_error::GPUPOOL_NOT_SUPPORTED),
            Err(Unplaced::Stayed) => Err(gpupool_error::GPUPOOL_STAYED),
            Err(Unplaced::OverBudget) => Err(gpupool_error::GPUPOOL_OVER_BUDGET),
        }
    });
    answer.unwrap_or_else(c_int::from)
}

/// Asks the driver, unless the memory is the pool's or certainly neither managed nor the program's own. What CUDA knows nothing of may be the driver's to move:
/// some machines have it move any memory of the process. Where it does not, its word for that is one that it has for much else.
fn of_managed(address: u64, ask: impl Fn(&Driver) -> CuResult + std::panic::RefUnwindSafe) -> c_int {
    let answer = looking(|| match address::known(address) {
        Known::Pooled(_) => Err(gpupool_error::GPUPOOL_NOT_SUPPORTED),
        Known::Freed | Known::Pinned(_) => Err(gpupool_error::GPUPOOL_NOT_POOLED),
        known @ (Known::Managed(_) | Known::Foreign) => {
            let driver = process::driver().ok_or(gpupool_error::GPUPOOL_NOT_ACTIVE)?;
            let managed = if matches!(known, Known::Foreign) { driver.is_managed(address) } else { Ok(true) };
            let is_unknown = managed == Err(CuResult::INVALID_VALUE);
            if address == 0 || managed == Ok(false) && !handles::by_hand::is_own(address) {
                return Err(gpupool_error::GPUPOOL_NOT_POOLED);
            }
            match ask(driver) {
                CuResult::INVALID_VALUE if is_unknown => Err(gpupool_error::GPUPOOL_NOT_POOLED),
                result => Ok(result),
            }
        }
    });
    match answer {
        Ok(result) => result.0,
        Err(error) => error.into(),
    }
}
