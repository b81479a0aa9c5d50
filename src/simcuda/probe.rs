//! Exports for tests, found by `dlsym`. They are no driver calls: nothing here is counted or made to fail.

use crate::boundary;
use crate::driver::if_initialised;
use crate::ffi::In;
use crate::physical::Place;
use crate::{fault, report, residence, vmm};
use std::ffi::{c_char, c_int};

/// Replaces the list of faults (`SIMCUDA_FAULT`'s syntax; empty for none) and counts from the next call. Returns 0, or 1
/// for a bad list, which is said on stderr.
///
/// # Safety
/// `spec` is null or a zero-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simcuda_fault_arm(spec: In<c_char>) -> c_int {
    let spec = if spec.is_null() { Ok("") } else { spec.text() };
    match spec.map_err(|_| "not UTF-8".to_owned()).and_then(fault::arm) {
        Ok(()) => 0,
        Err(message) => {
            simmachine::say(&format!("simcuda: simcuda_fault_arm: {message}"));
            1
        }
    }
}

/// How many of the faults that were armed have not struck yet.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_faults_left() -> u64 {
    fault::left()
}

/// Has `act` called once, at the beginning of the next call of `export` on any thread and before its effect: what is between its
/// caller's last look at something and the call takes as long as a test likes. With `:N` behind the name it is the Nth such call, and
/// `*:N` is the Nth call of any export.
///
/// # Safety
/// `export` is a zero-terminated string that lives on, or null for nothing to be called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simcuda_before(export: In<c_char>, act: Option<extern "C" fn()>) {
    boundary::BEFORE.set(export.text().ok().zip(act).filter(|_| !export.is_null()));
}

/// Has `act` called once, at the end of the next call of `export` on any thread and before it returns: what is between a
/// call's effect and its caller's next step takes as long as a test likes.
///
/// # Safety
/// `export` is a zero-terminated string that lives on, or null for nothing to be called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simcuda_after(export: In<c_char>, act: Option<extern "C" fn()>) {
    boundary::AFTER.set(export.text().ok().zip(act).filter(|_| !export.is_null()));
}

/// Driver calls of this process so far, refused ones and queries included.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_calls() -> u64 {
    boundary::calls()
}

/// What the processes of this one's machine use, for the simulated NVML; null before `cuInit`.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_occupancy() -> *const simmachine::Occupancy {
    if_initialised().map_or(std::ptr::null(), |driver| driver.machine.occupancy())
}

/// Bytes in use on the GPU with this ordinal, by all processes of the machine, contexts included; 0 for one that does not
/// exist.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_used(device: c_int) -> u64 {
    if_initialised().and_then(|driver| Some(driver.gpu(device).ok()?.store.used())).unwrap_or(0)
}

/// Bytes of host memory the driver holds for all processes of the machine, pinned and mapped, over all nodes.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_host_used() -> u64 {
    if_initialised().map_or(0, |driver| driver.hosts.iter().map(|store| store.used()).sum())
}

/// Bytes of pinned memory that the driver holds for the program, whole slabs for small requests.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_pinned() -> u64 {
    if_initialised().map_or(0, |driver| driver.hosts.iter().map(|store| store.usage().pinned).sum())
}

/// How many bytes of a range of managed memory are at `place`: a GPU's ordinal, −1 for the host, −2 for those that no
/// device has used and nobody has prefetched.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_managed_at(address: u64, bytes: u64, place: c_int) -> u64 {
    residence::bytes_at(address, bytes, |at| match at {
        Some(Place::Gpu(device)) => place >= 0 && device == place as usize,
        Some(Place::Host(_)) => place == -1,
        None => place == -2,
    })
}

/// `cuMemCreate` handles not released.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_handles() -> u64 {
    vmm::live_handles() as u64
}

/// Bytes mapped by `cuMemMap`.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_mapped() -> u64 {
    if_initialised().map_or(0, |driver| driver.space.mapped())
}

/// An uncorrectable error of the physical memory behind a range: who reads or writes it from now on, by whatever mapping and on
/// whatever GPU, gets ECC_UNCORRECTABLE, and its context with it. Returns 0, or 1 where nothing is mapped.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_spoil(address: u64, bytes: u64) -> c_int {
    let spans = if_initialised().and_then(|driver| driver.space.spans(address, bytes, false).ok());
    spans.inspect(|spans| crate::space::spoil(spans)).map_or(1, |_| 0)
}

/// Violations recorded so far.
#[unsafe(no_mangle)]
pub extern "C" fn simcuda_violations() -> u64 {
    report::violations() as u64
}
