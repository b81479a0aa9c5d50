//! Legacy IPC: plain memory of another process of the same user, through that process' memory file.

use crate::context::current;
use crate::driver::driver;
use crate::error::{Code, Outcome};
use crate::ffi::{Handle, Out};
use crate::physical::Use;
use crate::space::{Kind, Origin};
use std::ffi::c_uint;
use std::fs::OpenOptions;

const MAGIC: u64 = 0x6970_635f_6375_6461;
const LAZY_PEER_ACCESS: c_uint = 1;

/// `CUipcMemHandle`: 64 bytes that name process, descriptor, stretch and device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemHandle([u64; 8]);

pub fn get(out: Out<MemHandle>, address: u64) -> Outcome {
    out.required()?;
    current()?;
    let region = driver().space.find(address).ok_or(Code::INVALID_VALUE)?;
    let Kind::Plain { physical, device, origin: Origin::Alloc, .. } = &region.kind else {
        return Err(Code::INVALID_VALUE);
    };
    // A scattered allocation can not be named in 64 bytes; memory has to be nearly full for that to happen.
    let [piece] = physical.pieces[..] else { return Err(Code::NOT_SUPPORTED) };
    let descriptor = physical.store.descriptor() as u64;
    // As with the real driver, the handle is that of the whole allocation, and small ones share it.
    out.set(MemHandle([
        MAGIC,
        u64::from(std::process::id()),
        descriptor,
        piece.offset,
        piece.bytes,
        *device as u64,
        0,
        0,
    ]))
}

pub fn open(out: Out<u64>, handle: MemHandle, flags: c_uint) -> Outcome {
    out.required()?;
    let context = current()?;
    let MemHandle([magic, process, descriptor, offset, bytes, device, ..]) = handle;
    // The real driver refuses the process that made the handle, too.
    if magic != MAGIC || flags & !LAZY_PEER_ACCESS != 0 || process == u64::from(std::process::id()) {
        return Err(Code::INVALID_VALUE);
    }
    let driver = driver();
    let device = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
    let gpu = driver.gpus.get(device).ok_or(Code::INVALID_DEVICE)?;
    let path = format!("/proc/{process}/fd/{descriptor}");
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| Code::INVALID_VALUE)?;
    let physical = gpu.store.import(file.into(), offset, bytes, Use::Plain)?;
    out.set(driver.space.attach(physical, device, context.id)?)
}

pub fn close(address: u64) -> Outcome {
    current()?;
    let driver = driver();
    let region = driver.space.find(address).filter(|region| region.start == address).ok_or(Code::INVALID_VALUE)?;
    match region.kind {
        Kind::Plain { origin: Origin::Ipc, .. } => driver.space.free(address),
        _ => Err(Code::INVALID_VALUE),
    }
}

pub fn get_event(out: Out<MemHandle>, _event: Handle) -> Outcome {
    out.required()?;
    Err(Code::NOT_SUPPORTED)
}

pub fn open_event(out: Out<Handle>, _handle: MemHandle) -> Outcome {
    out.required()?;
    Err(Code::NOT_SUPPORTED)
}
