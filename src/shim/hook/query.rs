//! Bodies: what a program asks about memory. Pooled device memory answers as one ordinary allocation of the device that was
//! current when it was made, wherever its pieces are; pooled pinned memory as one of the host, whatever else the driver
//! pinned with it.

use super::{Real, boundary};
use crate::address::{self, Known};
use crate::bypass::{Answer, Bypass, or_driver};
use crate::process;
use crate::serve::memory::{memops, mempool};
use crate::serve::{handles, ipc, mem_get_info};
use crate::watch::context;
use cudarc::driver::sys::{CUdevice, CUdeviceptr};
use gpupool_cuda::{CuResult, Device, Driver};
use gpupool_interpose::Api;
use gpupool_pool::{Block, FRAME};
use std::ffi::{c_int, c_uint, c_void};

/// `CUpointer_attribute` values that are answered for the block; the others are the driver's to answer.
mod kind {
    pub const CONTEXT: i32 = 1;
    pub const MEMORY_TYPE: i32 = 2;
    pub const DEVICE_POINTER: i32 = 3;
    pub const HOST_POINTER: i32 = 4;
    pub const SYNC_MEMOPS: i32 = 6;
    pub const BUFFER_ID: i32 = 7;
    pub const IS_MANAGED: i32 = 8;
    pub const DEVICE_ORDINAL: i32 = 9;
    pub const IS_LEGACY_IPC_CAPABLE: i32 = 10;
    pub const RANGE_START: i32 = 11;
    pub const RANGE_SIZE: i32 = 12;
    pub const MAPPED: i32 = 13;
    pub const ALLOWED_HANDLE_TYPES: i32 = 14;
    pub const ACCESS_FLAGS: i32 = 16;
    pub const MEMPOOL_HANDLE: i32 = 17;
    pub const MAPPING_SIZE: i32 = 18;
    pub const MAPPING_BASE: i32 = 19;
    pub const MEMORY_BLOCK_ID: i32 = 20;
}

/// Which of these questions are answered by what is known of an address, so that no move changes the answer and nobody has to wait for one that is under way, or for a
/// program's resumption: by none of them is the driver asked about memory that may be mapped elsewhere now, or nowhere.
pub mod known {
    use super::{CUdeviceptr, Known, address, told_of_device};
    use std::ffi::{c_int, c_uint, c_void};

    /// Whether what is known of device memory has this attribute, and no move changes it.
    fn is_of_block(attribute: c_int) -> bool {
        told_of_device(attribute).is_some_and(|told| !told.changes)
    }

    /// # Safety
    /// None: it is one so that all rows have their question asked in the same way.
    pub unsafe fn pointer_attribute(data: *mut c_void, attribute: c_int, ptr: CUdeviceptr) -> bool {
        match address::known(ptr) {
            _ if data.is_null() => false,
            Known::Pooled(_) => is_of_block(attribute),
            // Pinned memory never moves, whoever answers.
            Known::Freed | Known::Pinned(_) => true,
            Known::Managed(_) | Known::Foreign => false,
        }
    }

    /// # Safety
    /// As of [`super::pointer_attributes`].
    pub unsafe fn pointer_attributes(
        count: c_uint,
        attributes: *mut c_int,
        data: *mut *mut c_void,
        ptr: CUdeviceptr,
    ) -> bool {
        if attributes.is_null() || data.is_null() {
            return false;
        }
        match address::known(ptr) {
            Known::Pooled(_) => (0..count as usize).all(|index| {
                // SAFETY: the caller vouches for as many attributes and pointers, neither list is NULL.
                let (attribute, output) = unsafe { (*attributes.add(index), *data.add(index)) };
                is_of_block(attribute) && !output.is_null()
            }),
            // Of what is freed the driver is asked by no address.
            Known::Freed | Known::Pinned(_) => true,
            Known::Managed(_) | Known::Foreign => false,
        }
    }

    /// # Safety
    /// None: it is one so that all rows have their question asked in the same way.
    pub unsafe fn address_range(_: *mut CUdeviceptr, _: *mut usize, ptr: CUdeviceptr) -> bool {
        // Managed memory has a range of its own, too. Without a context the driver says that, and looks at no address.
        !matches!(address::known(ptr), Known::Foreign)
    }
}

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE_MEMORY: u32 = 2;

/// Block ids start here, so that they never equal a buffer id of the driver's, which counts up from 1.
const FIRST_BUFFER_ID: u64 = 1 << 48;
/// Buffer ids of blocks of pinned memory begin here.
const FIRST_PINNED_ID: u64 = 1 << 49;

/// # Safety
/// The pointers are the program's output arguments of that call.
pub unsafe fn memory_info(real: &mut Real, free: *mut usize, total: *mut usize) -> CuResult {
    let result = real.call();
    if !result.is_ok() {
        return result;
    }
    let (pool_free, pool_total) = match mem_get_info::memory_info() {
        Ok(info) => info,
        Err(why) => {
            if !free.is_null() && matches!(why, Bypass::InfoOfDevice) {
                // SAFETY: not NULL, and the driver has just written to it.
                unsafe { *free = (*free as u64).saturating_add(mem_get_info::freed_here()) as usize };
            }
            why.note(real.api);
            return result;
        }
    };
    // SAFETY: the driver takes NULL for either; what is not NULL it has just written to.
    unsafe {
        if !free.is_null() {
            *free = pool_free as usize;
        }
        if !total.is_null() {
            *total = pool_total as usize;
        }
    }
    result
}

/// # Safety
/// `bytes` is the program's output argument of that call.
pub unsafe fn total_memory(real: &mut Real, bytes: *mut usize, device: CUdevice) -> CuResult {
    let result = real.call();
    if !result.is_ok() || bytes.is_null() {
        return result;
    }
    match mem_get_info::total_memory(Device::from_raw(device)) {
        // SAFETY: not NULL, and the driver has just written to it.
        Ok(total) => unsafe { *bytes = total as usize },
        Err(why) => why.note(real.api),
    }
    result
}

/// # Safety
/// `data` has room for a `T`, the C type of the attribute that is asked for.
unsafe fn put<T>(data: *mut c_void, value: T) {
    // SAFETY: as above; unaligned because the program only promised room.
    unsafe { data.cast::<T>().write_unaligned(value) };
}

/// After a question that the driver alone could answer ([`address::stays_the_drivers`]).
#[inline]
pub fn passed_on(api: Api, result: CuResult) {
    if tracing::enabled!(target: "gpupool::call", tracing::Level::TRACE) {
        process::contained(api, || Bypass::NotOurs.note(api));
    }
    boundary::trace(api, result);
}

/// Writes one attribute of what is known of `ptr`.
///
/// # Safety
/// `data` is not NULL and has room for this attribute, as the driver demands; of foreign memory the driver has written it.
unsafe fn write_attribute(data: *mut c_void, attribute: c_int, ptr: CUdeviceptr, known: &Known) -> Answer<CuResult> {
    // SAFETY: as for this function.
    unsafe {
        match known {
            Known::Foreign => as_asked_for(data, attribute, ptr),
            Known::Freed => Ok(CuResult::INVALID_VALUE),
            Known::Pooled(block) => write_of_device(data, attribute, ptr, block, false),
            Known::Managed(block) => write_of_device(data, attribute, ptr, block, true),
            Known::Pinned(block) => write_of_pinned(data, attribute, block),
        }
    }
}

/// What the driver does not know: which part of its allocation this is. The rest, a block has in common with its segment.
///
/// # Safety
/// `data` has room for the value of this attribute.
unsafe fn write_of_pinned(data: *mut c_void, attribute: c_int, block: &gpupool_pinned::Block) -> Answer<CuResult> {
    let value = value_of_pinned(attribute, block).ok_or(Bypass::NothingToHide)?;
    // SAFETY: each of these is a number of 64 bits, and `data` has room for it.
    unsafe { put::<u64>(data, value) };
    Ok(CuResult::SUCCESS)
}

/// The attribute of a block of pinned memory, where it has that by itself.
fn value_of_pinned(attribute: c_int, block: &gpupool_pinned::Block) -> Option<u64> {
    use kind as a;
    match attribute {
        a::RANGE_START | a::MAPPING_BASE => Some(block.address),
        a::RANGE_SIZE => Some(block.bytes),
        a::BUFFER_ID | a::MEMORY_BLOCK_ID => Some(FIRST_PINNED_ID + block.id),
        _ => None,
    }
}

/// What is told of an attribute of device memory, in the size of its C type in cuda.h.
enum Value {
    Word(u32),
    Long(u64),
    /// Such memory does not have it.
    Absent,
}

/// An attribute of device memory that is answered for the block.
struct Told {
    /// Of an address in a block, and whether the driver manages that. `None`: what the driver says of it is right.
    value: fn(CUdeviceptr, &Block, bool) -> Option<Value>,
    /// Whether it changes when the block moves, and so is not to be told while that is under way or the program is suspended.
    changes: bool,
}

impl Told {
    const fn of(value: fn(CUdeviceptr, &Block, bool) -> Option<Value>) -> Option<Self> {
        Some(Self { value, changes: false })
    }
}

/// The one table of what is answered for blocks of device memory, by attribute; the others are the driver's to answer.
fn told_of_device(attribute: c_int) -> Option<Told> {
    use Value::{Absent, Long, Word};
    use kind as a;
    match attribute {
        // Memory of the driver's stream-ordered pools is a pool's and no context's (measured), also where a block stands in for it. That such a block can be shared by
        // CUDA IPC is true of it, which that memory cannot be.
        a::CONTEXT => Told::of(|_, block, _| {
            let handle = context::handle_of(block.owner).filter(|_| mempool::behind(block).is_none());
            Some(Long(handle.map_or(0, |handle| handle.raw() as u64)))
        }),
        a::MEMPOOL_HANDLE => Told::of(|_, block, managed| {
            (!managed).then(|| Long(mempool::behind(block).map_or(0, |pool| pool.raw() as u64)))
        }),
        a::MEMORY_TYPE => Told::of(|_, _, _| Some(Word(DEVICE_MEMORY))),
        a::DEVICE_POINTER => Told::of(|ptr, _, _| Some(Long(ptr))),
        a::HOST_POINTER => Told::of(|_, _, _| Some(Absent)),
        // Managed memory of the driver's has it by itself, and keeps what it is set to.
        a::SYNC_MEMOPS => Told::of(|_, block, managed| (!managed).then(|| Word(memops::is_set(block).into()))),
        a::BUFFER_ID => Told::of(|_, block, _| Some(Long(FIRST_BUFFER_ID + block.id))),
        // What could be hidden of it is not worth a lie: the processor may use the memory, and tools ask.
        a::IS_MANAGED => Told::of(|_, _, managed| (!managed).then_some(Word(0))),
        // By the handles behind the block, which are others once it has moved.
        a::IS_LEGACY_IPC_CAPABLE => Some(Told {
            value: |_, block, managed| Some(Word((!managed && ipc::is_shareable(block)).into())),
            changes: true,
        }),
        a::DEVICE_ORDINAL => Told::of(|_, block, _| Some(Word(block.home))),
        a::RANGE_START => Told::of(|_, block, _| Some(Long(block.address))),
        a::RANGE_SIZE => Told::of(|_, block, _| Some(Long(block.bytes))),
        a::MAPPING_BASE => Told::of(|_, block, _| Some(Long(frames_around(block).0))),
        a::MAPPING_SIZE => Told::of(|_, block, _| Some(Long(frames_around(block).1))),
        a::MAPPED => Told::of(|_, _, _| Some(Word(1))),
        // By the documentation those that cuMemExportToShareableHandle takes, and of a block the program has no handle. What is behind it has one, which blocks
        // are shared by.
        a::ALLOWED_HANDLE_TYPES => Told::of(|_, _, managed| (!managed).then_some(Long(0))),
        a::ACCESS_FLAGS => Told::of(|_, _, _| Some(Word(3))),
        _ => None,
    }
}

/// # Safety
/// `data` has room for the value of this attribute.
unsafe fn write_of_device(
    data: *mut c_void,
    attribute: c_int,
    ptr: CUdeviceptr,
    block: &Block,
    managed: bool,
) -> Answer<CuResult> {
    let value = told_of_device(attribute).and_then(|told| (told.value)(ptr, block, managed));
    // SAFETY: the value has the size of the attribute's C type, and `data` has room for it.
    unsafe {
        match value.ok_or(Bypass::NothingToHide)? {
            Value::Word(word) => put(data, word),
            Value::Long(long) => put(data, long),
            Value::Absent => return Ok(CuResult::INVALID_VALUE),
        }
    }
    Ok(CuResult::SUCCESS)
}

/// First byte and size of the mapping around a block, as a program knows them of the driver's own: a block that is no smaller than
/// a frame is one by itself, and a smaller one lies in frames that others share (measured).
fn frames_around(block: &Block) -> (u64, u64) {
    let Block { address, bytes, .. } = *block;
    if address.is_multiple_of(FRAME) && bytes >= FRAME {
        return (address, bytes);
    }
    let start = address / FRAME * FRAME;
    (start, (address + bytes).next_multiple_of(FRAME) - start)
}

/// Corrects one attribute of memory that the program made itself (`cuMemCreate`) and that lies elsewhere than it asked for, or is made of
/// parts: of these the driver names the part where the program mapped one handle, of which it would name all (measured: `probe_ranges`).
///
/// # Safety
/// `data` has room for the value of this attribute, and the driver has written it there.
unsafe fn as_asked_for(data: *mut c_void, attribute: c_int, ptr: CUdeviceptr) -> Answer<CuResult> {
    if matches!(attribute, kind::MAPPING_BASE | kind::MAPPING_SIZE) {
        let (start, bytes) = handles::range_at(ptr).ok_or(Bypass::NotOurs)?;
        // SAFETY: both are numbers of 64 bits, and `data` has room for one.
        unsafe { put::<u64>(data, if attribute == kind::MAPPING_BASE { start } else { bytes }) };
        return Ok(CuResult::SUCCESS);
    }
    let (device, place) = handles::elsewhere_at(ptr).ok_or(Bypass::NotOurs)?;
    // SAFETY: the types are the C types of these attributes; unaligned because the program only promised room.
    unsafe {
        match attribute {
            kind::DEVICE_ORDINAL => data.cast::<u32>().write_unaligned(device),
            kind::MEMORY_TYPE => data.cast::<u32>().write_unaligned(DEVICE_MEMORY),
            kind::HOST_POINTER if place.is_host() => return Ok(CuResult::INVALID_VALUE),
            _ => return Err(Bypass::NothingToHide),
        }
    }
    Ok(CuResult::SUCCESS)
}

/// Has `write` correct every attribute that has an output. Asked for together, what memory does not have is not an error
/// but 0. If none was corrected, why the last one was not.
///
/// # Safety
/// The driver answered success to `cuPointerGetAttributes` with these arguments: it read `count` attributes and wrote
/// through as many pointers.
unsafe fn rewrite(
    count: c_uint,
    attributes: *const c_int,
    data: *const *mut c_void,
    write: impl Fn(*mut c_void, c_int) -> Answer<CuResult>,
) -> Answer<()> {
    let mut outcome = Ok(());
    let mut corrected = false;
    for index in 0..count as usize {
        // SAFETY: as above.
        let (attribute, output) = unsafe { (*attributes.add(index), *data.add(index)) };
        if output.is_null() {
            continue;
        }
        match write(output, attribute) {
            Ok(result) => {
                corrected = true;
                if !result.is_ok() {
                    // SAFETY: the attributes that some memory does not have are pointers.
                    unsafe { output.cast::<u64>().write_unaligned(0) };
                }
            }
            Err(why) => outcome = Err(why),
        }
    }
    if corrected { Ok(()) } else { outcome }
}

/// Answers all of these attributes of the pool's memory without the driver, which takes longer the larger its chunks are; or none, where one of
/// them is the driver's to say: nothing is written then. Whether it did.
///
/// # Safety
/// As of [`pointer_attributes`], and neither list is NULL.
unsafe fn answers_all(
    count: c_uint,
    attributes: *const c_int,
    data: *const *mut c_void,
    ptr: CUdeviceptr,
    known: &Known,
) -> bool {
    if count == 0 || !matches!(known, Known::Pooled(_)) {
        return false;
    }
    let mut scratch = 0_u64;
    for is_meant in [false, true] {
        for index in 0..count as usize {
            // SAFETY: the caller vouches for as many attributes and pointers.
            let (attribute, output) = unsafe { (*attributes.add(index), *data.add(index)) };
            if output.is_null() {
                return false;
            }
            let target = if is_meant { output } else { (&raw mut scratch).cast() };
            // SAFETY: the program's output has room for this attribute; no attribute that is answered here is larger than eight bytes.
            match unsafe { write_attribute(target, attribute, ptr, known) } {
                // SAFETY: the attributes that some memory does not have are pointers.
                Ok(result) if is_meant && !result.is_ok() => unsafe { output.cast::<u64>().write_unaligned(0) },
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }
    true
}

/// # Safety
/// `data` is the program's output argument of that call.
pub unsafe fn pointer_attribute(real: &mut Real, data: *mut c_void, attribute: c_int, ptr: CUdeviceptr) -> CuResult {
    if data.is_null() {
        Bypass::Malformed.note(real.api);
        return real.call();
    }
    let known = address::known(ptr);
    // What the pool does not know, the driver answers first.
    if matches!(known, Known::Foreign) {
        let result = real.call();
        // SAFETY: `data` is not NULL and the program's for this attribute, and looked at only where the driver has written to it.
        let answer = if result.is_ok() { unsafe { as_asked_for(data, attribute, ptr) } } else { Err(Bypass::NotOurs) };
        return or_driver(answer, real.api, || result);
    }
    let answer = match context::is_driver_gone() {
        true => Err(Bypass::ContextGone),
        // SAFETY: `data` is not NULL and the program's for this attribute.
        false => unsafe { write_attribute(data, attribute, ptr, &known) },
    };
    or_driver(answer, real.api, || real.call())
}

/// # Safety
/// `attributes` and `data` are the program's arguments of that call.
pub unsafe fn pointer_attributes(
    real: &mut Real,
    count: c_uint,
    attributes: *mut c_int,
    data: *mut *mut c_void,
    ptr: CUdeviceptr,
) -> CuResult {
    if attributes.is_null() || data.is_null() {
        return real.call();
    }
    let known = address::known(ptr);
    if matches!(known, Known::Freed) {
        // The defaults that the driver writes for an address that is nobody's, such as 0.
        // SAFETY: the program's own arguments but for the address.
        let defaults = |driver: &Driver| unsafe { driver.attributes(count, attributes, data, 0) };
        return context::driver().map(defaults).unwrap_or_else(|| real.call());
    }
    if matches!(known, Known::Pooled(_)) && context::is_driver_gone() {
        Bypass::ContextGone.note(real.api);
        return real.call();
    }
    // SAFETY: the program's own arguments, neither of which is NULL.
    if unsafe { answers_all(count, attributes, data, ptr, &known) } {
        return CuResult::SUCCESS;
    }
    let result = real.call();
    if !result.is_ok() {
        return result;
    }
    // What the runtime asks for of each pointer is among that which a block has in common with its segment.
    if let Known::Pinned(block) = &known {
        // SAFETY: the driver answered success, so it has read as many attributes.
        let mut asked = (0..count as usize).map(|index| unsafe { *attributes.add(index) });
        if asked.all(|attribute| value_of_pinned(attribute, block).is_none()) {
            Bypass::NothingToHide.note(real.api);
            return result;
        }
    }
    let write = |output, attribute| {
        // SAFETY: the output has room for this attribute, as the driver has just written it.
        unsafe { write_attribute(output, attribute, ptr, &known) }
    };
    // SAFETY: the driver answered success for these arguments.
    if let Err(why) = unsafe { rewrite(count, attributes, data, write) } {
        why.note(real.api);
    }
    result
}

/// One attribute can be set. The driver asks for no context.
///
/// # Safety
/// `value` is the program's argument of that call.
pub unsafe fn set_pointer_attribute(
    real: &mut Real,
    value: *const c_void,
    attribute: c_int,
    ptr: CUdeviceptr,
) -> CuResult {
    let answer = match address::known(ptr) {
        Known::Pooled(_) | Known::Freed if context::is_driver_gone() => Err(Bypass::ContextGone),
        Known::Pooled(block) if attribute == kind::SYNC_MEMOPS && !value.is_null() => {
            // SAFETY: not NULL, and the value of this attribute is a number of 32 bits; unaligned because the driver asks for no more.
            let waits = unsafe { value.cast::<c_uint>().read_unaligned() } != 0;
            Ok(memops::set(&block, waits))
        }
        Known::Pooled(_) | Known::Freed => Ok(CuResult::INVALID_VALUE),
        Known::Managed(_) | Known::Pinned(_) => Err(Bypass::NothingToHide),
        Known::Foreign if attribute == kind::SYNC_MEMOPS => {
            Ok(handles::giving_away(ptr, 1, handles::Anchor::SyncMemops, || real.call()))
        }
        Known::Foreign => Err(Bypass::NotOurs),
    };
    or_driver(answer, real.api, || real.call())
}

/// # Safety
/// The pointers are the program's output arguments of that call.
pub unsafe fn address_range(real: &mut Real, base: *mut CUdeviceptr, size: *mut usize, ptr: CUdeviceptr) -> CuResult {
    let known = address::known(ptr);
    // Without a context that can be used, the driver does not look at the address. It says so itself where it is asked.
    if !matches!(known, Known::Foreign) && !context::driver().is_some_and(context::is_usable) {
        Bypass::NoContext.note(real.api);
        return real.call();
    }
    let range = match known {
        Known::Foreign => {
            let result = real.call();
            match handles::range_at(ptr).filter(|_| result.is_ok()) {
                Some((start, bytes)) => Some((start, bytes)),
                None => {
                    Bypass::NotOurs.note(real.api);
                    return result;
                }
            }
        }
        Known::Freed => None,
        Known::Pooled(block) | Known::Managed(block) => Some((block.address, block.bytes)),
        Known::Pinned(block) => Some((block.address, block.bytes)),
    };
    let (start, bytes) = range.unwrap_or((0, 0));
    // SAFETY: NULL is legal for either; the driver writes zeros when it finds nothing.
    unsafe {
        if !base.is_null() {
            *base = start;
        }
        if !size.is_null() {
            *size = bytes as usize;
        }
    }
    if range.is_some() { CuResult::SUCCESS } else { CuResult::NOT_FOUND }
}
