//! What a GPU says of itself: an H200's answers.

use crate::ffi::{Answer, Out};
use crate::machine::Gpu;
use nvml_wrapper_sys::bindings::*;
use simmachine::{bus, bus_id};
use std::ffi::{CStr, c_char, c_uint};

/// MHz with a context on the GPU, and some seconds after the last one ended: measured. Here it falls asleep at once.
const SM_AWAKE: c_uint = 1980;
const SM_ASLEEP: c_uint = 345;
const MEMORY_CLOCK: c_uint = 3201;
const VIDEO_CLOCK: c_uint = 1545;
/// Milliwatts. The difference is measured, the rest is a plausible number.
const POWER_ASLEEP: c_uint = 76_000;
const POWER_AWAKE: c_uint = POWER_ASLEEP + 52_000;
pub const POWER_LIMIT: c_uint = 700_000;
/// The instance number of a GPU that is not divided (MIG).
const NO_INSTANCE: c_uint = c_uint::MAX;

/// `nvmlGetMemoryLimits_v1_t`, which the bindings do not have.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryLimits {
    group: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// What the group that `asked` names may have of a GPU. Where nobody has limited it: 0 and the most that there can be, as documented; not measured.
pub fn memory_limits(gpu: usize, asked: MemoryLimits) -> Answer<MemoryLimits> {
    if asked.group.is_null() {
        return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so by the interface's contract it points to a C string.
    let group = unsafe { CStr::from_ptr(asked.group) }.to_string_lossy();
    let limits = &crate::machine::settings()?.memory_limits;
    let known = limits.iter().find(|limit| limit.gpu == gpu && limit.group == group);
    let (soft, hard) = known.map_or((0, u64::MAX), |limit| (limit.soft, limit.hard));
    Ok(MemoryLimits { soft, hard, used: 0, ..asked })
}

pub fn clock(awake: bool, kind: c_uint) -> Answer<c_uint> {
    Ok(match kind {
        nvmlClockType_enum_NVML_CLOCK_GRAPHICS | nvmlClockType_enum_NVML_CLOCK_SM => {
            if awake {
                SM_AWAKE
            } else {
                SM_ASLEEP
            }
        }
        nvmlClockType_enum_NVML_CLOCK_MEM => MEMORY_CLOCK,
        nvmlClockType_enum_NVML_CLOCK_VIDEO => VIDEO_CLOCK,
        _ => return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT),
    })
}

pub fn power(awake: bool) -> c_uint {
    if awake { POWER_AWAKE } else { POWER_ASLEEP }
}

pub fn pci(index: usize) -> nvmlPciInfo_t {
    address(bus(index) as c_uint, &bus_id(index, 4), &bus_id(index, 8), 0x2335_10de)
}

/// An NVSwitch's, behind the GPUs'.
pub fn switch_pci() -> nvmlPciInfo_t {
    address(0x80, "0000:80:00.0", "00000000:80:00.0", 0x22a3_10de)
}

fn address(bus: c_uint, short: &str, long: &str, kind: c_uint) -> nvmlPciInfo_t {
    nvmlPciInfo_t {
        busIdLegacy: fixed(short),
        domain: 0,
        bus,
        device: 0,
        pciDeviceId: kind,
        pciSubSystemId: 0x18be_10de,
        busId: fixed(long),
    }
}

/// A text shorter than its field, with zeros behind it.
fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = from.cast_signed();
    }
    field
}

/// The second version says what it is in its first field.
pub fn memory_v2(device: nvmlDevice_t, out: Out<nvmlMemory_v2_t>) -> Answer {
    let version = size_of::<nvmlMemory_v2_t>() as c_uint | 2 << 24;
    if out.get()?.version != version {
        return Err(nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let (total, used) = Gpu::of(device)?.memory()?;
    out.set(nvmlMemory_v2_t { version, total, reserved: 0, free: total - used, used })
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
pub struct ProcessV1 {
    pub pid: c_uint,
    pub bytes: u64,
}

pub fn process_v2(pid: c_uint, bytes: u64) -> nvmlProcessInfo_v2_t {
    nvmlProcessInfo_v2_t { pid, usedGpuMemory: bytes, gpuInstanceId: NO_INSTANCE, computeInstanceId: NO_INSTANCE }
}

/// Where the list is too short the answer is how long it has to be.
pub fn processes<T>(
    device: nvmlDevice_t,
    count: Out<c_uint>,
    list: Out<T>,
    entry: impl Fn(c_uint, u64) -> T,
) -> Answer {
    let found = Gpu::of(device)?.list()?;
    let room = count.get()? as usize;
    count.set(found.len() as c_uint)?;
    if found.len() > room {
        return Err(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    }
    found.into_iter().enumerate().try_for_each(|(index, (pid, bytes))| list.set_at(index, entry(pid, bytes)))
}
